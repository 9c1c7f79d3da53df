"""What vLLM's configuration says of an engine: whether we serve it, what its blocks are, where its pages lie.

On a CPU pages are opaque: K lies packed by instruction set. On a GPU vLLM shows each layer as [block, head, token, K and V]
(vllm-project/vllm#42082) whatever lies where, so that blocks are stored in our own order and depend neither on vLLM's version
and layout nor on the number of ranks. The GPU's part has run on no GPU yet.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import vllm
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec, SlidingWindowSpec

from kvstore.core.errors import ConfigError
from kvstore.core.keys import KVSpec
from kvstore.engine_connector.fingerprint import weights_fingerprint
from kvstore.engine_connector.model_files import local_model_files
from kvstore.engine_connector.page_part import PagePart
from kvstore.engine_connector.protocol import Pages
from kvstore.engine_connector.vllm_identity import EngineFacts, GroupFacts, group_name, hash_seed, settings_by_length
from kvstore.kernels.block_part import BlockPart
from kvstore.kernels.device_pages import DevicePages
from kvstore.kernels.page_map import PageMap
from kvstore.kernels.paged import PagedCache

_SERVED_GROUPS = {
    "cpu": (FullAttentionSpec, SlidingWindowSpec),
    "cuda": (FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec),
}
"""Exactly these: what derives from them has other needs of a prefix, or other bytes."""


class Rank(NamedTuple):
    """One of the engine's tensor-parallel workers."""

    number: int
    num_ranks: int


def refuse_unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises ConfigError, naming what would be right."""
    transfer, parallel, cache = vllm_config.kv_transfer_config, vllm_config.parallel_config, vllm_config.cache_config
    device = current_platform.device_type
    kinds = _SERVED_GROUPS.get(device, ())
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    cache_dtypes = ("auto", dtype) if device == "cuda" else (cache.cache_dtype,)
    for field, value, right in (
        ("device", device, tuple(_SERVED_GROUPS)),
        ("kv_role", transfer.kv_role, ("kv_both",)),
        ("kv_load_failure_policy", transfer.kv_load_failure_policy, ("recompute",)),  # "fail" would fail their requests
        ("pipeline_parallel_size", parallel.pipeline_parallel_size, (1,)),  # ranks with other layers
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size, (1,)),  # ranks with other tokens
        ("decode_context_parallel_size", parallel.decode_context_parallel_size, (1,)),
        ("speculative_config", vllm_config.speculative_config, (None,)),
        ("kv_cache_dtype", cache.cache_dtype, cache_dtypes),
        *(
            (f"kv_cache_groups[{i}]", type(group.kv_cache_spec).__name__, tuple(kind.__name__ for kind in kinds))
            for i, group in enumerate(kv_cache_config.kv_cache_groups)
        ),
        ("kv_cache_groups", bool(kv_cache_config.kv_cache_groups), (True,)),
    ):
        if value not in right:
            raise ConfigError(
                f"{field}: {value!r} is not served by the kvstore connector; it needs {' or '.join(map(repr, right))}",
                field=field,
                value=str(value),
            )


def fails_whole(kv_cache_config: KVCacheConfig) -> bool:
    """Whether vLLM cannot compute a prefix from its first failed page on: there are several tables, or windows, whose one table
    has no pages for the tokens before."""
    groups = kv_cache_config.kv_cache_groups
    return len(groups) > 1 or any(isinstance(group.kv_cache_spec, SlidingWindowSpec) for group in groups)


def engine_specs(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, instance: bytes) -> list[KVSpec]:
    """One for each layer group, in vLLM's order. Raises ConfigError where what decides a block's numbers cannot be known."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if getattr(cache, "calculate_kv_scales", False):  # not every version of vLLM has it
        raise ConfigError(
            "calculate_kv_scales: True is not served by kvstore, since an engine takes the scales of its blocks from its first "
            "request, and no other one has them; it needs False",
            field="calculate_kv_scales",
            value="True",
        )
    algorithm = cache.prefix_caching_hash_algo
    files = local_model_files(model.model, revision=model.revision, cache_dir=vllm_config.load_config.download_dir)
    config = model.hf_config.to_dict()
    _, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    facts = EngineFacts(
        version=vllm.__version__,
        weights=weights_fingerprint(files),
        quantization=model.quantization or "",
        load_format=str(vllm_config.load_config.load_format),
        model_config=config,
        settings=settings_by_length(config, model.max_model_len) | _settings(vllm_config, files),
        dtype=str(model.dtype).removeprefix("torch."),
        cache_dtype=cache.cache_dtype,
        layout=str(kv_cache_config.kv_cache_layout),
        num_ranks=vllm_config.parallel_config.tensor_parallel_size,
        hash_tokens=hash_tokens,
        hash_algorithm=algorithm,
        hash_seed=hash_seed(
            algorithm, os.environ.get("PYTHONHASHSEED"), default=DEFAULT_NONE_HASH_SEED, instance=instance
        ),
    )
    return [facts.spec(group) for group in _groups(vllm_config, kv_cache_config)]


def _settings(vllm_config: VllmConfig, files: Path) -> dict[str, Any]:
    """How weights are quantised at the start, and how images are made numbers: vLLM hashes an image before that."""
    model = vllm_config.model_config
    settings: dict[str, Any] = {"quantization_config": model.quantization_config}
    if model.multimodal_config is not None:
        settings["mm_processor_kwargs"] = model.multimodal_config.mm_processor_kwargs
        settings["video_pruning_rate"] = model.multimodal_config.video_pruning_rate
        settings |= {path.name: path.read_text() for path in sorted(files.glob("*processor_config.json"))}
    return settings


def _groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[GroupFacts]:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    groups = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec, is_mla = group.kv_cache_spec, isinstance(group.kv_cache_spec, MLAAttentionSpec)
        kind = f"window:{spec.sliding_window}" if isinstance(spec, SlidingWindowSpec) else "full"
        opaque = current_platform.device_type == "cpu"
        isa = _get_attn_isa(model.dtype, spec.block_size, spec.head_size, cache.cache_dtype) if opaque else ""
        groups.append(
            GroupFacts(
                name=group_name(kind, number, group.layer_names, num_groups=len(kv_cache_config.kv_cache_groups)),
                num_layers=len(group.layer_names),
                num_kv_heads=1 if is_mla else model.get_total_num_kv_heads(),
                head_size=spec.head_size,
                planes=1 if is_mla else 2,
                block_tokens=spec.block_size,
                attention=f"cpu-{isa}" if opaque else "",
                page_nbytes=int(spec.page_size_bytes) * len(group.layer_names),
            )
        )
    return groups


def open_pages(
    kv_caches: Mapping[str, torch.Tensor], vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, rank: Rank
) -> list[Pages]:
    """What this rank has of each layer group's pages. Call on the thread that queues vLLM's kernels. Raises ConfigError or
    SpecMismatch for tensors that are not what the configuration says."""
    opened: list[Pages] = []
    for group, facts in zip(kv_cache_config.kv_cache_groups, _groups(vllm_config, kv_cache_config), strict=True):
        layers = [kv_caches[name] for name in group.layer_names]
        opened.append(_opaque_pages(layers, facts, rank) if facts.attention else _device_pages(layers, facts, rank))
    return opened


def _opaque_pages(layers: list[torch.Tensor], facts: GroupFacts, rank: Rank) -> Pages:
    pages = PagedCache(layers)
    if pages.page_nbytes != facts.page_nbytes:
        raise ConfigError(
            f"kv_caches: a block has {pages.page_nbytes} bytes in the tensors and {facts.page_nbytes} in kv_cache_config",
            field="kv_caches",
            value=pages.page_nbytes,
        )
    return PagePart(pages, rank=rank.number, num_ranks=rank.num_ranks) if rank.num_ranks > 1 else pages


def _device_pages(layers: list[torch.Tensor], facts: GroupFacts, rank: Rank) -> Pages:
    """Ranks beyond the number of KV heads have one that another rank has too, which writes it."""
    page_map = PageMap.of_layers(layers, "BHTC" if facts.planes == 2 else "BHTD")
    found = (page_map.num_heads, page_map.block_tokens, page_map.head_dim)
    wanted = (max(1, facts.num_kv_heads // rank.num_ranks), facts.block_tokens, facts.head_size)
    if found != wanted:
        raise ConfigError(
            f"kv_caches: a page has {found} heads, tokens and numbers in the tensors and {wanted} in kv_cache_config; where "
            f"vLLM's kernels want smaller blocks, use --block-size {page_map.block_tokens}",
            field="kv_caches",
            value=str(found),
        )
    ranks_a_head = max(1, rank.num_ranks // facts.num_kv_heads)
    first_head = rank.number // ranks_a_head * page_map.num_heads
    part = BlockPart.of(
        page_map,
        num_kv_heads=facts.num_kv_heads,
        first_head=first_head,
        writer=rank.number % ranks_a_head == 0,
    )
    return DevicePages.open(page_map, part)


def share_vllm_log() -> None:
    """vLLM gives handlers to its own logger only; without this our warnings would lack a format and our news be lost."""
    ours, theirs = logging.getLogger("kvstore"), logging.getLogger("vllm")
    if not ours.handlers and not logging.getLogger().handlers:
        ours.handlers, ours.level, ours.propagate = list(theirs.handlers), theirs.level, False
