"""The splits of a row in decode attention: where a row is cut, and how the splits' results are merged.

The splits of a row are the leaves of a tree with _FAN children per node. A program that has finished one of
several splits stores its softmax state and counts its arrival at the parent node. The last program to arrive
folds the children's states from left to right and goes on upwards, so no program waits for another one.

A softmax state of G query heads is (top, mass, acc): the largest score, in base 2, float32 [G]; the sum of
2 ** (score - top), float32 [G]; and the sum of the values so weighted, float32 [D, G]. The sums may have a
constant factor, the same in all splits. The first split's state includes the sinks, if there are any.
"""

# One kernel function that calls another looks like the call that raises outside of a kernel; range yields no
# int in a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

_FAN = tl.constexpr(8)  # splits, and nodes above them, below one node


@triton.jit
def row_cuts(
    length,
    log_split,
    window: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Cut a row of `length` tokens into splits; a row that is empty is one empty split.

    Args:
        log_split: log2 of the tokens of a split.
        MAX_SPLITS: a row that would have more has splits of twice, four times, ... as many tokens.
        DOUBLINGS: how often that may be needed at most.
        BLOCK_N: tokens of a tile.

    Returns (first seen token, begin of the first split, log2 of the tokens per split, number of splits). The
    last split takes the remainder: from half a split up to almost one and a half, or a whole shorter row.
    Splits begin at multiples of the tile, so each tile lies in one page if pages are large enough.
    """
    start = tl.maximum(length - window, 0) if window > 0 else length * 0
    begin = start // BLOCK_N * BLOCK_N
    tokens = length - begin
    log_tokens = log_split + tokens * 0
    for i in tl.static_range(DOUBLINGS):
        log_tokens += (tokens > (MAX_SPLITS << log_split << i)).to(tl.int32)
    num_splits = tl.maximum((tokens + (1 << log_tokens >> 1)) >> log_tokens, 1)
    return start, begin, log_tokens, num_splits


@triton.jit
def _fold(top, mass, acc, more_top, more_mass, more_acc):
    """Combine the softmax states of two sets of keys; both sets may be empty."""
    new_top = tl.maximum(top, more_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    old = tl.exp2(top - base)
    new = tl.exp2(more_top - base)
    return new_top, mass * old + more_mass * new, acc * old[None, :] + more_acc * new[None, :]


@triton.jit
def _load_state(acc_ptr, sum_ptr, place, there, lanes, group, G: tl.constexpr, D: tl.constexpr):
    """Load the softmax state (top, mass, acc) at `place` if it is `there`; else return that of no keys.

    The load bypasses L1, which does not see writes of other multiprocessors.
    """
    mask = there & (group < G)
    top = tl.load(sum_ptr + place * (2 * G) + group, mask, other=float("-inf"), cache_modifier=".cg")
    mass = tl.load(sum_ptr + place * (2 * G) + G + group, mask, other=0.0, cache_modifier=".cg")
    offsets = place * (G * D) + group[None, :] * D + lanes[:, None]
    acc = tl.load(acc_ptr + offsets, mask[None, :] & (lanes < D)[:, None], other=0.0, cache_modifier=".cg")
    return top, mass, acc


@triton.jit
def merge_splits(
    top,
    mass,
    acc,
    split,
    num_splits,
    acc_ptr,
    sum_ptr,
    arrivals_ptr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Merge a split's softmax state with those of its row's other splits, as far as they are there.

    Args:
        top, mass, acc: of split number `split` of `num_splits`: [BLOCK_G], [BLOCK_G], [BLOCK_D, BLOCK_G].
        acc_ptr, sum_ptr: scratch of the row and KV head, for each split G * D and 2 * G float32.
        arrivals_ptr: their int32 counters, one for each inner node, level after level; zeros, and zeros again
            when the row is done.
        WIDE: states that are loaded at a time, a divisor of _FAN.

    Returns (top, mass, acc, whether this is the row's state; if not, another program finishes the row).
    """
    group = tl.arange(0, BLOCK_G)
    lanes = tl.arange(0, BLOCK_D)
    mask = (lanes < D)[:, None] & (group < G)[None, :]
    # A node's state replaces that of its first child, so neighbouring nodes are `apart` places apart.
    apart = 1
    num_nodes = num_splits
    node = split
    while num_nodes > 1:
        parent = node // _FAN
        first = parent * _FAN
        num_below = tl.minimum(num_nodes - first, _FAN)
        place = node * apart
        place_offsets = place * (G * D) + group[None, :] * D + lanes[:, None]
        tl.store(acc_ptr + place_offsets, acc, mask)
        tl.store(sum_ptr + place * (2 * G) + group, top, group < G)
        tl.store(sum_ptr + place * (2 * G) + G + group, mass, group < G)
        tl.debug_barrier()  # all threads have stored before the counter tells other programs
        arrived = tl.atomic_add(arrivals_ptr + parent, 1, sem="acq_rel", scope="gpu")
        if arrived == num_below - 1:
            tl.store(arrivals_ptr + parent, 0)
            top = tl.full([BLOCK_G], float("-inf"), tl.float32)
            mass = tl.zeros([BLOCK_G], tl.float32)
            acc = tl.zeros([BLOCK_D, BLOCK_G], tl.float32)
            for below in range(0, num_below, WIDE):
                # As many at a time as fit into registers, so that their loads overlap.
                states = ()
                for i in tl.static_range(WIDE):
                    place = (first + below + i) * apart
                    there = below + i < num_below
                    state = _load_state(acc_ptr, sum_ptr, place, there, lanes, group, G, D)
                    states = states + (state,)  # noqa: RUF005 (no unpacking in kernels)
                for i in tl.static_range(WIDE):
                    top, mass, acc = _fold(top, mass, acc, *states[i])
            tl.debug_barrier()  # all threads have loaded before the next store overwrites
            num_nodes = (num_nodes + _FAN - 1) // _FAN
            arrivals_ptr += num_nodes
            apart *= _FAN
            node = parent
        else:
            num_nodes = 0
    return top, mass, acc, num_nodes == 1
