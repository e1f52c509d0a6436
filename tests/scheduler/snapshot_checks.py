"""What every wait for a snapshot promises, recomputed for each plan."""

from minisgl.request import Request, RequestState
from minisgl.scheduler.plan import Chunk, StepPlan
from minisgl.scheduler.scheduler import Scheduler


def waiting(scheduler: Scheduler) -> dict[int, int]:
    """Which requests have computed nothing since they got a row, and for whom they waited last."""
    waits = scheduler._prompts._waits
    if waits is None:
        return {}
    return {
        request.request_id: wait.leader.request_id
        for request, wait in waits._waits.items()
        if wait.leader is not None and request in scheduler._running
    }


class WaitChecks:
    """Notes which prompts a plan tries to go on with."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._tried: set[Request] = set()
        self.num_waits = 0
        plan_chunk = scheduler._prompts._next_chunk

        def noted(request: Request, most_tokens: int) -> Chunk | None:
            self._tried.add(request)
            return plan_chunk(request, most_tokens)

        scheduler._prompts._next_chunk = noted

    def check(self, plan: StepPlan | None) -> None:
        """Check the newest plan: who was left out waits, and it computes a part of what they wait for."""
        tried, self._tried = self._tried, set()
        running = [one for one in self._scheduler._running if not one.is_preempting]
        left_out = [one for one in running if one.state is RequestState.PREFILL and one not in tried]
        waits = self._scheduler._prompts._waits
        if plan is None or waits is None:
            assert plan is None or not left_out
            return
        rows = {chunk.row for chunk in plan.chunks}
        for request in left_out:
            wait = waits._waits[request]
            assert wait.leader is not None
            in_flight = wait.leader.state is RequestState.DECODE and wait.leader.steps_in_flight > 0
            assert wait.leader.row in rows or in_flight, "a request waits for one that computes nothing"
            assert wait.leader not in left_out
            assert request.steps_in_flight == 0
            assert request.num_planned_tokens < wait.end < len(request.feed)
            assert request.feed[: wait.end].tolist() == wait.leader.feed[: wait.end].tolist()
            assert request.cache_salt == wait.leader.cache_salt
            self.num_waits += 1
