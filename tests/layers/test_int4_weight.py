"""Weights of 4-bit numbers: products, gated products, padding, and what is replaced."""

import pytest
import torch
from torch.nn import functional as F

from minisgl.layers.int4_weight import Int4Weight
from minisgl.model_config.quantization import Int4Layout, Int4Scheme
from triton_kernels.quantize_int4 import dequantize_int4_reference
from triton_kernels.registry import KERNELS

CPU = torch.device("cpu")
SCHEMES = [
    Int4Scheme(Int4Layout.COMPUTED, 32),
    Int4Scheme(Int4Layout.AWQ, 64, zero_points=True),
    Int4Scheme(Int4Layout.COMPRESSED, None, zero_points=True),
    Int4Scheme(Int4Layout.GPTQ, 64, in_any_order=True),
]
SIZES = [(256, (128, 128)), (192, (96, 40, 40)), (64, (80, 80))]


def filled(width: int, sizes: tuple[int, ...], scheme: Int4Scheme, *, bias: bool = False) -> Int4Weight:
    """A weight from random numbers; where inputs have an order, they lie backwards."""
    generator = torch.Generator().manual_seed(width)
    weight = Int4Weight(width, sizes, scheme, torch.float32, CPU, bias=bias)
    weight.quantize(torch.randn(sum(sizes), width, generator=generator))
    if weight.order is not None:
        weight.order.copy_(torch.arange(width).flip(0))
    if weight.bias is not None:
        weight.bias.normal_(generator=generator)
    return weight


@pytest.mark.parametrize("scheme", SCHEMES, ids=Int4Scheme.describe)
@pytest.mark.parametrize(("width", "sizes"), SIZES)
def test_the_product_is_that_of_the_dequantized_weight(
    width: int, sizes: tuple[int, ...], scheme: Int4Scheme
) -> None:
    weight = filled(width, sizes, scheme, bias=True)
    x = torch.randn(7, width, generator=torch.Generator().manual_seed(1))
    numbers = dequantize_int4_reference(weight._tensors(), torch.float64)
    inputs = x.flip(1) if weight.order is not None else x
    assert weight.bias is not None
    expected = F.linear(inputs.double(), numbers[:, :width], weight.bias.double())
    torch.testing.assert_close(weight.multiply(x).double(), expected, rtol=1e-5, atol=1e-4)
    if len(sizes) == 2:
        gate, up = F.linear(inputs.double(), numbers[:, :width]).chunk(2, 1)
        torch.testing.assert_close(weight.gated(x).double(), F.silu(gate) * up, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("scheme", SCHEMES, ids=Int4Scheme.describe)
def test_quantizing_is_off_by_half_a_step_at_most(scheme: Int4Scheme) -> None:
    values = torch.randn(48, 192, generator=torch.Generator().manual_seed(3))
    weight = Int4Weight(192, (48,), scheme, torch.float32, CPU, bias=False)
    weight.quantize(values)
    got = dequantize_int4_reference(weight._tensors(), torch.float32)[:, :192]
    steps = weight.scales.t().repeat_interleave(weight.group, 1)[:, :192]
    assert ((got - values).abs() <= steps * (1.01 if scheme.zero_points else 0.51)).all()


def test_a_replaced_op_is_called() -> None:
    weight = filled(256, (64, 64), SCHEMES[0])
    x = torch.ones(2, 256)
    weight.kernels = KERNELS._replace(silu_mul=lambda gate_up: gate_up[:, :1])
    assert torch.equal(weight.gated(x), weight.multiply(x)[:, :1])


def test_loaded_tensors_that_kernels_do_not_read_are_gone_afterwards() -> None:
    weight = Int4Weight(64, (16, 8), SCHEMES[3], torch.float32, CPU, bias=False)
    for part in weight.part_tensors():
        for name, tensor in part.items():
            if name == "qzeros":
                tensor.fill_(0x77777777)
            elif name != "g_idx":
                tensor.fill_(1)
    weight.finish_loading()
    assert weight.only_while_loading == [{}, {}]
    held = sum(tensor.nbytes for tensor in (*weight.parameters(), *weight.buffers()))
    assert held == 128 * 24 // 2 + 4 * 24 * 2 + 8 * 64, "numbers, scales, order"
