"""The workloads of the offline benchmark: prompts and output lengths, random or read from a file.

Promise: the same settings give the same workload on every machine.
"""

import json
import random
from collections.abc import Callable, Mapping
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from minisgl.benchmark.settings import OfflineBenchSettings
from minisgl.errors import ConfigError

Message = Mapping[str, Any]
Encode = Callable[[str | list[Message]], list[int]]
"""Encodes a text or a conversation to token ids."""


class Item(NamedTuple):
    """One request."""

    prompt_ids: list[int]
    max_tokens: int


def check_offline_settings(settings: OfflineBenchSettings) -> None:
    """Check the settings of the workload.

    Raises:
        ConfigError: a number is out of range.
    """
    for name in ("num_requests", "min_prompt_tokens", "min_output_tokens", "max_output_tokens", "rounds"):
        if getattr(settings, name) < 1:
            raise ConfigError(f"{_flag(name)} must be at least 1, got {getattr(settings, name)}")
    for low, high in (
        ("min_prompt_tokens", "max_prompt_tokens"),
        ("min_output_tokens", "max_output_tokens"),
    ):
        if settings.prompts is None and getattr(settings, low) > getattr(settings, high):
            raise ConfigError(
                f"{_flag(low)} ({getattr(settings, low)}) is above {_flag(high)} ({getattr(settings, high)})"
            )
    if settings.max_token_id < 0:
        raise ConfigError(f"--max-token-id must be at least 0, got {settings.max_token_id}")
    if not 0 <= settings.temperature <= 100:
        raise ConfigError(f"--temperature must be between 0 and 100, got {settings.temperature}")


def random_workload(settings: OfflineBenchSettings) -> list[Item]:
    """Random prompts and lengths, drawn in the order of mini-sglang's benchmark/offline/bench.py: for each
    prompt its length and then its tokens, and after all prompts the output lengths."""
    rng = random.Random(settings.workload_seed)
    prompts = [
        [
            rng.randint(0, settings.max_token_id)
            for _ in range(rng.randint(settings.min_prompt_tokens, settings.max_prompt_tokens))
        ]
        for _ in range(settings.num_requests)
    ]
    low, high = settings.min_output_tokens, settings.max_output_tokens
    return [Item(prompt, rng.randint(low, high)) for prompt in prompts]


def prompts_workload(path: Path, settings: OfflineBenchSettings, encode: Encode) -> list[Item]:
    """Real prompts from a file, repeated in order if --num-requests is larger than their number.

    Raises:
        ConfigError: the file can't be read or has no prompts.
    """
    prompts = [encode(prompt) for prompt in read_prompts(path)]
    return [
        Item(prompt, settings.max_output_tokens) for prompt in islice(cycle(prompts), settings.num_requests)
    ]


def read_prompts(path: Path) -> list[str | list[Message]]:
    """The prompts in a file. Each line of a .jsonl file is an object with "turns", "messages" or "prompt";
    each line of another file is a text.

    Raises:
        ConfigError: the file can't be read, or a line has no prompt.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read --prompts {path}: {error}") from error
    if not lines:
        raise ConfigError(f"--prompts {path} has no prompts")
    if path.suffix != ".jsonl":
        return list(lines)
    return [_prompt_of(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _prompt_of(line: str, where: str) -> str | list[Message]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}") from error
    if isinstance(entry, dict):
        turns, messages, prompt = entry.get("turns"), entry.get("messages"), entry.get("prompt")
        if isinstance(turns, list) and turns and isinstance(turns[0], str):
            return [{"role": "user", "content": turns[0]}]
        if isinstance(messages, list) and messages and all(isinstance(one, dict) for one in messages):
            return messages
        if isinstance(prompt, str) and prompt:
            return prompt
    raise ConfigError(f'{where} needs "turns", "messages" or "prompt"')


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
