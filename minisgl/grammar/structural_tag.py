"""Structural tags: free text in which certain texts open a part with a structure, such as a tool call.

Takes vLLM's and SGLang's `structures` with `triggers`, and xgrammar's `format` of nested parts. Promise: a
part that can't be taken is refused by name. `to_lark` needs the tokenizer: a tag may be one special token.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minisgl.errors import RequestError
from minisgl.fields import shorten
from minisgl.grammar.json_schema import canonical_schema
from minisgl.grammar.lark import checked_lark
from minisgl.grammar.limits import MAX_LARK_BYTES, MAX_LITERAL_CHARS, MAX_TAGS
from minisgl.grammar.patterns import PatternError, to_llguidance

Node = list[Any]
"""A checked part: its kind and what it has, as plain JSON. Kinds: text, any, json, regex, lark, sequence, or,
repeat, tags (begin, content, ends), triggered."""

FIELDS: dict[str, tuple[str, ...]] = {
    "const_string": ("value",),
    "json_schema": ("json_schema",),
    "any_text": (),
    "regex": ("pattern",),
    "grammar": ("grammar",),
    "sequence": ("elements",),
    "or": ("elements",),
    "optional": ("content",),
    "star": ("content",),
    "plus": ("content",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags"),
    "tags_with_separator": ("tags", "separator"),
}
"""Type of a part -> the fields it must have."""
OPTIONAL: dict[str, tuple[str, ...]] = {
    "triggered_tags": ("at_least_one", "stop_after_first", "excludes"),
    "tags_with_separator": ("at_least_one", "stop_after_first"),
    "any_text": ("excludes",),
    "json_schema": ("style",),
}
NEUTRAL = {"excludes": ([], None), "style": ("json", None)}


def canonical_tag(value: dict[str, Any], where: str) -> Node:
    """The checked tree of a structural tag.

    Raises:
        RequestError: 400 with the place of what can't be taken.
    """
    return _Reader(where).read(value)


class _Reader:
    def __init__(self, where: str) -> None:
        self.where = where
        self.num_parts = 0

    def read(self, value: dict[str, Any]) -> Node:
        where = self.where
        if value.get("type") != "structural_tag":
            raise _refused(f"{where}.type", 'must be "structural_tag"')
        fields = {"format"} if "format" in value else {"structures", "triggers"}
        self.check_fields(value, fields, (), where)
        if "format" in value:
            return self.part(value["format"], f"{where}.format", last=True)
        at = f"{where}.structures"
        tags: list[Node] = []
        for i, one in enumerate(self.items(value["structures"], at)):
            self.check_fields(one, {"begin", "schema", "end"}, (), f"{at}[{i}]")
            content = ["json", canonical_schema(one["schema"], f"{at}[{i}].schema")]
            begin, end = (self.text(one[key], f"{at}[{i}].{key}") for key in ("begin", "end"))
            tags.append(["sequence", [["text", begin], content, ["text", end]]])
        return self.triggered(value["triggers"], tags, where, False, False)

    def part(self, value: Any, at: str, last: bool) -> Node:
        """A part of a `format`; `last` says that nothing comes after it."""
        self.num_parts += 1
        if self.num_parts > MAX_TAGS:
            raise RequestError(400, "grammar_too_large", f"{at}: at most {MAX_TAGS} parts are taken", at)
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind not in FIELDS:
            raise _refused(f"{at}.type", f"is {shorten(kind)}; known are {', '.join(FIELDS)}")
        self.check_fields(value, set(FIELDS[kind]), OPTIONAL.get(kind, ()), at)
        for key, neutral in NEUTRAL.items():
            if key in value and value[key] not in neutral:
                raise _refused(f"{at}.{key}", f"= {shorten(value[key])} is not supported")
        flags = [self.flag(value, key, at) for key in ("at_least_one", "stop_after_first")]
        match kind:
            case "const_string":
                return ["text", self.text(value["value"], f"{at}.value")]
            case "json_schema":
                return ["json", canonical_schema(value["json_schema"], f"{at}.json_schema")]
            case "any_text":
                if not last:
                    raise _refused(
                        at, "is any_text, which must be last, or stand before a const_string or end"
                    )
                return ["any"]
            case "regex":
                try:
                    return ["regex", to_llguidance(self.text(value["pattern"], f"{at}.pattern"))]
                except PatternError as error:
                    raise _refused(f"{at}.pattern", str(error)) from None
            case "grammar":
                text = self.text(value["grammar"], f"{at}.grammar", limit=MAX_LARK_BYTES)
                return ["lark", checked_lark(text, f"{at}.grammar")]
            case "sequence":
                return self.sequence(self.items(value["elements"], f"{at}.elements"), f"{at}.elements", last)
            case "or":
                found = self.items(value["elements"], f"{at}.elements")
                return ["or", [self.part(x, f"{at}.elements[{i}]", last) for i, x in enumerate(found)]]
            case "optional" | "star" | "plus":
                content = self.part(value["content"], f"{at}.content", False)
                return ["repeat", content, {"optional": "?", "star": "*", "plus": "+"}[kind]]
            case "tag":
                return self.tag(value, at, last)
            case "triggered_tags":
                if not last:
                    raise _refused(at, "is triggered_tags, after which nothing may come")
                tags = self.tags(value, at)
                return self.triggered(value["triggers"], tags, at, *flags)
            case _:
                tags = ["or", self.tags(value, at)]
                more = ["sequence", [["text", self.text(value["separator"], f"{at}.separator")], tags]]
                once = tags if flags[1] else ["sequence", [tags, ["repeat", more, "*"]]]
                return once if flags[0] else ["repeat", once, "?"]

    def sequence(self, elements: list[Any], at: str, last: bool) -> Node:
        nodes: list[Node] = []
        for i, one in enumerate(elements):
            follows = elements[i + 1] if i + 1 < len(elements) else None
            opens = isinstance(follows, dict) and (
                (follows.get("type") == "const_string" and bool(follows.get("value")))
                or (follows.get("type") == "tag" and bool(follows.get("begin")))
            )
            any_text = isinstance(one, dict) and one.get("type") == "any_text"
            node = self.part(one, f"{at}[{i}]", (last and follows is None) or (any_text and opens))
            nodes += node[1] if node[0] == "sequence" else [node]
        return ["sequence", nodes]

    def tag(self, value: dict[str, Any], at: str, last: bool) -> Node:
        begin = self.text(value["begin"], f"{at}.begin")
        ends = value["end"] if isinstance(value["end"], list) else [value["end"]]
        ends = [self.text(end, f"{at}.end", empty=True) for end in ends]
        if not ends:
            raise _refused(f"{at}.end", "must have an end")
        content = value["content"]
        any_text = isinstance(content, dict) and content.get("type") == "any_text"
        node = self.part(content, f"{at}.content", (any_text and all(ends)) or (last and not any(ends)))
        inner = node[1] if node[0] == "sequence" else [node]
        end = [["or", [["text", end] for end in ends]]] if any(ends) else []
        return ["sequence", [["text", begin], *inner, *end]]

    def tags(self, value: dict[str, Any], at: str) -> list[Node]:
        found = self.items(value["tags"], f"{at}.tags")
        for i, one in enumerate(found):
            if not isinstance(one, dict) or one.get("type", "tag") != "tag":
                raise _refused(f"{at}.tags[{i}].type", 'must be "tag"')
        return [self.part({"type": "tag", **x}, f"{at}.tags[{i}]", False) for i, x in enumerate(found)]

    def triggered(
        self, triggers: Any, tags: list[Node], at: str, at_least_one: bool, stop_after_first: bool
    ) -> Node:
        texts = [self.text(x, f"{at}.triggers") for x in self.items(triggers, f"{at}.triggers")]
        groups: dict[str, list[Node]] = {}
        for i, tag in enumerate(tags):
            begin = tag[1][0][1]
            found = [text for text in texts if begin.startswith(text)]
            if len(found) != 1:
                raise _refused(
                    f"{at}.triggers", f"must have one trigger that begins {shorten(begin)} (tag {i})"
                )
            groups.setdefault(found[0], []).append(
                ["sequence", [["text", begin[len(found[0]) :]], *tag[1][1:]]]
            )
        return ["triggered", groups, ["or", tags], at_least_one, stop_after_first]

    # Fields

    def check_fields(self, value: Any, needed: set[str], optional: Sequence[str], at: str) -> None:
        if not isinstance(value, dict):
            raise _refused(at, f"must be an object, got {shorten(value)}")
        for key in sorted(needed - value.keys()):
            raise _refused(f"{at}.{key}", "is missing")
        for key in value.keys() - needed - {"type", *optional}:
            raise _refused(f"{at}.{key}", "is a field that is not known")

    def items(self, value: Any, at: str) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise _refused(at, f"must be a list, got {shorten(value)}")
        if len(value) > MAX_TAGS:
            raise RequestError(400, "grammar_too_large", f"{at}: at most {MAX_TAGS} are taken", at)
        return value

    def text(self, value: Any, at: str, empty: bool = False, limit: int = MAX_LITERAL_CHARS) -> str:
        if not isinstance(value, str) or (
            not value and not empty and not at.endswith((".separator", ".end"))
        ):
            raise _refused(at, f"must be a text, got {shorten(value)}")
        if "\0" in value or len(value) > limit:
            raise _refused(at, f"has a NUL character, or more than {limit} characters")
        return value

    def flag(self, value: dict[str, Any], key: str, at: str) -> bool:
        found = value.get(key, False)
        if not isinstance(found, bool):
            raise _refused(f"{at}.{key}", f"must be true or false, got {shorten(found)}")
        return found


def to_lark(
    node: Node, special_tokens: Mapping[str, int], json_options: Callable[[Any], str]
) -> list[dict[str, str]]:
    """llguidance's list of grammars for a checked tree; the first one is the start.

    Args:
        special_tokens: text -> id of the tokens that no text contains.
        json_options: the text of a canonical schema with its whitespace options.
    """
    writer = _Writer(special_tokens, json_options)
    start = writer.expression(node)
    rules = [f"start: {start}", "TEXT: /(?s:.*)/", *writer.rules]
    return [{"name": "start", "lark_grammar": "\n".join(rules)}, *writer.others]


class _Writer:
    def __init__(self, special_tokens: Mapping[str, int], json_options: Callable[[Any], str]) -> None:
        self.rules: list[str] = []
        self.others: list[dict[str, str]] = []
        self.json_options = json_options
        self.ids = special_tokens
        names = sorted((text for text in special_tokens if text), key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, names))) if names else None

    def rule(self, body: str, lazy: bool = False) -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def expression(self, node: Node) -> str:
        match node[0]:
            case "text":
                return " ".join(self.pieces(node[1])) or '""'
            case "any":
                return "TEXT"
            case "json":
                return self.rule(f"%json {self.json_options(node[1])}")
            case "regex":
                return self.rule(f"/(?:{node[1]})/")
            case "lark":
                name = f"g{len(self.others)}"
                self.others.append({"name": name, "lark_grammar": node[1]})
                return self.rule(f"@{name}")
            case "or":
                return self.rule(" | ".join(map(self.expression, node[1])))
            case "repeat":
                return f"{self.rule(self.expression(node[1]))}{node[2]}"
            case "sequence":
                return self.sequence(node[1])
            case _:
                return self.triggered(*node[1:])

    def sequence(self, nodes: list[Node]) -> str:
        """The nodes one after the other; any text ends where the text after it begins."""
        out: list[str] = []
        at = 0
        while at < len(nodes):
            follows = nodes[at + 1] if at + 1 < len(nodes) else None
            if nodes[at] == ["text", ""]:
                at += 1
            elif nodes[at][0] == "any" and follows is not None and follows[0] in ("text", "or"):
                ends = follows[1] if follows[0] == "or" else [follows]
                out.append(self.rule(" | ".join(self.until(end[1]) for end in ends)))
                at += 2
            else:
                out.append(self.expression(nodes[at]))
                at += 1
        return " ".join(out) or '""'

    def until(self, end: str) -> str:
        """Any text up to `end`, and `end`."""
        first, *rest = self.pieces(end)
        if first.startswith("<"):
            return " ".join(["TEXT", first, *rest])
        return " ".join([self.rule(f"TEXT {first}", lazy=True), *rest])

    def triggered(
        self, groups: dict[str, list[Node]], tags: Node, at_least_one: bool, stop_after_first: bool
    ) -> str:
        if at_least_one and stop_after_first:
            return self.expression(tags)
        heads = []
        for trigger, rests in groups.items():
            rest = self.rule(" | ".join(self.expression(one) for one in rests))
            ways = {self.until(trigger), self.rule(f"TEXT {_quoted(trigger)}", lazy=True)}
            heads.append(f"({' | '.join(sorted(ways))}) {rest}")
        found = self.rule(" | ".join(heads))
        if stop_after_first:
            return f"({found} | TEXT)"
        return f"{self.expression(tags) if at_least_one else ''} {found}* TEXT".strip()

    def pieces(self, text: str) -> list[str]:
        """A text as literals and special tokens."""
        out: list[str] = []
        at = 0
        for found in self.special.finditer(text) if self.special else ():
            out += [_quoted(text[at : found.start()])] * (found.start() > at)
            out.append(f"<[{self.ids[found[0]]}]>")
            at = found.end()
        return out + [_quoted(text[at:])] * (at < len(text))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refused(at: str, why: str) -> RequestError:
    return RequestError(400, "invalid_structural_tag", f"{at} {why}", at)
