"""schemathesis against /openapi.json: requests made from the document, and such that break it, for minutes.

    python bench/clients/schema.py --seconds 300 --out bench/results/cpu/schemathesis.json

It starts a server with a tiny model of random weights, so that thousands of requests are answered, and makes
an environment for schemathesis once, in --folder. All its checks are on: no 5xx, answers as described, what
the document allows is taken, what it does not allow is refused. Exit code 1 after a failure.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from run import Client, python_command

from minisgl.benchmark.report import format_table, make_report, write_report

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from dummy_model import TEMPLATE, make_tokenizer  # noqa: E402  a script beside this folder

SCHEMATHESIS = Client("schemathesis", "")
REQUEST_LIMIT_S = 60
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 400,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 2,
    "bos_token_id": 1,
}
FLAGS = [
    *("--dummy-weights", "--device", "cpu", "--dtype", "float32", "--cpu-threads", "1", "--port", "0"),
    # Room for any call that the document allows: 128 choices of the whole context, many prompts.
    *("--num-pages", "33000", "--max-queued-requests", "100000"),
]


def run(url: str, command: Path, seconds: int, file: Path) -> dict[str, Any]:
    """schemathesis' own report of a run."""
    arguments = ["run", f"{url}/openapi.json", "--max-time", str(seconds), "--continue-on-failure"]
    arguments += [
        "--request-timeout",
        str(REQUEST_LIMIT_S),
        "--report",
        "json",
        "--report-json-path",
        str(file),
    ]
    subprocess.run([command, "--no-color", *arguments], check=False, stdout=sys.stderr, cwd=file.parent)
    return json.loads(file.read_text())


def accepted_rows(rates: dict[str, Any]) -> list[dict[str, Any]]:
    """For each route what became of the requests that the document allows."""
    rows = []
    for route, phases in sorted(rates.items()):
        sums = {name: sum(phase[name] for phase in phases.values()) for name in ("accepted", "rejected")}
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
            found = run(url, python.with_name("schemathesis"), arguments.seconds, Path(name) / "report.json")
        finally:
            server.terminate()
            server.wait()
    rows = accepted_rows(found["valid_rates"])
    summary = {
        "schemathesis": found["schemathesis_version"],
        "seed": str(found["seed"]),
        "seconds": round(found["running_time"]),
        "routes": found["operations"]["tested"],
        "requests": found["test_cases"]["generated"],
        "with_failures": found["test_cases"]["with_failures"],
        "unique_failures": found["test_cases"]["unique_failures"],
        "errors": len(found["errors"]),
    }
    print(format_table([summary]))
    print(format_table(rows))
    if arguments.out:
        report = make_report(
            "schemathesis",
            arguments={"seconds": arguments.seconds},
            metrics={name: summary[name] for name in ("requests", "with_failures", "errors")},
            tables={"summary": [summary], "allowed_requests": rows},
        )
        write_report(arguments.out, report)
    return int(bool(summary["with_failures"] or summary["errors"]) or not found["complete"])


if __name__ == "__main__":
    sys.exit(main())
