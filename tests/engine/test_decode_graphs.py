"""Which graph a decode batch gets, with what in it, and what is counted when there is none."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config

from minisgl.attention.backends import select
from minisgl.engine.graphs import recording
from minisgl.engine.graphs.buckets import decode_buckets
from minisgl.engine.graphs.decode_graphs import (
    CapturedSteps,
    DecodeGraphs,
    compiled_block,
    early_kernels,
    import_compiler,
)
from minisgl.engine.graphs.recording import early_rows
from minisgl.engine.step.rows import Rows
from minisgl.engine.step.steps import StepOutput
from minisgl.errors import MinisglError
from minisgl.layers.attention import Attention
from minisgl.layers.int4_weight import Int4Weight
from minisgl.layers.moe import MoeMLP
from minisgl.model_config.quantization import Int4Layout, Int4Scheme
from triton_kernels.decode_config import DecodeShape
from triton_kernels.early_start import EARLY_KERNELS
from triton_kernels.gpu import Gpu

CPU = torch.device("cpu")
MAX_ROWS = 20
BUCKETS = (2, 4, 8, 16)
H200 = Gpu((9, 0), 227 << 10, 132)
LLAMA, LLAMA_OVER_FP8 = DecodeShape(128, 2, 4, 8, False), DecodeShape(128, 2, 4, 8, True)


class Model:
    vocab_size = 64


class Step:
    """Stands in for the uncompiled step: each row's token is its id times ten."""

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self.rows = Rows(max_rows, 4, 16, CPU)
        self.model = Model()

    def __call__(self, row_ids: Tensor) -> Tensor:
        return row_ids * 10


class Graphs:
    """Stands in for recorded graphs: reads the tensor that was recorded, whatever is in it by then."""

    def __init__(self) -> None:
        self.recorded: dict[int, Tensor] = {}
        self.replayed: list[tuple[int, ...]] = []
        self.compiled = 0
        self.compiles_at_replay = 0

    def record(self, row_ids: Tensor) -> None:
        assert row_ids.shape[0] not in self.recorded
        self.recorded[row_ids.shape[0]] = row_ids
        self.compiled += 1

    def replay(self, row_ids: Tensor) -> StepOutput:
        assert row_ids is self.recorded[row_ids.shape[0]]
        self.replayed.append(tuple(row_ids.tolist()))
        self.compiled += self.compiles_at_replay
        return StepOutput(row_ids * 10, None)

    def counts(self) -> tuple[int, int]:
        return self.compiled, len(self.recorded)

    def release(self) -> None:
        self.recorded.clear()


def warm(strict: bool = False) -> tuple[DecodeGraphs, Graphs]:
    graphs = Graphs()
    decode = DecodeGraphs(Step(), graphs, BUCKETS, CPU, strict=strict)  # pyright: ignore[reportArgumentType] (a stand-in)
    decode.warm_up(BUCKETS, lambda bucket, duration_ms: None)
    graphs.replayed.clear()
    return decode, graphs


def test_warming_up_records_every_bucket_once_largest_first_with_padding_only() -> None:
    graphs = Graphs()
    seen = []
    decode = DecodeGraphs(Step(), graphs, BUCKETS, CPU, strict=True)  # pyright: ignore[reportArgumentType] (a stand-in)
    times = iter(
        [0.0, 0.004, 1.0, 1.003, 2.0, 2.004, 3.0, 3.004, 4.0, 4.006, 5.0, 5.007, 6.0, 6.010, 7.0, 7.010]
    )
    agreed = []
    decode.warm_up(
        BUCKETS,
        lambda bucket, duration_ms: seen.append(bucket),
        clock=lambda: next(times),
        minimum_over_ranks=lambda duration_us: agreed.append(duration_us) or duration_us - 1000,
    )
    assert seen == [16, 8, 4, 2]
    padding = [(MAX_ROWS,) * bucket for bucket in seen]
    assert graphs.replayed == padding + [tuple(range(bucket)) for bucket in (2, 4, 8, 16) for _ in range(2)]
    assert {tuple(row_ids.tolist()) for row_ids in graphs.recorded.values()} == set(padding)
    assert agreed == [3000, 4000, 6000, 10000]
    assert [decode.duration_us(rows) for rows in (1, 3, 8, 9, 17)] == [2000, 3000, 5000, 9000, 9000]
    assert (decode.num_recompiles, decode.num_graph_misses) == (0, 0)


def test_every_batch_gets_the_smallest_graph_that_holds_it_and_its_own_tokens_first() -> None:
    decode, graphs = warm(strict=True)
    for batch in range(1, 17):
        rows = tuple(range(MAX_ROWS - batch, MAX_ROWS))[::-1]
        assert decode(rows)[:batch].tolist() == [10 * row for row in rows]
        bucket = min(size for size in BUCKETS if size >= batch)
        assert graphs.replayed[-1] == (*rows, *(MAX_ROWS,) * (bucket - batch))
    assert (decode.num_recompiles, decode.num_graph_misses) == (0, 0)


def test_rows_that_change_between_steps_are_never_those_of_an_earlier_step() -> None:
    decode, graphs = warm()
    for rows in ((1, 2, 3), (1, 2, 3), (5, 6), (1, 2, 3), (1, 2), (3, 2, 1), (7,), (1, 2, 3, 4), (3, 2, 1)):
        assert decode(rows)[: len(rows)].tolist() == [10 * row for row in rows]
    assert len(graphs.replayed) == 9


def test_a_batch_beyond_the_largest_graph_runs_uncompiled_and_is_counted() -> None:
    decode, graphs = warm()
    rows = tuple(range(17))
    assert decode(rows).tolist() == [10 * row for row in rows]
    assert graphs.replayed == []
    assert (decode.num_recompiles, decode.num_graph_misses) == (0, 1)
    with pytest.raises(MinisglError, match="--strict-compile: no graph holds 17 rows"):
        warm(strict=True)[0](rows)


def test_what_a_step_compiles_is_counted_and_what_others_compile_is_not() -> None:
    decode, graphs = warm()
    graphs.compiled += 5  # another engine of this process
    decode((1,))
    assert (decode.num_recompiles, decode.num_graph_misses) == (0, 0)
    graphs.compiles_at_replay = 2
    decode((1,))
    assert (decode.num_recompiles, decode.num_graph_misses) == (2, 1)
    strict, graphs = warm(strict=True)
    graphs.compiles_at_replay = 1
    with pytest.raises(MinisglError, match="compiled or recorded while serving"):
        strict((1, 2))


def test_a_single_row_has_what_its_graph_of_two_rows_needs() -> None:
    assert decode_buckets(1) == (2,)
    rows = Rows(1, 4, 16, CPU)
    assert rows.decode_row_start[:3].tolist() == [0, 1, 2]
    state = rows.read(torch.tensor([0, rows.max_rows], dtype=torch.int32))
    assert state.context_len.tolist() == [1, 1]
    assert state.slot_mapping.tolist() == [-1, -1]  # nothing is written


def test_attention_starts_early_where_its_units_are_small() -> None:
    shapes = [LLAMA]
    assert early_kernels(24, shapes, H200) == EARLY_KERNELS
    most = early_kernels(25, shapes, H200)
    assert most == early_kernels(128, shapes, H200)
    assert EARLY_KERNELS.keys() - most.keys() == {"_paged_decode_kernel"}


def test_attention_over_fp8_starts_early_in_middle_batches_of_large_hoppers() -> None:
    shapes = [LLAMA_OVER_FP8]
    early = [rows for rows in range(1, 129) if early_kernels(rows, shapes, H200) == EARLY_KERNELS]
    assert early == [*range(1, 25), *range(41, 65)]
    assert early_kernels(64, [LLAMA_OVER_FP8, LLAMA], H200) != EARLY_KERNELS
    for gpu in (H200._replace(multiprocessors=78), H200._replace(capability=(12, 0))):
        assert early_kernels(64, shapes, gpu) != EARLY_KERNELS


def test_kernels_of_steps_with_few_rows_start_early() -> None:
    asked: list[bool] = []

    class Recorder:
        def record(self, run: Callable[[], Tensor], *, early: object) -> Callable[[], Tensor]:
            asked.append(early is not None)
            return run

    model: Any = nn.Linear(1, 1)
    model.attention_layers = lambda: [Attention(4, 2, 8, select("torch"))]
    step: Any = SimpleNamespace(model=model, rows=Rows(200, 4, 16, CPU))
    recorder: Any = Recorder()
    steps = CapturedSteps(step, recorder, compile_blocks=False, max_batch=200, early_rows=128)
    for num_rows in (2, 128, 144):
        steps.record(torch.zeros(num_rows, dtype=torch.int32))
    assert asked == [True, True, False]


def test_kernels_of_larger_steps_start_early_with_4_bit_layers() -> None:
    class Experts(MoeMLP):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    quantized = Int4Weight(64, (16,), Int4Scheme(Int4Layout.AWQ, 64), torch.float32, CPU, bias=False)
    assert early_rows(nn.Linear(4, 4)) == 128
    assert early_rows(nn.ModuleList([nn.Linear(4, 4), quantized])) == 256
    assert early_rows(nn.ModuleList([quantized, Experts()])) == 128


def test_one_rank_records_more_early_starts_than_several(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Recorded(Exception):
        pass

    def captured(*arguments: Any, early_rows: int, **options: Any) -> None:
        seen.append(early_rows)
        raise Recorded

    monkeypatch.setattr(recording, "CapturedSteps", captured)
    quantized = Int4Weight(64, (16,), Int4Scheme(Int4Layout.AWQ, 64), torch.float32, CPU, bias=False)
    none: Any = None
    for model, ranks in ((nn.Linear(4, 4), None), (quantized, None), (quantized, object())):
        config: Any = SimpleNamespace(kernel=())
        step: Any = SimpleNamespace(model=model)
        some: Any = ranks
        with pytest.raises(Recorded):
            recording._record_graphs(config, step, none, none, "layers", BUCKETS, CPU, some)
    assert seen == [128, 256, 64]


def test_torch_compiles_blocks_in_this_process() -> None:
    with inductor_config.patch(compile_threads=4):
        compiled_block(max_batch=8, backend="eager")
        assert inductor_config.compile_threads == 1
    with inductor_config.patch(compile_threads=4):
        import_compiler()
        assert inductor_config.compile_threads == 1
