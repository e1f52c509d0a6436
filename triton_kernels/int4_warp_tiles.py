"""Products of 4-bit weights, packed as int4_packing.py says, and bfloat16 rows by warps: see warp_tiles.py.

A warp takes tiles of 16 outputs, and of each a step of UNROLL blocks of 128 inputs, WARPS blocks apart: WARPS
warps sum over different blocks of the same outputs. A lane's two words next to each other are its two
neighbours in each quarter of a block. Scales of groups of 64 and 128 are applied to the sums in float32,
those of groups of 32 to the weights, which rounds them to bfloat16; powers of two (MXFP4) are exact.

In CROWDED steps (see `add_steps`) whole numbers carry a factor of 1 / 128, as INT4_PAIRS makes them, those of
MXFP4 one of 2^-64, and so do the sums, until `unscaled` takes it out. The bits of e2m1, placed where bfloat16
has its own, make a number 2^126 too small, and a scale of 2^(s - 1) might be too large for bfloat16. Scales
of MXFP4 are to be 2^-69 to 2^65.

N outputs of a matrix, K inputs. HALVES is 2 for a gate and an up matrix that lie OUT outputs apart.
"""

# One kernel function that calls another looks like the call that raises outside of a kernel; a constexpr is a
# plain value inside of one.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false

import triton
import triton.language as tl

from triton_kernels.e2m1_packing import E2M1_PAIRS, scales_as_bf16
from triton_kernels.int4_packing import (
    BLOCK,
    BLOCK_BYTES,
    INT4_PAIRS,
    QUARTER,
    int4_base,
    int4_divisor,
)
from triton_kernels.warp_tiles import TILE, load_rows, load_rows_inside, load_weights, multiply_bf16

_BLOCK = tl.constexpr(BLOCK)
_BLOCK_BYTES = tl.constexpr(BLOCK_BYTES)
_QUARTER = tl.constexpr(QUARTER)
_TILE = tl.constexpr(TILE)

# As INT4_PAIRS, but not divided: a 4-bit number in the low bits of 128.0 is added to it; adding -128 less the
# zero point leaves the number. It has two shifts more, but layers over 8 rows are 7 % faster with it.
_PAIRS = tl.constexpr(
    "{ .reg .b32 a, b, c, d, one; "
    "mov.b32 one, 0x3f803f80; "
    "shr.u32 b, $4, 4; shr.u32 c, $4, 8; shr.u32 d, $4, 12; "
    "lop3.b32 a, $4, 0x000f000f, 0x43004300, 0xea; "
    "lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea; "
    "lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea; "
    "lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea; "
    "fma.rn.bf16x2 $0, a, one, $5; fma.rn.bf16x2 $1, b, one, $6; "
    "fma.rn.bf16x2 $2, c, one, $7; fma.rn.bf16x2 $3, d, one, $8; }"
)
_SCALED_PAIRS = tl.constexpr(
    "{ .reg .b16 s<4>; .reg .b32 f<4>; "
    "mov.b32 {s0, s2}, $5; mov.b32 {s1, s3}, $6; "
    "mov.b32 f0, {s0, s0}; mov.b32 f1, {s1, s1}; mov.b32 f2, {s2, s2}; mov.b32 f3, {s3, s3}; "
    + E2M1_PAIRS.value.replace("$5", "f0").replace("$6", "f1").replace("$7", "f2").replace("$8", "f3")
    + " }"
)


@triton.jit
def _numbers(words, values, MXFP4: tl.constexpr, CROWDED: tl.constexpr):
    """Two words -> the two inputs of each quarter of a block, bfloat16 in int32; see `unscaled`.

    Args:
        values: of each quarter what is added to whole numbers, twice; of e2m1 its `scales_as_bf16`.
    """
    if MXFP4:
        return tl.inline_asm_elementwise(
            _SCALED_PAIRS,
            "=r,=r,=r,=r,r,r,r",
            [words, values[0], values[1]],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            INT4_PAIRS if CROWDED else _PAIRS,
            "=r,=r,=r,=r,r,r,r,r,r",
            [words, values[0], values[1], values[2], values[3]],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def _twice(values):
    """bfloat16 -> int32 with the number twice."""
    bits = values.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return bits | (bits << 16)


@triton.jit
def _times(pairs, scale):
    """bfloat16 products of pairs in int32."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",
        "=r,r,r",
        [pairs, scale],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _all_times(pairs, scales):
    return (
        _times(pairs[0], _twice(scales[0])),
        _times(pairs[1], _twice(scales[1])),
        _times(pairs[2], _twice(scales[2])),
        _times(pairs[3], _twice(scales[3])),
    )


@triton.jit
def _base(zero, HAS_ZEROS: tl.constexpr, CROWDED: tl.constexpr):
    if HAS_ZEROS and CROWDED:
        return _twice(int4_base(zero, tl.bfloat16))
    elif HAS_ZEROS:
        return _twice((-128.0 - zero.to(tl.float32)).to(tl.bfloat16))
    else:  # -8 / 128 or -136, twice
        return tl.full(zero.shape, -0x427F4280 if CROWDED else -0x3CF73CF8, tl.int32)


@triton.jit
def _addends(zeros, HAS_ZEROS: tl.constexpr, CROWDED: tl.constexpr):
    return (
        _base(zeros[0], HAS_ZEROS, CROWDED),
        _base(zeros[1], HAS_ZEROS, CROWDED),
        _base(zeros[2], HAS_ZEROS, CROWDED),
        _base(zeros[3], HAS_ZEROS, CROWDED),
    )


@triton.jit
def unscaled(sums, MXFP4: tl.constexpr):
    """The sums without the factor that their numbers carry; whole numbers only of CROWDED steps."""
    return sums * (18446744073709551616.0 if MXFP4 else int4_divisor(tl.bfloat16))


@triton.jit
def _two_words(pointers):
    """Two int32 next to each other, at pointers that are multiples of 8 bytes."""
    return tl.inline_asm_elementwise(
        "ld.global.nc.v2.b32 {$0, $1}, [$2];",
        "=r,=r,l",
        [pointers.to(tl.int64)],
        dtype=(tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def _group_values(pointers, block, N, GROUP: tl.constexpr):
    """Scales or zero points of one output in the quarters of a block."""
    row = block * (_BLOCK // GROUP)
    first = tl.load(pointers + row * N)
    if GROUP == _BLOCK:
        return first, first, first, first
    elif GROUP == 2 * _QUARTER:
        third = tl.load(pointers + (row + 1) * N)
        return first, first, third, third
    else:
        second = tl.load(pointers + (row + 1) * N)
        return first, second, tl.load(pointers + (row + 2) * N), tl.load(pointers + (row + 3) * N)


@triton.jit
def _fetch(w_address, scales, zeros, block, N, GROUP: tl.constexpr, ZEROS: tl.constexpr, MXFP4: tl.constexpr):
    """What a warp needs of one tile and block: words, scales and zero points of its two outputs."""
    start = w_address + block.to(tl.int64) * (N * _BLOCK_BYTES)
    first = load_weights(start)
    second = load_weights(start + 8 * _BLOCK_BYTES)
    if MXFP4:
        a, b = _two_words(scales + block * N)
        scale = (a, a, a, a)
        more_scale = (b, b, b, b)
    else:
        scale = _group_values(scales, block, N, GROUP)
        more_scale = _group_values(scales + 8, block, N, GROUP)
    zero = scale
    more_zero = more_scale
    if ZEROS:
        zero = _group_values(zeros, block, N, GROUP)
        more_zero = _group_values(zeros + 8, block, N, GROUP)
    return first, second, scale, more_scale, zero, more_zero


@triton.jit
def _fetch_part(
    matrix,
    first_block,
    part,
    N: tl.constexpr,
    OUT: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    MXFP4: tl.constexpr,
    TILES: tl.constexpr,
    HALVES: tl.constexpr,
    WARPS: tl.constexpr,
):
    """One tile and block of `fetch_step`; parts are in the order of blocks, tiles, halves."""
    w_address, scales, zeros = matrix
    block = tl.minimum(first_block + part // (TILES * HALVES) * WARPS, (K + _BLOCK - 1) // _BLOCK - 1)
    output = part % HALVES * OUT + part // HALVES % TILES * _TILE
    return _fetch(
        w_address + tl.cast(output, tl.int64) * _BLOCK_BYTES, scales + output, zeros + output,
        block, N, GROUP, ZEROS, MXFP4,
    )  # fmt: skip


@triton.jit
def fetch_step(
    matrix,
    first_block,
    N: tl.constexpr,
    OUT: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    MXFP4: tl.constexpr,
    TILES: tl.constexpr,
    HALVES: tl.constexpr,
    UNROLL: tl.constexpr,
    WARPS: tl.constexpr,
):
    """All that a warp loads of the weight in one step.

    Args:
        matrix: as `lanes_of_matrix` returns it.
        first_block: of each lane; the step's other blocks are WARPS blocks apart. Past the last block the
            last one is loaded again.
    """
    all_of_it = ()
    for part in tl.static_range(UNROLL * TILES * HALVES):
        fetched = _fetch_part(matrix, first_block, part, N, OUT, K, GROUP, ZEROS, MXFP4, TILES, HALVES, WARPS)
        all_of_it = all_of_it + (fetched,)  # noqa: RUF005 (no unpacking in kernels)
    return all_of_it


@triton.jit
def lanes_of_matrix(
    w_ptr, scale_ptr, zero_ptr, expert, start, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    MXFP4: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Of each lane the address (int64) of its 16 bytes of the first block, and pointers to its values.

    Args:
        expert: which of several matrices [N, K].
        start: the first output of the first tile; of all threads or of each.
        WARPS: of the program.
    """
    BLOCKS: tl.constexpr = (K + _BLOCK - 1) // _BLOCK
    lane = tl.arange(0, 32 * WARPS) % 32
    first = tl.cast(expert, tl.int64) * (BLOCKS * N)
    output = start + lane // 4
    # MXFP4's scales of a lane's two outputs are neighbours.
    of_values = first + start + lane // 4 * 2 if MXFP4 else first * (_BLOCK // GROUP) + output
    w_address = w_ptr.to(tl.int64) + (first + output) * _BLOCK_BYTES + lane % 4 * 16
    return w_address, scale_ptr + of_values, zero_ptr + of_values


@triton.jit
def _two_outputs(word, other, of_group, GROUP: tl.constexpr, MXFP4: tl.constexpr, CROWDED: tl.constexpr):
    """The numbers of a lane's two outputs: of each quarter of a block a pair of inputs."""
    values, more_values, scale, more_scale = of_group
    a = _numbers(word, values, MXFP4, CROWDED)
    b = _numbers(other, more_values, MXFP4, CROWDED)
    if GROUP == _QUARTER and not MXFP4:
        a = _all_times(a, scale)
        b = _all_times(b, more_scale)
    return a, b


@triton.jit
def _add_block(
    acc,
    x,
    fetched,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    MXFP4: tl.constexpr,
    CROWDED: tl.constexpr,
):
    """acc (4 float32) plus the products of a tile and a block; x is 4 int32 of pairs for each quarter."""
    first, second, scale, more_scale, zero, more_zero = fetched
    if MXFP4:
        values = scales_as_bf16(scale[0])
        more_values = scales_as_bf16(more_scale[0])
    else:
        values = _addends(zero, ZEROS, CROWDED)
        more_values = _addends(more_zero, ZEROS, CROWDED)
    of_group = (values, more_values, scale, more_scale)
    nothing = tl.zeros(scale[0].shape, tl.float32)
    low = (nothing, nothing, nothing, nothing)
    high = low
    if GROUP == _QUARTER:
        low = acc
    if CROWDED:
        # Two words of a quarter lie next to each other in registers, as the instruction wants them of x.
        for u in tl.static_range(0, 4, 2):
            a, b = _two_outputs(first[u], second[u], of_group, GROUP, MXFP4, CROWDED)
            c, d = _two_outputs(first[u + 1], second[u + 1], of_group, GROUP, MXFP4, CROWDED)
            for quarter in tl.static_range(4):
                numbers = (a[quarter], b[quarter], c[quarter], d[quarter])
                pair = (x[quarter][u], x[quarter][u + 1])
                if GROUP == 2 * _QUARTER and quarter >= 2:
                    high = multiply_bf16(numbers, pair, high)
                else:
                    low = multiply_bf16(numbers, pair, low)
    else:
        # Two sums, because each product waits for the one before it in its sum.
        for u in tl.static_range(4):
            a, b = _two_outputs(first[u], second[u], of_group, GROUP, MXFP4, CROWDED)
            low = multiply_bf16((a[0], b[0], a[1], b[1]), (x[0][u], x[1][u]), low)
            high = multiply_bf16((a[2], b[2], a[3], b[3]), (x[2][u], x[3][u]), high)
        if GROUP != 2 * _QUARTER:
            low = (low[0] + high[0], low[1] + high[1], low[2] + high[2], low[3] + high[3])
    if GROUP == _QUARTER:
        return low
    s = scale[0].to(tl.float32)
    t = more_scale[0].to(tl.float32)
    acc = (acc[0] + low[0] * s, acc[1] + low[1] * s, acc[2] + low[2] * t, acc[3] + low[3] * t)
    if GROUP == 2 * _QUARTER:
        s = scale[2].to(tl.float32)
        t = more_scale[2].to(tl.float32)
        acc = (acc[0] + high[0] * s, acc[1] + high[1] * s, acc[2] + high[2] * t, acc[3] + high[3] * t)
    return acc


@triton.jit
def _load_quarters(address, block, lane, K: tl.constexpr, WHOLE: tl.constexpr):
    """The inputs of a row that a lane multiplies, in each quarter of a block; zeros from input K on."""
    start = address + block.to(tl.int64) * (2 * _BLOCK)
    if WHOLE:
        return (
            load_rows(start),
            load_rows(start + 2 * _QUARTER),
            load_rows(start + 4 * _QUARTER),
            load_rows(start + 6 * _QUARTER),
        )
    else:
        first = block * _BLOCK + lane % 4 * 8
        return (
            load_rows_inside(start, K - first),
            load_rows_inside(start + 2 * _QUARTER, K - first - _QUARTER),
            load_rows_inside(start + 4 * _QUARTER, K - first - 2 * _QUARTER),
            load_rows_inside(start + 6 * _QUARTER, K - first - 3 * _QUARTER),
        )


@triton.jit
def no_sums(ROW_TILES: tl.constexpr, TILES: tl.constexpr, HALVES: tl.constexpr, WARPS: tl.constexpr):
    """Zeros for `add_steps`: of each row tile, tile and half 4 float32. WARPS: of the program."""
    nothing = tl.zeros([32 * WARPS], tl.float32)
    acc = ()
    for _ in tl.static_range(ROW_TILES * TILES * HALVES):
        acc = acc + ((nothing, nothing, nothing, nothing),)  # noqa: RUF005
    return acc


@triton.jit
def _add_step(
    acc,
    weight,
    rows,
    first_block,
    matrix,
    next_block,
    FETCH: tl.constexpr,
    WHOLE: tl.constexpr,
    N: tl.constexpr,
    OUT: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    MXFP4: tl.constexpr,
    ROW_TILES: tl.constexpr,
    TILES: tl.constexpr,
    HALVES: tl.constexpr,
    UNROLL: tl.constexpr,
    WARPS: tl.constexpr,
    CROWDED: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """The sums plus the products of what `fetch_step` loaded; and the next step, if it is to FETCH one.

    Args:
        rows: of each row tile int64 of each lane: its 16 bytes of the first block of row l // 4.
        first_block: as of `fetch_step`.
        matrix, next_block: of the next step.
        WHOLE: all of the step's blocks are there; else inputs from K on count as zeros.
    """
    PARTS: tl.constexpr = TILES * HALVES
    lane = tl.arange(0, 32 * WARPS * BESIDE) % 32
    ahead = ()
    if FETCH and not CROWDED:
        ahead = fetch_step(matrix, next_block, N, OUT, K, GROUP, ZEROS, MXFP4, TILES, HALVES, UNROLL, WARPS)
    for u in tl.static_range(UNROLL):
        x = ()
        for row_tile in tl.static_range(ROW_TILES):
            quarters = _load_quarters(rows[row_tile], first_block + u * WARPS, lane, K, WHOLE)
            x = x + (quarters,)  # noqa: RUF005
        for part in tl.static_range(PARTS):
            fetched = weight[u * PARTS + part]
            new = ()
            for place in tl.static_range(ROW_TILES * PARTS):
                if place % PARTS == part:
                    total = _add_block(acc[place], x[place // PARTS], fetched, GROUP, ZEROS, MXFP4, CROWDED)
                    new = new + (total,)  # noqa: RUF005
                else:
                    new = new + (acc[place],)  # noqa: RUF005
            acc = new
            if FETCH and CROWDED:
                fetched = _fetch_part(
                    matrix, next_block, u * PARTS + part, N, OUT, K, GROUP, ZEROS, MXFP4, TILES, HALVES, WARPS
                )
                ahead = ahead + (fetched,)  # noqa: RUF005
    return acc, ahead if FETCH else weight


@triton.jit
def add_steps(
    acc,
    weight,
    rows,
    matrix,
    following,
    N: tl.constexpr,
    OUT: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    MXFP4: tl.constexpr,
    ROW_TILES: tl.constexpr,
    TILES: tl.constexpr,
    HALVES: tl.constexpr,
    UNROLL: tl.constexpr,
    WARPS: tl.constexpr,
    FOLLOWED: tl.constexpr,
    CROWDED: tl.constexpr,
    BESIDE: tl.constexpr = 1,
):
    """The sums over all inputs, and the first step of what follows; the loads are a step ahead.

    Args:
        weight: the matrix's first step.
        following: the next matrix, if FOLLOWED.
        CROWDED: many warps share a multiprocessor, so instructions count, not what one of them waits for:
            each sum is one chain, and a part of the next step is loaded when that part of this one is
            multiplied, into the same registers. Else two chains, and the next step is loaded first.
        BESIDE: groups of WARPS warps in the program, each of other outputs.
    """
    BLOCKS: tl.constexpr = (K + _BLOCK - 1) // _BLOCK
    STEPS: tl.constexpr = (BLOCKS + UNROLL * WARPS - 1) // (UNROLL * WARPS)
    WHOLE: tl.constexpr = K % (_BLOCK * UNROLL * WARPS) == 0
    warp = tl.arange(0, 32 * WARPS * BESIDE) // 32 % WARPS
    for step in range(STEPS - 1):
        block = warp + step * (UNROLL * WARPS)
        acc, weight = _add_step(
            acc, weight, rows, block, matrix, block + UNROLL * WARPS, True, True, N, OUT, K, GROUP, ZEROS,
            MXFP4, ROW_TILES, TILES, HALVES, UNROLL, WARPS, CROWDED, BESIDE,
        )  # fmt: skip
    block = warp + (STEPS - 1) * (UNROLL * WARPS)
    return _add_step(
        acc, weight, rows, block, following, warp, FOLLOWED, WHOLE, N, OUT, K, GROUP, ZEROS, MXFP4, ROW_TILES,
        TILES, HALVES, UNROLL, WARPS, CROWDED, BESIDE,
    )  # fmt: skip
