"""The elementwise part of a gated MLP: activation(gate) * up, from the fused gate_up projection.

    silu_mul(x)       y[t, f] = silu(x[t, f]) * x[t, F + f],        silu(g) = g / (1 + exp(-g))
    gelu_tanh_mul(x)  y[t, f] = gelu_tanh(x[t, f]) * x[t, F + f],
                      gelu_tanh(g) = g / 2 * (1 + tanh(u)) = g / (1 + exp(-2u)),
                      u = sqrt(2 / pi) * (g + 0.044715 * g^3)       (Gemma)

T tokens, F MLP width. Float32 inside, one rounding at the end. Any F, T may be 0, rows may be strided.

Cost: 3*T*F elements moved, about 6 (GELU: 10) FLOP an output element: memory bound.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; a constexpr is a
# plain value inside of one.
# pyright: reportCallIssue=false, reportArgumentType=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from triton_kernels.early_start import between_kernels, can_start_early
from triton_kernels.launch import ceil_div
from triton_kernels.on_cpu import silu_mul_cpu
from triton_kernels.tuning import tuned


class SiluMulConfig(NamedTuple):
    """A launch configuration of silu_mul and of gelu_tanh_mul."""

    block_f: int = 1024  # columns per program
    num_warps: int = 4


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """The same as silu_mul, in plain torch."""
    wide = gate_up if gate_up.dtype == torch.float64 else gate_up.float()
    gate, up = wide.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def gelu_tanh_mul_reference(gate_up: Tensor) -> Tensor:
    """The same as gelu_tanh_mul, in plain torch."""
    wide = gate_up if gate_up.dtype == torch.float64 else gate_up.float()
    gate, up = wide.chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


# torch.compile copies a constant into code of its own, where a line break would end the string.
_SIGMOID = tl.constexpr(
    "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000; "
    "rcp.approx.ftz.f32 $0, e; }"
)
_ROUND_TWO = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
_INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


@triton.jit
def fast_sigmoid(x):
    """1 / (1 + exp(-x)) of float32, as exact as bfloat16 needs; tl.sigmoid has thrice the instructions."""
    if _INTERPRETED:
        return tl.sigmoid(x)
    return tl.inline_asm_elementwise(_SIGMOID, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def rounded_to(values, dtype: tl.constexpr):
    """Float32 as `dtype`: bfloat16 two at a time, in an eighth of the time of Triton's conversion."""
    if dtype == tl.bfloat16 and not _INTERPRETED:
        return tl.inline_asm_elementwise(
            _ROUND_TWO, "=r,f,f", [values], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return values.to(dtype)


@triton.jit
def bent(gate, GELU: tl.constexpr):
    """gelu_tanh(gate), or silu(gate); float32."""
    inner = gate
    if GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(inner)


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,
    y_ptr,
    row_stride,
    width: tl.constexpr,
    BLOCK_F: tl.constexpr,
    GELU: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = between_kernels(tl.program_id(0), EARLY).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = columns < width
    gate = tl.load(gate_up_ptr + row * row_stride + columns, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + width + columns, mask, other=0.0).to(tl.float32)
    y = bent(gate, GELU) * up
    tl.store(y_ptr + row * width + columns, y.to(y_ptr.dtype.element_ty), mask)


def silu_mul_triton(gate_up: Tensor, config: SiluMulConfig | None = None) -> Tensor:
    """Launch the kernel on any device."""
    return _gated(gate_up, config, gelu=False)


def gelu_tanh_mul_triton(gate_up: Tensor, config: SiluMulConfig | None = None) -> Tensor:
    """Launch the kernel on any device."""
    return _gated(gate_up, config, gelu=True)


def _gated(gate_up: Tensor, config: SiluMulConfig | None, gelu: bool) -> Tensor:
    num_tokens, double_width = gate_up.shape
    width = double_width // 2
    if config is None:
        config = tuned(
            SiluMulConfig(),
            "silu_mul",
            gate_up.device,
            gate_up.dtype,
            exact=(),
            near=(width,),
            size=num_tokens,
        )
    y = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    grid = (num_tokens, ceil_div(width, config.block_f))
    _silu_mul_kernel[grid](
        gate_up,
        y,
        gate_up.stride(0),
        width,
        config.block_f,
        gelu,
        can_start_early(gate_up.device),
        num_warps=config.num_warps,
    )
    return y


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up [T, 2F] (gate first, rows may be strided); returns a contiguous [T, F]."""
    if gate_up.device.type == "cpu":
        return silu_mul_cpu(gate_up)
    return silu_mul_triton(gate_up)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gelu_tanh(gate) * up of gate_up [T, 2F], as silu_mul."""
    if gate_up.device.type == "cpu":
        return gelu_tanh_mul_reference(gate_up)
    return gelu_tanh_mul_triton(gate_up)
