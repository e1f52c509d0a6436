"""What --admin-key guards: others' requests, the cache, /debug and priorities."""

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from running_server import LIMIT_S, RunningServer, eventually
from small_model import make_folder

ADMIN, ALICE, BOB = "admin-key", "alice-key", "bob-key"
ADMIN_ONLY = [
    ("POST", "/abort", {"abort_all": True}),
    ("POST", "/flush_cache", None),
    ("GET", "/debug/timeline", None),
    ("POST", "/debug/profile?steps=3", None),
    ("GET", "/debug/engines", None),
    ("GET", "/debug/requests", None),
    ("POST", "/debug/requests/x/abort", None),
    ("GET", "/debug/moments", None),
    ("GET", "/debug/history", None),
    ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 9, "priority": 1}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "priority": 1}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("admin") / "model")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    """Two processes, so that aborts have to find their way."""
    with RunningServer(folder, api_key=(ALICE, BOB), admin_key=(ADMIN,), api_workers=2) as running:
        yield running.ready()


@pytest.fixture(scope="module")
def public(folder: Path) -> Iterator[RunningServer]:
    """With an admin key and no API key."""
    with RunningServer(folder, admin_key=(ADMIN,)) as running:
        yield running.ready()


def ask(
    server: RunningServer, key: str | None, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any]:
    """Status and decoded JSON, over a connection of its own."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    sent |= {} if key is None else {"Authorization": f"Bearer {key}"}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT_S)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), sent)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def abort(server: RunningServer, key: str | None, name: str) -> tuple[int, Any]:
    return ask(server, key, "POST", "/abort", {"request_id": name})


@pytest.mark.parametrize(("method", "path", "body"), ADMIN_ONLY)
def test_what_concerns_others_needs_the_admin_key(
    server: RunningServer, public: RunningServer, method: str, path: str, body: Any
) -> None:
    for one, key in ((server, ALICE), (public, None), (public, "none"), (public, "admin-kex")):
        status, answer = ask(one, key, method, path, body)
        assert (status, answer["error"]["code"]) == (403, "admin_key_required"), key
    assert ask(server, "wrong", method, path, body)[0] == 401
    assert ask(server, None, method, path, body)[0] == 401
    for one in (server, public):
        assert ask(one, ADMIN, method, path, body)[0] == 200


@pytest.mark.parametrize("path", ["/debug/events", "/debug/requests/x"])
def test_events_and_single_requests_need_it_too(server: RunningServer, path: str) -> None:
    assert ask(server, ALICE, "GET", path)[1]["error"]["code"] == "admin_key_required"
    assert ask(server, None, "GET", path)[0] == 401


def test_a_refused_priority_names_its_field_and_running_later_needs_no_key(server: RunningServer) -> None:
    body = {"prompt": "a", "max_tokens": 9}
    status, answer = ask(server, BOB, "POST", "/v1/completions", {**body, "priority": 3})
    assert (status, answer["error"]["param"]) == (403, "priority")
    assert "admin key" in answer["error"]["message"]
    for priority in (0, -5, None):
        assert ask(server, BOB, "POST", "/v1/completions", {**body, "priority": priority})[0] == 200


def test_a_call_is_aborted_by_its_own_api_key_or_the_admins_and_no_other(server: RunningServer) -> None:
    def num_running() -> int:
        return ask(server, ALICE, "GET", "/server_info")[1]["server"]["num_running_requests"]

    with ThreadPoolExecutor() as threads:

        def waiting(name: str) -> "Future[tuple[int, Any]]":
            body = {"prompt": "@wait", "max_tokens": 99}
            call = threads.submit(
                ask, server, ALICE, "POST", "/v1/completions", body, **{"X_Request_Id": name}
            )
            eventually(lambda: num_running() == 1, "it runs")
            return call

        for key in (ALICE, ADMIN):
            name = f"of-alice-{key}"
            call = waiting(name)
            assert abort(server, BOB, name) == (200, {"aborted": 0})  # as if there were none
            assert num_running() == 1
            assert abort(server, key, name) == (200, {"aborted": 1})
            assert call.result(LIMIT_S)[0] == 409


def test_without_api_keys_every_abort_needs_the_admin_key(public: RunningServer) -> None:
    assert abort(public, None, "anyone")[0] == 403
    assert abort(public, ADMIN, "anyone") == (200, {"aborted": 0})


def test_the_admin_key_opens_all_else_and_is_nowhere_to_be_read(server: RunningServer) -> None:
    assert ask(server, ADMIN, "GET", "/v1/models")[0] == 200
    info = ask(server, ADMIN, "GET", "/server_info")[1]
    assert (info["server_settings"]["admin_key"], info["server_settings"]["api_key"]) == (
        "1 given",
        "2 given",
    )
    shown = json.dumps(info) + "\n".join(server.out) + server.errors.read_text()
    assert not any(key in shown for key in (ADMIN, ALICE, BOB))
