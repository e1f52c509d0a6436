"""GET /metrics in Prometheus' text format, with the metric names of vLLM and SGLang.

Promise: a metric without a known value (the engine's, while it loads) is left out, not zero.
"""

from collections.abc import Iterable, Iterator

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


def exposition(
    model: str, stats: ServerStats, status: Status | None, ready: Ready | None, num_restarts: int = 0
) -> bytes:
    """The body of GET /metrics.

    Args:
        stats: the sums over all server processes.
        status, ready: the engine's last messages; None = none yet.
        num_restarts: how often engines were started again.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Families(list(_families(model, stats, status, ready, num_restarts))))
    return generate_latest(registry)


class Families:
    """A prometheus_client collector of ready-made metrics."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """All metrics."""
        return self._families


def _families(
    model: str, stats: ServerStats, status: Status | None, ready: Ready | None, num_restarts: int
) -> Iterator[Metric]:
    def gauge(name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, help_text, labels=["model_name"])
        family.add_metric([model], value)
        return family

    def counter(name: str, help_text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, help_text, labels=["model_name"])
        family.add_metric([model], value)
        return family

    def by_label(name: str, help_text: str, labels: list[str], values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, help_text, labels=["model_name", *labels])
        for key, value in sorted(values.items()):
            family.add_metric([model, *key.split(" ")], value)
        return family

    def histogram(name: str, help_text: str, values: Histogram) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, help_text, labels=["model_name"])
        buckets, count = [], 0
        for bound, more in zip((*values.bounds, float("inf")), values.counts, strict=True):
            count += more
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), count))
        family.add_metric([model], buckets, values.total)
        return family

    yield gauge("num_open_requests", "Requests not answered yet.", stats.num_open_requests)
    yield gauge(
        "num_queued_tokens", "Prompt tokens of requests that have no token yet.", stats.num_queued_tokens
    )
    yield counter("engine_restarts", "How often the engine was started again.", num_restarts)
    yield counter("prompt_tokens", "Prompt tokens of requests the engine took.", stats.num_prompt_tokens)
    yield counter("generation_tokens", "Tokens generated.", stats.num_output_tokens)
    yield by_label("request_success", "Requests that ended.", ["finished_reason"], stats.ended)
    yield by_label("http_requests", "HTTP answers.", ["method", "handler", "status"], stats.responses)
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
            yield by_label(name, help_text, ["api_key", label], values)
    yield histogram("time_to_first_token_seconds", "From arrival to the first token.", stats.first_token_s)
    yield histogram("inter_token_latency_seconds", "Between two tokens of a request.", stats.inter_token_s)
    yield histogram("e2e_request_latency_seconds", "From arrival to the end.", stats.request_s)
    yield histogram(
        "request_time_per_output_token_seconds",
        "Mean time between two tokens of a request.",
        stats.per_token_s,
    )
    yield histogram("request_prompt_tokens", "Prompt tokens of a request.", stats.prompt_tokens)
    yield histogram("request_generation_tokens", "Tokens generated for a request.", stats.output_tokens)
    if status is None or ready is None:
        return
    yield gauge("num_requests_running", "Requests that have a row in the engine.", status.num_running)
    yield gauge("num_requests_waiting", "Requests that wait in the engine.", status.num_waiting)
    used = status.num_held_pages / max(ready.num_pages, 1)
    yield gauge("kv_cache_usage_perc", "Share (0 to 1) of the KV pages that requests hold.", used)
    cached = status.num_cached_pages / max(ready.num_pages, 1)
    yield gauge("prefix_cache_pages_perc", "Share (0 to 1) of the KV pages in the prefix cache.", cached)
    yield counter("prefix_cache_queries", "Prompt tokens looked up in the cache.", status.num_prompt_tokens)
    yield counter("prefix_cache_hits", "Prompt tokens found in the cache.", status.num_cached_tokens)
    yield counter("num_preemptions", "Requests whose pages others took.", status.num_preemptions)
    yield counter("engine_steps", "Steps of the engine.", status.num_steps)
    yield counter("engine_recompiles", "Compilations after warm-up.", status.num_recompiles)
    yield counter("engine_graph_misses", "Decode steps without a recorded graph.", status.num_graph_misses)
    causes = {"no_finite_logits": status.num_without_logits, "no_token_left": status.num_without_token}
    yield by_label("engine_request_errors", "Requests that the engine could give no token.", ["code"], causes)
    for part, counts, seconds in zip(
        REQUEST_PARTS, status.request_counts, status.request_part_s, strict=False
    ):  # an engine that knows none sends none
        values = Histogram(REQUEST_BOUNDS_S, counts, seconds)
        yield histogram(f"request_{part}_time_seconds", REQUEST_HELP[part], values)
    if status.step_counts:
        bounds = tuple(round(bound / 1e3, 6) for bound in STEP_BOUNDS_MS)
        steps = Histogram(bounds, status.step_counts, sum(status.step_part_s))
        yield histogram("engine_step_seconds", "Steps of the engine, by their length.", steps)
        yield counter("engine_gc_seconds", "Time that Python's garbage collection took.", status.gc_s)
