"""The linear layers over the rows of a large decode batch, against float64."""

import pytest
import torch
from torch.nn import functional as F

from triton_kernels import linear_many as module
from triton_kernels.linear_many import (
    LIBRARY,
    MOST_ROWS,
    TiledConfig,
    gated_linear_many,
    gated_linear_many_with,
    is_for_many,
    linear_many,
    linear_many_with,
)

# Rows, outputs, width and a configuration; few, because each is compiled anew on a GPU.
CASES = [
    ((17, 48, 96), TiledConfig(32, 64, 64, 1, 4, 3)),
    ((33, 130, 264), TiledConfig(32, 64, 64, 3, 4, 3)),
    ((64, 40, 520), TiledConfig(64, 64, 64, 8, 4, 3)),
    ((70, 200, 136), TiledConfig(64, 128, 64, 1, 8, 2)),
    ((67, 70, 136), TiledConfig(64, 16, 64, 1, 4, 3, rows_tall=True)),
    ((33, 50, 264), TiledConfig(64, 32, 64, 3, 4, 3, rows_tall=True)),
]
CPU = torch.device("cpu")


@pytest.fixture
def dtype(device: str) -> torch.dtype:
    """What the kernel is for, where the interpreter can do it."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def inputs(rows: int, outputs: int, width: int, device: str | torch.device, dtype: torch.dtype):
    """x [M, K] with rows that lie apart, weight [N, K], bias [N]; NaN all around x and behind the weight."""
    rng = torch.Generator().manual_seed(rows)
    around = torch.full((rows + 3, 2 * width), float("nan"))
    around[:rows, :width] = torch.randn(rows, width, generator=rng)
    weights = torch.full((outputs + 9, width), float("nan"))
    weights[:outputs] = torch.randn(outputs, width, generator=rng)
    bias = torch.randn(outputs, generator=rng)
    around, weights, bias = (tensor.to(device, dtype) for tensor in (around, weights, bias))
    return around[:rows, :width], weights[:outputs], bias


def assert_close(got: torch.Tensor, expected: torch.Tensor, in_bfloat16: float) -> None:
    tolerance = 1e-5 if got.dtype == torch.float32 else in_bfloat16
    assert (got.double() - expected).norm() <= tolerance * expected.norm()


def poison_what_is_allocated_next(rows: int, outputs: int, config: TiledConfig, like: torch.Tensor) -> None:
    """NaN in memory of the sizes of the output and of the partial sums."""
    nan = float("nan")
    out = torch.full((rows, outputs), nan, dtype=like.dtype, device=like.device)
    partial = torch.full((config.splits, rows, outputs), nan, dtype=torch.float32, device=like.device)
    del out, partial


@pytest.mark.parametrize(("size", "config"), CASES)
def test_every_row_and_output_is_computed_and_nothing_else_is_used(size, config, device, dtype):
    rows, outputs, width = size
    x, weight, bias = inputs(rows, outputs, width, device, dtype)
    added = bias if rows % 2 else None
    expected = F.linear(x.double(), weight.double(), None if added is None else added.double())
    poison_what_is_allocated_next(rows, outputs, config, x)
    assert_close(linear_many_with(x, weight, added, config=config), expected, 5e-3)


@pytest.mark.parametrize(("size", "config"), CASES)
def test_a_gated_layer_takes_the_gate_from_the_first_half(size, config, device, dtype):
    rows, outputs, width = size
    x, weight, _ = inputs(rows, 2 * outputs, width, device, dtype)
    gate, up = F.linear(x.double(), weight.double()).chunk(2, dim=-1)
    poison_what_is_allocated_next(rows, 2 * outputs, config, x)
    assert_close(gated_linear_many_with(x, weight, config=config), F.silu(gate) * up, 8e-3)


@pytest.mark.parametrize("config", [CASES[0][1], CASES[1][1]])
def test_a_row_is_the_same_to_the_last_bit_in_any_batch_with_its_configuration(config, device, dtype):
    x, weight, _ = inputs(70, 130, 264, device, dtype)
    if device == "cpu":  # numpy's products in the interpreter add up in an order that depends on the place
        x, weight = x.mul_(8).round_(), weight.mul_(8).round_()
    together = linear_many_with(x, weight, config=config)
    some = linear_many_with(x[30:50], weight, config=config)
    assert torch.equal(some, together[30:50])


def test_the_table_is_asked_for_the_next_power_of_two_and_never_beyond_its_rows(monkeypatch):
    asked = []

    def tuned(default, op, device, dtype, exact, near, size):
        asked.append((op, exact, size))
        return default

    monkeypatch.setattr(module, "tuned", tuned)
    for rows in (17, 32, 33, 80, 129, MOST_ROWS, MOST_ROWS + 1):
        x, weight, bias = inputs(rows, 40, 64, CPU, torch.float32)
        assert torch.equal(linear_many(x.contiguous(), weight, bias), F.linear(x, weight, bias))
    assert asked == [("linear_many", (40, 64), size) for size in (32, 32, 64, 128, 256, 256)]
    asked.clear()
    gated_linear_many(torch.randn(20, 64), torch.randn(80, 64))
    linear_many(torch.randn(20, 63), torch.randn(40, 63))  # a width that the copy engine can't step over
    assert asked == [("gated_linear_many", (80, 64), 32)]


def test_what_the_table_says_is_what_runs(monkeypatch):
    x, weight, _ = inputs(20, 80, 64, CPU, torch.float32)
    x, expected = x.contiguous(), F.linear(x, weight)
    launched = []

    def launch(x, weight, bias, gated, config):
        launched.append((gated, config))
        return expected

    monkeypatch.setattr(module, "_launch", launch)
    monkeypatch.setattr(module, "tuned", lambda *given, **named: CASES[0][1])
    assert torch.equal(linear_many(x, weight), expected)
    gated_linear_many(x, weight)
    assert launched == [(False, CASES[0][1]), (True, CASES[0][1])]
    monkeypatch.setattr(module, "tuned", lambda *given, **named: LIBRARY)
    linear_many(x, weight)
    assert len(launched) == 2


def test_it_is_one_op_of_a_compiled_graph_for_any_number_of_rows():
    graphs = []

    def look(graph, _):
        graphs.append([node.name for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, w: gated_linear_many(linear_many(x, w), w), backend=look, fullgraph=True, dynamic=False
    )
    weight = torch.randn(64, 64)
    for rows in (17, 80, 300):
        x = torch.randn(rows, 64)
        torch._dynamo.mark_dynamic(x, 0, min=17, max=512)
        gate, up = F.linear(F.linear(x, weight), weight).chunk(2, dim=-1)
        torch.testing.assert_close(compiled(x, weight), F.silu(gate) * up, atol=1e-3, rtol=1e-3)
    assert len(graphs) == 1
    assert len(graphs[0]) == 2


def test_a_cpu_and_float32_are_torchs():
    large = torch.empty(1 << 14, 1 << 13, device="meta")
    assert not is_for_many(torch.empty(20, 1 << 13, device="meta"), large, "linear_many")
    assert not is_for_many(torch.empty(20, 64), torch.empty(8, 64), "gated_linear_many")
