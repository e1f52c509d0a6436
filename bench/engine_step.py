"""Decode-step time of a model with dummy weights at a fixed context, against the bandwidth floor.

    python bench/engine_step.py --model llama-3.1-8b --batches 1,8,64,256 --out step.json

Rows start with `context - 1` tokens of random K/V in the pool; a step's time is the wall time between
launches with the next step always queued (what a server sees), and the GPU time between CUDA events.
The floor is (bytes of weights read + bytes of K/V read) / copy bandwidth.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import triton

from minisgl.config import EngineConfig
from minisgl.engine.engine import build_engine
from minisgl.engine.model_runner import ModelRunner
from minisgl.scheduler.plan import Chunk, PageUpdate, RowInit, StepPlan

COPY_BYTES_PER_S = 4.28e12
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
SHAPES = {
    "llama-3.1-8b": LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
}


def write_config(name: str, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))


def fill_rows(runner: ModelRunner, num_rows: int, context: int, page_size: int) -> None:
    """Give rows 0..num_rows-1 disjoint pages and `context - 1` tokens, without computing them."""
    pages_per_row = -(-(context + 512) // page_size)
    for row in range(num_rows):
        first = 1 + row * pages_per_row
        plan = StepPlan(
            step_id=row,
            row_inits=(RowInit(row, 0.0, 0, 1.0, 0.0, row),),
            page_updates=(PageUpdate(row, 0, tuple(range(first, first + pages_per_row))),),
            decode_rows=(),
            chunks=(Chunk(row, context - 2, np.array([row], dtype="<i4").tobytes(), True),),
            sampled_rows=(row,),
        )
        runner.collect(runner.launch(plan))


def time_decode(runner: ModelRunner, num_rows: int, steps: int) -> tuple[float, float]:
    """(wall ms, GPU ms) per step, medians, with one step always queued behind the running one."""
    rows = tuple(range(num_rows))
    plan = StepPlan(0, (), (), rows, (), rows)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    walls = []
    pending = runner.launch(plan)
    events[0].record()
    last = time.perf_counter()
    for step in range(steps):
        launched = runner.launch(plan)
        events[step + 1].record()
        runner.collect(pending)
        pending = launched
        now = time.perf_counter()
        walls.append((now - last) * 1e3)
        last = now
    runner.collect(pending)
    torch.cuda.synchronize()
    gpu = [events[i].elapsed_time(events[i + 1]) for i in range(steps)]
    return statistics.median(walls), statistics.median(gpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batches.split(",")]
    stages: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_config(args.model, folder)
        config = EngineConfig(
            model=args.model,
            dummy_weights=True,
            max_running_requests=max(batches),
            max_context_tokens=4096,
            strict_compile=True,
        )
        engine = build_engine(config, folder, stages.__setitem__)
    print({stage: round(ms) for stage, ms in stages.items()}, flush=True)
    model = engine.runner.model
    with torch.inference_mode():
        for attention in model.attention_layers():
            attention.k_cache.normal_()
            attention.v_cache.normal_()
    shape = SHAPES[args.model]
    embedding = 0 if shape["tie_word_embeddings"] else model.embed_tokens.weight.numel() * 2
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) - embedding
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    kv_per_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim * 2
    fill_rows(engine.runner, max(batches), args.context, config.page_size)
    results = []
    for batch in batches:
        wall_ms, gpu_ms = time_decode(engine.runner, batch, args.steps)
        floor_ms = (weights + batch * args.context * kv_per_token) / COPY_BYTES_PER_S * 1e3
        results.append({"batch": batch, "wall_ms": wall_ms, "gpu_ms": gpu_ms, "floor_ms": floor_ms})
        print(
            f"batch {batch:4d}: wall {wall_ms:7.3f} ms, GPU {gpu_ms:7.3f} ms, floor {floor_ms:7.3f} ms, "
            f"fraction {floor_ms / wall_ms:.2f}",
            flush=True,
        )
    status = engine.status(0)
    print(f"recompiles {status.num_recompiles}, graph misses {status.num_graph_misses}")
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]),
        "model": args.model,
        "context": args.context,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "stages_ms": stages,
        "results": results,
        "num_recompiles": status.num_recompiles,
        "num_graph_misses": status.num_graph_misses,
    }
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
