"""What a start does with the compile cache, however it ends."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from test_step_timeline import MODEL

from compile_cache.manifest import CacheError
from compile_cache.store import OpenCache
from minisgl.config import EngineConfig
from minisgl.engine.start import build_rank as rank
from minisgl.engine.start.build import build_engine
from minisgl.errors import ConfigError

ENGINE = EngineConfig(device="cpu", dtype="float32", dummy_weights=True, num_pages=9)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """What the start is given, as on a GPU."""
    opened = Mock(spec=OpenCache)
    monkeypatch.setattr(rank, "open_rank_compile_cache", lambda config, device, rank: opened)
    return opened


def test_a_start_publishes_and_the_engines_end_lets_go(folder: Path, cache: Mock) -> None:
    stages = []
    engine = build_engine(ENGINE, folder, lambda name, duration_ms: stages.append(name))
    cache.publish.assert_called_once_with()
    cache.close.assert_not_called()
    assert stages[-1] == "compile cache"
    engine.close()
    cache.close.assert_called_once_with()


def test_what_was_compiled_while_serving_is_published_at_the_end(folder: Path, cache: Mock) -> None:
    engine = build_engine(ENGINE, folder, lambda name, duration_ms: None)
    cache.publish.side_effect = lambda: cache.close.assert_not_called()
    engine._recorded = engine._recorded._replace(kernels=Mock(num_compiled=1, count=1))
    engine.close()
    engine.close()  # as whoever closes an engine that a lost rank has closed
    assert cache.publish.call_count == 2
    cache.close.assert_called_once_with()


def test_a_start_that_fails_lets_go_and_seals_nothing(folder: Path, cache: Mock) -> None:
    impossible = EngineConfig(device="cpu", dtype="float32", dummy_weights=True, num_pages=1 << 30)
    with pytest.raises(ConfigError, match="--num-pages"):
        build_engine(impossible, folder, lambda name, duration_ms: None)
    cache.publish.assert_not_called()
    cache.close.assert_called_once_with()


def test_a_disk_that_is_full_stops_no_start(
    folder: Path, cache: Mock, caplog: pytest.LogCaptureFixture
) -> None:
    cache.publish.side_effect = CacheError("it can't be sealed: no space left")
    with caplog.at_level(logging.WARNING):
        engine = build_engine(ENGINE, folder, lambda name, duration_ms: None)
    assert "no space left" in caplog.text
    assert engine.num_pages == 8
    engine.close()


def test_a_cpu_that_compiles_nothing_has_nothing_to_keep(folder: Path, tmp_path: Path) -> None:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        dummy_weights=True,
        num_pages=9,
        compile_cache=str(tmp_path / "c"),
        compile_on_cpu=False,
    )
    build_engine(config, folder, lambda name, duration_ms: None).close()
    assert not (tmp_path / "c").exists()


def test_dummy_weights_are_the_same_at_every_start_whatever_the_seed(folder: Path) -> None:
    engines = [
        build_engine(replace(ENGINE, seed=seed), folder, lambda name, duration_ms: None) for seed in (None, 5)
    ]
    first, second = (engine.runner.model.state_dict() for engine in engines)
    assert all(torch.equal(first[name], second[name]) for name in first)
    for engine in engines:
        engine.close()
