"""Keeps special tokens that stand in the text of messages from becoming special tokens of the prompt.

Promise: the prompt has the special tokens of the chat template and no others, and the model still reads the
text of the messages unchanged. Before the template sees them, such texts are replaced by placeholders that
nobody can guess; `Tokenizer.encode` puts the texts back, as ordinary text.
"""

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any


def special_tokens_pattern(texts: Collection[str]) -> re.Pattern[str] | None:
    """A pattern that finds any of these texts, the longest first; None: there are none."""
    found = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, found))) if found else None


def hide_special_tokens(
    messages: Sequence[Mapping[str, Any]], pattern: re.Pattern[str]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Copies of messages with placeholders for all that `pattern` finds; and placeholder -> text."""
    key, texts = f"x{secrets.token_hex(12)}x", dict[str, str]()

    def replace(found: re.Match[str]) -> str:
        return texts.setdefault(found[0], f"{key}{len(texts)}x")

    def hidden(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(replace, value)
        if isinstance(value, Mapping):
            return {name: hidden(inner) for name, inner in value.items()}
        return [hidden(inner) for inner in value] if isinstance(value, list) else value

    return [hidden(message) for message in messages], {hole: text for text, hole in texts.items()}


def restored(text: str, literals: Mapping[str, str]) -> str:
    """The text with what its placeholders stand for."""
    for placeholder, literal in literals.items():
        text = text.replace(placeholder, literal)
    return text
