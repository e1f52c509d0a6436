"""Rows for which the model gives no finite logits, or whose rules leave nothing, in an engine on a CPU."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_grammar import FakeCompiler, use_fake_grammars
from test_joined_decodes import MIXTURE, joining, some_requests
from test_step_timeline import MODEL, started

from minisgl.engine.engine import Engine
from minisgl.engine.ranks.follower_link import CHECKED_STEPS, TokenChecksum
from minisgl.engine.step.logits import LogitTables, pack_logprobs, pack_rules
from minisgl.ipc.messages import AddRequest
from minisgl.request import FinishReason, RequestOutput, SamplingParams
from minisgl.scheduler.plan import NO_LOGITS, NONE_ALLOWED, RowInit, RowRules
from minisgl.scheduler.rules import rules_of_call, rules_of_prompt
from triton_kernels.logit_rules import RuleTables
from triton_kernels.sample_reference import NO_TOKEN

SPOILED = 63
"""A token whose embedding is NaN."""


End = tuple[list[int], str, str]
"""Tokens, finish reason, error code."""


class Answer:
    """What one request got."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.final: RequestOutput | None = None

    def take(self, output: RequestOutput) -> None:
        assert self.final is None, "an output after the last one"
        self.token_ids += output.token_ids
        self.final = output if output.finish_reason is not None else None

    @property
    def end(self) -> End:
        """Its tokens, and how it ended."""
        assert self.final is not None
        return self.token_ids, str(self.final.finish_reason), self.final.error_code


def run(engine: Engine, requests: list[AddRequest]) -> list[Answer]:
    """All together, to the end."""
    answers = {request.request_id: Answer() for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id].take(output)
        engine.cache.check_invariants()
    return list(answers.values())


def ask(request_id: int, prompt: list[int], **params: Any) -> AddRequest:
    values = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "seed": 0} | params
    return AddRequest(request_id, np.array(prompt, "<i4").tobytes(), SamplingParams(**values))


def embedding_of(engine: Engine) -> torch.Tensor:
    return engine.runner.model.embed_tokens.weight.data


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = started(tmp_path, overlap=True, page_size=4, num_pages=60)
    yield made
    made.check_at_idle()
    assert made.num_broken_counts == 0
    assert made.status(0).num_held_rows == made.status(0).num_held_pages == 0
    made.close()


@pytest.mark.parametrize(
    ("overlap", "backend", "model", "num_pages"),
    [
        (False, "torch", MODEL, 200),
        (True, "torch", MODEL, 24),
        (True, "triton", MODEL, 200),
        (True, "torch", MIXTURE, 200),
    ],
    ids=["serial", "overlap, preempting", "triton", "mixture"],
)
def test_rows_with_nan_end_and_leave_neighbours_graphs_and_cache_alone(
    overlap: bool,
    backend: str,
    model: dict[str, Any],
    num_pages: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = joining(tmp_path, monkeypatch, backend, model=model, overlap=overlap, num_pages=num_pages)
    use_fake_grammars(engine, FakeCompiler(MODEL["vocab_size"], 2))
    requests = some_requests(random.Random(1))
    sound = [answer.end for answer in run(engine, requests)]
    prompts = [np.frombuffer(request.prompt_ids, "<i4").tolist() for request in requests]
    spoiled, expected = an_example(prompts, sound)
    embedding = embedding_of(engine)[spoiled].clone()
    engine.flush_prefix_cache()
    embedding_of(engine)[spoiled] = float("nan")
    assert [answer.end for answer in run(engine, requests)] == expected
    num_failed = sum(code == "no_finite_logits" for _, _, code in expected)
    assert engine.status(0).num_without_logits == num_failed
    # Nothing of what was NaN is found by those who come when all is well again.
    embedding_of(engine)[spoiled] = embedding
    assert [answer.end for answer in run(engine, requests)] == sound
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_neighbour_that_shares_pages_with_a_row_with_nan_has_the_tokens_it_has_alone(
    overlap: bool, tmp_path: Path
) -> None:
    """A masked key has weight 0, and 0 * NaN is NaN: one token spoils the earlier tokens of its chunk."""
    engine = started(tmp_path, MIXTURE, overlap=overlap, page_size=1, num_pages=60)
    embedding_of(engine)[SPOILED] = float("nan")
    sound = ask(0, [35, 39, 50])
    alone = run(engine, [sound])[0].end
    engine.flush_prefix_cache()
    spoiled = [ask(request_id, [35, 39, SPOILED]) for request_id in (0, 1)]
    together = [answer.end for answer in run(engine, [*spoiled, ask(2, [35, 39, 50])])]
    assert together[2] == alone
    assert [code for _, _, code in together] == ["no_finite_logits", "no_finite_logits", ""]
    assert engine.status(0).num_without_logits == 2
    engine.check_at_idle()
    assert engine.num_broken_counts == 0
    engine.close()


def an_example(prompts: list[list[int]], sound: list[End]) -> tuple[int, list[End]]:
    """A token, and how requests end when its embedding is NaN: some in their prefill, some in a decode."""
    for spoiled in range(64):
        expected: list[End] = []
        for prompt, end in zip(prompts, sound, strict=True):
            fed = end[0][:-1]
            if spoiled in prompt:
                expected.append(([], str(FinishReason.ERROR), "no_finite_logits"))
            elif spoiled in fed:
                tokens = fed[: fed.index(spoiled) + 1]
                expected.append((tokens, str(FinishReason.ERROR), "no_finite_logits"))
            else:
                expected.append(end)
        failed = [bool(tokens) for tokens, _, code in expected if code]
        if failed.count(True) >= 2 and failed.count(False) >= 2 and len(failed) < len(prompts) - 2:
            return spoiled, expected
    raise AssertionError("no token makes a good example")


def test_log_probabilities_and_rules_of_others_survive_a_row_without_logits(engine: Engine) -> None:
    embedding_of(engine)[SPOILED] = float("nan")
    requests = [
        ask(0, [1, 2, SPOILED, 3], logprobs=3),
        ask(1, [4, 5, 6], logprobs=2, frequency_penalty=0.5),
        ask(2, [SPOILED], prompt_logprobs=1, repetition_penalty=1.2),
        ask(3, [7, SPOILED, *range(20)], prompt_logprobs=1, max_tokens=0),
        ask(4, [7, 8, 9], prompt_logprobs=0, logprobs=0),
        ask(5, [9, 9], logit_bias={SPOILED: 100.0}, logprobs=1),
    ]
    alone = [run(engine, [request])[0].end for request in requests]
    together = run(engine, requests)
    assert [answer.end for answer in together] == alone
    assert [code for _, _, code in alone] == [
        "no_finite_logits", "", "no_finite_logits", "no_finite_logits", "", "no_finite_logits",
    ]  # fmt: skip
    assert alone[5][0] == [SPOILED]
    assert engine.status(0).num_without_logits == 8
    for answer in together:
        assert answer.final is not None
        assert answer.final.finish_reason is not FinishReason.ERROR or not answer.final.prompt_logprobs
        assert answer.final.error_status == (500 if answer.final.error_code else 0)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_bans_that_leave_nothing_end_the_request_with_its_own_error(
    engine: Engine, temperature: float
) -> None:
    nothing_left = {"allowed_token_ids": (5,), "bad_words_ids": ((5, 5),), "temperature": temperature}
    requests = [
        ask(0, [1, 2, 3], **nothing_left, logprobs=2),
        ask(1, [4, 5, 6], frequency_penalty=0.5),
        ask(2, list(range(9, 18)), **nothing_left),
        ask(3, [7, 5], **nothing_left, max_tokens=0),
    ]
    answers = run(engine, requests)
    assert [answer.end[2] for answer in answers] == ["no_token_left", "", "no_token_left", ""]
    assert answers[0].token_ids == answers[2].token_ids == [5]
    assert answers[1].end == run(engine, requests[1:2])[0].end
    assert (engine.status(0).num_without_logits, engine.status(0).num_without_token) == (0, 2)
    error = answers[2].final
    assert error is not None
    assert (error.error_status, error.error_param) == (400, "allowed_token_ids")
    assert "behind 1 generated tokens" in error.error_message
    # The model was sound, so what it computed may be shared: two pages of four tokens.
    again = run(engine, [ask(0, list(range(9, 18)))])[0].final
    assert again is not None
    assert again.num_cached_tokens == 8


def test_where_the_model_and_the_rules_leave_nothing_the_model_is_at_fault(engine: Engine) -> None:
    embedding_of(engine)[SPOILED] = float("nan")
    (answer,) = run(engine, [ask(0, [SPOILED, 5], allowed_token_ids=(5,), bad_words_ids=((5, 5),))])
    assert answer.end[2] == "no_finite_logits"


def test_the_sampler_and_the_scheduler_mean_the_same_by_no_token() -> None:
    assert NO_TOKEN == NO_LOGITS


def test_no_token_is_booked_nowhere() -> None:
    tables = LogitTables(3, 10, torch.device("cpu"))
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5, bad_words_ids=((5, 6),), seed=0)
    rules = rules_of_call(params, (), 10)
    assert rules is not None
    rules = rules_of_prompt(rules, np.array([1, 2], dtype=np.int32), 0)
    inits = tuple(RowInit(row, 0.0, 0, 1.0, 0.0, 0) for row in range(3))
    staged = pack_rules(inits, (RowRules((0, 1, 2), rules),), 10)
    tables.init_rows(staged, [torch.from_numpy(part) for part in staged])
    before = RuleTables(*(table.clone() for table in tables.rules))
    rows, counted = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([True, True, True])
    tables.add_tokens(rows, torch.tensor([NO_LOGITS, NONE_ALLOWED, 4], dtype=torch.int32), counted)
    for name, table, old in zip(before._fields, tables.rules, before, strict=True):
        assert torch.equal(table[[0, 1, 3]], old[[0, 1, 3]]), name
    assert tables.rules.marks[2, 4] == before.marks[2, 4] + 1


def test_the_line_of_a_row_without_a_token_disturbs_no_other_line() -> None:
    logits = torch.randn(3, 30)
    logits[1] = float("nan")
    lines = pack_logprobs(logits, torch.tensor([7, NO_LOGITS, 9], dtype=torch.int32))
    alone = pack_logprobs(logits[[0, 2]], torch.tensor([7, 9], dtype=torch.int32))
    assert torch.equal(lines[[0, 2]], alone)


def test_asked_tokens_take_the_place_of_the_likeliest_in_their_lines_only() -> None:
    logits, token_ids = torch.randn(70, 30), torch.arange(70, dtype=torch.int32) % 30
    asked = torch.full((70, 20), -1, dtype=torch.int32)
    asked[3, :2], asked[66, :20] = torch.tensor([29, 4]), torch.arange(20)
    plain, lines = pack_logprobs(logits, token_ids), pack_logprobs(logits, token_ids, asked)
    others = [row for row in range(70) if row not in (3, 66)]
    assert torch.equal(lines[others], plain[others])
    assert torch.equal(lines[:, :2], plain[:, :2]), "the token's own log probability and rank stay"
    exact = torch.log_softmax(logits, 1)
    assert lines[3, 2:4].tolist() == [29, 4]
    assert torch.equal(lines[3, 22:24].contiguous().view(torch.float32), exact[3, [29, 4]])
    assert lines[66, 2:22].tolist() == list(range(20))
    assert torch.equal(lines[66, 22:42].contiguous().view(torch.float32), exact[66, :20])


def test_ranks_compare_steps_without_tokens_too() -> None:
    checksum, other = TokenChecksum(), TokenChecksum()
    for number in range(CHECKED_STEPS):
        checksum.add([3, NO_LOGITS, number])
        other.add([3, NONE_ALLOWED if number == 5 else NO_LOGITS, number])
    assert checksum.num_steps == other.num_steps == CHECKED_STEPS
    assert checksum.value != other.value
