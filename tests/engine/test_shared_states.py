"""Requests that come together on a model with linear attention share states of prompts, and no answers."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_variants import DELTA
from tiny_models import VOCAB_SIZE, random_model

from minisgl.config import EngineConfig
from minisgl.engine.engine import Engine
from minisgl.engine.start.build import build_engine
from minisgl.ipc.messages import AddRequest
from minisgl.request import SamplingParams

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, "max_context_tokens": 480}
PARAMS = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    random_model(seed=3, family="qwen3_5_text", **DELTA).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Engine]:
    engine = engine_for(folder, prefix_cache=False, overlap=False)
    yield engine
    engine.close()


def engine_for(folder: Path, **settings: Any) -> Engine:
    config = EngineConfig(model=str(folder), **SETTINGS, num_pages=400, page_size=16, **settings)
    return build_engine(config, folder, lambda name, duration_ms: None)


def call(request_id: int, prompt: list[int], seeds: tuple[int, ...]) -> AddRequest:
    ids = np.asarray(prompt, "<i4").tobytes()
    return AddRequest(request_id, ids, PARAMS, num_choices=len(seeds), seeds=seeds)


def serve(engine: Engine, calls: list[AddRequest]) -> tuple[dict[int, list[int]], int]:
    """The tokens of all requests, and the prompt tokens that were computed."""
    got: dict[int, list[int]] = {}
    num_computed = 0
    launch = engine.runner.launch

    def counted(plan: Any) -> Any:
        nonlocal num_computed
        num_computed += sum(chunk.num_new_tokens for chunk in plan.chunks)
        return launch(plan)

    engine.runner.launch = counted
    for one in calls:
        engine.add(one)
    while engine.has_work:
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.token_ids)
    engine.runner.launch = launch
    engine.check_at_idle()
    return got, num_computed


@pytest.mark.parametrize("overlap", [False, True])
def test_sampled_choices_compute_their_prompt_once_and_answer_as_alone(
    folder: Path, alone: Engine, overlap: bool
) -> None:
    prompt = random.Random(1).choices(range(3, VOCAB_SIZE), k=400)
    seeds = tuple(range(70, 78))
    engine = engine_for(folder, overlap=overlap)
    got, num_computed = serve(engine, [call(0, prompt, seeds)])
    engine.close()
    assert num_computed == 384 + 8 * 16
    for choice, seed in enumerate(seeds):
        expected, _ = serve(alone, [call(0, prompt, (seed,))])
        assert got[choice] == expected[0]
    assert len({tuple(tokens) for tokens in got.values()}) == 8


@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_with_one_beginning_compute_it_once_and_answer_as_alone(
    folder: Path, alone: Engine, overlap: bool
) -> None:
    source = random.Random(2)
    system = source.choices(range(3, VOCAB_SIZE), k=320)
    calls = [
        call(number, [*system, 3 + number, *source.choices(range(3, VOCAB_SIZE), k=139)], (50 + number,))
        for number in range(8)
    ]
    engine = engine_for(folder, overlap=overlap)
    got, num_computed = serve(engine, calls)
    engine.close()
    assert num_computed == 320 + 8 * 140
    for one in calls:
        for choice, seed in enumerate(one.seeds):
            prompt = np.frombuffer(one.prompt_ids, "<i4").tolist()
            expected, _ = serve(alone, [call(0, prompt, (seed,))])
            assert got[one.request_id + choice] == expected[0]
