"""An engine as the sidecar sees it, in a process of its own: python block_client.py MODE SOCKET SEED [NUM_BLOCKS]

    hold-write   reserve, write half of the blocks, say `holding LEASE`; on a line: write the rest, commit, say what happened
    hold-read    acquire what hold-write or put stored for SEED, say `holding LEASE`; on a line: copy, say what came of it
    hold-fill    acquire what was stored for SEED, write half of a block into the first slot of the slab that is to be filled, say
                 `holding LEASE OFFSET`, and wait for a line
    put          store NUM_BLOCKS in prefixes of 16, say how many were committed
    load         put and get until standard input closes, through restarts of the sidecar; then one line of JSON
    hang-up      like hold-write, but on the first line it closes its connection and lives on until the second

A block's bytes are its key over and over, so that every copy can be told right from wrong.
"""

import json
import os
import random
import select
import sys
import time
import uuid

import numpy as np
from numpy.typing import NDArray
from sidecar_process import BLOCK_NBYTES, SPEC

from kvstore.client import Client
from kvstore.core.blocks import KeyStatus
from kvstore.core.errors import KVStoreError, PeerUnavailable
from kvstore.core.plans import SlabUse
from kvstore.proto import kvstore_pb2 as pb

PREFIX_BLOCKS = 16
SHORT_TTL_S = 0.3


def keys_of(seed: int, num_blocks: int) -> list[bytes]:
    return SPEC.hash.hash_blocks([seed, *range(num_blocks * SPEC.block_tokens - 1)])


def content(key: bytes, nbytes: int = BLOCK_NBYTES) -> NDArray[np.uint8]:
    return np.resize(np.frombuffer(key, np.uint8), nbytes)


def write(client: Client, offset: int, key: bytes) -> None:
    assert client.arena is not None
    client.arena.array[offset : offset + BLOCK_NBYTES] = content(key)


def put(client: Client, keys: list[bytes], ttl_s: float = 0.0) -> int:
    """Number of blocks that became READY."""
    grant = client.reserve(uuid.uuid4().hex, client.namespaces[0].namespace, keys, ttl_s=ttl_s)
    if not grant.lease_id:
        return 0
    granted = [key for key, status in zip(keys, grant.statuses, strict=True) if status == KeyStatus.GRANTED]
    for key, offset in zip(granted, grant.offsets.tolist(), strict=True):
        write(client, offset, key)
    return client.commit(grant.lease_id)


def copy(
    client: Client, keys: list[bytes], offsets: NDArray[np.uint64], generations: NDArray[np.uint64]
) -> dict[str, int]:
    """How many copies were right, failed (another generation: a reader would recompute), or wrong without a sign."""
    assert client.arena is not None
    table, found = client.arena.generations, {"right": 0, "failed": 0, "wrong": 0}
    for key, offset, generation in zip(keys, offsets.tolist(), generations.tolist(), strict=True):
        before = table[offset // 4096]
        block = client.arena.array[offset : offset + BLOCK_NBYTES].copy()
        if before != generation or table[offset // 4096] != generation:
            found["failed"] += 1
        else:
            found["right" if (block == content(key)).all() else "wrong"] += 1
    return found


def get(client: Client, keys: list[bytes]) -> dict[str, int]:
    grant = client.acquire(uuid.uuid4().hex, client.namespaces[0].namespace, keys)
    if not grant.lease_id:
        return {"right": 0, "failed": 0, "wrong": 0}
    found = copy(client, keys[: grant.num_blocks], grant.offsets, grant.generations)
    client.release(grant.lease_id, pb.LOADED)
    return found


def say(text: str) -> None:
    print(text, flush=True)


def hold_write(client: Client, keys: list[bytes], *, ttl_s: float) -> None:
    grant = client.reserve("held", client.namespaces[0].namespace, keys, ttl_s=ttl_s)
    half = len(keys) // 2
    for key, offset in zip(keys[:half], grant.offsets[:half].tolist(), strict=True):
        write(client, offset, key)
    say(f"holding {grant.lease_id}")
    sys.stdin.readline()
    for key, offset in zip(keys[half:], grant.offsets[half:].tolist(), strict=True):
        write(client, offset, key)
    try:
        say(f"committed {client.commit(grant.lease_id)}")
    except KVStoreError as err:
        say(err.code)
    sys.stdin.readline()
    try:
        client.abort(grant.lease_id)
        say("aborted")
    except KVStoreError as err:
        say(err.code)


def hold_read(client: Client, keys: list[bytes], *, ttl_s: float) -> None:
    grant = client.acquire("held", client.namespaces[0].namespace, keys, ttl_s=ttl_s)
    say(f"holding {grant.lease_id}")
    sys.stdin.readline()
    found = copy(client, keys[: grant.num_blocks], grant.offsets, grant.generations)
    try:
        client.release(grant.lease_id, pb.LOADED)
        say(json.dumps(found | {"release": "ok"}))
    except KVStoreError as err:
        say(json.dumps(found | {"release": err.code}))


def hold_fill(client: Client, keys: list[bytes]) -> None:
    assert client.slab is not None
    grant = client.acquire("held", client.namespaces[0].namespace, keys, slab=True)
    assert set(grant.slab) == {SlabUse.FILL}, grant.slab
    offset = int(grant.slab_offsets[0])
    client.slab.write(offset, content(b"half written"[:8], BLOCK_NBYTES // 2))
    say(f"holding {grant.lease_id} {offset}")
    sys.stdin.readline()


def hang_up(client: Client, keys: list[bytes]) -> None:
    grant = client.reserve("held", client.namespaces[0].namespace, keys)
    say(f"holding {grant.lease_id}")
    sys.stdin.readline()
    client.close()
    say("closed")
    sys.stdin.readline()


def load(client: Client, seed: int) -> None:
    """As an engine does it: a call that fails loses the sidecar, and from then on only connect is tried."""
    rng = random.Random(seed)
    totals = {"right": 0, "failed": 0, "wrong": 0, "committed": 0, "lost": 0}
    boots, longest_s = {client.boot_id}, 0.0
    while not select.select([sys.stdin], [], [], 0)[0]:
        keys = keys_of(rng.randrange(60), PREFIX_BLOCKS)
        started_s = time.monotonic()
        try:
            if not client.connected:
                client.connect()
                boots.add(client.boot_id)
            elif rng.random() < 0.5:
                totals["committed"] += put(client, keys)
            else:
                for name, count in get(client, keys).items():
                    totals[name] += count
        except PeerUnavailable:
            totals["lost"] += 1
            longest_s = max(longest_s, time.monotonic() - started_s)
            time.sleep(0.01)
        except KVStoreError as err:
            totals[err.code] = totals.get(err.code, 0) + 1
    say(json.dumps(totals | {"boots": len(boots), "longest_lost_call_s": longest_s}))


def main() -> None:
    mode, socket, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
    num_blocks = int(sys.argv[4]) if len(sys.argv) > 4 else PREFIX_BLOCKS
    client = Client(
        socket,
        instance=uuid.uuid4().bytes,
        role=pb.BOTH,
        specs=[SPEC],
        want_slab=mode == "hold-fill",
        connect_deadline_s=5,
        call_deadline_s=2,
    )
    client.connect()
    keys = keys_of(seed, num_blocks)
    if mode == "hold-write":
        hold_write(client, keys, ttl_s=float(os.environ.get("TTL_S", "0")))
    elif mode == "hold-read":
        hold_read(client, keys, ttl_s=float(os.environ.get("TTL_S", "0")))
    elif mode == "hold-fill":
        hold_fill(client, keys)
    elif mode == "hang-up":
        hang_up(client, keys)
    elif mode == "put":
        say("ready")
        sys.stdin.readline()
        say(str(sum(put(client, keys_of(seed * 1000 + i, PREFIX_BLOCKS)) for i in range(num_blocks // PREFIX_BLOCKS))))
    else:
        say("loading")
        load(client, seed)
    client.close()


if __name__ == "__main__":
    main()
