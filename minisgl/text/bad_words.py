"""Converts words that must not be generated into the token sequences that spell them."""

from collections.abc import Iterable

from minisgl.text.tokenizer import Tokenizer


def bad_words_ids(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The token ids of each word, with and without a space before it; each sequence once.

    Raises:
        RequestError: 400 when a word is not valid Unicode.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        for text in (bare, " " + bare) if bare else (word,):
            found[tuple(tokenizer.encode(text, add_special_tokens=False, param="bad_words"))] = None
    found.pop((), None)
    return tuple(found)
