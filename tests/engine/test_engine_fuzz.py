"""The engine against itself: in any company, a request gets the tokens that it gets alone.

Each round serves random requests on a tiny model in float32, with overlap, a pool that is too small for them,
random arrivals and aborts. Unused pages hold NaN. Each answer is compared with the same request alone on an
engine without overlap, chunks and prefix cache. `pytest --fuzz-rounds 1000` runs more rounds than the suite.

A difference is a tie, and does not count, if changing the reference's logits by at most 1e-4 / 2 gives the
token too. The test run's summary reports them.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from fake_grammar import FakeCompiler, allowed, use_fake_grammars
from family_variants import DELTA
from thought_rule import tokens_after
from tiny_models import VOCAB_SIZE, logits_of, random_model
from transformers import PreTrainedModel

from minisgl.config import EngineConfig
from minisgl.engine.engine import Engine
from minisgl.engine.start.build import build_engine
from minisgl.grammar.spec import GrammarSpec
from minisgl.ipc.messages import AddRequest, StepOutput
from minisgl.kvcache.grouped_manager import GroupedCacheManager
from minisgl.request import FinishReason, RequestOutput, SamplingParams, ThoughtLimit, TokenLogprobs
from minisgl.server.engines.sent_requests import SentRequests
from triton_kernels.sample_reference import sample_reference

EOS = 2
NUM_REQUESTS = 24
CONTEXT = 64
TIE = 1e-4
NUM_TIE_TRIALS = 400
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full attention": ("qwen3", {"head_dim": 16}),
    "a window": ("mistral", {"sliding_window": 9}),
    "windows in some layers": (
        "qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "linear attention": ("qwen3_5_text", DELTA),
    "experts": ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
}
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "cpu_threads": 1,
    "max_context_tokens": CONTEXT,
}


class Model(NamedTuple):
    reference: PreTrainedModel
    folder: Path
    alone: Engine


class Asked(NamedTuple):
    request: AddRequest
    prompt: list[int]
    arrives_at: int
    """Step."""
    aborted_at: int | None
    """Step, if the request still runs then."""


class Answer:
    """What one request got."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.finish_reason: FinishReason | None = None

    def take(self, output: RequestOutput) -> None:
        assert self.finish_reason is None, "an output after the final one"
        assert output.finish_reason is not FinishReason.ERROR, output.error_message
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "the prompt's log probabilities came twice"
            self.prompt_logprobs = output.prompt_logprobs.unpack()
        self.finish_reason = output.finish_reason


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    family, settings = FAMILIES[request.param]
    reference = random_model(seed=5, family=family, **settings)
    folder = tmp_path_factory.mktemp("tiny")
    reference.save_pretrained(folder)
    alone = engine_for(folder, overlap=False, prefix_cache=False, num_pages=CONTEXT + 1, page_size=1)
    yield Model(reference, folder, alone)
    alone.close()


def engine_for(folder: Path, **settings: Any) -> Engine:
    engine = build_engine(
        EngineConfig(model=str(folder), **SETTINGS, **settings), folder, lambda name, duration_ms: None
    )
    with torch.inference_mode():
        for attention in engine.runner.model.attention_layers():
            attention.k_cache[1:] = attention.v_cache[1:] = float("nan")
    waits = engine._scheduler._prompts._waits
    if waits is not None:
        waits._least, waits._least_of_one = 8, 2  # so that short prompts wait for each other, too
    use_fake_grammars(engine, FakeCompiler(VOCAB_SIZE, EOS))
    return engine


def random_params(source: random.Random) -> SamplingParams:
    def sometimes(value: Any, otherwise: Any, probability: float = 0.2) -> Any:
        return value if source.random() < probability else otherwise

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(source.randrange(VOCAB_SIZE) for _ in range(count))

    max_tokens = source.randrange(1, 28)
    grammar = sometimes(GrammarSpec("lark", str(source.random())), None, 0.25)
    thought = sometimes(random_limit(source), None, 0.25)
    if thought is not None and grammar is not None:
        thought = ThoughtLimit(thought.max_tokens, thought.open, thought.close[:1], is_open=True)
        grammar = GrammarSpec("lark", f"after {thought.close[0]} {source.random()}")
    is_free = grammar is None and thought is None
    return SamplingParams(
        grammar=grammar,
        thought_limit=thought,
        max_tokens=max_tokens,
        min_tokens=sometimes(source.randrange(max_tokens + 1), 0, 0.2 * is_free),
        temperature=sometimes(0.0, source.uniform(0.2, 1.5), 0.4),
        top_k=sometimes(source.randrange(1, 20), 0),
        top_p=sometimes(source.uniform(0.3, 1.0), 1.0),
        min_p=sometimes(source.uniform(0.0, 0.3), 0.0),
        seed=source.randrange(-(2**63), 2**63),
        stop_token_ids=sometimes(tokens(3), ()),
        ignore_eos=sometimes(grammar is None, False),
        presence_penalty=sometimes(source.uniform(-2, 2), 0.0),
        frequency_penalty=sometimes(source.uniform(-2, 2), 0.0),
        repetition_penalty=sometimes(source.uniform(0.5, 2), 1.0),
        logit_bias=sometimes({token: source.uniform(-5, 5) for token in tokens(4)}, None),
        allowed_token_ids=sometimes(tuple(source.sample(range(VOCAB_SIZE), 40)), (), 0.1 * is_free),
        bad_words_ids=sometimes((tokens(1), tokens(2), tokens(3)), (), 0.2 * (thought is None)),
        logprobs=sometimes(source.randrange(6), None),
        prompt_logprobs=sometimes(source.randrange(4), None),
    )


def random_limit(source: random.Random) -> ThoughtLimit:
    """Of a thought that is open, or that the model may open, even again."""
    marks = source.sample(range(3, VOCAB_SIZE), 6)
    may_reopen = source.random() < 0.5
    return ThoughtLimit(
        source.choice((0, 1, 2, 5, 9)),
        tuple(marks[: source.choice((1, 2))]),
        tuple(marks[2 : source.choice((3, 4))]),
        is_open=source.random() < 0.8,
        may_reopen=may_reopen,
        instead=tuple(marks[4:]) if may_reopen and source.random() < 0.5 else (),
    )


def random_requests(source: random.Random) -> list[Asked]:
    """Requests of all kinds; many share the beginning of their prompts with others, or all of it."""
    prefixes = [[source.randrange(3, VOCAB_SIZE) for _ in range(30)] for _ in range(2)]
    asked: list[Asked] = []
    arrives_at = 0
    for request_id in range(NUM_REQUESTS):
        arrives_at += source.choice((0, 0, 0, 1, 2, 6))
        own = [source.randrange(3, VOCAB_SIZE) for _ in range(source.randrange(1, 12))]
        prompt = source.choice(prefixes)[: source.choice((0, 4, 13, 30))] + own
        if asked and source.random() < 0.3:
            prompt = source.choice(asked).prompt
        request = AddRequest(
            request_id,
            np.asarray(prompt, "<i4").tobytes(),
            random_params(source),
            priority=source.choice((0, 0, 0, 1)),
            streamed=source.random() < 0.7,
        )
        aborted_at = arrives_at + source.randrange(12) if source.random() < 0.15 else None
        asked.append(Asked(request, prompt, arrives_at, aborted_at))
    return asked


def serve(engine: Engine, asked: list[Asked]) -> list[Answer]:
    """All of them, to the end; afterwards nothing is held."""
    answers = [Answer() for _ in asked]
    step = 0
    while engine.has_work or any(one.arrives_at >= step for one in asked):
        for one in asked:
            if one.arrives_at == step:
                engine.add(one.request)
            if one.aborted_at == step:
                engine.abort(one.request.request_id)
        for output in engine.step():
            answers[output.request_id].take(output)
        step += 1
    status = engine.status(0)
    assert (status.num_held_rows, status.num_held_pages) == (0, 0)
    engine.check_at_idle()
    assert engine.num_broken_counts == 0
    return answers


def test_in_any_company_a_request_gets_the_tokens_that_it_gets_alone(
    model: Model, fuzz_rounds: int, record_property: Callable[[str, object], None]
) -> None:
    num_preemptions = num_cached = num_ties = 0
    # Where all layers have the window, a row holds few pages, and the pool need not hold a whole request.
    all_windows = isinstance(model.alone.cache, GroupedCacheManager) and not model.alone.cache.keeps_all
    # So small that the three rounds of the suite preempt some rows.
    pool_tokens = (32, 64) if all_windows else (CONTEXT, 3 * CONTEXT // 2)
    for number in range(fuzz_rounds):
        source = random.Random(number)
        page_size = (4, 1, 8)[number % 3]
        engine = engine_for(
            model.folder,
            overlap=True,
            page_size=page_size,
            num_pages=source.randrange(*pool_tokens) // page_size + 1,
            max_running_requests=source.randrange(4, 12),
            max_step_tokens=source.choice((16, 48)),
            chunk_tokens=source.choice((7, 16)),
            mixed_step_tokens=16,
            output_reserve_tokens=(8, 0)[number % 2],
        )
        asked = random_requests(source)
        answers = serve(engine, asked)
        status = engine.status(0)
        num_preemptions += status.num_preemptions
        num_cached += status.num_cached_tokens
        engine.close()
        for one, answer in zip(asked, answers, strict=True):
            (expected,) = serve(
                model.alone, [one._replace(request=as_first(one.request), arrives_at=0, aborted_at=None)]
            )
            name = f"round {number}, request {one.request.request_id}: {one.prompt}, {one.request.params}"
            num_ties += compare(model.reference, one, answer, expected, name)
    counts = f"{num_preemptions} preemptions, {num_cached} cached prompt tokens, {num_ties} ties"
    record_property("fuzz", f"{fuzz_rounds} rounds of {NUM_REQUESTS} requests, {counts}")
    assert num_preemptions
    assert num_cached


def test_a_request_that_goes_on_in_another_engine_gets_the_tokens_that_it_gets_alone(
    model: Model, fuzz_rounds: int, record_property: Callable[[str, object], None]
) -> None:
    """Engines that end after a few steps, each followed by another one that gets the output so far."""
    num_lives = num_resumed = num_ties = 0
    for number in range((fuzz_rounds + 1) // 2):
        source = random.Random(number)
        asked = random_requests(source)
        sent = SentRequests()
        for one in asked:
            sent.add(one.request, sent_to=0)
        answers = [Answer() for _ in asked]
        while len(sent):
            num_lives += 1
            engine = engine_for(model.folder, overlap=True, page_size=4, num_pages=200, chunk_tokens=16)
            for message in sent.unsent(num_lives, 1.0):
                num_resumed += bool(message.outputs)
                engine.add(message)
            for _ in range(source.randrange(2, 14)):
                # What a step has computed and nobody was told is lost with the engine.
                outputs = engine.step()
                for output in outputs:
                    answers[output.request_id].take(output)
                sent.take_output(StepOutput(outputs))
            assert engine.status(0).num_broken_counts == 0
            engine.close()
        for one, answer in zip(asked, answers, strict=True):
            (expected,) = serve(
                model.alone, [one._replace(request=as_first(one.request), arrives_at=0, aborted_at=None)]
            )
            name = f"round {number}, request {one.request.request_id}: {one.prompt}, {one.request.params}"
            num_ties += compare(model.reference, one, answer, expected, name)
    record_property("resumed", f"{num_lives} engines, {num_resumed} resumptions, {num_ties} ties")
    assert num_resumed > NUM_REQUESTS


def as_first(request: AddRequest) -> AddRequest:
    return AddRequest(0, request.prompt_ids, request.params)


def compare(reference: PreTrainedModel, asked: Asked, answer: Answer, expected: Answer, name: str) -> int:
    """1 if they part at a tie, 0 if they are equal (an aborted one as far as it goes)."""
    if answer.finish_reason is FinishReason.ABORT:
        assert asked.aborted_at is not None, name
    if asked.request.params.grammar is not None:
        for place, token in enumerate(answer.token_ids):
            before = answer.token_ids[:place]
            assert token in allowed(asked.request.params.grammar.text, before, VOCAB_SIZE, EOS), name
    limit = asked.request.params.thought_limit
    for place, token in enumerate(answer.token_ids):
        assert limit is None or token in tokens_after(limit, answer.token_ids[:place], VOCAB_SIZE), name
    pairs = list(zip(answer.token_ids, expected.token_ids, strict=False))
    place = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    num_same = len(pairs) if place is None else place
    compare_logprobs(answer.logprobs[:num_same], expected.logprobs[:num_same], name)
    if answer.token_ids and asked.request.params.prompt_logprobs is not None:
        assert answer.prompt_logprobs is not None, name
        assert expected.prompt_logprobs is not None, name
        assert [one.token_id for one in answer.prompt_logprobs] == asked.prompt[1:], name
        compare_logprobs(answer.prompt_logprobs, expected.prompt_logprobs, name)
    if place is not None:
        sampled = answer.token_ids[place]
        assert is_tie(reference, asked, answer.token_ids[:place], sampled), (
            f"{name}: token {place} is {sampled}, alone it is {expected.token_ids[place]}"
        )
        return 1
    if answer.finish_reason is not FinishReason.ABORT:
        assert answer.token_ids == expected.token_ids, name
        assert answer.finish_reason is expected.finish_reason, name
    return 0


def compare_logprobs(found: list[TokenLogprobs], expected: list[TokenLogprobs], name: str) -> None:
    assert [one.token_id for one in found] == [one.token_id for one in expected], name
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3), name
        assert ours.top_logprobs == pytest.approx(theirs.top_logprobs, abs=1e-3), name


def is_tie(reference: PreTrainedModel, asked: Asked, output: list[int], sampled: int) -> bool:
    """Whether logits that differ from the reference's by TIE / 2 at most yield the token `sampled`."""
    params = asked.request.params
    logits = logits_of(reference, [*asked.prompt, *output])[-1]
    noise = torch.empty(NUM_TIE_TRIALS, VOCAB_SIZE)
    noise.uniform_(-TIE / 2, TIE / 2, generator=torch.Generator().manual_seed(0))
    # Noise at the edges of the allowed range shows a tie soonest.
    noise = torch.where(torch.arange(NUM_TIE_TRIALS)[:, None] % 2 == 0, noise, noise.sign() * TIE / 2)
    rows = torch.stack([ruled(params, asked.prompt, output, logits + one) for one in noise])

    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((NUM_TIE_TRIALS,), value, dtype=dtype)

    drawn = sample_reference(
        rows,
        column(params.temperature, torch.float32),
        column(params.top_k, torch.int32),
        column(params.top_p, torch.float32),
        column(params.min_p, torch.float32),
        torch.full((NUM_TIE_TRIALS,), params.seed or 0, dtype=torch.int64),
        column(len(asked.prompt) + len(output), torch.int32),
    )
    return sampled in drawn.tolist()


def ruled(params: SamplingParams, prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """The logits [V] under the request's penalties, biases, bans and grammar, token by token."""
    left = logits.clone()
    limit = params.thought_limit
    thinkable = None if limit is None else tokens_after(limit, output, VOCAB_SIZE)
    grammar = params.grammar
    may_follow = None if grammar is None else allowed(grammar.text, output, VOCAB_SIZE, EOS)
    for token in range(VOCAB_SIZE):
        value = float(logits[token])
        count = output.count(token)
        if count or token in prompt:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        value += (params.logit_bias or {}).get(token, 0.0)
        ends = token in params.stop_token_ids or (token == EOS and not params.ignore_eos)
        is_banned = bool(params.allowed_token_ids) and token not in params.allowed_token_ids
        is_banned |= ends and len(output) < params.min_tokens
        for word in params.bad_words_ids:
            before = list(word[:-1])
            is_banned |= word[-1] == token and (not before or (prompt + output)[-len(before) :] == before)
        is_banned |= thinkable is not None and token not in thinkable
        is_banned |= may_follow is not None and token not in may_follow
        left[token] = float("-inf") if is_banned else value
    return left
