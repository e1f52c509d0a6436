"""What is asked of the engine and what it answers: parameters, states and outputs of one request.

Promise: a `Request` changes state only along `NEXT`, so an illegal order of events is an error at
the place where it happens, not a leak found an hour later.
"""

from enum import Enum
from types import UnionType
from typing import Any

import msgspec
import numpy as np

from minisgl.errors import RequestError

MAX_SEED = 2**63 - 1
MAX_STOP_CHARS = 1000
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORDS_IDS = 2 * MAX_BAD_WORDS  # a word with and without a space before it
MAX_BAD_WORD_TOKENS = 16


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose the tokens of one request. Checked when constructed, also when decoded from the wire.

    Raises:
        RequestError: 400 with the field's name when a value has the wrong type or is out of its range.
    """

    max_tokens: int | None = None
    """Most tokens to generate; None = the room that is left in the model's context; 0 only reads the
    prompt, for its log probabilities."""
    min_tokens: int = 0
    """No end-of-sequence or stop token before so many tokens, and stop strings are looked for in what
    follows them only."""
    temperature: float = 1.0
    """0 = greedy (exact argmax, lowest id wins ties); otherwise logits are divided by it. Up to 100."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 = all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this; in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the likeliest one; in [0, 1]."""
    seed: int | None = None
    """Same seed, same prompt, same parameters: same tokens whatever the batch. None = a fresh one."""
    stop: tuple[str, ...] = ()
    """End before any of these strings, up to 1000 characters each; they are not part of the text. A single
    string is taken for one of them. Watched by the text side."""
    stop_token_ids: tuple[int, ...] = ()
    """End after any of these tokens (up to 1024), in addition to the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Go on through the model's end-of-sequence ids (for benchmarks)."""
    include_stop_str_in_output: bool = False
    """What ended the reply, a stop string or a token, is part of its text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that the output has; -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken off the logits of tokens for each time that the output has them; -2 to 2."""
    repetition_penalty: float = 1.0
    """Logits of tokens that prompt or output have are divided by it, negative ones multiplied; above 0, up
    to 100; 1 = off."""
    logit_bias: dict[int, float] | None = None
    """Token id -> what is added to its logit, -100 to 100; up to 1024 tokens."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these tokens may be generated; () = all."""
    bad_words: tuple[str, ...] = ()
    """Up to 64 texts that must not be generated, each with and without a space before it. The text side makes
    `bad_words_ids` of them."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids, up to 128 of up to 16 tokens, whose last token is not generated behind the
    others."""
    logprobs: int | None = None
    """Give the log probability of each generated token and of so many most likely ones (0 to 20), of the
    model's own distribution: before temperature, penalties and all else. None = off."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first. The prompt is computed without prefix cache."""

    def __post_init__(self) -> None:
        def refuse(param: str, needed: str, got: object, code: str = "invalid_value") -> None:
            raise RequestError(400, code, f"{param} must be {needed}, got {_short(got)}", param)

        def check_type(param: str, needed: str, types: type | UnionType, optional: bool = False) -> None:
            value = getattr(self, param)
            if not (optional and value is None) and (
                not isinstance(value, types) or (isinstance(value, bool) and types is not bool)
            ):
                refuse(param, needed, value, "invalid_type")

        # In Python "END" and ["END"] come easily to hand; a string must not count as its characters.
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        if isinstance(self.bad_words, str):
            msgspec.structs.force_setattr(self, "bad_words", (self.bad_words,))
        for param in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "bad_words_ids"):
            if isinstance(getattr(self, param), list):
                msgspec.structs.force_setattr(self, param, tuple(getattr(self, param)))
            check_type(param, "a list or tuple", tuple)
        for param in ("max_tokens", "seed", "logprobs", "prompt_logprobs"):
            check_type(param, "a whole number", int, optional=True)
        for param in ("top_k", "min_tokens"):
            check_type(param, "a whole number", int)
        for param in ("temperature", "top_p", "min_p", *PENALTIES):
            check_type(param, "a number", int | float)
        for param in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            check_type(param, "true or false", bool)
        check_type("logit_bias", "a mapping of token ids to numbers", dict, optional=True)

        if self.max_tokens is not None and self.max_tokens < 0:
            refuse("max_tokens", "at least 0", self.max_tokens)
        limit = MAX_MIN_TOKENS if self.max_tokens is None else self.max_tokens
        if not 0 <= self.min_tokens <= limit:
            refuse("min_tokens", f"from 0 to max_tokens ({limit})", self.min_tokens)
        if not 0 <= self.temperature <= 100:
            refuse("temperature", "between 0 and 100", self.temperature)
        if not -1 <= self.top_k < 2**31:
            refuse("top_k", "0 or -1 (off) or a positive number of tokens below 2**31", self.top_k)
        if not 0 < self.top_p <= 1:
            refuse("top_p", "above 0 and at most 1", self.top_p)
        if not 0 <= self.min_p <= 1:
            refuse("min_p", "between 0 and 1", self.min_p)
        if self.seed is not None and not -MAX_SEED - 1 <= self.seed <= MAX_SEED:
            refuse("seed", "a 64-bit integer", self.seed)
        for param in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, param) <= 2:
                refuse(param, "between -2 and 2", getattr(self, param))
        if not 0 < self.repetition_penalty <= 100:
            refuse("repetition_penalty", "above 0 and at most 100", self.repetition_penalty)
        for param in ("logprobs", "prompt_logprobs"):
            value = getattr(self, param)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                refuse(param, f"between 0 and {MAX_LOGPROBS}", value)

        def check_texts(param: str) -> None:
            for text in getattr(self, param):
                if not isinstance(text, str):
                    refuse(param, "a list of strings", text, "invalid_type")
                if not 1 <= len(text) <= MAX_STOP_CHARS:
                    refuse(param, f"strings of 1 to {MAX_STOP_CHARS} characters each", len(text))

        def check_ids(param: str, ids: Any, most: int | None = None) -> None:
            if most is not None and len(ids) > most:
                refuse(param, f"at most {most} ids", len(ids))
            if set(map(type, ids)) - {int}:
                strange = next(token for token in ids if type(token) is not int)
                refuse(param, "a list of whole numbers", strange, "invalid_type")
            if ids and (min(ids) < 0 or max(ids) >= 2**31):
                refuse(param, "token ids from 0 to 2**31 - 1", min(ids) if min(ids) < 0 else max(ids))

        check_texts("stop")
        check_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        check_ids("allowed_token_ids", self.allowed_token_ids)
        check_texts("bad_words")
        for param, most in (("bad_words", MAX_BAD_WORDS), ("bad_words_ids", MAX_BAD_WORDS_IDS)):
            if len(getattr(self, param)) > most:
                refuse(param, f"at most {most}", len(getattr(self, param)))
        for ids in self.bad_words_ids:
            if not isinstance(ids, list | tuple):
                refuse("bad_words_ids", "a list of lists of token ids", ids, "invalid_type")
            if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
                refuse("bad_words_ids", f"lists of 1 to {MAX_BAD_WORD_TOKENS} token ids each", len(ids))
            check_ids("bad_words_ids", ids)
        if self.bad_words_ids:
            as_tuples = tuple(tuple(ids) for ids in self.bad_words_ids)
            msgspec.structs.force_setattr(self, "bad_words_ids", as_tuples)
        if self.logit_bias:
            check_ids("logit_bias", list(self.logit_bias), MAX_LOGIT_BIAS)
            for bias in self.logit_bias.values():
                if not isinstance(bias, int | float) or isinstance(bias, bool):
                    refuse("logit_bias", "a mapping of token ids to numbers", bias, "invalid_type")
                if not -100 <= bias <= 100:
                    refuse("logit_bias", "values between -100 and 100", bias)

    @property
    def changes_logits(self) -> bool:
        """Whether more than temperature, top_k, top_p and min_p stands between logits and token."""
        return bool(
            self.min_tokens
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
            or self.logit_bias
            or self.allowed_token_ids
            or self.bad_words_ids
        )


PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
MAX_MIN_TOKENS = 2**31 - 1


def for_choice(params: SamplingParams, rank: int) -> SamplingParams:
    """Choices of one prompt differ, also under a seed, and the first is what n = 1 gives."""
    if params.seed is None or rank == 0:
        return params
    return msgspec.structs.replace(params, seed=(params.seed + rank) & MAX_SEED)


def with_bad_words_ids(params: SamplingParams, ids: tuple[tuple[int, ...], ...]) -> SamplingParams:
    """The same parameters with token ids in place of `bad_words`.

    Raises:
        RequestError: 400 when a word has too many tokens.
    """
    if max(map(len, ids), default=0) > MAX_BAD_WORD_TOKENS:
        message = f"bad_words must be words of up to {MAX_BAD_WORD_TOKENS} tokens each"
        raise RequestError(400, "invalid_value", message, "bad_words")
    return msgspec.structs.replace(params, bad_words=(), bad_words_ids=params.bad_words_ids + ids)


def _short(value: object) -> str:
    """A value for an error message; never long, whatever it is."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of more than 4300 digits
        return "a very large number"
    return text if len(text) <= 60 else text[:57] + "..."


def fit_to_context(
    num_prompt_tokens: int, params: SamplingParams, max_context_tokens: int, param: str = "prompt"
) -> SamplingParams:
    """The same parameters with `max_tokens` set: to what was asked for, or the room the prompt leaves.

    Raises:
        RequestError: 400 when the prompt is empty or leaves no room; `param` names it in the request.
    """
    if num_prompt_tokens == 0:
        raise RequestError(400, "invalid_value", "the prompt is empty; give at least one token", param)
    room = max_context_tokens - num_prompt_tokens
    if room < (0 if params.max_tokens == 0 else 1):
        raise RequestError(
            400,
            "context_length_exceeded",
            f"the prompt has {num_prompt_tokens} tokens, prompt and answer together may have "
            f"{max_context_tokens}; shorten the prompt to at most {max_context_tokens - 1}",
            param,
        )
    wanted = room if params.max_tokens is None else min(params.max_tokens, room)
    return msgspec.structs.replace(params, max_tokens=wanted, min_tokens=min(params.min_tokens, wanted))


class FinishReason(str, Enum):
    """Why a request ended. The first two are OpenAI's words; the others never reach a healthy client."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What the model thought of one token: natural logarithms, of its own distribution."""

    token_id: int
    logprob: float
    rank: int
    """1 + how many tokens are likelier."""
    top_ids: list[int]
    """The likeliest tokens, best first; as many as were asked for."""
    top_logprobs: list[float]


class RequestOutput(msgspec.Struct, array_like=True, gc=False):
    """What one step gave one request. The one with a `finish_reason` is the last, exactly once."""

    request_id: int
    token_ids: list[int]
    """New tokens, in order; an end-of-sequence or stop token is included."""
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when the request was first admitted."""
    error_status: int = 0
    """HTTP status of a refusal; 0 = none. With `finish_reason` ERROR only."""
    error_code: str = ""
    error_message: str = ""
    error_param: str | None = None
    """The field at fault."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`, where asked for."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """One for each token of the prompt but the first, where asked for; with the first output that has
    tokens, or with the last if none has."""


class RequestState(Enum):
    WAITING = "waiting"  # not in the pool: new, or preempted
    PREFILL = "prefill"  # has a row and pages; prompt tokens left to feed
    DECODE = "decode"  # feeds the token it generated last
    FINISHED = "finished"  # its final output is out; row and pages are still held
    RETIRED = "retired"  # row and pages given back


NEXT: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.PREFILL, RequestState.FINISHED}),
    RequestState.PREFILL: frozenset(
        {RequestState.PREFILL, RequestState.DECODE, RequestState.WAITING, RequestState.FINISHED}
    ),
    RequestState.DECODE: frozenset({RequestState.DECODE, RequestState.WAITING, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset({RequestState.RETIRED}),
    RequestState.RETIRED: frozenset(),
}
"""WAITING from PREFILL or DECODE is preemption; RETIRED needs `steps_in_flight == 0`."""


class Request:
    """One completion from its arrival to its retirement. Only the scheduler writes to it.

    `prompt` and `output` are what the user sees. `feed` is what has to be prefilled while it holds a
    row: the prompt, or after a preemption the prompt and the tokens generated so far.
    """

    __slots__ = (
        "arrival",
        "changes_logits",
        "decode_limit",
        "feed",
        "is_preempting",
        "last_fed_tokens",
        "lease",
        "max_new_tokens",
        "num_cached_tokens",
        "num_planned_tokens",
        "num_times_skipped",
        "output",
        "params",
        "priority",
        "prompt",
        "request_id",
        "row",
        "seed",
        "state",
        "steps_in_flight",
        "stop_ids",
        "streamed",
        "wants_logprobs",
        "was_admitted",
    )

    def __init__(
        self,
        request_id: int,
        prompt: np.ndarray,
        params: SamplingParams,
        *,
        priority: int,
        arrival: int,
        streamed: bool,
        seed: int,
        max_new_tokens: int,
        stop_ids: frozenset[int],
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt  # int32 [prompt tokens]
        self.params = params
        self.priority = priority
        self.arrival = arrival
        self.streamed = streamed  # its tokens are read as they come
        self.seed = seed
        self.max_new_tokens = max_new_tokens
        self.stop_ids = stop_ids
        self.changes_logits = params.changes_logits
        self.wants_logprobs = params.logprobs is not None
        self.state = RequestState.WAITING
        self.output: list[int] = []
        self.feed = prompt
        self.num_cached_tokens = 0  # found in the tree at the first admission
        self.was_admitted = False
        self.num_times_skipped = 0  # while waiting: how often a better prefix went first
        self.row = -1
        self.lease: Any = None  # kvcache.manager.Lease while it holds pages
        self.num_planned_tokens = 0  # K/V is in the pool, or will be after the launched steps
        self.last_fed_tokens = len(prompt) + max(max_new_tokens, 1) - 1  # fed when the last output is sampled
        self.decode_limit = 0  # num_planned_tokens up to which a decode needs no decision
        self.steps_in_flight = 0  # launched steps this request is part of, not yet applied
        self.is_preempting = False  # will go back to WAITING when no step is in flight

    @property
    def seniority(self) -> tuple[int, int]:
        """Sort key: who goes first, smallest first."""
        return (-self.priority, self.arrival)

    def tokens(self) -> np.ndarray:
        """Prompt and output, int32 [tokens]."""
        if not self.output:
            return self.prompt
        return np.concatenate([self.prompt, np.asarray(self.output, dtype=np.int32)])

    def move_to(self, state: RequestState) -> None:
        """Change state.

        Raises:
            RuntimeError: `NEXT` has no such transition; a bug of ours.
        """
        if state not in NEXT[self.state]:
            raise RuntimeError(
                f"request {self.request_id}: {self.state.name} -> {state.name} is no transition"
            )
        self.state = state
