"""The FP8 linear layers as layers call them: the reference, the choice of a kernel, refusals."""

import itertools

import pytest
import torch

from tests.triton_kernels.fp8_layer import assert_close, layer
from triton_kernels import fp8_linear as module
from triton_kernels.fp8_linear import (
    default_fp8_choice,
    default_fp8_tiled_config,
    fp8_gated_linear,
    fp8_gated_linear_many,
    fp8_linear,
    fp8_linear_many,
    fp8_linear_reference,
)
from triton_kernels.fp8_linear_many import LIBRARY
from triton_kernels.gpu import Gpu
from triton_kernels.silu_mul import silu_mul_reference

H200 = Gpu((9, 0), 227 << 10, 132)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("rows", [3, 80])
def test_the_layers_yield_the_products_of_the_dequantized_numbers(rows, blocks, device):
    one = layer((rows, 272, 256), device, blocks)
    assert_close(fp8_linear(*one.four, one.bias, torch.float32), one.expected(one.bias))
    gated = layer((rows, 272, 256), device, blocks, halves=2)
    assert_close(fp8_gated_linear(*gated.four, torch.float32), gated.expected_gated(), on_gpu=8e-3)


def test_the_reference_is_exact_in_float64():
    one = layer((5, 40, 64), "cpu")
    torch.testing.assert_close(fp8_linear_reference(*one.four, dtype=torch.float64), one.expected())


@pytest.mark.parametrize("blocks", [False, True])
def test_scales_that_do_not_fit_are_refused(blocks):
    one = layer((5, 256, 256), "cpu", blocks)
    other = layer((5, 256, 256), "cpu", not blocks)
    with pytest.raises(ValueError, match=r"a weight \(256, 256\) with scales"):
        fp8_linear(one.x, one.x_scale, one.weight, one.weight_scale[:1])
    with pytest.raises(ValueError, match="scales each"):
        fp8_gated_linear(one.x, other.x_scale, one.weight, one.weight_scale)


def test_few_rows_and_many_rows_have_kernels_of_their_own(monkeypatch):
    called = []

    def named(name: str):
        def run(x, x_scale, weight, *rest, config=None):
            called.append(name)
            return x.new_zeros((x.shape[0], weight.shape[0]), dtype=torch.bfloat16)

        return run

    monkeypatch.setattr(module, "_has_kernels", lambda x: True)
    for name in ("few", "many_with"):
        monkeypatch.setattr(module, f"fp8_linear_{name}", named(name))
    for rows in (1, 64, 65):
        fp8_linear_many(*layer((rows, 48, 64), "cpu").four)
    fp8_linear_many(*layer((1, 256, 128), "cpu", blocks=True).four)
    assert called == ["few", "few", "many_with", "many_with"]


@pytest.mark.parametrize("blocks", [False, True])
def test_the_tuning_table_may_choose_torchs_product(blocks, monkeypatch):
    monkeypatch.setattr(module, "_has_kernels", lambda x: True)
    monkeypatch.setattr(module, "_many_config", lambda *_: LIBRARY)
    monkeypatch.setattr(module, "fp8_linear_torch", fp8_linear_reference)
    one = layer((80, 256, 128), "cpu", blocks)
    assert_close(fp8_linear_many(*one.four, one.bias, torch.float32), one.expected(one.bias))
    gated = layer((80, 256, 128), "cpu", blocks, halves=2)
    monkeypatch.setattr(module, "silu_mul", silu_mul_reference)
    assert_close(fp8_gated_linear_many(*gated.four, torch.float32), gated.expected_gated())


def test_they_are_ops_of_a_compiled_graph_for_any_number_of_rows():
    graphs = []

    def look(graph, _):
        graphs.append([node.name for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    def both(x, scale, weight, weight_scale):
        plain = fp8_linear_many(x, scale, weight, weight_scale, None, torch.float32)
        return plain, fp8_gated_linear_many(x, scale, weight, weight_scale, torch.float32)

    torch._dynamo.reset()
    compiled = torch.compile(both, backend=look, fullgraph=True, dynamic=False)
    for rows in (17, 80, 300):
        one = layer((rows, 64, 64), "cpu")
        x, scale = one.x.contiguous(), one.x_scale
        torch._dynamo.mark_dynamic(x, 0, min=17, max=512)
        torch._dynamo.mark_dynamic(scale, 1, min=17, max=512)
        plain, gated = compiled(x, scale, one.weight.clone(), one.weight_scale.clone())
        assert_close(plain, one.expected())
        assert_close(gated, one.expected_gated())
    assert len(graphs) == 1


@pytest.mark.parametrize("gated", [False, True])
def test_the_default_configuration_fits_into_shared_memory_and_registers(gated):
    for outputs, rows in itertools.product((1024, 4096, 14336), (16, 32, 64, 128, 256, 512, 8192)):
        for blocks in (False, True):
            config = default_fp8_tiled_config(outputs, rows, blocks, gated, H200)
            tiles = config.block_n * (2 if gated or config.wide else 1)
            assert config.num_stages >= 2
            assert config.block_k * (config.block_m + tiles) * config.num_stages <= H200.shared_bytes
            assert config.block_m * tiles <= 128 * 32 * config.num_warps


@pytest.mark.parametrize("gated", [False, True])
def test_untuned_layers_of_many_rows_take_torchs_product_where_it_was_faster(gated, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def choice(outputs, rows, blocks, width=4096, gpu=H200):
        return default_fp8_choice(outputs, width, rows, blocks, gated, gpu) == LIBRARY

    assert [choice(4096, rows, False) for rows in (64, 128, 192, 512, 1024)] == [
        False,
        False,
        True,
        True,
        False,
    ]
    assert [choice(4096, rows, True) for rows in (64, 128, 192, 512, 1024)] == [False, True, True, True, True]
    assert choice(17408, 128, False) is gated  # 136 tiles of 128 outputs, for 132 multiprocessors
    assert not choice(4100, 256, False)  # what it can't multiply
    assert not choice(4096, 256, True, width=4224)
    assert not choice(4096, 256, True, gpu=H200._replace(capability=(12, 0)))  # what was not measured
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert not choice(4096, 256, False)
    assert not choice(4096, 256, True)


def test_a_choice_of_the_tuning_table_that_torch_can_not_multiply_is_not_taken(monkeypatch):
    one = layer((80, 256, 128), "cpu", blocks=True)
    monkeypatch.setattr(module, "tuned", lambda *_, **__: LIBRARY)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert module._many_config(one.x, one.weight, True, False, torch.bfloat16) != LIBRARY
    assert module._many_config(one.x, one.weight, False, False, torch.bfloat16) == LIBRARY
    assert module._many_config(one.x, one.weight, False, False, torch.float32) != LIBRARY
