"""Converts text to token ids and back, from the model folder's `tokenizer.json`, without transformers.

Promise: no text from a client raises anything but `RequestError`, and `token_bytes` gives each token's own
bytes, so that text can be assembled token by token.
"""

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as FastTokenizer

from minisgl.errors import ModelError, RequestError
from minisgl.text.literals import restored

SPECIAL_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip

SHORT_TEXT_BYTES = 4096
"""Text up to this size (about a millisecond) is tokenized without releasing the interpreter's lock."""
PROBE_CHARS_PER_TOKEN = 16
"""If a text has more characters than this times its token limit, its beginning is tokenized first. Text in
any language has fewer characters per token; runs of spaces have more."""
PROBE_SLACK = 2
"""The text is refused if its beginning has more than this times the token limit. The factor leaves room for
the few tokens that differ because the text was cut."""


class Tokenizer:
    """A model's tokenizer. Several threads may use it: no call changes the result of another.

    Args:
        fast: the `tokenizers` object; its truncation and padding are switched off.
        special_tokens: name ("bos_token" ...) -> text, for chat templates.
    """

    def __init__(self, fast: FastTokenizer, special_tokens: dict[str, str]) -> None:
        fast.no_truncation()
        fast.no_padding()
        self._fast = fast
        self.special_tokens = dict(special_tokens)
        self._special_ids = frozenset(
            token_id for token_id, token in fast.get_added_tokens_decoder().items() if token.special
        )
        content = json.loads(fast.to_str())
        kinds = {part["type"] for part in _flattened(content["decoder"], "decoders")}
        self._byte_of_char = _byte_level_alphabet() if "ByteLevel" in kinds else None
        self._has_byte_tokens = "ByteFallback" in kinds
        self._anchor_id = next(iter(fast.encode("a", add_special_tokens=False).ids[-1:]), None)
        self._bytes: dict[int, bytes] = {}
        vocab = fast.get_vocab(with_added_tokens=True)
        self._token_bounds = _token_bounds(content, vocab)
        self.vocab_size = 1 + max(vocab.values(), default=-1)

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

    def encode(
        self,
        text: str,
        add_special_tokens: bool,
        *,
        max_tokens: int | None = None,
        param: str = "prompt",
        literals: Mapping[str, str] = {},
    ) -> list[int]:
        """Token ids of `text`. Rendered chat prompts already have special tokens, so pass False for them.

        Text with far more than `max_tokens` tokens is refused before all of it is tokenized; the result may
        still be longer. `param` is the text's name in errors. Other threads run while long text is tokenized.

        Args:
            literals: placeholders in `text` -> what stands there as ordinary text, special tokens or not.

        Raises:
            RequestError: 400 when `text` is far too long, or is not valid Unicode (lone surrogates).
        """
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            half = f"\\u{ord(text[error.start]):04x}, half of a character, at character {error.start}"
            raise RequestError(
                400,
                "invalid_unicode",
                f"the text has the lone surrogate {half}; send both halves of it, or leave it out",
                param,
            ) from None
        if max_tokens is not None and (
            self._surely_exceeds(max_tokens, data) or self._beginning_exceeds(max_tokens, text)
        ):
            raise RequestError(
                400,
                "context_length_exceeded",
                f"the prompt has {len(data)} bytes and so more than {max_tokens} tokens, which is what "
                "prompt and answer together may have; shorten the prompt",
                param,
            )
        encoding = self._encode(text, len(data), add_special_tokens)
        return self._ids_with_literals(text, encoding, literals) if literals else encoding.ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids outside the vocabulary add no text."""
        return self._fast.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The token's text in the vocabulary; empty for an id outside the vocabulary."""
        return self._fast.id_to_token(token_id) or ""

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves this token out."""
        return token_id in self._special_ids

    def special_ids(self, wanted: Callable[[str], bool]) -> frozenset[int]:
        """The special tokens with a text that is wanted."""
        return frozenset(one for one in self._special_ids if wanted(self.token_text(one)))

    def special_texts(self) -> set[str]:
        """The texts of the special tokens."""
        return {token.content for token in self._fast.get_added_tokens_decoder().values() if token.special}

    def added_tokens(self) -> dict[str, int]:
        """Text and id of the tokens that stand beside the vocabulary proper: special tokens and markers."""
        return {token.content: one for one, token in self._fast.get_added_tokens_decoder().items()}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token adds after other text: maybe part of a character, maybe none."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def _encode(self, text: str, num_bytes: int, add_special_tokens: bool) -> Encoding:
        if num_bytes <= SHORT_TEXT_BYTES:
            return self._fast.encode(text, add_special_tokens=add_special_tokens)
        # Unlike `encode`, `encode_batch` releases the interpreter's lock while it works.
        return self._fast.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def _ids_with_literals(self, text: str, encoding: Encoding, literals: Mapping[str, str]) -> list[int]:
        """Token ids of `text`, in which the pieces between special tokens that have literals are replaced."""
        ids: list[int] = []
        piece: list[int] = []
        begin = 0  # of the piece, in characters

        def end_piece(end: int) -> None:
            given = text[begin:end]
            meant = restored(given, literals)
            ids.extend(piece if meant == given else self._plain.encode(meant, add_special_tokens=False).ids)
            piece.clear()

        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id not in self._special_ids:
                piece.append(token_id)
            elif start == stop:  # the tokenizer adds it at the beginning or the end
                if piece:
                    end_piece(len(text))
                    begin = len(text)
                ids.append(token_id)
            else:
                end_piece(start)
                begin = stop
                ids.append(token_id)
        end_piece(len(text))
        return ids

    @cached_property
    def _plain(self) -> FastTokenizer:
        """The same tokenizer, for which the texts of special tokens are ordinary text."""
        plain = FastTokenizer.from_str(self._fast.to_str())
        plain.encode_special_tokens = True
        return plain

    def _beginning_exceeds(self, num_tokens: int, text: str) -> bool:
        """Whether the beginning of a long text alone has far more than `num_tokens` tokens."""
        length = num_tokens * PROBE_CHARS_PER_TOKEN
        if len(text) <= length:
            return False
        return len(self._encode(text[:length], length, False).ids) > num_tokens * PROBE_SLACK

    def _surely_exceeds(self, num_tokens: int, data: bytes) -> bool:
        """Whether a text certainly has more than `num_tokens` tokens; False if that is unknown."""
        bounds = self._token_bounds
        return (
            bounds is not None
            and len(data.translate(None, bounds.dropped_bytes)) > num_tokens * bounds.max_text_bytes
        )

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._fast.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if self._byte_of_char is not None:
            # Like the ByteLevel decoder: a token with a character outside the alphabet is plain text.
            found = [self._byte_of_char.get(char) for char in token]
            return token.encode() if None in found else bytes(byte for byte in found if byte is not None)
        if self._has_byte_tokens and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        if self._anchor_id is None:
            return self._fast.decode([token_id], skip_special_tokens=False).encode()
        # Decode it after an ordinary token, because some decoders strip spaces at the start of a text.
        before = self._fast.decode([self._anchor_id], skip_special_tokens=False)
        both = self._fast.decode([self._anchor_id, token_id], skip_special_tokens=False)
        return both[len(before) :].encode()


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; empty if the file does not exist.

    Raises:
        ModelError: the file does not hold a JSON object.
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
    """A special token's text, which the files write as a string or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _register(fast: FastTokenizer, added: object, special_tokens: dict[str, str]) -> None:
    """Add the added tokens that only tokenizer_config.json lists, and mark the named tokens as special."""
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


class TokenBounds(NamedTuple):
    """Bounds on the text that one token can represent."""

    max_text_bytes: int  # most bytes of text that one token represents
    dropped_bytes: bytes  # bytes that produce no token at all


def _token_bounds(content: dict[str, Any], vocab: dict[str, int]) -> TokenBounds | None:
    """The bounds of a tokenizer; None if they are unknown. `content`: the JSON of tokenizer.json."""
    model, added = content["model"], content["added_tokens"]
    steps = _flattened(content["pre_tokenizer"], "pretokenizers")
    byte_level = "ByteLevel" in {step["type"] for step in steps}
    bounded = (
        model["type"] == "BPE"
        and (
            byte_level or (model["byte_fallback"] and all(f"<0x{byte:02X}>" in vocab for byte in range(256)))
        )
        and all(_keeps_length(step) for step in _flattened(content["normalizer"], "normalizers"))
        and all(step["type"] in TEXT_PRESERVING_STEPS and step.get("behavior") != "Removed" for step in steps)
        and not any(token["lstrip"] or token["rstrip"] for token in added)  # such tokens absorb spaces
    )
    if not bounded:
        return None
    # A byte-level token has one character per byte; added tokens, and tokens of other models, are text.
    texts = [token["content"] for token in added] + ([] if byte_level else list(vocab))
    longest = max(max(map(len, vocab)), max((len(text.encode()) for text in texts), default=1))
    alphabet = _byte_level_alphabet() if byte_level else {}
    return TokenBounds(longest, bytes(byte for char, byte in alphabet.items() if char not in vocab))


TEXT_PRESERVING_STEPS = frozenset({"ByteLevel", "Digits", "Split", "Metaspace", "Punctuation"})
"""Pre-tokenizers that drop no text, unless their `behavior` is "Removed"."""


def _keeps_length(normalizer: dict[str, Any]) -> bool:
    """Whether the normalizer never reduces a text's number of bytes."""
    if normalizer["type"] != "Replace":
        return normalizer["type"] == "Prepend"
    pattern = normalizer["pattern"].get("String")
    return pattern is not None and len(pattern.encode()) <= len(normalizer["content"].encode())


def _flattened(step: dict[str, Any] | None, several: str) -> list[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder; a Sequence is replaced by its steps."""
    if step is None:
        return []
    return (
        [inner for part in step[several] for inner in _flattened(part, several)]
        if several in step
        else [step]
    )


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's visible character -> byte. A printable byte is itself; the others are U+0100 and up."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(visible)]
    return {
        **{chr(byte): byte for byte in visible},
        **{chr(0x100 + rank): byte for rank, byte in enumerate(others)},
    }
