"""Graphs that are recorded while several ranks serve: all use one or none does, and no failure ends them."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_ranks import run_forked, run_on_ranks
from tiny_models import random_model
from torch import Tensor

from minisgl.config import DeviceFacts, EngineConfig, ResolvedConfig, resolve_engine_config
from minisgl.engine import model_runner, steps
from minisgl.engine.build import build_follower
from minisgl.engine.build_rank import Rendezvous
from minisgl.engine.engine import Engine
from minisgl.engine.graphs import background_recording, recording
from minisgl.engine.graphs.logit_extras import ExtrasDecodeGraphs
from minisgl.errors import EngineDeadError
from minisgl.ipc.messages import AddRequest
from minisgl.model_config.hf_config import read_model_config
from minisgl.parallel import mesh
from minisgl.parallel.mesh import Ranks
from minisgl.request import SamplingParams

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")

Fail = Callable[[Engine, pytest.MonkeyPatch], None]
"""Makes the next recording of an engine fail."""


class Recorder:
    """Keeps a function instead of recording it; what is warm is not run before, as on a GPU."""

    def __init__(self, **options: Any) -> None:
        self.is_full = False

    def record(
        self, run: Callable[[], Tensor], *, is_warm: bool = False, **options: Any
    ) -> Callable[[], Tensor]:
        if self.is_full:
            raise OUT_OF_MEMORY
        if not is_warm:
            run()
        return run

    def release(self) -> None:
        """Nothing to let go of."""


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


def extras_graphs_of(engine: Engine) -> ExtrasDecodeGraphs:
    return engine.runner._extras_decode


def live(folder: Path, store: Path, rank: int, fail: Fail | None = None) -> dict[str, Any]:
    """A rank of two, whose scheduler decides as the other's does. It records two graphs; the second fails on
    rank 1."""
    engine = build_follower(
        settings(folder, 2),
        folder,
        Rendezvous(rank, str(store), lambda: None),
        lambda name, duration_ms: None,
    )
    tokens = [tokens_of(engine)]
    engine.record_graphs()
    tokens.append(tokens_of(engine))
    sizes = [sorted(size for size, _ in extras_graphs_of(engine)._recorded)]
    tokens.append(tokens_of(engine, 1))  # of another size, for which a larger graph stands in
    assert engine.num_missing_graphs == 1
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1 and fail is not None:
            fail(engine, patch)
        engine.record_graph()
    tokens += [tokens_of(engine), tokens_of(engine, 1)]
    sizes.append(sorted(size for size, _ in extras_graphs_of(engine)._recorded))
    missing = engine.num_missing_graphs
    engine.close()
    return {"tokens": tokens, "sizes": sizes, "missing": missing}


def while_recording(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    recorder: Any = engine._recorded.recorder
    recorder.is_full = True


def behind_the_logits(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    def pack_logprobs(*arguments: Any) -> Tensor:
        raise OUT_OF_MEMORY

    patch.setattr(steps, "pack_logprobs", pack_logprobs)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a model; no graph is recorded but on demand."""
    folder = tmp_path / "model"
    random_model(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2).save_pretrained(folder)
    monkeypatch.setattr(recording, "GraphRecorder", Recorder)
    # Never due by itself, neither at once (after a recording of 0 s) nor later.
    monkeypatch.setattr(background_recording, "PAUSE", float("inf"))
    monkeypatch.setattr(background_recording, "URGENT_PAUSE", float("inf"))
    return folder


@pytest.mark.parametrize("fail", [while_recording, behind_the_logits])
def test_a_graph_that_one_rank_cannot_record_is_given_up_by_all_and_the_others_serve_on(
    fail: Fail, folder: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    first, second = run_forked([lambda rank=rank: live(folder, store, rank, fail) for rank in range(2)])
    assert first == second
    assert first["sizes"] == [[4], [4]]
    assert first["missing"] == 0
    three, same, one, again, one_again = first["tokens"]
    assert three == same == again
    assert one == one_again == three[:1]


def test_a_graph_that_all_ranks_can_record_is_used_by_all(folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    answers = run_forked([lambda rank=rank: live(folder, store, rank) for rank in range(2)])
    assert [answer["sizes"] for answer in answers] == [[[4], [2, 4]]] * 2


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
        raise OUT_OF_MEMORY

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


def test_ranks_are_fine_only_if_all_say_so(tmp_path: Path) -> None:
    def ask(ranks: Ranks) -> list[bool]:
        return [
            ranks.all_ranks_succeeded(f"{number}", fine)
            for number, fine in enumerate([True, ranks.rank == 1, True])
        ]

    assert run_on_ranks(2, tmp_path, ask) == [[True, False, True]] * 2


def test_a_rank_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    def ask(ranks: Ranks) -> str:
        threading.Timer(0.05, ranks.lost.set).start()
        began = time.monotonic()
        with pytest.raises(EngineDeadError) as error:
            ranks.all_ranks_succeeded("never", True)
        assert time.monotonic() - began < mesh.REACH_TIMEOUT_S / 4
        return str(error.value)

    (said,) = run_on_ranks(1, tmp_path, lambda ranks: ask(replace(ranks, size=2)))
    assert "never" in said
