"""Models of 4-bit weights against the dequantized weights in transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from int4_models import INT4_FORMATS, quantize_int4, rounded_layer, tensors_of
from quantized_models import set_quantization
from safetensors.torch import load_file, save_file
from tiny_models import PagedRunner, load_ours, logits_of, random_model
from torch import Tensor, nn

from minisgl.errors import ConfigError, ModelError
from minisgl.layers.int4_weight import Int4Weight
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.models.decoder import Decoder
from minisgl.models.registry import build_model
from minisgl.weights.loader import load_weights

TOLERANCE = 1e-3
"""Of logits with a deviation of about 3, computed in float32 from the same weights."""
PROMPT = [(7 * place + 3) % 97 for place in range(23)]
CHUNKS = [PROMPT[:9], PROMPT[9:22], PROMPT[22:]]
MODELS: dict[str, dict[str, Any]] = {
    "llama of odd sizes": {
        "family": "llama",
        "hidden_size": 192,
        "intermediate_size": 320,
        "num_attention_heads": 8,
        "head_dim": 24,
        "attention_bias": True,
    },
    "qwen3, tied": {
        "family": "qwen3",
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "gemma2": {
        "family": "gemma2",
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "head_dim": 64,
        "sliding_window": 5,
    },
}
ODD = MODELS["llama of odd sizes"]


def logits_of_ours(model: Decoder) -> Tensor:
    runner = PagedRunner(model, num_rows=1, page_size=4, max_tokens=24, seed=1)
    return torch.cat([runner.feed([(0, chunk)]) for chunk in CHUNKS])


def change_tensors(folder: Path, changes: Mapping[str, Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a checkpoint."""
    path = folder / "model.safetensors"
    tensors: dict[str, Tensor | None] = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


@pytest.mark.parametrize("name", INT4_FORMATS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_checkpoint_gives_the_logits_of_its_dequantized_weights(
    kind: str, name: str, tmp_path: Path
) -> None:
    reference = random_model(**MODELS[kind])
    plain = logits_of(reference, PROMPT)
    quantize_int4(reference, INT4_FORMATS[name], tmp_path)
    expected = logits_of(reference, PROMPT)
    assert (expected - plain).abs().amax(1).min() > 100 * TOLERANCE, "else the test would not see it"
    torch.testing.assert_close(logits_of_ours(load_ours(tmp_path)), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("compressed-tensors", {"ignore": ["lm_head", r"re:.*layers\.1\.(mlp|self_attn)\..*"]}),
        ("awq", {"modules_to_not_convert": ["layers.1"]}),
        ("gptq", {"modules_to_not_convert": ["model.layers.1"]}),
    ],
)
def test_layers_that_the_format_leaves_out_stay_as_they_are(
    name: str, more: dict[str, object], tmp_path: Path
) -> None:
    reference = random_model(**ODD)
    quantize_int4(reference, INT4_FORMATS[name], tmp_path, lambda layer: "layers.1." in layer, more)
    ours = load_ours(tmp_path)
    kinds = [
        [isinstance(module, Int4Weight) for module in layer.modules()].count(True) for layer in ours.layers
    ]
    assert kinds == [4, 0]
    torch.testing.assert_close(logits_of_ours(ours), logits_of(reference, PROMPT), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("kind", "group"), [("qwen3, tied", 128), ("llama of odd sizes", 64)])
def test_quantizing_while_loading_rounds_each_group_by_its_largest_value(
    kind: str, group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.weights.loader.PIECE_BYTES", 150 * 4 * 40)  # many pieces
    reference = random_model(**MODELS[kind])
    reference.save_pretrained(tmp_path)
    form = INT4_FORMATS["compressed-tensors"]._replace(group=group)
    for name, module in reference.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.weight.data = rounded_layer(module.weight.detach(), form, seed=0).exact().float()
    config = read_model_config(tmp_path, "int4")
    assert config.quantization is not None
    assert config.quantization.describe() == f"4-bit weights in groups of {group} (--quantization int4)"
    ours = build_model(config, attention_backend="torch", dtype=torch.float32, device="cpu")
    load_weights(ours, tmp_path, config, dtype=torch.float32, device="cpu")
    torch.testing.assert_close(logits_of_ours(ours), logits_of(reference, PROMPT), rtol=0, atol=TOLERANCE)


def test_a_model_without_groups_of_32_is_refused_while_loading(tmp_path: Path) -> None:
    random_model(hidden_size=48, intermediate_size=80).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"--quantization int4 needs .* multiples of 32, .* has 48, 80"):
        read_model_config(tmp_path, "int4")


@pytest.mark.parametrize("name", INT4_FORMATS)
def test_a_missing_or_surplus_tensor_is_named(name: str, tmp_path: Path) -> None:
    form = INT4_FORMATS[name]
    quantize_int4(random_model(**ODD), form, tmp_path)
    layer = "model.layers.1.mlp.up_proj"
    tensors = load_file(tmp_path / "model.safetensors")
    needed = [each for each in tensors if each.startswith(f"{layer}.") and not each.endswith("weight_shape")]
    if form.method == "gptq" and not form.in_any_order:
        needed.remove(f"{layer}.g_idx")
    assert len(needed) >= 2
    for each in needed:
        change_tensors(tmp_path, {each: None})
        with pytest.raises(ModelError, match=f"missing: {each}"):
            load_ours(tmp_path)
        change_tensors(tmp_path, {each: tensors[each]})
    change_tensors(tmp_path, {"model.norm.weight_scale": torch.ones(1), f"{layer}.weight": torch.ones(4, 4)})
    with pytest.raises(ModelError, match=r"not part of .*: model\.layers\.1\.mlp\.up_proj\.weight, model\.n"):
        load_ours(tmp_path)


def test_gptq_may_leave_away_groups_that_are_in_order(tmp_path: Path) -> None:
    reference = random_model(**ODD)
    quantize_int4(reference, INT4_FORMATS["gptq"], tmp_path)
    names = [name for name in load_file(tmp_path / "model.safetensors") if name.endswith(".g_idx")]
    change_tensors(tmp_path, dict.fromkeys(names))
    ours = logits_of_ours(load_ours(tmp_path))
    torch.testing.assert_close(ours, logits_of(reference, PROMPT), rtol=0, atol=TOLERANCE)


def test_symmetric_gptq_may_have_either_kind_of_zero_points_and_no_other(tmp_path: Path) -> None:
    reference = random_model(**ODD)
    quantize_int4(reference, INT4_FORMATS["gptq"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    zeros = {name: tensor for name, tensor in tensors.items() if name.endswith(".qzeros")}
    change_tensors(tmp_path, {name: tensor + 0x11111111 for name, tensor in zeros.items()})
    ours = logits_of_ours(load_ours(tmp_path))
    torch.testing.assert_close(ours, logits_of(reference, PROMPT), rtol=0, atol=TOLERANCE)
    name = next(iter(zeros))
    change_tensors(tmp_path, {name: zeros[name] + 1})
    with pytest.raises(ModelError, match=r"symmetric \(sym\), and their qzeros are others than 8"):
        load_ours(tmp_path)


def test_groups_that_do_not_fit_the_config_are_named(tmp_path: Path) -> None:
    name = "gptq, zero points, order of activations"
    quantize_int4(random_model(**ODD), INT4_FORMATS[name], tmp_path)
    layer = "model.layers.0.mlp"
    tensors = load_file(tmp_path / "model.safetensors")
    set_quantization(tmp_path, INT4_FORMATS[name].config | {"desc_act": False})
    with pytest.raises(ModelError, match=r"g_idx has inputs in another order, and .* no desc_act"):
        load_ours(tmp_path)
    set_quantization(tmp_path, INT4_FORMATS[name].config)
    order = tensors[f"{layer}.gate_proj.g_idx"]
    change_tensors(tmp_path, {f"{layer}.gate_proj.g_idx": order.roll(1)})
    with pytest.raises(ModelError, match="g_idx differs between layers with the same input"):
        load_ours(tmp_path)
    uneven = {f"{layer}.{part}_proj.g_idx": torch.zeros_like(order) for part in ("gate", "up")}
    change_tensors(tmp_path, uneven)
    with pytest.raises(ModelError, match="g_idx has groups that do not have 32 inputs each"):
        load_ours(tmp_path)


def test_sizes_that_a_format_can_not_pack_are_named(tmp_path: Path) -> None:
    random_model(hidden_size=192, intermediate_size=324, head_dim=32).save_pretrained(tmp_path)
    for name, named in (
        (
            "compressed-tensors",
            "in groups of 32 need layers of a multiple of 32 inputs, got 324",
        ),
        ("awq", "of awq need layers of a multiple of 8 outputs, got 324"),
    ):
        set_quantization(tmp_path, INT4_FORMATS[name].config)
        with pytest.raises(ModelError, match=named):
            load_ours(tmp_path)


def test_numbers_of_another_kind_are_named(tmp_path: Path) -> None:
    quantize_int4(random_model(**ODD), INT4_FORMATS["awq"], tmp_path)
    name = "model.layers.0.self_attn.o_proj.qweight"
    stored = load_file(tmp_path / "model.safetensors")[name]
    change_tensors(tmp_path, {name: stored.float()})
    with pytest.raises(ModelError, match=f"{name} is F32, needed I32"):
        load_ours(tmp_path)


def test_a_head_is_quantized_if_the_format_says_so(tmp_path: Path) -> None:
    settings: dict[str, Any] = ODD | {"vocab_size": 104}
    reference = random_model(**settings)
    form = INT4_FORMATS["gptq"]
    head = reference.get_submodule("lm_head")
    quantize_int4(reference, form, tmp_path, more_config={"lm_head": True})
    assert isinstance(head, nn.Linear)
    layer = rounded_layer(head.weight.detach(), form, seed=0)
    head.weight.data = layer.exact().float()
    more = {f"lm_head.{kind}": tensor for kind, tensor in tensors_of(layer, form).items()}
    change_tensors(tmp_path, {**more, "lm_head.weight": None})
    ours = logits_of_ours(load_ours(tmp_path))
    torch.testing.assert_close(ours, logits_of(reference, PROMPT), rtol=0, atol=TOLERANCE)
