"""Attaches log probabilities to the outputs of the requests that asked for them.

Promise: an output has one entry for each of its tokens. A prompt's entries come once and complete, even if
the prompt was computed more than once.
Shapes: k = top tokens per line.
"""

from collections.abc import Sequence

import numpy as np

from minisgl.request import LOWEST_LOGPROB, PackedLogprobs, Request, RequestOutput, TokenLogprobs
from minisgl.scheduler.plan import Chunk


class PromptLogprobs:
    """Collects the log probabilities of prompts, chunk by chunk, until they are sent."""

    def __init__(self) -> None:
        # Request id -> the target ids and lines of each chunk so far.
        self._found: dict[int, list[tuple[bytes, np.ndarray]]] = {}

    def __bool__(self) -> bool:
        """Whether any request's prompt is being collected."""
        return bool(self._found)

    def start(self, request: Request) -> None:
        """Start with an empty list for the request, if it asks for its prompt's log probabilities."""
        if request.params.prompt_logprobs is not None:
            self._found[request.request_id] = []

    def is_collecting(self, request: Request) -> bool:
        """Whether the request's prompt is being collected and was not sent yet."""
        return request.request_id in self._found

    def matchable_tokens(self, request: Request) -> np.ndarray:
        """The part of the request's feed that may come from the cache; cached tokens have no logits."""
        return request.feed[:1] if self.is_collecting(request) else request.feed

    def forget(self, request_id: int) -> None:
        self._found.pop(request_id, None)

    def add_chunk(self, request: Request, chunk: Chunk, lines: np.ndarray) -> None:
        """Add one chunk's log probabilities; lines: int32 [targets, 2 + 2 * k]."""
        found = self._found.get(request.request_id)
        if found is None or not chunk.targets:
            return
        k = (lines.shape[1] - 2) // 2
        num_top = min(request.params.prompt_logprobs or 0, k)
        found.append((chunk.targets, lines[:, [*range(2 + num_top), *range(2 + k, 2 + k + num_top)]]))

    def pop(self, request: Request) -> PackedLogprobs | None:
        """Return and forget a prompt's log probabilities; None = not asked for, or sent already."""
        found = self._found.pop(request.request_id, None)
        if found is None:
            return None
        return PackedLogprobs(
            b"".join(targets for targets, _ in found),
            b"".join(lines.astype("<i4", copy=False).tobytes() for _, lines in found),
        )


def attach_logprobs(
    sampled: Sequence[Request],
    lines: np.ndarray | None,
    prompts: PromptLogprobs,
    outputs: Sequence[RequestOutput],
) -> None:
    """Attach to a step's outputs the log probabilities that their requests asked for.

    Args:
        lines: int32 [R, 2 + 2 * k], one for each of `sampled`.
    """
    by_request = {output.request_id: output for output in outputs}
    for index, request in enumerate(sampled):
        output = by_request.get(request.request_id)
        if output is None:
            continue
        if request.wants_logprobs:
            assert lines is not None, "log probabilities were planned and did not come"
            num_top = request.params.num_top_logprobs
            output.logprobs = [read_logprobs(lines[index], token, num_top) for token in output.token_ids]
        output.prompt_logprobs = prompts.pop(request)


def read_logprobs(line: np.ndarray, token_id: int, num_top: int) -> TokenLogprobs:
    """Unpack a line (int32 [2 + 2 * k], `engine.step.logits.pack_logprobs`), keeping `num_top` top tokens."""
    k = (len(line) - 2) // 2
    values = line.view(np.float32)
    return TokenLogprobs(
        token_id,
        max(float(values[0]), LOWEST_LOGPROB),
        int(line[1]) + 1,
        line[2 : 2 + min(num_top, k)].tolist(),
        [max(value, LOWEST_LOGPROB) for value in values[2 + k : 2 + k + min(num_top, k)].tolist()],
    )
