"""vLLM's requests on their way through the scheduler side. Imports nothing of vLLM, so that it is tested without it.

What vLLM's contract asks for beyond protocol.py:

    loading   requests that wait for a load. vLLM keeps their pages itself until finished_recving, after an abort too, and
              would fail if they were named in finished_sending as well.
    held      requests that ended while saves still read their pages. vLLM keeps the pages until the worker names the
              request in finished_sending. We know here when that may be, so the next metadata tells the worker, which
              repeats it.

    out of window  pages of a layer group with a sliding window. vLLM gives them to others while the request goes on, and with
              them those that a save still reads. We know here which pages vLLM has given out in a step, so the step's metadata
              names the requests of such saves among the preempted ones, and the worker waits for these saves or calls them off.

A request is usable while its keys name its KV: never for some, and no more once the cache was reset.
"""

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from kvstore.core.plans import TIERS
from kvstore.core.traces import read_traceparent
from kvstore.engine_connector.protocol import (
    NO_PAGE,
    CacheOptions,
    ConnectorMetadata,
    PageTables,
    Request,
    SaveJob,
    ScheduledRequest,
    SchedulerSide,
    WorkerOutput,
)
from kvstore.engine_connector.vllm_adapters import Adapters, LoraRequest

logger = logging.getLogger(__name__)
_SALT_NBYTES = 16
_NO_WISHES = CacheOptions()
Tables = tuple[list[int], ...]
"""A request's pages, for each layer group."""


class VllmRequest(Protocol):
    """What is read of vllm.v1.request.Request."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    block_hashes: Sequence[bytes]
    lora_request: LoraRequest | None
    resumable: bool
    skip_reading_prefix_cache: bool
    trace_headers: Mapping[str, str] | None


class BlockTables(Protocol):
    """What is read of a step's kv_connector_block_state."""

    def get_block_ids(self, req_id: str) -> Tables | None:
        """A scheduled request's pages, for each layer group."""
        ...


class CachedRequests(Protocol):
    """What is read of vllm.v1.core.sched.output.CachedRequestData."""

    new_block_ids: Sequence[Tables | None]


class SchedulerOutput(Protocol):
    """What is read of vllm.v1.core.sched.output.SchedulerOutput."""

    scheduled_cached_reqs: CachedRequests
    num_scheduled_tokens: dict[str, int]
    preempted_req_ids: set[str] | None
    kv_connector_block_state: BlockTables


class StoreSide(SchedulerSide, Protocol):
    """A scheduler side that knows where blocks lie."""

    def tiers_of(self, request: Request) -> bytes:
        """Numbers of the tiers (core.plans.TIERS) of the blocks behind those on the engine, as the last match found them."""
        ...


class StepPlan(NamedTuple):
    """What the worker is told in a step."""

    step: ConnectorMetadata
    let_go: frozenset[str]  # held requests whose pages are not used any more


class TrackedRequest:
    """A vLLM request as protocol.Request. `epoch` (after reset_cache) and `adapter` (what its LoRA weights are) make its keys
    differ from those of others with the same hashes; without them the keys are vLLM's hashes."""

    def __init__(self, request: VllmRequest, *, epoch: bytes = b"", adapter: bytes = b"") -> None:
        self._request = request
        self.epoch = epoch
        self._salt = epoch + adapter
        self._salted: list[bytes] = []

    @property
    def request_id(self) -> str:
        """See protocol.Request."""
        return self._request.request_id

    @property
    def cache(self) -> CacheOptions:
        """See protocol.Request. vLLM's cache_salt is in its hashes, and it carries no other wishes."""
        return _NO_WISHES

    @property
    def tail_hash(self) -> bytes:
        """See protocol.Request. vLLM hashes full blocks only."""
        return b""

    @property
    def traceparent(self) -> str:
        """See protocol.Request. vLLM keeps the headers that came with the request, where its own tracing is on."""
        return read_traceparent((self._request.trace_headers or {}).get("traceparent", ""))

    @property
    def num_tokens(self) -> int:
        """See protocol.Request."""
        return self._request.num_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """See protocol.Request."""
        return self._request.num_prompt_tokens

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """See protocol.Request."""
        hashes = self._request.block_hashes
        if not self._salt:
            return hashes
        for digest in hashes[len(self._salted) :]:
            self._salted.append(hashlib.sha256(self._salt + digest).digest()[: len(digest)])
        return self._salted


class VllmRequests:
    """One thread: vLLM's scheduler. Closes `side`. `block_tokens`: of one of a request's hashes. `has_windows`: a layer group, or
    the only one, gives pages back while a request goes on."""

    def __init__(self, side: StoreSide, adapters: Adapters, *, block_tokens: int, has_windows: bool = False) -> None:
        self._side = side
        self._has_windows = has_windows
        self._adapters = adapters
        self._block_tokens = block_tokens
        self._requests: dict[str, tuple[VllmRequest, TrackedRequest]] = {}
        self._loading: set[str] = set()
        self._held: set[str] = set()
        self._given_out: set[int] = set()  # pages, since the last step; of an engine with windows
        self._saving: dict[int, SaveJob] = {}  # likewise
        self._epoch = b""
        self._counts: Counter[str] = Counter()

    def add(self, request: VllmRequest) -> None:
        """Remember a new request, if we can serve it at all: the tokens of a resumable one may be taken back, and of an adapter
        it must be known what it is."""
        adapter = b"" if request.lora_request is None else self._adapters.salt(request.lora_request)
        if adapter is not None and not request.resumable:
            tracked = TrackedRequest(request, epoch=self._epoch, adapter=adapter)
            self._requests[request.request_id] = request, tracked

    def match(self, request: VllmRequest, num_computed_tokens: int) -> int:
        """Tokens the store can give beyond `num_computed_tokens`."""
        if not self._is_usable(request.request_id) or request.skip_reading_prefix_cache:
            return 0
        _, tracked = self._requests[request.request_id]
        return self._side.get_num_new_matched_tokens(tracked, num_computed_tokens)

    def allocated(self, request_id: str, tables: Tables, num_tokens: int) -> None:
        """vLLM has given the request pages. Start the load that was matched, of so many tokens, if any; the request waits until
        `take` gets its id."""
        if self._has_windows:
            self._given_out.update(page for table in tables for page in table)
        if not num_tokens:
            return
        _, tracked = self._requests[request_id]
        self._side.update_state_after_alloc(tracked, self._tables(tables), num_tokens)
        self._loading.add(request_id)
        self._counts["loads"] += 1
        for tier, num_of_tier in self.hit_tokens(request_id, num_tokens).items():
            self._counts[f"hit_tokens_{tier}"] += num_of_tier

    def hit_tokens(self, request_id: str, num_tokens: int) -> Mapping[str, int]:
        """In which tiers (by their names in core.plans.TIERS) so many tokens of a load that was started lay."""
        if request_id not in self._requests:
            return {}
        tiers = self._side.tiers_of(self._requests[request_id][1])[: num_tokens // self._block_tokens]
        return {name: tiers.count(number) * self._block_tokens for number, name in enumerate(TIERS) if number in tiers}

    def build_meta(self, output: SchedulerOutput) -> StepPlan:
        """Loads, saves and preemptions of the step, and what is not held any more."""
        scheduled = []
        for request_id, num_scheduled_tokens in output.num_scheduled_tokens.items():
            if self._is_usable(request_id):
                request, tracked = self._requests[request_id]
                tables = output.kv_connector_block_state.get_block_ids(request_id)
                assert tables is not None, "every scheduled request has pages"
                scheduled.append(
                    ScheduledRequest(tracked, self._tables(tables), request.num_computed_tokens, num_scheduled_tokens)
                )
        preempted = frozenset(output.preempted_req_ids or ()) | self._losing_pages(output.scheduled_cached_reqs)
        step = self._side.build_connector_meta(scheduled, preempted)
        if self._has_windows:
            self._saving |= {job.job_id: job for job in step.saves}
        let_go = frozenset(request_id for request_id in self._held if not self._side.has_pending(request_id))
        self._held -= let_go
        return StepPlan(step, let_go)

    def take(self, output: WorkerOutput) -> None:
        """What the worker reported."""
        self._side.update_connector_output(output)
        self._loading -= output.finished_loading
        for job_id, _ in output.finished_saving:
            self._saving.pop(job_id, None)
        self._count(output)

    def take_counts(self) -> dict[str, float]:
        """What was counted since the last call, for vLLM's metrics."""
        counts: dict[str, float] = dict(self._counts)
        self._counts.clear()
        return counts

    def _count(self, output: WorkerOutput) -> None:
        written = [ok for _, oks in output.finished_saving for ok in oks]
        for name, value in (
            ("load_seconds", output.load_seconds),
            ("load_bytes", output.load_bytes),
            ("load_wait_seconds", sum(load.seconds for load in output.load_times)),
            ("failed_load_blocks", len(output.failed_block_ids)),
            ("save_seconds", output.save_seconds),
            ("save_bytes", output.save_bytes),
            ("saved_blocks", sum(written)),
            ("failed_save_blocks", len(written) - sum(written)),
        ):
            if value:
                self._counts[name] += value  # type: ignore[assignment]  # a Counter takes floats too

    def finish(self, request_id: str) -> bool:
        """A request ended or was aborted: whether vLLM is to keep its pages until we let go of it."""
        _, tracked = self._requests.pop(request_id, (None, None))
        if tracked is None or not self._side.request_finished(tracked) or request_id in self._loading:
            return False
        self._held.add(request_id)
        return True

    def reset(self) -> None:
        """From now on other keys, so that nothing saved so far is found; live requests are computed and not saved."""
        self._epoch = os.urandom(_SALT_NBYTES)
        logger.warning(
            "cache reset: what was saved so far is not used by this engine again, nor what it saves by others"
        )

    def close(self) -> None:
        """See protocol.SchedulerSide."""
        self._side.close()

    def _is_usable(self, request_id: str) -> bool:
        return request_id in self._requests and self._requests[request_id][1].epoch == self._epoch

    def _tables(self, tables: Tables) -> PageTables:
        """vLLM's page 0 stands for none; a table of full attention has none such."""
        if len(tables) == 1 and not self._has_windows:
            return tables[0]
        paged = [[page or NO_PAGE for page in table] for table in tables]
        return paged if len(paged) > 1 else paged[0]

    def _losing_pages(self, cached: CachedRequests) -> frozenset[str]:
        """Requests some of whose pages are saved and have been given to others."""
        if not self._has_windows:
            return frozenset()
        self._given_out.update(page for tables in cached.new_block_ids if tables for table in tables for page in table)
        losing = frozenset(
            job.request_id
            for job in self._saving.values()
            if any(move.block_id in self._given_out for move in job.moves)
        )
        self._given_out.clear()
        return losing
