"""kvstore as a secondary tier of vLLM's native offloading: its pool in host memory in front, the store behind.

    GPU  <-- vLLM's copies -->  vLLM's pool, of this engine alone  <-- copies in the background -->  the store, shared

    --kv-transfer-config '{"kv_connector": "KVStoreOffloadingConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvstore.engine_connector.vllm_tier",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592, "secondary_tiers":
            [{"type": "KVStoreTier", "module_path": "kvstore.engine_connector.vllm_tier"}]}}'

The connector is vLLM's own; ours adds what a tier is not told: the model that its blocks are of, and a reset of the cache. A
chunk of vLLM's pool is a block of the store. Each job of vLLM is a request of StoreSchedulerSide, so that leases, restarts of
the sidecar and deadlines are handled there.

vLLM's contract for tiers (vllm/v1/kv_offload/tiering/base.py) has no deadline, and asks again for ever what is "being looked
up", or found and then not loaded. So a look-up is answered at the end of its step, and what failed to load is a miss for its
request from then on. Everything runs in vLLM's scheduler thread, but the copies.
"""

import hashlib
import logging
import os
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import vllm
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvstore.client import Client
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import ConfigError
from kvstore.core.keys import KVSTORE_PAGE_FORMAT, KVSpec
from kvstore.core.limits import LOAD_DEADLINE_S
from kvstore.engine_connector.protocol import CacheOptions, FetchPolicy, ScheduledRequest, WorkerOutput
from kvstore.engine_connector.scheduler_side import StoreSchedulerSide
from kvstore.engine_connector.session import StoreSession
from kvstore.engine_connector.vllm_engine import engine_specs, share_vllm_log
from kvstore.engine_connector.vllm_identity import instance_of
from kvstore.engine_connector.worker_side import StoreWorkerSide
from kvstore.proto.kvstore_pb2 import SCHEDULER

logger = logging.getLogger(__name__)
_SALT_NBYTES = 16
_DRAIN_DEADLINE_S = LOAD_DEADLINE_S + 30.0  # saves are short, but their copies may wait for the processor

_specs: dict[str, KVSpec] = {}
"""What an engine's GPU blocks are, by engine_id, from its connector to its tier: both are made in one call, in one thread."""


class KVStoreOffloadingConnector(OffloadingConnector):  # type: ignore[misc]  # vLLM is not installed where the types are checked
    """vLLM's OffloadingConnector. Raises ConfigError for an engine whose blocks a tier cannot tell apart."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        share_vllm_log()
        engine_id = str(vllm_config.kv_transfer_config.engine_id)
        if role is KVConnectorRole.SCHEDULER:
            _refuse_unsupported(vllm_config, kv_cache_config)
            instance = instance_of(engine_id, vllm_config.instance_id)
            (_specs[engine_id],) = engine_specs(vllm_config, kv_cache_config, instance)
        super().__init__(vllm_config, role, kv_cache_config)

    def reset_cache(self) -> bool | None:
        """The weights may have changed in memory. vLLM resets its pool and no tier; it waits for our jobs, which raises when one
        does not end."""
        for tier in self.scheduler.manager.secondary_tiers:
            if isinstance(tier, KVStoreTier):
                tier.reset()
        reset: bool | None = super().reset_cache()
        return reset


@dataclass(slots=True)
class _Job:
    """A transfer of vLLM as protocol.Request: its keys are the blocks of a prompt."""

    transfer: TransferJob
    block_hashes: Sequence[bytes]
    num_tokens: int  # one more than the blocks have, since the last token's block is never loaded
    started_s: float
    num_loading: int = 0  # chunks that the store still had when they were to be loaded, from the first on
    written: bool = True
    cache = CacheOptions()
    tail_hash = b""
    traceparent = ""

    @property
    def request_id(self) -> str:
        """See protocol.Request."""
        return str(self.transfer.job_id)

    @property
    def num_prompt_tokens(self) -> int:
        """See protocol.Request."""
        return self.num_tokens

    @property
    def chunk_ids(self) -> list[int]:
        """Rows of vLLM's pool."""
        ids: list[int] = self.transfer.chunk_ids.tolist()
        return ids


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc]  # as above
    """Made by vLLM beside its scheduler. `socket`, `tenant`: of the sidecar."""

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        socket: str | None = None,
        tenant: str = "",
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        config = offloading_spec.config
        spec = _specs.pop(config.engine_id, None)
        if spec is None:
            raise ConfigError(
                f"kv_connector: a {tier_type} needs KVStoreOffloadingConnector in place of OffloadingConnector, which "
                "does not say which model the blocks are of",
                field="kv_connector",
                value="OffloadingConnector",
            )
        self._block_tokens = spec.block_tokens * config.cache.blocks_per_chunk
        rows = _Rows(primary_kv_view)
        canonical = "canonical" if config.canonical_layout else "direct"
        page_format = spec.page_format
        if page_format == KVSTORE_PAGE_FORMAT:  # of a GPU's pages; those of the pool are as vLLM has them
            page_format = f"opaque:vllm-{vllm.__version__}:{config.kv_cache_layout}:tp{config.parallel.tp_size}"
        page_format += f":pool-{canonical}"
        spec = replace(
            spec,
            block_tokens=self._block_tokens,
            page_format=page_format,
            stored_format=page_format,
            opaque_block_nbytes=rows.page_nbytes,
        )
        client = Client(
            socket,
            instance=instance_of(config.engine_id, "tier"),
            role=SCHEDULER,
            tenant=tenant,
            specs=[spec],
        )
        self._session = StoreSession(client)
        self._session.start()
        self._leases = StoreSchedulerSide(
            self._session, block_tokens=self._block_tokens, clock=MonotonicClock(), fetch=FetchPolicy.ALWAYS
        )
        self._copies = StoreWorkerSide(self._session)
        self._copies.register_pages(rows)
        self._digest_nbytes = spec.hash.digest_nbytes
        self._epoch = b""
        self._epochs: dict[str, bytes] = {}  # by request: that in which it began
        self._asked: dict[str, list[OffloadKey]] = {}  # by request, in this step
        self._found: dict[str, dict[OffloadKey, bool]] = {}  # by request
        self._jobs: dict[str, _Job] = {}  # by their name as requests
        self._new_stores: list[_Job] = []
        self._saving: dict[int, str] = {}  # SaveJob to request
        self._ended: list[JobResult] = []

    # --- look-ups ----------------------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """See SecondaryTierManager. What vLLM's pool has already was offered when it got there."""
        self._epochs[req_context.req_id] = self._epoch
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """See SecondaryTierManager. RETRY at most once for each key: vLLM goes on to the request's next key, and all are asked
        about in one Match at the end of the step."""
        found = self._found.setdefault(req_context.req_id, {})
        if key in found:
            return LookupResult.HIT if found[key] else LookupResult.MISS
        self._asked.setdefault(req_context.req_id, []).append(key)
        return LookupResult.RETRY

    def on_request_finished(self, req_context: ReqContext) -> None:
        """See SecondaryTierManager."""
        self._epochs.pop(req_context.req_id, None)
        self._found.pop(req_context.req_id, None)
        self._asked.pop(req_context.req_id, None)

    def _answer_lookups(self) -> None:
        for request_id, keys in self._asked.items():
            num_found = self._num_found(self._hashes(keys))
            self._found[request_id].update((key, i < num_found) for i, key in enumerate(keys))
        self._asked.clear()

    def _num_found(self, hashes: Sequence[bytes]) -> int:
        match = self._session.ask(self._session.link, lambda client, link: client.match(link.namespace, hashes))
        return 0 if match is None else match.num_blocks

    # --- jobs --------------------------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        """See SecondaryTierManager. Begins at the end of the step. After a reset vLLM offers what its live requests have anew,
        with what was computed before it: that is not stored."""
        job = self._add(job_metadata)
        if self._epochs.get(job_metadata.req_context.req_id, b"") == self._epoch:
            self._new_stores.append(job)
        else:
            self._end(job, JobResult(job_metadata.job_id, job.written), 0)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """See SecondaryTierManager. Begins at the end of the step: one Match, and one Acquire."""
        job = self._add(job_metadata)
        num_tokens = self._leases.get_num_new_matched_tokens(job, 0)
        job.num_loading = num_tokens // self._block_tokens
        self._leases.update_state_after_alloc(job, job.chunk_ids, num_tokens)
        if not num_tokens:
            self._end_load(job, frozenset())

    def on_schedule_end(self, context: ScheduleEndContext) -> None:  # noqa: ARG002
        """See SecondaryTierManager. Called every step, after submissions."""
        self._begin_jobs()
        self._answer_lookups()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """See SecondaryTierManager."""
        self._take(self._copies.get_output())
        ended, self._ended = self._ended, []
        return ended

    def drain_jobs(self) -> None:
        """See SecondaryTierManager. Loads end by their deadline. Raises TimeoutError for a copy that never ends."""
        self._begin_jobs()
        until_s = time.monotonic() + _DRAIN_DEADLINE_S
        while self._jobs:
            if time.monotonic() >= until_s:
                raise TimeoutError(
                    f"{len(self._jobs)} jobs of {self.tier_type} have not ended in {_DRAIN_DEADLINE_S} s"
                )
            self._take(self._copies.get_output(wait_s=0.05))

    def reset(self) -> None:
        """From now on other keys, so that nothing saved so far is found; what live requests compute is not saved."""
        self._epoch = os.urandom(_SALT_NBYTES)
        self._found = {request_id: {} for request_id in self._found}
        self._asked.clear()
        logger.warning(
            "cache reset: what was saved so far is not used by this engine again, nor what it saves by others"
        )

    def shutdown(self) -> None:
        """See SecondaryTierManager. vLLM unmaps its pool next: no view of it is left."""
        self._copies.close()
        self._leases.close()

    def _add(self, transfer: TransferJob) -> _Job:
        num_tokens = len(transfer.keys) * self._block_tokens + 1
        job = _Job(transfer, self._hashes(transfer.keys), num_tokens, time.monotonic())
        self._jobs[job.request_id] = job
        return job

    def _begin_jobs(self) -> None:
        """Reserve slots for what is to be stored, and start all copies."""
        scheduled = [ScheduledRequest(job, job.chunk_ids, 0, job.num_tokens - 1) for job in self._new_stores]
        meta = self._leases.build_connector_meta(scheduled, frozenset())
        self._saving |= {save.job_id: save.request_id for save in meta.saves}
        self._copies.start_load(meta)
        self._copies.start_save(meta)
        for job in self._new_stores:
            self._end_store_when_done(job)  # all held already, or no room
        self._new_stores.clear()

    def _take(self, output: WorkerOutput) -> None:
        self._leases.update_connector_output(output)
        for request_id in output.finished_loading:
            self._end_load(self._jobs[request_id], output.failed_block_ids)
        for job_id, written in output.finished_saving:
            job = self._jobs[self._saving.pop(job_id)]
            job.written = job.written and all(written)
            self._end_store_when_done(job)

    def _end_load(self, job: _Job, failed_chunk_ids: Collection[int]) -> None:
        """What failed is a miss for this request, or vLLM would ask for it for ever."""
        keys = list(job.transfer.keys)
        good = {chunk_id for chunk_id in job.chunk_ids[: job.num_loading] if chunk_id not in failed_chunk_ids}
        failed = {key for key, chunk_id in zip(keys, job.chunk_ids, strict=True) if chunk_id not in good}
        self._found.setdefault(job.transfer.req_context.req_id, {}).update(dict.fromkeys(failed, False))
        loaded = tuple(key for key in keys if key not in failed)
        self._end(job, JobResult(job.transfer.job_id, not failed, loaded or None), len(loaded))

    def _end_store_when_done(self, job: _Job) -> None:
        if not self._leases.has_pending(job.request_id):
            self._end(job, JobResult(job.transfer.job_id, job.written), len(job.block_hashes))

    def _end(self, job: _Job, result: JobResult, num_chunks: int) -> None:
        self._leases.request_finished(job)
        del self._jobs[job.request_id]
        result.transfer_time = time.monotonic() - job.started_s
        result.transfer_bytes = num_chunks * self.block_size_bytes
        self._ended.append(result)

    def _hashes(self, keys: Collection[OffloadKey]) -> list[bytes]:
        hashes = [get_offload_block_hash(key) for key in keys]
        assert all(len(digest) == self._digest_nbytes for digest in hashes), "of prefix_caching_hash_algo"
        if not self._epoch:
            return hashes
        return [hashlib.sha256(self._epoch + digest).digest()[: len(digest)] for digest in hashes]


class _Rows:
    """The chunks of vLLM's pool as protocol.Pages."""

    def __init__(self, view: memoryview) -> None:
        self._rows = np.asarray(view).view(np.uint8)
        self.num_pages, self.page_nbytes = self._rows.shape

    def copy_in(self, block_id: int, block: NDArray[np.uint8]) -> None:
        """See protocol.Pages."""
        np.copyto(self._rows[block_id], block)

    def copy_out(self, block_id: int, block: NDArray[np.uint8]) -> None:
        """See protocol.Pages."""
        np.copyto(block, self._rows[block_id])


def _refuse_unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    for field, value, right in (
        ("enable_lora", vllm_config.lora_config is not None, False),  # a tier is not told which adapter a key is of
        ("kv_cache_groups", len(kv_cache_config.kv_cache_groups), 1),
    ):
        if value != right:
            raise ConfigError(
                f"{field}: {value!r} is not served by the kvstore tier; it needs {right!r}",
                field=field,
                value=str(value),
            )
