"""Which settings a reload may change, and whether open answers can go on with the new ones.

Promise: settings that are not given stay as they are. If the model changes, those that belong to one model
are chosen anew. No I/O.
"""

import dataclasses
import typing
from typing import Any, NamedTuple

import msgspec

from minisgl.config import TEXT_FIELDS, EngineConfig, ServerConfig
from minisgl.server.http.bodies import Body

FIELDS_OF_ONE_MODEL = ("revision", "tokenizer", "chat_template", "tool_parser", "reasoning_parser")
"""They hold for one model, so another one does not keep them."""
SERVER_ONLY_FIELDS = ("seed",)
"""Fields of `EngineConfig` that only the server uses, at its start."""
CHANGES_ANSWERS = frozenset(
    {
        *("tokenizer", "dummy_weights", "quantization", "device", "dtype", "kv_dtype", "kernel"),
        *("max_context_tokens", "num_pages", "page_size", "memory_fraction"),
    }
)
"""If one of these changes, open answers would go on with other tokens, or might not fit. So they end first. A
change of the files in the model's folder counts as well; a change of the folder's name does not."""


def _optional_fields(kind: type[Any], names: typing.Iterable[str]) -> list[tuple[str, Any, Any]]:
    hints = typing.get_type_hints(kind)
    return [(name, hints[name] | msgspec.UnsetType, msgspec.UNSET) for name in names]


ENGINE_FIELDS = tuple(
    field.name for field in dataclasses.fields(EngineConfig) if field.name not in SERVER_ONLY_FIELDS
)
ReloadFields = msgspec.defstruct(
    "ReloadFields",
    [
        *_optional_fields(EngineConfig, ENGINE_FIELDS),
        *_optional_fields(ServerConfig, TEXT_FIELDS),
        ("beside", bool | None, None),
    ],
    frozen=True,
    kw_only=True,
)
"""POST /reload: settings with the names and values of the flags; null = auto. `beside`: whether the new
engines start while the old ones still run; null = if there is room."""
RELOAD = Body("ReloadBody", (ReloadFields,))


class NewSettings(NamedTuple):
    """The settings after a reload."""

    server: ServerConfig
    engine: EngineConfig
    changes_answers: bool
    """Open answers can't go on with these settings."""


def new_settings(server: ServerConfig, engine: EngineConfig, fields: Any) -> NewSettings:
    """The settings with the changes in `fields`, a `ReloadFields`. Nothing is checked."""
    given = {
        name: getattr(fields, name)
        for name in fields.__struct_fields__
        if name != "beside" and getattr(fields, name) is not msgspec.UNSET
    }
    if given.get("model", engine.model) != engine.model:
        given = {**dict.fromkeys(FIELDS_OF_ONE_MODEL), **given}
    of_engine = {name: value for name, value in given.items() if name in ENGINE_FIELDS}
    of_server = {name: value for name, value in given.items() if name in TEXT_FIELDS}
    changed = {name for name, value in of_engine.items() if value != getattr(engine, name)}
    return NewSettings(
        dataclasses.replace(server, **of_server),
        dataclasses.replace(engine, **of_engine),
        bool(changed & CHANGES_ANSWERS),
    )
