"""An engine of several layer groups on a real sidecar, which computes nothing: it knows what each page would hold.

As in vLLM's hybrid manager, all groups take their pages from one pool of numbers; a page that is out of its window is given back
when the step has been saved, and of a state only the one at a step's last checkpoint is kept.
"""

import contextlib
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.client import Client
from kvstore.core.clock import MonotonicClock
from kvstore.core.keys import KVSpec
from kvstore.engine_connector.layer_groups import LayerGroup
from kvstore.engine_connector.protocol import (
    NO_PAGE,
    CacheOptions,
    FetchPolicy,
    PageTables,
    ScheduledRequest,
    WorkerOutput,
)
from kvstore.engine_connector.scheduler_side import StoreSchedulerSide
from kvstore.engine_connector.session import StoreSession
from kvstore.engine_connector.worker_side import StoreWorkerSide
from kvstore.proto import kvstore_pb2 as pb

BLOCK = 16
NUM_PAGES = 400
DEADLINE_S = 20.0


def spec(group: str, *, block_tokens: int = BLOCK, weights: str = "groups") -> KVSpec:
    """Of two layers; a state is 8 KiB whatever it covers."""
    if group != "state":
        return KVSpec(weights=weights, num_layers=2, num_kv_heads=1, head_dim=32, dtype="float16", group=group)
    own = "opaque:test:state"
    return KVSpec(
        weights=weights,
        num_layers=2,
        num_kv_heads=1,
        head_dim=1,
        dtype="float32",
        group=group,
        block_tokens=block_tokens,
        page_format=own,
        stored_format=own,
        opaque_block_nbytes=8192,
    )


@dataclass
class Request:
    request_id: str
    token_ids: list[int]
    hashes: list[bytes]
    cache: CacheOptions = field(default_factory=CacheOptions)
    tail_hash: bytes = b""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        return self.hashes


class GroupPages:
    """Of one group, under the numbers of the pool."""

    def __init__(self, block_nbytes: int) -> None:
        self.memory = np.zeros((NUM_PAGES, block_nbytes), np.uint8)
        self.num_pages, self.page_nbytes = NUM_PAGES, block_nbytes

    def copy_in(self, block_id: int, block: NDArray[np.uint8]) -> None:
        np.copyto(self.memory[block_id], block)

    def copy_out(self, block_id: int, block: NDArray[np.uint8]) -> None:
        np.copyto(block, self.memory[block_id])


class GroupEngine:
    def __init__(self, socket: Path, specs: list[KVSpec], *, fetch: FetchPolicy = FetchPolicy.ALWAYS) -> None:
        self.specs = specs
        self.groups = [LayerGroup.of(each) for each in specs]
        client = Client(
            str(socket),
            instance=uuid.uuid4().bytes,
            role=pb.BOTH,
            specs=specs,
            connect_deadline_s=10.0,
            call_deadline_s=10.0,
        )
        self.session = StoreSession(client)
        self.session.start()
        self.scheduler = StoreSchedulerSide(
            self.session,
            block_tokens=specs[0].hash.block_tokens,
            clock=MonotonicClock(),
            fetch=fetch,
            groups=self.groups,
        )
        self.worker = StoreWorkerSide(self.session)
        self.pages = [GroupPages(each.block_nbytes) for each in specs]
        self.worker.register_pages(*self.pages)
        self.free = list(range(NUM_PAGES))
        self.stored: list[set[bytes]] = [set() for _ in specs]  # keys that were committed, if nothing was evicted

    def request(self, request_id: str, token_ids: list[int]) -> Request:
        return Request(request_id, token_ids, self.specs[0].hash.hash_blocks(token_ids))

    def content(self, group: int, key: bytes) -> NDArray[np.uint8]:
        return np.resize(np.frombuffer(bytes([group]) + key, np.uint8), self.specs[group].block_nbytes)

    def key(self, request: Request, group: int, block: int) -> bytes:
        return request.hashes[(block + 1) * self.groups[group].span - 1]

    def match(self, request: Request, first: int = 0) -> int:
        """In hashed blocks."""
        return self.scheduler.get_num_new_matched_tokens(request, first * BLOCK) // BLOCK

    def tables(self, request: Request, length: int) -> list[list[int]]:
        """Pages for what a hit of `length` needs."""
        tables = []
        for group in self.groups:
            needed = group.needed(0, length)
            tables.append([self.free.pop() if i in needed else NO_PAGE for i in range(length // group.span)])
        return tables

    def load(self, request: Request, length: int, tables: list[list[int]]) -> WorkerOutput:
        self.scheduler.update_state_after_alloc(request, self._page_tables(tables), length * BLOCK)
        self.step()
        outputs = self.hear(request)
        (told,) = [output for output in outputs if output.finished_loading]
        assert told.finished_loading == {request.request_id}
        return told

    def _page_tables(self, tables: list[list[int]]) -> PageTables:
        return tables if len(tables) > 1 else tables[0]

    def wrong_pages(self, request: Request, tables: list[list[int]], length: int) -> list[tuple[int, int]]:
        return [
            (number, block)
            for number, group in enumerate(self.groups)
            for block in group.needed(0, length)
            if not np.array_equal(
                self.pages[number].memory[tables[number][block]], self.content(number, self.key(request, number, block))
            )
        ]

    def step(self, *scheduled: ScheduledRequest) -> None:
        meta = self.scheduler.build_connector_meta(scheduled, frozenset())
        self.worker.handle_preemptions(meta)
        self.worker.start_load(meta)
        self.worker.start_save(meta)

    def hear(self, request: Request) -> list[WorkerOutput]:
        """Until nothing of the request is under way."""
        outputs, until_s = [], time.monotonic() + DEADLINE_S
        while self.scheduler.has_pending(request.request_id):
            assert time.monotonic() < until_s
            outputs.append(self.worker.get_output(wait_s=0.05))
            self.scheduler.update_connector_output(outputs[-1])
            self.scheduler.check()
        return outputs

    def compute(self, request: Request, first: int, tables: list[list[int]], *, chunk_blocks: int) -> None:
        """From block `first` on, a chunk a step."""
        num_blocks = len(request.token_ids) // BLOCK
        start = first
        while start < num_blocks:
            end = min(start + chunk_blocks, num_blocks)
            for number, group in enumerate(self.groups):
                self._fill(request, number, tables[number], start // group.span, end // group.span)
            self.step(ScheduledRequest(request, self._page_tables(tables), start * BLOCK, (end - start) * BLOCK))
            self.hear(request)
            self._note_stored(request, tables, start, end)
            for group, table in zip(self.groups, tables, strict=True):
                if not group.is_full:
                    self.give_back(table, range(group.needed(0, end).start))
            start = end

    def _fill(self, request: Request, number: int, table: list[int], first: int, end: int) -> None:
        for block in range(first, end):
            keeps = not self.specs[number].group.startswith("state") or block == end - 1
            table.append(self.free.pop() if keeps else NO_PAGE)
            if keeps:
                key = self.key(request, number, block)
                self.pages[number].memory[table[-1]] = self.content(number, key)

    def _note_stored(self, request: Request, tables: list[list[int]], start: int, end: int) -> None:
        """By the contract: what a prefix that ends with the step needs, as far as there are pages."""
        for number, group in enumerate(self.groups):
            if end // group.span > start // group.span:
                have = [block for block in group.needed(0, end) if tables[number][block] != NO_PAGE]
                self.stored[number].update(self.key(request, number, block) for block in have)

    def give_back(self, table: list[int], blocks: range) -> None:
        self.free += [table[block] for block in blocks if table[block] != NO_PAGE]
        table[blocks.start : blocks.stop] = [NO_PAGE] * len(blocks)

    def supported(self, request: Request, stored: list[set[bytes]]) -> int:
        """The longest prefix of which all groups' needed blocks are stored, by trying all."""
        lengths = range((request.num_tokens - 1) // BLOCK + 1)
        return max(
            length
            for length in lengths
            if all(
                length % group.span == 0
                and all(self.key(request, number, block) in stored[number] for block in group.needed(0, length))
                for number, group in enumerate(self.groups)
            )
        )

    def finish(self, request: Request, tables: list[list[int]]) -> None:
        assert not self.scheduler.request_finished(request)
        for table in tables:
            self.give_back(table, range(len(table)))

    def serve(self, request: Request, *, chunk_blocks: int = 4) -> int:
        """Load what there is, compute the rest. Blocks that were loaded."""
        length = self.match(request)
        tables = self.tables(request, length)
        if length:
            told = self.load(request, length, tables)
            assert not told.failed_block_ids
            assert self.wrong_pages(request, tables, length) == []
        self.compute(request, length, tables, chunk_blocks=chunk_blocks)
        self.finish(request, tables)
        return length

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()
        assert sorted(self.free) == list(range(NUM_PAGES))


@contextlib.contextmanager
def open_engine(socket: Path, specs: list[KVSpec], *, fetch: FetchPolicy = FetchPolicy.ALWAYS) -> Iterator[GroupEngine]:
    engine = GroupEngine(socket, specs, fetch=fetch)
    try:
        yield engine
    finally:
        engine.worker.close()
        engine.scheduler.close()
