"""Serves a mix of requests on a tiny model in float32, and gives the answers of the plain engine.

The plain engine has no overlap, no prefix cache, no chunks and one row: each request is alone in it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from fake_grammar import FakeCompiler, use_fake_grammars
from family_variants import DELTA
from int4_models import INT4_FORMATS, quantize_int4
from joining_engines import build_joining
from quantized_experts import quantize_int4_mixture
from tiny_models import VOCAB_SIZE, random_model
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as FastTokenizer

from minisgl.config import EngineConfig
from minisgl.engine.engine import Engine
from minisgl.engine.start.build import build_engine
from minisgl.grammar.spec import GrammarSpec
from minisgl.ipc.calls import add_requests
from minisgl.ipc.messages import AddRequest
from minisgl.request import FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from minisgl.seeds import request_seed
from minisgl.text.reply import ReplyText
from minisgl.text.stop import StopStrings
from minisgl.text.tokenizer import Tokenizer

EOS = 2
CONTEXT = 96
PAGE_SIZE = 4
NUM_REQUESTS = 15
IDS_PER_REQUEST = 4
"""Request ids of one `Asked`, at least as many as it has choices."""
BASE_SEED = 11


class Setup(NamedTuple):
    """Which engine; the defaults are several rows, and else the plain engine."""

    overlap: bool = False
    chunk_tokens: int = CONTEXT
    prefix_cache: bool = False
    num_pages: int = 6 * CONTEXT // PAGE_SIZE
    joins: bool = False
    window: bool = False
    states: bool = False
    experts: bool = False
    int4: bool = False
    """Weights of 4 bits, experts' too."""
    tp: int = 1
    fp8_cache: bool = False


class Asked(NamedTuple):
    """One request of the mix."""

    number: int
    prompt: tuple[int, ...]
    params: dict[str, Any]
    """Fields of `SamplingParams`."""
    arrives_at: int
    """Step."""
    num_choices: int = 1
    draws_seed: bool = False
    """The server draws its seed."""
    priority: int = 0
    user: str = ""
    cache_salt: str = ""
    turn_of: int | None = None
    """It goes on with the conversation of the request with this number, once that one has ended."""
    aborted_after: int | None = None
    """Tokens."""

    def with_params(self, **fields: Any) -> "Asked":
        return self._replace(params=self.params | fields)

    def sampling_params(self) -> SamplingParams:
        """The parameters of its call."""
        fields = dict(self.params)
        if self.draws_seed:
            del fields["seed"]
        thought, grammar = fields.get("thought_limit"), fields.get("grammar")
        if thought is not None and grammar is not None:  # the grammar is that of the text behind the thought
            fields["grammar"] = GrammarSpec("lark", f"after {thought.close[0]} {grammar.text}")
            fields["thought_limit"] = msgspec.structs.replace(thought, close=thought.close[:1])
        return SamplingParams(**fields)

    def choice_params(self, index: int) -> SamplingParams:
        """The parameters with which a single request gets the same as one of the choices.

        The prompt's log probabilities are computed for the first choice.
        """
        asked = self.with_params(prompt_logprobs=None) if index else self
        params = asked.sampling_params()
        if self.draws_seed:
            return msgspec.structs.replace(
                params, seed=request_seed(BASE_SEED, IDS_PER_REQUEST * self.number + index)
            )
        assert params.seed is not None
        return msgspec.structs.replace(params, seed=params.seed + index)


class Answer:
    """What one request got."""

    def __init__(self, prompt: Sequence[int], params: SamplingParams) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.finish_reason: FinishReason | None = None
        self.error_code = ""
        self.num_cached_tokens = 0
        self._reply = ReplyText(TOKENIZER, prompt, params, StopStrings(params.stop))
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether the engine has sent its last output."""
        return self._is_over

    def take(self, output: RequestOutput) -> bool:
        """Add an output. Returns whether a stop string ended the reply, which the engine does not know."""
        assert not self._is_over, "an output after the final one"
        self._is_over = output.finish_reason is not None
        if self.finish_reason is not None:  # by a stop string
            return False
        if output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            self.finish_reason, self.error_code = output.finish_reason, output.error_code
            return False
        piece = self._reply.receive(output)
        self.token_ids += piece.token_ids
        self.text += piece.text
        self.logprobs += piece.logprobs or []
        if piece.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "the prompt's log probabilities came twice"
            self.prompt_logprobs = piece.prompt_logprobs.unpack()
        self.finish_reason = piece.finish_reason
        self.num_cached_tokens = piece.num_cached_tokens
        return piece.must_abort


class Served(NamedTuple):
    """What happened."""

    setup: Setup
    asked: list[Asked]
    answers: dict[int, list[Answer]]
    """One for each choice, by the request's number."""
    began: list[int]
    """Numbers of the requests in the order of their first tokens."""
    max_in_flight: int
    """Most steps that were launched and not collected between two calls of `step`."""
    num_requests: int
    num_preemptions: int
    num_cached_tokens: int
    num_chunks: int
    num_joined: int
    """Steps whose decodes joined the chunks."""
    num_other_ranks: int
    charged_users: set[str]
    """Users whose service was counted, because several compete."""


class Engines:
    """Engines by their setup, each built once, and the plain engine's answers.

    Args:
        folder: for the models.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._engines: dict[Setup | str, Engine] = {}
        self._answers: dict[tuple[str, tuple[int, ...], bytes], Answer] = {}

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def serve(self, setup: Setup, asked: list[Asked]) -> Served:
        """Serve all of them to the end; afterwards nothing is held."""
        if setup not in self._engines:
            if setup.tp > 1:
                self._close_ranks()
            self._engines[setup] = self._build(setup)
        engine = self._engines[setup]
        engine.flush_prefix_cache()
        return serve(engine, setup, asked)

    def alone(self, setup: Setup, asked: Asked, index: int = 0) -> Answer:
        """What the plain engine of the same model answers to one choice of a request."""
        model, params = self.model_folder(setup), asked.choice_params(index)
        name = model.name + " over FP8" * setup.fp8_cache
        key = (name, asked.prompt, msgspec.json.encode(params))
        if key not in self._answers:
            if name not in self._engines:
                self._engines[name] = started(
                    model,
                    num_pages=CONTEXT + 1,
                    page_size=1,
                    prefix_cache=False,
                    max_running_requests=1,
                    kv_dtype="fp8" if setup.fp8_cache else None,
                )
            plain = self._engines[name]
            answer = self._answers[key] = Answer(asked.prompt, params)
            prompt = np.asarray(asked.prompt, "<i4").tobytes()
            plain.add(AddRequest(0, prompt, msgspec.structs.replace(params, stop=())))
            while plain.has_work:
                for output in plain.step():
                    if answer.take(output):
                        plain.abort(0)
        return self._answers[key]

    def resolve_turns(self, setup: Setup, asked: list[Asked]) -> list[Asked]:
        """The requests with the prompts of next turns: prompt and reply of the turn before, and some more."""
        resolved: dict[int, Asked] = {}
        for one in asked:
            if one.turn_of is not None:
                before = resolved[one.turn_of]
                reply = self.alone(setup, before).token_ids
                one = one._replace(prompt=(*before.prompt, *reply, 9, 8, one.number))
            resolved[one.number] = one
        return list(resolved.values())

    def _close_ranks(self) -> None:
        """Close the engine with several ranks, if there is one: a process can be in one group of ranks."""
        for setup in [setup for setup in self._engines if isinstance(setup, Setup) and setup.tp > 1]:
            self._engines.pop(setup).close()

    def _build(self, setup: Setup) -> Engine:
        def start() -> Engine:
            return started(
                self.model_folder(setup),
                overlap=setup.overlap,
                chunk_tokens=setup.chunk_tokens,
                prefix_cache=setup.prefix_cache,
                num_pages=setup.num_pages,
                page_size=PAGE_SIZE,
                tp=setup.tp,
                kv_dtype="fp8" if setup.fp8_cache else None,
                max_running_requests=6,
                max_step_tokens=CONTEXT,
                output_reserve_tokens=0,
            )

        return build_joining(start, max_graph_batch=6) if setup.joins else start()

    def model_folder(self, setup: Setup) -> Path:
        """The setup's model."""
        family = "qwen3_moe" if setup.experts else "mistral" if setup.window else "qwen3"
        if setup.states:
            family = "qwen3_5_moe_text" if setup.experts else "qwen3_5_text"
        name = f"{family} {'with a window' if setup.window else ''}{'of 4 bits' if setup.int4 else ''}"
        folder = self._folder / name
        if not folder.exists():
            window = {"sliding_window": 9, "use_sliding_window": True} if setup.window else {}
            experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
            settings = window | (experts if setup.experts else {}) | {"head_dim": 16}
            settings |= DELTA if setup.states else {}
            settings |= {"shared_expert_intermediate_size": 32} if setup.states and setup.experts else {}
            if setup.int4:
                settings |= {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
                settings |= {"moe_intermediate_size": 64} if setup.experts else {}
            model = random_model(seed=3, family=family, **settings)
            if setup.int4 and setup.experts:
                quantize_int4_mixture(model, INT4_FORMATS["awq"], folder)
            elif setup.int4:
                gates = ("in_proj_a", "in_proj_b")
                more: dict[str, object] = {"modules_to_not_convert": [*gates]} if setup.states else {}
                quantize_int4(model, INT4_FORMATS["awq"], folder, lambda name: name.endswith(gates), more)
            else:
                model.save_pretrained(folder)
        return folder


def started(folder: Path, **settings: Any) -> Engine:
    """An engine in float32 whose unused pages hold NaN."""
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        cpu_threads=1,
        max_context_tokens=CONTEXT,
        **settings,
    )
    engine = build_engine(config, folder, lambda name, duration_ms: None)
    with torch.inference_mode():
        for attention in engine.runner.model.attention_layers():
            attention.k_cache[1:] = attention.v_cache[1:] = float("nan")
        pool = engine.runner.states
        for state in (*pool.states, *pool.snapshots) if pool is not None else ():
            state.fill_(float("nan"))
    use_fake_grammars(engine, FakeCompiler(VOCAB_SIZE, EOS))
    return engine


def mix() -> list[Asked]:
    """Greedy and sampled requests, streamed and not, some of which begin alike or are the same."""
    requests = []
    for number in range(NUM_REQUESTS):
        common = [3 + (7 * place + number % 2) % 90 for place in range((0, 9, 24)[number % 3])]
        own = [3 + (11 * place + number // 4) % 90 for place in range(1 + number * 5 % 13)]
        params: dict[str, Any] = {"temperature": 0.8 * (number % 2), "seed": 100 + number}
        params["max_tokens"] = 8 + number % 9
        requests.append(Asked(number, (*common, *own), params, arrives_at=number // 3))
    return requests


def serve(engine: Engine, setup: Setup, asked: list[Asked]) -> Served:
    """Serve all of them to the end; afterwards nothing is held."""
    before, served_before = engine.status(0), services(engine)
    answers = {
        one.number: [Answer(one.prompt, one.choice_params(index)) for index in range(one.num_choices)]
        for one in asked
    }
    aborted_after = {one.number: one.aborted_after for one in asked}
    waiting, began, step, max_in_flight = list(asked), [], 0, 0
    while waiting or engine.has_work:
        for one in waiting.copy():
            earlier = [] if one.turn_of is None else answers[one.turn_of]
            if one.arrives_at <= step and all(answer.is_over for answer in earlier):
                engine.add(message(one))
                waiting.remove(one)
        for output in engine.step():
            number, index = divmod(output.request_id, IDS_PER_REQUEST)
            answer = answers[number][index]
            if output.token_ids and number not in began:
                began.append(number)
            must_abort = answer.take(output)
            limit = aborted_after[number]
            if must_abort or (limit is not None and len(answer.token_ids) >= limit):
                engine.abort(output.request_id)
        max_in_flight = max(max_in_flight, len(engine._launched))
        engine.cache.check_invariants()
        step += 1
    status = engine.status(0)
    assert (status.num_held_rows, status.num_held_pages) == (0, 0)
    engine.check_at_idle()
    assert engine.num_broken_counts == 0
    records = [one for one in engine.timeline.records if one.step_id >= before.num_steps]
    return Served(
        setup=setup,
        asked=asked,
        answers=answers,
        began=began,
        max_in_flight=max_in_flight,
        num_requests=sum(one.num_choices for one in asked),
        num_preemptions=status.num_preemptions - before.num_preemptions,
        num_cached_tokens=status.num_cached_tokens - before.num_cached_tokens,
        num_chunks=sum(record.num_chunks for record in records),
        num_joined=sum(record.graphs.joined for record in records),
        num_other_ranks=len(engine._followers.pids) if engine._followers is not None else 0,
        charged_users={
            user for user, service in services(engine).items() if service > served_before.get(user, 0)
        },
    )


def services(engine: Engine) -> dict[str, int]:
    """How much service each user has had."""
    return {user: account.service for user, account in engine._scheduler._shares._accounts.items()}


def message(asked: Asked) -> AddRequest:
    """The message that starts it, as a server makes it."""
    first = IDS_PER_REQUEST * asked.number
    (add,) = add_requests(
        range(first, first + asked.num_choices),
        [asked.prompt],
        asked.sampling_params(),
        base_seed=BASE_SEED,
        priority=asked.priority,
        streamed=asked.number % 4 > 0,
        cache_salt=asked.cache_salt,
        user=asked.user,
    )
    return add


def check_answer(answer: Answer, expected: Answer, name: str) -> None:
    """An aborted answer is compared as far as it goes."""
    assert answer.error_code in ("", "no_token_left"), name
    num = len(answer.token_ids)
    if answer.finish_reason is FinishReason.ABORT:
        assert answer.token_ids == expected.token_ids[:num], name
        assert expected.text.startswith(answer.text), name
    else:
        assert answer.token_ids == expected.token_ids, name
        assert answer.text == expected.text, name
        assert (answer.finish_reason, answer.error_code) == (expected.finish_reason, expected.error_code), (
            name
        )
    check_logprobs(answer.logprobs, expected.logprobs[: len(answer.logprobs)], name)
    assert (answer.prompt_logprobs is None) == (expected.prompt_logprobs is None), name
    check_logprobs(answer.prompt_logprobs or [], expected.prompt_logprobs or [], name)


def check_logprobs(found: list[TokenLogprobs], expected: list[TokenLogprobs], name: str) -> None:
    assert [one.token_id for one in found] == [one.token_id for one in expected], name
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.top_ids == theirs.top_ids, name
        values = [theirs.logprob, *theirs.top_logprobs]
        assert [ours.logprob, *ours.top_logprobs] == pytest.approx(values, abs=1e-3), name


def character_tokenizer() -> Tokenizer:
    """A token for each printable character, and three special ones."""
    characters = [chr(code) for code in range(33, 33 + VOCAB_SIZE - 3)]
    vocabulary = {piece: rank for rank, piece in enumerate(["<0>", "<1>", "</s>", *characters])}
    fast = FastTokenizer(models.BPE(vocabulary, []))
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(piece, special=True) for piece in ("<0>", "<1>", "</s>")])
    return Tokenizer(fast, {})


TOKENIZER = character_tokenizer()
