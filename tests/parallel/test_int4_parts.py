"""Each rank's part of a model of 4-bit weights, over gloo."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_variants import VARIANTS
from forked_ranks import run_on_ranks
from int4_models import INT4_FORMATS, quantize_int4
from quantized_experts import quantize_int4_mixture, quantize_mxfp4_mixture
from quantized_models import set_quantization
from tiny_models import PagedRunner, logits_of, random_model
from torch import Tensor
from torch.distributed.tensor import DTensor

from minisgl.errors import ConfigError
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.models.registry import build_model
from minisgl.models.sharded import shard_model
from minisgl.parallel.mesh import Ranks
from minisgl.parallel.sizes import rank_sizes, supported_tp_sizes
from minisgl.weights.loader import load_weights

TOLERANCE = 1e-3
"""Of logits with a deviation of about 3, computed in float32 from the same weights."""
PROMPT = [(7 * place + 3) % 97 for place in range(13)]
SETTINGS: dict[str, Any] = {
    "family": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": True,
}
IN_ORDER = [name for name, form in INT4_FORMATS.items() if not form.in_any_order]


def logits(model: Any) -> Tensor:
    runner = PagedRunner(model, num_rows=1, page_size=4, max_tokens=16, seed=1)
    with torch.inference_mode():
        return torch.cat([runner.feed([(0, chunk)]) for chunk in (PROMPT[:9], PROMPT[9:])])


def part(ranks: Ranks, folder: Path, quantization: str | None) -> tuple[Any, set[str]]:
    """Logits, and the layers of whose 4-bit numbers this rank has a part."""
    config = read_model_config(folder, quantization)
    kind: dict[str, Any] = {"attention_backend": "torch", "dtype": torch.float32, "device": "cpu"}
    model = build_model(config, tp=ranks.size, **kind)
    tensors = shard_model(model, config, ranks)
    sliced = set()
    for name, tensor in tensors.checkpoint_tensors().items():
        assert isinstance(tensor, DTensor)
        layer, _, what = name.rpartition(".")
        if what in ("weight_packed", "qweight") and tensor.to_local().numel() < tensor.numel():
            sliced.add(layer.rpartition(".")[2])
    load_weights(tensors, folder, config, dtype=torch.float32, device="cpu")
    return logits(model).numpy(), sliced


@pytest.mark.parametrize("name", ["awq", "gptq", "compressed-tensors, zero points"])
def test_two_ranks_share_experts(name: str, tmp_path: Path) -> None:
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    settings: dict[str, Any] = SETTINGS | experts | {"family": "qwen3_moe"}
    reference = random_model(**settings)
    quantize_int4_mixture(reference, INT4_FORMATS[name], tmp_path)
    expected = logits_of(reference, PROMPT)
    for got, sliced in run_on_ranks(2, tmp_path, part, tmp_path, None):
        torch.testing.assert_close(torch.from_numpy(got), expected, rtol=0, atol=TOLERANCE)
        assert {"gate_proj", "up_proj", "down_proj"} <= sliced


def test_two_ranks_share_experts_in_mxfp4_of_whole_blocks(tmp_path: Path) -> None:
    family, settings = VARIANTS["gpt_oss_windows_yarn"]
    sizes: dict[str, Any] = settings | {"hidden_size": 64, "intermediate_size": 192}
    reference = random_model(family=family, **sizes)
    quantize_mxfp4_mixture(reference, tmp_path)
    expected = logits_of(reference, PROMPT)
    for got, _ in run_on_ranks(2, tmp_path, part, tmp_path, None):
        torch.testing.assert_close(torch.from_numpy(got), expected, rtol=0, atol=TOLERANCE)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 224}))
    with pytest.raises(ConfigError, match=r"expert width of 224 \(in multiples of 32\) .* can be 1$"):
        rank_sizes(read_model_config(tmp_path), 2)


@pytest.mark.parametrize("name", IN_ORDER)
@pytest.mark.parametrize("num_kv_heads", [2, 1])
def test_two_ranks_have_the_logits_of_the_whole_model(name: str, num_kv_heads: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = SETTINGS | {"num_key_value_heads": num_kv_heads}
    reference = random_model(**settings)
    quantize_int4(reference, INT4_FORMATS[name], tmp_path)
    expected = logits_of(reference, PROMPT)
    shared = {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    shared |= {"k_proj", "v_proj"} if num_kv_heads == 2 else set()
    for got, sliced in run_on_ranks(2, tmp_path, part, tmp_path, None):
        torch.testing.assert_close(torch.from_numpy(got), expected, rtol=0, atol=TOLERANCE)
        assert sliced == shared


def test_two_ranks_quantize_while_loading_what_one_does(tmp_path: Path) -> None:
    settings: dict[str, Any] = SETTINGS | {"intermediate_size": 512}
    random_model(**settings).save_pretrained(tmp_path)
    config = read_model_config(tmp_path, "int4")
    whole = build_model(config, attention_backend="torch", dtype=torch.float32, device="cpu")
    load_weights(whole, tmp_path, config, dtype=torch.float32, device="cpu")
    expected = logits(whole)
    for got, sliced in run_on_ranks(2, tmp_path, part, tmp_path, "int4"):
        torch.testing.assert_close(torch.from_numpy(got), expected, rtol=0, atol=TOLERANCE)
        assert "down_proj" in sliced


def test_ranks_that_would_cut_a_group_are_refused_by_name(tmp_path: Path) -> None:
    random_model(**SETTINGS).save_pretrained(tmp_path)
    config = read_model_config(tmp_path, "int4")
    with pytest.raises(ConfigError, match=r"--tp 2 .* MLP width of 384 .in groups of 128 inputs"):
        build_model(config, attention_backend="torch", dtype=torch.float32, device="meta", tp=2)


def test_what_ranks_can_not_share_is_refused_by_name(tmp_path: Path) -> None:
    settings: dict[str, Any] = SETTINGS | {"intermediate_size": 336, "head_dim": 20}
    random_model(**settings).save_pretrained(tmp_path)
    for name, more, named in (
        ("gptq, zero points, order of activations", {}, r"groups of inputs in any order \(desc_act\)"),
        ("gptq, one group", {}, "2 KV heads .in words of 8 outputs"),
        ("gptq, one group", {"lm_head": True}, "vocabulary of 97"),
        ("compressed-tensors", {}, "4 attention heads .in groups of 32 inputs"),
    ):
        set_quantization(tmp_path, INT4_FORMATS[name].config | more)
        config = read_model_config(tmp_path)
        assert supported_tp_sizes(config) == [1]
        with pytest.raises(ConfigError, match=f"--tp 2 can't share out the model's {named}"):
            build_model(config, attention_backend="torch", dtype=torch.float32, device="meta", tp=2)
