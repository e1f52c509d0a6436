"""The prompts of `minisgl verify`: short ones, a long one, and conversations by the model's own template.

A folder without a tokenizer gets random token ids instead.
"""

import random
from pathlib import Path
from typing import NamedTuple

from minisgl.errors import RequestError
from minisgl.model_config.config import ModelConfig
from minisgl.text.chat_template import ChatTemplate
from minisgl.text.tokenizer import Tokenizer

NEW_TOKENS = 24
"""Greedy tokens of each prompt."""
LONG_TOKENS = 600
LONGEST_TOKENS = 5000
"""A long prompt leaves every sliding window up to this one."""
SHORT = ("The capital of France is", "def fibonacci(n):\n", "1, 2, 3, 4, 5,")
CHATS = (
    [{"role": "user", "content": "What is the capital of Japan?"}],
    [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "Write two sentences about it."},
    ],
)
THINGS = ("river", "engine", "garden", "letter", "window", "bridge", "number", "forest", "market", "song")
DOES = ("follows", "meets", "hides", "counts", "opens", "crosses", "paints", "answers", "keeps")


class Prompt(NamedTuple):
    """A prompt as token ids."""

    kind: str  # "one token", "short", "long" or "chat"
    token_ids: list[int]


def context_needed(config: ModelConfig) -> int:
    """Tokens of context with which the long prompt leaves the model's windows; at most the model's own."""
    return min(config.max_position, _long_tokens(config) + NEW_TOKENS + 8)


def make_prompts(folder: Path, config: ModelConfig, max_context_tokens: int) -> list[Prompt]:
    """The prompts, each with room for NEW_TOKENS behind it.

    Raises:
        ModelError: the folder's tokenizer is broken.
    """
    room = max_context_tokens - NEW_TOKENS
    long = min(_long_tokens(config), room)
    if not (folder / "tokenizer.json").is_file():
        made = [_random_prompt(kind, length, config) for kind, length in RANDOM]
        made.append(_random_prompt("long", long, config))
    else:
        tokenizer = Tokenizer.from_folder(folder)
        texts = [tokenizer.encode(text, True) for text in SHORT]
        made = [Prompt("one token", texts[0][:1]), *(Prompt("short", ids) for ids in texts)]
        made.append(Prompt("long", tokenizer.encode(_long_text(long), True)[:long]))
        made += [Prompt("chat", ids) for ids in _chats(folder, tokenizer)]
    return [prompt for prompt in made if 0 < len(prompt.token_ids) <= room]


RANDOM = (("one token", 1), ("short", 7), ("short", 33), ("short", 90))


def _random_prompt(kind: str, length: int, config: ModelConfig) -> Prompt:
    return Prompt(kind, random.Random(length).choices(range(config.vocab_size), k=length))


def _long_tokens(config: ModelConfig) -> int:
    windows = [window for window in config.windows if 0 < window < LONGEST_TOKENS]
    return max([LONG_TOKENS, *(window + 100 for window in windows)])


def _long_text(num_tokens: int) -> str:
    """Sentences that do not repeat, of at least as many tokens: each has four words or more."""
    draw = random.Random(0).choice
    lines = [
        f"{line}. The {draw(THINGS)} {draw(DOES)} the {draw(THINGS)}." for line in range(num_tokens // 4)
    ]
    return "\n".join(lines)


def _chats(folder: Path, tokenizer: Tokenizer) -> list[list[int]]:
    template = ChatTemplate.from_folder(folder, tokenizer)
    if not template.is_usable:
        return []
    return [ids for messages in CHATS if (ids := _chat(messages, template, tokenizer))]


def _chat(messages: list[dict[str, str]], template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
    """The prompt; empty if the template refuses the conversation, which the model can't serve then."""
    try:
        return tokenizer.encode(template.render(messages, True), False)
    except RequestError:
        return []
