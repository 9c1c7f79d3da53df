"""The scheduler side against the real store: what it matches, leases, reserves and commits, and what it does when the
store is away, forgets, or answers into the void. R1 to R6 are those of engine_connector/requests.py."""

from collections.abc import Iterator

import pytest
from engine_side import BLOCK, SLOTS_PER_SEGMENT, SPEC, Request, Side, Wish, pages
from in_process_sidecar import InProcessSidecar
from recording_tracer import ABOVE, RecordingTracer

from kvstore.client import Prefetched
from kvstore.core.limits import DEFAULT_LEASE_TTL_S, SAVE_DEADLINE_S
from kvstore.engine_connector.protocol import ConnectorMetadata, ScheduledRequest
from kvstore.engine_connector.session import StoreSession


@pytest.fixture
def sidecar() -> InProcessSidecar:
    return InProcessSidecar()


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


# --- the main job ---------------------------------------------------------------------------------------------------


def test_what_one_engine_saved_another_loads(a: Side, b: Side, sidecar: InProcessSidecar) -> None:
    request = Request("r", 4)
    assert a.match(request) == 0
    (save,) = a.fill(request, 0, 4)
    assert [move.block_id for move in save.moves] == [100, 101, 102, 103]
    assert b.match(request) == 0, "only what is committed is found"
    a.report_saved(save)

    assert b.match(request) == 4
    job = b.load(request, 4)

    assert [(m.block_id, m.offset, m.generation) for m in job.moves] == [tuple(m) for m in save.moves]
    assert job.boot_id == save.boot_id == sidecar.arena.boot_id
    assert job.lost_block_ids == ()
    b.report_loaded(job)
    for side in (a, b):
        assert not side.side.request_finished(request)
    sidecar.check_no_lease()


def test_each_chunk_saves_the_blocks_that_it_fills(a: Side, b: Side) -> None:
    request = Request("r", 4)
    (first,) = a.fill(request, 0, 2)
    assert a.step(ScheduledRequest(request, pages(request), 2 * BLOCK, BLOCK - 1)).saves == (), "no block is full"
    (second,) = a.step(ScheduledRequest(request, pages(request), 3 * BLOCK - 1, BLOCK + 1)).saves

    assert [move.block_id for move in first.moves] == [100, 101]
    assert [move.block_id for move in second.moves] == [102, 103]
    a.report_saved(first, second)
    assert b.match(request) == 4


def test_generated_tokens_blocks_are_saved_too(a: Side, b: Side) -> None:
    request = Request("r", 3, extra=0, num_generated=0)
    request.num_generated = 1
    a.report_saved(*a.fill(request, 0, 2))

    (save,) = a.step(ScheduledRequest(request, pages(request), 3 * BLOCK - 1, 1)).saves

    assert [move.block_id for move in save.moves] == [102]
    a.report_saved(save)
    assert b.match(Request("longer", 3)) == 3


def test_hashes_that_lag_behind_the_step_are_saved_once_they_are_there(a: Side) -> None:
    request = Request("r", 3)
    known, request.block_hashes = request.block_hashes, request.block_hashes[:2]

    (first,) = a.fill(request, 0, 3)
    request.block_hashes = known
    (second,) = a.step(ScheduledRequest(request, pages(request), 3 * BLOCK, 1)).saves

    assert [len(job.moves) for job in (first, second)] == [2, 1]
    a.report_saved(first, second)


def test_the_last_tokens_block_is_never_loaded(a: Side, b: Side) -> None:
    a.store(Request("r", 4))

    assert b.match(Request("exact", 4, extra=0)) == 3
    assert b.match(Request("one more", 4, extra=1)) == 4


def test_only_blocks_beyond_the_engines_own_are_matched_and_leased(a: Side, b: Side) -> None:
    request = Request("r", 4)
    a.store(request)

    assert b.match(request, num_computed=3) == 1
    job = b.load(request, 1)

    assert [move.block_id for move in job.moves] == [103]
    b.report_loaded(job)


def test_blocks_found_in_the_store_are_not_saved_again(a: Side, b: Side) -> None:
    a.store(Request("r", 4))
    longer = Request("longer", 6)

    b.match(longer)
    b.report_loaded(b.load(longer, 4))
    (save,) = b.fill(longer, 4, 6)

    assert [move.block_id for move in save.moves] == [104, 105]
    b.report_saved(save)
    assert a.match(Request("again", 6)) == 6


def test_a_load_of_no_tokens_takes_no_lease(a: Side, sidecar: InProcessSidecar) -> None:
    request = Request("r", 2)
    a.match(request)
    a.side.update_state_after_alloc(request, pages(request), 0)

    assert a.step() == ConnectorMetadata(boot_id=sidecar.arena.boot_id)
    sidecar.check_no_lease()


# --- loads that fail ------------------------------------------------------------------------------------------------


def test_blocks_that_went_between_match_and_lease_are_reported_as_lost(
    a: Side, b: Side, sidecar: InProcessSidecar
) -> None:
    request = Request("r", 4)
    a.store(request)
    assert b.match(request) == 4
    a.client._call("drop", lambda store, now_s: store.drop(SPEC.namespace(), [request.block_hashes[2]]))

    job = b.load(request, 4)

    assert [move.block_id for move in job.moves] == [100, 101]
    assert job.lost_block_ids == (102, 103)
    b.report_loaded(job)
    sidecar.check_no_lease()


@pytest.mark.parametrize("away", [True, False])
def test_a_load_of_which_nothing_is_left_is_still_reported(
    a: Side, b: Side, sidecar: InProcessSidecar, away: bool
) -> None:
    request = Request("r", 2)
    a.store(request)
    assert b.match(request) == 2
    sidecar.away = away
    if not away:
        sidecar.store.drop(SPEC.namespace(), None)

    job = b.load(request, 2)

    assert (job.lease_id, job.moves, job.lost_block_ids) == (0, (), (100, 101))
    assert b.side.has_pending("r")
    b.report_loaded(job)
    assert not b.side.has_pending("r")


def test_a_request_whose_load_failed_is_not_matched_again(a: Side, b: Side) -> None:
    """R4."""
    request, other = Request("r", 3), Request("other", 3)
    a.store(request)
    b.match(request)

    b.report_loaded(b.load(request, 3), failed=1)

    assert b.match(request) == 0
    assert b.match(other) == 3


def test_failed_pages_of_another_request_fail_no_load(a: Side, b: Side) -> None:
    request = Request("r", 3)
    a.store(request)
    b.match(request)
    job = b.load(request, 3)

    b.report(finished_loading=frozenset({"r"}), failed_block_ids=frozenset({7, 8}))

    assert job.lease_id
    assert b.match(request) == 3


def test_after_a_failed_load_the_recomputed_blocks_are_offered_and_found_held(a: Side, b: Side) -> None:
    request = Request("r", 3)
    a.store(request)
    b.match(request)
    b.report_loaded(b.load(request, 3), failed=2)

    assert b.fill(request, 1, 3) == ()


# --- blocks on a slower tier -----------------------------------------------------------------------------------------


def test_a_request_that_still_waits_has_its_blocks_brought_nearer_once(a: Side, b: Side) -> None:
    """R6. Asked about once, it may load in the same step, and then Acquire brings them; asked again, it has no pages yet."""
    request = Request("r", 5)
    a.store(Request("shorter", 4))
    b.client.on_drive = set(request.block_hashes[2:])
    assert b.match(request) == 4
    assert b.client.wishes == []

    for _ in range(3):
        assert b.match(request) == 4

    assert b.client.wishes == [Wish(request.block_hashes[:4], 0)]
    b.report_loaded(b.load(request, 4))


def test_only_blocks_that_the_engine_lacks_are_brought_nearer(a: Side, b: Side) -> None:
    request = Request("r", 4)
    a.store(request)
    b.client.on_drive = {request.block_hashes[0]}
    for _ in range(3):
        assert b.match(request, num_computed=1) == 3
    assert b.client.wishes == []

    b.client.on_drive = {request.block_hashes[3]}
    for _ in range(3):
        assert b.match(request, num_computed=1) == 3

    assert b.client.wishes == [Wish(request.block_hashes[:4], 1)]


def test_blocks_in_memory_are_not_asked_for(a: Side, b: Side) -> None:
    request = Request("r", 4)
    a.store(request)

    for _ in range(3):
        b.match(request)

    assert b.client.wishes == []


def test_a_request_that_got_its_pages_is_prefetched_again_only_when_it_waits_again(a: Side, b: Side) -> None:
    request = Request("r", 4)
    a.store(request)
    b.client.on_drive = set(request.block_hashes)
    b.match(request)
    b.report_loaded(b.load(request, 4))

    b.match(request)
    b.side.update_state_after_alloc(request, pages(request), 0)
    b.match(request)
    assert b.client.wishes == [], "it was asked about three times, and never waited"

    b.match(request)
    assert len(b.client.wishes) == 1


def test_the_sidecar_of_another_boot_is_asked_again(a: Side, b: Side, sidecar: InProcessSidecar) -> None:
    """It has the blocks on its drives only."""
    request = Request("r", 3)
    a.store(request)
    b.client.on_drive = set(request.block_hashes)
    for _ in range(3):
        b.match(request)
    sidecar.restart()
    assert b.match(request) == 0
    for side in (a, b):
        side.reconnect()
    a.store(Request("again", 3))

    for _ in range(3):
        assert b.match(request) == 3

    assert b.client.wishes == [Wish(request.block_hashes, 0)] * 2


def test_a_prefetch_whose_answer_got_lost_is_not_repeated_and_takes_nothing_from_the_match(
    a: Side, b: Side, sidecar: InProcessSidecar
) -> None:
    request = Request("r", 3)
    a.store(request)
    b.client.on_drive = set(request.block_hashes)
    b.match(request)
    prefetch = b.client.prefetch

    def lose_reply(*args: object, **kwargs: object) -> Prefetched:
        sidecar.lose_next_reply = True
        return prefetch(*args, **kwargs)

    b.client.prefetch = lose_reply
    assert b.match(request) == 3
    assert b.session.link is None
    b.reconnect()

    assert b.match(request) == 3

    assert len(b.client.wishes) == 1


# --- requests that end early ----------------------------------------------------------------------------------------


def test_an_abort_before_the_load_is_sent_gives_the_lease_back(a: Side, b: Side, sidecar: InProcessSidecar) -> None:
    request = Request("r", 2)
    a.store(request)
    b.match(request)
    b.side.update_state_after_alloc(request, pages(request), 2 * BLOCK)

    assert not b.side.request_finished(request)

    assert b.step().loads == ()
    sidecar.check_no_lease()


def test_an_abort_while_loading_keeps_the_pages_until_the_report(a: Side, b: Side, sidecar: InProcessSidecar) -> None:
    """R5."""
    request = Request("r", 2)
    a.store(request)
    b.match(request)
    job = b.load(request, 2)

    assert b.side.request_finished(request)
    assert b.side.has_pending("r")
    b.report_loaded(job)

    assert not b.side.has_pending("r")
    sidecar.check_no_lease()


def test_a_request_that_ends_while_saving_keeps_its_pages_until_the_report(a: Side, b: Side) -> None:
    request = Request("r", 2)
    (save,) = a.fill(request, 0, 2)

    assert a.side.request_finished(request)
    assert a.side.has_pending("r")
    a.report_saved(save)

    assert not a.side.has_pending("r")
    assert b.match(request) == 2


def test_a_request_the_side_never_saw_ends_without_pending(a: Side) -> None:
    assert not a.side.request_finished(Request("never", 1))
    assert not a.side.has_pending("never")


# --- saves that fail ------------------------------------------------------------------------------------------------


def test_blocks_not_written_are_given_back_and_offered_again(a: Side, b: Side, sidecar: InProcessSidecar) -> None:
    request = Request("r", 3)
    (save,) = a.fill(request, 0, 2)
    a.report(finished_saving=((save.job_id, (True, False)),))
    assert b.match(request) == 1

    (again,) = a.fill(request, 2, 3)

    assert [move.block_id for move in again.moves] == [101, 102]
    a.report_saved(again)
    assert b.match(request) == 3
    a.side.request_finished(request)
    sidecar.check_no_lease()


def test_a_full_arena_declines_and_what_is_behind_is_offered_later(sidecar: InProcessSidecar) -> None:
    sidecar.num_segments = 1
    sidecar.restart()
    a, b = Side(sidecar, b"a"), Side(sidecar, b"b")
    blocker, request = Request("blocker", SLOTS_PER_SEGMENT - 2, family=1), Request("r", 4)
    (blocking,) = a.fill(blocker, 0, blocker.num_blocks)

    (save,) = a.fill(request, 0, 3)

    assert len(save.moves) == 2, "two slots are left, and a slot being written cannot be evicted"
    a.report_saved(save, blocking)
    (rest,) = a.fill(request, 3, 4)
    assert [move.block_id for move in rest.moves] == [102, 103]
    a.report_saved(rest)
    assert b.match(request) == 4


def test_a_block_whose_parents_went_is_offered_again_with_them(a: Side, b: Side, sidecar: InProcessSidecar) -> None:
    request = Request("r", 4)
    a.report_saved(*a.fill(request, 0, 2))
    sidecar.store.drop(SPEC.namespace(), None)

    assert a.fill(request, 2, 3) == (), "an orphan"
    (save,) = a.fill(request, 3, 4)

    assert [move.block_id for move in save.moves] == [100, 101, 102, 103]
    a.report_saved(save)
    assert b.match(request) == 4


def test_a_lease_that_expired_before_its_commit_publishes_nothing_and_is_offered_again(
    a: Side, b: Side, sidecar: InProcessSidecar
) -> None:
    request = Request("r", 3)
    (save,) = a.fill(request, 0, 2)
    sidecar.clock.advance(DEFAULT_LEASE_TTL_S + 1)
    sidecar.store.expire(sidecar.clock.now_s())
    assert sidecar.limbo_bytes

    a.report_saved(save)

    assert b.match(request) == 0
    assert sidecar.limbo_bytes == 0, "the abort after the failed commit confirms the end"
    a.report_saved(*a.fill(request, 2, 3))
    assert b.match(request) == 3


# --- leases in time -------------------------------------------------------------------------------------------------


def test_leases_of_copies_under_way_are_renewed(a: Side, b: Side, sidecar: InProcessSidecar) -> None:
    stored, saving = Request("stored", 2), Request("saving", 2, family=1)
    a.store(stored)
    b.match(stored)
    load = b.load(stored, 2)
    (save,) = b.fill(saving, 0, 2)

    for _ in range(5):
        sidecar.clock.advance(DEFAULT_LEASE_TTL_S / 2)
        b.step()
        assert sidecar.store.expire(sidecar.clock.now_s()) == 0

    b.report_loaded(load)
    b.report_saved(save)
    assert a.match(saving) == 2
    for request in (stored, saving):
        b.side.request_finished(request)
    sidecar.check_no_lease()


def test_a_save_that_is_never_reported_is_given_up_and_its_slots_wait_for_the_worker(
    a: Side, b: Side, sidecar: InProcessSidecar
) -> None:
    """R11. The worker may be writing: others may store the blocks anew, and nobody gets its slots."""
    request = Request("r", 2)
    (save,) = a.fill(request, 0, 2)
    assert a.side.request_finished(request)

    for _ in range(round((SAVE_DEADLINE_S + 2 * DEFAULT_LEASE_TTL_S) / DEFAULT_LEASE_TTL_S) + 1):
        assert a.side.has_pending("r") == (sidecar.clock.now_s() < SAVE_DEADLINE_S)
        sidecar.clock.advance(DEFAULT_LEASE_TTL_S)
        a.step()
        sidecar.store.expire(sidecar.clock.now_s())

    assert not a.side.has_pending("r"), "its pages are free"
    assert sidecar.limbo_bytes == 2 * SPEC.block_nbytes
    a.reconnect()
    a.step()
    assert sidecar.limbo_bytes == 2 * SPEC.block_nbytes, "a reconnection does not say that nobody writes"
    b.store(request)
    assert b.match(request) == 2

    a.report_saved(save)
    assert sidecar.limbo_bytes == 0, "a late report does"
    assert b.match(request) == 2
    b.side.request_finished(request)
    sidecar.check_no_lease()


def test_a_save_of_a_live_request_that_is_given_up_is_offered_again(
    a: Side, b: Side, sidecar: InProcessSidecar
) -> None:
    request = Request("r", 2)
    (late,) = a.fill(request, 0, 1)
    for _ in range(8):
        sidecar.clock.advance(DEFAULT_LEASE_TTL_S)
        a.step()
        sidecar.store.expire(sidecar.clock.now_s())

    (save,) = a.fill(request, 1, 2)
    assert [move.block_id for move in save.moves] == [100, 101]
    a.report_saved(save)
    a.report_saved(late)

    assert b.match(request) == 2


def test_nothing_is_asked_of_an_idle_store(a: Side, sidecar: InProcessSidecar) -> None:
    a.client.calls.clear()
    for _ in range(10):
        sidecar.clock.advance(DEFAULT_LEASE_TTL_S)
        a.step()

    assert a.client.calls == []


# --- a store that is away -------------------------------------------------------------------------------------------


def test_without_a_store_nothing_is_found_or_saved_and_nothing_raises(sidecar: InProcessSidecar) -> None:
    sidecar.away = True
    a, request = Side(sidecar, b"a"), Request("r", 3)

    assert a.match(request) == 0
    a.side.update_state_after_alloc(request, pages(request), 0)
    assert a.fill(request, 0, 3) == ()
    assert not a.side.request_finished(request)
    assert a.client.calls == []


def test_after_a_lost_call_nothing_is_asked_until_the_store_is_back(a: Side, sidecar: InProcessSidecar) -> None:
    request = Request("r", 3)
    sidecar.away = True
    assert a.match(request) == 0
    a.client.calls.clear()
    sidecar.away = False

    assert a.match(request) == 0
    assert a.fill(request, 0, 2) == ()
    assert a.client.calls == []
    a.reconnect()

    (save,) = a.fill(request, 2, 3)
    assert len(save.moves) == 3
    a.report_saved(save)


def test_another_boot_is_offered_all_blocks_again(a: Side, b: Side, sidecar: InProcessSidecar) -> None:
    request = Request("r", 3)
    a.report_saved(*a.fill(request, 0, 2))
    sidecar.restart()
    for side in (a, b):
        side.match(Request("notices", 1, family=9))
        side.reconnect()
    assert b.match(request) == 0

    (save,) = a.fill(request, 2, 3)

    assert save.boot_id == sidecar.arena.boot_id
    assert [move.block_id for move in save.moves] == [100, 101, 102]
    a.report_saved(save)
    assert b.match(request) == 3


def test_a_save_of_an_earlier_boot_commits_nothing_in_this_one(a: Side, b: Side, sidecar: InProcessSidecar) -> None:
    """Lease ids start over at each boot: a commit of the earlier boot's lease would publish this boot's, not yet written."""
    request, other = Request("saved", 2), Request("other", 2, family=1)
    (of_earlier_boot,) = a.fill(request, 0, 2)
    sidecar.restart()
    a.match(other)
    a.reconnect()
    in_this_boot = a.fill(request, 0, 2) + a.fill(other, 0, 2)
    assert a.side._saves[of_earlier_boot.job_id].lease_id in {
        a.side._saves[job.job_id].lease_id for job in in_this_boot
    }

    a.report_saved(of_earlier_boot)

    b.reconnect()
    assert b.match(request) == b.match(other) == 0, "their saves have not been reported"
    a.report_saved(*in_this_boot)
    assert b.match(request) == b.match(other) == 2


def test_a_load_of_an_earlier_boot_releases_nothing_in_this_one(a: Side, b: Side, sidecar: InProcessSidecar) -> None:
    loaded, other, third = Request("loaded", 2), Request("other", 2, family=1), Request("third", 2, family=2)
    b.store(loaded)
    a.match(loaded)
    load = a.load(loaded, 2)
    sidecar.restart()
    a.match(other)
    a.reconnect()
    in_this_boot = a.fill(other, 0, 2) + a.fill(third, 0, 2)
    assert load.lease_id in {a.side._saves[job.job_id].lease_id for job in in_this_boot}

    a.report_loaded(load)

    a.report_saved(*in_this_boot)
    b.reconnect()
    assert b.match(other) == b.match(third) == 2


def test_a_load_under_way_stays_leased_through_a_reconnection(a: Side, b: Side, sidecar: InProcessSidecar) -> None:
    """Its blocks must not be evicted while the worker reads them: the Renew after a reconnection names it."""
    request = Request("r", 2)
    b.store(request)
    a.match(request)
    load = a.load(request, 2)
    sidecar.lose_next_reply = True
    a.match(Request("hangs", 1, family=9))
    a.reconnect()

    a.step()

    assert sidecar.store.stats().num_expired_leases == 1, "it waits for our word"
    a.report_loaded(load)
    assert sidecar.store.stats().num_expired_leases == 0


class LinkAt:
    """A session's link as a thread sees it that reads it just when the other thread publishes it: gone, then there."""

    def __init__(self, side: Side, num_reads_before: int) -> None:
        self.side, self.left, self.cls = side, num_reads_before, type(side.session)

    def __enter__(self) -> None:
        reconnected: list[bool] = []

        def link(session: StoreSession) -> object:
            self.left -= 1
            if self.left < 0 and not reconnected:
                reconnected.append(True)
                self.side.reconnect()
            return session._link

        self.side.session.__class__ = type("Racing", (self.cls,), {"link": property(link)})

    def __exit__(self, *_: object) -> None:
        self.side.session.__class__ = self.cls


@pytest.mark.parametrize("num_reads_before", range(6))
def test_a_reconnection_at_any_moment_frees_no_slot_that_is_written(
    num_reads_before: int, a: Side, b: Side, sidecar: InProcessSidecar
) -> None:
    """The background thread connects between any two looks at the session: no Renew forgets the save, no grant is orphaned."""
    request, other = Request("r", 3), Request("q", 3, family=1)
    (save,) = a.fill(request, 0, 2)
    sidecar.lose_next_reply = True
    a.match(Request("hangs", 1, family=9))
    assert sidecar.limbo_bytes == 2 * SPEC.block_nbytes

    with LinkAt(a, num_reads_before):
        jobs = a.fill(other, 0, 3)
        assert sidecar.limbo_bytes == 2 * SPEC.block_nbytes, "the worker still writes them"
        jobs += a.fill(other, 3, 3)

    a.report_saved(save, *jobs)
    if a.session.link is None:
        a.reconnect()
    a.step()
    for each in (request, other):
        a.side.request_finished(each)
    sidecar.check_no_lease()


def test_slots_of_a_grant_that_got_lost_come_back_after_reconnecting(
    a: Side, b: Side, sidecar: InProcessSidecar
) -> None:
    request = Request("r", 3)
    sidecar.lose_next_reply = True
    assert a.fill(request, 0, 2) == ()
    assert sidecar.limbo_bytes == 2 * SPEC.block_nbytes, "the store does not know that nobody heard of the grant"
    a.reconnect()

    (save,) = a.fill(request, 2, 3)

    assert sidecar.limbo_bytes == 0
    a.report_saved(save)
    assert b.match(request) == 3


def test_slots_still_being_copied_stay_in_limbo_after_reconnecting(a: Side, b: Side, sidecar: InProcessSidecar) -> None:
    request = Request("r", 3)
    (save,) = a.fill(request, 0, 2)
    sidecar.lose_next_reply = True
    assert a.match(Request("hangs", 1, family=9)) == 0
    a.reconnect()

    a.step()

    assert sidecar.limbo_bytes == 2 * SPEC.block_nbytes, "the worker may still write them"
    a.report_saved(save)
    assert sidecar.limbo_bytes == 0
    assert b.match(request) == 0, "its lease had ended"
    a.report_saved(*a.fill(request, 2, 3))
    assert b.match(request) == 3


def test_a_commit_whose_answer_got_lost_is_found_held(a: Side, b: Side, sidecar: InProcessSidecar) -> None:
    request = Request("r", 3)
    (save,) = a.fill(request, 0, 2)
    sidecar.lose_next_reply = True
    a.report_saved(save)
    a.reconnect()

    (rest,) = a.fill(request, 2, 3)

    assert [move.block_id for move in rest.moves] == [102]
    a.report_saved(rest)
    assert b.match(request) == 3
    a.side.request_finished(request)
    sidecar.check_no_lease()


def test_a_lease_whose_release_got_lost_ends_after_reconnecting(a: Side, b: Side, sidecar: InProcessSidecar) -> None:
    request = Request("r", 2)
    a.store(request)
    b.match(request)
    job = b.load(request, 2)
    sidecar.away = True
    b.report_loaded(job)
    assert not b.side.request_finished(request)
    sidecar.away = False
    b.reconnect()

    b.step()

    sidecar.check_no_lease()


def test_close_ends_the_connection_and_may_be_repeated(a: Side) -> None:
    a.side.close()
    a.side.close()

    assert a.client.closed
    assert a.match(Request("r", 2)) == 0


@pytest.mark.parametrize(("end", "outcome"), [("loaded", "loaded"), ("failed", "failed"), ("aborted", "cancelled")])
def test_a_traced_load_is_a_span_from_acquire_to_its_end(a: Side, b: Side, end: str, outcome: str) -> None:
    b.store(Request("stored", 4))
    a.side._tracer = tracer = RecordingTracer()
    request = Request("r", 5, traceparent=ABOVE)
    assert a.match(request) == 4
    if end == "aborted":
        a.side.update_state_after_alloc(request, pages(request), 4 * BLOCK)
        a.side.request_finished(request)
    else:
        a.report_loaded(a.load(request, 4), failed=2 * (end == "failed"))

    (span,) = tracer.spans
    assert a.client.traceparents == [ABOVE, span.traceparent]
    assert (span.name, span.above, span.ended) == ("kvstore.load", ABOVE, True)
    assert span.attributes["kvstore.outcome"] == outcome
    assert span.attributes["kvstore.blocks_loaded"] == {"loaded": 4, "failed": 2, "cancelled": 0}[outcome]


@pytest.mark.parametrize("written", [True, False])
def test_a_traced_save_is_a_span_from_reserve_to_commit(a: Side, written: bool) -> None:
    a.side._tracer = tracer = RecordingTracer()
    (job,) = a.fill(Request("r", 3, traceparent=ABOVE), 0, 3)
    assert tracer.spans == []
    a.report_saved(job, written=written)

    (span,) = tracer.spans
    assert (span.name, span.above, span.ended) == ("kvstore.save", ABOVE, True)
    assert span.attributes == {"kvstore.blocks": 3, "kvstore.blocks_committed": 3 if written else 0}


def test_without_a_tracer_or_a_context_nothing_is_sent(a: Side, b: Side) -> None:
    b.store(Request("stored", 4))
    a.match(Request("off", 5, traceparent=ABOVE))
    a.side._tracer = tracer = RecordingTracer()
    request = Request("r", 5)
    a.match(request)
    a.report_loaded(a.load(request, 4))

    assert a.client.traceparents == ["", "", ""]
    assert tracer.spans == []
