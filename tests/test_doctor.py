"""What doctor says of attention backends on machines other than this one."""

import json
from pathlib import Path

import pytest

from compile_cache.store import open_cache
from minisgl.commands import doctor
from minisgl.config import DeviceFacts, EngineConfig
from minisgl.engine.start.device import kernel_tuning

H200 = DeviceFacts(
    has_cuda=True, cuda_name="H200", num_gpus=1, compute_capability=(9, 0), flashinfer="0.6.14"
)


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this machine were another."""
    monkeypatch.setattr(doctor, "_devices", lambda torch, warnings: ([], H200))
    monkeypatch.setattr(doctor, "_driver_version", lambda: None)


def examine(tmp_path: Path, backend: str | None) -> doctor.Report:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return doctor.examine(EngineConfig(model=str(tmp_path), attention_backend=backend), tmp_path)


def test_it_says_what_each_backend_would_run_and_what_keeps_the_others(tmp_path: Path) -> None:
    report = examine(tmp_path, "triton,flashinfer")
    assert report.problems == []
    assert report.attention == {
        "triton": "would run prefill",
        "flashinfer": "could run, as flashinfer-fa3,flashinfer-fa2",
        "flashinfer-fa2": "would run decode",
        "flashinfer-fa3": "could run",
        "trtllm": "no: it needs a Blackwell GPU (compute 10.0), and this is compute 9.0",
        "torch": "could run",
    }
    assert "would run decode" in doctor.as_text(report)
    assert json.loads(doctor.as_json(report))["attention"] == report.attention


@pytest.mark.parametrize(
    ("gpu", "capability", "said"),
    [
        ("NVIDIA H200", (9, 0), "kernels tuned for it"),
        (
            "NVIDIA H100 PCIe",
            (9, 0),
            "kernels as tuned for nvidia-h100-80gb-hbm3, nvidia-h200: the same multiprocessors",
        ),
        ("NVIDIA L4", (8, 9), "kernels not tuned (minisgl tune --model MODEL)"),
        ("Tesla T4", (7, 5), "too old for the kernels"),
    ],
)
def test_it_says_for_which_gpu_the_kernels_were_tuned(
    gpu: str, capability: tuple[int, int], said: str
) -> None:
    assert kernel_tuning(gpu, capability) == said


def test_it_says_why_the_usual_one_is_chosen(tmp_path: Path) -> None:
    why = {choice.flag: choice.why for choice in examine(tmp_path, None).choices}
    assert why["--attention-backend"].startswith("our kernels")


def test_where_the_one_that_was_asked_for_can_not_run_it_shows_those_that_can(tmp_path: Path) -> None:
    report = examine(tmp_path, "trtllm")
    assert len(report.problems) == 1
    assert "--attention-backend trtllm: trtllm needs a Blackwell GPU" in report.problems[0]
    assert report.attention["triton"] == "could run"
    assert report.attention["trtllm"].startswith("no: it needs a Blackwell GPU")


def test_it_says_what_lies_in_the_compile_cache_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    assert examine(tmp_path, None).cache["compiled code"].startswith("none in")
    for facts in ({"gpu": "NVIDIA H200", "driver": "580.1"}, {"gpu": "NVIDIA L4", "driver": "570"}):
        cache = open_cache(tmp_path / "compiled", facts, environ := {})
        assert cache is not None
        kernel = Path(environ["TRITON_CACHE_DIR"]) / "kernel.cubin"
        kernel.parent.mkdir(parents=True)
        kernel.write_bytes(bytes(1 << 20))
        cache.publish()
        cache.close()
    report = examine(tmp_path, None)
    assert report.warnings == []
    assert "2 MiB" in report.cache["compiled code"]
    assert "gpu NVIDIA L4, driver 570" in report.cache["compiled code"]
    kernel.write_bytes(b"something else")
    report = examine(tmp_path, None)
    assert "driver 570" not in report.cache["compiled code"]
    assert [text for text in report.warnings if "kernel.cubin was changed" in text]
