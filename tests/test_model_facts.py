"""Engines that come to one server must compute the same numbers; how fast they do is their own affair."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_config import TINY

from minisgl.config import DeviceFacts, EngineConfig, resolve_engine_config
from minisgl.config.model_facts import difference, engine_facts

MODEL = replace(TINY, max_position=512)


def facts(folder: Path, **settings: Any) -> dict[str, str]:
    config = EngineConfig(device="cpu", dtype="float32", dummy_weights=True)
    resolved = resolve_engine_config(replace(config, **settings), MODEL, DeviceFacts(has_cuda=False))
    return engine_facts(resolved, folder)


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        ("--dtype", {"dtype": "bfloat16"}),
        ("--quantization", {"quantization": "fp8"}),
        ("--kv-dtype", {"kv_dtype": "fp8"}),
        ("--max-context-tokens", {"max_context_tokens": 128}),
        ("the model's weights", {"dummy_weights": False}),
    ],
)
def test_a_setting_that_changes_answers_is_a_difference(
    tmp_path: Path, flag: str, settings: dict[str, Any]
) -> None:
    assert difference(facts(tmp_path), facts(tmp_path, **settings)).startswith(f"{flag} must be the same")


@pytest.mark.parametrize("settings", [{"cpu_threads": 1}, {"max_running_requests": 7}, {"overlap": False}])
def test_a_setting_of_speed_is_none(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert difference(facts(tmp_path), facts(tmp_path, **settings)) == ""


def test_weights_files_that_differ_in_their_middle_are_a_difference(tmp_path: Path) -> None:
    found = []
    for name, middle in (("a", b"x"), ("b", b"y")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes(20_000) + middle + bytes(20_000))
        found.append(facts(folder, dummy_weights=False))
    assert difference(*found).startswith("the model's weights must be the same")
