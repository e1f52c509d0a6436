"""Token ids to text while they arrive.

Promise: every push returns all complete characters, the pushes and `finish` together give the text of
the whole output, and a token costs the same whether it is the first or the millionth.
"""

import codecs
from collections.abc import Sequence

from minisgl.text.tokenizer import Tokenizer

LONGEST_CHAR_BYTES = 4


class Detokenizer:
    """The text of one growing output.

    Args:
        prompt_ids: only the end matters: a prompt may stop inside a character that the output completes.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = tokenizer.token_bytes(token_id) + tail
            if len(tail) >= LONGEST_CHAR_BYTES:
                break
        self._utf8.decode(tail)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text these tokens complete; the bytes of an unfinished character are held back."""
        tokenizer = self._tokenizer
        if self._skip_special_tokens:
            token_ids = [token_id for token_id in token_ids if not tokenizer.is_special(token_id)]
        return self._utf8.decode(b"".join(map(tokenizer.token_bytes, token_ids)))

    def finish(self) -> str:
        """What was held back: U+FFFD for an unfinished character, otherwise nothing."""
        return self._utf8.decode(b"", final=True)
