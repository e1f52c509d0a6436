"""The next token of each row: temperature, top-k, top-p, min-p, one random number; argmax at temperature 0.

For one row, l = its logits in float32 (NaN counts as -inf, +inf as the largest finite number):

    max l == -inf:     NO_TOKEN, whatever the temperature
    temperature == 0:  argmax of l, the lowest id among equals
    otherwise:         w = exp((l - max l) / temperature), and the support shrinks in this order
      top_k (0 = off)    ids with l >= the k-th largest l                     (all that tie with it stay)
      top_p (>= 1 off)   of these, ids with mass(strictly larger l) < top_p * mass(all of these)
      min_p (0 = off)    of these, ids with w >= min_p                        (the largest w is 1)
    draw:              u in [0, 1); the first id, in vocabulary order, whose running mass exceeds u * mass

The largest logit always stays, so the support is never empty. u is the top 24 bits of the first word of
Philox-4x32-10 with key `seed` and counter `position`: a row's draw depends on nothing else in the batch.

The order is Hugging Face's and vLLM's. R rows, V vocabulary, both at least 1. Each result is an id in [0, V)
or NO_TOKEN.

There is no sort. Rows without top_k, top_p and min_p need the first kernel of sample_bracket.py, the others
all three: they bracket the smallest logit that stays (the threshold), sum the weights above the bracket and
list the ids inside it. The last kernel searches the threshold among the listed ids: it maps float32 values to
ordered integers and splits their range into WAYS + 1 parts, again and again. Then it draws. If the bracket is
wrong or holds too many ids (many equal logits), it searches over the whole row, one pass per split (7 for
bf16 logits, 14 for float32), with the same result. All choices depend on the row's own logits and options
only.

Cost: R*V elements read once; with top_k, top_p or min_p a part of them again, which grows with the number of
ids that stay.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; calling one from
# another looks like the call that raises outside of a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.launch import ceil_div, next_power_of_2
from triton_kernels.sample_bracket import (
    BLOCK_V,
    LEAST_TEMPERATURE,
    LOG2_E,
    SLOTS,
    WAYS,
    WIDTH,
    bracket_thresholds,
    load_logits,
    tamed,
    weight_of,
)
from triton_kernels.sample_reference import NO_TOKEN, sample_cpu

_NO_TOKEN = tl.constexpr(NO_TOKEN)
_LANES = 2048  # listed ids that are processed together
_LOW_ZERO_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""How many low bits of a float32 are zero whenever it holds a value of this dtype."""


@triton.jit
def _ordered_key(x, LOW_ZERO_BITS: tl.constexpr):
    """An int32 that orders as the float32 x does, with the bits that are always zero cut off."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> LOW_ZERO_BITS


@triton.jit
def _load_lanes(values_ptr, lists, places, counts):
    """One value of each lane's list (which starts at `lists` and has `counts`), and whether there is one."""
    there = places < counts
    return tamed(tl.load(values_ptr + lists + places, there, other=float("-inf"))), there


@triton.jit
def _smallest_key(
    values_ptr,
    lists,
    slots,
    counts,
    longest,
    step,
    low,
    high,
    above,
    bound,
    largest,
    sharpness,
    BY_MASS: tl.constexpr,
    LOW_ZERO_BITS: tl.constexpr,
    LANES: tl.constexpr,
):
    """The smallest key t in low..high above which there are less than `bound` ids, or mass; or high.

    Of lists in memory, `step` values of each at a time, plus `above`; low and high are int64.
    """
    while low < high:
        t = low + (high - low) * (1 + tl.arange(0, WAYS)) // (WAYS + 1)
        measures = tl.zeros([WAYS, LANES], tl.float32)
        for start in range(0, longest, step):
            x, there = _load_lanes(values_ptr, lists, start + slots, counts)
            key = _ordered_key(x, LOW_ZERO_BITS)
            measure = tl.where(there, weight_of(x, largest, sharpness) if BY_MASS else 1.0, 0.0)
            measures += tl.where(key[None, :] > t.to(tl.int32)[:, None], measure[None, :], 0.0)
        holds = above + tl.sum(measures, 1) < bound
        low, high = tl.max(tl.where(holds, low, t + 1)), tl.min(tl.where(holds, t, high))
    return high


@triton.jit
def _masses(
    values_ptr,
    lists,
    slots,
    counts,
    longest,
    step,
    threshold,
    min_p,
    largest,
    sharpness,
    LOW_ZERO_BITS: tl.constexpr,
    LANES: tl.constexpr,
):
    """[LANES]: what reaches the key `threshold` (int64) and min_p, of the values that each lane sees."""
    mass = tl.zeros([LANES], tl.float32)
    for start in range(0, longest, step):
        x, there = _load_lanes(values_ptr, lists, start + slots, counts)
        weight = weight_of(x, largest, sharpness)
        inside = there & (_ordered_key(x, LOW_ZERO_BITS) >= threshold.to(tl.int32))
        mass += tl.where(inside & ((weight >= min_p) | (x == largest)), weight, 0.0)
    return mass


@triton.jit
def _sample_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    position_ptr,
    block_top_ptr,
    block_group_ptr,
    block_mass_ptr,
    bracket_ptr,
    num_hits_ptr,
    hits_ptr,
    above_mass_ptr,
    draw_mass_ptr,
    count_ptr,
    listed_ptr,
    out_ptr,
    row_stride,
    vocab: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
    LOW_ZERO_BITS: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Draw the row's id, or take its first largest. A chunk is BLOCK_V ids: a block, or hits of the row."""
    row = tl.program_id(0).to(tl.int64)
    LANES: tl.constexpr = PADDED_BLOCKS * TILE
    GROUPS: tl.constexpr = BLOCK_V // WIDTH
    row_ptr = logits_ptr + row * row_stride
    blocks = tl.arange(0, PADDED_BLOCKS)
    known = blocks < NUM_BLOCKS
    places = row * NUM_BLOCKS + blocks
    block_tops = tl.load(block_top_ptr + places, known, other=float("-inf"))
    largest = tl.max(block_tops, 0)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        by_count = (top_k > 0) & (top_k < vocab)
        by_mass = not (top_p >= 1)
        sharpness = LOG2_E / tl.maximum(temperature, LEAST_TEMPERATURE)
        block_mass = tl.load(block_mass_ptr + places, known, other=0.0)
        block_mass *= weight_of(block_tops, largest, sharpness)
        num_hits = tl.load(num_hits_ptr + row)
        num_chunks = (num_hits + GROUPS - 1) // GROUPS
        lowest_key = _ordered_key(tl.min(tl.zeros([1], tl.float32) - float("inf"), 0), LOW_ZERO_BITS)
        threshold = lowest_key.to(tl.int64)
        if by_count | by_mass:
            total = tl.sum(block_mass, 0)
            largest_key = _ordered_key(largest, LOW_ZERO_BITS).to(tl.int64)
            in_use = blocks < num_chunks
            list_ptr = listed_ptr + row * (NUM_BLOCKS * SLOTS)
            lanes = tl.arange(0, LANES)
            # As many values of a list at a time as there are lanes for.
            step = TILE
            while (step < SLOTS) & (2 * step * num_chunks <= LANES):
                step *= 2
            chunks = lanes // step
            counts = tl.load(count_ptr + row * NUM_BLOCKS + chunks, chunks < num_chunks, other=0)
            longest = tl.max(counts, 0)
            settled = longest <= SLOTS
            low = _ordered_key(tl.load(bracket_ptr + 2 * row), LOW_ZERO_BITS).to(tl.int64)
            if settled:
                high = tl.load(bracket_ptr + 2 * row + 1)
                certain = high == float("inf")
                high = tl.minimum(_ordered_key(high, LOW_ZERO_BITS).to(tl.int64), largest_key)
                above = tl.sum(tl.load(above_mass_ptr + places, in_use, other=0.0), 0)
                if by_count:
                    settled = tl.sum(tl.load(count_ptr + places, in_use, other=0), 0) >= top_k
                    low = _smallest_key(
                        list_ptr, chunks * SLOTS, lanes % step, counts, longest, step,
                        low, high, 0.0, top_k.to(tl.float32), largest, sharpness,
                        False, LOW_ZERO_BITS, LANES,
                    )  # fmt: skip
                if by_mass:
                    kept = above + tl.sum(
                        _masses(
                            list_ptr, chunks * SLOTS, lanes % step, counts, longest, step,
                            low, float("-inf"), largest, sharpness, LOW_ZERO_BITS, LANES,
                        )
                    )  # fmt: skip
                    bound = top_p * tl.where(by_count, kept, total)
                    settled = settled & (kept > 0) & (kept >= bound) & (certain | (above < bound))
                    low = _smallest_key(
                        list_ptr, chunks * SLOTS, lanes % step, counts, longest, step,
                        low, high, above, bound, largest, sharpness,
                        True, LOW_ZERO_BITS, LANES,
                    )  # fmt: skip
            chunks = lanes // TILE
            slots = lanes % TILE
            if settled:
                threshold = low
                counts = tl.load(count_ptr + row * NUM_BLOCKS + chunks, chunks < num_chunks, other=0)
                masses = _masses(
                    list_ptr, chunks * SLOTS, slots, counts, longest, TILE,
                    threshold, min_p, largest, sharpness, LOW_ZERO_BITS, LANES,
                )  # fmt: skip
                block_mass = tl.load(draw_mass_ptr + places, in_use, other=0.0)
                block_mass += tl.sum(tl.reshape(masses, (PADDED_BLOCKS, TILE)), 1)
            else:
                num_hits = num_hits * 0
                counts = tl.minimum(vocab - chunks * BLOCK_V, BLOCK_V)
                if by_count:
                    threshold = _smallest_key(
                        row_ptr, chunks * BLOCK_V, slots, counts, BLOCK_V, TILE,
                        threshold, largest_key, 0.0, top_k.to(tl.float32), largest, sharpness,
                        False, LOW_ZERO_BITS, LANES,
                    )  # fmt: skip
                    total = tl.sum(
                        _masses(
                            row_ptr, chunks * BLOCK_V, slots, counts, BLOCK_V, TILE,
                            threshold, float("-inf"), largest, sharpness, LOW_ZERO_BITS, LANES,
                        )
                    )  # fmt: skip
                if by_mass:
                    threshold = _smallest_key(
                        row_ptr, chunks * BLOCK_V, slots, counts, BLOCK_V, TILE,
                        threshold, largest_key, 0.0, top_p * total, largest, sharpness,
                        True, LOW_ZERO_BITS, LANES,
                    )  # fmt: skip
                masses = _masses(
                    row_ptr, chunks * BLOCK_V, slots, counts, BLOCK_V, TILE,
                    threshold, min_p, largest, sharpness, LOW_ZERO_BITS, LANES,
                )  # fmt: skip
                block_mass = tl.sum(tl.reshape(masses, (PADDED_BLOCKS, TILE)), 1)
        elif num_hits > 0:
            block_mass = tl.load(draw_mass_ptr + places, blocks < num_chunks, other=0.0)

        word, _, _, _ = tl.philox(tl.load(seed_ptr + row), tl.load(position_ptr + row), 0, 0, 0)
        uniform = (word >> 8).to(tl.float32) * 5.9604644775390625e-08
        running = tl.cumsum(block_mass, 0)
        target = uniform * tl.sum(block_mass, 0)
        # The block that holds the target; the last one with any mass if rounding put the target beyond it.
        last = tl.max(tl.where(block_mass > 0, blocks, 0), 0)
        block = tl.minimum(tl.min(tl.where(running > target, blocks, PADDED_BLOCKS), 0), last)
        before = tl.max(tl.where(blocks < block, running, 0.0), 0)
        offsets = tl.arange(0, BLOCK_V)
        ids = block * BLOCK_V + offsets
        if num_hits > 0:
            hits = block * GROUPS + offsets // WIDTH
            groups = tl.load(hits_ptr + row * (NUM_BLOCKS * GROUPS) + hits, hits < num_hits, other=vocab)
            ids = groups * WIDTH + offsets % WIDTH
        x = load_logits(row_ptr, ids, vocab)
        weight = weight_of(x, largest, sharpness)
        inside = _ordered_key(x, LOW_ZERO_BITS) >= threshold.to(tl.int32)
        inside = inside & ((weight >= min_p) | (x == largest)) & (ids < vocab)
        reached = before + tl.cumsum(tl.where(inside, weight, 0.0), 0)
        first = tl.min(tl.where(inside & (reached > target), ids, vocab), 0)
        fallback = tl.max(tl.where(inside & (weight > 0), ids, 0), 0)
        token = tl.where(first < vocab, first, fallback)
    else:
        block_groups = tl.load(block_group_ptr + places, known, other=0)
        group = tl.min(tl.where(known & (block_tops == largest), block_groups, vocab), 0)
        candidates = group * WIDTH + tl.arange(0, WIDTH)
        is_largest = (load_logits(row_ptr, candidates, vocab) == largest) & (candidates < vocab)
        token = tl.min(tl.where(is_largest, candidates, vocab), 0)
    tl.store(out_ptr + row, tl.where(largest > float("-inf"), token, _NO_TOKEN))


def sample_triton(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """Launch the kernels on any device."""
    num_rows, vocab = logits.shape
    num_blocks = ceil_div(vocab, BLOCK_V)
    padded_blocks = next_power_of_2(num_blocks)
    found = bracket_thresholds(logits, temperature, top_k, top_p, min_p)
    out = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    _sample_kernel[(num_rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        position,
        *found,
        out,
        logits.stride(0),
        vocab,
        num_blocks,
        padded_blocks,
        _LOW_ZERO_BITS[logits.dtype],
        SLOTS,
        min(SLOTS, _LANES // padded_blocks),
        WIDTH,
        BLOCK_V,
        num_warps=8,
    )
    return out


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """One token id per row (NO_TOKEN where no logit is above -inf), int32 [R], of any float logits [R, V].

    temperature, top_p, min_p are float32 [R], top_k and position int32 [R], seed int64 [R]; rows of logits
    may be strided.
    """
    if logits.device.type != "cpu":
        return sample_triton(logits, temperature, top_k, top_p, min_p, seed, position)
    return sample_cpu(logits, temperature, top_k, top_p, min_p, seed, position)
