"""What Prometheus sees of an engine. Event loop only; the engine's own figures are those of its last step."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric

from kvstore.core.traces import Tracer
from kvstore.engine_connector.engine.outputs import EngineStats, RequestOutput

CONTENT_TYPE = CONTENT_TYPE_LATEST

_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_ITL_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)


class Figures:
    """Counts what passes through the server. `stats` is asked at each scrape."""

    def __init__(
        self, stats: Callable[[], EngineStats | None], num_connections: Callable[[], int], tracer: Tracer | None = None
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats, num_connections, tracer))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvstore_engine_{name}", text, labels, registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"kvstore_engine_{name}", text, registry=self._registry, buckets=buckets)

        self.responses = counter("http_responses", "Answers, streams by the status they began with.", "path", "code")
        self.hangups = counter("hangups", "Clients that were gone before their answer, or did not read it.")
        self._finished = counter("samples", "Samples answered in full, by why they ended.", "finish_reason")
        self._prompt = counter("prompt_tokens", "Tokens of answered prompts.")
        self._output = counter("output_tokens", "Tokens of answers.")
        self._cached = counter("cached_tokens", "Tokens of answered prompts that were not computed.", "source")
        self.ttft_s = histogram("ttft_seconds", "From a request's arrival to its first token.", _TTFT_S)
        self.itl_s = histogram("itl_seconds", "Between two tokens of a sample.", _ITL_S)
        self.e2e_s = histogram("request_seconds", "From a request's arrival to the end of its answer.", _E2E_S)
        for source in ("local", "fetched"):
            self._cached.labels(source)

    def count(self, outputs: Mapping[tuple[str, int], RequestOutput]) -> None:
        """A request was answered."""
        for (_, index), output in outputs.items():
            self._finished.labels(str(output.finish_reason)).inc()
            self._output.inc(len(output.token_ids))
            if index == 0:
                self._prompt.inc(output.num_prompt_tokens)
                self._cached.labels("local").inc(output.num_local_cached_tokens)
                self._cached.labels("fetched").inc(output.num_fetched_tokens)

    def render(self) -> bytes:
        """The page."""
        return generate_latest(self._registry)


class _EngineCollector:
    """Queue, pages and totals, as the engine counts them."""

    def __init__(
        self, stats: Callable[[], EngineStats | None], num_connections: Callable[[], int], tracer: Tracer | None
    ) -> None:
        self._tracer = tracer
        self._stats = stats
        self._num_connections = num_connections

    def collect(self) -> Iterator[Metric]:
        """One family after the other."""
        yield GaugeMetricFamily("kvstore_engine_connections", "Open connections.", self._num_connections())
        if self._tracer is not None:
            spans = CounterMetricFamily(
                "kvstore_engine_trace_spans", "Spans: exported; dropped and failed are lost.", labels=("result",)
            )
            for result, count in self._tracer.counts().items():
                spans.add_metric((result,), count)
            yield spans
        stats = self._stats()
        if stats is None:
            return
        requests = GaugeMetricFamily("kvstore_engine_requests", "Requests now, by state.", labels=("state",))
        for state in ("waiting", "loading", "running", "draining"):
            requests.add_metric((state,), getattr(stats, f"num_{state}"))
        yield requests
        yield GaugeMetricFamily("kvstore_engine_queue_limit", "Requests that may wait.", stats.max_waiting)
        pages = GaugeMetricFamily("kvstore_engine_pages", "Pages of the KV cache, by state.", labels=("state",))
        pages.add_metric(("free",), stats.num_free_pages)
        pages.add_metric(("held",), stats.num_pages - stats.num_free_pages)
        yield pages
        yield CounterMetricFamily("kvstore_engine_refused", "Requests turned away: queue full.", stats.num_refused)
        computed = CounterMetricFamily(
            "kvstore_engine_prefill_tokens", "Tokens of prompts, by where their KV came from.", labels=("source",)
        )
        for source in ("prefilled", "local_cached", "fetched"):
            computed.add_metric((source,), getattr(stats.total, source))
        yield computed
        yield CounterMetricFamily(
            "kvstore_engine_preemptions", "Samples that lost their pages.", stats.total.preemptions
        )
