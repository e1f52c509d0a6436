"""Penalties, biases, bans and log probabilities: the engine gives what transformers does.

Through the real engine on a tiny random model in float32, over what must not change an answer: the batch,
chunks, the prefix cache, overlap and preemption.
"""

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCAB_SIZE, logits_of, random_model
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

import minisgl.engine.step.logits
from minisgl.config import EngineConfig
from minisgl.engine.engine import Engine
from minisgl.engine.graphs.decode_graphs import DecodeGraphs
from minisgl.engine.start.build import build_engine
from minisgl.engine.step.steps import DecodeStep, StepOutput
from minisgl.ipc.messages import AddRequest
from minisgl.request import FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from triton_kernels.logit_rules import count_tokens_triton, logit_rules_triton

EOS = 2
NUM_TOKENS = 14
NEAR_TIE = 1e-5  # log probabilities that are as near as this may come in either order
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, "page_size": 4}


class CountPenalties(LogitsProcessor):
    """presence and frequency penalty as OpenAI's documentation writes them; the prompt does not count."""

    def __init__(self, num_prompt_tokens: int, presence: float, frequency: float) -> None:
        self.num_prompt_tokens, self.presence, self.frequency = num_prompt_tokens, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(input_ids[0, self.num_prompt_tokens :], minlength=scores.shape[1])
        return scores - counts * self.frequency - (counts > 0) * self.presence


class Allowed(LogitsProcessor):
    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        left = torch.full_like(scores, float("-inf"))
        left[:, self.ids] = scores[:, self.ids]
        return left


Rules = list[Any]
"""transformers' logits processors, in order."""


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return random_model(seed=3)


@pytest.fixture(scope="module")
def folder(reference: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    reference.save_pretrained(made)
    return made


def engine_for(folder: Path, **settings: Any) -> Engine:
    config = EngineConfig(model=str(folder), **SETTINGS, **settings)
    return build_engine(config, folder, lambda name, ms: None)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    made = engine_for(folder, overlap=True, chunk_tokens=6, num_pages=200, max_running_requests=8)
    yield made
    assert made.status(0).num_waiting == made.status(0).num_running == 0
    made.check_at_idle()
    assert made.num_broken_counts == 0
    made.close()


class Answer:
    """Everything one request got."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.final: RequestOutput | None = None

    def take(self, output: RequestOutput) -> None:
        assert self.final is None
        assert output.finish_reason is not FinishReason.ERROR, output.error_message
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None
            self.prompt_logprobs = output.prompt_logprobs.unpack()
        if output.finish_reason is not None:
            self.final = output


def run(engine: Engine, *asked: tuple[list[int], SamplingParams]) -> list[Answer]:
    """All requests together, to the end."""
    answers = [Answer() for _ in asked]
    for index, (prompt, params) in enumerate(asked):
        engine.add(AddRequest(index, np.asarray(prompt, "<i4").tobytes(), params))
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id].take(output)
    assert all(answer.final is not None for answer in answers)
    return answers


def refusal(engine: Engine, params: SamplingParams) -> RequestOutput:
    engine.add(AddRequest(0, np.asarray([5], "<i4").tobytes(), params))
    (output,) = engine.step()
    assert output.finish_reason is FinishReason.ERROR
    return output


def prompt_of(seed: int, length: int = 11) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def expected(
    reference: PreTrainedModel, prompt: list[int], rules: Rules, count: int = NUM_TOKENS
) -> list[int]:
    """Greedy tokens of transformers' logits behind its own processors."""
    tokens = list(prompt)
    for _ in range(count):
        scores = logits_of(reference, tokens)[-1:].clone()
        for rule in rules:
            scores = rule(torch.tensor([tokens]), scores)
        tokens.append(int(scores.argmax()))
    return tokens[len(prompt) :]


def greedy(**rules: Any) -> SamplingParams:
    values = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return SamplingParams(**(values | rules))


def cases(reference: PreTrainedModel) -> list[tuple[list[int], SamplingParams, Rules]]:
    """Prompts with every rule, each with what transformers has for it."""
    prompts = [prompt_of(seed) for seed in range(8)]
    plain = expected(reference, prompts[6], [])
    pair = tuple(plain[2:4])
    triple = tuple(prompts[7][-2:] + expected(reference, prompts[7], [], 1))
    return [
        (prompts[0], greedy(repetition_penalty=1.7), [RepetitionPenaltyLogitsProcessor(1.7)]),
        (prompts[1], greedy(presence_penalty=1.9), [CountPenalties(11, 1.9, 0)]),
        (prompts[2], greedy(frequency_penalty=1.1), [CountPenalties(11, 0, 1.1)]),
        (
            prompts[3],
            greedy(repetition_penalty=0.6, frequency_penalty=0.4, presence_penalty=-1.5),
            [RepetitionPenaltyLogitsProcessor(0.6), CountPenalties(11, -1.5, 0.4)],
        ),
        (
            prompts[4],
            greedy(logit_bias={7: 4.5, 11: 5, 90: -3.25}),
            [SequenceBiasLogitsProcessor([[[7], 4.5], [[11], 5.0], [[90], -3.25]])],
        ),
        (prompts[5], greedy(allowed_token_ids=(3, 50, 51, 70)), [Allowed([3, 50, 51, 70])]),
        (
            prompts[6],
            greedy(bad_words_ids=(pair, (plain[0],))),
            [NoBadWordsLogitsProcessor([list(pair), [plain[0]]])],
        ),
        (prompts[7], greedy(bad_words_ids=(triple,)), [NoBadWordsLogitsProcessor([list(triple)])]),
    ]


def test_every_rule_gives_the_tokens_of_transformers_alone_and_together(
    reference: PreTrainedModel, engine: Engine
) -> None:
    all_cases = cases(reference)
    wanted = [expected(reference, prompt, rules) for prompt, _, rules in all_cases]
    for (prompt, params, _), tokens in zip(all_cases, wanted, strict=True):
        assert tokens != expected(reference, prompt, []), f"{params} changes nothing: a poor example"
        assert run(engine, (prompt, params))[0].token_ids == tokens, params
    # Once more, all at once and with their prompts in the prefix cache.
    together = run(engine, *[(prompt, params) for prompt, params, _ in all_cases])
    assert [answer.token_ids for answer in together] == wanted
    assert all(answer.final and answer.final.num_cached_tokens == 8 for answer in together)


def test_the_kernels_give_the_tokens_of_transformers_too(
    reference: PreTrainedModel, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(minisgl.engine.step.logits, "logit_rules", logit_rules_triton)
    monkeypatch.setattr(minisgl.engine.step.logits, "count_tokens", count_tokens_triton)
    all_cases = cases(reference)
    answers = run(engine, *[(prompt, params) for prompt, params, _ in all_cases])
    for answer, (prompt, _, rules) in zip(answers, all_cases, strict=True):
        assert answer.token_ids == expected(reference, prompt, rules)


def test_rules_hold_after_a_preemption(reference: PreTrainedModel, folder: Path) -> None:
    small = engine_for(
        folder, overlap=True, num_pages=19, output_reserve_tokens=0, max_running_requests=8, chunk_tokens=5
    )
    all_cases = cases(reference)
    # One with log probabilities of its prompt among them, which begins again when it is preempted.
    asked = [(prompt, params) for prompt, params, _ in all_cases]
    asked.append((prompt_of(20, 24), greedy(logprobs=2, prompt_logprobs=1)))
    answers = run(small, *asked)
    assert small.status(0).num_preemptions > 0
    for answer, (prompt, _, rules) in zip(answers, all_cases, strict=False):
        assert answer.token_ids == expected(reference, prompt, rules)
    check_logprobs(reference, prompt_of(20, 24), answers[-1], 2, 1)
    small.close()


class OneBuffer:
    """Stands in for recorded decode steps. As with graphs, each replay overwrites the logits before."""

    def __init__(self, step: DecodeStep) -> None:
        self.step = step
        self.replayed: list[int] = []
        self.last: StepOutput | None = None

    def record(self, row_ids: Tensor) -> None:
        self.step.run(row_ids)  # on padding rows, which must change nothing

    def replay(self, row_ids: Tensor) -> StepOutput:
        if self.last is not None and self.last.logits is not None:
            self.last.logits.logits.fill_(float("nan"))
        self.replayed.append(len(row_ids))
        self.last = self.step.run(row_ids)
        return self.last

    def counts(self) -> tuple[int, int]:
        return 0, 0

    def release(self) -> None:
        pass


def test_steps_with_rules_and_log_probabilities_replay_the_graphs_of_plain_steps(
    reference: PreTrainedModel, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = engine.runner
    step = DecodeStep(runner.model, runner.rows)
    graphs = OneBuffer(step)
    decode = DecodeGraphs(step, graphs, (2, 4), torch.device("cpu"), strict=True)
    with torch.inference_mode():
        for _ in range(2):
            decode.table.record_next()
    monkeypatch.setattr(runner, "decode_graphs", decode)
    all_cases = cases(reference)
    for first in (0, 3, 6):
        some = all_cases[first : first + 3]
        answers = run(engine, *[(prompt, params) for prompt, params, _ in some])
        wanted = [expected(reference, prompt, rules) for prompt, _, rules in some]
        assert [answer.token_ids for answer in answers] == wanted
    graphs.replayed.clear()
    (answer,) = run(engine, (prompt_of(60), greedy(logprobs=5, frequency_penalty=0.5)))
    check_logprobs(reference, prompt_of(60), answer, 5, None)
    assert graphs.replayed == [2] * (len(answer.token_ids) - 1)


def test_a_batch_without_a_graph_gets_its_rules_too(
    reference: PreTrainedModel, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = engine.runner
    step = DecodeStep(runner.model, runner.rows)
    decode = DecodeGraphs(step, OneBuffer(step), (), torch.device("cpu"), strict=False)
    decode._buckets = (0,)
    monkeypatch.setattr(runner, "decode_graphs", decode)
    prompt, params, rules = cases(reference)[0]
    assert run(engine, (prompt, params))[0].token_ids == expected(reference, prompt, rules)
    assert decode.num_graph_misses == len(expected(reference, prompt, rules)) - 1


def test_plain_rows_get_the_same_tokens_whatever_their_company_asks(engine: Engine) -> None:
    asked = [(prompt_of(30 + n), SamplingParams(seed=n, max_tokens=20, top_p=0.9)) for n in range(3)]
    alone = [run(engine, one)[0].token_ids for one in asked]
    ruled = (prompt_of(40), SamplingParams(seed=5, max_tokens=25, repetition_penalty=1.5, logprobs=3))
    company = run(engine, ruled, *asked)
    assert [answer.token_ids for answer in company[1:]] == alone
    assert run(engine, ruled)[0].token_ids == company[0].token_ids
    # A row that had rules is plain for its next request.
    assert [run(engine, one)[0].token_ids for one in asked] == alone


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_sampled_tokens_obey_the_rules_too(engine: Engine, seed: int) -> None:
    params = SamplingParams(
        seed=seed, temperature=3.0, max_tokens=40, allowed_token_ids=(5, 6, 7), bad_words_ids=((5, 6), (7, 7))
    )
    tokens = run(engine, (prompt_of(seed), params))[0].token_ids
    assert set(tokens) == {5, 6, 7}
    assert not {(5, 6), (7, 7)} & set(pairwise(tokens))


@pytest.mark.parametrize("min_tokens", [0, 1, 5])
def test_min_tokens_keeps_the_end_away(reference: PreTrainedModel, engine: Engine, min_tokens: int) -> None:
    # Without it, every one of these ends at once: by end-of-sequence or by the stop token.
    stops: list[dict[str, Any]] = [
        {"logit_bias": {EOS: 100}},
        {"logit_bias": {60: 100}, "stop_token_ids": (60,)},
    ]
    for stop in stops:
        params = SamplingParams(temperature=0.0, max_tokens=9, min_tokens=min_tokens, **stop)
        (answer,) = run(engine, (prompt_of(50), params))
        assert len(answer.token_ids) == min_tokens + 1
        assert answer.final is not None
        assert answer.final.finish_reason is FinishReason.STOP
        if min_tokens:
            ends = [EOS, *params.stop_token_ids]
            bias = [[[token], float(value)] for token, value in (params.logit_bias or {}).items()]
            rules: Rules = [
                SequenceBiasLogitsProcessor(bias),
                MinNewTokensLengthLogitsProcessor(11, min_tokens, ends, device="cpu"),
            ]
            assert answer.token_ids == expected(reference, prompt_of(50), rules, min_tokens + 1)


def check_logprobs(
    reference: PreTrainedModel, prompt: list[int], answer: Answer, top: int | None, prompt_top: int | None
) -> None:
    """The answer's log probabilities are transformers' own, of the model's distribution."""
    tokens = prompt + answer.token_ids
    truth = logits_of(reference, tokens).double().log_softmax(1)
    assert (answer.prompt_logprobs is not None) == (prompt_top is not None)
    assert len(answer.logprobs) == (len(answer.token_ids) if top is not None else 0)
    wanted = [(place, entry, prompt_top or 0) for place, entry in enumerate(answer.prompt_logprobs or [])]
    wanted += [(len(prompt) - 1 + place, entry, top or 0) for place, entry in enumerate(answer.logprobs)]
    if prompt_top is not None:
        assert answer.prompt_logprobs is not None
        assert len(answer.prompt_logprobs) == len(prompt) - 1
    for place, entry, count in wanted:
        assert entry.token_id == tokens[place + 1]
        assert entry.logprob == pytest.approx(float(truth[place, entry.token_id]), abs=2e-4)
        best = truth[place].topk(count).values
        assert len(set(entry.top_ids)) == count
        assert truth[place, entry.top_ids].tolist() == pytest.approx(best.tolist(), abs=NEAR_TIE)
        assert entry.top_logprobs == pytest.approx(best.tolist(), abs=2e-4)
        above = truth[place] - truth[place, entry.token_id]
        assert int((above > NEAR_TIE).sum()) < entry.rank <= int((above >= -NEAR_TIE).sum())


def test_logprobs_are_of_the_models_own_distribution(reference: PreTrainedModel, engine: Engine) -> None:
    asked = [
        (prompt_of(60), SamplingParams(seed=1, temperature=2.0, max_tokens=10, logprobs=20)),
        (prompt_of(61), greedy(logprobs=3, repetition_penalty=1.5, logit_bias={9: 50})),
        (prompt_of(62), greedy(logprobs=0)),
        (prompt_of(63), greedy()),
    ]
    for answers in (run(engine, *asked), [run(engine, one)[0] for one in asked]):
        for (prompt, params), answer in zip(asked, answers, strict=True):
            check_logprobs(reference, prompt, answer, params.logprobs, None)
    assert 9 in answers[1].token_ids


def test_prompt_logprobs_cover_the_prompt_whatever_is_cached(
    reference: PreTrainedModel, engine: Engine
) -> None:
    prompt = prompt_of(70, 150)  # many chunks, and more targets than are worked on at a time
    run(engine, (prompt, greedy()))
    for params in (greedy(prompt_logprobs=4), greedy(prompt_logprobs=0, logprobs=1, max_tokens=1)):
        answer, other = run(engine, (prompt, params), (prompt_of(71), greedy()))
        check_logprobs(reference, prompt, answer, params.logprobs, params.prompt_logprobs)
        assert answer.final is not None
        assert answer.final.num_cached_tokens == 0
        assert other.prompt_logprobs is None
    again = run(engine, (prompt, greedy()))[0]
    assert again.final is not None
    assert again.final.num_cached_tokens == 148  # what such a request computes is shared all the same


def test_no_tokens_at_all_gives_the_prompts_logprobs_only(reference: PreTrainedModel, engine: Engine) -> None:
    before = engine.status(0).num_output_tokens
    for length in (1, 2, 13):
        prompt = prompt_of(80, length)
        (answer,) = run(engine, (prompt, greedy(max_tokens=0, prompt_logprobs=2)))
        assert answer.token_ids == []
        assert answer.final is not None
        assert answer.final.finish_reason is FinishReason.LENGTH
        check_logprobs(reference, prompt, answer, None, 2)
    assert engine.status(0).num_output_tokens == before


def test_an_abort_forgets_the_prompts_logprobs(engine: Engine) -> None:
    engine.add(AddRequest(0, np.asarray(prompt_of(90, 40), "<i4").tobytes(), greedy(prompt_logprobs=2)))
    for _ in range(3):
        engine.step()
    engine.abort(0)
    while engine.has_work:
        assert all(output.prompt_logprobs is None for output in engine.step())
    assert run(engine, (prompt_of(90, 40), greedy()))[0].prompt_logprobs is None


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"logit_bias": {VOCAB_SIZE: 1}}, "logit_bias"),
        ({"allowed_token_ids": (3, VOCAB_SIZE)}, "allowed_token_ids"),
        ({"bad_words_ids": ((1, 2), (3, VOCAB_SIZE))}, "bad_words_ids"),
        ({"allowed_token_ids": (EOS,), "min_tokens": 2}, "min_tokens"),
    ],
)
def test_rules_that_cannot_work_are_refused(engine: Engine, params: dict[str, Any], param: str) -> None:
    output = refusal(engine, SamplingParams(**params, seed=0))
    assert output.error_status == 400
    assert param in output.error_message
