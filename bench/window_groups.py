"""Do window layers that give their pages back answer as before on this GPU, and what do they cost?

    python bench/window_groups.py --out window_groups.json                      # on a GPU, two minutes
    python bench/window_groups.py --device cpu --layers 2 --tokens 8 --rows 3   # the script itself

Random weights of real shapes with few layers: Gemma 3 1B (window 512, and all tokens) and Mistral 7B (window
1,024 in all layers), with windows that give pages back and with --keep-window-pages. Each answers prompts of
several lengths in chunks beside each other, greedy, then the same again with cached prefixes, then a step of
many rows. With freed pages, all free pages are filled with NaN after every step.

Bars: no answer has an error; the first answers are the same in both ways (the same kernels read the same
numbers); no recompilation and no missing graph. Exit code 1 where one is missed.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl.benchmark.model_configs import MODEL_CONFIGS
from minisgl.config import EngineConfig
from minisgl.engine.engine import Engine
from minisgl.engine.start.build import build_engine
from minisgl.ipc.messages import AddRequest
from minisgl.kvcache.grouped_manager import GroupedCacheManager
from minisgl.kvcache.pool_figures import pool_figures
from minisgl.request import SamplingParams

MODELS: dict[str, dict[str, Any]] = {
    "gemma-3-1b": {"sliding_window": 512, "sliding_window_pattern": 2},
    "mistral-7b": {"sliding_window": 1024},
}
LENGTHS = (5, 300, 511, 513, 1100, 2500, 4000)
CONTEXT = 6144


def poison(engine: Engine) -> None:
    """Fill every free page with NaN, behind the steps that were launched."""
    cache, runner = engine.cache, engine.runner
    if not isinstance(cache, GroupedCacheManager):
        return
    free = [group._allocator.free_page_ids() for group in cache.windows]
    if cache.keeps_all:
        free.insert(0, cache.places.allocator.free_page_ids())
    index = [torch.tensor(pages, device=runner.rows.page_table.device) for pages in free]
    with torch.inference_mode():
        for layer, attention in enumerate(runner.model.attention_layers()):
            pages = index[runner.model.layer_groups[layer]]
            attention.k_cache.index_fill_(0, pages, float("nan"))
            attention.v_cache.index_fill_(0, pages, float("nan"))


def answers(
    engine: Engine, prompts: list[np.ndarray], num_tokens: int, first_id: int, with_nan: bool
) -> tuple[list[list[int]], int, float]:
    """The greedy tokens of prompts that come at once, how many prompt tokens were cached, and seconds."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    got: dict[int, list[int]] = {}
    cached: dict[int, int] = {}
    for number, prompt in enumerate(prompts, first_id):
        got[number] = []
        engine.add(AddRequest(number, prompt.astype("<i4").tobytes(), params))
    began = time.perf_counter()
    while engine.has_work:
        for output in engine.step():
            if output.error_message:
                raise SystemExit(f"request {output.request_id}: {output.error_message}")
            got[output.request_id] += output.token_ids
            cached[output.request_id] = output.num_cached_tokens
        if with_nan:
            poison(engine)
    return list(got.values()), sum(cached.values()), time.perf_counter() - began


def measure(folder: Path, keep: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything of one engine."""
    config = EngineConfig(
        model=str(folder),
        dummy_weights=True,
        device=arguments.device,
        max_context_tokens=CONTEXT,
        max_running_requests=arguments.rows,
        max_step_tokens=2048,
        num_pages=arguments.rows * CONTEXT // 16 // 2 if arguments.device == "cuda" else 600,
        keep_window_pages=keep,
        seed=0,
    )
    engine = build_engine(config, folder, lambda stage, ms: None)
    engine.record_graphs()
    vocab, source = engine.runner.model.vocab_size, np.random.default_rng(0)
    lengths = LENGTHS if arguments.device == "cuda" else (5, 300, 700)
    prompts = [source.integers(3, vocab, length).astype(np.int32) for length in lengths]
    first, _, _ = answers(engine, prompts, arguments.tokens, 0, not keep)
    again, cached, _ = answers(engine, prompts, arguments.tokens, 100, not keep)
    many = [source.integers(3, vocab, 1500).astype(np.int32) for _ in range(arguments.rows)]
    _, _, both_s = answers(engine, many, 1 + arguments.tokens, 200, False)
    _, _, prompts_s = answers(engine, [prompt[::-1] for prompt in many], 1, 600, False)
    status = engine.status(0)
    figures = [(group.window, group.usable) for group in pool_figures(engine.cache)]
    engine.cache.check_invariants()
    engine.close()
    return {
        "answers": first,
        "same_again": sum(a == b for a, b in zip(first, again, strict=True)),
        "cached_tokens": cached,
        "decode_step_ms": 1e3 * (both_s - prompts_s) / arguments.tokens,
        "recompiles": status.num_recompiles,
        "graph_misses": status.num_graph_misses,
        "preemptions": status.num_preemptions,
        "pages": figures,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    report: dict[str, Any] = {}
    failed = False
    for name, settings in MODELS.items():
        with tempfile.TemporaryDirectory() as made:
            shape = MODEL_CONFIGS[name] | settings | {"num_hidden_layers": arguments.layers}
            if arguments.device == "cpu":
                shape |= {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000, "eos_token_id": 2}
            (Path(made) / "config.json").write_text(json.dumps(shape))
            kept, freed = (measure(Path(made), keep, arguments) for keep in (True, False))
        same = sum(a == b for a, b in zip(kept.pop("answers"), freed.pop("answers"), strict=True))
        missed = same < len(LENGTHS) if arguments.device == "cuda" else same < 3
        missed |= any(one[key] for one in (kept, freed) for key in ("recompiles", "graph_misses"))
        failed |= missed
        report[name] = {"same_answers": same, "kept": kept, "freed": freed}
        print(name, json.dumps(report[name]), "MISSED" if missed else "", flush=True)
    if arguments.out:
        gpu = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
        arguments.out.write_text(json.dumps({"gpu": gpu, "models": report}, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
