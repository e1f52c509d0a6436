"""Reads single fields of a model's JSON files and refuses values that cannot be used."""

import json
from pathlib import Path
from typing import Any

from minisgl.errors import ModelError

LARGEST_INTEGER = 1 << 31


def read_json(path: Path, *, required: bool) -> dict[str, Any]:
    """The JSON object in the file; empty if the file is missing and not required.

    Raises:
        ModelError: the file is required and missing, or holds no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if required:
            raise ModelError(f"{path} is missing; a model folder needs it") from error
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def integer(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer; a missing key or null gives `default`.

    Raises:
        ModelError: the value is not a positive integer, or there is neither a value nor a default.
    """
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST_INTEGER:
        raise ModelError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def share(raw: dict[str, Any], key: str) -> float:
    """A number above 0 and at most 1; a missing key gives 1.

    Raises:
        ModelError: the value is not such a number.
    """
    value = number(raw, key, 1.0)
    if value > 1:
        raise ModelError(f"config.json: {key} must be at most 1, got {value!r}")
    return value


def number(raw: dict[str, Any], key: str, default: float | None = None) -> float:
    """A positive finite number; a missing key or null gives `default`.

    Raises:
        ModelError: the value is not a positive number, or there is neither a value nor a default.
    """
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ModelError(f"config.json: {key} must be a positive number, got {value!r}")
    return float(value)


def whole_number(raw: dict[str, Any], key: str, default: int) -> int:
    """An integer of 0 or more; a missing key gives `default`.

    Raises:
        ModelError: the value is not such an integer.
    """
    value = raw.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ModelError(f"config.json: {key} must be a whole number, got {value!r}")
    return value


def unsupported(what: str) -> ModelError:
    """The error for a setting that this engine does not support."""
    return ModelError(f"this engine does not have what config.json asks for: {what}")
