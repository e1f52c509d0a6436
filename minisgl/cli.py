"""The `minisgl` command: argv and environment become configuration, here and nowhere else.

Promise: importing this module, `minisgl --help` and `minisgl serve` load no torch; a user's mistake is
one line on stderr and exit code 2, Ctrl-C is exit code 130, and neither shows a traceback.
"""

import argparse
import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from minisgl.config import (
    EngineConfig,
    ServerConfig,
    check_engine_config,
    check_server_config,
    with_cache_dir,
)
from minisgl.errors import ConfigError, EngineDeadError, MinisglError
from minisgl.flags import add_flags, values_of
from minisgl.log import LEVELS, setup_logging
from minisgl.request import SamplingParams

if TYPE_CHECKING:
    from minisgl.llm import LLM

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130

EPILOG = """\
Every flag may also be given as an environment variable: --max-step-tokens as MINISGL_MAX_STEP_TOKENS;
the flag wins. MINISGL_CACHE moves the cache directory (otherwise $XDG_CACHE_HOME/minisgl or
~/.cache/minisgl).
"""

CHAT_DEFAULTS = {"temperature": 0.0}
"""For a person at a terminal: the same question gets the same answer unless asked otherwise."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` None = the process's own."""
    started_at = time.monotonic()
    # On a machine with other work, OpenMP threads that spin at barriers slow a CPU engine tenfold. Set before
    # torch is loaded, here or in the engine process, which inherits it.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    environ = settings_in(os.environ)
    _survive_foreign_characters()
    try:
        arguments = build_parser(environ).parse_args(argv)
        return arguments.run(arguments, environ, started_at)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output left, as in `minisgl generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except MinisglError as error:
        print(f"minisgl: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR


def settings_in(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what only looks like a setting: beside a service called minisgl, Kubernetes
    sets MINISGL_PORT=tcp://..."""
    return {
        name: value
        for name, value in environ.items()
        if not (name == "MINISGL_PORT" and value.startswith("tcp://"))
    }


def build_parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """The whole command line; `environ` gives the flags' defaults.

    Raises:
        ConfigError: a MINISGL_ variable has a value its flag would refuse.
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
    parser.set_defaults(run=_help_of(parser))

    def command(
        name: str, summary: str, run: Callable[..., int] | None, among: Any = commands
    ) -> argparse.ArgumentParser:
        sub = among.add_parser(name, help=summary, description=summary, epilog=EPILOG, allow_abbrev=False)
        sub.set_defaults(run=run or _help_of(sub))
        return sub

    serve = command("serve", "Serve a model over an OpenAI-compatible HTTP API.", _serve)
    add_flags(serve, "server", ServerConfig, environ)
    add_flags(serve, "engine", EngineConfig, environ)

    chat = command("chat", "Talk to a model in the terminal, without a server.", _chat)
    chat.add_argument("--system", metavar="TEXT", help="System prompt of the conversation.")
    _add_local_flags(chat, environ)

    generate = command("generate", "Complete one prompt and print the text.", _generate)
    generate.add_argument("prompt", nargs="?", help="The prompt; '-' or nothing reads it from stdin.")
    generate.add_argument("--chat", action="store_true", help="Send it through the model's chat template.")
    generate.add_argument("--system", metavar="TEXT", help="System prompt; implies --chat.")
    _add_local_flags(generate, environ)

    pull = command("pull", "Fetch a model, so that everything afterwards works offline.", _pull)
    pull.add_argument("name", nargs="?", help="A built-in model or a hub name.")
    pull.add_argument("--list", action="store_true", help="Show the built-in models.")

    plan = command("plan", "Show what of a model fits on a GPU, from its config alone.", _plan)
    plan.add_argument(
        "--gpu", default=environ.get("MINISGL_GPU", "H200"), metavar="TEXT",
        help="A GPU's name, or its memory in GiB (default: %(default)s).",
    )  # fmt: skip
    add_flags(plan, "engine", EngineConfig, environ)

    tune = command("tune", "Measure the kernels' launch configurations for a model on this GPU.", _tune)
    add_flags(tune, "tuning", TuneSettings, environ)

    bench = command("bench", "Measure something.", None)
    benches = bench.add_subparsers(metavar="WHAT", help="What to measure.")
    kernel = command("kernel", "Check and time the Triton kernels on this GPU.", _bench_kernel, benches)
    kernel.add_argument("names", nargs="*", help='Ops, or parts of "op shape", to measure; none is all.')
    add_flags(kernel, "measuring", KernelBenchSettings, environ)
    add_flags(kernel, "output", OutputSettings, environ)
    offline = command("offline", "Throughput of one engine, without a server.", _bench_offline, benches)
    add_flags(offline, "workload", OfflineBenchSettings, environ)
    add_flags(offline, "output", OutputSettings, environ)
    add_flags(offline, "engine", EngineConfig, environ)
    load = command("serve", "Load on a running server, as its users feel it.", _bench_serve, benches)
    add_flags(load, "load", ServeBenchSettings, environ)
    add_flags(load, "output", OutputSettings, environ)
    step = command("step", "Time of a step against the hardware's limits.", _bench_step, benches)
    add_flags(step, "measuring", StepBenchSettings, environ)
    add_flags(step, "output", OutputSettings, environ)
    add_flags(step, "engine", EngineConfig, environ)
    startup = command("startup", "Time from nothing to the first token.", _bench_startup, benches)
    add_flags(startup, "measuring", StartupBenchSettings, environ)
    add_flags(startup, "output", OutputSettings, environ)
    add_flags(startup, "engine", EngineConfig, environ)
    simulate = command(
        "simulate", "Scheduler settings on a workload, without a GPU.", _bench_simulate, benches
    )
    add_flags(simulate, "simulation", SimulateSettings, environ)
    add_flags(simulate, "output", OutputSettings, environ)
    compare = command("compare", "Compare two reports; exit code 1 on a regression.", _bench_compare, benches)
    compare.add_argument("a", help="The JSON file of the earlier report.")
    compare.add_argument("b", help="The JSON file of the later one.")
    add_flags(compare, "judging", CompareSettings, environ)
    plot = command("plot", "Draw a report that was written with --out.", _bench_plot, benches)
    plot.add_argument("report", help="The JSON file.")
    plot.add_argument("picture", help="The file to draw to: .png, .svg or .html.")

    cache = command("cache", "Look after the compiled code that is kept between starts.", None)
    actions = cache.add_subparsers(metavar="WHAT", help="What to do with it.")

    def action(name: str, summary: str, run: Callable[..., int], file: str = "") -> None:
        sub = command(name, summary, run, actions)
        if file:
            sub.add_argument("file", help=file)
        sub.add_argument(
            "--compile-cache",
            default=environ.get("MINISGL_COMPILE_CACHE"),
            metavar="TEXT",
            help='The folder, as for serve (default: "compiled" in the cache directory)',
        )

    action("ls", "Show the entries, their size, and what is wrong with them.", _cache_list)
    action("verify", "As ls, with exit code 1 if an entry is not whole.", _cache_verify)
    action(
        "export", "Pack all entries, for machines of the same kind.", _cache_export, "The .tar.gz to write."
    )
    action(
        "import",
        "Unpack entries from people you trust: it is code.",
        _cache_import,
        "A .tar.gz that 'minisgl cache export' wrote.",
    )
    action("clear", "Delete all entries that no engine is using.", _cache_clear)

    doctor = command("doctor", "Show what is installed, what would be used, and why.", _doctor)
    doctor.add_argument("--json", action="store_true", help="As JSON, for a bug report.")
    add_flags(doctor, "engine", EngineConfig, environ)
    return parser


def cache_dir(environ: Mapping[str, str]) -> Path:
    """Where models and compiled code are kept: MINISGL_CACHE, XDG_CACHE_HOME/minisgl, or the default."""
    from minisgl.weights.sources import default_cache_dir

    if environ.get("MINISGL_CACHE"):
        return Path(environ["MINISGL_CACHE"]).expanduser()
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]).expanduser() / "minisgl"
    return default_cache_dir()


def _add_local_flags(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    """The flags of a command that runs the engine in its own process."""
    parser.add_argument(
        "--log-level",
        default=environ.get("MINISGL_LOG_LEVEL", "warning"),
        metavar="TEXT",
        help=f"One of {', '.join(LEVELS)} (default: %(default)s)",
    )
    sampling = {**_text(CHAT_DEFAULTS), **environ}
    # What is printed is text: log probabilities would be computed and thrown away.
    add_flags(parser, "sampling", SamplingParams, sampling, skip=("logprobs", "prompt_logprobs"))
    add_flags(parser, "engine", EngineConfig, environ, skip=("seed",))


def _text(defaults: Mapping[str, object]) -> dict[str, str]:
    return {f"MINISGL_{name.upper()}": str(value) for name, value in defaults.items()}


def _help_of(parser: argparse.ArgumentParser) -> Callable[..., int]:
    """What runs where the command line ends before it says what to do."""

    def run(*_: object) -> int:
        parser.print_help(sys.stderr)
        return EXIT_USER_ERROR

    return run


def _serve(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from minisgl.server.launch import run_server

    server = ServerConfig(**values_of(ServerConfig, arguments, environ))
    engine = EngineConfig(**values_of(EngineConfig, arguments, environ))
    check_server_config(server)
    check_engine_config(engine)  # both before a model is fetched
    engine = with_cache_dir(engine, cache_dir(environ))
    _start_log(server.log_level, "server" if engine.node_rank == 0 else f"node {engine.node_rank}")
    folder = _folder(engine, environ)
    if engine.node_rank:
        from minisgl.engine.node import run_node

        try:
            run_node(engine, folder, lambda line: print(line, file=sys.stderr, flush=True))
        except EngineDeadError as error:
            print(f"minisgl: error: {error}", file=sys.stderr)
            return EXIT_FAILED
        return EXIT_OK
    return run_server(server, engine, folder, started_at=started_at)


def _chat(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from minisgl.shell import run_chat

    params = _sampling(arguments, environ)
    _check_text("--system", arguments.system or "")
    with _local_llm(arguments, environ, started_at) as llm:
        return run_chat(
            llm,
            params,
            system=arguments.system,
            history_file=cache_dir(environ) / "chat_history",
            stdin=sys.stdin,
            stdout=sys.stdout,
            stderr=sys.stderr,
        )


def _generate(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from minisgl.shell import print_reply

    prompt = arguments.prompt
    if prompt is None or prompt == "-":
        if prompt is None and sys.stdin.isatty():
            raise ConfigError('give a prompt: minisgl generate "Once upon a time" ("-" reads stdin)')
        prompt = sys.stdin.read()
    if not prompt:
        raise ConfigError('the prompt is empty; give one: minisgl generate "Once upon a time"')
    _check_text("the prompt", prompt)
    _check_text("--system", arguments.system or "")
    messages = [{"role": "user", "content": prompt}]
    if arguments.system is not None:
        messages.insert(0, {"role": "system", "content": arguments.system})
    params = _sampling(arguments, environ)
    with _local_llm(arguments, environ, started_at) as llm:
        chat = arguments.chat or arguments.system is not None
        figures = print_reply(llm.stream(messages if chat else prompt, params), sys.stdout)
        print(figures.line(), file=sys.stderr)
    return EXIT_OK


def _pull(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from minisgl.weights.sources import BUILTIN_MODELS, resolve_model_folder

    if arguments.list:
        for name, model in BUILTIN_MODELS.items():
            present = ""
            try:
                resolve_model_folder(name, pull_missing=False, cache_dir=cache_dir(environ))
                present = " (here)"
            except MinisglError:
                pass
            print(f"{name:<20} {model.description}{present}")
        return EXIT_OK
    if arguments.name is None:
        raise ConfigError("say which model: minisgl pull smollm2-135m ('minisgl pull --list' shows them)")
    _start_log("info", "pull")
    print(_folder(EngineConfig(model=arguments.name), environ))
    return EXIT_OK


def _plan(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from minisgl.benchmark.model_configs import model_folder
    from minisgl.capacity import describe, find_capacity, gpu_gib

    engine = EngineConfig(**{**values_of(EngineConfig, arguments, environ), "dummy_weights": True})
    check_engine_config(engine)
    gpu_gib(arguments.gpu)
    with model_folder(engine, cache_dir=cache_dir(environ)) as folder:
        print(describe(find_capacity(engine, folder, arguments.gpu), engine.model, arguments.gpu))
    return EXIT_OK


def _tune(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    settings = TuneSettings(**values_of(TuneSettings, arguments, environ))
    _choose_interpreter(settings.device)
    from minisgl.benchmark.tune import run_tune

    return run_tune(settings, sys.stdout)


def _bench_kernel(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    settings = KernelBenchSettings(**values_of(KernelBenchSettings, arguments, environ))
    output = OutputSettings(**values_of(OutputSettings, arguments, environ))
    _choose_interpreter(settings.device)
    from minisgl.benchmark.kernel_bench import run_kernel_bench

    return run_kernel_bench(settings, tuple(arguments.names), output, sys.stdout)


def _bench_offline(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    settings = OfflineBenchSettings(**values_of(OfflineBenchSettings, arguments, environ))
    output, engine = _output_and_engine(arguments, environ)
    from minisgl.benchmark.offline import run_offline_bench

    return run_offline_bench(settings, engine, output, sys.stdout, cache_dir=cache_dir(environ))


def _bench_serve(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    settings = ServeBenchSettings(**values_of(ServeBenchSettings, arguments, environ))
    output = OutputSettings(**values_of(OutputSettings, arguments, environ))
    _start_log("warning", "bench")
    from minisgl.benchmark.serve import run_serve_bench

    return run_serve_bench(settings, output, sys.stdout, cache_dir=cache_dir(environ))


def _bench_step(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    settings = StepBenchSettings(**values_of(StepBenchSettings, arguments, environ))
    output, engine = _output_and_engine(arguments, environ)
    from minisgl.benchmark.step import run_step_bench

    return run_step_bench(settings, engine, output, sys.stdout, cache_dir=cache_dir(environ))


def _bench_startup(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    settings = StartupBenchSettings(**values_of(StartupBenchSettings, arguments, environ))
    output, engine = _output_and_engine(arguments, environ)
    from minisgl.benchmark.startup import run_startup_bench

    return run_startup_bench(
        settings, engine, output, sys.stdout, environ=environ, cache_dir=cache_dir(environ)
    )


def _bench_simulate(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    settings = SimulateSettings(**values_of(SimulateSettings, arguments, environ))
    output = OutputSettings(**values_of(OutputSettings, arguments, environ))
    from minisgl.benchmark.simulate import run_simulation

    return run_simulation(settings, output, sys.stdout)


def _bench_compare(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    settings = CompareSettings(**values_of(CompareSettings, arguments, environ))
    from minisgl.benchmark.compare import run_compare

    return run_compare(Path(arguments.a), Path(arguments.b), settings, sys.stdout)


def _bench_plot(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from minisgl.benchmark.plots import plot_report
    from minisgl.benchmark.report import read_report

    plot_report(Path(arguments.picture), read_report(Path(arguments.report)))
    return EXIT_OK


def _output_and_engine(
    arguments: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[OutputSettings, EngineConfig]:
    """The settings that the benchmarks of an engine share, checked as far as that needs no device."""
    _start_log("warning", "bench")
    engine = EngineConfig(**values_of(EngineConfig, arguments, environ))
    check_engine_config(engine)
    engine = with_cache_dir(engine, cache_dir(environ))
    return OutputSettings(**values_of(OutputSettings, arguments, environ)), engine


def _choose_interpreter(device: str) -> None:
    """On cpu, have Triton interpret its kernels; it decides when they are imported, so this goes first."""
    if device not in ("cuda", "cpu"):
        raise ConfigError(f'--device must be "cuda" or "cpu", got {device}')
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"


def _doctor(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from minisgl.doctor import as_json, as_text, examine

    engine = EngineConfig(**values_of(EngineConfig, arguments, environ))
    report = examine(engine, cache_dir(environ))
    print(as_json(report) if arguments.json else as_text(report))
    return EXIT_FAILED if report.problems else EXIT_OK


def _cache_list(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    _cache_verify(arguments, environ, started_at)
    return EXIT_OK


def _cache_verify(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from compile_cache.entries import list_entries

    root = _compiled(arguments, environ)
    entries = list_entries(root)
    if not entries:
        print(f"no compiled code in {root}")
    for info in entries:
        size = f"{info.num_files} files, {info.num_bytes / 2**20:.1f} MiB"
        print(f"{info.name}  {size}  {info.problem or 'whole'}")
        if info.facts:
            print("    " + ", ".join(f"{name} {value}" for name, value in info.facts.items()))
    return EXIT_FAILED if any(info.problem for info in entries) else EXIT_OK


def _cache_export(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from compile_cache.entries import export_entries

    with _cache_errors():
        num_entries = export_entries(_compiled(arguments, environ), Path(arguments.file))
    print(f"{num_entries} entries in {arguments.file}")
    return EXIT_OK


def _cache_import(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from compile_cache.entries import import_entries

    with _cache_errors():
        names = import_entries(_compiled(arguments, environ), Path(arguments.file))
    print("\n".join(names))
    return EXIT_OK


def _cache_clear(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from compile_cache.entries import clear

    with _cache_errors():
        freed_bytes = clear(_compiled(arguments, environ))
    print(f"{freed_bytes / 2**20:.1f} MiB freed")
    return EXIT_OK


@contextmanager
def _cache_errors() -> Iterator[None]:
    """What the compile cache says to a user, as one of our errors."""
    from compile_cache.seal import CacheError

    try:
        yield
    except CacheError as error:
        raise ConfigError(str(error)) from error


def _compiled(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Path:
    """Where compiled code is kept."""
    return Path(os.path.expanduser(arguments.compile_cache or cache_dir(environ) / "compiled"))


def _folder(engine: EngineConfig, environ: Mapping[str, str]) -> Path:
    """The model's local folder, fetched with a progress bar when it is missing."""
    from minisgl.weights.progress import progress_on
    from minisgl.weights.sources import resolve_model_folder

    return resolve_model_folder(
        engine.model,
        revision=engine.revision,
        tokenizer=engine.tokenizer,
        with_weights=not engine.dummy_weights,
        cache_dir=cache_dir(environ),
        progress=progress_on(sys.stderr),
    )


def _sampling(arguments: argparse.Namespace, environ: Mapping[str, str]) -> SamplingParams:
    return SamplingParams(**values_of(SamplingParams, arguments, environ))


def _local_llm(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> "LLM":
    """An engine in this process; a line per start-up stage on stderr, and the wall time at the end."""
    from minisgl.llm import LLM
    from minisgl.server.startup_report import stage_line
    from minisgl.weights.progress import progress_on

    _start_log(arguments.log_level, "minisgl")
    settings = values_of(EngineConfig, arguments, environ)
    settings.pop("seed", None)  # --seed means the request's here
    # Held back until the first stage is over, so that a mistake in the settings is one line.
    earlier = [("command line", 1000 * (time.monotonic() - started_at))]

    def report(name: str, duration_ms: float) -> None:
        for stage in (*earlier, (name, duration_ms)):
            print(stage_line(*stage), file=sys.stderr)
        earlier.clear()

    llm = LLM(cache_dir=cache_dir(environ), progress=progress_on(sys.stderr), on_stage=report, **settings)
    report("total", 1000 * (time.monotonic() - started_at))
    return llm


def _survive_foreign_characters() -> None:
    """Bytes that are no text come in as what `_check_text` and the tokenizer refuse; characters that the
    terminal's encoding lacks go out as "?"."""
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace")):
        if isinstance(stream, io.TextIOWrapper):  # None where the caller has closed it
            stream.reconfigure(errors=errors)


def _check_text(name: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} is not valid UTF-8 (at character {error.start})") from None


def _start_log(level: str, process: str) -> None:
    if level not in LEVELS:
        raise ConfigError(f"--log-level must be one of {', '.join(LEVELS)}, got {level!r}")
    setup_logging(level, process)
