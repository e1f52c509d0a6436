"""Grammars for guaranteed calls, in the Lark dialect of llguidance.

Promise: a reply that follows the grammar to its end is read by the parser as calls of the given tools whose
arguments fit their schemas. A schema that a format can't carry is a 400 that names the place.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from minisgl.errors import RequestError
from minisgl.text.formats.call_grammars.schemas import (
    ARRAY_KEYWORDS_REFUSED,
    Depth,
    Property,
    choices,
    kinds,
    plain,
    properties,
    refusal,
    texts,
    values,
    with_definitions,
    without_texts,
)
from minisgl.text.formats.call_grammars.structure import Structure
from minisgl.text.formats.table import LiteralBody, TaggedBody

SPACES = r"/[ \t\r\n]*/"
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
KEY = r"/[A-Za-z_][A-Za-z0-9_]*/"

ThoughtFirst = Literal["no", "may", "open"]
"""Whether a reply may begin with a thought, or is already inside one that the prompt has opened."""


class Function(NamedTuple):
    """One function that may be called."""

    name: str
    schema: Mapping[str, Any] | None  # None: arguments are any object
    where: str  # names the schema in errors


def call_grammar(
    structure: Structure,
    tools: Sequence[Mapping[str, Any]],
    choice: str,
    *,
    parallel: bool = True,
    thought: ThoughtFirst = "no",
    token_ids: Mapping[str, int],
) -> str:
    """The grammar of replies.

    Args:
        tools: OpenAI's tool objects, checked.
        choice: "auto": text, and calls whose arguments fit where a tool is `strict`; "required": one call or
            more; otherwise the name of the one function that must be called.
        parallel: several calls are allowed.
        thought: what may come first.
        token_ids: the tokenizer's added tokens, text -> id; in a marker they are these tokens and no text.

    Raises:
        RequestError: 400; a schema has a keyword that this format can't guarantee.
    """
    functions = []
    for rank, tool in enumerate(tools):
        function = tool.get("function", tool)
        if choice in ("auto", "required", function["name"]):
            is_free = choice == "auto" and not function.get("strict")
            schema = None if is_free else function.get("parameters") or NO_ARGUMENTS
            functions.append(Function(function["name"], schema, f"tools[{rank}].function.parameters"))
    if not functions:
        text = f"tool_choice needs the function {choice}, which is not in tools"
        raise RequestError(400, "invalid_value", text, "tool_choice")
    several = parallel and choice in ("auto", "required")
    return _Rules(structure, token_ids).render(functions, choice == "auto", several, thought)


def answer_grammar(
    structure: Structure, answer: str, *, thought: ThoughtFirst, token_ids: Mapping[str, int]
) -> str:
    """The grammar of replies that are `answer`, such as the names of other grammars, after a thought."""
    return _Rules(structure, token_ids).answer(answer, thought)


class _Rules:
    """Collects the rules of one grammar."""

    def __init__(self, structure: Structure, token_ids: Mapping[str, int]) -> None:
        self._structure = structure
        self._token_ids = token_ids
        in_markers = [text for text in token_ids if any(text in marker for marker in structure.markers)]
        longest_first = sorted(in_markers, key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._names: dict[str, str] = {}  # a rule's text -> its name
        self._depth = Depth(0, [0])

    def render(
        self, functions: Sequence[Function], is_auto: bool, several: bool, thought: ThoughtFirst
    ) -> str:
        structure = self._structure
        if structure.separator is None:
            more = self._calls(functions, structure.between + structure.open)
            closing = ""
        else:
            more = self._calls(functions, structure.separator)
            closing = self._text(structure.close)
        rest = f"{self._rule(f'({more})*') if several and not structure.is_messages else ''} {closing}"
        if not is_auto:
            start = f"{self._calls(functions, structure.open)} {rest}"
        elif structure.is_messages:
            note = self._text_until([], MESSAGE_END, self._text("<|channel|>commentary<|message|>"))
            final = f"{self._text('<|channel|>final<|message|>')} {self._any_text([_regex('<|end|>')])}"
            start = f"({note})? ({self._calls(functions, structure.open)} | {final})"
        else:
            begins = self._call_begins([function.name for function in functions])
            text = self._any_text(begins)
            start = f"({self._calls(functions, structure.open, begins)} {rest} {text} | {text})"
        return "\n".join(
            [
                f"start: {self._thought(thought)} {start}",
                *(f"{name}: {text}" for text, name in self._names.items()),
                "",
            ]
        )

    def answer(self, answer: str, thought: ThoughtFirst) -> str:
        header = self._text("<|channel|>final<|message|>") if self._structure.is_messages else ""
        start = f"start: {self._thought(thought)} {answer.replace('@answer', f'{header} @answer')}"
        return "\n".join([start, *(f"{name}: {text}" for text, name in self._names.items()), ""])

    def _thought(self, thought: ThoughtFirst) -> str:
        """What may come before text and calls."""
        spec, is_messages = self._structure.thought, self._structure.is_messages
        spaces = "" if is_messages else self._terminal(SPACES)
        if spec is None or thought == "no":
            return spaces
        if thought == "open":
            return f"{self._text_until([], spec.close)} {spaces}"
        whole = self._text_until([], spec.close, self._text(spec.open))
        return f"({whole})*" if is_messages else f"{spaces} ({whole} {spaces})?"

    def _call_begins(self, names: Sequence[str]) -> list[str]:
        """Expressions for what may not stand in free text, as a call begins with it."""
        begins = []
        for trigger in self._structure.triggers:
            if trigger == "{":
                begins.append(r"\{[ \t\r\n]*\x22(name|type)\x22")
            elif trigger == "[":
                begins.append(rf"\[[ \t\r\n]*({'|'.join(map(_regex, names))})[ \t\r\n]*\(")
            else:
                begins.append(_regex(trigger))
        return begins

    def _any_text(self, without: Sequence[str], size: str = "*") -> str:
        """Text in which none of these expressions matches."""
        parts = [f"/(.|\\n){size}/", *(f"~/(.|\\n)*({pattern})(.|\\n)*/" for pattern in without)]
        return self._terminal(" & ".join(parts))

    def _text_until(self, without: Sequence[str], end: str, before: str = "", size: str = "*") -> str:
        """Any text and then `end`, which does not stand in it; `before` it other parts of a rule.

        The lexer is greedy: where `end` begins with text, it is one terminal with the text before it.
        """
        found = self._tokens.search(end)
        size_of_text = found.start() if found else len(end)
        text = self._any_text(without or [_regex(end.strip())], size)
        if size_of_text:
            text = self._terminal(f"{text} {json.dumps(end[:size_of_text])}")
        return f"{before} {text} {self._text(end[size_of_text:])}"

    # ---- one call

    def _calls(
        self, functions: Sequence[Function], before: str, after_text: Sequence[str] | None = None
    ) -> str:
        """One call of any function, with the text `before` it.

        Args:
            after_text: free text comes first, in which none of these expressions matches.
        """
        return self._one_of([self._call(function, before, after_text) for function in functions])

    def _call(self, function: Function, before: str, after_text: Sequence[str] | None) -> str:
        structure, name = self._structure, function.name
        self._depth = Depth(0, [0])
        if structure.is_name_json:
            name = json.dumps(name, ensure_ascii=False)[1:-1]
        begin = before + structure.begin + name + structure.after_name
        if after_text is not None:
            head = self._text_until(after_text, begin)
        elif structure.is_messages:  # the models write the recipient on either side of the channel
            other = f" to=functions.{name}<|channel|>commentary json<|message|>"
            head = f"({self._text(begin)} | {self._text(other)})"
        else:
            head = self._text(begin)
        match structure.arguments:
            case TaggedBody() as body:
                arguments = self._tagged(function, body)
            case LiteralBody() as body:
                arguments = self._literals(function, body)
            case _:
                arguments = self._json(self._object(function))
        if structure.may_have_id:
            arguments += f' (", \\"id\\": \\"" {self._terminal("/[A-Za-z0-9]{9}/")} "\\"")?'
        end = structure.end + (structure.close if structure.separator is None else "")
        return self._rule(f"{head} {arguments} {self._text(end)}")

    def _object(self, function: Function) -> Mapping[str, Any]:
        """The schema of arguments that are a JSON object."""
        schema = function.schema or {}
        if "$ref" in schema:
            return schema
        if kinds(schema) and "object" not in kinds(schema):
            raise refusal(f"{function.where}.type", "arguments must be an object")
        return {**schema, "type": "object"}

    def _tagged(self, function: Function, body: TaggedBody) -> str:
        """Arguments between tags, in the schema's order."""
        root = function.schema
        if root is None:
            key, after = self._terminal(r"/[^\n<>\x22]+/"), _after(body)
            forms = {
                kind: f"{self._json({})} {self._text(after)}"
                if kind == "json"
                else self._text_until([], after)
                for kind in body.key_close.values()
            }
            return f"({' | '.join(self._pair(body, key, kind, value) for kind, value in forms.items())})*"
        parts = []
        for key, schema, is_required, where in properties(root, root, function.where):
            found = [
                self._pair(body, self._text(key), "string", text)
                for text in self._bare(schema, root, where, _after(body))
            ]
            rest = without_texts(schema, root, where, self._depth)
            if rest is not None:
                value = self._one_of([self._json(with_definitions(rest, root)), *_python_words(rest, body)])
                value = f"{value} {self._text(_after(body))}"
                found.append(self._pair(body, self._text(key), "json", value))
            parts.append(self._one_of(found) + ("" if is_required else "?"))
        return " ".join(parts)

    def _pair(self, body: TaggedBody, key: str, kind: str, value: str) -> str:
        """A key and a value with what follows it."""
        closings = {found: text for text, found in body.key_close.items()}
        closing = closings[kind if kind in closings else "schema"]
        before = self._text(closing + body.value_open + ("\n" if body.in_lines else ""))
        return self._rule(f"{self._text(body.key_open)} {key} {before} {value}")

    def _literals(self, function: Function, body: LiteralBody) -> str:
        """key=value or key:value, in the schema's order."""
        root = function.schema
        between, assign, is_python = self._text(body.between), self._text(body.assign), body.assign == "="
        if root is None:
            value = self._json({}) if is_python else self._any(body)
            pair = self._rule(f"{self._terminal(KEY)} {assign} {value}")
            return f"({pair} ({between} {pair})*)?"
        pairs = []
        for one in properties(root, root, function.where):
            if is_python and not one.key.isidentifier():
                raise refusal(one.where, "its name is no identifier, which this model's calls need")
            value = (
                self._json(with_definitions(plain(one.schema, root, one.where), root))
                if is_python
                else self._gemma(one.schema, root, one.where, body, self._depth)
            )
            pairs.append((f"{self._key(one, body)} {assign} {value}", one.is_required))
        return self._joined(pairs, between)

    def _key(self, one: Property, body: LiteralBody) -> str:
        if re.fullmatch(r"[\w.\-]+", one.key):
            return self._text(one.key)
        return self._text(body.quotes[0] + one.key + body.quotes[0])

    def _joined(self, pairs: Sequence[tuple[str, bool]], between: str) -> str:
        """Pairs in their order, some of them optional, with `between` between two that are there."""
        rest, first = '""', '""'  # what may come after a pair; the same, if no pair came before
        for text, is_required in reversed(pairs):
            pair = self._rule(text)
            first = self._rule(f"{pair} {rest}" + ("" if is_required else f" | {first}"))
            rest = self._rule(f"{between} {pair} {rest}" + ("" if is_required else f" | {rest}"))
        return first

    # ---- values

    def _gemma(
        self, schema: Any, root: Mapping[str, Any], where: str, body: LiteralBody, depth: Depth
    ) -> str:
        """A value of Gemma's call language."""
        depth = depth.deeper(where)
        quote = self._text(body.quotes[0])
        found = [f"{quote} {text}" for text in self._bare(schema, root, where, body.quotes[0])]
        rest = without_texts(schema, root, where, self._depth)
        if rest is None:
            return self._one_of(found)
        inner = choices(rest, where)
        found += [self._gemma(one, root, place, body, depth) for one, place in inner]
        listed = values(rest)
        if listed is not None:
            if any(isinstance(value, dict | list) for value in listed):
                raise refusal(f"{where}.enum", "this model's calls can't guarantee objects and lists in it")
            found.append(self._json(rest))
        elif not inner:
            found += [self._gemma_kind(kind, rest, root, where, body, depth) for kind in kinds(rest)]
            found += [] if kinds(rest) else [self._any(body)]
        return self._one_of(found)

    def _gemma_kind(
        self,
        kind: str,
        schema: Mapping[str, Any],
        root: Mapping[str, Any],
        where: str,
        body: LiteralBody,
        depth: Depth,
    ) -> str:
        if kind == "array":
            for keyword in ARRAY_KEYWORDS_REFUSED:
                if schema.get(keyword):
                    raise refusal(f"{where}.{keyword}", "this model's calls can't guarantee it")
            item = self._gemma(schema.get("items", True), root, f"{where}.items", body, depth)
            return f'"[" {self._repeated(item, schema.get("minItems") or 0, schema.get("maxItems"))} "]"'
        if kind == "object":
            if "properties" not in schema:
                self._any(body)
                return "any_object"
            pairs = [
                (
                    f'{self._key(one, body)} ":" {self._gemma(one.schema, root, one.where, body, depth)}',
                    one.is_required,
                )
                for one in properties({**schema, "type": kind}, root, where)
            ]
            return f'"{{" {self._joined(pairs, self._text(body.between))} "}}"'
        return '("null" | "None")' if kind == "null" else self._json({**schema, "type": kind})

    def _repeated(self, item: str, least: int, most: int | None) -> str:
        """Items with commas between them."""
        if most == 0:
            return ""
        more = f'{item} ("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return more if least else f"({more})?"

    def _any(self, body: LiteralBody) -> str:
        """Any value of Gemma's call language."""
        quote, key = self._text(body.quotes[0]), self._terminal(KEY)
        text = self._text_until([], body.quotes[0], quote)
        scalar = f'{self._json({"type": ["number", "boolean", "null"]})} | "None"'
        pair = f'{key} ":" any_value'
        self._names[f'"{{" ({pair} ("," {pair})*)? "}}"'] = "any_object"
        some = '"[" (any_value ("," any_value)*)? "]"'
        self._names[f"{text} | {scalar} | any_object | {some}"] = "any_value"
        return "any_value"

    def _bare(self, schema: Any, root: Mapping[str, Any], where: str, end: str) -> list[str]:
        """The strings that a schema allows as bare text, each with `end`, which is in none, after it."""
        found = []
        for text in texts(schema, root, where, self._depth):
            if text.value is None:
                most = "" if text.max_chars is None else text.max_chars
                has_bounds = text.min_chars or text.max_chars is not None
                found.append(
                    self._text_until([], end, size=f"{{{text.min_chars},{most}}}" if has_bounds else "*")
                )
            elif end.strip() in text.value:
                raise refusal(f"{where}.enum", f"{end.strip()} can't stand in this model's calls")
            else:
                found.append(self._text(text.value + end))
        return found

    def _json(self, schema: Mapping[str, Any]) -> str:
        return self._rule(f"%json {json.dumps(schema)}")

    def _text(self, text: str) -> str:
        """A fixed text; tokens of their own in it are these tokens."""
        parts, at = [], 0
        for found in self._tokens.finditer(text):
            parts += [json.dumps(text[at : found.start()])] if found.start() > at else []
            parts.append(f"<[{self._token_ids[found[0]]}]>")
            at = found.end()
        parts += [json.dumps(text[at:])] if at < len(text) else []
        return " ".join(parts)

    def _one_of(self, found: Sequence[str]) -> str:
        return self._rule(" | ".join(found))

    def _rule(self, text: str) -> str:
        """The name of the rule with this text."""
        return self._names.setdefault(text, f"rule_{len(self._names)}")

    def _terminal(self, text: str) -> str:
        """The name of the terminal with this text."""
        return self._names.setdefault(text, f"TERMINAL_{len(self._names)}")


def _python_words(schema: Mapping[str, Any], body: TaggedBody) -> list[str]:
    """What templates write for true, false and null where the schema says the type."""
    if "schema" not in body.key_close.values() or values(schema) is not None:
        return []
    words = {"boolean": ['"True"', '"False"'], "null": ['"None"']}
    return [word for kind in kinds(schema) for word in words.get(kind, ())]


def _after(body: TaggedBody) -> str:
    """What follows a value."""
    return ("\n" if body.in_lines else "") + body.value_close + body.after_value


MESSAGE_END = "<|end|><|start|>assistant"


def _regex(text: str) -> str:
    """A regular expression of llguidance for a fixed text."""
    return re.sub(
        r"[^\w \n<>]", lambda found: f"\\x{ord(found[0]):02X}" if found[0].isascii() else found[0], text
    ).replace("\n", r"\n")
