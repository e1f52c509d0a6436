"""Detokenizing and stop strings together."""

import pytest
from small_tokenizers import byte_level

from minisgl.text.reply import ReplyText
from minisgl.text.stop import StopStrings
from minisgl.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(byte_level(), {})


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_tokens_behind_the_stop_string_are_not_counted() -> None:
    ids = ids_of("fox")
    behind = ids_of(" jumps over")
    reply = ReplyText(TOKENIZER, [], StopStrings(["fox"]))
    assert reply.push([*ids_of("The "), *ids, *behind]) == ("The ", len(ids_of("The ")) + len(ids), True)


@pytest.mark.parametrize("stops", [[], ["zebra"]])
def test_the_token_that_ended_the_reply_counts_and_is_not_text(stops: list[str]) -> None:
    ids = ids_of("Hi<tool>")  # an ordinary token given as stop token
    reply = ReplyText(TOKENIZER, [], StopStrings(stops))
    assert reply.finish(ids, drop_last=True) == ("Hi", len(ids), False)


def test_text_held_for_a_stop_string_comes_out_at_the_end() -> None:
    reply = ReplyText(TOKENIZER, [], StopStrings(["END!"]))
    first = reply.push(ids_of("The EN"))
    last = reply.finish(ids_of("D<|im_end|>"), drop_last=True)
    assert first.text + last.text == "The END"
    assert not last.stopped


def test_a_stop_string_completed_by_the_flush_counts_as_stop() -> None:
    half = ids_of("🦊")[:1]  # a character the vocabulary has only as bytes
    assert TOKENIZER.decode(half) == "\ufffd"
    reply = ReplyText(TOKENIZER, [], StopStrings(["\ufffd"]))
    assert reply.push(ids_of("ok ")).text == "ok "
    assert reply.finish(half, drop_last=False) == ("", len(half), True)


def test_an_empty_ending_flushes_too() -> None:
    reply = ReplyText(TOKENIZER, [], StopStrings(["xyz"]))
    assert reply.push(ids_of("wx")).text == "w"
    assert reply.finish([], drop_last=True) == ("x", 0, False)
