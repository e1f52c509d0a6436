"""Coding agents edit a file, with an engine that says what a good model would say.

    npm install --prefix FOLDER @openai/codex @anthropic-ai/claude-code
    python bench/clients/agent_clis.py FOLDER/node_modules/.bin

codex speaks /v1/responses, claude /v1/messages. The server is the real one; the model's tokenizer and
template are the tests' small ones. With --engine, this file is the engine's process.
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
"""The agents' instructions and tools are 25,000 to 75,000 tokens of the small tokenizer."""
STEPS = ("cat a.txt", "sed -i s/old/new/ a.txt")
LAST = "a.txt says new now."
TASK = "Change old to new in a.txt"
SHELLS = {"exec_command": "cmd", "Bash": "command"}
"""The agents' tools that run a command -> its parameter."""
CODEX_CONFIG = """
model = "tiny"
model_provider = "minisgl"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.minisgl]
name = "minisgl"
base_url = "URL/v1"
wire_api = "responses"
"""


class ScriptedEngine(FakeEngine):
    """Thinks, speaks and calls the shell once for each step, then ends.

    It refuses a prompt that does not go on from the one before, as the prefix cache would be of no use.
    """

    before = ""

    def add(self, request: AddRequest, request_id: int, prompt: bytes) -> None:
        text = self.tokenizer.decode(np.frombuffer(prompt, "<i4").tolist(), skip_special_tokens=False)
        num_done = text.count("<|im_start|>tool")
        reply = LAST
        if not text.startswith(self.before):
            reply = "the prompt does not go on from the one before"
        elif num_done < len(STEPS):
            shell = next(name for name in SHELLS if f'"name": "{name}"' in text)
            call = json.dumps({"name": shell, "arguments": {SHELLS[shell]: STEPS[num_done]}})
            reply = f"<think>\nI look.\n</think>\n\nOn it.\n<tool_call>\n{call}\n</tool_call>"
        self.before = text
        self.running[request_id] = Answer(request.params, [*self.encode(reply), self.eos], 0)


def commands(folder: Path) -> dict[str, list[str]]:
    """Each agent's command."""
    return {
        "codex": [str(folder / "codex"), "exec", "--skip-git-repo-check", TASK],
        "claude": [str(folder / "claude"), "-p", TASK, "--allowedTools", "Bash"],
    }


def environment(url: str, home: Path) -> dict[str, str]:
    """The environment in which all agents use the server at `url` and keep their files in `home`."""
    (home / "config.toml").write_text(CODEX_CONFIG.replace("URL", url))
    names = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
    return {
        **os.environ,
        "HOME": str(home),
        "CODEX_HOME": str(home),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **dict.fromkeys(names, "tiny"),
    }


def try_agent(command: list[str]) -> str:
    """Run the agent in a folder with the file; returns what went wrong."""
    with tempfile.TemporaryDirectory() as name:
        home, work = Path(name, "home"), Path(name, "work")
        home.mkdir()
        work.mkdir()
        (work / "a.txt").write_text("old text\n")
        model = make_tool_model(Path(name, "model"), context=CONTEXT)
        with RunningServer(model, worker=[sys.executable, __file__, "--engine"]) as server:
            done = subprocess.run(
                command,
                cwd=work,
                env=environment(server.ready().url(""), home),
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                stdin=subprocess.DEVNULL,
            )
        is_well = (work / "a.txt").read_text() == "new text\n" and LAST in done.stdout
        return "" if is_well else done.stdout + done.stderr


def main(folder: Path) -> int:
    problems = {name: try_agent(command) for name, command in commands(folder).items()}
    for name, problem in problems.items():
        print(f"{name}: {problem}" if problem else f"ok: {name} reads a file, edits it and ends")
    return int(any(problems.values()))


if __name__ == "__main__":
    if sys.argv[1:] == ["--engine"]:
        run_engine(ScriptedEngine)
    else:
        sys.exit(main(Path(sys.argv[1]).resolve()))
