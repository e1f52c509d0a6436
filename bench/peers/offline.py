"""The offline benchmark on another engine, in that engine's environment, as a report of the same kind.

    python bench/peers/offline.py vllm --python ~/vllm/bin/python --model Qwen/Qwen3-0.6B \\
        --out vllm.json --against ours.json

The workload flags are those of `minisgl bench offline`. --against prints the ratios to a report of ours (or
of another peer); `minisgl bench compare` tells whether they are significant when both have several rounds.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from minisgl.benchmark.model_configs import model_folder
from minisgl.benchmark.reports.plots import check_output, write_outputs
from minisgl.benchmark.reports.report import (
    Cell,
    Report,
    format_metrics,
    format_table,
    make_report,
    read_report,
)
from minisgl.benchmark.settings import OfflineBenchSettings, OutputSettings
from minisgl.benchmark.steps.workload import Item, check_offline_settings, random_workload
from minisgl.commands.flags import add_flags, values_of
from minisgl.config import EngineConfig
from minisgl.errors import ConfigError, MinisglError

FOLDER = Path(__file__).resolve().parent
PEERS = sorted(path.stem.removeprefix("peer_").replace("_", "-") for path in FOLDER.glob("peer_*.py"))


def main(argv: list[str] | None = None) -> int:
    """Run one peer; 2 after a user's mistake."""
    arguments = _parser().parse_args(argv)
    try:
        settings = OfflineBenchSettings(**values_of(OfflineBenchSettings, arguments, {}))
        output = OutputSettings(**values_of(OutputSettings, arguments, {}))
        check_offline_settings(settings)
        if settings.prompts is not None or settings.ignore_eos is False:
            raise ConfigError("peers run random prompts to their full length; leave --prompts and EOS alone")
        check_output(output)
        ours = read_report(Path(arguments.against)) if arguments.against is not None else None
        report = measure(arguments, settings)
        print(format_metrics(report.metrics))
        if ours is not None:
            print(f"\n{format_table(ratios(report, ours))}")
        write_outputs(report, output, sys.stdout)
    except MinisglError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def measure(arguments: argparse.Namespace, settings: OfflineBenchSettings) -> Report:
    """The peer's report.

    Raises:
        MinisglError: the peer failed, or gave other numbers of tokens than asked for.
    """
    items = random_workload(settings)
    config = EngineConfig(model=arguments.model, dummy_weights=arguments.dummy_weights)
    with model_folder(config) as folder:
        order = {
            "model": str(folder),
            "dummy_weights": arguments.dummy_weights,
            "max_context_tokens": arguments.max_context_tokens,
            "prompts": [item.prompt_ids for item in items],
            "max_tokens": [item.max_tokens for item in items],
            "max_token_id": settings.max_token_id,
            "temperature": settings.temperature,
            "rounds": settings.rounds,
            "options": dict(_option(text) for text in arguments.option),
        }
        result = run_adapter(arguments.peer, arguments.python, order)
    return report_of(arguments.peer, arguments.model, order["options"], settings, items, result)


def run_adapter(peer: str, python: str, order: dict[str, Any]) -> dict[str, Any]:
    """What the peer's adapter measured.

    Raises:
        MinisglError: it failed; its own words went to stderr.
    """
    script = FOLDER / f"peer_{peer.replace('-', '_')}.py"
    with tempfile.TemporaryDirectory() as name:
        result = Path(name) / "result.json"
        try:
            # From its own folder, so that `import minisgl` finds what the peer's environment has.
            done = subprocess.run(
                [python, str(script), str(result)], input=json.dumps(order), text=True, cwd=name, check=False
            )
        except OSError as error:
            raise ConfigError(f"--python {python} can't be run: {error}") from error
        if done.returncode or not result.is_file():
            raise MinisglError(
                f"{peer} failed with exit code {done.returncode}; is it installed in {python}?"
            )
        return json.loads(result.read_text(encoding="utf-8"))


def report_of(
    peer: str,
    model: str,
    options: dict[str, Any],
    settings: OfflineBenchSettings,
    items: list[Item],
    result: dict[str, Any],
) -> Report:
    """As `minisgl bench offline` reports; torch and GPU are those of the peer's environment.

    Raises:
        MinisglError: it gave other numbers of tokens than asked for.
    """
    wanted = [item.max_tokens for item in items]
    if result["output_lengths"] != wanted:
        raise MinisglError(
            f"{peer} gave {sum(result['output_lengths'])} tokens where {sum(wanted)} were asked for; its "
            "figures would not be comparable"
        )
    num_prompt_tokens, num_output_tokens = sum(len(item.prompt_ids) for item in items), sum(wanted)
    elapsed = result["elapsed_s"]
    samples = {
        "elapsed_s": elapsed,
        "output_tokens_per_s": [num_output_tokens / one for one in elapsed],
        "prompt_tokens_per_s": [num_prompt_tokens / one for one in elapsed],
        "total_tokens_per_s": [(num_prompt_tokens + num_output_tokens) / one for one in elapsed],
        "requests_per_s": [len(items) / one for one in elapsed],
    }
    report = make_report(
        "offline",
        arguments={
            "peer": peer,
            "versions": result["versions"],
            "model": model,
            "options": options,
            "workload": asdict(settings),
        },
        metrics={
            **{name: sum(values) / len(values) for name, values in samples.items()},
            "num_requests": len(items),
            "num_prompt_tokens": num_prompt_tokens,
            "num_output_tokens": num_output_tokens,
            "start_s": result["start_s"],
        },
        samples=samples,
    )
    versions = result["versions"]
    environment = replace(
        report.environment, torch=versions["torch"], triton=versions["triton"], gpu=result["gpu"]
    )
    return replace(report, environment=environment)


def ratios(peer: Report, ours: Report) -> list[dict[str, Cell]]:
    """Metrics with raw samples in both, and how many times ours is theirs."""
    rows: list[dict[str, Cell]] = []
    for name in peer.samples:
        theirs, own = peer.metrics.get(name), ours.metrics.get(name)
        if theirs and own and name in ours.samples:
            peer_name = str(peer.arguments["peer"])
            rows.append({"metric": name, "ours": own, peer_name: theirs, "ours / theirs": own / theirs})
    return rows


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--option must be name=value, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("peer", choices=PEERS, help="The engine.")
    parser.add_argument("--python", default=sys.executable, help="The interpreter it is installed for.")
    parser.add_argument("--model", default="smollm2-135m", help="As minisgl bench offline takes it.")
    parser.add_argument("--dummy-weights", action="store_true", help="Random weights, only config.json.")
    parser.add_argument("--max-context-tokens", type=int, default=4096, help="Longest request.")
    parser.add_argument(
        "--option", action="append", default=[], help="name=value for the engine's constructor, as JSON."
    )
    parser.add_argument("--against", help="A report to print ratios to.")
    add_flags(parser, "workload", OfflineBenchSettings, {})
    add_flags(parser, "output", OutputSettings, {})
    return parser


if __name__ == "__main__":
    sys.exit(main())
