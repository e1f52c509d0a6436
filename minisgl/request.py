"""A request: its sampling parameters, its states and its outputs.

Promise: a `Request` changes state only along `NEXT`, so an illegal order of events raises an error at once.
"""

from collections.abc import Callable
from copy import copy
from enum import Enum
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from minisgl.errors import RequestError
from minisgl.fields import convert_value
from minisgl.grammar.spec import (
    GrammarSpec,
    choice_spec,
    grammar_spec,
    json_schema_spec,
    regex_spec,
    structural_tag_spec,
)

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 8192
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
WatchedText = Annotated[str, Meta(min_length=1, max_length=1000)]
"""A text that the output is searched for."""
ThoughtTokens = Annotated[int, Meta(ge=-1, le=2**31 - 1)]


class ThoughtLimit(msgspec.Struct, frozen=True, array_like=True):
    """How many tokens a reply may think, and how the model's format writes thoughts, as token ids."""

    max_tokens: Annotated[int, Meta(ge=0)]
    """Tokens of thoughts, without their markers."""
    open: Annotated[tuple[TokenId, ...], Meta(min_length=1)]
    """These tokens begin a thought."""
    close: Annotated[tuple[TokenId, ...], Meta(min_length=1)]
    """These tokens are written where the limit is reached. The first of them ends every thought."""
    is_open: bool = False
    """The prompt ends inside a thought."""
    may_reopen: bool = False
    """Another thought may begin later in the reply; the limit is for all of them."""
    instead: tuple[TokenId, ...] = ()
    """Once the limit is reached, one of these follows `open[0]`; () = `open[0]` is not generated any more."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose the tokens of one request. Checked on construction, also when decoded from a message.

    Raises:
        RequestError: 400 with the field's name when a value has the wrong type or is out of range.
    """

    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    """Most tokens to generate. None = all that fit into the model's context; 0 = only compute the prompt, for
    its log probabilities."""
    min_tokens: MinTokens = 0
    """Least tokens to generate: before them, end-of-sequence and stop tokens are banned and stop strings are
    not searched for."""
    temperature: Temperature = 1.0
    """0 = greedy (exact argmax, lowest id wins ties); otherwise logits are divided by it. Up to 100."""
    top_k: TopK = 0
    """Keep the k most likely tokens; 0 or -1 = all."""
    top_p: TopP = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this; in (0, 1]."""
    min_p: MinP = 0.0
    """Drop tokens less likely than this times the most likely one; in [0, 1]."""
    seed: Seed | None = None
    """Same seed, prompt and parameters give the same random numbers in any batch, and in float32 the same
    tokens; in 16 bits, near ties may be decided differently. None or -1 = a fresh seed."""
    stop: tuple[WatchedText, ...] = ()
    """End before any of these strings, up to 1000 characters each; they are not part of the text. A single
    string counts as one of them. The process that detokenizes searches for them."""
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    """End after any of these tokens (up to 1024), in addition to the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-sequence ids (for benchmarks)."""
    include_stop_str_in_output: bool = False
    """The stop string or token that ended the reply is part of its text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    presence_penalty: Penalty = 0.0
    """Subtracted once from the logit of each token in the output; -2 to 2."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from a token's logit for each of its occurrences in the output; -2 to 2."""
    repetition_penalty: RepetitionPenalty = 1.0
    """Divides the logits of tokens in prompt or output; negative logits are multiplied. Above 0, up to 100;
    1 = off."""
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    """Token id -> number added to its logit, -100 to 100; up to 1024 tokens."""
    allowed_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_ALLOWED_TOKEN_IDS)] = ()
    """Only these tokens, up to 8192, may be generated; () = all."""
    bad_words: Annotated[tuple[WatchedText, ...], Meta(max_length=MAX_BAD_WORDS)] = ()
    """Up to 64 texts that must not be generated, each with and without a space before it. They are converted
    to `bad_words_ids` before the engine gets them."""
    bad_words_ids: Annotated[
        tuple[Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)], ...],
        Meta(max_length=MAX_BAD_WORDS_IDS),
    ] = ()
    """Up to 128 sequences of up to 16 token ids. A sequence's last token is not generated
    right after the others."""
    json_schema: dict[str, Any] | str | bool | None = None
    """The output is JSON that is valid for this schema. It becomes `grammar`, as do the next four."""
    regex: str | None = None
    """The output matches this regular expression (ECMA-262) from its beginning to its end."""
    ebnf: str | None = None
    """The output follows this grammar: llguidance's Lark, or GBNF (`root ::= ...`)."""
    choice: tuple[str, ...] | None = None
    """The output is one of these texts."""
    structural_tag: dict[str, Any] | str | None = None
    """Parts of the output have this structure: OpenAI's and xgrammar's `structural_tag`."""
    grammar: GrammarSpec | None = None
    """What the output must be, checked. At most one of the six may be given."""
    thinking_token_budget: ThoughtTokens | None = None
    """Most tokens of a reasoning model's thought, without its markers; then the thought is ended, and the
    answer follows. -1 or None = no limit. For conversations: it becomes `thought_limit`."""
    thought_limit: ThoughtLimit | None = None
    """The limit as the engine needs it."""
    logprobs: NumLogprobs | None = None
    """Return the log probability of each generated token and of this many most likely ones (0 to 20), in the
    model's own distribution: before temperature, penalties and all else. None = off."""
    logprob_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_LOGPROBS)] = ()
    """With `logprobs`: return those of these tokens, up to 20, in place of the most likely ones."""
    prompt_logprobs: NumLogprobs | None = None
    """The same for each token of the prompt but the first. The prompt is computed without prefix cache.
    They are computed for the first choice of a prompt; all its choices get them."""

    def __post_init__(self) -> None:
        for name, kind, default in SAMPLING_FIELDS:
            value = getattr(self, name)
            if value is default:
                continue
            # Python code may pass "END" for ["END"]; a string must not be read as a list of characters.
            if name in ("stop", "bad_words") and isinstance(value, str):
                value = (value,)
            msgspec.structs.force_setattr(self, name, convert_value(value, kind, name))
        if self.seed == -1:
            msgspec.structs.force_setattr(self, "seed", None)
        if self.logprob_token_ids and self.logprobs is None:
            message = "logprob_token_ids needs logprobs, which switches log probabilities on"
            raise RequestError(400, "invalid_value", message, "logprob_token_ids")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                400,
                "invalid_value",
                f"min_tokens must be from 0 to max_tokens ({self.max_tokens}), got {self.min_tokens}",
                "min_tokens",
            )
        for name, make in GRAMMAR_FIELDS:
            value = getattr(self, name)
            if value is None:
                continue
            if self.grammar is not None:
                message = f"{name} can't go with {self.grammar.where}: an output follows one grammar"
                raise RequestError(400, "invalid_value", message, name)
            msgspec.structs.force_setattr(self, "grammar", make(value, name))
            msgspec.structs.force_setattr(self, name, None)
        if self.grammar is not None and self.ignore_eos:
            message = "ignore_eos can't go with a grammar, whose output ends with the end of sequence"
            raise RequestError(400, "invalid_value", message, "ignore_eos")

    @property
    def num_top_logprobs(self) -> int:
        """How many log probabilities each generated token has beside its own."""
        return len(self.logprob_token_ids) or self.logprobs or 0

    @property
    def needs_tables(self) -> bool:
        """Whether the device needs more of it than temperature, top_k, top_p, min_p and seed."""
        return bool(self.logprob_token_ids) or self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """Whether a parameter other than temperature, top_k, top_p and min_p affects the choice of tokens."""
        return bool(
            self.min_tokens
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
            or self.logit_bias
            or self.allowed_token_ids
            or self.bad_words_ids
        )


GRAMMAR_FIELDS: tuple[tuple[str, Callable[[Any, str], GrammarSpec]], ...] = (
    ("json_schema", json_schema_spec),
    ("regex", regex_spec),
    ("ebnf", grammar_spec),
    ("choice", choice_spec),
    ("structural_tag", structural_tag_spec),
)
"""Fields that become `grammar`, and how."""
SAMPLING_FIELDS = tuple(
    (field.name, field.type, field.default) for field in msgspec.structs.fields(SamplingParams)
)
"""Name, annotated type, default."""


def params_for_choice(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of one choice of a prompt, by the choice's index.

    Each choice has a seed of its own. The first choice equals that of n = 1, and only for it are the prompt's
    log probabilities computed.
    """
    if index == 0 or (params.seed is None and params.prompt_logprobs is None):
        return params
    seed = None if params.seed is None else (params.seed + index) & MAX_SEED
    return _replace_unchecked(params, seed=seed, prompt_logprobs=None)


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
    """The same parameters with `max_tokens` set, limited to the tokens that the prompt leaves.

    Raises:
        RequestError: 400 when the prompt is empty or leaves no token; `param` names its field.
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
    return _replace_unchecked(params, max_tokens=wanted, min_tokens=min(params.min_tokens, wanted))


def without_stop_strings(params: SamplingParams) -> SamplingParams:
    """The same parameters without stop strings, which the engine does not use."""
    return _replace_unchecked(params, stop=()) if params.stop else params


def without_prompt_logprobs(params: SamplingParams) -> SamplingParams:
    """The same parameters for a request whose prompt's log probabilities have been sent."""
    return _replace_unchecked(params, prompt_logprobs=None) if params.prompt_logprobs is not None else params


def _replace_unchecked(params: SamplingParams, **values: Any) -> SamplingParams:
    """A copy with other values that are known to be valid; unlike `replace`, it checks nothing."""
    changed = copy(params)
    for name, value in values.items():
        msgspec.structs.force_setattr(changed, name, value)
    return changed


class FinishReason(str, Enum):
    """Why a request ended. OpenAI defines the first two; the others never reach a healthy client."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Log probabilities (natural) at one token's position, in the model's own distribution."""

    token_id: int
    logprob: float
    rank: int
    """1 + the number of more likely tokens."""
    top_ids: list[int]
    """The most likely tokens, best first; as many as the request asked for."""
    top_logprobs: list[float]


LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON can't express; OpenAI uses this number."""


class PackedLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The `TokenLogprobs` of N tokens with k most likely tokens each, in the device's format."""

    token_ids: bytes
    """Little-endian int32 [N]."""
    lines: bytes
    """Little-endian int32 [N, 2 + 2 * k], see `engine.step.logits.pack_logprobs`."""

    def __len__(self) -> int:
        return len(self.token_ids) // 4

    def unpack(self) -> list[TokenLogprobs]:
        """One `TokenLogprobs` for each token."""
        if not self.token_ids:
            return []
        token_ids = np.frombuffer(self.token_ids, "<i4")
        lines = np.frombuffer(self.lines, "<i4").reshape(len(token_ids), -1)
        k = (lines.shape[1] - 2) // 2
        columns = [0, *range(2 + k, 2 + 2 * k)]
        logprobs = np.maximum(lines.view(np.float32)[:, columns], LOWEST_LOGPROB).tolist()
        ranks, top_ids = (lines[:, 1] + 1).tolist(), lines[:, 2 : 2 + k].tolist()
        rows = zip(token_ids.tolist(), ranks, top_ids, logprobs, strict=True)
        return [TokenLogprobs(one, own, rank, ids, tops) for one, rank, ids, (own, *tops) in rows]


class RequestOutput(msgspec.Struct, array_like=True, gc=False):
    """A request's output of one step. Exactly one has a `finish_reason`; it is the last."""

    request_id: int
    token_ids: list[int]
    """New tokens, in order; an end-of-sequence or stop token is included."""
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when the request was first admitted."""
    error_status: int = 0
    """HTTP status of a refusal; 0 = no error. Set only with `finish_reason` ERROR."""
    error_code: str = ""
    error_message: str = ""
    error_param: str | None = None
    """The request's field at fault, if a single one is."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`, if the request asked for them."""
    prompt_logprobs: PackedLogprobs | None = None
    """One for each token of the prompt but the first, if the request asked for them. Set in the first output
    that has tokens, or in the last output if none has."""


class RequestState(Enum):
    WAITING = "waiting"  # new or preempted: holds no row and no pages
    PREFILL = "prefill"  # holds a row and pages; part of its feed is not computed yet
    DECODE = "decode"  # each step feeds the token that it generated last
    FINISHED = "finished"  # its final output is out; row and pages are still held
    RETIRED = "retired"  # row and pages are released


NEXT: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.PREFILL, RequestState.FINISHED}),
    RequestState.PREFILL: frozenset(
        {RequestState.PREFILL, RequestState.DECODE, RequestState.WAITING, RequestState.FINISHED}
    ),
    RequestState.DECODE: frozenset({RequestState.DECODE, RequestState.WAITING, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset({RequestState.RETIRED}),
    RequestState.RETIRED: frozenset(),
}
"""A change from PREFILL or DECODE to WAITING is preemption. RETIRED needs `steps_in_flight == 0`."""


class Request:
    """One completion from its arrival to its retirement. Only the scheduler writes to it.

    The user sees `prompt` and `output`. `feed` holds the tokens to prefill: the prompt, and after a
    preemption also the tokens generated before it.
    """

    __slots__ = (
        "account",
        "cache_salt",
        "changes_logits",
        "decode_limit",
        "feed",
        "has_grammar",
        "is_constrained",
        "is_isolated",
        "is_preempting",
        "lease",
        "matcher",
        "max_fed_tokens",
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
        "rules",
        "seed",
        "seniority",
        "state",
        "steps_in_flight",
        "stop_ids",
        "streamed",
        "thought",
        "uses_shared_pages",
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
        seniority: tuple[int, int],
        streamed: bool,
        seed: int,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        rules: Any = None,
        thought: Any = None,
        cache_salt: str = "",
        account: Any = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt  # int32 [prompt tokens]
        self.params = params
        self.priority = priority
        self.seniority = seniority  # sort key; the smallest goes first
        self.streamed = streamed  # the client reads its tokens as they come
        self.seed = seed
        self.max_new_tokens = max_new_tokens
        self.stop_ids = stop_ids
        self.rules = rules  # scheduler.plan.LogitRules without output, shared by a prompt's choices
        self.cache_salt = cache_salt  # it shares cached pages only with requests that have the same
        self.account = account  # scheduler.shares.Account of its user
        self.changes_logits = rules is not None
        self.wants_logprobs = params.logprobs is not None
        self.has_grammar = params.grammar is not None
        self.thought = thought  # scheduler.thoughts.ThoughtTracker, if the thought has a limit
        self.is_constrained = self.has_grammar or thought is not None
        self.matcher: Any = None  # grammar.matcher.Matcher, once the grammar is compiled
        self.state = RequestState.WAITING
        self.output: list[int] = []
        self.feed = prompt
        self.num_cached_tokens = 0  # found in the tree at the first admission
        self.was_admitted = False
        self.num_times_skipped = 0  # how often a request with a longer cached prefix went first
        self.row = -1
        self.lease: Any = None  # kvcache.manager.Lease while it holds pages
        self.num_planned_tokens = 0  # tokens whose K/V are in the pool after all launched steps
        self.max_fed_tokens = len(prompt) + max(max_new_tokens, 1) - 1  # fed when the last output is sampled
        self.decode_limit = 0  # below it, num_planned_tokens may grow without a check
        self.steps_in_flight = 0  # launched steps with this request that are not applied yet
        self.is_preempting = False  # returns to WAITING once no step is in flight
        self.uses_shared_pages = False  # has pages that another request may have computed
        self.is_isolated = False  # computes all of its pages itself, and shares none

    @property
    def has_extras(self) -> bool:
        """Whether its steps may do more than plain sampling: rules, log probabilities, or masks."""
        return self.changes_logits or self.wants_logprobs or self.is_constrained

    @property
    def needs_mask(self) -> bool:
        """Whether a mask must choose the token that its newest planned step samples."""
        place = self.num_planned_tokens - len(self.prompt)
        return self.has_grammar or (self.thought is not None and self.thought.may_restrict(place))

    def tokens(self) -> np.ndarray:
        """Prompt and output, int32 [tokens]."""
        if not self.output:
            return self.prompt
        return np.concatenate([self.prompt, np.asarray(self.output, dtype=np.int32)])

    def move_to(self, state: RequestState) -> None:
        """Change state.

        Raises:
            RuntimeError: `NEXT` has no such transition, which is a bug in minisgl.
        """
        if state not in NEXT[self.state]:
            raise RuntimeError(
                f"request {self.request_id}: {self.state.name} -> {state.name} is no transition"
            )
        self.state = state
