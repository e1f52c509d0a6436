"""What a backend that plans on the host is told, and an engine that serves by it.

The package flashinfer is a stand-in that computes in plain torch (tests/attention/fake_flashinfer.py), and so
are CUDA graphs: a recorded step runs again on what its buffers hold.
"""

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_flashinfer
import numpy as np
import pytest
from tiny_models import VOCAB_SIZE, random_model
from torch import Tensor

from minisgl.attention.backends import select
from minisgl.attention.interface import Backend, BatchPages
from minisgl.config import DeviceFacts, EngineConfig, ResolvedConfig, resolve_engine_config
from minisgl.engine.engine import Engine
from minisgl.engine.graphs import recording
from minisgl.engine.start import build
from minisgl.engine.step.attention_planner import AttentionPlanner
from minisgl.engine.step.inputs import HostPageTable
from minisgl.ipc.messages import AddRequest
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.request import SamplingParams
from minisgl.scheduler.plan import Chunk, PageUpdate, StepPlan

PAGE_SIZE = 4


def ids(count: int) -> bytes:
    return np.zeros(count, dtype="<i4").tobytes()


def test_the_host_knows_each_batch_as_the_device_will_have_it() -> None:
    told: list[BatchPages] = []
    pages = HostPageTable(max_rows=3, max_pages_per_row=4, page_size=PAGE_SIZE)
    updates = tuple(
        PageUpdate(row, 0, np.array(ids, dtype="<i4").tobytes()) for row, ids in ((0, [7, 8, 9]), (2, [4]))
    )
    pages.update(StepPlan(0, (), updates, (), (), ()))
    planner = AttentionPlanner(Backend(select("torch"), told.append, told.append), pages)

    planner.plan_prefill((Chunk(2, 0, ids(3), True), Chunk(0, 4, ids(3), False)))
    planner.plan_decode((2,), 2)  # and a row of padding
    planner.plan_prefill((Chunk(0, 7, ids(2), True),))
    planner.plan_decode((0, 2), 2)
    assert [[part.tolist() for part in batch] for batch in told] == [
        [[0, 3, 6], [0, 1, 3], [3, 3], [4, 7, 8]],
        [[0, 1, 2], [0, 1, 2], [4, 1], [4, 0]],
        [[0, 2], [0, 3], [1], [7, 8, 9]],
        [[0, 1, 2], [0, 3, 5], [2, 1], [7, 8, 9, 4, 0]],
    ]
    # The row goes to another request.
    planner.plan_prefill((Chunk(0, 0, ids(1), True),))
    planner.plan_decode((0,), 1)
    assert told[-1].last_page_len.tolist() == [2]
    assert all(part.dtype == np.int32 for batch in told for part in batch)


def test_padding_before_serving_is_planned_and_counts_as_nothing() -> None:
    told: list[BatchPages] = []
    pages = HostPageTable(max_rows=3, max_pages_per_row=4, page_size=PAGE_SIZE)
    planner = AttentionPlanner(Backend(select("torch"), told.append, told.append), pages)
    planner.plan_padding_prefill(2, 5)
    planner.plan_decode((), 2)
    planner.plan_decode((), 2)
    assert [part.tolist() for part in told[0]] == [[0, 5, 10], [0, 2, 4], [1, 1], [0, 0, 0, 0]]
    assert told[1].last_page_len.tolist() == told[2].last_page_len.tolist() == [1, 1]


def test_an_automatic_choice_other_than_the_usual_one_is_said(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    usual = read_model_config(folder)
    wide = replace(usual, num_heads=64, num_kv_heads=2, head_dim=64)
    facts = DeviceFacts(has_cuda=True, compute_capability=(9, 0))
    for model in (usual, wide):
        resolved = resolve_engine_config(EngineConfig(), model, facts)
        build._warn_of_slower_attention(EngineConfig(), resolved, model, facts)
    (said,) = (record.message for record in caplog.records)
    assert said.startswith("attention runs on torch, because triton takes at most 16 query heads")
    assert "doctor" in said


class Recorder:
    """In the place of CUDA graphs: what was recorded runs again."""

    def __init__(self, **options: Any) -> None:
        """What only matters to graphs may be anything."""

    def record(self, run: Callable[[], Tensor], **options: Any) -> Callable[[], Tensor]:
        run()
        return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    random_model(seed=5, family="mistral", sliding_window=9).save_pretrained(made)
    return made


def tokens_of(engine: Engine) -> list[list[int]]:
    """Greedy tokens of requests that share prefixes, come in over time, and are preempted."""
    source = random.Random(0)
    prefix = [source.randrange(3, VOCAB_SIZE) for _ in range(11)]
    prompts = [prefix[: source.randrange(12)] for _ in range(9)]
    prompts = [
        prompt + [source.randrange(3, VOCAB_SIZE) for _ in range(1 + source.randrange(20))]
        for prompt in prompts
    ]
    tokens: list[list[int]] = [[] for _ in prompts]
    waiting = list(enumerate(prompts))
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=0)
    penalised = SamplingParams(max_tokens=12, ignore_eos=True, frequency_penalty=0.5, seed=0)
    while waiting or engine.has_work:
        if waiting:
            number, prompt = waiting.pop(0)
            wanted = penalised if number == 4 else params
            engine.add(AddRequest(number, np.array(prompt, dtype="<i4").tobytes(), wanted))
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    engine.close()
    return tokens


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("backends", ["flashinfer-fa3,flashinfer-fa2", "torch,flashinfer-fa2"])
def test_an_engine_gives_the_tokens_that_the_torch_backend_gives(
    backends: str, overlap: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "cpu_threads": 1,
        "page_size": PAGE_SIZE,
        "num_pages": 20,
        "max_running_requests": 5,
        "max_step_tokens": 12,
        "output_reserve_tokens": 0,
    }
    config = EngineConfig(model=str(folder), **settings)
    expected = tokens_of(build.build_engine(config, folder, lambda name, ms: None))

    def resolve(*arguments: Any) -> ResolvedConfig:
        chosen: dict[str, Any] = {"attention_backend": backends, "max_graph_batch": 4, "overlap": overlap}
        chosen["keep_window_pages"] = True  # as the resolver says of these backends
        return replace(resolve_engine_config(*arguments), **chosen)

    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(build, "resolve_engine_config", resolve)
    monkeypatch.setattr(recording, "GraphRecorder", Recorder)
    engine = build.build_engine(config, folder, lambda name, ms: None)
    assert tokens_of(engine) == expected
    assert engine.status(0).num_preemptions > 0
    assert engine.status(0).num_cached_tokens > 0
