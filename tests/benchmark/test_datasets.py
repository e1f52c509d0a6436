"""Datasets and arrivals: exact lengths, what is shared, what a conversation remembers, what is refused."""

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from minisgl.benchmark.load.arrivals import constant_arrivals, parse_counts, parse_rates, poisson_arrivals
from minisgl.benchmark.load.datasets import (
    Conversation,
    Dialogue,
    Lengths,
    multi_turn_prompts,
    random_prompts,
    read_dataset,
    shared_prefix_prompts,
    warm_up_prompts,
)
from minisgl.errors import ConfigError

TRACES = Path(__file__).resolve().parent.parent / "data" / "traces"
LENGTHS = Lengths((5, 40), (2, 9))


def ids_of(conversation: Conversation, salt: tuple[int, ...] = (0,), vocab_size: int = 5000) -> list[int]:
    prompt = Dialogue("tokens", salt, vocab_size).next_prompt(conversation.turns[0])
    assert isinstance(prompt, list)
    return prompt  # type: ignore[return-value]  # token ids, not messages, in this form


def test_random_prompts_have_the_lengths_they_say_and_share_nothing() -> None:
    conversations = random_prompts(300, LENGTHS, seed=3)
    turns = [conversation.turns[0] for conversation in conversations]
    prompts = [ids_of(conversation) for conversation in conversations]
    assert [len(prompt) for prompt in prompts] == [turn.num_prompt_tokens for turn in turns]
    assert {turn.num_prompt_tokens for turn in turns} == set(range(5, 41))
    assert {turn.num_output_tokens for turn in turns} == set(range(2, 10))
    assert len({tuple(prompt[:3]) for prompt in prompts}) == 300


def test_equal_seeds_give_equal_prompts_and_others_others() -> None:
    assert random_prompts(9, LENGTHS, seed=1) == random_prompts(9, LENGTHS, seed=1)
    assert random_prompts(9, LENGTHS, seed=1) != random_prompts(9, LENGTHS, seed=2)


def test_another_salt_makes_other_tokens_of_the_same_lengths() -> None:
    conversation = random_prompts(1, LENGTHS, seed=0)[0]
    one, two = ids_of(conversation, (0, 0)), ids_of(conversation, (0, 1))
    assert len(one) == len(two)
    assert not set(zip(one, two, strict=True)) & {(token, token) for token in one}


def test_shared_prefixes_are_those_of_the_group_and_nothing_more() -> None:
    conversations = shared_prefix_prompts(12, LENGTHS, 0, num_groups=3, prefix_tokens=50)
    prompts = [ids_of(conversation) for conversation in conversations]
    assert all(55 <= len(prompt) <= 90 for prompt in prompts)
    for first, one in enumerate(prompts):
        for second, other in enumerate(prompts[:first]):
            same = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), 99)
            assert same == (50 if first % 3 == second % 3 else 0)


def test_the_prompt_of_a_turn_holds_all_turns_and_answers_before_it() -> None:
    turns = multi_turn_prompts(1, LENGTHS, 0, num_turns=3)[0].turns
    dialogue = Dialogue("text", (0,), 5000)
    first = dialogue.next_prompt(turns[0])
    dialogue.add_answer(" ANSWER ONE")
    second = dialogue.next_prompt(turns[1])
    dialogue.add_answer(" ANSWER TWO")
    third = dialogue.next_prompt(turns[2])
    assert isinstance(first, str)
    assert isinstance(second, str)
    assert isinstance(third, str)
    assert second.startswith(first + " ANSWER ONE ")
    assert third.startswith(second + " ANSWER TWO ")
    assert len(first.split()) == turns[0].num_prompt_tokens
    assert len(third.removeprefix(second + " ANSWER TWO").split()) == turns[2].num_prompt_tokens


def test_recorded_questions_begin_a_line_of_the_text(tmp_path: Path) -> None:
    turns = read_dataset(sharegpt(tmp_path), LENGTHS, 0)[0].turns
    dialogue = Dialogue("text", (0,), 5000)
    dialogue.next_prompt(turns[0])
    dialogue.add_answer(" a b c")
    assert dialogue.next_prompt(turns[1]) == "one two a b c\nthree"


def test_a_chat_is_sent_as_messages_in_turns() -> None:
    turns = multi_turn_prompts(1, LENGTHS, 0, num_turns=2)[0].turns
    dialogue = Dialogue("chat", (0,), 5000)
    dialogue.next_prompt(turns[0])
    dialogue.add_answer("well")
    messages = dialogue.next_prompt(turns[1])
    assert [(one["role"], one["content"] == "well") for one in messages] == [  # type: ignore[index]
        ("user", False),
        ("assistant", True),
        ("user", False),
    ]


def test_a_trace_keeps_lengths_arrivals_and_shared_blocks() -> None:
    path = TRACES / "mooncake.jsonl"
    conversations = read_dataset(path, LENGTHS, 0, length_scale=Fraction(1, 8))
    prompts = [ids_of(conversation) for conversation in conversations]
    assert [len(prompt) for prompt in prompts] == [138, 128, 64]
    assert [one.turns[0].num_output_tokens for one in conversations] == [5, 1, 2]
    assert [one.arrival_s for one in conversations] == [0.0, pytest.approx(0.1), pytest.approx(0.25)]
    assert prompts[0][:64] == prompts[1][:64] == prompts[2]
    assert prompts[0][64:128] != prompts[1][64:]
    assert len(read_dataset(path, LENGTHS, 0, limit=2)) == 2


def sharegpt(tmp_path: Path, lines: bool = False) -> Path:
    said = [
        {"from": "system", "value": "be good"},
        {"from": "human", "value": "one two"},
        {"from": "gpt", "value": "a b c"},
        {"from": "human", "value": "three"},
        {"from": "gpt", "value": "d"},
        {"from": "human", "value": "four"},
    ]
    entries = [
        {"id": "x", "conversations": said},
        {"id": "skipped", "conversations": [{"from": "gpt", "value": "I begin"}]},
        {
            "id": "y",
            "conversations": [{"role": "user", "content": "hi"}, {"from": "human", "value": "again"}],
        },
    ]
    path = tmp_path / "sharegpt.json"
    path.write_text("\n".join(map(json.dumps, entries)) if lines else json.dumps(entries))
    return path


@pytest.mark.parametrize("lines", [False, True])
def test_sharegpt_conversations_with_recorded_lengths(tmp_path: Path, lines: bool) -> None:
    path = sharegpt(tmp_path, lines)
    first, second = read_dataset(
        path, Lengths((1, 1), (77, 77)), 0, count_tokens=lambda said: len(said.split())
    )
    assert [(turn.prompt, turn.num_output_tokens) for turn in first.turns] == [
        ("one two", 3),
        ("three", 1),
        ("four", 77),
    ]
    assert [turn.prompt for turn in second.turns] == ["hi"]
    drawn = read_dataset(path, LENGTHS, 0, max_turns=1, limit=1)
    assert [len(one.turns) for one in drawn] == [1]
    assert 2 <= drawn[0].turns[0].num_output_tokens <= 9


def test_mt_bench_questions_in_both_spellings(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(
        '{"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]}\n\n'
        '{"prompt_id": 1, "prompt": ["Only one."]}\n'
    )
    first, second = read_dataset(path, LENGTHS, 0)
    assert [turn.prompt for turn in first.turns] == ["Write.", "Rewrite."]
    assert [turn.prompt for turn in second.turns] == ["Only one."]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "none of the traces"),
        (b"[]", "no conversation"),
        (b"[1, 2", "not valid JSON"),
        (b'[{"conversations": []}]', "no conversation"),
        (b'{"conversations": [{"from": "human", "value": "hi"}]}\n{"conv', "not valid JSON"),
        (b"\x00\x01", "none of the traces"),
        (b"\xff\xff", "no text file"),
    ],
)
def test_files_that_are_no_dataset_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_dataset(path, LENGTHS, 0)


def test_warm_up_prompts_are_as_long_but_have_nothing_in_common() -> None:
    conversations = random_prompts(5, LENGTHS, seed=0)
    warm = warm_up_prompts(conversations, 3)
    assert [len(ids_of(one)) for one in warm] == [len(ids_of(one)) for one in conversations[:3]]
    assert not {tuple(ids_of(one)[:4]) for one in warm} & {tuple(ids_of(one)[:4]) for one in conversations}


def test_poisson_gaps_are_exponential_with_the_rate_as_their_scale() -> None:
    times = poisson_arrivals(20_001, 8.0, seed=0)
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.02)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.03)
    assert np.mean(gaps > 1 / 8) == pytest.approx(math.exp(-1), abs=0.01)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.02


def test_poisson_arrivals_repeat_with_the_seed_and_stretch_with_the_rate() -> None:
    assert poisson_arrivals(50, 4.0, seed=1) == poisson_arrivals(50, 4.0, seed=1)
    assert poisson_arrivals(50, 4.0, seed=1) != poisson_arrivals(50, 4.0, seed=2)
    assert poisson_arrivals(50, 8.0, seed=1) == pytest.approx([at / 2 for at in poisson_arrivals(50, 4.0, 1)])


def test_constant_and_infinite_rates() -> None:
    assert constant_arrivals(3, 4.0) == [0.0, 0.25, 0.5]
    assert constant_arrivals(2, math.inf) == poisson_arrivals(2, math.inf, 0) == [0.0, 0.0]


def test_lists_of_rates_and_counts() -> None:
    assert parse_rates("0.5, 2,inf", "--x") == [0.5, 2.0, math.inf]
    assert parse_counts("1,16", "--x") == [1, 16]
    for text in ("", "0", "-1", "nan", "1,,2", "x"):
        with pytest.raises(ConfigError, match="--x must be"):
            parse_rates(text, "--x")
    for text in ("1.5", "inf", "0"):
        with pytest.raises(ConfigError, match="--x must be"):
            parse_counts(text, "--x")
