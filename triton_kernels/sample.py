"""The next token of each row: temperature, top-k, top-p, min-p, one random number; argmax at temperature 0.

For one row, l = its logits in float32 (NaN counts as -inf, +inf as the largest finite number):

    temperature == 0:  argmax of l, the lowest id among equals
    otherwise:         w = exp((l - max l) / temperature), and the support shrinks in this order
      top_k (0 = off)    ids with l >= the k-th largest l                     (all that tie with it stay)
      top_p (>= 1 off)   of these, ids with mass(strictly larger l) < top_p * mass(all of these)
      min_p (0 = off)    of these, ids with w >= min_p                        (the largest w is 1)
    draw:              u in [0, 1); the first id, in vocabulary order, whose running mass exceeds u * mass

The largest logit always stays, so the support is never empty. u is the top 24 bits of the first word of
Philox-4x32-10 with key `seed` and counter `position`: a row's draw depends on nothing else in the batch.

The order is Hugging Face's and vLLM's. R rows, V vocabulary, both at least 1; every id is in [0, V).

How: no sort. The first kernel finds the largest logit of every block of a row and of every 32 ids in it;
greedy rows need no more. From the groups' the second takes a floor that at least 2048 logits (or top_k)
reach. The third adds up every block's mass and lists what reaches the floor, 256 a block at most. In the
last, a program per row finds the smallest logit that stays among the listed ones, by quartering the ordered
integers that float32 values map to, and draws. Where the list is too short (a flat distribution) or a
block's is too long, it quarters over the row itself, one pass for each (8 of them settle bf16 logits, 16
float32): same meaning, slower. A row decides by nothing but its own logits and options.

Cost: R*V elements read once for greedy rows, twice for the others, 10 to 20 times more (mostly from L2) for
those that go the long way.
"""

# Launching a kernel looks like calling it, but takes options that it does not declare.
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.launch import ceil_div, next_power_of_2

_FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
_LOWEST_TEMPERATURE = tl.constexpr(1e-10)
_LOG2_E = tl.constexpr(1.4426950408889634)
_MASK32 = 0xFFFFFFFF
_BLOCK_V = 4096
_TILE = 1024
_GROUPS = 128  # group maxima per block
_SLOTS = 256  # candidates that a block may have before its row takes the long way
_LISTED = 2048  # groups of a row, at least, whose largest logit is a candidate (of a large vocabulary)
_LOW_ZERO_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""How many low bits of a float32 are zero whenever it holds a value of this dtype."""


def _multiply_high_low(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The two halves of the product of two 32-bit numbers, in int64 arithmetic that cannot overflow."""
    high = ((constant * (x >> 16)) + ((constant * (x & 0xFFFF)) >> 16)) >> 16
    low = ((constant * (x & 0xFFFF)) + (((constant * (x >> 16)) & 0xFFFF) << 16)) & _MASK32
    return high, low


def uniform_reference(seed: Tensor, position: Tensor) -> Tensor:
    """Philox-4x32-10 (Salmon et al. 2011): float32 [R] in [0, 1) of seed int64 [R], position int32 [R]."""
    key0, key1 = seed & _MASK32, (seed >> 32) & _MASK32
    c0, c1, c2, c3 = (position.long() & _MASK32, *(torch.zeros_like(seed) for _ in range(3)))
    for _ in range(10):
        high0, low0 = _multiply_high_low(0xD2511F53, c0)
        high1, low1 = _multiply_high_low(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) & _MASK32, (key1 + 0xBB67AE85) & _MASK32
    return (c0 >> 8).float() * 2.0**-24


def support_reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """(w float64 [R, V], kept bool [R, V]) of rows whose temperature is above 0, by sorting."""
    values = logits.float().nan_to_num(nan=float("-inf"), posinf=_FLOAT_MAX.value, neginf=float("-inf"))
    vocab = values.shape[1]
    ordered = values.sort(dim=1, descending=True).values
    largest = ordered[:, :1]
    spread = torch.where(largest == float("-inf"), 0.0, (values - largest).double())
    weights = torch.exp(spread / temperature[:, None].clamp(min=_LOWEST_TEMPERATURE.value).double())

    count = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab).long()
    kept = values >= ordered.gather(1, count[:, None] - 1)

    kept_weights = weights * kept
    order = values.argsort(dim=1, descending=True)
    running = kept_weights.gather(1, order).cumsum(1)
    # The mass before the first of the ids that tie with this one.
    first_equal = torch.searchsorted(-ordered, -ordered, side="left")
    before = torch.where(first_equal == 0, 0.0, running.gather(1, (first_equal - 1).clamp(min=0)))
    inside = (before < top_p[:, None].double() * running[:, -1:]) | (top_p[:, None] >= 1) | (first_equal == 0)
    kept &= torch.empty_like(kept).scatter_(1, order, inside)

    kept &= (weights >= min_p[:, None].double()) | (values == largest)
    return weights, kept


def sample_reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """What sample means, in plain torch, by sorting the vocabulary of every row that is not greedy."""
    values = logits.float().nan_to_num(nan=float("-inf"), posinf=_FLOAT_MAX.value, neginf=float("-inf"))
    # torch.argmax promises no order among equals: take the lowest index of the largest value.
    ids = (values == values.amax(1, keepdim=True)).int().argmax(1)
    drawn_rows = (temperature > 0).nonzero().flatten()
    if drawn_rows.numel():
        weights, kept = support_reference(
            logits[drawn_rows],
            temperature[drawn_rows],
            top_k[drawn_rows],
            top_p[drawn_rows],
            min_p[drawn_rows],
        )
        running = (weights * kept).cumsum(1)
        uniform = uniform_reference(seed[drawn_rows], position[drawn_rows]).double()
        target = uniform[:, None] * running[:, -1:]
        # The first id of the support whose running mass exceeds the target; the last if rounding hides it.
        beyond = (running > target) & kept
        first = torch.where(beyond.any(1), beyond.int().argmax(1), last_true(kept))
        ids[drawn_rows] = first
    return ids.int()


def last_true(mask: Tensor) -> Tensor:
    """Index of the last True of each row of mask [R, V]."""
    return mask.shape[1] - 1 - mask.flip(1).int().argmax(1)


@triton.jit
def _tamed(x):
    x = x.to(tl.float32)
    x = tl.where(x != x, float("-inf"), x)
    return tl.minimum(x, _FLOAT_MAX)


@triton.jit
def _load_logits(logits_ptr, ids, vocab: tl.constexpr):
    """Float32 logits of `ids`: NaN and what lies beyond the vocabulary is -inf, +inf the largest number."""
    return _tamed(tl.load(logits_ptr + ids, ids < vocab, other=float("-inf")))


@triton.jit
def _ordered_key(x, LOW_ZERO_BITS: tl.constexpr):
    """An int32 that orders as the float32 x does, with the bits that are always zero cut off."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> LOW_ZERO_BITS


@triton.jit
def _weight(x, largest, sharpness):
    return tl.exp2(tl.where(x == largest, 0.0, x - largest) * sharpness)


@triton.jit
def _smallest_key(
    logits_ptr,
    low,
    high,
    bound,
    largest,
    sharpness,
    BY_MASS: tl.constexpr,
    vocab: tl.constexpr,
    LOW_ZERO_BITS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The smallest key t in low..high with measure(ids whose key > t) < bound, or high; by quartering.

    The measure is the number of ids, or their mass. low and high are int64.
    """
    while low < high:
        span = high - low
        t1 = low + span // 4
        t2 = low + span // 2
        t3 = low + span * 3 // 4
        above1 = tl.zeros([BLOCK_V], tl.float32)
        above2 = tl.zeros([BLOCK_V], tl.float32)
        above3 = tl.zeros([BLOCK_V], tl.float32)
        for v0 in range(0, vocab, BLOCK_V):
            ids = v0 + tl.arange(0, BLOCK_V)
            x = _load_logits(logits_ptr, ids, vocab)
            key = _ordered_key(x, LOW_ZERO_BITS)
            measure = _weight(x, largest, sharpness) if BY_MASS else tl.where(ids < vocab, 1.0, 0.0)
            above1 += tl.where(key > t1.to(tl.int32), measure, 0.0)
            above2 += tl.where(key > t2.to(tl.int32), measure, 0.0)
            above3 += tl.where(key > t3.to(tl.int32), measure, 0.0)
        holds1 = tl.sum(above1, 0) < bound
        holds2 = tl.sum(above2, 0) < bound
        holds3 = tl.sum(above3, 0) < bound
        new_low = tl.where(holds1, low, tl.where(holds2, t1 + 1, tl.where(holds3, t2 + 1, t3 + 1)))
        high = tl.where(holds1, t1, tl.where(holds2, t2, tl.where(holds3, t3, high)))
        low = new_low
    return high


@triton.jit
def _smallest_listed_key(keys, measure, low, high, bound):
    """_smallest_key over keys that are at hand, with `measure` (count or mass) for each."""
    while low < high:
        step = (high - low) // 4
        t1 = low + step
        t2 = low + 2 * step
        t3 = low + 3 * step
        holds1 = tl.sum(tl.where(keys > t1.to(tl.int32), measure, 0.0)) < bound
        holds2 = tl.sum(tl.where(keys > t2.to(tl.int32), measure, 0.0)) < bound
        holds3 = tl.sum(tl.where(keys > t3.to(tl.int32), measure, 0.0)) < bound
        new_low = tl.where(holds1, low, tl.where(holds2, t1 + 1, tl.where(holds3, t2 + 1, t3 + 1)))
        high = tl.where(holds1, t1, tl.where(holds2, t2, tl.where(holds3, t3, high)))
        low = new_low
    return high


@triton.jit
def _block_tops_kernel(
    logits_ptr,
    block_top_ptr,
    block_id_ptr,
    group_top_ptr,
    row_stride,
    vocab: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The largest logit of a block of a row, its id, and the largest of each of the block's groups."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    WIDTH: tl.constexpr = BLOCK_V // GROUPS
    groups = tl.arange(0, GROUPS)
    ids = block * BLOCK_V + (groups * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    x = _load_logits(logits_ptr + row * row_stride, ids, vocab)
    tops = tl.max(x, 1)
    top = tl.max(tops, 0)
    place = row * tl.num_programs(1) + block
    tl.store(block_top_ptr + place, top)
    tl.store(block_id_ptr + place, tl.min(tl.min(tl.where(x == top, ids, vocab), 1), 0))
    tl.store(group_top_ptr + place * GROUPS + groups, tops)


@triton.jit
def _floor_kernel(
    group_top_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    floor_ptr,
    vocab: tl.constexpr,
    NUM_TOPS: tl.constexpr,
    PADDED_TOPS: tl.constexpr,
    LISTED: tl.constexpr,
):
    """A value (the upper 16 bits of its key) that at least LISTED, or top_k, logits of a row reach."""
    row = tl.program_id(0)
    top_k = tl.load(top_k_ptr + row)
    filtered = ((top_k > 0) & (top_k < vocab)) | (not (tl.load(top_p_ptr + row) >= 1))
    floor = tl.load(top_k_ptr + row) * 0 + 32767
    if filtered & (tl.load(temperature_ptr + row) > 0):
        places = tl.arange(0, PADDED_TOPS)
        there = places < NUM_TOPS
        x = tl.load(group_top_ptr + row.to(tl.int64) * NUM_TOPS + places, there, other=float("-inf"))
        keys = _ordered_key(x, 16)
        bound = tl.maximum(tl.where(top_k < vocab, top_k, 0), LISTED).to(tl.float32)
        high = tl.max(keys, 0)
        low = tl.min(keys, 0)
        # The smallest key above which there are fewer than `bound` of these; all that tie with it count.
        floor = _smallest_listed_key(keys, tl.where(there, 1.0, 0.0), low, high, bound)
    tl.store(floor_ptr + row, floor)


@triton.jit
def _block_mass_kernel(
    logits_ptr,
    block_top_ptr,
    floor_ptr,
    temperature_ptr,
    min_p_ptr,
    block_mass_ptr,
    draw_mass_ptr,
    count_ptr,
    listed_ptr,
    row_stride,
    vocab: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The mass of a block of a row, that of it which min_p leaves, and the logits that reach the floor."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        blocks = tl.arange(0, PADDED_BLOCKS)
        tops = tl.load(block_top_ptr + row * NUM_BLOCKS + blocks, blocks < NUM_BLOCKS, other=float("-inf"))
        largest = tl.max(tops, 0)
        min_p = tl.load(min_p_ptr + row)
        floor = tl.load(floor_ptr + row)
        sharpness = _LOG2_E / tl.maximum(temperature, _LOWEST_TEMPERATURE)
        place = row * NUM_BLOCKS + block
        mass = tl.zeros([TILE], tl.float32)
        drawable = tl.zeros([TILE], tl.float32)
        count = block * 0
        for v0 in tl.static_range(0, BLOCK_V, TILE):
            ids = block * BLOCK_V + v0 + tl.arange(0, TILE)
            # Loaded here, since torch.compile takes a tensor that is loaded in a function, and then decides
            # where to store, for one that is written.
            x = tl.load(logits_ptr + row * row_stride + ids, ids < vocab, other=float("-inf"))
            x = _tamed(x)
            weight = tl.where(ids < vocab, _weight(x, largest, sharpness), 0.0)
            mass += weight
            drawable += tl.where((weight >= min_p) | (x == largest), weight, 0.0)
            if floor < 32767:
                inside = ((_ordered_key(x, 16) >= floor) & (ids < vocab)).to(tl.int32)
                slot = count + tl.cumsum(inside, 0) - 1
                tl.store(listed_ptr + place * SLOTS + slot, x, (inside > 0) & (slot < SLOTS))
                count += tl.sum(inside, 0)
        tl.store(block_mass_ptr + place, tl.sum(mass, 0))
        tl.store(draw_mass_ptr + place, tl.sum(drawable, 0))
        tl.store(count_ptr + place, count)


@triton.jit
def _sample_kernel(
    logits_ptr,
    block_top_ptr,
    block_id_ptr,
    floor_ptr,
    block_mass_ptr,
    draw_mass_ptr,
    count_ptr,
    listed_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    position_ptr,
    out_ptr,
    row_stride,
    vocab: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
    LOW_ZERO_BITS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0)
    blocks = tl.arange(0, PADDED_BLOCKS)
    block_tops = tl.load(
        block_top_ptr + row.to(tl.int64) * NUM_BLOCKS + blocks, blocks < NUM_BLOCKS, other=float("-inf")
    )
    block_ids = tl.load(
        block_id_ptr + row.to(tl.int64) * NUM_BLOCKS + blocks, blocks < NUM_BLOCKS, other=vocab
    )
    largest = tl.max(block_tops, 0)
    chosen = tl.min(tl.where(block_tops == largest, block_ids, vocab), 0)

    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        row_ptr = logits_ptr + row.to(tl.int64) * row_stride
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        sharpness = _LOG2_E / tl.maximum(temperature, _LOWEST_TEMPERATURE)
        lowest_key = _ordered_key(tl.min(tl.zeros([1], tl.float32) - float("inf"), 0), LOW_ZERO_BITS).to(
            tl.int64
        )
        largest_key = _ordered_key(largest, LOW_ZERO_BITS).to(tl.int64)
        threshold = lowest_key
        by_count = (top_k > 0) & (top_k < vocab)
        by_mass = not (top_p >= 1)
        block_mass = tl.zeros([PADDED_BLOCKS], tl.float32)
        row_blocks = row.to(tl.int64) * NUM_BLOCKS + blocks
        settled = row * 0
        if by_count | by_mass:
            counts = tl.load(count_ptr + row_blocks, blocks < NUM_BLOCKS, other=0)
            if tl.max(counts, 0) <= SLOTS:
                slots = tl.arange(0, SLOTS)
                there = slots[None, :] < counts[:, None]
                x = tl.load(listed_ptr + row_blocks[:, None] * SLOTS + slots[None, :], there, other=0.0)
                keys = _ordered_key(x, LOW_ZERO_BITS)
                weight = tl.where(there, _weight(x, largest, sharpness), 0.0)
                # Every logit of at least this key is listed.
                cut = tl.load(floor_ptr + row).to(tl.int64) << (16 - LOW_ZERO_BITS)
                enough = tl.sum(counts, 0) >= 1
                if by_count:
                    enough = tl.sum(counts, 0) >= top_k
                    one = tl.where(there, 1.0, 0.0)
                    cut = _smallest_listed_key(keys, one, cut, largest_key, top_k.to(tl.float32))
                if by_mass:
                    kept = tl.sum(tl.where(keys >= cut.to(tl.int32), weight, 0.0))
                    bound = top_p * kept
                    if not by_count:
                        masses = tl.load(block_mass_ptr + row_blocks, blocks < NUM_BLOCKS, other=0.0)
                        bound = top_p * tl.sum(masses, 0)
                    enough = enough & (kept >= bound)
                    cut = _smallest_listed_key(keys, weight, cut, largest_key, bound)
                if enough:
                    inside = (keys >= cut.to(tl.int32)) & ((weight >= min_p) | (x == largest))
                    block_mass = tl.sum(tl.where(inside & there, weight, 0.0), 1)
                    threshold = cut
                    settled = row * 0 + 1
        else:
            block_mass = tl.load(draw_mass_ptr + row_blocks, blocks < NUM_BLOCKS, other=0.0)
            settled = row * 0 + 1

        if settled == 0:
            if (top_k > 0) & (top_k < vocab):
                threshold = _smallest_key(
                    row_ptr, threshold, largest_key, top_k.to(tl.float32), largest, sharpness,
                    False, vocab, LOW_ZERO_BITS, BLOCK_V,
                )  # fmt: skip
            if not (top_p >= 1):
                kept = tl.zeros([BLOCK_V], tl.float32)
                for v0 in range(0, vocab, BLOCK_V):
                    x = _load_logits(row_ptr, v0 + tl.arange(0, BLOCK_V), vocab)
                    inside = _ordered_key(x, LOW_ZERO_BITS) >= threshold.to(tl.int32)
                    kept += tl.where(inside, _weight(x, largest, sharpness), 0.0)
                threshold = _smallest_key(
                    row_ptr, threshold, largest_key, top_p * tl.sum(kept, 0), largest, sharpness,
                    True, vocab, LOW_ZERO_BITS, BLOCK_V,
                )  # fmt: skip

            for v0 in range(0, vocab, BLOCK_V):
                ids = v0 + tl.arange(0, BLOCK_V)
                x = _load_logits(row_ptr, ids, vocab)
                weight = _weight(x, largest, sharpness)
                inside = _ordered_key(x, LOW_ZERO_BITS) >= threshold.to(tl.int32)
                inside = inside & ((weight >= min_p) | (x == largest)) & (ids < vocab)
                mass = tl.sum(tl.where(inside, weight, 0.0), 0)
                block_mass = tl.where(blocks == v0 // BLOCK_V, mass, block_mass)

        word, _, _, _ = tl.philox(tl.load(seed_ptr + row), tl.load(position_ptr + row), 0, 0, 0)
        uniform = (word >> 8).to(tl.float32) * 5.9604644775390625e-08
        running = tl.cumsum(block_mass, 0)
        target = uniform * tl.sum(block_mass, 0)
        # The block that holds the target; the last one with any mass if rounding put the target beyond it.
        last = tl.max(tl.where(block_mass > 0, blocks, 0), 0)
        block = tl.minimum(tl.min(tl.where(running > target, blocks, PADDED_BLOCKS), 0), last)
        before = tl.max(tl.where(blocks < block, running, 0.0), 0)
        ids = block * BLOCK_V + tl.arange(0, BLOCK_V)
        x = _load_logits(row_ptr, ids, vocab)
        weight = _weight(x, largest, sharpness)
        inside = _ordered_key(x, LOW_ZERO_BITS) >= threshold.to(tl.int32)
        inside = inside & ((weight >= min_p) | (x == largest)) & (ids < vocab)
        reached = before + tl.cumsum(tl.where(inside, weight, 0.0), 0)
        first = tl.min(tl.where(inside & (reached > target), ids, vocab), 0)
        fallback = tl.max(tl.where(inside & (weight > 0), ids, 0), 0)
        chosen = tl.where(first < vocab, first, fallback)
    tl.store(out_ptr + row, chosen)


def sample_triton(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """The kernels, whatever the device."""
    num_rows, vocab = logits.shape
    num_blocks = ceil_div(vocab, _BLOCK_V)
    padded_blocks = next_power_of_2(num_blocks)
    num_tops = num_blocks * _GROUPS
    device = logits.device
    block_top = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=device)
    block_id = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=device)
    group_top = torch.empty((num_rows, num_tops), dtype=torch.float32, device=device)
    floor = torch.empty(num_rows, dtype=torch.int32, device=device)
    block_mass = torch.empty_like(block_top)
    draw_mass = torch.empty_like(block_top)
    count = torch.empty_like(block_id)
    listed = torch.empty((num_rows, num_blocks, _SLOTS), dtype=torch.float32, device=device)
    out = torch.empty(num_rows, dtype=torch.int32, device=device)
    _block_tops_kernel[(num_rows, num_blocks)](
        logits,
        block_top,
        block_id,
        group_top,
        logits.stride(0),
        vocab,
        _GROUPS,
        _BLOCK_V,
        num_warps=8,
    )
    _floor_kernel[(num_rows,)](
        group_top,
        temperature,
        top_k,
        top_p,
        floor,
        vocab,
        num_tops,
        padded_blocks * _GROUPS,
        _LISTED if num_tops >= 2 * _LISTED else ceil_div(num_tops, 8),
        num_warps=8,
    )
    _block_mass_kernel[(num_rows, num_blocks)](
        logits,
        block_top,
        floor,
        temperature,
        min_p,
        block_mass,
        draw_mass,
        count,
        listed,
        logits.stride(0),
        vocab,
        num_blocks,
        padded_blocks,
        _SLOTS,
        _TILE,
        _BLOCK_V,
        num_warps=4,
    )
    _sample_kernel[(num_rows,)](
        logits,
        block_top,
        block_id,
        floor,
        block_mass,
        draw_mass,
        count,
        listed,
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        position,
        out,
        logits.stride(0),
        vocab,
        num_blocks,
        padded_blocks,
        _LOW_ZERO_BITS[logits.dtype],
        _SLOTS,
        _BLOCK_V,
        num_warps=16,
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
    """One token id per row, int32 [R], from logits [R, V] of any float dtype.

    temperature, top_p, min_p are float32 [R], top_k and position int32 [R], seed int64 [R]; rows of logits
    may be strided.
    """
    if logits.device.type != "cpu":
        return sample_triton(logits, temperature, top_k, top_p, min_p, seed, position)
    return sample_reference(logits, temperature, top_k, top_p, min_p, seed, position)
