# pyright: reportMissingImports=false
"""What JSON Schema can't say of a body and the server refuses: such bodies are not sent as allowed ones.

Loaded by schemathesis, in its own environment.
"""

import json
from typing import Any, TypeGuard

import schemathesis

CONTEXT_BYTES = 900
"""Fits in the context of the model in schema.py, whose tokens may be single bytes."""
BAD_WORD_BYTES = 15
"""A word of so many bytes has, with a space before it, at most 16 tokens."""


@schemathesis.hook
def filter_body(context: Any, body: Any) -> bool:
    """Whether to send it."""
    if not isinstance(body, dict):
        return True
    least, most = body.get("min_tokens"), body.get("max_completion_tokens") or body.get("max_tokens")
    if is_number(least) and is_number(most) and least > most:
        return False
    allowed, stops = body.get("allowed_token_ids"), body.get("stop_token_ids")
    if least and isinstance(allowed, list) and all(ends_a_reply(one, stops) for one in allowed):
        return False  # min_tokens bans what ends a reply, and nothing else is allowed
    words = body.get("bad_words")
    if isinstance(words, list):
        for word in words:
            if isinstance(word, str) and len(word.encode("utf-8", "replace")) > BAD_WORD_BYTES:
                return False
    texts = [body.get("prompt"), body.get("messages")]
    return all(len(json.dumps(text, ensure_ascii=False, default=str)) < CONTEXT_BYTES for text in texts)


def ends_a_reply(token_id: Any, stops: Any) -> bool:
    """Even ids do in the model of schema.py."""
    is_stop = isinstance(stops, list) and token_id in stops
    return is_stop or (is_number(token_id) and token_id % 2 == 0)


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
