"""Prefill in buckets: what is padded, what that changes (nothing), and when it is worth it.

"Recorded" here is a function that runs again on the same tensors, which is all that a graph can do.
"""

import logging
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.config import DeviceFacts, EngineConfig, resolve_engine_config
from minisgl.engine.buckets import PrefillBucket, prefill_bucket_for, prefill_buckets
from minisgl.engine.inputs import HostPageTable, PrefillBatch, Stager, build_prefill
from minisgl.engine.prefill_graphs import PrefillGraphs
from minisgl.engine.recording import _record_prefill
from minisgl.engine.rows import Rows
from minisgl.engine.steps import prefill_step
from minisgl.model_config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.models.registry import build_model
from minisgl.scheduler.plan import Chunk, PageUpdate, StepPlan
from minisgl.weights.dummy import fill_dummy

CPU = torch.device("cpu")
PAGE_SIZE = 4
MAX_ROWS = 6
PAGES_PER_ROW = 24
VOCAB_SIZE = 61
BUCKETS = prefill_buckets(80, MAX_ROWS)
CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    num_layers=2,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=VOCAB_SIZE,
    max_position=128,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    tie_word_embeddings=False,
    qk_norm=True,
    checkpoint_dtype="float32",
    eos_token_ids=(),
    bos_token_id=None,
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
        order = random.Random(3).sample(range(1, num_pages), num_pages - 1)
        updates = tuple(
            PageUpdate(row, 0, tuple(order[row * PAGES_PER_ROW : (row + 1) * PAGES_PER_ROW]))
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


def run_again(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    run()
    return run


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
    for _ in range(12):
        chunks = some_chunks(generator, fed, 80)
        if not chunks:
            continue
        bucket = graphs.bucket_for(chunks) or BUCKETS[-1]
        used.add(bucket)
        expected = plain.step(build_prefill(chunks, plain.pages, Stager(CPU)))
        tokens = graphs.run(chunks, bucket, padded.pages)
        assert len(tokens) == bucket.rows
        assert tokens[: len(chunks)].tolist() == expected.tolist()
        assert torch.isfinite(padded.logits).all(), "padding computes NaN"
        assert padded.logits[: len(chunks)].std() > 0.1
        torch.testing.assert_close(padded.logits[: len(chunks)], plain.logits, rtol=0, atol=1e-4)
        for ours, theirs in zip(padded.state(), plain.state(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4, equal_nan=True)
    for pool, before in zip(padded.pools(), scratch, strict=True):
        torch.testing.assert_close(pool[0], before, rtol=0, atol=0, equal_nan=True)
    assert len(used) > 1


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
            bucket = prefill_bucket_for(num_tokens, num_rows, buckets)
            assert bucket is not None, (num_tokens, num_rows)
            assert bucket.tokens >= num_tokens
            assert bucket.rows >= num_rows
            assert bucket.tokens <= max(128, 3 / 2 * num_tokens + 1) or num_rows > 1
    assert prefill_bucket_for(max_tokens + 1, 1, buckets) is None


def test_many_short_chunks_get_more_padding_but_never_more_than_themselves() -> None:
    buckets = prefill_buckets(2048, 256)
    assert prefill_bucket_for(30, 30, buckets) is None
    assert prefill_bucket_for(600, 30, buckets) == PrefillBucket(1024, 32)
    assert prefill_bucket_for(600, 40, buckets) is None
    assert prefill_bucket_for(2048, 64, buckets) == PrefillBucket(2048, 64)
    assert prefill_bucket_for(2048, 65, buckets) is None
    assert prefill_buckets(8192, 256)[-1] == PrefillBucket(8192, 128)
    assert prefill_buckets(0, 256) == ()


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
    assert graphs.buckets == buckets[:2]
    assert graphs.num_missing == 0
    assert graphs.bucket_for(chunk_of(33)) is None


def test_a_graph_is_used_where_padding_costs_no_more_than_launching_would() -> None:
    engine = Engine()
    # A launch takes 10 ms. Runs: 16 tokens 4 ms, 32 tokens 9 ms, 64 tokens 17 ms; between, on the line.
    buckets = tuple(PrefillBucket(tokens, 4) for tokens in (16, 32, 64))
    graphs = PrefillGraphs(engine.step, run_again, buckets, engine.pages, Stager(CPU), CPU, VOCAB_SIZE)
    with torch.inference_mode():
        graphs.warm_up(buckets, clock=ticks(*[0.010] * 3, *[0.004] * 2, *[0.009] * 2, *[0.017] * 2))
    assert graphs.buckets == buckets
    expected = {1: buckets[0], 16: buckets[0], 17: buckets[1], 32: buckets[1], 64: buckets[2]}
    expected |= {33: None, 60: None, 61: buckets[2]}  # 60 tokens run in 16 ms, 5 % less than 16.8
    assert {n: graphs.bucket_for(chunk_of(n)) for n in expected} == expected


def test_sizes_between_measured_ones_are_judged_by_the_line_between_them_and_recorded_later() -> None:
    engine = Engine()
    # A launch takes 5 ms. Measured: 16 tokens at 4 ms, 64 at 8 ms and 128 at 12 ms, so 96 at 10 ms.
    durations = (*[0.005] * 3, 0.004, 0.004, 0.008, 0.008, 0.012, 0.012)
    buckets = tuple(PrefillBucket(tokens, 4) for tokens in (16, 32, 64, 96, 112, 128, 192))
    graphs = PrefillGraphs(engine.step, run_again, buckets, engine.pages, Stager(CPU), CPU, VOCAB_SIZE)
    with torch.inference_mode():
        graphs.warm_up([buckets[0], buckets[2], buckets[5]], clock=ticks(*durations))
        assert graphs.buckets == (buckets[0], buckets[2])
        assert graphs.num_missing == 2
        assert graphs.bucket_for(chunk_of(62)) == buckets[2]
        assert graphs.bucket_for(chunk_of(93)) is None
        graphs.record_next()  # what the chunks before had use for
        assert graphs.buckets == (buckets[0], buckets[2], buckets[3])
        graphs.record_next()
    assert graphs.buckets == buckets[:4]
    assert graphs.num_missing == 0
    chunks = (Chunk(2, 0, np.arange(30, dtype="<i4").tobytes(), True),)
    with torch.inference_mode():
        assert graphs.bucket_for(chunks) == buckets[1]
        replayed = graphs.run(chunks, buckets[1], engine.pages)[:1]
        assert torch.equal(replayed, engine.step(build_prefill(chunks, engine.pages, Stager(CPU))))


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
        graphs.warm_up(buckets, clock=ticks(*slow, *[0.050] * 2), agree=agree)
    assert asked == [10_000, 15_000, 30_000, 50_000]
    assert graphs.buckets == buckets[:2]


def test_graphs_are_measured_on_tokens_that_have_a_slot_and_so_experts() -> None:
    engine = Engine()
    longest = PAGES_PER_ROW * PAGE_SIZE
    bucket = PrefillBucket(longest + 10, 4)
    launched: list[tuple[list[int], int, list[int], int, int]] = []

    def step(batch: PrefillBatch) -> Tensor:
        queries = batch.row_start.diff().tolist()
        ids = batch.token_ids.tolist()
        slots = batch.slot_mapping.unique().tolist()
        launched.append((slots, int(batch.positions.max()), queries, min(ids), max(ids)))
        return batch.row_ids

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
    assert graphs.buckets == ()
    assert graphs.bucket_for(chunk_of(1)) is None


def test_a_gpu_that_cannot_record_prefill_starts_without_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine()

    def start(error: Exception, **settings: Any) -> PrefillGraphs | None:
        def record(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
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
