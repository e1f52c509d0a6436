"""An engine that says what the prompt tells it to, for checks of what a larger model would choose to do.

A user's message has the replies of its conversation: `[[say]] first [[then]] second [[end]]`. Each request
with this message gets the next one, and after the last the first again. Without a script, the reply is "ok".
The server is the real one; the model's tokenizer and template are the tests' small ones.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "server"))

import numpy as np
from fake_engine import Answer, FakeEngine, run_engine
from running_server import RunningServer
from tool_model import make_tool_model

from minisgl.ipc.messages import AddRequest
from minisgl.ipc.transport import EngineSocket
from minisgl.text.tokenizer import Tokenizer

CONTEXT = 100_000
SCRIPT = re.compile(r"\[\[say\]\] (.*?) \[\[end\]\]", re.DOTALL)


class ScriptedEngine(FakeEngine):
    """Says the next reply of the prompt's last script."""

    def __init__(self, socket: EngineSocket, tokenizer: Tokenizer, close: Callable[[], None]) -> None:
        super().__init__(socket, tokenizer, close)
        self.num_said: Counter[str] = Counter()

    def add(self, request: AddRequest, request_id: int, prompt: bytes) -> None:
        text = self.tokenizer.decode(np.frombuffer(prompt, "<i4").tolist(), skip_special_tokens=False)
        reply = "ok"
        if scripts := SCRIPT.findall(text):
            replies = scripts[-1].split(" [[then]] ")
            reply = replies[self.num_said[scripts[-1]] % len(replies)]
            self.num_said[scripts[-1]] += 1
        self.running[request_id] = Answer(request.params, [*self.encode(reply), self.eos], 0)


def scripted_server(folder: Path) -> RunningServer:
    """A server with this engine; its model, named tiny, is written to `folder`."""
    model = make_tool_model(folder / "tiny", context=CONTEXT)
    return RunningServer(model, worker=[sys.executable, __file__])


if __name__ == "__main__":
    run_engine(ScriptedEngine)
