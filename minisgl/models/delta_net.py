"""Makes the layers of linear attention from a model's config."""

import torch

from minisgl.layers.linear_attention import LinearAttention
from minisgl.model_config.config import ModelConfig
from minisgl.model_config.hf_folder.json_fields import unsupported
from minisgl.model_config.kv_groups import StateShape
from minisgl.model_config.quantization import Quantization, Scheme, layer_scheme


def make_linear_attention(
    config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device
) -> LinearAttention:
    """The linear attention of a layer.

    Raises:
        ModelError: the checkpoint's gates are quantized, or its fused projections.
    """
    shape = config.cache_shapes[layer]
    assert isinstance(shape, StateShape)
    name = f"model.layers.{layer}.linear_attn"
    return LinearAttention(
        config.hidden_size,
        shape,
        config.rms_norm_eps,
        dtype,
        device,
        in_scheme=_scheme_of_projections(config.quantization, name, config.projects_by_key_head),
        out_scheme=layer_scheme(config.quantization, f"{name}.out_proj"),
        by_key_head=config.projects_by_key_head,
    )


def _scheme_of_projections(quantization: Quantization | None, name: str, by_key_head: bool) -> Scheme | None:
    """The scheme of the projections to q, k, v and z; those to the gates have few outputs, and none."""
    if quantization is None:
        return None
    gates = ("in_proj_ba",) if by_key_head else ("in_proj_b", "in_proj_a")
    quantized = [gate for gate in gates if quantization.includes(f"{name}.{gate}")]
    if quantized and not quantization.while_loading:
        raise unsupported(f"quantized gates of linear attention ({name}.{quantized[0]})")
    if by_key_head:
        if quantization.includes(f"{name}.in_proj_qkvz"):
            raise unsupported(f"quantized projections by key head ({name}.in_proj_qkvz)")
        return None
    return layer_scheme(quantization, f"{name}.in_proj_qkvz", ("in_proj_qkv", "in_proj_z"))
