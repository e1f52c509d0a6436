"""Hands spans to OpenTelemetry's SDK, whose thread sends them to a collector by OTLP over HTTP.

Promise: nothing here waits for the collector except `close`, and that for a limited time. Spans that the
collector does not take are dropped. Only this file imports OpenTelemetry; it is imported with --otlp-endpoint
only. The SDK reads the usual environment variables, such as OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES,
OTEL_TRACES_SAMPLER and OTEL_EXPORTER_OTLP_HEADERS.
"""

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from minisgl import __version__
from minisgl.server.tracing.spans import SpanData

log = logging.getLogger(__name__)

MAX_QUEUED = 8192
"""Spans that wait for the collector, some 2 KB each; then the oldest are dropped."""
BATCH = 512
DELAY_MS = 1000
TIMEOUT_S = 10.0
"""How long the SDK tries to send a batch."""
SAY_AGAIN_S = 600.0
"""The SDK's warnings are logged once in this time."""
PATH = "/v1/traces"


class OpenSpan(NamedTuple):
    """A call's span that has begun."""

    span: Span
    context: Context
    data: SpanData


class SpanExport:
    """Sends spans to `endpoint`, an OTLP collector's base URL or the URL that takes its traces.

    Args:
        rank: of this server process.
    """

    def __init__(self, endpoint: str, rank: int) -> None:
        url = endpoint.rstrip("/")
        url = url if url.endswith(PATH) else url + PATH
        own = Resource(
            {
                "service.name": "minisgl",
                "service.version": __version__,
                "service.instance.id": f"{os.uname().nodename}-{os.getpid()}",
                "minisgl.server_rank": rank,
            }
        )
        self._provider = TracerProvider(
            resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(url, timeout=TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, MAX_QUEUED, DELAY_MS, BATCH))
        self._tracer = self._provider.get_tracer("minisgl", __version__)
        self._propagator = TraceContextTextMapPropagator()
        _limit_warnings(url)

    def begin(self, data: SpanData, parent: Mapping[str, str]) -> OpenSpan | None:
        """Begin the span of a call below that of its headers, if they name one; None = it is not sampled."""
        context = self._propagator.extract(parent) if parent else Context()
        span = self._begin(data, context, SpanKind.SERVER)
        if not span.is_recording():
            return None
        return OpenSpan(span, set_span_in_context(span, context), data)

    def end(self, call: OpenSpan, children: Sequence[SpanData]) -> None:
        """End the span of a call with those below it."""
        for child in children:
            _end(self._begin(child, call.context, SpanKind.INTERNAL), child)
        _end(call.span, call.data)

    def close(self, limit_s: float) -> None:
        """Send what is queued. Returns after `limit_s` in any case; what is left then is dropped."""
        sending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        sending.join(limit_s)
        if sending.is_alive():
            log.warning("the last spans could not be sent in time, and are lost")

    def _begin(self, data: SpanData, context: Context, kind: SpanKind) -> Span:
        return self._tracer.start_span(
            data.name, context, kind, data.attributes, start_time=int(data.begin_s * 1e9)
        )


def _end(span: Span, data: SpanData) -> None:
    for name, at_s, attributes in data.events:
        span.add_event(name, attributes, int(at_s * 1e9))
    if data.error:
        span.set_attribute("error.type", data.error)
        span.set_status(Status(StatusCode.ERROR, data.error))
    span.end(int(data.end_s * 1e9))


def _limit_warnings(url: str) -> None:
    """Log the SDK's warnings as ours, one in `SAY_AGAIN_S`: it has one for each batch and span it drops."""
    said_at = -SAY_AGAIN_S

    def relay(record: logging.LogRecord) -> bool:
        nonlocal said_at
        if record.levelno >= logging.WARNING and time.monotonic() - said_at >= SAY_AGAIN_S:
            said_at = time.monotonic()
            words = " ".join(record.getMessage().split())[:300]
            log.warning("spans for %s are lost or late: %s", url, words)
        return False

    handler = logging.Handler()
    handler.addFilter(relay)
    logger = logging.getLogger("opentelemetry")
    logger.handlers[:] = [handler]
    logger.propagate = False
