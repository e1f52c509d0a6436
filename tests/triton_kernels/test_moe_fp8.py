"""Mixtures of FP8 experts: the reference against a loop in float64, the kernels against the reference."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.triton_kernels.fp8_layer import behind
from triton_kernels.gpu import Gpu
from triton_kernels.moe_fp8 import (
    Fp8ExpertWeights,
    MoeFp8Config,
    default_moe_fp8_config,
    fused_moe_fp8,
    fused_moe_fp8_reference,
    fused_moe_fp8_triton,
)
from triton_kernels.moe_fp8_gemm import Fp8GemmConfig, Fp8Rows, multiply_experts_fp8
from triton_kernels.moe_route import route_triton
from triton_kernels.quantize_fp8 import GROUP, quantize_weight_fp8

KINDS = ("channels", "blocks", "given")
SMALL = MoeFp8Config(Fp8GemmConfig(16, 32, 128, 4, 2, 2), Fp8GemmConfig(16, 64, 128, 4, 2, 2))
POINTERS = MoeFp8Config(
    Fp8GemmConfig(32, 64, 128, 4, 2, 1, tma=False), Fp8GemmConfig(16, 32, 128, 4, 2, 4, tma=False)
)
TALL = MoeFp8Config(
    Fp8GemmConfig(64, 32, 128, 4, 2, 4, rows_tall=True), Fp8GemmConfig(64, 64, 128, 4, 2, 4, rows_tall=True)
)
CONFIGS = (SMALL, POINTERS, TALL)


def experts_of(
    kind: str, num_experts: int, width: int, expert_width: int, device: str, seed: int = 0
) -> Fp8ExpertWeights:
    """Random experts, with NaN behind them in memory."""
    rng = torch.Generator().manual_seed(seed)
    blocks = kind == "blocks"
    unit = GROUP if blocks else 16
    padded = [size + -size % unit for size in (width, expert_width)]
    gate_up, down, scales = [], [], ([], [])
    for _ in range(num_experts):
        matrices = [(expert_width, width)] * 2 + [(width, expert_width)]
        parts = []
        for outputs, inputs in matrices:
            weight = torch.randn(outputs, inputs, generator=rng) / math.sqrt(inputs)
            weight *= torch.rand(outputs, 1, generator=rng) + 0.5
            numbers, scale = quantize_weight_fp8(weight, blocks)
            parts.append((F.pad(numbers.float(), (0, -inputs % unit)).to(numbers.dtype), scale))
        gate_up.append(torch.cat([parts[0][0], parts[1][0]]))
        down.append(parts[2][0])
        both = [parts[0][1], parts[1][1]]
        scales[0].append(torch.stack(both) if blocks else torch.cat(both))
        scales[1].append(parts[2][1])
    assert gate_up[0].shape[1] == padded[0]
    given: dict[str, Tensor] = {}
    if kind == "given":
        given["input_scale"] = torch.tensor([3.0 / 448])
        given["hidden_scale"] = (torch.rand(num_experts, generator=rng) + 1) / 448
    tensors = [torch.stack(gate_up), torch.stack(scales[0]), torch.stack(down), torch.stack(scales[1])]
    whole = Fp8ExpertWeights(*(behind(tensor) for tensor in tensors), **given)
    return Fp8ExpertWeights(*(None if one is None else one.to(device) for one in whole))  # type: ignore[arg-type]


def inputs(tokens: int, num_experts: int, width: int, device: str, seed: int = 1) -> tuple[Tensor, Tensor]:
    """x and logits."""
    rng = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.randn(tokens, width, generator=rng) * (torch.rand(tokens, 1, generator=rng) + 0.1)
    return x.to(device, dtype), 2 * torch.randn(tokens, num_experts, generator=rng).to(device)


def assert_alike(got: Tensor, expected: Tensor) -> None:
    """Close by norm: a hidden value halfway between two FP8 numbers may fall to either. A GPU's sums of FP8
    products have 14 bits, so of a hundred hidden values a few do, by an eighth each."""
    tolerance = 2e-2 if got.device.type == "cuda" else 1e-2
    assert got.isfinite().all()
    assert (got.double() - expected.double()).norm() <= tolerance * expected.double().norm()


def rounded(x: Tensor, kind: str, given: Tensor | None) -> Tensor:
    """A row rounded to FP8 and back, written apart from the kernels, in float64."""
    if given is not None:
        return (x.float() / given).clamp(-448, 448).to(torch.float8_e4m3fn).double() * given.double()
    parts = x.float().split(GROUP if kind == "blocks" else x.numel())
    scales = [part.abs().max() / 448 for part in parts]
    return torch.cat(
        [(p / s).to(torch.float8_e4m3fn).double() * s.double() for p, s in zip(parts, scales, strict=True)]
    )


def dequantized(numbers: Tensor, scales: Tensor, kind: str) -> Tensor:
    wide = scales[:, None]
    if kind == "blocks":
        wide = scales.repeat_interleave(GROUP, 0)[: numbers.shape[0]].repeat_interleave(GROUP, 1)
    return numbers.double() * wide.double()


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_a_weighted_sum_over_the_largest_logits(kind: str) -> None:
    width, half, top_k = 144, 80, 2
    weights = experts_of(kind, 5, width, half, "cpu")
    x, logits = inputs(4, 5, width, "cpu")
    out = fused_moe_fp8(x, logits, weights, top_k)
    for token in range(4):
        chosen = sorted(range(5), key=lambda e: -logits[token, e].item())[:top_k]
        mass = logits[token, chosen].softmax(0)
        expected = torch.zeros(width, dtype=torch.float64)
        for e, p in zip(chosen, mass, strict=True):
            row = rounded(x[token], kind, weights.input_scale)
            if kind == "blocks":
                parts = zip(weights.gate_up[e].chunk(2), weights.gate_up_scale[e], strict=True)
                gate, up = (dequantized(numbers, scales, kind) for numbers, scales in parts)
            else:
                gate, up = dequantized(weights.gate_up[e], weights.gate_up_scale[e], kind).chunk(2)
            hidden = F.silu(gate[:, :width] @ row) * (up[:, :width] @ row)
            given = None if weights.hidden_scale is None else weights.hidden_scale[e]
            hidden = rounded(hidden, kind, given)
            down = dequantized(weights.down[e], weights.down_scale[e], kind)[:, :half]
            expected += p.double() * (down @ hidden)
        assert (out[token].double() - expected).norm() < 2e-2 * expected.norm()


@pytest.mark.parametrize(
    ("kind", "config", "size"),
    [
        ("channels", SMALL, (5, 4, 2, 144, 48)),
        ("channels", TALL, (19, 3, 2, 48, 80)),
        ("channels", None, (3, 33, 3, 48, 32)),
        ("blocks", POINTERS, (5, 4, 2, 144, 48)),
        ("blocks", TALL, (9, 3, 1, 48, 144)),
        ("blocks", None, (9, 2, 1, 48, 32)),
        ("given", SMALL, (19, 3, 2, 48, 80)),
        ("given", POINTERS, (3, 3, 3, 144, 16)),
        ("given", None, (70, 1, 1, 16, 32)),
    ],
)
def test_kernels_equal_the_reference(
    kind: str, config: MoeFp8Config | None, size: tuple[int, int, int, int, int], device: str
) -> None:
    tokens, num_experts, top_k, width, half = size
    weights = experts_of(kind, num_experts, width, half, device)
    x, logits = inputs(tokens, num_experts, width, device)
    renormalize = config is not SMALL
    expected = fused_moe_fp8_reference(x.double(), logits, weights, top_k, renormalize)
    assert_alike(fused_moe_fp8_triton(x, logits, weights, top_k, renormalize, config), expected)


@pytest.mark.parametrize("kind", KINDS)
# Of 528, a tile's last lanes lie behind all rows' ends, where ptxas loses numbers (triton_kernels/e4m3.py).
@pytest.mark.parametrize("size", [(1, 40, 8, 48, 48), (2, 3, 1, 528, 16), (2, 2, 1, 48, 528)])
def test_kernels_of_few_tokens_equal_the_reference(
    kind: str, size: tuple[int, int, int, int, int], device: str
) -> None:
    tokens, num_experts, top_k, width, half = size
    weights = experts_of(kind, num_experts, width, half, device)
    x, logits = inputs(tokens, num_experts, width, device)
    renormalize = num_experts > 2
    # Hidden values are rounded to the type of x first; in float64 that alone is as far as the tolerance.
    expected = fused_moe_fp8_reference(x, logits, weights, top_k, renormalize)
    assert_alike(fused_moe_fp8_triton(x, logits, weights, top_k, renormalize), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_float16_for_gpus_without_fp8_gives_the_same_products(kind: str, device: str) -> None:
    tokens, num_experts, top_k, width, half = 5, 3, 2, 48, 32
    weights = experts_of(kind, num_experts, width, half, device)
    x, logits = inputs(tokens, num_experts, width, device)
    routing = route_triton(logits, top_k, True)
    values = (torch.randn(tokens, weights.gate_up.shape[2], device=device) * 30).to(torch.float8_e4m3fn)
    groups = weights.gate_up.shape[2] // GROUP if kind == "blocks" else 1
    scales = torch.rand(groups, tokens, device=device)
    rows = Fp8Rows(values, torch.rand(1, device=device) if kind == "given" else scales)
    found = []
    for convert in (False, True):
        dtype = torch.float8_e4m3fn if kind == "given" else x.dtype
        y = torch.zeros(tokens * top_k, weights.down.shape[2], device=device).to(dtype)
        multiply_experts_fp8(
            rows, weights.gate_up, weights.gate_up_scale, routing, y, SMALL.gate_up, gated=True,
            rounded_as=x.dtype, given_scale=weights.hidden_scale, convert=convert,
        )  # fmt: skip
        found.append(y.float())
    assert_alike(found[1], found[0])
    assert found[0].norm() > 0


@pytest.mark.parametrize(("kind", "config"), list(zip(KINDS, CONFIGS, strict=True)))
def test_experts_that_are_not_hit_and_tokens_that_go_nowhere_do_not_count(
    kind: str, config: MoeFp8Config, device: str
) -> None:
    weights = experts_of(kind, 8, 48, 32, device)
    x, logits = inputs(7, 8, 48, device)
    logits[:, 4:] = -50.0
    logits[1], x[1] = float("-inf"), float("nan")
    expected = fused_moe_fp8_reference(x, logits, weights, 2)
    for tensor in (weights.gate_up, weights.down):
        tensor[4:] = torch.full_like(tensor[4:].float(), float("nan")).to(tensor.dtype)
    for tokens, chosen in ((7, config), (2, None)):
        out = fused_moe_fp8_triton(x[:tokens], logits[:tokens], weights, 2, True, chosen)
        assert_alike(out, expected[:tokens])
        assert (out[1] == 0).all()


def test_a_row_of_zeros_and_no_rows(device: str) -> None:
    weights = experts_of("channels", 4, 48, 32, device)
    x, logits = inputs(3, 4, 48, device)
    x[1] = 0.0
    out = fused_moe_fp8_triton(x, logits, weights, 2)
    assert (out[1] == 0).all()
    assert fused_moe_fp8_triton(x[:0], logits[:0], weights, 2).shape == (0, 48)


def test_tensors_that_do_not_fit_are_refused() -> None:
    weights = experts_of("channels", 4, 48, 32, "cpu")
    x, logits = inputs(3, 4, 48, "cpu")
    for wrong in (
        weights._replace(down_scale=weights.down_scale[:, 1:]),
        weights._replace(input_scale=torch.ones(1)),
    ):
        with pytest.raises(ValueError, match=r"need scales .* both scales of activations or none"):
            fused_moe_fp8(x, logits, wrong, 2)
    with pytest.raises(ValueError, match="rows of 47"):
        fused_moe_fp8(x[:, 1:], logits, weights, 2)


@pytest.mark.parametrize("kib", [99, 227])
def test_every_number_of_tokens_has_a_configuration_that_fits(kib: int) -> None:
    for capability in ((8, 0), (9, 0), (12, 0)):
        gpu = Gpu(capability, kib * 1024, 132)
        for tokens in (1, 7, 64, 300, 5000):
            for gated, config in zip((True, False), default_moe_fp8_config(tokens, 128, 8, gpu), strict=True):
                tile = config.block_k * (config.block_m + config.block_n * (2 if gated else 1))
                tiles = config.num_stages - (0 if gpu.multiplies_from_shared else 1)
                assert tiles * tile <= gpu.shared_bytes
                assert GROUP % config.block_n == 0
                assert config.block_k == GROUP


def test_it_compiles_with_a_symbolic_number_of_tokens(device: str) -> None:
    weights = experts_of("channels", 4, 48, 32, device)

    def mixture(x: Tensor, logits: Tensor) -> Tensor:
        return 2 * fused_moe_fp8(x, logits, weights, 2)

    compiled = torch.compile(mixture, fullgraph=True, backend="aot_eager", dynamic=False)
    for tokens in (6, 11):
        x, logits = inputs(tokens, 4, 48, device)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(logits, 0)
        assert_alike(compiled(x, logits), 2 * fused_moe_fp8_reference(x, logits, weights, 2))
