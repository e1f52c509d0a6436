"""What an answer must look like: a checked grammar, as plain data that travels in messages.

Promise: a `GrammarSpec` made here holds nothing that would be ignored; what can't be honoured is a 400 that
names the place. OpenAI's `strict` changes nothing here: a schema is enforced in full, or refused.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from minisgl.errors import RequestError
from minisgl.fields import shorten
from minisgl.grammar.json_schema import canonical_schema, dump
from minisgl.grammar.lark import checked_lark
from minisgl.grammar.limits import MAX_DEPTH, MAX_ENUM_VALUES, MAX_LITERAL_CHARS, MAX_SPEC_BYTES
from minisgl.grammar.patterns import PatternError, to_llguidance
from minisgl.grammar.structural_tag import canonical_tag

Kind = Literal["json_schema", "regex", "choice", "lark", "structural_tag"]
TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True):
    """A grammar that was checked, but not compiled yet.

    Args:
        kind: how to read `text`.
        text: canonical JSON (json_schema, choice, structural_tag), a regular expression, or Lark.
        where: the request's field it came from, for errors.
        whitespace: whether JSON may have spaces and line breaks; see `WHITESPACE` in compiler.py.
        around: named grammars in Lark; if there are any, the first is the whole, which refers to this one as
            `@answer` and to the others by their names.
    """

    kind: Kind
    text: str
    where: str = "grammar"
    whitespace: bool = True
    around: tuple[tuple[str, str], ...] = ()


def json_schema_spec(schema: Any, where: str, whitespace: bool = True) -> GrammarSpec:
    """A JSON schema: an object, true, false, or the text of one of these.

    Raises:
        RequestError: 400 with the place in the schema that can't be taken.
    """
    value = read_json(schema, where, bool)
    return GrammarSpec("json_schema", dump(canonical_schema(value, where)), where, whitespace)


def json_object_spec(where: str, whitespace: bool = True) -> GrammarSpec:
    """Any JSON object: OpenAI's `{"type": "json_object"}`."""
    return GrammarSpec("json_schema", '{"type":"object"}', where, whitespace)


def regex_spec(pattern: Any, where: str) -> GrammarSpec:
    """A regular expression (ECMA-262) that the whole answer matches."""
    check_text(pattern, where, MAX_SPEC_BYTES)
    try:
        return GrammarSpec("regex", to_llguidance(pattern), where)
    except PatternError as error:
        raise RequestError(400, "invalid_regex", f"{where} {error}", where) from None


def choice_spec(choices: Sequence[Any], where: str) -> GrammarSpec:
    """One of several texts."""
    if not isinstance(choices, list | tuple) or not choices or not all(isinstance(x, str) for x in choices):
        raise RequestError(
            400, "invalid_type", f"{where} must be a list of strings, got {shorten(choices)}", where
        )
    if len(choices) > MAX_ENUM_VALUES:
        raise RequestError(
            400, "grammar_too_large", f"{where} has {len(choices)} choices; at most {MAX_ENUM_VALUES}", where
        )
    longest = max(map(len, choices))
    if longest > MAX_LITERAL_CHARS:
        message = f"{where} has a choice of {longest} characters; at most {MAX_LITERAL_CHARS}"
        raise RequestError(400, "grammar_too_large", message, where)
    text = json.dumps(list(dict.fromkeys(choices)), ensure_ascii=False)
    check_text(text, where, MAX_SPEC_BYTES)
    return GrammarSpec("choice", text, where)


def grammar_spec(text: Any, where: str, whitespace: bool = True) -> GrammarSpec:
    """A context-free grammar, in llguidance's Lark or in GBNF (`root ::= ...`)."""
    check_text(text, where, MAX_SPEC_BYTES)
    return GrammarSpec("lark", checked_lark(text, where), where, whitespace)


def made_spec(lark: str, where: str) -> GrammarSpec:
    """A Lark grammar that this program made: its schemas are canonical and tokens may stand by number."""
    check_text(lark, where, MAX_SPEC_BYTES)
    return GrammarSpec("lark", lark, where)


def within(spec: GrammarSpec, around: tuple[tuple[str, str], ...]) -> GrammarSpec:
    """`spec` as the part `@answer` of grammars that this program made; see `GrammarSpec.around`."""
    for _, lark in around:
        check_text(lark, spec.where, MAX_SPEC_BYTES)
    return msgspec.structs.replace(spec, around=around)


def structural_tag_spec(tag: Any, where: str, whitespace: bool = True) -> GrammarSpec:
    """Free text with parts of a given structure: `{"type": "structural_tag", ...}` or its JSON text."""
    node = canonical_tag(read_json(tag, where), where)
    return GrammarSpec("structural_tag", dump(node), where, whitespace)


def read_json(value: Any, where: str, *others: type) -> Any:
    """A JSON object, or its text parsed; bounded in size and depth before it is parsed."""
    if isinstance(value, str):
        check_text(value, where, MAX_SPEC_BYTES)
        _check_depth_of_text(value, where)
        try:
            value = json.loads(value, parse_constant=_no_constant)
        except ValueError as error:
            raise RequestError(400, "invalid_json", f"{where} is no JSON: {error}", where) from None
    else:
        _check_depth(value, where)
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RequestError(400, "invalid_json", f"{where} can't be JSON: {error}", where) from None
        check_text(text, where, MAX_SPEC_BYTES)
    if not isinstance(value, (dict, *others)):
        raise RequestError(400, "invalid_type", f"{where} must be an object, got {shorten(value)}", where)
    return value


def check_text(text: Any, where: str, limit: int) -> None:
    """Refuse what is no text, has more than `limit` bytes, is empty, or is no valid Unicode."""
    if not isinstance(text, str) or not text:
        raise RequestError(400, "invalid_type", f"{where} must be a text, got {shorten(text)}", where)
    if len(text) <= limit:
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            message = f"{where} is not valid Unicode: {error.reason} at {error.start}"
            raise RequestError(400, "invalid_unicode", message, where) from None
    else:
        size = len(text)
    if size > limit:
        message = f"{where} has {size} bytes; at most {limit} are taken"
        raise RequestError(400, "grammar_too_large", message, where)


def _check_depth_of_text(text: str, where: str) -> None:
    depth = 0
    for found in TOKENS.finditer(text):
        if found[0] in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise _too_deep(where)
        elif found[0] in "]}":
            depth -= 1


def _check_depth(value: Any, where: str) -> None:
    nested = (dict, list, tuple)
    stack = [(value, 0)] if isinstance(value, nested) else []
    while stack:
        node, depth = stack.pop()
        if depth == MAX_DEPTH:
            raise _too_deep(where)
        parts = node.values() if isinstance(node, dict) else node
        stack += [(part, depth + 1) for part in parts if isinstance(part, nested)]


def _too_deep(where: str) -> RequestError:
    message = f"{where} is nested more than {MAX_DEPTH} levels deep"
    return RequestError(400, "schema_too_large", message, where)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")
