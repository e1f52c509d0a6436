"""The figures of GET /metrics, in Prometheus' text form, under the names vLLM and SGLang made known.

Promise: a figure that no process can give now (the engine's, while it loads) is left out, not zero.
"""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from minisgl.messages import Ready, Status
from minisgl.server.stats import FrontStats, Histogram

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "minisgl:"


def exposition(model: str, front: FrontStats, status: Status | None, ready: Ready | None) -> bytes:
    """The whole text.

    Args:
        front: the sums over all server processes.
        status, ready: what the engine said last; None = nothing yet.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Families(list(_families(model, front, status, ready))))
    return generate_latest(registry)


class Families:
    """What the library asks for metrics: here, ready-made ones."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """All of them."""
        return self._families


def _families(model: str, front: FrontStats, status: Status | None, ready: Ready | None) -> Iterator[Metric]:
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

    yield gauge("num_open_requests", "Requests not answered yet.", front.num_open_requests)
    yield gauge(
        "num_queued_tokens", "Prompt tokens of requests that have no token yet.", front.num_queued_tokens
    )
    yield counter("prompt_tokens", "Prompt tokens of requests the engine took.", front.num_prompt_tokens)
    yield counter("generation_tokens", "Tokens generated.", front.num_output_tokens)
    yield by_label("request_success", "Requests that ended.", ["finished_reason"], front.ended)
    yield by_label("http_requests", "HTTP answers.", ["method", "handler", "status"], front.responses)
    yield histogram("time_to_first_token_seconds", "From arrival to the first token.", front.first_token_s)
    yield histogram("inter_token_latency_seconds", "Between two tokens of a request.", front.inter_token_s)
    yield histogram("e2e_request_latency_seconds", "From arrival to the end.", front.request_s)
    yield histogram("request_prompt_tokens", "Prompt tokens of a request.", front.prompt_tokens)
    yield histogram("request_generation_tokens", "Tokens generated for a request.", front.output_tokens)
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
