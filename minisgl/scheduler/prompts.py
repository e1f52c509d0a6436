"""Plans the prompts of a step: admits waiting requests, and cuts prompts into chunks that fit the step."""

from bisect import insort

from minisgl.request import Request, RequestState
from minisgl.scheduler.holdings import Holdings
from minisgl.scheduler.journal import Journal
from minisgl.scheduler.logprobs import PromptLogprobs
from minisgl.scheduler.plan import Chunk
from minisgl.scheduler.queue.policy import MAX_ADMISSIONS_PER_STEP, by_seniority
from minisgl.scheduler.queue.room import PromptRoom
from minisgl.scheduler.queue.shares import Shares, goes_before
from minisgl.scheduler.queue.snapshot_waits import SnapshotWaits
from minisgl.scheduler.queue.waiting import WaitingQueue
from minisgl.scheduler.stats import SchedulerStats


class PromptPlanner:
    """Plans the chunks of one step at a time. `plan` fills the lists that it is given."""

    def __init__(
        self,
        chunk_tokens: int,
        holdings: Holdings,
        waiting: WaitingQueue,
        shares: Shares,
        prompt_logprobs: PromptLogprobs,
        stats: SchedulerStats,
        journal: Journal,
        chunk_multiple: int = 1,
        least_saved_tokens: int = 0,
    ) -> None:
        self._chunk_tokens = chunk_tokens
        self._chunk_multiple = chunk_multiple
        self._holdings = holdings
        self._waiting = waiting
        self._shares = shares
        self._prompt_logprobs = prompt_logprobs
        self._stats = stats
        self._journal = journal
        self._waits = (
            SnapshotWaits(holdings, prompt_logprobs, least_saved_tokens) if holdings.keeps_snapshots else None
        )

    def plan(
        self,
        room: PromptRoom,
        running: list[Request],
        chunks: list[Chunk],
        launched: list[tuple[Request, int]],
        sampled: list[Request],
    ) -> None:
        """Plan chunks while there is room: of running requests first, then of new ones.

        If users compete, a new request of one with less service goes before the rest of another one's prompt.

        Args:
            room: what the step has room for; what is planned is taken from it.
            running: by seniority; admitted requests are added.
            chunks: gets the chunks.
            launched: gets each chunk's request, and the tokens of its feed that are in the pool afterwards.
            sampled: gets the requests whose prompt ends in this step.
        """
        prefilling = [r for r in running if r.state is RequestState.PREFILL and not r.is_preempting]
        prefilling = self._shares.shortest_first(prefilling)
        waits = self._waits
        if waits is not None:
            waits.start_plan(prefilling)
        has_chunk: set[Request] = set()

        def plan_chunk(request: Request) -> None:
            """Plan the next chunk of a prompt, if there is room."""
            chunk = self._next_chunk(request, room.tokens_for(request))
            if chunk is None:
                return
            chunks.append(chunk)
            launched.append((request, request.num_planned_tokens))
            if chunk.samples:
                sampled.append(request)
            has_chunk.add(request)
            room.take(chunk.num_new_tokens)

        def go_on(request: Request) -> None:
            """Plan the next chunk of a running prompt, unless it waits or this plan has one."""
            if request in has_chunk:
                return
            if waits is not None and request in waits:
                if not waits.goes_on(request):
                    self._extend_match(request)
                begin_or_wait(request, waits)
            else:
                self._extend_match(request)
                plan_chunk(request)

        def begin_or_wait(request: Request, waits: SnapshotWaits) -> None:
            """Plan the first chunk of a prompt, unless it waits for a snapshot of another one."""
            leader = waits.leader(request)
            if leader is not None:
                if not waits.is_ending(leader):
                    go_on(leader)  # in the turn of the request, which may be of a user with more right to it
                if (leader in has_chunk or waits.is_ending(leader)) and waits.goes_on(request):
                    return
                self._extend_match(request)
            start = request.num_planned_tokens
            plan_chunk(request)
            if request in has_chunk:
                if waits.begin(request):
                    self._journal.admitted(request, start)
                self._count_admission(request, start)

        def has_room_for_head() -> bool:
            return bool(self._waiting) and room.tokens_for(self._waiting.head) > 0

        def admit(rival: Request | None) -> None:
            """Admit requests while there is room; with a rival, only those that go before it."""
            if not self._waiting.may_admit or not has_room_for_head():
                return
            # Counted once: the chunks planned below change no other request's need.
            still_needed = self._holdings.pages_still_needed(running)
            for _ in range(MAX_ADMISSIONS_PER_STEP):
                if not has_room_for_head():
                    return
                if rival is not None and not goes_before(self._waiting.head, rival):
                    return
                request = self._admit_next(running, still_needed)
                if request is None:
                    return
                if waits is None:
                    self._count_admission(request, request.num_planned_tokens)
                    plan_chunk(request)
                else:
                    waits.admit(request, self._waiting.next_few())
                    begin_or_wait(request, waits)
                still_needed += self._holdings.pages_still_needed([request])

        if prefilling and self._shares.compete:
            admit(prefilling[0])
        for request in prefilling:
            go_on(request)
        admit(None)

    def _extend_match(self, request: Request) -> None:
        self._holdings.extend_match(request, self._prompt_logprobs.matchable_tokens(request))

    def _next_chunk(self, request: Request, most_tokens: int) -> Chunk | None:
        """The next chunk of a prompt, of up to `most_tokens`; None if this or the pages allow none."""
        start = request.num_planned_tokens
        capacity_tokens = self._holdings.capacity_tokens(request)
        num_tokens = min(most_tokens, self._chunk_tokens, len(request.feed) - start, capacity_tokens - start)
        if num_tokens <= 0:
            return None
        end = start + num_tokens
        if end < len(request.feed):
            # So results depend less on how a prompt is cut; a step with less room than that cuts anywhere.
            whole = end // self._chunk_multiple * self._chunk_multiple
            end = whole if whole > start else end
        end = self._holdings.end_of_chunk(request, end)
        samples = end == len(request.feed)
        request.move_to(RequestState.DECODE if samples else RequestState.PREFILL)
        grown = self._holdings.grow(request, end)
        assert grown, "the pages that were counted are not there"
        snapshot = self._holdings.save_inside(request, end)
        wants_prompt = self._prompt_logprobs.is_collecting(request)
        targets = request.feed[start + 1 : end + 1].tobytes() if wants_prompt else b""
        request.num_planned_tokens = end
        request.steps_in_flight += 1
        # Later chunks of this step may read these pages: each layer stores all keys and values of the step
        # before it attends.
        self._holdings.share(request)
        return Chunk(request.row, start, request.feed[start:end].tobytes(), samples, targets, snapshot)

    def _admit_next(self, running: list[Request], pages_still_needed: int) -> Request | None:
        """Admit the next waiting request, with a row and its cached prefix; None = none can be admitted.

        Args:
            pages_still_needed: pages that the running requests still need.
        """
        request = self._waiting.admit_next(pages_still_needed if running else None)
        if request is None:
            return None
        insort(running, request, key=by_seniority)
        self._journal.admitted(request, request.num_planned_tokens)
        request.move_to(RequestState.PREFILL)
        return request

    def _count_admission(self, request: Request, num_cached_tokens: int) -> None:
        """Count what a prompt found in the cache, when its computation begins for the first time."""
        if not request.was_admitted:  # False when it returns after a preemption
            request.was_admitted = True
            request.num_cached_tokens = num_cached_tokens
            self._stats.num_prompt_tokens += len(request.prompt)
            self._stats.num_cached_tokens += num_cached_tokens
            self._shares.charge_prompt(request)
