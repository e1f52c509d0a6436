"""Reads `quantization_config` of 4-bit weights: compressed-tensors (pack-quantized), AWQ, GPTQ.

Promise: a setting that this engine does not support is refused by name.
"""

import re
from typing import Any

from minisgl.model_config.hf_folder.quantization_names import (
    ROUTERS,
    compressed_patterns,
    has_cache_scales,
    module_patterns,
    refused,
)
from minisgl.model_config.quantization import GROUP_SIZES, Int4Layout, Int4Scheme, Quantization

PER_CHANNEL = -1
"""What AWQ and GPTQ write as group size if all inputs share a scale."""


def read_packed(asked: dict[str, Any], group: dict[str, Any]) -> Quantization:
    """W4A16 of compressed-tensors.

    Args:
        asked: quantization_config.
        group: the one group of its config_groups.

    Raises:
        ModelError: a setting is not supported.
    """
    what = "compressed-tensors of format 'pack-quantized'"
    weights = group.get("weights") or {}
    kind = (weights.get("num_bits"), weights.get("type"))
    if kind != (4, "int"):
        raise refused(f"{what} with weights of num_bits {kind[0]!r} and type {kind[1]!r}")
    for side in ("input_activations", "output_activations"):
        if group.get(side):
            raise refused(f"{what} with {side}")
    if weights.get("dynamic"):
        raise refused(f"{what} with weights that are dynamic")
    strategy, size = str(weights.get("strategy")), weights.get("group_size")
    if strategy not in ("group", "channel"):
        raise refused(f"{what} with weights per {strategy}")
    order = weights.get("actorder")
    if order not in (None, False, True, "group", "weight", "static", "dynamic"):
        raise refused(f"{what} with actorder {order!r}")
    scheme = Int4Scheme(
        Int4Layout.COMPRESSED,
        None if strategy == "channel" else _group_size(size, what),
        zero_points=not weights.get("symmetric", True),
        in_any_order=order in (True, "group", "dynamic"),
    )
    return Quantization(
        scheme=scheme,
        source="compressed-tensors",
        targets=compressed_patterns(group.get("targets") or ["Linear"]),
        ignored=compressed_patterns(asked.get("ignore") or []),
        cache_scales=("k_scale", "v_scale") if has_cache_scales(asked) else None,
    )


def read_awq(asked: dict[str, Any]) -> Quantization:
    """AWQ, packed for its kernels of version gemm. The head is never quantized.

    Raises:
        ModelError: a setting is not supported.
    """
    _check({"bits": None} | asked, "awq", "bits", 4)
    version = str(asked.get("version", "gemm")).lower()
    if version != "gemm":
        raise refused(f"awq of version {asked['version']!r}")
    _check(asked, "awq", "zero_point", True)
    size = asked.get("group_size", 128)
    scheme = Int4Scheme(
        Int4Layout.AWQ,
        None if size == PER_CHANNEL else _group_size(size, "awq"),
        zero_points=True,
    )
    named = asked.get("modules_to_not_convert") or []
    return Quantization(scheme=scheme, source="awq", ignored=("lm_head", *ROUTERS, *module_patterns(named)))


def read_gptq(asked: dict[str, Any]) -> Quantization:
    """GPTQ, of both versions of its zero points.

    Raises:
        ModelError: a setting is not supported.
    """
    _check({"bits": None} | asked, "gptq", "bits", 4)
    _check(asked, "gptq", "pack_dtype", "int32")
    for key in ("dynamic", "is_marlin_format"):
        if asked.get(key):
            raise refused(f"gptq with {key} {asked[key]!r}")
    version = asked.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise refused(f"gptq with checkpoint_format {version!r}")
    size = asked.get("group_size", 128)
    scheme = Int4Scheme(
        Int4Layout(version),
        None if size == PER_CHANNEL else _group_size(size, "gptq"),
        zero_points=not asked.get("sym", True),
        in_any_order=bool(asked.get("desc_act")) and size != PER_CHANNEL,
    )
    quantized = [name for names in asked.get("modules_in_block_to_quantize") or [] for name in names]
    targets = tuple(rf".*\.{re.escape(name)}" for name in quantized) or (".*",)
    if asked.get("lm_head"):
        targets += ("lm_head",)
    named = asked.get("modules_to_not_convert") or []
    ignored = (*(() if asked.get("lm_head") else ("lm_head",)), *ROUTERS, *module_patterns(named))
    return Quantization(scheme=scheme, source=version, targets=targets, ignored=ignored)


def _check(asked: dict[str, Any], method: str, key: str, needed: object) -> None:
    got = asked.get(key, needed)
    if got != needed:
        raise refused(f"{method} with {key} {got!r}; {needed!r} is read")


def _group_size(size: object, what: str) -> int:
    if size not in GROUP_SIZES:
        choices = ", ".join(str(one) for one in sorted(GROUP_SIZES))
        raise refused(f"{what} with group_size {size!r}; {choices} and one for all inputs are read")
    assert isinstance(size, int)
    return size
