"""schemathesis against /openapi.json: requests made from the document, and such that break it, for minutes.

    python bench/clients/schema.py --seconds 300 --out bench/results/cpu/schemathesis.json

It starts a server with a tiny model of random weights, so that thousands of requests are answered, and makes
an environment for schemathesis once, in --folder. All its checks are on: no 5xx, answers as described, what
the document allows is taken, what it does not allow is refused. Exit code 1 after a failure. What JSON Schema
can't say of a body (see schema_hooks.py) is left out of what is sent. A second run, half as long, sends only
what is allowed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from run import Client, python_command

from minisgl.benchmark.reports.report import format_table, make_report, write_report

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from dummy_model import TEMPLATE, make_tokenizer  # noqa: E402  a script beside this folder

SCHEMATHESIS = Client("schemathesis", "")
HOOKS = Path(__file__).with_name("schema_hooks.py")
REQUEST_LIMIT_S = 60
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 400,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": list(range(0, 400, 2)),  # replies end soon, so that there is time for many requests
    "bos_token_id": 1,
}
FLAGS = [
    *("--dummy-weights", "--device", "cpu", "--dtype", "float32", "--cpu-threads", "1", "--port", "0"),
    # Room for any call that the document allows: 128 choices of the whole context, many prompts.
    *("--num-pages", "8300", "--max-queued-requests", "100000"),
]


def run(url: str, command: Path, mode: str, seconds: int, file: Path) -> dict[str, Any]:
    """schemathesis' own report of a run."""
    arguments = ["run", f"{url}/openapi.json", "--max-time", str(seconds), "--continue-on-failure"]
    arguments += ["--mode", mode]
    arguments += [
        "--request-timeout",
        str(REQUEST_LIMIT_S),
        "--report",
        "json",
        "--report-json-path",
        str(file),
    ]
    environ = {**os.environ, "SCHEMATHESIS_HOOKS": str(HOOKS)}
    subprocess.run(
        [command, "--no-color", *arguments], check=False, stdout=sys.stderr, cwd=file.parent, env=environ
    )
    return json.loads(file.read_text())


def summary_row(mode: str, found: dict[str, Any]) -> dict[str, Any]:
    """A run in figures."""
    return {
        "schemathesis": found["schemathesis_version"],
        "mode": mode,
        "seed": str(found["seed"]),
        "seconds": round(found["running_time"]),
        "routes": found["operations"]["tested"],
        "requests": found["test_cases"]["generated"],
        "with_failures": found["test_cases"]["with_failures"],
        "errors": len(found["errors"]),
    }


def accepted_rows(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each route what became of the requests that the document allows."""
    rows = []
    for route in sorted(runs[0]):
        phases = [phase for rates in runs for phase in rates.get(route, {}).values()]
        sums = {name: sum(phase[name] for phase in phases) for name in ("accepted", "rejected")}
        rows.append({"route": route, **sums})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--folder", type=Path, default=Path("~/.cache/minisgl/clients"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder: Path = arguments.folder.expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    python = Path(python_command(SCHEMATHESIS, folder)[0][0])
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "tiny"
        model.mkdir()
        make_tokenizer(CONFIG["vocab_size"]).save(str(model / "tokenizer.json"))
        (model / "config.json").write_text(json.dumps(CONFIG))
        (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
        flags = ["--model", str(model), *FLAGS, "--profile-dir", str(Path(name) / "profiles")]
        server = subprocess.Popen(
            [sys.executable, "-m", "minisgl", "serve", *flags], stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        try:
            line = next(line for line in server.stdout if line.startswith("curl "))
            url = line.split("/v1/")[0].removeprefix("curl ")
            program, file = python.with_name("schemathesis"), Path(name) / "report.json"
            found = [
                (mode, run(url, program, mode, seconds, file))
                for mode, seconds in (("all", arguments.seconds), ("positive", arguments.seconds // 2))
            ]
        finally:
            server.terminate()
            server.wait()
    runs = [summary_row(mode, one) for mode, one in found]
    rows = accepted_rows([one["valid_rates"] for _, one in found])
    print(format_table(runs))
    print(format_table(rows))
    num_problems = sum(row["with_failures"] + row["errors"] for row in runs)
    if arguments.out:
        report = make_report(
            "schemathesis",
            arguments={"seconds": arguments.seconds},
            metrics={"requests": sum(row["requests"] for row in runs), "problems": num_problems},
            tables={"runs": runs, "allowed_requests": rows},
        )
        write_report(arguments.out, report)
    return int(num_problems > 0)


if __name__ == "__main__":
    sys.exit(main())
