"""Checks context-free grammars that come as text, and converts GBNF to Lark.

Promise: what llguidance would ignore or what needs more than a mask (`temperature=`, `stop=`, token numbers)
is refused by name, and inline schemas are checked as all others are.
"""

import json
import re

from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from minisgl.errors import RequestError
from minisgl.grammar.json_schema import canonical_schema, dump
from minisgl.grammar.limits import MAX_DEPTH, MAX_JOINED_PATTERNS, MAX_LARK_BYTES, MAX_RULES

MAX_NESTING = 100
"""Brackets inside each other, in GBNF."""
TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<comment>(?://|\#)[^\n]*)
    |(?P<regex>/(?:[^/\\\n]|\\.)+/[imslux]*)
    |(?P<directive>%[A-Za-z_]+)
    |(?P<ids><\[)
    |(?P<option>\b(?:temperature|max_tokens|stop|stop_capture|capture)\b(?=\s*[=\],]))
    |(?P<colon>:)
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
SLOT = "%json "
RULE_OF_SCHEMA = re.compile(rf"^(\w+: {SLOT})(\{{.*\}})$", re.MULTILINE)
"""A rule that is a schema and nothing else, on a line of its own."""
DIRECTIVES = ("%ignore", "%import", "%json", "%llguidance")


def checked_lark(text: str, where: str) -> str:
    """The grammar in Lark, with inline schemas in their canonical form.

    Raises:
        RequestError: 400 with what can't be taken.
    """
    if len(text.encode()) > MAX_LARK_BYTES:
        message = f"{where} has {len(text.encode())} bytes; a grammar has at most {MAX_LARK_BYTES}"
        raise RequestError(400, "grammar_too_large", message, where)
    if "\0" in text:
        raise _refused(where, "has a NUL character")
    if text.count("&") > MAX_JOINED_PATTERNS:
        raise _refused(where, f"has more than {MAX_JOINED_PATTERNS} '&'")
    if not is_lark_syntax(text):
        return _from_gbnf(text, where)
    out: list[str] = []
    at = num_rules = 0
    while at < len(text):
        found = TOKEN.match(text, at)
        assert found is not None  # the last alternative takes any character
        at = found.end()
        num_rules += found["colon"] is not None
        if num_rules > MAX_RULES:
            raise _refused(where, f"has more than {MAX_RULES} rules")
        if found["ids"]:
            raise _refused(where, "names tokens by number, <[...]>, which is not supported")
        if found["option"]:
            raise _refused(where, f"uses {found['option']}, which is not supported")
        if found["directive"] and found["directive"] not in DIRECTIVES:
            raise _refused(where, f"uses {found['directive']}; known are {', '.join(DIRECTIVES)}")
        if found["directive"] in ("%json", "%llguidance"):
            block, at = _json_block(text, at, where)
            if found["directive"] == "%json":
                out.append(SLOT + dump(canonical_schema(block, f"{where}.%json")))
            elif block:
                raise _refused(where, "uses %llguidance with options, which is not supported")
        else:
            out.append(found[0])
    return "".join(out)


def _json_block(text: str, at: int, where: str) -> tuple[object, int]:
    """The JSON value that begins at `at`, and where it ends."""
    begin = re.compile(r"\s*").match(text, at)
    start = begin.end() if begin else at
    depth = 0
    for found in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', text[start:]):
        depth += (found[0] in "[{") - (found[0] in "]}")
        if depth > MAX_DEPTH:
            raise _refused(where, f"has a schema nested more than {MAX_DEPTH} levels deep")
        if depth <= 0:
            break
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except ValueError as error:
        raise _refused(where, f"has a block that is no JSON: {error}") from None


def _from_gbnf(text: str, where: str) -> str:
    if text.count("::=") > MAX_RULES:
        raise _refused(where, f"has more than {MAX_RULES} rules")
    depth = 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if depth > MAX_NESTING:
            raise _refused(where, f"nests brackets more than {MAX_NESTING} deep")
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the library raises whatever its parser meets
        message = str(error) or type(error).__name__
        raise _refused(where, f"is neither Lark (no rule `start:`) nor GBNF: {message}") from None


def _refused(where: str, why: str) -> RequestError:
    return RequestError(400, "invalid_grammar", f"{where} {why}", where)
