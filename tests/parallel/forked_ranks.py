"""Ranks for tests as forks of the test's process: no rank has to import torch again."""

import multiprocessing
import queue
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from minisgl.parallel.mesh import join, open_store

LIMIT_S = 120.0
"""For machines that are busy with other things."""


def run_on_ranks(size: int, tmp: Path, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(ranks, *args)` on `size` ranks that met over gloo; the results, by rank, come pickled."""

    def join_and_run(rank: int) -> Any:
        ranks = join(rank, size, open_store(str(store), size), torch.device("cpu"))
        try:
            return function(ranks, *args)
        finally:
            ranks.leave()

    store = tmp / f"store-{len(list(tmp.glob('store-*')))}"
    return run_forked([lambda rank=rank: join_and_run(rank) for rank in range(size)])


def run_forked(functions: list[Callable[[], Any]]) -> list[Any]:
    """Call each function in a process of its own, all at once; their results."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()

    def run(index: int) -> None:
        torch.set_num_threads(1)  # the threads of the process that was forked are not here
        try:
            answers.put((index, True, functions[index]()))
        except BaseException:
            answers.put((index, False, traceback.format_exc()))

    processes = [context.Process(target=run, args=(index,)) for index in range(len(functions))]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    try:
        while len(results) < len(functions):
            index, fine, result = answers.get(timeout=LIMIT_S)
            assert fine, f"process {index}:\n{result}"
            results[index] = result
    except queue.Empty:
        raise AssertionError(f"only {sorted(results)} of {len(functions)} answered") from None
    finally:
        for process in processes:
            process.join(5 if len(results) == len(functions) else 0)
            process.kill()
            process.join()
    return [results[index] for index in range(len(functions))]
