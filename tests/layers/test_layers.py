"""The small layers against their formulas in float64."""

import functools

import pytest
import torch
from torch import Tensor, nn

from minisgl.attention.backends import select
from minisgl.layers.attention import Attention
from minisgl.layers.linear import FusedLinear
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.norm import RMSNorm
from minisgl.layers.weight import PlainWeight
from triton_kernels.packed_weights import can_halve, can_pack, is_packed
from triton_kernels.registry import KERNELS

CPU = torch.device("cpu")


def randomised(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.normal_(generator=generator)


def double(x: Tensor) -> Tensor:
    return x.detach().double()


def test_rms_norm_and_its_fused_addition() -> None:
    norm = RMSNorm(33, 0.1, torch.float32, CPU)
    randomised(norm)
    x, residual = torch.randn(2, 5, 33, generator=torch.Generator().manual_seed(1))

    def expected(value: Tensor) -> Tensor:
        return value / (value.square().mean(-1, keepdim=True) + 0.1).sqrt() * double(norm.weight)

    torch.testing.assert_close(double(norm(x)), expected(double(x)), atol=1e-5, rtol=1e-5)
    y, total = norm.forward_add(x, residual)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(double(y), expected(double(x) + double(residual)), atol=1e-5, rtol=1e-5)


def test_the_gated_mlp_takes_the_gate_from_the_first_half() -> None:
    mlp = GatedMLP(12, 20, torch.float32, CPU)
    randomised(mlp)
    x = torch.randn(7, 12, generator=torch.Generator().manual_seed(2))
    parts = mlp.gate_up_proj.part_tensors()
    gate, up = (double(x) @ double(parts[f"{name}.weight"]).T for name in ("gate_proj", "up_proj"))
    expected = (gate * gate.sigmoid() * up) @ double(mlp.down_proj.part_tensors()["weight"]).T
    torch.testing.assert_close(double(mlp(x)), expected, atol=1e-3, rtol=1e-4)


def test_writing_to_a_part_writes_to_the_fused_weight_and_bias() -> None:
    fused = FusedLinear(3, {"a": 2, "b": 4}, torch.float32, CPU, bias=True)
    views = fused.part_tensors()
    names = ("a.weight", "b.weight", "a.bias", "b.bias")
    for value, name in enumerate(names):
        views[name].fill_(value)
    assert isinstance(fused.weight, PlainWeight)
    assert fused.weight.values[:, 0].tolist() == [0, 0, 1, 1, 1, 1]
    assert fused.weight.bias is not None
    assert fused.weight.bias.tolist() == [2, 2, 3, 3, 3, 3]
    assert [tuple(views[name].shape) for name in names] == [(2, 3), (4, 3), (2,), (4,)]
    assert fused(torch.ones(1, 3)).tolist() == [[2, 2, 6, 6, 6, 6]]


def test_the_pool_is_empty_until_allocated_and_not_part_of_the_checkpoint() -> None:
    attention = Attention(4, 2, 8, select("torch"))
    assert attention.k_cache.shape[0] == 0
    attention.allocate_kv(5, 16, torch.bfloat16, "cpu")
    assert attention.k_cache.shape == attention.v_cache.shape == (5, 16, 2, 8)
    assert attention.k_cache.dtype == torch.bfloat16
    assert not attention.state_dict()
    assert {name for name, _ in attention.named_buffers()} == {"k_cache", "v_cache", "kv_scales"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_packed_weight_multiplies_alike_and_its_parts_can_be_loaded_again(dtype: torch.dtype) -> None:
    mlp = GatedMLP(24, 40, dtype, CPU)
    randomised(mlp)
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(3)).to(dtype)
    fused = mlp.gate_up_proj.weight
    assert isinstance(fused, PlainWeight)
    fused.values.copy_(fused.values.bfloat16())  # which float16 holds
    expected, before = mlp(x), fused.values.clone()
    pack = fused.pack if dtype == torch.bfloat16 else functools.partial(fused.halve, lambda: True)
    if not (can_pack(fused.values) or can_halve(fused.values)):
        pytest.skip("needs an x86, for bfloat16 with AVX-512")
    pack()
    assert is_packed(fused.values)
    assert fused.values.shape == before.shape
    pack()  # a second time, it does nothing
    # Sums in another order; where large terms cancel, a number by itself may be far off.
    error = (mlp(x) - expected).double().norm() / expected.double().norm()
    assert error < (1e-2 if dtype == torch.bfloat16 else 1e-6), error
    parts = mlp.gate_up_proj.part_tensors()
    assert torch.equal(torch.cat(list(parts.values())), before)
    parts["up_proj.weight"].zero_()
    assert not mlp(x).any()
    pack()
    assert not mlp(x).any()
    with torch.inference_mode():
        parts = mlp.gate_up_proj.part_tensors()
    assert not parts["up_proj.weight"].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_stay_plain_for_a_users_function(dtype: torch.dtype) -> None:
    weight = PlainWeight(24, [40], dtype, CPU, bias=False)
    weight.values.fill_(1.5)
    weight.kernels = KERNELS._replace(linear=torch.nn.functional.linear)
    weight.pack()
    weight.halve(lambda: True)
    assert not is_packed(weight.values)
