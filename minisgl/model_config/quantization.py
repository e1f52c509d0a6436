"""Which layers of a model are quantized, and how: FP8 (e4m3) weights and activations, or 4-bit weights.

Promise: whether activations are quantized is the format's to say, so that a token's numbers never depend on
how many other tokens a step has.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from minisgl.errors import ModelError


class WeightScales(Enum):
    """What one scale of a weight is for."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    """An output feature."""
    BLOCK = "block"
    """128 output features x 128 input features."""


class ActivationScales(Enum):
    """What one scale of an activation is for, and where it comes from."""

    TOKEN = "token"
    """A row, computed from its largest value."""
    GROUP = "group"
    """128 columns of a row, computed likewise."""
    STATIC = "static"
    """All rows; the checkpoint has it."""


@dataclass(frozen=True)
class Fp8Scheme:
    """How a layer is quantized."""

    weights: WeightScales
    activations: ActivationScales
    scale_name: str = "weight_scale"
    """The checkpoint's name of a weight's scales; the weight's dequantized value is number times scale."""

    @property
    def computed_tensors(self) -> tuple[str, ...]:
        """Of a weight that is quantized while it loads: the tensors beside it that no checkpoint has."""
        return (self.scale_name,)

    def describe(self) -> str:
        """One phrase: the numbers and their scales."""
        return f"FP8, weights per {self.weights.value}, activations per {self.activations.value}"


class Int4Layout(Enum):
    """How a checkpoint packs 4-bit weights."""

    COMPRESSED = "compressed-tensors"
    """8 inputs of an output in an int32."""
    AWQ = "awq"
    """8 outputs of an input in an int32, in an order of their own."""
    GPTQ = "gptq"
    """8 inputs of an output in an int32, transposed; zero points less 1."""
    GPTQ_V2 = "gptq_v2"
    """The same with zero points as they are."""
    COMPUTED = "computed"
    """Quantized while loading."""


GROUP_SIZES = (128, 64, 32)
"""Input features of an output that may share a scale."""


@dataclass(frozen=True)
class Int4Scheme:
    """4-bit weights, dequantized as (number - zero point) * scale; activations stay as they are."""

    layout: Int4Layout
    group: int | None
    """Input features that share a scale, one of GROUP_SIZES; None = all."""
    zero_points: bool = False
    """Each group has one; else it is 8."""
    in_any_order: bool = False
    """A group may have any inputs, and the checkpoint says which (desc_act, g_idx)."""

    @property
    def computed_tensors(self) -> tuple[str, ...]:
        """Of a weight that is quantized while it loads: the tensors beside it that no checkpoint has."""
        return ("weight_packed", "weight_scale")

    @property
    def packs_outputs(self) -> bool:
        """Whether an int32 of the checkpoint has 8 output features, so a layer has a multiple of 8."""
        with_zeros = self.layout is Int4Layout.COMPRESSED and self.zero_points
        return with_zeros or self.layout in (Int4Layout.AWQ, Int4Layout.GPTQ, Int4Layout.GPTQ_V2)

    def describe(self) -> str:
        """One phrase: the numbers and their scales."""
        groups = "per channel" if self.group is None else f"in groups of {self.group}"
        more = " with zero points" if self.zero_points else ""
        return f"4-bit weights {groups}{more}{', groups in any order' if self.in_any_order else ''}"


Scheme = Fp8Scheme | Int4Scheme


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """The quantization of a model: one scheme, for the linear layers that the patterns name."""

    scheme: Scheme
    source: str
    """Who says so, for people: "compressed-tensors", "--quantization fp8"."""
    targets: tuple[str, ...] = (".*",)
    """Regular expressions; a layer is quantized if one matches its whole name in the checkpoint ..."""
    ignored: tuple[str, ...] = ()
    """... and none of these does."""
    prefix: str = ""
    """`ModelConfig.checkpoint_prefix`: the patterns see names with or without it."""
    while_loading: bool = False
    """The checkpoint is not quantized; the loader does it."""
    cache_scales: tuple[str, str] | None = None
    """The checkpoint also has scales for an FP8 cache: their names in a layer's "self_attn", of the keys' and
    of the values'. They are read with --kv-dtype fp8."""

    def describe(self) -> str:
        """One phrase: the numbers, their scales, the source."""
        return f"{self.scheme.describe()} ({self.source})"

    def includes(self, layer: str) -> bool:
        """Whether the linear layer of this name ("model.layers.0.mlp.up_proj") is quantized."""
        return self._matches(self.targets, layer) and not self.ignores(layer)

    def ignores(self, layer: str) -> bool:
        """Whether the format names this layer as one that is not quantized."""
        return self._matches(self.ignored, layer)

    def _matches(self, patterns: Sequence[str], layer: str) -> bool:
        names = {layer, self.prefix + layer}
        if self.prefix.startswith("model."):  # behind the layer's own "model."
            names.add(self.prefix + layer.removeprefix("model."))
        return any(re.fullmatch(pattern, name) for pattern in patterns for name in names)


def layer_scheme(quantization: Quantization | None, layer: str, parts: Sequence[str] = ()) -> Scheme | None:
    """How a linear layer is quantized; None = it is not.

    Args:
        quantization: the model's.
        layer: its name in the checkpoint, as "model.layers.0.self_attn.o_proj". That of a fused layer is what
            a checkpoint calls it that stores it fused.
        parts: of a fused layer: the names beside it of the layers that it consists of.

    Raises:
        ModelError: of the parts, some are quantized and some are not.
    """
    if quantization is None:
        return None
    outer = layer.rpartition(".")[0]
    names = [f"{outer}.{part}" for part in parts] or [layer]
    quantized = [name for name in names if quantization.includes(name)]
    if not quantized or quantization.ignores(layer):
        return None
    if len(quantized) < len(names):
        raise ModelError(
            f"config.json: of {', '.join(names)}, only {', '.join(quantized)} "
            f"{'is' if len(quantized) == 1 else 'are'} quantized; this engine multiplies them together, so "
            "all or none of them must be"
        )
    return quantization.scheme
