"""GPU faults: which errors are one, and that an engine with one calls CUDA no more. Faults are simulated."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from test_step_timeline import MODEL

from minisgl.config import EngineConfig
from minisgl.engine import worker
from minisgl.engine.device_faults import FAULTS, DeviceUse, device_fault_of, name_device_faults
from minisgl.engine.engine import Engine
from minisgl.engine.graphs.background_recording import BackgroundRecorder
from minisgl.engine.start import build_rank
from minisgl.engine.start.build import build_engine
from minisgl.engine.worker import fatal_message
from minisgl.errors import ConfigError, DeviceFaultError, EngineDeadError, RequestError
from minisgl.ipc.messages import AddRequest
from minisgl.request import SamplingParams

ILLEGAL = "CUDA error: an illegal memory access was encountered"


def cuda_error(text: str, code: int | None = None) -> Exception:
    """As torch raises it: with CUDA's number, which torch before 2.12 may leave out."""
    error = torch.AcceleratorError(text)
    if code is not None:
        error.error_code = code  # pyright: ignore[reportAttributeAccessIssue]
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (cuda_error(ILLEGAL + "\nSearch for `cudaErrorIllegalAddress' in the documentation."), 700),
        (cuda_error("CUDA error: words of a driver to come", 700), 700),
        (cuda_error("CUDA error: device-side assert triggered", 710), 710),
        (cuda_error("CUDA error: uncorrectable ECC error encountered", 214), 214),
        (cuda_error("CUDA error: unspecified launch failure"), 719),
        (cuda_error("CUDA error: unknown error", 999), 999),
        (cuda_error("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), 46),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), 700),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), 716),
        (
            torch.distributed.DistBackendError(
                "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nLast error:\n"
                "Cuda failure 220 'uncorrectable NVLink error detected during the execution'"
            ),
            220,
        ),
    ],
)
def test_errors_that_end_the_use_of_a_gpu_are_faults(error: Exception, code: int) -> None:
    fault = device_fault_of(error)
    assert fault is not None
    assert f"CUDA error {code}," in str(fault)
    assert str(fault).startswith("GPU fault: ")
    fatal = fatal_message(error)
    assert (fatal.is_device_fault, fatal.is_user_error, fatal.message) == (True, False, str(fault))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        cuda_error("CUDA error: out of memory", 2),
        cuda_error("CUDA error: invalid argument\nCompile with `TORCH_USE_CUDA_DSA` to enable asserts.", 1),
        cuda_error("CUDA error: operation not permitted when stream is capturing", 900),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of resources: shared memory"),
        RequestError(400, "invalid", f"a text that says '{ILLEGAL}'"),
        DeviceFaultError("rank 1 of --tp: GPU fault: ..."),  # of another rank's GPU
        KeyError("x"),
    ],
)
def test_other_errors_are_none(error: Exception) -> None:
    assert device_fault_of(error) is None


def test_every_error_that_cuda_calls_final_is_known() -> None:
    """CUDA's own header, which Triton brings along, says which errors a process can't outlive."""
    triton = pytest.importorskip("triton")
    header = Path(triton.__file__).parent / "backends" / "nvidia" / "include" / "cuda.h"
    if not header.exists():
        pytest.skip("this Triton has no cuda.h")
    text = header.read_text(errors="replace")
    errors = text[text.index("typedef enum cudaError_enum") :]
    final = {
        int(found[1])
        for entry in errors[: errors.index("CUresult;")].split("/**")
        if re.search(r"process\W+must\W+be\W+terminated", entry)
        and (found := re.search(r"CUDA_ERROR_\w+ *= *(\d+)", entry))
    }
    assert 700 in final
    assert final <= {fault.code for fault in FAULTS}


def test_a_fault_is_found_behind_the_error_that_reports_it() -> None:
    @name_device_faults()
    def build() -> None:
        try:
            raise cuda_error(ILLEGAL)
        except RuntimeError as error:
            raise ConfigError("flashinfer does not run here") from error

    with pytest.raises(DeviceFaultError) as caught:
        build()
    assert isinstance(caught.value.__cause__, ConfigError)


class Gpu:
    """A device that works until it has failed, and does not forgive a call afterwards."""

    def __init__(self) -> None:
        self.has_failed = False

    def fail(self, *_: object) -> Any:
        assert not self.has_failed, "CUDA was called after a fault"
        self.has_failed = True
        raise cuda_error(ILLEGAL, 700)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


@pytest.fixture
def engine(folder: Path) -> Engine:
    config = EngineConfig(device="cpu", dtype="float32", dummy_weights=True, num_pages=9)
    return build_engine(config, folder, lambda name, duration_ms: None)


def add(engine: Engine, **params: Any) -> None:
    prompt = np.arange(5, dtype="<i4").tobytes()
    engine.add(AddRequest(1, prompt, SamplingParams(**{"temperature": 0.0, "max_tokens": 9} | params)))


@pytest.mark.parametrize("place", ["launch", "collect"])
def test_after_a_fault_in_a_step_nothing_calls_cuda(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    gpu = Gpu()
    engine._ranks, engine._recorded = Mock(), Mock()
    engine.profiler = Mock()
    engine._compile_cache = cache = Mock()
    add(engine)
    engine.step()
    monkeypatch.setattr(engine.runner, place, gpu.fail)
    monkeypatch.setattr("minisgl.engine.model_runner.LaunchedStep.wait", lambda step: None)
    with pytest.raises(DeviceFaultError, match="CUDA error 700"):
        engine.step()
    assert gpu.has_failed
    monkeypatch.setattr("minisgl.engine.model_runner.LaunchedStep.wait", gpu.fail)
    for use in (engine.step, engine.record_graph):
        with pytest.raises(DeviceFaultError, match="CUDA error 700"):
            use()
    engine.close()
    engine.close()
    engine._ranks.leave.assert_not_called()
    engine._recorded.release.assert_not_called()
    engine.profiler.close.assert_not_called()
    cache.publish.assert_not_called()
    cache.close.assert_called_once_with()


def test_a_fault_that_only_the_end_notices_is_one_too(engine: Engine) -> None:
    gpu = Gpu()
    engine._ranks = Mock()
    engine._launched.extend([Mock(wait=gpu.fail), Mock(wait=gpu.fail)])
    with pytest.raises(DeviceFaultError):
        engine.close()
    engine._ranks.leave.assert_not_called()
    engine.close()


def test_a_fault_while_tables_are_allocated_or_a_graph_recorded_is_named(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.runner, "allocate_logit_tables", Gpu().fail)
    before = sys.getrefcount(engine)
    with pytest.raises(DeviceFaultError):
        add(engine, presence_penalty=1.0)
    engine.close()
    assert sys.getrefcount(engine) > before, "the engine, and what it holds on the GPU, would be freed"
    table = Mock(num_missing=1, record_next=Gpu().fail)
    recorder = BackgroundRecorder([table], None, strict=False)
    with pytest.raises(RuntimeError, match="illegal"):
        recorder.record_one()
    table.give_up.assert_not_called()


def test_a_fault_during_the_start_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_rank, "fill_dummy", Gpu().fail)
    config = EngineConfig(device="cpu", dtype="float32", dummy_weights=True, num_pages=9)
    with pytest.raises(DeviceFaultError, match="accessed memory"):
        build_engine(config, folder, lambda name, duration_ms: None)


def test_the_end_of_a_rank_explains_a_fault_that_it_causes(engine: Engine) -> None:
    """A kernel that reads the memory of a rank whose process has ended fails as well."""
    lost = EngineDeadError("rank 1 of --tp ended (killed by signal 9)")
    engine._followers = followers = Mock(cause_of=lambda error: lost)
    engine._device = DeviceUse(followers)
    engine._ranks = Mock()
    engine._step = Gpu().fail
    with pytest.raises(EngineDeadError, match="killed by signal 9") as caught:
        engine.step()
    assert not isinstance(caught.value, DeviceFaultError)
    engine.close()
    engine._ranks.leave.assert_not_called()
    followers.stop.assert_not_called()
    followers.close.assert_called_once_with()


@pytest.mark.parametrize(
    ("error", "code"),
    [("DeviceFaultError", 74), ("EngineDeadError", 1), ("ConfigError", 2)],
)
def test_the_exit_code_of_a_command_says_what_ended_its_engine(error: str, code: int) -> None:
    script = (
        "import atexit, sys; from minisgl import cli, errors\n"
        f"def fail(*_): raise errors.{error}('what happened')\n"
        "cli.COMMANDS['generate'] = fail\n"
        "sys.exit(cli.main(['generate', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ)
    assert (done.returncode, done.stderr) == (code, "minisgl: error: what happened\n")


@pytest.mark.parametrize(("is_device_fault", "code"), [(True, 74), (False, 1)])
def test_a_process_that_waits_for_a_lost_rank_ends_with_the_code_of_the_loss(
    monkeypatch: pytest.MonkeyPatch, is_device_fault: bool, code: int
) -> None:
    timer = Mock()
    monkeypatch.setattr(worker.threading, "Timer", timer)
    worker.end_soon("rank 1 ended", is_device_fault)
    timer.assert_called_once_with(worker.EXIT_DEADLINE_S, os._exit, (code,))
    timer.return_value.start.assert_called_once_with()
