"""Counts what a call uses: against its user's limits, in the statistics, and as a line of the usage log.

Promise: tokens are counted as the answer's usage counts them, once, whether or not the client reads them. A
call that the engine got has exactly one line in the usage log.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

from minisgl.request import FinishReason
from minisgl.server.keys.limits import LimitReachedError
from minisgl.server.keys.usage_log import UsageLog
from minisgl.server.keys.users import User
from minisgl.server.stats import ServerStats


class CallNote(NamedTuple):
    """What the usage log says of a call besides its counts."""

    request_id: str
    endpoint: str
    arrived_at: float  # time.monotonic()
    model: str


class CallMeter:
    """The counts of one call. `Meters.call` makes it.

    Args:
        n: choices for each prompt.
    """

    def __init__(self, user: User, n: int, stats: ServerStats) -> None:
        self.user = user
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.finish_reasons: dict[str, int] = {}
        self.was_sent = False
        self._stats = stats
        self._n = n
        self._cached: dict[int, int] = {}  # of each prompt's first choice

    @property
    def num_cached_tokens(self) -> int:
        return sum(self._cached.values())

    def take_prompts(self, num_tokens: int) -> None:
        """Count the tokens of the call's prompts, each prompt once.

        Raises:
            RequestError: as `User.take_prompt`.
        """
        self.user.take_prompt(num_tokens)
        self.num_prompt_tokens = num_tokens

    def count_sent(self) -> None:
        """The engine gets the call."""
        self.was_sent = True
        self._count_tokens("prompt", self.num_prompt_tokens)

    def count_output(self, choice: int, num_tokens: int, num_cached_tokens: int) -> None:
        """Count new tokens of a choice, and how many of its prompt's tokens were cached."""
        self.num_output_tokens += num_tokens
        self.user.take_output(num_tokens)
        self._count_tokens("output", num_tokens)
        if choice % self._n == 0:
            more = num_cached_tokens - self._cached.get(choice, 0)
            if more > 0:
                self._cached[choice] = num_cached_tokens
                self._count_tokens("cached", more)

    def count_end(self, reason: FinishReason) -> None:
        """Count a request of the call that has ended."""
        self.finish_reasons[reason.value] = self.finish_reasons.get(reason.value, 0) + 1
        self._add(self._stats.key_requests, reason.value, 1)

    def count_refusal(self, limit: str) -> None:
        """Count a call that was refused because of this limit."""
        self._add(self._stats.key_refusals, limit, 1)

    def _count_tokens(self, kind: str, num_tokens: int) -> None:
        self._add(self._stats.key_tokens, kind, num_tokens)

    def _add(self, counts: dict[str, int], kind: str, more: int) -> None:
        """Add to the user's count of this kind. Callers that are not told apart have none."""
        if self.user.name:
            key = f"{self.user.name} {kind}"
            counts[key] = counts.get(key, 0) + more


class Meters:
    """Makes the meters of calls.

    Args:
        usage_log: gets a line for each call; None = there is none.
    """

    def __init__(self, stats: ServerStats, usage_log: UsageLog | None) -> None:
        self._stats = stats
        self._usage_log = usage_log

    @contextlib.contextmanager
    def call(self, user: User, num_requests: int, n: int, note: CallNote) -> Iterator[CallMeter]:
        """Admit a call of `num_requests` requests, `n` for each prompt; count it until the block ends.

        Raises:
            RequestError: as `User.admit`.
        """
        meter = CallMeter(user, n, self._stats)
        try:
            user.admit(num_requests)
            try:
                yield meter
            except LimitReachedError:
                user.take_back()
                raise
            finally:
                user.num_open -= num_requests
                if meter.was_sent:
                    self._write(meter, note)
                else:
                    user.take_output(-meter.num_prompt_tokens)
        except LimitReachedError as error:
            meter.count_refusal(error.limit)
            raise

    def _write(self, meter: CallMeter, note: CallNote) -> None:
        if self._usage_log is None:
            return
        self._usage_log.write(
            {
                "time": round(time.time(), 3),
                "key": meter.user.name or None,
                "request_id": note.request_id,
                "endpoint": note.endpoint,
                "model": note.model,
                "prompt_tokens": meter.num_prompt_tokens,
                "cached_tokens": meter.num_cached_tokens,
                "output_tokens": meter.num_output_tokens,
                "finish_reasons": meter.finish_reasons,
                "duration_s": round(time.monotonic() - note.arrived_at, 4),
            }
        )
