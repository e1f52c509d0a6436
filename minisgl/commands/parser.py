"""The flags of every command, as one argument parser.

Promise: building the parser reads only the environment it is given, loads no torch and runs no command.
A parsed command line says in `command` which command it names, such as "bench kernel".
"""

import argparse
from collections.abc import Mapping
from typing import Any

from minisgl import __version__
from minisgl.benchmark.settings import (
    CompareSettings,
    KernelBenchSettings,
    OfflineBenchSettings,
    OutputSettings,
    ServeBenchSettings,
    SimulateSettings,
    StartupBenchSettings,
    StepBenchSettings,
    TuneSettings,
)
from minisgl.commands.flags import add_flags, fields_of
from minisgl.config import TEXT_FIELDS, ConnectConfig, EngineConfig, ReloadConfig, ServerConfig
from minisgl.log import LEVELS
from minisgl.request import SamplingParams
from minisgl.top.settings import TopSettings

EPILOG = """\
Every flag may also be given as an environment variable: --max-step-tokens as MINISGL_MAX_STEP_TOKENS;
the flag wins. MINISGL_CACHE moves the cache directory (otherwise
$XDG_CACHE_HOME/minisgl or ~/.cache/minisgl).
"""

CHAT_DEFAULTS = {"temperature": 0.0}
"""Defaults of commands for a terminal: greedy decoding, so the same question gets the same answer."""


def build_parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """The parser of the whole command line. `environ` overrides the flags' defaults.

    Raises:
        ConfigError: a MINISGL_ variable has a value that its flag would refuse.
    """
    parser = argparse.ArgumentParser(
        prog="minisgl",
        description="A small LLM serving engine on torch.compile and Triton.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"minisgl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    parser.set_defaults(command="", parser=parser)

    def command(name: str, summary: str, among: Any = commands) -> argparse.ArgumentParser:
        word = name.split()[-1]
        sub = among.add_parser(word, help=summary, description=summary, epilog=EPILOG, allow_abbrev=False)
        sub.set_defaults(command=name, parser=sub)
        return sub

    serve = command("serve", "Serve a model over an OpenAI-compatible HTTP API.")
    add_flags(serve, "server", ServerConfig, environ)
    add_flags(serve, "engine", EngineConfig, environ)

    engine = command("engine", "Run an engine for a server elsewhere ('minisgl serve --engine-listen').")
    add_flags(engine, "connection", ConnectConfig, environ)
    _add_engine_flags(engine, environ)

    reload = command("reload", "Give a running server other settings or another model.")
    add_flags(reload, "server", ReloadConfig, environ)
    # Only what is given changes, so the environment, which may be that of another start, says nothing here.
    not_text = [field.name for field in fields_of(ServerConfig) if field.name not in TEXT_FIELDS]
    add_flags(reload, "conversation", ServerConfig, {}, skip=not_text, only_given=True)
    add_flags(reload, "engine", EngineConfig, {}, skip=("seed",), only_given=True)

    chat = command("chat", "Talk to a model in the terminal, without a server.")
    chat.add_argument("--system", metavar="TEXT", help="System prompt of the conversation.")
    chat.add_argument(
        "--tools", metavar="FILE", help="Tools as a JSON list, as in the API; you write the calls' results."
    )
    _add_local_flags(chat, environ)

    generate = command("generate", "Complete one prompt and print the text.")
    generate.add_argument("prompt", nargs="?", help="The prompt; '-' or nothing reads it from stdin.")
    generate.add_argument("--chat", action="store_true", help="Send it through the model's chat template.")
    generate.add_argument("--system", metavar="TEXT", help="System prompt; implies --chat.")
    _add_local_flags(generate, environ)

    pull = command("pull", "Fetch a model, so that all other commands work offline.")
    pull.add_argument("name", nargs="?", help="A built-in model or a hub name.")
    pull.add_argument("--list", action="store_true", help="Show the built-in models.")

    api_key = command("api-key", "Make an API key and its line for --api-keys-file.")
    api_key.add_argument("name", help="The user's name in metrics and logs.")
    for flag, what in (
        ("--requests-per-minute", "Most calls a minute."),
        ("--tokens-per-minute", "Most prompt and output tokens a minute."),
        ("--max-concurrent-requests", "Most requests open at a time."),
    ):
        api_key.add_argument(flag, type=int, metavar="N", help=f"{what} Without, there is no limit.")
    api_key.add_argument(
        "--priority", type=int, default=0, metavar="N",
        help="Priority of its requests and the most they may ask for, -100 to 100 (default: %(default)s).",
    )  # fmt: skip
    api_key.add_argument("--admin", action="store_true", help="It has the rights of --admin-key.")
    api_key.add_argument("--file", metavar="FILE", help="Add the line to this file; without, it is printed.")

    plan = command("plan", "Show how many requests of a model fit on a GPU, from its config.json alone.")
    plan.add_argument(
        "--gpu", default=environ.get("MINISGL_GPU", "H200"), metavar="TEXT",
        help="A GPU's name, or its memory in GiB (default: %(default)s).",
    )  # fmt: skip
    _add_engine_flags(plan, environ)

    tune = command("tune", "Measure the kernels' launch configurations for a model on this GPU.")
    add_flags(tune, "tuning", TuneSettings, environ)

    bench = command("bench", "Measure something.")
    benches = bench.add_subparsers(metavar="WHAT", help="What to measure.")
    kernel = command("bench kernel", "Check and time the Triton kernels on this GPU.", benches)
    kernel.add_argument("names", nargs="*", help='Ops, or parts of "op shape", to measure; none is all.')
    add_flags(kernel, "measuring", KernelBenchSettings, environ)
    add_flags(kernel, "output", OutputSettings, environ)
    offline = command("bench offline", "Measure the throughput of one engine, without a server.", benches)
    add_flags(offline, "workload", OfflineBenchSettings, environ)
    add_flags(offline, "output", OutputSettings, environ)
    _add_engine_flags(offline, environ)
    load = command("bench serve", "Put load on a running server and measure latency and throughput.", benches)
    add_flags(load, "load", ServeBenchSettings, environ)
    add_flags(load, "output", OutputSettings, environ)
    step = command("bench step", "Compare the time of a step with the hardware's limits.", benches)
    add_flags(step, "measuring", StepBenchSettings, environ)
    add_flags(step, "output", OutputSettings, environ)
    _add_engine_flags(step, environ)
    startup = command("bench startup", "Measure the time from process start to the first token.", benches)
    add_flags(startup, "measuring", StartupBenchSettings, environ)
    add_flags(startup, "output", OutputSettings, environ)
    _add_engine_flags(startup, environ)
    simulate = command("bench simulate", "Simulate scheduler settings on a workload, without a GPU.", benches)
    add_flags(simulate, "simulation", SimulateSettings, environ)
    add_flags(simulate, "output", OutputSettings, environ)
    compare = command("bench compare", "Compare two reports; exit code 1 on a regression.", benches)
    compare.add_argument("a", help="The JSON file of the earlier report.")
    compare.add_argument("b", help="The JSON file of the later one.")
    add_flags(compare, "judging", CompareSettings, environ)
    plot = command("bench plot", "Draw a report that was written with --out.", benches)
    plot.add_argument("report", help="The JSON file.")
    plot.add_argument("picture", help="The file to draw to: .png, .svg or .html.")

    cache = command("cache", "Manage the compiled code that is kept between starts.")
    actions = cache.add_subparsers(metavar="WHAT", help="What to do with it.")

    def action(name: str, summary: str, file: str = "") -> None:
        sub = command(name, summary, actions)
        if file:
            sub.add_argument("file", help=file)
        sub.add_argument(
            "--compile-cache",
            default=environ.get("MINISGL_COMPILE_CACHE"),
            metavar="TEXT",
            help='The folder, as for serve (default: "compiled" in the cache directory)',
        )

    action("cache ls", "Show the entries, their size, and what is wrong with them.")
    action("cache verify", "As ls, with exit code 1 if an entry is not whole.")
    action("cache export", "Pack all entries, for machines of the same kind.", "The .tar.gz to write.")
    action(
        "cache import",
        "Unpack entries from people you trust: it is code.",
        "A .tar.gz that 'minisgl cache export' wrote.",
    )
    action("cache clear", "Delete all entries that no engine is using.")

    top = command("top", "Watch a running server in the terminal: its requests, and why they wait.")
    add_flags(top, "watching", TopSettings, environ)

    verify = command(
        "verify", "Compare a model on this machine with transformers; exit code 1 if it differs."
    )
    verify.add_argument("model", nargs="?", default=environ.get("MINISGL_MODEL", EngineConfig.model),
        help="What to compare: as --model of serve (default: %(default)s).",
    )  # fmt: skip
    verify.add_argument("--out", metavar="FILE", help="Write the report as JSON to this file.")
    add_flags(verify, "engine", EngineConfig, environ, skip=("seed", "model", "quantization"))

    doctor = command("doctor", "Show what is installed, which settings serve would choose, and why.")
    doctor.add_argument("--json", action="store_true", help="As JSON, for a bug report.")
    _add_engine_flags(doctor, environ)
    return parser


LOGPROBS = ("logprobs", "logprob_token_ids", "prompt_logprobs")
OTHERS = ("json_schema", "structural_tag", "grammar", "thought_limit")
REPLY_FLAGS = ("chat_template", "tool_parser", "reasoning_parser")
"""Fields of `ServerConfig` that these commands have, too."""


def _add_local_flags(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    """Add the flags of a command that runs the engine in its own process."""
    parser.add_argument(
        "--log-level",
        default=environ.get("MINISGL_LOG_LEVEL", "warning"),
        metavar="TEXT",
        help=f"One of {', '.join(LEVELS)} (default: %(default)s)",
    )
    sampling = {**_text(CHAT_DEFAULTS), **environ}
    # These commands print only text, so flags for log probabilities would have no effect.
    add_flags(parser, "sampling", SamplingParams, sampling, skip=(*LOGPROBS, *OTHERS))
    parser.add_argument("--json-schema", metavar="FILE", help="Answer in JSON that is valid for this schema.")
    not_ours = [field.name for field in fields_of(ServerConfig) if field.name not in REPLY_FLAGS]
    add_flags(parser, "conversation", ServerConfig, environ, skip=not_ours)
    _add_engine_flags(parser, environ)


def _add_engine_flags(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    """Add the engine's flags but --seed, which has an effect in a server and in nothing else."""
    add_flags(parser, "engine", EngineConfig, environ, skip=("seed",))


def _text(defaults: Mapping[str, object]) -> dict[str, str]:
    return {f"MINISGL_{name.upper()}": str(value) for name, value in defaults.items()}
