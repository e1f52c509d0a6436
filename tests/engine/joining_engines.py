"""Engines on a CPU whose decodes join their step's chunks wherever they may, in "recorded" steps.

A recorded step is a function that runs again on the same tensors, as a graph would (fake_recorder.py). Decode
steps are said to take so long that joining always pays off.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from fake_recorder import Recorder

from minisgl.config import EngineConfig, ResolvedConfig, resolve_engine_config
from minisgl.engine.engine import Engine
from minisgl.engine.graphs import recording
from minisgl.engine.graphs.decode_graphs import DecodeGraphs
from minisgl.engine.graphs.prefill_graphs import PrefillGraphs
from minisgl.engine.ranks import follower, rank_processes
from minisgl.engine.start import build

JOINING_RANK = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parent.parent / "models")]!r}
from joining_engines import run_joining_rank
run_joining_rank()
"""
"""A rank above 0 that records and joins as rank 0 does."""


def build_joining(
    start: Callable[[], Engine], max_graph_batch: int = 10, max_graph_tokens: int = 48
) -> Engine:
    """The engine that `start` builds, with recorded steps. `always_joining` must hold while it serves."""

    def resolve(*arguments: Any) -> ResolvedConfig:
        asked: EngineConfig = arguments[0]
        return replace(
            resolve_engine_config(*arguments),
            max_graph_batch=max_graph_batch,
            max_graph_tokens=max_graph_tokens,
            join_decodes=asked.join_decodes,
        )

    with _recording() as patch:
        patch.setattr(build, "resolve_engine_config", resolve)
        patch.setattr(rank_processes, "FOLLOWER", (sys.executable, "-c", JOINING_RANK))
        return start()


def always_joining(patch: pytest.MonkeyPatch) -> None:
    """Let every decode step seem slow."""
    patch.setattr(DecodeGraphs, "duration_us", lambda self, num_rows: 1e9)


def run_joining_rank() -> None:
    """The life of a rank above 0, in a process of its own."""
    with _recording() as patch:
        always_joining(patch)
        os._exit(follower.main())  # torch's cleanup at exit may wait for ranks that have ended


@contextlib.contextmanager
def _recording() -> Iterator[pytest.MonkeyPatch]:
    """Meanwhile, engines that are built "record" their steps, and measure that launches take no time."""
    warm_up = PrefillGraphs.warm_up
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "GraphRecorder", Recorder)
        patch.setattr(PrefillGraphs, "warm_up", partialmethod(warm_up, clock=lambda: 0.0))
        yield patch
