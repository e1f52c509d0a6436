"""Real clients against a running server, each in an environment of its own.

    minisgl serve --dtype float32 --chat-template docs/tools.jinja &
    python bench/clients/run.py --model-folder ~/.cache/minisgl/models/smollm2-135m

The environments (a venv with pip, or npm) are made once, in --folder; the first run installs some hundred
packages. Each client's script beside this file checks what it gets and prints a line per check. What the
served model is too small for is asked of a second server, with an engine that says given replies
(scripted_engine.py). The table has the client's version, its checks, and how long it took; exit code 1 when
one failed. Without --model-folder, lm-eval and guidellm are left out: they need its tokenizer, and lm-eval's
log-likelihoods are compared with transformers' on the same model.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from scripted_engine import scripted_server

from minisgl.benchmark.reports.report import make_report, write_report
from minisgl.ipc.child_process import module_command

HERE = Path(__file__).resolve().parent
NUM_ITEMS = 50
LIMIT_S = 900
"""For one client's checks."""


class Client(NamedTuple):
    """One library and what tries it."""

    package: str
    script: str
    beside: tuple[str, ...] = ()  # further packages that the script needs


PYTHON = (
    Client("openai", "openai_python.py"),
    Client("openai", "openai_responses.py"),
    Client("anthropic", "anthropic_python.py"),
    Client("litellm", "litellm_client.py", ("mcp",)),  # it imports mcp where a call has tools
    Client("langchain-openai", "langchain_client.py"),
    Client("instructor", "instructor_client.py", ("instructor[anthropic]",)),
    Client("openai-agents", "openai_agents_client.py"),
    Client("pydantic-ai-slim", "pydantic_ai_client.py", ("pydantic-ai-slim[anthropic,openai]",)),
    Client("dspy", "dspy_client.py"),
    Client("llm", "llm_client.py"),
    Client("lm_eval", "lm_eval_client.py", ("lm_eval[api]", "transformers")),
    Client("guidellm", "guidellm_client.py"),
)
NEED_FOLDER = ("lm_eval", "guidellm")
AI_SDK = ("@ai-sdk/openai-compatible", "@ai-sdk/openai", "@ai-sdk/anthropic", "zod")
NODE = (Client("openai", "openai_node.mjs", ("zod",)), Client("ai", "ai_sdk_node.mjs", AI_SDK))


class Outcome(NamedTuple):
    """A row of the table."""

    client: str
    version: str
    checks: list[str]
    problem: str
    seconds: float


def python_command(client: Client, folder: Path) -> tuple[list[str], str]:
    """The command that runs its script, and the package's version; makes the environment if need be."""
    home = folder / client.package
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        subprocess.run(module_command("venv", "--clear", str(home)), check=True)
        install = [home / "bin" / "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*install, client.package, *client.beside], check=True, stdout=sys.stderr)
        (home / "complete").touch()
    ask = f"from importlib.metadata import version; print(version({client.package!r}))"
    version = subprocess.run(
        [python, "-I", "-c", ask], check=True, capture_output=True, text=True
    ).stdout.strip()
    return [str(python), str(HERE / client.script)], version


def node_command(client: Client, folder: Path) -> tuple[list[str], str]:
    """The same for npm; its script has to lie where the package is."""
    home = folder / f"npm-{client.package}"
    if not (home / "complete").exists():
        home.mkdir(parents=True, exist_ok=True)
        install = ["npm", "install", "--silent", "--prefix", ".", client.package, *client.beside]
        subprocess.run(install, cwd=home, check=True, stdout=sys.stderr)
        (home / "complete").touch()
    (home / client.script).write_bytes((HERE / client.script).read_bytes())
    package = json.loads((home / "node_modules" / client.package / "package.json").read_text())
    return ["node", str(home / client.script)], package["version"]


def expected_loglikelihoods(model_folder: Path, file: Path) -> None:
    """Write what lm-eval's checks need: texts as pairs, and transformers' answers to them."""
    import torch
    from loglikelihood import ROOT, Item, by_transformers, make_items
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    rows = []
    for item in make_items(ROOT / "docs" / "operations.md", tokenizer, model, NUM_ITEMS):
        context, continuation = tokenizer.decode(item.context), tokenizer.decode(item.continuation)
        # As lm-eval does it: both together, and the context's number of tokens off the front.
        ids, first = tokenizer(context + continuation).input_ids, len(tokenizer(context).input_ids)
        score = by_transformers(model, Item(ids[:first], ids[first:]))
        rows.append([context, continuation, *score])
    file.write_text(json.dumps(rows))


def try_client(name: str, command: list[str], version: str, environ: dict[str, str]) -> Outcome:
    """Run its script."""
    started_at = time.monotonic()
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
        output, errors, is_well = done.stdout, done.stderr, done.returncode == 0
    except subprocess.TimeoutExpired:
        output, errors, is_well = "", f"not done after {LIMIT_S} s", False
    if not is_well:
        print(f"--- {name}\n{output}{errors}", file=sys.stderr)
    checks = [line.removeprefix("ok: ") for line in output.splitlines() if line.startswith("ok: ")]
    problem = "" if is_well else (errors.strip().splitlines() or ["failed"])[-1]
    return Outcome(name, version, checks, problem, time.monotonic() - started_at)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--name", default="smollm2-135m", help="the served model's name")
    parser.add_argument("--model-folder", type=Path, help="the same model, for transformers and lm-eval")
    parser.add_argument("--folder", type=Path, default=Path("~/.cache/minisgl/clients"))
    parser.add_argument("--out", type=Path, help="the table as JSON")
    parser.add_argument("--only", nargs="*", help="these clients, by package name")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.expanduser().resolve()
    model_folder: Path | None = arguments.model_folder
    folder.mkdir(parents=True, exist_ok=True)
    expected = folder / "expected.json"
    environ = {**os.environ, "BASE_URL": f"{arguments.url}/v1", "MODEL": arguments.name}
    environ["EXPECTED"], environ["TOKENIZER"] = str(expected), str(model_folder)
    environ["OPENAI_API_KEY"] = environ.get("OPENAI_API_KEY", "none")

    outcomes = []
    with tempfile.TemporaryDirectory() as scripted_folder, scripted_server(Path(scripted_folder)) as scripted:
        environ["SCRIPTED_URL"] = scripted.ready().url("/v1")
        for client in (*PYTHON, *NODE):
            name = f"{client.package} (npm)" if client in NODE else client.package
            if arguments.only and name not in arguments.only:
                continue
            if client.package in NEED_FOLDER:
                if model_folder is None:
                    continue
                if client.package == "lm_eval":
                    expected_loglikelihoods(model_folder, expected)
            command, version = (node_command if client in NODE else python_command)(client, folder)
            outcomes.append(try_client(name, command, version, environ))
    if arguments.out:
        rows = [
            {
                "client": one.client,
                "version": one.version,
                "checks": "; ".join(one.checks),
                "problem": one.problem,
            }
            for one in outcomes
        ]
        write_report(
            arguments.out, make_report("clients", arguments={}, metrics={}, tables={"clients": rows})
        )
    print("| client | version | checks | seconds |\n|---|---|---|---|")
    for one in outcomes:
        words = "; ".join([*one.checks, *([f"FAILED: {one.problem}"] if one.problem else [])])
        print(f"| {one.client} | {one.version} | {words} | {one.seconds:.0f} |")
    return int(any(one.problem for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
