"""The model's own chat template: renders messages into the prompt's text.

Promise: the text equals that of transformers' `apply_chat_template`. Templates run in a sandbox that can't
change or reach anything outside. An error inside a template is the request's error, never the server's.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minisgl.errors import ConfigError, RequestError
from minisgl.text.history import Habits, find_habits, for_template
from minisgl.text.tokenizer import Tokenizer, read_json

NO_TEMPLATE = (
    "this model has no chat template; use /v1/completions, or put a chat_template.jinja into the model folder"
)
NO_CALLS = (
    "this model's chat template can't write tool calls, so a conversation can't have tool_calls; leave them "
    "out, or put a chat_template.jinja that writes them into the model folder"
)
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_function",
        "description": "x",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "x"}}},
    },
}


class GenerationTag(jinja2.ext.Extension):
    """Renders the content of `{% generation %}`, a tag that marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012  the base class's name and type, read only

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template, or the reason why the model has none.

    Args:
        source: jinja2 text; None = the model has none.
        special_tokens: name -> text, variables of the template ("bos_token" ...).
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._template: jinja2.Template | None = None
        self._problem = NO_TEMPLATE
        if source is not None:
            try:
                self._template = _environment().from_string(source)
            except jinja2.TemplateError as error:
                self._problem = f"the model's chat template does not compile: {error}"

    @classmethod
    def from_folder(cls, path: str | Path, tokenizer: Tokenizer) -> "ChatTemplate":
        """Read `chat_template.jinja`, or else the one in `tokenizer_config.json` (of several: "default").

        Raises:
            ModelError: tokenizer_config.json is not a JSON object.
        """
        file = Path(path) / "chat_template.jinja"
        if file.is_file():
            source: object = file.read_text(encoding="utf-8")
        else:
            source = read_json(Path(path) / "tokenizer_config.json").get("chat_template")
        if isinstance(source, list):
            named = {entry["name"]: entry["template"] for entry in source}
            source = named.get("default")
        return cls(source if isinstance(source, str) else None, tokenizer.special_tokens)

    @classmethod
    def from_file(cls, path: str | Path, tokenizer: Tokenizer) -> "ChatTemplate":
        """Read the template that a user gives.

        Raises:
            ConfigError: the file can't be read, or the template does not compile.
        """
        try:
            template = cls(Path(path).read_text(encoding="utf-8"), tokenizer.special_tokens)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template {path} can't be read: {error}") from None
        if not template.is_usable:
            raise ConfigError(f"--chat-template {path}: {template._problem}")
        return template

    @property
    def is_usable(self) -> bool:
        """Whether there is a template that compiles."""
        return self._template is not None

    @cached_property
    def writes_tools(self) -> bool:
        """Whether the template tells the model of the tools it is given."""
        try:
            text = self._render([{"role": "user", "content": "x"}], True, {}, [PROBE_TOOL])
        except Exception:  # a template is foreign code: any exception may come out of it
            return False
        return PROBE_TOOL["function"]["name"] in text

    @cached_property
    def takes_late_system(self) -> bool:
        """Whether a system message may stand after other messages, and is written where it stands."""
        turns = [("system", "probe_a"), ("user", "probe_b"), ("system", "probe_c"), ("assistant", "probe_d")]
        messages = [{"role": role, "content": text} for role, text in [*turns, ("user", "probe_e")]]
        try:
            text = self._render(messages, True, {}, None)
        except Exception:  # a template is foreign code: any exception may come out of it
            return False
        places = [text.find(message["content"]) for message in messages]
        return -1 not in places and places == sorted(places)

    @cached_property
    def _habits(self) -> Habits | None:
        return find_habits(lambda messages: self._render(messages, False, {}, None))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt of `messages`, special tokens included: encode it without adding them again.

        Args:
            messages: what `normalize_messages` returns.
            variables: further template variables, such as `enable_thinking`; they override the usual ones.
            tools: OpenAI's tool objects; empty is the same as None.
            continue_final_message: the prompt ends with the last message's content, for the model to go on;
                `add_generation_prompt` is without effect then.

        Raises:
            RequestError: 400 with the template's own message when it refuses, when it can't write calls that
                the messages have, or when there is no template.
        """
        if self._template is None:
            raise RequestError(400, "chat_template_error", self._problem, "messages")
        if continue_final_message:
            return self._render_open(messages, variables, tools)
        if any("tool_calls" in message for message in messages):
            if self._habits is None:
                raise RequestError(400, "chat_template_error", NO_CALLS, "messages")
            messages = for_template(messages, self._habits)
        try:
            return self._render(messages, add_generation_prompt, variables or {}, tools)
        except Exception as error:  # a template is foreign code: any exception may come out of it
            raise RequestError(
                400,
                "chat_template_error",
                f"the model's chat template refused these messages: {error}",
                "messages",
            ) from error

    def _render_open(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        """The prompt up to the end of the last message's content, where the template must write a mark."""
        *before, last = messages
        if "tool_calls" in last:
            message = "continue_final_message can't go with tool_calls in the last message; leave them out"
            raise RequestError(400, "invalid_value", message, "continue_final_message")
        mark = f"x{secrets.token_hex(12)}x "
        text = self.render([*before, {**last, "content": last["content"] + mark}], False, variables, tools)
        end = text.rfind(mark.strip())
        if end < 0:
            message = "this model's chat template does not write the last message, so it can't be continued"
            raise RequestError(400, "chat_template_error", message, "continue_final_message")
        # A template that trims the content drops the space after the mark, and would those before it, too.
        return text[:end] if text.startswith(mark, end) else text[:end].rstrip()

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        assert self._template is not None
        return self._template.render(
            {
                **self._special_tokens,
                "tools": list(tools) if tools else None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                **variables,
                "messages": [dict(message) for message in messages],
            }
        )


def _environment() -> ImmutableSandboxedEnvironment:
    """The settings, filters and functions that templates on the hub are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, unlike jinja's own filter, which escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
