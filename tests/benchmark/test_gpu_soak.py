"""bench/gpu_soak.py on a tiny model, and that it notices what it is there to notice."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from minisgl.benchmark.reports.report import Report, read_report
from minisgl.ipc.questions import Status

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "gpu_soak.py"
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def gpu_soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_soak", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.append(str(SCRIPT.parent))  # last, so that none of its modules hides another one
    sys.modules[spec.name] = module  # where its dataclass looks for its own names
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def report(gpu_soak: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Of 150 requests in a pool that is too small for all that are open at once."""
    folder = tmp_path_factory.mktemp("soak")
    (folder / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    out = folder / "soak.json"
    words = ["--model", str(folder), "--dummy-weights", "--device", "cpu", "--num-pages", "100"]
    words += ["--num-requests", "150", "--num-warm-up-requests", "20", "--max-output-tokens", "40"]
    words += ["--shared", "0.8"]
    assert gpu_soak.main([*words, "--out", str(out)]) == 0
    return read_report(out)


def test_a_healthy_engine_is_as_it_was(report: Report) -> None:
    assert report.kind == "soak"
    assert report.metrics["num_problems"] == 0
    assert report.metrics["num_held_pages"] == report.metrics["num_held_rows"] == 0
    assert report.tables["problems"] == []


def test_prompts_find_the_beginnings_that_they_share(report: Report) -> None:
    assert report.metrics["num_requests"] == 150
    assert (report.metrics["num_cached_tokens"] or 0) > 0


@pytest.mark.parametrize(
    ("status", "memory", "noticed"),
    [
        ({}, (), []),
        ({"num_recompiles": 4}, (), ["num_recompiles rose by 1"]),
        ({"num_graph_misses": 2}, (), ["num_graph_misses rose by 2"]),
        ({"num_held_rows": 1}, (), ["num_held_rows is 1 though nothing runs"]),
        ({"num_free_pages": 7}, (), ["2 pages are missing"]),
        ({}, (0, 0, 2 << 20), []),  # a piece of the allocator
        ({}, (1 << 30, 1 << 30, 0), ["1024 MiB more are allocated", "1024 MiB more are reserved"]),
    ],
)
def test_what_an_engine_keeps_or_loses_is_noticed(
    gpu_soak: ModuleType, status: dict[str, Any], memory: tuple[int, ...], noticed: list[str]
) -> None:
    before = gpu_soak.Snapshot(Status(0, num_recompiles=3, num_free_pages=9), gpu_soak.Memory(0, 0, 0))
    counted: dict[str, Any] = {"num_recompiles": 3, "num_free_pages": 9} | status
    after = gpu_soak.Snapshot(Status(0, **counted), gpu_soak.Memory(*(memory or (0, 0, 0))))
    assert gpu_soak.changes(before, after, 9) == noticed
