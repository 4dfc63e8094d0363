"""``GET /metrics``: what the engine counted, as Prometheus reads it.

The engine counts; this only shows, anew whenever it is asked, so that nothing is counted twice.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from octavo.inference import Engine, Histogram
from octavo.server.operations import Operation

__all__ = ["EngineCollector", "Metrics"]

COUNTERS = (
    ("submitted", "octavo_requests_submitted", "Requests that were taken"),
    ("refused", "octavo_requests_refused", "Requests for which the queue was full"),
    ("prompt_tokens", "octavo_prompt_tokens", "Tokens of prompts that were started"),
    ("reused_tokens", "octavo_prompt_tokens_reused", "Of them, those whose keys and values were there already"),
    ("answer_tokens", "octavo_answer_tokens", "Tokens that were told"),
    ("steps", "octavo_steps", "Calls of the model"),
    ("rows", "octavo_rows", "Tokens that were read in them; over steps, the mean batch"),
    ("cast_elements", "octavo_cast_elements", "Elements of inputs that met a static scale"),
    ("saturated_elements", "octavo_saturated_elements", "Of them, those that it clipped"),
)
HISTOGRAMS = (
    ("first_token_s", "octavo_first_token_seconds", "From a request to its first token"),
    ("token_s", "octavo_token_seconds", "From one token of an answer to the next"),
    ("answer_s", "octavo_answer_seconds", "From a request to its end"),
)


class EngineCollector(Collector):
    """Reads an engine's counters."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """All there is to see now."""
        metrics, load = self._engine.metrics, self._engine.load
        for name, shown, about in COUNTERS:
            yield CounterMetricFamily(shown, about, value=getattr(metrics, name))
        finished = CounterMetricFamily("octavo_requests_finished", "Requests that are over, by why", labels=["reason"])
        for reason, count in metrics.finished.items():
            finished.add_metric([reason.value], count)
        yield finished
        for name, shown, about in HISTOGRAMS:
            histogram: Histogram = getattr(metrics, name)
            yield HistogramMetricFamily(shown, about, buckets=_buckets(histogram), sum_value=histogram.total)
        yield GaugeMetricFamily("octavo_requests_waiting", "Requests in the queue", value=load.waiting)
        yield GaugeMetricFamily("octavo_requests_running", "Requests in the batch", value=load.running)
        pages = GaugeMetricFamily("octavo_cache_pages", "Pages of keys and values, by whose they are", labels=["state"])
        free = load.pages - load.pages_used - load.pages_idle
        for state, count in (("used", load.pages_used), ("idle", load.pages_idle), ("free", free)):
            pages.add_metric([state], count)
        yield pages


class Metrics:
    """The surface of counters."""

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine))

    def operations(self) -> list[Operation]:
        """Of the surface."""
        about = "Counters for Prometheus"
        return [Operation(method="GET", path="/metrics", run=self.show, about=about, answers=("text/plain",))]

    async def show(self, request: Request) -> Response:
        """In Prometheus' text format."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """How many were at most each bound; the last is all of them."""
    counts = list(histogram.counts)
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return [(bound, sum(counts[: i + 1])) for i, bound in enumerate(bounds)]
