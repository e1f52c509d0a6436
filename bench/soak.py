"""Does anything get lost, get duplicated, leak or grow over very many requests? Needs no GPU.

    python bench/soak.py simulation --requests 1000000 --out bench/results/cpu/soak.json
    python bench/soak.py http --requests 5000 --out bench/results/cpu/soak.json

`simulation` serves requests with the scheduler, the KV cache and a fake engine whose tokens betray any wrong
page (soaks/simulation.py). `http` sends them to a server with a tiny model (soaks/http.py): random lengths,
clients that leave or read slowly, bad input, and kills and reloads of the engine. Few rows and pages make
requests wait and be preempted.

Both run in slices. Each slice ends with an idle engine, is checked, and is written to `--out` at once. The
same command goes on after the slices that the file has. `--requests` counts all slices. The exit code is 1
if a slice has a problem. Each run of the command is a `life` of its own: memory is compared within one.
"""

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from soaks.requests import slope

from minisgl.benchmark.reports.report import (
    Cell,
    find_environment,
    format_metrics,
    make_report,
    output_path,
    read_report,
    write_report,
)
from minisgl.errors import MinisglError

Row = dict[str, Cell]
KINDS = ("simulation", "http")
SLICES = {"simulation": 10_000, "http": 500}
"""Requests of one slice."""
SLICES_PER_POOL = 25
"""A simulated engine serves this many slices, so that its memory can be seen to grow; then comes the next."""
LEAST_SLICES = 6
"""Of a life whose memory is judged. Engines that are killed sooner are still warming up."""
COUNTED = ("num_requests", "num_leaving", "num_preemptions", "num_steps", "num_output_tokens", "elapsed_s")


def simulated_slices(first: int, end: int, seed: int) -> Iterator[Row]:
    """The slices from `first` to before `end`."""
    # Lazy: each kind needs only its own modules.
    from soaks.simulation import POOLS, SimulatedEngine, run_slice

    engine = None
    for index in range(first, end):
        pool = POOLS[index // SLICES_PER_POOL % len(POOLS)]
        if engine is None or engine.pool is not pool:
            engine = SimulatedEngine(pool)
        yield run_slice(engine, seed, index, SLICES["simulation"])


def http_slices(first: int, end: int, seed: int) -> Iterator[Row]:
    """The slices from `first` to before `end`, all by one server."""
    from soaks.http import run_slices

    yield from run_slices(first, end, seed, SLICES["http"])


def summary(kind: str, rows: list[Row]) -> dict[str, float | int | None]:
    """Sums over the slices, and the steepest growth of memory in the second half of any life."""
    metrics: dict[str, float | int | None] = {
        f"{kind}_{name}": round(sum(_number(row, name) for row in rows), 2) for name in COUNTED
    }
    disturbances = Counter(str(row.get("disturbance", "")).partition(" ")[0] for row in rows)
    metrics |= {f"{kind}_num_{name}s": num for name, num in disturbances.items() if name}
    metrics[f"{kind}_num_bad_slices"] = sum(bool(row["problems"]) for row in rows)
    # Blocks are what Python has allocated: objects of every kind.
    columns = [name for name in rows[0] if name.endswith("rss_bytes") or name in ("num_blocks", "num_fds")]
    for column in columns:
        lives = [points for points in _lives(rows, column) if len(points) >= LEAST_SLICES]
        slopes = [slope(points[len(points) // 2 :]) for points in lives]
        known = [value for value in slopes if value is not None]
        metrics[f"{kind}_{column}_per_1000_requests"] = round(max(known) * 1000, 1) if known else None
    return metrics


def _lives(rows: Iterable[Row], column: str) -> Iterator[list[tuple[float, float]]]:
    """Of each engine, for each of its slices: requests served so far, and the value at the end.

    Of a server with several engines, one after the other: of each of these if the value is an engine's.
    """
    own = "engine_pid" if column.startswith("engine_") else ""
    for _, slices in itertools.groupby(rows, key=lambda row: (row["life"], row.get("pool"), row.get(own))):
        points, served = [], 0.0
        for row in slices:
            served += _number(row, "num_requests")
            points.append((served, _number(row, column)))
        yield points


def _number(row: Row, name: str) -> float:
    value = row.get(name) or 0
    assert isinstance(value, int | float)
    return value


def run(kind: str, num_requests: int, seed: int, out: Path) -> int:
    """Serve the slices that `out` does not have yet; the number of slices with a problem."""
    tables: dict[str, list[Row]] = {name: [] for name in KINDS}
    if out.exists():
        tables |= {name: list(rows) for name, rows in read_report(out).tables.items() if name in KINDS}
    rows = tables[kind]
    end = -(-num_requests // SLICES[kind])
    life = int(_number(rows[-1], "life")) + 1 if rows else 0
    make = {"simulation": simulated_slices, "http": http_slices}[kind]
    commit = find_environment().git_commit
    for row in make(len(rows), end, seed):
        rows.append({**row, "life": life, "commit": (commit or "")[:12]})
        print(" ".join(f"{name}={value}" for name, value in rows[-1].items() if name != "commit"), flush=True)
        metrics: dict[str, float | int | None] = {}
        for name in KINDS:
            metrics |= summary(name, tables[name]) if tables[name] else {}
        write_report(out, make_report("soak", arguments={"seed": seed}, metrics=metrics, tables=tables))
    if not rows:
        return 0
    print(format_metrics(summary(kind, rows)))
    return sum(bool(row["problems"]) for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--requests", type=int, required=True, help="of all slices, rounded up to a slice")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True, help="the report; the slices in it are not run again")
    given = parser.parse_args()
    try:
        out = output_path("--out", given.out)
        assert out is not None
        return int(run(given.kind, given.requests, given.seed, out) > 0)
    except MinisglError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
