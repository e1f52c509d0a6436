"""Generates command-line flags from the fields of a settings class: names, types, defaults, docstrings.

Promise: each field becomes a flag of the same name, the environment variable MINISGL_NAME sets its default,
and its docstring is the help text, so they always agree. This module does not read the environment; the
caller passes it in.
"""

import argparse
import ast
import functools
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
SECRETS = frozenset({"admin_key", "api_key"})
"""Fields whose values are never printed."""
METAVARS = {int: "N", float: "X", str: "TEXT"}


class Field(NamedTuple):
    """One setting: name, type of one value, whether the flag may repeat, default and help text."""

    name: str
    kind: type | None  # None: a flag can't express it
    repeats: bool
    default: Any
    doc: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "MINISGL_" + self.name.upper()


@functools.cache  # several commands have the same fields, and reading the source takes milliseconds
def fields_of(cls: type) -> tuple[Field, ...]:
    """The fields of a dataclass or msgspec Struct, in order, with the docstrings below them.

    Raises:
        TypeError: a field has no default, or a type that no flag supports.
    """
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
    return tuple(found)


def add_flags(
    parser: argparse.ArgumentParser,
    title: str,
    cls: type,
    environ: Mapping[str, str],
    skip: Iterable[str] = (),
    *,
    only_given: bool = False,
) -> None:
    """Add a group of flags to `parser`, one per field of `cls`. `environ` overrides the defaults.

    With `only_given` there are no defaults: the parsed arguments have only the flags that were given.

    Raises:
        ConfigError: a MINISGL_ variable has a value that its flag would refuse.
    """
    group = parser.add_argument_group(title)
    for field in fields_of(cls):
        if field.name in skip or field.kind is None:
            continue
        default = argparse.SUPPRESS if only_given else default_of(field, environ)
        help_text = field.doc.replace("%", "%%") if only_given else _help(field, default)
        if field.kind is bool:
            group.add_argument(
                field.flag, dest=field.name, action="store_true", default=default, help=help_text
            )
            off = "--no-" + field.flag[2:]
            off_help = f"Turn {field.flag} off."
            group.add_argument(off, dest=field.name, action="store_false", default=default, help=off_help)
        elif field.repeats:
            group.add_argument(
                field.flag,
                dest=field.name,
                action="append",
                type=field.kind,
                default=default if only_given else None,
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
    """The values of the parsed flags, by field of `cls`. Fields without a flag are left out."""
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
    """The value of a field whose flag is not given: from the environment, else the class's default.

    Raises:
        ConfigError: the variable's text is not a value of the field's type.
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
    if field.kind is bool and default is not None:
        text += f" (default: {'on' if default else 'off'})"
    elif field.name in SECRETS:
        text += f" (default: {'$' + field.variable if default else 'none'})"
    elif default is not None and default != ():
        text += f" (default: {default})"
    return text.replace("%", "%%")


def _kind(hint: Any) -> tuple[type | None, bool]:
    """The type of one value, and whether the field holds several: int, `int | None`, `tuple[int, ...]`.

    The type is None for mappings, structs and tuples of tuples, which no flag can express.

    Raises:
        TypeError: the type is none of these.
    """
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        inner = [part for part in typing.get_args(hint) if part is not type(None)]
        if len(inner) == 1:
            return _kind(inner[0])
        if any(typing.get_origin(part) is dict for part in inner):
            return None, False
    if typing.get_origin(hint) is dict or hasattr(hint, "__struct_fields__"):
        return None, False
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        return (None, False) if typing.get_origin(inner) is tuple else (inner, True)
    if hint in (bool, int, float, str):
        return hint, False
    raise TypeError(f"no flag can hold a {hint}")


def _field_docs(cls: type) -> dict[str, str]:
    """The docstring below each field of a class, joined into one line, read from the source."""
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
