"""`minisgl tune`: times launch configurations for a model's shapes and writes this GPU's tuning table.

Promise: every configuration is checked on the inputs with which it is timed, and a wrong one never wins. The
table is written atomically after each shape, so a new run continues after an interrupted one.
"""

import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from minisgl.benchmark.kernels.kernel_op import Case, Tuning
from minisgl.benchmark.kernels.kernel_timing import (
    MAX_ERROR,
    Ceilings,
    Problem,
    Timer,
    measure_ceilings,
    quick_graph_microseconds,
    wall_microseconds,
)
from minisgl.benchmark.kernels.model_shapes import ModelShape, read_model_shapes
from minisgl.benchmark.kernels.ops.all_ops import TUNABLE
from minisgl.benchmark.reports.panels import Group
from minisgl.benchmark.reports.plots import check_chart_path, write_chart
from minisgl.benchmark.settings import TuneSettings
from minisgl.errors import ConfigError
from minisgl.progress import Progress, ShownProgress, lines_on
from triton_kernels.gpu import MOST_SHARED_BYTES, Gpu, gpu_of
from triton_kernels.tuning import (
    FOLDER,
    as_dict,
    dtype_name,
    is_fresh,
    kernel_hash,
    new_table,
    read_table,
    table_path,
    write_table,
)

LEAST_GAIN = 1.01
"""A configuration must beat the default by this factor; less is noise."""
MOST_LOSS = 1.05
"""A configuration for all sizes may be slower than the default by this factor at any one of them."""
DECODE_TOKENS = 512
"""Only sizes up to this one choose the configuration of compiled decode steps."""
COMPILE_THREADS = 16
CPU_CANDIDATES = 2
H200 = Gpu((9, 0), MOST_SHARED_BYTES, 132)


class TuneTask(NamedTuple):
    """An op and a part of a model, which together have one entry in the table."""

    op: str
    tuning: Tuning
    part: Any  # mostly a ModelShape

    @property
    def exact(self) -> dict[str, int]:
        """Numbers that must equal the launcher's."""
        return self.tuning.exact(self.part)

    @property
    def near(self) -> dict[str, int]:
        """Numbers by which a launcher finds the nearest entry."""
        return self.tuning.near(self.part)

    @property
    def label(self) -> str:
        """All these numbers as text."""
        return _as_text(self.exact | self.near)


class Timed(NamedTuple):
    """One configuration's time on one case, or the reason why it has none."""

    config: Any
    us: float = math.inf
    failed: str = ""


class CaseResult(NamedTuple):
    """A case and the times of all configurations; the default is first."""

    case: Case
    floor_us: float
    limit: str
    timed: list[Timed]


def run_tune(settings: TuneSettings, out: TextIO, timer: Timer | None = None) -> int:
    """Tune, print the results, and return the exit code.

    Args:
        timer: replaces the timing by CUDA graphs, for tests.

    Raises:
        ConfigError: an unknown model or op, no GPU, or a place that can't be written to.
    """
    shapes = read_model_shapes(settings.model)
    ops = _wanted_ops(settings.ops)
    plot = Path(settings.plot) if settings.plot else None
    if plot is not None:
        check_chart_path(plot)
    on_gpu = settings.device == "cuda"
    if settings.dry_run:
        _print_plan(shapes, ops, on_gpu, out)
        return 0
    device, gpu_name = _device(settings)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    path = table_path(gpu_name, Path(settings.out) if settings.out else FOLDER)
    table = _table_to_continue(path, gpu_name, gpu_of(device).capability)
    timer = timer or (quick_graph_microseconds if on_gpu else wall_microseconds)
    begin = time.perf_counter()
    with torch.inference_mode(), ShownProgress(lines_on()) as progress:
        ceilings = measure_ceilings(timer, device)
        table["ceilings"] = {name: round(value, 4) for name, value in ceilings._asdict().items()}
        print(
            f"{gpu_name}: copies {ceilings.copy_tb_s:.2f} TB/s, "
            f"multiplies {ceilings.matmul_tflop_s:.0f} TFLOP/s",
            file=out,
        )
        print(HEADER, file=out)
        tasks = [task for shape in shapes for task in _tasks(ops, shape, on_gpu)]
        counts = [_num_configs(task, device, dtype) for task in tasks]
        done = 0
        for task, count in zip(tasks, counts, strict=True):
            entry = _known_entry(table, task, dtype)
            if entry is None or settings.again:
                shown = partial(_report, progress, done, sum(counts))
                entry = _tune(task, device, dtype, ceilings, timer, shown)
            done += count
            _save_entry(table, task, entry, path)
            progress.clear()
            _print_entry(entry, out)
        _report(progress, done, sum(counts), 0)
    print(f"{time.perf_counter() - begin:.0f} s; {path}", file=out)
    if plot is not None:
        _plot(table, plot, {shape.name for shape in shapes}, ops)
        print(plot, file=out)
    return 0


HEADER = (
    f"{'op':<23}{'shape':<29}{'size':<14}{'default us':>11}{'tuned us':>10}{'gain':>7}{'of roofline':>13}"
)


def _wanted_ops(names: str | None) -> dict[str, Tuning]:
    if names is None:
        return TUNABLE
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in TUNABLE:
            raise ConfigError(f"--ops: {name!r} can't be tuned; there are {', '.join(TUNABLE)}")
    return {name: TUNABLE[name] for name in wanted}


def _tasks(ops: dict[str, Tuning], shape: ModelShape, on_gpu: bool) -> list[TuneTask]:
    """The tasks of a model: each op with each of its parts that has cases."""
    every = [TuneTask(op, tuning, part) for op, tuning in ops.items() for part in tuning.parts(shape)]
    return [task for task in every if task.tuning.cases(task.part, on_gpu)]


def _device(settings: TuneSettings) -> tuple[torch.device, str]:
    """The device to measure on, and the name of its table."""
    if settings.device == "cpu":
        if settings.out is None:
            raise ConfigError(
                "--device cpu only tries the command out in Triton's interpreter: give --out DIR"
            )
        return torch.device("cpu"), "CPU interpreter"
    if not torch.cuda.is_available():
        raise ConfigError(
            "minisgl tune needs a CUDA GPU and torch sees none; --dry-run shows what would be measured"
        )
    if not 0 <= settings.gpu < torch.cuda.device_count():
        raise ConfigError(f"--gpu must be below {torch.cuda.device_count()}, got {settings.gpu}")
    torch.cuda.set_device(settings.gpu)
    return torch.device("cuda", settings.gpu), torch.cuda.get_device_name(settings.gpu)


def _gpu_to_tune() -> Gpu:
    """The GPU whose configurations are tried: the current one, else an H200."""
    return gpu_of(torch.device("cuda")) if torch.cuda.is_available() else H200


def _print_plan(shapes: list[ModelShape], ops: dict[str, Tuning], on_gpu: bool, out: TextIO) -> None:
    gpu = _gpu_to_tune()
    for shape in shapes:
        for task in _tasks(ops, shape, on_gpu):
            cases = task.tuning.cases(task.part, on_gpu)
            every = [one for case in cases for one in task.tuning.candidates(task.part, case.size, gpu)]
            candidates = list(dict.fromkeys(every))
            print(f"{shape.name} {task.op} {task.label}", file=out)
            print(f"  sizes: {', '.join(case.label for case in cases)}", file=out)
            print(f"  {len(candidates)} candidates and the default:", file=out)
            for candidate in candidates:
                print(f"    {candidate}", file=out)


def _table_to_continue(path: Path, gpu_name: str, capability: tuple[int, int]) -> dict[str, Any]:
    """The table in `path` without stale entries; an empty table if there is none for this Triton.

    Raises:
        ConfigError: nothing can be written there.
    """
    fresh = new_table(gpu_name, capability)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.with_name(f".{path.name}.probe")
        probe.touch()
        probe.unlink()
        table = read_table(path) if path.is_file() else fresh
    except OSError as error:
        raise ConfigError(f"can't write {path} ({error.strerror}); give --out DIR") from error
    except ValueError:
        return fresh
    if table["triton"] != fresh["triton"]:
        return fresh
    table = fresh | table  # a table of before may lack a field
    table["entries"] = [entry for entry in table["entries"] if is_fresh(table, entry["op"])]
    return table


def _key(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry["op"], entry["dtype"], tuple(entry["exact"].values()), tuple(entry["near"].values())


def _known_entry(table: dict[str, Any], task: TuneTask, dtype: torch.dtype) -> dict[str, Any] | None:
    """Find the entry of an earlier run for the same numbers, and add this model's name to it."""
    key = (task.op, dtype_name(dtype), tuple(task.exact.values()), tuple(task.near.values()))
    for entry in table["entries"]:
        if _key(entry) == key:
            if task.part.name not in entry["models"]:
                entry["models"].append(task.part.name)
            return entry
    return None


def _save_entry(table: dict[str, Any], task: TuneTask, entry: dict[str, Any], path: Path) -> None:
    kept = [other for other in table["entries"] if _key(other) != _key(entry)]
    table["entries"] = [*kept, entry]
    files = task.tuning.files
    table["kernels"][task.op] = {"files": list(files), "hash": kernel_hash(files)}
    table["date"] = time.strftime("%Y-%m-%d")
    table["torch"] = torch.__version__
    write_table(path, table)


def _tune(
    task: TuneTask,
    device: torch.device,
    dtype: torch.dtype,
    ceilings: Ceilings,
    timer: Timer,
    report: Callable[[int], None],
) -> dict[str, Any]:
    """Measure every candidate of one task; returns the table's entry. `report` gets how many are done."""
    tuning = task.tuning
    results = []
    num_done = 0
    for case in tuning.cases(task.part, device.type == "cuda"):
        configs = _configs(task, case, device, dtype)
        problem = case.build(device, dtype)
        report(num_done)
        if device.type == "cuda":
            _compile_all(tuning, problem, configs)
        timed = []
        for config in configs:
            timed.append(_measure(tuning, config, problem, timer))
            num_done += 1
            report(num_done)
        # Time the default again, in case the GPU's clock has changed meanwhile.
        again = _measure(tuning, configs[0], problem, timer)
        timed[0] = timed[0]._replace(us=min(timed[0].us, again.us))
        results.append(CaseResult(case, ceilings.floor_us(problem), ceilings.limit(problem), timed))
        del problem
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return _entry(task, dtype, results)


def _configs(task: TuneTask, case: Case, device: torch.device, dtype: torch.dtype) -> list[Any]:
    """The configurations to measure; the default is first."""
    gpu = _gpu_to_tune()
    candidates = list(task.tuning.candidates(task.part, case.size, gpu))
    if device.type == "cpu":
        candidates = candidates[:CPU_CANDIDATES]
    return list(dict.fromkeys([task.tuning.default(task.part, case.size, dtype.itemsize, gpu), *candidates]))


def _num_configs(task: TuneTask, device: torch.device, dtype: torch.dtype) -> int:
    cases = task.tuning.cases(task.part, device.type == "cuda")
    return sum(len(_configs(task, case, device, dtype)) for case in cases)


def _report(progress: Progress, before: int, total: int, num_done: int) -> None:
    progress("tuning", before + num_done, total, "configurations")


def _compile_all(tuning: Tuning, problem: Problem, configs: list[Any]) -> None:
    """Compile every configuration in several threads, because compilation takes most of the time."""
    device = torch.device("cuda", torch.cuda.current_device())

    def run(config: Any) -> None:
        torch.cuda.set_device(device)
        with torch.inference_mode():
            try:
                tuning.function(config)(*problem.arguments[0])
            except Exception:  # _measure reports the error
                return

    with ThreadPoolExecutor(COMPILE_THREADS) as pool:
        list(pool.map(run, configs))
    torch.cuda.synchronize()


def _measure(tuning: Tuning, config: Any, problem: Problem, timer: Timer) -> Timed:
    """Check one configuration, then time it."""
    function = tuning.function(config)
    try:
        error = problem.check(function)
        if not error < MAX_ERROR:
            return Timed(config, failed=f"relative error {error:.1e}")
        return Timed(config, timer(problem.calls(function)))
    except Exception as error:  # a configuration that does not fit the GPU raises, which is a result
        return Timed(config, failed=f"{type(error).__name__}: {error}"[:100])


def _entry(task: TuneTask, dtype: torch.dtype, results: list[CaseResult]) -> dict[str, Any]:
    by_size = task.tuning.by_size
    counted = results
    if by_size:
        counted = [result for result in results if result.case.size <= DECODE_TOKENS] or results
    for_all = best_for_all(counted)
    sizes = []
    for result in results:
        default = result.timed[0]
        chosen = _best(result) if by_size else _timed_with(result, for_all or default.config)
        if not math.isfinite(chosen.us):
            continue  # no configuration ran; `failed` has the reasons
        sizes.append(
            {
                "size": result.case.size,
                "label": result.case.label,
                "config": as_dict(chosen.config),
                "default_us": round(default.us, 2) if math.isfinite(default.us) else None,
                "us": round(chosen.us, 2),
                "fraction": round(result.floor_us / chosen.us, 4),
                "limit": result.limit,
            }
        )
    works = {timed.config for result in results for timed in result.timed if not timed.failed}
    failed = {
        str(timed.config): timed.failed
        for result in results
        for timed in result.timed
        if timed.failed and timed.config not in works
    }
    return {
        "op": task.op,
        "dtype": dtype_name(dtype),
        "exact": task.exact,
        "near": task.near,
        "models": [task.part.name],
        "config": as_dict(for_all or counted[0].timed[0].config),
        "candidates": max(len(result.timed) for result in results),
        "failed": failed,
        "sizes": sizes,
    }


def best_for_all(results: list[CaseResult]) -> Any | None:
    """The candidate with the best geometric mean over all cases, if it beats the default; else None.

    A candidate that is much slower than the default on any case does not count.
    """
    best, best_score = None, 1 / LEAST_GAIN
    for timed in results[0].timed[1:]:
        ratios = [_timed_with(result, timed.config).us / result.timed[0].us for result in results]
        if not all(math.isfinite(ratio) for ratio in ratios) or max(ratios) > MOST_LOSS:
            continue
        score = math.exp(sum(map(math.log, ratios)) / len(ratios))
        if score < best_score:
            best, best_score = timed.config, score
    return best


def _timed_with(result: CaseResult, config: Any) -> Timed:
    return next((timed for timed in result.timed if timed.config == config), Timed(config))


def _best(result: CaseResult) -> Timed:
    """The fastest configuration, or the default if the gain is within noise."""
    best = min(result.timed, key=lambda timed: timed.us)
    return best if best.us * LEAST_GAIN < result.timed[0].us else result.timed[0]


def _as_text(numbers: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in numbers.items())


def _print_entry(entry: dict[str, Any], out: TextIO) -> None:
    head = f"{entry['op']:<23}{_as_text(entry['exact'] | entry['near']):<29}"
    for one in entry["sizes"]:
        before = f"{one['default_us']:>11.2f}" if one["default_us"] else f"{'failed':>11}"
        gain = f"{one['default_us'] / one['us']:>6.2f}x" if one["default_us"] else f"{'':>7}"
        print(
            f"{head}{one['label']:<14}{before}{one['us']:>10.2f}{gain}{one['fraction']:>13.1%}",
            file=out,
            flush=True,
        )
    for config, reason in list(entry["failed"].items())[:3]:
        print(f"{head}refused: {config}: {reason}", file=out)


def _plot(table: dict[str, Any], path: Path, models: Iterable[str], ops: Iterable[str]) -> None:
    wanted, names = set(models), set(ops)
    groups = [
        Group(
            f"{entry['op']} {_as_text(entry['exact'] | entry['near'])}, {one['label']}",
            (one["fraction"] * one["us"] / one["default_us"] if one["default_us"] else None, one["fraction"]),
            (f"{one['default_us']:.1f} us" if one["default_us"] else "", f"{one['us']:.1f} us"),
        )
        for entry in table["entries"]
        if wanted & set(entry["models"]) and entry["op"] in names
        for one in entry["sizes"]
    ]
    title = f"{table['gpu']}, Triton {table['triton']}: fraction of the roofline"
    write_chart(path, title, ("default", "tuned"), groups, 1.0)
