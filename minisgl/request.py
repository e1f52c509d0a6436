"""What is asked of the engine and what it answers: parameters, states and outputs of one request.

Promise: a `Request` changes state only along `NEXT`, so an illegal order of events is an error at
the place where it happens, not a leak found an hour later.
"""

from enum import Enum
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from minisgl.errors import RequestError
from minisgl.fields import checked

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORDS_IDS = 2 * MAX_BAD_WORDS  # a word with and without a space before it
MAX_BAD_WORD_TOKENS = 16
MAX_TOKEN_ID = 2**31 - 1
MAX_SEED = 2**63 - 1

MinTokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
TopP = Annotated[float, Meta(gt=0, le=1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=-MAX_SEED - 1, le=MAX_SEED)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=100)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID, title="Token id")]
Watched = Annotated[str, Meta(min_length=1, max_length=1000)]
"""A text that the output is watched for."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose the tokens of one request. Checked when constructed, also when decoded from the wire.

    Raises:
        RequestError: 400 with the field's name when a value has the wrong type or is out of its range.
    """

    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    """Most tokens to generate; None = the room that is left in the model's context; 0 only reads the
    prompt, for its log probabilities."""
    min_tokens: MinTokens = 0
    """No end-of-sequence or stop token before so many tokens, and stop strings are looked for in what
    follows them only."""
    temperature: Temperature = 1.0
    """0 = greedy (exact argmax, lowest id wins ties); otherwise logits are divided by it. Up to 100."""
    top_k: TopK = 0
    """Keep the k most likely tokens; 0 or -1 = all."""
    top_p: TopP = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this; in (0, 1]."""
    min_p: MinP = 0.0
    """Drop tokens less likely than this times the likeliest one; in [0, 1]."""
    seed: Seed | None = None
    """Same seed, same prompt, same parameters: same random numbers whatever the batch, and in float32 the
    same tokens; in 16 bits a near tie may fall otherwise. None = a fresh one."""
    stop: tuple[Watched, ...] = ()
    """End before any of these strings, up to 1000 characters each; they are not part of the text. A single
    string is taken for one of them. Watched by the text side."""
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    """End after any of these tokens (up to 1024), in addition to the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Go on through the model's end-of-sequence ids (for benchmarks)."""
    include_stop_str_in_output: bool = False
    """What ended the reply, a stop string or a token, is part of its text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    presence_penalty: Penalty = 0.0
    """Taken off the logits of tokens that the output has; -2 to 2."""
    frequency_penalty: Penalty = 0.0
    """Taken off the logits of tokens for each time that the output has them; -2 to 2."""
    repetition_penalty: RepetitionPenalty = 1.0
    """Logits of tokens that prompt or output have are divided by it, negative ones multiplied; above 0, up
    to 100; 1 = off."""
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    """Token id -> what is added to its logit, -100 to 100; up to 1024 tokens."""
    allowed_token_ids: tuple[TokenId, ...] = ()
    """Only these tokens may be generated; () = all."""
    bad_words: Annotated[tuple[Watched, ...], Meta(max_length=MAX_BAD_WORDS)] = ()
    """Up to 64 texts that must not be generated, each with and without a space before it. The text side makes
    `bad_words_ids` of them."""
    bad_words_ids: Annotated[
        tuple[Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)], ...],
        Meta(max_length=MAX_BAD_WORDS_IDS),
    ] = ()
    """Sequences of token ids, up to 128 of up to 16 tokens, whose last token is not generated behind the
    others."""
    logprobs: NumLogprobs | None = None
    """Give the log probability of each generated token and of so many most likely ones (0 to 20), of the
    model's own distribution: before temperature, penalties and all else. None = off."""
    prompt_logprobs: NumLogprobs | None = None
    """The same for each token of the prompt but the first. The prompt is computed without prefix cache."""

    def __post_init__(self) -> None:
        for name, kind, default in SAMPLING_FIELDS:
            value = getattr(self, name)
            if value is default:
                continue
            # In Python "END" and ["END"] come easily to hand; a string must not count as its characters.
            if name in ("stop", "bad_words") and isinstance(value, str):
                value = (value,)
            msgspec.structs.force_setattr(self, name, checked(value, kind, name))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                400,
                "invalid_value",
                f"min_tokens must be from 0 to max_tokens ({self.max_tokens}), got {self.min_tokens}",
                "min_tokens",
            )

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


SAMPLING_FIELDS = tuple(
    (field.name, field.type, field.default) for field in msgspec.structs.fields(SamplingParams)
)
"""Name, annotated type, default."""


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
