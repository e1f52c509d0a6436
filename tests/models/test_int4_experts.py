"""Mixtures of experts of 4-bit weights against the dequantized weights in transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from int4_models import INT4_FORMATS, quantize_int4, rounded_layer
from quantized_experts import quantize_int4_mixture, write_experts
from safetensors.torch import load_file, save_file
from test_fp8_experts import logits_of_ours
from test_int4_models import PROMPT, TOLERANCE, change_tensors
from tiny_models import load_ours, logits_of, random_model
from torch import Tensor
from torch.nn import functional as F

from minisgl.errors import ConfigError, ModelError
from minisgl.layers.experts.int4 import Int4Experts
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.models.registry import build_model
from minisgl.weights.dummy import fill_dummy
from minisgl.weights.loader import load_weights

ODD: dict[str, Any] = {
    "family": "qwen3_moe",
    "hidden_size": 192,
    "num_attention_heads": 8,
    "head_dim": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "intermediate_size": 128,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe of odd sizes": ODD,
    "qwen2_moe with a shared expert": ODD
    | {"family": "qwen2_moe", "shared_expert_intermediate_size": 64, "num_key_value_heads": 4},
    "mixtral": ODD | {"family": "mixtral", "num_local_experts": 4, "intermediate_size": 128},
}
FORMATS = [name for name, form in INT4_FORMATS.items() if not form.in_any_order]
SAMPLE = {
    ("qwen3_moe of odd sizes", "awq"),
    ("qwen3_moe of odd sizes", "gptq"),
    ("qwen2_moe with a shared expert", "compressed-tensors, zero points"),
    ("mixtral", "gptq, one group"),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_checkpoint_gives_the_logits_of_its_dequantized_weights(
    kind: str, name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if (kind, name) not in SAMPLE and not request.config.option.all_pairs:
        pytest.skip("a sample runs without --all-pairs")
    reference = random_model(**MODELS[kind])
    plain = logits_of(reference, PROMPT)
    quantize_int4_mixture(reference, INT4_FORMATS[name], tmp_path)
    expected = logits_of(reference, PROMPT)
    assert (expected - plain).abs().amax(1).min() > 100 * TOLERANCE, "else the test would not see it"
    ours = load_ours(tmp_path)
    assert all(isinstance(layer.experts, Int4Experts) for layer in ours.expert_layers())
    torch.testing.assert_close(logits_of_ours(ours), expected, rtol=0, atol=TOLERANCE)


def test_quantizing_while_loading_rounds_each_group_by_its_largest_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.weights.loader.PIECE_BYTES", 150 * 4 * 40)  # many pieces
    reference = random_model(**ODD)
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    reference.save_pretrained(plain)
    form = INT4_FORMATS["compressed-tensors"]._replace(group=64)
    quantize_int4(reference, form, quantized)

    def rounded(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Any]:
        exact = rounded_layer(weight, form, seed=0).exact().float()
        return {"weight": exact}, lambda x: F.linear(x, exact)

    write_experts(reference, quantized, rounded)
    config = read_model_config(plain, "int4")
    assert config.quantization is not None
    assert config.quantization.describe() == "4-bit weights in groups of 64 (--quantization int4)"
    ours = build_model(config, attention_backend="torch", dtype=torch.float32, device="cpu")
    load_weights(ours, plain, config, dtype=torch.float32, device="cpu")
    torch.testing.assert_close(logits_of_ours(ours), logits_of(reference, PROMPT), rtol=0, atol=TOLERANCE)


def test_groups_in_any_order_are_refused(tmp_path: Path) -> None:
    for name in ("compressed-tensors, order of activations", "gptq, zero points, order of activations"):
        folder = tmp_path / name[:4]
        quantize_int4_mixture(random_model(**ODD), INT4_FORMATS[name], folder)
        with pytest.raises(
            ModelError, match=r"experts of 4-bit .* groups in any order \(desc_act; model\.la"
        ):
            read_model_config(folder)


def test_widths_without_whole_groups_are_refused(tmp_path: Path) -> None:
    narrow: dict[str, Any] = ODD | {"moe_intermediate_size": 48}
    random_model(**narrow).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"--quantization int4 needs .* this model has 192, 48"):
        read_model_config(tmp_path, "int4")


def test_a_missing_or_surplus_tensor_of_an_expert_is_named(tmp_path: Path) -> None:
    quantize_int4_mixture(random_model(**ODD), INT4_FORMATS["awq"], tmp_path)
    name = "model.layers.1.mlp.experts.3.up_proj.qzeros"
    stored = load_file(tmp_path / "model.safetensors")
    change_tensors(tmp_path, {name: None})
    with pytest.raises(ModelError, match=f"missing: {name}"):
        load_ours(tmp_path)
    save_file(stored | {"model.layers.0.mlp.experts.4.up_proj.scales": torch.ones(1)},
              tmp_path / "model.safetensors")  # fmt: skip
    with pytest.raises(ModelError, match=r"not part of Qwen3MoeForCausalLM: .*experts\.4\.up_proj\.scales"):
        load_ours(tmp_path)


def test_dummy_weights_are_the_unquantized_ones_quantized(tmp_path: Path) -> None:
    random_model(**ODD).save_pretrained(tmp_path)
    models = []
    for flag in (None, "int4"):
        config = read_model_config(tmp_path, flag)
        models.append(build_model(config, attention_backend="torch", dtype=torch.float32, device="cpu"))
        fill_dummy(models[-1], 3)
    plain, quantized = (logits_of_ours(model) for model in models)
    assert 0 < (quantized - plain).norm() < 0.5 * plain.norm()
