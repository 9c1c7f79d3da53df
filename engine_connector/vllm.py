"""kvstore as a KV connector of vLLM (0.32), loaded from outside its tree:

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVStoreConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvstore.engine_connector.vllm", "kv_load_failure_policy": "recompute"}'

vLLM makes the object once beside its scheduler and once in each worker, in one process or in several: so many connections of
one instance. Each verb translates to the same verb of StoreSchedulerSide (through VllmRequests) or StoreWorkerSide; what
those promise is in protocol.py. Loads and saves are asynchronous only: a synchronous load that fails lets the step compute,
and a connector save, blocks made of garbage.

KV events of tiers come from the sidecar (`kvstore serve --events`) and not from here: it knows what it evicts, and several
engines on one store would announce the same block each.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvstore.client import Client
from kvstore.core.clock import MonotonicClock
from kvstore.engine_connector.layer_groups import LayerGroup
from kvstore.engine_connector.protocol import ConnectorMetadata, Pages, WorkerOutput
from kvstore.engine_connector.rank_outputs import RankOutputs
from kvstore.engine_connector.scheduler_side import StoreSchedulerSide
from kvstore.engine_connector.session import StoreSession
from kvstore.engine_connector.vllm_adapters import Adapters
from kvstore.engine_connector.vllm_engine import (
    Rank,
    engine_specs,
    fails_whole,
    open_pages,
    refuse_unsupported,
    share_vllm_log,
)
from kvstore.engine_connector.vllm_identity import ConnectorSettings, instance_of
from kvstore.engine_connector.vllm_metrics import StoreProm, StoreStats
from kvstore.engine_connector.vllm_requests import VllmRequests
from kvstore.engine_connector.worker_side import StoreWorkerSide
from kvstore.proto.kvstore_pb2 import SCHEDULER, WORKER
from kvstore.tracing import open_tracer

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvstore.otel import OtelTracer

_FLUSH_S = 2.0  # for spans that are still to be sent
_HIT_SOURCES = {"pinned": CacheHitSource.HOST, "nvme": CacheHitSource.DISK, "peer": CacheHitSource.P2P}


@dataclass(frozen=True, slots=True)
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where the types are checked
    """Scheduler to worker, every step."""

    step: ConnectorMetadata
    let_go: frozenset[str]  # held requests whose pages are not used any more


@dataclass(frozen=True, slots=True)
class StepOutput(KVConnectorWorkerMetadata):  # type: ignore[misc]  # as above
    """Workers to scheduler, after steps in which something ended: (rank, output) of each worker that has one."""

    outputs: tuple[tuple[int, WorkerOutput], ...]

    def aggregate(self, other: Self) -> "StepOutput":
        """All of them: RankOutputs remembers who has reported what."""
        return StepOutput(self.outputs + other.outputs)


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # as above
    """Both roles. Raises ConfigError for an engine we do not serve, before it serves anybody."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        share_vllm_log()
        refuse_unsupported(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = ConnectorSettings.from_extra_config(transfer.kv_connector_extra_config)
        self._instance = instance_of(str(transfer.engine_id), vllm_config.instance_id)
        self._num_ranks = vllm_config.parallel_config.tensor_parallel_size
        self._started_ns = time.time_ns()
        self._fails_whole = fails_whole(kv_cache_config)
        self._ranks = RankOutputs(self._num_ranks)
        self._requests: VllmRequests | None = None
        self._worker: _WorkerRole | None = None
        self._tracer: OtelTracer | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a save that is called off is a miss later on."""
        return False

    def shutdown(self) -> None:
        """Give everything back. Safe to call twice."""
        if self._requests is not None:
            self._requests.close()
        if self._worker is not None:
            self._worker.close()
        if self._tracer is not None:
            self._tracer.close(_FLUSH_S)

    # --- scheduler -------------------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """The scheduler is complete: connect."""
        super().bind_kv_cache_manager(kv_cache_manager)
        specs = engine_specs(self._vllm_config, self._kv_cache_config, self._instance)
        client = Client(
            self._settings.socket,
            instance=self._instance,
            role=SCHEDULER,
            tenant=self._settings.tenant,
            specs=specs,
            want_arena=False,
        )
        session = StoreSession(client)
        session.start()
        if self._settings.trace:
            self._tracer = open_tracer("kvstore-connector")
        groups = [LayerGroup.of(spec) for spec in specs]
        side = StoreSchedulerSide(
            session,
            block_tokens=specs[0].hash.block_tokens,
            groups=groups,
            clock=MonotonicClock(),
            fetch=self._settings.fetch,
            chunk_tokens=self._vllm_config.scheduler_config.max_num_batched_tokens,
            tracer=self._tracer,
        )
        self._requests = VllmRequests(
            side,
            Adapters(self._started_ns),
            block_tokens=specs[0].hash.block_tokens,
            has_windows=any(not group.is_full for group in groups),
        )

    def on_new_request(self, request: "Request") -> None:
        """Called once for each request, before anything else."""
        self._on_scheduler.add(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        """Never None: a match is answered within a call's deadline, or is none."""
        num_tokens = self._on_scheduler.match(request, num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Called with 0 tokens for what is not loaded, and once more after each load."""
        self._on_scheduler.allocated(request.request_id, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: "Request", num_external_tokens: int) -> dict[CacheHitSource, int]:
        """By the tiers that the match named; vLLM calls what does not add up unspecified."""
        hits = self._on_scheduler.hit_tokens(request.request_id, num_external_tokens)
        return {_HIT_SOURCES[tier]: num_tokens for tier, num_tokens in hits.items() if tier in _HIT_SOURCES}

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        """Called every step."""
        plan = self._on_scheduler.build_meta(scheduler_output)
        self._ranks.expect(plan.step)
        return StepMetadata(*plan)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Called after every step in which the worker reported something."""
        meta = connector_output.kv_connector_worker_meta
        if meta is not None:
            self._on_scheduler.take(self._ranks.add(meta.outputs))

    def request_finished_all_groups(
        self,
        request: "Request",
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, None]:
        """Called once for each request. True keeps its pages until the worker names it in finished_sending."""
        return self._on_scheduler.finish(request.request_id), None

    def reset_cache(self) -> bool:
        """The weights may have changed in memory, where the fingerprint does not see it."""
        self._on_scheduler.reset()
        return True

    def get_kv_connector_stats(self) -> StoreStats | None:
        """Asked of both roles; the scheduler's half has them all."""
        return None if self._requests is None else StoreStats(data=self._requests.take_counts())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> StoreStats:
        """In the API server."""
        return StoreStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> StoreProm:
        """In the API server."""
        return StoreProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _on_scheduler(self) -> VllmRequests:
        assert self._requests is not None, "vLLM calls bind_kv_cache_manager first"
        return self._requests

    # --- worker ----------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The pages exist: connect and map the arena."""
        rank = Rank(get_tensor_model_parallel_rank(), self._num_ranks)
        pages = open_pages(kv_caches, self._vllm_config, self._kv_cache_config, rank)
        client = Client(
            self._settings.socket,
            instance=self._instance,
            role=WORKER,
            rank=rank.number,
            tenant=self._settings.tenant,
        )
        self._worker = _WorkerRole(StoreSession(client), pages, rank.number)

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        """First call of a step, before pages are overwritten."""
        self._on_worker.side.handle_preemptions(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:  # noqa: ARG002
        """Also in steps without a forward."""
        self._on_worker.start_loads(self._get_connector_metadata().step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: requests of the step have all they need."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole, after the forward."""

    def wait_for_save(self) -> None:
        """After the forward: the pages are full."""
        self._on_worker.side.start_save(self._get_connector_metadata().step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Once a step; the next two answer from the same output, so that failed pages go with their request."""
        output, failed = self._on_worker.take_output()
        return KVConnectorTransferResults(
            finished_sending=set(self._get_connector_metadata().let_go),
            finished_recving=set(output.finished_loading),
            failed_recving=failed if self._fails_whole else set(),
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages of this step's finished_recving that are to be computed, up to the first of which all is good. Where that is not
        so, vLLM is told of requests instead, and computes all of them."""
        return set() if self._fails_whole else set(self._on_worker.output.failed_block_ids)

    def build_connector_worker_meta(self) -> StepOutput | None:
        """For our scheduler half."""
        output = self._on_worker.output
        return StepOutput(((self._on_worker.rank, output),)) if output.step or output != WorkerOutput() else None

    @property
    def _on_worker(self) -> "_WorkerRole":
        assert self._worker is not None, "vLLM calls register_kv_caches first"
        return self._worker


class _WorkerRole:
    """What lives beside vLLM's pages."""

    def __init__(self, session: StoreSession, pages: Sequence[Pages], rank: int) -> None:
        session.start()
        self.rank = rank
        self._session = session
        self.side = StoreWorkerSide(session)
        self.side.register_pages(*pages)
        self.output = WorkerOutput()  # of this step
        self._loading: dict[str, set[int]] = {}  # pages of each request's loads

    def start_loads(self, step: ConnectorMetadata) -> None:
        """Of the step."""
        for job in step.loads:
            pages = self._loading.setdefault(job.request_id, set())
            pages.update(move.block_id for move in job.moves)
            pages.update(job.lost_block_ids)
        self.side.start_load(step)

    def take_output(self) -> tuple[WorkerOutput, set[str]]:
        """The step's, and the requests that it says have a page that failed."""
        self.output = self.side.get_output()
        loaded = {request_id: self._loading.pop(request_id) for request_id in self.output.finished_loading}
        failed = {request_id for request_id, pages in loaded.items() if pages & self.output.failed_block_ids}
        return self.output, failed

    def close(self) -> None:
        """Safe to call twice."""
        self.side.close()
        self._session.close()
