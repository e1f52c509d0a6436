"""The flags people type are a promise: this is the list of them, and how they come about.

A failing snapshot means that a flag was added, renamed or removed. Adding one: add it here. Renaming or
removing one: say so in CHANGELOG.md, too.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import cast

import pytest

from minisgl.benchmark import settings as benchmark_settings
from minisgl.commands.flags import add_flags, fields_of, values_of
from minisgl.commands.parser import build_parser
from minisgl.config import ConnectConfig, EngineConfig, ReloadConfig, ServerConfig
from minisgl.errors import ConfigError
from minisgl.request import SamplingParams

SERVER = """
    --access-log --admin-key --allowed-host --api-key --api-keys-file --api-workers --cors-origin
    --drain-timeout-s
    --engine-restarts --heartbeat-timeout-s --host --keep-alive-timeout-s --log-level --max-body-bytes
    --max-queued-requests --max-queued-tokens --max-upload-bytes --no-access-log --otlp-endpoint --port
    --chat-template --reasoning-parser --engine-listen --engine-secret-file
    --replicas --request-timeout-s --sampling-defaults
    --no-special-tokens-in-content --served-model-name --special-tokens-in-content --startup-timeout-s
    --spare-process --no-spare-process --tls-cert --tls-key
    --tool-parser --upload-timeout-s --usage-log
"""
ENGINE = """
    --attention-backend --chunk-tokens --compile-cache --compile-mode --compile-on-cpu --cpu-threads --device
    --dtype --dummy-weights --join-decodes --kernel --max-context-tokens --max-graph-batch --max-graph-tokens
    --max-running-requests
    --max-step-tokens --memory-fraction --mixed-step-tokens --model --no-dummy-weights
    --no-compile-on-cpu --no-join-decodes --no-overlap
    --no-prefix-cache --no-strict-compile --num-pages --output-reserve-tokens --overlap --page-size
    --keep-window-pages --no-keep-window-pages --kv-dtype
    --kv-events-buffer-steps --kv-events-endpoint --kv-events-replay-endpoint --kv-events-topic
    --prefix-cache --profile-dir --quantization --revision
    --state-cache-memory --strict-compile --tokenizer --tp
"""
SAMPLING = """
    --allowed-token-ids --bad-words --choice --ebnf --json-schema --regex
    --frequency-penalty --ignore-eos --include-stop-str-in-output
    --max-tokens --min-p --min-tokens --no-ignore-eos --no-include-stop-str-in-output
    --no-skip-special-tokens --presence-penalty --repetition-penalty --seed --skip-special-tokens --stop
    --stop-token-ids --temperature --thinking-token-budget --top-k --top-p
    --chat-template --tool-parser --reasoning-parser
"""
TUNE = """
    --again --device --dry-run --gpu --model --no-again --no-dry-run --ops --out --plot
"""
BENCH_KERNEL = "--baselines --device --kernel --model"
OUTPUT = "--commit --out --plot"
BENCH_OFFLINE = """
    --ignore-eos --max-output-tokens --max-prompt-tokens --max-token-id --min-output-tokens
    --min-prompt-tokens --no-ignore-eos --no-streamed --num-requests --prompts --rounds --streamed
    --temperature --workload-seed
"""
BENCH_SERVE = """
    --api --api-key --arrival --concurrency --dataset --extra-body --ignore-eos --length-scale
    --max-output-tokens --max-prompt-tokens --min-output-tokens --min-prompt-tokens --no-ignore-eos
    --num-requests --prefix-groups --prefix-tokens --prompt-form --prompt-seed --request-rate
    --served-model-name --slo --temperature --think-time-s --time-scale --timeout-s --tokenizer --tokens-from
    --turns --url --vocab-size --warmup --workload-seed
"""
API_KEY = """
    --admin --file --max-concurrent-requests --priority --requests-per-minute --tokens-per-minute
"""
TEXT = """
    --served-model-name --sampling-defaults --chat-template --tool-parser --reasoning-parser
    --special-tokens-in-content --no-special-tokens-in-content
"""
BENCH_STEP = "--batches --contexts --mixed --prefills --prefixes --steps"
BENCH_STARTUP = "--cold --no-cold --rounds"
BENCH_COMPARE = "--confidence --metrics --resamples --seed --threshold"
BENCH_SIMULATE = """
    --against --chunk-tokens --join-decodes --length-scale --max-running-requests --max-step-tokens
    --mixed-step-tokens --num-pages --num-requests --output-reserve-tokens --overlap --page-size
    --prefix-cache --step-report --streamed --time-scale --trace --trace-format
"""

FLAGS = {
    "serve": {"--seed", *SERVER.split(), *ENGINE.split()},
    "engine": {"--server", "--engine-secret-file", "--drain-timeout-s", "--log-level", *ENGINE.split()},
    "reload": {"--url", "--admin-key", "--beside", "--no-beside", *TEXT.split(), *ENGINE.split()},
    "chat": {"--system", "--tools", "--log-level", *SAMPLING.split(), *ENGINE.split()},
    "generate": {"--chat", "--system", "--log-level", *SAMPLING.split(), *ENGINE.split()},
    "pull": {"--list"},
    "api-key": set(API_KEY.split()),
    "plan": {"--gpu", *ENGINE.split()},
    "tune": set(TUNE.split()),
    "bench": set(),
    "bench kernel": {*BENCH_KERNEL.split(), *OUTPUT.split()},
    "bench offline": {*BENCH_OFFLINE.split(), *OUTPUT.split(), *ENGINE.split()},
    "bench serve": {*BENCH_SERVE.split(), *OUTPUT.split()},
    "bench step": {*BENCH_STEP.split(), *OUTPUT.split(), *ENGINE.split()},
    "bench startup": {*BENCH_STARTUP.split(), *OUTPUT.split(), *ENGINE.split()},
    "bench simulate": {*BENCH_SIMULATE.split(), *OUTPUT.split()},
    "bench compare": set(BENCH_COMPARE.split()),
    "bench plot": set(),
    "cache": set(),
    **{f"cache {what}": {"--compile-cache"} for what in ("ls", "verify", "export", "import", "clear")},
    "top": {"--api-key", "--interval-s", "--url"},
    "verify": {"--out", *ENGINE.split()} - {"--model", "--quantization"},
    "doctor": {"--json", *ENGINE.split()},
}

SETTINGS = [
    EngineConfig,
    ServerConfig,
    ConnectConfig,
    ReloadConfig,
    SamplingParams,
    *(cls for cls in vars(benchmark_settings).values() if is_dataclass(cls)),
]


def subparsers(environ: Mapping[str, str] | None = None) -> dict[str, argparse.ArgumentParser]:
    """Every command and what is below it, as "bench kernel"."""
    return parsers_below(build_parser(environ or {}), "")


def parsers_below(parser: argparse.ArgumentParser, prefix: str) -> dict[str, argparse.ArgumentParser]:
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in cast("dict[str, argparse.ArgumentParser]", action.choices).items():
                found |= {prefix + name: below, **parsers_below(below, f"{prefix}{name} ")}
    return found


def test_the_commands_are_these() -> None:
    assert list(subparsers()) == list(FLAGS)


@pytest.mark.parametrize("command", FLAGS)
def test_the_flags_of_a_command_are_these(command: str) -> None:
    options = {option for action in subparsers()[command]._actions for option in action.option_strings}
    assert sorted(options - {"-h", "--help"}) == sorted(FLAGS[command])


@pytest.mark.parametrize("command", FLAGS)
def test_every_flag_has_help_and_the_help_can_be_printed(command: str) -> None:
    parser = subparsers()[command]
    silent = [action.dest for action in parser._actions if not action.help]
    assert silent == []
    assert "usage: minisgl " + command in parser.format_help()


@pytest.mark.parametrize("cls", SETTINGS)
def test_every_setting_has_a_docstring(cls: type) -> None:
    assert [field.name for field in fields_of(cls) if not field.doc] == []


@pytest.mark.parametrize("cls", SETTINGS)
def test_no_flags_means_the_classes_own_defaults(cls: type) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, "settings", cls, {})
    assert cls(**values_of(cls, parser.parse_args([]), {})) == cls()


def parse(command: list[str], environ: Mapping[str, str], cls: type) -> dict:
    return values_of(cls, build_parser(environ).parse_args(command), environ)


def test_flags_arrive_with_their_types() -> None:
    words = ["serve", "--port=9", "--memory-fraction", "0.5", "--no-overlap", "--dtype=float16"]
    words += ["--num-pages", "7"]
    engine = parse(words, {}, EngineConfig)
    assert (engine["memory_fraction"], engine["overlap"], engine["dtype"], engine["num_pages"]) == (
        0.5,
        False,
        "float16",
        7,
    )
    assert parse(words, {}, ServerConfig)["port"] == 9


def test_a_repeated_flag_collects_its_values() -> None:
    words = ["generate", "hi", "--stop", "a", "--stop", "b c", "--stop-token-ids", "3"]
    params = SamplingParams(**parse(words, {}, SamplingParams))
    assert (params.stop, params.stop_token_ids) == (("a", "b c"), (3,))


def test_the_environment_gives_defaults_and_flags_win() -> None:
    environ = {
        "MINISGL_PORT": "9000",
        "MINISGL_MODEL": "org/name",
        "MINISGL_OVERLAP": "no",
        "MINISGL_STRICT_COMPILE": "TRUE",
        "MINISGL_STOP": "END",
    }
    assert parse(["serve"], environ, ServerConfig)["port"] == 9000
    assert parse(["serve", "--port", "1"], environ, ServerConfig)["port"] == 1
    engine = parse(["serve", "--no-strict-compile"], environ, EngineConfig)
    assert (engine["model"], engine["overlap"], engine["strict_compile"]) == ("org/name", False, False)
    assert parse(["generate"], environ, SamplingParams)["stop"] == ("END",)
    assert parse(["generate", "--stop", "x"], environ, SamplingParams)["stop"] == ("x",)


@pytest.mark.parametrize(
    ("name", "text"), [("MINISGL_PORT", "many"), ("MINISGL_OVERLAP", "maybe"), ("MINISGL_TOP_P", "")]
)
def test_a_bad_variable_is_named(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=name):
        build_parser({name: text})


@pytest.mark.parametrize(
    ("command", "variable"),
    [
        ("serve", "MINISGL_API_KEY"),
        ("serve", "MINISGL_ADMIN_KEY"),
        ("bench serve", "MINISGL_API_KEY"),
    ],
)
def test_help_never_shows_a_secret(command: str, variable: str) -> None:
    shown = subparsers({variable: "hidden-value"})[command].format_help()
    assert "hidden-value" not in shown
    assert f"(default: ${variable})" in " ".join(shown.split())
    assert "(default: none)" in " ".join(subparsers()[command].format_help().split())


def test_generate_and_chat_are_greedy_unless_asked_otherwise() -> None:
    assert parse(["generate"], {}, SamplingParams)["temperature"] == 0.0
    assert parse(["chat", "--temperature", "0.7"], {}, SamplingParams)["temperature"] == 0.7
    assert parse(["chat"], {"MINISGL_TEMPERATURE": "0.3"}, SamplingParams)["temperature"] == 0.3


def test_help_shows_percent_signs_and_defaults_as_they_are() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Settings:
        share: int = 50
        """Up to 100 % of it,
        over two lines."""
        names: tuple[str, ...] = ()
        """Names."""

    parser = argparse.ArgumentParser()
    add_flags(parser, "settings", Settings, {})
    shown = " ".join(parser.format_help().split())
    assert "Up to 100 % of it, over two lines. (default: 50)" in shown
    assert "Names. May be given several times." in shown
