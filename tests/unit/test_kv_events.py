"""KV events: vLLM's bytes, sequence numbers, replay, what happens when events are lost, and that the loop never waits."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq
from events_on_the_wire import BLOCK_TOKENS, EVENTS, GOLDEN, NOW_S
from small_store import SmallStore

from kvstore.config import Config
from kvstore.core.blocks import Holder
from kvstore.core.errors import ConfigError
from kvstore.kv_events import KVEvents, encode_batch
from kvstore.kv_publisher import END, Batch, Publisher

ANY = "tcp://127.0.0.1:*"
WAIT_MS = 5000
WRITER = Holder(b"w" * 16, 1)


class Subscriber:
    """Of a publisher; knows the blocks by tier as its events tell them, like a router's index."""

    def __init__(self, publisher: Publisher, topic: bytes = b"") -> None:
        self._context = zmq.Context()
        pub, self.replay_address = publisher.bound()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.set_hwm(0)
        self._sub.subscribe(topic)
        self._sub.connect(pub)
        self.sequences: list[int] = []
        self.blocks: set[tuple[str, str, int]] = set()
        self.parents: dict[int, int | None] = {}
        self.num_cleared = 0

    def receive(self) -> list[bytes]:
        assert self._sub.poll(WAIT_MS), "nothing came"
        return self._sub.recv_multipart()

    def take(self, payload: bytes) -> None:
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
                self.num_cleared += 1
                continue
            named = {(event["ownership"], event["medium"], number) for number in event["block_hashes"]}
            if event["type"] == "BlockStored":
                self.blocks |= named
                parents = [event["parent_block_hash"], *event["block_hashes"]]
                self.parents |= dict(zip(event["block_hashes"], parents, strict=False))
            else:
                self.blocks -= named

    def read_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            _, sequence, payload = self.receive()
            self.sequences.append(int.from_bytes(sequence, "big"))
            self.take(payload)

    def replay(self, first: int, *frames: bytes) -> list[list[bytes]]:
        """All messages of one answer, the end's among them."""
        dealer = self._context.socket(zmq.DEALER)
        dealer.set_hwm(0)
        dealer.connect(self.replay_address)
        dealer.send_multipart(list(frames) or [b"", first.to_bytes(8, "big")])
        answers: list[list[bytes]] = []
        while not answers or answers[-1][2] != END:
            assert dealer.poll(WAIT_MS), "no answer"
            answers.append(dealer.recv_multipart())
        dealer.close(linger=0)
        return answers

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def publishing(**options: Any) -> Iterator[tuple[Publisher, Subscriber]]:
    """A publisher, and one who has subscribed to it."""
    publisher = Publisher(ANY, ANY, **options)
    publisher.open()
    subscriber = Subscriber(publisher)
    try:
        yield publisher, subscriber
    finally:
        subscriber.close()
        publisher.stop(5.0)
        assert not publisher.alive


def batch(payload: bytes, num_blocks: int = 1) -> Batch:
    return Batch(num_blocks, lambda: payload)


def greet(publisher: Publisher, subscriber: Subscriber) -> int:
    """Publish until the subscription has arrived; how many batches that took."""
    for count in range(1, 1000):
        publisher.put(batch(b"hello"))
        if subscriber._sub.poll(10):
            while subscriber._sub.poll(50):
                subscriber.receive()
            return count
    raise AssertionError("the subscription never arrived")


def test_the_bytes_are_those_of_vllm() -> None:
    assert encode_batch(EVENTS, BLOCK_TOKENS, NOW_S) == GOLDEN


def test_messages_are_numbered_and_can_be_asked_for_again() -> None:
    with publishing(topic="kv") as (publisher, subscriber):
        first = greet(publisher, subscriber)
        for number in range(5):
            publisher.put(batch(b"%d" % number))
        live = [subscriber.receive() for _ in range(5)]
        answers = subscriber.replay(first + 2)

    assert live == [[b"kv", (first + i).to_bytes(8, "big"), b"%d" % i] for i in range(5)]
    assert answers == [*([b"", *message] for message in live[2:]), [b"", b"", END, b""]]


def test_a_replay_holds_as_much_as_both_bounds_allow_and_longer_gaps_are_heard_of() -> None:
    heard: list[float] = []
    options = {"max_replay_batches": 2000, "max_replay_bytes": 1500 * 10}
    with publishing(**options, on_forgotten=lambda: heard.append(1)) as (publisher, subscriber):
        for number in range(3000):
            publisher.put(batch(b"%010d" % number))
        while not publisher.idle:
            time.sleep(0.001)
        everything, known = subscriber.replay(0), subscriber.replay(2900)

    assert [int(message[3]) for message in everything[:-1]] == list(range(1500, 3000))
    assert [int(message[3]) for message in known[:-1]] == list(range(2900, 3000))
    assert len(heard) == 1


def test_what_is_no_replay_request_is_passed_over() -> None:
    with publishing() as (publisher, subscriber):
        publisher.put(batch(b"one"))
        for wrong in ([b""], [b"", b"seven77"], [b"x", b"\0" * 8], [b"", b"\0" * 8, b""]):
            dealer = subscriber._context.socket(zmq.DEALER)
            dealer.connect(subscriber.replay_address)
            dealer.send_multipart(wrong)
            assert not dealer.poll(20)
            dealer.close(linger=0)

        assert len(subscriber.replay(0)) == 2


def test_a_full_queue_is_dropped_and_put_never_waits() -> None:
    """The thread is held while it encodes, so that nothing is taken from the queue."""
    held, released = threading.Event(), threading.Event()

    def hold() -> bytes:
        held.set()
        assert released.wait(5)
        return b"held"

    with publishing(max_queued_blocks=10) as (publisher, subscriber):
        greet(publisher, subscriber)
        publisher.put(Batch(1, hold))
        assert held.wait(5)

        accepted = [publisher.put(batch(b"%d" % number, 4)) for number in range(3)]
        released.set()
        publisher.put(batch(b"after", 100))

        assert accepted == [True, True, False]
        assert [subscriber.receive()[2] for _ in range(2)] == [b"held", b"after"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"events": "127.0.0.1:5557"}, "events"),
        ({"events": "tcp://127.0.0.1"}, "events"),
        ({"events_replay": "tcp://127.0.0.1:5558"}, "events"),
        ({"events_topic": "kv"}, "events"),
        ({"events": "tcp://127.0.0.1:5557", "events_replay": "udp://127.0.0.1:5558"}, "events_replay"),
        ({"events": "tcp://127.0.0.1:5557", "events_replay": "tcp://127.0.0.1:5557"}, "events_replay"),
    ],
)
def test_wrong_addresses_are_refused_by_name(fields: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**fields)

    assert caught.value.fields["field"] == named


def test_an_address_that_cannot_be_bound_is_refused_by_name() -> None:
    with publishing() as (publisher, _):
        taken = publisher.bound()[0]
        for field, addresses in (("events", (taken, "")), ("events_replay", (ANY, taken))):
            with pytest.raises(ConfigError, match=field):
                Publisher(*addresses).open()


# --- with a store ---------------------------------------------------------------------------------------------------


class Telling:
    """A small store whose events are published on a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, **limits: Any) -> None:
        self.events = KVEvents(Config(events=ANY, events_replay=ANY), loop)
        self.events.open()
        self.small = SmallStore(num_segments=8, **limits)
        self.small.store._blocks._on_event = self.events.on_event

    @property
    def publisher(self) -> Publisher:
        assert self.events._publisher is not None
        return self.events._publisher

    def numbers(self, names: Sequence[str]) -> set[int]:
        return {int.from_bytes(key, "big") & (1 << 64) - 1 for key in self.small.keys(names)}


def told(subscriber: Subscriber) -> set[int]:
    assert {owner for owner, _, _ in subscriber.blocks} <= {f"kvstore:{subscriber_namespace(subscriber)}"}
    return {number for _, medium, number in subscriber.blocks if medium == "CPU"}


def subscriber_namespace(subscriber: Subscriber) -> str:
    return next(iter(subscriber.blocks))[0].removeprefix("kvstore:") if subscriber.blocks else ""


def run(scenario: Callable[[Telling], Any], **limits: Any) -> None:
    async def main() -> None:
        telling = Telling(asyncio.get_running_loop(), **limits)
        try:
            await scenario(telling)
        finally:
            await telling.events.close(5.0)

    asyncio.run(main())


async def reads(subscriber: Subscriber, condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(subscriber.read_until, condition)


def wide(letters: str) -> list[str]:
    """Names that differ in the hash's low 64 bits."""
    return [letter.rjust(16, "-") for letter in letters]


def names(count: int) -> list[str]:
    return [f"{i:016d}" for i in range(count)]


def test_it_begins_with_all_cleared_and_what_is_held_and_goes_on_with_what_happens() -> None:
    async def scenario(telling: Telling) -> None:
        small = telling.small
        small.put(WRITER, wide("abc"))
        small.put(WRITER, wide("xy"), parent=wide("b")[0])
        telling.events.join(small.store)
        await asyncio.sleep(0.05)
        small.put(WRITER, wide("de"), parent=wide("c")[0])
        await asyncio.sleep(0.05)
        small.store.drop(small.namespace, small.keys(wide("xy")))
        await asyncio.sleep(0.05)
        subscriber = Subscriber(telling.publisher)
        try:
            messages = await asyncio.to_thread(subscriber.replay, 0)
            for _, _, _, payload in messages[:1]:
                subscriber.take(payload)
            assert subscriber.num_cleared == 1
            assert not subscriber.blocks
            for _, _, _, payload in messages[1:-1]:
                subscriber.take(payload)
            assert told(subscriber) == telling.numbers(wide("abcde"))
            a, b, x, e = (telling.numbers([name]).pop() for name in wide("abxe"))
            assert (subscriber.parents[a], subscriber.parents[b], subscriber.parents[x]) == (None, a, b)
            assert subscriber.parents[e] == telling.numbers(wide("d")).pop()
        finally:
            subscriber.close()

    run(scenario)


def test_after_an_overflow_everything_is_told_anew_and_the_index_is_right_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.kv_events.EVENT_SLICE_ROWS", 7)

    async def scenario(telling: Telling) -> None:
        small, publisher = telling.small, telling.publisher
        subscriber = Subscriber(publisher)
        await asyncio.to_thread(greet, publisher, subscriber)
        telling.events.join(small.store)
        held, released = threading.Event(), threading.Event()

        def hold() -> bytes:
            held.set()
            assert released.wait(5)
            return encode_batch([], [], 0.0)

        try:
            small.put(WRITER, names(20))
            await reads(subscriber, lambda: bool(subscriber.num_cleared))
            publisher.put(Batch(0, hold))
            assert await asyncio.to_thread(held.wait, 5)
            publisher._max_queued_blocks = 30
            for number in range(5):  # each in a turn of its own
                small.put(WRITER, [f"{number}-{i:014d}" for i in range(16)])
                small.store.drop(small.namespace, small.keys([f"{number}-{i:014d}" for i in range(8, 16)]))
                await asyncio.sleep(0)
            released.set()
            right = telling.numbers(names(20)) | telling.numbers(
                [f"{number}-{i:014d}" for number in range(5) for i in range(8)]
            )
            await reads(subscriber, lambda: subscriber.num_cleared == 2 and told(subscriber) == right)
            assert subscriber.sequences == list(range(subscriber.sequences[0], subscriber.sequences[-1] + 1))
        finally:
            released.set()
            subscriber.close()

    run(scenario)


def test_who_asks_for_what_is_forgotten_gets_everything_but_not_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(telling: Telling) -> None:
        small = telling.small
        telling.publisher._buffer.max_batches = 3
        subscriber = Subscriber(telling.publisher)
        await asyncio.to_thread(greet, telling.publisher, subscriber)
        telling.events.join(small.store)
        try:
            await reads(subscriber, lambda: subscriber.num_cleared == 1)
            for number in range(6):
                small.put(WRITER, wide(f"{number}"))
                await asyncio.sleep(0)
            await asyncio.to_thread(subscriber.replay, 0)
            await asyncio.sleep(0.05)
            monkeypatch.setattr("kvstore.kv_events.EVENT_RETELL_S", 0.0)
            assert telling.events._telling is not None
            assert telling.events._telling.done()  # just told: too soon
            await asyncio.to_thread(subscriber.replay, 0)
            await reads(subscriber, lambda: subscriber.num_cleared == 2 and bool(subscriber.blocks))
            assert told(subscriber) == telling.numbers(wide("012345"))
        finally:
            subscriber.close()

    run(scenario)


def test_an_event_costs_the_loop_no_wait_when_nobody_listens() -> None:
    async def scenario(telling: Telling) -> None:
        telling.events.join(telling.small.store)
        await asyncio.sleep(0.02)
        telling.publisher._max_queued_blocks = 1
        for _ in range(50):
            telling.small.put(WRITER, names(16))
            telling.small.store.drop(telling.small.namespace, None)
            await asyncio.sleep(0)
        assert telling.publisher.alive

    started_s = time.monotonic()
    run(scenario)
    assert time.monotonic() - started_s < 5
