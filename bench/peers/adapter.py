"""The half of a peer measurement that runs in the peer's own environment; needs only the standard library.

    python bench/peers/peer_NAME.py RESULT.json < order.json

Promise: the same prompts, lengths and sampling as `minisgl bench offline`; a short warm-up is not timed;
every round has prompts of its own, of equal lengths, so that no engine answers from the cache of
the round before.
"""

import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

WARM_UP_REQUESTS = 8
WARM_UP_TOKENS = 4


class Order(NamedTuple):
    """What the driver (bench/peers/offline.py) asks for."""

    model: str  # a folder
    dummy_weights: bool
    max_context_tokens: int
    prompts: list[list[int]]
    max_tokens: list[int]
    max_token_id: int
    temperature: float
    rounds: int
    options: dict[str, Any]  # for the engine's constructor


Generate = Callable[[list[list[int]], list[int]], list[int]]
"""Prompts and the wanted output lengths, end-of-sequence ignored -> the lengths that came."""


def run(package: str, start: Callable[[Order], Generate]) -> None:
    """Carry out the order on stdin with the engine that `start` makes; argv names the file of the result."""
    order = Order(**json.load(sys.stdin))
    begin = time.perf_counter()
    generate = start(order)
    start_s = time.perf_counter() - begin
    few = order.prompts[:WARM_UP_REQUESTS]
    generate(shifted(few, order.rounds, order.max_token_id), [WARM_UP_TOKENS] * len(few))
    elapsed_s, output_lengths = [], []
    for number in range(order.rounds):
        prompts = shifted(order.prompts, number, order.max_token_id)
        begin = time.perf_counter()
        output_lengths = generate(prompts, order.max_tokens)
        elapsed_s.append(time.perf_counter() - begin)
    result = {
        "start_s": start_s,
        "elapsed_s": elapsed_s,
        "output_lengths": output_lengths,
        "versions": {name: version_of(name) for name in (package, "torch", "triton")},
        "gpu": gpu_name(),
    }
    Path(sys.argv[1]).write_text(json.dumps(result), encoding="utf-8")


def shifted(prompts: list[list[int]], by: int, max_token_id: int) -> list[list[int]]:
    """Other prompts of the same lengths; `by` 0 gives the prompts themselves."""
    return [[(token + by) % (max_token_id + 1) for token in prompt] for prompt in prompts]


def version_of(package: str) -> str | None:
    """None where it is not installed under that name."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def gpu_name() -> str | None:
    """As torch knows it."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
