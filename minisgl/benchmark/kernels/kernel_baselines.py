"""The baselines of our kernels: plain torch compiled by inductor, and flashinfer where it is installed.

Promise: a baseline gets the same arguments and computes the same function. No check depends on a baseline.
"""

import importlib
import importlib.util
import math

import torch

from minisgl.benchmark.kernels.kernel_op import Case, KernelOp
from minisgl.benchmark.kernels.kernel_timing import Calls, Problem

BASELINES = ("inductor", "flashinfer")
MOST_GATHERED_BYTES = 4 << 30
"""The largest gather of keys; with very unequal lengths, a gather up to the longest row would not fit."""


def baseline_calls(name: str, op: KernelOp, problem: Problem, case: Case) -> Calls | None:
    """The problem's calls by one of BASELINES; None where the op has no such baseline."""
    return (inductor_calls if name == "inductor" else flashinfer_calls)(op, problem, case)


def inductor_calls(op: KernelOp, problem: Problem, case: Case) -> Calls | None:
    """The problem's calls in plain torch under torch.compile; the first call compiles."""
    if op.plain_torch is None:
        return None
    if case.attention is not None:  # plain torch gathers the whole page table, so cut it to the longest row
        shape = case.attention
        pages = math.ceil(max(shape.contexts) / shape.page_size)
        gathered = len(shape.contexts) * pages * problem.arguments[0][1][0].nbytes
        if gathered > MOST_GATHERED_BYTES:
            return None
        cut = [(*given[:3], given[3][:, :pages].contiguous(), *given[4:]) for given in problem.arguments]
        problem = problem._replace(arguments=cut)
    torch.compiler.reset()  # torch compiles code for every shape, without its limit of recompilations
    return problem.calls(torch.compile(op.plain_torch, dynamic=False))


def flashinfer_calls(op: KernelOp, problem: Problem, case: Case) -> Calls | None:
    """The problem's calls by flashinfer's functions; None where flashinfer is not installed."""
    if op.flashinfer is None or importlib.util.find_spec("flashinfer") is None:
        return None
    return op.flashinfer(importlib.import_module("flashinfer"), problem, case)
