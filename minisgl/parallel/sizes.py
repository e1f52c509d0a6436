"""What one of several ranks has of a model: split arithmetic, pure functions of the model's sizes.

Promise: every rank gets the same sizes, so all run the same step on tensors of the same shapes.
"""

from dataclasses import replace

from minisgl.errors import ConfigError
from minisgl.hf_config import EXPERT_TILE
from minisgl.model_config import ModelConfig


def rank_sizes(model: ModelConfig, tp: int) -> ModelConfig:
    """The model as one of `tp` ranks has it: its share of heads and of the MLP's or each expert's width.

    Fewer KV heads than ranks are copied: a rank has one then. What all ranks have whole (model width,
    vocabulary of the logits) stays as it is.

    Raises:
        ConfigError: heads or widths can't be shared out evenly.
    """
    if tp == 1:
        return model
    uneven = _uneven(model, tp)
    if uneven:
        fitting = ", ".join(str(size) for size in possible_sizes(model))
        raise ConfigError(f"--tp {tp} can't share out the model's {uneven} evenly; it can be {fitting}")
    experts = model.experts
    if experts is not None:
        experts = replace(experts, intermediate_size=experts.intermediate_size // tp)
    return replace(
        model,
        num_heads=model.num_heads // tp,
        num_kv_heads=max(model.num_kv_heads // tp, 1),
        intermediate_size=model.intermediate_size // tp,
        experts=experts,
    )


def vocabulary_rows(vocab_size: int, tp: int) -> int:
    """Rows of embedding and head on each rank; the last ranks' are partly padding if it does not come out."""
    return -(-vocab_size // tp)


def possible_sizes(model: ModelConfig, most: int = 16) -> list[int]:
    """The values of --tp that suit the model, up to `most`."""
    return [tp for tp in range(1, most + 1) if not _uneven(model, tp)]


def _uneven(model: ModelConfig, tp: int) -> str | None:
    """What `tp` ranks can't share out evenly; None = nothing."""
    heads, kv_heads, experts = model.num_heads, model.num_kv_heads, model.experts
    if heads % tp:
        return f"{heads} attention heads"
    if kv_heads % tp and tp % kv_heads:
        return f"{kv_heads} KV heads"
    if (experts is None or experts.dense_layers) and model.intermediate_size % tp:
        return f"MLP width of {model.intermediate_size}"
    if experts is not None and experts.intermediate_size % (EXPERT_TILE * tp):
        return f"expert width of {experts.intermediate_size} (in multiples of {EXPERT_TILE})"
    return None
