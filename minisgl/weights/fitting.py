"""Compares what a checkpoint's files hold with what a model needs.

Promise: every difference is an error that names the tensor: one that is missing or surplus, of the wrong
shape, or of other numbers than the model's quantization says.
"""

import math
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.errors import ModelError
from minisgl.model_config.config import ModelConfig
from minisgl.model_config.quantization import Int4Scheme

FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FP8 = "F8_E4M3"
WORDS = "I32"
BYTES = "U8"
DTYPES = FLOAT_DTYPES | {
    FP8: torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    BYTES: torch.uint8,
    WORDS: torch.int32,
    "I64": torch.int64,
}
SCALE_DTYPES = FLOAT_DTYPES.keys() | {"F8_E8M0"}
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers that some checkpoints (Phi-3's) store fused, with the parts' rows one after the other."""
PACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Tensors that some checkpoints (Qwen3.5's) store for all experts: [experts, rows, columns]."""
SKIPPED = {
    "Qwen3NextForCausalLM": ("mtp.",),
    "Qwen3_5ForCausalLM": ("mtp.", "model.visual."),
    "Qwen3_5MoeForCausalLM": ("mtp.", "model.visual."),
}
"""Beginnings of names that are not loaded: layers that draft further tokens, and what sees."""
SCALE = "scale"
"""Is part of the name of every scale in a checkpoint."""
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale")
SHAPE = ".weight_shape"
"""Beside packed numbers; the model's config says the same."""
GROUP_OF_INPUTS = ".g_idx"
NAMES_SHOWN = 6


class StoredTensor(NamedTuple):
    """A tensor's entry in a file's header."""

    path: Path
    shape: list[int]
    dtype: str  # as safetensors writes it, for example "BF16"
    begin: int  # offset of its bytes in the file


def take_tensors_to_compute(
    targets: dict[str, Tensor], config: ModelConfig
) -> dict[int, tuple[Tensor, Tensor]]:
    """Remove from `targets` the tensors that no checkpoint has because the loader computes them.

    Returns numbers and scales, by the id of the weight that they are computed from.
    """
    if config.quantization is None or not config.quantization.while_loading:
        return {}
    kinds = config.quantization.scheme.computed_tensors
    suffix = f".{kinds[-1]}"
    found = {}
    for layer in [name.removesuffix(suffix) for name in targets if name.endswith(suffix)]:
        weight = targets[f"{layer}.weight"]
        computed = [targets.pop(f"{layer}.{kind}") for kind in kinds]
        # FP8 numbers take the place of the weight, 4-bit ones have memory of their own.
        found[id(weight)] = (computed[0] if len(computed) > 1 else weight, computed[-1])
    return found


def without_optional(
    targets: dict[str, Tensor], stored: Collection[str], config: ModelConfig
) -> dict[str, Tensor]:
    """The targets without those that a checkpoint need not have and this one has not."""
    scheme = None if config.quantization is None else config.quantization.scheme
    if not isinstance(scheme, Int4Scheme) or scheme.in_any_order:
        return targets
    return {
        name: target
        for name, target in targets.items()
        if name in stored or not name.endswith(GROUP_OF_INPUTS)
    }


def is_shared(stored: StoredTensor, parts: list[Tensor]) -> bool:
    """Whether a fused layer has one scale for all of its parts, each of which gets it."""
    return len(parts) > 1 and math.prod(stored.shape) == 1


def parts_of_each(stored: Iterable[str], targets: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """The parameters that each checkpoint tensor fills; several for a fused tensor."""
    parts = {name: [target] for name, target in targets.items()}
    for name in stored:
        layer, _, kind = name.rpartition(".")
        outer, _, leaf = layer.rpartition(".")
        members = [f"{outer}.{part}.{kind}" for part in FUSED.get(leaf, ())]
        if kind in PACKED and leaf == "experts":
            members = _of_all_experts(layer, PACKED[kind], parts)
        if members and name not in parts and all(member in parts for member in members):
            parts[name] = [parts.pop(member)[0] for member in members]
    return parts


def _of_all_experts(module: str, names: Collection[str], parts: Collection[str]) -> list[str]:
    """The names of these tensors of every expert of a mixture, expert after expert."""
    members: list[str] = []
    for expert in range(len(parts)):
        own = [f"{module}.{expert}.{name}.weight" for name in names]
        if own[0] not in parts:
            break
        members += own
    return members


def check_fit(
    parts: dict[str, list[Tensor]], stored: dict[str, StoredTensor], config: ModelConfig, folder: Path
) -> dict[str, StoredTensor]:
    """Compare the model's parameters with the files' headers.

    Returns the entries with their parameters' shapes: that of a scale may have further dimensions of 1.

    Raises:
        ModelError: a tensor is missing, unexpected, of the wrong shape or of other numbers than needed.
    """
    complaints = []
    missing = sorted(parts.keys() - stored.keys())
    if missing:
        complaints.append(f"missing: {joined_names(missing)}")
    unexpected = sorted(name for name in stored.keys() - parts.keys() if not _ignorable(name, config))
    if unexpected:
        complaints.append(f"not part of {config.architecture}: {joined_names(unexpected)}")
    common = sorted(parts.keys() & stored.keys())
    shapes, kinds, fitting = [], [], {}
    for name in common:
        found = stored[name]
        if name.rpartition(".")[2] in PACKED and len(found.shape) > parts[name][0].dim() == 2:
            found = found._replace(shape=[found.shape[0] * found.shape[1], found.shape[2]])
        needed = [sum(part.shape[0] for part in parts[name]), *parts[name][0].shape[1:]]
        same = found.shape in (needed, _without_pairs(needed))
        if SCALE in name.rpartition(".")[2]:
            same = is_shared(found, parts[name]) or _without_ones(found.shape) == _without_ones(needed)
        if not same:
            shapes.append(f"{name} is {found.shape}, needed {needed}")
        wanted = _wanted_dtypes(name, parts[name][0], config)
        if found.dtype not in wanted:
            kinds.append(f"{name} is {found.dtype}, needed {' or '.join(sorted(wanted))}")
        if not is_shared(found, parts[name]):
            found = found._replace(shape=needed)
        fitting[name] = found
    if shapes:
        complaints.append(f"wrong shape: {joined_names(shapes)}")
    if kinds:
        complaints.append(f"numbers of another kind: {joined_names(kinds)}")
    if complaints:
        raise ModelError(f"the weights in {folder} do not fit its config.json; " + "; ".join(complaints))
    return fitting


def _wanted_dtypes(name: str, target: Tensor, config: ModelConfig) -> Collection[str]:
    """The dtypes that this tensor may have in a file."""
    if target.dtype == DTYPES[WORDS]:
        return [WORDS]
    if target.dtype == DTYPES[BYTES]:
        return [BYTES]
    if target.dtype == DTYPES[FP8] and not (config.quantization and config.quantization.while_loading):
        return [FP8]
    return SCALE_DTYPES if SCALE in name.rpartition(".")[2] else FLOAT_DTYPES


def _without_pairs(shape: list[int]) -> list[int]:
    """The shape with a last dimension of 2 joined to the one before: gpt-oss's gate and up, in turn."""
    return [*shape[:-2], shape[-2] * 2] if len(shape) > 1 and shape[-1] == 2 else shape


def _without_ones(shape: list[int]) -> list[int]:
    """The shape without dimensions of 1 at its end."""
    sizes = list(shape)
    while sizes and sizes[-1] == 1:
        sizes.pop()
    return sizes


def _ignorable(name: str, config: ModelConfig) -> bool:
    """Whether the checkpoint may contain this tensor although the model does not use it."""
    copy_of_the_embedding = name == "lm_head.weight" and config.tie_word_embeddings
    quantization = config.quantization
    if name.endswith(SHAPE) and quantization is not None and isinstance(quantization.scheme, Int4Scheme):
        return quantization.includes(name.removesuffix(SHAPE))
    if name.startswith(SKIPPED.get(config.architecture, ())):
        return True
    after_the_last = range(config.num_layers, config.num_layers + config.mtp_layers)
    if name.startswith(tuple(f"model.layers.{layer}." for layer in after_the_last)):
        return True  # of multi-token prediction
    of_the_cache = quantization is not None and quantization.cache_scales and name.endswith(CACHE_SCALES)
    is_unread = config.cache_scale_names is None or name.endswith(".q_scale")
    return copy_of_the_embedding or (of_the_cache and is_unread) or name.endswith("rotary_emb.inv_freq")


def joined_names(items: Iterable[str]) -> str:
    items = list(items)
    more = f" and {len(items) - NAMES_SHOWN} more" if len(items) > NAMES_SHOWN else ""
    return ", ".join(items[:NAMES_SHOWN]) + more
