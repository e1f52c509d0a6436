"""Reads replies by the model's own `response_template` (version 1, a key of tokenizer_config.json).

Promise: of a reply that transformers' parser accepts, the events say the same; arguments that are JSON are
the text that the model wrote. A template with a part that we do not have is a ModelError that names it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minisgl.errors import ModelError
from minisgl.text.formats.calls import Calls, read_json_call, stream_object
from minisgl.text.formats.literals import literal_value
from minisgl.text.formats.patterns import Delimiter
from minisgl.text.formats.reader import Emit, Reader, Reading
from minisgl.text.formats.table import JsonBody
from minisgl.text.formats.tools import STRING, cast, dumps

THOUGHT_FIELDS = frozenset({"reasoning_content", "reasoning", "thinking"})
TEMPLATE_KEYS = frozenset({"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"})
FIELD_KEYS = frozenset(
    {
        *("open", "open_pattern", "close", "close_pattern", "content", "content_args"),
        *("repeats", "join", "optional", "transform", "transform_each"),
    }
)
PLACEHOLDER = re.compile(r"\{(\w+)(?:\.(\w+))?\}")
VALUE_GROUPS = ("(?P<value>.*?)", r"(?P<value>[\s\S]*?)")


@dataclass(frozen=True, kw_only=True)
class JsonRegion:
    """The region is one JSON object with name and arguments, or a list of them."""

    body: JsonBody
    is_list: bool


@dataclass(frozen=True, kw_only=True)
class ObjectRegion:
    """The opening delimiter has the name, and the region is the arguments' object."""

    quotes: tuple[str, ...]
    """What delimits strings besides JSON's quotes."""
    is_json: bool


@dataclass(frozen=True, kw_only=True)
class TagRegion:
    """The opening delimiter has the name, and the region has a tag for each argument."""

    key: Delimiter
    """Up to the value; the group `key` is the argument's name."""
    end: Delimiter
    is_json: bool
    """Values are JSON where they can be."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of the message."""

    kind: str
    """thought, content or calls"""
    open: Delimiter | None
    close: Delimiter | None
    region: JsonRegion | ObjectRegion | TagRegion | None = None
    name: str = ""
    """A call's name, or in braces the opening delimiter's group that has it."""


@dataclass(frozen=True, kw_only=True)
class ResponseTemplate:
    """A checked template."""

    fields: tuple[Field, ...]
    implicit: Field | None
    """The field of the text outside of all others; None: such text is dropped."""
    anchor: re.Pattern[str]

    def begun(self, prompt: str) -> str:
        """What the prompt has already written of the reply."""
        ends = [found.end() for found in self.anchor.finditer(prompt)]
        return prompt[ends[-1] :] if ends else ""

    def keeps(self, token_text: str) -> bool:
        """Whether this special token must stay in the text that the parser reads: each may be its end."""
        return True


def load_response_template(template: object) -> ResponseTemplate:
    """Check a template and prepare it.

    Raises:
        ModelError: a part is invalid, or is one that this engine does not have; the message names it.
    """
    spec = _mapping(template, "it", TEMPLATE_KEYS)
    if spec.get("version", 1) != 1:
        raise _problem(f"version {spec['version']!r} is not supported, only 1 is")
    fields = [_field(name, raw) for name, raw in _mapping(spec.get("fields"), "fields").items()]
    implicit = [field for field in fields if field.open is None]
    if len(implicit) > 1 or not fields:
        raise _problem("fields: at least one is needed, and only one may have no open or open_pattern")
    if implicit and implicit[0].kind == "calls":
        raise _problem("fields.tool_calls: it has no open or open_pattern, which is not supported")
    anchor = _delimiter(spec, "start_anchor", "start_anchor")
    if anchor is None:
        raise _problem("it needs start_anchor or start_anchor_pattern")
    return ResponseTemplate(
        fields=tuple(field for field in fields if field.open is not None),
        implicit=implicit[0] if implicit else None,
        anchor=re.compile(anchor.pattern, re.DOTALL),
    )


def _problem(text: str) -> ModelError:
    return ModelError(
        f"the model's response_template can't be used: {text}. --tool-parser and --reasoning-parser choose a "
        "format by name instead"
    )


def _mapping(value: object, where: str, keys: frozenset[str] | None = None) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _problem(f"{where} must be an object, got {type(value).__name__}")
    for key in value:
        if keys is not None and key not in keys:
            raise _problem(f"{where} has the key {key!r}, which is not supported")
    return value


def _delimiter(spec: Mapping[str, Any], key: str, where: str) -> Delimiter | None:
    """The delimiter under `key` or `key`_pattern."""
    texts, pattern = spec.get(key), spec.get(f"{key}_pattern")
    texts = [texts] if isinstance(texts, str) else texts
    try:
        if texts is None and pattern is None:
            return None
        are_texts = isinstance(texts, list) and texts and all(isinstance(one, str) and one for one in texts)
        if texts is not None and are_texts and pattern is None:
            return Delimiter(texts=texts)
        if texts is None and isinstance(pattern, str) and pattern:
            return Delimiter(pattern=pattern)
    except ValueError as error:
        raise _problem(f"{where}: {key}_pattern {error}") from None
    raise _problem(f"{where}: {key} must be a text or a list of texts, or {key}_pattern an expression")


def _field(name: str, raw: object) -> Field:
    where = f"fields.{name}"
    spec = _mapping(raw, where, FIELD_KEYS)
    opening, closing = _delimiter(spec, "open", where), _delimiter(spec, "close", where)
    content = spec.get("content", "text")
    args = _mapping(spec.get("content_args", {}), f"{where}.content_args")
    if name in THOUGHT_FIELDS or name == "content":
        if content != "text" or spec.get("transform") is not None or not args.get("strip", True):
            raise _problem(f"{where} must be plain text; content, strip and transform can't change it here")
        kind = "thought" if name in THOUGHT_FIELDS else "content"
        return Field(kind=kind, open=opening, close=closing)
    if name != "tool_calls":
        raise _problem(f"{where} is a field that is not supported")
    groups = opening.names if opening else frozenset()
    region, call_name = _region(where, spec, content, args, groups)
    return Field(kind="calls", open=opening, close=closing, region=region, name=call_name)


def _region(
    where: str, spec: Mapping[str, Any], content: object, args: Mapping[str, Any], groups: frozenset[str]
) -> tuple[JsonRegion | ObjectRegion | TagRegion, str]:
    """How the field's calls are read, and where their name is."""
    name, arguments = _paths(where, spec)
    is_list = bool(spec.get("transform_each"))
    if content == "json":
        _mapping(args, f"{where}.content_args", frozenset({"unquoted_keys", "string_delims"}))
        if arguments == ("content", None) and (name[1] is None and name[0] != "content") and not is_list:
            return ObjectRegion(quotes=_quotes(where, args), is_json=not args), _call_name(
                where, name, groups
            )
        of_element = is_list and name[1] is None and arguments[1] is None
        keys = (name[0], arguments[0]) if of_element else (name[1], arguments[1])
        if None not in keys and not args and (is_list or name[0] == arguments[0] == "content"):
            body = JsonBody(name_key=str(keys[0]), argument_keys=(str(keys[1]),))
            return JsonRegion(body=body, is_list=is_list), ""
    elif content == "xml-inline" and arguments == ("content", None) and name[1] is None and not is_list:
        return _tags(where, args), _call_name(where, name, groups)
    raise _problem(f"{where}: content {content!r} with this content_args and transform is not supported")


def _paths(where: str, spec: Mapping[str, Any]) -> tuple[tuple[str, str | None], tuple[str, str | None]]:
    """Where the transform takes a call's name and its arguments from: (root, key in it)."""
    transform = spec.get("transform")
    function = transform.get("function", transform) if isinstance(transform, Mapping) else transform
    if function is None or function == "{content}":
        return ("content", "name"), ("content", "arguments")
    if isinstance(function, Mapping):
        found = [PLACEHOLDER.fullmatch(str(function.get(key))) for key in ("name", "arguments")]
        if found[1] is not None:
            name = (found[0][1], found[0][2]) if found[0] else (f"={function.get('name')}", None)
            return name, (found[1][1], found[1][2])
    raise _problem(f"{where}.transform must have a function with name and arguments")


def _call_name(where: str, name: tuple[str, str | None], groups: frozenset[str]) -> str:
    if name[0].startswith("="):
        return name[0][1:]
    if name[0] not in groups:
        raise _problem(f"{where}.transform: open_pattern has no group {name[0]!r}")
    return f"{{{name[0]}}}"


def _quotes(where: str, args: Mapping[str, Any]) -> tuple[str, ...]:
    pairs = args.get("string_delims", [])
    if any(len(pair) != 2 or pair[0] != pair[1] for pair in pairs):
        raise _problem(f"{where}.content_args.string_delims must open and close strings alike")
    return tuple(pair[0] for pair in pairs)


def _tags(where: str, args: Mapping[str, Any]) -> TagRegion:
    _mapping(args, f"{where}.content_args", frozenset({"tag_pattern", "value_parser"}))
    pattern = args.get("tag_pattern")
    group = next((group for group in VALUE_GROUPS if group in str(pattern)), None)
    if not isinstance(pattern, str) or group is None:
        raise _problem(f"{where}.content_args.tag_pattern must have the group {VALUE_GROUPS[0]}")
    before, _, after = pattern.partition(group)
    parser = _mapping(args.get("value_parser") or {}, f"{where}.value_parser", frozenset({"name", "args"}))
    if parser.get("name", "text") not in ("text", "json"):
        raise _problem(f"{where}.content_args.value_parser {parser['name']!r} is not supported")
    try:
        tags = TagRegion(
            key=Delimiter(pattern=before), end=Delimiter(pattern=after), is_json=parser.get("name") == "json"
        )
    except ValueError as error:
        raise _problem(f"{where}.content_args.tag_pattern {error}") from None
    if "key" not in tags.key.names:
        raise _problem(f"{where}.content_args.tag_pattern must have the group 'key' before the value")
    return tags


def read_by_template(calls: Calls, template: ResponseTemplate) -> Reading[None]:
    """Read a whole reply, what the prompt has written of it included."""
    reader, writer = calls.reader, calls.writer
    implicit = template.implicit
    emits: dict[str, Emit] = {"thought": writer.reasoning, "content": writer.content}
    outside = emits[implicit.kind] if implicit else _drop
    while not reader.ended or reader.at < len(reader.text):
        watched = {delimiter: field for field in template.fields if (delimiter := field.open)}
        if implicit and implicit.close:
            watched[implicit.close] = implicit
        hit = yield from _until(reader, list(watched), outside)
        if hit is None:
            return
        field = watched[hit[0]]
        if field is implicit:
            writer.boundary()
        elif field.kind == "calls":
            calls.open(hit[1][0])
            yield from _read_call_region(calls, field, hit[1].groupdict())
            calls.close()
        else:
            writer.boundary()
            yield from _until(reader, [field.close] if field.close else [], emits[field.kind])
            writer.boundary()


def _drop(text: str) -> None:
    pass


def _until(
    reader: Reader, delimiters: list[Delimiter], emit: Emit
) -> Reading[tuple[Delimiter, re.Match[str]] | None]:
    """Give the text before the next delimiter to `emit` and read both; None at the end of the text.

    Of delimiters that begin together, the longer one counts.
    """
    begins = [0] * len(delimiters)  # characters ahead in which each one was searched for in vain
    while True:
        text, start = reader.text, reader.at
        hits: list[tuple[int, int, int]] = []
        pending = len(text)
        matches = []
        for rank, delimiter in enumerate(delimiters):
            found = delimiter.search(text, start + begins[rank], reader.ended)
            begins[rank] = found.begin - start
            matches.append(found.match)
            pending = min(pending, found.pending)
            if found.match is not None:
                hits.append((found.match.start(), -found.match.end(), rank))
        if hits and (min(hits)[0] < pending or reader.ended):
            rank = min(hits)[2]
            match = matches[rank]
            if match.start() > start:
                emit(reader.take(match.start() - start))
            reader.take(match.end() - match.start())
            return delimiters[rank], match
        if pending > start:
            emit(reader.take(pending - start))
            begins = [begin - (pending - start) for begin in begins]
        if reader.ended:
            return None
        yield


def _read_call_region(calls: Calls, field: Field, groups: Mapping[str, str | None]) -> Reading[None]:
    """Read the calls of one region whose opening delimiter is read, and the region's end."""
    reader = calls.reader
    name = (groups.get(field.name[1:-1]) or "").strip() if field.name.startswith("{") else field.name
    closers = [field.close] if field.close else []
    match field.region:
        case TagRegion():
            yield from _read_tags(calls, field.region, name, closers)
            return
        case ObjectRegion(quotes=quotes, is_json=is_json):
            yield from reader.spaces()
            if is_json:
                good = yield from stream_object(calls, name, optional=False)
            else:
                good = (yield from reader.peek(1)) == "{"
                if good:
                    calls.begin(name)
                    calls.end((yield from literal_value(reader, calls.arguments, ('"', *quotes), False)))
        case JsonRegion(body=body, is_list=is_list):
            good = yield from _read_objects(calls, body, is_list)
        case None:
            good = False
    if not good:
        calls.spill()
        return
    yield from _until(reader, closers, calls.stray)


def _read_objects(calls: Calls, body: JsonBody, is_list: bool) -> Reading[bool]:
    """Read one JSON call, or a list of them."""
    reader = calls.reader
    yield from reader.spaces()
    if is_list and not (yield from reader.literal("[")):
        return False
    while True:
        yield from reader.spaces()
        if (yield from reader.peek(1)) != "{" or not (yield from read_json_call(calls, body)):
            return is_list and bool((yield from reader.literal("]")))
        yield from reader.spaces()
        if not is_list:
            return True
        yield from reader.literal(",")


def _read_tags(calls: Calls, region: TagRegion, name: str, closers: list[Delimiter]) -> Reading[None]:
    """Read arguments between tags up to the region's end."""
    reader = calls.reader
    calls.begin(name)
    calls.arguments("{")
    separator = ""
    stray: list[str] = []
    while hit := (yield from _until(reader, [region.key, *closers], stray.append)):
        if hit[0] is not region.key:
            break
        key = hit[1]["key"]
        calls.arguments(f"{separator}{dumps(key)}: ")
        separator = ", "
        types = () if region.is_json else calls.tools.types(name, key)
        is_string = frozenset(types) == STRING
        pieces: list[str] = []
        calls.arguments('"' if is_string else "")
        emit = (lambda text: calls.arguments(dumps(text)[1:-1])) if is_string else pieces.append
        closed = yield from _until(reader, [region.end], emit)
        if is_string:
            calls.arguments('"' if closed else "")
        else:
            raw = "".join(pieces)
            calls.arguments(cast(raw, types) if closed else raw)
        if not closed:
            calls.end(False)
            return
    is_whole = hit is not None
    calls.arguments("}" if is_whole else "")
    calls.end(is_whole)
    if "".join(stray).strip():
        calls.stray("".join(stray))
