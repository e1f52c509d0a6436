"""The engine's features, one row each: how to switch it on, and how to see that it really happened.

A feature is a setting of the engine, a change of some requests, or both. test_pairs.py serves a mix of
requests with each two of them. Below are the pairs that are refused.
"""

from collections.abc import Callable, Mapping, Set
from itertools import product
from typing import Any, NamedTuple

from fake_grammar import allowed
from pair_runs import EOS, Asked, Served
from thought_rule import tokens_after
from tiny_models import VOCAB_SIZE

from minisgl.grammar.spec import GrammarSpec
from minisgl.request import FinishReason, SamplingParams, ThoughtLimit

THOUGHT = ThoughtLimit(3, open=(60,), close=(61, 62), is_open=True)
STOP_IDS = tuple(range(3, VOCAB_SIZE, 5))
STOP_TEXTS = (*"AHOV^elsz", "bc", "Qr", "7d", "tU")
SALTS = ("red", "blue")


class Feature(NamedTuple):
    """One row of the table."""

    name: str
    seen: Callable[[Served, list[int]], bool] | None = None
    """Whether it happened, given the numbers of the requests that have it. None = the plain engine's answers
    are others without it."""
    engine: Mapping[str, Any] = {}
    """Fields of `pair_runs.Setup`."""
    change: Callable[[Asked], Asked] = lambda asked: asked
    """What it makes of a request."""
    without: Callable[[Asked], Asked] = lambda asked: asked
    """The change that the answers without it are of."""


def sets(**fields: Any) -> Callable[[Asked], Asked]:
    """A change of sampling fields."""
    return lambda asked: asked.with_params(**fields)


def has_logprobs(served: Served, numbers: list[int]) -> bool:
    answers = [answer for number in numbers for answer in served.answers[number]]
    return all(len(answer.logprobs) == len(answer.token_ids) for answer in answers) and any(
        one.top_logprobs for answer in answers for one in answer.logprobs
    )


def has_prompt_logprobs(served: Served, numbers: list[int]) -> bool:
    prompts = {one.number: one.prompt for one in served.asked}
    firsts = [(served.answers[number][0], prompts[number]) for number in numbers]
    return all(
        [one.token_id for one in answer.prompt_logprobs or ()] == list(prompt[1:])
        for answer, prompt in firsts
        if answer.token_ids
    )


def follows_grammars(served: Served, numbers: list[int]) -> bool:
    def may_follow(params: SamplingParams, output: list[int]) -> Set[int]:
        assert params.grammar is not None
        return allowed(params.grammar.text, output, VOCAB_SIZE, EOS)

    return only_allowed_tokens(served, numbers, may_follow)


def keeps_to_limits(served: Served, numbers: list[int]) -> bool:
    def may_follow(params: SamplingParams, output: list[int]) -> Set[int]:
        assert params.thought_limit is not None
        return tokens_after(params.thought_limit, output, VOCAB_SIZE)

    ends = [answer.token_ids[3:4] for number in numbers for answer in served.answers[number]]
    return only_allowed_tokens(served, numbers, may_follow) and [THOUGHT.close[0]] in ends


def only_allowed_tokens(
    served: Served, numbers: list[int], may_follow: Callable[[SamplingParams, list[int]], Set[int]]
) -> bool:
    """Whether each token may follow those before it, by an independent rule."""
    params = {one.number: one.sampling_params() for one in served.asked}
    return all(
        token in may_follow(params[number], answer.token_ids[:place])
        for number in numbers
        for answer in served.answers[number]
        for place, token in enumerate(answer.token_ids)
    )


def choices_differ(served: Served, numbers: list[int]) -> bool:
    return any(len({tuple(one.token_ids) for one in served.answers[number]}) == 3 for number in numbers)


def some_aborted(served: Served, numbers: list[int]) -> bool:
    return any(
        one.finish_reason is FinishReason.ABORT for number in numbers for one in served.answers[number]
    )


def some_overtake(served: Served, numbers: list[int]) -> bool:
    """Whether a request with the feature began before one that came earlier."""
    arrived = {one.number: (one.arrives_at, one.number) for one in served.asked if one.turn_of is None}
    began = [number for number in served.began if number in arrived]
    return any(
        arrived[late] > arrived[early]
        for place, late in enumerate(began)
        if late in numbers
        for early in began[place + 1 :]
    )


def shares_by_salt(served: Served, numbers: list[int]) -> bool:
    """Whether pages are shared, and only with requests of the same salt."""
    fed: dict[int, list[list[int]]] = {}
    for one in served.asked:
        fed[one.number] = [[*one.prompt, *answer.token_ids] for answer in served.answers[one.number]]
    salts = {one.number: one.cache_salt for one in served.asked}
    for one in served.asked:
        others = [
            tokens for number, every in fed.items() for tokens in every if salts[number] == one.cache_salt
        ]
        others.remove(fed[one.number][0])
        for answer in served.answers[one.number]:
            assert answer.num_cached_tokens <= max(len_common(list(one.prompt), tokens) for tokens in others)
    return any(answer.num_cached_tokens for number in numbers for answer in served.answers[number])


def len_common(first: list[int], second: list[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def replies_were_cached(served: Served, numbers: list[int]) -> bool:
    """Whether a conversation's next turn found tokens of the reply before it, not only of its prompt."""
    prompts = {one.number: one.prompt for one in served.asked}
    return any(
        answer.num_cached_tokens > len(prompts[one.turn_of])
        for one in served.asked
        if one.turn_of is not None
        for answer in served.answers[one.number]
    )


def minimum_held(served: Served, numbers: list[int]) -> bool:
    answers = [answer for number in numbers for answer in served.answers[number]]
    return all(
        len(answer.token_ids) >= 6 or answer.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
        for answer in answers
    )


FEATURES = (
    # Of the engine.
    Feature("overlap", lambda served, _: served.max_in_flight > 0, {"overlap": True}),
    Feature(
        "chunks",
        lambda served, _: served.num_chunks > served.num_requests + served.num_preemptions,
        {"chunk_tokens": 7},
    ),
    Feature("prefix cache", lambda served, _: served.num_cached_tokens > 0, {"prefix_cache": True}),
    Feature("preemption", lambda served, _: served.num_preemptions > 0, {"num_pages": 31}),
    Feature("joined decodes", lambda served, _: served.num_joined > 0, {"joins": True}),
    Feature("a window", lambda served, _: served.setup.window, {"window": True}),
    Feature("linear attention", lambda served, _: served.setup.states, {"states": True}),
    Feature("FP8 cache", lambda served, _: served.setup.fp8_cache, {"fp8_cache": True}),
    Feature("experts", lambda served, _: served.setup.experts, {"experts": True}),
    Feature("weights of 4 bits", lambda served, _: served.setup.int4, {"int4": True}),
    # Of requests: the choice of tokens.
    Feature(
        "penalties",
        change=sets(presence_penalty=0.8, frequency_penalty=1.1, repetition_penalty=1.4),
    ),
    Feature("two ranks", lambda served, _: served.num_other_ranks == 1, {"tp": 2}),
    Feature("log probabilities", has_logprobs, change=sets(logprobs=3)),
    Feature(
        "log probabilities of ids",
        has_logprobs,
        change=sets(logprobs=0, logprob_token_ids=(5, 40, 90)),
    ),
    Feature("prompt log probabilities", has_prompt_logprobs, change=sets(prompt_logprobs=2)),
    Feature(
        "a grammar",
        follows_grammars,
        change=lambda asked: asked.with_params(grammar=GrammarSpec("lark", str(asked.number))),
    ),
    Feature("a thought's limit", keeps_to_limits, change=sets(thought_limit=THOUGHT)),
    Feature("biases", change=sets(logit_bias={7: 4.0, 30: 3.0, 61: -2.0})),
    Feature("allowed ids", change=sets(allowed_token_ids=(2, *range(20, 80)))),
    Feature(
        "bad words",
        change=sets(
            bad_words_ids=(*((token,) for token in range(3, 40, 2)), *product(range(40, 60), (45, 70)))
        ),
    ),
    Feature("stop ids", change=sets(stop_token_ids=STOP_IDS)),
    Feature("stop strings", change=sets(stop=STOP_TEXTS)),
    Feature(
        "a minimum of tokens",
        minimum_held,
        change=sets(min_tokens=6, stop_token_ids=STOP_IDS),
        without=sets(stop_token_ids=STOP_IDS),
    ),
    Feature("limits of sampling", change=sets(temperature=1.3, top_k=12, top_p=0.8, min_p=0.05)),
    Feature(
        "drawn seeds",
        change=lambda asked: asked.with_params(temperature=0.9)._replace(draws_seed=True),
        without=sets(temperature=0.9),
    ),
    # Of requests: who is served, and when.
    Feature("several choices", choices_differ, change=lambda asked: asked._replace(num_choices=3)),
    Feature("priorities", some_overtake, change=lambda asked: asked._replace(priority=asked.number // 8)),
    Feature(
        "users with API keys",
        lambda served, _: served.charged_users >= {"early", "late"},
        change=lambda asked: asked._replace(user="early" if asked.number < 9 else "late"),
    ),
    Feature(
        "cache salts",
        shares_by_salt,
        {"prefix_cache": True},
        lambda asked: asked._replace(cache_salt=SALTS[asked.number % 2]),
    ),
    Feature(
        "next turns",
        replies_were_cached,
        {"prefix_cache": True},
        lambda asked: asked._replace(turn_of=asked.number - 5 if asked.number >= 5 else None),
    ),
    Feature("aborts", some_aborted, change=lambda asked: asked._replace(aborted_after=3)),
)


NO_SUCH_MODEL = (("a window", "linear attention"), ("linear attention", "two ranks"))
"""Pairs that no model has, or that are refused below."""


class Refusal(NamedTuple):
    """Two things that are refused together, and what the error says of them."""

    names: tuple[str, str]
    asked: Mapping[str, Any]
    """Fields of `EngineConfig`, or of `SamplingParams`."""
    message: str
    """A part of the error's message."""
    setup: Mapping[str, Any] = {}
    """Fields of `pair_runs.Setup`."""


REFUSED_AT_START = (
    Refusal(("CPU", "decode graphs"), {"max_graph_batch": 4}, "--max-graph-batch 4 needs --device cuda"),
    Refusal(("CPU", "prefill graphs"), {"max_graph_tokens": 64}, "--max-graph-tokens 64 needs --device cuda"),
    Refusal(
        ("CPU", "compiled steps"), {"compile_mode": "layers"}, "--compile-mode layers needs --device cuda"
    ),
    Refusal(
        ("CPU", "attention by kernels"),
        {"attention_backend": "triton"},
        "--attention-backend triton needs --device cuda",
    ),
    Refusal(
        ("four ranks", "six attention heads"),
        {"tp": 4},
        "--tp 4 can't share out the model's 6 attention heads evenly",
    ),
    Refusal(
        ("linear attention", "two ranks"),
        {"tp": 2},
        "4 heads of linear attention (--tp is not implemented for them)",
        {"states": True},
    ),
    Refusal(
        ("linear attention", "page events"),
        {"kv_events_endpoint": "tcp://127.0.0.1:0"},
        "--kv-events-endpoint can't tell what a prompt finds in the cache of Qwen3_5ForCausalLM",
        {"states": True},
    ),
    Refusal(
        ("all layers' keys and values", "a cache of states"),
        {"state_cache_memory": 1.0},
        "--state-cache-memory is for models with linear attention",
    ),
)
REFUSED_IN_REQUESTS = (
    Refusal(
        ("a grammar", "no end of sequence"),
        {"regex": "a+", "ignore_eos": True},
        "ignore_eos can't go with a grammar",
    ),
    Refusal(("a grammar", "another one"), {"regex": "a+", "choice": ("a",)}, "choice can't go with regex"),
    Refusal(
        ("log probabilities of ids", "no log probabilities"),
        {"logprob_token_ids": (3,)},
        "logprob_token_ids needs logprobs",
    ),
    Refusal(
        ("allowed ids", "bad words that ban them all"),
        {"allowed_token_ids": (5, 6), "bad_words_ids": ((5,), (6,))},
        "every one of allowed_token_ids is banned: by bad_words",
    ),
    Refusal(
        ("allowed ids", "a minimum of tokens that bans them all"),
        {"allowed_token_ids": (5,), "stop_token_ids": (5,), "min_tokens": 1},
        "every one of allowed_token_ids is banned",
    ),
    Refusal(
        ("a minimum of tokens", "a lower maximum"),
        {"min_tokens": 9, "max_tokens": 8},
        "min_tokens must be from 0 to max_tokens (8), got 9",
    ),
    Refusal(
        ("a thought's limit", "a prompt that is no conversation"),
        {"thinking_token_budget": 5},
        "thinking_token_budget goes only with a conversation",
    ),
)
