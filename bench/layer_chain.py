"""Where a decode step's time goes: a chain of a model's layers as one CUDA graph, with each launch left out.

    python bench/layer_chain.py                                      # Llama-3.1-8B's shape, every format
    python bench/layer_chain.py --formats fp8-kv --rows 64,256 --left-out
    python bench/layer_chain.py --formats int4 --rows 8 --profile    # each kernel's own time, without overlap

Needs a GPU. Formats: bf16, fp8, fp8-kv (the cache too), fp8-block, int4. The layers' weights together exceed
L2. Kernels start early as in the engine's graphs. "-stage" is how much shorter a layer's time gets without
that launch: what follows then works on old numbers, which costs no time.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._C._autograd import DeviceType

from minisgl.engine.graphs.decode_graphs import early_kernels
from minisgl.engine.graphs.early_starts import instantiate_with_early_starts
from minisgl.engine.graphs.recording import EARLY_ROWS, EARLY_ROWS_OF_INT4
from triton_kernels.decode_config import DecodeShape, num_arrivals
from triton_kernels.fp8_linear import fp8_gated_linear_then_round, fp8_linear
from triton_kernels.gpu import gpu_of
from triton_kernels.int4_linear import int4_gated_linear, int4_linear
from triton_kernels.linear import gated_linear, linear
from triton_kernels.paged_decode import Rope, paged_decode_triton
from triton_kernels.quantize_fp8 import FP8, GROUP, quantize_fp8, quantize_weight_fp8
from triton_kernels.quantize_int4 import quantize_weight_int4
from triton_kernels.rms_norm import add_rms_norm
from triton_kernels.rms_norm_fp8 import add_rms_norm_fp8

HIDDEN, WIDE, HEADS, KV_HEADS, DIM, PAGE = 4096, 14336, 32, 8, 128, 16
SHAPES = {
    "qkv": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
    "o": (HIDDEN, HEADS * DIM),
    "gate_up": (2 * WIDE, HIDDEN),
    "down": (HIDDEN, WIDE),
}
FORMATS = ("bf16", "fp8", "fp8-kv", "fp8-block", "int4")
EPS = 1e-5
BF16 = torch.bfloat16
State = dict[str, Any]
Stage = Callable[["Layer", State], None]


class Layer:
    """One layer's weights, and its keys and values."""

    def __init__(self, fmt: str, rows: int, context: int) -> None:
        def new(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=BF16)

        self.norms = (new(HIDDEN), new(HIDDEN))
        self.weights: dict[str, Any] = {}
        for name, shape in SHAPES.items():
            weight = new(*shape) * 0.02
            if fmt.startswith("fp8"):
                self.weights[name] = quantize_weight_fp8(weight, fmt == "fp8-block")
            elif fmt == "int4":
                self.weights[name] = quantize_weight_int4(weight, 128)
            else:
                self.weights[name] = weight
        pages = rows * (-(-context // PAGE) + 1)
        pool = torch.empty((2, pages, PAGE, KV_HEADS, DIM), device="cuda", dtype=BF16)
        pool.normal_()
        self.pool = pool.to(FP8) if fmt == "fp8-kv" else pool


class Chain:
    """The layers of one format over one number of rows."""

    def __init__(self, fmt: str, rows: int, context: int = 1024, num_layers: int = 6) -> None:
        self.fmt, self.rows = fmt, rows
        self.layers = [Layer(fmt, rows, context) for _ in range(num_layers)]
        each = -(-context // PAGE) + 1
        index = {"device": "cuda", "dtype": torch.int32}
        # Pages in a random order, as after a while of serving.
        self.table = torch.randperm(rows * each, device="cuda").to(torch.int32).view(rows, each)
        self.row_ids = torch.arange(rows, **index)
        self.lengths = torch.full((rows,), context, **index)
        last = context - 1
        slots = self.table[:, last // PAGE] * PAGE + last % PAGE
        angles = torch.randn((context, DIM), device="cuda")
        self.rope = Rope(angles, self.lengths - 1, slots.to(torch.int32))
        self.arrivals = torch.zeros(num_arrivals(rows, KV_HEADS), **index)
        self.kv_scales = torch.ones(2, device="cuda") if fmt == "fp8-kv" else None
        self.x = torch.randn((rows, HIDDEN), device="cuda", dtype=BF16)
        self.group = GROUP if fmt == "fp8-block" else None

    def stages(self) -> dict[str, Stage]:
        """What a layer launches, in order. Each takes from the state and puts into it."""
        stages: dict[str, Stage] = {
            "norm": self._norm(0),
            "qkv": self._linear("qkv", "y"),
            "attention": self.attention(),
        }
        if self.fmt.startswith("fp8"):
            stages["rounding"] = lambda layer, s: s.update(out=quantize_fp8(s["out"], self.group))
        return stages | {
            "o": self._linear("o", "out"),
            "norm2": self._norm(1),
            "gate_up": self._gate_up,
            "down": self._linear("down", "wide"),
        }

    def _linear(self, name: str, source: str) -> Stage:
        def multiply(layer: Layer, s: State) -> None:
            weight, x = layer.weights[name], s[source]
            if self.fmt == "bf16":
                s["y"] = linear(x, weight)
            else:
                s["y"] = int4_linear(x, weight) if self.fmt == "int4" else fp8_linear(*x, *weight)

        return multiply

    def _gate_up(self, layer: Layer, s: State) -> None:
        weight, x = layer.weights["gate_up"], s["y"]
        if self.fmt == "bf16":
            s["wide"] = gated_linear(x, weight)
        elif self.fmt == "int4":
            s["wide"] = int4_gated_linear(x, weight)
        else:
            s["wide"] = fp8_gated_linear_then_round(*x, *weight, group=self.group)

    def _norm(self, which: int) -> Stage:
        def norm(layer: Layer, s: State) -> None:
            arguments = (s["y"], s["residual"], layer.norms[which], EPS)
            if self.fmt.startswith("fp8"):
                *rows, s["residual"] = add_rms_norm_fp8(*arguments, self.group)
                s["y"] = tuple(rows)
            else:
                s["y"], s["residual"] = add_rms_norm(*arguments)

        return norm

    def attention(self, config: Any = None) -> Stage:
        """Decode attention by one configuration."""

        def attend(layer: Layer, s: State) -> None:
            out = paged_decode_triton(
                s["y"], layer.pool[0], layer.pool[1], self.table, self.row_ids, self.lengths, DIM**-0.5, 0,
                0.0, self.arrivals, self.kv_scales, config, self.rope,
            )  # fmt: skip
            s["out"] = out.view(self.rows, -1)

        return attend

    def has_early_starts(self) -> bool:
        """Whether kernels start early in the engine's graphs."""
        return self.rows <= (EARLY_ROWS_OF_INT4 if self.fmt == "int4" else EARLY_ROWS)

    def early(self) -> Mapping[str, str | None]:
        """The kernels that start early in the engine's graphs, if any do."""
        shape = DecodeShape(DIM, 2, HEADS // KV_HEADS, KV_HEADS, self.fmt == "fp8-kv")
        return early_kernels(self.rows, [shape], gpu_of(self.x.device))

    def capture(
        self, stages: Mapping[str, Stage | None], early: Mapping[str, str | None] | None = None
    ) -> torch.cuda.CUDAGraph:
        """The graph of all layers. A stage of None is left out: what it makes is that of an earlier run."""
        if early is None:
            early = self.early() if self.has_early_starts() else {}
        normal = self.stages()
        kept: State = {"y": self.x, "residual": self.x}
        results: dict[str, State] = {}
        for name, stage in normal.items():
            before = dict(kept)
            stage(self.layers[0], kept)
            results[name] = {key: value for key, value in kept.items() if before.get(key) is not value}

        def run() -> None:
            s: State = {"y": self.x, "residual": self.x}
            for layer in self.layers:
                for name, stage in stages.items():
                    if stage is None:
                        s.update(results[name])
                    else:
                        stage(layer, s)

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            run()
        if early:
            if not instantiate_with_early_starts(graph, early):
                raise RuntimeError("no early starts")
        else:
            graph.instantiate()
        return graph

    def time(self, graphs: dict[str, torch.cuda.CUDAGraph], replays: int = 15) -> dict[str, float]:
        """Microseconds a layer: medians of replays that take turns."""
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for graph in graphs.values():
            graph.replay()
        for _ in range(replays):
            for name, graph in graphs.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                graph.replay()
                end.record()
                end.synchronize()
                times[name].append(start.elapsed_time(end) * 1e3 / 2 / len(self.layers))
        return {name: statistics.median(some) for name, some in times.items()}

    def profile(self) -> Iterator[tuple[str, float]]:
        """Each stage's kernels and their own microseconds, one after the other."""
        graph = self.capture(self.stages(), early={})
        graph.replay()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(5):
                graph.replay()
            torch.cuda.synchronize()
        kernels = (event for event in profiler.events() or [] if event.device_type == DeviceType.CUDA)
        events = sorted(kernels, key=lambda event: event.time_range.start)
        each = len(events) // (5 * len(self.layers))
        for place in range(each):
            same = events[place::each]
            yield same[0].name[:50], statistics.median(e.time_range.elapsed_us() for e in same)


def measure(fmt: str, rows: int, left_out: bool, profile: bool) -> None:
    """Print one line, or one for each kernel."""
    chain = Chain(fmt, rows)
    stages = chain.stages()
    graphs = {"all": chain.capture(stages)}
    if chain.has_early_starts():
        graphs["all, not early"] = chain.capture(stages, {})
    else:
        graphs["all, early"] = chain.capture(stages, chain.early())
    if left_out:
        graphs |= {f"-{name}": chain.capture(stages | {name: None}) for name in stages}
    times = chain.time(graphs)
    words = [
        f"{name} {us:.1f}" if "all" in name else f"{name} {times['all'] - us:.1f}"
        for name, us in times.items()
    ]
    print(f"{fmt} {rows}: " + ", ".join(words), flush=True)
    if profile:
        print("   ", "; ".join(f"{name} {us:.1f}" for name, us in chain.profile()), flush=True)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rows", default="1,8,64,256")
    parser.add_argument("--left-out", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    for fmt in arguments.formats.split(","):
        for rows in map(int, arguments.rows.split(",")):
            measure(fmt, rows, arguments.left_out, arguments.profile)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
