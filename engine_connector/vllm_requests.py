"""vLLM's requests on their way through the scheduler side. Imports nothing of vLLM, so that it is tested without it.

What vLLM's contract asks for beyond protocol.py:

    loading   requests that wait for a load. vLLM keeps their pages itself until finished_recving, after an abort too, and
              would fail if they were named in finished_sending as well.
    held      requests that ended while saves still read their pages. vLLM keeps the pages until the worker names the
              request in finished_sending. We know here when that may be, so the next metadata tells the worker, which
              repeats it.

A request is usable while its hashes name its KV: never for some (is_cacheable), and no more once the cache was reset.
"""

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from kvstore.core.traces import read_traceparent
from kvstore.engine_connector.protocol import (
    CacheOptions,
    ConnectorMetadata,
    ScheduledRequest,
    SchedulerSide,
    WorkerOutput,
)

logger = logging.getLogger(__name__)
_SALT_NBYTES = 16
_NO_WISHES = CacheOptions()


class VllmRequest(Protocol):
    """What is read of vllm.v1.request.Request."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    block_hashes: Sequence[bytes]
    lora_request: Any
    resumable: bool
    skip_reading_prefix_cache: bool
    trace_headers: Mapping[str, str] | None


class BlockTables(Protocol):
    """What is read of a step's kv_connector_block_state."""

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...] | None:
        """A scheduled request's pages, for each layer group."""
        ...


class SchedulerOutput(Protocol):
    """What is read of vllm.v1.core.sched.output.SchedulerOutput."""

    num_scheduled_tokens: dict[str, int]
    preempted_req_ids: set[str] | None
    kv_connector_block_state: BlockTables


class StepPlan(NamedTuple):
    """What the worker is told in a step."""

    step: ConnectorMetadata
    let_go: frozenset[str]  # held requests whose pages are not used any more


def is_cacheable(request: VllmRequest) -> bool:
    """Whether the request's hashes name its KV. An adapter is in them by name and path only, so that another adapter under
    the same path would be served this one's KV; the tokens of a resumable request may be taken back."""
    return request.lora_request is None and not request.resumable


class TrackedRequest:
    """A vLLM request as protocol.Request. A `salt` (after reset_cache) makes its hashes differ from all before."""

    def __init__(self, request: VllmRequest, salt: bytes) -> None:
        self._request = request
        self.salt = salt
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
        if not self.salt:
            return hashes
        for digest in hashes[len(self._salted) :]:
            self._salted.append(hashlib.sha256(self.salt + digest).digest()[: len(digest)])
        return self._salted


class VllmRequests:
    """One thread: vLLM's scheduler. Closes `side`."""

    def __init__(self, side: SchedulerSide) -> None:
        self._side = side
        self._requests: dict[str, tuple[VllmRequest, TrackedRequest]] = {}
        self._loading: set[str] = set()
        self._held: set[str] = set()
        self._salt = b""

    def add(self, request: VllmRequest) -> None:
        """Remember a new request, if we can serve it at all."""
        if is_cacheable(request):
            self._requests[request.request_id] = request, TrackedRequest(request, self._salt)

    def match(self, request: VllmRequest, num_computed_tokens: int) -> int:
        """Tokens the store can give beyond `num_computed_tokens`."""
        if not self._is_usable(request.request_id) or request.skip_reading_prefix_cache:
            return 0
        _, tracked = self._requests[request.request_id]
        return self._side.get_num_new_matched_tokens(tracked, num_computed_tokens)

    def load(self, request_id: str, block_ids: Sequence[int], num_tokens: int) -> None:
        """Start the load that was matched; the request waits until `take` gets its id."""
        _, tracked = self._requests[request_id]
        self._side.update_state_after_alloc(tracked, block_ids, num_tokens)
        self._loading.add(request_id)

    def build_meta(self, output: SchedulerOutput) -> StepPlan:
        """Loads, saves and preemptions of the step, and what is not held any more."""
        scheduled = []
        for request_id, num_scheduled_tokens in output.num_scheduled_tokens.items():
            if self._is_usable(request_id):
                request, tracked = self._requests[request_id]
                tables = output.kv_connector_block_state.get_block_ids(request_id)
                assert tables is not None, "every scheduled request has pages"
                (block_ids,) = tables  # of the only group
                scheduled.append(
                    ScheduledRequest(tracked, block_ids, request.num_computed_tokens, num_scheduled_tokens)
                )
        step = self._side.build_connector_meta(scheduled, frozenset(output.preempted_req_ids or ()))
        let_go = frozenset(request_id for request_id in self._held if not self._side.has_pending(request_id))
        self._held -= let_go
        return StepPlan(step, let_go)

    def take(self, output: WorkerOutput) -> None:
        """What the worker reported."""
        self._side.update_connector_output(output)
        self._loading -= output.finished_loading

    def finish(self, request_id: str) -> bool:
        """A request ended or was aborted: whether vLLM is to keep its pages until we let go of it."""
        _, tracked = self._requests.pop(request_id, (None, None))
        if tracked is None or not self._side.request_finished(tracked) or request_id in self._loading:
            return False
        self._held.add(request_id)
        return True

    def reset(self) -> None:
        """From now on other keys, so that nothing saved so far is found; live requests are computed and not saved."""
        self._salt = os.urandom(_SALT_NBYTES)
        logger.warning(
            "cache reset: what was saved so far is not used by this engine again, nor what it saves by others"
        )

    def close(self) -> None:
        """See protocol.SchedulerSide."""
        self._side.close()

    def _is_usable(self, request_id: str) -> bool:
        return request_id in self._requests and self._requests[request_id][1].salt == self._salt
