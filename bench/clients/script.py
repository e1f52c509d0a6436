"""How a client's checks tell the scripted engine (scripted_engine.py) what to say."""

import json
import os
from typing import Any

URL = os.environ["SCRIPTED_URL"]
MODEL = "tiny"


def say(*replies: str) -> str:
    """A user's message; `replies` are the answers to the requests with it, in this order."""
    return f"[[say]] {' [[then]] '.join(replies)} [[end]]"


def calls(*named: tuple[str, Any], before: str = "") -> str:
    """A reply with these calls: names and arguments."""
    texts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in named]
    return before + "".join(f"\n<tool_call>\n{text}\n</tool_call>" for text in texts)
