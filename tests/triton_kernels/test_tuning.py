"""Tables of launch configurations: what a lookup finds, ignores and says, and what it costs a trace."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton

from triton_kernels import (
    all_reduce,
    fp8_linear_many,
    fused_moe,
    int4_linear_many,
    linear_few,
    linear_many,
    moe_int4,
    paged_decode,
    paged_prefill,
    paged_prefill_hopper,
    rms_norm,
    silu_mul,
    tuning,
)
from triton_kernels.gpu import ELSEWHERE, OLDEST, Gpu
from triton_kernels.tuning import (
    FOLDER,
    as_dict,
    code_only,
    find_choice,
    find_tables,
    kernel_hash,
    new_table,
    read_table,
    table_path,
    tuned,
    write_table,
)

GPU = torch.device("cuda")
BF16 = torch.bfloat16
CAPABILITY = (8, 6)


class Config(NamedTuple):
    block: int = 1
    warps: int = 1


def entry(block: int, near: int, sizes: dict[int, int] | None = None, op: str = "silu_mul") -> dict[str, Any]:
    return {
        "op": op,
        "dtype": "bfloat16",
        "exact": {"D": 128},
        "near": {"K": near},
        "config": {"block": block, "warps": 4},
        "sizes": [
            {"size": size, "config": {"block": own, "warps": 4}} for size, own in (sizes or {}).items()
        ],
    }


def table_of(*entries: dict[str, Any]) -> dict[str, Any]:
    files = ["silu_mul.py"]
    known = {"files": files, "hash": kernel_hash(tuple(files))}
    kernels = {one["op"]: known for one in entries}
    return {**new_table("Some GPU", CAPABILITY), "kernels": kernels, "entries": list(entries)}


@pytest.fixture
def some_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place where the table of the GPU that torch pretends to have is looked for."""
    path = tmp_path / "some-gpu.json"
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(tuning, "gpu_of", lambda device: Gpu(CAPABILITY, 99 << 10, 72))
    tuning._choice.cache_clear()
    tuning._entries_in_use.cache_clear()
    yield path
    tuning._choice.cache_clear()
    tuning._entries_in_use.cache_clear()


def look_up(near: int = 8, size: int | None = None, op: str = "silu_mul", exact: int = 128) -> Config:
    return tuned(Config(), op, GPU, BF16, exact=(exact,), near=(near,), size=size)


def test_the_nearest_shape_is_taken_and_one_too_far_away_is_not(some_gpu: Path) -> None:
    write_table(some_gpu, table_of(entry(10, near=1), entry(20, near=8)))
    assert look_up(near=1) == Config(10, 4)
    assert look_up(near=2) == Config(10, 4)
    assert look_up(near=3) == Config(20, 4), "nearer by ratio"
    assert look_up(near=64) == Config(20, 4)
    assert look_up(near=65) == Config()


def test_exact_numbers_op_and_dtype_must_be_equal(some_gpu: Path) -> None:
    write_table(some_gpu, table_of(entry(10, near=8)))
    assert look_up() == Config(10, 4)
    assert look_up(exact=64) == Config()
    assert look_up(op="rms_norm") == Config()
    assert tuned(Config(), "silu_mul", GPU, torch.float16, (128,), (8,)) == Config()
    assert tuned(Config(), "silu_mul", torch.device("cpu"), BF16, (128,), (8,)) == Config()


def test_the_nearest_size_is_taken_in_log_space(some_gpu: Path) -> None:
    write_table(some_gpu, table_of(entry(10, 8, {1: 1, 16: 16, 4096: 99})))
    found = [look_up(size=size).block for size in (0, 1, 3, 5, 250, 260, 100_000)]
    assert found == [1, 1, 1, 16, 16, 99, 99]
    assert look_up(size=None) == Config(10, 4)


def test_a_missing_table_is_one_line_that_says_what_to_run(
    some_gpu: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert [look_up(near=near) for near in (1, 2, 3)] == [Config()] * 3
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "Some GPU" in record.getMessage()
    assert "minisgl tune" in record.getMessage()


def test_a_gpu_without_a_table_takes_that_of_one_with_the_same_multiprocessors(
    some_gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    # Not caplog: an earlier test of this process may have set up the log as a server does.
    monkeypatch.setattr(tuning.logger, "info", lambda text, *values: said.append(text % values))

    def other(name: str, block: int, capability: tuple[int, int]) -> None:
        table = {**table_of(entry(block, 8)), "gpu": name, "capability": list(capability)}
        write_table(table_path(name, some_gpu.parent), table)

    other("Another", 10, (9, 0))
    other("Some GPU Ti", 20, CAPABILITY)
    other("Some later GPU", 30, CAPABILITY)
    (some_gpu.parent / "broken.json").write_text("{")
    assert [look_up(near=near) for near in (4, 8)] == [Config(20, 4)] * 2
    (line,) = said
    assert "Some GPU: those of some-gpu-ti" in line
    assert find_tables("Some GPU", (10, 0), some_gpu.parent) == []


def test_a_gpus_own_table_is_taken_before_anothers(some_gpu: Path) -> None:
    write_table(some_gpu.with_name("a-gpu.json"), {**table_of(entry(10, 8)), "gpu": "A GPU"})
    write_table(some_gpu, table_of(entry(20, 8)))
    assert look_up() == Config(20, 4)


def test_what_a_table_lacks_is_looked_up_in_the_one_that_it_names(some_gpu: Path) -> None:
    other = {**table_of(entry(10, 8), entry(30, 1024)), "gpu": "Some other GPU", "otherwise": "some-gpu"}
    write_table(some_gpu.with_name("some-other-gpu.json"), other)
    write_table(some_gpu, {**table_of(entry(20, 8)), "otherwise": "some-other-gpu"})
    assert (look_up(), look_up(near=1024), look_up(near=1 << 20)) == (Config(20, 4), Config(30, 4), Config())


def test_a_new_table_names_the_one_that_was_taken_before(some_gpu: Path) -> None:
    assert new_table("Some GPU", CAPABILITY, some_gpu.parent)["otherwise"] is None
    other = some_gpu.with_name("some-other-gpu.json")
    write_table(other, {**table_of(entry(10, 8)), "gpu": "Some other GPU"})
    fresh = new_table("Some GPU", CAPABILITY, some_gpu.parent)
    assert fresh["otherwise"] == "some-other-gpu"
    write_table(some_gpu, fresh)
    assert find_tables("Some GPU", CAPABILITY, some_gpu.parent) == [some_gpu, other]


def test_hopper_gpus_have_the_configurations_of_the_h100_and_the_h200() -> None:
    h200 = table_path("NVIDIA H200")
    h100 = table_path("NVIDIA H100 80GB HBM3")
    assert find_tables("NVIDIA H200", (9, 0)) == [h200]
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA GH200 480GB"):
        assert find_tables(name, (9, 0)) == [h100, h200]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 99}'])
def test_a_broken_table_is_one_line_and_the_default(
    some_gpu: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    some_gpu.write_text(text)
    assert [look_up(near=near) for near in (1, 2)] == [Config()] * 2
    assert len(caplog.records) == 1
    assert "can't be read" in caplog.text


def test_another_triton_makes_a_table_stale(some_gpu: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_table(some_gpu, {**table_of(entry(10, 8)), "triton": "1.0"})
    assert look_up() == Config()
    assert len(caplog.records) == 1
    assert f"Triton 1.0, this is {triton.__version__}" in caplog.text


def test_a_changed_kernel_makes_its_own_entries_stale_only(
    some_gpu: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = table_of(entry(10, 8), entry(20, 8, op="rms_norm"))
    table["kernels"]["rms_norm"] = {"files": ["rms_norm.py"], "hash": "0" * 16}
    write_table(some_gpu, table)
    assert (look_up(), look_up(op="rms_norm")) == (Config(10, 4), Config())
    assert len(caplog.records) == 1
    assert "kernels rms_norm changed" in caplog.text


def test_comments_and_docstrings_do_not_count_as_changes() -> None:
    before = 'def f(x):\n    return x + "#"  # why\n'
    after = '"""About."""\n\n# more\ndef f(x):\n    """What."""\n    return x + "#"\n'
    assert code_only(before) == code_only(after) == 'def f(x):\n    return x + "#"'
    assert code_only(before) != code_only(before.replace("+", "-"))
    assert kernel_hash(("silu_mul.py",)) != kernel_hash(("rms_norm.py",))


def test_what_is_written_is_read_back_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "gpu.json"
    for table in (table_of(), table_of(entry(1, 2)), table_of(entry(1, 2), entry(3, 4, {1: 5}))):
        write_table(path, {**table, "ceilings": {}})
        assert read_table(path) == {**table, "ceilings": {}}
    assert [file.name for file in path.parent.iterdir()] == ["gpu.json"]


def test_the_name_of_a_table_is_the_gpus() -> None:
    assert table_path("NVIDIA H200").name == "nvidia-h200.json"
    assert table_path("NVIDIA A100-SXM4-80GB").name == "nvidia-a100-sxm4-80gb.json"


def test_configurations_inside_one_keep_their_place() -> None:
    config = fused_moe.default_moe_config(1, 8, 64, 2, 2, ELSEWHERE)
    one = {**entry(0, 8), "config": as_dict(config)}
    choice = find_choice([one], "silu_mul", "bfloat16", (128,), (8,))
    assert choice is not None
    assert choice.for_all[0] == tuple(config.gate_up)
    assert config.pairs is None or choice.for_all[2] == tuple(config.pairs)


def test_a_lookup_is_a_constant_in_a_trace_and_a_symbolic_size_adds_no_guard(some_gpu: Path) -> None:
    write_table(some_gpu, table_of(entry(10, 8, {1: 1, 4096: 99})))

    def step(x: torch.Tensor) -> torch.Tensor:
        config = tuned(Config(), "silu_mul", GPU, BF16, exact=(128,), near=(x.shape[1],), size=x.shape[0])
        return x * config.block

    graphs = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(step, backend=keep, fullgraph=True, dynamic=False)
    x = torch.ones(4096, 8)
    torch._dynamo.mark_dynamic(x, 0)
    assert compiled(x)[0, 0] == 10, "the configuration for all sizes"
    assert compiled(torch.ones(5, 8))[0, 0] == 10
    assert len(graphs) == 1
    assert step(x)[0, 0] == 99


CONFIGS = {
    "all_reduce": all_reduce.AllReduceConfig,
    "paged_decode": paged_decode.DecodeConfig,
    "paged_prefill": paged_prefill.PrefillConfig,
    "paged_prefill_hopper": paged_prefill_hopper.HopperPrefillConfig,
    "rms_norm": rms_norm.NormConfig,
    "add_rms_norm": rms_norm.NormConfig,
    "silu_mul": silu_mul.SiluMulConfig,
    "fused_moe": fused_moe.MoeConfig,
    "linear": linear_few.LinearConfig,
    "gated_linear": linear_few.LinearConfig,
    "linear_many": linear_many.TiledConfig,
    "gated_linear_many": linear_many.TiledConfig,
    "fp8_linear_many": fp8_linear_many.Fp8TiledConfig,
    "fp8_linear_many_blocks": fp8_linear_many.Fp8TiledConfig,
    "fp8_gated_linear_many": fp8_linear_many.Fp8TiledConfig,
    "fp8_gated_linear_many_blocks": fp8_linear_many.Fp8TiledConfig,
    "int4_linear_many": int4_linear_many.Int4TiledConfig,
    "int4_gated_linear_many": int4_linear_many.Int4TiledConfig,
    "paged_decode_fp8": paged_decode.DecodeConfig,
    "fused_moe_int4": moe_int4.MoeInt4Config,
    "fused_moe_mxfp4": moe_int4.MoeInt4Config,
}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_the_shipped_tables_hold_what_the_kernels_take(path: Path) -> None:
    table = read_table(path)
    assert path == table_path(table["gpu"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", table["date"])
    assert tuple(table["capability"]) >= OLDEST
    assert table["entries"]
    for one in table["entries"]:
        assert one["op"] in table["kernels"]
        assert one["sizes"], one["op"]
        fields = list(CONFIGS[one["op"]]._fields)
        for config in (one["config"], *(size["config"] for size in one["sizes"])):
            assert list(config) == fields
        assert all(0 < size["fraction"] < 1.2 for size in one["sizes"])
        assert find_choice(
            [one], one["op"], one["dtype"], tuple(one["exact"].values()), tuple(one["near"].values())
        )
    assert json.loads(path.read_text()) == table


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_the_shipped_tables_are_of_these_kernels(path: Path) -> None:
    """Else their entries are passed over: run minisgl tune; or, if the kernel compiles to the same PTX, write
    its new hash into the table."""
    for op, kernel in read_table(path)["kernels"].items():
        assert kernel_hash(tuple(kernel["files"])) == kernel["hash"], op
