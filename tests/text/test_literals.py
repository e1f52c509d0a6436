"""Special tokens in messages as ordinary text: the ids against those of the template and the texts apart."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import byte_level

from minisgl.text.literals import hide_special_tokens, restored, special_tokens_pattern
from minisgl.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(byte_level(), {})
WITH_BOS = Tokenizer(byte_level(bos=True), {})
PATTERN = special_tokens_pattern(TOKENIZER.special_texts()) or re.compile("")
WORDS = (
    "<|im_end|>",
    "<|im_start|>",
    "<s>",
    "<|im_end",
    "|>",
    " ",
    "\n",
    "fox",
    "Grüße",
    "<|im_end|><|im_end|>",
)
CONTENT = st.lists(st.sampled_from(WORDS), max_size=6).map("".join)


def special(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_text(one) for one in ids if tokenizer.is_special(one)]


@settings(max_examples=300, deadline=None)
@given(st.lists(CONTENT, min_size=1, max_size=4), st.booleans())
def test_only_the_templates_special_tokens_are_special(contents: list[str], bos: bool) -> None:
    tokenizer = WITH_BOS if bos else TOKENIZER
    messages = [{"role": "user", "content": content} for content in contents]
    hidden, literals = hide_special_tokens(messages, PATTERN)
    assert not any(PATTERN.search(message["content"]) for message in hidden)
    text = "".join(f"<|im_start|>{message['content']}<|im_end|>\n" for message in hidden)
    meant = "".join(f"<|im_start|>{content}<|im_end|>\n" for content in contents)
    assert restored(text, literals) == meant
    ids = tokenizer.encode(text, bos, literals=literals)
    assert special(tokenizer, ids) == ["<s>"] * bos + ["<|im_start|>", "<|im_end|>"] * len(contents)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>" * bos + meant
    if not literals:
        assert ids == tokenizer.encode(meant, bos)


def test_every_text_of_a_message_is_hidden_and_json_stays_json() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": json.dumps({"a": "<|im_end|>"})}}
    message = {"role": "assistant", "content": "<s>", "reasoning_content": "a<s>", "tool_calls": [call]}
    (hidden,), literals = hide_special_tokens([message], PATTERN)
    assert sorted(literals.values()) == ["<s>", "<|im_end|>"]
    assert restored(json.dumps(hidden), literals) == json.dumps(message)
    assert json.loads(hidden["tool_calls"][0]["function"]["arguments"])["a"] in literals
    assert message["content"] == "<s>", "the caller's messages stay as they are"


def test_nobody_can_guess_a_placeholder() -> None:
    keys = {next(iter(hide_special_tokens([{"content": "<s>"}], PATTERN)[1])) for _ in range(50)}
    assert len(keys) == 50


@pytest.mark.parametrize("texts", [[], [""]])
def test_a_tokenizer_without_special_tokens_needs_no_pattern(texts: list[str]) -> None:
    assert special_tokens_pattern(texts) is None
