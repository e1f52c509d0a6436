"""Quantized models against the same numbers in plain torch, which tests/models/quantized_models.py has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_models import FORMATS, quantize
from safetensors.torch import load_file, save_file
from tiny_models import PagedRunner, load_ours, logits_of, random_model
from torch import Tensor

from minisgl.errors import ModelError
from minisgl.layers.fp8_weight import Fp8Weight
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.models.decoder import Decoder
from minisgl.models.registry import build_model
from minisgl.weights.loader import load_weights

TOLERANCE = 1e-4
"""Of logits with a deviation of about 3, computed in float32."""
PROMPT = [(7 * place + 3) % 97 for place in range(23)]
CHUNKS = [PROMPT[:9], PROMPT[9:22], PROMPT[22:]]
ODD = {"hidden_size": 150, "intermediate_size": 273, "num_attention_heads": 6, "head_dim": 22}
ALIGNED = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama of odd sizes": ODD | {"family": "llama", "attention_bias": True},
    "qwen3 in whole blocks, tied": ALIGNED | {"family": "qwen3", "tie_word_embeddings": True},
    "gemma2": ALIGNED | {"family": "gemma2", "sliding_window": 5},
}


def logits_of_ours(model: Decoder) -> Tensor:
    runner = PagedRunner(model, num_rows=1, page_size=4, max_tokens=24, seed=1)
    return torch.cat([runner.feed([(0, chunk)]) for chunk in CHUNKS])


def assert_alike(got: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    """Two computations of the same quantized model. Where an activation lies halfway between two FP8 numbers,
    their float32 sums may fall to different sides, and the tokens from there on differ. So a quarter of the
    tokens has to agree as far as float32 does, and the others to a small part of what quantization costs.

    Args:
        scale: the norm of the difference that quantization makes.
    """
    errors = (got - expected).abs().amax(1)
    assert errors.quantile(0.25) < TOLERANCE, errors
    assert (got - expected).norm() < 0.2 * scale


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_checkpoint_gives_the_logits_of_its_format(kind: str, name: str, tmp_path: Path) -> None:
    reference = random_model(**MODELS[kind])
    plain = logits_of(reference, PROMPT)
    quantize(reference, FORMATS[name], tmp_path)
    expected = logits_of(reference, PROMPT)
    cost = (expected - plain).norm().item()
    assert (expected - plain).abs().amax(1).min() > 100 * TOLERANCE, "else the test would not see it"
    assert_alike(logits_of_ours(load_ours(tmp_path)), expected, cost)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("compressed-tensors, dynamic", {"ignore": ["lm_head", r"re:.*layers\.1\.(mlp|self_attn)\..*"]}),
        ("fp8 of DeepSeek", {"modules_to_not_convert": ["model.layers.1"]}),
        ("fp8 of one scale", {"ignored_layers": ["model.layers.1.mlp", "layers.1.self_attn"]}),
        ("modelopt", {"ignore": ["lm_head", "model.layers.1*"]}),
    ],
)
def test_layers_that_the_format_leaves_out_stay_as_they_are(
    name: str, more: dict[str, object], tmp_path: Path
) -> None:
    reference = random_model(**MODELS["llama of odd sizes"])
    quantize(reference, FORMATS[name], tmp_path, lambda layer: "layers.1." in layer, more)
    ours = load_ours(tmp_path)
    kinds = [
        [isinstance(module, Fp8Weight) for module in layer.modules()].count(True) for layer in ours.layers
    ]
    assert kinds == [4, 0]
    assert_alike(logits_of_ours(ours), logits_of(reference, PROMPT))


@pytest.mark.parametrize(
    ("flag", "name"), [("fp8", "compressed-tensors, dynamic"), ("fp8-block", "fp8 of DeepSeek")]
)
@pytest.mark.parametrize("kind", ["llama of odd sizes", "qwen3 in whole blocks, tied"])
def test_quantizing_while_loading_gives_what_a_quantized_checkpoint_does(
    kind: str, flag: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.weights.loader.PIECE_BYTES", 150 * 4 * 40)  # many pieces
    reference = random_model(**MODELS[kind])
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    reference.save_pretrained(plain)
    quantize(reference, FORMATS[name], quantized)
    config = read_model_config(plain, flag)
    ours = build_model(config, attention_backend="torch", dtype=torch.float32, device="cpu")
    load_weights(ours, plain, config, dtype=torch.float32, device="cpu")
    for mine, theirs in zip(ours.parameters(), load_ours(quantized).parameters(), strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=1e-6, atol=0)
    assert torch.equal(logits_of_ours(ours), logits_of_ours(load_ours(quantized)))


def test_scales_may_be_of_the_dtypes_and_shapes_that_files_have(tmp_path: Path) -> None:
    reference = random_model(**MODELS["llama of odd sizes"])
    quantize(reference, FORMATS["fp8 of DeepSeek"], tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    tensors[name] = torch.full_like(tensors[name], 0.25).to(torch.float8_e8m0fnu)
    save_file(tensors, path)
    weights = {key: value for key, value in load_ours(tmp_path).checkpoint_tensors().items() if key == name}
    assert (weights[name] == 0.25).all()


@pytest.mark.parametrize("name", FORMATS)
def test_a_missing_or_surplus_scale_is_named(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    quantize(random_model(), form, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    scale = f"model.layers.1.mlp.up_proj.{form.scale_name}"
    kept = tensors.pop(scale)
    save_file(tensors, path)
    with pytest.raises(ModelError, match=f"missing: {scale}"):
        load_ours(tmp_path)
    save_file(tensors | {scale: kept, "model.norm.weight_scale": kept.clone()}, path)
    with pytest.raises(ModelError, match=r"not part of LlamaForCausalLM: model\.norm\.weight_scale"):
        load_ours(tmp_path)


def test_numbers_of_another_kind_than_the_format_says_are_named(tmp_path: Path) -> None:
    quantize(random_model(), FORMATS["compressed-tensors, dynamic"], tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.o_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.bfloat16)}, path)
    with pytest.raises(ModelError, match=f"{name} is BF16, needed F8_E4M3"):
        load_ours(tmp_path)
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"].to(torch.float8_e4m3fn)}, path)
    with pytest.raises(ModelError, match=r"lm_head\.weight is F8_E4M3, needed BF16 or"):
        load_ours(tmp_path)


def test_scales_of_a_cache_are_left_where_the_format_has_them(tmp_path: Path) -> None:
    for name, fits in (("modelopt", True), ("compressed-tensors, static", False)):
        quantize(random_model(), FORMATS[name], tmp_path)
        path = tmp_path / "model.safetensors"
        more = {f"model.layers.0.self_attn.{kind}_proj.{kind}_scale": torch.ones(1) for kind in "kv"}
        save_file(load_file(path) | more, path)
        if fits:
            load_ours(tmp_path)
        else:
            with pytest.raises(ModelError, match=r"not part of LlamaForCausalLM.*k_scale"):
                load_ours(tmp_path)
