"""Checkpoints into models: sharded or not, converted, complete or refused."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from minisgl.errors import ModelError
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.models.decoder import Decoder
from minisgl.models.registry import build_model
from minisgl.weights import loader
from minisgl.weights.loader import load_weights


def save_llama(folder: Path, *, tied: bool = False, **save_settings: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=32,
            tie_word_embeddings=tied,
        )
    )
    model.save_pretrained(folder, **save_settings)  # pyright: ignore[reportArgumentType] - passed through
    return model


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    config = read_model_config(folder)
    model = build_model(config, attention_backend="torch", dtype=dtype, device="cpu")
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    load_weights(model, folder, config, dtype=dtype, device="cpu")
    return model


def assert_holds(ours: Decoder, theirs: LlamaForCausalLM, dtype: torch.dtype = torch.float32) -> None:
    """Every tensor of transformers' checkpoint lies in our parameters, fused ones by their rows."""
    expected = theirs.state_dict()
    for i in range(2):
        prefix = f"model.layers.{i}."
        mine = ours.layers[i].state_dict()
        qkv = torch.cat([expected[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"])
        gate_up = torch.cat([expected[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")])
        assert torch.equal(mine["self_attn.qkv_proj.weight.values"], qkv.to(dtype))
        assert torch.equal(mine["mlp.gate_up_proj.weight.values"], gate_up.to(dtype))
        for name, kept in (
            ("self_attn.o_proj", "weight.values"),
            ("mlp.down_proj", "weight.values"),
            ("input_layernorm", "weight"),
            ("post_attention_layernorm", "weight"),
        ):
            assert torch.equal(mine[f"{name}.{kept}"], expected[f"{prefix}{name}.weight"].to(dtype))
    assert torch.equal(ours.embed_tokens.weight, expected["model.embed_tokens.weight"].to(dtype))
    assert torch.equal(ours.norm.weight, expected["model.norm.weight"].to(dtype))
    assert torch.equal(ours.lm_head.part_tensors()["weight"], expected["lm_head.weight"].to(dtype))
    assert not any(parameter.isnan().any() for parameter in ours.parameters())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_file_is_loaded_and_converted(tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = save_llama(tmp_path, tied=tied)
    assert_holds(load(tmp_path, dtype), theirs, dtype)


def test_shards_are_loaded_with_and_without_an_index(tmp_path: Path) -> None:
    theirs = save_llama(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert_holds(load(tmp_path), theirs)
    (tmp_path / loader.INDEX).unlink()
    assert_holds(load(tmp_path), theirs)


def test_a_tensor_larger_than_a_piece_arrives_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = save_llama(tmp_path)
    monkeypatch.setattr(loader, "PIECE_BYTES", 7 * 8 * 24)
    assert_holds(load(tmp_path), theirs)


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    save_llama(tmp_path)
    config = read_model_config(tmp_path)
    model = build_model(config, attention_backend="torch", dtype=torch.float16, device="cpu")
    reports: list[tuple[str, int, int, str]] = []
    load_weights(
        model,
        tmp_path,
        config,
        dtype=torch.float16,
        device="cpu",
        on_progress=lambda stage, done, total, unit="": reports.append((stage, done, total, unit)),
    )
    total = 2 * sum(parameter.numel() for parameter in model.parameters())
    assert reports[0][1:] == (0, total, "bytes")
    assert reports[-1][1:] == (total, total, "bytes")


def test_a_copy_of_tied_embeddings_and_old_frequencies_are_ignored(tmp_path: Path) -> None:
    theirs = save_llama(tmp_path, tied=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros(61, 24)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_holds(load(tmp_path), theirs)


def test_tensors_that_do_not_fit_are_listed_before_anything_is_copied(tmp_path: Path) -> None:
    save_llama(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(24)
    tensors["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(12, 24)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(40, 24, dtype=torch.int8)
    save_file(tensors, path)
    config = read_model_config(tmp_path)
    model = build_model(config, attention_backend="torch", dtype=torch.float32, device="cpu")
    for parameter in model.parameters():
        parameter.fill_(7.0)
    with pytest.raises(ModelError) as caught:
        load_weights(model, tmp_path, config, dtype=torch.float32, device="cpu")
    message = str(caught.value)
    assert "missing: model.norm.weight" in message
    assert "not part of LlamaForCausalLM: model.layers.0.self_attn.q_proj.bias" in message
    assert "model.layers.1.self_attn.k_proj.weight is [12, 24], needed [8, 24]" in message
    assert "model.layers.1.mlp.up_proj.weight is I8" in message
    assert all((parameter == 7.0).all() for parameter in model.parameters())


def test_of_a_model_that_sees_only_what_sees_is_left_out(tmp_path: Path) -> None:
    theirs = save_llama(tmp_path)
    path = tmp_path / "model.safetensors"
    text = {f"language_model.{name}": tensor for name, tensor in load_file(path).items()}
    others = {name: torch.zeros(3) for name in ("vision_tower.conv.weight", "multi_modal_projector.norm")}
    save_file(text | others, path)
    config = replace(read_model_config(tmp_path), checkpoint_prefix="language_model.")
    model = build_model(config, attention_backend="torch", dtype=torch.float32, device="cpu")
    load_weights(model, tmp_path, config, dtype=torch.float32, device="cpu")
    assert_holds(model, theirs)
    save_file(text | others | {"audio_tower.conv.weight": torch.zeros(3)}, path)
    with pytest.raises(ModelError, match=r"not part of LlamaForCausalLM: audio_tower\.conv\.weight"):
        load_weights(model, tmp_path, config, dtype=torch.float32, device="cpu")


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    save_llama(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 9}))
    with pytest.raises(ModelError, match=r"missing: model\.layers\.2.* and 57 more"):
        load(tmp_path)


def test_missing_damaged_and_doubled_files_are_named(tmp_path: Path) -> None:
    save_llama(tmp_path, max_shard_size="10KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    kept = shards[1].read_bytes()

    shards[1].write_bytes(kept[: len(kept) // 2])
    with pytest.raises(ModelError, match=shards[1].name):
        load(tmp_path)
    shards[1].unlink()
    with pytest.raises(ModelError, match=f"incomplete: {shards[1].name}"):
        load(tmp_path)
    shards[1].write_bytes(kept)
    (tmp_path / loader.INDEX).write_text("{}")
    with pytest.raises(ModelError, match=loader.INDEX):
        load(tmp_path)
    (tmp_path / loader.INDEX).unlink()
    (tmp_path / "again.safetensors").write_bytes(kept)
    with pytest.raises(ModelError, match="both hold"):
        load(tmp_path)


def test_a_folder_without_safetensors_says_so(tmp_path: Path) -> None:
    save_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match="PyTorch files are not read"):
        load(tmp_path)


def test_an_experts_matrices_go_to_their_place_and_a_missing_one_is_named(tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=3,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    theirs = MixtralForCausalLM(config)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    ours = load(tmp_path)
    mixture = ours.get_submodule("layers.0.mlp")
    expected = theirs.get_submodule("model.layers.0.mlp")
    for name, its_name in (
        ("experts.gate_up", "experts.gate_up_proj"),
        ("experts.down", "experts.down_proj"),
        ("router", "gate.weight"),
    ):
        assert torch.equal(mixture.get_parameter(name), expected.get_parameter(its_name))
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_local_experts": 4}))
    with pytest.raises(ModelError, match=r"missing: model\.layers\.0\.block_sparse_moe\.experts\.3\.w1"):
        load(tmp_path)


LOAD_AND_TELL_THE_GROWTH = """
import sys
from dataclasses import replace
from pathlib import Path
import torch
from minisgl.engine.start.device import peak_host_bytes
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.models.registry import build_model
from minisgl.weights import loader

folder = Path(sys.argv[1])
loader.PIECE_BYTES = 1 << 20
config = read_model_config(folder)
model = build_model(config, attention_backend="torch", dtype=torch.float32, device="cpu")
for parameter in model.parameters():
    parameter.zero_()
before = peak_host_bytes()
loader.load_weights(model, folder, config, dtype=torch.float32, device="cpu")
print(peak_host_bytes() - before)
"""


def test_a_load_takes_far_less_host_memory_than_a_file_has(tmp_path: Path) -> None:
    settings = LlamaConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    LlamaForCausalLM(settings).save_pretrained(tmp_path)
    file_bytes = (tmp_path / "model.safetensors").stat().st_size
    command = [sys.executable, "-c", LOAD_AND_TELL_THE_GROWTH, str(tmp_path)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    assert file_bytes > 100e6
    assert int(run.stdout) < file_bytes / 4


@pytest.mark.parametrize("piece_bytes", [1, 1000, 1 << 20])
def test_matrices_that_a_checkpoint_has_as_one_are_taken_apart(
    piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "PIECE_BYTES", piece_bytes)
    theirs = save_llama(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for layer in range(2):
        for outer, fused, names in (("self_attn", "qkv", "qkv"), ("mlp", "gate_up", ("gate", "up"))):
            prefix = f"model.layers.{layer}.{outer}"
            parts = [tensors.pop(f"{prefix}.{name}_proj.weight") for name in names]
            tensors[f"{prefix}.{fused}_proj.weight"] = torch.cat(parts)
    save_file(tensors, path)
    assert_holds(load(tmp_path), theirs)

    name = "model.layers.0.self_attn.qkv_proj.weight"
    save_file(tensors | {name: tensors[name][1:].clone()}, path)
    with pytest.raises(ModelError, match=rf"wrong shape: {name} is \[39, 24\], needed \[40, 24\]"):
        load(tmp_path)


def test_a_file_that_ends_while_it_is_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llama(tmp_path)
    path = tmp_path / "model.safetensors"
    check = loader.check_fit

    def check_then_truncate(*arguments: Any) -> Any:
        fitting = check(*arguments)
        path.write_bytes(path.read_bytes()[:-1000])
        return fitting

    monkeypatch.setattr(loader, "check_fit", check_then_truncate)
    with pytest.raises(ModelError, match=r"model\.safetensors can't be read \(it ends too early\)"):
        load(tmp_path)
