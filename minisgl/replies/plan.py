"""How the replies to one prompt are constrained, and how they are read: thought, content and calls.

Promise: every API that answers a conversation gets the same grammar and the same events. What a model's
format can't guarantee is a 400 that names the field. Without tools and thoughts, replies are plain text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import msgspec

from minisgl.errors import RequestError
from minisgl.fields import shorten
from minisgl.grammar.spec import GrammarSpec, json_schema_spec, made_spec, within
from minisgl.replies.model import ReplyModel
from minisgl.replies.thought_limit import limit_thought
from minisgl.replies.tools import NO_TOOLS, AskedTools, Tool
from minisgl.request import SamplingParams
from minisgl.text.formats.call_grammars.lark import ThoughtFirst, answer_grammar, call_grammar
from minisgl.text.formats.call_grammars.structure import Structure, describe
from minisgl.text.formats.events import CallEnd, CallStart, Content, Event, Reasoning
from minisgl.text.formats.parser import ReplyFormat, ReplyParser, new_parser, opens_thought
from minisgl.text.formats.response_template import ResponseTemplate
from minisgl.text.formats.table import CALLS, Format

EFFORT_VARIABLES = ("reasoning_effort", "enable_thinking", "thinking")
"""Template variables that say how much to think."""
JSON_BEGINS = ("", *'{["-0123456789tfn')
PLACE = re.compile(r"tools\[(\d+)\]\.function\.parameters")


class ReplyPlan(NamedTuple):
    """The replies to one prompt."""

    params: SamplingParams  # with the grammar
    prompt: str = ""  # rendered; empty where no format reads the replies
    reads: ReplyFormat | None = None  # None: replies are plain text
    reasons: bool = False  # the format has thoughts
    tools: tuple[Tool, ...] = ()  # those that may be called
    kept_special: frozenset[int] = frozenset()
    """Ids of special tokens that the format needs in the text."""
    thought_end: int | None = None
    """The token that ends a thought; None: there is no such token."""

    def reader(self) -> "ReplyReader":
        """The reader of one more reply."""
        parser = None
        if self.reads is not None:
            tools = [tool.openai() for tool in self.tools]
            parser = new_parser(self.reads, prompt=self.prompt, tools=tools)
        return ReplyReader(parser, self.thought_end)


class Piece(Protocol):
    """More of a reply: the server's `Delta`, or `LLM`'s."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> object | None:
        """Not None with the last one."""
        ...


class ReplyReader:
    """Reads one reply. Its figures are up to date after each `read`.

    `is_broken`: the reply, or the model, broke off in a call, whose arguments are not a JSON object then.
    """

    def __init__(self, parser: ReplyParser | None, thought_end: int | None = None) -> None:
        self.has_calls = False
        self.is_broken = False
        self._parser = parser
        self._thought_end = thought_end
        self._num_tokens = self._num_chars = self._num_thought_chars = 0
        self._num_until_end: int | None = None  # tokens up to the one that ended the thought

    def read(self, delta: Piece) -> list[Event]:
        """The events of the reply's next delta; the last one, with a finish reason, ends the reply."""
        if self._parser is None:
            return [Content(delta.text)] if delta.text else []
        events = self._parser.feed(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            events += self._parser.finish()
        if self._num_until_end is None and self._thought_end in delta.token_ids:
            self._num_until_end = self._num_tokens + delta.token_ids.index(self._thought_end) + 1
        self._num_tokens += len(delta.token_ids)
        self._num_chars += len(delta.text)
        for event in events:
            if isinstance(event, Reasoning):
                self._num_thought_chars += len(event.text)
            elif isinstance(event, CallStart):
                self.has_calls = True
            elif isinstance(event, CallEnd) and not event.complete:
                self.is_broken = True
        return events

    @property
    def ends_in_calls(self) -> bool:
        """Whether the reply has calls, and all of them are whole."""
        return self.has_calls and not self.is_broken

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the thought. Where no token ends it, its share of the characters times all tokens."""
        if not self._num_thought_chars:
            return 0
        if self._num_until_end is not None:
            return self._num_until_end
        return round(self._num_tokens * self._num_thought_chars / self._num_chars)


def effort_variables(
    effort: str | None, model: ReplyModel, where: str = "reasoning_effort"
) -> dict[str, Any]:
    """The template variables that ask for this effort: those that the model's template has.

    Raises:
        RequestError: 400 if the template has none, and `effort` would change something.
    """
    if effort is None:
        return {}
    values = (effort, effort != "none", effort != "none")
    source = model.template.source or ""
    used = {
        name: value
        for name, value in zip(EFFORT_VARIABLES, values, strict=True)
        if re.search(rf"\b{name}\b", source)
    }
    if not used and (effort != "none" or has_thoughts(model.reply_format)):
        message = (
            f"{where} = {shorten(effort)} is not supported: this model's chat template has no such setting"
        )
        raise RequestError(400, "unsupported_parameter", message, where)
    return used


def check_callable(model: ReplyModel, asked: AskedTools) -> None:
    """Refuse tools that the model can't be told of, or whose calls could not be read.

    Raises:
        RequestError: 400 that says what to do.
    """
    if not asked.told:
        return
    if not has_calls(model.reply_format):
        message = (
            f"{asked.where} can't be used: how this model writes calls is not known; name it with "
            "--tool-parser or LLM(tool_parser=...), or leave the tools out"
        )
        raise RequestError(400, "unsupported_parameter", message, asked.where)
    if not model.template.writes_tools:
        message = (
            f"{asked.where} can't be used: this model's chat template does not write tools; name "
            "one that does with --chat-template or LLM(chat_template=...), or leave the tools out"
        )
        raise RequestError(400, "unsupported_parameter", message, asked.where)


def plan_reply(
    model: ReplyModel,
    prompt: str,
    params: SamplingParams,
    asked: AskedTools = NO_TOOLS,
    limit_field: str = "thinking_token_budget",
) -> ReplyPlan:
    """How the replies to the rendered `prompt` are made and read. Call `check_callable` first.

    `limit_field`: what the request calls `params.thinking_token_budget`, for errors.

    Raises:
        RequestError: 400; a schema can't be guaranteed, or two fields do not go together.
    """
    form, reasons = model.reply_format, has_thoughts(model.reply_format)
    if params.thinking_token_budget is not None:
        budget = params.thinking_token_budget
        limit = limit_thought(model, prompt, budget, limit_field) if budget >= 0 else None
        params = msgspec.structs.replace(params, thinking_token_budget=None, thought_limit=limit)
    if form is None or not (reasons or asked.told):
        return ReplyPlan(params)
    if asked.needs_grammar or params.grammar is not None:
        grammar = _Grammars(model.marker_ids, form, prompt, asked).whole(params.grammar)
        params = msgspec.structs.replace(params, grammar=grammar)
    end = None
    if isinstance(form, Format) and form.thought is not None:
        end = model.marker_ids.get(form.thought.close)
    return ReplyPlan(
        params, prompt, form, reasons, asked.allowed if asked.told else (), model.kept_special, end
    )


def has_thoughts(form: ReplyFormat | None) -> bool:
    """Whether replies in this format may hold thoughts."""
    if isinstance(form, ResponseTemplate):
        return any(field.kind == "thought" for field in (*form.fields, form.implicit) if field)
    return form is not None and (form.channels or form.thought is not None)


def has_calls(form: ReplyFormat | None) -> bool:
    """Whether replies in this format may hold calls."""
    if isinstance(form, ResponseTemplate):
        return any(field.kind == "calls" for field in form.fields)
    return form is not None and (form.channels or form.calls is not None)


class _Grammars:
    """Makes the grammar of one call's replies."""

    def __init__(
        self, token_ids: Mapping[str, int], form: ReplyFormat, prompt: str, asked: AskedTools
    ) -> None:
        self._token_ids = token_ids
        self._form = form
        self._prompt = prompt
        self._asked = asked

    def whole(self, answer: GrammarSpec | None) -> GrammarSpec | None:
        """The grammar of a reply: a thought, then calls or what `answer` says."""
        asked, form = self._asked, self._form
        if asked.choice == "required" and answer is not None and answer.kind == "json_schema":
            answer = None  # the reply is calls only, so the schema has no text to hold
        if isinstance(form, ResponseTemplate):
            return self._by_template(form, answer)
        # A format without calls has a structure of its own thought and any other's calls, which are not used.
        structure = describe(form if has_calls(form) else replace(form, calls=CALLS["hermes"]))
        assert structure is not None
        thought = _thought_first(form, self._prompt)
        if answer is None:
            return made_spec(self._calls(structure, thought, asked.choice), asked.where)
        if not asked.told:
            if thought == "no":
                return answer
            text = answer_grammar(structure, "@answer", thought=thought, token_ids=self._token_ids)
            return within(answer, (("reply", text),))
        if asked.choice == "required" or answer.kind != "json_schema" or not self._tells_apart(structure):
            raise self._refusal(answer)
        text = answer_grammar(structure, "(@calls | @answer)", thought=thought, token_ids=self._token_ids)
        return within(answer, (("reply", text), ("calls", self._calls(structure, "no", "required"))))

    def _by_template(self, form: ResponseTemplate, answer: GrammarSpec | None) -> GrammarSpec | None:
        """The grammar for a model that only its own response_template describes: there is none for calls."""
        asked = self._asked
        if answer is None:
            message = (
                f"{asked.where}: tool_choice required or a name, strict, parallel_tool_calls false can't be "
                "guaranteed with this model's response_template; name a format with --tool-parser"
            )
            raise RequestError(400, "unsupported_parameter", message, asked.where)
        if asked.told:
            raise self._refusal(answer)
        if any(isinstance(event, Reasoning) for event in new_parser(form, prompt=self._prompt).feed("x")):
            message = (
                f"{answer.where} can't be used: the prompt opens a thought, whose end only this model's "
                "response_template knows; name a format with --reasoning-parser"
            )
            raise RequestError(400, "unsupported_parameter", message, answer.where)
        return answer

    def _calls(self, structure: Structure, thought: ThoughtFirst, choice: str) -> str:
        """The grammar of calls. Errors name the places of the request's own fields."""
        tools = []
        for tool in self._asked.allowed:
            parameters = None
            if tool.parameters is not None and (choice == "required" or tool.strict):
                schema = {"type": "object", **tool.parameters}
                parameters = json.loads(json_schema_spec(schema, tool.where).text)
            tools.append({"name": tool.name, "parameters": parameters, "strict": tool.strict})
        try:
            return call_grammar(
                structure,
                tools,
                choice,
                parallel=self._asked.parallel,
                thought=thought,
                token_ids=self._token_ids,
            )
        except RequestError as error:

            def place(found: re.Match[str]) -> str:
                return self._asked.allowed[int(found[1])].where

            raise RequestError(
                error.status, error.code, PLACE.sub(place, error.message), error.param
            ) from None

    def _tells_apart(self, structure: Structure) -> bool:
        """Whether a reply's first token or character says if it is calls or JSON."""
        begin = structure.open + structure.begin
        is_token = any(begin.startswith(text) for text in self._token_ids)
        return structure.is_messages or is_token or begin[:1] not in JSON_BEGINS

    def _refusal(self, answer: GrammarSpec) -> RequestError:
        asked = self._asked
        message = (
            f"{answer.where} can't go with {asked.where}, when tool_choice is {asked.choice}: this model's "
            "reply can't be held to be either calls or such an answer; leave one of them out"
        )
        return RequestError(400, "invalid_value", message, answer.where)


def _thought_first(form: Format, prompt: str) -> ThoughtFirst:
    if form.channels:
        return "may"
    if form.thought is None:
        return "no"
    return "open" if opens_thought(form.thought, prompt) else "may"
