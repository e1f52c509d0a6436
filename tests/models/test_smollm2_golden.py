"""The embedded default model, converted and run by us, against transformers' recorded greedy output."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import PagedRunner, load_ours
from transformers import AutoTokenizer

from minisgl.errors import ModelError
from minisgl.models.decoder import Decoder
from minisgl.weights.sources import resolve_model_folder

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "smollm2_golden.json").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = GOLDEN["cases"]


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return resolve_model_folder("smollm2-135m")
    except ModelError as error:
        pytest.skip(f"the embedded model is not on this machine and can't be fetched: {error}")


@pytest.fixture(scope="module")
def model(folder: Path) -> Decoder:
    return load_ours(folder)


def test_the_tokenizer_renders_and_encodes_the_recorded_prompts(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for case in CASES:
        if "messages" in case:
            text = tokenizer.apply_chat_template(case["messages"], tokenize=False, add_generation_prompt=True)
            assert text == case["prompt_text"]
        assert tokenizer(case["prompt_text"]).input_ids == case["prompt_ids"]
        recorded = case["float32"]
        assert tokenizer.decode(recorded["ids"], skip_special_tokens=True) == recorded["text"]


def test_every_recorded_token_is_the_likeliest_in_one_ragged_prefill(model: Decoder) -> None:
    runner = PagedRunner(model, num_rows=len(CASES), page_size=16, max_tokens=160, seed=0)
    fed = [case["prompt_ids"] + case["float32"]["ids"][:-1] for case in CASES]
    logits = runner.feed(list(enumerate(fed)))
    for case, rows in zip(CASES, logits.split([len(ids) for ids in fed]), strict=True):
        expected = case["float32"]
        answers = rows[len(case["prompt_ids"]) - 1 :].log_softmax(-1)
        assert answers.argmax(-1).tolist() == expected["ids"]
        recorded = torch.tensor(expected["logprobs"])
        assert (answers.max(-1).values - recorded).abs().max() < 2e-4  # they were rounded to 4 digits


def test_greedy_decoding_in_a_batch_gives_the_recorded_tokens(model: Decoder) -> None:
    runner = PagedRunner(model, num_rows=len(CASES), page_size=16, max_tokens=160, seed=1)
    rows = [(row, case["prompt_ids"]) for row, case in enumerate(CASES)]
    generated: list[list[int]] = [[] for _ in CASES]
    while rows:
        chosen = runner.feed(rows, last_only=True).argmax(-1).tolist()
        for (row, _), token in zip(rows, chosen, strict=True):
            generated[row].append(token)
        rows = [
            (row, [generated[row][-1]])
            for row, _ in rows
            if len(generated[row]) < len(CASES[row]["float32"]["ids"])
        ]
    assert generated == [case["float32"]["ids"] for case in CASES]
