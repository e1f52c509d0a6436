"""Prefill attention on Hopper GPUs: paged_prefill for 16-bit types, with warp-specialised matrix products.

Shape letters, formulas and edge cases are those of paged_prefill.py. G <= 64 query heads per KV head, D one
of 64, 128, 256, pages of 16 tokens or more, pools with one token stride through all pages (`takes` checks a
call). Written in Gluon, Triton's language of explicit layouts and warps.

A program processes 2 * (64 // G) neighbouring queries of one row for HEADS KV heads, one after the other. Its
twelve warps have roles:
    two groups of four   64 query rows (64 // G tokens times G heads) each. While the matrix unit computes the
                         scores of key tile j and the values of tile j - 1, the group computes its softmax;
                         the groups alternate, so that one's softmax overlaps the other's products
    one warp for keys,   copy the pages of the next tiles to shared memory with the tensor copy engine, a box
    one for values       of at most a page and 64 columns per instruction. They fill pages without tokens of
                         the row with zeros, and zero the values after the row's last token (its keys are
                         masked, but NaN times weight 0 is NaN)
    two for queries      fetch the next KV head's queries while the current ones are in use
With several KV heads per program only the first one's start-up time is visible. Key tiles that no query sees
are skipped, tiles that all queries see are not masked, and programs with long tiles start first.

Cost: 4 * H * D FLOP per (query, seen key) pair, and the pages once per 2 * (64 // G) queries from L2.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; calling one from
# another looks like the call that raises outside of a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# Gluon's compile-time values are plain objects to a reader of types, and its tensors are built by them.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from triton_kernels.gpu import gpu_of
from triton_kernels.launch import ceil_div
from triton_kernels.tuning import tuned

_LOG2_E = gl.constexpr(1.4426950408889634)
_CONSUMER_REGISTERS = 232
_PRODUCER_REGISTERS = 40
_COLUMNS = 64  # of a box: 128 bytes, the widest that shared memory's swizzle takes
_BOX_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

# Gluon's names change: async_load is there since Triton 3.8, without the older name, reinterpret since 3.9.
# thread_barrier became barrier in 3.7: both are what tl.debug_barrier is.
_copy_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_copy_block = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_reinterpret = (
    getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
)


class HopperPrefillConfig(NamedTuple):
    """A launch configuration of paged_prefill_hopper."""

    block_n: int  # keys per tile
    stages: int  # tiles of keys, and of values, in shared memory
    heads: int  # KV heads that a program goes through; divides K


def default_hopper_config(
    head_dim: int, num_kv_heads: int, tiles: int, processors: int
) -> HopperPrefillConfig:
    """The configuration if none is given or tuned; `tiles` of queries at most, for each KV head."""
    heads = 4 if num_kv_heads % 4 == 0 and tiles * (num_kv_heads // 4) >= 3 * processors else 1
    return HopperPrefillConfig(block_n=64 if head_dim > 128 else 128, stages=2, heads=heads)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _box_rows(pages_ptr, n0, length, S: gl.constexpr, BOX: gl.constexpr, BOXES: gl.constexpr):
    """The pool token at which each box of the key tile at n0 starts; negative = no box."""
    rows = ()
    for i in gl.static_range(BOXES):
        token = n0 + i * BOX
        page = gl.load(pages_ptr + token // S, mask=token < length, other=-1)
        rows = rows + (page * S + token % S,)  # noqa: RUF005 (the compiler knows no star)
    return rows


@gluon.jit
def _fetch_tiles(
    desc, pages_ptr, boxes, full, empty, first_head, head_stride, low, high, length,
    S: gl.constexpr, BOX: gl.constexpr, BLOCK_N: gl.constexpr, SLABS: gl.constexpr, STAGES: gl.constexpr,
    HEADS: gl.constexpr, CLEAN: gl.constexpr,
):  # fmt: skip
    """One warp: copies keys or values, tile after tile, into slots that both groups have finished with.

    CLEAN zeroes the tokens after the row's last one; that tile is first copied to full[STAGES].
    """
    BOXES: gl.constexpr = BLOCK_N // BOX
    num_tiles = (high - low + BLOCK_N - 1) // BLOCK_N
    pieces = _reinterpret(boxes, boxes.dtype, [boxes.shape[0] * BOX // 16, 16, 64], boxes.layout)
    next_rows = _box_rows(pages_ptr, low, length, S, BOX, BOXES)
    for h in range(HEADS):
        column = (first_head + h) * head_stride
        for j in range(num_tiles):
            n0 = low + j * BLOCK_N
            count = h * num_tiles + j
            slot = count % STAGES
            rows = next_rows
            following = gl.where(j + 1 < num_tiles, n0 + BLOCK_N, low)
            next_rows = _box_rows(pages_ptr, following, length, S, BOX, BOXES)
            first_box = slot * (SLABS * BOXES)
            mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
            ragged = (n0 + BLOCK_N > length) & (length % BOX != 0)
            landed = full.index(gl.where(ragged, STAGES, slot)) if CLEAN else full.index(slot)
            mbarrier.expect(landed, BLOCK_N * SLABS * 64 * 2)
            for i in gl.static_range(BOXES):
                for slab in gl.static_range(SLABS):
                    box = boxes.index(first_box + (slab * BOXES + i))
                    _copy_box(desc, [rows[i], column + slab * 64], landed, box)
            if CLEAN:  # noqa: SIM102 (this one is decided by the compiler)
                if ragged:
                    mbarrier.wait(full.index(STAGES), h & 1)
                    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
                    sixteen = gl.arange(0, 16, gl.SliceLayout(1, layout))
                    for piece in range(length % BOX // 16, BOX // 16):
                        filled = piece * 16 + sixteen < length % BOX
                        for slab in gl.static_range(SLABS):
                            last_box = first_box + slab * BOXES + (length - n0) // BOX
                            tokens = pieces.index(last_box * (BOX // 16) + piece)
                            tokens.store(gl.where(filled[:, None], tokens.load(layout), 0.0))
                    fence_async_shared()
                    tl.debug_barrier()
                    mbarrier.arrive(full.index(slot))


@gluon.jit
def _fetch_queries(
    q_ptr, slabs, full, empty, first, end, first_head, q_row_stride, q_head_stride,
    G: gl.constexpr, SLABS: gl.constexpr, HEADS: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Two warps: fetch both groups' queries for one KV head after the other; zeros beyond the row."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    place = gl.arange(0, 64, gl.SliceLayout(1, layout))
    lanes = gl.arange(0, 64, gl.SliceLayout(0, layout))
    for h in range(HEADS):
        buffer = h % BUFFERS
        mbarrier.wait(empty.index(buffer), ((h // BUFFERS) & 1) ^ 1)
        for group in range(2):
            token = first + group * (64 // G) + place // G
            mask = ((place < 64 // G * G) & (token < end))[:, None]
            offsets = token.to(gl.int64) * q_row_stride + ((first_head + h) * G + place % G) * q_head_stride
            for slab in gl.static_range(SLABS):
                _copy_block(
                    slabs.index((buffer * 2 + group) * SLABS + slab),
                    q_ptr + offsets[:, None] + (slab * 64 + lanes)[None, :],
                    mask=mask,
                )
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        tl.debug_barrier()
        mbarrier.arrive(full.index(buffer))


@gluon.jit
def _softmax(
    scores, top, mass, position, n0,
    scale: gl.constexpr, window: gl.constexpr, softcap: gl.constexpr, MASKED: gl.constexpr,
    BLOCK_N: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """The weights of one key tile, the factor on the sums so far, the new maximum (base 2), the new mass."""
    to_base_2: gl.constexpr = _LOG2_E if softcap > 0 else scale * _LOG2_E
    if softcap > 0:
        scores = softcap - 2 * softcap / (1 + gl.exp2(scores * (2 * scale * _LOG2_E / softcap)))
    if MASKED:
        token = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        seen = token[None, :] <= position[:, None]
        if window > 0:
            seen = seen & (token[None, :] > position[:, None] - window)
        scores = gl.where(seen, scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1) * to_base_2)
    # With a window a query may see nothing of the first tile: avoid -inf minus -inf.
    shift = gl.where(new_top == float("-inf"), 0.0, new_top) if window > 0 else new_top
    weights = gl.exp2(scores * to_base_2 - shift[:, None])
    shrink = gl.exp2(top - shift)
    return weights, shrink, new_top, mass * shrink + gl.sum(weights, 1)


@gluon.jit
def _attend(
    acc, weights, top, mass, position, low, begin, end, tiles_before, turns_before, q, k_tiles, v_tiles,
    k_full, k_empty, v_full, v_empty, my_turn, other_turn,
    scale: gl.constexpr, window: gl.constexpr, softcap: gl.constexpr, MASKED: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    s_layout: gl.constexpr, o_layout: gl.constexpr, p_layout: gl.constexpr,
):  # fmt: skip
    """Process the scores of key tiles begin : end, each with the values of the previous tile.

    `weights` are those of the last tile processed, on entry and on return.
    """
    for j in range(begin, end):
        count = tiles_before + j
        slot = count % STAGES
        old = (count - 1) % STAGES
        mbarrier.wait(k_full.index(slot), (count // STAGES) & 1)
        mbarrier.wait(my_turn, (turns_before + j - 1) & 1)
        zeros = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
        scores = warpgroup_mma(q, k_tiles.index(slot).permute([1, 0]), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(old), ((count - 1) // STAGES) & 1)
        acc = warpgroup_mma(weights, v_tiles.index(old), acc, is_async=True)
        mbarrier.arrive(other_turn)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_empty.index(slot))
        new_weights, shrink, top, mass = _softmax(
            scores, top, mass, position, low + j * BLOCK_N, scale, window, softcap, MASKED, BLOCK_N, s_layout
        )
        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
        mbarrier.arrive(v_empty.index(old))
        weights = gl.convert_layout(new_weights.to(q.dtype), p_layout)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
    return acc, weights, top, mass


@gluon.jit
def _attend_group(
    out_ptr, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
    first, end, length, first_head, low, high, first_position,
    scale: gl.constexpr, window: gl.constexpr, softcap: gl.constexpr,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    HEADS: gl.constexpr, Q_BUFFERS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Four warps: attention of 64 query rows over all key tiles, for one KV head after the other."""
    BLOCK_Q: gl.constexpr = 64 // G
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    io_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    my_turn = turns.index(GROUP)
    other_turn = turns.index(1 - GROUP)

    first += GROUP * BLOCK_Q
    first_position += GROUP * BLOCK_Q
    position = first_position + gl.arange(0, 64, gl.SliceLayout(1, s_layout)) // G
    position = gl.minimum(position, length - 1)
    num_tiles = (high - low + BLOCK_N - 1) // BLOCK_N
    full_tiles = (first_position + 1 - low) // BLOCK_N if window == 0 else low * 0
    full_tiles = gl.minimum(gl.maximum(full_tiles, 1), num_tiles)
    if GROUP == 0:
        mbarrier.arrive(my_turn)
    for h in range(HEADS):
        buffer = h % Q_BUFFERS
        q = q_tiles.index(buffer * 2 + GROUP)
        before = h * num_tiles
        turns_before = h * (num_tiles - 1)
        top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
        mass = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_layout))
        acc = gl.zeros([64, D], gl.float32, o_layout)

        mbarrier.wait(q_full.index(buffer), (h // Q_BUFFERS) & 1)
        mbarrier.wait(k_full.index(before % STAGES), (before // STAGES) & 1)
        zeros = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
        scores = warpgroup_mma(
            q, k_tiles.index(before % STAGES).permute([1, 0]), zeros, use_acc=False, is_async=True
        )
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(before % STAGES))
        weights, _, top, mass = _softmax(
            scores, top, mass, position, low, scale, window, softcap, True, BLOCK_N, s_layout
        )
        weights = gl.convert_layout(weights.to(q.dtype), p_layout)
        acc, weights, top, mass = _attend(
            acc, weights, top, mass, position, low, 1, full_tiles, before, turns_before, q, k_tiles, v_tiles,
            k_full, k_empty, v_full, v_empty, my_turn, other_turn,
            scale, window, softcap, False, BLOCK_N, STAGES, s_layout, o_layout, p_layout,
        )  # fmt: skip
        acc, weights, top, mass = _attend(
            acc, weights, top, mass, position, low, full_tiles, num_tiles, before, turns_before, q, k_tiles,
            v_tiles, k_full, k_empty, v_full, v_empty, my_turn, other_turn,
            scale, window, softcap, True, BLOCK_N, STAGES, s_layout, o_layout, p_layout,
        )  # fmt: skip
        last = before + num_tiles - 1
        mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
        acc = warpgroup_mma(weights, v_tiles.index(last % STAGES), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(last % STAGES))
        mass = gl.where(mass > 0, mass, 1.0)
        acc = acc * gl.convert_layout(1.0 / mass, gl.SliceLayout(1, o_layout))[:, None]
        # The outputs go through the queries' shared memory, so that whole lines are written.
        q.store(acc.to(q.dtype))
        tl.debug_barrier()
        out = q.load(io_layout)
        place = gl.arange(0, 64, gl.SliceLayout(1, io_layout))
        lanes = gl.arange(0, D, gl.SliceLayout(0, io_layout))
        token = first + place // G
        mask = ((place < BLOCK_Q * G) & (token < end))[:, None]
        offsets = (token.to(gl.int64) * H + (first_head + h) * G + place % G) * D
        gl.store(out_ptr + offsets[:, None] + lanes[None, :], out, mask=mask)
        tl.debug_barrier()
        mbarrier.arrive(q_empty.index(buffer))


@gluon.jit(do_not_specialize=["num_tokens", "num_rows"])
def _paged_prefill_hopper_kernel(
    q_ptr,
    k_desc,
    v_desc,
    page_table_ptr,
    row_ids_ptr,
    context_len_ptr,
    row_start_ptr,
    out_ptr,
    num_tokens,
    num_rows,
    page_table_stride,
    q_row_stride,
    q_head_stride,
    k_head_stride,
    v_head_stride,
    scale: gl.constexpr,
    window: gl.constexpr,
    softcap: gl.constexpr,
    H: gl.constexpr,
    K: gl.constexpr,
    D: gl.constexpr,
    S: gl.constexpr,
    BOX: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    HEADS: gl.constexpr,
    Q_BUFFERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    G: gl.constexpr = H // K
    BLOCK_Q: gl.constexpr = 2 * (64 // G)
    BLOCK_R: gl.constexpr = 128
    SLABS: gl.constexpr = D // 64
    NUM_BOXES: gl.constexpr = STAGES * SLABS * BLOCK_N // BOX
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    first_head = gl.program_id(0) % (K // HEADS) * HEADS

    # The tile is the target-th from the end, so that long ones start first.
    target = gl.program_id(0) // (K // HEADS)
    num_targets = gl.num_programs(0) // (K // HEADS)
    r_layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    rows_before = target * 0
    row_begin = target * 0
    row_tiles = target * 0
    num_tiles = target * 0
    for r0 in range(0, num_rows, BLOCK_R):
        rows = num_rows - 1 - r0 - gl.arange(0, BLOCK_R, r_layout)
        new = gl.load(row_start_ptr + rows + 1, mask=rows >= 0, other=0)
        new -= gl.load(row_start_ptr + rows, mask=rows >= 0, other=0)
        tiles = (new + BLOCK_Q - 1) // BLOCK_Q
        ends = num_tiles + gl.associative_scan(tiles, 0, _add)
        before = ends <= target
        rows_before += gl.sum(before.to(gl.int32), 0)
        row_begin = gl.maximum(row_begin, gl.max(gl.where(before, ends, 0), 0))
        row_tiles += gl.sum(gl.where((ends > target) & (ends - tiles <= target), tiles, 0), 0)
        num_tiles += gl.sum(tiles, 0)
    row = num_rows - 1 - rows_before
    tile = row_tiles - 1 - (target - row_begin)

    if target >= num_tiles:
        # There is always a spare program. The spare programs write zeros for the padding tokens.
        flat_layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
        first = gl.load(row_start_ptr + num_rows) + target - num_tiles
        for token in range(first, num_tokens, num_targets - num_tiles):
            line_ptr = out_ptr + (token.to(gl.int64) * H + first_head * G) * D
            for i in range(0, HEADS * G * D, 1024):
                lanes = i + gl.arange(0, 1024, flat_layout)
                zeros = gl.zeros([1024], dtype, flat_layout)
                gl.store(line_ptr + lanes, zeros, mask=lanes < HEADS * G * D)
    else:
        begin = gl.load(row_start_ptr + row)
        end = gl.load(row_start_ptr + row + 1)
        length = gl.load(context_len_ptr + row)
        pages_ptr = page_table_ptr + gl.load(row_ids_ptr + row).to(gl.int64) * page_table_stride
        first = begin + tile * BLOCK_Q
        first_position = length - end + first
        high = gl.minimum(length, first_position + BLOCK_Q)
        low = high * 0
        if window > 0:
            low = gl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N

        # A tile is SLABS slabs of 64 columns, a slab is the tile's boxes one after the other.
        layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        k_boxes = gl.allocate_shared_memory(dtype, [NUM_BOXES, BOX, 64], layout)
        v_boxes = gl.allocate_shared_memory(dtype, [NUM_BOXES, BOX, 64], layout)
        k_tiles = _reinterpret(k_boxes, dtype, [STAGES, BLOCK_N, D], layout)
        v_tiles = _reinterpret(v_boxes, dtype, [STAGES, BLOCK_N, D], layout)
        q_slabs = gl.allocate_shared_memory(dtype, [Q_BUFFERS * 2 * SLABS, 64, 64], layout)
        q_tiles = _reinterpret(q_slabs, dtype, [Q_BUFFERS * 2, 64, D], layout)
        bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
        q_full = gl.allocate_shared_memory(gl.int64, [Q_BUFFERS, 1], bar_layout)
        q_empty = gl.allocate_shared_memory(gl.int64, [Q_BUFFERS, 1], bar_layout)
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
        k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], bar_layout)
        v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
        turns = gl.allocate_shared_memory(gl.int64, [2, 1], bar_layout)
        for i in gl.static_range(Q_BUFFERS):
            mbarrier.init(q_full.index(i), count=1)
            mbarrier.init(q_empty.index(i), count=2)
        for i in gl.static_range(STAGES):
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(v_full.index(i), count=1)
            mbarrier.init(k_empty.index(i), count=2)
            mbarrier.init(v_empty.index(i), count=2)
        mbarrier.init(v_full.index(STAGES), count=1)
        for i in gl.static_range(2):
            mbarrier.init(turns.index(i), count=1)

        gl.warp_specialize(
            [
                (_attend_group, (
                    out_ptr, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    turns, first, end, length, first_head, low, high, first_position,
                    scale, window, softcap, H, G, D, BLOCK_N, STAGES, HEADS, Q_BUFFERS, 0,
                )),
                (_attend_group, (
                    out_ptr, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    turns, first, end, length, first_head, low, high, first_position,
                    scale, window, softcap, H, G, D, BLOCK_N, STAGES, HEADS, Q_BUFFERS, 1,
                )),
                (_fetch_tiles, (
                    k_desc, pages_ptr, k_boxes, k_full, k_empty, first_head, k_head_stride, low, high, length,
                    S, BOX, BLOCK_N, SLABS, STAGES, HEADS, False,
                )),
                (_fetch_tiles, (
                    v_desc, pages_ptr, v_boxes, v_full, v_empty, first_head, v_head_stride, low, high, length,
                    S, BOX, BLOCK_N, SLABS, STAGES, HEADS, True,
                )),
                (_fetch_queries, (
                    q_ptr, q_slabs, q_full, q_empty, first, end, first_head, q_row_stride, q_head_stride,
                    G, SLABS, HEADS, Q_BUFFERS,
                )),
            ],
            [4, 1, 1, 2],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


def takes(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether paged_prefill_hopper supports this call; reads nothing from the device."""
    if q.device.type != "cuda" or not gpu_of(q.device).has_wgmma:
        return False
    _, num_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads, _ = k_cache.shape
    if q.dtype not in (torch.bfloat16, torch.float16) or head_dim not in (64, 128, 256):
        return False
    if page_size < 16 or num_heads // num_kv_heads > 64 or num_pages * page_size >= 1 << 31:
        return False
    if q.stride(2) != 1 or q.stride(0) % 16 or q.stride(1) % 16 or q.data_ptr() % 16:
        return False
    return all(
        pool.dtype == q.dtype
        and pool.stride(3) == 1
        and pool.stride(2) % 8 == 0
        and pool.stride(1) % 8 == 0
        and pool.stride(0) == page_size * pool.stride(1)
        and pool.data_ptr() % 16 == 0
        for pool in (k_cache, v_cache)
    )


def _descriptor(pool: Tensor, box: int) -> TensorDescriptor:
    """The pool [P, S, K, D] as a matrix of tokens times head columns, copied in boxes of `box` tokens."""
    num_pages, page_size, num_kv_heads, head_dim = pool.shape
    shape = [num_pages * page_size, (num_kv_heads - 1) * pool.stride(2) + head_dim]
    return TensorDescriptor(pool, shape, [pool.stride(1), 1], [box, _COLUMNS], _BOX_LAYOUT)


def paged_prefill_hopper(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_ids: Tensor,
    context_len: Tensor,
    row_start: Tensor,
    max_query_len: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    kv_scales: Tensor | None = None,
    config: HopperPrefillConfig | None = None,
) -> Tensor:
    """paged_prefill by this file's kernel, which must take it; max_query_len and kv_scales are not used."""
    num_tokens, num_heads, head_dim = q.shape
    num_rows = row_ids.shape[0]
    _, page_size, num_kv_heads, _ = k_cache.shape
    block_q = 2 * (64 // (num_heads // num_kv_heads))
    # An upper bound of the tiles, plus one: sum of ceil(n_r / block_q) < T / block_q + R.
    tiles = ceil_div(num_tokens, block_q) + num_rows
    if config is None:
        default = default_hopper_config(head_dim, num_kv_heads, tiles, gpu_of(q.device).multiprocessors)
        exact = (head_dim, num_heads // num_kv_heads, num_kv_heads)
        config = tuned(
            default, "paged_prefill_hopper", q.device, q.dtype, exact, near=(page_size,), size=num_tokens
        )
        # A batch with fewer tiles than the tuned one must not leave multiprocessors idle.
        config = config._replace(heads=min(config.heads, default.heads))
    box = min(page_size, config.block_n)
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    grid = (tiles * (num_kv_heads // config.heads),)
    _paged_prefill_hopper_kernel[grid](
        q,
        _descriptor(k_cache, box),
        _descriptor(v_cache, box),
        page_table,
        row_ids,
        context_len,
        row_start,
        out,
        num_tokens,
        num_rows,
        page_table.stride(0),
        q.stride(0),
        q.stride(1),
        k_cache.stride(2),
        v_cache.stride(2),
        scale,
        window,
        softcap,
        num_heads,
        num_kv_heads,
        head_dim,
        page_size,
        box,
        config.block_n,
        config.stages,
        config.heads,
        2 if config.heads > 1 and head_dim <= 128 else 1,
        _CONSUMER_REGISTERS,
        _PRODUCER_REGISTERS,
        num_warps=4,
    )
    return out
