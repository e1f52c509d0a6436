"""POST /v1/messages and /v1/messages/count_tokens, Anthropic's API: what a call says.

Promise: every part of the conversation reaches the model's template, or is a 400 that names it. What changes
nothing about the text, such as cache_control, has no effect on it. Tools that Anthropic runs itself are left
out, since agents name them to every server.
"""

import logging
import re
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from minisgl.errors import RequestError
from minisgl.fields import Neutral, convert, convert_value, json_type_name, refuse_unknown, shorten
from minisgl.grammar.spec import GrammarSpec, json_schema_spec
from minisgl.replies.conversation import Conversation, EncodedCall
from minisgl.replies.plan import has_thoughts
from minisgl.replies.tools import MAX_TOOLS, AskedTools, Tool, ask_tools
from minisgl.request import SamplingParams, WatchedText
from minisgl.server.apis.messages_answer import ERRORS, MessageAnswer, MessagesFormat, TokenCount
from minisgl.server.calls.call import CallContext, CallOptions
from minisgl.server.calls.call_fields import OTHER_SERVERS, AtLeastOne, CacheSalt, sampling_params
from minisgl.server.calls.completer import Completer
from minisgl.server.calls.turns import Turns
from minisgl.server.http.bodies import DOCUMENTED_AS, Body
from minisgl.server.http.middleware import json_answer
from minisgl.server.http.routes import EVENTS, JSON, Answer, Route
from minisgl.server.sampling_fields import MessagesSampling
from minisgl.server.served_model import ServedModel
from minisgl.text.messages import MAX_MESSAGES

log = logging.getLogger(__name__)

BILLING_HEADER = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
"""What Claude Code writes before its system prompt. It changes with every call, and the prefix cache would
never find the prompt again."""


def routes(completer: Completer) -> list[Route]:
    """The routes of this API."""

    async def count_tokens(request: web.Request) -> web.StreamResponse:
        num_tokens = await completer.count_prompt_tokens(request, parse_count)
        return json_answer(msgspec.json.encode(TokenCount(num_tokens)))

    return [
        Route(
            "POST",
            "/v1/messages",
            "Continue a conversation, as Anthropic's clients ask for it.",
            partial(completer.answer, parse=parse_messages),
            Answer("The answer, or its events when stream is true.", MessageAnswer, (JSON, EVENTS)),
            MESSAGES,
            errors=ERRORS,
        ),
        Route(
            "POST",
            "/v1/messages/count_tokens",
            "The number of tokens of a conversation's prompt.",
            count_tokens,
            Answer("The number.", TokenCount),
            COUNT,
            errors=ERRORS,
        ),
    ]


class TextBlock(Struct, frozen=True):
    """A text inside of a system prompt or a tool's result."""

    type: Literal["text"]
    text: str


TextOrBlocks = str | list[TextBlock]


class Block(Struct, frozen=True):
    """One block of a turn. Fields that are not listed are ignored; none of Anthropic's changes the text."""

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    """Of a tool_use."""
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    """Of a tool_result."""
    content: TextOrBlocks | None = None
    """Of a tool_result."""
    is_error: bool | None = None
    """The text of this tool_result gets "Error: " before it."""


NEEDED: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
"""The fields that a block of each type must have."""
OPTIONAL = {"tool_result": ("content", "is_error")}


class Turn(Struct, frozen=True):
    """Turns of the same role in a row are one turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


TurnList = Annotated[list[Turn], Meta(min_length=1, max_length=MAX_MESSAGES)]


class InputTool(Struct, frozen=True):
    """A tool. One whose type is given and not "custom" is left out: Anthropic or the client would run it."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: str | None = None
    strict: bool | None = None


TOOL_IGNORED: dict[str, Neutral] = {
    "cache_control": None,
    "allowed_callers": None,
    "defer_loading": None,
    "eager_input_streaming": None,
    "input_examples": None,
}


class ToolChoice(Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Of the type "tool"."""
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, frozen=True):
    """Sets the template's variables for thoughts, where it has them. A model need not think."""

    type: Literal["enabled", "disabled", "adaptive"]
    """With "disabled", the answer leaves out what the model thinks all the same."""
    display: Literal["summarized", "omitted"] | None = None
    budget_tokens: AtLeastOne | None = None
    """Most tokens of the thought. A model without thoughts keeps to it in any case."""


class JsonFormat(Struct, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any] | bool


class OutputConfig(Struct, frozen=True):
    format: JsonFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Sets the template's variable reasoning_effort, where it has one."""


class PromptFields(Struct, frozen=True):
    """POST /v1/messages/count_tokens."""

    messages: Annotated[Any, Meta(extra={DOCUMENTED_AS: (TurnList,)})]
    model: str | None = None
    system: Annotated[Any, Meta(extra={DOCUMENTED_AS: (str, list[TextBlock])})] = None
    tools: (
        Annotated[list[Any], Meta(max_length=MAX_TOOLS, extra={DOCUMENTED_AS: (list[InputTool],)})] | None
    ) = None
    tool_choice: Annotated[dict[str, Any], Meta(extra={DOCUMENTED_AS: (ToolChoice,)})] | None = None
    thinking: Annotated[dict[str, Any], Meta(extra={DOCUMENTED_AS: (Thinking,)})] | None = None
    output_config: Annotated[dict[str, Any], Meta(extra={DOCUMENTED_AS: (OutputConfig,)})] | None = None


class MessagesFields(Struct, frozen=True):
    """POST /v1/messages."""

    max_tokens: AtLeastOne
    stream: bool | None = None
    stop_sequences: Annotated[list[WatchedText], Meta(max_length=16)] | None = None
    cache_salt: CacheSalt | None = None


COUNT_IGNORED: dict[str, Neutral] = {"cache_control": None, "context_management": None}
IGNORED: dict[str, Neutral] = {
    **COUNT_IGNORED,
    "metadata": None,
    "service_tier": None,
    "inference_geo": None,
    "diagnostics": None,
    "container": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
COUNT = Body("CountTokensBody", (PromptFields,), (), COUNT_IGNORED)
MESSAGES = Body("MessagesBody", (MessagesFields, PromptFields, MessagesSampling), (), OTHER_SERVERS | IGNORED)


class MessagesCall(NamedTuple):
    """A parsed call."""

    conversation: Conversation
    options: CallOptions
    shows_thoughts: bool = True
    prompt_field: str = "messages"
    num_prompts: int = 1

    def encode(self, model: ServedModel, max_context_tokens: int) -> EncodedCall:
        """See `Call`."""
        return self.conversation.encode(model, max_context_tokens, self.options.params)

    def answer_format(self, encoded: EncodedCall, context: CallContext) -> MessagesFormat:
        """See `Call`."""
        max_tokens = self.options.params.max_tokens or 0
        return MessagesFormat(encoded.plan.reader(), context, max_tokens, self.shows_thoughts)


def parse_messages(body: bytes, model: ServedModel) -> MessagesCall:
    """Parse a body of POST /v1/messages.

    Raises:
        RequestError: 400 that names the invalid field.
    """
    fields, prompt, sampling = MESSAGES.read(body)
    conversation, grammar, thinking = _read_prompt(prompt, model)
    stops = tuple(fields.stop_sequences or ())
    budget = thinking.budget_tokens if thinking and has_thoughts(model.reply_format) else None
    params = sampling_params(
        sampling,
        model,
        max_tokens=fields.max_tokens,
        stop=stops,
        grammar=grammar,
        thinking_token_budget=budget,
    )
    shows_thoughts = thinking is None or (thinking.type != "disabled" and thinking.display != "omitted")
    options = CallOptions(
        params, model=prompt.model, stream=bool(fields.stream), cache_salt=fields.cache_salt or ""
    )
    return MessagesCall(conversation, options, shows_thoughts)


def parse_count(body: bytes, model: ServedModel) -> MessagesCall:
    """Parse a body of POST /v1/messages/count_tokens.

    Raises:
        RequestError: 400 that names the invalid field.
    """
    prompt: PromptFields = COUNT.read(body)[0]
    conversation, grammar, _ = _read_prompt(prompt, model)
    return MessagesCall(conversation, CallOptions(SamplingParams(grammar=grammar), model=prompt.model))


def _read_prompt(
    fields: PromptFields, model: ServedModel
) -> tuple[Conversation, GrammarSpec | None, Thinking | None]:
    """The conversation, the grammar of the answer, and what is said of thoughts."""
    turns = Turns("\n", model.template.takes_late_system)
    if fields.system is not None:
        turns.add_system(_system(fields.system, "system"))
    given = convert_value(
        fields.messages, Annotated[list[Any], Meta(min_length=1, max_length=MAX_MESSAGES)], "messages"
    )
    for rank, turn in enumerate(given):
        _add_turn(turns, turn, f"messages[{rank}]")
    if turns.last_role is None:
        message = "messages must hold a turn of the user"
        raise RequestError(400, "invalid_value", message, "messages")
    if turns.last_role == "assistant":
        where = f"messages[{len(given) - 1}]"
        message = f"{where} is the assistant's, but an answer can't be prefilled here: end with the user's"
        raise RequestError(400, "unsupported_parameter", message, where)
    output, grammar = OutputConfig(), None
    if fields.output_config is not None:
        refuse_unknown(fields.output_config, OutputConfig.__struct_fields__, {}, "output_config.")
        output = convert(fields.output_config, OutputConfig, "output_config.")
        if output.format is not None:
            grammar = json_schema_spec(output.format.schema, "output_config.format.schema")
    thinking = None
    if fields.thinking is not None:
        refuse_unknown(fields.thinking, Thinking.__struct_fields__, {}, "thinking.")
        thinking = convert(fields.thinking, Thinking, "thinking.")
    variables = _thinking_variables(thinking, output.effort, model.template.source or "")
    conversation = Conversation(
        turns.messages(), _tools(fields), variables, limit_field="thinking.budget_tokens"
    )
    return conversation, grammar, thinking


def _system(given: Any, where: str) -> str:
    """A system prompt without the billing header."""
    blocks: TextOrBlocks = convert_value(given, TextOrBlocks, where)
    texts = [blocks] if isinstance(blocks, str) else [block.text for block in blocks]
    return "\n".join(text for text in (BILLING_HEADER.sub("", one) for one in texts) if text)


def _add_turn(turns: Turns, given: Any, where: str) -> None:
    if not isinstance(given, dict):
        message = f'{where} must be {{"role", "content"}}, got {json_type_name(given)}'
        raise RequestError(400, "invalid_type", message, where)
    role = convert_value(given.get("role"), Literal["user", "assistant", "system"], f"{where}.role")
    content = given.get("content")
    if role == "system":
        turns.add_system(_system(content, f"{where}.content"))
        return
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    blocks = convert_value(blocks, list[dict[str, Any]], f"{where}.content")
    for rank, block in enumerate(blocks or [{"type": "text", "text": ""}]):
        _add_block(turns, role, block, f"{where}.content[{rank}]")


def _add_block(turns: Turns, role: str, given: dict[str, Any], where: str) -> None:
    kind = given.get("type")
    names = NEEDED.get(kind, ()) if isinstance(kind, str) else ()
    used = ("type", *names, *OPTIONAL.get(str(kind), ()))
    block: Block = convert({name: given[name] for name in used if name in given}, Block, f"{where}.")
    for name in names:
        if getattr(block, name) is None:
            at = f"{where}.{name}"
            raise RequestError(400, "missing_required_parameter", f"{at} is missing", at)
    if (block.type == "tool_result") == (role == "assistant") and block.type != "text":
        message = f"{where}.type {block.type} can't stand in a turn of the {role}"
        raise RequestError(400, "invalid_value", message, f"{where}.type")
    match block.type:
        case "text" if role == "user":
            turns.add_user(block.text or "", joined=True)
        case "text":
            turns.add_reply(block.text or "")
        case "thinking":
            turns.add_thought(block.thinking or "")
        case "redacted_thinking":
            pass
        case "tool_use":
            turns.add_call(block.id or "", block.name or "", block.input or {}, f"{where}.input")
        case "tool_result":
            content = block.content or ""
            text = content if isinstance(content, str) else "\n".join(part.text for part in content)
            turns.add_result(block.tool_use_id or "", f"Error: {text}" if block.is_error else text)


def _thinking_variables(thinking: Thinking | None, effort: str | None, source: str) -> dict[str, Any]:
    """The template variables for thoughts, of those that the template's source has."""
    variables: dict[str, Any] = {}
    if effort is not None:
        variables["reasoning_effort"] = effort
    if thinking is not None and thinking.type != "adaptive":
        variables |= dict.fromkeys(("enable_thinking", "thinking"), thinking.type == "enabled")
    return {name: value for name, value in variables.items() if re.search(rf"\b{name}\b", source)}


def _tools(fields: PromptFields) -> AskedTools:
    """The tools that may be called."""
    tools: list[Tool] = []
    for rank, given in enumerate(fields.tools or ()):
        where = f"tools[{rank}]"
        if not isinstance(given, dict):
            message = f"{where} must be an object, got {json_type_name(given)}"
            raise RequestError(400, "invalid_type", message, where)
        if given.get("type") not in (None, "custom"):
            log.debug("%s of type %s is left out", where, shorten(given["type"]))
            continue
        refuse_unknown(given, InputTool.__struct_fields__, TOOL_IGNORED, f"{where}.")
        tool: InputTool = convert(given, InputTool, f"{where}.")
        schema = f"{where}.input_schema"
        tools.append(Tool(tool.name, tool.description, tool.input_schema, bool(tool.strict), schema))
    if fields.tool_choice is None:
        return ask_tools(tools, None)
    refuse_unknown(fields.tool_choice, ToolChoice.__struct_fields__, {}, "tool_choice.")
    choice: ToolChoice = convert(fields.tool_choice, ToolChoice, "tool_choice.")
    if (choice.name is not None) != (choice.type == "tool"):
        message = "tool_choice.name goes with tool_choice.type tool, and only with it"
        raise RequestError(400, "invalid_value", message, "tool_choice.name")
    parallel = choice.type != "tool" and not choice.disable_parallel_tool_use
    names = None if choice.name is None else [choice.name]
    kind = "required" if choice.type in ("any", "tool") else choice.type
    return ask_tools(tools, kind, parallel=parallel, names=names)
