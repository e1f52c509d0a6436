"""What one of several ranks has of a model: split arithmetic, pure functions of the model's sizes.

Promise: every rank gets the same sizes, so all run the same step on tensors of the same shapes.
"""

from dataclasses import replace

from minisgl.config import ModelConfig
from minisgl.errors import ConfigError


def rank_sizes(model: ModelConfig, tp: int) -> ModelConfig:
    """The model as one of `tp` ranks has it: its share of heads and of the MLP's or each expert's width.

    Fewer KV heads than ranks are copied: a rank has one then. What all ranks have whole (model width,
    vocabulary of the logits) stays as it is.

    Raises:
        ConfigError: heads or widths can't be shared out evenly.
    """
    if tp == 1:
        return model
    heads, kv_heads = model.num_heads, model.num_kv_heads
    _check(heads % tp == 0, tp, f"{heads} attention heads", model)
    _check(kv_heads % tp == 0 or tp % kv_heads == 0, tp, f"{kv_heads} KV heads", model)
    experts = model.experts
    if experts is None or experts.dense_layers:
        _check(model.intermediate_size % tp == 0, tp, f"MLP's width of {model.intermediate_size}", model)
    if experts is not None:
        width = experts.intermediate_size
        _check(width % tp == 0, tp, f"experts' width of {width}", model)
        experts = replace(experts, intermediate_size=width // tp)
    return replace(
        model,
        num_heads=heads // tp,
        num_kv_heads=max(kv_heads // tp, 1),
        intermediate_size=model.intermediate_size // tp,
        experts=experts,
    )


def vocabulary_rows(vocab_size: int, tp: int) -> int:
    """Rows of embedding and head on each rank; the last ranks' are partly padding if it does not come out."""
    return -(-vocab_size // tp)


def possible_sizes(model: ModelConfig, most: int = 16) -> list[int]:
    """The values of --tp that suit the model, up to `most`."""
    return [tp for tp in range(1, most + 1) if _fits(model, tp)]


def _fits(model: ModelConfig, tp: int) -> bool:
    try:
        rank_sizes(model, tp)
    except ConfigError:
        return False
    return True


def _check(even: bool, tp: int, what: str, model: ModelConfig) -> None:
    if not even:
        fitting = ", ".join(str(size) for size in possible_sizes(model))
        raise ConfigError(f"--tp {tp} can't share out the model's {what} evenly; it can be {fitting}")
