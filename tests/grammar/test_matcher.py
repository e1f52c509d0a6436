"""Masks equal what may really follow; whatever goes wrong closes the request's mask."""

import itertools
import random
import re

import numpy as np
import pytest
from grammar_tokens import EOS, SECOND_EOS, VOCAB, Tokens, allowed, make_tokenizer, mask_of
from llguidance import LLMatcher, LLParserLimits

from minisgl.errors import ModelError
from minisgl.grammar import matcher as matcher_module
from minisgl.grammar.matcher import (
    Grammar,
    GrammarError,
    MaskFiller,
    Matcher,
    NoTokenAllowedError,
    TokenRefusedError,
)
from minisgl.grammar.spec import choice_spec, grammar_spec, json_object_spec, regex_spec
from minisgl.weights.sources import resolve_model_folder

CHOICES = ["a", "ab", "abc", "abd", "true", " a", "x y", "漢字", 'q"q']
CRAMPED = {
    "type": "object",
    "properties": {
        "a": {
            "anyOf": [
                {
                    "anyOf": [
                        {"type": "object", "properties": {f"p{i}": {}, "k": {"const": i}}, "required": ["k"]}
                        for i in range(begin, begin + 500)
                    ]
                }
                for begin in (0, 500)
            ]
        }
    },
    "required": ["a"],
}
"""The library gives up at `{"a":{`: too many things may come next."""


def starving(tokens: Tokens) -> Matcher:
    """A matcher whose library has too little fuel for the next mask."""
    library = tokens.compiler.prepare().result().library
    start = LLMatcher(
        library,
        LLMatcher.grammar_from_regex("x(?:.{1,50}y.{50}){30}"),
        log_level=0,
        limits=LLParserLimits(step_lexer_fuel=10, verbose_errors=False),
    )
    assert not start.is_error()
    matcher = Matcher(Grammar(start, VOCAB, (EOS, SECOND_EOS)))
    matcher.advance(tokens.ids("x"))
    return matcher


def token_bytes(tokens: Tokens) -> dict[int, bytes]:
    library = tokens.compiler.prepare().result().library
    return {i: library.decode_bytes([i]) for i in range(2, library.vocab_size) if library.decode_bytes([i])}


def test_masks_of_choices_are_what_a_search_finds(words: Tokens) -> None:
    grammar = words.compile(choice_spec(CHOICES, "choice"))
    texts = [choice.encode() for choice in CHOICES]
    special = set(words.compiler.prepare().result().special_tokens.values())
    everything = {i: text for i, text in token_bytes(words).items() if i not in special}
    prefixes = {text[:end] for text in texts for end in range(len(text) + 1)}
    one_byte = {text: i for i, text in everything.items() if len(text) == 1}
    for prefix in prefixes:
        matcher = Matcher.rebuilt(grammar, [one_byte[bytes([byte])] for byte in prefix])
        expected = {i for i, text in everything.items() if prefix + text in prefixes}
        if prefix in texts:
            expected |= {EOS, SECOND_EOS}
        assert allowed(matcher) == expected, prefix


def test_masks_of_an_expression_are_what_a_search_finds(words: Tokens) -> None:
    pattern = "(ab|b)c?[1-3]{2}(true)?"
    grammar = words.compile(regex_spec(pattern, "regex"))
    full = {
        text
        for length in range(9)
        for text in map("".join, itertools.product("abc123", repeat=min(length, 6)))
        if re.fullmatch(pattern, text)
    }
    full |= {text + "true" for text in full}
    prefixes = {text[:end] for text in full for end in range(len(text) + 1)}
    everything = {i: text.decode() for i, text in token_bytes(words).items() if text.isascii()}
    everything = {i: text for i, text in everything.items() if "\xff" not in text}
    for prefix in random.Random(0).sample(sorted(prefixes), 60):
        expected = {i for i, text in everything.items() if prefix + text in prefixes}
        if prefix in full:
            expected |= {EOS, SECOND_EOS}
        matcher = Matcher(grammar)
        matcher.advance(words.ids(prefix))
        assert allowed(matcher) == expected, prefix


def test_every_allowed_token_is_taken_and_no_other(words: Tokens) -> None:
    grammar = words.schema(
        {"type": "object", "properties": {"a": {"type": ["integer", "string", "boolean"]}}}
    )
    draw = random.Random(0)
    for _ in range(10):
        matcher = Matcher(grammar)
        while not matcher.is_finished and matcher.num_tokens < 12:
            choices = allowed(matcher)
            for token_id in range(VOCAB):
                twin = matcher.copy()
                try:
                    twin.advance([token_id])
                    taken = True
                except TokenRefusedError:
                    taken = False
                assert taken == (token_id in choices), token_id
            matcher.advance([draw.choice(sorted(choices))])


def test_padding_ids_are_never_allowed(words: Tokens) -> None:
    known = words.tokenizer.get_vocab_size()
    assert known < VOCAB
    matcher = Matcher(words.compile(regex_spec("[^]*", "regex")))
    assert max(allowed(matcher)) < known
    assert mask_of(matcher).shape == ((VOCAB + 31) // 32,)
    with pytest.raises(TokenRefusedError, match=str(VOCAB - 1)):
        matcher.advance([VOCAB - 1])


def test_a_rebuilt_matcher_and_a_copy_equal_the_old_one(words: Tokens) -> None:
    grammar = words.compile(json_object_spec("response_format"))
    for seed in range(10):
        ids = words.ids(words.walk(grammar, seed))
        old = Matcher(grammar)
        for count in range(len(ids) + 1):
            rebuilt, twin = Matcher.rebuilt(grammar, ids[:count]), old.copy()
            assert (mask_of(rebuilt) == mask_of(old)).all()
            assert (mask_of(twin) == mask_of(old)).all()
            assert rebuilt.may_end == old.may_end == twin.may_end
            old.advance(ids[count : count + 1])
            assert twin.num_tokens == count


def test_tokens_may_come_several_at_a_time(tokens: Tokens) -> None:
    grammar = tokens.compile(json_object_spec("response_format"))
    matcher = Matcher(grammar)
    matcher.advance(tokens.ids('{"a": 1'))
    matcher.advance([])
    matcher.advance([*tokens.ids("}"), EOS, EOS])
    assert matcher.is_finished
    assert matcher.may_end
    assert matcher.num_tokens == 10


def test_after_the_end_only_ends_of_sequence_are_allowed(tokens: Tokens) -> None:
    matcher = Matcher(tokens.compile(choice_spec(["a", "ab"], "choice")))
    assert not matcher.may_end
    matcher.advance(tokens.ids("a"))
    assert matcher.may_end
    assert allowed(matcher) == {EOS, SECOND_EOS, *tokens.ids("b")}
    ended = matcher.copy()
    ended.advance([SECOND_EOS])
    assert ended.is_finished
    assert allowed(ended) == {EOS, SECOND_EOS}
    ended.advance([EOS])
    matcher.advance(tokens.ids("b"))
    assert allowed(matcher) == {EOS, SECOND_EOS}
    with pytest.raises(TokenRefusedError):
        ended.advance(tokens.ids("b"))


@pytest.mark.parametrize("bad", ["x", "\x00EOS", "a\x00EOSb"])
def test_a_token_that_was_not_allowed_closes_the_matcher(bad: str, tokens: Tokens) -> None:
    matcher = Matcher(tokens.compile(choice_spec(["a"], "choice")))
    ids = [
        one for part in re.split("(\x00EOS)", bad) for one in ([EOS] if "EOS" in part else tokens.ids(part))
    ]
    with pytest.raises(TokenRefusedError):
        matcher.advance(ids)
    out = np.full(matcher.grammar.num_words, -1, np.int32)
    for _ in range(2):
        with pytest.raises(TokenRefusedError):
            matcher.fill_mask(out)
        assert not out.any()
    with pytest.raises(TokenRefusedError):
        matcher.advance(tokens.ids("a"))
    assert not matcher.may_end


def test_where_the_library_gives_up_the_mask_is_closed(tokens: Tokens) -> None:
    cramped = tokens.after(tokens.schema(CRAMPED), '{"a":')
    with pytest.raises(GrammarError, match="too much work"):
        cramped.advance(tokens.ids("{"))
    for matcher in (cramped, starving(tokens)):
        out = np.full(matcher.grammar.num_words, -1, np.int32)
        with pytest.raises(GrammarError, match="too much work"):
            matcher.fill_mask(out)
        assert not out.any()
        assert not matcher.may_end


def test_a_mask_without_a_token_is_an_error(tokens: Tokens) -> None:
    library = tokens.compiler.prepare().result().library
    matcher = Matcher(tokens.compile(choice_spec(["ab"], "choice")))
    assert library.vocab_size == VOCAB
    empty = np.zeros(matcher.grammar.num_words, np.int32)
    assert isinstance(matcher._error_of_mask(empty), NoTokenAllowedError)
    with pytest.raises(NoTokenAllowedError):
        matcher.advance(tokens.ids("a"))


def test_slow_masks_end_the_request_in_time(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = Matcher(tokens.compile(json_object_spec("response_format")))
    matcher.advance(tokens.ids("{"))
    monkeypatch.setattr(matcher_module, "SLOW_MASK_S", -1.0)
    monkeypatch.setattr(matcher_module, "SLOW_BUDGET_S", 0.0)
    with pytest.raises(GrammarError, match="take too long"):
        matcher.fill_mask(np.zeros(matcher.grammar.num_words, np.int32))


def test_many_masks_equal_single_ones(words: Tokens) -> None:
    grammars = [
        words.compile(json_object_spec("response_format")),
        words.compile(choice_spec(CHOICES, "choice")),
        words.schema({"type": "array", "items": {"type": "integer"}}),
    ]
    draw = random.Random(0)
    rows = []
    for row in draw.sample(range(12), 9):
        matcher = Matcher(grammars[row % 3])
        for _ in range(row):
            matcher.advance([draw.choice(sorted(allowed(matcher)))])
        rows.append((row, matcher))
    filler = MaskFiller(2)
    out = np.full((12, grammars[0].num_words), 7, np.int32)
    for suspects in (False, True):
        filler._suspects = suspects
        assert filler.fill(rows, out) == []
        for row in range(12):
            matcher = dict(rows).get(row)
            assert (out[row] == (7 if matcher is None else mask_of(matcher))).all()


def test_one_failing_row_leaves_its_neighbours_alone(tokens: Tokens) -> None:
    good = Matcher(tokens.compile(json_object_spec("response_format")))
    good.advance(tokens.ids("{"))
    gives_up = starving(tokens)
    refused = good.copy()
    with pytest.raises(TokenRefusedError):
        refused.advance(tokens.ids("x"))
    out = np.full((4, good.grammar.num_words), -1, np.int32)
    failed = MaskFiller(2).fill([(3, gives_up), (0, good), (2, refused)], out)
    assert sorted(row for row, _ in failed) == [2, 3]
    assert not out[2].any()
    assert not out[3].any()
    assert (out[0] == mask_of(good)).all()
    assert (out[1] == -1).all()


class Panic(BaseException):
    """What a panic of the library looks like."""


class Broken:
    """A library that panics."""

    def is_stopped(self) -> bool:
        return False

    def is_error(self) -> bool:
        return False

    def is_accepting(self) -> bool:
        return True

    def unsafe_compute_mask_ptr(self, *arguments: object) -> None:
        raise Panic("at the disco")

    try_consume_tokens = unsafe_compute_mask_ptr


def test_a_panic_of_the_library_closes_the_masks(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    start = tokens.after(tokens.compile(json_object_spec("response_format")), "{")
    out = np.full((2, start.grammar.num_words), -1, np.int32)
    for act in (lambda one: one.fill_mask(out[0]), lambda one: one.advance([5])):
        matcher = start.copy()
        monkeypatch.setattr(matcher, "_library", Broken())
        with pytest.raises(GrammarError, match="disco"):
            act(matcher)
        with pytest.raises(GrammarError, match="disco"):
            matcher.fill_mask(out[0])
        assert not out[0].any()
    filler = MaskFiller(1)
    monkeypatch.setattr(filler, "_threads", Broken())
    failed = filler.fill([(0, start.copy()), (1, start.copy())], out)
    assert [row for row, _ in failed] == [0, 1]
    assert not out.any()


def test_the_requests_of_one_grammar_share_the_time_of_slow_masks(
    tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matcher_module, "SLOW_MASK_S", -1.0)
    grammar = tokens.compile(regex_spec("[a-c]{1,9}", "x"))
    first, second = grammar.matcher(), grammar.matcher()
    first.advance(tokens.ids("a"))
    second.advance(tokens.ids("a"))
    mask = np.zeros(grammar.num_words, np.int32)
    first.fill_mask(mask)
    grammar.slow_s = matcher_module.SLOW_BUDGET_S + 1
    with pytest.raises(GrammarError, match="take too long"):
        second.fill_mask(mask)
    grammar.slow_s = 0.4
    grammar.matcher()
    assert grammar.slow_s == 0.2


def test_a_slow_row_is_found_among_others(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher_module, "SLOW_MASK_S", 0.004)
    monkeypatch.setattr(matcher_module, "SLOW_BUDGET_S", 0.01)
    slow = Matcher(tokens.compile(grammar_spec('start: start start | "a"', "grammar")))
    good = Matcher(tokens.compile(json_object_spec("response_format")))
    good.advance(tokens.ids("{"))
    filler, out = MaskFiller(1), np.zeros((2, good.grammar.num_words), np.int32)
    failed: list[tuple[int, GrammarError]] = []
    for _ in range(3000):
        failed = filler.fill([(0, slow), (1, good)], out)
        if failed:
            break
        slow.advance(tokens.ids("a"))
    assert [row for row, _ in failed] == [0]
    assert "take too long" in str(failed[0][1])
    assert out[1].any()


def test_the_first_mask_is_computed_once(tokens: Tokens) -> None:
    grammar = tokens.compile(json_object_spec("response_format"))
    assert grammar.first_mask is not None
    fresh = Grammar(grammar.start, VOCAB, (EOS, SECOND_EOS))
    assert (mask_of(Matcher(fresh)) == grammar.first_mask).all()
    assert allowed(Matcher(grammar)) == set(tokens.ids("{"))


def test_a_real_tokenizer_writes_valid_json_through_its_masks() -> None:
    try:
        folder = resolve_model_folder("smollm2-135m", pull_missing=False)
    except ModelError as error:
        pytest.skip(str(error))
    from tokenizers import Tokenizer

    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    tokens = Tokens(Tokenizer.from_str(text), 49152, [2])
    grammar = tokens.schema(
        {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "number"}}}
    )
    assert allowed(tokens.after(grammar, "{}")) == {2}
    for text in ('{"name": "Ann Lee", "n": -1.5e3}', '{\n  "name": "漢字 😀",\n  "n": 0\n}'):
        assert tokens.accepts(grammar, text)
    assert not tokens.accepts(grammar, '{"name": 3}')
    special = [i for i in range(17) if i != 2]
    matcher = tokens.after(grammar, '{"name": "')
    assert not allowed(matcher) & set(special)


def test_an_end_of_sequence_id_that_no_tokenizer_has_is_an_error() -> None:
    tokens = Tokens(make_tokenizer(), eos=[VOCAB - 1])
    with pytest.raises(ModelError, match="tokenizer"):
        tokens.compiler.prepare().result()
