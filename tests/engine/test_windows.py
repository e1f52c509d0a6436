"""Engines whose window layers give pages back, against transformers: tiny models in float32 on the CPU.

After every step, all free pages hold NaN, in every layer. So a page that went too early, or a slot or page
table of another group, shows in the tokens.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from family_variants import VARIANTS
from tiny_models import VOCAB_SIZE, random_model
from transformers import PreTrainedModel

from minisgl.config import EngineConfig
from minisgl.engine.engine import Engine
from minisgl.engine.start.build import build_engine
from minisgl.ipc.messages import AddRequest
from minisgl.kvcache.grouped_manager import GroupedCacheManager
from minisgl.kvcache.pool_figures import pool_figures
from minisgl.request import SamplingParams

NEW_TOKENS = 5
CONTEXT = 200
SAMPLE = ("mistral_window", "gemma3_windows")
WITH_WINDOWS = [
    *SAMPLE,
    "gemma2_alternating_windows",
    "olmo3_windows",
    "exaone4_windows",
    "phi3_window_longrope_tied",
    "mixtral_4_experts_window",
    "qwen2_window_in_the_second_layer",
    "qwen3_window_in_the_first_layer",
    "qwen3_moe_one_dense_layer_window",
    "smollm3_window_in_layers_without_rope",
    "ministral3_window_tied",
]


class Model(NamedTuple):
    reference: PreTrainedModel
    folder: Path


@pytest.fixture(scope="module", params=WITH_WINDOWS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    if request.param not in SAMPLE and not request.config.getoption("--all-pairs"):
        pytest.skip("one of the families that run with --all-pairs")
    family, settings = VARIANTS[request.param]
    if "longrope" in request.param:  # transformers chooses its factors by the length of each text
        settings = settings | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    reference = random_model(family=family, **settings)
    folder = tmp_path_factory.mktemp("tiny")
    reference.save_pretrained(folder)
    return Model(reference, folder)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE - 1), k=length)


def expected(model: Model, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' greedy tokens."""
    generate: Any = model.reference.generate
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
            )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


class Served:
    """An engine whose free pages are poisoned after each step."""

    def __init__(self, model: Model, **settings: Any) -> None:
        config = EngineConfig(
            **{
                "model": str(model.folder),
                "device": "cpu",
                "dtype": "float32",
                "cpu_threads": 1,
                "max_context_tokens": CONTEXT,
                "max_running_requests": 4,
                "page_size": 4,
                "num_pages": 150,
                **settings,
            }
        )
        self.engine: Engine = build_engine(config, model.folder, lambda stage, ms: None)
        assert isinstance(self.engine.cache, GroupedCacheManager)
        self.cache = self.engine.cache
        self.next_id = 0

    def poison(self) -> None:
        """In flight are only steps that were launched; on a CPU these have run."""
        groups = [group._allocator.free_page_ids() for group in self.cache.windows]
        if self.cache.keeps_all:
            groups.insert(0, self.cache.places.allocator.free_page_ids())
        runner = self.engine.runner
        with torch.inference_mode():
            for layer, attention in enumerate(runner.model.attention_layers()):
                free = list(groups[runner.model.layer_groups[layer]])
                attention.k_cache[free] = attention.v_cache[free] = float("nan")

    def answers(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
        """The greedy tokens of prompts that come at once, and how many tokens of each were cached."""
        first, self.next_id = self.next_id, self.next_id + len(prompts)
        got: dict[int, list[int]] = {first + index: [] for index in range(len(prompts))}
        cached = dict.fromkeys(got, 0)
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        for index, prompt in enumerate(prompts, first):
            self.engine.add(AddRequest(index, np.asarray(prompt, dtype="<i4").tobytes(), params))
        self.poison()
        while self.engine.has_work:
            for output in self.engine.step():
                assert output.error_message == ""
                got[output.request_id] += output.token_ids
                cached[output.request_id] = output.num_cached_tokens
            self.cache.check_invariants()
            self.poison()
        return list(got.values()), list(cached.values())


@pytest.fixture
def serve() -> Iterator[Any]:
    engines: list[Served] = []

    def start(model: Model, **settings: Any) -> Served:
        engines.append(Served(model, **settings))
        return engines[-1]

    yield start
    for served in engines:
        served.engine.close()


def test_prompts_longer_than_the_window_in_chunks_beside_others(model: Model, serve: Any) -> None:
    prompts = [prompt_of(length, length) for length in (1, 37, 90, 150)]
    served = serve(model, chunk_tokens=23, overlap=True)
    assert served.answers(prompts)[0] == expected(model, prompts)
    groups = pool_figures(served.cache)
    assert all(group.held == 0 for group in groups)


def test_prefix_hits_at_every_length_that_the_groups_can_offer(model: Model, serve: Any) -> None:
    """A long prompt, then its beginnings with other ends, which use the pages that are left."""
    served = serve(model, num_pages=400, max_step_tokens=64, overlap=True)
    whole = prompt_of(120)
    assert served.answers([whole])[0] == expected(model, [whole])
    lengths = [0] * 8
    for number, cut in enumerate((120, 117, 100, 61, 44, 24, 20, 3)):
        prompt = whole[:cut] + prompt_of(9, cut)
        answers, (lengths[number],) = served.answers([prompt])
        assert answers == expected(model, [prompt]), f"after a hit of {lengths[number]} of {cut} tokens"
        assert lengths[number] % 4 == 0
        assert lengths[number] <= cut
    assert lengths[0] == 120
    assert lengths[-1] == 0


def test_requests_that_are_preempted_go_on_from_what_is_left(model: Model, serve: Any) -> None:
    prompts = [prompt_of(length, length) for length in (50, 70, 90, 30)]
    served = serve(model, num_pages=55, output_reserve_tokens=0, chunk_tokens=16, overlap=True)
    for _ in range(3):
        assert served.answers(prompts)[0] == expected(model, prompts)
    assert served.engine.status(0).num_held_pages == 0
