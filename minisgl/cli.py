"""The `minisgl` command: the only place that turns arguments and environment into settings.

`commands/parser.py` has the flags, and COMMANDS at the end of this file the function of each command.

Promise: importing this module, `minisgl --help` and `minisgl serve` load no torch. A user's mistake gives one
line on stderr and exit code 2, an engine that dies 1 or, of a GPU fault, 74, and Ctrl-C 130, all without a
traceback.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

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
from minisgl.commands import files
from minisgl.commands.flags import fields_of, values_of
from minisgl.commands.parser import REPLY_FLAGS, build_parser
from minisgl.config import (
    SUPERVISED,
    ConnectConfig,
    EngineConfig,
    ReloadConfig,
    ServerConfig,
    check_connect_config,
    check_engine_config,
    check_server_config,
    with_cache_dir,
)
from minisgl.errors import ConfigError, DeviceFaultError, EngineDeadError, MinisglError
from minisgl.log import LEVELS, setup_logging
from minisgl.request import SamplingParams
from minisgl.top.settings import TopSettings

if TYPE_CHECKING:
    from minisgl.llm import LLM

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run one command and return its exit code. None means the process's own arguments and environment."""
    started_at = time.monotonic()
    # On a busy machine, OpenMP threads that spin long at barriers slow a CPU engine tenfold; on a quiet one,
    # threads that do not spin at all cost a quarter of its speed. The spins are some 10 us. Both must be set
    # before torch is loaded; the engine process inherits them.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    environ = settings_from(os.environ if environ is None else environ)
    files.tolerate_odd_characters()
    try:
        arguments = parse(build_parser(environ), argv)
        run = COMMANDS.get(arguments.command)
        if run is None:  # "minisgl", "minisgl bench" or "minisgl cache" alone
            arguments.parser.print_help(sys.stderr)
            return EXIT_USER_ERROR
        return run(arguments, environ, started_at)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has exited, as in `minisgl generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except EngineDeadError as error:
        print(f"minisgl: error: {error}", file=sys.stderr)
        if isinstance(error, DeviceFaultError):
            from minisgl.engine.device_faults import exit_after_device_fault

            exit_after_device_fault()
        return EXIT_FAILED
    except MinisglError as error:
        print(f"minisgl: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Like `parser.parse_args`, but the error for an unknown flag names the closest one, or the help."""
    arguments, unknown = parser.parse_known_args(argv)
    if not unknown:
        return arguments
    flags = re.findall(r"--[a-z][a-z0-9-]*", arguments.parser.format_usage())
    names = [word.partition("=")[0].replace("_", "-") for word in unknown if word.startswith("--")]
    guesses = dict.fromkeys(flag for name in names for flag in get_close_matches(name, flags, n=1))
    meant = f"did you mean {', '.join(guesses)}?" if guesses else f"see {arguments.parser.prog} --help"
    parser.error(f"unrecognized arguments: {' '.join(unknown)}; {meant}")


def settings_from(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without variables that only look like settings.

    Kubernetes sets MINISGL_PORT=tcp://... for a service called minisgl.
    """
    return {
        name: value
        for name, value in environ.items()
        if not (name == "MINISGL_PORT" and value.startswith("tcp://"))
    }


def cache_dir(environ: Mapping[str, str]) -> Path:
    """The folder for models and compiled code: MINISGL_CACHE, XDG_CACHE_HOME/minisgl or the default."""
    from minisgl.weights.sources import default_cache_dir

    if environ.get("MINISGL_CACHE"):
        return Path(environ["MINISGL_CACHE"]).expanduser()
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]).expanduser() / "minisgl"
    return default_cache_dir()


def _serve(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from minisgl.server.engines.launch import run_server

    server = ServerConfig(**values_of(ServerConfig, arguments, environ))
    engine = EngineConfig(**values_of(EngineConfig, arguments, environ))
    check_server_config(server)
    check_engine_config(engine)  # both checks come before a model is fetched
    is_door = server.engine_listen is not None
    secret = files.read_secret(server.engine_secret_file, environ) if is_door else None
    engine = with_cache_dir(engine, cache_dir(environ))
    _start_log(server.log_level, "server")
    folder = _fetch_model(engine, environ, with_weights=not is_door)
    return run_server(
        server,
        engine,
        folder,
        visible_gpus=environ.get("CUDA_VISIBLE_DEVICES"),
        engine_secret=secret,
        find_model=lambda wanted: (with_cache_dir(wanted, cache_dir(environ)), _fetch_model(wanted, environ)),
        started_at=started_at,
    )


def _engine(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from minisgl.engine.ranks.job import job_from
    from minisgl.engine.remote.connected_engine import process_parts, run_connected_engine, run_rank_of_job

    connect = ConnectConfig(**values_of(ConnectConfig, arguments, environ))
    engine = EngineConfig(**values_of(EngineConfig, arguments, environ))
    check_connect_config(connect)
    check_engine_config(engine)
    secret = "" if connect.server == SUPERVISED else files.read_secret(connect.engine_secret_file, environ)
    job = job_from(environ)
    engine = with_cache_dir(engine, cache_dir(environ))
    _start_log(connect.log_level, "engine")

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    parts = process_parts(connect, secret, say, job)
    folder = _fetch_model(engine, environ)
    if job is not None and job.rank:
        return run_rank_of_job(engine, folder, job)
    run_connected_engine(engine, folder, parts, started_at, job)
    return EXIT_OK


def _reload(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from minisgl.commands.reload import run_reload

    config = ReloadConfig(**values_of(ReloadConfig, arguments, environ))
    given = {**values_of(ServerConfig, arguments, {}), **values_of(EngineConfig, arguments, {})}
    own = {field.name for field in fields_of(ReloadConfig)}
    run_reload(config, {name: value for name, value in given.items() if name not in own}, sys.stdout)
    return EXIT_OK


def _chat(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from minisgl.commands.chat import run_chat

    params = _sampling_params(arguments, environ)
    files.check_utf8("--system", arguments.system or "")
    tools = files.read_tools_file(Path(arguments.tools)) if arguments.tools is not None else []
    with _make_llm(arguments, environ, started_at) as llm:
        return run_chat(
            llm,
            params,
            system=arguments.system,
            history_file=cache_dir(environ) / "chat_history",
            stdin=sys.stdin,
            stdout=sys.stdout,
            stderr=sys.stderr,
            tools=tools,
        )


def _generate(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from minisgl.commands.chat import print_reply

    prompt = files.prompt_from(arguments.prompt, sys.stdin)
    files.check_utf8("--system", arguments.system or "")
    messages = [{"role": "user", "content": prompt}]
    if arguments.system is not None:
        messages.insert(0, {"role": "system", "content": arguments.system})
    params = _sampling_params(arguments, environ)
    with _make_llm(arguments, environ, started_at) as llm:
        chat = arguments.chat or arguments.system is not None
        figures = print_reply(llm.stream(messages if chat else prompt, params), sys.stdout)
        print(figures.line(), file=sys.stderr)
    return EXIT_OK


def _pull(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from minisgl.weights.builtin_models import BUILTIN_MODELS
    from minisgl.weights.sources import resolve_model_folder

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
    print(_fetch_model(EngineConfig(model=arguments.name), environ))
    return EXIT_OK


def _api_key(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from minisgl.commands.api_key import run_api_key

    limits = ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests")
    fields = {name: getattr(arguments, name) for name in ("name", "priority", "admin", *limits)}
    run_api_key(fields, Path(arguments.file) if arguments.file is not None else None, sys.stdout, sys.stderr)
    return EXIT_OK


def _plan(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from minisgl.benchmark.model_configs import model_folder
    from minisgl.commands.plan import describe, find_capacity, gpu_gib, gpu_is_here

    engine = EngineConfig(**{**values_of(EngineConfig, arguments, environ), "dummy_weights": True})
    check_engine_config(engine)
    gpu_gib(arguments.gpu)
    with model_folder(engine, cache_dir=cache_dir(environ)) as folder:
        print(describe(find_capacity(engine, folder, arguments.gpu), engine.model, arguments.gpu))
    if not gpu_is_here():
        print(f"\nThis machine has no GPU; the plan assumes the one that --gpu names ({arguments.gpu}).")
    return EXIT_OK


def _tune(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    settings = TuneSettings(**values_of(TuneSettings, arguments, environ))
    _choose_interpreter(settings.device)
    from minisgl.benchmark.kernels.tune import run_tune

    return run_tune(settings, sys.stdout)


def _bench_kernel(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    settings = KernelBenchSettings(**values_of(KernelBenchSettings, arguments, environ))
    output = OutputSettings(**values_of(OutputSettings, arguments, environ))
    _choose_interpreter(settings.device)
    from minisgl.benchmark.kernels.kernel_bench import run_kernel_bench

    return run_kernel_bench(settings, tuple(arguments.names), output, sys.stdout)


def _bench_offline(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    settings = OfflineBenchSettings(**values_of(OfflineBenchSettings, arguments, environ))
    output, engine = _output_and_engine(arguments, environ)
    from minisgl.benchmark.steps.offline import run_offline_bench

    return run_offline_bench(settings, engine, output, sys.stdout, cache_dir=cache_dir(environ))


def _bench_serve(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    settings = ServeBenchSettings(**values_of(ServeBenchSettings, arguments, environ))
    output = OutputSettings(**values_of(OutputSettings, arguments, environ))
    _start_log("warning", "bench")
    from minisgl.benchmark.load.serve import run_serve_bench

    return run_serve_bench(settings, output, sys.stdout, cache_dir=cache_dir(environ))


def _bench_step(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    settings = StepBenchSettings(**values_of(StepBenchSettings, arguments, environ))
    output, engine = _output_and_engine(arguments, environ)
    from minisgl.benchmark.steps.step import run_step_bench

    return run_step_bench(settings, engine, output, sys.stdout, cache_dir=cache_dir(environ))


def _bench_startup(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    settings = StartupBenchSettings(**values_of(StartupBenchSettings, arguments, environ))
    output, engine = _output_and_engine(arguments, environ)
    from minisgl.benchmark.steps.startup import run_startup_bench

    return run_startup_bench(
        settings, engine, output, sys.stdout, environ=environ, cache_dir=cache_dir(environ)
    )


def _bench_simulate(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    settings = SimulateSettings(**values_of(SimulateSettings, arguments, environ))
    output = OutputSettings(**values_of(OutputSettings, arguments, environ))
    from minisgl.benchmark.steps.simulate import run_simulation

    return run_simulation(settings, output, sys.stdout)


def _bench_compare(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    settings = CompareSettings(**values_of(CompareSettings, arguments, environ))
    from minisgl.benchmark.reports.compare import run_compare

    return run_compare(Path(arguments.a), Path(arguments.b), settings, sys.stdout)


def _bench_plot(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from minisgl.benchmark.reports.plots import plot_report
    from minisgl.benchmark.reports.report import read_report

    plot_report(Path(arguments.picture), read_report(Path(arguments.report)))
    return EXIT_OK


def _output_and_engine(
    arguments: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[OutputSettings, EngineConfig]:
    """The settings that all engine benchmarks share. They are checked as far as possible without a device."""
    _start_log("warning", "bench")
    engine = EngineConfig(**values_of(EngineConfig, arguments, environ))
    check_engine_config(engine)
    engine = with_cache_dir(engine, cache_dir(environ))
    return OutputSettings(**values_of(OutputSettings, arguments, environ)), engine


def _choose_interpreter(device: str) -> None:
    """On a CPU, let Triton interpret its kernels. Triton reads this when kernels are imported."""
    if device not in ("cuda", "cpu"):
        raise ConfigError(f'--device must be "cuda" or "cpu", got {device}')
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"


def _doctor(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from minisgl.commands.doctor import as_json, as_text, examine

    engine = EngineConfig(**values_of(EngineConfig, arguments, environ))
    report = examine(engine, cache_dir(environ))
    print(as_json(report) if arguments.json else as_text(report))
    return EXIT_FAILED if report.problems else EXIT_OK


def _top(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from minisgl.top.top import run_top

    run_top(TopSettings(**values_of(TopSettings, arguments, environ)))
    return EXIT_OK


def _verify(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from minisgl.commands.verify import run_verify

    engine = EngineConfig(**values_of(EngineConfig, arguments, environ))
    check_engine_config(engine)
    _start_log("warning", "verify")
    passed = run_verify(engine, arguments.out, cache_dir(environ), sys.stdout, sys.stderr)
    return EXIT_OK if passed else EXIT_FAILED


def _cache_list(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    _cache_verify(arguments, environ, started_at)
    return EXIT_OK


def _cache_verify(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from minisgl.commands.cache import print_entries

    return EXIT_OK if print_entries(_compiled_folder(arguments, environ), sys.stdout) else EXIT_FAILED


def _cache_export(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from minisgl.commands.cache import export_to

    export_to(Path(arguments.file), _compiled_folder(arguments, environ), sys.stdout)
    return EXIT_OK


def _cache_import(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from minisgl.commands.cache import import_from

    import_from(Path(arguments.file), _compiled_folder(arguments, environ), sys.stdout)
    return EXIT_OK


def _cache_clear(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> int:
    from minisgl.commands.cache import clear_entries

    clear_entries(_compiled_folder(arguments, environ), sys.stdout)
    return EXIT_OK


def _compiled_folder(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Path:
    """The folder of the compiled code: --compile-cache, or "compiled" in the cache directory."""
    return Path(os.path.expanduser(arguments.compile_cache or cache_dir(environ) / "compiled"))


def _fetch_model(engine: EngineConfig, environ: Mapping[str, str], *, with_weights: bool = True) -> Path:
    """The model's local folder. A missing model is fetched, with a progress bar."""
    from minisgl.progress import ShownProgress, lines_on
    from minisgl.weights.sources import resolve_model_folder

    with ShownProgress(lines_on()) as progress:
        return resolve_model_folder(
            engine.model,
            revision=engine.revision,
            tokenizer=engine.tokenizer,
            with_weights=with_weights and not engine.dummy_weights,
            cache_dir=cache_dir(environ),
            progress=progress,
        )


def _sampling_params(arguments: argparse.Namespace, environ: Mapping[str, str]) -> SamplingParams:
    values = values_of(SamplingParams, arguments, environ)
    if arguments.json_schema is not None:
        values["json_schema"] = files.read_file("--json-schema", Path(arguments.json_schema))
    return SamplingParams(**values)


def _make_llm(arguments: argparse.Namespace, environ: Mapping[str, str], started_at: float) -> "LLM":
    """Start an engine in this process. Prints a line per start-up stage and the total time to stderr."""
    from minisgl.llm import LLM
    from minisgl.progress import ShownProgress, lines_on
    from minisgl.server.engines.startup_report import stage_line

    _start_log(arguments.log_level, "minisgl")
    settings = values_of(EngineConfig, arguments, environ)
    settings.pop("seed", None)  # in these commands, --seed is the request's seed
    # Printed with the engine's first stage, so that a mistake in the settings shows only the error.
    earlier = [("command line", 1000 * (time.monotonic() - started_at))]

    def report(name: str, duration_ms: float) -> None:
        for stage in (*earlier, (name, duration_ms)):
            print(stage_line(*stage), file=sys.stderr)
        earlier.clear()

    settings |= {name: getattr(arguments, name) for name in REPLY_FLAGS}
    with ShownProgress(lines_on()) as progress:
        llm = LLM(cache_dir=cache_dir(environ), progress=progress, on_stage=report, **settings)
    report("total", 1000 * (time.monotonic() - started_at))
    return llm


def _start_log(level: str, process: str) -> None:
    if level not in LEVELS:
        raise ConfigError(f"--log-level must be one of {', '.join(LEVELS)}, got {level!r}")
    setup_logging(level, process)


COMMANDS: dict[str, Callable[[argparse.Namespace, Mapping[str, str], float], int]] = {
    "serve": _serve,
    "engine": _engine,
    "reload": _reload,
    "chat": _chat,
    "generate": _generate,
    "pull": _pull,
    "api-key": _api_key,
    "plan": _plan,
    "tune": _tune,
    "bench kernel": _bench_kernel,
    "bench offline": _bench_offline,
    "bench serve": _bench_serve,
    "bench step": _bench_step,
    "bench startup": _bench_startup,
    "bench simulate": _bench_simulate,
    "bench compare": _bench_compare,
    "bench plot": _bench_plot,
    "cache ls": _cache_list,
    "cache verify": _cache_verify,
    "cache export": _cache_export,
    "cache import": _cache_import,
    "cache clear": _cache_clear,
    "top": _top,
    "verify": _verify,
    "doctor": _doctor,
}
"""The function of each command that `commands/parser.py` knows. Arguments: the parsed command line, the
environment, and `time.monotonic()` when the program began. Returns the exit code."""
