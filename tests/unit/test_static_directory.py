"""Peers that hang, lie about who they are, or are told too much: the others are asked all the same."""

import random
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore.core.errors import ConfigError, PeerUnavailable, RemoteProtocolError
from kvstore.transport.block_log import BlockLog, Cursor, Head, LogChunk, stored
from kvstore.transport.directory import Node, fingerprints
from kvstore.transport.own_blocks import MAX_QUEUED_UPDATES, OwnBlocks
from kvstore.transport.snapshot import Snapshot
from kvstore.transport.static_directory import MAX_STATIC_PEERS, PeerAnswer, StaticDirectory

NAMESPACE = bytes(16)
HASHES = [random.Random(number).randbytes(16) for number in range(1000)]
SOON_S = 10.0


def node(name: str, epoch: int = 1) -> Node:
    return Node(name, epoch, name)


def wait_for(condition: Callable[[], object], what: str) -> None:
    until_s = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < until_s, what
        time.sleep(0.005)


Peers = dict[str, Callable[[Cursor], PeerAnswer]]


def asking(peers: Peers, **options: float) -> StaticDirectory:
    def fetch(address: str, cursor: Cursor, max_bytes: int, deadline_s: float) -> PeerAnswer:
        return peers[address](cursor)

    options = {"interval_s": 0.02, "deadline_s": 0.2, "ttl_s": 1.0} | options
    return StaticDirectory(node("me"), list(peers), fetch, **options)


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def answering(name: str, log: BlockLog) -> Callable[[Cursor], PeerAnswer]:
    return lambda cursor: PeerAnswer(node(name, log.head.epoch), log.read(cursor, 1 << 20))


def test_a_peer_that_hangs_delays_no_other(release: threading.Event) -> None:
    """Not even seven of them, and beyond any deadline."""
    log = BlockLog(1)
    log.append(stored(fingerprints(NAMESPACE, HASHES)))

    def hang(cursor: Cursor) -> PeerAnswer:
        release.wait(SOON_S)
        raise PeerUnavailable("no answer")

    peers: Peers = {f"hung-{number}": hang for number in range(7)}
    directory = asking(peers | {"well": answering("well", log)})
    directory.start()

    wait_for(lambda: directory.locate(NAMESPACE, HASHES), "the peer that is well is known")
    log.append(stored(fingerprints(bytes(range(16)), HASHES[:1])))
    wait_for(lambda: directory.locate(bytes(range(16)), HASHES[:1]), "and asked again")
    release.set()
    directory.close()
    assert not directory._thread.is_alive()


def test_two_addresses_of_one_node_are_one_node() -> None:
    log = BlockLog(1)
    directory = asking({"one": answering("same", log), "two": answering("same", log)})
    directory.start()

    wait_for(lambda: directory.figures().failures, "the second one is refused")
    assert [known.node_id for known in directory.nodes()] == ["same"]
    directory.close()
    directory.check()


def test_a_peer_whose_log_makes_no_sense_is_passed_over() -> None:
    """Half a record; a cursor that does not follow. Another peer is followed all the same."""
    log = BlockLog(1)
    log.append(stored(fingerprints(NAMESPACE, HASHES[:9])))
    head = Head(1, 1, -1, 0, 100)
    peers: Peers = {
        "half": lambda cursor: PeerAnswer(node("half"), LogChunk(head, head.start(), bytes(12))),
        "skips": lambda cursor: PeerAnswer(node("skips"), LogChunk(head, Cursor(1, 1, 50), bytes(8))),
        "well": answering("well", log),
    }
    directory = asking(peers)
    directory.start()

    wait_for(lambda: directory.figures().failures >= 4, "both are counted, twice")
    wait_for(lambda: directory.locate(NAMESPACE, HASHES), "the other is known")
    assert directory.locate(NAMESPACE, HASHES)[0].num_blocks == 9
    directory.close()
    directory.check()


def test_a_peer_that_says_there_is_more_and_gives_none_is_asked_no_faster() -> None:
    asked: list[float] = []

    def give_nothing(cursor: Cursor) -> PeerAnswer:
        asked.append(time.monotonic())
        return PeerAnswer(node("liar"), LogChunk(Head(1, 1, -1, 0, 100), Cursor(1, 1, 0), b""))

    directory = asking({"liar": give_nothing}, interval_s=0.1)
    directory.start()
    time.sleep(0.5)
    directory.close()
    assert 2 <= len(asked) <= 6


def test_what_does_not_fit_into_one_answer_is_asked_for_at_once() -> None:
    log = BlockLog(1)
    log.append(stored(np.random.default_rng(1).integers(0, 1 << 63, 1 << 18, np.uint64) << np.uint64(1)))
    directory = asking({"large": answering("large", log)}, interval_s=5.0, ttl_s=20.0)
    directory.start()
    wait_for(lambda: directory.figures().num_entries > (1 << 17), "it is read on before the interval is over")
    wait_for(lambda: directory.figures().num_entries == 1 << 18, "to its end")
    directory.close()


def test_a_node_whose_clock_went_back_is_taken_for_what_it_is_when_its_earlier_life_is_hidden() -> None:
    lives = [9]

    def answer(cursor: Cursor) -> PeerAnswer:
        return answering("a", BlockLog(lives[0]))(cursor)

    directory = asking({"a": answer}, ttl_s=0.3)
    directory.start()
    wait_for(lambda: directory.nodes() == (node("a", 9),), "its first life")
    lives[0] = 7
    wait_for(lambda: directory.nodes() == (node("a", 7),), "its second, with the smaller epoch")
    directory.close()
    directory.check()


def test_another_node_with_our_name_is_told_of_and_not_taken_for_ourselves(caplog: pytest.LogCaptureFixture) -> None:
    names = ["me"]

    def answer(cursor: Cursor) -> PeerAnswer:
        return answering(names[0], BlockLog(2))(cursor)

    directory = asking({"a": answer})
    directory.start()
    wait_for(lambda: directory.figures().failures, "it is counted")
    assert "node_id" in caplog.text
    names[0] = "other"
    wait_for(lambda: directory.nodes() == (node("other", 2),), "with a name of its own it is a peer")
    directory.close()


def test_why_a_peer_is_not_heard_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(cursor: Cursor) -> PeerAnswer:
        raise RemoteProtocolError("proof: not right")

    directory = asking({"a": refuse})
    directory.start()
    wait_for(lambda: directory.figures().failures >= 2, "asked again")
    directory.close()
    told = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1
    assert "proof: not right" in told[0].getMessage()


def test_a_queue_that_overflows_says_so_and_can_begin_anew() -> None:
    own = OwnBlocks(epoch=1)
    hashes = np.arange(1 << 18, dtype=np.uint64).repeat(2).tobytes()
    batch = [hashes[at : at + 16] for at in range(0, len(hashes), 16)]
    for _ in range(MAX_QUEUED_UPDATES // len(batch)):
        own.publish(NAMESPACE, batch)
    own.check()
    assert not own.resync_needed

    own.withdraw(NAMESPACE, batch[:1])
    own.check()
    assert own.resync_needed
    assert own.dropped == len(batch)

    own.take()
    own.resync()
    own.publish(NAMESPACE, batch[:10])
    own.take()
    own.check()
    assert not own.resync_needed
    assert own.log.num_blocks() == 10


def test_who_is_hidden_comes_back_with_what_changed_meanwhile() -> None:
    """A partition that heals: nothing is read a second time. After a minute it is."""
    log, snapshot = BlockLog(1), Snapshot("me", forget_s=60.0)
    log.append(stored(fingerprints(NAMESPACE, HASHES[:100])))
    assert snapshot.see(node("a")) == Cursor()
    snapshot.apply("a", log.read(Cursor(), 1 << 20))

    snapshot.hide("a", now_s=10.0)
    snapshot.tidy(now_s=69.0)
    snapshot.check()
    assert (snapshot.nodes(), snapshot.locate(NAMESPACE, HASHES)) == ((), ())
    assert snapshot.see(node("a")) == Cursor(1, 1, 100)
    assert snapshot.locate(NAMESPACE, HASHES)[0].num_blocks == 100

    snapshot.hide("a", now_s=100.0)
    snapshot.tidy(now_s=161.0)
    snapshot.tidy(now_s=162.0)
    snapshot.check()
    assert snapshot.num_entries == 0
    assert snapshot.see(node("a")) == Cursor()


def test_an_earlier_life_is_not_seen_again() -> None:
    snapshot = Snapshot("me")
    snapshot.see(node("a", 5))

    assert snapshot.see(node("a", 4)) is None
    assert snapshot.nodes() == (node("a", 5),)
    assert snapshot.see(node("me", 9)) is None


def test_a_life_with_a_smaller_epoch_follows_one_that_is_hidden() -> None:
    """A clock that went back. What the earlier life held is void."""
    log, snapshot = BlockLog(5), Snapshot("me")
    log.append(stored(fingerprints(NAMESPACE, HASHES[:9])))
    snapshot.see(node("a", 5))
    snapshot.apply("a", log.read(Cursor(), 1 << 20))
    snapshot.hide("a", now_s=1.0)

    assert snapshot.see(node("a", 4)) == Cursor()
    assert snapshot.nodes() == (node("a", 4),)
    assert snapshot.locate(NAMESPACE, HASHES) == ()
    snapshot.tidy(now_s=2.0)
    snapshot.check()


@pytest.mark.parametrize(
    ("field", "peers", "options"),
    [
        ("peers", [str(number) for number in range(MAX_STATIC_PEERS + 1)], {}),
        ("peers", ["a", "a"], {}),
        ("ttl_s", ["a"], {"ttl_s": 0.01}),
    ],
)
def test_wrong_options_are_named(field: str, peers: list[str], options: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as caught:
        StaticDirectory(node("me"), peers, lambda *_: pytest.fail("asked"), **options)

    assert caught.value.fields["field"] == field


def test_a_node_is_read_back_and_a_later_versions_fields_are_passed_over() -> None:
    import msgspec

    encoded = msgspec.msgpack.encode(msgspec.to_builtins(node("a")) | {"colour": "red"})

    assert Node.decode(encoded) == node("a")
    assert Node.decode(node("a").encode()) == node("a")
