"""What a server in front of strangers needs: keys, origins, TLS, ids, a log, several processes on a port."""

import asyncio
import http.client
import json
import os
import shutil
import signal
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from running_server import LIMIT_S, RunningServer, eventually
from small_model import make_folder

from minisgl.server.stats import RATE_WINDOW_S, BusyClock, Rate, ServerStats, total
from minisgl.server.streams import LONGEST_RETRY_S

KEYS = ("first-key", "second-key")
ORIGIN = "https://chat.example"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("service") / "model")


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[RunningServer]:
    """A server with keys, one origin and an access log."""
    with RunningServer(folder, api_key=KEYS, cors_origin=(ORIGIN,), access_log=True) as running:
        yield running.ready()


@pytest.fixture(scope="module")
def many(folder: Path) -> Iterator[RunningServer]:
    """Three processes on one port."""
    with RunningServer(folder, api_workers=3, max_queued_requests=300) as running:
        yield running.ready()


def ask(
    server: RunningServer, path: str, method: str = "GET", body: Any = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """(status, headers in lower case, body) over a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT_S)
    try:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, None if body is None else json.dumps(body), sent)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("key", KEYS)
def test_any_of_the_keys_opens_the_door(guarded: RunningServer, key: str) -> None:
    assert ask(guarded, "/v1/models", Authorization=f"Bearer {key}")[0] == 200


@pytest.mark.parametrize(
    "sent",
    [None, "", "Bearer", "Bearer wrong", "Basic first-key", "first-key", "Bearer first-keyy", "Bearer \xe9"],
)
@pytest.mark.parametrize("path", ["/v1/models", "/server_info", "/openapi.json", "/nothing"])
def test_without_a_key_there_is_a_401(guarded: RunningServer, sent: str | None, path: str) -> None:
    headers = {} if sent is None else {"Authorization": sent}
    status, answered, body = ask(guarded, path, **headers)
    assert (status, answered["www-authenticate"]) == (401, "Bearer")
    assert json.loads(body)["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", ["/health", "/health/ready", "/metrics"])
def test_monitors_need_no_key(guarded: RunningServer, path: str) -> None:
    assert ask(guarded, path)[0] == 200


def test_the_keys_are_nowhere_to_be_read(guarded: RunningServer) -> None:
    info = ask(guarded, "/server_info", Authorization=f"Bearer {KEYS[0]}")[2].decode()
    shown = info + "\n".join(guarded.out) + guarded.errors.read_text()
    assert not any(key in shown for key in KEYS)
    assert "$MINISGL_API_KEY" in guarded.out[-1]


def test_a_page_from_the_named_origin_may_call_and_others_may_not(guarded: RunningServer) -> None:
    status, headers, _ = ask(
        guarded,
        "/v1/completions",
        "OPTIONS",
        Origin=ORIGIN,
        Access_Control_Request_Method="POST",
        Access_Control_Request_Headers="authorization, content-type",
    )
    assert (status, headers["access-control-allow-origin"]) == (204, ORIGIN)
    assert headers["access-control-allow-headers"] == "authorization, content-type"
    assert "POST" in headers["access-control-allow-methods"]
    status, headers, _ = ask(guarded, "/v1/models", Origin=ORIGIN, Authorization=f"Bearer {KEYS[0]}")
    assert (status, headers["access-control-allow-origin"], headers["vary"]) == (200, ORIGIN, "Origin")
    refused = ask(guarded, "/v1/models", Origin=ORIGIN)  # the page must be able to read why
    assert (refused[0], refused[1]["access-control-allow-origin"]) == (401, ORIGIN)
    for method in ("GET", "OPTIONS"):
        assert "access-control-allow-origin" not in ask(guarded, "/health", method, Origin="https://evil")[1]


@pytest.mark.parametrize(
    ("origin", "site", "status"),
    [
        ("https://evil", "cross-site", 403),
        ("https://evil", "same-site", 403),
        (None, "cross-site", 403),
        (ORIGIN, "cross-site", 200),
        ("http://127.0.0.1", "same-origin", 200),
        (None, None, 200),
    ],
)
def test_a_form_of_a_foreign_page_does_nothing(
    guarded: RunningServer, origin: str | None, site: str | None, status: int
) -> None:
    sent = {"Authorization": f"Bearer {KEYS[0]}", "Content-Type": "text/plain"}
    sent |= {"Origin": origin} if origin else {}
    sent |= {"Sec-Fetch-Site": site} if site else {}
    came, _, body = ask(guarded, "/abort", "POST", {"abort_all": True}, **sent)
    assert came == status
    assert (b"origin_not_allowed" in body) == (status == 403)


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("trace-1:a/b", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("a b", False),
        ('a"b', False),
        ("", False),
    ],
)
def test_the_callers_request_id_comes_back_if_it_is_one(
    guarded: RunningServer, sent: str, kept: bool
) -> None:
    came = ask(guarded, "/health", X_Request_Id=sent)[1]["x-request-id"]
    assert (came == sent) == kept
    assert len(came) > 0


def test_the_access_log_has_a_line_of_json_for_every_call(guarded: RunningServer) -> None:
    key = {"Authorization": f"Bearer {KEYS[0]}"}
    body = {"prompt": "@say hello world", "max_tokens": 50}
    for stream in (False, True):
        ask(
            guarded,
            "/v1/completions",
            "POST",
            {**body, "stream": stream},
            X_Request_Id=f"log-{stream}",
            **key,
        )
    ask(guarded, "/v1/completions", "POST", {"prompt": 5}, X_Request_Id="log-bad", **key)

    def lines() -> dict[str, Any]:
        written = guarded.errors.read_text().splitlines()
        return {
            line["request_id"]: line for line in map(json.loads, (w for w in written if w.startswith("{")))
        }

    eventually(lambda: {"log-True", "log-False", "log-bad"} <= lines().keys(), "the lines are there")
    for name in ("log-True", "log-False"):
        line = lines()[name]
        assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
        assert 0 < line["first_token_s"] <= line["duration_s"]
        assert min(line["prompt_tokens"], line["output_tokens"]) > 3
    assert (lines()["log-bad"]["status"], lines()["log-bad"]["output_tokens"]) == (400, 0)
    assert "hello world" not in guarded.errors.read_text()


def test_tls_files_make_it_https(folder: Path, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1"
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*make.split(), *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    with RunningServer(folder, tls_cert=str(cert), tls_key=str(key)) as server:
        server.ready()
        assert server.out[-1].startswith("curl https://")
        trust = ssl.create_default_context(cafile=str(cert))
        url = f"https://127.0.0.1:{server.port}/health"
        with urllib.request.urlopen(url, timeout=LIMIT_S, context=trust) as answer:
            assert json.load(answer)["status"] == "ok"
    with RunningServer(folder, tls_cert=str(key), tls_key=str(cert)) as server:
        assert server.process.wait(LIMIT_S) == 2
        assert "--tls-cert" in server.errors.read_text()


async def gather(server: RunningServer, prompts: list[str]) -> list[tuple[int, Any]]:
    """All at once, each over its own connection, so that the kernel spreads them over the processes."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def one(prompt: str) -> tuple[int, Any]:
            body = {"prompt": prompt, "max_tokens": 100}
            async with session.post(server.url("/v1/completions"), json=body) as answer:
                return answer.status, await answer.json()

        return await asyncio.gather(*map(one, prompts))


def processes_of(server: RunningServer) -> list[int]:
    listing = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listing.splitlines()[1:]]
    return [pid for pid, parent in pairs if parent == server.process.pid]


def test_several_processes_answer_on_one_port_and_their_figures_are_added(many: RunningServer) -> None:
    texts = [f"number {number}" for number in range(24)]
    answers = asyncio.run(gather(many, [f"@say {text}" for text in texts]))
    assert [answer["choices"][0]["text"] for status, answer in answers if status == 200] == texts
    info = many.call("/server_info")[1]
    assert len(info["processes"]) == 3
    assert sum(process["output_tokens"] > 0 for process in info["processes"]) >= 2
    assert info["server"]["num_output_tokens"] == sum(one["output_tokens"] for one in info["processes"])
    assert info["server"]["num_output_tokens"] >= sum(a["usage"]["completion_tokens"] for _, a in answers)
    assert info["engine"]["num_held_rows"] == 0


def test_of_a_crowd_of_connections_none_is_lost(many: RunningServer) -> None:
    answers = asyncio.run(gather(many, ["@say hello"] * 900))
    texts = [answer["choices"][0]["text"] for status, answer in answers if status == 200]
    refusals = [answer["error"]["code"] for status, answer in answers if status == 429]
    assert (len(texts) + len(refusals), set(texts)) == (900, {"hello"})
    assert set(refusals) <= {"too_many_requests"}
    sums = many.call("/server_info")[1]["server"]
    assert (sums["num_open_requests"], sums["num_running_requests"]) == (0, 0)


def test_an_abort_reaches_every_process(many: RunningServer) -> None:
    async def scenario() -> list[tuple[int, Any]]:
        waiting = asyncio.ensure_future(gather(many, ["@wait"] * 9))
        loop = asyncio.get_running_loop()

        def num_running() -> int:
            return many.call("/server_info")[1]["server"]["num_running_requests"]

        while await loop.run_in_executor(None, num_running) < 9:
            assert not waiting.done()
        assert (await loop.run_in_executor(None, lambda: many.call("/abort", {"abort_all": True})))[1] == {
            "aborted": 9
        }
        return await asyncio.wait_for(waiting, LIMIT_S)

    assert {status for status, _ in asyncio.run(scenario())} == {409}


def test_all_processes_drain_and_end_on_a_signal(folder: Path) -> None:
    with RunningServer(folder, api_workers=2) as server:
        server.ready()
        pids = processes_of(server)
        assert len(pids) == 2  # the engine and one more server process

        async def scenario() -> list[tuple[int, Any]]:
            waiting = asyncio.ensure_future(gather(server, ["@wait"] * 8))
            loop = asyncio.get_running_loop()

            def running() -> int:
                return server.call("/server_info")[1]["engine"]["num_running"]

            while await loop.run_in_executor(None, running) < 8:
                assert not waiting.done()
            engine = (await loop.run_in_executor(None, server.health))[1]["engine_pid"]
            server.process.send_signal(signal.SIGTERM)
            while (await loop.run_in_executor(None, server.health))[0] == 200:
                pass
            while (
                "stopping" not in server.errors.read_text()
            ):  # the processes are asked for their requests first
                await asyncio.sleep(0)
            os.kill(engine, signal.SIGUSR1)  # the engine ends what runs
            return await asyncio.wait_for(waiting, LIMIT_S)

        assert {status for status, _ in asyncio.run(scenario())} == {200}
        assert server.process.wait(LIMIT_S) == 0
        assert "stopping: 8 open requests" in server.errors.read_text()
        assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def test_a_server_process_that_dies_ends_the_server_with_an_error(folder: Path) -> None:
    with RunningServer(folder, api_workers=2) as server:
        server.ready()
        engine = server.health()[1]["engine_pid"]
        (worker,) = [pid for pid in processes_of(server) if pid != engine]
        os.kill(worker, signal.SIGKILL)
        assert server.process.wait(LIMIT_S) == 1
        assert "server process 1 ended" in server.errors.read_text()
        assert not Path(f"/proc/{engine}").exists()


def test_the_other_processes_end_when_the_first_is_killed(folder: Path) -> None:
    with RunningServer(folder, api_workers=2) as server:
        server.ready()
        pids = processes_of(server)
        server.process.kill()
        server.process.wait(LIMIT_S)
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "all are gone")


def test_two_servers_never_share_a_port_unasked(many: RunningServer, folder: Path) -> None:
    with RunningServer(folder, api_workers=2, port=many.port) as second:
        assert second.process.wait(LIMIT_S) == 2
        assert "--port" in second.errors.read_text()


def test_the_rate_is_that_of_the_window_and_retry_after_follows_it() -> None:
    now = [100.0]
    rate = Rate(lambda: now[0])
    assert rate.per_s() == 0.0
    assert rate.seconds_for(5, LONGEST_RETRY_S) is None
    for _ in range(10):
        rate.count(3)
        now[0] += 1.0
    assert rate.per_s() == 3.0
    assert rate.seconds_for(7, LONGEST_RETRY_S) == 3
    assert rate.seconds_for(10**6, LONGEST_RETRY_S) == LONGEST_RETRY_S
    now[0] += RATE_WINDOW_S
    assert rate.per_s() == 0.0


def test_an_idle_hour_does_not_make_the_rate_small() -> None:
    now = [100.0]
    busy = BusyClock(lambda: now[0])
    rate = Rate(busy.now)
    for _ in range(3):
        busy.set_busy(True)
        now[0] += 2.0
        rate.count(100)
        busy.set_busy(False)
        now[0] += 3600.0
    assert busy.now() == 6.0
    assert rate.per_s() == 300 / 4  # the first two seconds came before the first count
    busy.set_busy(True)
    now[0] += RATE_WINDOW_S + 6.0
    assert rate.per_s() == 0.0


def test_the_sums_are_what_one_process_would_have_counted() -> None:
    parts = [ServerStats(), ServerStats(), ServerStats()]
    whole = ServerStats()
    for number, value in enumerate([0.0, 0.001, 0.0011, 3.0, 1e9, 0.25]):
        for stats in (parts[number % 3], whole):
            stats.first_token_s.observe(value, number)
            stats.num_output_tokens += number
            stats.ended[f"reason {number % 2}"] = stats.ended.get(f"reason {number % 2}", 0) + 1
    assert total(parts) == whole
    assert sum(whole.first_token_s.counts) == 15
