"""Does the KV cache's bookkeeping slow down as the tree grows? Times it at 1k, 10k and 100k pages.

    python bench/kvcache.py [--page-size 16] [--prompt-tokens 2048] [--rounds 200]

The tree contains prompts that share a system prompt. The pool is full, so every page of a new request is
evicted from the tree. The columns should be equal: no operation may cost more in a larger tree. "grow,
decode" is the call of a steady decode step.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from minisgl.kvcache.manager import KVCacheManager

TREE_PAGES = (1_000, 10_000, 100_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    results = [
        measure(pages, options.page_size, options.prompt_tokens, options.rounds) for pages in TREE_PAGES
    ]
    print(f"median µs (operations/s), prompts of {options.prompt_tokens} tokens, page {options.page_size}")
    print(f"{'tree pages':<32}" + "".join(f"{pages:>22,}" for pages in TREE_PAGES))
    for name in results[0]:
        cells = (f"{result[name] * 1e6:.1f} ({1 / result[name]:,.0f})" for result in results)
        print(f"{name:<32}" + "".join(f"{cell:>22}" for cell in cells))


def measure(tree_pages: int, page_size: int, prompt_tokens: int, rounds: int) -> dict[str, float]:
    """Median seconds of each operation with `tree_pages` pages in the tree and none free."""
    random = np.random.default_rng(0)
    system = random.integers(0, 50_000, prompt_tokens // 4, dtype=np.int32)

    def new_prompt() -> np.ndarray:
        own = random.integers(0, 50_000, prompt_tokens - len(system), dtype=np.int32)
        return np.concatenate([system, own])

    manager = KVCacheManager(num_pages=tree_pages + 1, page_size=page_size)
    prompts: list[np.ndarray] = []
    while not prompts or manager.num_free_pages > 0:
        prompts.append(new_prompt())
        lease = manager.admit(prompts[-1])
        if manager.grow(lease, prompt_tokens) is None:
            raise SystemExit(f"--prompt-tokens {prompt_tokens} is too long for {tree_pages} pages")
        manager.release(lease, prompts[-1], prompt_tokens)
    manager.check_invariants()

    seconds: dict[str, list[float]] = {}

    def timed(name: str, operation: Callable[..., Any], *arguments: object) -> Any:
        start = time.perf_counter()
        result = operation(*arguments)
        seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result

    half = prompt_tokens // 2
    known = prompts[-1]  # used in every round, so it stays in the tree
    gc.collect()
    for _ in range(rounds):
        timed("match_length, all cached", manager.match_length, known)
        lease = timed("admit, all cached", manager.admit, known)
        timed("release, nothing new", manager.release, lease, known, lease.num_cached_tokens)

        fresh = new_prompt()
        lease = timed("admit, system prompt cached", manager.admit, fresh)
        if manager.num_free_pages:
            raise SystemExit("pages are free, so this would not measure eviction")
        timed("grow, evicts 1/4 of a prompt", manager.grow, lease, half)
        timed("commit, first chunk", manager.commit, lease, fresh, half)
        manager.grow(lease, prompt_tokens)
        timed("commit, next chunk", manager.commit, lease, fresh, prompt_tokens)
        timed("grow, decode, no page needed", manager.grow, lease, prompt_tokens)
        timed("grow, decode, evicts 1 page", manager.grow, lease, prompt_tokens + page_size)
        answered = np.concatenate([fresh, fresh[:page_size]])
        timed("release, one page new", manager.release, lease, answered, len(answered))
    manager.check_invariants()
    seconds["check_invariants"] = []
    for _ in range(3):
        timed("check_invariants", manager.check_invariants)
    return {name: statistics.median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    main()
