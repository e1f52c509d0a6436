"""Tiny mixtures of quantized experts: checkpoints written by hand, and what their format computes in torch.

Everything here is written apart from the engine's own quantization, which tests compare with it.
"""

import re
from collections.abc import Callable
from pathlib import Path

import torch
from int4_models import Int4Format, quantize_int4, rounded_layer, tensors_of
from quantized_models import STATIC_PEAK, Format, RoundedLinear, quantize, rounded_weight, set_quantization
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

MATRIX = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.weight")
GATE_UP_DOWN = {"gate_proj": 0, "up_proj": 1, "down_proj": 2, "w1": 0, "w3": 1, "w2": 2}
"""Places of the parts in an expert; Mixtral's names too."""

Layer = Callable[[Tensor], Tensor]


class RoundedExperts(nn.Module):
    """Experts as their format defines them, one matrix at a time; takes transformers' place in a mixture."""

    def __init__(self, experts: list[list[Layer]]) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """x [T, M], each token's experts and their weights [T, k] -> [T, M]."""
        out = torch.zeros_like(x)
        for token in range(len(x)):
            row = x[token : token + 1]
            for expert, weight in zip(index[token].tolist(), weights[token], strict=True):
                gate, up, down = self.experts[expert]
                out[token] += weight * down(F.silu(gate(row)) * up(row))[0]
        return out


def write_experts(
    model: PreTrainedModel, folder: Path, rounded: Callable[[str, Tensor], tuple[dict[str, Tensor], Layer]]
) -> None:
    """Quantize the experts of a checkpoint that is there, and make the model's compute the same.

    Args:
        rounded: of a matrix's name and its values: its tensors, and the layer.
    """
    path = folder / "model.safetensors"
    tensors = load_file(path)
    mixtures: dict[str, dict[int, list[Layer]]] = {}
    for name in list(tensors):
        found = MATRIX.fullmatch(name)
        if found is None:
            continue
        outer, expert, part = found.groups()
        layer = name.removesuffix(".weight")
        stored, function = rounded(layer, tensors.pop(name))
        tensors |= {f"{layer}.{kind}": tensor for kind, tensor in stored.items()}
        place = mixtures.setdefault(outer, {}).setdefault(int(expert), [nn.Identity()] * 3)
        place[GATE_UP_DOWN[part]] = function
    assert mixtures
    save_file(tensors, path, metadata={"format": "pt"})
    for outer, experts in mixtures.items():
        mixture = model.get_submodule(outer.replace("block_sparse_moe", "mlp"))
        mixture.add_module("experts", RoundedExperts([experts[index] for index in range(len(experts))]))


def quantize_fp8_mixture(model: PreTrainedModel, form: Format, folder: Path) -> None:
    """Write `model` with its experts as an FP8 checkpoint; its routers and their like stay as they are."""
    keys = {"modelopt": ["lm_head", "*.gate", "*.shared_expert_gate"]}
    kept = ["lm_head", "re:.*[.]gate$", "re:.*shared_expert_gate$"]
    more: dict[str, object] = {}
    if "ignore" in form.config:
        more["ignore"] = keys.get(str(form.config["quant_method"]), kept)
    quantize(model, form, folder, lambda name: name.endswith("shared_expert_gate"), more)

    def rounded(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Layer]:
        numbers, scales, exact = rounded_weight(weight, form.weights)
        stored = {"weight": numbers, form.scale_name: scales}
        expert, part = layer.split(".")[-2:]
        # Rows go through gate and up of any expert with the largest of their scales, which the first has.
        is_down = GATE_UP_DOWN[part] == 2
        peak = STATIC_PEAK * (1 + 0.2 * int(expert)) if is_down else STATIC_PEAK
        if form.activations == "static":
            stored_peak = peak if is_down else STATIC_PEAK / (1 + int(expert))
            stored["input_scale"] = torch.tensor(stored_peak / 448)
        return stored, RoundedLinear(exact, None, form.activations, peak)

    write_experts(model, folder, rounded)


def quantize_mxfp4_mixture(model: PreTrainedModel, folder: Path) -> None:
    """Write a gpt-oss model as a checkpoint of random MXFP4 experts, and give it their values."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    rng = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith((".gate_up_proj", ".down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=rng).to(torch.uint8)
        scales = torch.randint(123, 126, blocks.shape[:3], generator=rng).to(torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        exact = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        model.get_parameter(name).data = exact.data
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantization(folder, {"quant_method": "mxfp4"})


def quantize_int4_mixture(model: PreTrainedModel, form: Int4Format, folder: Path) -> None:
    """Write `model` with its experts as a checkpoint of 4-bit weights; its routers stay as they are."""
    more: dict[str, object] = {}
    if "ignore" in form.config:
        more["ignore"] = ["lm_head", "re:.*[.]gate$", "re:.*shared_expert_gate$"]
    quantize_int4(model, form, folder, lambda name: name.endswith("shared_expert_gate"), more)

    def rounded(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Layer]:
        matrix = rounded_layer(weight, form, seed=weight.shape[1])
        exact = matrix.exact().float()
        return tensors_of(matrix, form), lambda x: F.linear(x, exact)

    write_experts(model, folder, rounded)
