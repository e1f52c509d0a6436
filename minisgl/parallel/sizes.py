"""The sizes of one rank's part of a model: pure functions of the model's config.

Promise: all ranks get the same sizes, so all run the same step on tensors of the same shapes.
"""

from dataclasses import replace

from minisgl.errors import ConfigError
from minisgl.model_config.config import ExpertStorage, ModelConfig
from minisgl.model_config.hf_folder.experts_config import EXPERT_TILE, MXFP4_BLOCK
from minisgl.model_config.kv_groups import KVShape, StateShape
from minisgl.model_config.quantization import Int4Scheme, WeightScales

BLOCK = 128
"""Features with one scale, in a weight whose scales are for blocks."""
WORD = 8
"""4-bit numbers of an int32."""


def rank_sizes(model: ModelConfig, tp: int) -> ModelConfig:
    """The config of one of `tp` ranks: its share of the heads and of the MLP's or each expert's width.

    With fewer KV heads than ranks, each rank holds a copy of one head. The model width and the vocabulary of
    the logits stay whole.

    Raises:
        ConfigError: heads or widths are not divisible.
    """
    if tp == 1:
        return model
    uneven = _uneven(model, tp)
    if uneven:
        fitting = ", ".join(str(size) for size in supported_tp_sizes(model))
        raise ConfigError(f"--tp {tp} can't share out the model's {uneven} evenly; it can be {fitting}")
    experts = model.experts
    if experts is not None:
        experts = replace(
            experts,
            intermediate_size=experts.intermediate_size // tp,
            shared_intermediate_size=experts.shared_intermediate_size // tp,
        )
    return replace(
        model,
        num_heads=model.num_heads // tp,
        num_kv_heads=max(model.num_kv_heads // tp, 1),
        cache_shapes=tuple(_share_of(shape, tp) for shape in model.cache_shapes),
        intermediate_size=model.intermediate_size // tp,
        experts=experts,
    )


def _share_of(shape: KVShape | StateShape, tp: int) -> KVShape | StateShape:
    """A rank's share of a layer's cache: of the heads, and of the convolution's channels."""
    heads = max(shape.num_heads // tp, 1)
    if isinstance(shape, KVShape):
        return shape._replace(num_heads=heads)
    return shape._replace(num_heads=heads, conv_channels=shape.conv_channels // tp)


def vocabulary_rows(vocab_size: int, tp: int) -> int:
    """Rows of embedding and head per rank, rounded up: the last ranks may have padding rows."""
    return -(-vocab_size // tp)


def supported_tp_sizes(model: ModelConfig, most: int = 16) -> list[int]:
    """The values of --tp that divide the model evenly, up to `most`."""
    return [tp for tp in range(1, most + 1) if not _uneven(model, tp)]


def _uneven(model: ModelConfig, tp: int) -> str | None:
    """The first size that `tp` does not divide; None = all are divisible."""
    heads, kv_heads, experts = model.num_heads, model.num_kv_heads, model.experts
    if tp > 1 and experts is not None and experts.beside_mlp:
        return "experts beside an MLP"
    for shape in model.cache_shapes:
        if isinstance(shape, KVShape) and shape.num_heads % tp:
            return f"{shape.num_heads} KV heads of some layers"
    if heads % tp:
        return f"{heads} attention heads"
    if kv_heads % tp and tp % kv_heads:
        return f"{kv_heads} KV heads"
    for shape in model.cache_shapes:
        if isinstance(shape, StateShape) and tp > 1:
            return f"{shape.num_heads} heads of linear attention (--tp is not implemented for them)"
        if shape.num_heads % tp and tp % shape.num_heads:
            return f"{shape.num_heads} KV heads"
    if (experts is None or experts.dense_layers) and model.intermediate_size % tp:
        return f"MLP width of {model.intermediate_size}"
    unit = EXPERT_TILE if experts is None or experts.storage is not ExpertStorage.MXFP4 else MXFP4_BLOCK
    if experts is not None and experts.intermediate_size % (unit * tp):
        return f"expert width of {experts.intermediate_size} (in multiples of {unit})"
    if experts is not None and experts.shared_intermediate_size % tp:
        return f"shared expert's width of {experts.shared_intermediate_size}"
    return _uneven_blocks(model, tp)


def _uneven_blocks(model: ModelConfig, tp: int) -> str | None:
    """The first size whose share is not made of the whole blocks, groups or words of quantized weights."""
    quantization = model.quantization
    if tp == 1 or quantization is None:
        return None
    scheme = quantization.scheme
    heads, kv_heads = f"{model.num_heads} attention heads", f"{model.num_kv_heads} KV heads"
    width, vocabulary = f"MLP width of {model.intermediate_size}", f"vocabulary of {model.vocab_size}"
    shares = {
        heads: model.num_heads // tp * model.head_dim,
        kv_heads: max(model.num_kv_heads // tp, 1) * model.head_dim,
    }
    inputs = [heads]  # of which a layer's inputs are split
    experts = model.experts
    for name, size in (
        (width, 0 if experts is not None and not experts.dense_layers else model.intermediate_size),
        (f"expert width of {experts.intermediate_size}", experts.intermediate_size) if experts else ("", 0),
        (f"shared expert's width of {experts.shared_intermediate_size}", experts.shared_intermediate_size)
        if experts
        else ("", 0),
    ):
        if size:
            shares[name] = size // tp
            inputs.append(name)
    if not model.tie_word_embeddings and quantization.includes("lm_head"):
        shares[vocabulary] = vocabulary_rows(model.vocab_size, tp)
    if isinstance(scheme, Int4Scheme):
        if scheme.in_any_order:
            return "groups of inputs in any order (desc_act)"
        if vocabulary in shares and model.vocab_size % tp:
            return vocabulary
        unit = scheme.group or WORD
        units = dict.fromkeys(inputs, (unit, f"groups of {unit} inputs"))
        if scheme.packs_outputs:
            whole_words = (WORD, f"words of {WORD} outputs")
            units = dict.fromkeys(shares, whole_words) | units
    elif scheme.weights is WeightScales.BLOCK:
        units = dict.fromkeys(shares, (BLOCK, f"blocks of {BLOCK} features with one scale"))
    else:
        return None
    for size, (unit, name) in units.items():
        if shares[size] % unit:
            return f"{size} (in {name})"
    return None
