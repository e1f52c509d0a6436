"""Requests with a grammar in an engine on a CPU: when they start, how they fail, and what others notice."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_grammar import FakeCompiler, FakeGrammar, allowed, fill_one_by_one, use_fake_grammars
from test_no_token import Answer, ask, run
from test_step_timeline import MODEL, started

from minisgl.engine.engine import Engine
from minisgl.engine.step.inputs import Stager
from minisgl.errors import RequestError
from minisgl.grammar import matcher
from minisgl.grammar.spec import GrammarSpec
from minisgl.ipc.messages import AddRequest
from minisgl.request import RequestOutput, SamplingParams

VOCAB_SIZE = MODEL["vocab_size"]
EOS = 2
SPEC = GrammarSpec("lark", "one")


@pytest.fixture(params=[False, True], ids=["no-overlap", "overlap"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    made = started(tmp_path, MODEL | {"eos_token_id": EOS}, overlap=request.param, page_size=4, num_pages=60)
    yield made
    assert not made.has_work
    made.check_at_idle()
    assert made.num_broken_counts == 0
    assert made.status(0).num_held_rows == made.status(0).num_held_pages == 0
    made.close()


def constrained(request_id: int, spec: GrammarSpec = SPEC, **params: Any) -> Any:
    return ask(request_id, [5, 6, 7], ignore_eos=False, grammar=spec, **params)


def step_until(engine: Engine, answers: dict[int, Answer], num_steps: int) -> None:
    for _ in range(num_steps):
        for output in engine.step():
            answers[output.request_id].take(output)


def test_outputs_follow_their_grammars_and_others_are_as_without(engine: Engine) -> None:
    use_fake_grammars(engine, FakeCompiler(VOCAB_SIZE, EOS))
    plain = [ask(10, [9, 8]), ask(11, [9, 8, 7], temperature=1.0, seed=3, repetition_penalty=1.4)]
    alone = [run(engine, [one])[0].end for one in plain]
    specs = [GrammarSpec("lark", str(number)) for number in range(4)]
    requests = [
        constrained(number, spec, temperature=float(number % 2), logprobs=number, max_tokens=12)
        for number, spec in enumerate(specs)
    ]
    answers = run(engine, [*requests, *plain])
    for spec, answer in zip(specs, answers, strict=False):
        for place, token in enumerate(answer.token_ids):
            assert token in allowed(spec.text, answer.token_ids[:place], VOCAB_SIZE, EOS)
        assert answer.token_ids[-1] == EOS or len(answer.token_ids) == 12
    assert [answer.end for answer in answers[4:]] == alone


def test_a_request_waits_for_its_grammar_and_nobody_waits_for_it(engine: Engine) -> None:
    compiler = FakeCompiler(VOCAB_SIZE, EOS, at_once=False)
    use_fake_grammars(engine, compiler)
    answers = {0: Answer(), 1: Answer()}
    engine.add(constrained(0))
    engine.add(ask(1, [9, 8]))
    while answers[1].final is None:
        step_until(engine, answers, 1)
    assert engine.has_work
    assert engine.status(0).num_waiting == 1
    assert answers[0].token_ids == []
    compiler.finish()
    while engine.has_work:
        step_until(engine, answers, 1)
    assert answers[0].final is not None
    assert answers[0].token_ids


@pytest.mark.parametrize("is_compiled", [False, True])
def test_an_abort_before_the_grammar_is_ready_ends_the_request_at_once(
    engine: Engine, is_compiled: bool
) -> None:
    compiler = FakeCompiler(VOCAB_SIZE, EOS, at_once=False)
    use_fake_grammars(engine, compiler)
    answers = {0: Answer()}
    engine.add(constrained(0))
    step_until(engine, answers, 2)
    if is_compiled:
        compiler.finish()
    engine.abort(0)
    step_until(engine, answers, 1)
    assert answers[0].end[2] == ""
    assert not engine.has_work
    if not is_compiled:
        compiler.finish()
    step_until(engine, answers, 1)


def test_the_grammar_of_a_call_that_has_left_is_not_compiled(engine: Engine) -> None:
    compiler = FakeCompiler(VOCAB_SIZE, EOS, at_once=False)
    use_fake_grammars(engine, compiler)
    answers = {number: Answer() for number in range(3)}
    both = constrained(0)
    engine.add(AddRequest(0, both.prompt_ids, both.params, num_choices=2))
    engine.add(constrained(2, GrammarSpec("lark", "two")))
    engine.abort(0)
    step_until(engine, answers, 1)
    assert [future.cancelled() for _, future in compiler.open] == [False, False], "a choice still waits"
    engine.abort(1)
    step_until(engine, answers, 1)
    assert [future.cancelled() for _, future in compiler.open] == [True, False]
    compiler.finish()
    compiler.finish()
    while engine.has_work:
        step_until(engine, answers, 1)
    assert [answers[number].end[2] for number in (0, 1, 2)] == ["", "", ""]
    assert answers[2].token_ids


def test_a_full_queue_of_grammars_refuses_new_requests_only(engine: Engine) -> None:
    compiler = FakeCompiler(VOCAB_SIZE, EOS)
    use_fake_grammars(engine, compiler)
    new = constrained(0)
    run(engine, [new, msgspec.structs.replace(new, request_id=1, waiting_since_s=1.0)])
    assert compiler.may_refuse == [True, False], "the second one comes from an engine that has ended"


def test_the_grammar_of_a_call_that_is_refused_is_not_compiled(engine: Engine) -> None:
    compiler = FakeCompiler(VOCAB_SIZE, EOS, at_once=False)
    use_fake_grammars(engine, compiler)
    answers = {0: Answer()}
    engine.add(ask(0, [5] * MODEL["max_position_embeddings"], ignore_eos=False, grammar=SPEC))
    assert compiler.open == []
    step_until(engine, answers, 1)
    assert answers[0].end[2] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("error", "code"),
    [(RequestError(400, "bad_schema", "no"), "bad_schema"), (ValueError("a defect"), "grammar_failed")],
)
def test_a_grammar_that_cannot_be_compiled_is_an_error_of_its_call(
    engine: Engine, error: Exception, code: str
) -> None:
    compiler = FakeCompiler(VOCAB_SIZE, EOS, at_once=False)
    use_fake_grammars(engine, compiler)
    answers = {0: Answer(), 1: Answer()}
    engine.add(constrained(0))
    engine.add(ask(1, [9, 8]))
    compiler.finish(error)
    while engine.has_work:
        step_until(engine, answers, 1)
    assert answers[0].end[2] == code
    assert answers[1].end[2] == ""


class Failing(FakeGrammar):
    """Fails behind two tokens, as it is told."""

    def __init__(self, fault: str, output: tuple[int, ...] = ()) -> None:
        super().__init__("one", VOCAB_SIZE, EOS, output)
        self.fault = fault

    def matcher(self) -> "Failing":
        return Failing(self.fault)

    def fill_mask(self, mask: np.ndarray) -> None:
        if len(self.output) < 2:
            mask.fill(-1)
            mask.view("<u4")[EOS // 32] &= np.uint32(~(1 << EOS % 32) & 0xFFFFFFFF)
        elif self.fault == "fill":
            raise ValueError("no mask today")
        elif self.fault != "dead end":
            mask.fill(-1)

    def advance(self, token_ids: Any) -> None:
        if len(self.output) == 2 and self.fault == "advance":
            raise ValueError("not this one")
        self.output = (*self.output, *token_ids)


@pytest.mark.parametrize(
    ("fault", "code"),
    [("fill", "grammar_failed"), ("advance", "grammar_failed"), ("dead end", "grammar_failed")],
)
def test_a_grammar_that_fails_ends_its_request_and_no_other(
    engine: Engine, fault: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = FakeCompiler(VOCAB_SIZE, EOS)
    monkeypatch.setattr("fake_grammar.FakeGrammar", lambda *_: Failing(fault))
    use_fake_grammars(engine, compiler)
    neighbour = ask(1, [9, 8])
    alone = run(engine, [neighbour])[0].end
    failed, other = run(engine, [constrained(0), neighbour])
    assert (failed.end[2], len(failed.token_ids)) == (code, 2)
    assert other.end == alone


def test_a_grammar_that_needs_too_much_work_is_the_requests_fault(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ambiguous(Failing):
        def matcher(self) -> "Ambiguous":
            return Ambiguous(self.fault)

        def fill_mask(self, mask: np.ndarray) -> None:
            if len(self.output) == 2:
                raise matcher.TooMuchWorkError("too much")
            super().fill_mask(mask)

    def fill(rows: Any, masks: np.ndarray) -> list[tuple[int, Exception]]:
        try:
            return fill_one_by_one(rows, masks)
        except matcher.TooMuchWorkError as error:
            return [(rows[0][0], error)]

    monkeypatch.setattr("fake_grammar.FakeGrammar", lambda *_: Ambiguous(""))
    use_fake_grammars(engine, FakeCompiler(VOCAB_SIZE, EOS))
    grammars: Any = engine._grammars
    grammars.fill_masks = fill
    (answer,) = run(engine, [constrained(0)])
    assert answer.final is not None
    assert (answer.final.error_status, answer.final.error_code) == (400, "grammar_failed")
    assert answer.final.error_param == "grammar"


def test_rules_and_a_grammar_that_leave_no_token_are_the_requests_fault(engine: Engine) -> None:
    use_fake_grammars(engine, FakeCompiler(VOCAB_SIZE, EOS))
    first = min(set(range(VOCAB_SIZE)) - allowed("one", [], VOCAB_SIZE, EOS))
    (answer,) = run(engine, [constrained(0, allowed_token_ids=(first,))])
    assert answer.end[2] == "no_token_left"


def test_the_masks_of_a_step_are_copied_once_and_through_a_buffer_of_their_own(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fake_grammars(engine, FakeCompiler(VOCAB_SIZE, EOS))
    copies: list[tuple[Stager, int]] = []
    copy = Stager.to_device

    def spy(stager: Stager, arrays: list[np.ndarray]) -> Any:
        copies.append((stager, max(map(len, arrays))))
        return copy(stager, arrays)

    monkeypatch.setattr(Stager, "to_device", spy)
    runner, plans = engine.runner, []
    sample = runner.sample

    def sample_and_look(step: Any, masks: Any) -> None:
        plans.append(step.plan)
        before = len(copies)
        sample(step, masks)
        assert len(copies) == before + 1
        assert copies[-1][0] is runner._mask_stager is not runner.stager

    monkeypatch.setattr(runner, "sample", sample_and_look)
    assert len(runner._mask_stager._buffers) == 1
    answers = {number: Answer() for number in range(3)}
    for number in range(3):  # one joins while others decode
        engine.add(constrained(number, max_tokens=12))
        step_until(engine, answers, 2)
    while engine.has_work:
        step_until(engine, answers, 1)
    assert any(plan.chunks and plan.decode_rows and len(plan.masked) > 1 for plan in plans)


def test_a_steps_masks_have_their_time_in_the_trace(engine: Engine) -> None:
    use_fake_grammars(engine, FakeCompiler(VOCAB_SIZE, EOS))
    run(engine, [constrained(0), ask(1, [9, 8], max_tokens=20)])
    events = json.loads(engine.timeline.to_trace())["traceEvents"]
    host = sorted((one for one in events if one["ph"] == "X"), key=lambda one: one["ts"])
    masks = {one["args"]["step"] for one in host if one["name"] == "masks"}
    assert masks == {one.step_id for one in engine.timeline.records if one.masked_s}
    assert 0 < len(masks) < len(engine.timeline.records), "steps without a grammar have none"
    for one, following in itertools.pairwise(host):
        assert one["dur"] >= 0
        assert following["ts"] >= one["ts"] + one["dur"] - 1e-2, "the host has one thread"


def test_a_grammar_needs_the_end_of_sequence() -> None:
    with pytest.raises(RequestError, match="ignore_eos") as refused:
        SamplingParams(grammar=SPEC, ignore_eos=True)
    assert refused.value.param == "ignore_eos"


def test_without_a_tokenizer_file_a_grammar_is_refused(engine: Engine) -> None:
    answer = Answer()
    engine.add(constrained(0))
    outputs: list[RequestOutput] = []
    while engine.has_work:
        outputs += engine.step()
    for output in outputs:
        answer.take(output)
    assert answer.end[2] == "no_grammar"


def test_a_token_leaves_before_the_mask_behind_it_is_filled(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fake_grammars(engine, FakeCompiler(VOCAB_SIZE, EOS))
    num_filled = num_tokens = 0
    fill = engine._grammars.fill_masks

    def count(rows: Any, masks: np.ndarray) -> Any:
        nonlocal num_filled
        num_filled += len(rows)
        return fill(rows, masks)

    monkeypatch.setattr(engine._grammars, "fill_masks", count)
    engine.add(constrained(0, max_tokens=9))
    while engine.has_work:
        for output in engine.step():
            num_tokens += len(output.token_ids)
            assert num_filled == num_tokens
    assert num_tokens > 1
