"""Names of models to folders."""

import subprocess
import sys
from pathlib import Path

import pytest

from minisgl.errors import ModelError
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


def test_importing_the_readers_and_the_puller_loads_no_torch() -> None:
    code = (
        "import sys, minisgl.weights.sources, minisgl.weights.pull, minisgl.model_config;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
