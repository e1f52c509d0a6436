"""The open requests of one engine, with everything that is needed to send them to its next life.

Promise: a request's output here is what its reader was given, token for token. A request that has ended, or
that was aborted, is forgotten.
"""

from array import array
from collections.abc import Iterator

import msgspec

from minisgl.ipc.calls import one_request
from minisgl.ipc.messages import AddRequest, StepOutput

NEAR_TOKENS = 4
"""A crash counts against a request that has generated at most so many tokens since the crash before. Steps in
flight at a crash have two or three tokens that the server never got."""
SUSPECT_AFTER = 2
GUILTY_AFTER = 3
"""Numbers of crashes at about the same place. In the last one the request was alone."""


class SentRequest:
    """One request that was given to an engine, and its output so far."""

    __slots__ = ("crashed_at", "index", "message", "num_crashes", "output", "sent_to")

    def __init__(self, message: AddRequest, index: int) -> None:
        self.message = message
        self.index = index  # in `message`
        self.output = array("i")
        self.sent_to = 0  # the life of the engine that has it; 0 = none
        self.num_crashes = 0  # of engines that had it, since it last got further
        self.crashed_at = 0  # tokens that it had at the last of them

    @property
    def request_id(self) -> int:
        return self.message.request_id + self.index

    @property
    def prompt_ids(self) -> bytes:
        """Little-endian int32."""
        prompts = (self.message.prompt_ids, *self.message.more_prompts)
        return prompts[self.index // self.message.num_choices]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids) // 4

    @property
    def is_past_its_crash(self) -> bool:
        """Whether it has got further than where the engine crashed."""
        return len(self.output) > self.crashed_at + NEAR_TOKENS

    @property
    def is_suspect(self) -> bool:
        """Whether the engine crashed twice while it was at about the same place."""
        return self.num_crashes >= SUSPECT_AFTER

    @property
    def is_guilty(self) -> bool:
        """Whether the engine crashed on it again, when it was alone."""
        return self.num_crashes >= GUILTY_AFTER

    def count_crash(self) -> None:
        """The engine that had it has crashed."""
        self.num_crashes = 1 if self.is_past_its_crash else self.num_crashes + 1
        self.crashed_at = len(self.output)
        self.sent_to = 0

    def acquit(self) -> None:
        """It got past the place of the crash, alone."""
        self.num_crashes = 0


class SentRequests:
    """The open requests, in the order in which they came."""

    def __init__(self) -> None:
        self._requests: dict[int, SentRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[SentRequest]:
        return iter(self._requests.values())

    def add(self, message: AddRequest, sent_to: int) -> None:
        """Keep the requests of a message that the engine's life `sent_to` gets; 0 = none gets it yet."""
        for index in range(message.num_requests):
            request = SentRequest(message, index)
            request.sent_to = sent_to
            self._requests[request.request_id] = request

    def adopt(self, request: SentRequest) -> None:
        """Keep a request that another engine has given up; this one has not got it yet."""
        request.sent_to = 0
        self._requests[request.request_id] = request

    def forget(self, request_id: int) -> None:
        """Forget a request that was aborted. The id of an ended request is ignored."""
        self._requests.pop(request_id, None)

    def take_output(self, step: StepOutput) -> None:
        """Keep the new tokens, and forget the requests that have ended."""
        for output in step.outputs:
            if output.finish_reason is not None:
                self._requests.pop(output.request_id, None)
            elif output.request_id in self._requests:
                self._requests[output.request_id].output.extend(output.token_ids)

    def suspects(self) -> list[SentRequest]:
        """Those that must be tried alone."""
        return [request for request in self if request.is_suspect]

    def lose(self, life: int, *, is_crash: bool = True) -> list[SentRequest]:
        """The life of the engine has ended. Returns the requests that it must not get again."""
        for request in self:
            if request.sent_to == life and is_crash:
                request.count_crash()
            elif request.sent_to == life:
                request.sent_to = 0
        return [request for request in self if request.is_guilty]

    def unsent(self, life: int, waiting_since_s: float) -> Iterator[AddRequest]:
        """Messages for the requests that this life of the engine has not got; they count as sent to it.

        Messages that no engine has answered yet are given as they were, so that their requests share prompt
        and grammar. Requests may be added and forgotten between two messages.
        """
        for request in list(self):
            message = request.message
            if request.sent_to == life or request.request_id not in self:
                continue
            whole = range(message.request_id, message.request_id + message.num_requests)
            own = [self._requests[one] for one in whole if one in self]
            if len(own) == len(whole) and not any(one.output or one.sent_to == life for one in own):
                for one in own:
                    one.sent_to = life
                yield with_waiting_since(message, waiting_since_s)
            else:
                yield self.again(request, life, waiting_since_s)

    def again(self, request: SentRequest, life: int, waiting_since_s: float) -> AddRequest:
        """The message that sends one request to this life of the engine, behind its output."""
        request.sent_to = life
        since_s = max(waiting_since_s, request.message.arrived_s)
        return one_request(request.message, request.index, request.output, since_s)


def with_waiting_since(message: AddRequest, waiting_since_s: float) -> AddRequest:
    """The same message for requests that waited for the engine: since then, or since they arrived."""
    since_s = max(waiting_since_s, message.arrived_s)
    return msgspec.structs.replace(message, waiting_since_s=since_s)
