"""Clients that send too much, too slowly, or no HTTP at all: limits hold, and the log stays readable."""

import gzip
import json
import re
import socket
import subprocess
import time
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from running_server import LIMIT_S, RunningServer, eventually
from small_model import CONTEXT, make_folder

from minisgl.text.messages import MAX_MESSAGES

UPLOAD_LIMIT_S = 2.0
BODY_BYTES = 3_000_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = make_folder(tmp_path_factory.mktemp("hostile") / "model")
    limits: dict[str, Any] = {"max_body_bytes": BODY_BYTES, "max_upload_bytes": 2 * BODY_BYTES}
    with RunningServer(folder, upload_timeout_s=UPLOAD_LIMIT_S, **limits) as running:
        yield running.ready()


class Raw:
    """One connection, byte by byte."""

    def __init__(
        self,
        server: RunningServer,
        *headers: str,
        body: bytes = b"",
        path: str = "/v1/completions",
        request_bytes: bytes | None = None,
    ) -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S)
        head = [f"POST {path} HTTP/1.1", "Host: localhost", *headers, "", ""]
        self._socket.sendall(request_bytes or "\r\n".join(head).encode() + body)

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, as much of the body as is there with them)."""
        data = b""
        while b"\r\n\r\n" not in data:
            piece = self._socket.recv(65536)
            assert piece, f"closed after {data!r}"
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        first, *rest = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in rest)
        while len(body) < int(headers.get("content-length", 0)):
            body += self._socket.recv(65536)
        return int(first.split()[1]), headers, body

    def error(self) -> tuple[int, str]:
        """(status, OpenAI's error code)."""
        status, headers, body = self.answer()
        assert headers["content-type"].startswith("application/json"), body
        return status, json.loads(body)["error"]["code"]

    def close(self) -> None:
        self._socket.close()


def still_serves(server: RunningServer) -> None:
    status, answer = server.complete("@say fine")
    assert (status, answer["choices"][0]["text"]) == (200, "fine")


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/abort"])
def test_an_upload_that_never_ends_gets_a_408(server: RunningServer, path: str) -> None:
    began = time.monotonic()
    with closing(Raw(server, "Content-Length: 1000", body=b'{"prompt": ', path=path)) as raw:
        assert raw.error() == (408, "upload_timeout")
    assert UPLOAD_LIMIT_S <= time.monotonic() - began < LIMIT_S
    still_serves(server)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_unfinished_uploads_together_have_a_budget(server: RunningServer, is_chunked: bool) -> None:
    length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {BODY_BYTES}"
    piece = (b"%x\r\n" % BODY_BYTES if is_chunked else b"") + b" " * (BODY_BYTES - 1)
    held = [Raw(server, length, body=piece) for _ in range(2)]
    eventually(lambda: num_upload_bytes(server) == 2 * (BODY_BYTES - 1), "both are held", UPLOAD_LIMIT_S)
    with closing(Raw(server, length, body=piece[:1000])) as third:
        assert third.error() == (429, "too_many_uploads")
    assert held[0].error() == (408, "upload_timeout")
    assert held[1].error() == (408, "upload_timeout")
    for raw in held:
        raw.close()
    still_serves(server)


def test_uploads_that_only_announce_hold_nobody_up(server: RunningServer) -> None:
    lengths = [f"Content-Length: {BODY_BYTES}"] * 16 + ["Transfer-Encoding: chunked"] * 16
    held = [Raw(server, length) for length in lengths]
    body = b'{"prompt": "@say fine"}'
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    for raw in [Raw(server, "Transfer-Encoding: chunked", body=body) for _ in range(40)]:
        assert raw.answer()[0] == 200
        raw.close()
    for raw in held:
        raw.close()


def num_upload_bytes(server: RunningServer) -> int:
    return server.call("/server_info")[1]["server"]["num_upload_bytes"]


def test_a_client_that_leaves_its_upload_gives_the_room_back(server: RunningServer) -> None:
    for _ in range(5):
        Raw(server, f"Content-Length: {BODY_BYTES}").close()
    eventually(lambda: server.complete("@say fine")[0] == 200, "there is room", UPLOAD_LIMIT_S / 2)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/abort"])
def test_a_body_that_says_it_is_too_large_is_not_read(server: RunningServer, path: str) -> None:
    with closing(Raw(server, f"Content-Length: {BODY_BYTES + 1}", path=path)) as raw:
        assert raw.error() == (413, "body_too_large")


def test_packed_bodies_are_measured_unpacked(server: RunningServer) -> None:
    body = gzip.compress(json.dumps({"prompt": "@say fine"}).encode())
    headers = ("Content-Encoding: gzip", f"Content-Length: {len(body)}")
    with closing(Raw(server, *headers, body=body)) as raw:
        assert raw.answer()[0] == 200
    bomb = gzip.compress(b" " * (BODY_BYTES + 1))
    with closing(Raw(server, "Content-Encoding: gzip", f"Content-Length: {len(bomb)}", body=bomb)) as raw:
        assert raw.error() == (413, "body_too_large")


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_packed_bodies_take_as_much_of_the_budget_as_they_hold(server: RunningServer, encoding: str) -> None:
    """Though a few thousand bytes travel for each of them."""
    pack = gzip.compress if encoding == "gzip" else zlib.compress
    body = pack(json.dumps({"prompt": "@say fine", "pad": " " * (BODY_BYTES - 1000)}).encode())
    headers = (f"Content-Encoding: {encoding}", f"Content-Length: {len(body)}")

    def num_upload_bytes() -> int:
        return server.call("/server_info")[1]["server"]["num_upload_bytes"]

    held = [Raw(server, *headers, body=body[:-1]) for _ in range(2)]
    eventually(lambda: num_upload_bytes() >= 2 * (BODY_BYTES - 1000), "both are counted", UPLOAD_LIMIT_S)
    with closing(Raw(server, *headers, body=body)) as third:
        assert third.error() == (429, "too_many_uploads")
    for raw in held:
        raw.close()
    eventually(lambda: num_upload_bytes() == 0, "the room is given back", UPLOAD_LIMIT_S)
    still_serves(server)


@pytest.mark.parametrize(
    ("headers", "body", "status", "code"),
    [
        (("Content-Encoding: foo",), b"{}", 415, "unsupported_encoding"),
        (("Content-Encoding: gzip",), b"{}", 400, "invalid_body"),
        (("Expect: a-miracle",), b"{}", 417, "expectation_failed"),
    ],
)
def test_what_the_http_parser_lets_through_is_refused_as_openais_object(
    server: RunningServer, headers: tuple[str, ...], body: bytes, status: int, code: str
) -> None:
    with closing(Raw(server, *headers, f"Content-Length: {len(body)}", body=body)) as raw:
        assert raw.error() == (status, code)
    still_serves(server)


def test_a_client_that_asks_first_may_go_on(server: RunningServer) -> None:
    body = b'{"prompt": "@say fine"}'
    with closing(Raw(server, "Expect: 100-continue", f"Content-Length: {len(body)}")) as raw:
        assert raw.answer()[0] == 100
        raw._socket.sendall(body)
        assert raw.answer()[0] == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"no request line\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # a TLS handshake
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nno header\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Large: " + b"x" * 10_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 10_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["request-line", "tls", "header", "large-header", "large-path"],
)
def test_what_the_http_parser_refuses_gets_openais_object_and_a_request_id(
    server: RunningServer, request_bytes: bytes
) -> None:
    with closing(Raw(server, request_bytes=request_bytes)) as raw:
        status, headers, body = raw.answer()
        assert raw._socket.recv(1) == b"", "the connection is closed"
    error = json.loads(body)["error"]
    assert (status, headers["content-type"]) == (400, "application/json"), body
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_http", None)
    assert error["message"].startswith("the request can't be read: ")
    assert len(error["message"]) < 300
    assert re.fullmatch(r"[0-9a-f]{32}", headers["x-request-id"])
    still_serves(server)


def test_what_is_no_http_is_refused_and_leaves_no_traceback_in_the_log(server: RunningServer) -> None:
    with closing(Raw(server, "Transfer-Encoding: chunked", body=b"ZZ\r\n")) as raw:
        assert raw.answer()[0] == 400
    with closing(Raw(server, "Content-Length: minus one")) as raw:
        assert raw.answer()[0] == 400
    with closing(Raw(server, "Content-Encoding: gzip", "Content-Length: 100", body=b"{}" * 25)) as raw:
        assert raw.answer()[0] == 400
    still_serves(server)
    log = server.errors.read_text()
    assert "Traceback" not in log
    assert "Error handling request" not in log


def test_a_prompt_far_beyond_the_context_is_refused_while_others_go_on(server: RunningServer) -> None:
    body = {"model": "tiny", "prompt": "1" * (BODY_BYTES - 1000)}
    began = time.monotonic()
    status, answer, _ = server.call("/v1/completions", body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert f"more than {CONTEXT} tokens" in answer["error"]["message"]
    chat = {"messages": [{"role": "user", "content": body["prompt"]}]}
    status, answer, _ = server.call("/v1/chat/completions", chat)
    assert (answer["error"]["code"], answer["error"]["param"]) == ("context_length_exceeded", "messages")
    assert time.monotonic() - began < 5.0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "1" * (BODY_BYTES - 1000)}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "1" * (BODY_BYTES - 1000)}]}, "messages"),
        ("/detokenize", {"tokens": [5] * 500_000}, "tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 60_000}, "messages"),
    ],
)
def test_every_text_has_a_bound_that_the_refusal_names(
    server: RunningServer, path: str, body: dict[str, Any], param: str
) -> None:
    status, answer, _ = server.call(path, body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert re.search(rf"(more than|up to) ({CONTEXT}|{MAX_MESSAGES}) ", answer["error"]["message"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["x" * 1001]}, "stop"),
        ({"stop": [f"{n}" + "x" * 60_000 for n in range(16)], "n": 128}, "stop"),
        ({"stop": ["x"] * 100_000}, "stop"),
        ({"stop_token_ids": list(range(1025))}, "stop_token_ids"),
        ({"stop_token_ids": [-1] * 200_000}, "stop_token_ids"),
        ({"stop_token_ids": [5, -1]}, "stop_token_ids"),
        ({"prompt": [-1] * 200_000}, "prompt"),
        ({"temperature": 10**400}, "temperature"),
        ({"seed": 10**4000}, "seed"),
    ],
)
def test_long_lists_are_refused_at_once_in_few_words(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    began = time.monotonic()
    status, answer = server.complete(**{"prompt": "@say x", **fields})
    assert time.monotonic() - began < 5.0
    assert status == 400
    assert len(answer["error"]["message"]) < 200
    assert answer["error"]["param"] in (param, None)


def test_the_longest_stop_strings_of_many_choices_cost_little(server: RunningServer) -> None:
    stop = [f"{n:x}" + "x" * 999 for n in range(16)]
    began = time.monotonic()
    status, answer = server.complete("@say hello world", stop=stop, n=128)
    assert status == 200, answer
    assert {choice["text"] for choice in answer["choices"]} == {"hello world"}
    assert time.monotonic() - began < 5.0


def test_the_memory_of_the_server_does_not_grow_with_unfinished_uploads(server: RunningServer) -> None:
    def resident_bytes() -> int:
        pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
        return pages * int(subprocess.check_output(["getconf", "PAGESIZE"]))

    before = resident_bytes()
    held = [Raw(server, f"Content-Length: {BODY_BYTES}") for _ in range(20)]
    for raw in held:
        raw._socket.settimeout(0.2)
        with closing(raw):
            try:
                raw._socket.sendall(b" " * (BODY_BYTES - 1))
            except OSError:
                continue  # refused and not read
    assert resident_bytes() - before < 20 * BODY_BYTES / 2
    eventually(lambda: server.complete("@say fine")[0] == 200, "well", 2 * UPLOAD_LIMIT_S)
