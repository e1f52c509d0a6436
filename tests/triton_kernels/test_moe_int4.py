"""Mixtures of experts of 4-bit weights: the reference against float64 numbers, the kernels against it."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.triton_kernels.fp8_layer import behind
from triton_kernels.e2m1_packing import pack_e2m1, pack_scales
from triton_kernels.gpu import Gpu
from triton_kernels.int4_packing import BLOCK, BLOCK_BYTES, pack_int4
from triton_kernels.moe_gate import SILU, Gate, GateKind
from triton_kernels.moe_int4 import (
    Int4GemmConfig,
    MoeInt4Config,
    PackedExperts,
    default_moe_int4_config,
    fused_moe_int4,
    fused_moe_int4_reference,
    fused_moe_int4_triton,
)
from triton_kernels.mxfp4 import NUMBERS

SMALL = MoeInt4Config(Int4GemmConfig(16, 32, 4, 2, 2), Int4GemmConfig(16, 64, 4, 2, 2))
POINTERS = MoeInt4Config(
    Int4GemmConfig(32, 64, 4, 2, 1, tma=False), Int4GemmConfig(16, 32, 4, 2, 4, tma=False)
)
CLAMPED = Gate(GateKind.CLAMPED, 1.702, 0.7)


def matrices(
    num_experts: int, outputs: int, width: int, group: int, kind: str, device: str, seed: int
) -> tuple[PackedExperts, Tensor]:
    """Random experts of 4-bit numbers, and their values in float64 [E, N, K].

    Args:
        kind: "plain", "zeros" or "mxfp4"; with "bias" in it, with biases.
    """
    rng = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    padded = width + -width % BLOCK
    codes = torch.randint(0, 16, (num_experts, outputs, padded), generator=rng)
    group_of = torch.arange(padded) // group
    shape = (num_experts, padded // group, outputs)
    zeros = None
    if "mxfp4" in kind:
        scales = torch.randint(119, 124, shape, generator=rng).to(torch.uint8)
        wide = torch.pow(2.0, scales.double() - 127)
        exact = torch.tensor(NUMBERS, dtype=torch.float64)[codes]
    else:
        scales = (torch.rand(shape, generator=rng) + 0.2).to(dtype) / math.sqrt(8 * width)
        wide = scales.double()
        exact = codes.double() - 8
        if "zeros" in kind:
            zeros = torch.randint(0, 17, shape, generator=rng).to(dtype)
            exact = codes.double() - zeros.double().transpose(1, 2)[:, :, group_of]
    exact = (exact * wide.transpose(1, 2)[:, :, group_of])[:, :, :width]
    bias = torch.randn(num_experts, outputs, generator=rng).to(device, dtype) if "bias" in kind else None
    pack = pack_e2m1 if "mxfp4" in kind else pack_int4
    packed = torch.stack([pack(one) for one in codes])
    weight = PackedExperts(
        behind(packed.to(device)),
        behind(scales.to(device))
        if scales.is_floating_point()
        else torch.stack([pack_scales(one.t()) for one in scales]).to(device),
        None if zeros is None else behind(zeros.to(device)),
        bias,
    )
    return weight, exact


class Mixture:
    """The arguments of a mixture, and what it must yield."""

    def __init__(self, size: tuple[int, int, int, int, int], group: int, kind: str, device: str) -> None:
        tokens, experts, self.top_k, width, half = size
        rng = torch.Generator().manual_seed(3)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.x = torch.randn(tokens, width, generator=rng).to(device, dtype)
        self.logits = 2 * torch.randn(tokens, experts, generator=rng).to(device)
        self.gate_up, self.exact_up = matrices(experts, 2 * half, width, group, kind, device, 0)
        self.down, self.exact_down = matrices(experts, width, half, group, kind, device, 1)

    def expected(self, gate: Gate) -> Tensor:
        """In float64, one token at a time."""
        out = torch.zeros(self.x.shape, dtype=torch.float64)
        for token, row in enumerate(self.x.cpu().double()):
            logits = self.logits[token].cpu()
            chosen = sorted(range(len(logits)), key=lambda e: -logits[e].item())[: self.top_k]
            for e, p in zip(chosen, logits[chosen].double().softmax(0), strict=True):
                both = self.exact_up[e] @ row
                if self.gate_up.bias is not None:
                    both = both + self.gate_up.bias[e].cpu().double()
                first, up = both.chunk(2)
                if gate.kind == GateKind.CLAMPED:
                    first, up = first.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
                    hidden = first * torch.sigmoid(gate.alpha * first) * (up + 1)
                else:
                    hidden = F.silu(first) * up
                y = self.exact_down[e] @ hidden
                if self.down.bias is not None:
                    y = y + self.down.bias[e].cpu().double()
                out[token] += p * y
        return out


def assert_close(got: Tensor, expected: Tensor) -> None:
    assert got.isfinite().all()
    tolerance = 1e-2 if got.dtype == torch.bfloat16 else 1e-5
    assert (got.cpu().double() - expected).norm() <= tolerance * expected.norm()


CASES = [
    ((5, 4, 2, 144, 48), 128, "plain", SILU, SMALL),
    ((3, 3, 3, 160, 144), 64, "plain bias", SILU, POINTERS),
    ((9, 3, 1, 128, 32), 32, "zeros", SILU, SMALL),
    ((19, 3, 2, 48, 144), 128, "zeros", SILU, POINTERS),
    ((5, 4, 2, 144, 64), 32, "mxfp4 bias", CLAMPED, SMALL),
    ((19, 3, 2, 64, 96), 32, "mxfp4", SILU, POINTERS),
    ((3, 33, 3, 48, 32), 64, "zeros bias", SILU, None),
    ((70, 1, 1, 32, 32), 32, "mxfp4 bias", CLAMPED, None),
]


@pytest.mark.parametrize(("size", "group", "kind", "gate", "config"), CASES)
def test_reference_and_kernels_equal_float64(
    size: tuple[int, int, int, int, int],
    group: int,
    kind: str,
    gate: Gate,
    config: MoeInt4Config | None,
    device: str,
) -> None:
    one = Mixture(size, group, kind, device)
    expected = one.expected(gate)
    arguments = (one.x, one.logits, one.gate_up, one.down, one.top_k, True, gate)
    assert_close(fused_moe_int4_reference(*arguments), expected)
    assert_close(fused_moe_int4_triton(*arguments, config), expected)


@pytest.mark.parametrize("config", [SMALL, POINTERS])
def test_experts_that_are_not_hit_and_tokens_that_go_nowhere_do_not_count(
    config: MoeInt4Config, device: str
) -> None:
    one = Mixture((7, 8, 2, 48, 32), 32, "zeros", device)
    one.logits[:, 4:] = -50.0
    one.logits[2], one.x[2] = float("-inf"), float("nan")
    expected = fused_moe_int4_reference(one.x, one.logits, one.gate_up, one.down, 2)
    for weight in (one.gate_up, one.down):
        weight.scales[4:] = float("nan")
    out = fused_moe_int4_triton(one.x, one.logits, one.gate_up, one.down, 2, config=config)
    assert_close(out, expected.cpu().double())
    assert (out[2] == 0).all()


def test_no_rows_and_strided_rows(device: str) -> None:
    one = Mixture((3, 4, 2, 48, 32), 32, "plain", device)
    arguments = (one.logits, one.gate_up, one.down, 2)
    assert fused_moe_int4_triton(one.x[:0], one.logits[:0], one.gate_up, one.down, 2).shape == (0, 48)
    apart = torch.cat([one.x, torch.full_like(one.x, float("nan"))], 1)[:, :48]
    assert_close(fused_moe_int4_triton(apart, *arguments, config=SMALL), one.expected(SILU))


def test_tensors_that_do_not_fit_are_refused() -> None:
    one = Mixture((3, 4, 2, 48, 32), 32, "mxfp4", "cpu")
    for wrong in (
        one.down._replace(scales=one.down.scales[:, 1:]),
        one.down._replace(zeros=one.down.scales),
        one.gate_up,
    ):
        with pytest.raises(ValueError, match="4-bit experts over rows of 48 and logits of 4 need packed"):
            fused_moe_int4(one.x, one.logits, one.gate_up, wrong, 2)


@pytest.mark.parametrize("kib", [99, 227])
def test_every_number_of_tokens_has_a_configuration_that_fits(kib: int) -> None:
    for capability in ((8, 0), (9, 0), (12, 0)):
        gpu = Gpu(capability, kib * 1024, 132)
        for tokens in (1, 7, 64, 300, 5000):
            for gated, config in zip(
                (True, False), default_moe_int4_config(tokens, 128, 8, gpu), strict=True
            ):
                tile = BLOCK_BYTES * config.block_n * (2 if gated else 1) + 2 * BLOCK * config.block_m
                tiles = config.num_stages - (0 if gpu.multiplies_from_shared else 1)
                assert tiles * tile <= gpu.shared_bytes
                assert config.num_stages >= 2


def test_it_compiles_with_a_symbolic_number_of_tokens(device: str) -> None:
    one = Mixture((11, 4, 2, 48, 32), 32, "mxfp4 bias", device)

    def mixture(x: Tensor, logits: Tensor) -> Tensor:
        return 2 * fused_moe_int4(x, logits, one.gate_up, one.down, 2, True, CLAMPED)

    compiled = torch.compile(mixture, fullgraph=True, backend="aot_eager", dynamic=False)
    for tokens in (6, 11):
        x, logits = one.x[:tokens].clone(), one.logits[:tokens].clone()
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(logits, 0)
        assert_close(compiled(x, logits), 2 * one.expected(CLAMPED)[:tokens])
