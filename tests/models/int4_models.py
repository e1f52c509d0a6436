"""Tiny models of 4-bit weights: checkpoints written by hand after the formats' documents, and their values.

Everything here is written apart from the engine's own conversion, which tests compare with it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from quantized_models import set_quantization
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Int4Format(NamedTuple):
    """What a checkpoint of a format looks like."""

    config: dict[str, object]
    group: int | None
    zero_points: bool = False
    in_any_order: bool = False

    @property
    def method(self) -> str:
        """compressed-tensors, awq or gptq."""
        return str(self.config["quant_method"])


def _packed(**weights: object) -> dict[str, object]:
    given = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    group = {
        "targets": ["Linear"],
        "weights": given | {"actorder": None, "dynamic": False, "observer": "minmax"} | weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


AWQ: dict[str, object] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}
GPTQ: dict[str, object] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "sym": True,
    "damp_percent": 0.01,
    "static_groups": False,
    "true_sequential": True,
}
INT4_FORMATS = {
    "compressed-tensors": Int4Format(_packed(group_size=32), 32),
    "compressed-tensors, zero points": Int4Format(_packed(group_size=64, symmetric=False), 64, True),
    "compressed-tensors, channels": Int4Format(_packed(strategy="channel", group_size=None), None),
    "compressed-tensors, order of activations": Int4Format(
        _packed(group_size=32, actorder="group"), 32, in_any_order=True
    ),
    "awq": Int4Format(AWQ | {"group_size": 32}, 32, True),
    "gptq": Int4Format(GPTQ | {"group_size": 64}, 64),
    "gptq, zero points, order of activations": Int4Format(
        GPTQ | {"group_size": 32, "sym": False, "desc_act": True, "checkpoint_format": "gptq"}, 32, True, True
    ),
    "gptq, one group": Int4Format(GPTQ | {"group_size": -1, "sym": False}, None, True),
    "gptq_v2, zero points": Int4Format(
        GPTQ | {"group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"}, 32, True
    ),
}


class RoundedLayer(NamedTuple):
    """A weight [out, in] in 4 bits."""

    numbers: Tensor  # int64 [out, in], 0..15
    scales: Tensor  # float32 [out, G]
    zeros: Tensor  # int64 [out, G]
    group_of: Tensor  # int64 [in], the group of each input

    def exact(self) -> Tensor:
        """The dequantized weight in float64."""
        return (self.numbers - self.zeros[:, self.group_of]) * self.scales.double()[:, self.group_of]


def rounded_layer(weight: Tensor, form: Int4Format, seed: int) -> RoundedLayer:
    """A weight rounded to 4 bits, with the groups of its format; `seed` decides their inputs."""
    out, width = weight.shape
    group = form.group or width
    group_of = torch.arange(width) // group
    if form.in_any_order:
        group_of = group_of[torch.randperm(width, generator=torch.Generator().manual_seed(seed))]
    scales = torch.empty(out, width // group)
    zeros = torch.full((out, width // group), 8)
    for one in range(width // group):
        members = weight[:, group_of == one]
        if form.zero_points:
            low, high = members.amin(1).clamp(max=0), members.amax(1).clamp(min=0)
            scales[:, one] = (high - low) / 15
            zeros[:, one] = (-low / scales[:, one]).round().long()
        else:
            scales[:, one] = members.abs().amax(1) / 7.5
    numbers = (weight / scales[:, group_of]).round().long() + zeros[:, group_of]
    return RoundedLayer(numbers.clamp(0, 15), scales, zeros, group_of)


def words(numbers: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight numbers in each int32 along `dim`; the n-th four bits have the number of place order[n]."""
    numbers = numbers.movedim(dim, -1)
    numbers = nn.functional.pad(numbers, (0, -numbers.shape[-1] % 8))
    groups = numbers.unflatten(-1, (-1, 8))
    whole = sum(groups[..., place].long() << (4 * nth) for nth, place in enumerate(order))
    assert isinstance(whole, Tensor)
    signed = torch.where(whole >= 1 << 31, whole - (1 << 32), whole)
    return signed.to(torch.int32).movedim(-1, dim).contiguous()


def tensors_of(layer: RoundedLayer, form: Int4Format) -> dict[str, Tensor]:
    """What a checkpoint of the format has of a layer, beside its bias."""
    numbers, scales, zeros, group_of = layer
    if form.method == "compressed-tensors":
        tensors = {
            "weight_packed": words(numbers, 1),
            "weight_scale": scales,
            "weight_shape": torch.tensor(numbers.shape),
        }
        if form.zero_points:
            tensors["weight_zero_point"] = words(zeros, 0)
        if form.in_any_order:
            tensors["weight_g_idx"] = group_of.int()
        return tensors
    scales, zeros = scales.t().contiguous(), zeros.t()
    if form.method == "awq":
        return {
            "qweight": words(numbers.t(), 1, AWQ_ORDER),
            "qzeros": words(zeros, 1, AWQ_ORDER),
            "scales": scales,
        }
    stored = zeros if form.config.get("checkpoint_format") == "gptq_v2" else zeros - 1
    return {
        "qweight": words(numbers.t(), 0),
        "qzeros": words(stored % 16, 1),
        "scales": scales,
        "g_idx": group_of.int(),
    }


def quantize_int4(
    model: PreTrainedModel,
    form: Int4Format,
    folder: Path,
    is_kept: Callable[[str], bool] = lambda name: False,
    more_config: dict[str, object] | None = None,
) -> None:
    """Write `model` as a checkpoint of a format to `folder`, and give it the dequantized weights.

    Args:
        is_kept: whether the layer of a name stays unquantized, beside the head.
        more_config: further keys of quantization_config.
    """
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or name == "lm_head" or is_kept(name):
            continue
        # Layers with the same input have the same order of it.
        layer = rounded_layer(module.weight.detach(), form, seed=module.in_features)
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{kind}": tensor for kind, tensor in tensors_of(layer, form).items()}
        module.weight.data = layer.exact().float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantization(folder, form.config | (more_config or {}))
