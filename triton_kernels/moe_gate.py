"""What an expert makes of its gate and up projections: SwiGLU, Gemma's GELU, or gpt-oss's clamped SwiGLU.

    silu        gate * sigmoid(gate) * up
    gelu        gelu_tanh(gate) * up
    clamped     g * sigmoid(alpha * g) * (u + 1)      g = min(gate, limit), u = up within -limit .. limit

Element-wise, float32 inside the kernels of the experts.
"""

from enum import IntEnum
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.silu_mul import bent


class GateKind(IntEnum):
    """Which of the three."""

    SILU = 0
    GELU = 1
    CLAMPED = 2


class Gate(NamedTuple):
    """An activation of experts; alpha and limit are those of CLAMPED."""

    kind: GateKind = GateKind.SILU
    alpha: float = 1.0
    limit: float = 0.0


SILU = Gate()


def gate_reference(gate: Tensor, up: Tensor, how: Gate) -> Tensor:
    """The same in plain torch."""
    if how.kind == GateKind.CLAMPED:
        gate, up = gate.clamp(max=how.limit), up.clamp(-how.limit, how.limit)
        return gate * torch.sigmoid(how.alpha * gate) * (up + 1)
    if how.kind == GateKind.GELU:
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    return torch.nn.functional.silu(gate) * up


@triton.jit
def bent_gate(gate, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """What float32 values of gate multiply those of `bent_up` with; KIND as in GateKind."""
    if KIND == 2:
        gate = tl.minimum(gate, LIMIT)
        return gate * tl.sigmoid(ALPHA * gate)
    else:
        return bent(gate, KIND == 1)


@triton.jit
def bent_up(up, KIND: tl.constexpr, LIMIT: tl.constexpr):
    """The other factor, of float32 values of up."""
    if KIND == 2:
        return tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
    else:
        return up
