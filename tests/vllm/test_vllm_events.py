"""KV events through vLLM's own classes: our bytes are those that vLLM writes, and its decoder reads them."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "unit"))

from events_on_the_wire import BLOCK_TOKENS, EVENTS, GOLDEN, NAMESPACE, NOW_S

from kvstore.kv_events import encode_batch

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own imports warn


def test_vllm_writes_the_same_bytes_and_reads_ours() -> None:
    import msgspec
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

    rest = {"ownership": f"kvstore:{NAMESPACE.hex()}"}
    stored = {"token_ids": [], "block_size": 16, "lora_id": None, "lora_name": None, **rest}
    theirs = KVEventBatch(
        ts=NOW_S,
        events=[
            AllBlocksCleared(),
            BlockStored(
                block_hashes=[0x1112131415161718, (1 << 64) - 1], parent_block_hash=None, medium="CPU", **stored
            ),
            BlockStored(block_hashes=[7], parent_block_hash=0x1112131415161718, medium="STORAGE", **stored),
            BlockRemoved(block_hashes=[7], medium="STORAGE", **rest),
        ],
        data_parallel_rank=0,
    )

    ours = encode_batch(EVENTS, BLOCK_TOKENS, NOW_S)

    assert ours == GOLDEN == msgspec.msgpack.encode(theirs)
    assert msgspec.msgpack.decode(ours, type=KVEventBatch) == theirs
