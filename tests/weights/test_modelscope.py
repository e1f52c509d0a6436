"""Names on ModelScope, through its own client, from a server in this process that answers like it."""

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from minisgl.errors import ConfigError, ModelError
from minisgl.weights.sources import resolve_model_folder

modelscope_hub = pytest.importorskip("modelscope_hub", reason="ModelScope's client is not installed")

FILES = {
    "config.json": b'{"of": "the model"}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "original/config.json": b"[]",
    "README.md": b"a model",
}
FILE_LIST, ONE_FILE = "/api/v1/models/org/model/repo/files", "/api/v1/models/org/model/repo"


class FakeModelScope(BaseHTTPRequestHandler):
    """Has org/model in two revisions, and org/closed, which nobody may see."""

    asked: list[str]

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        revision = query.get("Revision", [""])[0]
        if url.path == FILE_LIST and revision in ("master", "v2"):
            listed = [
                {
                    "Path": path,
                    "Type": "blob",
                    "Size": len(content),
                    "Sha256": hashlib.sha256(content).hexdigest(),
                }
                for path, content in FILES.items()
            ]
            self.answer(200, json.dumps({"Code": 200, "Success": True, "Data": {"Files": listed}}).encode())
        elif url.path == ONE_FILE:
            self.asked.append(f"{revision} {query['FilePath'][0]}")
            self.answer(200, FILES[query["FilePath"][0]])
        elif "/org/closed/" in url.path:
            self.answer(403, b'{"Code": 403, "Success": false, "Message": "no permission"}')
        else:
            self.answer(404, b'{"Code": 404, "Success": false, "Message": "not found"}')

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a request is no news."""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What files the server was asked for, as "revision path"; the client asks it, and nobody else."""
    paths: list[str] = []
    handler = type("Handler", (FakeModelScope,), {"asked": paths})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "modelscope"))
        monkeypatch.setenv("MODELSCOPE_HOME", str(tmp_path / "home"))
        modelscope_hub.set_default_config(None)
        yield paths
        modelscope_hub.set_default_config(None)
        server.shutdown()
        thread.join()


def test_a_model_is_fetched_once_without_what_is_not_needed(asked: list[str]) -> None:
    folder = resolve_model_folder("modelscope:org/model")
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == {
        name: FILES[name] for name in ("config.json", "model.safetensors", "tokenizer.json")
    }
    assert sorted(asked) == ["master config.json", "master model.safetensors", "master tokenizer.json"]
    asked.clear()
    assert resolve_model_folder("modelscope:org/model") == folder
    assert resolve_model_folder("modelscope:org/model", pull_missing=False) == folder
    assert asked == []


def test_weights_that_are_not_needed_are_not_fetched(asked: list[str]) -> None:
    folder = resolve_model_folder("modelscope:org/model", with_weights=False)
    assert sorted(asked) == ["master config.json", "master tokenizer.json"]
    assert resolve_model_folder("modelscope:org/model") == folder
    assert sorted(asked)[1] == "master model.safetensors"


def test_a_revision_and_a_tokenizer_may_come_from_there(asked: list[str], tmp_path: Path) -> None:
    resolve_model_folder("modelscope:org/model", revision="v2")
    assert {request.split()[0] for request in asked} == {"v2"}
    asked.clear()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    folder = resolve_model_folder(
        str(tmp_path / "mine"), tokenizer="modelscope:org/model", cache_dir=tmp_path / "cache"
    )
    assert asked == ["master tokenizer.json"]
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "config.json": "{}",
        "tokenizer.json": "{}",
    }


@pytest.mark.parametrize(
    ("model", "revision", "named"),
    [
        ("modelscope:org/none", None, "ModelScope has no model 'org/none', or it is private"),
        ("modelscope:org/model", "v9", "no model 'org/model' or no revision 'v9' of it"),
        ("modelscope:org/closed", None, "org/closed is closed to you.*MODELSCOPE_API_TOKEN"),
        ("modelscope:org", None, "no model 'modelscope:org'.*modelscope:org/name"),
    ],
)
def test_what_is_not_to_be_had_is_said(
    model: str, revision: str | None, named: str, asked: list[str]
) -> None:
    with pytest.raises((ModelError, ConfigError), match=named):
        resolve_model_folder(model, revision=revision)


def test_without_network_the_clients_cache_serves_or_the_error_says_what_to_do(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve_model_folder("modelscope:org/model")
    download = modelscope_hub.HubApi.download_repo

    def unplugged(api: Any, *names: str, local_files_only: bool, **settings: Any) -> Path:
        if not local_files_only:
            raise modelscope_hub.NetworkError("connection refused")
        return download(api, *names, local_files_only=True, **settings)

    monkeypatch.setattr(modelscope_hub.HubApi, "download_repo", unplugged)
    assert resolve_model_folder("modelscope:org/model") == folder
    for pull_missing in (False, True):
        with pytest.raises(ModelError, match=r"can't fetch modelscope:org/other.*local folder.*smollm2-135m"):
            resolve_model_folder("modelscope:org/other", pull_missing=pull_missing)


def test_without_the_client_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope_hub", None)
    with pytest.raises(ModelError, match=r"pip install 'minisgl\[modelscope\]'"):
        resolve_model_folder("modelscope:org/model")
