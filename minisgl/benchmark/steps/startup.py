"""`minisgl bench startup`: measures the time from starting an engine process to its first token, by stage.

Promise: every start runs in its own process, which the parent times. The stages and the unaccounted rest add
up to the wall time. A "cold" start begins with empty caches of compiled code (ours and the CUDA driver's); a
"warm" start uses the caches of the cold start before it. After the first start the model's files are in the
operating system's page cache.
"""

import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import msgspec

from minisgl.benchmark.model_configs import model_folder
from minisgl.benchmark.reports.plots import check_output, write_outputs
from minisgl.benchmark.reports.report import (
    Cell,
    Report,
    TimelineChart,
    engine_arguments,
    format_metrics,
    make_report,
)
from minisgl.benchmark.settings import OutputSettings, StartupBenchSettings
from minisgl.benchmark.steps.startup_child import StageFinished, StartFailed, StartOrder
from minisgl.config import EngineConfig
from minisgl.errors import ConfigError, MinisglError
from minisgl.ipc.child_process import module_command
from minisgl.progress import ShownProgress, lines_on
from minisgl.server.engines.startup_report import waterfall

CHILD = "minisgl.benchmark.steps.startup_child"
TORCH_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
DRIVER_VARIABLE = "CUDA_CACHE_PATH"
ERROR_TAIL = 2000
"""Characters of a failed child's stderr to show."""


class Start(NamedTuple):
    """The times of one start."""

    kind: str  # "cold" or "warm"
    round: int
    stages_ms: dict[str, float]
    total_ms: float


def run_startup_bench(
    settings: StartupBenchSettings,
    engine_config: EngineConfig,
    output: OutputSettings,
    out: TextIO,
    *,
    environ: Mapping[str, str],
    cache_dir: Path | None = None,
) -> int:
    """Measure, print, write and draw; returns the exit code. `environ` is the children's environment.

    Raises:
        ConfigError: a setting is impossible.
        ModelError: there is no such model.
        MinisglError: a start failed; the message contains its stderr.
    """
    if settings.rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, got {settings.rounds}")
    check_output(output)
    kinds = ("cold", "warm") if settings.cold else ("warm",)
    starts: list[Start] = []
    num_starts = settings.rounds * len(kinds)
    with ShownProgress(lines_on()) as progress:
        with model_folder(engine_config, cache_dir=cache_dir, progress=progress) as folder:
            for number in range(1, settings.rounds + 1):
                with tempfile.TemporaryDirectory(prefix="minisgl-caches-") as caches:
                    config, variables = engine_config, environ
                    if settings.cold:
                        config, variables = with_caches_in(Path(caches), engine_config, environ)
                    for kind in kinds:
                        progress("starts", len(starts), num_starts, "starts")
                        stages, total_ms = start_once(config, folder, variables)
                        starts.append(Start(kind, number, stages, total_ms))
        progress("starts", num_starts, num_starts, "starts")
    report = _report(settings, engine_config, starts)
    for kind in kinds:
        of_kind = [start for start in starts if start.kind == kind]
        print(f"{kind}, mean of {len(of_kind)}:", file=out)
        print(waterfall(_mean_stages(of_kind), _mean([start.total_ms for start in of_kind])) + "\n", file=out)
    print(format_metrics(report.metrics), file=out)
    write_outputs(report, output, out)
    return 0


def with_caches_in(
    folder: Path, config: EngineConfig, environ: Mapping[str, str]
) -> tuple[EngineConfig, dict[str, str]]:
    """The settings and the environment of a start whose caches of compiled code are in `folder`."""
    variables = {name: value for name, value in environ.items() if name not in TORCH_VARIABLES}
    variables[DRIVER_VARIABLE] = str(folder / "driver")
    if config.compile_cache == "":  # torch and Triton use their own caches
        return config, variables | {name: str(folder / name) for name in TORCH_VARIABLES}
    return replace(config, compile_cache=str(folder / "compiled")), variables


def start_once(
    engine_config: EngineConfig, folder: Path, environ: Mapping[str, str]
) -> tuple[dict[str, float], float]:
    """Start an engine once. Returns its stages by name and the time to its first token, in milliseconds.

    Raises:
        MinisglError: the child ended before its first token.
    """
    with tempfile.TemporaryFile() as errors:
        started_at = time.monotonic()
        child = subprocess.Popen(
            module_command(CHILD),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=dict(environ),
        )
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            order = msgspec.json.encode(StartOrder(engine_config, str(folder), started_at))
            child.stdin.write(order + b"\n")
            child.stdin.flush()
            stages: dict[str, float] = {}
            for line in child.stdout:
                told = msgspec.json.decode(line, type=StageFinished | StartFailed)
                if isinstance(told, StartFailed):
                    raise ConfigError(told.message)
                stages[told.name] = told.duration_ms
                if told.is_last:
                    total_ms = 1e3 * (time.monotonic() - started_at)
                    child.wait()
                    return stages, total_ms
        except BrokenPipeError:
            pass  # the child ended before it read its order; stderr says why
        finally:
            child.kill()
            child.communicate()
        errors.seek(0)
        said = errors.read().decode("utf-8", "replace")[-ERROR_TAIL:].strip()
    raise MinisglError(
        f"the engine process ended (exit code {child.returncode}) before its first token: {said}"
    )


def _report(settings: StartupBenchSettings, engine_config: EngineConfig, starts: list[Start]) -> Report:
    kinds = list(dict.fromkeys(start.kind for start in starts))
    samples = {
        f"{kind}_total_s": [start.total_ms / 1e3 for start in starts if start.kind == kind] for kind in kinds
    }
    spans: list[dict[str, Cell]] = []
    for start in starts:
        begin_s = 0.0
        for name, duration_ms in start.stages_ms.items():
            spans.append(
                {
                    "start": f"{start.kind} {start.round}",
                    "stage": name,
                    "begin_s": begin_s,
                    "duration_s": duration_ms / 1e3,
                }
            )
            begin_s += duration_ms / 1e3
    means = {kind: _mean_stages([start for start in starts if start.kind == kind]) for kind in kinds}
    names = list(dict.fromkeys(name for stages in means.values() for name in stages))
    metrics: dict[str, Any] = {name: _mean(values) for name, values in samples.items()}
    for kind, stages in means.items():
        metrics[f"{kind}_unaccounted_s"] = metrics[f"{kind}_total_s"] - sum(stages.values()) / 1e3
    return make_report(
        "startup",
        arguments={"settings": asdict(settings), "engine": engine_arguments(engine_config)},
        metrics=metrics,
        tables={
            "spans": spans,
            "stages": [
                {
                    "stage": name,
                    **{f"{kind}_s": stages.get(name, 0.0) / 1e3 for kind, stages in means.items()},
                }
                for name in names
            ],
        },
        samples=samples,
        charts=[
            TimelineChart(
                title=f"{engine_config.model}: from nothing to the first token",
                table="spans",
                lane="start",
                name="stage",
                start="begin_s",
                duration="duration_s",
                x_label="seconds",
            )
        ],
    )


def _mean_stages(starts: list[Start]) -> dict[str, float]:
    """Mean milliseconds by stage; a stage that a start did not have counts as 0 for it."""
    names = dict.fromkeys(name for start in starts for name in start.stages_ms)
    return {name: _mean([start.stages_ms.get(name, 0.0) for start in starts]) for name in names}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
