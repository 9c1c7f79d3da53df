"""kvstore as a storage backend of SGLang's HiCache (0.5.23), loaded from outside its tree:

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache --hicache-storage-backend dynamic
        --hicache-storage-backend-extra-config '{"backend_name": "kvstore", "module_path": "kvstore.engine_connector.sglang",
        "class_name": "KVStoreHiCache", "interface_v1": 1, "hicache_storage_pass_prefix_keys": true}'

SGLang makes one in each rank. Its threads ask for pages by key and say where they lie in its host pool; we copy them between
there and the arena, once. A page is a block under SGLang's own key, in the namespace of its pool and part (sglang_pages.py,
sglang_identity.py). No call raises because the store is absent or slow: that is a miss, or a page that is not stored. Ranks
may find different lengths; SGLang takes the shortest.
"""

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_context

from kvstore.client import Client
from kvstore.core.errors import ConfigError
from kvstore.core.keys import KVSpec
from kvstore.engine_connector.fingerprint import adapter_fingerprint, weights_as_loaded, weights_fingerprint
from kvstore.engine_connector.keyed_blocks import KeyedBlocks
from kvstore.engine_connector.model_files import local_model_files
from kvstore.engine_connector.session import StoreSession
from kvstore.engine_connector.sglang_identity import BackendSettings, ModelFacts, PoolFacts, digests, kv_spec, part_of
from kvstore.engine_connector.sglang_pages import KV_POOL, Pages, PoolPages, copy_in, copy_out
from kvstore.proto.kvstore_pb2 import BOTH

logger = logging.getLogger(__name__)

LOAD_DEADLINE_S = 2.0
"""Of one call's pages, of which there are 128 at most. SGLang gives a whole prefetch 1 s and 0.25 s for each 1,024 tokens by
default."""

_LOADS, _SAVES = "loads", "saves"


@dataclass(slots=True)
class _StoredPool:
    """A host pool, and where its pages are stored: a namespace for each shard. Without `blocks` not connected yet."""

    pages: PoolPages
    specs: tuple[KVSpec, ...]
    namespaces: tuple[bytes, ...]
    blocks: KeyedBlocks | None = None


class _Moved(NamedTuple):
    num_pages: int
    gb_per_s: float


class KVStoreHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang is not installed where the types are checked
    """One rank's backend. Its calls come from several of SGLang's threads. Raises ConfigError, when SGLang attaches it, for
    settings and pools that we do not serve."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        self._config = storage_config
        self._settings = BackendSettings.from_extra_config(storage_config.extra_config)
        self._model = _model_facts(self._settings)
        self._pools: dict[str, _StoredPool] = {}
        self._sessions: list[StoreSession] = []
        self._lock = threading.Lock()
        self._moved: dict[str, list[_Moved]] = {_LOADS: [], _SAVES: []}
        self._has_warned = False

    # --- pools -----------------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of attention's K and V; called first."""
        super().register_mem_pool_host(mem_pool_host)
        config = self._config
        num_shards = config.tp_lcm_size // config.tp_size if config.should_split_heads and config.tp_lcm_size else 1
        self._add(PoolPages(KV_POOL, mem_pool_host, num_shards=num_shards))

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """The others, and that of attention once more. Some come when all else is connected; a connection of their own is
        made for them."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name not in self._pools:
            self._add(PoolPages(name, host_pool))
            if self._sessions:
                self._connect([self._pools[name]])

    def on_host_pools_registered(self) -> None:
        """Connect. An absent sidecar is no error."""
        self._connect(list(self._pools.values()))

    def close(self) -> None:
        """Give everything back. Safe to call twice."""
        for session in self._sessions:
            session.close()

    def _add(self, pages: PoolPages) -> None:
        parts = range(pages.num_shards)
        specs = tuple(kv_spec(self._model, _pool_facts(pages, self._config, shard)) for shard in parts)
        self._pools[pages.name] = _StoredPool(
            pages, specs, tuple(spec.namespace(self._settings.tenant) for spec in specs)
        )

    def _connect(self, pools: Sequence[_StoredPool]) -> None:
        client = Client(
            self._settings.socket,
            instance=uuid.uuid4().bytes,
            role=BOTH,
            rank=self._config.tp_rank,
            tenant=self._settings.tenant,
            specs=[spec for pool in pools for spec in pool.specs],
        )
        session = StoreSession(client)
        session.start()
        self._sessions.append(session)
        blocks = KeyedBlocks(session, load_deadline_s=LOAD_DEADLINE_S)
        for pool in pools:
            pool.blocks = blocks

    # --- pages of attention, in place --------------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:  # noqa: ARG002
        """How many pages, from the first one on, are there."""
        return self._count_held(KV_POOL, digests(keys))

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002
    ) -> list[bool]:
        """For each page whether it is in the host pool now: the first ones are. `host_indices` has the tokens of all."""
        return _leading(self._load(KV_POOL, keys, host_indices), keys)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """For each page whether the store has it now, or will have when another engine has written it."""
        return _leading(self._save(KV_POOL, keys, host_indices, self._parent(extra_info)), keys)

    # --- models with several pools ------------------------------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002
    ) -> PoolTransferResult:
        """The longest prefix that all pools can restore, and every length that they can: some have each page, some (Mamba's
        state, a sliding window) only some, of which a length needs as many last ones as the transfer has keys."""
        hashes = digests(keys)
        num_pages = self._count_held(KV_POOL, hashes)
        hits, restorable = {KV_POOL: num_pages}, set(range(1, num_pages + 1))
        for transfer in pool_transfers or []:
            name, held = _name(transfer), hashes[:num_pages]
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                lengths = self._lengths_with_window(name, held, max(1, len(transfer.keys or ())))
            elif transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                lengths = set(range(1, self._count_held(name, held) + 1))
            else:
                continue  # says nothing of how long a prefix may be
            hits[name] = max(lengths, default=0)
            restorable &= lengths
        found = {name: num_hits for name, num_hits in hits.items() if num_hits}
        return PoolTransferResult(max(restorable, default=0), found, sorted(restorable))

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002
    ) -> dict[str, list[bool]]:
        """As batch_get_v1, by pool."""
        return {
            transfer.name: _leading(
                self._load(_name(transfer), transfer.keys or [], transfer.host_indices), transfer.keys or []
            )
            for transfer in transfers
        }

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """As batch_set_v1, by pool. A pool that has some pages only has none of their parents."""
        parent = self._parent(extra_info)
        saved = {}
        for transfer in transfers:
            keys, is_sparse = transfer.keys or [], transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
            num_saved = self._save(_name(transfer), keys, transfer.host_indices, b"" if is_sparse else parent)
            saved[transfer.name] = _leading(num_saved, keys)
        return saved

    def _lengths_with_window(self, name: str, hashes: list[bytes], num_last: int) -> set[int]:
        """Lengths of a prefix whose last pages, as many or all, the pool has."""
        pool = self._pools.get(name)
        if pool is None or pool.blocks is None or not hashes:
            return set()
        (namespace,) = pool.namespaces  # only the pool of attention has shards
        lengths, run = set(), 0
        for length, is_held in enumerate(pool.blocks.held_each(namespace, hashes), 1):
            run = run + 1 if is_held else 0
            if run >= min(num_last, length):
                lengths.add(length)
        return lengths

    # --- single pages: SGLang's calls to backends without interface_v1, which copy twice --------------------------------------

    def exists(self, key: str) -> bool:
        """Whether the page is there."""
        return self.batch_exists([key]) == 1

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """The page's bytes in `target_location`, a flat page as the host pool makes it; None if it is not there."""
        targets = [] if target_location is None else [target_location]
        return self.batch_get([key], targets, target_sizes)[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor] | None = None,
        target_sizes: Any = None,  # noqa: ARG002
    ) -> list[torch.Tensor | None]:
        """Likewise for each page: the first ones."""
        targets = list(target_locations or ())
        num_loaded = self._load_to(KV_POOL, keys, lambda pages, shard: pages.flat_pieces(targets, shard))
        return [targets[i] if i < num_loaded else None for i in range(len(keys))]

    def set(
        self, key: str, value: torch.Tensor | None = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store a flat page; whether the store has it now."""
        return self.batch_set([key], [] if value is None else [value], target_location, target_sizes)

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: Any = None,  # noqa: ARG002
        target_sizes: Any = None,  # noqa: ARG002
    ) -> bool:
        """Likewise; whether it has all."""
        sources = [value.contiguous() for value in values or ()]
        num_saved = self._save_from(KV_POOL, keys, lambda pages, shard: pages.flat_pieces(sources, shard), parent=b"")
        return num_saved == len(keys)

    # --- the rest --------------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget what the store has of this rank's pages, for other engines of the same model too."""
        for pool in self._pools.values():
            num_dropped = sum(pool.blocks.drop(namespace) for namespace in pool.namespaces) if pool.blocks else 0
            logger.info("cleared pool=%s num_blocks=%d", pool.pages.name, num_dropped)

    def get_stats(self) -> StorageMetrics:
        """Of the calls since the last one: pages, and GB/s."""
        with self._lock:
            loads, saves = self._moved[_LOADS], self._moved[_SAVES]
            self._moved = {_LOADS: [], _SAVES: []}
        return StorageMetrics(
            prefetch_pgs=[moved.num_pages for moved in loads],
            backup_pgs=[moved.num_pages for moved in saves],
            prefetch_bandwidth=[moved.gb_per_s for moved in loads],
            backup_bandwidth=[moved.gb_per_s for moved in saves],
        )

    # --- moves -----------------------------------------------------------------------------------------------------------

    def _count_held(self, name: str, hashes: list[bytes]) -> int:
        """Pages whose shards are all there."""
        pool, num_pages = self._pools.get(name), len(hashes)
        if pool is None or pool.blocks is None:
            return 0
        for shard, namespace in enumerate(pool.namespaces):
            further = shard > 0 or name != KV_POOL
            if num_pages:
                num_pages = pool.blocks.count_held(namespace, hashes[:num_pages], further_group=further)
        return num_pages

    def _load(self, name: str, keys: list[str], host_indices: torch.Tensor | None) -> int:
        return self._load_to(name, keys, _in_place(host_indices))

    def _load_to(self, name: str, keys: list[str], pieces_of: "_PiecesOf") -> int:
        def load(blocks: KeyedBlocks, namespace: bytes, hashes: list[bytes], block_nbytes: int, pages: Pages) -> int:
            further = name != KV_POOL or namespace != self._pools[name].namespaces[0]
            return blocks.load(namespace, hashes, block_nbytes, copy_in(pages), further_group=further)

        return self._move(_LOADS, name, keys, pieces_of, load)

    def _save(self, name: str, keys: list[str], host_indices: torch.Tensor | None, parent: bytes) -> int:
        return self._save_from(name, keys, _in_place(host_indices), parent)

    def _save_from(self, name: str, keys: list[str], pieces_of: "_PiecesOf", parent: bytes) -> int:
        def save(blocks: KeyedBlocks, namespace: bytes, hashes: list[bytes], block_nbytes: int, pages: Pages) -> int:
            return blocks.save(namespace, hashes, block_nbytes, copy_out(pages), parent=parent)

        return self._move(_SAVES, name, keys, pieces_of, save)

    def _move(self, kind: str, name: str, keys: list[str], pieces_of: "_PiecesOf", move: "_MoveShard") -> int:
        """Pages whose shards are all moved, from the first one on."""
        started_s = time.monotonic()
        pool, hashes = self._pools.get(name), digests(keys)
        if pool is None or pool.blocks is None:
            return 0
        num_pages = len(hashes)
        for shard, namespace in enumerate(pool.namespaces):
            pages = pieces_of(pool.pages, shard)
            num_pages = min(num_pages, len(pages))
            if num_pages:
                num_pages = move(pool.blocks, namespace, hashes[:num_pages], pool.pages.block_nbytes, pages)
        seconds = time.monotonic() - started_s
        if num_pages:
            with self._lock:
                self._moved[kind].append(_Moved(num_pages, num_pages * pool.pages.page_nbytes / seconds / 1e9))
        return num_pages

    def _parent(self, extra_info: HiCacheStorageExtraInfo | None) -> bytes:
        """The page before those of the call; b"" when they are the first ones, and when SGLang does not say."""
        prefix = None if extra_info is None else extra_info.prefix_keys
        if prefix is None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                'hicache_storage_pass_prefix_keys: off; with "hicache_storage_pass_prefix_keys": true in the extra config the '
                "store knows which page follows which, and evicts the last ones first"
            )
        return next(iter(digests(prefix[-1:])), b"") if prefix else b""


_PiecesOf = Callable[[PoolPages, int], Pages]
_MoveShard = Callable[[KeyedBlocks, bytes, list[bytes], int, Pages], int]


def _in_place(host_indices: torch.Tensor | None) -> _PiecesOf:
    return lambda pool, shard: () if host_indices is None else pool.pieces(host_indices, shard)


def _leading(num_good: int, keys: Sequence[str]) -> list[bool]:
    return [i < num_good for i in range(len(keys))]


def _name(transfer: PoolTransfer) -> str:
    return str(transfer.name)


def _model_facts(settings: BackendSettings) -> ModelFacts:
    model = settings.model_path or str(_of_server("model_path", ""))
    if not model:
        raise ConfigError(
            'model_path: SGLang has not said which model it serves; give "model_path": "DIRECTORY" in the extra config',
            field="model_path",
            value="",
        )
    files = local_model_files(model, revision=_of_server("revision", None), cache_dir=_of_server("download_dir", None))
    config = files / "config.json"
    changed = json.loads(str(_of_server("json_model_override_args", "{}")) or "{}")
    scales = _of_server("quantization_param_path", None)
    return ModelFacts(
        version=sglang.__version__,
        weights=weights_fingerprint(files),
        quantization=str(_of_server("quantization", "") or ""),
        load_format=str(_of_server("load_format", "auto")),
        model_config=(json.loads(config.read_text()) if config.is_file() else {}) | changed,
        dtype=str(_of_server("dtype", "auto")),
        cache_dtype=str(_of_server("kv_cache_dtype", "auto")),
        cache_scales=weights_fingerprint(scales) if scales else "",
        adapters=_adapters(),
        draft=_draft(),
        salt=settings.salt,
    )


def _adapters() -> str:
    """Those of --lora-paths: SGLang's keys hold their names and paths."""
    loras = _of_server("lora_paths", None) or ()
    return "\n\n".join(
        sorted(f"{lora.lora_name}\n{adapter_fingerprint(local_model_files(str(lora.lora_path)))}" for lora in loras)
    )


def _draft() -> str:
    draft = _of_server("speculative_draft_model_path", None)
    if not draft:
        return ""
    files = local_model_files(str(draft), revision=_of_server("speculative_draft_model_revision", None))
    quantization = str(_of_server("speculative_draft_model_quantization", "") or "")
    load_format = str(_of_server("speculative_draft_load_format", None) or "")
    return weights_as_loaded(weights_fingerprint(files), quantization=quantization, load_format=load_format)


def _of_server(name: str, default: str | None) -> Any:
    """SGLang's own setting as it resolved it. A process that does not serve (a test, a tool) has none."""
    try:
        return get_context().config_leaf(name)
    except ValueError:
        return default


def _pool_facts(pages: PoolPages, config: HiCacheStorageConfig, shard: int) -> PoolFacts:
    pool, num_layers = pages.host_pool, int(getattr(pages.host_pool, "layer_num", 1))
    first_layer = int(getattr(pool, "start_layer", 0) or 0)
    return PoolFacts(
        name=pages.name,
        kind=type(pool).__name__,
        layout=pool.layout,
        dtype=str(getattr(pool, "dtype", "uint8")).removeprefix("torch."),
        part=part_of(
            layers=range(first_layer, first_layer + num_layers),
            stage=(config.pp_rank, config.pp_size),
            heads=(config.tp_rank * pages.num_shards + shard, config.tp_size * pages.num_shards),
            # As SGLang's file backend has it: the state of Mamba layers is split where MLA's latents are not.
            replicated=config.is_mla_model and pages.name != PoolName.MAMBA.value,
            context=(config.attn_cp_rank, config.attn_cp_size),
        ),
        num_layers=num_layers,
        num_kv_heads=max(1, int(getattr(pool, "head_num", 1)) // pages.num_shards),
        head_dim=int(getattr(pool, "head_dim", 0) or getattr(pool, "kv_cache_dim", 0) or 1),
        page_tokens=pages.page_tokens,
        page_nbytes=pages.block_nbytes,
    )
