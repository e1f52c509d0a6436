"""Reads the calls of a reply in any of the table's formats.

Promise: nothing that the model wrote is lost. A call that breaks before its name and first argument are
known, or that names no tool of the request, is content, as it was written. A call that breaks later keeps
the arguments it has and ends incomplete; the text from the break on is content.
"""

import re

from minisgl.text.formats.literals import literal_value
from minisgl.text.formats.reader import Markers, Reader, Reading, json_value
from minisgl.text.formats.table import Body, CallFormat, JsonBody, LiteralBody, NamedBody, TaggedBody
from minisgl.text.formats.tools import FAILED, STRING, Tools, cast, dumps, loads
from minisgl.text.formats.writer import Writer

NAME_RUN = re.compile(r"""[^\s<>"'`|｜=:,(){}\[\]]*""")
KEY_RUN = re.compile(r"""[^\n<>"]*""")
META_KEYS = frozenset({"id", "call_id", "index", "type"})
"""What else a call's JSON object may have; it is not passed on."""
MAX_SPACES = 64
"""After so much white space a call begins without having seen its first argument."""
IDENTIFIER_RUN = re.compile(r"\w*")


class Calls:
    """Where the calls of one reply are written.

    The text of a call is remembered until its header is known to be good, and is content otherwise.
    """

    def __init__(self, reader: Reader, writer: Writer, tools: Tools) -> None:
        self.reader = reader
        self.writer = writer
        self.tools = tools
        self._echoes = False  # the call names no tool: its text is content as it is read
        self._arguments: list[str] = []
        self.is_broken = False  # the arguments that were read last broke off

    def open(self, marker: str) -> None:
        """Calls may begin here; `marker` is what was read of them."""
        self.reader.record(marker)

    def spill(self) -> None:
        """What was read since the last good call is content after all."""
        self.writer.content(self.reader.recorded())

    def settle(self) -> None:
        """What was read since the arguments belongs to the call."""
        self.flush()
        self.reader.record()

    def stray(self, text: str) -> None:
        """Text inside a call, where the format has no place for it, is content."""
        if not self._echoes:
            self.writer.content(text)

    def close(self) -> None:
        """The calls are over; what was read behind the last one belongs to it."""
        self.flush()
        self._echoes = False
        self.reader.forget()

    def flush(self) -> None:
        """Make what was read of an unknown call content."""
        if self._echoes:
            self.spill()

    def begin(self, name: str) -> None:
        """The header is good: a call of `name` begins, and its arguments follow."""
        self.flush()
        self._echoes = name not in self.tools
        self._arguments = []
        if self._echoes:
            self.flush()
        else:
            self.reader.forget()
            self.writer.call_start(name)

    def arguments(self, text: str) -> None:
        """The next piece of the arguments' JSON text."""
        if not self._echoes and text:
            self._arguments.append(text)
            self.writer.call_arguments(text)

    def end(self, is_whole: bool) -> None:
        """The arguments are over. They are complete if they were read to their end and are an object."""
        self.is_broken = not is_whole
        if self._echoes:
            self.flush()
            return
        value = loads("".join(self._arguments)) if is_whole else FAILED
        self.writer.call_end(isinstance(value, dict))
        self.reader.record()


def read_calls(calls: Calls, form: CallFormat, marker: str) -> Reading[None]:
    """Read what follows one of the format's opening markers."""
    reader = calls.reader
    calls.open("" if marker in form.unread else marker)
    if marker not in form.unread:
        yield from reader.spaces()
        yield from reader.literal(form.head.strip(), form.also_head)
    separators = dict.fromkeys([(form.separator or "").strip(), ","])
    while True:
        yield from reader.spaces()
        body = yield from _next_body(reader, form.bodies)
        if body is None:
            break
        good = yield from read_call(calls, body)
        if not good:
            break
        yield from reader.spaces()
        is_closed = form.separator is None and not form.closes
        for close in form.closes:
            if (yield from reader.literal(close)):
                is_closed = True
                yield from reader.spaces()
        if is_closed:
            calls.close()
            return
        yield from reader.literal(*separators)
    calls.spill()
    calls.close()


def _next_body(reader: Reader, bodies: tuple[Body, ...]) -> Reading[Body | None]:
    """The body that can begin here; nothing is read."""
    for body in bodies:
        begin = "{" if isinstance(body, JsonBody) else body.begin
        if begin:
            if (yield from reader.peek(len(begin))) == begin:
                return body
        else:
            char = yield from reader.peek(1)
            if char and NAME_RUN.fullmatch(char):
                return body
    return None


def read_call(calls: Calls, body: Body) -> Reading[bool]:
    """Read one call. Returns False if its header is broken; what was read of it is then remembered."""
    match body:
        case JsonBody():
            return (yield from read_json_call(calls, body))
        case NamedBody():
            return (yield from read_named_call(calls, body))
        case TaggedBody():
            return (yield from read_tagged_call(calls, body))
        case LiteralBody():
            return (yield from read_literal_call(calls, body))


def read_json_call(calls: Calls, body: JsonBody) -> Reading[bool]:
    """Read {"name": ..., "arguments": {...}}; the keys may come in any order."""
    reader = calls.reader
    name: str | None = None
    early: list[str] | None = None  # arguments that stand before the name
    has_begun = False
    first_keys = body.first_keys
    reader.take(1)
    while True:
        yield from reader.spaces()
        if (yield from reader.literal("}")):
            break
        if name is not None or early is not None or not first_keys:
            yield from reader.literal(",")
            yield from reader.spaces()
        key = yield from _json_string(reader)
        is_known = key is not None and (not first_keys or name is not None or key in first_keys)
        yield from reader.spaces()
        if not is_known or not (yield from reader.literal(":")):
            return _is_broken(calls, has_begun)
        yield from reader.spaces()
        if key == body.name_key and name is None:
            name = yield from _json_string(reader)
            if name is None:
                return False
        elif key in body.argument_keys and not has_begun:
            if name is not None:
                good = yield from _object_or_text(calls, name)
                if not good or calls.is_broken:
                    return good
                has_begun = True
            else:
                early = []
                if not (yield from json_value(reader, early.append)):
                    return False
        elif key not in META_KEYS or not (yield from json_value(reader, lambda text: None)):
            return _is_broken(calls, has_begun)
        yield from reader.spaces()
        yield from reader.literal(",")
    if name is None:
        return False
    if not has_begun:
        calls.begin(name)
        calls.arguments(_decoded("".join(early or ["{}"])))
        calls.end(True)
    calls.settle()
    return True


def _is_broken(calls: Calls, has_begun: bool) -> bool:
    """A JSON call breaks: what was read behind its arguments, if it has begun, is content."""
    if has_begun:
        calls.spill()
    return has_begun


def _object_or_text(calls: Calls, name: str) -> Reading[bool]:
    """Read the arguments of a JSON call: an object, or a string that holds an object's text."""
    reader = calls.reader
    if (yield from reader.peek(1)) == "{":
        return (yield from stream_object(calls, name, optional=False))
    pieces: list[str] = []
    is_whole = yield from json_value(reader, pieces.append)
    text = _decoded("".join(pieces))
    if not is_whole or not text.startswith("{"):
        return False
    calls.begin(name)
    calls.arguments(text)
    calls.end(True)
    return True


def _decoded(text: str) -> str:
    """The text of arguments that are written inside a JSON string or as null; others as they are."""
    if text == "null":
        return "{}"
    inner = loads(text) if text.startswith('"') else text
    if not isinstance(inner, str) or any("\ud800" <= char <= "\udfff" for char in inner):
        return text  # half of a character can't be sent
    return inner


def stream_object(calls: Calls, name: str, optional: bool) -> Reading[bool]:
    """Begin a call whose arguments are the JSON object that stands here, and read it.

    Args:
        optional: no object at all means no arguments.
    """
    reader = calls.reader
    if (yield from reader.peek(1)) != "{":
        if optional:
            calls.begin(name)
            calls.arguments("{}")
            calls.end(True)
        return optional
    opening = 1
    # An object begins with a key or ends at once; if not, the whole call is content.
    while opening < MAX_SPACES:
        head = yield from reader.peek(opening + 1)
        if len(head) <= opening:
            break
        if not head[-1].isspace():
            if head[-1] not in '"}':
                return False
            break
        opening += 1
    calls.begin(name)
    calls.end((yield from json_value(reader, calls.arguments)))
    return True


def _json_string(reader: Reader) -> Reading[str | None]:
    """Read a JSON string and return what it says; None if there is no valid one."""
    if (yield from reader.peek(1)) != '"':
        return None
    pieces: list[str] = []
    is_whole = yield from json_value(reader, pieces.append)
    value = loads("".join(pieces)) if is_whole else None
    return value if isinstance(value, str) else None


def read_named_call(calls: Calls, body: NamedBody) -> Reading[bool]:
    """Read a name and the JSON object behind it."""
    reader = calls.reader
    yield from reader.literal(body.begin)
    yield from reader.spaces()
    name = yield from reader.run(NAME_RUN)
    yield from reader.spaces()
    if name and body.after_name == "[ARGS]" and (yield from reader.literal("[CALL_ID]")):
        yield from reader.run(NAME_RUN)
    if not name or not (yield from reader.literal(body.after_name.strip())):
        return False
    yield from reader.spaces()
    if not (yield from stream_object(calls, name, optional=bool(body.end))):
        return False
    if body.end:
        yield from reader.spaces()
        yield from reader.literal(body.end.strip())
    calls.settle()
    return True


def read_tagged_call(calls: Calls, body: TaggedBody) -> Reading[bool]:
    """Read a name and arguments between tags; the JSON is built from the values and the tool's schema."""
    reader = calls.reader
    yield from reader.literal(body.begin)
    yield from reader.spaces()
    name = yield from reader.run(NAME_RUN)
    after_name = body.after_name.strip()
    if not name or (after_name and not (yield from reader.literal(after_name))):
        return False
    yield from reader.spaces()
    next_tag = yield from reader.next_of(body.key_open, body.end)
    if not next_tag:
        return False
    calls.begin(name)
    calls.arguments("{")
    separator = ""
    while (yield from reader.literal(body.key_open, body.end)) == body.key_open:
        key = yield from reader.run(KEY_RUN)
        ending = yield from reader.literal(*body.key_close)
        has_value = bool(ending)
        if ending and body.value_open:
            yield from reader.spaces()
            has_value = bool((yield from reader.literal(body.value_open.strip())))
        if not has_value:
            calls.end(False)
            calls.stray(body.key_open + key + ending)
            return True
        calls.arguments(f"{separator}{dumps(key)}: ")
        kind = body.key_close[ending]
        types = calls.tools.types(name, key) if kind == "schema" else ("string",) * (kind == "string")
        if not (yield from _read_value(calls, body, types)):
            calls.end(False)
            return True
        separator = ", "
        yield from reader.spaces()
        next_tag = yield from reader.next_of(body.key_open, body.end)
    if next_tag == body.end:
        calls.arguments("}")
    calls.end(next_tag == body.end)
    return True


def _read_value(calls: Calls, body: TaggedBody, types: tuple[str, ...]) -> Reading[bool]:
    """Read one value up to its closing tag and write it as JSON; a string is written while it arrives."""
    reader = calls.reader
    ends = Markers([f"\n{body.value_close}", body.value_close] if body.in_lines else [body.value_close])
    if body.in_lines:
        yield from reader.literal("\n")
    if frozenset(types) == STRING:
        calls.arguments('"')
        closed = yield from reader.until(ends, lambda text: calls.arguments(dumps(text)[1:-1]))
        calls.arguments('"' if closed else "")
        return bool(closed)
    pieces: list[str] = []
    closed = yield from reader.until(ends, pieces.append)
    raw = "".join(pieces)
    calls.arguments(cast(raw, types) if closed else raw)
    return bool(closed)


def read_literal_call(calls: Calls, body: LiteralBody) -> Reading[bool]:
    """Read name(key=value, ...) or name{key:value,...}; the JSON is built from the literals."""
    reader = calls.reader
    yield from reader.literal(body.begin)
    name = yield from reader.run(NAME_RUN)
    yield from reader.spaces()
    if not name or not (yield from reader.literal(body.open)):
        return False
    is_python = body.assign == "="
    separator = ""
    while True:
        yield from reader.spaces()
        if (yield from reader.literal(body.close)):
            break
        key = yield from _read_key(reader, body)
        yield from reader.spaces()
        if not key or not (yield from reader.literal(body.assign)):
            if separator:
                calls.end(False)
                calls.stray(key)
            return bool(separator)
        if not separator:
            calls.begin(name)
        yield from reader.spaces()
        calls.arguments(f"{separator or '{'}{dumps(key)}: ")
        if not (yield from literal_value(reader, calls.arguments, body.quotes, is_python)):
            calls.end(False)
            return True
        separator = ", "
        yield from reader.spaces()
        if not (yield from reader.literal(",")) and (yield from reader.peek(1)) != body.close:
            calls.end(False)
            return True
    if not separator:
        calls.begin(name)
    calls.arguments("}" if separator else "{}")
    calls.end(True)
    return True


def _read_key(reader: Reader, body: LiteralBody) -> Reading[str]:
    """Read an argument's name."""
    if body.assign == ":" and (yield from reader.literal(*body.quotes)):
        pieces: list[str] = []
        yield from reader.until(Markers(body.quotes), pieces.append)
        return "".join(pieces)
    return (yield from reader.run(IDENTIFIER_RUN if body.assign == "=" else KEY_OF_LITERAL_RUN))


KEY_OF_LITERAL_RUN = re.compile(r"[^:,{}\[\]<\s]*")
