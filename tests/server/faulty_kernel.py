"""Ops that fail as on a GPU with a fault, for `--kernel silu_mul=faulty_kernel:silu_mul` on a CPU.

They fail on a prompt of `FAULTY_TOKENS` tokens, in the process of rank `FAULTY_RANK` (environment).
"""

import os

import torch
from torch import Tensor

import triton_kernels.silu_mul as ours

in_use = object
"""Makes what the failing call holds."""
NUM_TOKENS = int(os.environ.get("FAULTY_TOKENS", "0"))
RANK = int(os.environ.get("FAULTY_RANK", "0"))


def silu_mul(gate_up: Tensor) -> Tensor:
    ranks = torch.distributed
    rank = ranks.get_rank() if ranks.is_initialized() else 0
    if len(gate_up) == NUM_TOKENS and rank == RANK:
        error = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
        error.error_code = 214  # pyright: ignore[reportAttributeAccessIssue]
        held = in_use()
        assert held  # until the frame ends
        raise error
    return ours.silu_mul(gate_up)
