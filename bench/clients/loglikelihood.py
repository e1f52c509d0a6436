"""Log-likelihoods as lm-eval asks for them, from a running server, beside transformers' on the same model.

    minisgl serve --dtype float32 &
    python bench/clients/loglikelihood.py --model-folder ~/.cache/minisgl/models/smollm2-135m

Each item is a context and a continuation: lines of text, cut in two. Its token ids go to /v1/completions with
echo, logprobs and one token to generate, several items in a call, as lm-eval's local-completions does; what
comes back for the continuation's tokens is summed up. Exit code 1 when an item differs by more than the
tolerance, or in whether the continuation is what greedy decoding gives (unless two tokens are that close).
"""

import argparse
import json
import sys
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
BATCH = 8
GREEDY = 6
"""Every so many items, the continuation is the model's own."""


class Item(NamedTuple):
    """Token ids."""

    context: list[int]
    continuation: list[int]


class Score(NamedTuple):
    """What an item gets."""

    logprob: float
    is_greedy: bool
    closest: float  # the smallest lead of a likeliest token over the second, where known


def make_items(file: Path, tokenizer: Any, model: Any, count: int) -> list[Item]:
    """From the longest lines of a text; some continuations are replaced by the model's own."""
    lines = sorted(file.read_text(encoding="utf-8").splitlines(), key=len, reverse=True)[:count]
    if len(lines) < count:
        sys.exit(f"{file} has {len(lines)} lines, {count} items need as many")
    items = []
    for index, line in enumerate(lines):
        words = line.split()
        half = max(1, len(words) // 2)
        context = tokenizer(" ".join(words[:half])).input_ids or [tokenizer.bos_token_id]
        continuation = tokenizer(" " + " ".join(words[half:]), add_special_tokens=False).input_ids[:40]
        if index % GREEDY == 0:
            own = model.generate(torch.tensor([context]), max_new_tokens=5, do_sample=False)
            continuation = own[0, len(context) :].tolist()
        items.append(Item(context, continuation))
    return items


def by_transformers(model: Any, item: Item) -> Score:
    """In one pass over context and continuation."""
    tokens = item.context + item.continuation
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, len(item.context) - 1 : -1]
    logprobs = logits.double().log_softmax(1)
    wanted = torch.tensor(item.continuation)
    top = logprobs.topk(2, 1).values
    return Score(
        float(logprobs.gather(1, wanted[:, None]).sum()),
        bool((logprobs.argmax(1) == wanted).all()),
        float((top[:, 0] - top[:, 1]).min()),
    )


def by_server(url: str, name: str, items: list[Item]) -> list[Score]:
    """One call; the last entry of each choice is the generated token and does not count."""
    body = {
        "model": name,
        "prompt": [item.context + item.continuation for item in items],
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": 1,
        "echo": True,
        "seed": 1234,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        choices = json.load(answer)["choices"]
    scores = []
    for item, choice in zip(items, sorted(choices, key=lambda choice: choice["index"]), strict=True):
        first = len(item.context)
        logprobs = choice["logprobs"]["token_logprobs"][first:-1]
        tops = choice["logprobs"]["top_logprobs"][first:-1]
        assert len(logprobs) == len(item.continuation)
        greedy = all(logprob == max(top.values()) for logprob, top in zip(logprobs, tops, strict=True))
        scores.append(Score(sum(logprobs), greedy, 0.0))
    return scores


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--name", default="smollm2-135m", help="the served model's name")
    parser.add_argument("--model-folder", type=Path, required=True, help="the same model, for transformers")
    parser.add_argument("--items", type=int, default=50)
    parser.add_argument("--text", type=Path, default=ROOT / "docs" / "operations.md")
    parser.add_argument("--tolerance", type=float, default=5e-3, help="of a sum of log probabilities")
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model_folder)
    model = AutoModelForCausalLM.from_pretrained(arguments.model_folder, dtype=torch.float32).eval()
    items = make_items(arguments.text, tokenizer, model, arguments.items)
    served: list[Score] = []
    for first in range(0, len(items), BATCH):
        served += by_server(arguments.url, arguments.name, items[first : first + BATCH])
    truth = [by_transformers(model, item) for item in items]

    errors = [abs(ours.logprob - true.logprob) for ours, true in zip(served, truth, strict=True)]
    odd = [
        index
        for index, (ours, true) in enumerate(zip(served, truth, strict=True))
        if ours.is_greedy != true.is_greedy and true.closest > arguments.tolerance
    ]
    num_tokens = sum(len(item.continuation) for item in items)
    print(
        f"{len(items)} items, {num_tokens} tokens, log-likelihoods from {min(s.logprob for s in truth):.1f} "
        f"to {max(s.logprob for s in truth):.1f}, {sum(s.is_greedy for s in truth)} greedy"
    )
    print(f"largest difference {max(errors):.2g}, mean {sum(errors) / len(errors):.2g}")
    print(f"greedy or not: {len(odd)} items differ {odd or ''}")
    return int(max(errors) > arguments.tolerance or bool(odd))


if __name__ == "__main__":
    sys.exit(main())
