"""`minisgl bench serve` as a user runs it: settings, report, pictures, counts, refusals."""

import asyncio
import io
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl.benchmark.load.serve import PROBE_TOKENS, measure_serve
from minisgl.benchmark.load.serve_plan import make_plan
from minisgl.benchmark.reports.report import Report, read_report, write_report
from minisgl.benchmark.settings import ServeBenchSettings
from minisgl.cli import main
from minisgl.errors import ConfigError
from minisgl.progress import no_progress

FAKE = Path(__file__).with_name("fake_openai_server.py")
TRACES = Path(__file__).resolve().parent.parent / "data" / "traces"
SHORT = ("--min-prompt-tokens", "4", "--max-prompt-tokens", "9", "--min-output-tokens", "2")
SHORT = (*SHORT, "--max-output-tokens", "5", "--warmup", "2")
MODEL_FLAGS = (
    "--port",
    "0",
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--cpu-threads",
    "1",
    "--num-pages",
    "99",
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of the fake server."""
    process = subprocess.Popen([sys.executable, str(FAKE)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    process.kill()
    process.wait()
    process.stdout.close()


def bench(url: str, *flags: str) -> int:
    return main(["bench", "serve", "--url", url, *SHORT, *flags])


@pytest.mark.parametrize(
    "flags",
    [
        ("--concurrency", "2"),
        ("--request-rate", "200"),
        ("--arrival", "constant", "--request-rate", "200"),
        ("--dataset", "shared-prefix", "--prefix-tokens", "5"),
        ("--dataset", "multi-turn", "--turns", "2", "--concurrency", "3"),
        ("--dataset", "multi-turn", "--turns", "2", "--api", "chat"),
        ("--prompt-form", "text"),
    ],
    ids=" ".join,
)
def test_every_load_gives_a_report(url: str, tmp_path: Path, flags: tuple[str, ...]) -> None:
    out = tmp_path / "report.json"
    assert bench(url, "--num-requests", "6", "--out", str(out), *flags) == 0
    report = read_report(out)
    num = 12 if "multi-turn" in flags else 6
    assert (report.kind, report.metrics["num_complete"], report.tables["errors"]) == ("serve", num, [])
    for name in ("ttft", "e2e", "tpot", "itl"):
        figures = [report.metrics[f"{name}_{which}_ms"] for which in ("p50", "p90", "p95", "p99", "max")]
        assert figures == sorted(figures, key=lambda figure: figure or 0.0)
    assert report.metrics["num_output_tokens"] == sum(report.samples["output_tokens"])
    assert report.metrics["prefix_hit_rate"] == pytest.approx(3 / 7)  # as the fake server says
    assert len(report.samples["ttft_ms"]) == len(report.samples["sent_s"]) == num


def test_several_points_are_drawn_over_what_varies(url: str, tmp_path: Path) -> None:
    out, plot = tmp_path / "report.json", tmp_path / "plot.svg"
    trace = str(TRACES / "mooncake.jsonl")
    flags = ("--dataset", trace, "--length-scale", "1/8", "--time-scale", "0.4,3", "--slo", "ttft:9000")
    assert bench(url, *flags, "--out", str(out), "--plot", str(plot)) == 0
    report = read_report(out)
    assert [row["time_scale"] for row in report.tables["points"]] == [0.4, 3]
    assert report.metrics["time_scale=3/num_complete"] == 3
    assert report.metrics["time_scale=3/slo_attainment"] == 1
    sent = report.samples["time_scale=3/sent_s"]
    assert max(sent) == pytest.approx(3 * 0.25, abs=0.3)
    picture = plot.read_text()
    for words in ("Throughput", "Time to first token", "time scale", "Requests in the server"):
        assert words in picture


def test_what_was_measured_before_an_interruption_is_kept(url: str, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    seen: list[list[object]] = []
    plan = make_plan(ServeBenchSettings(url=url, num_requests=2, max_output_tokens=100, concurrency="1,2"))

    def interrupt(report: Report) -> None:
        write_report(out, report)
        seen.append([row["concurrency"] for row in report.tables["points"]])
        if len(seen) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(measure_serve(ServeBenchSettings(), plan, no_progress, io.StringIO(), interrupt))
    assert seen == [[1]]
    assert read_report(out).metrics["concurrency=1/num_complete"] == 2


def test_errors_are_counted_and_make_the_exit_code_1(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.json"
    fake = json.dumps({"fake": {"fail_after": "cut", "after": 3}})
    flags = ("--num-requests", "8", "--warmup", "0", "--extra-body", fake, "--concurrency", "2")
    assert bench(url, "--out", str(out), *flags) == 1
    report = read_report(out)
    [error] = report.tables["errors"]
    assert (error["error"], error["count"]) == ("truncated", report.metrics["num_errors"])
    assert 0 < (report.metrics["num_errors"] or 0) < 8  # answers of up to three tokens are whole
    assert report.metrics["num_complete"] == len(report.samples["ttft_ms"])
    assert "truncated" in capsys.readouterr().out


def test_answers_of_another_length_are_pointed_out(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(url, "--num-requests", "3", "--extra-body", '{"max_tokens": 77}') == 0
    assert "3 of 3 answers are not as long as asked for" in capsys.readouterr().out


def test_the_key_is_sent_and_in_no_report(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "report.json"
    words = ["minisgl", "bench", "serve", "--api-key", "sesame-77"]
    monkeypatch.setattr(sys, "argv", words)
    assert bench(url, "--num-requests", "1", "--api-key", "sesame-77", "--out", str(out)) == 0
    text = out.read_text()
    assert "sesame" not in text
    assert "--api-key ***" in text


def test_a_server_without_usage_may_be_taken_at_its_word(url: str, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    fake = json.dumps({"fake": {"no_usage": True, "per_event": 3}})
    flags = ("--tokens-from", "asked", "--dataset", "multi-turn", "--turns", "2", "--num-requests", "3")
    assert bench(url, *flags, "--extra-body", fake, "--out", str(out)) == 0
    report = read_report(out)
    settings = ServeBenchSettings(
        dataset="multi-turn", turns=2, num_requests=3, min_prompt_tokens=4, max_prompt_tokens=9,
        min_output_tokens=2, max_output_tokens=5,
    )  # fmt: skip
    asked = [conversation.turns for conversation in make_plan(settings).conversations]
    assert report.metrics["num_output_tokens"] == sum(turn.num_output_tokens for two in asked for turn in two)
    assert report.metrics["num_prompt_tokens"] == sum(
        2 * (first.num_prompt_tokens or 0) + first.num_output_tokens + (second.num_prompt_tokens or 0)
        for first, second in asked
    )
    assert report.metrics["prefix_hit_rate"] is None
    assert "no usage for 6 answers" in str(report.tables["warnings"])


@pytest.mark.parametrize(
    ("fake", "words"),
    [
        ({"no_usage": True}, "sends no usage at the end of a stream"),
        ({"status": 400}, "failed at the first request: http_400 (too many of you)"),
        ({"html": True}, "failed at the first request: not_a_stream"),
    ],
)
def test_a_server_that_can_not_be_measured_is_refused(
    url: str, fake: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(url, "--num-requests", "3", "--extra-body", json.dumps({"fake": fake})) == 2
    assert words in capsys.readouterr().err


def test_a_wrong_url_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("http://127.0.0.1:9", "nonsense", "http://", f"{url}/v2", "ftp://127.0.0.1"):
        assert bench(wrong) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "--url" in error


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"api": "soap"}, "--api must be"),
        ({"dataset": "nothing"}, "--dataset must be one of random"),
        ({"dataset": "/"}, "--dataset must be one of random"),
        ({"num_requests": 0}, "--num-requests must be at least 1"),
        ({"turns": 0}, "--turns must be at least 1"),
        ({"min_prompt_tokens": 9, "max_prompt_tokens": 8}, "--min-prompt-tokens must not be above"),
        ({"min_output_tokens": 0}, "--min-output-tokens must be at least 1"),
        ({"request_rate": "0"}, "--request-rate must be positive"),
        ({"request_rate": "fast"}, "--request-rate must be positive"),
        ({"concurrency": "1.5"}, "--concurrency must be whole"),
        ({"concurrency": "2", "request_rate": "2"}, "--request-rate does nothing"),
        ({"concurrency": "2", "arrival": "poisson"}, "go together"),
        ({"arrival": "closed"}, "go together"),
        ({"arrival": "sometimes"}, "--arrival must be"),
        ({"arrival": "trace"}, "recorded arrivals"),
        ({"time_scale": "0.5"}, "--time-scale needs --arrival trace"),
        ({"dataset": str(TRACES / "azure.csv"), "time_scale": "inf"}, "--time-scale must be finite"),
        ({"dataset": str(TRACES / "azure.csv"), "length_scale": "a"}, "--length-scale must be a fraction"),
        ({"dataset": str(TRACES / "azure.csv"), "length_scale": "-1"}, "--length-scale must be positive"),
        ({"dataset": str(TRACES / "mooncake.jsonl"), "length_scale": "0.3"}, "whole number"),
        ({"length_scale": "1/8"}, "--length-scale needs a trace"),
        ({"prompt_form": "tokens", "api": "chat"}, "--prompt-form tokens needs"),
        ({"prompt_form": "tokens", "dataset": "multi-turn"}, "--prompt-form tokens needs"),
        ({"prompt_form": "words"}, "--prompt-form must be"),
        ({"extra_body": "{"}, "--extra-body is not valid JSON"),
        ({"extra_body": "[]"}, "--extra-body must be a JSON object"),
        ({"slo": "fast"}, "--slo must name"),
        ({"timeout_s": 0.0}, "--timeout-s must be positive"),
        ({"timeout_s": float("nan")}, "--timeout-s must be positive"),
        ({"temperature": -1.0}, "--temperature must be at least 0"),
        ({"temperature": float("inf")}, "--temperature must be at least 0"),
        ({"vocab_size": 1}, "--vocab-size must be at least 2"),
        ({"tokens_from": "chunks"}, "--tokens-from must be"),
        ({"tokens_from": "asked", "ignore_eos": False}, "--tokens-from asked needs"),
        ({"warmup": -1}, "--warmup must be at least 0"),
        ({"api_key": "a\nb"}, "--api-key has characters"),
        ({"num_requests": 10**11}, "--num-requests must be at most"),
        ({"max_prompt_tokens": 10**12}, "at most 10000000 can be made"),
        ({"dataset": str(TRACES / "azure.csv"), "length_scale": "1e9"}, "at most 10000000 can be made"),
        ({"url": ""}, "--url"),
        ({"url": "https://"}, "--url"),
        ({"url": "ftp://there"}, "--url"),
        ({"url": "http://a:b"}, "--url"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused_before_anything_is_sent(settings: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        make_plan(ServeBenchSettings(**settings))


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:80", "http://127.0.0.1:80"),
        ("http://a/v1/", "http://a"),
        ("https://a:1/", "https://a:1"),
        ("localhost:80/v1", "http://localhost:80"),
    ],
)
def test_urls_may_be_given_as_people_write_them(text: str, url: str) -> None:
    assert make_plan(ServeBenchSettings(url=text)).target.url == url


def test_what_is_sent_follows_from_the_flags(url: str) -> None:
    flags = (
        "--num-requests",
        "2",
        "--temperature",
        "0.5",
        "--no-ignore-eos",
        "--extra-body",
        '{"run": "sent"}',
    )
    assert bench(url, *flags) == 0
    assert bench(url, "--num-requests", "1", "--extra-body", '{"run": "defaults"}') == 0
    with urllib.request.urlopen(f"{url}/records", timeout=10) as answer:
        bodies = [one["body"] for one in json.loads(answer.read())]
    sent = next(body for body in bodies if body.get("run") == "sent")
    assert (sent["temperature"], sent["stream"], sent["stream_options"]) == (
        0.5,
        True,
        {"include_usage": True},
    )
    assert "ignore_eos" not in sent
    default = next(body for body in bodies if body.get("run") == "defaults")
    assert (default["ignore_eos"], default["temperature"], default["model"]) == (True, 0.0, "fake-model")
    assert all(isinstance(token, int) for token in default["prompt"])


def test_every_run_asks_something_else_unless_its_seed_is_given(url: str, tmp_path: Path) -> None:
    seeds = []
    for name, flags in (
        ("one", ()),
        ("two", ()),
        ("three", ("--prompt-seed", "7")),
        ("four", ("--prompt-seed", "7")),
    ):
        out = tmp_path / "report.json"
        assert (
            bench(
                url, "--num-requests", "1", "--extra-body", f'{{"run": "{name}"}}', "--out", str(out), *flags
            )
            == 0
        )
        seeds.append(read_report(out).arguments["prompt_seed"])
    with urllib.request.urlopen(f"{url}/records", timeout=10) as answer:
        bodies = [one["body"] for one in json.loads(answer.read())]
    one, two, three, four = (
        next(body["prompt"] for body in reversed(bodies) if body.get("run") == name)
        for name in ("one", "two", "three", "four")
    )
    assert len(one) == len(two) == len(three)
    assert one[:3] != two[:3]
    assert three == four
    assert (len(set(seeds)), seeds[2:]) == (3, [7, 7])


def test_the_command_needs_no_torch() -> None:
    code = (
        "import sys, minisgl.benchmark.load.serve; print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["False", "False"]


@pytest.fixture(scope="module")
def real_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of `minisgl serve` with the built-in model."""
    tmp = tmp_path_factory.mktemp("s")
    process = subprocess.Popen(
        [sys.executable, "-m", "minisgl", "serve", *MODEL_FLAGS],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp)},
    )
    assert process.stdout is not None
    ports = (re.search(r"curl http://127.0.0.1:(\d+)", line) for line in process.stdout)
    port = next(found for found in ports if found)[1]
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(30)
    process.stdout.close()


def counters(url: str, expected: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """The engine's own counts of prompt, cached and output tokens; waits for `expected`, a few seconds."""
    deadline = time.monotonic() + 6
    while True:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            engine = json.loads(answer.read())["engine"] or {}
        found = tuple(engine.get(f"num_{kind}_tokens", 0) for kind in ("prompt", "cached", "output"))
        if (engine and expected is None) or found == expected or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def test_the_counted_tokens_are_the_real_servers_own(real_url: str, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    before = counters(real_url)
    flags = ("--warmup", "0", "--dataset", "shared-prefix", "--prefix-groups", "1", "--prefix-tokens", "40")
    flags = (*flags, "--min-prompt-tokens", "9", "--num-requests", "6", "--concurrency", "2")
    assert bench(real_url, *flags, "--out", str(out)) == 0
    metrics = read_report(out).metrics
    probe = (40 + 9, 0, PROBE_TOKENS)
    counted = tuple(int(metrics[f"num_{kind}_tokens"] or 0) for kind in ("prompt", "cached", "output"))
    expected = tuple(sum(parts) for parts in zip(before, counted, probe, strict=True))
    assert counters(real_url, expected) == expected
    assert counted[0] == 6 * (40 + 9)
    assert counted[1] > 0
