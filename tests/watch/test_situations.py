"""Made-up situations, each with one cause: the words name it and a knob, and the knob does help."""

from typing import Any

import pytest
from watched_scheduler import STEP_MS, WatchedScheduler

from minisgl.lives import Life, Moment, Phase
from minisgl.server.watch.advice import advice_on
from minisgl.server.watch.words import Cause, SlowClient, causes_of


def main_cause(watched: WatchedScheduler, request_id: int) -> Cause:
    """Its first cause, and the checks that all causes must pass."""
    life = watched.life(request_id)
    causes = causes_of(life)
    assert sum(cause.ms for cause in causes) == pytest.approx(life.total_ms, abs=0.01)
    for cause in causes:
        assert cause.knobs, cause
        assert any(knob in cause.words for knob in cause.knobs), cause
        assert all(not word.startswith("--") or word.strip(",;.") for word in cause.words.split())
    return causes[0]


def waited_ms(watched: WatchedScheduler, request_id: int) -> float:
    return sum(wait.ms for phase in watched.life(request_id).phases for wait in phase.waits)


def run_pool(num_pages: int) -> WatchedScheduler:
    watched = WatchedScheduler(num_pages=num_pages, page_size=4, max_context_tokens=60)
    watched.add(0, 24, max_tokens=20)
    watched.add(1, 24, max_tokens=20)
    watched.step()
    watched.add(2, 24, max_tokens=4)
    watched.run()
    return watched


def test_a_full_pool() -> None:
    watched = run_pool(num_pages=24)
    cause = main_cause(watched, 2)
    assert cause.reason == "pages"
    assert cause.knobs[0] == "--memory-fraction"
    assert (
        "7 needed, 1 free (9 more are kept for the 2 running requests), two requests hold 56 %" in cause.words
    )
    assert waited_ms(run_pool(num_pages=64), 2) < cause.ms / 5, "more pages help"


def run_giant(chunk_tokens: int) -> WatchedScheduler:
    watched = WatchedScheduler(
        num_pages=200, max_step_tokens=16, mixed_step_tokens=16, chunk_tokens=chunk_tokens
    )
    watched.add(0, 400)
    watched.step()
    watched.add(1, 8)
    watched.run()
    return watched


def test_one_giant_prompt() -> None:
    watched = run_giant(chunk_tokens=16)
    cause = main_cause(watched, 1)
    assert cause.reason == "budget"
    assert cause.knobs[0] == "--chunk-tokens"
    assert "they took all 16 prompt tokens of a step, and request 0 had 368 tokens left" in cause.words
    assert waited_ms(run_giant(chunk_tokens=8), 1) < cause.ms / 5, "smaller chunks help"
    own = main_cause(watched, 0)
    assert own.reason == "prompt"
    assert "400 prompt tokens in 25 steps" in own.words
    assert own.knobs[0] == "--mixed-step-tokens"


def run_priorities(priority: int) -> WatchedScheduler:
    watched = WatchedScheduler(max_rows=1, num_pages=64)
    watched.add(0, 8)
    watched.step()
    watched.add(1, 8, priority=priority)
    for number in range(2, 12):
        watched.add(number, 8, priority=2)
    watched.run()
    return watched


def test_priorities() -> None:
    watched = run_priorities(priority=0)
    cause = main_cause(watched, 1)
    assert cause.reason == "priority"
    assert cause.knobs[0] == "priority"
    assert "behind requests of priority 2, as this one has 0" in cause.words
    assert main_cause(watched, 11).reason == "rows", "the first of them wait for rows, not for priority"
    assert waited_ms(run_priorities(priority=2), 1) < cause.ms / 5, "a higher priority helps"


def run_burst(step_tokens: int) -> WatchedScheduler:
    watched = WatchedScheduler(
        num_pages=200, max_step_tokens=step_tokens, mixed_step_tokens=step_tokens, chunk_tokens=step_tokens
    )
    for number in range(6):
        watched.add(number, 200, first_token=5)
    watched.run()
    return watched


def test_a_burst_with_one_prefix() -> None:
    watched = run_burst(step_tokens=16)
    helped = run_burst(step_tokens=200)
    for number in range(1, 6):
        cause = main_cause(watched, number)
        assert cause.reason == "prefix"
        assert cause.knobs[0] == "--mixed-step-tokens"
        assert "of its 200 tokens" in cause.words
        assert waited_ms(helped, number) < cause.ms / 5, "larger steps help"


def run_preempting(num_pages: int) -> WatchedScheduler:
    watched = WatchedScheduler(
        num_pages=num_pages, page_size=4, max_context_tokens=100, output_reserve_tokens=0, prefix_cache=False
    )
    watched.add(0, 12, max_tokens=60)
    watched.add(1, 13, max_tokens=60)
    watched.run()
    return watched


def test_preemption() -> None:
    watched = run_preempting(30)
    life = watched.life(1)
    assert life.num_preemptions == 1
    cause = main_cause(watched, 1)
    assert cause.reason == "preempted"
    assert cause.knobs[0] == "--memory-fraction"
    assert "request 0 needed a page and none was free" in cause.words
    assert "gave back its 15" in cause.words
    helped = run_preempting(64)
    assert helped.life(1).num_preemptions == 0, "more pages help"


def test_a_slow_client() -> None:
    watched = WatchedScheduler()
    watched.add(0, 8)
    watched.run()
    slow = SlowClient("call-0", unsent_bytes=70_000, unread_pieces=12, stalled_ms=4_000.0)
    cause = causes_of(watched.life(0), slow)[0]
    assert cause.reason == "client"
    assert cause.ms == 4_000
    assert "the client reads slowly: 70000 bytes unsent" in cause.words
    assert cause.knobs == ["--request-timeout-s"]


def test_a_grammar_that_is_compiled() -> None:
    watched = WatchedScheduler()
    watched.add(0, 8, json_schema={"type": "object"})
    watched.wait(300)
    assert watched.life(0).state == "grammar"
    assert watched.scheduler.num_waiting == 1

    class Grammar:
        def matcher(self) -> Any:
            return self

        def advance(self, token_ids: Any) -> None: ...

    watched.scheduler.start_with_grammar(0, Grammar())
    watched.record()
    watched.scheduler.abort(0)
    watched.record()
    cause = main_cause(watched, 0)
    assert cause.reason == "grammar"
    assert cause.ms == 300
    assert cause.knobs == ["response_format"]


def run_rows(max_rows: int) -> WatchedScheduler:
    watched = WatchedScheduler(max_rows=max_rows)
    for number in range(4):
        watched.add(number, 8, max_tokens=12)
    watched.run()
    return watched


def test_rows_used_up() -> None:
    watched = run_rows(2)
    cause = main_cause(watched, 3)
    assert cause.reason == "rows"
    assert cause.ms == 12 * STEP_MS
    assert cause.knobs == ["--max-running-requests"]
    assert "all 2 were taken" in cause.words
    assert waited_ms(run_rows(4), 3) == 0, "more rows help"


@pytest.mark.parametrize(
    ("code", "knob"),
    [
        ("too_many_requests", "--max-queued-requests"),
        ("too_many_tokens", "--max-queued-tokens"),
        ("loading", "/health/ready"),
        ("shutting_down", "--drain-timeout-s"),
    ],
)
def test_refusals_of_a_full_queue_a_start_and_a_stop(code: str, knob: str) -> None:
    moment = Moment(
        number=1, kind="refused", reason=code, at=0, until=0, count=3, worst_ms=0, usual_ms=0, figures={}
    )
    advice = advice_on(moment)
    assert advice.knobs[0] == knob
    assert advice.words.startswith("3 requests were refused: ")
    assert knob in advice.words


@pytest.mark.parametrize(
    ("num_chunks", "knobs"), [(1, ["prompt"]), (3, ["--mixed-step-tokens", "--max-step-tokens"])]
)
def test_a_prompt_that_took_one_step_is_not_told_to_take_fewer(num_chunks: int, knobs: list[str]) -> None:
    chunks = [(float(number + 1), 7) for number in range(num_chunks)]
    phase = Phase("prompt", 0.0, 9.0, [], chunks, {"tokens": 7 * num_chunks, "cached_tokens": 16})
    life = Life(
        number=1,
        id="a",
        state="decoding",
        arrived_at=0.0,
        total_ms=9.0,
        first_token_ms=9.0,
        prompt_tokens=7 * num_chunks + 16,
        cached_tokens=16,
        output_tokens=1,
        priority=0,
        num_preemptions=0,
        ahead=None,
        end=None,
        error_code="",
        phases=[phase],
    )
    (cause,) = causes_of(life)
    assert cause.knobs == knobs
    assert ("fewer steps" in cause.words) is (num_chunks > 1)
