"""The tensor-parallel plan of each model family: how each checkpoint tensor is placed on the ranks.

Promise: a placed tensor is a DTensor of the checkpoint's shape, and its local part is the memory that the
model computes with (shards.py finds the slice of the checkpoint that belongs there).
"""

from collections.abc import Mapping
from enum import Enum

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from minisgl.errors import ConfigError
from minisgl.parallel.mesh import Ranks


class Split(Enum):
    """How a layer [out, in] is split among the ranks. Layers without a split are whole on every rank."""

    COLWISE = "output features; its output is shared out in the same way"
    KV_HEADS = "output features, by KV head; fewer heads than ranks are copied to neighbouring ranks"
    ROWWISE = "input features; the ranks' outputs have to be added up"
    VOCABULARY = "rows, unevenly where they have to be"
    EXPERTS = "width of each expert, of tensors that hold all experts; what has none of it is added up"
    HEADS = "a number for each head"


DECODER = {
    "q_proj": Split.COLWISE,
    "k_proj": Split.KV_HEADS,
    "v_proj": Split.KV_HEADS,
    "o_proj": Split.ROWWISE,
    "gate_proj": Split.COLWISE,
    "up_proj": Split.COLWISE,
    "down_proj": Split.ROWWISE,
    "embed_tokens": Split.VOCABULARY,
    "lm_head": Split.VOCABULARY,
}
"""Splits by the layer's name in the checkpoint. An expert's layers have the names of an MLP's."""

NORM_OF_ALL_HEADS = DECODER | {"q_norm": Split.COLWISE, "k_norm": Split.KV_HEADS}
"""Of families that normalise all heads of q, and of k, together; a norm of each head is whole everywhere."""

PLANS: dict[str, dict[str, Split]] = {
    "Ernie4_5ForCausalLM": DECODER,
    "Exaone4ForCausalLM": DECODER,
    "Gemma2ForCausalLM": DECODER,
    "Gemma3ForCausalLM": DECODER,
    "Gemma4ForCausalLM": DECODER,
    "Glm4ForCausalLM": DECODER,
    "Glm4MoeForCausalLM": DECODER,
    "GptOssForCausalLM": DECODER | {"experts": Split.EXPERTS, "self_attn": Split.HEADS},
    "GraniteForCausalLM": DECODER,
    "LlamaForCausalLM": DECODER,
    "Ministral3ForCausalLM": DECODER,
    "MistralForCausalLM": DECODER,
    "MixtralForCausalLM": DECODER | {"w1": Split.COLWISE, "w3": Split.COLWISE, "w2": Split.ROWWISE},
    "Olmo2ForCausalLM": NORM_OF_ALL_HEADS,
    "Olmo3ForCausalLM": NORM_OF_ALL_HEADS,
    "Phi3ForCausalLM": DECODER,
    "Qwen2ForCausalLM": DECODER,
    "Qwen2MoeForCausalLM": DECODER,
    "Qwen3ForCausalLM": DECODER,
    "Qwen3MoeForCausalLM": DECODER,
    "Qwen3NextForCausalLM": DECODER,
    "Qwen3_5ForCausalLM": DECODER,
    "Qwen3_5MoeForCausalLM": DECODER,
    "SeedOssForCausalLM": DECODER,
    "SmolLM3ForCausalLM": DECODER,
}


def plan_for(architecture: str) -> dict[str, Split]:
    """The plan of a family.

    Raises:
        ConfigError: the family has no plan.
    """
    if architecture not in PLANS:
        raise ConfigError(f"--tp can't be used with {architecture}: it works for {', '.join(PLANS)}")
    return PLANS[architecture]


def place_tensors(
    views: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    plan: Mapping[str, Split],
    num_kv_heads: int,
    ranks: Ranks,
) -> dict[str, Tensor]:
    """The model's tensors as DTensors on the ranks' mesh.

    Args:
        views: this rank's memory, by the checkpoint's names ("....q_proj.weight").
        shapes: of the whole tensors, by the same names.
        num_kv_heads: of the whole model.
    """
    flat = ranks.mesh
    copies = ranks.mesh_of_copies(num_kv_heads) if ranks.size > num_kv_heads else None
    placed: dict[str, Tensor] = {}
    for name, view in views.items():
        *_, layer, kind = name.split(".")
        split = plan.get(layer)
        shape = shapes[name]
        mesh, placements = flat, _placements(split, kind, view.shape, shape)
        if split is Split.KV_HEADS and copies is not None:
            mesh, placements = copies, (*placements, Replicate())
        local_shape, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
        if split is Split.VOCABULARY:
            view = view[: local_shape[0]]  # further rows are padding
        assert view.shape == local_shape, f"{name} is {list(view.shape)} here, its share {list(local_shape)}"
        stride = torch.empty(shape, device="meta").stride()
        placed[name] = DTensor.from_local(
            view, mesh, placements, run_check=False, shape=shape, stride=stride
        ).requires_grad_(False)
    return placed


def _placements(
    split: Split | None, kind: str, local: torch.Size, whole: torch.Size
) -> tuple[Placement, ...]:
    if split is None:
        return (Replicate(),)
    if split is Split.EXPERTS and local == whole:  # the outputs' bias, which must count once
        return (Partial(),)
    if kind not in ("weight", "bias"):
        # Scales are split as the features that they are for, whether one is for a feature or for a block of
        # them; one that is for all features is whole on every rank.
        smaller = [dim for dim, size in enumerate(whole) if local[dim] < size]
        return (Shard(smaller[0]),) if smaller else (Replicate(),)
    if split is Split.ROWWISE:
        # Only the first rank holds the bias and the others zeros, so the sum of outputs contains it once.
        return (Shard(1),) if kind == "weight" else (Partial(),)
    return (Shard(0),)
