"""Rounding to FP8 (e4m3) with a scale for each row, or for each 128 columns of a row.

    quantize_fp8(x)        s[0, t] = max over k of |x[t, k]| / 448;    q[t, k] = e4m3(x[t, k] / s[0, t])
    quantize_fp8(x, 128)   the same with s[g, t] for the columns 128 * g to 128 * g + 127
    quantize_fp8(silu_mul(x), ...) in one launch: silu_mul_fp8_triton

T rows, K columns, G scales of a row. s is float32 [G, T], q is [T, K], x / s within 5 units in the last
place before it is rounded. A row of zeros has zeros and a scale above 0; NaN stays NaN. Any K (with groups: a
multiple of 128), T may be 0, rows may be strided.

Cost: 3*T*K bytes moved for 16-bit x, 5*T*K from gate and up: memory bound.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; calling one from
# another looks like the call that raises outside of a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.e4m3 import FP8, LARGEST, as_fp8
from triton_kernels.early_start import between_kernels, can_start_early
from triton_kernels.launch import ceil_div, next_power_of_2
from triton_kernels.silu_mul import fast_sigmoid, rounded_to, silu_mul_reference

GROUP = 128
"""Columns with one scale, where a row has several; also the edge of a weight's block."""
SMALLEST_PEAK = 1e-12
"""Stands in for the largest value of a row of zeros."""
GROUPED_BLOCK = 1024
"""Columns of a program, where a row has several scales."""
COLUMNS_OF_A_WARP = 256
"""Of a row that has one scale, in each block: 16 bytes of 16-bit numbers for each lane."""
PEAKS_BLOCK = 2048
"""Columns of a program that knows a row's largest value from others."""
_LARGEST = tl.constexpr(LARGEST)
_SMALLEST_PEAK = tl.constexpr(SMALLEST_PEAK)


def quantize_fp8_reference(x: Tensor, group: int | None = None) -> tuple[Tensor, Tensor]:
    """The same as quantize_fp8, in plain torch."""
    parts = x.float().unflatten(1, (-1, group or x.shape[1]))
    scales = parts.abs().amax(-1).clamp(min=SMALLEST_PEAK) / LARGEST
    rounded = (parts / scales.unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(FP8)
    return rounded.flatten(1), scales.t().contiguous()


def silu_mul_fp8_reference(gate_up: Tensor, group: int | None = None) -> tuple[Tensor, Tensor]:
    """The same as silu_mul_fp8_triton, in plain torch."""
    return quantize_fp8_reference(silu_mul_reference(gate_up), group)


def dequantize_fp8(rounded: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What quantize_fp8 made of x: q * s, [T, K] of `dtype`."""
    wide = rounded.to(dtype).unflatten(1, (scales.shape[0], -1))
    return (wide * scales.to(dtype).t().unsqueeze(-1)).flatten(1)


def quantize_weight_fp8(weight: Tensor, blocks: bool = False) -> tuple[Tensor, Tensor]:
    """A weight [N, K] as e4m3, and its scales: float32 [N], or [ceil(N / 128), ceil(K / 128)] of `blocks`."""
    if not blocks:
        rounded, scales = quantize_fp8_reference(weight)
        return rounded, scales[0]
    outputs, width = weight.shape
    padding = (0, -width % GROUP, 0, -outputs % GROUP)
    tiles = (
        torch.nn.functional.pad(weight.float(), padding).unflatten(0, (-1, GROUP)).unflatten(2, (-1, GROUP))
    )
    scales = tiles.abs().amax((1, 3)).clamp(min=SMALLEST_PEAK) / LARGEST
    rounded = (tiles / scales[:, None, :, None]).clamp(-LARGEST, LARGEST).to(FP8)
    return rounded.flatten(2).flatten(0, 1)[:outputs, :width].contiguous(), scales


@triton.jit
def quantized(values, GROUP: tl.constexpr):
    """Float32 [R, C] -> (e4m3 [R, C], scales [R, C // GROUP])."""
    parts = tl.reshape(values, [values.shape[0], values.shape[1] // GROUP, GROUP])
    peaks = tl.maximum(tl.max(tl.abs(parts), 2), _SMALLEST_PEAK)
    # One division for each scale: one for each number takes longer than its bytes.
    rounded = as_fp8(parts * tl.expand_dims(_LARGEST / peaks, 2))
    return tl.reshape(rounded, [values.shape[0], values.shape[1]]), peaks / _LARGEST


@triton.jit
def store_quantized(q_ptr, scales_ptr, values, rows, columns, num_rows, width, GROUP: tl.constexpr):
    """Quantize float32 `values` [R, C] of these rows and columns, from a multiple of GROUP on; store both."""
    rounded, scales = quantized(values, GROUP)
    there = (rows < num_rows)[:, None]
    tl.store(q_ptr + rows[:, None] * width + columns[None, :], rounded, there & (columns < width)[None, :])
    groups = tl.min(columns, 0) // GROUP + tl.arange(0, values.shape[1] // GROUP)
    places = groups[None, :].to(tl.int64) * num_rows + rows[:, None]
    tl.store(scales_ptr + places, scales, there & (groups * GROUP < width)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_fp8_kernel(
    x_ptr,
    q_ptr,
    scales_ptr,
    num_rows,
    x_stride,
    width: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program rounds BLOCKS blocks of a row's columns: several only where GROUP is 0, the whole row."""
    num_rows = between_kernels(num_rows, EARLY)
    row = tl.minimum(tl.program_id(0), num_rows - 1).to(tl.int64)  # the minimum: no load before the wait
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    blocks = ()
    peak = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(BLOCKS):
        inside = columns + i * BLOCK < width
        x = tl.load(x_ptr + row * x_stride + columns + i * BLOCK, inside, other=0.0)
        if GATED:
            gate = x.to(tl.float32)
            up = tl.load(x_ptr + row * x_stride + width + columns + i * BLOCK, inside, other=0.0)
            x = rounded_to(gate * fast_sigmoid(gate) * up.to(tl.float32), x.dtype)
        blocks = blocks + (x,)  # noqa: RUF005 (no unpacking in kernels)
        peak = tl.maximum(peak, tl.abs(x.to(tl.float32)))
    if GROUP > 0:
        rows = row + tl.zeros([1], tl.int64)
        values = blocks[0].to(tl.float32)[None, :]
        store_quantized(q_ptr, scales_ptr, values, rows, columns, num_rows, width, GROUP)
    else:
        largest = tl.maximum(tl.max(peak, 0), _SMALLEST_PEAK)
        factor = _LARGEST / largest
        for i in tl.static_range(BLOCKS):
            there = columns + i * BLOCK < width
            rounded = as_fp8(blocks[i].to(tl.float32) * factor)
            tl.store(q_ptr + row * width + columns + i * BLOCK, rounded, there)
        tl.store(scales_ptr + row, largest / _LARGEST)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_with_peaks_kernel(
    x_ptr,
    peaks_ptr,
    q_ptr,
    scales_ptr,
    num_rows,
    width: tl.constexpr,
    PEAKS: tl.constexpr,
    PEAKS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    num_rows = between_kernels(num_rows, EARLY)
    row = tl.minimum(tl.program_id(0), num_rows - 1).to(tl.int64)  # the minimum: no load before the wait
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    some = tl.arange(0, PEAKS_BLOCK)
    peaks = tl.load(peaks_ptr + row * PEAKS + some, some < PEAKS, other=0.0)
    x = tl.load(x_ptr + row * width + columns, columns < width, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(peaks, 0), _SMALLEST_PEAK)
    tl.store(q_ptr + row * width + columns, as_fp8(x * (_LARGEST / largest)), columns < width)
    tl.store(scales_ptr + row, largest / _LARGEST, tl.program_id(1) == 0)


def quantize_fp8_with_peaks(x: Tensor, peaks: Tensor) -> tuple[Tensor, Tensor]:
    """quantize_fp8 of contiguous x [T, K] whose rows' largest magnitudes are the largest of peaks [T, P]."""
    num_rows, width = x.shape
    rounded, scales = empty_fp8(x, width, None)
    _quantize_with_peaks_kernel[(num_rows, ceil_div(width, PEAKS_BLOCK))](
        x,
        peaks,
        rounded,
        scales,
        num_rows,
        width,
        peaks.shape[1],
        next_power_of_2(peaks.shape[1]),
        PEAKS_BLOCK,
        can_start_early(x.device),
        num_warps=4,
    )
    return rounded, scales


def quantize_fp8_triton(
    x: Tensor, group: int | None = None, num_warps: int | None = None, room: int = 0
) -> tuple[Tensor, Tensor]:
    """Launch the kernel on any device; the e4m3 have memory for `room` rows or more."""
    return _launch(x, x.shape[1], group, num_warps, room)


def silu_mul_fp8_triton(
    gate_up: Tensor, group: int | None = None, num_warps: int | None = None, room: int = 0
) -> tuple[Tensor, Tensor]:
    """Launch the kernel on any device; the e4m3 have memory for `room` rows or more."""
    return _launch(gate_up, gate_up.shape[1] // 2, group, num_warps, room)


def _launch(
    x: Tensor, width: int, group: int | None, num_warps: int | None, room: int
) -> tuple[Tensor, Tensor]:
    rounded, scales = empty_fp8(x, width, group, room)
    num_warps = num_warps or warps_for(GROUPED_BLOCK if group else width)
    block = GROUPED_BLOCK if group else min(next_power_of_2(width), COLUMNS_OF_A_WARP * num_warps)
    _quantize_fp8_kernel[(x.shape[0], ceil_div(width, block) if group else 1)](
        x,
        rounded,
        scales,
        x.shape[0],
        x.stride(0),
        width,
        x.shape[1] != width,
        group or 0,
        block,
        1 if group else ceil_div(width, block),
        can_start_early(x.device),
        num_warps=num_warps,
    )
    return rounded, scales


def empty_fp8(like: Tensor, width: int, group: int | None, room: int = 0) -> tuple[Tensor, Tensor]:
    """Uninitialised e4m3 [T, width] and its scales, for the rows of `like`.

    Args:
        room: at least so many rows have memory. Not inside of torch.compile, which would fill and copy them.

    Raises:
        ValueError: `group` does not divide the width.
    """
    if group and width % group:
        raise ValueError(f"a scale for each {group} columns needs a width of a multiple of it, got {width}")
    num_rows, num_scales = like.shape[0], width // group if group else 1
    if room:
        rounded = torch.empty((max(num_rows, room), width), dtype=FP8, device=like.device)[:num_rows]
    else:
        rounded = torch.empty((num_rows, width), dtype=FP8, device=like.device)
    return rounded, torch.empty((num_scales, num_rows), dtype=torch.float32, device=like.device)


def warps_for(width: int) -> int:
    """The warps of a program that rounds `width` numbers, where nothing else is measured."""
    return min(32, max(4, next_power_of_2(width) // 2048))


def quantize_fp8(x: Tensor, group: int | None = None) -> tuple[Tensor, Tensor]:
    """x [T, K] (rows may be strided) -> e4m3 [T, K] and float32 scales [K / group or 1, T], contiguous.

    Raises:
        ValueError: `group` does not divide K.
    """
    return quantize_fp8_reference(x, group) if x.device.type == "cpu" else quantize_fp8_triton(x, group)
