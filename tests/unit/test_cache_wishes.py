"""What a request wishes of the cache (protocol.CacheOptions), and what an engine tells of a session (protocol.SessionHints),
as they reach the real store."""

from collections.abc import Iterator

import pytest
from engine_side import BLOCK, SLOTS_PER_SEGMENT, Request, Side, Wish, pages
from in_process_sidecar import InProcessSidecar

from kvstore.core.limits import MAX_RECENT_SESSIONS
from kvstore.engine_connector.protocol import CacheOptions, ScheduledRequest, SessionHints


@pytest.fixture
def sidecar() -> InProcessSidecar:
    return InProcessSidecar(num_segments=1)


@pytest.fixture
def a(sidecar: InProcessSidecar) -> Iterator[Side]:
    side = Side(sidecar, b"a")
    yield side
    side.side.close()


@pytest.fixture
def b(sidecar: InProcessSidecar) -> Iterator[Side]:
    side = Side(sidecar, b"b")
    yield side
    side.side.close()


def flood(side: Side) -> None:
    """Push out whatever can be: a prompt as large as the arena, block by block as room is made."""
    for family in range(1000, 1000 + SLOTS_PER_SEGMENT):
        side.store(Request(f"flood {family}", 1, family=family))


# --- no_read, no_store, ttl_s -------------------------------------------------------------------------------------------


def test_a_request_that_reads_nothing_asks_nothing_and_is_saved(a: Side, b: Side) -> None:
    a.store(Request("r", 4))
    request = Request("r", 6, cache=CacheOptions(no_read=True))
    b.client.calls.clear()

    assert b.match(request) == 0
    assert b.client.calls == []

    b.store(request)
    assert a.match(Request("next", 6)) == 6


def test_a_request_that_stores_nothing_reserves_nothing_and_is_served(a: Side, b: Side) -> None:
    a.store(Request("r", 2))
    request = Request("r", 4, cache=CacheOptions(no_store=True))
    assert b.match(request) == 2
    b.report_loaded(b.load(request, 2))

    assert b.fill(request, 2, 4) == ()

    assert "reserve" not in b.client.calls
    assert not b.side.request_finished(request)
    assert a.match(Request("next", 4)) == 2


def test_blocks_with_a_time_to_live_are_gone_after_it_and_those_of_others_are_not(
    a: Side, b: Side, sidecar: InProcessSidecar
) -> None:
    a.store(Request("others", 2))
    b.store(Request("mortal", 4, cache=CacheOptions(ttl_s=10.0)))
    assert a.match(Request("next", 4)) == 4

    sidecar.clock.advance(9.9)
    assert a.match(Request("before", 4)) == 4
    sidecar.clock.advance(0.2)
    sidecar.store.expire(sidecar.clock.now_s())

    assert a.match(Request("after", 4)) == 2


# --- pin_s --------------------------------------------------------------------------------------------------------------


def test_a_pinned_prompt_outlives_a_flood_and_the_answer_behind_it_does_not(
    a: Side, b: Side, sidecar: InProcessSidecar
) -> None:
    prompt = Request("r", 2, cache=CacheOptions(pin_s=60.0))
    a.report_saved(*a.fill(prompt, 0, 1))
    assert "pin" not in a.client.calls, "half of it is committed"
    a.report_saved(*a.fill(prompt, 1, 2))
    assert a.client.calls[-1] == "pin"
    answered = Request("r", 3, num_generated=BLOCK)
    a.report_saved(*a.fill(answered, 2, 3))
    assert not a.side.request_finished(prompt)
    assert a.client.calls.count("pin") == 1

    flood(b)
    assert b.match(Request("next", 3)) == 2

    sidecar.clock.advance(60.1)
    flood(b)
    assert b.match(Request("later", 3)) == 0


def test_a_prompt_that_others_have_stored_is_pinned_without_a_save(a: Side, b: Side) -> None:
    a.store(Request("r", 2))
    request = Request("r", 2, cache=CacheOptions(pin_s=60.0))

    assert b.fill(request, 0, 2) == ()

    assert b.client.calls[-2:] == ["reserve", "pin"]
    flood(a)
    assert a.match(Request("next", 2)) == 2


def test_a_prompt_that_another_request_is_still_writing_is_pinned_when_this_one_ends(a: Side, b: Side) -> None:
    (writing,) = a.fill(Request("writer", 2), 0, 2)
    request = Request("pins", 2, cache=CacheOptions(pin_s=60.0))
    assert a.fill(request, 0, 2) == ()
    a.report_saved(writing)

    assert not a.side.request_finished(request)

    flood(b)
    assert b.match(Request("next", 2)) == 2


def test_a_pin_waits_for_the_save_under_way_when_the_request_has_ended(a: Side, b: Side) -> None:
    request = Request("r", 2, cache=CacheOptions(pin_s=60.0))
    (save,) = a.fill(request, 0, 2)
    assert a.side.request_finished(request)
    assert "pin" not in a.client.calls

    a.report_saved(save)

    assert a.client.calls.count("pin") == 1
    flood(b)
    assert b.match(Request("next", 2)) == 2


def test_a_pin_that_got_lost_is_repeated(a: Side, b: Side, sidecar: InProcessSidecar) -> None:
    request = Request("r", 2, cache=CacheOptions(pin_s=60.0))
    (save,) = a.fill(request, 0, 2)
    sidecar.away = True
    a.report_saved(save)  # commit and pin reach nobody
    sidecar.away = False
    a.reconnect()
    a.report_saved(*a.step(ScheduledRequest(request, pages(request), 2 * BLOCK, 1)).saves)
    (again,) = a.fill(Request("r", 3, cache=request.cache, num_generated=BLOCK), 0, 3)
    a.report_saved(again)

    flood(b)

    assert b.match(Request("next", 3)) == 2


def test_another_boot_is_asked_to_pin_again(a: Side, b: Side, sidecar: InProcessSidecar) -> None:
    request = Request("r", 2, cache=CacheOptions(pin_s=60.0))
    a.report_saved(*a.fill(request, 0, 2))
    sidecar.restart()
    assert a.match(request) == 0
    for side in (a, b):
        side.reconnect()

    a.report_saved(*a.fill(request, 0, 2))

    flood(b)
    assert b.match(Request("next", 2)) == 2


def test_a_pin_of_another_boot_is_repeated_when_the_request_ends(a: Side, b: Side, sidecar: InProcessSidecar) -> None:
    request = Request("r", 2, cache=CacheOptions(pin_s=60.0))
    a.report_saved(*a.fill(request, 0, 2))
    sidecar.restart()
    assert a.match(request) == 0
    for side in (a, b):
        side.reconnect()
    b.store(Request("again", 2))

    assert not a.side.request_finished(request)

    flood(b)
    assert b.match(Request("next", 2)) == 2


def test_without_a_wish_nothing_is_pinned(a: Side) -> None:
    a.store(Request("r", 2))
    a.store(Request("short", 0, extra=3, cache=CacheOptions(pin_s=60.0)))  # no full block

    assert "pin" not in a.client.calls


# --- sessions -----------------------------------------------------------------------------------------------------------


def of_session(session_id: str, num_blocks: int, *, family: int = 0, salt: str = "") -> Request:
    cache = CacheOptions(session_id=session_id, salt=salt)
    return Request(f"{salt} {session_id} {num_blocks}", num_blocks, family=family, cache=cache)


def test_an_expected_session_is_prefetched_as_its_last_request_left_it(a: Side) -> None:
    a.store(of_session("s", 2))
    last = of_session("s", 4)
    a.store(last)
    a.store(of_session("other", 1, family=7))
    assert isinstance(a.side, SessionHints)

    assert a.side.expect_session("s") == 4

    assert a.client.wishes == [Wish(last.block_hashes, 0)]


def test_an_ended_session_goes_first_pinned_or_not_and_is_forgotten(a: Side, b: Side) -> None:
    a.store(Request("older", 2, family=5))
    pinned = Request("r", 2, cache=CacheOptions(session_id="s", pin_s=60.0))
    a.store(pinned)
    for family in range(10, 10 + SLOTS_PER_SEGMENT - 4):  # the arena is full
        a.store(Request(f"fill {family}", 1, family=family))

    assert a.side.end_session("s") == 2

    a.store(Request("x", 2, family=6))
    assert b.match(Request("next", 2)) == 0
    assert b.match(Request("next older", 2, family=5)) == 2
    assert a.side.end_session("s") == 0
    assert a.client.calls.count("cool") == 1


def test_hints_of_unknown_sessions_and_without_a_store_ask_nothing(a: Side, sidecar: InProcessSidecar) -> None:
    a.store(of_session("s", 2))
    a.store(Request("of no session", 2))
    a.client.calls.clear()
    assert (a.side.expect_session("?"), a.side.end_session("?"), a.side.expect_session("")) == (0, 0, 0)
    assert a.client.calls == []

    sidecar.away = True

    assert a.side.expect_session("s") == 0
    assert a.side.end_session("s") == 0


def test_sessions_of_different_salts_do_not_meet(a: Side) -> None:
    a.store(of_session("s", 2))
    a.store(of_session("s", 3, family=3, salt="ours"))

    assert a.side.expect_session("s", salt="theirs") == a.side.end_session("s", salt="theirs") == 0
    assert a.side.end_session("s") == 2
    assert a.side.expect_session("s") == 0
    assert a.side.expect_session("s", salt="ours") == 3


def test_the_sessions_that_spoke_last_are_remembered(a: Side) -> None:
    for number in range(MAX_RECENT_SESSIONS):
        a.store(of_session(f"s{number}", 1))
    a.store(of_session("s0", 1))

    a.store(of_session("one more", 1))

    assert a.side.expect_session("s1") == 0
    assert a.side.expect_session("s0") == 1
