"""The sum over ranks: each rank a process here, the regions memory that all of them share."""

import pytest
import torch
from forked_ranks import run_forked

from triton_kernels import all_reduce as kernel
from triton_kernels.all_reduce import (
    AllReduceConfig,
    Regions,
    all_reduce,
    all_reduce_norm,
    all_reduce_norm_reference,
    all_reduce_reference,
    clear_region,
    default_all_reduce_config,
    region_bytes,
    release_flag,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="bench/all_reduce.py checks it on GPUs")

EPS = 1e-5
CAPACITY = 16 << 10
NUM_PROGRAMS = 2
SHAPES = ((1, 48), (2, 60), (0, 48), (5, 12), (3, 50))
"""One row, a row each, none, more than programs, a width that two shots can't share out among three."""


def shared_regions(num_ranks: int) -> tuple[torch.Tensor, list[Regions]]:
    """Memory that processes forked from now on have in common."""
    memory = torch.zeros((num_ranks, region_bytes(CAPACITY, num_ranks)), dtype=torch.uint8).share_memory_()
    for region in memory:
        clear_region(region)
    addresses = torch.tensor([region.data_ptr() for region in memory])
    return memory, [Regions(addresses, rank, CAPACITY) for rank in range(num_ranks)]


def parts_of(call: int, num_ranks: int, dtype: torch.dtype) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(call)
    shape = SHAPES[call % len(SHAPES)]
    return [torch.randn(shape, generator=rng).to(dtype) for _ in range(num_ranks)]


def residual_and_weight(call: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(1000 + call)
    num_rows, width = SHAPES[call % len(SHAPES)]
    return torch.randn((num_rows, width), generator=rng).to(dtype), torch.randn(width, generator=rng).to(
        dtype
    )


def calls_of(regions: Regions, num_calls: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    """What a rank gets from calls of both kinds, in one shot and in two, one after the other."""
    kernel.MAX_PROGRAMS = NUM_PROGRAMS
    results = []
    for call in range(num_calls):
        config = AllReduceConfig(shots=1 + call // 2 % 2, num_warps=4)
        x = parts_of(call, len(regions.addresses), dtype)[regions.rank]
        if call % 2:
            results.append(all_reduce_norm(x, *residual_and_weight(call, dtype), EPS, regions, config))
        else:
            all_reduce(x, regions, config)
            results.append((x,))
    return [tuple(tensor.numpy() for tensor in result) for result in results]


@pytest.mark.parametrize(("num_ranks", "dtype"), [(2, torch.float16), (3, torch.float32)])
def test_every_rank_gets_the_sum_whatever_came_before(num_ranks: int, dtype: torch.dtype) -> None:
    memory, regions = shared_regions(num_ranks)
    num_calls = 4 * len(SHAPES)
    results = run_forked([lambda own=own: calls_of(own, num_calls, dtype) for own in regions])
    tolerance = 2e-3 if dtype is torch.float16 else 1e-5
    for call in range(num_calls):
        parts = parts_of(call, num_ranks, dtype)
        expected = (all_reduce_reference(parts),)
        if call % 2:
            expected = all_reduce_norm_reference(parts, *residual_and_weight(call, dtype), EPS)
        for rank in range(num_ranks):
            for got, first, wanted in zip(results[rank][call], results[0][call], expected, strict=True):
                torch.testing.assert_close(torch.from_numpy(got), wanted, atol=tolerance, rtol=tolerance)
                assert (got == first).all(), "ranks must agree to the bit"
    left = [torch.zeros_like(region) for region in memory]
    for region in left:
        clear_region(region)
    places = region_bytes(0, num_ranks)
    assert all((one[places:] == other[places:]).all() for one, other in zip(memory, left, strict=True))


def test_a_released_rank_waits_for_nobody() -> None:
    memory, regions = shared_regions(2)
    release_flag(memory[0]).fill_(1)
    for shots in (1, 2, 1):
        all_reduce(torch.ones((3, 48)), regions[0], AllReduceConfig(shots, 4))


@pytest.mark.parametrize(
    ("num_ranks", "num_rows", "width", "shots"),
    [
        (2, 1, 8192, 1),
        (2, 512, 8192, 1),
        (4, 16, 4096, 1),
        (4, 16, 5120, 1),
        (4, 64, 4096, 2),
        (4, 1, 8192, 2),
    ],
)
def test_untuned_sums_go_the_way_that_was_faster_on_h200s(
    num_ranks: int, num_rows: int, width: int, shots: int
) -> None:
    assert default_all_reduce_config(2 * num_rows * width, width, num_ranks).shots == shots
