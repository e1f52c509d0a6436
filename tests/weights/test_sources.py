"""Names of models to folders."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import write_gguf

from minisgl.errors import ConfigError, ModelError
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.weights.sources import resolve_model_folder


def test_a_folder_with_a_config_is_taken_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model_folder(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model_folder(str(tmp_path)) == tmp_path


def test_a_file_and_an_unknown_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").touch()
    with pytest.raises(ModelError, match="is a file"):
        resolve_model_folder(str(tmp_path / "weights.safetensors"))
    for name in ("smollm", str(tmp_path / "nowhere"), "../nowhere", "a/b/c", ""):
        with pytest.raises(ModelError, match=r"no model|no config"):
            resolve_model_folder(name)


def test_a_built_in_model_that_is_not_there_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="minisgl pull smollm2-135m"):
        resolve_model_folder("smollm2-135m", pull_missing=False, cache_dir=tmp_path)


@pytest.mark.parametrize("pull_missing", [False, True])
def test_a_hub_name_without_network_says_what_to_do(
    pull_missing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"no-such-org/no-such-model.*local folder.*smollm2-135m"):
        resolve_model_folder("no-such-org/no-such-model", pull_missing=pull_missing)


def test_a_hub_name_takes_a_revision_and_other_names_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(name: str, **settings: object) -> str:
        asked.update(settings, name=name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model_folder("org/model", revision="v1.0") == tmp_path
    assert (asked["name"], asked["revision"]) == ("org/model", "v1.0")
    assert "*.safetensors" in asked["allow_patterns"]
    resolve_model_folder("org/model", with_weights=False)
    assert "*.safetensors" not in asked["allow_patterns"]
    for name in ("smollm2-135m", str(tmp_path)):
        with pytest.raises(ConfigError, match="--revision"):
            resolve_model_folder(name, revision="v1.0")


def test_a_gguf_file_is_converted_once_and_again_when_it_changed(tmp_path: Path) -> None:
    file, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    write_gguf(file)
    with pytest.raises(ModelError, match="not been converted"):
        resolve_model_folder(str(file), cache_dir=cache, pull_missing=False)
    folder = resolve_model_folder(str(file), cache_dir=cache)
    assert read_model_config(folder).num_layers == 2
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model_folder(str(file), cache_dir=cache, pull_missing=False) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    os.utime(file, ns=(1, 1))
    assert resolve_model_folder(str(file), cache_dir=cache) != folder
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="broken"):
        resolve_model_folder(str(tmp_path / "broken.gguf"), cache_dir=cache)
    assert not [path for path in (cache / "gguf").iterdir() if ".build-" in path.name]


def test_another_tokenizer_takes_the_place_of_the_models_own(tmp_path: Path) -> None:
    for name, files in (
        ("model", ("config.json", "model.safetensors", "tokenizer.json", "special_tokens_map.json")),
        ("other", ("config.json", "tokenizer.json", "chat_template.jinja")),
        ("none", ("config.json",)),
    ):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text(name)
    model, other = str(tmp_path / "model"), str(tmp_path / "other")
    folder = resolve_model_folder(model, tokenizer=other, cache_dir=tmp_path / "cache")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "config.json": "model",
        "model.safetensors": "model",
        "tokenizer.json": "other",
        "chat_template.jinja": "other",
    }
    assert resolve_model_folder(model, tokenizer=other, cache_dir=tmp_path / "cache") == folder
    with pytest.raises(ModelError, match=r"--tokenizer .*none has no tokenizer\.json"):
        resolve_model_folder(model, tokenizer=str(tmp_path / "none"), cache_dir=tmp_path / "cache")


def test_a_gguf_file_with_an_unknown_tokenizer_runs_with_another(tmp_path: Path) -> None:
    file, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    write_gguf(file, pre="tekken")
    with pytest.raises(ModelError, match="--tokenizer"):
        resolve_model_folder(str(file), cache_dir=cache)
    (tmp_path / "tokenizer.json").write_text("mine")
    folder = resolve_model_folder(str(file), tokenizer=str(tmp_path), cache_dir=cache)
    assert (folder / "tokenizer.json").read_text() == "mine"
    assert read_model_config(folder).num_layers == 2


def test_importing_the_readers_and_the_puller_loads_no_torch() -> None:
    code = (
        "import sys, minisgl.weights.sources, minisgl.weights.pull, minisgl.model_config.hf_folder.hf_config;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
