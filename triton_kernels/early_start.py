"""Programmatic dependent launch: kernels that may start while the kernel before them still runs.

A kernel of EARLY_KERNELS passes a number, on which its loads of what other kernels write depend, through
`after_predecessor`: programs may start while the predecessor ends, and see all that it stored afterwards.
Whoever launches the kernels decides: without the launch attribute, or the edge in a CUDA graph, the
instructions cost next to nothing and change nothing.

Promise: where the GPU has no such launches (before Hopper), nothing of it is in the kernels.
https://docs.nvidia.com/cuda/cuda-programming-guide/04-special-topics/programmatic-dependent-launch.html
"""

# Calling a function of a kernel looks like calling an object; a constexpr is a plain value inside of one.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl

EARLY_KERNELS: dict[str, str | None] = {
    "_add_rms_norm_kernel": None,
    "_all_reduce_kernel": None,
    "_linear_kernel": None,
    "_norm_router_kernel": None,
    "_paged_decode_kernel": None,
    "_pairs_down_kernel": "_pairs_up_kernel",
    "_pairs_up_kernel": None,
    "_rms_norm_kernel": None,
    "_rope_store_kernel": None,
    "_silu_mul_kernel": None,
    "_split_linear_kernel": None,
    "_sum_splits_kernel": None,
    "_tiled_linear_kernel": None,
}
"""Names of the kernels that may start early, each with the only kernel that may be before it; None = any.

Every program waits before it stores, and before it loads what others store, but for two exceptions. What was
stored before a kernel that is not named here may be loaded at any time behind it: it began when all before it
had ended, and no kernel begins before those in front of it have begun. In a decode step these are the step's
inputs (positions, slots, lengths, the page table): behind them comes the embedding, which is torch's. And one
that names the kernel before it may load what that does not store, if that lets the next start no sooner than
all of its programs have waited or ended. At least one program of a kernel must wait.
"""


@torch.compiler.assume_constant_result
def can_start_early(device: torch.device) -> bool:
    """Whether kernels for this device have the instructions."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


_WAIT = tl.constexpr("griddepcontrol.wait; ")
_START_NEXT = tl.constexpr("griddepcontrol.launch_dependents; ")


@triton.jit
def _behind(instructions: tl.constexpr, number, EARLY: tl.constexpr, PURE: tl.constexpr):
    """`number`, int32, when the instructions have run."""
    if EARLY:
        return tl.inline_asm_elementwise(
            instructions + "mov.b32 $0, $1;", "=r,r", [number], dtype=tl.int32, is_pure=PURE, pack=1
        )
    else:
        return number


@triton.jit
def after_predecessor(number, EARLY: tl.constexpr):
    """`number`, int32, as soon as the kernel before this one has ended.

    Declared pure, as all of these, because torch.compile takes every argument of a kernel with other inline
    assembly for written. So only what depends on the result is sure to come afterwards.
    """
    return _behind(_WAIT, number, EARLY, PURE=True)


@triton.jit
def start_next_and_wait(number, EARLY: tl.constexpr):
    """`after_predecessor`, and the next kernel may start before that: where it is of few small programs."""
    return _behind(_START_NEXT + _WAIT, number, EARLY, PURE=True)


@triton.jit
def between_kernels(number, EARLY: tl.constexpr):
    """`after_predecessor`, and the next kernel may start right then: for kernels of few small programs."""
    return _behind(_WAIT + _START_NEXT, number, EARLY, PURE=True)


@triton.jit
def start_next_if_few(number, most: tl.constexpr, EARLY: tl.constexpr):
    """`number`, int32; if it is at most `most`, the next kernel may start once all programs have begun."""
    if EARLY:
        return tl.inline_asm_elementwise(
            "{.reg .pred p; setp.le.s32 p, $1, $2; @p griddepcontrol.launch_dependents; mov.b32 $0, $1;}",
            "=r,r,r",
            [number, most],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return number


@triton.jit
def let_next_start(values, EARLY: tl.constexpr):
    """`values`, float32; once all programs have them, or have ended, the next kernel may start.

    A kernel that never says so lets the next one start when its programs have ended.
    """
    if EARLY:
        return tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.b32 $0, $1;",
            "=f,f",
            [values],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return values


# The two below are for kernels that torch.compile does not see: it would take all their tensors for written.


@triton.jit
def let_next_start_here(number, EARLY: tl.constexpr):
    """`number`, int32; once all programs are here, or have ended, the next kernel may start."""
    return _behind(_START_NEXT, number, EARLY, PURE=False)


@triton.jit
def fetch_into_l2(pointers):
    """Asks for the lines of memory at `pointers`, and does not wait for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
