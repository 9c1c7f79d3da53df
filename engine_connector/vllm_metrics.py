"""What the connector did, among vLLM's own metrics: `vllm:kvstore_*` on its /metrics, and in its log.

The scheduler's half counts (VllmRequests.take_counts), vLLM carries the counts to its API server and hands them to
StoreProm, which is made there. A count that we do not know, from another version of this file, is an error and no metric.
"""

from collections import Counter
from typing import Any

import prometheus_client
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvstore.core.plans import TIERS

COUNTERS = {
    "loads": "Loads from the store that were started.",
    "load_wait_seconds": "Time that requests waited for their loads, from the step that started them.",
    "load_seconds": "Time spent copying blocks into pages; of several ranks, rank 0's.",
    "load_bytes": "Bytes of the blocks copied into pages.",
    "failed_load_blocks": "Blocks of loads that did not come or came too late, and were computed.",
    "save_seconds": "Time spent copying pages into blocks; of several ranks, rank 0's.",
    "save_bytes": "Bytes of the pages copied into blocks.",
    "saved_blocks": "Blocks that this engine brought into the store.",
    "failed_save_blocks": "Blocks that were granted and not written: preempted, or the sidecar has gone.",
    **{f"hit_tokens_{tier}": f"Tokens of started loads that lay in the tier {tier!r} when asked." for tier in TIERS},
}
PREFIX = "vllm:kvstore_"


class StoreStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not installed where the types are checked
    """Counts of COUNTERS by name, since the last ones."""

    data: dict[str, float]

    def aggregate(self, other: KVConnectorStats) -> "StoreStats":
        """See KVConnectorStats."""
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, float]:
        """For a line of vLLM's log."""
        return dict(self.data)

    def reset(self) -> None:
        """See KVConnectorStats."""
        self.data = {}

    def is_empty(self) -> bool:
        """See KVConnectorStats."""
        return not self.data


class StoreProm(KVConnectorPromMetrics):  # type: ignore[misc]  # as above
    """One Prometheus counter for each count, with vLLM's labels."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter: Any = metric_types[prometheus_client.Counter]
        self._counters = {
            name: counter(name=PREFIX + name, documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        for of_all in self._counters.values():  # so that each is there, and 0, from the start
            for values in per_engine_labelvalues.values():
                of_all.labels(*values)

    def observe(self, transfer_stats_data: dict[str, float], engine_idx: int = 0) -> None:
        """See KVConnectorPromMetrics."""
        for name, value in transfer_stats_data.items():
            self._counters[name].labels(*self.per_engine_labelvalues[engine_idx]).inc(value)
