"""One rank of an engine, in a process of its own: python rank_process.py FD, over which it is told what to do (`Rank`)."""

import sys
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.client import Client
from kvstore.core.keys import KVSpec
from kvstore.core.layout import BlockLayout
from kvstore.engine_connector.protocol import ConnectorMetadata, WorkerOutput
from kvstore.engine_connector.session import StoreSession
from kvstore.engine_connector.worker_side import StoreWorkerSide
from kvstore.proto import kvstore_pb2 as pb

NUM_PAGES = 32


class Part(NamedTuple):
    """What a rank has of each block. `writes`: no other rank before it has the same."""

    layers: range
    heads: range
    writes: bool = True


def content(token: int, layout: BlockLayout) -> NDArray[np.uint16]:
    """`[L, H, T, P, D]`: what the model computes for a block that begins with `token`, on any rank."""
    return np.random.default_rng(token).integers(0, 1 << 16, layout.shape, np.uint16)


class PartPages:
    """Pages `[num_pages, layers, heads, T, P, D]` of 16 bit numbers. `hold_after`: copies out hang once so many are done."""

    def __init__(self, layout: BlockLayout, part: Part) -> None:
        self.layout, self.part = layout, part
        shape = (NUM_PAGES, len(part.layers), len(part.heads), *layout.shape[2:])
        self.memory = np.zeros(shape, np.uint16)
        self.num_pages, self.num_layers, self.page_nbytes = NUM_PAGES, len(part.layers), layout.nbytes
        self.hold_after, self.num_copied_out = 1 << 30, 0

    def of_block(self, numbers: NDArray[np.uint16]) -> NDArray[np.uint16]:
        layers, heads = self.part.layers, self.part.heads
        return numbers[layers.start : layers.stop, heads.start : heads.stop]

    def copy_in(self, block_id: int, block: NDArray[np.uint8]) -> None:
        np.copyto(self.memory[block_id], self.of_block(block.view(np.uint16).reshape(self.layout.shape)))

    def copy_out(self, block_id: int, block: NDArray[np.uint8]) -> None:
        while self.num_copied_out >= self.hold_after:
            sys.stdin.read()  # until the process is killed
        if self.part.writes:
            np.copyto(self.of_block(block.view(np.uint16).reshape(self.layout.shape)), self.memory[block_id])
        self.num_copied_out += 1


class Rank:
    """A worker side with a session of its own."""

    def __init__(self, socket: str, instance: bytes, rank: int, spec: KVSpec, part: Part) -> None:
        client = Client(
            socket, instance=instance, role=pb.WORKER, rank=rank, connect_deadline_s=10.0, call_deadline_s=10.0
        )
        self.session = StoreSession(client)
        self.session.start()
        self.side = StoreWorkerSide(self.session)
        self.pages = PartPages(BlockLayout.from_spec(spec), part)
        self.side.register_pages(self.pages)

    def step(self, meta: ConnectorMetadata, computed: dict[int, int]) -> None:
        """One step whose forward fills pages: {page: the block's first token}."""
        self.side.handle_preemptions(meta)
        self.side.start_load(meta)
        for page, token in computed.items():
            self.pages.memory[page] = self.pages.of_block(content(token, self.pages.layout))
        self.side.start_save(meta)

    def output(self) -> WorkerOutput:
        return self.side.get_output(wait_s=0.05)

    def wrong_pages(self, expected: dict[int, int]) -> list[int]:
        """Pages that do not hold this rank's part of the block that begins with that token."""
        pages = self.pages
        return [
            page
            for page, token in expected.items()
            if not np.array_equal(pages.memory[page], pages.of_block(content(token, pages.layout)))
        ]

    def hold_after(self, num_copies: int) -> None:
        self.pages.hold_after = self.pages.num_copied_out + num_copies

    def num_copied_out(self) -> int:
        return self.pages.num_copied_out

    def close(self) -> None:
        self.side.close()
        self.session.close()


def main(connection: Connection) -> None:
    rank: Rank | None = None
    while True:
        try:
            call, *arguments = connection.recv()
        except EOFError:
            return
        answer: Any = None
        if call == "open":
            if rank is not None:
                rank.close()
            rank = Rank(*arguments)
        else:
            answer = getattr(rank, call)(*arguments)
        connection.send(answer)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
