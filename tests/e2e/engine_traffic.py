"""Engines as the sidecar sees them, without a model: prompts of which some begin alike, planned, loaded, saved.

python tests/e2e/engine_traffic.py SOCKET SECONDS     for looking at the dashboard
"""

import random
import threading
import time
import uuid
from collections import Counter

import numpy as np
from block_client import content
from sidecar_process import BLOCK_NBYTES, SPEC

from kvstore.client import Client
from kvstore.core.blocks import KeyStatus
from kvstore.core.plans import TIERS, MatchWish
from kvstore.proto import kvstore_pb2 as pb
from kvstore.usage import NO_TENANT

TENANTS = ("search", "assistant", "")
_NUM_DOCUMENTS = 40
_TOKEN_S = 70e-6  # of a prefill that never happened
_ARRIVAL_DEADLINE_S = 2.0
_OF_TENANTS = ("requests", "requested_tokens")
_TOKENS = SPEC.hash.block_tokens


class Traffic:
    """One engine for each tenant, in threads of this process. `asked` counts what they did, as they see it, under the names
    that metrics have: "requests", "hit_tokens|TIER", "tenant_requests|TENANT"."""

    def __init__(self, socket: str, *, pause_s: float = 0.01, seed: int = 1) -> None:
        self.asked: Counter[str] = Counter()
        self._pause_s = pause_s
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._failures: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(socket, tenant, seed + i)) for i, tenant in enumerate(TENANTS)
        ]

    def __enter__(self) -> "Traffic":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(10.0)
            assert not thread.is_alive()
        assert self._failures == []

    def _run(self, socket: str, tenant: str, seed: int) -> None:
        try:
            with Client(
                socket,
                instance=uuid.uuid4().bytes,
                role=pb.BOTH,
                tenant=tenant,
                specs=[SPEC],
                connect_deadline_s=5.0,
                call_deadline_s=5.0,
            ) as client:
                engine = _Engine(client, random.Random(seed))
                while not self._stopping.wait(self._pause_s * (1 + len(tenant) / 3)):
                    asked = engine.prompt()
                    of_tenant = {f"tenant_{name}|{tenant or NO_TENANT}": asked[name] for name in _OF_TENANTS}
                    with self._lock:
                        self.asked.update(asked | of_tenant)
        except BaseException as err:
            self._failures.append(err)
            raise


class _Engine:
    def __init__(self, client: Client, rng: random.Random) -> None:
        self._client, self._rng = client, rng
        self._namespace = client.namespaces[0].namespace

    def prompt(self) -> dict[str, int]:
        """One request, from Match to Commit."""
        client, rng, name = self._client, self._rng, f"chatcmpl-{uuid.uuid4().hex[:10]}"
        document = min(_NUM_DOCUMENTS - 1, int(rng.paretovariate(0.7)) - 1)
        length = _TOKENS * (8 + 5 * (document % 9))
        prompt = [document + 1] * length + [rng.randrange(1 << 30) for _ in range(_TOKENS * rng.randrange(1, 6) + 5)]
        keys = SPEC.hash.hash_blocks(prompt)
        own = rng.choice((0, 0, 4))  # blocks that the engine has itself
        match = client.match(self._namespace, keys, MatchWish(name, len(prompt), first_needed=own, chunk_tokens=512))
        assert match.plan is not None
        loaded = (
            self._load(name, keys[: own + match.plan.num_blocks], own, match.plan_id) if match.plan.num_blocks else 0
        )
        stored = self._save(keys)
        steps = [
            (float(tokens), tokens * tokens / 2, tokens * _TOKEN_S) for tokens in (128, 512, rng.randrange(64, 512))
        ]
        client.report(self._namespace, prefill=steps, copy_nbytes=loaded * BLOCK_NBYTES, copy_s=loaded * 4e-6)
        blocks = Counter(TIERS[tier] for tier in match.tiers[own : own + loaded])
        blocks["hbm"] = own
        return {
            "requests": 1,
            "requested_tokens": len(prompt),
            "missed_tokens": len(prompt) - blocks.total() * _TOKENS,
            "stored_blocks": stored,
            **{f"hit_tokens|{tier}": count * _TOKENS for tier, count in blocks.items()},
        }

    def _load(self, name: str, keys: list[bytes], own: int, plan_id: int) -> int:
        client, began_s = self._client, time.monotonic()
        grant = client.acquire(name, self._namespace, keys, first_needed=own, plan_id=plan_id)
        if not grant.lease_id:
            return 0
        assert client.arena is not None
        table, until_s, num_loaded = client.arena.generations, began_s + _ARRIVAL_DEADLINE_S, 0
        for offset, generation in zip(grant.offsets.tolist(), grant.generations.tolist(), strict=True):
            while table[offset // 4096] != generation and time.monotonic() < until_s:
                time.sleep(0.001)
            num_loaded += int(table[offset // 4096] == generation)
            np.array(client.arena.array[offset : offset + BLOCK_NBYTES])
        outcome = pb.LOADED if num_loaded == len(grant.offsets) else pb.FAILED
        client.release(grant.lease_id, outcome, num_loaded=num_loaded, seconds=time.monotonic() - began_s)
        return num_loaded

    def _save(self, keys: list[bytes]) -> int:
        client = self._client
        grant = client.reserve(uuid.uuid4().hex, self._namespace, keys)
        if not grant.lease_id:
            return 0
        assert client.arena is not None
        granted = [key for key, status in zip(keys, grant.statuses, strict=True) if status == KeyStatus.GRANTED]
        for key, offset in zip(granted, grant.offsets.tolist(), strict=True):
            client.arena.array[offset : offset + BLOCK_NBYTES] = content(key)
        return client.commit(grant.lease_id)


if __name__ == "__main__":
    import sys

    with Traffic(sys.argv[1], pause_s=0.03) as traffic:
        time.sleep(float(sys.argv[2]))
    print(dict(traffic.asked))
