"""GET /metrics in Prometheus' text format, with the metric names of vLLM and SGLang.

Promise: a metric without a known value (the engine's, while it loads) is left out, not zero.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from minisgl.ipc.messages import Ready
from minisgl.ipc.questions import Status
from minisgl.lives import REQUEST_BOUNDS_S, REQUEST_PARTS, STEP_BOUNDS_MS
from minisgl.server.stats import Histogram, ServerStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "minisgl:"
REQUEST_HELP = {
    "queue": "From the engine's taking a request to its first row.",
    "prefill": "From the first row to the first token.",
    "decode": "From the first token to the end.",
    "inference": "From the first row to the end.",
}


class EngineFigures(NamedTuple):
    """What is told of one engine."""

    status: Status | None
    ready: Ready | None
    """The engine's last messages; None = none yet."""
    num_restarts: int = 0
    is_up: bool = True


def exposition(model: str, stats: ServerStats, engines: Sequence[EngineFigures]) -> bytes:
    """The body of GET /metrics.

    Args:
        stats: the sums over all server processes.
        engines: by their numbers. Of several, each has its figures with a label `engine`.
    """
    families = {family.name: family for family in _server_families(model, stats)}
    for number, figures in enumerate(engines):
        labels = {"model_name": model} | ({"engine": str(number)} if len(engines) > 1 else {})
        for family in _engine_families(_Labelled(labels), figures):
            families.setdefault(family.name, family)
            if families[family.name] is not family:
                families[family.name].samples += family.samples
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Families(list(families.values())))
    return generate_latest(registry)


class Families:
    """A prometheus_client collector of ready-made metrics."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """All metrics."""
        return self._families


class _Labelled:
    """Makes metrics with these labels."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._names, self.values = list(labels), list(labels.values())

    def gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, help_text, labels=self._names)
        family.add_metric(self.values, value)
        return family

    def gauges(self, name: str, help_text: str, labels: list[str]) -> GaugeMetricFamily:
        """A family of gauges with more labels, to which the caller adds."""
        return GaugeMetricFamily(PREFIX + name, help_text, labels=[*self._names, *labels])

    def counter(self, name: str, help_text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, help_text, labels=self._names)
        family.add_metric(self.values, value)
        return family

    def by_label(self, name: str, help_text: str, labels: list[str], values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, help_text, labels=[*self._names, *labels])
        for key, value in sorted(values.items()):
            family.add_metric([*self.values, *key.split(" ")], value)
        return family

    def histogram(self, name: str, help_text: str, values: Histogram) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, help_text, labels=self._names)
        buckets, count = [], 0
        for bound, more in zip((*values.bounds, float("inf")), values.counts, strict=True):
            count += more
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), count))
        family.add_metric(self.values, buckets, values.total)
        return family


def _server_families(model: str, stats: ServerStats) -> Iterator[Metric]:
    made = _Labelled({"model_name": model})
    yield made.gauge("num_open_requests", "Requests not answered yet.", stats.num_open_requests)
    yield made.gauge(
        "num_queued_tokens", "Prompt tokens of requests that have no token yet.", stats.num_queued_tokens
    )
    yield made.counter("prompt_tokens", "Prompt tokens of requests the engine took.", stats.num_prompt_tokens)
    yield made.counter("generation_tokens", "Tokens generated.", stats.num_output_tokens)
    yield made.by_label("request_success", "Requests that ended.", ["finished_reason"], stats.ended)
    yield made.by_label("http_requests", "HTTP answers.", ["method", "handler", "status"], stats.responses)
    if stats.key_requests or stats.key_refusals:
        by_key = (
            ("key_requests", "Requests of an API key that ended.", "finished_reason", stats.key_requests),
            (
                "key_tokens",
                "Tokens of an API key; cached ones count as prompt, too.",
                "kind",
                stats.key_tokens,
            ),
            ("key_refusals", "Calls that a limit on the API key refused.", "limit", stats.key_refusals),
        )
        for name, help_text, label, values in by_key:
            yield made.by_label(name, help_text, ["api_key", label], values)
    yield made.histogram(
        "time_to_first_token_seconds", "From arrival to the first token.", stats.first_token_s
    )
    yield made.histogram(
        "inter_token_latency_seconds", "Between two tokens of a request.", stats.inter_token_s
    )
    yield made.histogram("e2e_request_latency_seconds", "From arrival to the end.", stats.request_s)
    yield made.histogram(
        "request_time_per_output_token_seconds",
        "Mean time between two tokens of a request.",
        stats.per_token_s,
    )
    yield made.histogram("request_prompt_tokens", "Prompt tokens of a request.", stats.prompt_tokens)
    yield made.histogram("request_generation_tokens", "Tokens generated for a request.", stats.output_tokens)


def _engine_families(made: _Labelled, figures: EngineFigures) -> Iterator[Metric]:
    status, ready = figures.status, figures.ready
    yield made.gauge("engine_up", "1 if the engine takes requests, else 0.", figures.is_up)
    yield made.counter("engine_restarts", "How often the engine was started again.", figures.num_restarts)
    if status is None or ready is None:
        return
    yield made.gauge("num_requests_running", "Requests that have a row in the engine.", status.num_running)
    yield made.gauge("num_requests_waiting", "Requests that wait in the engine.", status.num_waiting)
    used = status.num_held_pages / max(ready.num_pages, 1)
    yield made.gauge("kv_cache_usage_perc", "Share (0 to 1) of the KV pages that requests hold.", used)
    cached = status.num_cached_pages / max(ready.num_pages, 1)
    yield made.gauge("prefix_cache_pages_perc", "Share (0 to 1) of the KV pages in the prefix cache.", cached)
    if status.window_pages:
        family = made.gauges("kv_window_pages", "Pages of layers that share a window.", ["window", "state"])
        for window, usable, free, held in status.window_pages:
            for state, pages in (("free", free), ("held", held), ("cached", usable - free - held)):
                family.add_metric([*made.values, str(window), state], pages)
        yield family
    yield made.counter(
        "prefix_cache_queries", "Prompt tokens looked up in the cache.", status.num_prompt_tokens
    )
    yield made.counter("prefix_cache_hits", "Prompt tokens found in the cache.", status.num_cached_tokens)
    yield made.counter("num_preemptions", "Requests whose pages others took.", status.num_preemptions)
    yield made.counter("engine_steps", "Steps of the engine.", status.num_steps)
    yield made.counter("engine_recompiles", "Compilations after warm-up.", status.num_recompiles)
    yield made.counter(
        "engine_graph_misses", "Decode steps without a recorded graph.", status.num_graph_misses
    )
    causes = {"no_finite_logits": status.num_without_logits, "no_token_left": status.num_without_token}
    yield made.by_label(
        "engine_request_errors", "Requests that the engine could give no token.", ["code"], causes
    )
    for part, counts, seconds in zip(
        REQUEST_PARTS, status.request_counts, status.request_part_s, strict=False
    ):  # an engine that knows none sends none
        values = Histogram(REQUEST_BOUNDS_S, counts, seconds)
        yield made.histogram(f"request_{part}_time_seconds", REQUEST_HELP[part], values)
    if status.step_counts:
        bounds = tuple(round(bound / 1e3, 6) for bound in STEP_BOUNDS_MS)
        steps = Histogram(bounds, status.step_counts, sum(status.step_part_s))
        yield made.histogram("engine_step_seconds", "Steps of the engine, by their length.", steps)
        yield made.counter("engine_gc_seconds", "Time that Python's garbage collection took.", status.gc_s)
