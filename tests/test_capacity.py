"""What `minisgl plan` says fits, against arithmetic by hand."""

import json
from pathlib import Path

import pytest
import torch

from minisgl.benchmark.model_configs import MODEL_CONFIGS
from minisgl.cli import main
from minisgl.commands.plan import describe, find_capacity, gpu_gib
from minisgl.config import GIB, EngineConfig
from minisgl.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL_CONFIGS["llama-3.1-8b"]))
    return tmp_path


def test_weights_and_pool_of_llama_8b_are_what_its_numbers_give(folder: Path) -> None:
    capacity = find_capacity(EngineConfig(memory_fraction=0.9), folder, "H200")
    layer = 4096 * 4096 * 2 + 2 * 1024 * 4096 + 3 * 14336 * 4096 + 2 * 4096
    parameters = 32 * layer + 2 * 128256 * 4096 + 4096
    table = 131072 * 128 * 4  # cosines and sines in float32
    cache_scales = 32 * 2 * 4  # two float32 in each layer
    assert capacity.budget.weights_bytes == 2 * parameters + table + cache_scales
    token_bytes = 2 * 32 * 8 * 128 * 2
    assert capacity.budget.page_bytes == 16 * token_bytes
    tokens = (capacity.budget.num_pages - 1) * 16
    assert capacity.requests[8192] == tokens // 8192
    assert list(capacity.requests)[-1] == 131072
    spent = sum(
        getattr(capacity.budget, f"{part}_bytes")
        for part in ("weights", "activation", "tables", "reserve", "pool")
    )
    assert 0 <= capacity.budget.available_bytes - spent < capacity.budget.page_bytes


def test_a_longer_request_never_fits_more_often(folder: Path) -> None:
    counts = list(find_capacity(EngineConfig(page_size=64), folder, "80").requests.values())
    assert counts == sorted(counts, reverse=True)


def test_the_text_says_what_limits_each_length(folder: Path) -> None:
    config = EngineConfig(max_context_tokens=16384, max_running_requests=100)
    text = describe(find_capacity(config, folder, "h100"), "m", "h100")
    limits = {
        line.split()[0]: line.split("limited by ")[1] for line in text.splitlines() if "limited" in line
    }
    assert limits == {
        "1,024": "--max-running-requests",
        "2,048": "--max-running-requests",
        "4,096": "--max-running-requests",
        "8,192": "the KV pool",
        "16,384": "the KV pool",
    }


@pytest.mark.parametrize("gpu", ["H200", "h200", "NVIDIA H200", "nvidia h200"])
def test_a_gpu_is_known_by_its_name(gpu: str) -> None:
    assert gpu_gib(gpu) == 139.8


@pytest.mark.parametrize("gpu", ["", "H2000", "-5", "0", "nan", "inf"])
def test_what_is_no_gpu_is_refused(gpu: str) -> None:
    with pytest.raises(ConfigError, match="--gpu must be one of B200"):
        gpu_gib(gpu)


def test_a_model_that_does_not_fit_is_one_line(folder: Path, capsys) -> None:
    assert main(["plan", "--model", str(folder), "--gpu", "12"]) == 2
    assert "the weights take 15.02 GiB" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="minisgl plan plans for GPUs"):
        find_capacity(EngineConfig(device="cpu"), folder, "H200")


@pytest.mark.parametrize("is_here", [False, True])
def test_a_plan_on_a_machine_without_a_gpu_says_which_one_it_assumes(
    is_here: bool, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_here)
    assert main(["plan", "--model", str(folder), "--gpu", "h100"]) == 0
    said = "This machine has no GPU; the plan assumes the one that --gpu names (h100).\n"
    assert capsys.readouterr().out.endswith(said) is not is_here


def test_more_memory_never_holds_fewer_pages(folder: Path) -> None:
    pages = [find_capacity(EngineConfig(), folder, str(gib)).budget.num_pages for gib in (24, 40, 80, 140)]
    assert pages == sorted(pages)
    assert (pages[3] - pages[2] + 1) * 16 * 131072 >= (140 - 80) * GIB * 0.9


@pytest.mark.parametrize(
    ("gpu", "backend"),
    [
        ("H200", "flashinfer-fa3,flashinfer-fa2"),
        ("80", "flashinfer-fa3,flashinfer-fa2"),
        ("a100-80gb", "flashinfer-fa2"),
        ("B200", "flashinfer-fa2"),
    ],
)
def test_attention_is_chosen_for_the_gpu_that_is_planned_for(folder: Path, gpu: str, backend: str) -> None:
    capacity = find_capacity(EngineConfig(attention_backend="flashinfer"), folder, gpu)
    assert capacity.config.attention_backend == backend


def test_trtllm_is_for_blackwells_alone(folder: Path) -> None:
    config = EngineConfig(attention_backend="trtllm")
    assert find_capacity(config, folder, "B200").config.attention_backend == "trtllm"
    with pytest.raises(ConfigError, match=r"needs a Blackwell GPU .* this is compute 9\.0"):
        find_capacity(config, folder, "H100")
