"""The linear layers of 4-bit weights as layers call them: the reference, the choice of a kernel, refusals."""

import pytest
import torch

from tests.triton_kernels.int4_layer import assert_close, layer
from triton_kernels import int4_linear as int4_linear_module
from triton_kernels.gpu import ELSEWHERE, Gpu
from triton_kernels.int4_linear import (
    MOST_ROWS,
    _many_config,
    _size_of,
    _suits_tiles,
    default_int4_tiled_config,
    int4_gated_linear,
    int4_gated_linear_many,
    int4_linear,
    int4_linear_many,
    int4_linear_reference,
)
from triton_kernels.int4_linear_many import (
    DEQUANTIZED,
    Int4TiledConfig,
    int4_gated_linear_many_with,
    int4_linear_many_with,
)
from triton_kernels.int4_packing import BLOCK_BYTES
from triton_kernels.quantize_int4 import Int4Weight

H200 = Gpu((9, 0), 227 << 10, 132)


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("rows", [3, 12, 20, 80, MOST_ROWS + 1])
def test_the_layers_yield_the_products_of_the_dequantized_numbers(rows, zero_points, device):
    one = layer((rows, 144, 256), 128, zero_points, device)
    assert_close(int4_linear(one.x, one.weight, one.bias), one.expected(one.bias))
    assert_close(int4_gated_linear(one.x, one.weight), one.expected_gated())


def test_torchs_product_of_the_dequantized_weight_is_the_same_layer(device):
    one = layer((9, 144, 256), 64, True, device)
    assert_close(
        int4_linear_many_with(one.x, one.weight, one.bias, config=DEQUANTIZED), one.expected(one.bias)
    )
    assert_close(int4_gated_linear_many_with(one.x, one.weight, config=DEQUANTIZED), one.expected_gated())


def test_the_reference_is_exact_in_float64():
    one = layer((5, 40, 128), 32, True, "cpu")
    torch.testing.assert_close(int4_linear_reference(one.x.double(), one.weight), one.expected())


def test_rows_of_another_width_are_refused():
    one = layer((5, 48, 256), 64, False, "cpu")
    with pytest.raises(ValueError, match="a weight of 256 inputs needs rows of as many, got 128"):
        int4_linear(one.x[:, :128], one.weight)
    with pytest.raises(ValueError, match="packed 4-bit weights"):
        int4_gated_linear(one.x, one.weight._replace(scales=one.weight.scales[:, :-1]))


def test_they_are_ops_of_a_compiled_graph_for_any_number_of_rows():
    graphs = []

    def look(graph, _):
        graphs.append([node.name for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    def both(x, packed, scales):
        return int4_linear_many(x, packed, scales), int4_gated_linear_many(x, packed, scales)

    torch._dynamo.reset()
    compiled = torch.compile(both, backend=look, fullgraph=True, dynamic=False)
    for rows in (17, 80, 300):
        one = layer((rows, 64, 128), 128, False, "cpu")
        x, weight = one.x.contiguous(), Int4Weight(one.weight.packed, one.weight.scales.clone())
        torch._dynamo.mark_dynamic(x, 0, min=17, max=512)
        plain, gated = compiled(x, weight.packed, weight.scales)
        assert_close(plain, one.expected())
        assert_close(gated, one.expected_gated())
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("outputs", "group", "zero_points", "last_by_others"),
    [(1 << 17, 128, False, 8), (1 << 17, 128, True, 16), (1 << 17, 32, False, 16), (64, 128, False, 16)],
)
def test_on_hopper_tiles_serve_from_the_rows_on_where_they_are_faster(
    outputs, group, zero_points, last_by_others, monkeypatch
):
    monkeypatch.setattr(int4_linear_module, "gpu_of", lambda device: H200)
    packed = torch.empty((1, outputs, BLOCK_BYTES), dtype=torch.uint8, device="meta")
    scales = torch.empty((128 // group, outputs), dtype=torch.bfloat16, device="meta")
    weight = Int4Weight(packed, scales, scales if zero_points else None)
    for rows in (1, 8, 9, 16, 17, 32):
        x = torch.zeros((rows, 128), dtype=torch.bfloat16)
        assert _suits_tiles(x, weight) == (rows > last_by_others)
        assert not _suits_tiles(x.float(), weight)
    monkeypatch.setattr(int4_linear_module, "gpu_of", lambda device: H200._replace(capability=(12, 0)))
    assert not _suits_tiles(x, weight)


def test_a_table_without_choices_for_few_rows_does_not_decide_them(monkeypatch):
    for_64_rows = Int4TiledConfig(64, 128, 8, 4)
    one = layer((40, 64, 128), 128, False, "cpu")
    for found in (for_64_rows, DEQUANTIZED):
        monkeypatch.setattr(int4_linear_module, "tuned", lambda *_, _found=found, **__: _found)
        for rows in (9, 20):
            chosen = _many_config(one.x[:rows], one.weight, False)
            assert chosen == default_int4_tiled_config(64, _size_of(rows), False, ELSEWHERE)
        assert _many_config(one.x, one.weight, False) == found


def test_some_rows_between_powers_of_two_have_a_size_of_their_own():
    assert [_size_of(rows) for rows in (1, 9, 16, 17, 64, 65, 96, 97, 129, 161, 193, 257)] == [
        1, 16, 16, 32, 64, 96, 96, 128, 160, 192, 256, 512,
    ]  # fmt: skip


@pytest.mark.parametrize("gated", [False, True])
def test_the_default_configuration_fits_into_shared_memory_and_registers(gated):
    for outputs in (1024, 4096, 14336, 151936):
        for rows in (16, 32, 64, 96, 128, 256, 512):
            config = default_int4_tiled_config(outputs, rows, gated, H200)
            weight_rows = config.block_n * (2 if gated and config.fused else 1)
            assert config.num_stages >= 2
            assert BLOCK_BYTES * (weight_rows + 4 * config.block_m) * config.num_stages <= H200.shared_bytes
            assert weight_rows * config.block_m <= 160 * 32 * config.num_warps


def test_a_bias_of_another_dtype_is_refused():
    one = layer((3, 64, 128), 128, False, "cpu")
    with pytest.raises(ValueError, match=r"a bias is of the dtype of x, torch\.float32; got torch\.float16"):
        int4_linear(one.x, one.weight, one.bias.half())


def test_hoppers_kernel_is_chosen_for_bfloat16_from_65_rows_on_and_only_where_it_can_store(monkeypatch):
    monkeypatch.setattr(int4_linear_module, "tuned", lambda default, *_, **__: default)
    packed = torch.empty((32, 4096, 64), device="meta", dtype=torch.uint8)
    scales = torch.empty((32, 4096), device="meta", dtype=torch.bfloat16)
    weight = Int4Weight(packed, scales, None)

    def chosen(rows: int, dtype: torch.dtype = torch.bfloat16) -> Int4TiledConfig:
        return _many_config(torch.empty((rows, 4096), device="meta", dtype=dtype), weight, False)

    assert [chosen(rows).hopper for rows in (33, 64, 65, 200, 300, 512)] == [False, False, *4 * [True]]
    assert chosen(300).block_m == 160  # of these rows, not of the next tuned number
    assert not chosen(200, torch.float16).hopper
    on_hopper = chosen(200)
    monkeypatch.setattr(int4_linear_module, "tuned", lambda *_, **__: on_hopper)
    assert chosen(200) == on_hopper
    assert not chosen(200, torch.float16).hopper
