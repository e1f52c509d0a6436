"""The peers' driver: transformers runs the same workload; what a peer gets wrong is said."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from minisgl.benchmark.reports.report import read_report
from minisgl.benchmark.settings import OfflineBenchSettings
from minisgl.benchmark.steps.workload import Item
from minisgl.errors import MinisglError

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "peers"
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}


def load(name: str) -> ModuleType:
    """A script of bench/peers, which is no package."""
    spec = importlib.util.spec_from_file_location(f"peers_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_transformers_runs_the_workload_in_a_process_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    words = ["transformers", "--model", str(tmp_path), "--dummy-weights", "--python", sys.executable]
    words += ["--num-requests", "5", "--min-prompt-tokens", "3", "--max-prompt-tokens", "9"]
    words += ["--min-output-tokens", "2", "--max-output-tokens", "6", "--max-token-id", "60"]
    words += ["--rounds", "2", "--option", "batch=2", "--option", "device=cpu"]
    driver, out = load("offline"), tmp_path / "hf.json"
    assert driver.main([*words, "--out", str(out)]) == 0
    report = read_report(out)
    assert report.kind == "offline"
    assert report.arguments["versions"]["transformers"]
    assert len(report.samples["elapsed_s"]) == 2
    capsys.readouterr()
    rows = {row["metric"]: row for row in driver.ratios(report, report)}
    assert rows["output_tokens_per_s"]["ours / theirs"] == 1.0


def result_of(lengths: list[int]) -> dict[str, Any]:
    versions = {"vllm": "1", "torch": "2", "triton": None}
    return {"start_s": 1.0, "elapsed_s": [2.0], "output_lengths": lengths, "versions": versions, "gpu": None}


def test_a_peer_that_gives_other_lengths_has_no_figures() -> None:
    driver, items = load("offline"), [Item([1, 2], 3), Item([1], 4)]
    report = driver.report_of("vllm", "m", {}, OfflineBenchSettings(), items, result_of([3, 4]))
    assert report.metrics["output_tokens_per_s"] == 3.5
    assert report.environment.torch == "2"
    with pytest.raises(MinisglError, match="6 tokens where 7"):
        driver.report_of("vllm", "m", {}, OfflineBenchSettings(), items, result_of([3, 3]))


def test_rounds_share_no_prompt_and_keep_their_lengths() -> None:
    adapter = load("adapter")
    prompts = [[0, 5, 10], [10]]
    assert adapter.shifted(prompts, 0, 10) == prompts
    assert adapter.shifted(prompts, 1, 10) == [[1, 6, 0], [0]]


def test_mistakes_are_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    driver = load("offline")
    assert driver.main(["vllm", "--python", "/no/such/python", "--num-requests", "1"]) == 2
    assert driver.main(["vllm", "--option", "x"]) == 2
    assert driver.main(["vllm", "--prompts", "p.jsonl"]) == 2
    assert capsys.readouterr().err.count("error: ") == 3
