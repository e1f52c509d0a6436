"""An engine that says what a test of the page needs, at the pace it needs; otherwise as fake_engine.py.

@flow RATE COUNT   COUNT tokens of Markdown at RATE tokens a second
"""

import time
from typing import Any

import numpy as np
from fake_engine import FakeEngine

from minisgl.ipc.messages import AddRequest

MARKDOWN = """## A heading

A paragraph with *emphasis*, **strength**, `code`, and a [link](https://example.org/).

- one thing
- another thing, with a longer line of text that may have to be broken on a small screen
  1. nested
  2. twice

```python
def add(one: int, other: int) -> int:
    return one + other  # a comment
```

| name | value |
|:-----|------:|
| a    |     1 |
| b    |    22 |

> A quotation.

"""


class ScriptedEngine(FakeEngine):
    """The fake engine with answers that flow."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.flows: dict[int, tuple[int, float]] = {}  # request -> (tokens a second, when it began)

    def patience_ms(self) -> int:
        flows = self.flows.keys() & self.running.keys()
        return 2 if flows else super().patience_ms()

    def add(self, request: AddRequest, request_id: int, prompt: bytes) -> None:
        super().add(request, request_id, prompt)
        word, text = self.command(np.frombuffer(prompt, "<i4").tolist())
        if word == "flow":
            rate, count = map(int, text.split())
            whole = self.encode(MARKDOWN)
            token_ids = (whole * (count // len(whole) + 1))[:count]
            self.running[request_id].token_ids = [*token_ids, self.eos]
            self.flows[request_id] = (rate, time.monotonic())

    def due(self, request_id: int, most: int) -> int:
        if request_id not in self.flows or request_id not in self.running:
            return most
        rate, began_at = self.flows[request_id]
        return int(rate * (time.monotonic() - began_at)) - self.running[request_id].num_given
