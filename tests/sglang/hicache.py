"""SGLang's real HiCacheController over its real host pools, on the CPU: what SGLang is, without the model.

The controller's four threads ask the backend and copy pages as in a server; only the device side (a GPU's pool, and copies
between it and the host pool) is left out.
"""

import threading
import time
from types import SimpleNamespace

import stand_ins  # noqa: F401 - before anything of sglang
import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo, MLABufferInfo
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_context, get_parallel

LAYERS, HEADS, HEAD_DIM, PAGE = 4, 2, 32, 16
WAIT_S = 30.0


def host_pool(layout, *, heads=HEADS, pages=200, layers=LAYERS):
    """A real host pool of bf16 whose bytes are random."""
    shape = (PAGE, heads, HEAD_DIM)
    buffers = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(layers)]
    pointers = torch.tensor([each.data_ptr() for each in buffers], dtype=torch.uint64)
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=tuple(buffers), v=tuple(buffers), k_data_ptrs=pointers, v_data_ptrs=pointers, layout=KVBufferLayout.NHD
        ),
        page_size=PAGE,
        head_num=heads,
        head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    return MHATokenToKVPoolHost(info, **_sizes(layout, pages, layers))


def mla_pool(layout, *, pages=8, layers=LAYERS):
    """A real host pool of MLA's latents."""
    rank, rope = 48, 16
    buffers = tuple(torch.zeros((PAGE, 1, rank + rope), dtype=torch.bfloat16) for _ in range(layers))
    info = MLABufferInfo(
        buffers=buffers,
        data_ptrs=torch.tensor([each.data_ptr() for each in buffers], dtype=torch.uint64),
        layer_indices=tuple(range(layers)),
        device_layer_num=layers,
        page_size=PAGE,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        kv_cache_dim=rank + rope,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    return MLATokenToKVPoolHost(info, target_layer_num=layers, **_sizes(layout, pages, layers))


def _sizes(layout, pages, layers):
    """What host pools of both kinds are told alike."""
    return {
        "host_to_device_ratio": 1.0,
        "host_size": 0,
        "page_size": PAGE,
        "layout": layout,
        "pin_memory": False,
        "device_capacity_tokens": pages * PAGE,
        "start_layer": 0,
        "end_layer": layers,
    }


def page_of(pool, page_hash, rank=0):
    """The bytes that a rank's page of this hash holds: nobody's else."""
    empty = pool.get_dummy_flat_data_page()
    generator = torch.Generator().manual_seed(int(page_hash[:12], 16) + rank)
    return torch.randint(0, 256, (empty.nbytes,), dtype=torch.uint8, generator=generator).view(empty.dtype)


class Engine:
    """A rank of an engine: controller, host pool, backend. A prompt is a list of token ids, whole pages of it."""

    def __init__(self, pool, *, backend, extra, model_name="served-name", rank=0, num_ranks=1, tp_group=None):
        self.pool, self.rank = pool, rank
        device_pool = SimpleNamespace(
            device="cpu", layer_num=pool.layer_num, register_layer_transfer_counter=lambda counter: None
        )
        allocator = SimpleNamespace(get_kvcache=lambda: device_pool)
        parallel = {"tp_rank": rank, "tp_size": num_ranks, "pp_rank": 0, "pp_size": 1}
        with (
            get_context().override_server_args(tp_size=num_ranks),
            get_parallel().override(**parallel, attn_dcp_size=1, attn_dcp_rank=0),
        ):
            self.controller = HiCacheController(
                allocator,
                pool,
                PAGE,
                tp_group,
                threading.Event(),
                write_policy="write_through",
                storage_backend=backend,
                model_name=model_name,
                storage_backend_extra_config=dict(extra),
            )
        self.backend = self.controller.storage_backend

    def hashes(self, tokens):
        return get_storage_hash_str(tokens, page_size=PAGE)

    def save(self, tokens, num_before=0):
        """Back a prompt up, but for its first tokens, which were before; how many tokens were stored."""
        hashes, first = self.hashes(tokens), num_before // PAGE
        indices = self.pool.alloc((len(hashes) - first) * PAGE)
        for i, page_hash in enumerate(hashes[first:]):
            self.pool.set_from_flat_data_page(int(indices[i * PAGE]), page_of(self.pool, page_hash, self.rank))
        self.controller.write_storage(indices, tokens[num_before:], hashes[first:], hashes[:first])
        operation = self.controller.ack_backup_queue.get(timeout=WAIT_S)
        self.pool.free(indices)
        return operation.completed_tokens

    def load(self, tokens):
        """Prefetch a prompt: tokens found, tokens brought, and of them the pages whose bytes are right."""
        controller, pool = self.controller, self.pool
        controller.prefetch("request", tokens, None, [])
        operation = controller.prefetch_hit_queue.get(timeout=WAIT_S)
        found = operation.storage_hit_count
        if not found:
            return {"found": 0, "brought": 0, "right": 0, "seconds": 0.0}
        operation.host_indices = pool.alloc(found)
        pool.kv_buffer.view(torch.uint8).fill_(0xA5)
        started_s = time.monotonic()
        controller.prefetch_buffer.put(operation)
        brought = 0
        while not (ack := controller.ack_prefetch_queue.get(timeout=WAIT_S)).completed_req:
            brought = ack.completed_tokens if ack.completed_tokens is not None else brought
        seconds = time.monotonic() - started_s
        right = sum(
            torch.equal(
                pool.get_data_page(int(operation.host_indices[i * PAGE])).contiguous().view(torch.uint8),
                page_of(pool, page_hash, self.rank).view(torch.uint8),
            )
            for i, page_hash in enumerate(operation.hash_value[: brought // PAGE])
        )
        pool.free(operation.host_indices)
        return {"found": found, "brought": brought, "right": right, "seconds": seconds}

    def close(self):
        self.controller.detach_storage_backend()
