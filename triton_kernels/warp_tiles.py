"""Products over few rows in which each warp multiplies tiles of 16 outputs straight from registers.

A tensor of these functions has one element for each thread of a program: thread 32 * w + l is lane l of warp
w. A lane's 16-byte loads are what the matrix instruction wants of it, so nothing passes shared memory:

    lane l holds of a tile the outputs l // 4 and 8 + l // 4, and of x the row l // 4
    of the inputs it holds the same ones of both, which lanes with the same l % 4 share

The instruction adds up over inputs in any order, as long as both operands have the same. A tile's sums are
four numbers a lane: outputs l // 4 (two) and 8 + l // 4 (two), rows 2 * (l % 4) and 2 * (l % 4) + 1.

For NVIDIA GPUs from 8.0 on, not interpreted, and not inside of torch.compile: loads are volatile.
"""

# One kernel function that calls another looks like the call that raises outside of a kernel; the default of a
# constexpr is a plain value.
# pyright: reportCallIssue=false, reportArgumentType=false

import triton
import triton.language as tl

TILE = 16
"""Outputs of a tile."""
ROWS = 8
"""Rows that one instruction multiplies."""


@triton.jit
def load_weights(address):
    """16 bytes at each address (int64), which no kernel writes and nobody reads again: four int32."""
    return tl.inline_asm_elementwise(
        "ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l",
        [address],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_rows(address):
    """16 bytes at each address (int64), which other programs read, too: four int32."""
    return tl.inline_asm_elementwise(
        "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l",
        [address],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_rows_inside(address, left):
    """As load_rows where `left` (int32) is more than 0; elsewhere zeros, and nothing is loaded."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $5, 0; "
        "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        "@p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }",
        "=&r,=&r,=&r,=&r,l,r",
        [address, left],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def multiply_bf16(a, b, c):
    """c (4 float32) plus the product of 16 outputs a (4 int32, two bfloat16 each) and 8 rows b (2 int32)."""
    return tl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
        "{$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def sum_of_warps(c, WARPS: tl.constexpr, BESIDE: tl.constexpr = 1):
    """The sums of WARPS warps' tiles (4 float32 each): [BESIDE * 32 lanes, 2 rows, 2 outputs]."""
    sums = tl.join(tl.join(c[0], c[1]), tl.join(c[2], c[3]))
    if WARPS == 1:
        return sums
    return tl.reshape(tl.sum(tl.reshape(sums, [BESIDE, WARPS, 32, 2, 2]), 1), [BESIDE * 32, 2, 2])


@triton.jit
def place_in_tile(STRIDE: tl.constexpr = 0, BESIDE: tl.constexpr = 1):
    """Of what sum_of_warps returns: (outputs, rows), which broadcast to [BESIDE * 32, 2, 2].

    STRIDE: from one of BESIDE to the next, in outputs.
    """
    lanes = tl.arange(0, 32 * BESIDE)[:, None, None]
    outputs = lanes // 32 * STRIDE + lanes % 32 // 4 + 8 * tl.arange(0, 2)[None, None, :]
    return outputs, lanes % 4 * 2 + tl.arange(0, 2)[None, :, None]
