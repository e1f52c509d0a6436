"""Penalties and log probabilities on several ranks, in recorded steps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_recorder import Recorder
from forked_ranks import run_forked
from tiny_models import random_model

from minisgl.config import DeviceFacts, EngineConfig, ResolvedConfig, resolve_engine_config
from minisgl.engine import model_runner
from minisgl.engine.engine import Engine
from minisgl.engine.graphs import recording
from minisgl.engine.start.build import build_follower
from minisgl.engine.start.build_rank import Rendezvous
from minisgl.ipc.messages import AddRequest
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.request import SamplingParams


def settings(folder: Path, tp: int) -> ResolvedConfig:
    """Of an engine on CPU that records what a GPU would."""
    config = EngineConfig(
        device="cpu", dtype="float32", tp=tp, page_size=4, num_pages=34, max_running_requests=4
    )
    resolved = resolve_engine_config(config, read_model_config(folder), DeviceFacts(has_cuda=False))
    return replace(resolved, max_graph_batch=4)


def tokens_of(engine: Engine, num_requests: int = 3) -> list[list[int]]:
    """Of requests with penalties and log probabilities."""
    tokens: list[list[int]] = [[] for _ in range(num_requests)]
    for number in range(num_requests):
        prompt = (np.arange(5 + number, dtype="<i4") * 7 + number) % 64
        params = SamplingParams(
            temperature=0.0, max_tokens=6, ignore_eos=True, frequency_penalty=0.7, logprobs=2
        )
        engine.add(AddRequest(number, prompt.tobytes(), params))
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    return tokens


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a model."""
    folder = tmp_path / "model"
    random_model(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2).save_pretrained(folder)
    monkeypatch.setattr(recording, "GraphRecorder", Recorder)
    return folder


def live_without_memory(folder: Path, store: Path, rank: int) -> tuple[list[list[int]], list[str]]:
    """A rank of two; once both have started, rank 1 has no memory for tables of rules. Returns the tokens of
    requests with penalties, and when rules were staged."""
    engine = build_follower(
        settings(folder, 2),
        folder,
        Rendezvous(rank, str(store), lambda: None),
        lambda name, duration_ms: None,
    )
    staged: list[str] = []
    pack_rules = model_runner.pack_rules

    def noted(*arguments: Any) -> Any:
        staged.append("rules" if arguments[1] else "none")
        return pack_rules(*arguments)

    def refuse(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "pack_rules", noted)
        if rank == 1:
            patch.setattr(model_runner, "LogitTables", refuse)
        engine.add(
            AddRequest(7, np.arange(5, dtype="<i4").tobytes(), SamplingParams(temperature=0.0, max_tokens=2))
        )
        while engine.has_work:
            engine.step()
        assert staged == [], "staged for rows without rules"
        tokens = tokens_of(engine)
    assert engine.num_missing_graphs == 0, "ranks that serve would have to record together"
    assert engine.runner.decode_graphs is not None
    assert engine.runner.decode_graphs.table.sizes == (2, 4)
    engine.close()
    return tokens, staged


def test_no_rank_needs_memory_for_rules_after_the_start(folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    first, second = run_forked(
        [lambda rank=rank: live_without_memory(folder, store, rank) for rank in (0, 1)]
    )
    assert first == second
    tokens, staged = first
    assert [len(ids) for ids in tokens] == [6, 6, 6]
    assert "rules" in staged
