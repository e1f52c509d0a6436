"""Models with an FP8 cache against transformers with a cache whose keys and values are rounded alike."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_models import FORMATS, quantize
from safetensors.torch import load_file, save_file
from tiny_models import PagedRunner, load_ours, logits_of, random_model
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from minisgl.errors import ModelError
from minisgl.models.decoder import Decoder

E4M3 = torch.float8_e4m3fn
PROMPT = [(7 * place + 3) % 97 for place in range(23)]
CHUNKINGS = ([PROMPT], [PROMPT[:9], PROMPT[9:22], PROMPT[22:]], [[token] for token in PROMPT])
FORMAT = "compressed-tensors, dynamic"
SCHEME: dict[str, object] = {
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
}


class RoundedCache(DynamicCache):
    """transformers' cache, of rounded keys and values.

    Args:
        scales: of the keys and of the values of a layer.
    """

    def __init__(self, scales: Callable[[int], tuple[float, float]]) -> None:
        super().__init__()
        self.scales = scales

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *rest: Any, **more: Any
    ) -> Any:
        pair = zip((key_states, value_states), self.scales(layer_idx), strict=True)
        rounded = [(x / scale).clamp(-448, 448).to(E4M3).float() * scale for x, scale in pair]
        return super().update(rounded[0], rounded[1], layer_idx, *rest, **more)


def expected_logits(
    reference: PreTrainedModel, scales: Callable[[int], tuple[float, float]] = lambda layer: (1.0, 1.0)
) -> Tensor:
    with torch.no_grad():
        return reference(torch.tensor([PROMPT]), past_key_values=RoundedCache(scales)).logits[0]


def logits_of_ours(model: Decoder, chunks: list[list[int]]) -> Tensor:
    runner = PagedRunner(model, num_rows=1, page_size=4, max_tokens=24, seed=1, cache_dtype=E4M3)
    return torch.cat([runner.feed([(0, chunk)]) for chunk in chunks])


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"attention_bias": True}),
        ("qwen3", {"head_dim": 22}),
        ("gemma2", {"sliding_window": 5}),
        ("mistral", {"sliding_window": 9}),
    ],
)
def test_logits_are_those_of_rounded_keys_and_values_however_the_prompt_is_cut(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    reference = random_model(family=family, **settings)
    reference.save_pretrained(tmp_path)
    expected = expected_logits(reference)
    cost = (expected - logits_of(reference, PROMPT)).norm()
    ours = load_ours(tmp_path, kv_dtype="fp8")
    for chunks in CHUNKINGS:
        # A value halfway between two numbers of FP8 may go to the other one.
        assert (logits_of_ours(ours, chunks) - expected).norm() < 0.05 * cost


def with_cache_scales(folder: Path, names: dict[str, str]) -> dict[str, Tensor]:
    """The tensors of a checkpoint, and scales of keys and values that differ from layer to layer."""
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        for kind, name in names.items():
            scale = cache_scales(layer)[kind == "v"]
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([scale])
    return tensors


def cache_scales(layer: int) -> tuple[float, float]:
    return 0.03 * (layer + 1), 0.011 * (layer + 2)


@pytest.mark.parametrize(
    ("form", "names"),
    [
        (FORMAT, {"k": "k_scale", "v": "v_scale"}),
        ("modelopt", {"k": "k_proj.k_scale", "v": "v_proj.v_scale"}),
    ],
)
def test_a_checkpoints_scales_are_used_and_one_that_lacks_is_named(
    form: str, names: dict[str, str], tmp_path: Path
) -> None:
    reference = random_model()
    quantize(reference, FORMATS[form], tmp_path, more_config=SCHEME)
    tensors = with_cache_scales(tmp_path, names)
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    expected = expected_logits(reference, cache_scales)
    cost = (expected - logits_of(reference, PROMPT)).norm()
    ours = load_ours(tmp_path, kv_dtype="fp8")
    found = [attention.kv_scales.tolist() for attention in ours.attention_layers()]
    assert found == [pytest.approx(cache_scales(0)), pytest.approx(cache_scales(1))]
    # Activations of the linear layers are rounded, too, and may go to the other side.
    assert (logits_of_ours(ours, CHUNKINGS[1]) - expected).norm() < 0.3 * cost
    load_ours(tmp_path)  # without an FP8 cache they are left unread
    missing = f"model.layers.1.self_attn.{names['v']}"
    save_file({name: tensor for name, tensor in tensors.items() if name != missing}, path)
    with pytest.raises(ModelError, match=f"missing: {missing}"):
        load_ours(tmp_path, kv_dtype="fp8")
    save_file(tensors | {"model.layers.7.self_attn.k_scale": torch.ones(1)}, path)
    with pytest.raises(
        ModelError, match=r"not part of LlamaForCausalLM: model\.layers\.7\.self_attn\.k_scale"
    ):
        load_ours(tmp_path, kv_dtype="fp8")
    name = f"model.layers.0.self_attn.{names['k']}"
    save_file(tensors | {name: torch.ones(3)}, path)
    with pytest.raises(ModelError, match=rf"{name} is \[3\], needed \[1\]"):
        load_ours(tmp_path, kv_dtype="fp8")
