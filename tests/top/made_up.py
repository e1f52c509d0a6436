"""A made-up server for tests of `minisgl top`: answers in the real shapes, and what it was asked."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from minisgl.server.watch.history import Sample
from minisgl.server.watch.views import (
    EngineHistory,
    EngineMoments,
    EngineRequests,
    EnginesAnswer,
    EngineView,
    HistoryAnswer,
    MomentsAnswer,
    MomentView,
    RequestsAnswer,
    RequestView,
)
from minisgl.server.watch.words import Cause
from minisgl.top.client import Snapshot

NOW = 1_700_000_000.0
KEY = "admin-key"


def made_request(number: int, **changes: Any) -> RequestView:
    """A request that decodes."""
    cause = Cause("pages", 312.0, "312 ms for pages: 12 needed, 3 free", ["--memory-fraction"])
    fields: dict[str, Any] = {
        "number": number, "id": f"call-{number}", "state": "decoding", "arrived_at": NOW + number,
        "total_ms": 1000.0 + number, "first_token_ms": 40.0, "prompt_tokens": 100 + number,
        "cached_tokens": 64, "output_tokens": 7, "priority": 0, "num_preemptions": 0, "ahead": None,
        "end": None, "error_code": "", "phases": [], "why": cause.words, "causes": [cause], "client": None,
    }  # fmt: skip
    return RequestView(**{**fields, **changes})


def made_snapshot(requests: list[RequestView], num_engines: int = 1) -> Snapshot:
    """What a server says whose engines have these requests in turn."""
    sample = Sample(
        time=NOW, output_tokens_per_s=123.0, prompt_tokens_per_s=456.0, running=3, waiting=2, hit_rate=0.25,
        pages_free=50, pages_running=40, pages_cached=10, first_token_p50_ms=41.0, step_p50_ms=7.5,
    )  # fmt: skip
    moment = MomentView(
        number=1, kind="step", reason="graph_miss", at=NOW, until=NOW, count=1, worst_ms=90.0, usual_ms=8.0,
        figures={}, words="a step took 90 ms, usually 8 ms", knobs=["--max-graph-batch"],
    )  # fmt: skip
    ids = range(num_engines)
    columns: dict[str, list[float | None]] = {"output_tokens_per_s": [0.0, 50.0, 100.0]}
    return Snapshot(
        EnginesAnswer(
            time=NOW, version="0", model="made-up",
            engines=[
                EngineView(
                    id=one, state="serving", reason=None, pid=1, silent_s=0.0, device="cpu", num_pages=100,
                    page_size=16, max_rows=8, max_context_tokens=256, startup_ms={}, choices=[], settings={},
                    sample=sample, counters=None,
                )
                for one in ids
            ],
        ),
        HistoryAnswer(
            time=NOW, interval_s=1.0,
            engines=[EngineHistory(id=one, state="serving", columns=columns) for one in ids],
        ),
        RequestsAnswer(
            time=NOW,
            engines=[
                EngineRequests(
                    id=one, state="serving", num_open=1, num_ended=0, requests=requests[one::num_engines]
                )
                for one in ids
            ],
        ),
        MomentsAnswer(time=NOW, engines=[EngineMoments(id=0, state="serving", moments=[moment])], refused=[]),
    )  # fmt: skip


class MadeUpServer:
    """Answers as a minisgl server on a port of this machine. Start it again on its port after `stop`.

    Its engines have the requests in turn.
    """

    def __init__(self, requests: list[RequestView], key: str | None = None, num_engines: int = 1) -> None:
        self.requests = requests
        self.num_engines = num_engines
        self.key = key
        self.aborted: list[str] = []
        self.port = 0
        self._http: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> "MadeUpServer":
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                snapshot = made_snapshot(owner.requests, owner.num_engines)
                answers = {
                    "engines": snapshot.engines,
                    "history": snapshot.history,
                    "requests": snapshot.requests,
                    "moments": snapshot.moments,
                }
                name = self.path.partition("?")[0].removeprefix("/debug/")
                self._answer(answers.get(name))

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                owner.aborted.append(self.path)
                self._answer({"aborted": 1})

            def _answer(self, body: Any) -> None:
                is_known = owner.key is None or self.headers.get("Authorization") == f"Bearer {owner.key}"
                self.send_response(403 if not is_known else 404 if body is None else 200)
                self.end_headers()
                self.wfile.write(msgspec.json.encode(body) if is_known else json.dumps({}).encode())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, daemon=True, kwargs={"poll_interval": 0.01}).start()
        return self

    def stop(self) -> None:
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None
