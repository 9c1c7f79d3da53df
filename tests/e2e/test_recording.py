"""A sidecar records what real clients ask of it; the recording, replayed, gives the hits that it counted."""

import json
import random
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner
from sidecar_process import SPEC, SidecarProcess, running_sidecar, tool, wait_until

from kvstore.cli.main import cli
from kvstore.client import Client
from kvstore.core.errors import ConfigError
from kvstore.core.keys import HashScheme, KVSpec
from kvstore.proto import kvstore_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]

WIDE = KVSpec(
    weights="wide",
    num_layers=5,
    num_kv_heads=2,
    head_dim=64,
    dtype="float16",
    block_tokens=32,
    hash=HashScheme(algorithm="sha256", block_tokens=32),
)
"""Blocks of 80 KiB."""
ARENA = 4 << 20  # 256 blocks of SPEC
NUM_REQUESTS = 160


def run_json(*args: str) -> dict[str, Any]:
    found = CliRunner().invoke(cli, [*args, "--json"], catch_exceptions=False)
    assert found.exit_code == 0
    answer: dict[str, Any] = json.loads(found.output)
    return answer


class Engine(NamedTuple):
    """Chats and documents of one tenant, asked one after the other."""

    client: Client
    spec: KVSpec
    draw: random.Random

    def ask(self) -> None:
        """Match, twice at times; load; store what is missing, and behind it what was generated."""
        spec, draw, client = self.spec, self.draw, self.client
        namespace, name = client.namespaces[0].namespace, uuid.uuid4().hex
        document = min(25, int(draw.paretovariate(0.8)))
        tokens = [document + 1] * (spec.block_tokens * (3 + document % 7)) + [draw.randrange(4)] * spec.block_tokens * 2
        keys = spec.hash.hash_blocks(tokens)
        for _ in range(draw.choice((1, 1, 2))):
            match = client.match(namespace, keys, request_id=name)
        if match.num_blocks:
            grant = client.acquire(name, namespace, keys[: match.num_blocks])
            assert grant.num_blocks == match.num_blocks
            client.release(grant.lease_id, pb.LOADED, num_loaded=match.num_blocks)
        if draw.random() < 0.1:
            return  # not to be stored
        answer = spec.hash.hash_blocks(tokens + [draw.randrange(3)] * spec.block_tokens)
        self._store(keys[match.num_blocks :], keys[match.num_blocks - 1] if match.num_blocks else b"")
        self._store(answer[-1:], keys[-1])

    def _store(self, keys: list[bytes], parent: bytes) -> None:
        if keys:
            grant = self.client.reserve(uuid.uuid4().hex, self.client.namespaces[0].namespace, keys, parent=parent)
            if grant.lease_id:
                self.client.commit(grant.lease_id)


@contextmanager
def engines(sidecar: SidecarProcess) -> Iterator[list[Engine]]:
    with ExitStack() as clients:
        yield [
            Engine(
                clients.enter_context(
                    Client(
                        str(sidecar.socket),
                        instance=uuid.uuid4().bytes,
                        role=pb.BOTH,
                        tenant=tenant,
                        specs=[spec],
                        connect_deadline_s=5.0,
                        call_deadline_s=5.0,
                    )
                ),
                spec,
                random.Random(seed),
            )
            for seed, (tenant, spec) in enumerate((("alice", SPEC), ("bob", SPEC), ("bob", WIDE)))
        ]


def test_a_replay_of_the_recording_gives_the_hits_that_the_sidecar_counted(tmp_path: Path) -> None:
    """Three engines, two tenants, blocks of two sizes; the arena holds a third of what they ask for. To the token with LRU; for
    other policies it also matters which of uses within two seconds come a millisecond before or after these."""
    path = tmp_path / "traffic.jsonl.gz"
    flags = ("--eviction", "lru", "--record", str(path), "--no-grpc")
    with running_sidecar(tmp_path, *flags, arena="4MiB") as sidecar, tool(sidecar) as look:
        wait_until(lambda: look.stats().tiers[0].capacity_bytes == ARENA, "all memory")
        with engines(sidecar) as asking:
            for turn in range(NUM_REQUESTS):
                asking[(0, 1, 0, 2)[turn % 4]].ask()
            wait_until(lambda: look.stats().usage.num_requests == NUM_REQUESTS, "all settled", 20.0)
        stats = look.stats()
        live = run_json("size", "--live", "--socket", str(sidecar.socket))
        for beyond in ("1", "99999TiB"):
            with pytest.raises(ConfigError, match=r"--capacity: .* which its curve has"):
                run_json("size", "--live", "--socket", str(sidecar.socket), "--capacity", beyond)
        assert sidecar.stop() == 0

    replayed = run_json("replay", str(path))
    sized = run_json("size", str(path), "--exact", "--capacity", ",".join(str(row["nbytes"]) for row in live["sizes"]))

    hits = stats.usage.hit_tokens["pinned"]
    assert stats.counters["evicted_blocks_total"] > 100
    assert 0.2 < hits / stats.usage.requested_tokens < 0.8
    same = {"requests": NUM_REQUESTS, "hit_tokens": hits, "capacity": ARENA, "policy": "lru"}
    assert {name: replayed[name] for name in same} == same
    assert replayed["evicted_blocks"] == stats.counters["evicted_blocks_total"]
    assert run_json("replay", str(path), "--capacity", "1MiB")["hit_tokens"] < hits
    assert run_json("replay", str(path), "--capacity", "2MiB", "--nvme", "32MiB")["nvme_hits"] > 0
    for one, other in zip(live["sizes"], sized["sizes"], strict=True):
        assert one["token_hit"] == pytest.approx(other["token_hit"], abs=0.02)
    assert live["best_token_hit"] == pytest.approx(sized["best_token_hit"], abs=0.02)
    assert stats.counters["dropped_records_total"] == 0
    assert stats.counters["recorded_bytes_total"] > 0


def test_a_killed_sidecar_leaves_what_it_had_recorded_and_the_next_one_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl.gz"
    with running_sidecar(tmp_path, "--record", str(path), "--no-grpc", arena="4MiB") as sidecar:
        with tool(sidecar) as look, engines(sidecar) as asking:
            for _ in range(20):
                asking[0].ask()
            wait_until(lambda: look.stats().counters["recorded_lines_total"] > 40, "a flush")
        sidecar.kill()
        assert run_json("replay", str(path), "--capacity", "1000")["requests"] == 20
        sidecar.start()

        assert run_json("replay", f"{path}.before", "--capacity", "1000")["requests"] == 20
