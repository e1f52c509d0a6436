"""Weights on their way into L2 before the kernel that reads them has begun.

Some kernels of a small decode step leave memory idle: they wait for each other's few bytes, or for other
ranks. Programs of theirs can ask for what is needed next, which takes a few instructions, holds nobody up and
changes no result. For Hopper and later: early_start.can_start_early.
https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-prefetch
"""

# pyright: reportCallIssue=false

import triton
import triton.language as tl


@triton.jit
def prefetch_to_l2(number, ptr, num_bytes, part, num_parts):
    """`number`, int32, once this program has asked for one part of the `num_bytes` at `ptr`, less than 2**31.

    The bytes are cut into `num_parts` equal parts, of which this is number `part`, from 0; the program's
    threads ask for equal pieces of it. Up to 15 bytes at the end may be left out.

    Declared pure, for the reason given in early_start.py. So unless something depends on the result, nothing
    is asked for; and an address to store at must not, or torch.compile takes the tensor at ptr for written.
    """
    part_bytes = tl.cdiv(num_bytes, num_parts * 16) * 16
    begin = part.to(tl.int64) * part_bytes
    num_bytes = tl.minimum(num_bytes // 16 * 16 - begin, part_bytes).to(tl.int32)
    piece_bytes = tl.cdiv(part_bytes, tl.extra.cuda.num_threads() * 16) * 16
    address = (ptr.to(tl.int64, bitcast=True) & -16) + begin
    return tl.inline_asm_elementwise(
        """
        {
            .reg .pred any;
            .reg .b32 thread, begin, size;
            .reg .b64 address;
            mov.u32 thread, %tid.x;
            mul.lo.s32 begin, thread, $4;
            sub.s32 size, $3, begin;
            min.s32 size, size, $4;
            setp.gt.s32 any, size, 0;
            cvt.s64.s32 address, begin;
            add.s64 address, address, $2;
            @any cp.async.bulk.prefetch.L2.global [address], size;
            mov.b32 $0, $1;
        }
        """,
        "=r,r,l,r,r",
        [number, address, num_bytes, piece_bytes],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
