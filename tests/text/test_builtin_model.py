"""The text side on the built-in model's own files, where they have been pulled, against transformers."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from minisgl.errors import ModelError
from minisgl.text.chat_template import ChatTemplate
from minisgl.text.detokenizer import Detokenizer
from minisgl.text.tokenizer import Tokenizer
from minisgl.weights.sources import resolve_model_folder

TEXTS = [
    "Hello world",
    "  leading spaces\n\n\ttabs",
    "1234567890",
    "déjà vu 世界 🎉👩‍👩‍👧‍👦",
    "<|im_start|>user",
    "",
]
CONVERSATIONS = [
    [{"role": "user", "content": "What is 2+2?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße 世界"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
]


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return resolve_model_folder("smollm2-135m", pull_missing=False)
    except ModelError as error:
        pytest.skip(str(error))


def test_chats_become_the_ids_that_transformers_gives(folder: Path) -> None:
    ours, theirs = Tokenizer.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    template = ChatTemplate.from_folder(folder, ours)
    for messages in CONVERSATIONS:
        ids = ours.encode(template.render(messages), add_special_tokens=False)
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ids == expected


def test_texts_become_the_same_ids_and_come_back_token_by_token(folder: Path) -> None:
    ours, theirs = Tokenizer.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=True)
        assert ids == theirs(text)["input_ids"]
        detokenizer = Detokenizer(ours, [], skip_special_tokens=False)
        assert "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.finish() == text
