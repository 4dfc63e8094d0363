"""``GET /metrics``: the engine's counters in Prometheus' text format, read from the engine at each request."""

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from octavo.inference import Engine, LatencyHistogram
from octavo.server.operations import Operation

__all__ = ["EngineCollector", "Metrics"]

COUNTERS = (
    ("submitted", "octavo_requests_submitted", "Requests that were accepted"),
    ("refused", "octavo_requests_refused", "Requests refused because the queue was full"),
    ("prompt_tokens", "octavo_prompt_tokens", "Tokens of prompts that were started"),
    ("reused_tokens", "octavo_prompt_tokens_reused", "Of them, those whose keys and values were in the cache"),
    ("answer_tokens", "octavo_answer_tokens", "Tokens that were generated"),
    ("steps", "octavo_steps", "Calls of the model"),
    ("rows", "octavo_rows", "Tokens read in all steps; divided by steps, the mean batch"),
    ("cast_elements", "octavo_cast_elements", "Elements of inputs cast with a static scale"),
    ("saturated_elements", "octavo_saturated_elements", "Of them, those that saturated"),
)
HISTOGRAMS = (
    ("first_token_s", "octavo_first_token_seconds", "Time from a request to its first token"),
    ("token_s", "octavo_token_seconds", "Time between tokens of an answer"),
    ("answer_s", "octavo_answer_seconds", "Time from a request to its end"),
)


class EngineCollector(Collector):
    """Prometheus collector of an engine's counters."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield all current metrics."""
        metrics, load = self._engine.metrics, self._engine.load
        for name, shown, about in COUNTERS:
            yield CounterMetricFamily(shown, about, value=getattr(metrics, name))
        finished = CounterMetricFamily("octavo_requests_finished", "Requests that ended, by reason", labels=["reason"])
        for reason, count in metrics.finished.items():
            finished.add_metric([reason.value], count)
        yield finished
        for name, shown, about in HISTOGRAMS:
            histogram: LatencyHistogram = getattr(metrics, name)
            bounds = [*map(str, histogram.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
            yield HistogramMetricFamily(shown, about, buckets=buckets, sum_value=histogram.total)
        yield GaugeMetricFamily("octavo_requests_waiting", "Requests in the queue", value=load.waiting)
        yield GaugeMetricFamily("octavo_requests_running", "Requests in the batch", value=load.running)
        pages = GaugeMetricFamily("octavo_cache_pages", "Pages of keys and values, by state", labels=["state"])
        free = load.pages - load.pages_used - load.pages_idle
        for state, count in (("used", load.pages_used), ("idle", load.pages_idle), ("free", free)):
            pages.add_metric([state], count)
        yield pages


class Metrics:
    """Metrics endpoint."""

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine))

    def operations(self) -> list[Operation]:
        """Return the endpoint's operation."""
        about = "Counters for Prometheus"
        return [Operation(method="GET", path="/metrics", run=self.show, about=about, answers=("text/plain",))]

    async def show(self, request: Request) -> Response:
        """Return all metrics in Prometheus' text format."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)
