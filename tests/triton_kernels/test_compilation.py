"""What the interpreter cannot show: kernels compile for all GPUs, launchers trace in Dynamo."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl.benchmark.reports.report import read_report
from triton_kernels.early_start import EARLY_KERNELS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMPILED = HERE / "compiled"
"""What each kernel compiled to, for each GPU; bench/compiled_before.py reads and writes it."""
TMA_KERNELS = {"_tiled_linear_kernel", "_sum_splits_kernel", "_fp8_tiled_kernel", "_int4_tiled_kernel"}
"""Only GPUs with TMA run them; torch's product serves elsewhere."""
FP8_KERNELS = {
    "_quantize_fp8_kernel",
    "_quantize_with_peaks_kernel",
    "_unpack_pages_kernel",
    "_rms_norm_fp8_kernel",
    "_fp8_linear_kernel",
    "_fp8_split_linear_kernel",
    "_fp8_tiled_kernel",
    "_pairs_up_fp8_kernel",
    "_pairs_down_fp8_kernel",
}
"""Only GPUs that have FP8 run them."""
HOPPER_KERNELS = {
    "_gated_delta_decode_hopper_kernel",
    "_int4_hopper_kernel",
    "_paged_prefill_hopper_kernel",
}
TALL_KERNELS = {
    "_paged_prefill_kernel",
    "_paged_prefill_hopper_kernel",
    "_tiled_linear_kernel",
    "_fp8_tiled_kernel",
    "_int4_tiled_kernel",
    "_int4_hopper_kernel",
    "_delta_scan_kernel",
}
"""Their tiles have 64 rows or more, as many as Hopper's matrix instructions take."""
MULTIPLYING = TALL_KERNELS | {
    "_gate_up_kernel",
    "_down_kernel",
    "_linear_kernel",
    "_split_linear_kernel",
    "_router_kernel",
    "_paged_decode_kernel",
    "_fp8_linear_kernel",
    "_fp8_split_linear_kernel",
    "_int4_linear_kernel",
    "_experts_fp8_kernel",
    "_experts_int4_kernel",
}
KERNELS = MULTIPLYING | {
    "_rms_norm_kernel",
    "_add_rms_norm_kernel",
    "_norm_router_kernel",
    "_enter_mixture_kernel",
    "_leave_mixture_kernel",
    "_all_reduce_kernel",
    "_silu_mul_kernel",
    "_sum_splits_kernel",
    "_read_rows_kernel",
    "_advance_rows_kernel",
    "_token_mask_kernel",
    "_logit_rules_kernel",
    "_count_tokens_kernel",
    "_rope_store_kernel",
    "_tops_kernel",
    "_bracket_kernel",
    "_list_kernel",
    "_sample_kernel",
    "_pick_experts_kernel",
    "_place_pairs_kernel",
    "_top_k_kernel",
    "_choose_kernel",
    "_sort_kernel",
    "_sum_slots_kernel",
    "_pairs_up_kernel",
    "_pairs_down_kernel",
    "_pairs_up_fp8_kernel",
    "_pairs_down_fp8_kernel",
    "_pairs_up_int4_kernel",
    "_pairs_down_int4_kernel",
    "_experts_up_warp_kernel",
    "_experts_down_warp_kernel",
    "_quantize_fp8_kernel",
    "_quantize_with_peaks_kernel",
    "_unpack_pages_kernel",
    "_rms_norm_fp8_kernel",
    "_dequantize_int4_kernel",
    "_int4_warp_kernel",
    "_gated_delta_decode_hopper_kernel",
    "_gated_delta_decode_kernel",
    "_delta_convolve_kernel",
    "_delta_solve_kernel",
    "_delta_prepare_kernel",
    "_delta_norm_kernel",
}
MOST_WAITS = {"_experts_down_warp_kernel": 3}
"""Instead of one: a program's first tile, of whichever size, is behind a wait, and so is its end."""
LOAD_EARLY = {
    "_add_rms_norm_kernel": "its weight",
    "_all_reduce_kernel": "its weight",
    "_int4_warp_kernel": "its weight",
    "_gated_delta_decode_hopper_kernel": "the step's rows and lengths, their states, weights",
    "_gated_delta_decode_kernel": "the step's rows and lengths, their states, weights",
    "_enter_mixture_kernel": "weights",
    "_leave_mixture_kernel": "weights",
    "_experts_down_warp_kernel": "where an expert's rows end, older than the kernel before, and weights",
    "_norm_router_kernel": "weights",
    "_pairs_down_fp8_kernel": "logits, which are older than the kernel before, and weights",
    "_pairs_down_int4_kernel": "logits, which are older than the kernel before, and weights",
    "_paged_decode_kernel": "the step's lengths, page table, positions and slots, a table and weights",
    "_pairs_down_kernel": "logits, which are older than the kernel before, and weights",
    "_rms_norm_fp8_kernel": "its weight",
    "_rms_norm_kernel": "its weight",
    "_rope_store_kernel": "the step's positions and slots, a table and weights",
}
"""What kernels load before they wait, as early_start.py allows it."""
SPILLS = {"_paged_prefill_hopper_kernel": 256, "_fp8_tiled_kernel": 256}
"""Bytes of a thread's stack that kernels may use; others 64."""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or sys.platform != "linux", reason="needs Triton's compiler"
)


def output_lines(program: Path, *arguments: str) -> list[dict]:
    """The JSON lines that a program prints, run with Triton's interpreter off."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.timeout(900)  # with --all-kernels sm_90 takes 95 s, and 400 on slow or busy machines
@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_every_kernel_compiles_for_every_gpu_within_its_shared_memory_and_registers(
    target: str, pytestconfig: pytest.Config
) -> None:
    """The program itself fails if a kernel does not compile, or takes more shared memory than there is.

    What has not changed since it was recorded is not compiled again, but for a sample. After a change of a
    kernel: `pytest tests/triton_kernels/test_compilation.py --record-kernels`.
    """
    # Machine code takes a third of the time; the report in bench/results is of all of it.
    options = [] if target == "sm_90" else ["--stop-at-shared"]
    options += ["--known", str(COMPILED)]
    options += ["--record"] if pytestconfig.getoption("--record-kernels") else []
    options += ["--every"] if pytestconfig.getoption("--all-kernels") else []
    compiled = output_lines(ROOT / "bench/compile_kernels.py", "--targets", target, *options)
    assert {line["target"] for line in compiled} == {target}
    compute = int(target.removeprefix("sm_"))
    kernels = KERNELS if compute >= 90 else KERNELS - TMA_KERNELS
    kernels = kernels if compute >= 89 else kernels - FP8_KERNELS
    kernels = kernels if compute == 90 else kernels - HOPPER_KERNELS
    assert {line["kernel"] for line in compiled} == kernels
    for line in compiled:
        assert line["bare_fp8"] == 0, f"rounds to FP8 without as_fp8: {line}"
        multiplies = line["kernel"] in MULTIPLYING and "float32" not in line["launch"]
        if multiplies:
            assert line["wgmma"] + line["tcgen05"] + line["mma"] > 0, f"no matrix instructions: {line}"
            assert line["tma"] + line["cp_async"] > 0, f"loads are not pipelined: {line}"
        if line["kernel"] in EARLY_KERNELS and compute >= 90:
            assert 1 <= line["waits"] <= MOST_WAITS.get(line["kernel"], 1), line
        else:
            assert line["waits"] == 0, f"not named as one that may start early: {line}"
        if compute < 90:
            assert line["tma"] == 0, f"needs TMA: {line}"
        if compute != 90:
            continue
        if line["kernel"] in EARLY_KERNELS:
            assert line["kernel"] in LOAD_EARLY or line["before_wait"] == 0, f"reads too early: {line}"
            # What comes behind reads before it waits, as if all before this kernel had ended.
            is_named = line["kernel"] in EARLY_KERNELS.values()
            assert not (is_named and line["triggers_before_wait"]), f"lets the next start too early: {line}"
        # The warps that only fetch queries have few registers, and time enough. Two FP8 tiles of a gated
        # layer with scales of blocks are faster than smaller ones that do not spill.
        spills_allowed = SPILLS.get(line["kernel"], 64)
        assert line.get("stack_bytes", 0) <= spills_allowed, f"spills: {line}"
        if line["kernel"] in TALL_KERNELS and "float32" not in line["launch"]:
            assert line["wgmma"] > 0, f"no Hopper matrix instructions: {line}"
        if line["kernel"] == "_tiled_linear_kernel":
            assert line.get("stack_bytes", 0) == 0, f"spills: {line}"


def test_the_report_of_kernels_by_gpu_has_every_kernel_and_no_failure() -> None:
    report = read_report(ROOT / "bench/results/cpu/kernels-by-gpu.json")
    assert report.metrics["failed"] == 0
    found = {row["kernel"] for row in report.tables["kernels"]}
    assert found == KERNELS, "run: python bench/compile_kernels.py --candidates --out ..."
    assert not any(row["failed"] for name in ("kernels", "candidates") for row in report.tables[name])


def test_every_launcher_traces_with_a_symbolic_batch_and_writes_only_what_it_says():
    """A false 'written' would make torch.compile copy that tensor, a whole KV pool perhaps, at every call."""
    traced = output_lines(HERE / "trace_launchers.py")
    written = {
        line["launcher"]: sorted(name for kernel in line["kernels"] for name in kernel["written"])
        for line in traced
    }
    assert written == {
        "rms_norm": ["y_ptr"],
        "add_rms_norm": ["new_residual_ptr", "y_ptr"],
        "silu_mul": ["y_ptr"],
        "linear": ["y_ptr"],
        "gated_linear": ["y_ptr"],
        "quantize_fp8": ["q_ptr", "scales_ptr"],
        "add_rms_norm_fp8": ["new_residual_ptr", "q_ptr", "scales_ptr"],
        "fp8_linear": ["y_ptr"],
        "fp8_gated_linear": ["y_ptr"],
        "fp8_gated_linear_with_peaks": ["peaks_ptr", "y_ptr"],
        "quantize_fp8_with_peaks": ["q_ptr", "scales_ptr"],
        "enter_mixture": ["for_experts_ptr", "for_mlp_ptr", "logits_ptr", "stream_ptr"],
        "leave_mixture": ["new_residual_ptr", "y_ptr"],
        "choose_experts": ["factors_ptr", "weights_ptr"],
        "read_rows": [
            "context_len_out_ptr",
            "min_p_out_ptr",
            "positions_out_ptr",
            "seed_out_ptr",
            "slot_mapping_out_ptr",
            "temperature_out_ptr",
            "token_ids_out_ptr",
            "top_k_out_ptr",
            "top_p_out_ptr",
        ],
        "advance_rows": ["context_len_ptr", "last_token_ptr"],
        "token_mask": ["out_ptr"],
        "logit_rules": ["out_ptr"],
        "count_tokens": ["marks_ptr", "recent_ptr"],
        "rope_store": ["k_cache_ptr", "q_ptr", "v_cache_ptr"],
        "rope_store normed": ["k_cache_ptr", "q_ptr", "v_cache_ptr"],
        "rope_store, values of keys": ["k_cache_ptr", "q_ptr", "v_cache_ptr"],
        "paged_decode": ["arrivals_ptr", "out_ptr", "partial_acc_ptr", "partial_sum_ptr"],
        "paged_decode over e4m3": ["arrivals_ptr", "out_ptr", "partial_acc_ptr", "partial_sum_ptr"],
        "rope_paged_decode": [
            "arrivals_ptr",
            "k_cache_ptr",
            "out_ptr",
            "partial_acc_ptr",
            "partial_sum_ptr",
            "v_cache_ptr",
        ],
        "paged_prefill": ["out_ptr"],
        "sample": [
            "above_mass_ptr",
            "block_group_ptr",
            "block_mass_ptr",
            "block_top_ptr",
            "bracket_ptr",
            "count_ptr",
            "draw_mass_ptr",
            "group_top_ptr",
            "hits_ptr",
            "listed_ptr",
            "num_hits_ptr",
            "out_ptr",
        ],
    }
