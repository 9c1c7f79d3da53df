"""KVStoreConnector that writes down every call that vLLM makes of it. In one process with scheduler and worker."""

import functools
from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvstore.engine_connector import vllm, vllm_engine
from kvstore.kernels.paged import PagedCache

CALLS: list[dict[str, Any]] = []
_RECORDED = (
    "bind_kv_cache_manager",
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "reset_cache",
    "register_kv_caches",
    "handle_preemptions",
    "bind_connector_metadata",
    "clear_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "get_kv_connector_stats",
    "take_events",
)
REQUEST_FIELDS = ("request_id", "num_tokens", "num_prompt_tokens", "num_computed_tokens", "block_hashes")
REQUEST_FIELDS += ("lora_request", "resumable", "skip_reading_prefix_cache", "trace_headers")
_LAST: dict[str, Any] = {}
_failing = False


def fail_loads() -> None:
    """From now on no page is loaded."""
    CALLS.append({"role": "pages", "name": "fail_loads"})
    global _failing  # noqa: PLW0603 - one process, one engine
    _failing = True


class FailingPages(PagedCache):
    """Pages whose loads fail when they are to."""

    def copy_in(self, block_id: int, block: Any) -> None:
        """As PagedCache.copy_in."""
        if _failing:
            raise OSError("to be recorded")
        super().copy_in(block_id, block)


def _plain(value: Any) -> Any:
    """What of an argument or result the connector reads, as JSON."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict) and all(hasattr(each, "stride") for each in value.values()):
        return {name: [list(tensor.shape), list(tensor.stride())] for name, tensor in value.items()}
    if isinstance(value, dict):
        return {str(getattr(key, "value", key)): _plain(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value))
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    kind = type(value).__name__
    if kind == "Request":
        return {field: _plain(getattr(value, field)) for field in REQUEST_FIELDS}
    if kind == "KVCacheBlocks":
        return _plain(value.get_block_ids())
    if kind == "SchedulerOutput":
        tables = {r: value.kv_connector_block_state.get_block_ids(r) for r in value.num_scheduled_tokens}
        return {
            "num_scheduled_tokens": value.num_scheduled_tokens,
            "preempted_req_ids": _plain(value.preempted_req_ids),
            "tables": _plain(tables),
            "new_block_ids": _plain(value.scheduled_cached_reqs.new_block_ids),
        }
    if kind == "KVConnectorTransferResults":
        fields = ("finished_sending", "finished_recving", "failed_recving")
        return {field: _plain(getattr(value, field)) for field in fields}
    return f"<{kind}>"


def _recorder(name: str) -> Callable[..., Any]:
    method = getattr(vllm.KVStoreConnector, name)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        role = "scheduler" if self.role is KVConnectorRole.SCHEDULER else "worker"
        record = {"role": role, "name": name, "args": _plain(args), "kwargs": _plain(kwargs)}
        if name == "build_connector_meta":  # it reads requests that it was told of before
            requests = [_plain(request) for request, _ in self._requests._requests.values()]
            record["requests"] = [request for request in requests if _LAST.get(request["request_id"]) != request]
            _LAST.update((request["request_id"], request) for request in requests)
        CALLS.append(record)
        result = method(self, *args, **kwargs)
        record["result"] = _plain(result)
        return result

    return call


class KVStoreConnector(vllm.KVStoreConnector):
    """Written down."""


for _name in _RECORDED:
    if hasattr(vllm.KVStoreConnector, _name):
        setattr(KVStoreConnector, _name, _recorder(_name))
vllm_engine.PagedCache = FailingPages
