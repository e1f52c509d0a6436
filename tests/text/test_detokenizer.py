"""Text that grows token by token against `tokenizers` decoding the whole."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import byte_fallback, byte_level

from minisgl.text.detokenizer import Detokenizer
from minisgl.text.tokenizer import Tokenizer

FAST = byte_level()
TOKENIZER = Tokenizer(byte_level(), {})
TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    ["世界<|im_end|>🎉", "👩‍👩‍👧‍👦 family", "x<tool>世界y", "½€…", "\ufffd \ufffd\ufffd"]
)


def pieces_of(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """`ids` cut at these places (modulo the length)."""
    places = sorted({cut % (len(ids) + 1) for cut in cuts} | {0, len(ids)})
    return [ids[a:b] for a, b in itertools.pairwise(places)]


@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=150)
@given(
    ids=st.lists(st.integers(0, TOKENIZER.vocab_size + 3), max_size=60),
    cuts=st.lists(st.integers(0, 1000), max_size=60),
)
def test_random_ids_in_random_pieces_equal_decoding_the_whole(
    skip: bool, ids: list[int], cuts: list[int]
) -> None:
    detokenizer = Detokenizer(TOKENIZER, [], skip_special_tokens=skip)
    text = "".join(detokenizer.push(piece) for piece in pieces_of(ids, cuts)) + detokenizer.finish()
    assert text == FAST.decode(ids, skip_special_tokens=skip)


@settings(max_examples=150)
@given(text=TEXTS)
def test_only_an_unfinished_character_is_held_back(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER, [], skip_special_tokens=False)
    ids = FAST.encode(text, add_special_tokens=False).ids
    shown = ""
    for count, token_id in enumerate(ids, start=1):
        shown += detokenizer.push([token_id])
        complete = b"".join(map(TOKENIZER.token_bytes, ids[:count])).decode("utf-8", "ignore")
        assert shown == complete
    assert detokenizer.finish() == ""
    assert shown == text


def test_no_text_is_lost_when_the_output_stops_inside_a_character() -> None:
    ids = FAST.encode("good text 🦊").ids[:-1]  # a character the vocabulary has only as bytes
    assert FAST.decode(ids) == "good text \ufffd"
    detokenizer = Detokenizer(TOKENIZER, [])
    shown = "".join(detokenizer.push([token_id]) for token_id in ids)
    assert shown == "good text "
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_do_not_leak() -> None:
    ids = FAST.encode("Hi<|im_end|>").ids
    assert Detokenizer(TOKENIZER, []).push(ids) == "Hi"
    assert Detokenizer(TOKENIZER, [], skip_special_tokens=False).push(ids) == "Hi<|im_end|>"


@pytest.mark.parametrize("char", ["é", "世", "🎉"])
def test_an_output_completes_the_character_its_prompt_stopped_in(char: str) -> None:
    plain = [byte_token(byte) for byte in char.encode()]
    for cut in range(1, len(plain)):
        detokenizer = Detokenizer(TOKENIZER, FAST.encode("Say ").ids + plain[:cut])
        assert detokenizer.push(plain[cut:]) + detokenizer.finish() == char


def test_a_prompt_that_ends_with_a_character_adds_nothing() -> None:
    for prompt in ("hello", "世界", "🎉", "", "<|im_start|>"):
        detokenizer = Detokenizer(TOKENIZER, FAST.encode(prompt).ids)
        assert detokenizer.push(FAST.encode(" world").ids) == " world"


@settings(max_examples=100)
@given(text=st.text("abc é.日🎉", min_size=1))
def test_byte_fallback_vocabularies_stream_the_same_text(text: str) -> None:
    fast = byte_fallback()
    detokenizer = Detokenizer(Tokenizer(byte_fallback(), {}), fast.encode("a").ids)
    ids = fast.encode(text, add_special_tokens=False).ids
    shown = "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.finish()
    assert shown == " " + text  # behind other text the "▁" of the first word is a space


def byte_token(byte: int) -> int:
    """The id of the token that is this one byte."""
    for token, token_id in FAST.get_vocab().items():
        if len(token) == 1 and TOKENIZER.token_bytes(token_id) == bytes([byte]):
            return token_id
    raise LookupError(byte)
