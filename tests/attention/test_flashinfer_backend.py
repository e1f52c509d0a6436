"""What flashinfer is asked for, with a stand-in for the package: the same attention as the torch backend."""

import types
from typing import Any
from unittest.mock import Mock

import fake_flashinfer
import numpy as np
import pytest
import torch

from minisgl.attention.backends import build_backend, select
from minisgl.attention.choice import Backends
from minisgl.attention.flashinfer import AttentionShape, _Wrapper, split_workspace_bytes, tile_of
from minisgl.attention.interface import AttentionInputs, Backend, BatchPages
from minisgl.engine.step.inputs import HostPageTable
from minisgl.errors import ConfigError
from minisgl.scheduler.plan import PageUpdate, StepPlan

CPU = torch.device("cpu")
PAGE_SIZE, PAGES_PER_ROW, MAX_ROWS = 4, 12, 6
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 24
SCALE = 0.3
BUCKETS = (2, 4)
SHAPE = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, SCALE, frozenset({0, 7}), torch.float32, CPU)


class Pool:
    """Rows of random lengths over a pool that is NaN wherever it must not be looked at."""

    def __init__(self, lengths: list[int], seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.lengths = np.array(lengths, dtype=np.int32)
        counts = [-(-length // PAGE_SIZE) for length in lengths]
        pages = (torch.randperm(sum(counts)) + 1).split(counts)
        caches = torch.full((2, sum(counts) + 1, PAGE_SIZE, KV_HEADS, HEAD_DIM), float("nan"))
        caches[:, 0] = 0.0  # the scratch page
        self.table = HostPageTable(MAX_ROWS, PAGES_PER_ROW, PAGE_SIZE)
        updates = [PageUpdate(row, 0, ids.numpy().astype("<i4").tobytes()) for row, ids in enumerate(pages)]
        self.table.update(StepPlan(0, (), tuple(updates), (), (), ()))
        self.device_table = torch.zeros(MAX_ROWS + 1, PAGES_PER_ROW, dtype=torch.int32)
        for row, (length, ids) in enumerate(zip(lengths, pages, strict=True)):
            self.device_table[row, : len(ids)] = ids
            for j in range(length):
                caches[:, ids[j // PAGE_SIZE], j % PAGE_SIZE] = torch.randn(2, KV_HEADS, HEAD_DIM)
        self.k_cache, self.v_cache = caches

    def batch(self, rows: list[int], new_tokens: list[int], *, is_decode: bool) -> "Batch":
        return Batch(self, rows, new_tokens, is_decode=is_decode)


class Batch:
    """The last tokens of some rows, as the host and as the device know them."""

    def __init__(self, pool: Pool, rows: list[int], new_tokens: list[int], *, is_decode: bool) -> None:
        ids = np.array(rows, dtype=np.int32)
        row_start = np.concatenate([[0], np.cumsum(new_tokens)]).astype(np.int32)
        lengths = np.maximum(np.append(pool.lengths, np.zeros(MAX_ROWS, dtype=np.int32))[ids], 1)
        self.pages = BatchPages(row_start, *pool.table.pages_of(ids, lengths.astype(np.int32)))
        self.inputs = AttentionInputs(
            pool.device_table,
            torch.from_numpy(ids),
            torch.from_numpy(lengths.astype(np.int32)),
            torch.empty(0),
            torch.from_numpy(row_start),
            max(new_tokens),
            is_decode,
        )
        self.q = torch.randn(sum(new_tokens), HEADS, HEAD_DIM)
        self.pool = pool

    def attended(self, attend: Any, window: int) -> torch.Tensor:
        return attend(self.q, self.pool.k_cache, self.pool.v_cache, self.inputs, SCALE, window)

    def check(self, backend: Backend) -> None:
        for window in sorted(SHAPE.windows):
            expected = self.attended(select("torch"), window)
            torch.testing.assert_close(self.attended(backend.attend, window), expected)


def copy(target: torch.Tensor, source: np.ndarray) -> None:
    assert len(target) == len(source)
    assert len(source) % 4 == 0  # what the engine's copies take
    target.copy_(torch.from_numpy(source))


def make(
    prefill: str = "flashinfer-fa3",
    decode: str = "flashinfer-fa2",
    buckets: tuple[int, ...] = BUCKETS,
    max_rows: int = MAX_ROWS,
) -> Backend:
    return build_backend(
        Backends(prefill, decode),
        SHAPE,
        copy,
        buckets=buckets,
        max_rows=max_rows,
        max_context_tokens=PAGES_PER_ROW * PAGE_SIZE,
        load=lambda name: fake_flashinfer,
    )


def test_prompts_equal_the_torch_backend_whole_and_in_chunks() -> None:
    pool, backend = Pool([37, 9, 1, 20]), make()
    assert backend.plan_prefill is not None
    for rows, new_tokens in (
        ([0, 1, 2, 3], [37, 9, 1, 20]),
        ([3, 0], [6, 30]),
        ([1, 2], [1, 1]),  # token by token, and still no decode step
    ):
        batch = pool.batch(rows, new_tokens, is_decode=False)
        backend.plan_prefill(batch.pages)
        batch.check(backend)


@pytest.mark.parametrize("rows", [[0, 1], [3, 0, 2, 1], [0, 1, MAX_ROWS, MAX_ROWS], [2], [0, 1, 2]])
def test_decode_steps_equal_the_torch_backend_with_and_without_a_bucket(rows: list[int]) -> None:
    pool, backend = Pool([37, 9, 1, 20]), make()
    assert backend.plan_decode is not None
    for _ in range(2):
        batch = pool.batch(rows, [1] * len(rows), is_decode=True)
        backend.plan_decode(batch.pages)
        batch.check(backend)


def test_a_single_row_may_fill_the_context_beside_the_padding_of_its_bucket() -> None:
    pool, backend = Pool([PAGES_PER_ROW * PAGE_SIZE]), make(buckets=(2,), max_rows=1)
    assert backend.plan_decode is not None
    batch = pool.batch([0, MAX_ROWS], [1, 1], is_decode=True)
    backend.plan_decode(batch.pages)
    batch.check(backend)


def test_a_batch_is_planned_behind_the_tables_of_another_size() -> None:
    """All sizes share one buffer; each batch's own tables are written before it runs."""
    pool, backend = Pool([37, 9, 1, 20], seed=1), make()
    assert backend.plan_decode is not None
    assert backend.plan_prefill is not None
    for rows in ([0, 1, 2, 3], [3, 2], [1, 0, 3, 2], [2]):
        chunk = pool.batch([0, 3], [30, 6], is_decode=False)
        decode = pool.batch(rows, [1] * len(rows), is_decode=True)
        backend.plan_decode(decode.pages)
        decode.check(backend)
        backend.plan_prefill(chunk.pages)
        chunk.check(backend)


def prefill_wrappers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those that are made from now on."""
    made: list[Any] = []

    class Noted(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(fake_flashinfer, "BatchPrefillWithPagedKVCacheWrapper", Noted)
    return made


def test_planning_prompts_writes_nothing_that_the_prompts_before_were_planned_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their tables may still be on their way to the device."""
    wrappers = prefill_wrappers(monkeypatch)
    pool, backend = Pool([37, 9, 1, 20]), make()
    assert backend.plan_prefill is not None
    before: set[int] = set()
    for rows in ([0, 1], [2], [3, 0], [1]):
        counts = [wrapper.num_plans for wrapper in wrappers]
        batch = pool.batch(rows, [1] * len(rows), is_decode=False)
        backend.plan_prefill(batch.pages)
        planned = {i for i, wrapper in enumerate(wrappers) if wrapper.num_plans > counts[i]}
        assert {wrappers[i].planned["window_left"] + 1 for i in planned} == SHAPE.windows
        assert not planned & before
        batch.check(backend)
        before = planned


@pytest.mark.parametrize("kind", ["prefill", "decode", "decode of no bucket"])
def test_a_wrapper_plans_again_only_when_the_copy_of_its_last_plan_is_over(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, where an event of the wrapper's own says so."""
    happened: list[str] = []
    init = _Wrapper.__init__

    def with_event(self: _Wrapper, own: Any, device: torch.device) -> None:
        init(self, own, device)
        name = f"{id(self)}"
        plan = self.plan

        def noting(function: Any, *arguments: Any, **options: Any) -> None:
            def noted() -> None:
                happened.append(f"plan {name}")
                function(*arguments, **options)

            plan(noted)

        monkeypatch.setattr(self, "plan", noting, raising=False)
        self._copied = Mock(
            synchronize=lambda: happened.append(f"wait {name}"),
            record=lambda: happened.append(f"copy {name}"),
        )

    monkeypatch.setattr(_Wrapper, "__init__", with_event)
    pool, backend = Pool([37, 9, 1, 20]), make()
    rows = [0] if kind == "decode of no bucket" else [0, 1]
    batch = pool.batch(rows, [1] * len(rows), is_decode=kind != "prefill")
    plan = backend.plan_prefill if kind == "prefill" else backend.plan_decode
    assert plan is not None
    happened.clear()
    for _ in range(3):
        plan(batch.pages)
    assert len(happened) == 3 * 3 * len(SHAPE.windows)
    for wait, planned, copied in zip(*[iter(happened)] * 3, strict=True):
        (name,) = {event.split()[1] for event in (wait, planned, copied)}
        assert [wait, planned, copied] == [f"wait {name}", f"plan {name}", f"copy {name}"]


@pytest.mark.parametrize(("prefill", "decode"), [("torch", "flashinfer-fa2"), ("flashinfer-fa2", "torch")])
def test_a_pair_runs_each_kind_of_step_by_its_own_backend(prefill: str, decode: str) -> None:
    pool, backend = Pool([37, 9, 1, 20]), make(prefill, decode)
    assert (backend.plan_prefill is None) == (prefill == "torch")
    assert (backend.plan_decode is None) == (decode == "torch")
    for new_tokens, is_decode, plan in (
        ([1, 1], True, backend.plan_decode),
        ([1, 1], False, backend.plan_prefill),
        ([5, 3], False, backend.plan_prefill),
    ):
        batch = pool.batch([0, 1], new_tokens, is_decode=is_decode)
        if plan is not None:
            plan(batch.pages)
        batch.check(backend)


def test_a_decode_step_compiles_as_one_graph_for_all_batch_sizes() -> None:
    pool, backend = Pool([37, 9, 1, 20]), make()
    assert backend.plan_decode is not None
    compilations = 0

    def count(graph: Any, inputs: Any) -> Any:
        nonlocal compilations
        compilations += 1
        return graph

    compiled = torch.compile(backend.attend, fullgraph=True, dynamic=False, backend=count)
    for rows in ([0, 1], [3, 0, 2, 1]):
        batch = pool.batch(rows, [1] * len(rows), is_decode=True)
        for tensor in (batch.q, batch.inputs.row_ids, batch.inputs.context_len):
            torch._dynamo.mark_dynamic(tensor, 0)
        torch._dynamo.mark_dynamic(batch.inputs.row_start, 0)
        backend.plan_decode(batch.pages)
        torch.testing.assert_close(batch.attended(compiled, 0), batch.attended(select("torch"), 0))
    assert compilations == 1


def test_a_package_that_does_not_load_is_a_config_error_that_says_so() -> None:
    def build(load: Any) -> None:
        names = Backends("flashinfer-fa2", "flashinfer-fa2")
        build_backend(names, SHAPE, copy, buckets=(), max_rows=1, max_context_tokens=1, load=load)

    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    with pytest.raises(ConfigError, match=r"use --attention-backend triton.* ImportError: No module"):
        build(missing)
    with pytest.raises(ConfigError, match=r"AttributeError: .*BatchPrefillWithPagedKVCacheWrapper"):
        build(lambda name: types.SimpleNamespace(__version__="0.1"))


def test_stateless_backends_need_no_plan_and_no_package() -> None:
    def forbidden(name: str) -> Any:
        raise AssertionError

    backend = build_backend(
        Backends("torch", "torch"), SHAPE, copy, buckets=(), max_rows=1, max_context_tokens=1, load=forbidden
    )
    assert backend == Backend(select("torch"))


def test_workspaces_hold_the_partial_results_of_the_largest_step() -> None:
    llama = SHAPE._replace(num_heads=32, num_kv_heads=8, head_dim=128)
    # 256 rows of 4 heads each in tiles of 16: 64 tiles, and one more for each row.
    partial_results = 32 * (64 + 256) * 16 * (128 + 1) * 4
    assert partial_results <= split_workspace_bytes(llama, 132, 256, tile_of(4, 128)) < 1.05 * partial_results
    # Few rows are split among all places for programs: two on each multiprocessor.
    assert split_workspace_bytes(llama, 132, 2, 16) >= 32 * (2 * 132 // 8) * 16 * 129 * 4
    assert [tile_of(group, 128) for group in (1, 16, 17, 64, 65)] == [16, 16, 64, 64, 128]
    assert tile_of(65, 256) == 64
