"""The real scheduler, the engine's watch over it, and a clock that a test moves."""

from typing import Any

import numpy as np
from scheduler_rig import build

from minisgl.engine.watch.lives import Lives
from minisgl.engine.watch.moments import Moments
from minisgl.ipc.messages import AddRequest
from minisgl.ipc.questions import AskRequests
from minisgl.lives import Life
from minisgl.request import SamplingParams
from minisgl.scheduler.plan import StepPlan

STEP_MS = 10.0


class WatchedScheduler:
    """Steps of `STEP_MS` each, with one in flight if `overlap`. Times are milliseconds since the start."""

    def __init__(self, *, overlap: bool = False, **limits: Any) -> None:
        self.scheduler, self.executor, self.cache = build(**limits)
        self.moments = Moments()
        self.lives = Lives(self.moments)
        self.now_ms = 1000.0
        self.outputs = 0
        self._overlap = overlap
        self._launched: list[tuple[StepPlan, list[int]]] = []

    def record(self, call: AddRequest | None = None) -> None:
        self.lives.record(self.scheduler.journal.take(), int(self.now_ms * 1e3), call)

    def wait(self, ms: float) -> None:
        """Let time pass while the engine does something else."""
        self.now_ms += ms

    def add(
        self,
        request_id: int,
        num_prompt_tokens: int,
        max_tokens: int = 4,
        *,
        priority: int = 0,
        first_token: int | None = None,
        arrived_ms: float = 0.0,
        **params: Any,
    ) -> None:
        """Add a request of a prompt of its own, or one that begins as others with the same `first_token`."""
        start = 4 + 7 * request_id if first_token is None else first_token
        prompt = (np.arange(start, start + num_prompt_tokens) % 46 + 4).astype(np.int32)
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=not params, temperature=0, **params)
        call = AddRequest(
            request_id,
            prompt.astype("<i4").tobytes(),
            sampling,
            call_id=f"call-{request_id}",
            arrived_s=arrived_ms / 1e3,
        )
        self.scheduler.add(request_id, prompt, sampling, priority)
        self.record(call)

    def step(self) -> None:
        plan = self.scheduler.plan()
        self.record()
        if plan is not None:
            self._launched.append((plan, self.executor.execute(plan)))
        self.now_ms += STEP_MS
        keep = 1 if self._overlap and plan is not None else 0
        while len(self._launched) > keep:
            self.scheduler.apply(*self._launched.pop(0))
            self.record()
        self.outputs += len(self.scheduler.take_outputs())

    def run(self, max_steps: int = 5000) -> None:
        """Step to the end."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")

    def tell(self, **ask: Any) -> list[Life]:
        """Lives, the newest first."""
        requests, queue = self.scheduler.open_requests()
        ask = {"limit": 5000} | ask
        question = AskRequests(0, **ask)
        return self.lives.tell(question, int(self.now_ms * 1e3), 0.0, requests, queue).requests

    def life(self, request_id: int) -> Life:
        (found,) = self.tell(number=request_id)
        return found
