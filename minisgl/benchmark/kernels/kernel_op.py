"""The description of one op: the cases to measure, what to compare it with, and how to tune it.

Promise: `minisgl bench kernel` and `minisgl tune` read the same descriptions (`ops/all_ops.py`). An op's
problem, sizes, candidates and baselines stand in one file.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from minisgl.benchmark.kernels.kernel_timing import Calls, Problem
from minisgl.benchmark.kernels.model_shapes import ModelShape
from minisgl.benchmark.kernels.ops.attention_problems import AttentionShape
from triton_kernels.gpu import Gpu

BENCH_TOKENS = (1, 64, 256, 4096, 16384)
TUNE_TOKENS = (1, 64, 256, 1024, 8192)
CPU_TOKENS = (1, 5)
ELEMENT_SIZE = 2
"""Bytes of an element of the dtypes for which candidates must fit: bfloat16 and float16."""
"""Numbers of tokens on the CPU, where kernels run in Triton's interpreter."""


class Case(NamedTuple):
    """A problem that has not been built yet."""

    label: str
    size: int  # tokens or rows
    build: Callable[[torch.device, torch.dtype], Problem]
    attention: AttentionShape | None = None  # the batch of an attention op, which baselines must plan
    dtype: torch.dtype | None = None  # replaces the run's dtype


Cases = Callable[[ModelShape, bool], list[Case]]
"""The cases of a model's shape; the flag says whether they run on a GPU."""


class Tuning(NamedTuple):
    """How an op is tuned.

    Each part of a model has an entry of its own in the tuning table. For most ops the whole model is the only
    part; a linear layer's parts are its matrices. A part has a `name`, which is the model's.
    """

    files: tuple[str, ...]  # in triton_kernels: a change of their code makes measurements stale
    by_size: bool  # each size may have its own configuration, because the configuration changes no result
    exact: Callable[[Any], dict[str, int]]  # of a part: numbers that must equal the launcher's
    near: Callable[[Any], dict[str, int]]  # of a part: a launcher takes the entry with the nearest numbers
    cases: Callable[[Any, bool], list[Case]]  # of (part, on a GPU)
    default: Callable[[Any, int, int, Gpu], Any]  # of (part, size, bytes of an element, GPU)
    candidates: Callable[[Any, int, Gpu], Iterable[Any]]  # of (part, size, GPU): those that fit it
    launcher: Callable[..., Any]  # takes `config`
    parts: Callable[[ModelShape], list[Any]] = lambda shape: [shape]

    def function(self, config: Any) -> Callable[..., Any]:
        """The op with one configuration."""
        return functools.partial(self.launcher, config=config)


class KernelOp(NamedTuple):
    """One op as it is measured; a None means that the op has no such baseline or is not tuned."""

    name: str
    launcher: Callable[..., Any]  # our kernel, which also runs in the interpreter
    bench_cases: Cases
    plain_torch: Callable[..., Any] | None = None  # the baseline that inductor compiles
    flashinfer: Callable[[Any, Problem, Case], Calls] | None = None  # of (the module, problem, case)
    tuning: Tuning | None = None


def token_cases(
    build: Callable[[int, ModelShape, torch.device, torch.dtype], Problem],
    tokens: tuple[int, ...],
    label: Callable[[int, ModelShape], str] = lambda count, shape: f"{count} tokens",
    cpu_tokens: tuple[int, ...] = CPU_TOKENS,
) -> Cases:
    """One case for each number of tokens."""

    def cases(shape: ModelShape, on_gpu: bool) -> list[Case]:
        return [
            Case(label(count, shape), count, functools.partial(build, count, shape))
            for count in (tokens if on_gpu else cpu_tokens)
        ]

    return cases
