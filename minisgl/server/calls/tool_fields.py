"""The fields of a chat about tools."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from minisgl.replies.tools import (
    MAX_TOOLS,
    AllowedToolsChoice,
    AskedTools,
    NamedTool,
    ToolDefinition,
    read_tools,
)
from minisgl.server.http.bodies import DOCUMENTED_AS

GivenTools = Annotated[list[Any], Meta(max_length=MAX_TOOLS, extra={DOCUMENTED_AS: (list[ToolDefinition],)})]
"""`read_tools` reads them."""


class ToolFields(Struct, frozen=True):
    """The tools of a chat."""

    tools: GivenTools | None = None
    tool_choice: (
        Annotated[
            str | dict[str, Any],
            Meta(extra={DOCUMENTED_AS: (Literal["auto", "none", "required"], NamedTool, AllowedToolsChoice)}),
        ]
        | None
    ) = None
    """Default: "auto" with tools."""
    parallel_tool_calls: bool | None = None
    """False: at most one call in a reply."""


def tools_of(fields: ToolFields) -> AskedTools:
    """The tools that the fields ask for.

    Raises:
        RequestError: 400 that names the invalid field.
    """
    return read_tools(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
