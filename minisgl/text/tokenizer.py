"""Text to token ids and back, through the model folder's `tokenizer.json` and without transformers.

Promise: what a client can send never raises anything but `RequestError`, and `token_bytes` gives
each token's own bytes, so that text can be put together token by token.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from minisgl.errors import ModelError, RequestError

SPECIAL_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip


class Tokenizer:
    """A model's tokenizer. Use from several threads is fine: nothing here changes what another call sees.

    Args:
        fast: the `tokenizers` object; truncation and padding are switched off.
        special_tokens: name ("bos_token" ...) -> text, as chat templates know them.
    """

    def __init__(self, fast: FastTokenizer, special_tokens: dict[str, str]) -> None:
        fast.no_truncation()
        fast.no_padding()
        self._fast = fast
        self.special_tokens = dict(special_tokens)
        self._special_ids = frozenset(
            token_id for token_id, token in fast.get_added_tokens_decoder().items() if token.special
        )
        kinds = _decoder_kinds(fast)
        self._byte_of_char = _byte_level_alphabet() if "ByteLevel" in kinds else None
        self._has_byte_tokens = "ByteFallback" in kinds
        self._anchor = next(iter(fast.encode("a", add_special_tokens=False).ids[-1:]), None)
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = 1 + max(fast.get_vocab(with_added_tokens=True).values(), default=-1)

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """Read `tokenizer.json`, and the special tokens' names from the JSON files beside it.

        Raises:
            ModelError: there is no `tokenizer.json`, or it can't be read.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelError(
                f"{folder} has no tokenizer.json; a model folder needs one (converted, fast format)"
            )
        try:
            fast = FastTokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for every defect of the file
            raise ModelError(f"{file} can't be read: {error}") from error
        config = read_json(folder / "tokenizer_config.json")
        named = {**config, **read_json(folder / "special_tokens_map.json")}
        special_tokens = {
            name: text for name in SPECIAL_NAMES if (text := _token_text(named.get(name))) is not None
        }
        _register(fast, config.get("added_tokens_decoder"), special_tokens)
        return cls(fast, special_tokens)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Rendered chat prompts have their special tokens already: pass False.

        Raises:
            RequestError: 400 when `text` is not valid Unicode (lone surrogates).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                400, "invalid_unicode", f"the text is not valid Unicode: {error.reason} at {error.start}"
            ) from None
        return self._fast.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids that are no token give nothing."""
        return self._fast.decode(ids, skip_special_tokens=skip_special_tokens)

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves this token out."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token adds behind other text: possibly a part of a character, possibly none."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._fast.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if self._byte_of_char is not None:
            # As the ByteLevel decoder does: a token with one foreign character stands for itself.
            found = [self._byte_of_char.get(char) for char in token]
            return token.encode() if None in found else bytes(byte for byte in found if byte is not None)
        if self._has_byte_tokens and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        if self._anchor is None:
            return self._fast.decode([token_id], skip_special_tokens=False).encode()
        # Behind an ordinary token, where no decoder strips what it strips at the start of a text.
        before = self._fast.decode([self._anchor], skip_special_tokens=False)
        both = self._fast.decode([self._anchor, token_id], skip_special_tokens=False)
        return both[len(before) :].encode()


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; empty if the file is not there.

    Raises:
        ModelError: the file is there and holds something else.
    """
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file} must hold a JSON object, got {type(content).__name__}")
    return content


def _token_text(value: object) -> str | None:
    """A special token is written as its text or as an object with the text in `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _register(fast: FastTokenizer, added: object, special_tokens: dict[str, str]) -> None:
    """Add what only tokenizer_config.json knows: further added tokens; and make the named ones special."""
    for entry in added.values() if isinstance(added, dict) else ():
        text = _token_text(entry)
        if text is not None and fast.token_to_id(text) is None:
            flags = {
                name: bool(entry.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized")
            }
            fast.add_tokens([AddedToken(text, special=bool(entry.get("special")), **flags)])
    special = {token.content for token in fast.get_added_tokens_decoder().values() if token.special}
    for text in special_tokens.values():
        if text not in special and fast.token_to_id(text) is not None:
            fast.add_special_tokens([AddedToken(text, normalized=False, special=True)])


def _decoder_kinds(fast: FastTokenizer) -> set[str]:
    """Names of the decoder's parts, a Sequence's included."""
    decoder = json.loads(fast.to_str()).get("decoder") or {}
    return {part["type"] for part in [decoder, *decoder.get("decoders", [])] if "type" in part}


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's visible character of each byte: a printable one is itself, the others are U+0100 and up."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(visible)]
    return {
        **{chr(byte): byte for byte in visible},
        **{chr(0x100 + rank): byte for rank, byte in enumerate(others)},
    }
