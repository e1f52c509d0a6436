"""From the engine's outputs to the text of a reply and its one end."""

import pytest
from small_tokenizers import byte_level

from minisgl.errors import RequestError
from minisgl.request import FinishReason, PackedLogprobs, RequestOutput, SamplingParams, TokenLogprobs
from minisgl.text.reply import ReplyPiece, ReplyText
from minisgl.text.stop import StopStrings
from minisgl.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(byte_level(), {})
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def reply_with(*stops: str) -> ReplyText:
    return ReplyText(TOKENIZER, [], SamplingParams(stop=stops), StopStrings(stops))


def figures(piece: ReplyPiece) -> tuple[str, int, FinishReason | None, bool]:
    """Text, tokens that count, end, and whether the engine must be told."""
    return piece.text, len(piece.token_ids), piece.finish_reason, piece.must_abort


def test_tokens_behind_the_stop_string_are_not_counted_and_the_engine_must_be_told() -> None:
    counted, behind = [*ids_of("The "), *ids_of("fox")], ids_of(" jumps over")
    entries = [TokenLogprobs(token_id, -1.0, 1, [], []) for token_id in (*counted, *behind)]
    piece = reply_with("fox").receive(RequestOutput(1, [*counted, *behind], logprobs=entries))
    assert figures(piece) == ("The ", len(counted), STOP, True)
    assert (piece.token_ids, piece.logprobs) == (counted, entries[: len(counted)])


def test_a_stop_string_in_the_engines_last_output_needs_no_abort() -> None:
    ids = ids_of("a fox")
    assert figures(reply_with("fox").receive(RequestOutput(1, ids, LENGTH))) == ("a ", len(ids), STOP, False)


@pytest.mark.parametrize("stops", [[], ["zebra"]])
def test_the_token_that_ended_the_reply_counts_and_is_not_text(stops: list[str]) -> None:
    ids = ids_of("Hi<tool>")  # an ordinary token given as stop token
    assert figures(reply_with(*stops).receive(RequestOutput(1, ids, STOP))) == ("Hi", len(ids), STOP, False)


def test_text_held_for_a_stop_string_comes_out_at_the_end() -> None:
    reply = reply_with("END!")
    first = reply.receive(RequestOutput(1, ids_of("The EN")))
    last = reply.receive(RequestOutput(1, ids_of("D<|im_end|>"), STOP))
    assert first.text + last.text == "The END"
    assert (first.finish_reason, last.finish_reason) == (None, STOP)


def test_a_stop_string_completed_by_the_flush_counts_as_stop() -> None:
    half = ids_of("🦊")[:1]  # a character the vocabulary has only as bytes
    assert TOKENIZER.decode(half) == "\ufffd"
    reply = reply_with("\ufffd")
    assert reply.receive(RequestOutput(1, ids_of("ok "))).text == "ok "
    assert figures(reply.receive(RequestOutput(1, half, LENGTH))) == ("", len(half), STOP, False)


def test_an_empty_ending_flushes_too() -> None:
    reply = reply_with("xyz")
    assert reply.receive(RequestOutput(1, ids_of("wx"))).text == "w"
    assert figures(reply.receive(RequestOutput(1, [], STOP))) == ("x", 0, STOP, False)


def test_the_prompts_log_probabilities_and_cached_tokens_pass_through() -> None:
    packed, reply = PackedLogprobs(bytes(4), bytes(8)), reply_with()
    first = reply.receive(RequestOutput(1, ids_of("a"), None, 5, prompt_logprobs=packed))
    last = reply.receive(RequestOutput(1, ids_of("b"), LENGTH))
    assert [piece.prompt_logprobs for piece in (first, last)] == [packed, None]
    assert [piece.num_cached_tokens for piece in (first, last)] == [5, 5]
    assert [piece.logprobs for piece in (first, last)] == [None, None]


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_the_engines_error_is_raised_as_the_client_gets_it(reason: FinishReason) -> None:
    with pytest.raises(RequestError, match="no such token") as caught:
        reply_with().receive(RequestOutput(1, [], reason, 0, 422, "refused", "no such token", "prompt"))
    assert (caught.value.status, caught.value.code, caught.value.param) == (422, "refused", "prompt")
    with pytest.raises(RequestError, match=reason.value) as caught:
        reply_with().receive(RequestOutput(1, [], reason))
    assert (caught.value.status, caught.value.code) == (500, "internal_error")


def test_nothing_may_come_after_the_end() -> None:
    for end in (RequestOutput(1, ids_of("fox")), RequestOutput(1, [], LENGTH)):
        reply = reply_with("fox")
        reply.receive(end)
        with pytest.raises(AssertionError, match="request 1"):
            reply.receive(end)
