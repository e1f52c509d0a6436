"""Compiles checked grammars in threads, and keeps the newest ones.

Promise: a caller never waits in `compile`; a grammar that can't be compiled, takes too long or allows nothing
fails its own request with a 400. What nobody waits for any more is not begun. llguidance compiles without the
interpreter's lock, but builds its tokenizer with it, which takes about a second: `prepare` says when.
"""

import json
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from minisgl.errors import ModelError, RequestError
from minisgl.fields import shorten
from minisgl.grammar.json_schema import dump
from minisgl.grammar.lark import RULE_OF_SCHEMA
from minisgl.grammar.limits import COMPILE_LIMIT_S
from minisgl.grammar.matcher import Grammar, GrammarError, Matcher
from minisgl.grammar.places import find_place
from minisgl.grammar.spec import GrammarSpec
from minisgl.grammar.structural_tag import to_lark

logger = logging.getLogger(__name__)

WHITESPACE = r" |\n {0,40}"
"""Whitespace of generated JSON, at most once wherever JSON allows any: nothing, one space, or a line break
with an indentation of up to 40 spaces. So a model writes compact JSON, Python's `json.dumps` or indented
JSON, as it was trained to, but can't write whitespace for ever. None before the first or after the last
character."""
ESCAPES = 'nrbtf\\"'
"""Letters that may follow a backslash in generated strings. Without `\\u` each string has one spelling, so no
key can be written twice in different spellings."""
SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(rf'[^"\\\x00-\x1F\x7F]{{1,{most}}}' for most in (1, 2, 3, 4, 6, 8, 12, 20, 30)),
    r'[^"\\\x00-\x1F\x7F]+',
]
"""Kinds of tokens that the library allows together where a grammar allows all text of that kind: whitespace,
then characters of a string by number, for strings of limited length. With the library's own kinds (up to 10,
up to 30, any number) the masks of such strings take 1.7 times as long."""
OPTIONS = '%llguidance {"no_forcing": true}\n'
"""Begins each grammar. Without it the library follows text that can only go on in one way to its end for each
mask, and hangs where there is no end: `start: A A` with `A: "a"+`."""
THREADS = 2
STACK_BYTES = 64 * 2**20
"""Stack of a compiling thread: the library recurses into schemas; see MAX_LEVELS in limits.py."""
MAX_LEXER_STATES = 50_000
"""States of a grammar's lexer, 1 to 2 kB each: they are made while answers are written, and kept with it."""
CACHE_ENTRIES = 128
CACHE_BYTES = 64 * 2**20
BYTES_PER_GRAMMAR = 64 * 1024
BYTES_PER_CHAR = 40
"""Memory of a compiled grammar: a fixed part, and one for each character of its text (an upper bound)."""

Key = tuple[str, str, bool, tuple[tuple[str, str], ...]]
T = TypeVar("T")


class Refusal(NamedTuple):
    """Why a grammar can't be used, and its place behind the request's field."""

    message: str
    place: str = ""

    def error(self, spec: GrammarSpec) -> RequestError:
        """This refusal, as the error of one request."""
        where = spec.where + self.place
        return RequestError(400, "unsupported_grammar", f"{where} {self.message}", where)


CLOSED = Refusal("can't be compiled: the engine ends")


class GrammarCompiler:
    """Compiles grammars for one model.

    Args:
        tokenizer_json: the text of the model's `tokenizer.json`.
        vocab_size: size of the model's logits; ids beyond the tokenizer's are never allowed.
        eos_token_ids: the ids that end an answer.
        limit_s: seconds after which a compilation counts as failed.
        max_queued: grammars that wait for a thread; one more is refused. None: no limit.
    """

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        *,
        cache_entries: int = CACHE_ENTRIES,
        cache_bytes: int = CACHE_BYTES,
        limit_s: float = COMPILE_LIMIT_S,
        max_queued: int | None = None,
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._max_entries, self._max_bytes, self._limit_s = cache_entries, cache_bytes, limit_s
        self._max_queued = max_queued
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._is_closed = False
        self._tokenizer: Future[_Tokenizer] | None = None
        self._cache: OrderedDict[Key, Grammar | Refusal] = OrderedDict()
        self._bytes = 0
        # Who waits for each grammar that is queued or being compiled.
        self._waiting: dict[Key, list[tuple[GrammarSpec, Future[Grammar]]]] = {}
        self._queue: OrderedDict[Key, GrammarSpec] = OrderedDict()  # not begun
        self._num_working = 0  # threads that take grammars out of the queue

    def prepare(self) -> "Future[_Tokenizer]":
        """Start building the tokenizer, unless that was done; the first grammar needs it.

        It holds the interpreter's lock for about a second, in two parts: call it while nobody waits.
        """
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._start(
                    _Tokenizer.build, self._tokenizer_json, self._vocab_size, self._eos_token_ids
                )
            return self._tokenizer

    def compile(self, spec: GrammarSpec, *, may_refuse: bool = True) -> "Future[Grammar]":
        """The grammar, once it is compiled; its error is a `RequestError`. Callbacks run in a thread of ours.

        Several callers with the same grammar share one compilation; each may cancel its own future. A grammar
        whose last caller cancels leaves the queue. With a full queue, the error is a 429, unless `may_refuse`
        is False, as for a request that was accepted by an engine before this one.
        """
        answer: Future[Grammar] = Future()
        key = (spec.kind, spec.text, spec.whitespace, spec.around)
        with self._lock:
            known = self._cache.get(key)
            if isinstance(known, Grammar) and known.is_worn:
                del self._cache[key]
                self._bytes -= _size(key)
                known = None
            if self._is_closed:
                answer.set_exception(CLOSED.error(spec))
                return answer
            if known is not None:
                self._cache.move_to_end(key)
            elif key in self._waiting:
                self._waiting[key].append((spec, answer))
            elif may_refuse and self._max_queued is not None and len(self._queue) >= self._max_queued:
                answer.set_exception(_queue_is_full(len(self._queue), spec))
                return answer
            else:
                self._waiting[key] = [(spec, answer)]
                self._queue[key] = spec
        if known is not None:
            _settle(answer, spec, known)
            return answer
        answer.add_done_callback(partial(self._forget_cancelled, key))
        try:
            self.prepare()
            self._wake()
        except RuntimeError:  # no thread takes work any more
            self._answer(key, CLOSED, keep=False)
        return answer

    @property
    def num_queued(self) -> int:
        """Grammars that wait for a thread."""
        return len(self._queue)

    def cached(self) -> tuple[int, int]:
        """How many grammars are kept, and their estimated bytes."""
        with self._lock:
            return len(self._cache), self._bytes

    def close(self) -> None:
        """Forget everything; compilations that did not begin fail."""
        with self._lock:
            self._is_closed = True
            left = [one for waiting in self._waiting.values() for one in waiting]
            self._waiting.clear()
            self._queue.clear()
            self._cache.clear()
            self._bytes = 0
        self._threads.shutdown(wait=False, cancel_futures=True)
        for spec, answer in left:
            _settle(answer, spec, CLOSED)

    def _start(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Run a function in one of our threads; a thread that begins now has a larger stack."""
        usual = threading.stack_size(STACK_BYTES)
        try:
            return self._threads.submit(function, *arguments)
        finally:
            threading.stack_size(usual)

    def _wake(self) -> None:
        """Have one more thread take grammars out of the queue, unless all do."""
        with self._lock:
            if self._num_working >= THREADS or not self._queue:
                return
            self._num_working += 1
        try:
            self._start(self._work)
        except RuntimeError:
            with self._lock:
                self._num_working -= 1
            raise

    def _work(self) -> None:
        """Compile what is queued, the oldest first, until nothing is."""
        while (taken := self._take()) is not None:
            self._run(*taken)

    def _take(self) -> tuple[Key, GrammarSpec] | None:
        with self._lock:
            if self._queue:
                return self._queue.popitem(last=False)
            self._num_working -= 1
            return None

    def _forget_cancelled(self, key: Key, answer: "Future[Grammar]") -> None:
        """If a caller has cancelled, it waits no more; a grammar for which nobody waits leaves the queue."""
        if not answer.cancelled():
            return
        with self._lock:
            waiting = self._waiting.get(key, [])
            waiting[:] = [one for one in waiting if one[1] is not answer]
            if not waiting and self._queue.pop(key, None) is not None:
                del self._waiting[key]

    def _run(self, key: Key, spec: GrammarSpec) -> None:
        too_long = Refusal(
            f"takes more than {self._limit_s:g} s to compile; make it smaller or less ambiguous"
        )
        try:
            tokenizer = self.prepare().result()
        except Exception as error:
            logger.warning("grammars are not available: %s", error)
            self._answer(key, Refusal(f"can't be used with this model: {shorten(str(error))}"), keep=False)
            return
        timer = threading.Timer(self._limit_s, self._answer, (key, too_long, False))
        timer.daemon = True
        began = time.thread_time()
        try:
            timer.start()
            found: Grammar | Refusal = tokenizer.compile(spec)
        except BaseException as error:  # also a panic of the library: it ends this request, not the thread
            logger.exception("a grammar of kind %s broke the compiler", spec.kind)
            found = Refusal(f"can't be compiled: {shorten(str(error))}")
        timer.cancel()
        logger.debug("compiled a %s in %.1f ms", spec.kind, 1e3 * (time.thread_time() - began))
        self._answer(key, found)

    def _answer(self, key: Key, found: Grammar | Refusal, keep: bool = True) -> None:
        """Give all who wait for `key` the result, once, and keep it."""
        with self._lock:
            waiting = self._waiting.pop(
                key, []
            )  # empty if all left, the time was over, or `close` was called
            self._queue.pop(key, None)  # there if it was asked for again when the time was over
            if keep and not self._is_closed:
                self._cache[key] = found
                self._bytes += _size(key)
                while len(self._cache) > self._max_entries or self._bytes > self._max_bytes:
                    self._bytes -= _size(self._cache.popitem(last=False)[0])
        for spec, answer in waiting:
            _settle(answer, spec, found)


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    """What is needed of a tokenizer.json."""

    added_tokens: list[_AddedToken] = []


class _Tokenizer:
    """llguidance's tokenizer of a model, and what else its grammars share."""

    def __init__(
        self, library: LLTokenizer, vocab_size: int, eos: tuple[int, ...], special: Mapping[str, int]
    ):
        self.library = library
        self.vocab_size = vocab_size
        self.eos_token_ids = eos
        self.special_tokens = special
        self.limits = LLParserLimits(verbose_errors=False, max_lexer_states=MAX_LEXER_STATES)

    @classmethod
    def build(cls, tokenizer_json: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> "_Tokenizer":
        """Read a model's tokenizer.

        Raises:
            ModelError: the library can't read it, or no end-of-sequence id is in it.
        """
        try:
            added = msgspec.json.decode(tokenizer_json, type=_TokenizerFile).added_tokens
            library = LLTokenizer(
                tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids), slices=[]
            )
            library = library.with_slices(SLICES)
        except (ValueError, msgspec.MsgspecError) as error:
            raise ModelError(f"the tokenizer can't be used for grammars: {error}") from error
        special = {one.content: one.id for one in added if library.is_special_token(one.id)}
        return cls(library, vocab_size, eos_token_ids, special)

    def compile(self, spec: GrammarSpec) -> Grammar | Refusal:
        """The grammar with its first mask, or why it can't be used."""
        found = self._try(self._source(spec))
        if isinstance(found, str):
            return self._refusal(spec, found)
        grammar = Grammar(found, self.vocab_size, self.eos_token_ids)
        first = np.zeros(grammar.num_words, np.int32)
        try:
            Matcher(grammar).fill_mask(first)
        except GrammarError as error:
            return Refusal(f"can't be used: {error}")
        grammar.first_mask = first
        return grammar

    def _source(self, spec: GrammarSpec) -> str:
        """llguidance's text of a grammar."""
        grammars = self._grammars(spec)
        if spec.around:
            around = [
                {"name": name, "lark_grammar": _with_options(lark, spec.whitespace)}
                for name, lark in spec.around
            ]
            grammars = [*around, {**grammars[0], "name": "answer"}, *grammars[1:]]
        for one in grammars:
            one["lark_grammar"] = OPTIONS + one["lark_grammar"]
        return dump({"grammars": grammars})

    def _grammars(self, spec: GrammarSpec) -> list[dict[str, str]]:
        """llguidance's grammars for a specification without what is around it; the first is the start."""
        match spec.kind:
            case "json_schema":
                lark = f"start: %json {with_options(json.loads(spec.text), spec.whitespace)}"
            case "regex":
                lark = f"start: /(?:{spec.text})/"
            case "choice":
                texts = " | ".join(json.dumps(one, ensure_ascii=False) for one in json.loads(spec.text))
                lark = f"start: CHOICE\nCHOICE: {texts}"
            case "lark":
                lark = _with_options(spec.text, spec.whitespace)
            case "structural_tag":
                options = partial(with_options, whitespace=spec.whitespace)
                return list(to_lark(json.loads(spec.text), self.special_tokens, options))
        return [{"lark_grammar": lark}]

    def _try(self, source: str) -> LLMatcher | str:
        """A matcher at the beginning, or the library's error."""
        found = LLMatcher(self.library, source, log_level=0, limits=self.limits)
        return found.get_error() if found.is_error() else found

    def _refusal(self, spec: GrammarSpec, message: str) -> Refusal:
        place = ""
        if spec.kind == "json_schema":

            def error_of(schema: Any) -> str | None:
                text = dump(schema if isinstance(schema, dict) else {"allOf": [schema]})
                found = self._try(self._source(GrammarSpec("json_schema", text)))
                return found if isinstance(found, str) else None

            place = find_place(json.loads(spec.text), error_of)
        return Refusal(f"can't be used: {_first_lines(message)}", place)


def with_options(schema: Any, whitespace: bool) -> str:
    """The text of a canonical schema with our options for the library."""
    options = {"json_allowed_escapes": ESCAPES, "whitespace_flexible": False}
    if whitespace:
        options["whitespace_pattern"] = WHITESPACE
    return dump({"x-guidance": options, **(schema if isinstance(schema, dict) else {"allOf": [schema]})})


def _with_options(lark: str, whitespace: bool) -> str:
    """The grammar with our options in the rules that are a schema and nothing else."""

    def rule(found: re.Match[str]) -> str:
        try:
            return found[1] + with_options(json.loads(found[2]), whitespace)
        except ValueError:  # a schema and more
            return found[0]

    return RULE_OF_SCHEMA.sub(rule, lark)


def _settle(answer: "Future[Grammar]", spec: GrammarSpec, found: Grammar | Refusal) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    if isinstance(found, Refusal):
        answer.set_exception(found.error(spec))
    else:
        answer.set_result(found)


def _queue_is_full(num_queued: int, spec: GrammarSpec) -> RequestError:
    message = (
        f"{num_queued} grammars wait to be compiled, which is as many as this server queues; try again in"
    )
    return RequestError(429, "too_many_grammars", f"{message} a moment", spec.where)


def _size(key: Key) -> int:
    return BYTES_PER_GRAMMAR + BYTES_PER_CHAR * sum(map(len, (key[1], *(lark for _, lark in key[3]))))


def _first_lines(message: str) -> str:
    return message.split("\n<", 1)[0].strip()[:300].replace("\n", "; ")
