"""Prefill in buckets: what is padded, what that changes (nothing), and when it is worth it.

"Recorded" here is a function that runs again on the same tensors, which is all that a graph can do.
"""

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tiny_config import TINY
from torch import Tensor

from minisgl.config import DeviceFacts, EngineConfig, resolve_engine_config
from minisgl.engine.graphs.buckets import PrefillBucket, prefill_bucket_for, prefill_buckets, startup_prefills
from minisgl.engine.graphs.prefill_graphs import PrefillChoice, PrefillGraphs
from minisgl.engine.graphs.recording import _record_prefill
from minisgl.engine.step.inputs import NO_DECODES, Decodes, HostPageTable, PrefillBatch, Stager, build_prefill
from minisgl.engine.step.rows import Rows
from minisgl.engine.step.steps import StepOutput, prefill_step
from minisgl.models.decoder import Decoder
from minisgl.models.registry import build_model
from minisgl.scheduler.plan import Chunk, PageUpdate, StepPlan
from minisgl.weights.dummy import fill_dummy

CPU = torch.device("cpu")
PAGE_SIZE = 4
MAX_ROWS = 6
PAGES_PER_ROW = 24
VOCAB_SIZE = 61
BUCKETS = prefill_buckets(80, MAX_ROWS, 8)
CONFIG = replace(
    TINY,
    architecture="Qwen3ForCausalLM",
    vocab_size=VOCAB_SIZE,
    max_position=128,
    qk_norm=True,
    tie_word_embeddings=False,
)


class Engine:
    """A small model over a pool of NaN, whose steps keep the logits they sampled from."""

    def __init__(self) -> None:
        self.model: Decoder = build_model(
            CONFIG, attention_backend="torch", dtype=torch.float32, device="cpu"
        )
        fill_dummy(self.model, 5)
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
            if parameter.ndim == 2:
                parameter.mul_(10)  # flat logits would hide mistakes
        num_pages = 1 + MAX_ROWS * PAGES_PER_ROW
        self.model.allocate_kv(num_pages, PAGE_SIZE, torch.float32, "cpu")
        for attention in self.model.attention_layers():
            attention.k_cache.fill_(float("nan"))
            attention.v_cache.fill_(float("nan"))
        self.rows = Rows(MAX_ROWS, PAGES_PER_ROW, PAGE_SIZE, CPU)
        self.pages = HostPageTable(MAX_ROWS, PAGES_PER_ROW, PAGE_SIZE)
        order = np.array(random.Random(3).sample(range(1, num_pages), num_pages - 1), dtype="<i4")
        updates = tuple(
            PageUpdate(row, 0, order[row * PAGES_PER_ROW : (row + 1) * PAGES_PER_ROW].tobytes())
            for row in range(MAX_ROWS)
        )
        change = self.pages.update(StepPlan(0, (), updates, (), (), ()))
        assert change is not None
        self.rows.page_table.view(-1)[torch.from_numpy(change.flat_index)] = torch.from_numpy(change.page_ids)
        self.logits = torch.empty(0)
        self.rows.sample = self._sample
        self.step = partial(prefill_step, self.model, self.rows)

    def _sample(self, logits: Tensor, *_: Any) -> Tensor:
        self.logits = logits
        return logits.argmax(1).int()

    def graphs(self, buckets: tuple[PrefillBucket, ...] = BUCKETS) -> PrefillGraphs:
        graphs = PrefillGraphs(self.step, run_again, buckets, self.pages, Stager(CPU), CPU, VOCAB_SIZE)
        graphs.warm_up(buckets, clock=lambda: 0.0)
        return graphs

    def state(self) -> list[Tensor]:
        """All that a step may write but the scratch page."""
        return [self.rows.last_token, self.rows.context_len, *[pool[1:] for pool in self.pools()]]

    def pools(self) -> list[Tensor]:
        """Keys and values of each layer, [P, S, K, D]."""
        return [pool for a in self.model.attention_layers() for pool in (a.k_cache, a.v_cache)]


def run_again(run: Callable[[], Any]) -> Callable[[], Any]:
    run()
    return run


def some_decodes(generator: random.Random, fed: list[int], busy: set[int]) -> Decodes:
    """One more token for some of the rows that have some and are not busy."""
    free = [row for row in range(MAX_ROWS) if 0 < fed[row] < PAGES_PER_ROW * PAGE_SIZE and row not in busy]
    rows = generator.sample(free, generator.randint(0, len(free)))
    for row in rows:
        fed[row] += 1
    return Decodes(np.array(rows, dtype=np.int32), np.array([fed[row] for row in rows], dtype=np.int32))


def as_chunks(decodes: Decodes, rows: Rows) -> tuple[Chunk, ...]:
    """The same as prompts of one token, which the host knows."""
    return tuple(
        Chunk(row, length - 1, rows.last_token[row].numpy().astype("<i4").tobytes(), True)
        for row, length in zip(decodes.rows.tolist(), decodes.lengths.tolist(), strict=True)
    )


def some_chunks(generator: random.Random, fed: list[int], most: int) -> tuple[Chunk, ...]:
    """Chunks of some rows, of at most so many tokens together, behind what the rows have been fed."""
    chunks = []
    for row in generator.sample(range(MAX_ROWS), generator.randint(1, MAX_ROWS)):
        length = generator.choice((1, 2, 7, 16, 33, 60))
        if length > most or fed[row] + length > PAGES_PER_ROW * PAGE_SIZE:
            continue
        token_ids = np.array(generator.choices(range(VOCAB_SIZE), k=length), dtype="<i4")
        chunks.append(Chunk(row, fed[row], token_ids.tobytes(), generator.random() < 0.5))
        fed[row] += length
        most -= length
    return tuple(chunks)


@torch.inference_mode()
@pytest.mark.parametrize("seed", range(4))
def test_a_padded_step_gives_each_row_what_it_gets_unpadded_and_writes_nothing_else(seed: int) -> None:
    plain, padded = Engine(), Engine()
    graphs = padded.graphs()
    scratch = [pool[0].clone() for pool in padded.pools()]
    generator = random.Random(seed)
    fed = [0] * MAX_ROWS
    used = set()
    num_decodes = 0
    for _ in range(16):
        chunks = some_chunks(generator, fed, 80 - MAX_ROWS)
        if not chunks:
            continue
        decodes = some_decodes(generator, fed, {chunk.row for chunk in chunks})
        num_decodes += len(decodes.rows)
        bucket = graphs.choose(chunks, len(decodes.rows), 1.0).bucket or BUCKETS[-1]
        used.add(bucket)
        one_by_one = as_chunks(decodes, plain.rows) + chunks
        expected = plain.step(build_prefill(one_by_one, plain.pages, Stager(CPU))).token_ids
        tokens, logits = graphs.run(chunks, decodes, bucket, padded.pages)
        assert len(tokens) == bucket.decodes + bucket.rows
        assert torch.isfinite(padded.logits).all(), "padding computes NaN"
        places = [*range(len(decodes.rows)), *range(bucket.decodes, bucket.decodes + len(chunks))]
        assert tokens[places].tolist() == expected.tolist()
        assert logits is not None
        assert logits.logits is padded.logits
        lengths = [*decodes.lengths, *[chunk.num_computed_tokens + chunk.num_new_tokens for chunk in chunks]]
        assert logits.row_ids[places].tolist() == [*decodes.rows, *[chunk.row for chunk in chunks]]
        assert logits.context_len[places].tolist() == lengths
        assert padded.logits[places].std() > 0.1
        torch.testing.assert_close(padded.logits[places], plain.logits, rtol=0, atol=1e-4)
        for ours, theirs in zip(padded.state(), plain.state(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4, equal_nan=True)
    for pool, before in zip(padded.pools(), scratch, strict=True):
        torch.testing.assert_close(pool[0], before, rtol=0, atol=0, equal_nan=True)
    assert len(used) > 1
    assert num_decodes > 3


@torch.inference_mode()
def test_warming_up_writes_to_the_scratch_page_only() -> None:
    engine = Engine()
    before = [tensor.clone() for tensor in engine.state()]
    engine.graphs()
    for tensor, old in zip(engine.state(), before, strict=True):
        torch.testing.assert_close(tensor, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("max_tokens", [1, 15, 16, 100, 512, 1000, 2048, 8192])
@pytest.mark.parametrize("max_rows", [1, 5, 256])
def test_every_prefill_up_to_the_largest_bucket_has_one_unless_it_is_many_short_chunks(
    max_tokens: int, max_rows: int
) -> None:
    buckets = prefill_buckets(max_tokens, max_rows)
    assert buckets[-1].tokens == max_tokens
    assert all(bucket.rows <= min(bucket.tokens, max_rows) for bucket in buckets)
    for num_tokens in range(1, max_tokens + 1):
        for num_rows in (1, min(num_tokens, 16, max_rows), min(max(num_tokens // 32, 1), 128, max_rows)):
            bucket = prefill_bucket_for(PrefillBucket(num_tokens, num_rows), buckets)
            assert bucket is not None, (num_tokens, num_rows)
            assert bucket.tokens >= num_tokens
            assert bucket.rows >= num_rows
            assert bucket.tokens <= max(128, 3 / 2 * num_tokens + 1) or num_rows > 1
    assert prefill_bucket_for(PrefillBucket(max_tokens + 1, 1), buckets) is None


def test_many_short_chunks_get_more_padding_but_never_more_than_themselves() -> None:
    buckets = prefill_buckets(2048, 256)

    def bucket_for(num_tokens: int, num_rows: int) -> PrefillBucket | None:
        return prefill_bucket_for(PrefillBucket(num_tokens, num_rows), buckets)

    assert bucket_for(30, 30) is None
    assert bucket_for(600, 30) == PrefillBucket(1024, 32)
    assert bucket_for(600, 40) is None
    assert bucket_for(2048, 64) == PrefillBucket(2048, 64)
    assert bucket_for(2048, 65) is None
    assert prefill_buckets(8192, 256)[-1] == PrefillBucket(8192, 128)
    assert prefill_buckets(0, 256) == ()


def test_a_prefill_with_decodes_has_a_bucket_with_room_for_them() -> None:
    buckets = prefill_buckets(2048, 256, 200)
    assert buckets[:5] == ((16, 16, 0), (16, 16, 16), (32, 16, 0), (32, 16, 32), (64, 16, 0))
    assert buckets[-3:] == ((2048, 64, 0), (2048, 64, 32), (2048, 64, 200))
    assert prefill_bucket_for(PrefillBucket(100, 1, 0), buckets) == (128, 16, 0)
    assert prefill_bucket_for(PrefillBucket(100, 1, 32), buckets) == (128, 16, 32)
    assert prefill_bucket_for(PrefillBucket(100, 1, 99), buckets) == (128, 16, 128)
    assert prefill_bucket_for(PrefillBucket(300, 9, 150), buckets) == (384, 16, 200)
    assert prefill_bucket_for(PrefillBucket(300, 9, 201), buckets) is None
    first = [bucket.tokens for bucket in startup_prefills(buckets)]
    assert first == [16, 128, 256, 512, 1024, 2048]
    assert {bucket.decodes for bucket in startup_prefills(buckets)} == {0}
    small = [
        [bucket.tokens for bucket in startup_prefills(prefill_buckets(most, 256))] for most in (9, 48, 130)
    ]
    assert small == [[9], [16, 48], [16, 128, 130]]
    assert max(bucket.tokens for bucket in prefill_buckets(8192, 256, 256) if bucket.decodes) == 2048
    assert {bucket.decodes % 4 for bucket in prefill_buckets(70, 256, 56)} == {0}, (
        "what follows is not aligned"
    )


def ticks(*durations: float) -> Callable[[], float]:
    """A clock that is asked at the start and the end of each of these durations."""
    times = iter([time for start, duration in enumerate(durations) for time in (start, start + duration)])
    return lambda: next(times)


def chunk_of(num_tokens: int) -> tuple[Chunk, ...]:
    return (Chunk(0, 0, bytes(4 * num_tokens), True),)


def test_graphs_are_recorded_up_to_twice_the_time_that_launching_takes() -> None:
    engine = Engine()
    launches = (0.030, 0.010, 0.011)  # the shortest counts: what disturbs the host makes it longer
    runs = (0.015, 0.004, 0.021, 0.019, 0.022, 0.021)  # two of each bucket
    buckets = tuple(PrefillBucket(tokens, 4) for tokens in (16, 32, 64, 128))
    graphs = PrefillGraphs(engine.step, run_again, buckets, engine.pages, Stager(CPU), CPU, VOCAB_SIZE)
    with torch.inference_mode():
        graphs.warm_up(buckets, clock=ticks(*launches, *runs))
    assert graphs.table.sizes == buckets[:2]
    assert graphs.table.num_missing == 0
    assert graphs.choose(chunk_of(33)).bucket is None


def test_a_graph_is_used_where_padding_costs_no_more_than_launching_would() -> None:
    engine = Engine()
    # A launch takes 10 ms. Runs: 16 tokens 4 ms, 32 tokens 9 ms, 64 tokens 17 ms; between, on the line.
    buckets = tuple(PrefillBucket(tokens, 4) for tokens in (16, 32, 64))
    graphs = PrefillGraphs(engine.step, run_again, buckets, engine.pages, Stager(CPU), CPU, VOCAB_SIZE)
    with torch.inference_mode():
        graphs.warm_up(buckets, clock=ticks(*[0.010] * 3, *[0.004] * 2, *[0.009] * 2, *[0.017] * 2))
    assert graphs.table.sizes == buckets
    expected = {1: buckets[0], 16: buckets[0], 17: buckets[1], 32: buckets[1], 64: buckets[2]}
    expected |= {33: None, 60: None, 61: buckets[2]}  # 60 tokens run in 16 ms, 5 % less than 16.8
    assert {n: graphs.choose(chunk_of(n)).bucket for n in expected} == expected


def test_sizes_between_measured_ones_are_judged_by_the_line_between_them_and_recorded_later() -> None:
    engine = Engine()
    # A launch takes 5 ms. Measured: 16 tokens at 4 ms, 64 at 8 ms and 128 at 12 ms, so 96 at 10 ms.
    durations = (*[0.005] * 3, 0.004, 0.004, 0.008, 0.008, 0.012, 0.012)
    buckets = tuple(PrefillBucket(tokens, 4) for tokens in (16, 32, 64, 96, 112, 128, 192))
    graphs = PrefillGraphs(engine.step, run_again, buckets, engine.pages, Stager(CPU), CPU, VOCAB_SIZE)
    with torch.inference_mode():
        graphs.warm_up([buckets[0], buckets[2], buckets[5]], clock=ticks(*durations))
        assert graphs.table.sizes == (buckets[0], buckets[2])
        assert graphs.table.num_missing == 2
        assert graphs.choose(chunk_of(62)).bucket == buckets[2]
        assert graphs.choose(chunk_of(93)).bucket is None
        graphs.table.record_next()  # what the chunks before had use for
        assert graphs.table.sizes == (buckets[0], buckets[2], buckets[3])
        graphs.table.record_next()
    assert graphs.table.sizes == buckets[:4]
    assert graphs.table.num_missing == 0
    chunks = (Chunk(2, 0, np.arange(30, dtype="<i4").tobytes(), True),)
    with torch.inference_mode():
        assert graphs.choose(chunks).bucket == buckets[1]
        replayed = graphs.run(chunks, NO_DECODES, buckets[1], engine.pages).token_ids[:1]
        assert torch.equal(replayed, engine.step(build_prefill(chunks, engine.pages, Stager(CPU))).token_ids)


def test_decodes_go_with_chunks_where_that_takes_less_time_than_one_after_the_other() -> None:
    engine = Engine()
    # A launch takes 6 ms. Runs: 16 tokens 4 ms, 32 tokens 6 ms, 64 tokens 9 ms; room for decodes 0.2 ms.
    durations = (*[0.006] * 3, *[0.004] * 2, *[0.006] * 2, *[0.009] * 2)
    durations += (0.008, 0.0065, *[0.0092] * 2)  # launched with decodes, 6.5 ms
    buckets = tuple(PrefillBucket(tokens, 4, decodes) for tokens in (16, 32, 64) for decodes in (0, 4))

    def graphs_of(buckets: tuple[PrefillBucket, ...]) -> PrefillGraphs:
        graphs = PrefillGraphs(engine.step, run_again, buckets, engine.pages, Stager(CPU), CPU, VOCAB_SIZE)
        with torch.inference_mode():
            graphs.warm_up([PrefillBucket(tokens, 4) for tokens in (16, 32, 64)], clock=ticks(*durations))
        return graphs

    graphs = graphs_of(buckets)
    assert graphs.table.sizes == (buckets[0], buckets[2], *buckets[4:])
    # No small graph has room for decodes yet, so that they take a launch.
    assert graphs.choose(chunk_of(15), 1, 2510.0) == (None, True, 6500.0)
    assert graphs.choose(chunk_of(15), 1, 2490.0) == (PrefillBucket(16, 4), False, 6490.0)
    assert graphs.choose(chunk_of(28), 4, 900.0).joined
    with torch.inference_mode():
        graphs.table.record_next()  # what the last would have liked
    assert graphs.choose(chunk_of(28), 4, 210.0) == (PrefillBucket(32, 4, 4), True, 6200.0)
    assert graphs.choose(chunk_of(28), 4, 190.0) == (PrefillBucket(32, 4), False, 6190.0)
    assert graphs.choose(chunk_of(28)) == PrefillChoice(PrefillBucket(32, 4), False, 6000.0)
    with torch.inference_mode():
        while graphs.table.num_missing:
            graphs.table.record_next()
    assert graphs.table.sizes == buckets
    # Beside 15 tokens one more is free; beside 16 it takes the next bucket, 2 ms more.
    assert graphs.choose(chunk_of(15), 1, 210.0) == (PrefillBucket(16, 4, 4), True, 4200.0)
    assert graphs.choose(chunk_of(16), 1, 2210.0) == (PrefillBucket(32, 4, 4), True, 6200.0)
    assert graphs.choose(chunk_of(16), 1, 2190.0) == (PrefillBucket(16, 4), False, 6190.0)
    # More than 64 tokens have no graph; each token takes 94 us, and room for two decodes 100.
    assert graphs.choose(chunk_of(64), 2, 290.0) == (None, True, 9287.5)
    assert graphs.choose(chunk_of(64), 2, 280.0) == (PrefillBucket(64, 4), False, 9280.0)
    assert not graphs_of(buckets[::2]).choose(chunk_of(15), 1, 9000.0).joined, (
        "no bucket has room for decodes"
    )


def test_ranks_that_measure_other_times_decide_alike() -> None:
    buckets = tuple(PrefillBucket(tokens, 4) for tokens in (16, 32, 64))
    slow = (*[0.010] * 3, *[0.015] * 2, *[0.030] * 2)
    least = iter([10_000, 4_000, 12_000, 21_000])  # microseconds, of all ranks
    engine = Engine()
    graphs = PrefillGraphs(engine.step, run_again, buckets, engine.pages, Stager(CPU), CPU, VOCAB_SIZE)
    asked: list[int] = []

    def agree(value: int) -> int:
        asked.append(value)
        return next(least)

    with torch.inference_mode():
        graphs.warm_up(buckets, clock=ticks(*slow, *[0.050] * 2), minimum_over_ranks=agree)
    assert asked == [10_000, 15_000, 30_000, 50_000]
    assert graphs.table.sizes == buckets[:2]


def test_ranks_that_measure_other_times_join_alike() -> None:
    buckets = tuple(PrefillBucket(16, 4, decodes) for decodes in (0, 4))
    engine = Engine()
    graphs = PrefillGraphs(engine.step, run_again, buckets, engine.pages, Stager(CPU), CPU, VOCAB_SIZE)
    least = iter([10_000, 4_000, 11_000, 4_300])
    clock = ticks(*[0.020] * 3, *[0.005] * 2, *[0.030] * 2, *[0.009] * 2)
    with torch.inference_mode():
        graphs.warm_up(buckets[:1], clock=clock, minimum_over_ranks=lambda value: next(least))
    assert graphs.choose(chunk_of(15), 1, 310.0) == (buckets[1], True, 4300.0)
    assert graphs.choose(chunk_of(17), 1, 2000.0) == (None, False, 10000.0)
    assert graphs.choose(chunk_of(17), 1, 7001.0) == (None, True, 11000.0)


def test_graphs_are_measured_on_tokens_that_have_a_slot_and_so_experts() -> None:
    engine = Engine()
    longest = PAGES_PER_ROW * PAGE_SIZE
    bucket = PrefillBucket(longest + 10, 4)
    launched: list[tuple[list[int], int, list[int], int, int]] = []

    def step(batch: PrefillBatch) -> StepOutput:
        queries = batch.row_start.diff().tolist()
        ids = batch.token_ids.tolist()
        slots = batch.slot_mapping.unique().tolist()
        launched.append((slots, int(batch.positions.max()), queries, min(ids), max(ids)))
        return StepOutput(batch.row_ids, None)

    graphs = PrefillGraphs(step, run_again, (bucket,), engine.pages, Stager(CPU), CPU, VOCAB_SIZE)
    graphs.warm_up([bucket])
    slots, position, queries, least, greatest = launched[-1]
    assert (slots, position, queries) == (list(range(PAGE_SIZE)), 0, [longest, 10, 0, 0])
    assert 0 <= least < greatest < VOCAB_SIZE


def test_a_model_that_takes_far_longer_than_its_launch_has_no_graphs() -> None:
    engine = Engine()
    graphs = PrefillGraphs(engine.step, run_again, BUCKETS, engine.pages, Stager(CPU), CPU, VOCAB_SIZE)
    with torch.inference_mode():
        graphs.warm_up(BUCKETS, clock=ticks(*[0.010] * 3, *[0.030] * 2))
    assert graphs.table.sizes == ()
    assert graphs.choose(chunk_of(1)).bucket is None


def test_a_gpu_that_cannot_record_prefill_starts_without_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine()

    def start(error: Exception, **settings: Any) -> PrefillGraphs | None:
        def record(run: Callable[[], Any]) -> Callable[[], Any]:
            raise error

        config = resolve_engine_config(EngineConfig(**settings), CONFIG, DeviceFacts(has_cuda=True))
        graphs = PrefillGraphs(engine.step, record, BUCKETS, engine.pages, Stager(CPU), CPU, VOCAB_SIZE)
        return _record_prefill(config, graphs, BUCKETS, None)

    broken = RuntimeError("operation not permitted when stream is capturing")
    with caplog.at_level(logging.WARNING):
        assert start(broken) is None
    assert "--max-graph-tokens 0" in caplog.text
    assert "operation not permitted" in caplog.text
    with pytest.raises(RuntimeError, match="not permitted"):
        start(broken, strict_compile=True)
    with pytest.raises(torch.OutOfMemoryError):
        start(torch.OutOfMemoryError("no room"))
