"""What formats share: how they name layers, and how one that this engine does not read is refused."""

import re
from collections.abc import Sequence
from typing import Any

from minisgl.errors import ModelError
from minisgl.model_config.hf_folder.json_fields import unsupported

SUPPORTED = (
    "FP8 of compressed-tensors (dynamic, static, block), of quant_method fp8 (DeepSeek, Qwen3-FP8) and of "
    "modelopt (quant_algo FP8); 4-bit weights of compressed-tensors (pack-quantized), AWQ (gemm) and GPTQ"
)


ROUTERS = (r".*\.gate", r".*\.shared_expert_gate")
"""Patterns of the layers that choose experts, which some formats leave out without saying so."""


def compressed_patterns(names: Sequence[str]) -> tuple[str, ...]:
    """Patterns of compressed-tensors' names of layers, of "re:" and a regular expression for their
    beginnings, or of the class "Linear".

    Raises:
        ModelError: a regular expression is malformed.
    """
    patterns = []
    for name in names:
        if name == "Linear":
            patterns.append(".*")
        elif name.startswith("re:"):
            patterns.append(f"(?:{_checked_regex(name.removeprefix('re:'))}).*")
        else:
            patterns.append(re.escape(name))
    return tuple(patterns)


def module_patterns(names: Sequence[str]) -> tuple[str, ...]:
    """Patterns of names that stand for a layer, for all layers of a module, or for all whose name ends so."""
    return tuple(rf"(?:.*\.)?{re.escape(name)}(?:\..*)?" for name in names)


def refused(what: str) -> ModelError:
    """The error of a format, or of a setting of one, that is not supported."""
    return unsupported(f"quantized weights: {what}. Supported: {SUPPORTED}; else take an unquantized version")


def _checked_regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ModelError(
            f"config.json: quantization_config has a bad pattern {pattern!r}: {error}"
        ) from error
    return pattern


def has_cache_scales(asked: dict[str, Any]) -> bool:
    """Whether the checkpoint has a scale for each layer's keys and one for its values."""
    scheme = asked.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        return not scheme.get("dynamic", False)
    return bool(scheme or asked.get("kv_cache_quant_algo"))
