"""Reads what a model is from its Hugging Face folder: `config.json` and `generation_config.json`.

Promise: a setting that would change the model's output and that this engine does not have is refused by
name, never ignored. Reads what transformers 4 and transformers 5 write.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from minisgl.errors import ModelError
from minisgl.model_config import DTYPE_BYTES, ExpertsConfig, ModelConfig, RopeScaling

LARGEST_INTEGER = 1 << 31
MOST_EXPERTS = 1024
EXPERT_TILE = 16
"""What the mixture's kernels want widths to be a multiple of."""
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


class Windows(Enum):
    """Which layers `sliding_window` is for."""

    NONE = "the class has none: the key is refused"
    ALL = "every layer"
    ALL_IF_USED = "every layer, where use_sliding_window says so"
    LATER_LAYERS_IF_USED = "those of layer_types, else from max_window_layers on, if use_sliding_window"
    PATTERN = "those of layer_types, else all but every sixth (sliding_window_pattern)"


@dataclass(frozen=True, kw_only=True)
class Family:
    """What one Hugging Face class makes of config.json; defaults are transformers' own for keys left out."""

    num_kv_heads: int | None = None
    """None = as many as query heads."""
    head_dim: int | None = None
    """None = hidden_size / num_attention_heads."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    windows: Windows = Windows.NONE
    sliding_window: int | None = 4096
    qkv_bias: bool = False
    """q, k and v always have biases; `attention_bias` means nothing."""
    attention_bias: bool = False
    """`attention_bias` gives all four projections one; a class that does not read it refuses it."""
    qk_norm: bool = False
    tied: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")
    """The key, and the one value that is known."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """By key; Gemma 3's larger models leave most of them out."""
    is_gemma: bool = False
    """Scaled embeddings, norms less 1, the scores' scale, two RoPE settings, soft cap of the logits."""
    read_experts: Callable[[dict[str, Any]], ExpertsConfig | None] | None = None


class Rope(NamedTuple):
    """What positions do."""

    theta: float
    scaling: RopeScaling | None
    local_theta: float = 10000.0


def read_model_config(folder: Path) -> ModelConfig:
    """The model in `folder`, checked to be one this engine can run as it is meant.

    Raises:
        ModelError: config.json is missing or broken, or asks for something this engine does not have.
    """
    raw = _read_json(folder / "config.json", required=True)
    generation = _read_json(folder / "generation_config.json", required=False)
    raw, prefix = _text_part(raw)
    architecture = _architecture(raw)
    family = FAMILIES[architecture]
    raw = {**family.sizes, **raw}
    _refuse_what_is_missing(raw, family)

    hidden_size = _integer(raw, "hidden_size")
    num_heads = _integer(raw, "num_attention_heads")
    num_kv_heads = _integer(raw, "num_key_value_heads", family.num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads ({num_heads}) must be a multiple of "
            f"num_key_value_heads ({num_kv_heads})"
        )
    if raw.get("head_dim") is None and hidden_size % num_heads and family.head_dim is None:
        raise ModelError(
            f"config.json gives no head_dim and hidden_size ({hidden_size}) is no multiple of "
            f"num_attention_heads ({num_heads})"
        )
    head_dim = _integer(raw, "head_dim", family.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim must be even for rotary embeddings, got {head_dim}")
    rope = _gemma_rope(raw, family, head_dim) if family.is_gemma else _rope(raw, family, head_dim)
    max_position = _max_position(raw, rope.scaling)
    has_bias = family.attention_bias and bool(raw.get("attention_bias"))
    config = ModelConfig(
        architecture=architecture,
        num_layers=_integer(raw, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=_integer(raw, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_integer(raw, "vocab_size"),
        max_position=max_position,
        rms_norm_eps=_number(raw, "rms_norm_eps", family.rms_norm_eps),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", family.tied)),
        qkv_bias=family.qkv_bias or has_bias,
        o_bias=has_bias,
        qk_norm=family.qk_norm,
        windows=_windows(raw, family, max_position),
        experts=family.read_experts(raw) if family.read_experts else None,
        checkpoint_prefix=prefix,
        checkpoint_dtype=_checkpoint_dtype(raw),
        eos_token_ids=_joined_ids("eos_token_id", generation, raw),
        bos_token_id=next(iter(_joined_ids("bos_token_id", raw, generation)), None),
    )
    return _with_gemma_settings(config, raw, rope.local_theta) if family.is_gemma else config


def _with_gemma_settings(config: ModelConfig, raw: dict[str, Any], local_theta: float) -> ModelConfig:
    kinds = _layer_kinds(raw, FAMILIES[config.architecture])
    softcap = raw.get("final_logit_softcapping")
    return replace(
        config,
        local_rope_layers=frozenset(i for i, kind in enumerate(kinds) if kind == "sliding_attention"),
        local_rope_theta=local_theta,
        attention_scale=_number(raw, "query_pre_attn_scalar", 256.0) ** -0.5,
        embedding_scale=math.sqrt(config.hidden_size),
        logit_softcap=None if softcap is None else _number(raw, "final_logit_softcapping"),
        norms_less_one=True,
    )


def _qwen3_experts(raw: dict[str, Any]) -> ExpertsConfig | None:
    """Qwen3-MoE's mixture; None where no layer has one."""
    if raw.get("num_experts", raw.get("num_local_experts")) == 0:
        return None
    num_layers = _integer(raw, "num_hidden_layers")
    every = _integer(raw, "decoder_sparse_step", 1)
    listed = raw.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(layer, int) for layer in listed):
        raise ModelError(f"config.json: mlp_only_layers must be a list of layers, got {listed!r}")
    dense = frozenset(layer for layer in range(num_layers) if layer in listed or (layer + 1) % every)
    if len(dense) == num_layers:
        return None
    experts = ExpertsConfig(
        num_experts=_num_experts(raw, 128),
        experts_per_token=_integer(raw, "num_experts_per_tok", 8),
        intermediate_size=_integer(raw, "moe_intermediate_size", 768),
        renormalize=bool(raw.get("norm_topk_prob", False)),
        dense_layers=dense,
    )
    return _checked(experts, _integer(raw, "hidden_size"), "moe_intermediate_size")


def _mixtral_experts(raw: dict[str, Any]) -> ExpertsConfig:
    experts = ExpertsConfig(
        num_experts=_num_experts(raw, 8),
        experts_per_token=_integer(raw, "num_experts_per_tok", 2),
        intermediate_size=_integer(raw, "intermediate_size"),
        renormalize=True,
        module_name="block_sparse_moe",
        gate_up_down_names=("w1", "w3", "w2"),
    )
    return _checked(experts, _integer(raw, "hidden_size"), "intermediate_size")


def _num_experts(raw: dict[str, Any], default: int) -> int:
    """Under either name: transformers 5 writes num_local_experts for Qwen, too."""
    name = "num_experts" if raw.get("num_experts") is not None else "num_local_experts"
    return _integer(raw, name, default)


def _checked(experts: ExpertsConfig, hidden_size: int, width_name: str) -> ExpertsConfig:
    """The same experts.

    Raises:
        ModelError: their number or widths are none that the kernels take.
    """
    if not experts.experts_per_token <= experts.num_experts <= MOST_EXPERTS:
        raise ModelError(
            f"config.json: num_experts_per_tok ({experts.experts_per_token}) may be at most the number of "
            f"experts ({experts.num_experts}), and that at most {MOST_EXPERTS}"
        )
    for name, width in (("hidden_size", hidden_size), (width_name, experts.intermediate_size)):
        if width % EXPERT_TILE:
            raise ModelError(
                f"config.json: with experts, {name} must be a multiple of {EXPERT_TILE}, got {width}"
            )
    return experts


FAMILIES = {
    "Gemma3ForCausalLM": Family(
        num_kv_heads=4,
        head_dim=256,
        rope_theta=1e6,
        windows=Windows.PATTERN,
        attention_bias=True,
        qk_norm=True,
        tied=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        sizes={
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "max_position_embeddings": 131072,
            "num_attention_heads": 8,
            "num_hidden_layers": 26,
            "vocab_size": 262208,
        },
        is_gemma=True,
    ),
    "LlamaForCausalLM": Family(attention_bias=True),
    "MistralForCausalLM": Family(num_kv_heads=8, windows=Windows.ALL),
    "MixtralForCausalLM": Family(
        num_kv_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        windows=Windows.ALL,
        sliding_window=None,
        read_experts=_mixtral_experts,
    ),
    "Phi3ForCausalLM": Family(rms_norm_eps=1e-5, windows=Windows.ALL, sliding_window=None),
    "Qwen2ForCausalLM": Family(num_kv_heads=32, windows=Windows.LATER_LAYERS_IF_USED, qkv_bias=True),
    "Qwen3ForCausalLM": Family(
        num_kv_heads=32,
        head_dim=128,
        windows=Windows.LATER_LAYERS_IF_USED,
        attention_bias=True,
        qk_norm=True,
    ),
    "Qwen3MoeForCausalLM": Family(
        num_kv_heads=4,
        windows=Windows.ALL_IF_USED,
        attention_bias=True,
        qk_norm=True,
        read_experts=_qwen3_experts,
    ),
}
"""By Hugging Face class name; models/registry.py builds them."""

WITH_TEXT_PART = {
    "Gemma3ForConditionalGeneration": ("Gemma3ForCausalLM", "gemma3_text"),
    "Mistral3ForConditionalGeneration": ("MistralForCausalLM", "mistral"),
}
"""Classes that see, too: the class of their `text_config`, and its model_type. Requests with images are
refused, so what sees is not loaded."""
TEXT_PREFIX = "language_model."
"""Stands before the names of the text part's tensors."""

MEANS_NOTHING: dict[str, tuple[object, ...]] = {
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "dual_chunk_attention_config": (),
    "compression_config": (),
    "use_bidirectional_attention": (False,),
    "shared_expert_intermediate_size": (0,),
    "n_shared_experts": (0,),
    "num_shared_experts": (0,),
}
"""Keys that this engine does not follow, and the values (null always) that ask for nothing."""


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if required:
            raise ModelError(f"{path} is missing; a model folder needs it") from error
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _text_part(raw: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The config of the text model in one that has other parts, too, and the prefix of its tensors' names.

    Raises:
        ModelError: the text model is not the one that such models have.
    """
    whole = next((name for name in _class_names(raw) if name in WITH_TEXT_PART), None)
    if whole is None:
        return raw, ""
    architecture, model_type = WITH_TEXT_PART[whole]
    text = raw.get("text_config")
    if not isinstance(text, dict) or text.get("model_type", model_type) != model_type:
        got = text.get("model_type") if isinstance(text, dict) else text
        raise _missing(f"text_config of model_type {got!r} in a {whole}; only {model_type!r} is known")
    # These transformers asks the whole's config for.
    asked = ("tie_word_embeddings", "bos_token_id", "eos_token_id")
    of_whole = {key: raw[key] for key in asked if raw.get(key) is not None}
    return {**raw, **text, **of_whole, "architectures": [architecture]}, TEXT_PREFIX


def _class_names(raw: dict[str, Any]) -> list[str]:
    named = raw.get("architectures") or []
    return [named] if isinstance(named, str) else named


def _architecture(raw: dict[str, Any]) -> str:
    """The first known of config.json's class names."""
    named = _class_names(raw)
    for name in named:
        if name in FAMILIES:
            return name
    got = ", ".join(map(str, named)) or f"none (model_type {raw.get('model_type')!r})"
    raise ModelError(
        f"the model's architecture is not supported: got {got}; supported: "
        f"{', '.join((*FAMILIES, *WITH_TEXT_PART))}"
    )


def _refuse_what_is_missing(raw: dict[str, Any], family: Family) -> None:
    """Name the first setting that this engine would have to ignore.

    Raises:
        ModelError: there is one.
    """
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise _missing(f"quantized weights ({method}); take the model's unquantized version")
    activation, known = family.activation
    if raw.get(activation, known) != known:
        raise _missing(f"{activation} = {raw[activation]!r}; only {known!r} is known")
    for name, harmless in MEANS_NOTHING.items():
        value = raw.get(name)
        if value is not None and value not in harmless:
            raise _missing(f"{name} = {value!r}")
    if raw.get("final_logit_softcapping") is not None and not family.is_gemma:
        raise _missing(f"final_logit_softcapping = {raw['final_logit_softcapping']!r}")
    if raw.get("attention_bias") and not (family.attention_bias or family.qkv_bias):
        raise _missing(f"attention_bias = {raw['attention_bias']!r}")
    if family.windows is Windows.NONE and raw.get("sliding_window") and raw.get("use_sliding_window", True):
        raise _missing(f"sliding_window = {raw['sliding_window']!r}")


def _missing(what: str) -> ModelError:
    return ModelError(f"this engine does not have what config.json asks for: {what}")


def _windows(raw: dict[str, Any], family: Family, max_position: int) -> tuple[int, ...]:
    """`ModelConfig.windows`; a window as long as the longest context is none."""
    kinds = _layer_kinds(raw, family)
    if "sliding_attention" not in kinds:
        return ()
    window = _integer({"sliding_window": raw.get("sliding_window", family.sliding_window)}, "sliding_window")
    if window >= max_position:
        return ()
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _layer_kinds(raw: dict[str, Any], family: Family) -> list[str]:
    """Each layer's "full_attention" or "sliding_attention", as transformers gives them.

    Raises:
        ModelError: `layer_types` has another length, or a type that is not known here or not read.
    """
    num_layers = _integer(raw, "num_hidden_layers")
    listed = raw.get("layer_types") or []
    if not isinstance(listed, list) or len(listed) not in (0, num_layers):
        raise ModelError(f"config.json: layer_types must name a type for each of {num_layers} layers")
    others = sorted({str(kind) for kind in listed} - {"full_attention", "sliding_attention"})
    if others:
        raise _missing(f"layer_types {', '.join(others)}; known are full_attention, sliding_attention")

    window = raw.get("sliding_window", family.sliding_window)
    used = window is not None and family.windows is not Windows.NONE
    if family.windows in (Windows.ALL_IF_USED, Windows.LATER_LAYERS_IF_USED):
        used = used and bool(raw.get("use_sliding_window"))
    first = every = 0
    if family.windows is Windows.LATER_LAYERS_IF_USED:
        first = _whole(raw, "max_window_layers", 28)
    elif family.windows is Windows.PATTERN:
        every = _integer(raw, "sliding_window_pattern", 6)
    kinds = ["full_attention"] * num_layers
    for i in range(first if used else num_layers, num_layers):
        if not every or (i + 1) % every:
            kinds[i] = "sliding_attention"
    if family.windows in (Windows.LATER_LAYERS_IF_USED, Windows.PATTERN):
        if not used and ("sliding_attention" in listed or family.windows is Windows.PATTERN):
            raise ModelError("config.json: some layers are to have a window, but there is no sliding_window")
        return listed or kinds
    if "sliding_attention" in listed and listed != kinds:
        raise _missing("layer_types with sliding_attention, which this architecture does not read")
    return kinds


def _whole(raw: dict[str, Any], key: str, default: int) -> int:
    value = raw.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ModelError(f"config.json: {key} must be a whole number, got {value!r}")
    return value


def _max_position(raw: dict[str, Any], scaling: RopeScaling | None) -> int:
    """Longest context; YaRN's reaches as far as its factor says (Qwen2.5 keeps the length before it)."""
    max_position = _integer(raw, "max_position_embeddings")
    if scaling is None or scaling.kind != "yarn":
        return max_position
    return max(max_position, int(scaling.original_max_position * scaling.factor))


def _rope(raw: dict[str, Any], family: Family, head_dim: int) -> Rope:
    """Theta and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    older, newer = raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {}
    for settings in (older, newer):
        if not isinstance(settings, dict) or any(isinstance(value, dict) for value in settings.values()):
            raise ModelError("config.json: RoPE settings that differ by layer type are not supported")
    # Where a folder has both, transformers follows rope_scaling; theta may still lie in the other.
    theta = _number(newer, "rope_theta", _number(raw, "rope_theta", family.rope_theta))
    parameters = older or newer
    return Rope(_number(parameters, "rope_theta", theta), _rope_scaling(raw, parameters, head_dim))


def _gemma_rope(raw: dict[str, Any], family: Family, head_dim: int) -> Rope:
    """Of full and sliding layers apart: transformers 5 nests them, 4 has `rope_local_base_freq` beside."""
    nested = raw.get("rope_parameters") or {}
    if not isinstance(nested, dict) or not set(nested) <= {"full_attention", "sliding_attention"}:
        raise ModelError("config.json: rope_parameters must be those of full_attention and sliding_attention")
    full = {**(nested.get("full_attention") or {}), **(raw.get("rope_scaling") or {})}
    local = nested.get("sliding_attention") or {}
    kind = local.get("rope_type", "default")
    if kind != "default":
        raise _missing(f"RoPE of type {kind!r} in the layers with a window")
    return Rope(
        _number(full, "rope_theta", _number(raw, "rope_theta", family.rope_theta)),
        _rope_scaling(raw, full, head_dim),
        _number(local, "rope_theta", _number(raw, "rope_local_base_freq", 10000.0)),
    )


def _rope_scaling(raw: dict[str, Any], parameters: dict[str, Any], head_dim: int) -> RopeScaling | None:
    """What `parameters` ask for beyond theta.

    Raises:
        ModelError: a type of RoPE that is not known here.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "proportional":
        return RopeScaling(
            kind="proportional",
            factor=_number(parameters, "factor", 1.0),
            rotated_share=_share(parameters, "partial_rotary_factor"),
        )
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise _missing(f"partial_rotary_factor = {parameters['partial_rotary_factor']!r}")
    # Dynamic NTK changes nothing up to max_position_embeddings, and longer contexts are refused: the angles
    # of keys that are already in the pool can't change with a sequence's length.
    if kind in ("default", "dynamic"):
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=_number(parameters, "factor"))
    if kind == "su" or (kind == "yarn" and "short_factor" in parameters):  # names in Phi-3's first versions
        kind = "longrope"
    if kind not in ("llama3", "yarn", "longrope"):
        raise _missing(f"RoPE of type {kind!r}; known are {', '.join(ROPE_TYPES)}")
    # transformers prefers the one beside the RoPE settings.
    key = "original_max_position_embeddings"
    max_position = _integer(raw, "max_position_embeddings")
    original = _integer(parameters if raw.get(key) is None else raw, key, max_position)
    if kind == "yarn":
        return _yarn(parameters, original, max_position)
    if kind == "longrope":
        return _longrope(parameters, original, max_position, head_dim)
    scaling = RopeScaling(
        kind="llama3",
        factor=_number(parameters, "factor"),
        original_max_position=original,
        low_freq_factor=_number(parameters, "low_freq_factor"),
        high_freq_factor=_number(parameters, "high_freq_factor"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ModelError("config.json: RoPE's high_freq_factor must be larger than low_freq_factor")
    return scaling


def _yarn(parameters: dict[str, Any], original: int, max_position: int) -> RopeScaling:
    factor = _number(parameters, "factor", max_position / original)

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    magnify = magnitude(1.0)
    if mscale and mscale_all_dim:
        magnify = magnitude(_number(parameters, "mscale")) / magnitude(_number(parameters, "mscale_all_dim"))
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=_number(parameters, "beta_fast", 32.0),
        beta_slow=_number(parameters, "beta_slow", 1.0),
        truncate=bool(parameters.get("truncate", True)),
        attention_factor=_number(parameters, "attention_factor", magnify),
    )


def _longrope(parameters: dict[str, Any], original: int, max_position: int, head_dim: int) -> RopeScaling:
    factor = _number(parameters, "factor", max_position / original)
    magnify = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeScaling(
        kind="longrope",
        factor=factor,
        original_max_position=original,
        short_factors=_factors(parameters, "short_factor", head_dim // 2),
        long_factors=_factors(parameters, "long_factor", head_dim // 2),
        attention_factor=_number(parameters, "attention_factor", magnify),
    )


def _factors(parameters: dict[str, Any], key: str, count: int) -> tuple[float, ...]:
    listed = parameters.get(key)
    if not isinstance(listed, list) or len(listed) != count:
        got = f"{len(listed)} of them" if isinstance(listed, list) else repr(listed)
        raise ModelError(f"config.json: RoPE's {key} must be a list of {count} numbers, got {got}")
    return tuple(_number({key: value}, key) for value in listed)


def _checkpoint_dtype(raw: dict[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ModelError(f"config.json: weights of dtype {name!r}; known are {', '.join(DTYPE_BYTES)}")
    return name


def _joined_ids(key: str, *configs: dict[str, Any]) -> tuple[int, ...]:
    """Token ids under `key`, an integer or a list of them in each config; each once, in order."""
    ids: dict[int, None] = {}
    for config in configs:
        value = config.get(key)
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise ModelError(f"{key} must be a token id or a list of them, got {value!r}")
            ids[token_id] = None
    return tuple(ids)


def _integer(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST_INTEGER:
        raise ModelError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def _share(raw: dict[str, Any], key: str) -> float:
    value = _number(raw, key, 1.0)
    if value > 1:
        raise ModelError(f"config.json: {key} must be at most 1, got {value!r}")
    return value


def _number(raw: dict[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ModelError(f"config.json: {key} must be a positive number, got {value!r}")
    return float(value)
