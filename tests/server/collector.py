"""An OpenTelemetry collector for tests: it keeps the spans that it gets by OTLP over HTTP."""

import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from running_server import eventually


class SentSpan(NamedTuple):
    """A span as the collector got it. Times are Unix times in seconds."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    trace_state: str
    begin_s: float
    end_s: float
    attributes: dict[str, Any]
    failed: bool
    events: list[tuple[str, dict[str, Any]]]
    resource: dict[str, Any]

    @property
    def call_id(self) -> str:
        return self.attributes.get("minisgl.request_id", "")


class Collector:
    """Listens on a port of its own while the `with` block runs."""

    def __init__(self) -> None:
        self.spans: list[SentSpan] = []
        self.headers: list[dict[str, str]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces"
                assert self.headers["Content-Type"] == "application/x-protobuf"
                collector.headers.append(dict(self.headers))
                collector.spans += spans_in(ExportTraceServiceRequest.FromString(data))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "Collector":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def call(self, call_id: str) -> tuple[SentSpan, list[SentSpan]]:
        """The span of the call with this X-Request-Id and those below it, once they have come."""

        def find() -> list[SentSpan]:
            return [span for span in list(self.spans) if span.call_id == call_id]

        eventually(find, f"a span of {call_id}")
        (root,) = find()
        return root, [span for span in self.spans if span.parent_id == root.span_id]


def spans_in(message: ExportTraceServiceRequest) -> list[SentSpan]:
    return [
        SentSpan(
            span.name,
            Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.trace_state,
            span.start_time_unix_nano / 1e9,
            span.end_time_unix_nano / 1e9,
            values(span.attributes),
            span.status.code == Status.STATUS_CODE_ERROR,
            [(event.name, values(event.attributes)) for event in span.events],
            values(resource.resource.attributes),
        )
        for resource in message.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def values(attributes: Sequence[KeyValue]) -> dict[str, Any]:
    return {one.key: value(one.value) for one in attributes}


def value(one: AnyValue) -> Any:
    kind = one.WhichOneof("value")
    assert kind is not None
    if kind == "array_value":
        return [value(part) for part in one.array_value.values]
    return getattr(one, kind)
