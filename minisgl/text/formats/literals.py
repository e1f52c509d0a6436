"""Turns literals of Python and of Gemma's call language into JSON text while they arrive.

Promise: a value that is whole gives the JSON text that `json.dumps` would give for it. A string is written as
it is read; numbers and names when they end.
"""

import ast
import json
import re

from minisgl.text.formats.reader import Emit, Markers, Reader, Reading
from minisgl.text.formats.tools import dumps

MAX_DEPTH = 200
"""Values nested deeper than this are broken."""
WORD_RUN = re.compile(r"[\w.+\-]*")
BARE_RUN = re.compile(r"[^,{}\[\]<]*")
PLAIN_RUN = re.compile(r"[^\\'\"]*")
NAMES = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\\": "\\", "'": "'",
    '"': '"', "/": "/", "\n": "",
}  # fmt: skip
"""Python's, and JSON's \\/."""
HEX = frozenset("0123456789abcdefABCDEF")
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def literal_value(
    reader: Reader, emit: Emit, quotes: tuple[str, ...], is_python: bool, depth: int = 0
) -> Reading[bool]:
    """Read one value and emit its JSON text. Returns False where no value stands or it breaks off.

    Args:
        quotes: what opens and closes a string.
        is_python: strings have escapes, and brackets may be round; otherwise keys and strings may be bare.
    """
    char = yield from reader.peek(1)
    if depth < MAX_DEPTH and char and char in ("{", "[", "(") and (is_python or char != "("):
        return (yield from _container(reader, emit, quotes, is_python, depth))
    quote = yield from reader.literal(*quotes)
    if quote:
        return (yield from _string(reader, emit, quote, is_python))
    word = yield from reader.run(WORD_RUN if is_python else BARE_RUN)
    if reader.ended and reader.at == len(reader.text):
        emit(word)  # it may have been cut
        return False
    text = NAMES.get(word.strip()) or _number(word.strip())
    if text is None and not is_python and word.strip():
        text = dumps(word.strip())
    emit(word if text is None else text)
    return text is not None


def _number(word: str) -> str | None:
    """JSON of a number as Python writes it."""
    sign, digits = ("-", word[1:]) if word.startswith("-") else ("", word.removeprefix("+"))
    if not digits[:1].isdigit() and not digits.startswith("."):
        return None
    try:
        value = ast.literal_eval(digits)
        return sign + json.dumps(value, allow_nan=False) if isinstance(value, int | float) else None
    except (ValueError, SyntaxError):
        return None


def _container(
    reader: Reader, emit: Emit, quotes: tuple[str, ...], is_python: bool, depth: int
) -> Reading[bool]:
    """Read a dict, list or tuple."""
    opening = reader.take(1)
    closing = {"{": "}", "[": "]", "(": ")"}[opening]
    is_object = opening == "{"
    emit("{" if is_object else "[")
    is_first = True
    while True:
        yield from reader.spaces()
        if (yield from reader.literal(closing)):
            emit("}" if is_object else "]")
            return True
        if not is_first:
            emit(", ")
        is_first = False
        if is_object:
            if not (yield from _key(reader, emit, quotes, is_python)):
                return False
            emit(": ")
            yield from reader.spaces()
        if not (yield from literal_value(reader, emit, quotes, is_python, depth + 1)):
            return False
        yield from reader.spaces()
        if not (yield from reader.literal(",")) and (yield from reader.peek(1)) != closing:
            return False


def _key(reader: Reader, emit: Emit, quotes: tuple[str, ...], is_python: bool) -> Reading[bool]:
    """Read a key of an object and the colon behind it."""
    quote = yield from reader.literal(*quotes)
    if quote:
        good = yield from _string(reader, emit, quote, is_python)
    else:
        word = (yield from reader.run(WORD_RUN if is_python else KEY_RUN)).strip()
        good = bool(word)
        emit(dumps(word) if good else "")
    yield from reader.spaces()
    return good and bool((yield from reader.literal(":")))


KEY_RUN = re.compile(r"[^:,{}\[\]<]*")


def _string(reader: Reader, emit: Emit, quote: str, is_python: bool) -> Reading[bool]:
    """Read the rest of a string. Python's and JSON's quotes have escapes, others have not."""
    emit('"')
    if not is_python and quote != '"':
        closed = yield from reader.until(Markers([quote]), lambda text: emit(dumps(text)[1:-1]))
        emit('"' if closed else "")
        return bool(closed)
    if (
        is_python and (yield from reader.peek(2)) == quote * 2
    ):  # one more quote at once, and another: three of them open
        reader.take(2)
        quote = quote * 3
    while True:
        yield from reader.run(PLAIN_RUN, lambda text: emit(dumps(text)[1:-1]))
        if (yield from reader.literal(quote)):
            emit('"')
            return True
        char = yield from reader.peek(1)
        if not char:
            return False
        reader.take(1)
        if char == "\\":
            if not (yield from _escape(reader, emit)):
                return False
        else:
            emit(dumps(char)[1:-1])


def _escape(reader: Reader, emit: Emit) -> Reading[bool]:
    """Read what follows a backslash."""
    char = yield from reader.peek(1)
    if not char:
        return False
    reader.take(1)
    if char in HEX_DIGITS:
        digits = yield from reader.peek(HEX_DIGITS[char])
        is_hex = len(digits) == HEX_DIGITS[char] and all(digit in HEX for digit in digits)
        if not is_hex or int(digits, 16) > 0x10FFFF:
            emit(dumps("\\" + char)[1:-1])
            return True
        code = int(reader.take(len(digits)), 16)
        # Two of these make one character, as JSON has it; JSON's own escapes leave that to the reader.
        emit(f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else dumps(chr(code))[1:-1])
    elif char in "01234567":
        digits = char
        while len(digits) < 3 and (next_char := (yield from reader.peek(1))) and next_char in "01234567":
            digits += reader.take(1)
        emit(dumps(chr(int(digits, 8)))[1:-1])
    else:
        emit(dumps(ESCAPES.get(char, "\\" + char))[1:-1])
    return True
