"""`minisgl tune` in Triton's interpreter, with a timer that says what the test wants to hear."""

import io
import json
import math
import xml.etree.ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.benchmark.kernels import tune
from minisgl.benchmark.kernels.kernel_op import Case
from minisgl.benchmark.kernels.model_shapes import MODEL_SHAPES, TO_SERVE, read_model_shape
from minisgl.benchmark.kernels.ops.all_ops import TUNABLE
from minisgl.benchmark.kernels.ops.linear_ops import Matrix, many_rows_candidates
from minisgl.benchmark.kernels.tune import CaseResult, Timed, best_for_all, run_tune
from minisgl.benchmark.settings import TuneSettings
from minisgl.cli import main
from minisgl.errors import ConfigError
from triton_kernels.gpu import Gpu
from triton_kernels.silu_mul import SiluMulConfig, silu_mul_triton
from triton_kernels.tuning import read_table

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs kernels in Triton's interpreter")


L4 = Gpu((8, 9), 99 << 10, 58)
NEEDS_HOPPER = (
    "linear_many",
    "gated_linear_many",
    "paged_prefill_hopper",
    "fp8_linear_many_blocks",
    "fp8_gated_linear_many_blocks",
    "int4_linear_many",
    "int4_gated_linear_many",
)
"""Ops whose kernels older GPUs do not run, so that there is nothing to tune."""
FIXED_ON_HOPPER = ("gated_delta_decode",)
"""On Hopper another kernel runs, with one configuration."""


def config_of(call: Callable[[], Any]) -> Any:
    """The configuration that a timed call runs with."""
    cells = [cell.cell_contents for cell in call.__closure__ or ()]
    return next((cell.keywords["config"] for cell in cells if hasattr(cell, "keywords")), None)


class FakeTimer:
    """Runs a call and reports the microseconds `price` asks for its configuration; 1000 for ceilings."""

    def __init__(self, price: Callable[[Any], float]) -> None:
        self.price = price
        self.timed: list[Any] = []

    def __call__(self, calls: list[Callable[[], Any]]) -> float:
        calls[0]()
        config = config_of(calls[0])
        if config is None:
            return 1000.0
        self.timed.append(config)
        return self.price(config)


def tune_smollm2(
    out: Path, timer: FakeTimer | None = None, **settings: Any
) -> tuple[dict[str, Any], list[str]]:
    settings = {"ops": "silu_mul", **settings}
    said = io.StringIO()
    wanted = TuneSettings(model="smollm2-135m", device="cpu", out=str(out), **settings)
    assert run_tune(wanted, said, timer) == 0
    return read_table(out / "cpu-interpreter.json"), said.getvalue().splitlines()


def test_the_fastest_wins_and_the_table_says_by_how_much(tmp_path: Path) -> None:
    timer = FakeTimer(lambda config: 50.0 if config == SiluMulConfig(256, 4) else 100.0)
    table, said = tune_smollm2(tmp_path, timer)
    (entry,) = table["entries"]
    assert entry["config"] == {"block_f": 256, "num_warps": 4}
    assert [(one["size"], one["default_us"], one["us"]) for one in entry["sizes"]] == [
        (1, 100.0, 50.0),
        (5, 100.0, 50.0),
    ]
    assert entry["models"] == ["smollm2-135m"]
    assert sum("2.00x" in line for line in said) == 2
    assert set(table["kernels"]) == {"silu_mul"}


def test_a_wrong_answer_never_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launcher(x: torch.Tensor, config: SiluMulConfig) -> torch.Tensor:
        if config.num_warps == 2:
            raise RuntimeError("out of resources")
        return silu_mul_triton(x, config) * (1.02 if config.block_f == 256 else 1.0)

    monkeypatch.setitem(TUNABLE, "silu_mul", TUNABLE["silu_mul"]._replace(launcher=launcher))
    timer = FakeTimer(lambda config: 1.0 if config != SiluMulConfig() else 100.0)
    table, said = tune_smollm2(tmp_path, timer)
    assert set(timer.timed) == {SiluMulConfig()}
    (entry,) = table["entries"]
    assert entry["config"] == SiluMulConfig()._asdict()
    assert any("relative error 2.0e-02" in line for line in said)
    assert any("out of resources" in line for line in said)


def test_noise_does_not_win(tmp_path: Path) -> None:
    timer = FakeTimer(lambda config: 100.0 if config == SiluMulConfig() else 99.5)
    table, _ = tune_smollm2(tmp_path, timer)
    assert table["entries"][0]["config"] == SiluMulConfig()._asdict()


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    class Interrupted(Exception):
        pass

    def stop_at_norms(config: Any) -> float:
        if not isinstance(config, SiluMulConfig):
            raise KeyboardInterrupt
        return 100.0

    with pytest.raises(KeyboardInterrupt):
        tune_smollm2(tmp_path, FakeTimer(stop_at_norms), ops="silu_mul,rms_norm")
    timer = FakeTimer(lambda config: 100.0)
    table, _ = tune_smollm2(tmp_path, timer, ops="silu_mul,rms_norm")
    assert [entry["op"] for entry in table["entries"]] == ["silu_mul", "rms_norm"]
    assert not any(isinstance(config, SiluMulConfig) for config in timer.timed)
    again = FakeTimer(lambda config: 70.0)
    table, _ = tune_smollm2(tmp_path, again, ops="silu_mul,rms_norm", again=True)
    assert any(isinstance(config, SiluMulConfig) for config in again.timed)
    assert [entry["op"] for entry in table["entries"]] == ["silu_mul", "rms_norm"]


def test_stale_entries_are_measured_again_and_others_kept(tmp_path: Path) -> None:
    path = tmp_path / "cpu-interpreter.json"
    table, _ = tune_smollm2(tmp_path, FakeTimer(lambda config: 100.0), ops="silu_mul,rms_norm")
    table["kernels"]["silu_mul"]["hash"] = "0" * 16
    path.write_text(json.dumps(table))
    timer = FakeTimer(lambda config: 100.0)
    tune_smollm2(tmp_path, timer, ops="silu_mul,rms_norm")
    assert {type(config) for config in timer.timed} == {SiluMulConfig}
    path.write_text(json.dumps({**table, "triton": "0.1"}))
    timer = FakeTimer(lambda config: 100.0)
    tune_smollm2(tmp_path, timer, ops="silu_mul,rms_norm")
    assert len({type(config) for config in timer.timed}) == 2


def test_one_configuration_for_all_sizes_must_not_lose_much_anywhere() -> None:
    case = Case("", 1, lambda device, dtype: pytest.fail("not built"))

    def result(**us: float) -> CaseResult:
        return CaseResult(case, 1.0, "TB/s", [Timed(name, time) for name, time in us.items()])

    assert best_for_all([result(default=10, a=5, b=8), result(default=10, a=11, b=9)]) == "b"
    assert best_for_all([result(default=10, a=math.inf, b=10), result(default=10, a=1, b=10)]) is None
    assert best_for_all([result(default=10, a=5, b=8), result(default=10, a=10.4, b=9)]) == "a"


def test_every_op_smokes_through_the_command_and_draws_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "plot.svg"
    words = [
        "tune",
        "--model",
        "smollm2-135m",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
        "--plot",
        str(plot),
    ]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert not [line for line in said.splitlines() if "refused" in line or "failed" in line]
    tuned_ops = {entry["op"] for entry in read_table(tmp_path / "cpu-interpreter.json")["entries"]}
    # 576 inputs are no multiple of 128.
    of_blocks = {"fp8_gated_linear_many_blocks", "int4_gated_linear_many"}
    of_experts = {op for op in TUNABLE if op.startswith(("fused_moe", "gated_delta"))}
    assert tuned_ops == TUNABLE.keys() - of_experts - {"paged_prefill_hopper"} - of_blocks
    root = xml.etree.ElementTree.parse(plot).getroot()
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any("CPU interpreter" in text for text in texts)
    for op in tuned_ops:
        assert any(text.startswith(op + " ") for text in texts), op


def test_a_dry_run_shows_shapes_and_candidates_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--dry-run", "--model", "all"]) == 0
    said = capsys.readouterr().out
    for model in TO_SERVE:
        assert f"{model} paged_decode D=" in said
    assert "qwen3-30b-a3b fused_moe top_k=8 E=128 M=2048 F=768" in said
    assert "llama-3.1-8b fused_moe" not in said
    assert "PrefillConfig(" in said


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--model", "no-such"], "no-such"),
        (["--ops", "silu_mul,dance"], "'dance' can't be tuned; there are rms_norm"),
        (["--device", "tpu"], "--device must be"),
        (["--device", "cpu"], "give --out DIR"),
        (["--plot", "a.jpg"], ".png, .svg, .html"),
        ([], "needs a CUDA GPU and torch sees none; --dry-run"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *words]) == 2
    error = capsys.readouterr().err
    assert what in error
    assert len(error.splitlines()) == 1


def test_a_place_that_can_not_be_written_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="give --out DIR"):
        run_tune(TuneSettings(device="cpu", out=str(tmp_path / "file" / "below")), io.StringIO())


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_defaults_and_candidates_are_configurations_of_one_kind(name: str) -> None:
    shape = read_model_shape(name)
    for op, tunable in TUNABLE.items():
        for part in tunable.parts(shape):
            for case in tunable.cases(part, True):
                default = type(tunable.default(part, case.size, 2, tune.H200))
                found = {type(one) for one in tunable.candidates(part, case.size, tune.H200)}
                assert found == (set() if op in FIXED_ON_HOPPER else {default}), op
                found = {type(one) for one in tunable.candidates(part, case.size, L4)}
                assert found == (set() if op in NEEDS_HOPPER else {default}), op


def test_tables_name_the_files_whose_changes_make_them_stale() -> None:
    for path in tune.FOLDER.glob("*.json"):
        for op, kernel in read_table(path)["kernels"].items():
            assert tuple(kernel["files"]) == TUNABLE[op].files, (path.name, op)


def test_cpu_tables_never_ship() -> None:
    assert not list(tune.FOLDER.glob("cpu*"))


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-0.6b", "qwen3-14b", "qwen3-30b-a3b"])
def test_every_linear_layer_of_a_model_is_tuned_where_it_runs(name: str) -> None:
    shape = read_model_shape(name)
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    attention = [(qkv, shape.hidden), (shape.hidden, shape.heads * shape.head_dim)]
    mlp = [] if shape.experts else [(shape.hidden, shape.intermediate)]
    gate_up = [] if shape.experts else [(2 * shape.intermediate, shape.hidden)]

    def numbers(op: str) -> list[tuple[int, ...]]:
        tunable = TUNABLE[op]
        return [tuple(tunable.exact(part).values()) for part in tunable.parts(shape)]

    assert numbers("gated_linear") == numbers("gated_linear_many") == gate_up
    assert numbers("linear") == numbers("linear_many") == [*attention, *mlp, (shape.vocab, shape.hidden)]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [32, 64, 128, 256])
def test_candidates_for_many_rows_fit_into_shared_memory_and_leave_every_split_some_steps(
    rows: int, gated: bool
) -> None:
    for outputs, width in ((2048, 1024), (6144, 4096), (28672, 4096), (152064, 5120), (5120, 17408)):
        candidates = many_rows_candidates(Matrix("", outputs, width), rows, tune.H200, gated=gated)
        assert 3 <= len(candidates) <= 20
        for config in candidates:
            tile = config.block_k * (config.block_n * (2 if gated else 1) + config.block_m)
            assert 2 * tile * config.num_stages <= 227 * 1024
            assert config.splits == 1 or width // (config.block_k * config.splits) >= 4
