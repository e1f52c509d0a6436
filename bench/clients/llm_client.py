"""llm, the command-line tool: a model from extra-openai-models.yaml, streamed and whole."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = os.environ["MODEL"]
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "extra-openai-models.yaml").write_text(
        f"- model_id: mine\n  model_name: {MODEL}\n  api_base: {os.environ['BASE_URL']}\n"
    )
    command = [sys.executable, "-m", "llm", "-m", "mine", "-o", "temperature", "0", "-o", "max_tokens", "24"]
    answers = [
        subprocess.run(
            [*command, *more, "Name three colours."],
            env={**os.environ, "LLM_USER_PATH": folder},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for more in ([], ["--no-stream"])
    ]
    assert answers[0].strip()
    assert answers[0] == answers[1]
    print("ok: a prompt, streamed and whole")
