"""Checks and times every Triton kernel on the GPU; a table on stdout, JSON in --out.

    python bench/kernels.py --out kernels.json                     everything, about three minutes
    python bench/kernels.py --only decode prefill                  cases whose name contains a word
    python bench/kernels.py --variants decode --only 64x4096       launch configurations of one kernel

Nothing is timed that has not just been checked: fresh random inputs, memory that must not be read is NaN,
outputs lie where NaN was before, relative error (by norm) against a float32 or float64 reference under 5e-3.
A time is the median over replays of a CUDA graph of many calls; the calls rotate through input sets that
together exceed L2 four times over ("cold"), or as nearly as their small size allows ("warm").

H query heads, K KV heads, D head dim, T tokens, R rows.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from attention_cases import (
    attention_flop,
    decode_case,
    decode_shapes,
    decode_variants,
    flashinfer_calls,
    kv_bytes,
    prefill_case,
    prefill_shapes,
    prefill_variants,
)
from kernel_case import COLD_BYTES, Case
from moe_cases import moe_case, moe_shapes, route_case
from token_cases import BF16, advance_rows_cases, elementwise_cases, sample_cases

from triton_kernels.paged_decode import default_decode_config
from triton_kernels.paged_prefill import default_prefill_config

CEILING = {"TB/s": 4.28, "TFLOP/s": 794.0}
"""Measured on an H200: device-to-device copy (read + write), 8192-cubed bf16 matmul."""
MAX_ERROR = 5e-3


def graph_microseconds(calls: list[Callable[[], Any]]) -> float:
    """Median time of one call, from replays of a graph that goes through `calls` at least once."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    calls[0]()
    torch.cuda.synchronize()
    estimate_s = time.perf_counter() - begin
    # Enough calls that the two events do not count: 4 ms by an estimate that includes launching.
    rounds = math.ceil(4e-3 / (estimate_s * len(calls)))
    if estimate_s < 2e-4:
        rounds = max(rounds, math.ceil(200 / len(calls)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times = []
    spent = 0.0
    while len(times) < 7 or (spent < 60.0 and len(times) < 25):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
        spent += times[-1]
    return statistics.median(times) * 1e3 / (rounds * len(calls))


def all_cases(wanted: Callable[[str], bool]) -> Iterator[Case]:
    for tokens in (1, 64, 4096, 16384):
        names = ("rms_norm", "add_rms_norm", "silu_mul", "rope_store")
        if any(wanted(f"{name} {tokens}x") for name in names):
            yield from elementwise_cases(tokens)
    if wanted("advance_rows 256"):
        yield from advance_rows_cases(256)
    for rows, dtype in ((1, BF16), (256, BF16), (256, torch.float32)):
        if wanted(f"sample {rows}x151936"):
            yield from sample_cases(rows, 151936, dtype)
    for tokens in (1, 64, 8192):
        if wanted(f"moe_route {tokens}x128/8"):
            yield route_case(tokens)
    for mixture, tokens in moe_shapes():
        if wanted(f"moe {tokens}x {mixture.label}"):
            yield moe_case(mixture, tokens)
    for shape in decode_shapes():
        if wanted(f"decode {shape.label}"):
            yield decode_case(shape)
    for shape in prefill_shapes():
        if wanted(f"prefill {shape.label}"):
            yield prefill_case(shape)


def measure(case: Case, check: bool) -> dict[str, Any]:
    """One result: checked, timed; `failed` instead of a time where the check fails."""
    result: dict[str, Any] = {"op": case.op, "shape": case.shape}
    if check:
        try:
            result["error"] = case.check()
        except ValueError as error:
            return {**result, "failed": str(error)}
        if not result["error"] < MAX_ERROR:
            return {**result, "failed": f"relative error {result['error']:.1e}"}
    microseconds = graph_microseconds(case.calls)
    rate = case.work / microseconds * 1e-6
    cold = len(case.calls) * case.set_bytes >= COLD_BYTES / 2
    return {
        **result,
        "us": round(microseconds, 2),
        "rate": round(rate, 3),
        "unit": case.unit,
        "fraction": round(rate / CEILING[case.unit], 3),
        "cache": "cold" if cold else "warm",
    }


def line(result: dict[str, Any], label: str = "") -> str:
    head = f"{result['op']:<13} {result['shape']:<36} {label}"
    if "failed" in result:
        return f"{head} FAILED: {result['failed']}"
    return (
        f"{head} {result['us']:>9.2f} us {result['rate']:>8.3f} {result['unit']:<7} "
        f"{result['fraction']:>6.1%} {result['cache']}"
        + (f"  err {result['error']:.1e}" if "error" in result else "")
    )


def run_variants(which: str, wanted: Callable[[str], bool]) -> list[dict[str, Any]]:
    """Every launch configuration over the wanted shapes, each checked; best first, * = the default."""
    results = []
    shapes = decode_shapes() if which == "decode" else prefill_shapes()
    for shape in shapes:
        if not wanted(f"{which} {shape.label}"):
            continue
        configs: list[Any] = decode_variants() if which == "decode" else prefill_variants()
        default = default_decode_config if which == "decode" else default_prefill_config
        configs = list(dict.fromkeys([default(shape.head_dim, 2), *configs]))
        of_shape = []
        for config in configs:
            torch.cuda.empty_cache()
            try:
                case = decode_case(shape, config) if which == "decode" else prefill_case(shape, config)
                result = measure(case, check=True)
            except Exception as error:  # a configuration that does not fit the GPU is a result
                result = {"op": which, "shape": shape.label, "failed": repr(error)[:80]}
            of_shape.append({**result, "config": config._asdict(), "default": config == configs[0]})
        of_shape.sort(key=lambda result: result.get("us", math.inf))
        for result in of_shape:
            mark = "*" if result["default"] else " "
            print(line(result, f"{mark}{tuple(result['config'].values())!s:<28}"), flush=True)
        results += of_shape
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", help="write the results as JSON to this file")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose 'op shape' contains one of these")
    parser.add_argument("--variants", choices=["decode", "prefill"], help="time launch configurations")
    parser.add_argument("--no-check", action="store_true", help="time without checking")
    parser.add_argument(
        "--flashinfer", action="store_true", help="time flashinfer on the attention shapes too"
    )
    arguments = parser.parse_args()

    def wanted(name: str) -> bool:
        return not arguments.only or any(word in name for word in arguments.only)

    begin = time.perf_counter()
    torch.manual_seed(int(time.time()))
    if arguments.variants:
        results = run_variants(arguments.variants, wanted)
    else:
        results = []
        for case in all_cases(wanted):
            if wanted(f"{case.op} {case.shape}"):
                results.append(measure(case, not arguments.no_check))
                print(line(results[-1]), flush=True)
            del case
            torch.cuda.empty_cache()
    if arguments.flashinfer:
        for which, shapes in (("decode", decode_shapes()), ("prefill", prefill_shapes())):
            for shape in shapes:
                if wanted(f"{which} {shape.label}"):
                    result: dict[str, Any] = {"op": f"{which} (fi)", "shape": shape.label}
                    try:
                        us = graph_microseconds(flashinfer_calls(shape, which == "decode"))
                        work, unit = (
                            (kv_bytes(shape), "TB/s")
                            if which == "decode"
                            else (attention_flop(shape), "TFLOP/s")
                        )
                        rate = work / us * 1e-6
                        result |= {"us": us, "rate": rate, "unit": unit, "fraction": rate / CEILING[unit]}
                        result["cache"] = "cold"
                    except Exception as error:  # another project's limits are a result, not ours to raise
                        result["failed"] = repr(error)[:80]
                    results.append(result)
                    print(line(result), flush=True)
    failures = sum("failed" in result for result in results)
    print(f"{len(results)} results, {failures} failed, {time.perf_counter() - begin:.0f} s")
    if arguments.out:
        report = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "command": " ".join(sys.argv),
            "ceiling": CEILING,
            "results": results,
        }
        with open(arguments.out, "w") as file:
            json.dump(report, file, indent=1)
    sys.exit(1 if failures and not arguments.variants else 0)


if __name__ == "__main__":
    main()
