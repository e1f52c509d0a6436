"""The sizes of a model that its kernels depend on, from a table of public models or from config.json.

Promise: this module does not depend on the models' code, so it covers models that the engine can't run.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from minisgl.benchmark.model_configs import MODEL_CONFIGS
from minisgl.errors import ConfigError


class ModelShape(NamedTuple):
    """A decoder's sizes; those of one rank if the model is split."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    """Of linear attention; 0 = no layer has it."""
    linear_head_dim: int = 0
    gated_attention: bool = False
    """The query projection has as many outputs again, which gate attention's."""


TO_SERVE = (
    "llama-3.1-8b",
    "qwen3-0.6b",
    "qwen3-30b-a3b",
    "llama-3.1-70b/tp4",
    "qwen2.5-7b",
    "qwen3-8b",
    "qwen3-14b",
    "qwen3-32b",
    "smollm2-135m",
    "mistral-7b",
    "qwen3.5-35b-a3b",
    "gpt-oss-20b",
)
"""The models of the shipped tuning tables: `--model all`."""


def read_model_shapes(models: str) -> list[ModelShape]:
    """The shapes of the models in a comma-separated list; "all" means TO_SERVE.

    Raises:
        ConfigError: as for read_model_shape.
    """
    names = TO_SERVE if models == "all" else [name.strip() for name in models.split(",")]
    return [read_model_shape(name) for name in names]


def read_model_shape(model: str) -> ModelShape:
    """The shape of a model in MODEL_SHAPES or of a folder with config.json; "/tpN" selects one of N ranks.

    Raises:
        ConfigError: there is no such model, or N ranks can't share it.
    """
    base, slash, split = model.rpartition("/tp")
    ranks = int(split) if slash and split.isdigit() else 1
    name = base if slash and split.isdigit() else model
    if name.lower() in MODEL_SHAPES:
        shape = MODEL_SHAPES[name.lower()]
    elif (Path(name).expanduser() / "config.json").is_file():
        shape = shape_of_config(Path(name).expanduser())
    else:
        raise ConfigError(
            f"--model {name!r} is neither a folder with config.json nor one of {', '.join(MODEL_SHAPES)}"
        )
    return shape if ranks == 1 else split_over_ranks(shape, ranks)


def split_over_ranks(shape: ModelShape, ranks: int) -> ModelShape:
    """One rank's share: heads and MLP width are divided; a rank has at least one KV head.

    Raises:
        ConfigError: the number of ranks does not divide the heads or the width, or the model has linear
            attention, which the engine does not split.
    """
    if shape.linear_value_heads:
        raise ConfigError(f"{shape.name} has linear attention, which is not split over ranks")
    for name, number in (("heads", shape.heads), ("intermediate size", shape.intermediate)):
        if ranks < 1 or number % ranks:
            raise ConfigError(f"{shape.name} has {number} {name}, which {ranks} ranks can't share")
    return shape._replace(
        name=f"{shape.name}/tp{ranks}",
        intermediate=shape.intermediate // ranks,
        heads=shape.heads // ranks,
        kv_heads=max(1, shape.kv_heads // ranks),
        vocab=-(-shape.vocab // ranks),
        expert_width=shape.expert_width // ranks,
    )


def shape_of_config(folder: Path) -> ModelShape:
    """The shape in a folder's Hugging Face config.json.

    Raises:
        ConfigError: the file can't be read, or a number is missing.
    """
    path = folder / "config.json"
    try:
        return _shape(folder.resolve().name, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} does not say a model's sizes: {type(error).__name__} {error}") from error


def _shape(name: str, raw: dict[str, Any]) -> ModelShape:
    hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
    return ModelShape(
        name=name,
        hidden=hidden,
        intermediate=_first(raw, "intermediate_size", "moe_intermediate_size"),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        vocab=int(raw["vocab_size"]),
        qk_norm=str(raw.get("model_type", "")).startswith("qwen3"),
        experts=_first(raw, "num_experts", "num_local_experts", "n_routed_experts"),
        experts_per_token=_first(raw, "num_experts_per_tok", "top_k_experts"),
        linear_key_heads=_first(raw, "linear_num_key_heads"),
        linear_value_heads=_first(raw, "linear_num_value_heads"),
        linear_head_dim=_first(raw, "linear_key_head_dim"),
        gated_attention=bool(raw.get("attn_output_gate", "linear_key_head_dim" in raw)),
        expert_width=_first(raw, "moe_intermediate_size")
        or (int(raw["intermediate_size"]) if _first(raw, "num_local_experts") else 0),
    )


def _first(raw: dict[str, Any], *names: str) -> int:
    return next((int(raw[name]) for name in names if raw.get(name)), 0)


MODEL_SHAPES = {name: _shape(name, raw) for name, raw in MODEL_CONFIGS.items()}
"""The known models by their `--model` name."""
