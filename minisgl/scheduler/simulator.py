"""A fake engine that executes step plans without a model, for tests and for policy research.

Promise: it keeps a pool, page tables and rows like the real engine and reads its context only from them, so a
wrong page, row or order of steps changes its tokens. Time is virtual.
The fake model: each pool slot holds a running hash of the whole prefix; the next token is a function of the
hash and the row's seed. `expected_tokens` computes the same tokens from the prompt alone.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from minisgl.request import FinishReason, SamplingParams
from minisgl.scheduler.plan import StepPlan
from minisgl.scheduler.scheduler import Scheduler

_HASH_MASK = 2**61 - 1
_POISON = -1


class FakeModel(NamedTuple):
    """A fake language model: each token is a function of the whole context and the seed."""

    vocab_size: int
    eos_token_id: int
    eos_one_in: int = 0
    """On average one token in this many is end-of-sequence; 0 = never."""

    def advance(self, context: int, token: int) -> int:
        """The hash of `context` extended by `token`."""
        return (context * 1_000_003 + token * 7919 + 17) % _HASH_MASK

    def next_token(self, context: int, seed: int) -> int:
        value = (context ^ (seed & _HASH_MASK)) * 0x9E3779B97F4A7C15 % _HASH_MASK
        if self.eos_one_in and (value >> 40) % self.eos_one_in == 0:
            return self.eos_token_id
        return int((value >> 13) % self.vocab_size)

    def expected_tokens(
        self, prompt: Sequence[int], max_new_tokens: int, seed: int, stops: bool = True
    ) -> list[int]:
        """The tokens that a request with this prompt must get, computed without pool or rows."""
        context, output = 0, []
        for token in prompt:
            context = self.advance(context, int(token))
        while len(output) < max_new_tokens:
            token = self.next_token(context, seed)
            output.append(token)
            if stops and token == self.eos_token_id:
                break
            context = self.advance(context, token)
        return output


class StepCost(NamedTuple):
    """Virtual duration of a step in milliseconds: the time of its decodes plus the time of its chunks.

    Both times are linear in the work; the chunks' time has a lower bound. `minisgl bench simulate` fits the
    coefficients. Decodes that join the chunks count as prefill tokens and read their own keys.
    """

    decode_ms: float = 4.0
    """Fixed cost of a step that decodes."""
    per_decode_row_ms: float = 0.02
    per_context_token_ms: float = 1e-5
    """Cost of each token that a decoding row attends to."""
    prefill_ms: float = 4.0
    """Fixed cost of a step with chunks."""
    per_prompt_token_ms: float = 0.02
    per_attended_token_ms: float = 0.0
    """Cost of each pair of a prompt token and a token it attends to."""
    least_prefill_ms: float = 0.0
    """Least cost of a step's chunks: the weights are read and the kernels launched for few tokens, too."""
    per_state_copy_ms: float = 0.0
    """Cost of each copy of a row's states of linear attention to a snapshot or from one."""

    def step_ms(self, plan: StepPlan, num_context_tokens: int, *, join_decodes: bool = False) -> float:
        """Duration of a step. If decodes may join the chunks, the faster of the two ways counts.

        Args:
            num_context_tokens: tokens that all decoding rows together attend to.
            join_decodes: decodes may run in one batch with the chunks.
        """
        num_decodes = len(plan.decode_rows)
        keys_ms = self.per_context_token_ms * num_context_tokens
        num_saves = sum(chunk.snapshot is not None for chunk in plan.chunks)
        copies_ms = self.per_state_copy_ms * (num_saves + sum(map(len, plan.state_copies)))
        decode_ms = self.decode_ms + self.per_decode_row_ms * num_decodes + keys_ms if num_decodes else 0.0
        if not plan.chunks:
            return copies_ms + decode_ms
        run_ms = decode_ms + self._prefill_ms(plan, 0)
        if join_decodes:
            run_ms = min(run_ms, self._prefill_ms(plan, num_decodes) + keys_ms)
        return copies_ms + run_ms

    def _prefill_ms(self, plan: StepPlan, num_decodes: int) -> float:
        """Time of the chunks and `num_decodes` joined decodes, without the keys that the decodes read."""
        num_tokens = sum(chunk.num_new_tokens for chunk in plan.chunks) + num_decodes
        pairs = sum(attended_pairs(chunk.num_new_tokens, chunk.num_computed_tokens) for chunk in plan.chunks)
        linear_ms = (
            self.prefill_ms + self.per_prompt_token_ms * num_tokens + self.per_attended_token_ms * pairs
        )
        return max(linear_ms, self.least_prefill_ms)


def attended_pairs(num_new_tokens: int, num_computed_tokens: int) -> float:
    """Pairs of a new token and a token it attends to; each token attends to itself, too."""
    return num_new_tokens * (num_computed_tokens + (num_new_tokens + 1) / 2)


class Executor(Protocol):
    """The part of an engine that a simulation uses."""

    @property
    def context_lens(self) -> Sequence[int]:
        """Tokens in the pool, for each row."""
        ...

    def execute(self, plan: StepPlan) -> list[int]:
        """One token per `plan.sampled_rows`."""
        ...


class FakeExecutor:
    """Executes plans in launch order, like a GPU stream.

    Args:
        windows: window and pages of each window group. Every step checks that their pages still hold what the
            new tokens see, after all rows have stored theirs.
        num_snapshots: slots for states of linear attention; None = the model has no states.
        num_pages: of the group that keeps all tokens; 0 = all groups have windows.
    """

    def __init__(
        self,
        model: FakeModel,
        *,
        num_pages: int,
        page_size: int,
        max_rows: int,
        windows: Sequence[tuple[int, int]] = (),
        num_snapshots: int | None = None,
    ) -> None:
        self.model = model
        self._page_size = page_size
        groups = [(0, num_pages)] * (num_pages > 0) + [*windows]
        self._windows = [window for window, _ in groups]
        # Of each group: the hash of the prefix that ends in this slot, and of that which ends before it.
        self._pools = [[_POISON] * (pages * page_size) for _, pages in groups]
        self._before = [[_POISON] * (pages * page_size) for _, pages in groups]
        # Linear attention: the hash of each row's prefix, and of each snapshot's. New rows read none.
        self._has_states = num_snapshots is not None
        self._states = [_POISON] * max_rows
        self._snapshots = [_POISON] * (num_snapshots or 0)
        self._pages: list[list[dict[int, int]]] = [[{} for _ in range(max_rows)] for _ in groups]
        self._last_token = [_POISON] * max_rows
        self._context_len = [0] * max_rows
        self._seed = [0] * max_rows

    def execute(self, plan: StepPlan) -> list[int]:
        """One token per `plan.sampled_rows`."""
        assert len({init.row for init in plan.row_inits}) == len(plan.row_inits), "a row is initialised twice"
        for init in plan.row_inits:
            self._seed[init.row] = init.seed
            for pages in self._pages:
                pages[init.row] = {}
            self._context_len[init.row] = 0
            self._last_token[init.row] = _POISON
        touched = set()
        for update in plan.page_updates:
            page_ids = np.frombuffer(update.page_ids, "<i4").tolist()
            for index, page_id in enumerate(page_ids, update.first_index):
                entry = (update.group, update.row, index)
                assert entry not in touched, "two values for one page-table entry in one plan"
                touched.add(entry)
                self._pages[update.group][update.row][index] = page_id
        if plan.chunks:
            lengths = tuple([self._context_len[row] + 1 for row in plan.decode_rows])
            assert plan.decode_lengths == lengths, "the plan has other lengths than the rows"
        copies = plan.state_copies
        inside = [chunk.snapshot[1] for chunk in plan.chunks if chunk.snapshot is not None]
        loaded, saved = [row for _, row in copies.loads], [slot for _, slot in copies.saves] + inside
        assert len(set(loaded)) == len(loaded), "two states for one row in one plan"
        assert len(set(saved)) == len(saved), "two states for one snapshot in one plan"
        assert not {slot for slot, _ in copies.loads}.intersection(inside), "loaded before it is saved"
        for row, slot in plan.state_copies.saves:
            self._snapshots[slot] = self._states[row]
        for slot, row in plan.state_copies.loads:
            self._states[row] = self._snapshots[slot]
        starts = [(row, self._context_len[row]) for row in plan.decode_rows]
        starts += [(chunk.row, chunk.num_computed_tokens) for chunk in plan.chunks]
        results = [
            self._feed(row, self._context_len[row], [self._last_token[row]]) for row in plan.decode_rows
        ]
        for chunk in plan.chunks:
            token_ids = np.frombuffer(chunk.token_ids, dtype="<i4").tolist()
            begin = 0
            if chunk.snapshot is not None:
                begin, slot = chunk.snapshot
                assert 0 < begin < len(token_ids), "the snapshot is not inside of the chunk"
                self._feed(chunk.row, chunk.num_computed_tokens, token_ids[:begin])
                self._snapshots[slot] = self._states[chunk.row]
            result = self._feed(chunk.row, chunk.num_computed_tokens + begin, token_ids[begin:])
            if chunk.samples:
                results.append(result)
        for row, start in starts:
            self._check_windows(row, start)
        for row, token in zip(plan.sampled_rows, results, strict=True):
            self._last_token[row] = token
        return results

    @property
    def context_lens(self) -> list[int]:
        return self._context_len

    def _slot(self, group: int, row: int, position: int) -> int:
        page = self._pages[group][row][position // self._page_size]
        return page * self._page_size + position % self._page_size

    def _feed(self, row: int, start: int, token_ids: list[int]) -> int:
        context = self._pools[0][self._slot(0, row, start - 1)] if start else 0
        assert context != _POISON, f"row {row} reads a slot that was never written"
        if self._has_states and start:
            assert self._states[row] == context, f"row {row} has the state of other tokens"
        for position, token in enumerate(token_ids, start):
            before, context = context, self.model.advance(context, token)
            for group, pool in enumerate(self._pools):
                slot = self._slot(group, row, position)
                pool[slot], self._before[group][slot] = context, before
        self._context_len[row] = start + len(token_ids)
        self._states[row] = context
        return self.model.next_token(context, self._seed[row])

    def _check_windows(self, row: int, start: int) -> None:
        """Check that all that the row's new tokens, from `start` on, see in windows is one prefix."""
        for group, window in enumerate(self._windows):
            if not window:
                continue
            end = self._context_len[row]
            slots = [self._slot(group, row, position) for position in range(max(start - window + 1, 0), end)]
            hashes = [self._pools[group][slot] for slot in slots]
            assert _POISON not in hashes, f"row {row} reads a slot of group {group} that was never written"
            assert hashes[:-1] == [self._before[group][slot] for slot in slots[1:]], (
                f"row {row} sees other tokens in the window of group {group}"
            )
            assert hashes[-1] == self._pools[0][self._slot(0, row, end - 1)], "groups differ"


class Arrival(NamedTuple):
    """A request of a simulated workload."""

    at_ms: float
    prompt: np.ndarray  # int32 [tokens]
    params: SamplingParams
    priority: int = 0
    user: str = ""


class Served(NamedTuple):
    """One request as its client saw it; times are virtual milliseconds since the start."""

    token_ids: list[int]
    finish_reason: FinishReason
    num_cached_tokens: int
    arrived_ms: float
    token_ms: list[float]
    """Arrival time of each token."""
    finished_ms: float


class _Launched(NamedTuple):
    plan: StepPlan
    token_ids: list[int]
    ends_ms: float


def simulate(
    scheduler: Scheduler,
    executor: Executor,
    arrivals: Sequence[Arrival],
    *,
    cost: StepCost | None = None,
    overlap: bool = True,
    streamed: bool = True,
    join_decodes: bool = False,
    on_served: Callable[[int], None] = lambda num_served: None,
    next_turn: Callable[[int, Served], Arrival | None] = lambda index, served: None,
) -> list[Served]:
    """Replay `arrivals` (any order) to the end; one `Served` per arrival, in the given order.

    Events have the order of `Engine.step`. Planning takes no time; with overlap, a step is planned while the
    previous one runs. `join_decodes` is passed to `StepCost.step_ms`. `on_served` is called with the number
    of finished requests.

    Args:
        next_turn: called with each finished request's index and what its client saw. The arrival that it
            returns joins the others, behind the last index.
    """
    cost = cost or StepCost()
    arrivals = list(arrivals)
    to_come = [(arrival.at_ms, index) for index, arrival in enumerate(arrivals)]
    heapq.heapify(to_come)
    served: dict[int, Served] = {}
    tokens: dict[int, list[int]] = {}
    times: dict[int, list[float]] = {}
    host_ms = device_ms = 0.0  # the host's clock; when the device has finished all launched steps
    launched: deque[_Launched] = deque()
    while len(served) < len(arrivals):
        if not scheduler.has_work:
            host_ms = max(host_ms, to_come[0][0])
        while to_come and to_come[0][0] <= host_ms:
            _, index = heapq.heappop(to_come)
            arrival = arrivals[index]
            tokens[index], times[index] = [], []
            scheduler.add(index, arrival.prompt, arrival.params, arrival.priority, streamed, arrival.user)
        plan = scheduler.plan()
        if plan is not None:
            attended = sum(executor.context_lens[row] + 1 for row in plan.decode_rows)
            duration_ms = cost.step_ms(plan, attended, join_decodes=join_decodes)
            device_ms = max(device_ms, host_ms) + duration_ms
            launched.append(_Launched(plan, executor.execute(plan), device_ms))
        keep_in_flight = 1 if overlap and plan is not None else 0
        while len(launched) > keep_in_flight:
            step = launched.popleft()
            host_ms = max(host_ms, step.ends_ms)
            scheduler.apply(step.plan, step.token_ids)
        for output in scheduler.take_outputs():
            index = output.request_id
            tokens[index] += output.token_ids
            times[index] += [host_ms] * len(output.token_ids)
            if output.finish_reason is not None:
                served[index] = Served(
                    tokens[index],
                    output.finish_reason,
                    output.num_cached_tokens,
                    arrivals[index].at_ms,
                    times[index],
                    host_ms,
                )
                on_served(len(served))
                turn = next_turn(index, served[index])
                if turn is not None:
                    heapq.heappush(to_come, (turn.at_ms, len(arrivals)))
                    arrivals.append(turn)
    return [served[index] for index in range(len(arrivals))]
