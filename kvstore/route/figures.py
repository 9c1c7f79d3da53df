"""What Prometheus sees of a router. Event loop only."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric

from kvstore.route.engines import Engine

CONTENT_TYPE = CONTENT_TYPE_LATEST

_HEAD_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)


class Figures:
    """Counts what passes. `num_chunks` is asked at each scrape."""

    def __init__(
        self, engines: Sequence[Engine], num_chunks: Callable[[], Mapping[str, int]], num_connections: Callable[[], int]
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engines, num_chunks, num_connections))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvstore_route_{name}", text, labels, registry=self._registry)

        self.requests = counter("requests", "Requests sent to an engine, and why to this one.", "engine", "reason")
        self.retries = counter(
            "retries", "Requests that an engine did not answer, by what went wrong.", "engine", "why"
        )
        self.broken = counter("broken_answers", "Answers that an engine broke off.", "engine")
        self.responses = counter("http_responses", "Answers, streams by the status they began with.", "code")
        self.hangups = counter("hangups", "Clients that were gone before the end of their answer.")
        self.prompt_bytes = counter("prompt_bytes", "Of prompts, by whether the engine is likely to have it.", "cached")
        self.head_s = Histogram(
            "kvstore_route_head_seconds",
            "From a request's arrival to the head of its answer.",
            registry=self._registry,
            buckets=_HEAD_S,
        )

    def render(self) -> bytes:
        """The page."""
        return generate_latest(self._registry)


class _EngineCollector:
    """What is now."""

    def __init__(
        self, engines: Sequence[Engine], num_chunks: Callable[[], Mapping[str, int]], num_connections: Callable[[], int]
    ) -> None:
        self._engines = engines
        self._num_chunks = num_chunks
        self._num_connections = num_connections

    def collect(self) -> Iterator[Metric]:
        """One family after the other."""
        yield GaugeMetricFamily("kvstore_route_connections", "Open connections of clients.", self._num_connections())
        up = GaugeMetricFamily("kvstore_route_engine_up", "1 for an engine that is up.", labels=("engine",))
        busy = GaugeMetricFamily("kvstore_route_in_flight", "Requests of an engine now.", labels=("engine",))
        known = GaugeMetricFamily("kvstore_route_prefix_chunks", "Chunks it is likely to have.", labels=("engine",))
        num_chunks = self._num_chunks()
        for engine in self._engines:
            up.add_metric((engine.url,), engine.is_up)
            busy.add_metric((engine.url,), engine.num_in_flight)
            known.add_metric((engine.url,), num_chunks.get(engine.url, 0))
        yield from (up, busy, known)
