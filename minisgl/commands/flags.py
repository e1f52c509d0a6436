"""Command-line flags made from the fields of a settings class, their types, defaults and docstrings.

Promise: a field is a flag of the same name, an environment variable MINISGL_NAME may set its default,
and the help is the field's own docstring, so that the three can't drift apart. Reads no environment
itself; the caller hands it in.
"""

import argparse
import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, NamedTuple

import msgspec

from minisgl.errors import ConfigError

TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off")
SECRETS = frozenset({"api_key"})
"""Fields whose value is never printed."""
METAVARS = {int: "N", float: "X", str: "TEXT"}


class Field(NamedTuple):
    """One setting: its name, the type of one value, whether it repeats, default and meaning."""

    name: str
    kind: type | None  # None: no flag can hold it
    repeats: bool
    default: Any
    doc: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "MINISGL_" + self.name.upper()


def fields_of(cls: type) -> list[Field]:
    """The settings of a dataclass or msgspec Struct, in order, with the docstrings below them."""
    docs = _field_docs(cls)
    hints = typing.get_type_hints(cls)
    if is_dataclass(cls):
        defaults = {field.name: field.default for field in fields(cls)}
    else:
        defaults = {field.name: field.default for field in msgspec.structs.fields(cls)}
    found = []
    for name, default in defaults.items():
        kind, repeats = _kind(hints[name])
        if default is MISSING or default is msgspec.NODEFAULT:
            raise TypeError(f"{cls.__name__}.{name} needs a default to be a flag")
        found.append(Field(name, kind, repeats, default, docs[name]))
    return found


def add_flags(
    parser: argparse.ArgumentParser,
    title: str,
    cls: type,
    environ: Mapping[str, str],
    skip: Iterable[str] = (),
) -> None:
    """Give `parser` a group of flags, one per field of `cls`; `environ` overrides the defaults.

    Raises:
        ConfigError: a MINISGL_ variable has a value its flag would refuse.
    """
    group = parser.add_argument_group(title)
    for field in fields_of(cls):
        if field.name in skip or field.kind is None:
            continue
        default = default_of(field, environ)
        help_text = _help(field, default)
        if field.kind is bool:
            group.add_argument(
                field.flag, dest=field.name, action="store_true", default=default, help=help_text
            )
            off = "--no-" + field.flag[2:]
            group.add_argument(off, dest=field.name, action="store_false", help=f"Turn {field.flag} off.")
        elif field.repeats:
            group.add_argument(
                field.flag,
                dest=field.name,
                action="append",
                type=field.kind,
                metavar=METAVARS[field.kind],
                help=f"{help_text} May be given several times.",
            )
        else:
            group.add_argument(
                field.flag,
                dest=field.name,
                type=field.kind,
                default=default,
                metavar=METAVARS[field.kind],
                help=help_text,
            )


def values_of(cls: type, namespace: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """What the parsed flags say for the fields of `cls`; fields without a flag are left out."""
    values: dict[str, Any] = {}
    for field in fields_of(cls):
        if not hasattr(namespace, field.name):
            continue
        value = getattr(namespace, field.name)
        if field.repeats:
            value = default_of(field, environ) if value is None else tuple(value)
        values[field.name] = value
    return values


def default_of(field: Field, environ: Mapping[str, str]) -> Any:
    """The value a field has without its flag: the environment's, else the class's.

    Raises:
        ConfigError: the variable's text is none of the field's type.
    """
    text = environ.get(field.variable)
    if text is None or field.kind is None:
        return field.default
    if field.kind is bool:
        if text.lower() in TRUE:
            return True
        if text.lower() in FALSE:
            return False
        raise ConfigError(f"{field.variable} must be one of {', '.join(TRUE + FALSE)}, got {text!r}")
    try:
        value = field.kind(text)
    except ValueError:
        wanted = {int: "a whole number", float: "a number"}[field.kind]
        raise ConfigError(f"{field.variable} must be {wanted}, got {text!r}") from None
    return (value,) if field.repeats else value


def _help(field: Field, default: Any) -> str:
    text = field.doc
    if field.kind is bool:
        text += f" (default: {'on' if default else 'off'})"
    elif field.name in SECRETS:
        text += f" (default: {'$' + field.variable if default else 'none'})"
    elif default is not None and default != ():
        text += f" (default: {default})"
    return text.replace("%", "%%")


def _kind(hint: Any) -> tuple[type | None, bool]:
    """The type of one value and whether a field holds several: int, `int | None`, `tuple[int, ...]`.

    No flag can hold mappings, nor lists of lists: None.
    """
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        inner = [part for part in typing.get_args(hint) if part is not type(None)]
        if len(inner) == 1:
            return _kind(inner[0])
    if typing.get_origin(hint) is dict:
        return None, False
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        return (None, False) if typing.get_origin(inner) is tuple else (inner, True)
    if hint in (bool, int, float, str):
        return hint, False
    raise TypeError(f"no flag can hold a {hint}")


def _field_docs(cls: type) -> dict[str, str]:
    """The string below each field of a class, on one line, read from its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    docs: dict[str, str] = {}
    for statement, below in zip(body, [*body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        doc = ""
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            doc = inspect.cleandoc(str(below.value.value)).replace("\n", " ")
        docs[statement.target.id] = doc
    return docs
