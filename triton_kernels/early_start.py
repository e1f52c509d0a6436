"""Programmatic dependent launch: kernels that may start while the previous kernel still runs.

A kernel of EARLY_KERNELS computes its load addresses, or masks, from a number that it passes through
`after_predecessor`. So its programs may start while the previous kernel ends, and still see all its stores.
The launch decides: without the launch attribute (in a CUDA graph: the edge) the instructions change nothing.

Promise: on GPUs without such launches (before Hopper) the kernels contain none of these instructions.
https://docs.nvidia.com/cuda/cuda-programming-guide/04-special-topics/programmatic-dependent-launch.html
"""

# Calling a function of a kernel looks like calling an object; a constexpr is a plain value inside of one.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl

from triton_kernels.gpu import gpu_of

EARLY_KERNELS: dict[str, str | None] = {
    "_add_rms_norm_kernel": None,
    "_all_reduce_kernel": None,
    "_choose_kernel": None,
    "_enter_mixture_kernel": None,
    "_experts_down_warp_kernel": "_experts_up_warp_kernel",
    "_experts_up_warp_kernel": None,
    "_fp8_linear_kernel": None,
    "_fp8_split_linear_kernel": None,
    "_fp8_tiled_kernel": None,
    "_gated_delta_decode_hopper_kernel": None,
    "_gated_delta_decode_kernel": None,
    "_int4_linear_kernel": None,
    "_int4_hopper_kernel": None,
    "_int4_tiled_kernel": None,
    "_int4_warp_kernel": None,
    "_leave_mixture_kernel": None,
    "_linear_kernel": None,
    "_norm_router_kernel": None,
    "_paged_decode_kernel": None,
    "_pairs_down_fp8_kernel": "_pairs_up_fp8_kernel",
    "_pairs_down_int4_kernel": "_pairs_up_int4_kernel",
    "_pairs_down_kernel": "_pairs_up_kernel",
    "_pairs_up_fp8_kernel": None,
    "_pairs_up_int4_kernel": None,
    "_pairs_up_kernel": None,
    "_pick_experts_kernel": None,
    "_place_pairs_kernel": None,
    "_quantize_fp8_kernel": None,
    "_quantize_with_peaks_kernel": None,
    "_rms_norm_fp8_kernel": None,
    "_rms_norm_kernel": None,
    "_rope_store_kernel": None,
    "_router_kernel": None,
    "_silu_mul_kernel": None,
    "_split_linear_kernel": None,
    "_sum_slots_kernel": None,
    "_sum_splits_kernel": None,
    "_tiled_linear_kernel": None,
}
"""The kernels that may start early, each with the only kernel that may precede it; None = any.

Every program waits before it stores and before it loads data that other kernels store. There are two
exceptions. (1) Data stored before a kernel that is not in this table may be loaded at any time after that
kernel: it started when all kernels before it had ended, and kernels start in order. In a decode step these
are the step's inputs (positions, slots, lengths, the page table): torch's embedding follows them, and the
states of linear attention, which the steps before stored. (2) A
kernel with a named predecessor may load data that the predecessor does not store, if the predecessor lets it
start only after all of its own programs have waited or ended. At least one program of each kernel must wait.
"""


@torch.compiler.assume_constant_result
def can_start_early(device: torch.device) -> bool:
    """Whether this device supports programmatic dependent launch."""
    return device.type == "cuda" and gpu_of(device).starts_early


_WAIT = tl.constexpr("griddepcontrol.wait; ")
_START_NEXT = tl.constexpr("griddepcontrol.launch_dependents; ")


@triton.jit
def _behind(instructions: tl.constexpr, number, EARLY: tl.constexpr, PURE: tl.constexpr):
    """Run the instructions, then return `number` (int32)."""
    if EARLY:
        return tl.inline_asm_elementwise(
            instructions + "mov.b32 $0, $1;", "=r,r", [number], dtype=tl.int32, is_pure=PURE, pack=1
        )
    else:
        return number


@triton.jit
def after_predecessor(number, EARLY: tl.constexpr):
    """Wait until the previous kernel has ended, then return `number` (int32).

    All these functions are declared pure: torch.compile believes that a kernel with other inline assembly
    writes all its arguments. So only code that depends on the result is certain to run afterwards.
    """
    return _behind(_WAIT, number, EARLY, PURE=True)


@triton.jit
def start_next_and_wait(number, EARLY: tl.constexpr):
    """`after_predecessor`; the next kernel, one of few small programs, may start before the wait."""
    return _behind(_START_NEXT + _WAIT, number, EARLY, PURE=True)


@triton.jit
def between_kernels(number, EARLY: tl.constexpr):
    """`after_predecessor`; the next kernel may start after the wait. For kernels of few small programs, and
    for those whose programs all run at once and are followed by a kernel that fills the GPU evenly, too."""
    return _behind(_WAIT + _START_NEXT, number, EARLY, PURE=True)


@triton.jit
def start_next_if_few(number, most: tl.constexpr, EARLY: tl.constexpr):
    """Return `number` (int32); if it is at most `most`, the next kernel may start once all programs run."""
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
    """Return `values` (float32); the next kernel may start once all programs have got here or ended.

    Without this call the next kernel starts when all programs have ended.
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


# The next three are only for kernels that torch.compile does not see: it would believe that they write all
# their tensors.


@triton.jit
def after_predecessor_here(number, EARLY: tl.constexpr):
    """`after_predecessor`, and inline assembly that is not pure stays on its side of it."""
    return _behind(_WAIT, number, EARLY, PURE=False)


@triton.jit
def let_next_start_here(number, EARLY: tl.constexpr):
    """Return `number` (int32); the next kernel may start once all programs have got here or ended."""
    return _behind(_START_NEXT, number, EARLY, PURE=False)


@triton.jit
def fetch_into_l2(pointers):
    """Prefetch the memory lines at `pointers` into L2, without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
