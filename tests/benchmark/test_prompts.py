"""Made-up prompts: reproducible, of exact length, equal only where they must be."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from minisgl.benchmark.load.prompts import Draw, as_text, as_token_ids, codes_of, trace_draws
from minisgl.benchmark.load.traces import TraceRequest
from minisgl.text.tokenizer import Tokenizer
from minisgl.weights.sources import resolve_model_folder


def draw_codes(key: tuple[int, ...], num_tokens: int) -> np.ndarray:
    return codes_of([Draw(key, num_tokens)])


REQUEST = TraceRequest(
    arrival_s=0, num_prompt_tokens=40, num_output_tokens=1, block_ids=(5, 6, 7), block_tokens=16
)


@pytest.mark.parametrize(("vocab_size", "lowest"), [(49152, 1000), (2001, 1000), (1999, 999), (2, 1)])
def test_ids_stay_inside_the_vocabulary_and_off_its_start(vocab_size: int, lowest: int) -> None:
    ids = as_token_ids(draw_codes((1, 2), 10_001), vocab_size)
    assert len(ids) == 10_001
    assert lowest <= ids.min() <= ids.max() < vocab_size


def test_a_longer_draw_begins_like_a_shorter_one_and_other_keys_differ() -> None:
    assert np.array_equal(draw_codes((4, 5), 100)[:30], draw_codes((4, 5), 30))
    keys = [(4, 5), (5, 4), (4,), (5,), (0, 4, 5), (4, 5, 0), (4, -5)]
    assert len({tuple(draw_codes(key, 8).tolist()) for key in keys}) == len(keys)


def test_the_numbers_are_splitmix64s_from_a_state_mixed_of_the_key() -> None:
    mask, gamma = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    state = 0
    for number in (7, -2):
        state = mix((state + number + gamma) & mask)
    expected = []
    for _ in range(5):
        state = (state + gamma) & mask
        expected.append(mix(state))
    assert draw_codes((7, -2), 5).tolist() == expected


def trace_codes(request: TraceRequest, index: int, seed: int = 0) -> np.ndarray:
    return codes_of(trace_draws(request, index), (seed,))


def test_draws_behind_one_another_are_what_they_are_alone() -> None:
    draws = [Draw((1,), 3), Draw((2, 9), 1), Draw((3,), 5)]
    alone = [codes_of([draw], (7,)) for draw in draws]
    assert np.array_equal(codes_of(draws, (7,)), np.concatenate(alone))
    assert np.array_equal(codes_of([Draw((7, 1), 3)]), alone[0])


def test_equal_blocks_have_equal_tokens_and_cut_blocks_begin_like_whole_ones() -> None:
    other = replace(REQUEST, block_ids=(5, 9, 7), num_prompt_tokens=48)
    one, two = trace_codes(REQUEST, 0), trace_codes(other, 1)
    assert (len(one), len(two)) == (40, 48)
    assert np.array_equal(one[:16], two[:16])
    assert not np.any(one[16:32] == two[16:32])
    assert np.array_equal(one[32:], two[32:40])


def test_what_no_block_covers_is_the_requests_own() -> None:
    bare = replace(REQUEST, block_ids=(5,))
    one, two = trace_codes(bare, 0), trace_codes(bare, 1)
    assert len(one) == len(two) == 40
    assert np.array_equal(one[:16], two[:16])
    assert not np.any(one[16:] == two[16:])


def test_another_seed_shares_nothing() -> None:
    assert not np.any(trace_codes(REQUEST, 0) == trace_codes(REQUEST, 0, 1))


def test_texts_have_one_token_per_word_and_join_without_a_seam() -> None:
    tokenizer = Tokenizer.from_folder(Path(resolve_model_folder("smollm2-135m")))
    first, second = as_text(draw_codes((1,), 333)), as_text(draw_codes((2,), 44))
    assert len(tokenizer.encode(first, add_special_tokens=False)) == 333
    assert len(tokenizer.encode(first + second, add_special_tokens=False)) == 377


def test_a_dummy_models_tokenizer_has_text_for_nearly_every_id_and_knows_the_words(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "bench" / "dummy_model.py"
    subprocess.run(
        [sys.executable, str(script), "smollm2-135m", str(tmp_path)], check=True, stdout=subprocess.PIPE
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    vocab_size = json.loads((tmp_path / "config.json").read_text())["vocab_size"]
    assert tokenizer.vocab_size == vocab_size
    texts = [tokenizer.token_bytes(token_id) for token_id in range(256, vocab_size)]
    assert all(text.isascii() and len(text) > 1 for text in texts)
    assert len(set(texts)) == vocab_size - 256
    assert len(tokenizer.encode(as_text(draw_codes((1,), 333)), add_special_tokens=False)) == 333
