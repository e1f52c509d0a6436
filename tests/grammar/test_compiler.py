"""Compiling: shared, kept, bounded; and what is refused with which limit."""

import json
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from grammar_tokens import EOS, VOCAB, Tokens, make_tokenizer

from minisgl.errors import RequestError
from minisgl.grammar import compiler as compiler_module
from minisgl.grammar.compiler import GrammarCompiler, Refusal
from minisgl.grammar.matcher import Grammar, Matcher
from minisgl.grammar.spec import (
    GrammarSpec,
    choice_spec,
    json_schema_spec,
    made_spec,
    regex_spec,
    structural_tag_spec,
    within,
)

TOKENIZER = make_tokenizer().to_str()


def new_compiler(**knobs: Any) -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, VOCAB, [EOS], **knobs)


def integers(most: int) -> Any:
    return json_schema_spec({"type": "integer", "maximum": most}, f"schema{most}")


def count_compilations(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts compiled from now on."""
    tokenizer, found = compiler.prepare().result(), []

    def compile_and_note(spec: Any) -> Grammar | Refusal:
        found.append(spec.text)
        return type(tokenizer).compile(tokenizer, spec)

    monkeypatch.setattr(tokenizer, "compile", compile_and_note)
    return found


def test_equal_grammars_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = new_compiler()
    found = count_compilations(compiler, monkeypatch)
    first = [compiler.compile(integers(7)) for _ in range(20)]
    others = [compiler.compile(choice_spec(["a"], "choice"))]
    grammars = {one.result() for one in first}
    assert len(grammars) == 1
    assert compiler.compile(integers(7)).result() in grammars
    assert others[0].result() not in grammars
    assert len(found) == 2


def test_whoever_cancels_cancels_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = new_compiler()
    tokenizer, go = compiler.prepare().result(), threading.Event()
    right = tokenizer.compile
    monkeypatch.setattr(tokenizer, "compile", lambda spec: go.wait(10) and right(spec))
    first, second = (compiler.compile(integers(3)) for _ in range(2))
    assert first.cancel()
    go.set()
    assert isinstance(second.result(), Grammar)
    assert first.cancelled()


class Held:
    """Holds the compilations of a compiler with one thread until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **knobs: Any) -> None:
        monkeypatch.setattr(compiler_module, "THREADS", 1)
        self.compiler = new_compiler(**knobs)
        tokenizer = self.compiler.prepare().result()
        right, self.go, self.begun = tokenizer.compile, threading.Event(), threading.Event()
        self.compiled: list[str] = []

        def wait(spec: Any) -> Grammar | Refusal:
            self.begun.set()
            assert self.go.wait(30)
            self.compiled.append(spec.where)
            return right(spec)

        monkeypatch.setattr(tokenizer, "compile", wait)


def test_a_grammar_for_which_nobody_waits_leaves_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    compiler = held.compiler
    running = compiler.compile(integers(0))
    assert held.begun.wait(30)
    one, other = (compiler.compile(integers(1)) for _ in range(2))
    last = compiler.compile(integers(2))
    assert compiler.num_queued == 2
    assert one.cancel()
    assert compiler.num_queued == 2, "the other caller still waits"
    assert other.cancel()
    assert compiler.num_queued == 1
    assert running.cancel(), "what has begun goes on and is kept"
    assert not compiler._waiting[next(iter(compiler._waiting))]
    again = compiler.compile(integers(1))
    held.go.set()
    for waiting in (last, again, compiler.compile(integers(0))):
        assert isinstance(waiting.result(30), Grammar)
    assert held.compiled == ["schema0", "schema2", "schema1"]
    assert (compiler.num_queued, compiler._waiting) == (0, {})


def test_a_full_queue_refuses_grammars_that_are_not_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch, max_queued=2)
    compiler = held.compiler
    begun = compiler.compile(integers(0))
    assert held.begun.wait(30)
    queued = [compiler.compile(integers(most)) for most in (1, 2, 1, 0)]
    refused = compiler.compile(integers(3))
    error = refused.exception(0)
    assert isinstance(error, RequestError)
    assert (error.status, error.code, error.param) == (429, "too_many_grammars", "schema3")
    assert "2 grammars wait" in error.message
    assert queued[1].cancel()
    queued.append(compiler.compile(integers(4)))
    queued.append(compiler.compile(integers(5), may_refuse=False))
    held.go.set()
    for waiting in (begun, *queued):
        assert waiting.cancelled() or isinstance(waiting.result(30), Grammar)
    assert isinstance(compiler.compile(integers(3)).result(30), Grammar), "a full queue is no verdict"


def test_many_grammars_keep_all_threads_busy_and_leave_none(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = new_compiler()
    tokenizer, both = compiler.prepare().result(), threading.Barrier(2)
    right = tokenizer.compile

    def meet(spec: Any) -> Grammar | Refusal:
        both.wait(30)  # in pairs: one thread alone would wait here for ever
        return right(spec)

    monkeypatch.setattr(tokenizer, "compile", meet)
    for waiting in [compiler.compile(integers(most)) for most in range(20)]:
        assert isinstance(waiting.result(30), Grammar)
    assert (compiler.num_queued, compiler._waiting) == (0, {})


def test_the_newest_grammars_are_kept_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = new_compiler(cache_entries=2)
    found = count_compilations(compiler, monkeypatch)
    for most in (1, 2, 1, 3, 1, 2):
        compiler.compile(integers(most)).result()
    assert [json.loads(text)["maximum"] for text in found] == [1, 2, 3, 2]
    assert compiler.cached()[0] == 2


def test_the_newest_grammars_are_kept_by_bytes() -> None:
    one = new_compiler()
    one.compile(integers(1)).result()
    size = one.cached()[1]
    compiler = new_compiler(cache_bytes=2 * size)
    for most in range(5):
        compiler.compile(integers(most)).result()
    assert compiler.cached() == (2, 2 * size)
    tiny = new_compiler(cache_bytes=size - 1)
    assert isinstance(tiny.compile(integers(1)).result(), Grammar)
    assert tiny.cached() == (0, 0)


def test_a_refusal_is_kept_and_names_each_callers_field(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = new_compiler()
    found = count_compilations(compiler, monkeypatch)
    schema = {
        "type": "object",
        "properties": {"a": {"minimum": 3, "maximum": 2, "type": "integer"}},
        "required": ["a"],
    }
    for field in ("tools[0].function.parameters", "response_format"):
        with pytest.raises(RequestError) as caught:
            compiler.compile(json_schema_spec(schema, field)).result()
        assert caught.value.param == f"{field}.properties.a"
        assert caught.value.message.startswith(f"{field}.properties.a can't be used: ")
    assert len(found) == 1


def test_a_grammar_in_which_the_library_gave_up_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = new_compiler()
    found = count_compilations(compiler, monkeypatch)
    worn = compiler.compile(integers(1)).result()
    matcher = Matcher(worn)
    monkeypatch.setattr(
        matcher, "_library", SimpleNamespace(is_error=lambda: True, stop_reason=lambda: "tired")
    )
    assert "tired" in str(matcher._error_of_mask(np.zeros(worn.num_words, np.int32)))
    fresh = compiler.compile(integers(1)).result()
    assert fresh is not worn
    assert compiler.compile(integers(1)).result() is fresh
    assert len(found) == 2
    assert compiler.cached()[0] == 1


def test_a_compilation_that_takes_too_long_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = new_compiler(limit_s=0.05)
    tokenizer, go = compiler.prepare().result(), threading.Event()
    right = tokenizer.compile
    slow = integers(5)
    monkeypatch.setattr(
        tokenizer, "compile", lambda spec: go.wait(30) and right(spec) if spec == slow else right(spec)
    )
    waiting = compiler.compile(slow)
    with pytest.raises(RequestError, match=r"schema5 takes more than 0.05 s to compile"):
        waiting.result(30)
    assert isinstance(compiler.compile(integers(6)).result(30), Grammar)
    go.set()
    # A busy moment is no verdict: asked again, it is compiled again, or was meanwhile.
    assert isinstance(compiler.compile(slow).result(30), Grammar)


class Panic(BaseException):
    """What a panic of the library looks like."""


def test_a_defect_in_the_library_fails_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = new_compiler()
    tokenizer = compiler.prepare().result()

    def broken(spec: Any) -> Grammar:
        raise Panic("panic")

    monkeypatch.setattr(tokenizer, "compile", broken)
    with pytest.raises(RequestError, match="panic"):
        compiler.compile(integers(5)).result()


@pytest.mark.parametrize("text", ["{}", "no json", '{"added_tokens": []}'])
def test_a_tokenizer_that_can_not_be_read_fails_requests_only(text: str) -> None:
    compiler = GrammarCompiler(text, VOCAB, [EOS])
    with pytest.raises(RequestError, match="with this model") as caught:
        compiler.compile(integers(5)).result()
    assert caught.value.status == 400


def test_close_fails_what_did_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "THREADS", 1)
    compiler = new_compiler()
    tokenizer, go, began = compiler.prepare().result(), threading.Event(), threading.Event()
    right = tokenizer.compile

    def wait(spec: Any) -> Any:
        began.set()
        go.wait(30)
        return right(spec)

    monkeypatch.setattr(tokenizer, "compile", wait)
    first = compiler.compile(integers(1))
    assert began.wait(30)
    second = compiler.compile(integers(2))
    compiler.close()
    for one in (first, second):
        with pytest.raises(RequestError, match="the engine ends"):
            one.result(30)
    go.set()
    assert compiler.cached() == (0, 0)
    for one in (compiler, new_compiler()):
        one.close()
        with pytest.raises(RequestError, match="the engine ends"):
            one.compile(integers(3)).result(30)


def test_a_spec_travels_in_messages() -> None:
    for spec in (integers(4), regex_spec("a", "r"), choice_spec(["x"], "c")):
        packed = msgspec.msgpack.encode(spec)
        assert msgspec.msgpack.decode(packed, type=GrammarSpec) == spec
        assert {spec: 1}[msgspec.msgpack.decode(packed, type=GrammarSpec)] == 1


def test_callbacks_come_with_the_result(tokens: Tokens) -> None:
    came = threading.Event()
    tokens.compiler.compile(regex_spec("[0-9]{1,7}x", "regex")).add_done_callback(lambda done: came.set())
    assert came.wait(30)


THOUGHT = 'start: ("<think>" END)? (@calls | @answer)\nEND: /[a-z ]*<.think>/\n'
CALLS = 'start: "[call]" rule_0\nrule_0: %json {"type":"object"}\n'
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<f>",
        "content": {"type": "json_schema", "json_schema": {"const": 7}},
        "end": "</f>",
    },
}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (json_schema_spec({"type": "integer"}, "x"), "12"),
        (regex_spec("a+", "x"), "aa"),
        (choice_spec(["yes", "no"], "x"), "no"),
        (made_spec('start: "b"+', "x"), "bb"),
        (structural_tag_spec(TAG, "x"), "<f>7</f>"),
    ],
)
def test_an_answer_may_stand_within_other_grammars(tokens: Tokens, answer: GrammarSpec, text: str) -> None:
    grammar = tokens.compile(within(answer, (("reply", THOUGHT), ("calls", CALLS))))
    alone = tokens.compile(answer)
    assert grammar is not alone
    assert tokens.accepts(alone, text)
    assert not tokens.accepts(alone, f"<think>a b</think>{text}")
    assert tokens.accepts(grammar, text)
    assert tokens.accepts(grammar, f"<think>a b</think>{text}")
    assert not tokens.accepts(grammar, "<think>a b</think>")
    assert tokens.accepts(grammar, '[call]{"a": 1}')
    assert not tokens.accepts(grammar, '[call]{"a":  1}'), "white space is bounded in a rule's schema, too"
    assert not tokens.accepts(grammar, f"{text}[call]{{}}")
