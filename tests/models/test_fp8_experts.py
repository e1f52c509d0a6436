"""Mixtures of FP8 experts against the same numbers in plain torch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_experts import quantize_fp8_mixture
from quantized_models import FORMATS, set_quantization
from safetensors.torch import load_file, save_file
from test_quantized_models import CHUNKS, PROMPT, TOLERANCE, assert_alike
from tiny_models import PagedRunner, load_ours, logits_of, random_model
from torch import Tensor

from minisgl.errors import ModelError
from minisgl.layers.experts.fp8 import Fp8Experts
from minisgl.layers.experts.weights import PlainExperts
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.models.decoder import Decoder
from minisgl.models.registry import build_model
from minisgl.weights.dummy import fill_dummy
from minisgl.weights.loader import load_weights

ODD: dict[str, Any] = {
    "family": "qwen3_moe",
    "hidden_size": 144,
    "num_attention_heads": 4,
    "head_dim": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 80,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe of odd sizes": ODD,
    "qwen3_moe in blocks, one dense layer": ODD
    | {
        "hidden_size": 256,
        "moe_intermediate_size": 256,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
        "seed": 1,
    },
    "qwen2_moe with a shared expert": ODD
    | {"family": "qwen2_moe", "shared_expert_intermediate_size": 96, "num_key_value_heads": 4},
    "mixtral": ODD | {"family": "mixtral", "num_local_experts": 4, "intermediate_size": 80},
}
SAMPLE = {
    ("qwen3_moe of odd sizes", "fp8 of DeepSeek"),
    ("qwen3_moe in blocks, one dense layer", "compressed-tensors, block"),
    ("qwen2_moe with a shared expert", "compressed-tensors, dynamic"),
    ("qwen2_moe with a shared expert", "fp8 of one scale"),
    ("mixtral", "modelopt"),
}


def logits_of_ours(model: Decoder) -> Tensor:
    runner = PagedRunner(model, num_rows=1, page_size=4, max_tokens=24, seed=1)
    return torch.cat([runner.feed([(0, chunk)]) for chunk in CHUNKS])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_checkpoint_gives_the_logits_of_its_format(
    kind: str, name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if (kind, name) not in SAMPLE and not request.config.option.all_pairs:
        pytest.skip("a sample runs without --all-pairs")
    reference = random_model(**MODELS[kind])
    plain = logits_of(reference, PROMPT)
    quantize_fp8_mixture(reference, FORMATS[name], tmp_path)
    expected = logits_of(reference, PROMPT)
    cost = (expected - plain).norm().item()
    assert (expected - plain).abs().amax(1).min() > 100 * TOLERANCE, "else the test would not see it"
    ours = load_ours(tmp_path)
    assert any(isinstance(module, Fp8Experts) for module in ours.modules())
    assert_alike(logits_of_ours(ours), expected, cost)


@pytest.mark.parametrize(
    ("flag", "name"), [("fp8", "compressed-tensors, dynamic"), ("fp8-block", "fp8 of DeepSeek")]
)
def test_quantizing_while_loading_gives_what_a_quantized_checkpoint_does(
    flag: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.weights.loader.PIECE_BYTES", 144 * 4 * 40)  # many pieces
    reference = random_model(**MODELS["qwen2_moe with a shared expert"])
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    reference.save_pretrained(plain)
    quantize_fp8_mixture(reference, FORMATS[name], quantized)
    config = read_model_config(plain, flag)
    ours = build_model(config, attention_backend="torch", dtype=torch.float32, device="cpu")
    load_weights(ours, plain, config, dtype=torch.float32, device="cpu")
    for mine, theirs in zip(ours.parameters(), load_ours(quantized).parameters(), strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=1e-6, atol=0)
    assert torch.equal(logits_of_ours(ours), logits_of_ours(load_ours(quantized)))


def test_experts_that_the_format_leaves_out_stay_as_they_are(tmp_path: Path) -> None:
    reference = random_model(**ODD)
    reference.save_pretrained(tmp_path)
    more = {"ignore": ["lm_head", "re:.*[.]gate$", r"re:.*layers\.1\.mlp\..*"]}
    for form, kinds in (
        (FORMATS["compressed-tensors, dynamic"], more),
        (FORMATS["fp8 of DeepSeek"], {"modules_to_not_convert": ["model.layers.1.mlp"]}),
    ):
        config = form.config | kinds
        set_quantization(tmp_path, config)
        model = build_model(
            read_model_config(tmp_path), attention_backend="torch", dtype=torch.float32, device="meta"
        )
        first, second = model.expert_layers()
        assert isinstance(first.experts, Fp8Experts)
        assert isinstance(second.experts, PlainExperts)


def test_a_missing_or_surplus_scale_of_an_expert_is_named(tmp_path: Path) -> None:
    form = FORMATS["modelopt"]
    quantize_fp8_mixture(random_model(**ODD), form, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for kind in ("weight_scale", "input_scale"):
        name = f"model.layers.1.mlp.experts.3.up_proj.{kind}"
        save_file({each: tensor for each, tensor in tensors.items() if each != name}, path)
        with pytest.raises(ModelError, match=rf"missing: {name}"):
            load_ours(tmp_path)
    save_file(tensors | {"model.layers.1.mlp.gate.weight_scale": torch.ones(1)}, path)
    with pytest.raises(ModelError, match=r"not part of Qwen3MoeForCausalLM: .*mlp\.gate\.weight_scale"):
        load_ours(tmp_path)


def test_dummy_weights_are_the_unquantized_ones_quantized(tmp_path: Path) -> None:
    random_model(**ODD).save_pretrained(tmp_path)
    models = []
    for flag in (None, "fp8", "fp8-block"):
        config = read_model_config(tmp_path, flag)
        model = build_model(config, attention_backend="torch", dtype=torch.float32, device="cpu")
        fill_dummy(model, 3)
        models.append(model)
    plain, *others = (logits_of_ours(model) for model in models)
    assert plain.isfinite().all()
    for logits in others:
        assert 0 < (logits - plain).norm() < 0.2 * plain.norm()
