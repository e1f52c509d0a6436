"""POST /v1/responses, OpenAI's API for agents, without anything stored: what a call says.

Promise: a conversation is whole in each call. `store: true` and everything that refers to an earlier call is
refused by name; `store` is false here unless a call says otherwise. Tools that OpenAI runs itself are left
out, since agents name them to every server.
"""

import logging
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct

from minisgl.errors import RequestError
from minisgl.fields import Neutral, convert, convert_value, json_type_name, refuse_unknown, shorten
from minisgl.grammar.spec import GrammarSpec, json_object_spec, json_schema_spec
from minisgl.replies.conversation import Conversation, EncodedCall
from minisgl.replies.plan import effort_variables
from minisgl.replies.tools import MAX_TOOLS, NO_PARAMETERS, AskedTools, Tool, ask_tools
from minisgl.server.apis.responses_answer import ResponseAnswer, ResponsesFormat
from minisgl.server.calls.call import CallContext, CallOptions
from minisgl.server.calls.call_fields import (
    OTHER_SERVERS,
    AtLeastOne,
    CacheSalt,
    TemplateVariables,
    ThoughtFields,
    check_template_variables,
    sampling_params,
)
from minisgl.server.calls.completer import Completer
from minisgl.server.calls.turns import Turns
from minisgl.server.http.bodies import DOCUMENTED_AS, Body
from minisgl.server.http.routes import EVENTS, JSON, Answer, Route
from minisgl.server.sampling_fields import ResponseSampling
from minisgl.server.served_model import ServedModel
from minisgl.text.messages import MAX_MESSAGES

log = logging.getLogger(__name__)


def routes(completer: Completer) -> list[Route]:
    """The route of this API."""
    return [
        Route(
            "POST",
            "/v1/responses",
            "Continue a conversation, as agents ask for it. Nothing is stored.",
            partial(completer.answer, parse=parse_response),
            Answer("The answer, or its events when stream is true.", ResponseAnswer, (JSON, EVENTS)),
            RESPONSE,
        )
    ]


class ItemPart(Struct, frozen=True):
    """One part of an item's text; the parts are joined without a separator."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


PartsOrText = str | list[ItemPart]


class InputItem(Struct, frozen=True):
    """One item of the conversation. Fields that are not listed are ignored: outputs come back as inputs."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    """Of a message. A developer is the system. Those at the beginning become one message."""
    content: PartsOrText | None = None
    """Of a message, or of a reasoning item."""
    call_id: str | None = None
    name: str | None = None
    """Of a function_call."""
    arguments: str | None = None
    """Of a function_call: the text of a JSON object."""
    output: PartsOrText | None = None
    """Of a function_call_output."""


NEEDED: dict[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
"""The fields that an item of each type must have."""
InputItems = Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]


class FlatTool(Struct, frozen=True):
    """A tool. One whose type is not "function" is left out: OpenAI or the client would run it."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


TOOL_IGNORED: dict[str, Neutral] = {"defer_loading": None, "allowed_callers": None, "output_schema": None}


class FlatName(Struct, frozen=True):
    """Exactly one call of this function."""

    type: Literal["function"]
    name: str


class FlatAllowed(Struct, frozen=True):
    """The model is told of all tools, and may call only these."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatName], Meta(min_length=1, max_length=MAX_TOOLS)]


class TextOptions(Struct, frozen=True):
    format: dict[str, Any] | None = None
    """{"type": "text" or "json_object"}, or {"type": "json_schema", "name", "schema", "strict"}."""


class ReasoningOptions(Struct, frozen=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponseStreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class ResponseFields(Struct, frozen=True):
    """POST /v1/responses."""

    input: Annotated[Any, Meta(extra={DOCUMENTED_AS: (str, InputItems)})]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: AtLeastOne | None = None
    tools: (
        Annotated[list[Any], Meta(max_length=MAX_TOOLS, extra={DOCUMENTED_AS: (list[FlatTool],)})] | None
    ) = None
    tool_choice: (
        Annotated[
            str | dict[str, Any],
            Meta(extra={DOCUMENTED_AS: (Literal["auto", "none", "required"], FlatName, FlatAllowed)}),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: Annotated[dict[str, Any], Meta(extra={DOCUMENTED_AS: (TextOptions,)})] | None = None
    reasoning: Annotated[dict[str, Any], Meta(extra={DOCUMENTED_AS: (ReasoningOptions,)})] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    include: list[str] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    cache_salt: CacheSalt | None = None


HARMLESS_INCLUDES = (
    "reasoning.encrypted_content",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)
"""Values of `include` that ask for what no answer of this server has."""
REASONING_IGNORED: dict[str, Neutral] = {"summary": None, "generate_summary": None, "context": None}
UNSUPPORTED: dict[str, Neutral] = {
    "store": (False,),
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    "context_management": ([],),
    "moderation": (),
    "top_logprobs": (0,),
    "max_tool_calls": None,
    "service_tier": None,
    "safety_identifier": None,
    "prompt_cache_key": None,
    "prompt_cache_options": None,
    "prompt_cache_retention": None,
    "client_metadata": None,
}
RESPONSE = Body(
    "ResponseBody", (ResponseFields, ResponseSampling, ThoughtFields), (), OTHER_SERVERS | UNSUPPORTED
)


class ResponseCall(NamedTuple):
    """A parsed call."""

    conversation: Conversation
    options: CallOptions
    echo: dict[str, Any]  # the answer's fields that repeat the call's
    prompt_field: str = "input"
    num_prompts: int = 1

    def encode(self, model: ServedModel, max_context_tokens: int) -> EncodedCall:
        """See `Call`."""
        return self.conversation.encode(model, max_context_tokens, self.options.params)

    def answer_format(self, encoded: EncodedCall, context: CallContext) -> ResponsesFormat:
        """See `Call`."""
        return ResponsesFormat(self.echo, encoded.plan.reader(), context)


def parse_response(body: bytes, model: ServedModel) -> ResponseCall:
    """Parse a body of POST /v1/responses.

    Raises:
        RequestError: 400 that names the invalid field.
    """
    fields, sampling, thought = RESPONSE.read(body)
    check_template_variables(fields.chat_template_kwargs)
    for rank, name in enumerate(fields.include or ()):
        if name not in HARMLESS_INCLUDES:
            where = f"include[{rank}]"
            message = f"{where} = {shorten(name)} is not supported here; leave it out"
            raise RequestError(400, "unsupported_parameter", message, where)
    turns = Turns("", model.template.takes_late_system)
    if fields.instructions:
        turns.add_system(fields.instructions)
    _add_input(turns, fields.input)
    shown_text, grammar = _text(fields.text or {})
    reasoning = fields.reasoning or {}
    refuse_unknown(reasoning, ReasoningOptions.__struct_fields__, REASONING_IGNORED, "reasoning.")
    effort = convert(reasoning, ReasoningOptions, "reasoning.").effort
    asked = _tools(fields)
    variables = effort_variables(effort, model, "reasoning.effort") | (fields.chat_template_kwargs or {})
    params = sampling_params(
        sampling,
        model,
        max_tokens=fields.max_output_tokens,
        grammar=grammar,
        thinking_token_budget=thought.thinking_token_budget,
    )
    echo = {
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "reasoning": {"effort": effort, "summary": None},
        "temperature": params.temperature,
        "text": shown_text,
        "tool_choice": fields.tool_choice or "auto",
        "tools": [_shown_tool(tool) for tool in asked.tools],
        "top_p": params.top_p,
        "user": fields.user,
    }
    options = CallOptions(
        params, model=fields.model, stream=bool(fields.stream), cache_salt=fields.cache_salt or ""
    )
    conversation = Conversation(turns.messages(), asked, variables, field="input")
    return ResponseCall(conversation, options, echo)


def _tools(fields: ResponseFields) -> AskedTools:
    """The functions that may be called."""
    tools: list[Tool] = []
    for rank, given in enumerate(fields.tools or ()):
        where = f"tools[{rank}]"
        if not isinstance(given, dict):
            message = f"{where} must be an object, got {json_type_name(given)}"
            raise RequestError(400, "invalid_type", message, where)
        if given.get("type") != "function":
            log.debug("%s of type %s is left out", where, shorten(given.get("type")))
            continue
        refuse_unknown(given, FlatTool.__struct_fields__, TOOL_IGNORED, f"{where}.")
        tool: FlatTool = convert(given, FlatTool, f"{where}.")
        parameters = f"{where}.parameters"
        tools.append(Tool(tool.name or "", tool.description, tool.parameters, bool(tool.strict), parameters))
    choice, parallel = fields.tool_choice, fields.parallel_tool_calls is not False
    if not isinstance(choice, dict):
        return ask_tools(tools, choice, parallel=parallel)
    match choice.get("type"):
        case "function":
            refuse_unknown(choice, FlatName.__struct_fields__, {}, "tool_choice.")
            name = convert(choice, FlatName, "tool_choice.").name
            return ask_tools(tools, "required", parallel=False, names=[name])
        case "allowed_tools":
            refuse_unknown(choice, FlatAllowed.__struct_fields__, {}, "tool_choice.")
            allowed: FlatAllowed = convert(choice, FlatAllowed, "tool_choice.")
            return ask_tools(
                tools, allowed.mode, parallel=parallel, names=[one.name for one in allowed.tools]
            )
        case other:
            message = f"tool_choice.type must be function or allowed_tools, got {shorten(other)}"
            raise RequestError(400, "invalid_value", message, "tool_choice.type")


def _shown_tool(tool: Tool) -> dict[str, Any]:
    """A tool as the answer repeats it."""
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": NO_PARAMETERS if tool.parameters is None else tool.parameters,
        "strict": tool.strict,
    }


def _add_input(turns: Turns, given: Any) -> None:
    """Add the field `input`: a text, or items."""
    if isinstance(given, str):
        turns.add_user(given)
        return
    if not isinstance(given, list):
        message = f"input must be a text or a list of items, got {json_type_name(given)}"
        raise RequestError(400, "invalid_type", message, "input")
    convert_value(given, Annotated[list[Any], Meta(min_length=1, max_length=MAX_MESSAGES)], "input")
    for rank, item in enumerate(given):
        _add_item(turns, item, f"input[{rank}]")


def _add_item(turns: Turns, given: Any, where: str) -> None:
    if not isinstance(given, dict):
        message = f"{where} must be an object, got {json_type_name(given)}"
        raise RequestError(400, "invalid_type", message, where)
    # A null type counts as absent; so do fields that do not belong to the item's type.
    kind = given.get("type") or "message"
    if kind == "item_reference":
        message = (
            f"{where} refers to an item of an earlier answer, and answers are not stored: send the item "
            "itself (clients do so with store: false)"
        )
        raise RequestError(400, "unsupported_parameter", message, where)
    used = NEEDED.get(kind, ("type",)) if isinstance(kind, str) else ("type",)
    used = (*used, "content") if kind == "reasoning" else used
    item: InputItem = convert(
        {"type": kind, **{name: given[name] for name in used if name in given}}, InputItem, f"{where}."
    )
    for name in NEEDED[item.type]:
        if getattr(item, name) is None:
            at = f"{where}.{name}"
            raise RequestError(400, "missing_required_parameter", f"{at} is missing", at)
    text = _joined(item.content)
    match item:
        case InputItem(type="reasoning"):
            turns.add_thought(text)
        case InputItem(type="function_call"):
            turns.add_call(item.call_id or "", item.name or "", item.arguments or "", f"{where}.arguments")
        case InputItem(type="function_call_output"):
            turns.add_result(item.call_id or "", _joined(item.output))
        case InputItem(role="assistant"):
            turns.add_reply(text)
        case InputItem(role="user"):
            turns.add_user(text)
        case _:
            turns.add_system(text)


def _joined(content: PartsOrText | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


def _text(given: dict[str, Any]) -> tuple[dict[str, Any], GrammarSpec | None]:
    """The field `text` as the answer repeats it, and the grammar that it asks for."""
    refuse_unknown(given, TextOptions.__struct_fields__, {"verbosity": ("medium",)}, "text.")
    form = convert(given, TextOptions, "text.").format or {"type": "text"}
    where, grammar = "text.format", None
    match form.get("type"):
        case "text":
            refuse_unknown(form, {"type"}, {}, f"{where}.")
        case "json_object":
            refuse_unknown(form, {"type"}, {}, f"{where}.")
            grammar = json_object_spec(where)
        case "json_schema":
            refuse_unknown(form, {"type", "name", "schema", "description", "strict"}, {}, f"{where}.")
            grammar = json_schema_spec(form.get("schema"), f"{where}.schema")
        case other:
            message = f"{where}.type must be text, json_object or json_schema, got {shorten(other)}"
            raise RequestError(400, "invalid_value", message, f"{where}.type")
    return {"format": form}, grammar
