"""Do several ranks compute what the model says, how fast, and does the loss of one end them?

    python bench/tp_check.py --tp 2 4       # GPUs: four layers of a 70B's shape, random weights
    python bench/tp_check.py --tp 1 2       # ... and one rank as well
    python bench/tp_check.py --device cpu   # a small model

Every rank but 0, which has made the checkpoint, says how long it loaded and how much host memory it has had
at most (bar: 1.3 times its share of the weights where that is 4 GB or more; beside less, the libraries' own
counts too much). Log probabilities of prompts' tokens are compared with transformers in float32 (bar: at most
twice as far from it as transformers in bfloat16). What decode steps generate greedily is fed again as a
prompt, by which no token may be less likely than the likeliest by more than twice that: both may be off.
Then milliseconds for a decode step at each batch. At last a rank is killed in the middle of a step (bar: an
error within 5 s, no process left, the GPUs of all ranks but 0 as free as before). Exit code 1 where a bar
is missed.
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
from minisgl.engine.engine import Engine
from minisgl.engine.start.build import build_engine
from minisgl.errors import EngineDeadError
from minisgl.ipc.messages import AddRequest
from minisgl.request import RequestOutput, SamplingParams
from minisgl.weights.sources import default_cache_dir

MOST_TIMES_AS_FAR = 2.0
LIMIT_S = 5.0
MOST_HOST_MEMORY = 1.3
JUDGED_BYTES = 4e9
MOST_BYTES_LEFT = 1 << 30
NUM_STEPS = 64
NUM_DECODED = 24
PROMPT_LENGTHS = (17, 64, 200)
MAX_TOKENS = 512
SHAPES = {"cuda": (8192, 28672, 64, 8, 128256), "cpu": (256, 512, 8, 2, 1001)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, nargs="+", default=[2])
    parser.add_argument("--device", choices=sorted(SHAPES), default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    fine = True
    with tempfile.TemporaryDirectory() as folder:
        exact, allowed = save_model(Path(folder), args.device, args.layers)
        print(f"transformers in bfloat16: {allowed / MOST_TIMES_AS_FAR:.4f} from float32 at most", flush=True)
        config = EngineConfig(
            device=args.device,
            dtype="bfloat16",
            max_context_tokens=MAX_TOKENS,
            max_running_requests=max(args.batches),
            max_graph_tokens=256 if args.device == "cuda" else None,  # as few as the prompts need
            memory_fraction=0.5,
        )
        config = with_cache_dir(config, default_cache_dir())
        for tp in args.tp:
            free_before = free_bytes_of_others(args.device, tp)
            began = time.perf_counter()
            engine = build_engine(replace(config, tp=tp), Path(folder), lambda name, duration_ms: None)
            print(f"tp {tp}: started in {time.perf_counter() - began:.1f} s", flush=True)
            try:
                engine.record_graphs()
                fine &= print_starts(tp, engine)
                difference = float(np.abs(prompt_logprobs(engine) - exact).max())
                fine &= difference <= allowed
                print(f"tp {tp}: log probabilities are {difference:.4f} from float32 at most", flush=True)
                for batch in args.batches:
                    loss = largest_loss(engine, batch)
                    fine &= loss <= 2 * allowed
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
    return 0 if fine else 1


def print_starts(tp: int, engine: Engine) -> bool:
    """Whether no other rank has had much more than its share in host memory."""
    fine = True
    for start in engine.wait_for_other_ranks():
        ratio = start.peak_host_bytes / start.weights_bytes
        fine &= ratio <= MOST_HOST_MEMORY or start.weights_bytes < JUDGED_BYTES
        print(
            f"tp {tp}: rank {start.rank}: {start.weights_bytes / 1e9:.2f} GB of weights in "
            f"{start.load_ms / 1e3:.1f} s, host memory at most {start.peak_host_bytes / 1e9:.2f} GB, "
            f"{ratio:.2f} times that"
        )
    return fine


def save_model(folder: Path, device: str, num_layers: int) -> tuple[np.ndarray, float]:
    """Write a checkpoint whose weights make logits spread over some units.

    Returns:
        The log probabilities of the prompts' tokens in float32, and how far from them others may be.
    """
    hidden_size, width, heads, kv_heads, vocab_size = SHAPES[device]
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=width,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab_size,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=hidden_size**-0.5,
    )
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    in_bfloat16 = transformers_logprobs(model)
    exact = transformers_logprobs(model.float())
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return exact, MOST_TIMES_AS_FAR * float(np.abs(in_bfloat16 - exact).max())


@torch.inference_mode()
def transformers_logprobs(model: LlamaForCausalLM) -> np.ndarray:
    """As `prompt_logprobs`."""
    found = []
    for request_id, num_tokens in enumerate(PROMPT_LENGTHS):
        ids = torch.tensor(prompt_of(request_id, num_tokens), dtype=torch.int64, device=model.device)
        logprobs = model(ids[None]).logits[0, :-1].float().log_softmax(-1)
        found.append(logprobs.gather(1, ids[1:, None])[:, 0].cpu().numpy())
    return np.concatenate(found)


def add(engine: Engine, request_id: int, num_tokens: int, params: SamplingParams) -> None:
    prompt_ids = prompt_of(request_id, num_tokens).tobytes()
    engine.add(AddRequest(request_id=request_id, prompt_ids=prompt_ids, params=params))


def prompt_of(request_id: int, num_tokens: int) -> np.ndarray:
    return (np.arange(num_tokens, dtype="<i4") * 31 + 7 * request_id) % 1000


def prompt_logprobs(engine: Engine) -> np.ndarray:
    """Of all tokens of three prompts but the first."""
    for request_id, num_tokens in enumerate(PROMPT_LENGTHS):
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
        add(engine, request_id, num_tokens, params)
    found: dict[int, list[float]] = {}
    for output in all_outputs(engine):
        if output.prompt_logprobs is not None:
            found[output.request_id] = [one.logprob for one in output.prompt_logprobs.unpack()]
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
        entries = output.prompt_logprobs.unpack() if output.prompt_logprobs is not None else []
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
