"""Log probabilities on their way from the device to the outputs that asked for them.

Promise: an output has one entry for each of its tokens; those of a prompt come complete and once, however
often the prompt was computed.
"""

from collections.abc import Sequence

import numpy as np

from minisgl.request import Request, RequestOutput, TokenLogprobs
from minisgl.scheduler.plan import Chunk

LOWEST = -9999.0
"""Stands for minus infinity, which JSON has no word for; the number that OpenAI uses."""


class PromptLogprobs:
    """What is known so far of the prompts that nobody has heard of yet."""

    def __init__(self) -> None:
        self._found: dict[int, list[TokenLogprobs]] = {}  # by request id

    def __bool__(self) -> bool:
        """Whether any is wanted."""
        return bool(self._found)

    def want(self, request: Request) -> None:
        """From the beginning, if the request asks for them."""
        if request.params.prompt_logprobs is not None:
            self._found[request.request_id] = []

    def wants(self, request: Request) -> bool:
        """Whether those of its prompt are still to be computed or heard of."""
        return request.request_id in self._found

    def matchable(self, request: Request) -> np.ndarray:
        """The part of its feed that may come from the cache: cached tokens have no logits."""
        return request.feed[:1] if self.wants(request) else request.feed

    def forget(self, request_id: int) -> None:
        self._found.pop(request_id, None)

    def book(self, request: Request, chunk: Chunk, lines: np.ndarray) -> None:
        """Read those of one chunk; lines: int32 [targets, 2 + 2 * k]."""
        found = self._found.get(request.request_id)
        if found is None or not chunk.targets:
            return
        num_top = request.params.prompt_logprobs or 0
        for line, token_id in zip(lines, np.frombuffer(chunk.targets, dtype="<i4").tolist(), strict=True):
            found.append(read_logprobs(line, token_id, num_top))

    def take(self, request: Request) -> list[TokenLogprobs] | None:
        """All of a prompt, once; None = they are not wanted, or are known already."""
        return self._found.pop(request.request_id, None)


def attach_logprobs(
    sampled: Sequence[Request],
    lines: np.ndarray | None,
    prompts: PromptLogprobs,
    outputs: Sequence[RequestOutput],
) -> None:
    """Give a step's outputs the log probabilities that their requests asked for.

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
            num_top = request.params.logprobs or 0
            output.logprobs = [read_logprobs(lines[index], token, num_top) for token in output.token_ids]
        output.prompt_logprobs = prompts.take(request)


def read_logprobs(line: np.ndarray, token_id: int, num_top: int) -> TokenLogprobs:
    """One line (int32 [2 + 2 * k], `engine.logits.pack_logprobs`) with its first `num_top` top tokens."""
    k = (len(line) - 2) // 2
    values = line.view(np.float32)
    return TokenLogprobs(
        token_id,
        max(float(values[0]), LOWEST),
        int(line[1]) + 1,
        line[2 : 2 + min(num_top, k)].tolist(),
        [max(value, LOWEST) for value in values[2 + k : 2 + k + min(num_top, k)].tolist()],
    )
