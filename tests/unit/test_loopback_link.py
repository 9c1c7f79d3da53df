"""The loopback link's faults: what it does to each extent, as told and as its seed decides."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "contract"))

from link_nodes import DEADLINE_S, LEASE, SLOT, Ends, Node, read, read_all

from kvstore.transport.link import Link, LinkProblem, ReadDone
from kvstore.transport.loopback import Faults, LoopbackEndpoint, LoopbackNetwork

SHORT_S = 0.1  # a deadline that is meant to pass


class Net:
    """Two nodes, a link between them, and the network whose faults a test sets."""

    def __init__(self, seed: int) -> None:
        self.network = LoopbackNetwork(seed=seed)
        self.owner, self.reader = (Node(self._make, seed=number) for number in (1, 2))
        self.link: Link = self.reader.endpoint.connect("owner", self.owner.endpoint.describe())

    def _make(self, node: Node) -> LoopbackEndpoint:
        return LoopbackEndpoint(
            self.network, memory=node.memory, generations=node.arena.generations, gatekeeper=node.gate
        )

    def close(self) -> None:
        self.owner.close()
        self.reader.close()


@pytest.fixture
def net() -> Iterator[Net]:
    with contextlib.closing(Net(seed=7)) as net:
        yield net


def test_what_is_dropped_is_a_timeout(net: Net) -> None:
    net.network.faults = Faults(drop=1.0)

    problems = read_all(net.link, net.owner.slots(3), deadline_s=SHORT_S)

    assert problems == dict.fromkeys(range(3), LinkProblem.TIMEOUT)


def test_a_cut_leaves_half_a_block_and_ends_what_waits(net: Net) -> None:
    net.network.faults = Faults(cut=1.0)
    before = net.reader.memory.copy()

    problems = read_all(net.link, net.owner.slots(3))

    assert problems == dict.fromkeys(range(3), LinkProblem.GONE)
    assert np.array_equal(net.reader.memory[: SLOT // 2], net.owner.memory[: SLOT // 2])
    assert np.array_equal(net.reader.memory[SLOT // 2 :], before[SLOT // 2 :])


@pytest.mark.parametrize("checked", [True, False])
def test_a_flip_is_found_by_the_checksum_alone(net: Net, checked: bool) -> None:
    net.network.faults = Faults(corrupt=1.0)

    problems = read_all(net.link, net.owner.slots(1, checked=checked))

    assert problems == {0: LinkProblem.CORRUPT if checked else None}
    assert np.count_nonzero(net.reader.memory[:SLOT] != net.owner.memory[:SLOT]) == 1


def test_what_cannot_be_recalled_ends_twice(net: Net) -> None:
    net.network.faults = Faults(unsettled=1.0, late_s=SHORT_S)
    before = net.reader.memory[:SLOT].copy()
    seen_before: list[bool] = []
    ends = Ends()

    def on_done(done: list[ReadDone]) -> None:
        seen_before.append(np.array_equal(net.reader.memory[:SLOT], before))
        ends(done)

    net.link.read(net.owner.slots(1), lease=LEASE, deadline_s=SHORT_S, on_done=on_done)
    with ends._changed:
        assert ends._changed.wait_for(lambda: len(ends.done) == 2, DEADLINE_S)

    assert ends.done == [ReadDone(0, LinkProblem.TIMEOUT, settled=False), ReadDone(0, LinkProblem.TIMEOUT)]
    assert seen_before == [True, False]
    assert np.array_equal(net.reader.memory[:SLOT], net.owner.memory[:SLOT])
    assert net.link.stats().problems == {"timeout": 1}


def test_a_close_waits_for_what_cannot_be_recalled(net: Net) -> None:
    net.network.faults = Faults(unsettled=1.0, late_s=4 * SHORT_S)
    ends = read(net.link, net.owner.slots(1), deadline_s=SHORT_S)
    with ends._changed:
        assert ends._changed.wait_for(lambda: ends.done, DEADLINE_S)

    assert not net.link.close(SHORT_S)
    assert net.link.close(DEADLINE_S)


def test_delay_and_bandwidth_take_their_time(net: Net) -> None:
    net.network.faults = Faults(delay_s=(0.01, 0.02), bytes_per_s=SLOT / 0.02)
    started_s = time.monotonic()

    problems = read_all(net.link, net.owner.slots(4, checked=True))

    assert problems == dict.fromkeys(range(4))
    assert time.monotonic() - started_s >= 4 * 0.03


def test_a_seed_decides_and_nothing_else() -> None:
    def outcome(seed: int) -> dict[int, LinkProblem | None]:
        with contextlib.closing(Net(seed)) as net:
            net.network.faults = Faults(corrupt=0.5, delay_s=(0.0, 0.001))
            return read_all(net.link, net.owner.slots(32, checked=True))

    first = outcome(1)

    assert first == outcome(1)
    assert first != outcome(2)
    assert set(first.values()) == {None, LinkProblem.CORRUPT}
