"""Turns token ids into text while they arrive.

Promise: every push returns all complete characters, and the pushes and `finish` together return the text of
the whole output. The cost of a token does not grow with the output.
"""

import codecs
from collections.abc import Sequence

from minisgl.text.tokenizer import Tokenizer

MAX_CHAR_BYTES = 4


class Detokenizer:
    """Decodes one growing output.

    Args:
        prompt_ids: the prompt, of which only the end matters: the output may complete its last character.
        skip_special_tokens: leave special tokens out of the text.
        kept_special: ids of special tokens that stay in the text all the same.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool = True,
        kept_special: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._kept_special = kept_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = tokenizer.token_bytes(token_id) + tail
            if len(tail) >= MAX_CHAR_BYTES:
                break
        self._utf8.decode(tail)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; the bytes of an incomplete character are held back."""
        tokenizer = self._tokenizer
        if self._skip_special_tokens:
            kept = self._kept_special
            token_ids = [one for one in token_ids if not tokenizer.is_special(one) or one in kept]
        return self._utf8.decode(b"".join(map(tokenizer.token_bytes, token_ids)))

    def finish(self) -> str:
        """The rest of the text: U+FFFD for an incomplete character, otherwise nothing."""
        return self._utf8.decode(b"", final=True)
