"""`minisgl tune`: measures launch configurations for a model's shapes and writes this GPU's table.

Promise: a configuration wins only after its answers were checked on the inputs it was timed on; the table is
written after each shape, in one piece, so an interrupted run goes on where it was when started again.
"""

import math
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from minisgl.benchmark.kernel_candidates import TUNABLE, Case, TunableOp
from minisgl.benchmark.kernel_timing import (
    MAX_ERROR,
    Ceilings,
    Problem,
    Timer,
    measure_ceilings,
    quick_graph_microseconds,
    wall_microseconds,
)
from minisgl.benchmark.model_shapes import ModelShape, find_shapes
from minisgl.benchmark.plots import Group, check_chart_path, write_chart
from minisgl.benchmark.settings import TuneSettings
from minisgl.errors import ConfigError
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
"""What beats the default by less than this is noise; the default stays."""
MOST_LOSS = 1.05
"""A configuration for all sizes may be this much slower than the default at one of them."""
DECODE_TOKENS = 512
"""Sizes up to this one count for the configuration that compiled decode steps use."""
COMPILE_THREADS = 16
CPU_CANDIDATES = 2


class Timed(NamedTuple):
    """What one configuration did on one case: a time, or why it has none."""

    config: Any
    us: float = math.inf
    failed: str = ""


class CaseResult(NamedTuple):
    """A case with the times of all configurations, the default's first."""

    case: Case
    floor_us: float
    limit: str
    timed: list[Timed]


def run_tune(settings: TuneSettings, out: TextIO, timer: Timer | None = None) -> int:
    """Tune, print what came of it, and return the exit code.

    Args:
        timer: measures instead of CUDA graphs, for tests.

    Raises:
        ConfigError: an unknown model or op, no GPU, or a place that can't be written to.
    """
    shapes = find_shapes(settings.model)
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
    table = _table_to_go_on_with(path, gpu_name)
    timer = timer or (quick_graph_microseconds if on_gpu else wall_microseconds)
    begin = time.perf_counter()
    with torch.inference_mode():
        ceilings = measure_ceilings(timer, device)
        table["ceilings"] = {name: round(value, 4) for name, value in ceilings._asdict().items()}
        print(
            f"{gpu_name}: copies {ceilings.copy_tb_s:.2f} TB/s, "
            f"multiplies {ceilings.matmul_tflop_s:.0f} TFLOP/s",
            file=out,
        )
        print(HEADER, file=out)
        for shape in shapes:
            for tunable, part in _parts(ops, shape, on_gpu):
                entry = _known_entry(table, tunable, part, dtype)
                if entry is None or settings.again:
                    entry = _tune_part(tunable, part, device, dtype, ceilings, timer)
                _put(table, tunable, entry, path)
                _print_entry(entry, out)
    print(f"{time.perf_counter() - begin:.0f} s; {path}", file=out)
    if plot is not None:
        _plot(table, plot, {shape.name for shape in shapes}, {op.op for op in ops})
        print(plot, file=out)
    return 0


HEADER = (
    f"{'op':<23}{'shape':<29}{'size':<14}{'default us':>11}{'tuned us':>10}{'gain':>7}{'of roofline':>13}"
)


def _wanted_ops(names: str | None) -> list[TunableOp]:
    if names is None:
        return list(TUNABLE.values())
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in TUNABLE:
            raise ConfigError(f"--ops: {name!r} can't be tuned; there are {', '.join(TUNABLE)}")
    return [TUNABLE[name] for name in wanted]


def _parts(ops: list[TunableOp], shape: ModelShape, on_gpu: bool) -> list[tuple[TunableOp, Any]]:
    """What to tune of a model: ops, and the parts of it that have an entry each."""
    every = [(tunable, part) for tunable in ops for part in tunable.parts(shape)]
    return [(tunable, part) for tunable, part in every if tunable.cases(part, on_gpu)]


def _device(settings: TuneSettings) -> tuple[torch.device, str]:
    """The device to measure on, and the name its table goes by."""
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


def _print_plan(shapes: list[ModelShape], ops: list[TunableOp], on_gpu: bool, out: TextIO) -> None:
    for shape in shapes:
        for tunable, part in _parts(ops, shape, on_gpu):
            cases = tunable.cases(part, on_gpu)
            every = [one for case in cases for one in tunable.candidates(part, case.size)]
            candidates = list(dict.fromkeys(every))
            print(f"{shape.name} {tunable.op} {_shown(tunable.exact(part) | tunable.near(part))}", file=out)
            print(f"  sizes: {', '.join(case.label for case in cases)}", file=out)
            print(f"  {len(candidates)} candidates and the default:", file=out)
            for candidate in candidates:
                print(f"    {candidate}", file=out)


def _table_to_go_on_with(path: Path, gpu_name: str) -> dict[str, Any]:
    """The table in `path` if it is one for this Triton, without entries that are stale; else an empty one.

    Raises:
        ConfigError: nothing can be written there.
    """
    fresh = new_table(gpu_name)
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
    table["entries"] = [entry for entry in table["entries"] if is_fresh(table, entry["op"])]
    return table


def _key(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry["op"], entry["dtype"], tuple(entry["exact"].values()), tuple(entry["near"].values())


def _known_entry(
    table: dict[str, Any], tunable: TunableOp, part: Any, dtype: torch.dtype
) -> dict[str, Any] | None:
    """The entry of an earlier run for this very shape, with this model's name added to it."""
    exact, near = tunable.exact(part), tunable.near(part)
    key = (tunable.op, dtype_name(dtype), tuple(exact.values()), tuple(near.values()))
    for entry in table["entries"]:
        if _key(entry) == key:
            if part.name not in entry["models"]:
                entry["models"].append(part.name)
            return entry
    return None


def _put(table: dict[str, Any], tunable: TunableOp, entry: dict[str, Any], path: Path) -> None:
    kept = [other for other in table["entries"] if _key(other) != _key(entry)]
    table["entries"] = [*kept, entry]
    table["kernels"][tunable.op] = {"files": list(tunable.files), "hash": kernel_hash(tunable.files)}
    table["date"] = time.strftime("%Y-%m-%d")
    table["torch"] = torch.__version__
    write_table(path, table)


def _tune_part(
    tunable: TunableOp,
    part: Any,
    device: torch.device,
    dtype: torch.dtype,
    ceilings: Ceilings,
    timer: Timer,
) -> dict[str, Any]:
    """The table's entry for one op and one part of a model."""
    results = []
    for case in tunable.cases(part, device.type == "cuda"):
        candidates = list(tunable.candidates(part, case.size))
        if device.type == "cpu":
            candidates = candidates[:CPU_CANDIDATES]
        default = tunable.default(part, case.size, dtype.itemsize)
        configs = list(dict.fromkeys([default, *candidates]))
        problem = case.build(device, dtype)
        if device.type == "cuda":
            _compile_all(tunable, problem, configs)
        timed = [_measure(tunable, config, problem, timer) for config in configs]
        # Once more at the end, so that a clock that has moved meanwhile does not decide.
        again = _measure(tunable, default, problem, timer)
        timed[0] = timed[0]._replace(us=min(timed[0].us, again.us))
        results.append(CaseResult(case, ceilings.floor_us(problem), ceilings.limit(problem), timed))
        del problem
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return _entry(tunable, part, dtype, results)


def _compile_all(tunable: TunableOp, problem: Problem, configs: list[Any]) -> None:
    """Run every configuration once, from several threads: compiling is most of the time that tuning takes."""
    device = torch.device("cuda", torch.cuda.current_device())

    def run(config: Any) -> None:
        torch.cuda.set_device(device)
        with torch.inference_mode():
            try:
                tunable.function(config)(*problem.arguments[0])
            except Exception:  # reported when it is measured
                return

    with ThreadPoolExecutor(COMPILE_THREADS) as pool:
        list(pool.map(run, configs))
    torch.cuda.synchronize()


def _measure(tunable: TunableOp, config: Any, problem: Problem, timer: Timer) -> Timed:
    """Check, then time."""
    function = tunable.function(config)
    try:
        error = problem.check(function)
        if not error < MAX_ERROR:
            return Timed(config, failed=f"relative error {error:.1e}")
        return Timed(config, timer(problem.calls(function)))
    except Exception as error:  # a configuration that does not fit the GPU is a result
        return Timed(config, failed=f"{type(error).__name__}: {error}"[:100])


def _entry(tunable: TunableOp, part: Any, dtype: torch.dtype, results: list[CaseResult]) -> dict[str, Any]:
    counted = results
    if tunable.by_size:
        counted = [result for result in results if result.case.size <= DECODE_TOKENS] or results
    for_all = best_for_all(counted)
    sizes = []
    for result in results:
        default = result.timed[0]
        chosen = _best(result) if tunable.by_size else _of(result, for_all or default.config)
        if not math.isfinite(chosen.us):
            continue  # nothing ran; `failed` says why
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
        "op": tunable.op,
        "dtype": dtype_name(dtype),
        "exact": tunable.exact(part),
        "near": tunable.near(part),
        "models": [part.name],
        "config": as_dict(for_all or counted[0].timed[0].config),
        "candidates": max(len(result.timed) for result in results),
        "failed": failed,
        "sizes": sizes,
    }


def best_for_all(results: list[CaseResult]) -> Any | None:
    """The configuration with the best geometric mean over the cases that is nowhere much slower than the
    default; None = no candidate beats it."""
    best, best_score = None, 1 / LEAST_GAIN
    for timed in results[0].timed[1:]:
        ratios = [_of(result, timed.config).us / result.timed[0].us for result in results]
        if not all(math.isfinite(ratio) for ratio in ratios) or max(ratios) > MOST_LOSS:
            continue
        score = math.exp(sum(map(math.log, ratios)) / len(ratios))
        if score < best_score:
            best, best_score = timed.config, score
    return best


def _of(result: CaseResult, config: Any) -> Timed:
    return next((timed for timed in result.timed if timed.config == config), Timed(config))


def _best(result: CaseResult) -> Timed:
    """The fastest; the default unless it is beaten by more than noise."""
    best = min(result.timed, key=lambda timed: timed.us)
    return best if best.us * LEAST_GAIN < result.timed[0].us else result.timed[0]


def _shown(numbers: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in numbers.items())


def _print_entry(entry: dict[str, Any], out: TextIO) -> None:
    head = f"{entry['op']:<23}{_shown(entry['exact'] | entry['near']):<29}"
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
            f"{entry['op']} {_shown(entry['exact'] | entry['near'])}, {one['label']}",
            (one["fraction"] * one["us"] / one["default_us"] if one["default_us"] else None, one["fraction"]),
            (f"{one['default_us']:.1f} us" if one["default_us"] else "", f"{one['us']:.1f} us"),
        )
        for entry in table["entries"]
        if wanted & set(entry["models"]) and entry["op"] in names
        for one in entry["sizes"]
    ]
    title = f"{table['gpu']}, Triton {table['triton']}: fraction of the roofline"
    write_chart(path, title, ("default", "tuned"), groups, 1.0)
