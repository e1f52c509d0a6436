"""Every `minisgl bench` of an engine on a small workload on cpu: figures, files, pictures and exit codes."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planted_modules import imported_from, plant_modules

from minisgl.benchmark.reports.report import Report, make_report, read_report, write_report
from minisgl.benchmark.settings import OfflineBenchSettings
from minisgl.benchmark.steps.offline import make_workload, measure_offline
from minisgl.benchmark.steps.startup import with_caches_in
from minisgl.benchmark.steps.workload import Item, check_offline_settings, random_workload, read_prompts
from minisgl.cli import main
from minisgl.config import EngineConfig
from minisgl.engine.engine import Engine
from minisgl.engine.start.build import build_engine
from minisgl.errors import ConfigError, MinisglError
from minisgl.progress import no_progress
from minisgl.weights.sources import resolve_model_folder

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}
ENGINE = ["--device", "cpu", "--dtype", "float32", "--cpu-threads", "1", "--num-pages", "256"]
SMALL = ["--num-requests", "6", "--min-prompt-tokens", "8", "--max-prompt-tokens", "40"]
SMALL += ["--min-output-tokens", "2", "--max-output-tokens", "9"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        return resolve_model_folder("smollm2-135m")
    except MinisglError as error:
        pytest.skip(f"the built-in model is not on this machine and can't be fetched: {error}")


@pytest.fixture(scope="module")
def offline_file(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """The report of one run with SmolLM2 that several tests look at."""
    folder = tmp_path_factory.mktemp("offline")
    words = ["bench", "offline", *SMALL, "--max-running-requests", "4", "--rounds", "2", *ENGINE]
    words += ["--max-context-tokens", "512", "--commit", "1234567"]
    assert main([*words, "--out", str(folder / "o.json"), "--plot", str(folder / "o.svg")]) == 0
    return folder / "o.json"


@pytest.fixture
def engine(tiny: Path) -> Iterator[Engine]:
    config = EngineConfig(device="cpu", dtype="float32", dummy_weights=True, num_pages=64, cpu_threads=1)
    engine = build_engine(config, tiny, lambda name, ms: None)
    yield engine
    engine.close()


def small_settings(**others: Any) -> OfflineBenchSettings:
    base = OfflineBenchSettings(
        num_requests=6, min_prompt_tokens=8, max_prompt_tokens=40, min_output_tokens=2, max_output_tokens=9
    )
    return replace(base, **others)


def test_offline_counts_what_was_asked_for(offline_file: Path) -> None:
    report = read_report(offline_file)
    items = random_workload(small_settings())
    assert report.kind == "offline"
    assert report.metrics["num_output_tokens"] == sum(item.max_tokens for item in items)
    assert report.metrics["num_prompt_tokens"] == sum(len(item.prompt_ids) for item in items)
    assert report.tables["requests"] == [
        {"num_prompt_tokens": len(item.prompt_ids), "num_output_tokens": item.max_tokens} for item in items
    ]
    assert report.metrics["num_cached_tokens"] == 0, "a round must not find the prompts of the one before"
    assert [row["num_output_tokens"] for row in report.tables["rounds"]] == [
        report.metrics["num_output_tokens"]
    ] * 2
    assert len(report.samples["elapsed_s"]) == 2
    assert report.environment.git_commit == "1234567"
    assert (offline_file.parent / "o.svg").read_text(encoding="utf-8").count("<svg") == 1


def test_a_report_is_drawn_later(offline_file: Path, tmp_path: Path) -> None:
    assert main(["bench", "plot", str(offline_file), str(tmp_path / "later.html")]) == 0
    assert "output_tokens_per_s" in (tmp_path / "later.html").read_text(encoding="utf-8")
    assert main(["bench", "plot", str(offline_file), str(tmp_path / "later.pdf")]) == 2


def test_a_report_compared_with_itself_is_no_regression(
    offline_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "compare", str(offline_file), str(offline_file)]) == 0
    assert "no regression over 5.0%" in capsys.readouterr().out


def test_a_simulation_of_a_real_run_makes_its_decisions(
    offline_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s.json"
    words = ["bench", "simulate", "--against", str(offline_file), "--out", str(out)]
    assert main([*words, "--plot", str(tmp_path / "s.svg")]) == 0
    against = {row["metric"]: row["ratio"] for row in read_report(out).tables["against"]}
    assert against["num_steps"] == 1.0
    assert "costs are made up" in capsys.readouterr().out
    assert (tmp_path / "s.svg").stat().st_size > 0
    simulated = read_report(out).arguments["simulated"]
    assert [(one["streamed"], one["join_decodes"]) for one in simulated] == [(False, False)]


def test_a_run_from_before_there_were_requests_that_nobody_reads_is_simulated_as_it_was(
    offline_file: Path, tmp_path: Path
) -> None:
    older, out = json.loads(offline_file.read_text(encoding="utf-8")), tmp_path / "s.json"
    del older["arguments"]["workload"]["streamed"]
    del older["arguments"]["engine"]["join_decodes"]
    (tmp_path / "older.json").write_text(json.dumps(older), encoding="utf-8")
    assert main(["bench", "simulate", "--against", str(tmp_path / "older.json"), "--out", str(out)]) == 0
    simulated = read_report(out).arguments["simulated"]
    assert [(one["streamed"], one["join_decodes"]) for one in simulated] == [(True, False)]


def test_the_default_workload_is_that_of_the_engines_it_is_compared_with() -> None:
    random.seed(0)  # as their script does, through the module's own generator
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    lengths = [random.randint(100, 1024) for _ in range(256)]
    items = random_workload(OfflineBenchSettings())
    assert items == [Item(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]


def test_real_prompts_go_through_the_chat_template(smollm2: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    lines = [
        {"turns": ["Hello", "again"]},
        {"prompt": "Once"},
        {"messages": [{"role": "user", "content": "Hello"}]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    items = make_workload(small_settings(prompts=str(path), num_requests=4), smollm2)
    assert [item.max_tokens for item in items] == [9] * 4
    assert items[0].prompt_ids == items[2].prompt_ids == items[3].prompt_ids
    assert len(items[0].prompt_ids) > 5
    assert len(items[1].prompt_ids) == 1
    text = tmp_path / "p.txt"
    text.write_text("one\n\ntwo\n", encoding="utf-8")
    assert read_prompts(text) == ["one", "two"]


@pytest.mark.parametrize("content", ["", "{}\n", "not json\n", '{"turns": []}\n', '{"prompt": ""}\n'])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"p\.jsonl"):
        read_prompts(path)


def test_an_output_ends_where_the_model_ends_it_unless_told_otherwise(engine: Engine) -> None:
    items = [Item([5, 6, 7], 40)] * 8
    settings = small_settings(temperature=5.0, ignore_eos=False, max_token_id=63)
    ended = measure_offline(engine, items, settings, no_progress)
    full = measure_offline(engine, items, small_settings(temperature=5.0), no_progress)
    assert full.metrics["num_output_tokens"] == 8 * 40
    assert (ended.metrics["num_output_tokens"] or 0) < 8 * 40


def test_a_request_that_does_not_fit_is_a_config_error(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="300 tokens, this engine takes 256"):
        measure_offline(engine, [Item([1] * 200, 100)], small_settings(), no_progress)


@pytest.mark.parametrize(
    "words",
    [
        ["offline", "--num-requests", "0"],
        ["offline", "--min-prompt-tokens", "9", "--max-prompt-tokens", "8"],
        ["offline", "--prompts", "/no/such/file"],
        ["offline", "--out", "/no/such/folder/o.json"],
        ["offline", "--plot", "o.pdf"],
        ["offline", "--temperature", "-1"],
        ["offline", "--model", "llama-3.1-8b"],
        ["offline", "--model", "none", "--dummy-weights"],
        ["step", "--batches", "1,x"],
        ["step", "--batches", "0"],
        ["step", "--batches", "8", "--max-running-requests", "4"],
        ["step", "--steps", "1"],
        ["startup", "--rounds", "0"],
        ["simulate", "--prefix-cache", "maybe"],
        ["simulate", "--max-step-tokens", "many"],
        ["simulate", "--num-pages", "1"],
        ["simulate", "--trace", "/no/such/file"],
        ["simulate", "--against", "/no/such/file"],
        ["simulate", "--length-scale", "x", "--trace", "/no/such/file"],
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_line_and_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    device = ["--device", "cpu"] if words[0] in ("offline", "step", "startup") else []
    assert main(["bench", *words, *device]) == 2
    error = capsys.readouterr().err
    assert error.startswith("minisgl: error: ")
    assert error.count("\n") == 1


def test_steps_are_timed_and_set_against_their_floor(tmp_path: Path, tiny: Path) -> None:
    out = tmp_path / "step.json"
    words = ["bench", "step", "--model", str(tiny), "--dummy-weights", *ENGINE, "--batches", "1,3"]
    words += ["--contexts", "8,60,9999", "--prefills", "5,17,80", "--prefixes", "0,30", "--steps", "3"]
    words += ["--mixed", "5,120"]
    assert main([*words, "--out", str(out), "--plot", str(tmp_path / "step.png")]) == 0
    report = read_report(out)
    decode, prefill = report.tables["decode"], report.tables["prefill"]
    assert [(row["batch"], row["context"]) for row in decode] == [(1, 8), (1, 60), (3, 8), (3, 60)]
    assert [(row["new_tokens"], row["prefix"]) for row in prefill] == [
        (tokens, prefix) for tokens in (5, 17, 80) for prefix in (0, 30)
    ]
    mixed = [(row["batch"], row["context"], row["new_tokens"]) for row in report.tables["mixed"]]
    assert mixed == [
        (batch, context, tokens) for batch in (1, 3) for context in (8, 60) for tokens in (5, 120)
    ]
    left_out = [row["point"] for row in report.tables["left_out"]]
    assert left_out[:3] == ["decode 1 x 9999", "decode 3 x 9999", "mixed 1 x 9999 + 5"]
    assert all(len(values) == 3 for name, values in report.samples.items() if name.startswith("decode"))
    for row in [*decode, *prefill]:
        assert float(row["floor_ms"] or 0) > 0
        assert row["fraction"] == pytest.approx(float(row["floor_ms"] or 0) / float(row["wall_ms"] or 1))
    assert {"decode_3x60_p50_ms", "prefill_80on30_p50_ms", "copy_tb_per_s"} <= set(report.metrics)
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    simulated = tmp_path / "sim.json"
    words = ["bench", "simulate", "--step-report", str(out), "--prefix-cache", "on,off"]
    assert main([*words, "--mixed-step-tokens", "64,512", "--out", str(simulated)]) == 0
    assert len(read_report(simulated).tables["settings"]) == 4


def test_a_step_of_experts_says_how_many_its_tokens_were_sent_to(tmp_path: Path) -> None:
    experts = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(TINY | experts), encoding="utf-8")
    out = tmp_path / "step.json"
    words = ["bench", "step", "--model", str(tmp_path), "--dummy-weights", *ENGINE, "--batches", "1,32"]
    words += ["--contexts", "8", "--prefills", "1,90", "--prefixes", "0", "--steps", "3"]
    assert main([*words, "--out", str(out)]) == 0
    tables = read_report(out).tables
    alone, many = (float(row["experts_hit"] or 0) for row in tables["decode"])
    one_token, prompt = (float(row["experts_hit"] or 0) for row in tables["prefill"])
    assert alone == one_token == 2
    assert 2 < many <= 8
    assert 2 < prompt <= 8


def test_a_start_is_accounted_for(
    tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = plant_modules(tmp_path / "downloaded")
    monkeypatch.chdir(planted)
    out = tmp_path / "startup.json"
    words = ["bench", "startup", "--model", str(tiny), "--dummy-weights", *ENGINE, "--rounds", "1"]
    assert main([*words, "--out", str(out), "--plot", str(tmp_path / "startup.svg")]) == 0
    report = read_report(out)
    for kind in ("cold", "warm"):
        spans = [row for row in report.tables["spans"] if row["start"] == f"{kind} 1"]
        assert [spans[0]["stage"], spans[-1]["stage"]] == ["start Python", "first token"]
        accounted_s = sum(float(row["duration_s"] or 0) for row in spans)
        assert report.samples[f"{kind}_total_s"] == [report.metrics[f"{kind}_total_s"]]
        assert accounted_s + metric(report, f"{kind}_unaccounted_s") == pytest.approx(
            metric(report, f"{kind}_total_s")
        )
        assert accounted_s <= metric(report, f"{kind}_total_s")
    assert capsys.readouterr().out.count("unaccounted") >= 2
    assert imported_from(planted) == []


def metric(report: Report, name: str) -> float:
    value = report.metrics[name]
    assert value is not None
    return float(value)


def test_a_start_that_fails_says_why(tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert main(["bench", "startup", "--model", str(tmp_path), "--dummy-weights", "--device", "cpu"]) == 2
    assert "architecture" in capsys.readouterr().err


def test_a_cold_start_finds_no_compiled_code_anywhere(tmp_path: Path) -> None:
    environ = {"PATH": "/bin", "TRITON_CACHE_DIR": "/full", "CUDA_CACHE_PATH": "/full"}
    own = EngineConfig(compile_cache="/full")
    config, variables = with_caches_in(tmp_path, own, environ)
    assert config == replace(own, compile_cache=str(tmp_path / "compiled"))
    assert variables == {"PATH": "/bin", "CUDA_CACHE_PATH": str(tmp_path / "driver")}
    config, variables = with_caches_in(tmp_path, EngineConfig(compile_cache=""), environ)
    assert config.compile_cache == ""
    assert "/full" not in variables.values()
    assert {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"} <= set(variables)


TRACE = [
    {"timestamp": 1000 * i, "input_length": 600, "output_length": 24, "hash_ids": [7, i]} for i in range(6)
]


def served_report(path: Path, dataset: Path) -> None:
    """As `minisgl bench serve` reports a replayed trace."""
    points = [
        {"time_scale": scale, "output_tokens_per_s": 10.0 / scale, "ttft_p50_ms": 5.0} for scale in (0.5, 2)
    ]
    arguments = {"dataset": str(dataset), "num_requests": 5, "length_scale": "1/8", "time_scale": "0.5,2"}
    report = make_report("serve", arguments=arguments, metrics={}, tables={"points": points}, command="test")
    write_report(path, report)


def test_a_served_trace_is_simulated_as_it_was_served(tmp_path: Path) -> None:
    trace, served, out = tmp_path / "t.jsonl", tmp_path / "serve.json", tmp_path / "s.json"
    trace.write_text("".join(json.dumps(line) + "\n" for line in TRACE), encoding="utf-8")
    served_report(served, trace)
    words = ["bench", "simulate", "--against", str(served), "--time-scale", "0.5", "--out", str(out)]
    assert main(words) == 0
    report = read_report(out)
    assert [row["metric"] for row in report.tables["against"]] == ["output_tokens_per_s", "ttft_p50_ms"]
    # 5 requests of 75 tokens, half a second apart; the first 64 tokens are those of block 7.
    assert report.metrics["output_tokens_per_s"] == pytest.approx(15 / metric(report, "elapsed_s"))
    assert metric(report, "elapsed_s") == pytest.approx(2.0, abs=0.1)
    assert report.metrics["prefix_hit_rate"] == pytest.approx(4 * 64 / (5 * 75))
    assert [one["streamed"] for one in report.arguments["simulated"]] == [True]
    assert main([*words[:4], "--time-scale", "1"]) == 2


def test_a_report_of_something_else_is_nothing_to_simulate(tmp_path: Path) -> None:
    write_report(tmp_path / "a.json", make_report("startup", arguments={}, metrics={}, command="test"))
    assert main(["bench", "simulate", "--against", str(tmp_path / "a.json")]) == 2
    write_report(tmp_path / "b.json", make_report("serve", arguments={}, metrics={}, command="test"))
    assert main(["bench", "simulate", "--against", str(tmp_path / "b.json")]) == 2


def test_real_prompts_need_no_range_of_lengths() -> None:
    check_offline_settings(small_settings(prompts="p.txt", min_output_tokens=100, max_output_tokens=5))
    with pytest.raises(ConfigError, match="--min-output-tokens"):
        check_offline_settings(small_settings(min_output_tokens=100, max_output_tokens=5))
