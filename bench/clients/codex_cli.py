"""The codex CLI edits a file over /v1/responses, with an engine that says what a good model would say.

    npm install --prefix FOLDER @openai/codex
    python bench/clients/codex_cli.py FOLDER/node_modules/.bin/codex

The server is the real one; the model's tokenizer and template are the tests' small ones. With --engine, this
file is the engine's process.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "server"))

import numpy as np
from fake_engine import Answer, FakeEngine, run_engine
from running_server import RunningServer
from tool_model import make_tool_model

from minisgl.ipc.messages import AddRequest

LIMIT_S = 120
CONTEXT = 300_000
"""Codex's instructions and tools are about 25,000 tokens of the small tokenizer."""
STEPS = ("cat a.txt", "sed -i s/old/new/ a.txt")


class ScriptedEngine(FakeEngine):
    """Thinks, speaks and calls the shell once for each step, then ends."""

    def add(self, request: AddRequest, request_id: int, prompt: bytes) -> None:
        text = self.tokenizer.decode(np.frombuffer(prompt, "<i4").tolist(), skip_special_tokens=False)
        num_done = text.count("<|im_start|>tool")
        reply = "a.txt says new now."
        if num_done < len(STEPS):
            call = json.dumps({"name": "exec_command", "arguments": {"cmd": STEPS[num_done]}})
            reply = f"<think>\nI look.\n</think>\n\nOn it.\n<tool_call>\n{call}\n</tool_call>"
        self.running[request_id] = Answer(request.params, [*self.encode(reply), self.eos], 0)


def main() -> int:
    codex = str(Path(sys.argv[1]).resolve())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        home, work = folder / "home", folder / "work"
        home.mkdir()
        work.mkdir()
        (work / "a.txt").write_text("old text\n")
        model = make_tool_model(folder / "model", context=CONTEXT)
        with RunningServer(model, worker=[sys.executable, __file__, "--engine"]) as server:
            server.ready()
            provider = f'name = "minisgl"\nbase_url = "{server.url("/v1")}"\nwire_api = "responses"\n'
            rules = 'approval_policy = "never"\nsandbox_mode = "danger-full-access"\n'
            (home / "config.toml").write_text(
                f'model = "tiny"\nmodel_provider = "minisgl"\n{rules}[model_providers.minisgl]\n{provider}'
            )
            done = subprocess.run(
                [codex, "exec", "--skip-git-repo-check", "Change old to new in a.txt"],
                cwd=work,
                env={**os.environ, "CODEX_HOME": str(home)},
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                stdin=subprocess.DEVNULL,
            )
        if (work / "a.txt").read_text() != "new text\n" or "a.txt says new now." not in done.stdout:
            print(done.stdout, done.stderr, file=sys.stderr)
            return 1
    print("ok: codex reads a file, edits it and ends")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--engine"]:
        run_engine(ScriptedEngine)
    else:
        sys.exit(main())
