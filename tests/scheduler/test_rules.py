"""Rules of a call: checked, packed and sent once for all of its choices, and not too many in a step."""

import msgspec
import numpy as np
import pytest
from scheduler_rig import build, drain, prompt_of

from minisgl import request
from minisgl.ipc.messages import AddRequest, ToEngine
from minisgl.request import SamplingParams
from minisgl.scheduler import prompts as prompts_module
from minisgl.scheduler import request_factory
from minisgl.scheduler.queue import waiting
from minisgl.scheduler.rules import MAX_RULES_COST_PER_STEP

N = 128
RULED = SamplingParams(
    max_tokens=2,
    ignore_eos=True,
    seed=1,
    allowed_token_ids=tuple(range(4, 40)),
    bad_words_ids=((5,), (6, 7)),
    logit_bias={8: 1.5},
    min_tokens=1,
)


class Calls:
    """Counts the calls of a function that it stands for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.count = 0
        self._function = getattr(owner, name)
        monkeypatch.setattr(owner, name, self)

    def __call__(self, *args: object) -> object:
        self.count += 1
        return self._function(*args)


def test_rules_are_checked_and_made_once_per_call_and_not_per_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [prompt_of(20, 21, 22), prompt_of(23, 24)]
    data = [prompt.astype("<i4").tobytes() for prompt in prompts]
    sent = msgspec.msgpack.encode(AddRequest(0, data[0], RULED, num_choices=N // 2, more_prompts=(data[1],)))
    monkeypatch.setattr(prompts_module, "MAX_ADMISSIONS_PER_STEP", N)
    scheduler, executor, _ = build(max_rows=N, num_pages=1000, max_step_tokens=1000)
    checks = Calls(monkeypatch, request, "convert_value")
    packs = Calls(monkeypatch, request_factory, "rules_of_call")
    message = msgspec.msgpack.decode(sent, type=ToEngine)
    assert isinstance(message, AddRequest)
    num_fields = sum(getattr(RULED, name) != default for name, _, default in request.SAMPLING_FIELDS)
    assert checks.count == num_fields  # as the one message is decoded
    scheduler.add_call(0, prompts, message.params, message.num_choices, 0, True)
    plan = scheduler.plan()
    assert plan is not None
    assert (checks.count, packs.count) == (num_fields, 1)
    assert [len(rows) for rows, _ in plan.row_rules] == [N // 2, N // 2]  # one set of rules for each prompt
    first, second = (rules for _, rules in plan.row_rules)
    assert first.allowed_token_ids is second.allowed_token_ids
    assert (first.min_len, second.min_len) == (4, 3)
    scheduler.apply(plan, executor.execute(plan))
    drain(scheduler, executor)


def test_the_choices_of_a_call_are_numbered_and_seeded_in_order_and_refused_together() -> None:
    scheduler, executor, _ = build()
    scheduler.add_call(5, [prompt_of(20, 21), prompt_of(99), prompt_of(22)], RULED, 2, 0, True)
    scheduler.add_call(11, [prompt_of(20)], SamplingParams(allowed_token_ids=(99,)), 2, 0, True)
    outputs = scheduler.take_outputs()
    assert [(one.request_id, one.error_param) for one in outputs] == [
        (7, None),
        (8, None),
        (11, "allowed_token_ids"),
        (12, "allowed_token_ids"),
    ]
    plan = scheduler.plan()
    assert plan is not None
    assert [init.seed for init in plan.row_inits] == [1, 2, 1, 2]
    scheduler.apply(plan, executor.execute(plan))
    ended = {one.request_id for one in drain(scheduler, executor) if one.finish_reason is not None}
    assert ended == {5, 6, 9, 10}


def test_a_step_takes_in_rules_up_to_a_bound_and_the_next_ones_the_rest() -> None:
    vocab_size, num_allowed = 20_000, 8192
    params = SamplingParams(
        max_tokens=50, ignore_eos=True, allowed_token_ids=tuple(range(4, 4 + num_allowed))
    )
    scheduler, executor, _ = build(
        vocab_size=vocab_size, max_rows=64, num_pages=1000, max_step_tokens=1000, mixed_step_tokens=1000
    )
    num_calls = 2 * MAX_RULES_COST_PER_STEP // num_allowed + 1
    for call in range(num_calls):
        scheduler.add_call(2 * call, [prompt_of(20 + call)], params, 2, 0, True)
    written = []
    while scheduler.num_waiting:
        plan = scheduler.plan()
        assert plan is not None
        written.append(sum(rules.cost_tokens for _, rules in plan.row_rules))
        scheduler.apply(plan, executor.execute(plan))
    assert max(written) < MAX_RULES_COST_PER_STEP + num_allowed + 1000
    assert len(written) == 3
    drain(scheduler, executor)


def test_rules_of_a_request_that_leaves_before_they_are_written_hold_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "MAX_RULES_COST_PER_STEP", 1)  # instead of a prompt of 65,000 tokens
    scheduler, executor, _ = build(num_pages=6, page_size=4, max_rows=4)
    scheduler.add(0, prompt_of(*range(4, 24)), SamplingParams(max_tokens=0))  # takes all pages
    plan = scheduler.plan()
    assert plan is not None
    scheduler.add(1, prompt_of(20), RULED)
    scheduler.add(2, prompt_of(21), SamplingParams(max_tokens=2, ignore_eos=True))
    scheduler.abort(0)  # its pages come back with the step
    assert scheduler.plan() is None
    assert scheduler.num_running == 1, "the next one has a row, but no page yet"
    scheduler.abort(1)
    scheduler.check_invariants()
    scheduler.apply(plan, executor.execute(plan))
    ended = [one.request_id for one in drain(scheduler, executor) if one.finish_reason is not None]
    assert ended == [0, 1, 2]


def test_a_prompts_logprobs_are_computed_for_its_first_choice_only() -> None:
    scheduler, executor, _ = build()
    prompt = prompt_of(*range(20, 30))
    scheduler.add_call(
        0, [prompt], SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=0), 3, 0, True
    )
    told = []
    num_targets = 0
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        lines = tuple(np.zeros((len(chunk.targets) // 4, 2), dtype=np.int32) for chunk in plan.chunks)
        num_targets += sum(map(len, lines))
        scheduler.apply(plan, executor.execute(plan), prompt_logprobs=lines)
        told += [one.request_id for one in scheduler.take_outputs() if one.prompt_logprobs is not None]
    assert (told, num_targets) == ([0], len(prompt) - 1)
