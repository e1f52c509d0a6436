"""Is the engine right on this GPU? Golden prompts against transformers, then a server under load.

    python bench/gpu_check.py --model FOLDER --out check.json

1. Logits of our decoder (bfloat16, Triton kernels) on the golden prompts and answers, against transformers
   in float32 on the same weights; transformers' own bfloat16 error beside it.
2. Tokens that the engine generates (graphs, overlap), all prompts at once, and prompt by prompt with decodes
   that go with prompts wherever they may: how far each is below the best one in float32.
   Both bars: at most twice as far off as transformers in bfloat16 is.
3. Prefill by replayed graph against the same prefill uncaptured, in every bucket, with NaN wherever nothing
   belongs: keys of the last layer, which depend on all before, and how far a chosen token is below the best.
   In a graph with room for decodes a row of one token decodes. Bars for what bfloat16 rounds away when matrix
   products have other shapes: 0.05 of a row, 0.2 deviations.
4. `minisgl serve` over loopback: golden prompts twice (the second time from the prefix cache), then a mixed
   load of every batch size; afterwards no recompilation and no missing graph.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
import unittest.mock
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
import transformers

from minisgl.config import EngineConfig
from minisgl.engine.engine import Engine
from minisgl.engine.graphs.buckets import PrefillBucket
from minisgl.engine.start.build import build_engine
from minisgl.engine.step.inputs import NO_DECODES, Decodes, build_prefill
from minisgl.engine.step.steps import prefill_step
from minisgl.scheduler.plan import Chunk, PageUpdate, StepPlan
from minisgl.verification.compare import gap, relative_error
from minisgl.verification.ours import generate, our_logits

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "data" / "smollm2_golden.json"


def generate_joined(engine: Engine, prompts: list[list[int]], max_tokens: int) -> tuple[list[list[int]], int]:
    """The same where decodes go with prompts wherever they may; and how many steps did."""
    engine.flush_prefix_cache()
    decode = engine.runner.decode_graphs
    assert decode is not None, "decode was not recorded"
    with unittest.mock.patch.object(decode, "duration_us", return_value=1e9):
        answers = generate(engine, prompts, max_tokens, steps_between=2)
    return answers, sum(record.graphs.joined for record in engine.timeline.records)


@torch.inference_mode()
def check_prefill_graphs(engine: Engine) -> dict[str, Any]:
    """Part 3: each bucket with one row that nearly fills it, and with three rows behind prefixes."""
    graphs = engine.runner.prefill_graphs
    assert graphs is not None, "prefill was not recorded"
    generator = np.random.default_rng(0)
    worst_keys = worst_gap = 0.0
    num_tokens = num_other_tokens = 0
    for bucket in graphs.table.sizes:
        for lengths, prefix in (((bucket.tokens - 3,), 0), ((1, bucket.tokens // 3, bucket.tokens // 4), 23)):
            prompts = [generator.integers(1000, 40000, prefix + n).astype("<i4") for n in lengths]
            ids, keys, logits = _prefill(engine, prompts, prefix, None)
            replayed_ids, replayed_keys, _ = _prefill(engine, prompts, prefix, bucket)
            assert torch.equal(keys.isnan(), replayed_keys.isnan()), f"{bucket} wrote other slots"
            for ours, reference in zip(replayed_keys, keys, strict=True):
                worst_keys = max(worst_keys, relative_error(ours.nan_to_num(), reference.nan_to_num()))
            below = gap(logits, logits.max(1).values, replayed_ids.long())
            worst_gap = max(worst_gap, below / float(logits.std()))
            num_tokens += len(ids)
            num_other_tokens += int((ids != replayed_ids).sum())
    return {
        "buckets": len(graphs.table.sizes),
        "keys_relative_error": worst_keys,
        "worst_gap_of_a_chosen_token_in_deviations": worst_gap,
        "other_tokens": f"{num_other_tokens} of {num_tokens}",
        "ok": worst_keys < 0.05 and worst_gap < 0.2,
    }


def _prefill(
    engine: Engine, prompts: list[np.ndarray], prefix: int, bucket: PrefillBucket | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Feed what follows the prefixes, uncaptured or in a bucket: tokens, each row's keys, logits.

    The logits are those of the last uncaptured step, here that of the prefixes if there is a bucket.
    """
    runner = engine.runner
    per_row = -(-max(map(len, prompts)) // engine.config.page_size)
    last_page = len(prompts) * per_row
    for attention in runner.model.attention_layers():
        attention.k_cache[: last_page + 2].fill_(float("nan"))  # the scratch page and one behind are, too
        attention.v_cache[: last_page + 2].fill_(float("nan"))
    updates = tuple(
        PageUpdate(row, 0, ids.tobytes())
        for row, ids in enumerate(np.arange(1, 1 + last_page, dtype="<i4").reshape(-1, per_row))
    )
    runner.collect(runner.launch(StepPlan(0, (), updates, (), (), ())))
    seen: list[torch.Tensor] = []
    sample = runner.rows.sample

    def sample_and_keep(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(logits.float())
        return sample(logits, *rest)

    def feed(begin: int, end: int | None, into: PrefillBucket | None) -> torch.Tensor:
        chunks = tuple(
            Chunk(row, begin, prompt[begin:end].tobytes(), end is None) for row, prompt in enumerate(prompts)
        )
        if into is not None:
            assert runner.prefill_graphs is not None
            decodes = NO_DECODES
            if into.decodes and chunks[0].num_new_tokens == 1:
                runner.rows.last_token[0] = int(prompts[0][-1])
                decodes = Decodes(*np.array([[0], [begin + 1]], dtype=np.int32))
                chunks = chunks[1:]
            tokens = runner.prefill_graphs.run(chunks, decodes, into, runner.pages).token_ids
            places = [*range(len(decodes.rows)), *range(into.decodes, into.decodes + len(chunks))]
            return tokens[places].clone()
        batch = build_prefill(chunks, runner.pages, runner.stager)
        return prefill_step(runner.model, runner.rows, batch).token_ids

    runner.rows.sample = sample_and_keep
    try:
        if prefix:
            feed(0, prefix, None)
        token_ids = feed(prefix, None, bucket)
    finally:
        runner.rows.sample = sample
    cache = runner.model.attention_layers()[-1].k_cache
    keys = cache[1 : last_page + 1].unflatten(0, (len(prompts), per_row)).clone()
    assert cache[[0, last_page + 1]].isnan().all(), "a page that belongs to nobody was written"
    return token_ids, keys, seen[-1] if seen else torch.empty(0)


def check_numbers(folder: Path) -> dict[str, Any]:
    """Parts 1 to 3."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    cases = golden["cases"]
    config = EngineConfig(model=str(folder), max_running_requests=16, strict_compile=True)
    engine = build_engine(config, folder, lambda name, ms: print(f"  {name}: {ms:.0f} ms", flush=True))
    prompts = [case["prompt_ids"] for case in cases]
    answers = generate(engine, prompts, golden["max_new_tokens"])
    # Prompts of one token are all that some steps have beside their decodes.
    joined_prompts = prompts + [prompt[-1:] for prompt in prompts]
    joined, num_joined = generate_joined(engine, joined_prompts, golden["max_new_tokens"])
    golden_ids = [case["float32"]["ids"] for case in cases]
    load = transformers.AutoModelForCausalLM.from_pretrained
    precise: torch.nn.Module = load(folder, dtype=torch.float32, device_map="cuda").eval()
    coarse: torch.nn.Module = load(folder, dtype=torch.bfloat16, device_map="cuda").eval()
    worst = worst_peer = worst_gap = worst_peer_gap = 0.0
    same_tokens = 0
    for prompt, answer in zip(prompts + joined_prompts, answers + joined, strict=True):
        tokens = prompt + answer
        ids = torch.tensor([tokens], device="cuda")
        with torch.inference_mode():
            reference = precise(ids).logits[0]
            peer = coarse(ids).logits[0]
        ours = our_logits(engine, tokens)
        worst = max(worst, relative_error(ours, reference))
        worst_peer = max(worst_peer, relative_error(peer, reference))
        steps = reference[len(prompt) - 1 : -1]
        best = steps.max(1).values
        chosen = torch.tensor(answer, device="cuda")
        peer_chosen = peer[len(prompt) - 1 : -1].argmax(1)
        worst_gap = max(worst_gap, gap(steps, best, chosen))
        worst_peer_gap = max(worst_peer_gap, gap(steps, best, peer_chosen))
        same_tokens += answer in golden_ids
    engine.record_graphs()
    graphs = check_prefill_graphs(engine)
    status = engine.status(0)
    engine.close()
    return {
        "logits_relative_error": worst,
        "logits_relative_error_of_transformers_bf16": worst_peer,
        "worst_gap_of_a_chosen_token": worst_gap,
        "worst_gap_of_transformers_bf16": worst_peer_gap,
        "answers_equal_to_float32_golden": f"{same_tokens} of {2 * len(cases)}",
        "steps_with_joined_decodes": num_joined,
        "prefill_graphs": graphs,
        "num_recompiles": status.num_recompiles,
        "num_graph_misses": status.num_graph_misses,
        "ok": graphs["ok"]
        and num_joined > 0
        and worst <= 2 * worst_peer
        and worst_gap <= 2 * max(worst_peer_gap, 0.05)
        and status.num_recompiles == status.num_graph_misses == 0,
    }


async def drive(url: str, model: str) -> dict[str, Any]:
    """Part 4, against a running server."""
    cases = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def complete(prompt: Any, **fields: Any) -> dict[str, Any]:
            body = {"model": model, "prompt": prompt, **fields}
            async with session.post(url + "/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                return await response.json()

        cached = []
        for _ in range(2):
            greedy = [complete(case["prompt_ids"], temperature=0, max_tokens=64) for case in cases]
            answers = await asyncio.gather(*greedy)
            cached.append(sum(a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers))
        load = []
        for index in range(300):
            prompt = [100 + index % 50] * (1 + index * 7 % 900)
            load.append(complete(prompt, temperature=index % 3 / 2, max_tokens=2 + index % 120))
        await asyncio.gather(*load)
        # The engine's figures come with a heartbeat: wait for one that is younger than the load.
        engine = {"num_output_tokens": -1, "sequence": -1}
        last_sequence = None
        while last_sequence is None or engine["sequence"] < last_sequence + 2:
            async with session.get(url + "/health") as response:
                engine = (await response.json())["engine"]
            last_sequence = engine["sequence"] if last_sequence is None else last_sequence
            await asyncio.sleep(0.2)
    return {
        "cached_tokens_first_and_second_time": cached,
        "engine": engine,
        "ok": cached[1] > 0 and engine["num_recompiles"] == 0 and engine["num_graph_misses"] == 0,
    }


def check_server(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "minisgl", "serve", "--model", str(folder), "--port", "0"]
    command += ["--max-running-requests", "128", "--served-model-name", "golden"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = None
        for line in process.stdout:
            print("  " + line, end="", flush=True)
            if line.startswith("curl "):
                address = re.search(r"http://[^/ ]+", line)
                break
        assert address is not None, "the server did not start"
        result = asyncio.run(drive(address[0], "golden"))
    finally:
        process.terminate()
        exit_code = process.wait(60)
    return result | {"exit_code": exit_code, "ok": result["ok"] and exit_code == 0}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the built-in model")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "command": "python bench/gpu_check.py",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numbers": check_numbers(args.model),
    }
    print(json.dumps(report, indent=1), flush=True)
    report["server"] = check_server(args.model)
    print(json.dumps(report["server"], indent=1), flush=True)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if report["numbers"]["ok"] and report["server"]["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
