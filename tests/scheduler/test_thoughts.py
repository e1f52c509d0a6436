"""The limit of thoughts: against a plain rule on whole outputs, for random outputs of every format."""

import random

import msgspec
import numpy as np
import pytest
from thought_rule import tokens_after

from minisgl.errors import RequestError
from minisgl.request import SamplingParams, ThoughtLimit
from minisgl.scheduler.request_factory import RequestFactory
from minisgl.scheduler.thoughts import ThoughtTracker

VOCAB_SIZE = 70
OPEN, CLOSE, TEXT = 65, 66, 7
HARMONY = {"open": (60, 61, 62), "close": (63, 64, 65), "may_reopen": True, "instead": (3, 4)}
KINDS = {
    "prompt opened": {"open": (OPEN,), "close": (CLOSE,), "is_open": True},
    "may open": {"open": (OPEN,), "close": (CLOSE,)},
    "anywhere": {"open": (OPEN, 5), "close": (CLOSE,), "may_reopen": True},
    "long end": {"open": (OPEN,), "close": (CLOSE, 8, 9), "is_open": True},
    "harmony": HARMONY,
}


def allowed(tracker: ThoughtTracker) -> frozenset[int]:
    mask = np.full(-(-VOCAB_SIZE // 32), -1, "<i4")
    tracker.restrict(mask)
    return frozenset(t for t in range(VOCAB_SIZE) if mask.view("<u4")[t // 32] >> (t % 32) & 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_tokens", [0, 1, 2, 5])
def test_the_tokens_that_may_follow_are_those_of_the_rule(kind: str, max_tokens: int) -> None:
    limit = ThoughtLimit(max_tokens, **KINDS[kind])  # type: ignore[arg-type]
    runs = [limit.open, limit.open[:1], limit.close[:1], limit.close, limit.instead, (TEXT,)]
    num_forced = 0
    for seed in range(150):
        source = random.Random(seed)
        tracker, output = ThoughtTracker(limit), list[int]()
        wanted: list[int] = []
        behind = ThoughtTracker(limit)  # knows the output but for its last tokens, as with overlap
        for index in range(14):
            expected = tokens_after(limit, output, VOCAB_SIZE)
            assert allowed(tracker) == expected, output
            if len(expected) < VOCAB_SIZE:
                num_forced += 1
                assert tracker.may_restrict(index), output
                assert behind.may_restrict(index), output
            wanted = wanted or [*source.choice(runs), TEXT]
            token = wanted.pop(0)
            token = token if token in expected else source.choice(sorted(expected))
            tracker.advance(token)
            if output:
                behind.advance(output[-1])
            output.append(token)
    assert num_forced


def test_steps_wait_for_no_mask_far_from_the_limit_and_after_the_thought() -> None:
    tracker = ThoughtTracker(ThoughtLimit(10, (OPEN,), (CLOSE,), is_open=True))
    assert [index for index in range(14) if tracker.may_restrict(index)] == [10, 11, 12, 13]
    for _ in range(3):
        tracker.advance(TEXT)
    tracker.advance(CLOSE)
    assert not any(tracker.may_restrict(index) for index in range(4, 40))


def test_a_limit_without_a_format_and_unknown_tokens_are_refused() -> None:
    factory = RequestFactory(max_context_tokens=64, vocab_size=VOCAB_SIZE, eos_token_ids=(2,))
    factory.check(SamplingParams(thinking_token_budget=-1))
    with pytest.raises(RequestError, match="conversation") as refused:
        factory.check(SamplingParams(thinking_token_budget=0))
    assert refused.value.param == "thinking_token_budget"
    with pytest.raises(RequestError, match="token ids"):
        factory.check(SamplingParams(thought_limit=ThoughtLimit(3, (OPEN,), (VOCAB_SIZE,))))


def test_a_limit_travels_in_messages() -> None:
    limit = ThoughtLimit(5, **HARMONY)  # type: ignore[arg-type]
    params = SamplingParams(thought_limit=limit)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
