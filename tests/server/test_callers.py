"""Which web pages and host names may call a server without a key, and with one."""

import json
import socket
from collections.abc import Iterator

import pytest
from multidict import CIMultiDict, CIMultiDictProxy
from running_server import RunningServer
from small_model import make_folder
from test_service import ask

from minisgl.config import ServerConfig, check_server_config
from minisgl.errors import ConfigError, RequestError
from minisgl.server.http.callers import allowed_hosts, check_host, check_origin

OWN = "llm.example.org"
CHAT = "https://chat.example"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Two processes without a key."""
    folder = make_folder(tmp_path_factory.mktemp("callers") / "model")
    with RunningServer(folder, api_workers=2, allowed_host=[OWN], cors_origin=[CHAT]) as running:
        yield running.ready()


def code_of(body: bytes) -> str | None:
    return json.loads(body).get("error", {}).get("code")


def refusal_of(server: ServerConfig, *hosts: str) -> str | None:
    headers = CIMultiDictProxy(CIMultiDict([("Host", host) for host in hosts]))
    try:
        check_host(headers, allowed_hosts(server))
    except RequestError as error:
        return str(error) if error.status == 403 else None
    return None


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8000",
        "localhost.:8000",
        "127.0.0.1:1",
        "10.1.2.3",
        "[::1]:8000",
        "[fe80::1]",
        "",
        socket.gethostname(),
        f"{socket.gethostname()}:8000",
        "bound.example:8000",
        f"{OWN.upper()}:443",
    ],
)
def test_addresses_and_the_servers_own_names_are_answered(host: str) -> None:
    assert refusal_of(ServerConfig(host="bound.example", allowed_host=(OWN,)), host) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "notlocalhost",
        "2130706433",
        "0x7f.1",
        "[::1].evil.example",
        "[evil.example]",
        f"sub.{OWN}",
        "a b",
    ],
)
def test_other_names_are_refused_with_the_flag_that_allows_them(host: str) -> None:
    words = refusal_of(ServerConfig(allowed_host=(OWN,)), host)
    assert words is not None
    assert "--allowed-host" in words
    assert refusal_of(ServerConfig(), "localhost", host) is not None
    assert refusal_of(ServerConfig(api_key=("key",)), host) is None
    assert refusal_of(ServerConfig(allowed_host=("*",)), host) is None


def test_a_call_without_host_is_answered() -> None:
    assert refusal_of(ServerConfig()) is None


def test_a_refusal_repeats_little_of_the_name() -> None:
    words = refusal_of(ServerConfig(), "x" * 5000 + "\n\x1b[0m")
    assert words is not None
    assert len(words) < 300
    assert words.isprintable()


@pytest.mark.parametrize("name", ["http://a", "a:80", "a/b", "", "a b", "::1"])
def test_an_allowed_host_is_a_bare_name(name: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-host"):
        check_server_config(ServerConfig(allowed_host=(name,)))


@pytest.mark.parametrize(
    ("method", "sent", "is_refused"),
    [
        ("POST", {}, False),
        ("POST", {"Origin": "https://evil"}, True),
        ("GET", {"Origin": "https://evil"}, True),
        ("OPTIONS", {"Origin": "https://evil"}, True),
        ("POST", {"Origin": "null"}, True),
        ("POST", {"Origin": ""}, True),
        ("POST", {"Origin": CHAT}, False),
        ("POST", {"Origin": CHAT + ".evil"}, True),
        ("POST", {"Origin": "http://localhost:8000"}, False),
        ("POST", {"Origin": "http://LOCALHOST:8000"}, False),
        ("POST", {"Origin": "http://localhost:3000"}, True),
        ("POST", {"Origin": "http://localhost"}, True),
        ("POST", {"Origin": "ftp://localhost:8000"}, True),
        (
            "POST",
            {"Origin": "https://evil", "Host": "evil"},
            False,
        ),  # the Host is refused, or a key is asked for
        ("POST", {"Origin": "https://name", "Host": "name:443"}, False),
        ("POST", {"Origin": "http://name:80", "Host": "name"}, False),
        ("POST", {"Origin": "https://name:80", "Host": "name"}, True),
        # A proxy that gives the server another Host than the browser's: the browser knows better.
        ("POST", {"Origin": "https://proxy", "Sec-Fetch-Site": "same-origin"}, False),
        ("POST", {"Sec-Fetch-Site": "cross-site"}, True),
        ("POST", {"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:8000"}, True),
        ("POST", {"Sec-Fetch-Site": "cross-site", "Origin": CHAT}, False),
        ("GET", {"Sec-Fetch-Site": "cross-site"}, False),  # a link
        ("GET", {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil"}, True),
        ("GET", {"Sec-Fetch-Site": "none"}, False),
    ],
)
def test_pages_of_other_origins_are_refused(method: str, sent: dict[str, str], is_refused: bool) -> None:
    headers = CIMultiDictProxy(CIMultiDict({"Host": "localhost:8000", **sent}))
    words = ""
    try:
        check_origin(method, headers, {CHAT})
    except RequestError as error:
        words = str(error)
    assert ("--cors-origin" in words) == is_refused
    if "Origin" in sent:
        check_origin(method, headers, {"*"})


def test_without_a_key_a_rebound_name_reads_and_does_nothing(server: RunningServer) -> None:
    evil = {"Host": f"evil.example:{server.port}"}
    for _ in range(8):  # either process
        for path, method in (("/abort", "POST"), ("/v1/models", "GET"), ("/nothing", "GET")):
            status, _, body = ask(server, path, method, {} if method == "POST" else None, **evil)
            assert (status, code_of(body)) == (403, "host_not_allowed")
    assert ask(server, "/v1/models", Host=OWN)[0] == 200
    assert ask(server, "/v1/models", Host=f"10.2.3.4:{server.port}")[0] == 200


@pytest.mark.parametrize("path", ["/health", "/health/ready", "/metrics"])
def test_monitors_may_use_any_name(server: RunningServer, path: str) -> None:
    assert ask(server, path, Host="minisgl.pods.example:8000")[0] == 200


def test_a_page_that_no_browser_marks_is_known_by_its_origin(server: RunningServer) -> None:
    body = {"prompt": "@say fine", "max_tokens": 9}
    for origin in ("http://evil.example", "null"):
        status, headers, answer = ask(server, "/v1/completions", "POST", body, Origin=origin)
        assert (status, code_of(answer)) == (403, "origin_not_allowed")
        assert "access-control-allow-origin" not in headers
        preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        assert ask(server, "/v1/completions", "OPTIONS", **preflight)[0] == 403
    status, headers, _ = ask(server, "/v1/completions", "POST", body, Origin=CHAT)
    assert (status, headers["access-control-allow-origin"]) == (200, CHAT)
    assert ask(server, "/v1/completions", "OPTIONS", Origin=CHAT)[0] == 204
    own = f"http://127.0.0.1:{server.port}"
    assert ask(server, "/v1/completions", "POST", body, Origin=own)[0] == 200
