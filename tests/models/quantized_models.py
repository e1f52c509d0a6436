"""Tiny quantized models: checkpoints written by hand after the formats' documents, and the same in torch.

Everything here is written apart from the engine's own quantization, which tests compare with it.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

E4M3 = torch.float8_e4m3fn
STATIC_PEAK = 6.0
"""The largest input that a static scale covers."""


class Format(NamedTuple):
    """What a checkpoint of a format looks like."""

    config: dict[str, object]
    weights: str
    activations: str
    scale_name: str = "weight_scale"


def _compressed(weights: dict[str, object], inputs: dict[str, object], **more: object) -> dict[str, object]:
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": number | {"dynamic": False} | weights,
        "input_activations": number | inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    } | more


FORMATS = {
    "compressed-tensors, dynamic": Format(
        _compressed({"strategy": "channel"}, {"strategy": "token", "dynamic": True}), "channel", "token"
    ),
    "compressed-tensors, static": Format(
        _compressed({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}), "tensor", "static"
    ),
    "compressed-tensors, block": Format(
        _compressed(
            {"strategy": "block", "block_structure": [128, 128]},
            {"strategy": "group", "group_size": 128, "dynamic": True},
        ),
        "block",
        "group",
    ),
    "fp8 of DeepSeek": Format(
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        "block",
        "group",
        "weight_scale_inv",
    ),
    "fp8 of one scale": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]},
        "tensor",
        "token",
    ),
    "modelopt": Format(
        {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
            "ignore": ["lm_head"],
        },
        "tensor",
        "static",
    ),
}


def rounded_weight(weight: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Weight [out, in] -> numbers, scales as a checkpoint has them, dequantized weight in float64."""
    out, width = weight.shape
    if kind == "block":
        scales = torch.empty(-(-out // 128), -(-width // 128))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = weight[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
                scales[i, j] = block.abs().max() / 448
        wide = scales.repeat_interleave(128, 0)[:out].repeat_interleave(128, 1)[:, :width]
    elif kind == "channel":
        scales = weight.abs().amax(1, keepdim=True) / 448
        wide = scales
    else:
        scales = weight.abs().max().reshape(1) / 448
        wide = scales
    numbers = (weight / wide).to(E4M3)
    return numbers, scales, numbers.double() * wide.double()


def rounded_input(x: Tensor, kind: str, peak: float = STATIC_PEAK) -> Tensor:
    """x [..., in] rounded to e4m3 and back, in float64."""
    if kind == "static":
        scale = torch.tensor(peak / 448)
        return (x / scale).clamp(-448, 448).to(E4M3).double() * scale.double()
    if kind == "group":
        groups = [rounded_input(part, "token") for part in x.split(128, dim=-1)]
        return torch.cat(groups, dim=-1)
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x / scale).to(E4M3).double() * scale.double()


class RoundedLinear(nn.Module):
    """A linear layer as its format defines it."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, activations: str, peak: float = STATIC_PEAK
    ) -> None:
        super().__init__()
        self.rounded = weight
        self.added = bias
        self.activations = activations
        self.peak = peak

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], float32."""
        y = F.linear(rounded_input(x, self.activations, self.peak), self.rounded)
        return (y if self.added is None else y + self.added.double()).float()


def quantize(
    model: PreTrainedModel,
    form: Format,
    folder: Path,
    is_kept: Callable[[str], bool] = lambda name: False,
    more_config: dict[str, object] | None = None,
    peaks: Mapping[str, float] | None = None,
) -> None:
    """Write `model` as a checkpoint of a format to `folder`, and make it compute as that format says.

    Args:
        is_kept: whether the layer of a name stays unquantized, beside the head.
        more_config: further keys of quantization_config.
        peaks: the largest input of each layer, for static scales.
    """
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, nn.Linear) or name == "lm_head" or is_kept(name):
            continue
        numbers, scales, exact = rounded_weight(layer.weight.detach(), form.weights)
        tensors[f"{name}.weight"] = numbers
        tensors[f"{name}.{form.scale_name}"] = scales
        peak = peaks[name] if peaks else STATIC_PEAK
        if form.activations == "static":
            tensors[f"{name}.input_scale"] = torch.tensor(peak / 448)
        outer, _, leaf = name.rpartition(".")
        bias = None if layer.bias is None else layer.bias.detach()
        setattr(model.get_submodule(outer), leaf, RoundedLinear(exact, bias, form.activations, peak))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantization(folder, form.config | (more_config or {}))


def set_quantization(folder: Path, config: dict[str, object]) -> None:
    """Put a quantization_config into a folder's config.json."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"quantization_config": config}))
