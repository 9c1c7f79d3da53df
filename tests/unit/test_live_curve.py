"""The curve that a sidecar keeps of its own traffic, over the dispatcher and by itself."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import pytest
from small_spill import SmallSpill
from small_store import PAGE

from kvstore.core.blocks import Holder
from kvstore.core.clock import ManualClock
from kvstore.core.errors import RemoteProtocolError
from kvstore.core.keys import HashScheme, KVSpec, pack_keys
from kvstore.core.limits import MAX_KEYS_PER_CALL, SLOT_ALIGN_BYTES
from kvstore.dispatcher import Dispatcher
from kvstore.live_curve import CAPACITIES, ENDLESS, FORGET_S, HALF_LIFE_S, WITH_DRIVES, CurveFigures, LiveCurve
from kvstore.proto import kvstore_pb2 as pb
from kvstore.replay.cache import block_key
from kvstore.reuse_curve import ReuseCurve
from kvstore.sessions import Peer, Session, Sessions
from kvstore.transport.frames import Verb

SMALL = KVSpec(weights="small", num_layers=1, num_kv_heads=2, head_dim=64, dtype="float16")  # 2 pages a block
LARGE = KVSpec(weights="large", num_layers=3, num_kv_heads=2, head_dim=64, dtype="float16", block_tokens=32)  # 12
SHA = KVSpec(
    weights="sha", num_layers=1, num_kv_heads=2, head_dim=64, dtype="float16", hash=HashScheme(algorithm="sha256")
)


def keys(numbers: Sequence[int], spec: KVSpec = SMALL) -> bytes:
    return pack_keys([block_key(number) * (spec.hash.digest_nbytes // 16) for number in numbers])


def ask(
    curve: LiveCurve, numbers: Sequence[int], spec: KVSpec = SMALL, *, tenant: str = "", now_s: float = 0.0
) -> None:
    """A prompt of whole blocks; what is missing is stored."""
    namespace, packed = spec.namespace(tenant), keys(numbers, spec)
    num_tokens = len(numbers) * spec.block_tokens
    curve.wanted(namespace, spec, packed, now_s, num_tokens=num_tokens, num_had=0, num_found=0)
    curve.stored(namespace, spec, packed)


def rates(figures: CurveFigures) -> dict[str, float]:
    return {each.capacity: each.hit_rate for each in figures.capacities}


def test_capacities_are_parts_of_the_ram_then_the_drives_then_without_end() -> None:
    curve = LiveCurve()
    for turn in range(400):
        ask(curve, range(turn % 4 * 1000, turn % 4 * 1000 + 100))  # four documents of 100 blocks of two pages, in turn
    ram = 230 * 2 * SLOT_ALIGN_BYTES

    figures = curve.figures(ram, 16 * ram)

    assert [each.capacity for each in figures.capacities] == [*CAPACITIES, WITH_DRIVES, ENDLESS]
    assert [each.bytes // ram for each in figures.capacities] == [0, 1, 2, 4, 8, 16, 0]
    assert rates(figures)["1x"] < 0.02
    assert rates(figures)["2x"] == pytest.approx(0.99, abs=0.01)
    assert figures.words == (
        "Of the tokens asked for lately, twice the RAM would have hit 99 % instead of 0 %, the drives 99 %, and a day's blocks "
        "without end 99 %."
    )
    assert all(a <= b for a, b in pairwise(figures.hit_rates))
    assert all(a < b for a, b in pairwise(figures.bytes))
    assert len(figures.bytes) == len(figures.hit_rates) <= 64
    assert figures.memory_bytes < 1 << 20


def test_namespaces_of_several_sizes_share_the_ram_and_no_block() -> None:
    """By bytes and by tokens: 100 blocks of 2 pages and 16 tokens, 50 of 12 pages and 32 tokens, 100 of a tenant."""
    curve = LiveCurve()
    for _ in range(300):
        ask(curve, range(100), SMALL)
        ask(curve, range(50), LARGE)
        ask(curve, range(100), SMALL, tenant="other")
        ask(curve, range(100), SHA)
    all_pages = 3 * 100 * 2 + 50 * 12

    enough, half = (
        rates(curve.figures(pages * SLOT_ALIGN_BYTES, 0))["1x"] for pages in (1.1 * all_pages, all_pages / 2)
    )

    assert enough > 0.97
    assert half < 0.02
    assert curve.figures(1 << 20, 0).requested_tokens == 300 * (3 * 100 * 16 + 50 * 32)


def test_the_live_curve_is_within_two_points_of_the_exact_one() -> None:
    """30,000 documents by Zipf's law, some 300,000 blocks, at five sizes of RAM, with a megabyte of state."""
    draw, curve, exact = random.Random(11), LiveCurve(), ReuseCurve(max_followed=0)
    weights = [1 / (rank + 1) ** 0.7 for rank in range(30_000)]
    for document in draw.choices(range(30_000), weights, k=4_000):
        numbers = range(document * 100, document * 100 + 2 + document % 20)
        ask(curve, numbers)
        exact.request(_numbers(numbers), size=2)

    for pages in (2000, 10_000, 40_000, 160_000, 640_000):
        live = rates(curve.figures(pages * SLOT_ALIGN_BYTES, 0))
        assert abs(live["1x"] - exact.hit_rate(pages)) < 0.02
    assert abs(live[ENDLESS] - exact.best_hit_rate()) < 0.02
    assert curve.figures(1, 0).memory_bytes < 1 << 20


def test_what_was_long_ago_counts_for_less_and_a_block_of_yesterday_is_new() -> None:
    curve = LiveCurve()
    ask(curve, range(100))
    ask(curve, range(100), now_s=HALF_LIFE_S)
    assert curve.figures(1 << 30, 0).requested_tokens == pytest.approx(1.5 * 1600)
    assert rates(curve.figures(1 << 30, 0))[ENDLESS] == pytest.approx(1 / 1.5)

    ask(curve, range(100), now_s=2 * FORGET_S + HALF_LIFE_S)
    figures = curve.figures(1 << 30, 0)

    assert figures.followed_blocks == 100
    assert rates(figures)[ENDLESS] < 0.02


def test_what_a_drive_brought_back_after_a_restart_is_known_once_it_was_found() -> None:
    """An engine does not store again what it found."""
    curve, namespace = LiveCurve(), SMALL.namespace("")
    for _ in range(4):
        curve.wanted(namespace, SMALL, keys(range(10)), 0.0, num_tokens=160, num_had=0, num_found=8)

    assert rates(curve.figures(1 << 30, 0))[ENDLESS] == pytest.approx(3 * 8 / 40)


@pytest.mark.parametrize("spec", [SMALL, SHA])
@pytest.mark.parametrize("order", ["big", "little"])
def test_keys_of_an_engine_that_counts_are_a_sample_too(spec: KVSpec, order: Literal["big", "little"]) -> None:
    curve, namespace = LiveCurve(), spec.namespace("")
    for start in [*range(0, 20_000, 100), *range(0, 20_000, 100)]:
        packed = b"".join(number.to_bytes(spec.hash.digest_nbytes, order) for number in range(start, start + 100))
        curve.wanted(namespace, spec, packed, 0.0, num_tokens=1600, num_had=0, num_found=0)
        curve.stored(namespace, spec, packed)

    found = rates(curve.figures(15_000 * 2 * SLOT_ALIGN_BYTES, 0))
    assert (found["1x"], found["2x"]) == pytest.approx((0.0, 0.5), abs=0.02)
    assert found[ENDLESS] == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("spec", [SMALL, SHA])
def test_the_longest_calls_do_not_take_more_than_a_megabyte(spec: KVSpec) -> None:
    """Asked for only, then stored, then found: what is too much goes before it takes room."""
    curve, namespace = LiveCurve(), spec.namespace("")
    for turn in range(3):
        packed = keys(range(turn * MAX_KEYS_PER_CALL, (turn + 1) * MAX_KEYS_PER_CALL), spec)
        for step in ("asked", "stored", "found"):
            if step == "stored":
                curve.stored(namespace, spec, packed)
            else:
                num_found = MAX_KEYS_PER_CALL if step == "found" or turn == 2 else 0
                num_tokens = MAX_KEYS_PER_CALL * spec.block_tokens
                curve.wanted(namespace, spec, packed, 0.0, num_tokens=num_tokens, num_had=0, num_found=num_found)
            assert curve.figures(1 << 40, 0).memory_bytes < 1 << 20, (turn, step)

    assert rates(curve.figures(1 << 40, 0))["1x"] == pytest.approx(0.5, abs=0.02)
    assert rates(curve.figures(1 << 20, 0))["1x"] == pytest.approx(0.0, abs=0.02)


def test_nothing_asked_and_no_ram_are_told_so() -> None:
    figures = LiveCurve().figures(0, 0)

    assert set(rates(figures).values()) == {0.0}
    assert figures.bytes == figures.hit_rates == ()
    assert figures.words.startswith("Too little was asked for")


# --- through the dispatcher -----------------------------------------------------------------------------------------------


class Arena:
    nbytes = segment_bytes = faulted_nbytes = 16 * PAGE


class House:
    """A sidecar's dispatcher and an engine."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.small = SmallSpill(restored=["a", "ab"], drives=(4,))
        clock = ManualClock()
        sessions = Sessions(self.small.store, loop=loop, clock=clock)
        self.dispatcher = Dispatcher(
            store=self.small.store, sessions=sessions, arena=Arena(), boot_id=bytes(16), clock=clock
        )

    def match(self, names: list[str], *, role: int = pb.BOTH, **fields: object) -> None:
        session = Session(
            session_id=1,
            holder=Holder(b"" if role == pb.TOOL else b"engine one......", 1),
            tenant="",
            role=role,
            rank=0,
            namespaces=frozenset({self.small.namespace}),
            has_arena=True,
            has_slab=False,
            cuda_registered=False,
            peer=Peer(0, None, local=True, trusted=True, close=lambda _: None),
        )
        packed = b"".join(self.small.keys(names))
        self.dispatcher.call(
            session, Verb.MATCH, pb.MatchRequest(namespace=self.small.namespace, keys=packed, **fields)
        )

    @property
    def tokens(self) -> float:
        return self.dispatcher.stats().capacity_curve.requested_tokens


@pytest.fixture
def house() -> Iterator[House]:
    loop = asyncio.new_event_loop()
    yield House(loop)
    loop.close()


def test_a_request_counts_once_with_its_tail_whether_a_plan_or_its_name_tells(house: House) -> None:
    for _ in range(3):
        house.match(["a", "ab", "abc"], wish=pb.PlanWish(request_id="r", num_tokens=3 * 16 + 5))
        house.match(["a", "ab"], request_id="s")
    assert house.tokens == 3 * 16 + 5 + 2 * 16

    house.match(["a", "ab"])
    house.match(["a", "ab"])
    house.match(["a", "ab"], role=pb.TOOL)
    assert house.tokens == 3 * 16 + 5 + 3 * 2 * 16


def test_blocks_of_a_further_layer_group_take_room_and_no_tokens(house: House) -> None:
    """They are used with the request, so they lie between its uses; they are no request of their own."""
    curve, first, further = LiveCurve(), SMALL.namespace(""), LARGE.namespace("")
    curve.stored(further, LARGE, keys(range(50), LARGE))
    for _ in range(300):
        curve.wanted(first, SMALL, keys(range(100)), 0.0, num_tokens=1600, num_had=0, num_found=100)
        curve.used(further, LARGE, keys(range(50), LARGE))
    enough, without = (rates(curve.figures(pages * SLOT_ALIGN_BYTES, 0))["1x"] for pages in (810, 250))
    assert enough > 0.97
    assert without < 0.02

    house.match(["a", "ab"], further_group=True)
    assert house.tokens == 0


def test_a_name_that_is_too_long_is_refused(house: House) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        house.match(["a"], request_id="r" * 257)

    assert caught.value.fields["field"] == "request_id"


def _numbers(numbers: Sequence[int]) -> object:
    return np.array([int.from_bytes(block_key(number)[:8], "little") for number in numbers], np.uint64)
