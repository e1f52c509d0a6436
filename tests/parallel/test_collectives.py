"""Sums over ranks by the kernel: prepared at start, or given up loudly. Ranks are processes with shared
memory."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_on_ranks

from minisgl.parallel import collectives
from minisgl.parallel.collectives import RankSum
from minisgl.parallel.mesh import Ranks
from triton_kernels import all_reduce as kernel
from triton_kernels.all_reduce import AllReduceConfig, Regions, clear_region, region_bytes
from triton_kernels.rms_norm import add_rms_norm_reference

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="bench/tp_check.py checks it on GPUs")

CAPACITY = 4 * 4 * 48
"""Bytes: four rows of float32."""
EPS = 1e-5


class Memory:
    """What `regions.SharedMemory` is on GPUs."""

    def __init__(self, regions: Regions) -> None:
        self.regions = regions
        self.in_use = True

    def wait_until_idle(self) -> bool:
        return True


def shared_memory() -> torch.Tensor:
    memory = torch.zeros((2, region_bytes(CAPACITY, 2)), dtype=torch.uint8).share_memory_()
    for region in memory:
        clear_region(region)
    return memory


def add_up(ranks: Ranks, memory: torch.Tensor, norm: bool, broken: bool) -> dict[str, Any]:
    """Sums of 1, 4 and 5 rows, the last too many for the kernel; what was said, and the kernel's calls."""
    addresses = torch.tensor([region.data_ptr() for region in memory])
    ranks = replace(ranks, memory=Memory(Regions(addresses, ranks.rank, CAPACITY)))  # pyright: ignore[reportArgumentType] (a stand-in)
    calls: list[int] = []
    launch = kernel._launch

    def note(x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        calls.append(x.shape[0])
        launch(x, *args, **kwargs)
        if broken and ranks.rank == 1:
            args[3].zero_()  # the sum

    kernel._launch = note
    said: list[logging.LogRecord] = []
    collectives.logger.addFilter(lambda record: said.append(record) or True)
    rank_sum = RankSum(ranks)
    rank_sum.prepare(ranks, 48, torch.float32, eps=EPS if norm else None)
    prepared, results, ours = list(calls), [], ranks.sums_use_kernel
    calls.clear()
    for num_rows in (1, 4, 5):
        x = torch.full((num_rows, 48), ranks.rank + 1.0)
        residual, weight = torch.arange(48.0).expand(num_rows, 48).contiguous(), torch.linspace(1, 2, 48)
        y, total = rank_sum.norm(x, residual, weight, EPS) if norm else (x, rank_sum(x))
        results.append((y.numpy(), total.numpy()))
    return {"prepared": prepared, "calls": calls, "said": len(said), "ours": ours, "results": results}


@pytest.mark.parametrize(("norm", "broken"), [(True, False), (False, False), (True, True)])
def test_sums_that_the_kernel_can_not_do_go_another_way(norm: bool, broken: bool, tmp_path: Path) -> None:
    seen = run_on_ranks(2, tmp_path, add_up, shared_memory(), norm, broken)
    for one in seen:
        assert one["prepared"] == [1], "the default is the same for so few bytes"
        assert one["calls"] == ([] if broken else [1, 4])
        assert (one["said"], one["ours"]) == (broken, not broken)
        for num_rows, (y, total) in zip((1, 4, 5), one["results"], strict=True):
            expected = torch.full((num_rows, 48), 3.0)
            if norm:
                residual = torch.arange(48.0).expand(num_rows, 48)
                normed, expected = add_rms_norm_reference(expected, residual, torch.linspace(1, 2, 48), EPS)
                torch.testing.assert_close(torch.from_numpy(y), normed)
            torch.testing.assert_close(torch.from_numpy(total), expected)


def test_ranks_whose_tables_differ_leave_sums_to_the_process_group(tmp_path: Path) -> None:
    def add_up_by_unlike_tables(ranks: Ranks, memory: torch.Tensor) -> dict[str, Any]:
        collectives.all_reduce_config = lambda x, num_ranks: AllReduceConfig(1 + ranks.rank, 4)
        return add_up(ranks, memory, True, False)

    for seen in run_on_ranks(2, tmp_path, add_up_by_unlike_tables, shared_memory()):
        assert (seen["prepared"], seen["calls"], seen["said"], seen["ours"]) == ([], [], 1, False)
