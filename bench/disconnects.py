"""Does the server free everything when clients disconnect at random moments?

    python bench/disconnects.py --requests 1000 --out bench/results/cpu/disconnects.json

It starts the real engine with a tiny model, few rows, few pages and two server processes, so that
some requests wait and some are preempted when their clients leave. The exit code is 1 if rows,
pages or requests remain.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from minisgl.benchmark.reports.report import format_table, make_report, write_report

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "server"))
from leaving_clients import held, info, leave, served

LIMIT_S = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, served(Path(name) / "model") as url:
        began = time.perf_counter()
        ends = leave(url, arguments.requests, random.Random(arguments.seed))
        seconds = time.perf_counter() - began
        deadline = time.monotonic() + LIMIT_S
        while any((left := held(url)).values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        now = info(url)
    ended = now["server"]["ended"]
    engine = {key: now["engine"][key] for key in ("num_steps", "num_preemptions")}
    tables = {"left": [ends], "ended": [ended], "engine": [engine], "held_afterwards": [left]}
    for rows in tables.values():
        print(format_table(rows))
    if arguments.out:
        report = make_report(
            "disconnects",
            arguments={"requests": arguments.requests, "seed": arguments.seed},
            metrics={"seconds": round(seconds, 2), "held_afterwards": sum(left.values())},
            tables=tables,
        )
        write_report(arguments.out, report)
    return int(any(left.values()))


if __name__ == "__main__":
    sys.exit(main())
