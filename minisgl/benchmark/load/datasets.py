"""Datasets of `minisgl bench serve`: conversations of one or several turns, synthetic or from a file.

Promise: torch-free; equal settings give equal conversations; a synthetic turn has exactly
`num_prompt_tokens` tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from minisgl.benchmark.load.prompts import Draw, as_text, as_token_ids, codes_of, trace_draws
from minisgl.benchmark.load.traces import read_trace, scale_trace
from minisgl.errors import ConfigError

SYNTHETIC = ("random", "shared-prefix", "multi-turn")
DEFAULT_REQUESTS = 256
DEFAULT_TURNS = 3
CHARACTERS_PER_TOKEN = 4
"""Roughly, in English text; used only for the lengths of warm-up requests."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One user message of a conversation, and the length of its answer."""

    prompt: tuple[Draw, ...] | str
    num_output_tokens: int

    @property
    def num_prompt_tokens(self) -> int | None:
        """Tokens that the turn adds to the prompt; None for a text from a file."""
        return None if isinstance(self.prompt, str) else sum(draw.num_tokens for draw in self.prompt)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Consecutive turns. The prompt of a turn contains all earlier turns and their answers."""

    turns: tuple[Turn, ...]
    arrival_s: float | None = None
    """When the first turn arrived, in a dataset that records it."""


class Lengths(NamedTuple):
    """(smallest, largest) of uniform distributions."""

    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]


class Dialogue:
    """Builds the prompts of one conversation while it goes on.

    Args:
        form: "tokens" for lists of token ids, "text", or "chat" for messages.
        salt: another salt turns the same draws into other tokens.
        vocab_size: token ids are below this.
    """

    def __init__(self, form: str, salt: Sequence[int], vocab_size: int) -> None:
        self._form = form
        self._salt = salt
        self._vocab_size = vocab_size
        self._said: list[str] = []  # alternately by the user and the server

    def next_prompt(self, turn: Turn) -> str | list[int] | list[dict[str, str]]:
        """Add a turn and return the whole prompt, earlier turns included."""
        if self._form == "tokens":
            assert not self._said
            assert not isinstance(turn.prompt, str)
            return as_token_ids(codes_of(turn.prompt, self._salt), self._vocab_size).tolist()
        if not isinstance(turn.prompt, str):
            self._said.append(as_text(codes_of(turn.prompt, self._salt)))
        elif self._form == "text" and self._said:
            self._said.append(f"\n{turn.prompt}")
        else:
            self._said.append(turn.prompt)
        if self._form == "text":
            return "".join(self._said)
        roles = ("user", "assistant")
        return [{"role": roles[place % 2], "content": said} for place, said in enumerate(self._said)]

    def add_answer(self, answer: str) -> None:
        """Add the server's answer, which all later prompts contain."""
        self._said.append(answer)


def random_prompts(num_requests: int, lengths: Lengths, seed: int) -> list[Conversation]:
    """Prompts that share no prefix."""
    return _synthetic(num_requests, 1, lengths, seed)


def shared_prefix_prompts(
    num_requests: int, lengths: Lengths, seed: int, num_groups: int, prefix_tokens: int
) -> list[Conversation]:
    """Prompts in groups that share a prefix; `lengths` gives the tokens after the prefix."""
    prefixes = [(Draw((4, group), prefix_tokens),) for group in range(num_groups)]
    return _synthetic(num_requests, 1, lengths, seed, prefixes)


def multi_turn_prompts(
    num_conversations: int, lengths: Lengths, seed: int, num_turns: int
) -> list[Conversation]:
    """Conversations of `num_turns` turns; `lengths` gives the tokens of each turn and answer."""
    return _synthetic(num_conversations, num_turns, lengths, seed)


def read_dataset(
    path: Path,
    lengths: Lengths,
    seed: int,
    *,
    limit: int | None = None,
    max_turns: int | None = None,
    length_scale: Fraction = Fraction(1),
    count_tokens: Callable[[str], int] | None = None,
) -> list[Conversation]:
    """The first `limit` conversations in a file. The file's content tells its format:

    - a trace (`traces.py`): arrivals as recorded, lengths as recorded times `length_scale`
    - ShareGPT's form, JSON array or lines of {"conversations": [{"from": "human", "value": ...}, ...]}:
      answers as long as recorded when `count_tokens` is given, otherwise as `lengths` says
    - MT-bench's form, JSON lines of {"turns": [...]} or {"prompt": [...]}: answers as `lengths` says

    Raises:
        ConfigError: the file can't be read, has none of these formats, or its lengths can't be scaled.
    """
    texts = _read_texts(path)
    if texts is None:
        requests = scale_trace(read_trace(path, limit=limit), length_scale=length_scale)
        return [
            Conversation(
                turns=(
                    Turn(prompt=trace_draws(request, place), num_output_tokens=request.num_output_tokens),
                ),
                arrival_s=request.arrival_s,
            )
            for place, request in enumerate(requests)
        ]
    if length_scale != 1:
        raise ConfigError(f"--length-scale needs a trace, {path} is none")
    texts = [exchanges[:max_turns] for exchanges in texts][:limit]
    drawn = iter(_uniform(lengths.output_tokens, sum(map(len, texts)), (seed, 1)))

    def answer_tokens(answer: str | None) -> int:
        by_chance = next(drawn)
        return by_chance if answer is None or count_tokens is None else max(1, count_tokens(answer))

    return [
        Conversation(
            turns=tuple(
                Turn(prompt=one.question, num_output_tokens=answer_tokens(one.answer)) for one in exchanges
            )
        )
        for exchanges in texts
    ]


def warm_up_prompts(conversations: Sequence[Conversation], num: int) -> list[Conversation]:
    """Synthetic requests as long as the first turns of the first `num` conversations, with other tokens."""
    found = []
    for place, conversation in enumerate(conversations[:num]):
        first = conversation.turns[0]
        num_tokens = first.num_prompt_tokens or len(str(first.prompt)) // CHARACTERS_PER_TOKEN + 1
        turn = Turn(prompt=(Draw((5, place), num_tokens),), num_output_tokens=first.num_output_tokens)
        found.append(Conversation(turns=(turn,)))
    return found


def _synthetic(
    num_conversations: int,
    num_turns: int,
    lengths: Lengths,
    seed: int,
    prefixes: Sequence[tuple[Draw, ...]] = ((),),
) -> list[Conversation]:
    """Synthetic conversations; conversation i begins with prefix i modulo the number of prefixes."""
    inputs = iter(_uniform(lengths.prompt_tokens, num_conversations * num_turns, (seed, 0)))
    outputs = iter(_uniform(lengths.output_tokens, num_conversations * num_turns, (seed, 1)))

    def turn(place: int, number: int) -> Turn:
        prefix = prefixes[place % len(prefixes)] if number == 0 else ()
        own = Draw((3, place, number), next(inputs))
        return Turn(prompt=(*prefix, own), num_output_tokens=next(outputs))

    return [
        Conversation(turns=tuple(turn(place, number) for number in range(num_turns)))
        for place in range(num_conversations)
    ]


def _uniform(bounds: tuple[int, int], num: int, seed: Sequence[int]) -> list[int]:
    """`num` integers, uniform from bounds[0] to bounds[1]."""
    return np.random.default_rng(tuple(seed)).integers(bounds[0], bounds[1] + 1, num).tolist()


class Exchange(NamedTuple):
    question: str
    answer: str | None  # None: not recorded


def _read_texts(path: Path) -> list[list[Exchange]] | None:
    """The conversations in a file of texts; None where the file has another format."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"can't read the dataset {path}: {error.strerror}") from None
    try:
        if content.lstrip()[:1] == b"[":
            entries = msgspec.json.decode(content)
        else:
            first = msgspec.json.decode(content.lstrip().partition(b"\n")[0])
            if not {"conversations", "turns", "prompt"} & set(first):
                return None
            entries = [msgspec.json.decode(line) for line in content.splitlines() if line.strip()]
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError) as error:
        if content.lstrip()[:1] == b"[" or b'"conversations"' in content[:100_000]:
            raise ConfigError(f"the dataset {path} is not valid JSON: {error}") from None
        return None
    texts = [_exchanges(entry) for entry in entries if isinstance(entry, dict)]
    texts = [exchanges for exchanges in texts if exchanges]
    if not texts:
        raise ConfigError(
            f"the dataset {path} has no conversation that begins with a user's text; it must be a trace, or "
            "have ShareGPT's or MT-bench's form (docs/benchmarks.md)"
        )
    return texts


def _exchanges(entry: dict[str, Any]) -> list[Exchange]:
    """Questions and answers of one entry, up to the first message that is out of order."""
    said = entry.get("conversations")
    if not isinstance(said, list):
        questions = entry.get("turns", entry.get("prompt"))
        questions = [questions] if isinstance(questions, str) else questions
        kept = questions if isinstance(questions, list) else []
        return [Exchange(question, None) for question in kept if isinstance(question, str) and question]
    found: list[Exchange] = []
    is_answered = True
    for one in said:
        one = one if isinstance(one, dict) else {}
        speaker, text = one.get("from", one.get("role")), one.get("value", one.get("content"))
        if not isinstance(text, str):
            break
        if speaker == "system" and not found:
            continue
        if speaker in ("human", "user") and is_answered and text:
            found.append(Exchange(text, None))
        elif speaker in ("gpt", "assistant") and not is_answered:
            found[-1] = Exchange(found[-1].question, text)
        else:
            break
        is_answered = not is_answered
    return found
