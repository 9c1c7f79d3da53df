"""Engines of several ranks on a real sidecar, a process for each rank: any tensor-parallel degree reads what any other wrote,
and a block is only there when all ranks have written it. The ranks compute nothing: each knows its part of every block."""

import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from rank_process import Part
from sidecar_process import ROOT, SidecarProcess, running_sidecar, tool, wait_until

from kvstore.client import Client
from kvstore.core.clock import MonotonicClock
from kvstore.core.keys import KVSpec
from kvstore.engine_connector.protocol import CacheOptions, FetchPolicy, ScheduledRequest, WorkerOutput
from kvstore.engine_connector.rank_outputs import RankOutputs
from kvstore.engine_connector.scheduler_side import StoreSchedulerSide
from kvstore.engine_connector.session import StoreSession
from kvstore.proto import kvstore_pb2 as pb

SPEC = KVSpec(weights="ranks", num_layers=4, num_kv_heads=4, head_dim=16, dtype="bfloat16")
MLA = replace(SPEC, weights="latent", num_kv_heads=1, planes=1, head_dim=96)
BLOCK = SPEC.block_tokens
NUM_BLOCKS = 5
DEADLINE_S = 20.0


def tensor_parallel(spec: KVSpec, degree: int, layers: range | None = None) -> list[Part]:
    """As engines split heads: evenly, and where there are more ranks than heads, each head on neighbouring ranks."""
    heads, parts = spec.num_kv_heads, []
    for rank in range(degree):
        first = rank * heads // degree
        last = max(first + 1, (rank + 1) * heads // degree)
        parts.append(Part(layers or range(spec.num_layers), range(first, last), rank * heads % degree == 0))
    return parts


def pipeline(spec: KVSpec, num_stages: int, degree: int) -> list[Part]:
    """Stages of layers, each of `degree` ranks."""
    bounds = [stage * spec.num_layers // num_stages for stage in range(num_stages + 1)]
    stages = [range(*bounds[i : i + 2]) for i in range(num_stages)]
    return [part for layers in stages for part in tensor_parallel(spec, degree, layers)]


class RankProcess:
    """rank_process.py, for one engine after another."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, Path(__file__).parent / "rank_process.py", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )
        self._connection = Connection(ours.detach())

    def send(self, *call: Any) -> None:
        self._connection.send(call)

    def receive(self) -> Any:
        assert self._connection.poll(DEADLINE_S), "the rank does not answer"
        return self._connection.recv()

    def ask(self, *call: Any) -> Any:
        self.send(*call)
        return self.receive()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._connection.close()


@dataclass
class Request:
    """`NUM_BLOCKS` full blocks and one token."""

    request_id: str
    first_token: int
    spec: KVSpec
    cache: CacheOptions = field(default_factory=CacheOptions)
    tail_hash: bytes = b""
    num_prompt_tokens: int = NUM_BLOCKS * BLOCK + 1
    num_tokens: int = num_prompt_tokens

    @property
    def block_hashes(self) -> list[bytes]:
        return self.spec.hash.hash_blocks(range(self.first_token, self.first_token + NUM_BLOCKS * BLOCK))

    def blocks(self, pages: Sequence[int]) -> dict[int, int]:
        """{page: first token}."""
        return {page: self.first_token + i * BLOCK for i, page in enumerate(pages)}


class RankedEngine:
    """A scheduler side here, and a worker side in each of `processes`."""

    def __init__(self, path: Path, spec: KVSpec, parts: list[Part], processes: Sequence[RankProcess]) -> None:
        self.spec, self.processes = spec, processes[: len(parts)]
        instance = uuid.uuid4().bytes
        client = Client(
            str(path),
            instance=instance,
            role=pb.SCHEDULER,
            specs=[spec],
            want_arena=False,
            connect_deadline_s=10.0,
            call_deadline_s=10.0,
        )
        self.session = StoreSession(client)
        self.session.start()
        self.scheduler = StoreSchedulerSide(
            self.session, block_tokens=BLOCK, clock=MonotonicClock(), fetch=FetchPolicy.ALWAYS
        )
        self.ranks = RankOutputs(len(parts))
        for rank, (process, part) in enumerate(zip(self.processes, parts, strict=True)):
            process.send("open", str(path), instance, rank, spec, part)
        for process in self.processes:
            process.receive()

    def step(self, *scheduled: ScheduledRequest, computed: dict[int, int] | None = None) -> None:
        meta = self.scheduler.build_connector_meta(scheduled, frozenset())
        self.ranks.expect(meta)
        for process in self.processes:
            process.ask("step", meta, computed or {})

    def hear(self) -> WorkerOutput:
        """One report of each rank."""
        output = self.ranks.add([(rank, process.ask("output")) for rank, process in enumerate(self.processes)])
        self.scheduler.update_connector_output(output)
        self.scheduler.check()
        return output

    def hear_until(self, over: Callable[[], bool]) -> list[WorkerOutput]:
        outputs, until_s = [], time.monotonic() + DEADLINE_S
        while not over():
            assert time.monotonic() < until_s
            outputs.append(self.hear())
        return outputs

    def start_save(self, request: Request, pages: Sequence[int]) -> None:
        share = ScheduledRequest(request, pages, 0, NUM_BLOCKS * BLOCK)
        self.step(share, computed=request.blocks(pages[:NUM_BLOCKS]))

    def write(self, request: Request, pages: Sequence[int]) -> None:
        self.start_save(request, pages)
        self.hear_until(lambda: not self.scheduler.has_pending(request.request_id))
        assert not self.scheduler.request_finished(request)

    def match(self, request: Request) -> int:
        """In blocks."""
        return self.scheduler.get_num_new_matched_tokens(request, 0) // BLOCK

    def read(self, request: Request, pages: Sequence[int]) -> None:
        """Every rank has its part of every block."""
        assert self.match(request) == NUM_BLOCKS
        self.scheduler.update_state_after_alloc(request, pages, NUM_BLOCKS * BLOCK)
        self.step()
        outputs = self.hear_until(lambda: not self.scheduler.has_pending(request.request_id))
        assert outputs[-1].finished_loading == {request.request_id}
        assert not any(output.failed_block_ids for output in outputs)
        for process in self.processes:
            assert process.ask("wrong_pages", request.blocks(pages[:NUM_BLOCKS])) == []
        assert not self.scheduler.request_finished(request)

    def close(self) -> None:
        self.scheduler.close()


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    with running_sidecar(tmp_path_factory.mktemp("ranks"), "--no-grpc") as process:
        yield process


@pytest.fixture(scope="module")
def processes() -> Iterator[list[RankProcess]]:
    """Eight, enough for an engine that writes and one that reads."""
    started = [RankProcess() for _ in range(8)]
    yield started
    for process in started:
        process.kill()


WAYS = {
    "tp1": tensor_parallel(SPEC, 1),
    "tp2": tensor_parallel(SPEC, 2),
    "tp4": tensor_parallel(SPEC, 4),
    "pp2": pipeline(SPEC, 2, 1),
    "pp2 x tp2": pipeline(SPEC, 2, 2),
}
TWO_HEADS = replace(SPEC, weights="two heads", num_kv_heads=2)
MODELS = {
    "four heads": (SPEC, WAYS),
    "two heads": (TWO_HEADS, {f"tp{degree}": tensor_parallel(TWO_HEADS, degree) for degree in (1, 2, 4)}),
    "latent": (MLA, {f"tp{degree}": tensor_parallel(MLA, degree) for degree in (1, 2, 4)}),
}


def test_the_ways_to_split_are_those_of_engines() -> None:
    assert [part.heads for part in WAYS["tp2"]] == [range(2), range(2, 4)]
    replicated = tensor_parallel(TWO_HEADS, 4)
    assert [part.heads for part in replicated] == [range(1), range(1), range(1, 2), range(1, 2)]
    assert [part.writes for part in replicated] == [True, False, True, False]
    assert [part.writes for part in tensor_parallel(MLA, 4)] == [True, False, False, False]
    assert [part.layers for part in pipeline(SPEC, 2, 2)] == [range(2), range(2), range(2, 4), range(2, 4)]


@pytest.mark.parametrize("model", MODELS)
def test_any_degree_reads_what_any_other_wrote(
    model: str, sidecar: SidecarProcess, processes: list[RankProcess]
) -> None:
    spec, ways = MODELS[model]
    for i, (writer, writer_parts) in enumerate(ways.items()):
        writing = RankedEngine(sidecar.socket, spec, writer_parts, processes[:4])
        request = Request("w", 1000 * (i + 1), spec)
        writing.write(request, range(NUM_BLOCKS + 1))
        for reader_parts in ways.values():
            reading = RankedEngine(sidecar.socket, spec, reader_parts, processes[4:])
            reading.read(replace(request, request_id=f"read what {writer} wrote"), range(20, 20 + NUM_BLOCKS + 1))
            reading.close()
        writing.close()


def test_a_rank_killed_in_mid_save_leaves_no_block_and_its_slots_come_back(
    sidecar: SidecarProcess, processes: list[RankProcess]
) -> None:
    mortal = [RankProcess(), RankProcess()]
    engine = RankedEngine(sidecar.socket, SPEC, tensor_parallel(SPEC, 2), mortal)
    other = RankedEngine(sidecar.socket, SPEC, tensor_parallel(SPEC, 1), processes)
    request = Request("r", 100_000, SPEC)
    mortal[1].ask("hold_after", 2)

    engine.start_save(request, range(NUM_BLOCKS + 1))
    wait_until(lambda: mortal[0].ask("num_copied_out") == NUM_BLOCKS, "rank 0 has written all")
    wait_until(lambda: mortal[1].ask("num_copied_out") == 2, "rank 1 has written two blocks")
    engine.hear()
    assert engine.scheduler.has_pending("r")
    assert other.match(request) == 0, "not all ranks have written"

    mortal[1].kill()
    with tool(sidecar) as look:
        assert look.stats().tiers[0].writing_bytes == NUM_BLOCKS * SPEC.block_nbytes
        engine.scheduler.update_connector_output(engine.ranks.lose(1))
        stats = look.stats()

    assert not engine.scheduler.has_pending("r"), "the pages are the engine's again"
    assert (stats.tiers[0].writing_bytes, stats.tiers[0].limbo_bytes, stats.num_leases) == (0, 0, 0)
    assert other.match(replace(request, request_id="other")) == 0
    mortal[0].kill()
    engine.close()
    other.close()
