"""`minisgl bench kernel` in Triton's interpreter, and the chart it draws."""

import statistics
import sys
import xml.etree.ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch

from minisgl.benchmark.kernels.kernel_bench import with_results
from minisgl.benchmark.kernels.kernel_timing import Ceilings, Problem
from minisgl.benchmark.kernels.model_shapes import read_model_shape
from minisgl.benchmark.kernels.ops.all_ops import OPS
from minisgl.benchmark.kernels.ops.moe_ops import fused_moe_problem, moe_route_problem
from minisgl.benchmark.kernels.ops.rope_ops import rope_store_problem
from minisgl.benchmark.kernels.ops.row_ops import advance_rows_problem
from minisgl.benchmark.reports.report import make_report, read_report
from minisgl.cli import main
from triton_kernels.fused_moe import fused_moe_reference
from triton_kernels.registry import Kernels

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs kernels in Triton's interpreter")

CPU = torch.device("cpu")
OF_STATES = {"gated_delta_decode", "gated_delta_prefill"}


def test_the_command_checks_times_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "k.json", tmp_path / "k.svg"
    names = [
        "norm",
        "_mul",
        "rope",
        "paged",
        "greedy",
        "advance_rows",
        "token_mask",
        "rules",
        "count_tokens",
        "linear",
    ]
    words = ["bench", "kernel", *names, "--device", "cpu", "--model", "smollm2-135m", "--commit", "abc123"]
    assert main([*words, "--out", str(out), "--plot", str(plot)]) == 0
    report = read_report(out)
    of_experts = {"fused_moe", "moe_route", "add_rms_norm_router"}
    assert report.tables.keys() == OPS.keys() - of_experts - {"paged_prefill_hopper"} - OF_STATES
    assert {chart.title.partition(":")[0] for chart in report.charts} == report.tables.keys()
    rows = [(op, row) for op, rows in report.tables.items() for row in rows]
    for op, row in rows:
        name = f"{op} {row['shape']} ours"
        times = report.samples[f"{name}_us"]
        assert report.metrics[f"{name}_p50_us"] == row["ours_us"] == statistics.median(times)
        assert times
        assert msgspec.convert(row["error"], float) < 1e-4
        floor_us, us, fraction = (
            msgspec.convert(row[c], float) for c in ("floor_us", "ours_us", "ours_fraction")
        )
        assert fraction == pytest.approx(floor_us / us, rel=0.05, abs=1e-3)
        assert row["unit"] in ("TB/s", "TFLOP/s")
        assert row["failed"] is None
    assert (report.environment.git_commit, report.environment.torch) == ("abc123", torch.__version__)
    assert (report.arguments["model"], report.arguments["names"]) == ("smollm2-135m", names)
    said = capsys.readouterr().out
    assert f"{len(rows)} results, 0 failed" in said
    drawn = "".join(xml.etree.ElementTree.parse(plot).getroot().itertext())
    assert "paged_decode: share of the roofline" in drawn
    assert main(["bench", "compare", str(out), str(out)]) == 0
    assert f"{rows[0][0]} {rows[0][1]['shape']} ours_p50_us" in capsys.readouterr().out


def test_a_failed_kernel_has_its_words_in_the_report_and_no_time() -> None:
    empty = make_report("kernel", arguments={}, metrics={}, command="test")
    results = [("a", {"shape": "1x2", "failed": "wrong"}), ("b", {"shape": "3", "ours_us": 5.0})]
    report = with_results(empty, results, {"b 3 ours_us": [4.0, 5.0, 9.0]})
    assert (report.tables["a"][0]["failed"], report.tables["a"][0]["ours_us"]) == ("wrong", None)
    assert report.metrics == {"b 3 ours_p50_us": 5.0}
    assert [chart.title.partition(":")[0] for chart in report.charts] == ["b"]


def test_a_replacement_is_timed_in_the_ops_place_and_a_wrong_one_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = ModuleType("experiment")
    exec("def norm(x, weight, eps): return x", experiment.__dict__)
    monkeypatch.setitem(sys.modules, "experiment", experiment)
    words = ["bench", "kernel", "rms_norm 5x", "--device", "cpu", "--model", "smollm2-135m"]
    assert main([*words, "--kernel", "rmsnorm=experiment:norm"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "FAILED: relative error" in line] == ["rms_norm"]
    assert main([*words, "--kernel", "rmsnorm=experiment:other"]) == 2


def test_an_unknown_name_says_which_kernels_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernel", "dance", "--device", "cpu"]) == 2
    assert "no kernel and no shape is called 'dance'; the kernels: rms_norm, " in capsys.readouterr().err


def test_an_unknown_baseline_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernel", "--device", "cpu", "--baselines", "inductor,magic"]) == 2
    assert "there are inductor and flashinfer, and none; got 'magic'" in capsys.readouterr().err


def test_without_a_gpu_the_error_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernel"]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_every_op_that_can_be_replaced_can_be_timed() -> None:
    shape = read_model_shape("qwen3-30b-a3b")
    measured = {name for name, op in OPS.items() if op.bench_cases(shape, True)}
    assert set(Kernels._fields) <= measured == OPS.keys() - {"paged_prefill_hopper"} - OF_STATES
    shape = read_model_shape("qwen3.5-27b")
    assert all(OPS[name].bench_cases(shape, True) for name in OF_STATES)


def test_the_floor_is_the_larger_of_the_two_limits() -> None:
    ceilings = Ceilings(copy_tb_s=4.0, matmul_tflop_s=800.0)
    copy = Problem(4e9, 8e9, [], 0, lambda function: 0.0)
    multiply = copy._replace(flop=8e12)
    assert (ceilings.limit(copy), ceilings.limit(multiply)) == ("TB/s", "TFLOP/s")
    assert ceilings.floor_us(copy) == pytest.approx(1e3)
    assert ceilings.floor_us(multiply) == pytest.approx(1e4)
    assert ceilings.rate(multiply, 2e4) == pytest.approx(400.0)


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "silu_mul", "rope_store", "paged_decode"])
def test_baselines_compute_what_our_ops_do(op: str) -> None:
    case = OPS[op].bench_cases(read_model_shape("smollm2-135m"), False)[0]
    problem = case.build(CPU, torch.float32)
    plain = OPS[op].plain_torch
    assert plain is not None
    if op == "paged_decode":  # in other company its rows may differ in the last bits
        got = plain(*problem.arguments[0])
        assert torch.allclose(got, OPS[op].launcher(*problem.arguments[0]), atol=1e-5)
    else:
        assert problem.check(plain) < 1e-5


def test_the_experts_problem_counts_the_experts_that_are_hit() -> None:
    shape = read_model_shape("qwen3-30b-a3b")._replace(
        hidden=32, experts=6, experts_per_token=2, expert_width=16
    )
    problem = fused_moe_problem(1, shape, CPU, torch.float32)
    assert problem.check(fused_moe_reference) < 1e-6
    assert problem.num_bytes == 2 * 3 * 32 * 16 * 4 + 2 * 32 * 4
    assert problem.flop == 2 * 6 * 32 * 16
    with pytest.raises(ValueError, match="finite"):
        problem.check(lambda x, *rest: x * float("nan"))


def test_the_routing_problem_knows_the_order_and_the_rows_problem_the_rows() -> None:
    shape = read_model_shape("qwen3-30b-a3b")._replace(experts=6, experts_per_token=2)
    route = OPS["moe_route"].launcher
    problem = moe_route_problem(5, shape, CPU, torch.float32)
    assert problem.check(route) < 1e-6
    with pytest.raises(ValueError, match="order"):
        problem.check(lambda *given: route(*given)._replace(order=route(*given).order.flip(0)))
    with pytest.raises(ValueError, match="rows"):
        advance_rows_problem(5, CPU, torch.float32).check(lambda *given: None)


def test_a_store_to_a_wrong_slot_is_found() -> None:
    problem = rope_store_problem(4, read_model_shape("smollm2-135m"), CPU, torch.float32)

    def shifted(
        qkv: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, *pools
    ):
        return OPS["rope_store"].launcher(qkv, cos_sin, positions, slots.roll(1) // 2, *pools)

    with pytest.raises(ValueError, match="wrong slots"):
        problem.check(shifted)


@pytest.mark.parametrize("op", sorted(OF_STATES))
def test_linear_attention_is_checked_with_its_states(op: str) -> None:
    (case,) = OPS[op].bench_cases(read_model_shape("qwen3.5-9b"), False)
    problem = case.build(CPU, torch.float32)
    assert problem.check(OPS[op].launcher) < 1e-5

    def forgetful(qkvz: torch.Tensor, ba: torch.Tensor, weights: Any, states: Any, *others: Any) -> Any:
        recurrent = states.recurrent.clone()
        out = OPS[op].launcher(qkvz, ba, weights, states, *others)
        states.recurrent.copy_(recurrent)
        return out

    assert problem.check(forgetful) > 0.1
