"""Traces every launcher with torch.compile, full graph, batch size symbolic; prints one JSON line for each.

Run as a program, without a GPU and with Triton's interpreter off. Nothing is executed: Dynamo traces, its
graph is looked at, and torch's analysis of each kernel says which of its arguments it takes for written.
"""

import contextlib
import json
from typing import Any

import torch
import torch._dynamo.exc
import torch._higher_order_ops.triton_kernel_wrap as wrap
import torch.utils._triton
import triton
from triton.backends.compiler import GPUTarget

from triton_kernels import (
    advance_rows,
    fp8_linear_few,
    linear_few,
    logit_rules,
    mixture_norms,
    moe_choice,
    paged_decode,
    paged_prefill,
    quantize_fp8,
    read_rows,
    rms_norm,
    rms_norm_fp8,
    rope_store,
    sample,
    silu_mul,
    token_mask,
)
from triton_kernels.linear_few import MAX_ROWS
from triton_kernels.quantize_fp8 import FP8


class PretendDriver:
    """Stands in for the GPU's driver: torch asks it what to generate Triton IR for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


class GraphSeen(Exception):
    """Ends a call whose graph has been looked at and whose guards have been made."""


def written_arguments(kernel, arguments: dict) -> list[str]:
    """Names of the tensors that torch takes the kernel to write."""
    real = {
        name: torch.empty(1, dtype=value.meta["example_value"].dtype)
        if isinstance(value, torch.fx.Node) and isinstance(value.meta["example_value"], torch.Tensor)
        else (48 if isinstance(value, torch.fx.Node) else value)
        for name, value in arguments.items()
    }
    mutated = getattr(wrap, "identify_mutated_tensors", None)  # before torch 2.12
    if mutated is not None:
        return sorted(mutated(kernel, real, {}))
    return sorted(
        access.name for access in wrap.identify_accessed_tensors(kernel, real, {}).read_writes.writes
    )


def stop(*_: Any) -> Any:
    raise GraphSeen


def trace(name: str, launcher: Any, *args: Any, dynamic: tuple[int, ...]) -> None:
    """Compile launcher(*args) with dimension 0 of the `dynamic` args symbolic; print what was seen."""
    kernels = []

    def look(graph_module: torch.fx.GraphModule, _: Any) -> Any:
        for node in graph_module.graph.nodes:
            if node.target is wrap.triton_kernel_wrapper_mutation:
                kernel: Any = wrap.kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
                constants = wrap.kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])
                options = ("num_warps", "num_stages")
                constants = {key: value for key, value in constants.items() if key not in options}
                written = written_arguments(kernel, {**node.kwargs["kwargs"], **constants})
                kernels.append({"kernel": kernel.fn.__name__, "written": written})
        return stop

    for index in dynamic:
        # As the engine does: code that is compiled once for these rows must not choose by their number.
        is_few = args[index].shape[0] <= MAX_ROWS
        low, high = (2, MAX_ROWS) if is_few else (MAX_ROWS + 1, 512)
        torch._dynamo.mark_dynamic(args[index], 0, min=low, max=high)
    torch._dynamo.reset()
    with contextlib.suppress(GraphSeen):
        torch.compile(launcher, fullgraph=True, dynamic=False, backend=look)(*args)
    print(json.dumps({"launcher": name, "kernels": kernels}), flush=True)  # noqa: T201 (a program's output)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def trace_quantized(x: torch.Tensor, norm: torch.Tensor) -> None:
    """The launchers of quantized models that compiled code calls directly."""
    rounded, scales = quantize_fp8.quantize_weight_fp8(torch.randn(80, 64))
    rows, row_scales = quantize_fp8.quantize_fp8_reference(x)
    trace("quantize_fp8", quantize_fp8.quantize_fp8_triton, x, dynamic=(0,))
    trace(
        "add_rms_norm_fp8",
        lambda x, w: rms_norm_fp8.add_rms_norm_fp8_triton(x, x, w, 1e-5),
        x,
        norm,
        dynamic=(0,),
    )
    for name, launcher in (
        ("fp8_linear", fp8_linear_few.fp8_linear_few),
        ("fp8_gated_linear", fp8_linear_few.fp8_gated_linear_few),
        ("fp8_gated_linear_with_peaks", fp8_linear_few.fp8_gated_linear_few_with_peaks),
    ):
        trace(name, launcher, rows, row_scales, rounded, scales, dynamic=(0,))
    trace(
        "quantize_fp8_with_peaks", quantize_fp8.quantize_fp8_with_peaks, x, torch.rand(6, 3), dynamic=(0, 1)
    )


def main() -> None:
    """Trace each launcher once."""
    torch.utils._triton.has_triton = lambda: True
    driver: Any = PretendDriver()
    triton.runtime.driver.set_active(driver)
    x, weight = torch.randn(6, 64), torch.randn(64)
    trace("rms_norm", lambda x, w: rms_norm.rms_norm_triton(x, w, 1e-5), x, weight, dynamic=(0,))
    trace(
        "add_rms_norm",
        lambda x, w: rms_norm.add_rms_norm_triton(x, x, w, 1e-5),
        x,
        weight,
        dynamic=(0,),
    )
    trace("silu_mul", silu_mul.silu_mul_triton, x, dynamic=(0,))
    trace("linear", linear_few.linear_triton, x, torch.randn(80, 64), dynamic=(0,))
    trace("gated_linear", linear_few.gated_linear_triton, x, torch.randn(80, 64), dynamic=(0,))
    trace_quantized(x, weight)
    trace(
        "enter_mixture",
        lambda x, w, slots: mixture_norms.enter_mixture(
            x, x, mixture_norms.EntryNorms(w, w, w, w), 1e-5, torch.randn(8, 64), 0.125, slots
        ),
        x,
        weight,
        ints(6),
        dynamic=(0, 2),
    )
    trace(
        "leave_mixture",
        lambda x, w: mixture_norms.leave_mixture(
            x, x, None, x, mixture_norms.ExitNorms(w, w, w), 1e-5, torch.ones(1)
        ),
        x,
        weight,
        dynamic=(0,),
    )
    choice = moe_choice.Choice(2, num_groups=4, kept_groups=2)
    trace(
        "choose_experts",
        lambda logits, bias: moe_choice.choose_experts_triton(logits, choice, bias)[0],
        torch.randn(6, 16),
        torch.randn(16),
        dynamic=(0,),
    )
    trace(
        "read_rows",
        lambda *args: read_rows.read_rows_triton(*args, page_size=16),
        ints(6),
        ints(9),
        ints(9),
        ints(9, 7),
        torch.rand(9),
        ints(9),
        torch.rand(9),
        torch.rand(9),
        ints(9).long(),
        dynamic=(0,),
    )
    trace(
        "advance_rows",
        lambda *args: advance_rows.advance_rows_triton(*args, max_rows=8),
        *(ints(6) for _ in range(3)),
        ints(9),
        ints(9),
        dynamic=(0, 1, 2),
    )
    trace("token_mask", token_mask.token_mask_triton, torch.randn(6, 70), ints(6), ints(2, 3), dynamic=(0, 1))
    tables = logit_rules.RuleTables(
        torch.zeros(9, dtype=torch.bool),
        ints(9),
        torch.rand(9),
        torch.rand(9),
        torch.rand(9),
        ints(9, 5),
        torch.rand(9, 5),
        ints(9, 4, 3),
        ints(9, 4),
        ints(9, 3),
        ints(9, 70),
    )
    trace(
        "logit_rules",
        lambda *args: logit_rules.logit_rules_triton(*args, tables=tables),
        torch.randn(6, 70),
        ints(6),
        ints(6),
        dynamic=(0, 1, 2),
    )
    trace(
        "count_tokens",
        lambda *args: logit_rules.count_tokens_triton(*args, recent=tables.recent, marks=tables.marks),
        ints(6),
        ints(6),
        torch.zeros(6, dtype=torch.bool),
        dynamic=(0, 1, 2),
    )
    pools = (torch.randn(20, 16, 2, 64), torch.randn(20, 16, 2, 64))
    trace(
        "rope_store",
        rope_store.rope_store_triton,
        torch.randn(6, 10 * 64),
        torch.randn(50, 64),
        ints(6),
        ints(6),
        *pools,
        dynamic=(0, 2, 3),
    )
    trace(
        "rope_store normed",
        rope_store.rope_store_triton,
        torch.randn(6, 10 * 64),
        torch.randn(50, 64),
        ints(6),
        ints(6),
        *pools,
        torch.randn(64),
        torch.randn(64),
        dynamic=(0, 2, 3),
    )
    trace(
        "rope_store, values of keys",
        lambda qkv, *args: rope_store.rope_store_triton(qkv, *args, normed_values="keys"),
        torch.randn(6, 8 * 64),
        torch.randn(50, 64),
        ints(6),
        ints(6),
        *pools,
        dynamic=(0, 2, 3),
    )
    q, rows = torch.randn(6, 6, 64), (ints(9, 70), ints(6), ints(6))
    trace(
        "paged_decode",
        lambda *args: paged_decode.paged_decode_triton(*args, scale=0.1),
        q,
        *pools,
        *rows,
        dynamic=(0, 4, 5),
    )
    trace(
        "paged_decode over e4m3",
        lambda scales, *args: paged_decode.paged_decode_triton(*args, scale=0.1, kv_scales=scales),
        torch.ones(2),
        q,
        *(pool.to(FP8) for pool in pools),
        *rows,
        dynamic=(1, 5, 6),
    )
    trace(
        "rope_paged_decode",
        lambda weights, qkv, table, positions, slots, *args: paged_decode.paged_decode_triton(
            qkv, *args, scale=0.1, rope=paged_decode.Rope(table, positions, slots, weights[0], weights[1])
        ),
        torch.randn(2, 64),
        torch.randn(6, 10 * 64),
        torch.randn(50, 64),
        ints(6),
        ints(6),
        *pools,
        *rows,
        dynamic=(1, 3, 4, 8, 9),
    )
    trace(
        "paged_prefill",
        lambda *args: paged_prefill.paged_prefill_triton(*args, max_query_len=9, scale=0.1),
        torch.randn(21, 6, 64),
        *pools,
        *rows,
        ints(7),
        dynamic=(0, 4, 5, 6),
    )
    columns = (
        torch.rand(6),
        ints(6),
        torch.rand(6),
        torch.rand(6),
        ints(6).long(),
        ints(6),
    )
    trace("sample", sample.sample_triton, torch.randn(6, 500), *columns, dynamic=tuple(range(7)))


if __name__ == "__main__":
    main()
