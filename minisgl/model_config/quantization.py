"""Which layers of a model are quantized, and how: FP8 numbers (e4m3) with scales for weights and activations.

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


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """The quantization of a model: one scheme, for the linear layers that the patterns name."""

    scheme: Fp8Scheme
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
        return (
            f"FP8, weights per {self.scheme.weights.value}, activations per "
            f"{self.scheme.activations.value} ({self.source})"
        )

    def includes(self, layer: str) -> bool:
        """Whether the linear layer of this name ("model.layers.0.mlp.up_proj") is quantized."""
        return self._matches(self.targets, layer) and not self.ignores(layer)

    def ignores(self, layer: str) -> bool:
        """Whether the format names this layer as one that is not quantized."""
        return self._matches(self.ignored, layer)

    def _matches(self, patterns: Sequence[str], layer: str) -> bool:
        names = {layer, self.prefix + layer}
        return any(re.fullmatch(pattern, name) for pattern in patterns for name in names)


def layer_scheme(
    quantization: Quantization | None, layer: str, parts: Sequence[str] = ()
) -> Fp8Scheme | None:
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
