"""The tools of a call: what may be called, and whether the model must.

Promise: tools are checked once, whichever API they come from, and nothing of them is ignored. `plan.py`
makes the grammar that guarantees calls.
"""

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct

from minisgl.errors import RequestError
from minisgl.fields import convert, json_type_name, refuse_unknown, shorten

MAX_TOOLS = 512
"""Most tools of one call."""
MAX_NAME_CHARS = 128
NAME = re.compile(rf"[A-Za-z0-9_.\-]{{1,{MAX_NAME_CHARS}}}")
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


class FunctionTool(Struct, frozen=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(pattern=rf"^{NAME.pattern}\Z")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of an object; none: the function has no arguments."""
    strict: bool | None = None
    """Calls of it fit the schema also where the model is free to call or not."""


class ToolDefinition(Struct, frozen=True):
    """One tool. Functions are the only kind."""

    type: Literal["function"]
    function: FunctionTool


class FunctionName(Struct, frozen=True):
    name: str


class NamedTool(Struct, frozen=True):
    """Exactly one call of this function."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Struct, frozen=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(Struct, frozen=True):
    """The model is told of all tools, and may call only these."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


CHOICES = ("auto", "none", "required")


class Tool(NamedTuple):
    """One function. `where` names its schema in errors."""

    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool
    where: str

    def openai(self) -> dict[str, Any]:
        """The object that templates and parsers know."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(NO_PARAMETERS) if self.parameters is None else self.parameters
        return {"type": "function", "function": function}


class AskedTools(NamedTuple):
    """The tools of one call, checked."""

    tools: tuple[Tool, ...] = ()
    allowed: tuple[Tool, ...] = ()  # those that may be called
    choice: Literal["none", "auto", "required"] = "none"
    parallel: bool = True  # several calls may stand in one reply
    where: str = "tools"  # the field, for errors

    @property
    def told(self) -> bool:
        """Whether the model is told of the tools, and its replies may have calls."""
        return bool(self.tools) and self.choice != "none"

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """The template's variable `tools`; empty with tool_choice none."""
        return [tool.openai() for tool in self.tools] if self.told else []

    @property
    def needs_grammar(self) -> bool:
        """Whether something of the calls is guaranteed: that there is one, or names, schemas, number."""
        if not self.told:
            return False
        return (
            self.choice == "required"
            or not self.parallel
            or len(self.allowed) < len(self.tools)
            or any(tool.strict for tool in self.allowed)
        )


NO_TOOLS = AskedTools()


def new_call_id() -> str:
    """An id for a call in an answer. No two calls have the same."""
    return f"call_{uuid.uuid4().hex[:24]}"


def read_tools(
    given: Sequence[object] | None, choice: str | dict[str, Any] | None, parallel: bool | None = None
) -> AskedTools:
    """The tools of a chat, in OpenAI's form.

    Args:
        given: the field `tools`: objects of the form of `ToolDefinition`.
        choice: the field `tool_choice`: one of `CHOICES`, or a `NamedTool` or `AllowedToolsChoice`.
        parallel: the field `parallel_tool_calls`.

    Raises:
        RequestError: 400 that names the invalid field.
    """
    tools = [_tool(one, f"tools[{index}]") for index, one in enumerate(given or ())]
    if isinstance(choice, dict):
        return _chosen(tools, choice, parallel)
    return ask_tools(tools, choice, parallel=parallel is not False)


def ask_tools(
    tools: Sequence[Tool],
    choice: str | None,
    *,
    parallel: bool = True,
    names: Sequence[str] | None = None,
    where: str = "tools",
    choice_where: str = "tool_choice",
) -> AskedTools:
    """The tools of a call of any API.

    Args:
        choice: "auto", "none" or "required"; None: auto if there are tools.
        names: only these may be called; None: all.
        where: the field with the tools; `choice_where`: the one with the choice.

    Raises:
        RequestError: 400; a tool's name or schema is invalid or twice there, or the choice names no tool.
    """
    if len(tools) > MAX_TOOLS:
        message = f"{where} must be up to {MAX_TOOLS} tools, got {len(tools)}"
        raise RequestError(400, "invalid_value", message, where)
    known: dict[str, Tool] = {}
    for tool in tools:
        place = tool.where.rpartition(".")[0]
        if not NAME.fullmatch(tool.name):
            message = (
                f"{place}.name must be 1 to {MAX_NAME_CHARS} letters, digits, dots, dashes or underscores, "
                f"got {shorten(tool.name)}"
            )
            raise RequestError(400, "invalid_value", message, f"{place}.name")
        if tool.name in known:
            message = f"{place}.name {shorten(tool.name)} is given twice; names must differ"
            raise RequestError(400, "invalid_value", message, f"{place}.name")
        if tool.parameters is not None and tool.parameters.get("type", "object") != "object":
            message = f'{tool.where}.type must be "object", got {shorten(tool.parameters["type"])}'
            raise RequestError(400, "invalid_value", message, f"{tool.where}.type")
        known[tool.name] = tool
    match choice:
        case None:
            choice = "auto" if tools else "none"
        case "auto" | "none" | "required":
            pass
        case _:
            message = (
                f"{choice_where} must be one of {', '.join(CHOICES)}, or an object, got {shorten(choice)}"
            )
            raise RequestError(400, "invalid_value", message, choice_where)
    if not tools and (choice == "required" or names):
        message = f"{choice_where} asks for a call, so {where} must hold at least one tool"
        raise RequestError(400, "invalid_value", message, choice_where)
    for name in names or ():
        if name not in known:
            message = f"{choice_where} names the function {shorten(name)}, which is not in {where}"
            raise RequestError(400, "invalid_value", message, choice_where)
    allowed = tuple(tool for tool in tools if names is None or tool.name in names)
    made: Literal["none", "auto", "required"] = (
        "none" if choice == "none" or not tools else "required" if choice == "required" else "auto"
    )
    return AskedTools(tuple(tools), allowed, made, parallel, where)


def _chosen(tools: Sequence[Tool], choice: dict[str, Any], parallel: bool | None) -> AskedTools:
    """The tools with a tool_choice that is an object."""
    kind = choice.get("type")
    if kind == "function":
        refuse_unknown(choice, NamedTool.__struct_fields__, {}, "tool_choice.")
        name = convert(choice, NamedTool, "tool_choice.").function.name
        return ask_tools(tools, "required", parallel=False, names=[name])
    if kind == "allowed_tools":
        refuse_unknown(choice, AllowedToolsChoice.__struct_fields__, {}, "tool_choice.")
        allowed: AllowedTools = convert(choice, AllowedToolsChoice, "tool_choice.").allowed_tools
        names = [one.function.name for one in allowed.tools]
        return ask_tools(tools, allowed.mode, parallel=parallel is not False, names=names)
    message = f"tool_choice.type must be function or allowed_tools, got {shorten(kind)}"
    raise RequestError(400, "invalid_value", message, "tool_choice.type")


def _tool(given: object, where: str) -> Tool:
    if not isinstance(given, dict):
        message = f"{where} must be an object, got {json_type_name(given)}"
        raise RequestError(400, "invalid_type", message, where)
    kind = given.get("type")
    if kind != "function":
        message = f"{where}.type must be function, the only kind of tool here, got {shorten(kind)}"
        raise RequestError(400, "unsupported_parameter", message, f"{where}.type")
    refuse_unknown(given, ToolDefinition.__struct_fields__, {}, f"{where}.")
    inner = given.get("function")
    if not isinstance(inner, dict):
        message = f"{where}.function must be an object with a name, got {json_type_name(inner)}"
        raise RequestError(400, "invalid_type", message, f"{where}.function")
    where = f"{where}.function"
    refuse_unknown(inner, FunctionTool.__struct_fields__, {}, f"{where}.")
    tool: FunctionTool = convert(inner, FunctionTool, f"{where}.")
    return Tool(tool.name, tool.description, tool.parameters, bool(tool.strict), f"{where}.parameters")
