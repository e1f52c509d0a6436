"""Random requests for a soak, and a loop that serves them and checks every answer. No torch.

Lengths are uniform on a logarithmic scale, so short ones are common and the longest do occur.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from minisgl.ipc.messages import AddRequest
from minisgl.request import FinishReason, RequestOutput, SamplingParams

STRETCH = 50
"""Requests. `RequestMix.special` holds in one of ten such stretches."""
NUM_REMEMBERED = 32
"""A prompt may begin as one of this many earlier ones does."""
SPECIAL = (
    SamplingParams(repetition_penalty=1.1, presence_penalty=0.5, seed=1),
    SamplingParams(logprobs=3, seed=2),
    SamplingParams(logit_bias={5: 3.0}, logprobs=0, seed=3),
)
"""One request of each kind of step that is recorded when it is first needed."""


@dataclass(frozen=True, kw_only=True)
class RequestMix:
    """What the requests are like. Shares are from 0 to 1."""

    max_prompt_tokens: int = 4096
    max_output_tokens: int = 512
    special: float = 0.2
    """Share of requests with penalties, biases or log probabilities, in one of ten stretches: all rows beside
    them take their kind of step, and the plain ones must occur too."""
    aborted: float = 0.02
    """Share of requests whose client leaves after some tokens."""
    shared: float = 0.2
    """Share of prompts that begin as an earlier one does."""
    salted: float = 0.0
    """Share of requests with one of two cache salts."""
    prior: float = 0.0
    """Share of requests with a higher priority."""


class Asked(NamedTuple):
    """One request, and when its client leaves."""

    prompt: np.ndarray  # int32 [tokens]
    params: SamplingParams
    streamed: bool
    leaves_after: int | None  # tokens
    cache_salt: str = ""
    priority: int = 0


class Serves(Protocol):
    """The part of an engine that a soak uses."""

    @property
    def has_work(self) -> bool: ...

    def add(self, request: AddRequest) -> None: ...

    def abort(self, request_id: int) -> None: ...

    def step(self) -> list[RequestOutput]: ...


def random_requests(
    rng: np.random.Generator, num_requests: int, mix: RequestMix, context: int, vocab_size: int
) -> Iterator[Asked]:
    """Requests that fit `context` tokens."""
    earlier: list[np.ndarray] = []
    longest_output = min(mix.max_output_tokens, context // 2)
    longest_prompt = min(mix.max_prompt_tokens, context - longest_output)
    for index in range(num_requests):
        num_prompt, num_output = log_uniform(rng, longest_prompt), log_uniform(rng, longest_output)
        prompt = rng.integers(0, vocab_size, num_prompt).astype(np.int32)
        if earlier and rng.random() < mix.shared:
            beginning = earlier[int(rng.integers(len(earlier)))][: num_prompt - 1]
            prompt[: len(beginning)] = beginning
        earlier = [*earlier[1 - NUM_REMEMBERED :], prompt]
        leaves = rng.random() < mix.aborted
        special = mix.special if index // STRETCH % 10 == 2 else 0.0
        yield Asked(
            prompt,
            _random_params(rng, num_output, special, vocab_size),
            bool(rng.random() < 0.5),
            int(rng.integers(0, num_output)) if leaves else None,
            str(rng.choice(["a", "b"])) if rng.random() < mix.salted else "",
            int(rng.random() < mix.prior),
        )


def soak(
    engine: Serves,
    requests: Sequence[Asked],
    rng: np.random.Generator,
    most_open: int,
    *,
    on_ended: Callable[[int], None] = lambda num_ended: None,
    expected: Callable[[Asked], Sequence[int]] | None = None,
) -> list[str]:
    """Run the requests, from one to `most_open` at once; returns what went wrong, one line each.

    Each request must get one final output, nothing after it, and the right number of tokens.

    Args:
        on_ended: called with the number of requests that have ended.
        expected: the tokens that a request gets if nobody aborts it. None: only their number is checked.
    """
    problems: list[str] = []
    received: dict[int, list[int]] = {}
    next_request = num_ended = 0
    target = most_open
    while next_request < len(requests) or received:
        while next_request < len(requests) and len(received) < target:
            engine.add(_message(next_request, requests[next_request]))
            received[next_request] = []
            next_request += 1
        if not engine.has_work:
            problems += [f"request {request_id} never ended" for request_id in received]
            received.clear()
            continue
        for output in engine.step():
            if output.request_id not in received:
                problems.append(f"request {output.request_id} got an output after its end")
                continue
            asked, tokens = requests[output.request_id], received[output.request_id]
            tokens += output.token_ids
            if output.finish_reason is None:
                if asked.leaves_after is not None and len(tokens) >= asked.leaves_after:
                    engine.abort(output.request_id)
                continue
            del received[output.request_id]
            problems += _problems_of(output, asked, len(tokens))
            if expected is not None and tokens != list(expected(asked))[: len(tokens)]:
                problems.append(f"request {output.request_id} got wrong tokens")
            num_ended += 1
            on_ended(num_ended)
            if rng.random() < 0.02:
                target = int(rng.integers(1, most_open + 1))
    while engine.has_work:
        problems += [f"request {one.request_id} got an output after its end" for one in engine.step()]
    return problems


def with_length(params: SamplingParams, num_tokens: int) -> SamplingParams:
    """The same parameters, for exactly `num_tokens` tokens."""
    given = {name: getattr(params, name) for name in params.__struct_fields__}
    return SamplingParams(**given | {"max_tokens": num_tokens, "ignore_eos": True})


def log_uniform(rng: np.random.Generator, largest: int) -> int:
    """A whole number from 1 to `largest`, each order of magnitude as likely as the next."""
    return int(np.exp(rng.uniform(0.0, np.log(largest + 1))))


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """The slope of the line through (x, y) points by least squares; None with fewer than three."""
    if len(points) < 3:
        return None
    x, y = np.array(points, np.float64).T
    return float(np.polyfit(x - x.mean(), y, 1)[0])


def _message(request_id: int, asked: Asked) -> AddRequest:
    return AddRequest(
        request_id,
        asked.prompt.astype("<i4").tobytes(),
        asked.params,
        asked.priority,
        asked.streamed,
        cache_salt=asked.cache_salt,
    )


def _problems_of(output: RequestOutput, asked: Asked, num_received: int) -> list[str]:
    """What is wrong with a request that has ended."""
    wanted = asked.params.max_tokens or 0
    expected = {FinishReason.LENGTH: num_received == wanted}
    if asked.params.stop_token_ids:
        expected[FinishReason.STOP] = 1 <= num_received <= wanted
    if asked.leaves_after is not None:
        expected[FinishReason.ABORT] = asked.leaves_after <= num_received <= wanted
    if output.finish_reason is not None and expected.get(output.finish_reason):
        return []
    return [
        f"request {output.request_id} of {wanted} tokens got {num_received} and ended by "
        f"{output.finish_reason}: {output.error_message}"
    ]


def _random_params(
    rng: np.random.Generator, num_tokens: int, special: float, vocab_size: int
) -> SamplingParams:
    """`special`: how likely it is one of `SPECIAL`."""
    if rng.random() < special:
        return with_length(SPECIAL[int(rng.integers(len(SPECIAL)))], num_tokens)
    return SamplingParams(
        max_tokens=num_tokens,
        ignore_eos=True,
        temperature=float(rng.choice([0.0, 0.6, 1.0])),
        top_k=int(rng.choice([0, 1, 40])),
        top_p=float(rng.choice([1.0, 0.9])),
        min_p=float(rng.choice([0.0, 0.05])),
        seed=int(rng.integers(1 << 62)),
        stop_token_ids=(int(rng.integers(vocab_size)),) if rng.random() < 0.1 else (),
    )
