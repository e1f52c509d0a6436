"""The function of each op: ours, or a user's replacement for an experiment.

Promise: a `Kernels` is complete and never changes. The layers hold one and call its fields, so the choice
costs nothing at run time. A fused op runs only if none of the ops that it fuses is replaced.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor

import triton_kernels.fused_moe as moe
import triton_kernels.linear as product
import triton_kernels.paged_decode as decode
import triton_kernels.paged_prefill as prefill
import triton_kernels.rms_norm as norm
import triton_kernels.rope_store as rope
import triton_kernels.sample as sampling
import triton_kernels.silu_mul as mlp


class Kernels(NamedTuple):
    """One function for each op that can be replaced; the signatures are those of our own."""

    rms_norm: Callable[..., Any] = norm.rms_norm
    add_rms_norm: Callable[..., Any] = norm.add_rms_norm
    linear: Callable[..., Any] = product.linear
    gated_linear: Callable[..., Any] = product.gated_linear
    silu_mul: Callable[..., Any] = mlp.silu_mul
    rope_store: Callable[..., Any] = rope.rope_store
    paged_decode: Callable[..., Any] = decode.paged_decode
    paged_prefill: Callable[..., Any] = prefill.paged_prefill
    fused_moe: Callable[..., Any] = moe.fused_moe
    sample: Callable[..., Any] = sampling.sample


KERNELS = Kernels()
"""Our own functions."""
OF_SOME_MODELS = ("kv_scales", "normed_values", "sinks", "biases", "gate", "shared", "scales")
"""Arguments that only models get that have such a thing."""


def with_replacements(specs: Iterable[str], kernels: Kernels = KERNELS) -> Kernels:
    """`kernels` with the ops that `specs` ("op=module:function") name replaced; modules may lie in the cwd.

    Underscores and case in op names do not matter ("rmsnorm").

    Raises:
        ValueError: a spec is malformed, names no op or no function, or the function can't be called as the
            op is.
    """
    chosen = {}
    for spec in specs:
        name, equals, target = spec.partition("=")
        module_name, colon, function_name = target.partition(":")
        if not (name and equals and module_name and colon and function_name):
            raise ValueError(f"write op=module:function, got {spec!r}")
        op = op_named(name)
        if op in chosen:
            raise ValueError(f"{op} is replaced twice")
        function = _load(module_name, function_name)
        _check_signature(op, getattr(KERNELS, op), function, target)
        chosen[op] = function
    if "silu_mul" in chosen or "linear" in chosen:
        # The fused op is used only while all its parts are ours.
        chosen.setdefault("gated_linear", _gated_linear_of(kernels._replace(**chosen)))
    return kernels._replace(**chosen)


def _gated_linear_of(kernels: Kernels) -> Callable[[Tensor, Tensor], Tensor]:
    def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
        return kernels.silu_mul(kernels.linear(x, weight))

    return gated_linear


def op_named(name: str) -> str:
    """The op with this name, ignoring case and underscores.

    Raises:
        ValueError: there is no such op.
    """
    ops = {op.replace("_", ""): op for op in Kernels._fields}
    op = ops.get(name.replace("_", "").replace("-", "").lower())
    if op is None:
        raise ValueError(f"there is no op {name!r}; there are {', '.join(Kernels._fields)}")
    return op


def _load(module_name: str, function_name: str) -> Callable[..., Any]:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that no other module comes from there
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing a user's module may raise anything
        raise ValueError(f"can't import {module_name}: {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{module_name} has no function {function_name!r}")
    return function


def _check_signature(op: str, ours: Callable, theirs: Callable, target: str) -> None:
    """Whether `theirs` accepts all arguments that the layers may pass, in their order."""
    wanted = inspect.signature(ours)
    parameters = wanted.parameters.values()
    required = [None for parameter in parameters if parameter.default is parameter.empty]
    optional = {p.name: p.default for p in parameters if p.default is not p.empty}
    for name in OF_SOME_MODELS:
        optional.pop(name, None)
    try:
        inspect.signature(theirs).bind(*required, **optional)
    except TypeError as error:
        shown = ", ".join(str(parameter).split(":")[0] for parameter in parameters)
        raise ValueError(f"{target} can't stand in for {op}({shown}): {error}") from error
    except ValueError:  # no signature, as for functions written in C
        return
