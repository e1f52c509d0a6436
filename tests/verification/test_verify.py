"""`minisgl verify` passes models that are right, finds faults that are planted, and says where they are."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import random_model

from minisgl.cli import main
from minisgl.config import EngineConfig
from minisgl.engine.engine import Engine
from minisgl.engine.start.build import build_engine
from minisgl.errors import ConfigError
from minisgl.layers.rotary import make_cos_sin
from minisgl.layers.weight import PlainWeight
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.verification import reference, verify
from minisgl.verification.traces import LOGITS, Place
from minisgl.verification.verify import Verification, verify_model

HEAD_DIM = 8
Plant = Callable[[Engine, Path], None]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("gemma"), "gemma3_text", **GEMMA)


GEMMA = {
    "head_dim": 16,
    "sliding_window": 40,
    "query_pre_attn_scalar": 50,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


def saved(folder: Path, family: str, **settings: Any) -> Path:
    model: Any = random_model(family=family, **{"num_hidden_layers": 3, **settings})
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def run(folder: Path, dtype: str = "bfloat16", **settings: Any) -> Verification:
    config = EngineConfig(model=str(folder), device="cpu", dtype=dtype, num_pages=200, **settings)
    return verify_model(config, folder, lambda line: None)


def plant(monkeypatch: pytest.MonkeyPatch, change: Plant) -> None:
    """Change the engine's model after it is loaded; transformers reads the folder as it is."""

    def build(config: EngineConfig, folder: Path, on_stage: Any) -> Engine:
        engine = build_engine(config, folder, on_stage)
        with torch.inference_mode():
            change(engine, folder)
        return engine

    monkeypatch.setattr(verify, "build_engine", build)


def swap_heads(weight: PlainWeight, first: int, second: int) -> None:
    weight.unpack()
    heads = weight.values.unflatten(0, (-1, HEAD_DIM))
    heads[[first, second]] = heads[[second, first]]


def permute_q_heads(engine: Engine, folder: Path) -> None:
    layer: Any = engine.runner.model.layers[1]
    swap_heads(layer.self_attn.qkv_proj.weight, 0, 4)  # heads of different KV heads


def permute_v_heads(engine: Engine, folder: Path) -> None:
    layer: Any = engine.runner.model.layers[2]
    swap_heads(layer.self_attn.qkv_proj.weight, 8, 9)  # behind 6 heads of q and 2 of k


def change_rope_base(engine: Engine, folder: Path) -> None:
    config = read_model_config(folder)
    object.__setattr__(config, "rope_theta", 2000.0)
    cos_sin = engine.runner.model.cos_sin
    cos_sin.copy_(make_cos_sin(config, torch.device("cpu"))[: len(cos_sin)])


def leave_a_norm_out(engine: Engine, folder: Path) -> None:
    layer: Any = engine.runner.model.layers[1]
    layer.post_attention_layernorm.forward_add = lambda x, residual: (x + residual, x + residual)


def overflow(engine: Engine, folder: Path) -> None:
    layer: Any = engine.runner.model.layers[1]
    layer.mlp.down_proj.weight.unpack()
    layer.mlp.down_proj.weight.values.mul_(3e38)


def widen_the_window(engine: Engine, folder: Path) -> None:
    engine.runner.model.attention_layers()[0].window = 0


def scale_the_head(engine: Engine, folder: Path) -> None:
    engine.runner.model.norm.weight[::2] = 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_a_model_that_is_right_passes(model: str, dtype: str, request: pytest.FixtureRequest) -> None:
    found = run(request.getfixturevalue(model), dtype)
    assert found.findings == []
    assert found.passed
    assert found.verdict().startswith("PASSED: logits ")
    kinds = {one.kind for one in found.prompts}
    assert kinds == {"one token", "short", "long"}, "random ids, as the folder has no tokenizer"
    assert max(one.num_prompt_tokens for one in found.prompts) > 400
    assert all(len(one.answer) == 24 for one in found.prompts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("change", "check", "layer", "part", "likely"),
    [
        (permute_q_heads, "logits", 1, "attention of layer 1", "the order of the heads of q or k"),
        (permute_v_heads, "logits", 2, "attention of layer 2", "the v or output projection"),
        (change_rope_base, "logits", 0, "attention of layer 0", "RoPE"),
        (leave_a_norm_out, "logits", 1, "the norm before the MLP of layer 1", "a norm that is missing"),
        (overflow, "overflow", 1, "the MLP of layer 1", "range"),
        (scale_the_head, "logits", 3, "the final norm or the head", "final norm"),
    ],
)
def test_a_planted_fault_is_found_where_it_is(
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    change: Plant,
    check: str,
    layer: int,
    part: str,
    likely: str,
) -> None:
    plant(monkeypatch, change)
    found = run(llama, dtype)
    assert not found.passed
    first = found.findings[0]
    assert (first.check, first.layer, first.part) == (check, layer, part)
    assert likely in first.likely
    assert found.verdict().startswith(f"FAILED: {check} in {part}: ")
    assert "\n" not in found.verdict()


def test_a_window_that_is_missing_is_called_one(gemma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, widen_the_window)
    first = run(gemma).findings[0]
    assert (first.layer, first.likely) == (0, "the sliding window (40 tokens)")
    assert "the positions before" in first.what


def test_float16_that_is_too_narrow_for_the_model_is_no_fault_of_ours(tmp_path: Path) -> None:
    """A norm behind the MLP undoes the factor, which only float16 can't hold."""
    model = random_model(family="gemma3_text", **{"num_hidden_layers": 3, **GEMMA})
    layer: Any = model.model.layers[1]
    with torch.no_grad():
        layer.mlp.down_proj.weight.mul_(1e5)
    model.save_pretrained(tmp_path)
    assert run(tmp_path, "bfloat16").passed
    (finding,) = run(tmp_path, "float16").findings
    assert finding.check == "overflow"
    assert finding.part in ("the MLP of layer 1", "the output of layer 1")
    assert "transformers in 16 bits overflows, too" in finding.likely


def test_a_wrong_end_of_sequence_id_fails_though_all_numbers_are_right(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = replace(read_model_config(llama), eos_token_ids=(5,))
    monkeypatch.setattr(verify, "read_model_config", lambda *_: wrong)
    found = run(llama)
    (finding,) = found.findings
    assert finding.check == "end of sequence"
    assert found.verdict().startswith("FAILED: end of sequence: transformers ends an answer at [2]")


def test_a_checkpoint_with_nan_is_no_pass(tmp_path: Path) -> None:
    model: Any = random_model(num_hidden_layers=3)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    (finding,) = run(tmp_path, "float32").findings
    assert (finding.check, finding.part) == ("reference", "attention of layer 1")
    assert "download the model again" in finding.likely


def test_where_transformers_alone_overflows_there_is_no_bar_and_no_pass(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = verify.reference_traces

    def overflowing(*args: Any, dtype: str, **options: Any) -> reference.Computed:
        computed = right(*args, dtype=dtype, **options)
        if dtype == "bfloat16":
            computed.traces[0][Place(3, LOGITS)][0, 0] = float("inf")
        return computed

    monkeypatch.setattr(verify, "reference_traces", overflowing)
    (finding,) = run(llama).findings
    assert finding.check == "reference"
    assert "transformers in bfloat16" in finding.what


def test_a_pool_without_room_for_any_prompt_is_an_error(llama: Path) -> None:
    config = EngineConfig(model=str(llama), device="cpu", num_pages=2, max_context_tokens=64)
    with pytest.raises(ConfigError, match="--num-pages"):
        verify_model(config, llama, lambda line: None)


def test_a_window_that_no_prompt_leaves_is_noted(gemma: Path) -> None:
    assert run(gemma).notes == []
    notes = run(gemma, max_context_tokens=32).notes
    assert notes == ["no prompt is longer than the sliding window of 40 tokens, so it was not tested"]


def test_wrong_tokens_beside_right_logits_are_blamed_on_the_steps(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = verify.generate

    def wrong(engine: Engine, prompts: Any, max_tokens: int, **options: bool) -> list[list[int]]:
        answers = right(engine, prompts, max_tokens, **options)
        if len(prompts) == 1:
            answers[0][7] = (answers[0][7] + 50) % 97
        return answers

    monkeypatch.setattr(verify, "generate", wrong)
    found = run(llama)
    (finding,) = found.findings
    assert finding.check == "greedy tokens"
    assert "(again, alone)" in finding.what
    assert "--no-prefix-cache" in finding.likely


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layer_by_layer_transformers_computes_the_same(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "gemma3_text": GEMMA,
        "gemma2": {"head_dim": 16, "attn_logit_softcapping": 1.5},
        "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    }
    folder = saved(tmp_path, family, **settings.get(family, {}))
    config = read_model_config(folder)
    tokens = reference.Tokens([token % 89 for token in range(90)], np.arange(0, 90, 7))
    memory = reference.Memory(0, 1 << 40)

    def traces(whole: bool) -> reference.Computed:
        monkeypatch.setattr(reference, "fits_whole", lambda *_: whole)
        return reference.reference_traces(
            folder, config, [tokens], dtype=dtype, device="cpu", num_parameters=1, memory=memory
        )

    whole, streamed = traces(True), traces(False)
    assert (whole.layer_by_layer, streamed.layer_by_layer) == (False, True)
    (one,), (other,) = whole.traces, streamed.traces
    assert one.keys() == other.keys()
    assert all(torch.equal(one[place], other[place]) for place in one)


def test_a_model_fits_whole_only_where_all_of_it_does() -> None:
    memory = reference.Memory(device_bytes=24 << 30, host_bytes=64 << 30)
    assert reference.fits_whole(1_000_000_000, "float32", "cuda", memory)
    assert not reference.fits_whole(8_000_000_000, "float32", "cuda", memory)
    assert reference.fits_whole(8_000_000_000, "bfloat16", "cuda", memory)
    assert reference.fits_whole(8_000_000_000, "float32", "cpu", memory)


def test_too_little_host_memory_is_said_before_loading(llama: Path) -> None:
    config = read_model_config(llama)
    with pytest.raises(ConfigError, match="host memory"):
        reference.reference_traces(
            llama,
            config,
            [],
            dtype="float32",
            device="cpu",
            num_parameters=10**9,
            memory=reference.Memory(0, 1 << 30),
        )


def test_dummy_weights_are_given_to_transformers(gemma: Path) -> None:
    found = run(gemma, dummy_weights=True)
    assert found.passed, found.verdict()


def test_more_ranks_than_one_are_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="--tp 2"):
        run(llama, tp=2)


def test_the_command_prints_a_verdict_and_writes_a_report(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.json"
    assert main(["verify", str(llama), *SMALL, "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("PASSED: ")
    report = json.loads(out.read_text())
    assert report["kind"] == "verify"
    assert report["metrics"]["passed"] == 1
    assert report["metrics"]["logits_error"] <= report["metrics"]["logits_error_bar"]
    assert report["tables"]["verdict"][0]["passed"] is True
    assert {row["layer"] for row in report["tables"]["places"]} == {0, 1, 2, 3}


SMALL = ["--device", "cpu", "--num-pages", "200"]


def test_the_command_fails_with_a_report_that_json_can_hold(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, overflow)
    out = tmp_path / "report.json"
    assert main(["verify", str(llama), *SMALL, "--out", str(out)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("FAILED: overflow in the MLP of layer 1")
    report = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert report["tables"]["findings"][0]["layer"] == 1


def test_the_command_refuses_what_it_can_not_use(
    tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(tmp_path / "none")]) == 2
    assert main(["verify", str(llama), "--out", str(tmp_path / "no" / "file.json")]) == 2
    assert "--out" in capsys.readouterr().err
