"""Tokenizers that several files use."""

import pytest
from grammar_tokens import Tokens, make_tokenizer


@pytest.fixture(scope="session")
def tokens() -> Tokens:
    """Single bytes, so that every spelling of a text is one sequence of tokens."""
    return Tokens(make_tokenizer())


@pytest.fixture(scope="session")
def words() -> Tokens:
    """Bytes, words that span several parts of JSON, and tokens outside of text."""
    return Tokens(
        make_tokenizer(
            ['{"', '":', '", "', '"}', "true", " a", "ab", "bc", '"a"', "12", "漢"], ["<call>", "[C]"]
        )
    )
