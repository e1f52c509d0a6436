"""Mixture of experts: the reference against a loop over tokens, every launch path against the reference."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from triton_kernels.fused_moe import (
    MoeConfig,
    default_moe_config,
    fused_moe,
    fused_moe_reference,
    fused_moe_triton,
    pairs_that_suit,
)
from triton_kernels.gpu import ELSEWHERE
from triton_kernels.moe_gate import Gate, GateKind, gate_reference
from triton_kernels.moe_gemm import GemmConfig, down_triton, gate_up_triton, sum_slots_triton
from triton_kernels.moe_pairs import PairsConfig
from triton_kernels.moe_route import route_triton, top_k_reference

SMALL_TILES = MoeConfig(GemmConfig(16, 32, 32, 4, 2, 2), GemmConfig(16, 32, 64, 4, 2, 2))
LARGE_TILES = MoeConfig(GemmConfig(64, 64, 32, 4, 2, 4), GemmConfig(64, 64, 32, 4, 2, 4))
POINTERS = MoeConfig(GemmConfig(32, 32, 64, 4, 2, 4, tma=False), GemmConfig(32, 64, 32, 4, 2, 4, tma=False))
PAIRS = SMALL_TILES._replace(pairs=PairsConfig(8, 64, 1, 8, 32, 3))
CONFIGS = [SMALL_TILES, LARGE_TILES, POINTERS, PAIRS]


def inputs(
    tokens, experts, width, expert_width, device, dtype=torch.float32, seed=0, shared=False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, logits, gate_up, down."""
    rng = torch.Generator().manual_seed(seed)
    experts += shared
    x = torch.randn((tokens, width), generator=rng)
    logits = 2 * torch.randn((tokens, experts), generator=rng)
    gate_up = torch.randn((experts, 2 * expert_width, width), generator=rng) / math.sqrt(width)
    down = torch.randn((experts, width, expert_width), generator=rng) / math.sqrt(expert_width)
    return x.to(device, dtype), logits.to(device, dtype), gate_up.to(device, dtype), down.to(device, dtype)


def relative_error(got, expected):
    assert got.isfinite().all()
    return ((got.double() - expected).norm() / expected.norm()).item()


def wide(tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, logits, gate_up, down = tensors
    return x.double(), logits.double(), gate_up.double(), down.double()


def test_reference_is_a_weighted_sum_over_the_largest_logits():
    x, logits, gate_up, down = wide(inputs(5, 6, 16, 32, "cpu"))
    for renormalize in (True, False):
        out = fused_moe(x, logits, gate_up, down, 2, renormalize)
        for token in range(5):
            p = (logits[token] - logits[token].max()).exp()
            first, second = sorted(range(6), key=lambda e: -logits[token, e].item())[:2]
            mass = p[first] + p[second] if renormalize else p.sum()
            expected = torch.zeros(16, dtype=torch.float64)
            for e in (first, second):
                gate, up = gate_up[e, :32] @ x[token], gate_up[e, 32:] @ x[token]
                expected += p[e] / mass * (down[e] @ (gate / (1 + (-gate).exp()) * up))
            torch.testing.assert_close(out[token], expected)


def test_a_scale_is_that_of_the_experts_outputs() -> None:
    x, logits, gate_up, down = wide(inputs(5, 6, 32, 16, "cpu"))
    logits[3] = float("-inf")
    scales = torch.tensor([0.5, -3.0, 0.0, 7.0, 1.0, 2.0], dtype=torch.float64)
    for renormalize in (True, False):
        expected = fused_moe(x, logits, gate_up, down * scales[:, None, None], 2, renormalize)
        found = fused_moe(x, logits, gate_up, down, 2, renormalize, scales=scales)
        torch.testing.assert_close(found, expected)


def test_the_reference_adds_a_shared_expert_by_its_gate() -> None:
    x, logits, gate_up, down = wide(inputs(5, 6, 32, 16, "cpu", shared=True))
    logits[3] = float("-inf")
    expected = fused_moe(x, logits[:, :6], gate_up[:6], down[:6], 2)
    gate, up = (x @ gate_up[6].T).split(16, 1)
    expected += ((F.silu(gate) * up) @ down[6].T) / (1 + torch.exp(-logits[:, 6:]))
    assert (expected[3] == 0).all()
    more_logits = torch.cat([logits, torch.full_like(logits, float("nan"))], 1)  # columns of no expert
    torch.testing.assert_close(fused_moe(x, more_logits, gate_up, down, 2, shared=True), expected)
    with pytest.raises(ValueError, match="no biases"):
        fused_moe(x, logits, gate_up, down, 2, gate=Gate(GateKind.GELU), shared=True)


@settings(max_examples=25)
@given(
    tokens=st.integers(1, 40),
    experts=st.sampled_from([2, 8, 60, 130]),
    top_k=st.integers(1, 8),
    width=st.sampled_from([16, 48, 128]),
    expert_width=st.sampled_from([16, 64, 80]),
    config=st.sampled_from(CONFIGS),
    half=st.booleans(),
    renormalize=st.booleans(),
    shared=st.booleans(),
    scaled=st.booleans(),
    seed=st.integers(0, 100),
)
def test_kernels_equal_the_reference(
    tokens, experts, top_k, width, expert_width, config, half, renormalize, shared, scaled, seed
):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if half else torch.float32
    top_k = min(top_k, experts)
    tokens = min(tokens, 4) if config is PAIRS and device == "cpu" else tokens
    tensors = inputs(tokens, experts, width, expert_width, device, dtype, seed, shared)
    factors = torch.randn(experts, generator=torch.Generator().manual_seed(seed)) if scaled else None
    scales = None if factors is None else factors.to(device, dtype)
    out = fused_moe_triton(*tensors, top_k, renormalize, config, shared=shared, scales=scales)
    scales = None if scales is None else scales.double()
    expected = fused_moe_reference(*wide(tensors), top_k, renormalize, shared=shared, scales=scales)
    assert relative_error(out, expected) < (2e-3 if half else 1e-5)


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 16, 17, 300])
def test_a_shared_expert_by_the_default_configuration(tokens: int, device: str) -> None:
    if device == "cpu" and tokens not in (1, 5):
        pytest.skip("the interpreter is slow")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tensors = inputs(tokens, 40, 64, 48, device, dtype, shared=True)
    out = fused_moe_triton(*tensors, 3, shared=True)
    expected = fused_moe_reference(*wide(tensors), 3, shared=True)
    assert relative_error(out, expected) < (1e-5 if device == "cpu" else 5e-3)
    assert torch.equal(out, fused_moe_triton(*tensors, 3, shared=True))


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (60, 1), (128, 8), (256, 8)])
def test_default_configurations_at_every_expert_count(experts, top_k, device):
    for tokens in (2, 5) if device == "cpu" else (1, 3, 5, 16, 33, 128, 300, 1500):
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        tensors = inputs(tokens, experts, 64, 48, device, dtype)
        out = fused_moe_triton(*tensors, top_k)
        expected = fused_moe_reference(*wide(tensors), top_k)
        assert relative_error(out, expected) < (1e-5 if device == "cpu" else 5e-3), tokens


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("config", CONFIGS)
def test_weights_of_experts_not_hit_are_never_used(config, shared, device):
    x, logits, gate_up, down = inputs(7, 60, 48, 32, device, shared=shared)
    logits[:, 5:55] = -50.0
    expected = fused_moe_reference(x, logits, gate_up, down, 2, shared=shared)
    gate_up[5:55] = float("nan")
    down[5:55] = float("nan")
    out = fused_moe_triton(x, logits, gate_up, down, 2, True, config, shared=shared)
    torch.testing.assert_close(out, expected)


GATES = [Gate(), Gate(GateKind.GELU), Gate(GateKind.CLAMPED, 1.702, 0.7)]


def test_the_clamped_gate_is_gpt_oss_own() -> None:
    gate_up = 8 * torch.randn(5, 40)
    config = GptOssConfig(num_local_experts=1, hidden_size=16, intermediate_size=20)
    expected = GptOssExperts(config)._apply_gate(gate_up)
    got = gate_reference(gate_up[:, ::2], gate_up[:, 1::2], Gate(GateKind.CLAMPED, 1.702, 7.0))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("config", CONFIGS)
def test_biases_and_other_activations(config, biased, gate, device):
    tensors = inputs(4 if config is PAIRS else 9, 8, 48, 80, device)
    rng = torch.Generator().manual_seed(1)
    biases = (torch.randn((8, 160), generator=rng).to(device), torch.randn((8, 48), generator=rng).to(device))
    renormalize, options = biased, (biases if biased else None, gate)
    out = fused_moe_triton(*tensors, 3, renormalize, config, *options)
    expected = fused_moe_reference(*wide(tensors), 3, renormalize, *options)
    assert relative_error(out, expected) < 1e-5


def test_a_bias_is_added_once_for_each_expert_and_weighted_like_it() -> None:
    x, logits, gate_up, down = wide(inputs(3, 4, 16, 32, "cpu"))
    biases = (torch.zeros(4, 64, dtype=torch.float64), torch.randn(4, 16, dtype=torch.float64))
    difference = fused_moe(x, logits, gate_up, down, 2, True, biases) - fused_moe(x, logits, gate_up, down, 2)
    experts, weights = top_k_reference(logits, 2, True)
    torch.testing.assert_close(difference, (biases[1][experts.long()] * weights[:, :, None]).sum(1))


@pytest.mark.parametrize("config", CONFIGS)
def test_all_tokens_to_one_expert(config, device):
    x, logits, gate_up, down = inputs(70 if config.pairs is None else 5, 8, 48, 32, device)
    logits[:, 3] = 30.0
    expected = fused_moe_reference(x, logits, gate_up, down, 1)
    torch.testing.assert_close(fused_moe_triton(x, logits, gate_up, down, 1, True, config), expected)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_token_without_a_finite_logit_goes_nowhere_and_yields_zeros(config, shared, device):
    x, logits, gate_up, down = inputs(5, 8, 48, 32, device, shared=shared)
    logits[1], logits[4], logits[2, :3] = float("-inf"), float("nan"), float("nan")
    x[1], x[4] = float("nan"), float("inf")
    for nowhere in (logits, torch.full_like(logits, float("-inf"))):
        out = fused_moe_triton(x, nowhere, gate_up, down, 2, True, config, shared=shared)
        torch.testing.assert_close(out, fused_moe_reference(x, nowhere, gate_up, down, 2, shared=shared))
        assert (out[[1, 4]] == 0).all()


@pytest.mark.parametrize("config", CONFIGS)
def test_a_shared_experts_gate_that_is_nan_is_not_hidden(config, device):
    x, logits, gate_up, down = inputs(3, 8, 48, 32, device, shared=True)
    logits[1, 8] = float("nan")
    for run in (fused_moe_reference, partial(fused_moe_triton, config=config)):
        out = run(x, logits, gate_up, down, 2, shared=True)
        assert out[1].isnan().all()
        assert out[[0, 2]].isfinite().all()


def test_products_write_their_own_rows_only_and_scratch_is_not_trusted(device, monkeypatch):
    x, logits, gate_up, down = inputs(9, 8, 48, 32, device)
    logits[4] = float("-inf")
    empty = torch.empty

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(float("nan") if made.is_floating_point() else 2**30)

    monkeypatch.setattr(torch, "empty", poisoned)
    routing = route_triton(logits, 2, True)
    hidden = gate_up_triton(x, gate_up, routing, SMALL_TILES.gate_up)
    partial = down_triton(hidden, down, routing, SMALL_TILES.down)
    out = sum_slots_triton(partial, routing, 8)
    assert hidden[:16].isfinite().all()
    assert hidden[16:].isnan().all()
    assert partial.view(9, 2, -1)[4].isnan().all()
    assert partial.isnan().any(1).sum() == 2
    for config in (SMALL_TILES, PAIRS):
        out = fused_moe_triton(x, logits, gate_up, down, 2, True, config)
        torch.testing.assert_close(out, fused_moe_reference(x, logits, gate_up, down, 2))


def test_no_tokens_and_strided_rows(device):
    x, logits, gate_up, down = inputs(6, 8, 48, 32, device)
    assert fused_moe_triton(x[:0], logits[:0], gate_up, down, 2).shape == (0, 48)
    expected = fused_moe_reference(x, logits, gate_up, down, 2)
    x = torch.cat((x, torch.full_like(x, float("nan"))), dim=1)[:, :48]
    logits = torch.cat((logits, torch.full_like(logits, 1e9)), dim=1)[:, :8]
    for config in CONFIGS:
        torch.testing.assert_close(fused_moe_triton(x, logits, gate_up, down, 2, True, config), expected)
    expected = fused_moe_reference(
        x, logits, gate_up, down, 2, shared=True
    )  # of 7 experts, all go to the last
    for config in CONFIGS:
        out = fused_moe_triton(x, logits, gate_up, down, 2, True, config, shared=True)
        torch.testing.assert_close(out, expected)


def test_every_number_of_tokens_has_a_configuration():
    for tokens in range(1, 20000, 37):
        for element in (2, 4):
            config = default_moe_config(tokens, 128, 768, 8, element, ELSEWHERE)
            assert (config.pairs is not None) == (tokens <= 4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tokens", [1, 4, 5, 64, 500])
def test_captured_in_a_graph_it_follows_new_routings_to_the_same_bits(tokens, shared):
    first = inputs(tokens, 60, 128, 64, "cuda", torch.bfloat16, 1, shared)
    second = inputs(tokens, 60, 128, 64, "cuda", torch.bfloat16, 2, shared)
    eager = [fused_moe(*tensors, 4, shared=shared) for tensors in (first, second)]
    graph = torch.cuda.CUDAGraph()
    x, logits, gate_up, down = (tensor.clone() for tensor in first)
    with torch.cuda.graph(graph):
        out = fused_moe(x, logits, gate_up, down, 4, shared=shared)
    for tensors, expected in ((second, eager[1]), (first, eager[0])):
        for buffer, tensor in zip((x, logits, gate_up, down), tensors, strict=True):
            buffer.copy_(tensor)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


def test_it_compiles_with_a_symbolic_number_of_tokens(device):
    compiled = torch.compile(
        lambda x, logits, gate_up, down: 2 * fused_moe(x, logits, gate_up, down, 2),
        fullgraph=True,
        backend="aot_eager",
        dynamic=False,
    )
    for tokens in (6, 11, 300):
        tensors = inputs(tokens, 8, 48, 32, device)
        torch._dynamo.mark_dynamic(tensors[0], 0)
        torch._dynamo.mark_dynamic(tensors[1], 0)
        torch.testing.assert_close(compiled(*tensors), 2 * fused_moe_reference(*tensors, 2))


def test_tiles_of_a_tuned_entry_divide_another_models_width():
    tuned = PairsConfig()
    assert tuned.up_block_k == 512
    assert pairs_that_suit(tuned, 2048) == tuned._replace(up_block_k=256)
    assert pairs_that_suit(tuned, 4096) == tuned
    assert pairs_that_suit(tuned, 2816) == tuned._replace(up_block_n=2, up_block_k=256, up_ahead=3)
    assert pairs_that_suit(tuned, 2880) == tuned  # 256 does not divide it either
    assert pairs_that_suit(tuned, 256) == tuned._replace(up_block_k=256)
    measured = tuned._replace(up_block_n=1, up_block_k=1024)
    assert pairs_that_suit(measured, 2816) == measured
