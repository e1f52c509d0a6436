"""Each rank's part of a quantized model, over gloo: scales are sliced as the weights that they are for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_on_ranks
from quantized_experts import quantize_fp8_mixture
from quantized_models import FORMATS, quantize
from safetensors.torch import load_file
from tiny_models import PagedRunner, load_ours, logits_of, random_model
from torch import Tensor
from torch.distributed.tensor import DTensor

from minisgl.errors import ConfigError
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.models.registry import build_model
from minisgl.models.sharded import shard_model
from minisgl.parallel.mesh import Ranks
from minisgl.parallel.sizes import rank_sizes, supported_tp_sizes
from minisgl.weights.loader import load_weights

PROMPT = [(7 * place + 3) % 97 for place in range(13)]
SETTINGS: dict[str, Any] = {
    "family": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
}
EXPERTS = {
    "family": "qwen3_moe",
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}


def logits(model: Any) -> Tensor:
    runner = PagedRunner(model, num_rows=1, page_size=4, max_tokens=16, seed=1)
    with torch.inference_mode():
        return torch.cat([runner.feed([(0, chunk)]) for chunk in (PROMPT[:9], PROMPT[9:])])


def part(ranks: Ranks, folder: Path, quantization: str | None) -> tuple[Any, list[str], set[str]]:
    """Logits, the tensors that are not what the checkpoint has, and those that this rank has a part of."""
    config = read_model_config(folder, quantization)
    kind: dict[str, Any] = {"attention_backend": "torch", "dtype": torch.float32, "device": "cpu"}
    model = build_model(config, tp=ranks.size, **kind)
    tensors = shard_model(model, config, ranks)
    load_weights(tensors, folder, config, dtype=torch.float32, device="cpu")
    expected: dict[str, Tensor] = {}
    if quantization is None:
        expected = load_file(folder / "model.safetensors")
    wrong, sliced = [], set()
    for name, tensor in tensors.checkpoint_tensors().items():
        assert isinstance(tensor, DTensor)
        if tensor.to_local().shape != tensor.shape:
            sliced.add(name)
        if expected:
            # The collectives know no FP8.
            pieces = tensor.to_local()
            whole = DTensor.from_local(
                pieces.float(),
                tensor.device_mesh,
                tensor.placements,
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
            if not torch.equal(whole.full_tensor(), expected[name].float().reshape(tensor.shape)):
                wrong.append(name)
    return logits(model).numpy(), wrong, sliced


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_kv_heads", [2, 1])
def test_two_ranks_have_the_logits_and_the_tensors_of_one(
    name: str, num_kv_heads: int, tmp_path: Path
) -> None:
    form = FORMATS[name]
    settings: dict[str, Any] = SETTINGS | {"num_key_value_heads": num_kv_heads}
    reference = random_model(**settings)
    plain = logits_of(reference, PROMPT)
    quantize(reference, form, tmp_path)
    expected = logits(load_ours(tmp_path))
    cost = (expected - plain).norm()
    for got, wrong, sliced in run_on_ranks(2, tmp_path, part, tmp_path, None):
        # Of attention's and the MLP's outputs a rank has some columns, and a scale for these alone if there
        # is one for each token. Other scales are the same on one rank and on two.
        bound = 1.0 if form.activations == "token" else 0.2
        assert (torch.from_numpy(got) - expected).norm() < bound * cost
        assert not wrong
        scales = {each for each in sliced if each.endswith(form.scale_name)}
        per_layer = {"tensor": 0, "channel": 5, "block": 7}[form.weights] - (
            2 if num_kv_heads == 1 and form.weights != "tensor" else 0
        )
        assert len(scales) == 2 * per_layer, scales


@pytest.mark.parametrize("name", ["compressed-tensors, block", "compressed-tensors, dynamic", "modelopt"])
def test_two_ranks_have_the_scales_of_their_parts_of_experts(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    experts: dict[str, Any] = SETTINGS | EXPERTS | {"num_hidden_layers": 1}
    reference = random_model(**experts)
    plain = logits_of(reference, PROMPT)
    quantize_fp8_mixture(reference, form, tmp_path)
    expected = logits(load_ours(tmp_path))
    cost = (expected - plain).norm()
    for got, wrong, sliced in run_on_ranks(2, tmp_path, part, tmp_path, None):
        bound = 1.0 if form.activations == "token" else 0.2
        assert (torch.from_numpy(got) - expected).norm() < bound * cost
        assert not wrong
        scales = [each for each in sliced if ".experts." in each and each.endswith(form.scale_name)]
        assert len(scales) == 3 * {"tensor": 0, "channel": 2, "block": 3}[form.weights], scales


def test_experts_whose_shares_have_no_whole_blocks_are_named(tmp_path: Path) -> None:
    experts: dict[str, Any] = SETTINGS | EXPERTS | {"moe_intermediate_size": 384}
    random_model(**experts).save_pretrained(tmp_path)
    config = read_model_config(tmp_path, "fp8-block")
    assert supported_tp_sizes(config) == [1]
    with pytest.raises(ConfigError, match=r"expert width of 384 \(in blocks of 128 features"):
        rank_sizes(config, 2)
    assert 2 in supported_tp_sizes(read_model_config(tmp_path, "fp8"))


@pytest.mark.parametrize("flag", ["fp8", "fp8-block"])
def test_two_ranks_quantize_while_loading_what_one_does(flag: str, tmp_path: Path) -> None:
    reference = random_model(**SETTINGS)
    reference.save_pretrained(tmp_path)
    config = read_model_config(tmp_path, flag)
    whole = build_model(config, attention_backend="torch", dtype=torch.float32, device="cpu")
    load_weights(whole, tmp_path, config, dtype=torch.float32, device="cpu")
    expected = logits(whole)
    cost = (expected - logits_of(reference, PROMPT)).norm()
    for got, _, sliced in run_on_ranks(2, tmp_path, part, tmp_path, flag):
        bound = 1.0 if flag == "fp8" else 0.2
        assert (torch.from_numpy(got) - expected).norm() < bound * cost
        assert any(name.endswith("weight_scale") for name in sliced)


def test_ranks_that_would_cut_a_block_are_refused_by_name(tmp_path: Path) -> None:
    settings: dict[str, Any] = SETTINGS | {"intermediate_size": 384}
    random_model(**settings).save_pretrained(tmp_path)
    config = read_model_config(tmp_path, "fp8-block")
    assert supported_tp_sizes(config) == [1]
    assert 2 in supported_tp_sizes(read_model_config(tmp_path, "fp8"))
    with pytest.raises(
        ConfigError, match=r"--tp 2 can't share out the model's MLP width of 384 .in blocks of 128"
    ):
        build_model(config, attention_backend="torch", dtype=torch.float32, device="meta", tp=2)
