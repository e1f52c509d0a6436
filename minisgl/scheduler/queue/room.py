"""How many prompt tokens a step has room for, and for whose prompts."""

from collections.abc import Collection, Sequence

from minisgl.request import Request
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.queue.policy import prefill_budget_tokens
from minisgl.scheduler.queue.shares import Account, is_below_share


class PromptRoom:
    """The prompt tokens that the step being planned may still feed.

    Prompts leave the streams of their step some pace (`policy.prefill_budget_tokens`). A prompt of a user
    below its share owes that to nobody, if only users above theirs stream: it may fill the step.

    Args:
        beside_streams: tokens for prompts that leave the streams their pace.
        whole: tokens that the step has room for.
        streaming: who reads the step's decodes as they come, if users compete.
    """

    def __init__(self, beside_streams: int, whole: int, streaming: Collection[Account]) -> None:
        self._beside_streams = beside_streams
        self._whole = whole
        self._streaming = streaming

    def tokens_for(self, request: Request) -> int:
        """Most tokens of this request's prompt; 0 or less = none."""
        fills = self._streaming and is_below_share(request, self._streaming)
        return self._whole if fills else self._beside_streams

    def take(self, num_tokens: int) -> None:
        """A chunk of so many tokens is planned."""
        self._beside_streams -= num_tokens
        self._whole -= num_tokens


def room_beside(decoding: Sequence[Request], config: SchedulerConfig, *, compete: bool) -> PromptRoom:
    """The prompt tokens that a step has room for beside these decodes.

    Args:
        compete: there is more than one user.
    """
    whole = prefill_budget_tokens(len(decoding), config.max_step_tokens, None)
    if not any(request.streamed for request in decoding):
        return PromptRoom(whole, whole, ())
    beside_streams = prefill_budget_tokens(len(decoding), config.max_step_tokens, config.mixed_step_tokens)
    streaming = {request.account for request in decoding if request.streamed} if compete else ()
    return PromptRoom(beside_streams, whole, streaming)
