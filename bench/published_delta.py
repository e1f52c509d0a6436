"""Linear attention's prefill beside the Triton kernels that flash-linear-attention publishes, on a GPU.

    pip install flash-linear-attention
    python bench/published_delta.py --out published-delta.json

Both get q and k normalised, v, and the gates as the projections yield them, and return the outputs and the
last states: what lies between the convolution and the gated norm. Theirs has whole tensors of q, k and v, and
the table of chunks, before the clock starts. Both are first compared with a recurrence in float64. Then each
is recorded in a CUDA graph, over three sets of inputs in turn (of 512 tokens, part of them stay in L2). The
last column is our whole op, with convolution and norm. Exit code 1: ours is less exact than theirs by a
tenth, or slower.
"""

import argparse
import functools
import importlib
import importlib.metadata
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor

from minisgl.benchmark.kernels.kernel_timing import graph_samples
from minisgl.benchmark.reports.report import format_table, make_report, write_report
from triton_kernels.gated_delta import CHUNK, TAPS, DeltaStates, DeltaWeights
from triton_kernels.gated_delta_chunks import prepare_chunks
from triton_kernels.gated_delta_prefill import (
    default_delta_prefill_config,
    gated_delta_prefill_triton,
    scan_chunks,
)
from triton_kernels.gpu import gpu_of

KEY_HEADS, VALUE_HEADS, DIM = 16, 32, 128  # Qwen3.5-35B-A3B
LENGTHS = ((512,), (2048,), (8192,), (1024,) * 8, (64,) * 64)
CHECKED = ((300,), (64, 1, 200))
COLD_SETS = 3
ROUNDS = 3


class Batch(NamedTuple):
    """Prompts that begin behind others, as both kernels take them."""

    lengths: tuple[int, ...]
    y: Tensor  # [T, C]: q, k, v
    ba: Tensor  # [T, 2V]
    weights: DeltaWeights
    states: DeltaStates
    qkvz: Tensor  # for the whole op


def make_batch(lengths: tuple[int, ...], device: torch.device) -> Batch:
    """Random values of the spread that a trained model's have."""
    tokens, channels = sum(lengths), (2 * KEY_HEADS + VALUE_HEADS) * DIM

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device, dtype=torch.bfloat16)

    q, k = (F.normalize(normal(tokens, KEY_HEADS, DIM).float(), dim=2) for _ in range(2))
    y = torch.cat((q.flatten(1) * DIM**-0.5, k.flatten(1), normal(tokens, VALUE_HEADS * DIM)), dim=1)
    heads = torch.randn(2, VALUE_HEADS, device=device)
    weights = DeltaWeights(normal(channels, TAPS) * 0.5, heads[0] * 0.5, heads[1], 1 + 0.2 * normal(DIM))
    recurrent = torch.randn(len(lengths) + 1, VALUE_HEADS, DIM, DIM, device=device) * 0.1
    states = DeltaStates(normal(len(lengths) + 1, TAPS, channels), recurrent)
    qkvz = normal(tokens, channels + VALUE_HEADS * DIM)
    return Batch(lengths, y.to(torch.bfloat16), normal(tokens, 2 * VALUE_HEADS), weights, states, qkvz)


def rows_of(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """row_ids, context_len and row_start; each row has 100 tokens before the new ones."""
    ints = functools.partial(torch.tensor, dtype=torch.int32, device=batch.y.device)
    starts = [0, *itertools.accumulate(batch.lengths)]
    return ints([*range(len(batch.lengths))]), ints([100 + n for n in batch.lengths]), ints(starts)


def ours(batch: Batch) -> Callable[[], tuple[Tensor, Tensor]]:
    """Outputs [T, V, E] and the states, which are written in place."""
    rows = rows_of(batch)
    config = default_delta_prefill_config(DIM, DIM, 2, gpu_of(batch.y.device))

    def run() -> tuple[Tensor, Tensor]:
        chunks = prepare_chunks(batch.y, batch.ba, batch.weights, batch.states, rows[2], config.prepare_warps)
        o = scan_chunks(batch.y, chunks, batch.states, *rows, config)
        return o.unflatten(1, (VALUE_HEADS, DIM)), batch.states.recurrent[:-1]

    return run


def theirs(batch: Batch) -> Callable[[], tuple[Tensor, Tensor]]:
    """Outputs and states, as `ours`."""
    chunk_gated_delta_rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    prepare_chunk_indices = importlib.import_module("fla.ops.utils.index").prepare_chunk_indices
    sizes = (KEY_HEADS * DIM, KEY_HEADS * DIM, VALUE_HEADS * DIM)
    q, k, v = (part.unflatten(1, (-1, DIM)).contiguous()[None] for part in batch.y.split(sizes, dim=1))
    b, a = (part.contiguous()[None] for part in batch.ba.chunk(2, dim=1))
    starts = rows_of(batch)[2].long()
    known: dict[str, Any] = {
        "scale": 1.0,
        "initial_state": batch.states.recurrent[:-1],
        "output_final_state": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "A_log": batch.weights.a_log,
        "dt_bias": batch.weights.dt_bias,
        "cu_seqlens": starts,
        "chunk_indices": prepare_chunk_indices(starts, CHUNK),
    }

    def run() -> tuple[Tensor, Tensor]:
        o, state = chunk_gated_delta_rule(q, k, v, a, b, **known)
        return o[0], state

    return run


def recurrence(batch: Batch) -> tuple[Tensor, Tensor]:
    """Outputs and states in float64, token by token."""
    sizes = (KEY_HEADS * DIM, KEY_HEADS * DIM, VALUE_HEADS * DIM)
    q, k, v = (part.double().unflatten(1, (-1, DIM)) for part in batch.y.split(sizes, dim=1))
    q, k = (part.repeat_interleave(VALUE_HEADS // KEY_HEADS, dim=1) for part in (q, k))
    b, a = batch.ba.double().chunk(2, dim=1)
    decay = (-batch.weights.a_log.double().exp() * F.softplus(a + batch.weights.dt_bias.double())).exp()
    outputs, states = [], []
    for row, (first, end) in enumerate(itertools.pairwise((0, *itertools.accumulate(batch.lengths)))):
        state = batch.states.recurrent[row].double()
        for t in range(first, end):
            state = state * decay[t, :, None, None]
            change = b[t].sigmoid()[:, None] * (v[t] - torch.einsum("vde,vd->ve", state, k[t]))
            state = state + k[t][:, :, None] * change[:, None, :]
            outputs.append(torch.einsum("vde,vd->ve", state, q[t]))
        states.append(state)
    return torch.stack(outputs), torch.stack(states)


def errors(batch: Batch) -> dict[str, float]:
    """The larger relative error of outputs and states, by norm, of ours and theirs."""
    expected = recurrence(batch)
    found = {"theirs": theirs(batch)(), "ours": ours(batch)()}  # ours overwrites the states
    return {
        name: max(
            float((part.double() - exact).norm() / exact.norm())
            for part, exact in zip(parts, expected, strict=True)
        )
        for name, parts in found.items()
    }


def time_batch(lengths: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """Median microseconds of theirs, ours and our whole op."""
    batches = [make_batch(lengths, device) for _ in range(COLD_SETS)]
    eps = 1e-6

    def whole(batch: Batch) -> Callable[[], Tensor]:
        rows = rows_of(batch)
        arguments = (batch.qkvz, batch.ba, batch.weights, batch.states, *rows, eps)
        return lambda: gated_delta_prefill_triton(*arguments)

    contenders = {"theirs": theirs, "ours": ours, "ours_whole": whole}
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    calls = {name: [make(batch) for batch in batches] for name, make in contenders.items()}
    for _ in range(ROUNDS):
        for name, of in calls.items():
            samples[name] += graph_samples(of)
    times = {f"{name}_us": round(statistics.median(of), 1) for name, of in samples.items()}
    faster = round(times["theirs_us"] / times["ours_us"], 2)
    return {"prompts": f"{len(lengths)} x {lengths[0]}", **times, "times_as_fast": faster}


@torch.no_grad()
def main() -> int:
    """Compare, time, print, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--commit", help="the commit, for the report, where there is no git")
    parser.add_argument("--out", type=Path, help="write a report here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU, and both are kernels for one")
    device = torch.device("cuda")
    torch.manual_seed(0)
    checks = [
        {"prompts": " + ".join(map(str, lengths)), **errors(make_batch(lengths, device))}
        for lengths in CHECKED
    ]
    print("Relative errors:", format_table(checks), sep="\n", flush=True)
    rows = [time_batch(lengths, device) for lengths in LENGTHS]
    print("Microseconds of a layer:", format_table(rows), sep="\n")
    if options.out:
        report = make_report(
            "published_delta",
            arguments={"flash_linear_attention": importlib.metadata.version("fla-core")},
            metrics={f"times as fast, {row['prompts']}": row["times_as_fast"] for row in rows},
            tables={"errors": checks, "times": rows},
        )
        if options.commit:
            report = replace(report, environment=replace(report.environment, git_commit=options.commit))
        write_report(options.out, report)
    exact = all(check["ours"] <= 1.1 * check["theirs"] for check in checks)
    return 0 if exact and all(row["times_as_fast"] >= 1 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
