"""The launch configurations of decode attention, and the batch sizes at which they change.

They decide the last bits of results; see triton_kernels/paged_decode.py. R rows of the batch, H query
heads, K KV heads, G = H / K query heads per KV head, D head dim, S page size. Pools of e4m3 have their own.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from triton_kernels.e4m3 import FP8
from triton_kernels.gpu import Gpu, gpu_of
from triton_kernels.launch import ceil_div, next_power_of_2
from triton_kernels.linear_few import MAX_ROWS
from triton_kernels.tuning import tuned

TIERS = (64 * 128, 192 * 128, 320 * 128)
"""Sizes of a batch, as rows * K * (D rounded up to a power of two)."""
FP8_TIERS = (64 * 128, 320 * 128, 640 * 128)
"""The same over pools of e4m3: as many instructions for half of the bytes, so units stay shorter."""
FEW_TIERS = (8 * 128, 64 * 128, 64 * 128)
TWO_WARPS_TIERS = (8 * 128, 192 * 128, 320 * 128)
"""The same of some batches in which `warps_share` a unit."""
MIDDLE_UNITS = 512
"""Most rows * K of a middle batch (`is_middle`): rows of up to 1,500 tokens are one turn of its programs."""
MIDDLE_MULTIPROCESSORS = MIDDLE_UNITS // 4
EARLY_UNITS = 192
"""Most rows * K of other batches whose attention starts early (`starts_early`)."""
MAX_SPLITS = 64
FEW_ROWS = MAX_ROWS
"""Most rows of the smallest batches, which may have a configuration of their own. torch.compile specialises
for them anyway."""


class DecodeConfig(NamedTuple):
    """A launch configuration of paged_decode; the first three fields change the last bits of results."""

    block_n: int  # keys per tile; at least 16
    split_tokens: int  # of the smallest batches; a multiple of block_n and a power of two
    max_splits: int  # per row; at most MAX_SPLITS
    num_warps: int
    num_stages: int
    few_programs_per_sm: int  # up to the second of the batch's tiers
    some_programs_per_sm: int  # up to the third
    many_programs_per_sm: int


MIDDLE = DecodeConfig(64, 256, MAX_SPLITS, 2, 3, 4, 4, 4)
"""Of a middle batch: two warps share a unit, and splits have 1,024 tokens."""


class DecodeShape(NamedTuple):
    """The shape of a layer's decode attention: with the number of rows, it decides the configuration."""

    head_dim: int
    element_size: int  # bytes of an element of the queries
    group: int  # query heads of a KV head
    num_kv_heads: int
    is_fp8: bool  # the pools hold e4m3


class SharedUnits(NamedTuple):
    """How batches run whose units several warps share."""

    config: DecodeConfig
    tiers: tuple[int, int, int]
    """Instead of `TIERS`."""


def choose_config(
    x: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    config: DecodeConfig | None = None,
    kv_dtype: torch.dtype | None = None,
) -> tuple[DecodeConfig, list[int]]:
    """The configuration of a batch, and the most rows of each of its tiers but the last.

    Args:
        x: [R, ...], the batch's queries or what they are made of.
        config: the caller's choice; None = the tuned one, except for batches in which `warps_share` a unit
            and those that are `is_middle`.
        kv_dtype: of the pools; None = that of x.
    """
    is_fp8 = kv_dtype == FP8
    rows = tier_rows(num_kv_heads, head_dim, _tiers(is_fp8))
    if config is not None:
        return config, rows
    few_rows = True if x.shape[0] <= FEW_ROWS else False  # noqa: SIM210 (torch.compile takes no symbol here)
    group = num_heads // num_kv_heads
    shape = DecodeShape(head_dim, x.element_size(), group, num_kv_heads, is_fp8)
    config = DecodeConfig(*_default(x.device, *shape[:4], few_rows, is_fp8))
    shared = warps_share(shape)
    if few_rows and shared is not None:
        return config, tier_rows(num_kv_heads, head_dim, shared.tiers)
    # torch.compile must not see this bound, or it compiles anew there: `_launch_or_op` in paged_decode.py.
    may_branch = not few_rows and not torch.compiler.is_compiling()
    if may_branch and is_fp8 and is_middle(x.shape[0], shape, gpu_of(x.device)):
        return MIDDLE, rows
    exact, near = (head_dim, group), (num_kv_heads, page_size)
    op = "paged_decode_fp8" if is_fp8 else "paged_decode"
    return tuned(config, op, x.device, x.dtype, exact, near), rows


@torch.compiler.assume_constant_result
def _default(
    device: torch.device,
    head_dim: int,
    element_size: int,
    group: int,
    num_kv_heads: int,
    few_rows: bool,
    is_fp8: bool,
) -> tuple[int, ...]:
    shape = (head_dim, element_size, group, num_kv_heads, few_rows, is_fp8)
    return tuple(default_decode_config(*shape, gpu=gpu_of(device)))


def default_decode_config(
    head_dim: int,
    element_size: int,
    group: int = 4,
    num_kv_heads: int = 8,
    few_rows: bool = False,
    is_fp8: bool = False,
    *,
    gpu: Gpu,
) -> DecodeConfig:
    """The configuration if none is given or tuned, as measured on an H200.

    A program is one warp if the outputs of a KV head's query heads leave it enough registers.

    Args:
        element_size: bytes of an element of the queries.
        few_rows: for batches of up to FEW_ROWS.
        is_fp8: the pools hold e4m3, not what the queries are.
    """
    shared = warps_share(DecodeShape(head_dim, element_size, group, num_kv_heads, is_fp8))
    if few_rows and shared is not None:
        return decode_that_fits(shared.config, head_dim, element_size, group, gpu, is_fp8)
    num_warps = max(1, next_power_of_2(head_dim) * block_g(group) // 1024)
    block_n = min(32, 16 * num_warps)
    if element_size == 4:  # no tensor cores: a product's sums need more registers
        num_warps, block_n = 4, 16
    few = 24 // num_warps
    # Measured with heads of 64, 128 and 256, over e4m3 of 128: the fewer bytes a program has in flight, the
    # more programs.
    share = 128 * 16 / (next_power_of_2(head_dim) * block_n)
    if is_fp8 and element_size == 2:
        share *= 2
    # With eight query heads of 64 (gpt-oss), measured beyond FEW_ROWS.
    split_tokens = 256 if (head_dim, group, element_size, is_fp8) == (64, 8, 2, False) else 128
    config = DecodeConfig(
        block_n,
        split_tokens,
        max_splits=MAX_SPLITS,
        num_warps=num_warps,
        num_stages=4,
        few_programs_per_sm=few,
        some_programs_per_sm=min(few, max(2, int(5 * share))),
        many_programs_per_sm=min(few, max(2, int(4 * share))),
    )
    return decode_that_fits(config, head_dim, element_size, group, gpu, is_fp8)


def decode_that_fits(
    config: DecodeConfig, head_dim: int, element_size: int, group: int, gpu: Gpu, is_fp8: bool = False
) -> DecodeConfig:
    """The configuration with as many stages as fit this GPU; their number changes no result."""
    columns = element_size * next_power_of_2(head_dim)
    stage_bytes = 2 * config.block_n * (next_power_of_2(head_dim) if is_fp8 else columns)  # keys and values
    other_bytes = block_g(group) * (columns + element_size * config.block_n)  # queries and weights
    return config._replace(num_stages=gpu.stages_that_fit(config.num_stages, stage_bytes, other_bytes))


def warps_share(shape: DecodeShape) -> SharedUnits | None:
    """The configuration of batches of up to FEW_ROWS in which several warps share a unit; None = one does.

    The GPU has room for more warps than such a batch has units, and a unit of wide heads, of many query heads
    or of e4m3, whose products take longer than its bytes, is much work: several warps finish it sooner.
    Measured on an H200, with heads of 64, 256 and 512 those of the models named here.
    """
    head_dim, element_size, group, num_kv_heads, is_fp8 = shape
    if element_size != 2:
        return None
    if head_dim == 128 and num_kv_heads <= 4 < group:
        return SharedUnits(DecodeConfig(64, 128, MAX_SPLITS, 4, 3, 6, 6, 6), FEW_TIERS)
    if head_dim == 128 and is_fp8 and block_g(group) == 8:  # Llama 3.1 8B
        return SharedUnits(DecodeConfig(64, 128, MAX_SPLITS, 2, 3, 12, 12, 12), TWO_WARPS_TIERS)
    if is_fp8:
        return None
    if head_dim == 256:  # Gemma 4 26B, Qwen3.5 35B
        return SharedUnits(DecodeConfig(32, 128, MAX_SPLITS, 4, 4, 6, 6, 6), TIERS)
    if head_dim == 512:  # Gemma 4 26B
        return SharedUnits(DecodeConfig(16, 64, MAX_SPLITS, 4, 4, 6, 6, 6), TIERS)
    if head_dim == 64 and group == 8:  # gpt-oss 20B
        return SharedUnits(DecodeConfig(64, 128, MAX_SPLITS, 4, 3, 6, 6, 6), FEW_TIERS)
    return None


def is_middle(num_rows: int, shape: DecodeShape, gpu: Gpu) -> bool:
    """Whether the batch is a middle one: more than FEW_ROWS rows, and two warps share a unit.

    True in the third tier over pools of e4m3 if all units run at once. A single warp would wait for its own
    products there. With 8 KV heads the batch has 41 to 64 rows. Measured on an H200.
    """
    if not gpu.is_hopper or gpu.multiprocessors < MIDDLE_MULTIPROCESSORS:
        return False
    return _may_be_middle(num_rows, shape)


def _may_be_middle(num_rows: int, shape: DecodeShape) -> bool:
    """The same on the GPUs that have middle batches."""
    if not shape.is_fp8 or (shape.head_dim, shape.element_size, block_g(shape.group)) != (128, 2, 8):
        return False
    _, few, _ = tier_rows(shape.num_kv_heads, shape.head_dim, FP8_TIERS)
    return max(few, FEW_ROWS) < num_rows <= MIDDLE_UNITS // shape.num_kv_heads


def rows_of_all_kernels(most_rows: int, shape: DecodeShape, gpu: Gpu) -> list[int]:
    """Numbers of rows whose batches together run every kernel that batches of up to `most_rows` do."""
    kinds = {is_middle(most_rows, shape, gpu): most_rows}
    for num_rows in range(FEW_ROWS + 1, most_rows):
        kinds.setdefault(is_middle(num_rows, shape, gpu), num_rows)
    return sorted({min(most_rows, FEW_ROWS), *kinds.values()})


def starts_early(num_rows: int, shape: DecodeShape, gpu: Gpu) -> bool:
    """Whether a step is faster if attention starts while the kernel before it ends.

    In large batches each multiprocessor gets a few long units, and an early start distributes them unevenly;
    less so in a middle batch.
    """
    return num_rows * shape.num_kv_heads <= EARLY_UNITS or is_middle(num_rows, shape, gpu)


def block_g(group: int) -> int:
    """Columns of the tensor-core tiles: a KV head's query heads, rounded up."""
    return 8 if group <= 8 else 16


def programs_for_equal_rows(many: int, num_units: int, multiprocessors: int) -> int:
    """Programs of a multiprocessor that take units of equal length in whole turns: `many`, to half more.

    8 programs take as long for 10 units as for 16. No branches: torch.compile makes one code for all batches.
    """
    units = ceil_div(num_units, multiprocessors)
    found = many
    for turns in (1, 2, 3, 4):
        share = ceil_div(units, turns)
        fits = min(max(many + many // 2 + 1 - share, 0), 1)
        found = max(found, share * fits)
    return found


def num_arrivals(num_rows: int, num_kv_heads: int) -> int:
    """Number of `arrivals` counters that paged_decode needs for this many rows, with any number of pages."""
    return 1 + num_kv_heads * num_rows * MAX_SPLITS


def _tiers(is_fp8: bool) -> tuple[int, int, int]:
    return FP8_TIERS if is_fp8 else TIERS


def tier_rows(num_kv_heads: int, head_dim: int, tiers: tuple[int, int, int]) -> list[int]:
    """The most rows of a batch that does not exceed each of `tiers`."""
    return [elements // (num_kv_heads * next_power_of_2(head_dim)) for elements in tiers]


def fewest_alike(
    num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, element_size: int, is_fp8: bool = False
) -> int:
    """The fewest rows of a batch in which a row's result is, to the last bit, that in a batch of num_rows.

    Valid if no config is given.
    """
    changes = tier_rows(num_kv_heads, head_dim, _tiers(is_fp8))
    shape = DecodeShape(head_dim, element_size, num_heads // num_kv_heads, num_kv_heads, is_fp8)
    shared = warps_share(shape)
    if shared is not None:
        few = tier_rows(num_kv_heads, head_dim, shared.tiers)
        changes = [FEW_ROWS, *(n for n in few if n < FEW_ROWS), *(n for n in changes if n > FEW_ROWS)]
    most = MIDDLE_UNITS // num_kv_heads
    if _may_be_middle(most, shape):
        changes.append(most)
    return 1 + max((rows for rows in changes if rows < num_rows), default=0)
