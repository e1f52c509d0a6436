"""The first three kernels of sample: a bracket of each row's threshold, and the ids inside it.

The threshold is the smallest logit that stays in a row's support; sample.py says what that is, and searches
for it among the ids that are listed here. `_tops_kernel` finds the largest logit of each block and of each
group of 64 ids, and the block's mass. `_bracket_kernel` brackets the threshold, with one program per row:
  from below, by the largest logits of the groups, whose count and mass are known; or
  if these have too little mass (a flat distribution), from both sides, by a sample of one id in 64; or
  if the sample is too small, from below, by a value that three quarters of the groups reach.
`_list_kernel` sums the weights above the bracket and lists the ids inside it; it reads only groups that reach
the bracket.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; calling one from
# another looks like the call that raises outside of a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.launch import ceil_div, next_power_of_2
from triton_kernels.sample_reference import FLOAT_MAX, LOWEST_TEMPERATURE

LOG2_E = tl.constexpr(1.4426950408889634)
WAYS = tl.constexpr(4)
"""Thresholds that are tried at once."""
BLOCK_V = 4096
"""Ids of a block."""
WIDTH = 64
"""Ids of a group."""
SLOTS = 1024
"""Most ids that a chunk may list before the search covers the whole row."""
LEAST_TEMPERATURE = tl.constexpr(LOWEST_TEMPERATURE)
"""A temperature above 0 counts as at least this."""
_FLOAT_MAX = tl.constexpr(FLOAT_MAX)
_ROUNDS = tl.constexpr(4)  # rounds that narrow a bracket, each by a factor of WAYS + 1
_REACH = tl.constexpr(64.0)  # a logit that is this many temperatures below the largest has no mass
_MARGIN = tl.constexpr(3.5)  # standard deviations of a sampled mass on either side
_ENOUGH = tl.constexpr(32.0)  # the sampled mass must be this many times the weight of the last sampled id


@triton.jit
def tamed(x):
    """Logits in float32: NaN as -inf, +inf as the largest finite number."""
    x = x.to(tl.float32)
    x = tl.where(x != x, float("-inf"), x)
    return tl.minimum(x, _FLOAT_MAX)


@triton.jit
def load_logits(logits_ptr, ids, vocab: tl.constexpr):
    """Float32 logits of `ids`: NaN and what lies beyond the vocabulary is -inf, +inf the largest number."""
    return tamed(tl.load(logits_ptr + ids, ids < vocab, other=float("-inf")))


@triton.jit
def weight_of(x, largest, sharpness):
    """exp((x - largest) / temperature), sharpness being log2(e) / temperature; 1 where both are -inf."""
    return tl.exp2(tl.where(x == largest, 0.0, x - largest) * sharpness)


@triton.jit
def _bracket(x, measure, low, high, bound):
    """Narrow low..high, keeping measure(x > low) >= bound > measure(x > high) if it holds."""
    for _ in tl.static_range(_ROUNDS):
        t = low + (high - low) * ((1.0 + tl.arange(0, WAYS)) / (WAYS + 1))
        holds = tl.sum(tl.where(x[None, :] > t[:, None], measure[None, :], 0.0), 1) < bound
        low, high = tl.max(tl.where(holds, low, t)), tl.min(tl.where(holds, t, high))
    return low, high


@triton.jit
def _tops_kernel(
    logits_ptr,
    temperature_ptr,
    block_top_ptr,
    block_group_ptr,
    block_mass_ptr,
    group_top_ptr,
    row_stride,
    vocab: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A block's largest logit, that logit's group, the mass relative to it; each group's largest logit."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    GROUPS: tl.constexpr = BLOCK_V // WIDTH
    groups = tl.arange(0, GROUPS)
    temperature = tl.load(temperature_ptr + row)
    ids = block * BLOCK_V + (groups * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    x = load_logits(logits_ptr + row * row_stride, ids, vocab)
    tops = tl.max(x, 1)
    top, group = tl.max(tops, 0, return_indices=True)
    place = row * tl.num_programs(1) + block
    tl.store(group_top_ptr + place * GROUPS + groups, tops)
    tl.store(block_top_ptr + place, top)
    tl.store(block_group_ptr + place, block * GROUPS + group)
    if temperature > 0:
        sharpness = LOG2_E / tl.maximum(temperature, LEAST_TEMPERATURE)
        weight = tl.where(ids < vocab, weight_of(x, top, sharpness), 0.0)
        tl.store(block_mass_ptr + place, tl.sum(tl.sum(weight, 1), 0))


@triton.jit
def _bracket_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    block_top_ptr,
    block_mass_ptr,
    group_top_ptr,
    bracket_ptr,
    num_hits_ptr,
    hits_ptr,
    row_stride,
    vocab: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """low, high: most likely, low <= the smallest logit that stays < high. And the groups that reach low.

    high = inf: low is certain, and nothing is above. Both -inf: min_p alone counts, for which all groups do.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    by_count = (top_k > 0) & (top_k < vocab)
    by_mass = not (top_p >= 1)
    if (temperature > 0) & (by_count | by_mass | (not (tl.load(min_p_ptr + row) <= 0))):
        blocks = tl.arange(0, PADDED_BLOCKS)
        known = blocks < NUM_BLOCKS
        block_tops = tl.load(block_top_ptr + row * NUM_BLOCKS + blocks, known, other=float("-inf"))
        masses = tl.load(block_mass_ptr + row * NUM_BLOCKS + blocks, known, other=0.0)
        places = tl.arange(0, PADDED_BLOCKS * GROUPS)
        there = places * WIDTH < vocab
        first_group = row * (NUM_BLOCKS * GROUPS)
        tops = tl.load(group_top_ptr + first_group + places, there, other=float("-inf"))
        largest = tl.max(block_tops, 0)
        temperature = tl.maximum(temperature, LEAST_TEMPERATURE)
        sharpness = LOG2_E / temperature
        highest = tl.maximum(largest, -_FLOAT_MAX)
        lowest = highest - _REACH * temperature
        low = float("-inf")
        high = float("-inf")
        if by_count | by_mass:
            high = float("inf")
            total = tl.sum(masses * weight_of(block_tops, largest, sharpness), 0)
            bound = top_p * total
            measure = tl.where(there, weight_of(tops, largest, sharpness), 0.0)
            if by_count:
                bound = top_k.to(tl.float32)
                measure = tl.where(there, 1.0, 0.0)
            start = tl.min(tl.where(tops > lowest, tops, highest), 0)
            low, _ = _bracket(tops, measure, start, highest, bound)
            reached = there & (tops >= low)
            too_light = tl.sum(tl.where(reached, measure, 0.0), 0) < bound
            most = 3 * ((vocab + WIDTH - 1) // WIDTH) // 4
            if (not by_count) & (too_light | (tl.sum(reached.to(tl.int32), 0) > most)):
                low, _ = _bracket(tops, tl.where(there, 1.0, 0.0), start, highest, most * 1.0)
                sampled = tl.load(logits_ptr + row * row_stride + places * WIDTH, there, other=float("-inf"))
                sampled = tamed(sampled)
                measure = tl.where(there, weight_of(sampled, largest, sharpness), 0.0)
                start = tl.min(tl.where(sampled > lowest, sampled, highest), 0)
                whole = tl.sum(measure, 0)
                # The mass below what stays, in units of a sampled weight, and the sampling error of that: the
                # variance is the sum of the squares, at most the mass times its largest weight.
                below = (total - bound) / WIDTH
                middle_low, middle_high = _bracket(sampled, measure, start, highest, whole - below)
                heaviest = weight_of(middle_high, largest, sharpness)
                # In this order: interpreted, a constexpr times a tensor is a constexpr, with which since
                # Triton 3.7 no tensor can be compared.
                if below >= heaviest * _ENOUGH:
                    error = _MARGIN * tl.sqrt(below * heaviest)
                    low, _ = _bracket(sampled, measure, start, middle_high, whole - (below - error))
                    _, high = _bracket(sampled, measure, middle_low, highest, whole - (below + error))
        hit = there & (tops >= low)
        place = tl.cumsum(hit.to(tl.int32), 0) - 1
        tl.store(hits_ptr + first_group + place, places, hit)
        tl.store(num_hits_ptr + row, tl.sum(hit.to(tl.int32), 0))
        tl.store(bracket_ptr + 2 * row, low)
        tl.store(bracket_ptr + 2 * row + 1, high)
    else:
        tl.store(num_hits_ptr + row, 0)


@triton.jit
def _list_kernel(
    logits_ptr,
    temperature_ptr,
    min_p_ptr,
    block_top_ptr,
    bracket_ptr,
    num_hits_ptr,
    hits_ptr,
    above_mass_ptr,
    draw_mass_ptr,
    count_ptr,
    listed_ptr,
    row_stride,
    vocab: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Of GROUPS hits of a row: the mass above the bracket, what min_p leaves of it, the logits in it."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    num_hits = tl.load(num_hits_ptr + row)
    if chunk * GROUPS < num_hits:
        hits = chunk * GROUPS + tl.arange(0, GROUPS)
        groups = tl.load(hits_ptr + row * (NUM_BLOCKS * GROUPS) + hits, hits < num_hits, other=vocab)
        low = tl.load(bracket_ptr + 2 * row)
        high = tl.load(bracket_ptr + 2 * row + 1)
        ids = (groups * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
        there = ids < vocab
        # Loaded here and not in a function: if a function loads a tensor and the value then decides where to
        # store, torch.compile believes that the tensor is written.
        x = tl.load(logits_ptr + row * row_stride + ids, there, other=float("-inf"))
        x = tamed(x)
        inside = (there & (x >= low) & (x < high)).to(tl.int32)
        in_groups = tl.sum(inside, 1)
        slot = (tl.cumsum(in_groups, 0) - in_groups)[:, None] + tl.cumsum(inside, 1) - 1
        place = row * NUM_BLOCKS + chunk
        tl.store(listed_ptr + place * SLOTS + slot, x, (inside > 0) & (slot < SLOTS))
        tl.store(count_ptr + place, tl.sum(in_groups, 0))
        mass = 0.0
        drawable = 0.0
        if high < float("inf"):
            blocks = tl.arange(0, PADDED_BLOCKS)
            tops = tl.load(
                block_top_ptr + row * NUM_BLOCKS + blocks, blocks < NUM_BLOCKS, other=float("-inf")
            )
            largest = tl.max(tops, 0)
            sharpness = LOG2_E / tl.maximum(tl.load(temperature_ptr + row), LEAST_TEMPERATURE)
            weight = tl.where(there & (x >= high), weight_of(x, largest, sharpness), 0.0)
            stays = (weight >= tl.load(min_p_ptr + row)) | (x == largest)
            mass = tl.sum(tl.sum(weight, 1), 0)
            drawable = tl.sum(tl.sum(tl.where(stays, weight, 0.0), 1), 0)
        tl.store(above_mass_ptr + place, mass)
        tl.store(draw_mass_ptr + place, drawable)


class Bracketed(NamedTuple):
    """Results for R rows, each of B blocks of BLOCK_V ids and G groups of WIDTH ids.

    The fields have the order of the arguments that sample.py's kernel takes.

    A chunk is as many hits as a block has groups. Nothing writes: masses of rows at temperature 0; of rows
    without hits the bracket; hits behind the row's last, chunks without hits, and logits behind a chunk's.
    """

    block_top: Tensor  # float32 [R, B], each block's largest logit
    block_group: Tensor  # int32 [R, B], the first group of the row that has it in this block
    block_mass: Tensor  # float32 [R, B], the sum of weights that are relative to the block's largest logit
    bracket: Tensor  # float32 [R, 2]: low <= the threshold < high, most likely; see _bracket_kernel
    num_hits: Tensor  # int32 [R], groups that reach low; 0 at temperature 0 and without options
    hits: Tensor  # int32 [R, G], these groups
    above_mass: Tensor  # float32 [R, B], each chunk's sum of weights from high on
    draw_mass: Tensor  # float32 [R, B], what min_p leaves of it
    num_inside: Tensor  # int32 [R, B], each chunk's ids inside the bracket
    listed: Tensor  # float32 [R, B, SLOTS], the logits of the first SLOTS of them


def bracket_thresholds(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Bracketed:
    """Launch the three kernels; arguments are those of `sample`."""
    num_rows, vocab = logits.shape
    num_blocks = ceil_div(vocab, BLOCK_V)
    padded_blocks = next_power_of_2(num_blocks)
    groups = BLOCK_V // WIDTH

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((num_rows, *shape), dtype=dtype, device=logits.device)

    block_top, block_mass, above_mass, draw_mass = (scratch(num_blocks) for _ in range(4))
    block_group, num_inside = (scratch(num_blocks, dtype=torch.int32) for _ in range(2))
    group_top, bracket = scratch(num_blocks * groups), scratch(2)
    num_hits, hits = scratch(dtype=torch.int32), scratch(num_blocks * groups, dtype=torch.int32)
    listed = scratch(num_blocks, SLOTS)
    _tops_kernel[(num_rows, num_blocks)](
        logits,
        temperature,
        block_top,
        block_group,
        block_mass,
        group_top,
        logits.stride(0),
        vocab,
        WIDTH,
        BLOCK_V,
        num_warps=8,
    )
    _bracket_kernel[(num_rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        block_top,
        block_mass,
        group_top,
        bracket,
        num_hits,
        hits,
        logits.stride(0),
        vocab,
        num_blocks,
        padded_blocks,
        groups,
        WIDTH,
        num_warps=8,
    )
    _list_kernel[(num_rows, num_blocks)](
        logits,
        temperature,
        min_p,
        block_top,
        bracket,
        num_hits,
        hits,
        above_mass,
        draw_mass,
        num_inside,
        listed,
        logits.stride(0),
        vocab,
        num_blocks,
        padded_blocks,
        SLOTS,
        groups,
        WIDTH,
        num_warps=2 * logits.element_size(),
    )
    return Bracketed(
        block_top, block_group, block_mass, bracket, num_hits, hits, above_mass, draw_mass, num_inside, listed
    )
