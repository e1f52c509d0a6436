"""Do several ranks give what one gives, how fast, and does the loss of one end them?

    python bench/tp_check.py --tp 2 4       # GPUs: four layers of an 8B's shape, random weights
    python bench/tp_check.py --device cpu   # a small model

Every rank but 0, which has made the checkpoint, says how long it loaded and how much host memory it has had
at most (bar: 1.3 times its share of the weights where that is 4 GB or more; beside less, the libraries' own
counts too much). What decode steps generate greedily is fed again as a prompt, by which no token may be less
likely than the likeliest by more than 0.2: twice the last bar, for both may be off. Then milliseconds for a
decode step at each batch. A rank is killed in the middle of a step (bar: an error within 5 s, no process
left, the GPUs of all ranks but 0 as free as before). At last one rank alone: the others' log probabilities of
prompts' tokens against its own (bar: 0.1 at most, bfloat16). Exit code 1 where a bar is missed.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from minisgl.config import EngineConfig, with_cache_dir
from minisgl.engine.build import build_engine
from minisgl.engine.engine import Engine
from minisgl.errors import EngineDeadError
from minisgl.messages import AddRequest
from minisgl.request import RequestOutput, SamplingParams
from minisgl.weights.sources import default_cache_dir

LARGEST_DIFFERENCE = 0.1
LARGEST_LOSS = 2 * LARGEST_DIFFERENCE
LIMIT_S = 5.0
MOST_HOST_MEMORY = 1.3
JUDGED_BYTES = 4e9
MOST_BYTES_LEFT = 1 << 30
NUM_STEPS = 64
NUM_DECODED = 24
SHAPES = {"cuda": (4096, 14336, 32, 8, 128256), "cpu": (256, 512, 8, 2, 1001)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, nargs="+", default=[2])
    parser.add_argument("--device", choices=sorted(SHAPES), default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--layers", type=int, default=4, help="16 and more for the bar of host memory")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), args.device, args.layers)
        config = EngineConfig(
            device=args.device,
            dtype="bfloat16",
            max_context_tokens=512,
            max_running_requests=max(args.batches),
            memory_fraction=0.5,
        )
        config = with_cache_dir(config, default_cache_dir())
        fine = True
        logprobs: dict[int, np.ndarray] = {}
        for tp in (*args.tp, 1):
            free_before = free_bytes_of_others(args.device, tp)
            began = time.perf_counter()
            engine = build_engine(replace(config, tp=tp), Path(folder), lambda name, duration_ms: None)
            print(f"tp {tp}: started in {time.perf_counter() - began:.1f} s", flush=True)
            try:
                engine.record_graphs()
                fine &= print_starts(tp, engine)
                logprobs[tp] = prompt_logprobs(engine)
                for batch in args.batches:
                    loss = largest_loss(engine, batch)
                    fine &= loss <= LARGEST_LOSS
                    step_ms = decode_step_ms(engine, batch)
                    print(
                        f"tp {tp}: batch {batch}: decoded tokens are less likely by {loss:.4f} at most; "
                        f"{step_ms:.3f} ms a step",
                        flush=True,
                    )
                if tp > 1:
                    fine &= lose_a_rank(engine, free_before)
            finally:
                engine.close()
        for tp in args.tp:
            difference = float(np.abs(logprobs[tp] - logprobs[1]).max())
            fine &= difference <= LARGEST_DIFFERENCE
            print(f"tp {tp}: log probabilities differ from one rank's by {difference:.4f} at most")
    return 0 if fine else 1


def print_starts(tp: int, engine: Engine) -> bool:
    """Whether no other rank has had much more than its share in host memory."""
    fine = True
    for start in engine.other_ranks():
        ratio = start.peak_host_bytes / start.weights_bytes
        fine &= ratio <= MOST_HOST_MEMORY or start.weights_bytes < JUDGED_BYTES
        print(
            f"tp {tp}: rank {start.rank}: {start.weights_bytes / 1e9:.2f} GB of weights in "
            f"{start.load_ms / 1e3:.1f} s, host memory at most {start.peak_host_bytes / 1e9:.2f} GB, "
            f"{ratio:.2f} times that"
        )
    return fine


def save_model(folder: Path, device: str, num_layers: int) -> None:
    """Weights that make logits spread over some units."""
    hidden_size, width, heads, kv_heads, vocab_size = SHAPES[device]
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=width,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab_size,
        max_position_embeddings=1024,
        initializer_range=hidden_size**-0.5,
    )
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()


def add(engine: Engine, request_id: int, num_tokens: int, params: SamplingParams) -> None:
    prompt_ids = prompt_of(request_id, num_tokens).tobytes()
    engine.add(AddRequest(request_id=request_id, prompt_ids=prompt_ids, params=params))


def prompt_of(request_id: int, num_tokens: int) -> np.ndarray:
    return (np.arange(num_tokens, dtype="<i4") * 31 + 7 * request_id) % 1000


def prompt_logprobs(engine: Engine) -> np.ndarray:
    """Of the tokens of three prompts."""
    for request_id, num_tokens in enumerate((17, 64, 200)):
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
        add(engine, request_id, num_tokens, params)
    found: dict[int, list[float]] = {}
    for output in all_outputs(engine):
        found.setdefault(output.request_id, []).extend(one.logprob for one in output.prompt_logprobs or ())
    return np.concatenate([found[request_id] for request_id in sorted(found)])


def all_outputs(engine: Engine) -> Iterator[RequestOutput]:
    """Of all requests, to their end."""
    while engine.has_work:
        yield from engine.step()


def largest_loss(engine: Engine, batch: int) -> float:
    """By how much a decoded token is less likely than the likeliest, by log probabilities of prompts."""
    engine.flush_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=NUM_DECODED, ignore_eos=True)
    texts = {row: prompt_of(row, 20 + row % 7) for row in range(batch)}
    starts = {row: len(text) for row, text in texts.items()}
    for row, text in texts.items():
        engine.add(AddRequest(request_id=row, prompt_ids=text.tobytes(), params=params))
    for output in all_outputs(engine):
        texts[output.request_id] = np.append(texts[output.request_id], output.token_ids).astype("<i4")
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    for row, text in texts.items():
        engine.add(AddRequest(request_id=row, prompt_ids=text.tobytes(), params=params))
    losses: dict[int, list[float]] = {row: [] for row in texts}
    for output in all_outputs(engine):
        entries = output.prompt_logprobs or ()
        losses[output.request_id] += [one.top_logprobs[0] - one.logprob for one in entries]
    # A prompt's first token has no log probability; of the generated ones, all have.
    return max(max(losses[row][start - 1 :]) for row, start in starts.items())


def decode_step_ms(engine: Engine, batch: int) -> float:
    """The median of a step in which `batch` rows decode."""
    for request_id in range(batch):
        params = SamplingParams(temperature=0.0, max_tokens=2 * NUM_STEPS, ignore_eos=True)
        add(engine, 100 + request_id, 64, params)
    ends = []
    while engine.has_work:
        outputs = engine.step()
        if len(outputs) == batch:
            ends.append(time.perf_counter())
    return 1e3 * float(np.median(np.diff(ends)[NUM_STEPS // 2 :]))


def free_bytes_of_others(device: str, tp: int) -> list[int]:
    """Free memory of the GPUs of all ranks but 0."""
    return [torch.cuda.mem_get_info(gpu)[0] for gpu in range(1, tp)] if device == "cuda" else []


def lose_a_rank(engine: Engine, free_before: list[int]) -> bool:
    """Whether the end of the last rank ends the engine in time and leaves no process and no memory taken."""
    assert engine._followers is not None
    pids = engine._followers.pids
    add(engine, 1, 64, SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True))
    for _ in range(8):
        engine.step()
    began = time.perf_counter()
    os.kill(pids[-1], signal.SIGKILL)
    try:
        while engine.has_work:
            engine.step()
        print("the loss of a rank was not noticed")
        return False
    except EngineDeadError as error:
        took_s = time.perf_counter() - began
        print(f"{error}: after {took_s:.2f} s")
    engine.close()
    left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    free = free_bytes_of_others(engine.config.device, engine.config.tp)
    taken = max((before - now for before, now in zip(free_before, free, strict=True)), default=0)
    print(f"processes left: {left or 'none'}; GPU memory left: {max(taken, 0) / 1e9:.2f} GB", flush=True)
    return took_s < LIMIT_S and not left and taken < MOST_BYTES_LEFT


if __name__ == "__main__":
    sys.exit(main())
