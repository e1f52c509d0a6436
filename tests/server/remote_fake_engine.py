"""The fake engine as one that connects to a server (--engine-listen).

Arguments: the server's address, the model folder, and JSON of what it says of itself otherwise: {"secret",
"version", "facts", "leave_s"}. It comes back as a new life when the server ends one. At SIGTERM it leaves,
with "leave_s" seconds for its requests.
"""

import json
import os
import signal
import sys
import uuid
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine

from minisgl import __version__
from minisgl.config.model_facts import server_facts
from minisgl.errors import ConfigError
from minisgl.ipc.door_messages import Hello, Leaving
from minisgl.ipc.messages import Ready
from minisgl.ipc.server_line import ServerDoor, ServerLine, ServerLostError
from minisgl.text.tokenizer import Tokenizer

SECRET = "a secret of the tests"


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run(endpoint: str, folder: Path, odd: dict[str, Any]) -> None:
    knobs = json.loads((folder / "fake.json").read_text())
    tokenizer = Tokenizer.from_folder(folder)
    facts = {**server_facts(folder), "--dtype": "float32", **odd.get("facts", {})}
    door = ServerDoor(endpoint, odd.get("secret", SECRET), say)
    is_leaving = False

    def leave(line: ServerLine) -> None:
        nonlocal is_leaving
        is_leaving = True
        line.send(Leaving(odd.get("leave_s", 60.0)))

    while not is_leaving:
        life = uuid.uuid4().hex
        line = door.enter(Hello(odd.get("version", __version__), life, "here", os.getpid(), facts))
        say("in")
        engine = FakeEngine(line, tokenizer, line.close)
        engine.pace_ms = knobs.get("pace_ms", 0)
        signal.signal(signal.SIGUSR1, lambda *_, engine=engine: engine.go_from_now_on())
        signal.signal(signal.SIGTERM, lambda *_, line=line: leave(line))
        line.send(Ready(knobs["context"], 100, 16, 8, "fake", {"import": 12.0}))
        try:
            engine.run()
        except ServerLostError as error:
            say(f"out: {error}")
        line.close()


if __name__ == "__main__":
    try:
        run(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
    except ConfigError as error:
        say(f"refused: {error}")
        sys.exit(2)
