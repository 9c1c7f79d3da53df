"""The scheduler side: match, lease, reserve, commit, pin. Runs between an engine's steps; never waits longer than one call's
deadline, and that only once before the session's breaker opens.

Everything it knows of the store it asked in this boot of the sidecar: when the boot id changes, what was saved counts as
not saved, and the request's blocks are offered again. When the same boot answers again after a silence, a Renew names the
leases whose blocks the worker still copies, and says that it is done with all others, those among them whose grant got
lost on its way.
"""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from kvstore.client import Acquired, Client, Reserved, wire_request_id
from kvstore.core.blocks import KeyStatus
from kvstore.core.clock import Clock
from kvstore.core.errors import ConfigError
from kvstore.core.limits import DEFAULT_LEASE_TTL_S, LOAD_DEADLINE_S, SAVE_DEADLINE_S, TAIL_KEEP_S
from kvstore.core.plans import FetchPlan, MatchWish, SlabUse
from kvstore.core.traces import Span, Tracer
from kvstore.engine_connector.group_parts import GroupPart, GroupParts
from kvstore.engine_connector.layer_groups import LayerGroup
from kvstore.engine_connector.pool_reports import PoolReports
from kvstore.engine_connector.protocol import (
    BlockMove,
    CacheOptions,
    ConnectorMetadata,
    FetchPolicy,
    HandOver,
    LoadJob,
    PageTables,
    Request,
    SaveJob,
    ScheduledRequest,
    SlabMove,
    WorkerOutput,
)
from kvstore.engine_connector.recent_sessions import RecentSessions
from kvstore.engine_connector.requests import (
    Offer,
    PendingLoad,
    PendingSave,
    PinWish,
    Prefetch,
    RequestState,
    SavedBlocks,
)
from kvstore.engine_connector.session import Link, StoreSession
from kvstore.engine_connector.step_times import StepTimes
from kvstore.proto.kvstore_pb2 import CANCELLED, FAILED, LOADED, Outcome

logger = logging.getLogger(__name__)

MIN_BLOCKS_BY_LAYERS = 4
"""A load of fewer blocks is over before the engine comes to its first layer."""

MIN_BLOCKS_BOTH_ENDS = 2

_PATIENCE_S, _PATIENCE_FRACTION = 0.25, 0.15
"""A load is not late before so long, or before so much of what computing all would take if that is less: the chunk that begins
then is computed to its end."""

_PRICE_OF_ANOTHER, _MAX_PRICE = 0.25, 3.0
"""What a second of the engine costs, in seconds of time to first token: a part of one for each other request that the last step
computed, whose tokens come later for it; measured engines lose nothing more beyond the limit, since they batch."""


class StoreSchedulerSide:
    """Implements protocol.SchedulerSide over a StoreSession, which it closes.

    `groups` are those of the session's specs. One with full attention leads: its Match counts the request and plans it, and the
    others follow with what they need for a prefix of that length, or a shorter one that all support. A model without full
    attention is not planned: what its groups support is fetched.
    """

    def __init__(
        self,
        session: StoreSession,
        *,
        block_tokens: int,
        clock: Clock,
        hand_over: HandOver | None = None,
        fetch: FetchPolicy = FetchPolicy.PLANNED,
        chunk_tokens: int = 0,
        load_deadline_s: float = LOAD_DEADLINE_S,
        groups: Sequence[LayerGroup] = (LayerGroup(),),
        tracer: Tracer | None = None,
        uses_slab: bool = False,
    ) -> None:
        """`block_tokens`: of one of a request's hashes. `chunk_tokens`: what the engine computes of a prompt at a time; 0: all,
        or not known. `tracer` is the caller's. `uses_slab`: the engine's one worker maps the sidecar's slab, if there is one,
        which serves models of one full layer group. Raises ConfigError for a hand-over of other layer groups than that."""
        assert block_tokens > 0
        self._groups = GroupParts(groups)
        if hand_over is not None and not self._groups.is_plain:
            raise ConfigError(
                f"hand_over: {hand_over} with {len(groups)} layer groups; it is for models of one, with full attention",
                field="hand_over",
                value=str(hand_over),
            )
        self._uses_slab = uses_slab and self._groups.is_plain
        self._tracer = tracer
        self._fetch = fetch
        self._chunk_tokens = chunk_tokens
        self._uses_both_ends = False
        self._saves_tails = hand_over in (HandOver.PRODUCER, HandOver.BOTH)
        self._loads_tails = hand_over in (HandOver.CONSUMER, HandOver.BOTH)
        self._session = session
        self._block_tokens = block_tokens
        self._clock = clock
        self._load_deadline_s = load_deadline_s
        self._requests: dict[str, RequestState] = {}
        self._sessions = RecentSessions()
        self._new_loads: list[LoadJob] = []
        self._saves: dict[int, PendingSave] = {}
        self._job_ids = itertools.count(1)
        self._renewed_s = clock.now_s()
        self._wire_ids = itertools.count(1)  # ours, not the engine's: any text is a request id there
        self._renewed_link = session.link
        self._times = StepTimes(clock)
        self._pool = PoolReports(clock)
        self._planning_link: Link | None = None  # whose sidecar has answered with a plan

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """See protocol.SchedulerSide. One Match of all keys but the last token's block, one of each further layer group
        (longest_prefix: two at most), and one Prefetch each if the request waits and its blocks lie on a slower tier."""
        state, link = self._state(request), self._session.link
        first = num_computed_tokens // self._block_tokens
        keys = self._loadable_keys(request)
        state.offer = Offer(first)
        never = self._fetch is FetchPolicy.NEVER or request.cache.no_read
        if link is None or state.load_failed or never or len(keys) <= first or first % self._groups.alignment:
            return 0
        state.follow_boot(link.boot_id)
        if self._groups.leader is None:
            return (
                self._groups.longest_prefix(self._session, link, keys, first, len(keys)) * self._block_tokens
                - num_computed_tokens
            )
        leader = self._leading(link)
        has_tail = len(keys) > len(self._full_block_keys(request))
        # What a producer computed for this instance is not computed again: it is there to decode.
        planned = self._fetch is FetchPolicy.PLANNED and not has_tail
        wish = self._wish(request, first) if planned else None
        name = wire_request_id(request.request_id)
        traceparent = "" if self._tracer is None else request.traceparent
        match = self._session.ask(
            link, lambda client, _: client.match(leader, keys, wish, request_id=name, traceparent=traceparent)
        )
        if match is not None and match.plan is not None:
            self._planning_link = link
        if match is None or match.num_blocks <= first:
            return 0
        state.offer = Offer(first, match.plan, match.plan_id, match.tiers[first:])
        last = match.num_blocks
        if match.plan is not None:
            last = min(last, first + match.plan.num_blocks)
        if not self._groups.is_plain:
            last = self._groups.longest_prefix(self._session, link, keys, first, last)
        if any(match.tiers[first:last]):
            self._prefetch_if_waiting(state, link, keys[:last])
        whole = has_tail and last == len(keys)
        return (request.num_prompt_tokens if whole else last * self._block_tokens) - num_computed_tokens

    def update_state_after_alloc(self, request: Request, block_ids: PageTables, num_external_tokens: int) -> None:
        """See protocol.SchedulerSide. One Acquire for each layer group that needs blocks."""
        state = self._state(request)
        state.prefetch = Prefetch.NOT_DUE
        assert state.load is None, "R1: one load at a time"
        if num_external_tokens == 0:
            return
        first, plan, plan_id = state.offer.first_block, state.offer.plan, state.offer.plan_id
        last = first + -(-num_external_tokens // self._block_tokens)
        keys = self._loadable_keys(request)[:last]
        assert len(keys) == last, "more tokens than were matched"
        link, started_s = self._session.link, self._clock.now_s()
        boot_id = b"" if link is None else link.boot_id
        span = self._load_span(request, started_s)
        parts = self._groups.of_prefix(keys, first, last, self._groups.tables(block_ids))
        grants = [self._acquire(link, part, plan, plan_id, span) for part in parts]
        short = [grant is None or grant.num_blocks < len(part.keys) for part, grant in zip(parts, grants, strict=True)]
        granted = [grant.lease_id for grant in grants if grant is not None and grant.lease_id]
        pages = tuple(page for part in parts for page in part.pages)
        if not granted or (any(short) and not self._groups.is_plain):
            self._release(PendingLoad(tuple(granted), boot_id, ()), CANCELLED)
            state.load = PendingLoad((), boot_id, pages, started_s, span=span)
            self._new_loads.append(LoadJob(request.request_id, 0, boot_id, (), self._load_deadline_s, pages))
            return
        jobs = [
            self._load_job(request, boot_id, part, grant, plan)
            for part, grant in zip(parts, grants, strict=True)
            if grant is not None
        ]
        in_ram = not any(short) and all(all(grant.ready) for grant in grants if grant is not None)
        fills = tuple(move.position for job in jobs for move in job.slab if move.fills)
        state.load = PendingLoad(tuple(granted), boot_id, pages, started_s, in_ram=in_ram, fills=fills, span=span)
        self._new_loads += jobs

    def _acquire(
        self, link: Link | None, part: GroupPart, plan: FetchPlan | None, plan_id: int, span: Span | None
    ) -> Acquired | None:
        leads = part.group == self._groups.leader
        wire_id = str(next(self._wire_ids))
        return self._session.ask(
            link,
            lambda client, link: client.acquire(
                wire_id,
                link.namespaces[part.group],
                part.keys,
                first_needed=part.first_needed,
                from_back=plan is not None and plan.both_ends,
                plan_id=plan_id if leads else 0,
                traceparent=span.traceparent if span else "",
                further_group=not leads,
                slab=self._uses_slab,
            ),
        )

    def _load_job(
        self, request: Request, boot_id: bytes, part: GroupPart, grant: Acquired, plan: FetchPlan | None
    ) -> LoadJob:
        num_granted = grant.num_blocks - part.first_needed
        moves = tuple(map(BlockMove, part.pages[:num_granted], grant.offsets.tolist(), grant.generations.tolist()))
        assert len(moves) == num_granted == len(grant.offsets) == len(grant.generations)
        deadline_s = min(self._load_deadline_s, grant.expires_in_s)
        if plan is not None and not plan.both_ends and plan.deadline_s > 0:
            deadline_s = min(deadline_s, plan.deadline_s)
        lost = part.pages[num_granted:]
        return LoadJob(
            request.request_id,
            grant.lease_id,
            boot_id,
            moves,
            deadline_s,
            lost,
            group=part.group,
            whole=not self._groups.is_plain,
            slab=_slab_moves(grant),
        )

    def tiers_of(self, request: Request) -> bytes:
        """Numbers of the tiers (core.plans.TIERS) of the blocks behind those on the engine, as the last match found them."""
        return self._state(request).offer.tiers

    def use_both_ends(self, chunk_tokens: int) -> None:
        """See protocol.BothEndsScheduler."""
        self._uses_both_ends, self._chunk_tokens = self._groups.is_plain, chunk_tokens

    def fill_from_back(self, request: Request) -> bool:
        """See protocol.BothEndsScheduler."""
        state, job = self._state(request), self._new_loads[-1]
        load, plan = state.load, state.offer.plan
        assert load is not None
        assert job.request_id == request.request_id
        num_blocks = len(job.moves)
        if plan is None or not plan.both_ends or num_blocks < max(len(load.block_ids), MIN_BLOCKS_BOTH_ENDS):
            return False
        load.from_back = True
        meet = min(plan.front_blocks, num_blocks)
        self._new_loads[-1] = replace(
            job,
            from_back=True,
            front_blocks=meet if self._price(request) or not meet else num_blocks,
            meet_block=meet,
            expected_s=max(plan.fetch_s * (num_blocks - meet) / num_blocks, _patience_s(plan)),
        )
        return True

    def load_by_layers(self, request: Request) -> bool:
        """See protocol.LayerwiseScheduler."""
        load, job = self._state(request).load, self._new_loads[-1]
        assert load is not None
        assert job.request_id == request.request_id
        load.by_layers = self._groups.is_plain and load.in_ram and len(job.moves) >= MIN_BLOCKS_BY_LAYERS
        self._new_loads[-1] = replace(job, by_layers=load.by_layers)
        return load.by_layers

    def build_connector_meta(
        self, scheduled: Sequence[ScheduledRequest], preempted_request_ids: frozenset[str]
    ) -> ConnectorMetadata:
        """See protocol.SchedulerSide. At most one Reserve for each request that fills a block in the step, and one for the tail
        of a prompt that is complete."""
        self._give_up_saves()
        self._renew_when_due()
        self._report_when_due()
        self._pool.send_due(self._session)
        loads, self._new_loads = tuple(self._new_loads), []
        saves = [job for item in scheduled for job in self._save(item) if job is not None]
        step = self._times.begin(scheduled)
        return ConnectorMetadata(loads, tuple(saves), preempted_request_ids, self._session.boot_id, step)

    def update_connector_output(self, output: WorkerOutput) -> None:
        """See protocol.SchedulerSide."""
        self._times.end(output)
        for request_id in output.finished_loading:
            self._finish_load(request_id, output)
        for job_id, written in output.finished_saving:
            self._finish_save(job_id, written)

    def request_finished(self, request: Request) -> bool:
        """See protocol.SchedulerSide."""
        self._pool.send_due(self._session, at_once=True)
        state = self._requests.get(request.request_id)
        if state is None:
            return False
        state.finished = True
        self._sessions.remember(request)
        self._cancel_unsent_load(request.request_id, state)
        self._forget_when_done(request.request_id, state)
        return state.pending

    def expect_session(self, session_id: str, *, salt: str = "") -> int:
        """See protocol.SessionHints. One Prefetch."""
        keys = self._sessions.keys(session_id, salt)
        link = self._session.link if keys else None
        answer = self._session.ask(link, lambda client, link: client.prefetch(self._leading(link), keys))
        return 0 if answer is None else answer.num_blocks

    def end_session(self, session_id: str, *, salt: str = "") -> int:
        """See protocol.SessionHints. One Pin."""
        keys = self._sessions.forget(session_id, salt)
        link = self._session.link if keys else None
        return self._session.ask(link, lambda client, link: client.cool(self._leading(link), keys)) or 0

    def pool_has(self, num_blocks: int) -> None:
        """See protocol.PoolListener."""
        self._pool.num_blocks = num_blocks

    def blocks_cached(self, parent_hash: bytes, block_hashes: Sequence[bytes]) -> None:
        """See protocol.PoolListener."""
        self._pool.stored(parent_hash, block_hashes)

    def blocks_forgotten(self, block_hashes: Sequence[bytes]) -> None:
        """See protocol.PoolListener."""
        self._pool.removed(block_hashes)

    def cache_cleared(self) -> None:
        """See protocol.PoolListener."""
        self._pool.cleared()

    def has_pending(self, request_id: str) -> bool:
        """See protocol.SchedulerSide."""
        state = self._requests.get(request_id)
        return state is not None and state.pending

    def close(self) -> None:
        """See protocol.SchedulerSide. The connection's end gives back what is still held."""
        self._session.close()

    def check(self) -> None:
        """R2 and R5: every pending job belongs to a known request, and the other way round."""
        for job_id, save in self._saves.items():
            assert save.given_up or job_id in self._requests[save.request_id].save_job_ids
        for request_id, state in self._requests.items():
            assert state.save_job_ids <= self._saves.keys()
            assert state.pending or not state.finished, request_id

    # --- saving --------------------------------------------------------------------------------------------------------

    def _save(self, item: ScheduledRequest) -> list[SaveJob | None]:
        return [*(self._save_blocks(item, group) for group in range(len(self._groups.groups))), self._save_tail(item)]

    def _save_blocks(self, item: ScheduledRequest, number: int) -> SaveJob | None:
        """Slots for the blocks of a layer group that are full once the step has run, from the first one that the store may lack.
        Of a group that needs only some at the end of a prefix, for those (R12).

        Blocks from the engine's own prefix cache are offered too: the store answers HELD for what it has, and after a
        restart of the sidecar this is how it is filled again.
        """
        request, state = item.request, self._state(item.request)
        load = state.load
        assert load is None or load.by_layers or load.from_back, "R1: nothing is computed of a request that is loading"
        if request.cache.no_store or (load is not None and load.from_back):
            return None
        num_filled = (item.num_computed_tokens + item.num_scheduled_tokens) // self._block_tokens
        group, saved = self._groups.groups[number], state.saved[number]
        num_full = min(num_filled, len(request.block_hashes)) // group.span
        link = self._session.link
        if link is None:
            return None
        state.follow_boot(link.boot_id)
        if num_full <= saved.num_offered:
            return None
        saved.num_offered = num_full
        table = self._groups.tables(item.block_ids)[number]
        first = self._groups.first_to_save(number, table, saved.num_saved, num_full)
        keys = group.keys(request.block_hashes, range(first, num_full))
        parent = request.block_hashes[first * group.span - 1] if first and group.is_full else b""
        grant = self._reserve(link, number, keys, parent, request.cache, request.cache.ttl_s) if keys else None
        if grant is None:
            return None
        num_held = _num_not_declined(grant.statuses)
        # An orphan's parents are gone (evicted, or their writer died): next time all blocks are offered again.
        saved.num_saved = 0 if grant.declined_reason == "orphan" else first + num_held
        if grant.lease_id == 0:
            self._pin_when_held(state)
            return None
        return self._save_granted(link, item, number, first, keys, grant)

    def _save_tail(self, item: ScheduledRequest) -> SaveJob | None:
        """A slot for the tail of a prompt that the step completes, behind its full blocks, which are held or being saved now.
        Once its page holds generated tokens too, it is not saved any more."""
        request = item.request
        ends_prompt = item.num_computed_tokens + item.num_scheduled_tokens == request.num_prompt_tokens
        if not (self._saves_tails and ends_prompt and request.tail_hash) or request.cache.no_store:
            return None
        link = self._session.link
        if link is None:
            return None
        first, keys = request.num_prompt_tokens // self._block_tokens, [request.tail_hash]
        parent = request.block_hashes[first - 1] if first else b""
        grant = self._reserve(
            link, 0, keys, parent, request.cache, min(request.cache.ttl_s or TAIL_KEEP_S, TAIL_KEEP_S)
        )
        return None if grant is None or grant.lease_id == 0 else self._save_granted(link, item, 0, first, keys, grant)

    def _reserve(  # noqa: PLR0917 - what a reservation is made of
        self, link: Link, number: int, keys: list[bytes], parent: bytes, cache: CacheOptions, keep_s: float
    ) -> Reserved | None:
        wire_id, namespace = str(next(self._wire_ids)), link.namespaces[number]
        return self._session.ask(
            link,
            lambda client, _: client.reserve(wire_id, namespace, keys, parent=parent, keep_s=keep_s, label=cache.label),
        )

    def _save_granted(  # noqa: PLR0917 - what a save is made of
        self, link: Link, item: ScheduledRequest, number: int, first: int, keys: list[bytes], grant: Reserved
    ) -> SaveJob:
        """`keys` are those of the request's blocks of the group from `first` on."""
        table = self._groups.tables(item.block_ids)[number]
        request, num_held = item.request, _num_not_declined(grant.statuses)
        granted = [i for i in range(num_held) if grant.statuses[i] == KeyStatus.GRANTED]
        moves = tuple(
            BlockMove(table[first + i], offset, generation)
            for i, offset, generation in zip(granted, grant.offsets.tolist(), grant.generations.tolist(), strict=True)
        )
        job_id = next(self._job_ids)
        self._saves[job_id] = PendingSave(
            grant.lease_id,
            link.boot_id,
            request.request_id,
            number,
            first,
            tuple(keys[i] for i in granted),
            self._clock.now_s(),
            traceparent="" if self._tracer is None else request.traceparent,
        )
        self._state(request).save_job_ids.add(job_id)
        return SaveJob(job_id, request.request_id, link.boot_id, moves, number)

    def _finish_save(self, job_id: int, written: tuple[bool, ...]) -> None:
        save = self._saves.pop(job_id)
        if save.given_up:
            self._commit(save, [])  # now at last nobody writes into its slots
            return
        state = self._requests[save.request_id]
        state.save_job_ids.discard(job_id)
        num_ready = self._commit(save, [key for key, ok in zip(save.keys, written, strict=True) if ok])
        if self._tracer is not None and save.traceparent:
            about = {"kvstore.blocks": len(save.keys), "kvstore.blocks_committed": num_ready}
            self._tracer.start("kvstore.save", save.traceparent, at_s=save.started_s, kind="client").end(about)
        if num_ready < len(save.keys):
            saved = state.saved[save.group]
            saved.num_saved = min(saved.num_saved, save.first_block)
            if not any(written):
                saved.num_offered = min(saved.num_offered, save.first_block)
        self._pin_when_held(state)
        self._forget_when_done(save.request_id, state)

    def _give_up_saves(self) -> None:
        """R11. No abort: a worker that does not report may yet write into the slots."""
        for job_id, save in self._saves.items():
            if self._clock.now_s() - save.started_s < SAVE_DEADLINE_S:
                return  # the others are younger
            if not save.given_up:
                logger.error("save not reported request_id=%s blocks=%d", save.request_id, len(save.keys))
                save.given_up = True
                state = self._requests[save.request_id]
                state.save_job_ids.discard(job_id)
                saved = state.saved[save.group]
                saved.num_saved = min(saved.num_saved, save.first_block)
                self._forget_when_done(save.request_id, state)

    def _commit(self, save: PendingSave, written: list[bytes]) -> int:
        """Publish what was written, give the rest back; how many blocks became READY."""
        link = self._session.link
        if link is None or save.boot_id != link.boot_id:
            return 0
        num_ready = self._session.ask(link, lambda client, _: client.commit(save.lease_id, written)) if written else 0
        if num_ready is None or len(written) < len(save.keys):
            self._session.ask(link, lambda client, _: client.abort(save.lease_id))
        return num_ready or 0

    def _pin_when_held(self, state: RequestState) -> None:
        """R7. Its own saves that are under way hold nothing yet; those behind the prompt do not matter."""
        if state.pin is None:
            return
        num_blocks = [len(state.pin.keys) // group.span for group in self._groups.groups]
        if any(saved.num_saved < wanted for saved, wanted in zip(state.saved, num_blocks, strict=True)):
            return
        saves = [self._saves[job_id] for job_id in state.save_job_ids]
        if all(save.first_block >= num_blocks[save.group] for save in saves):
            self._pin(state)

    def _pin(self, state: RequestState) -> None:
        link, pin = self._session.link, state.pin
        if pin is None or link is None:
            return
        state.follow_boot(link.boot_id)
        if not state.pinned:
            parts = self._groups.of_prefix(list(pin.keys), 0, len(pin.keys))
            pinned = [self._pin_part(link, part, pin.pin_s) == len(part.keys) for part in parts]
            state.pinned = all(pinned)

    def _pin_part(self, link: Link, part: GroupPart, pin_s: float) -> int | None:
        return self._session.ask(link, lambda client, link: client.pin(link.namespaces[part.group], part.keys, pin_s))

    # --- loading -------------------------------------------------------------------------------------------------------

    def _loadable_keys(self, request: Request) -> list[bytes]:
        """All full blocks but one that holds the last token, which must be computed for its logits. Behind those of a prompt
        its tail, if the last token is beyond the prompt and not beyond the tail's page."""
        num_loadable, num_prompt_tokens = request.num_tokens - 1, request.num_prompt_tokens
        keys = self._full_block_keys(request)
        is_last = len(keys) == num_prompt_tokens // self._block_tokens and num_loadable >= num_prompt_tokens
        return [*keys, request.tail_hash] if self._loads_tails and is_last and request.tail_hash else keys

    def _full_block_keys(self, request: Request) -> list[bytes]:
        return list(request.block_hashes[: (request.num_tokens - 1) // self._block_tokens])

    def _wish(self, request: Request, first: int) -> MatchWish:
        return MatchWish(
            wire_request_id(request.request_id),
            request.num_tokens,
            first_needed=first,
            chunk_tokens=self._chunk_tokens,
            compute_price=self._price(request),
            both_ends=self._uses_both_ends,
            deadline_s=self._load_deadline_s,
            label=request.cache.label,
        )

    def _price(self, request: Request) -> float:
        return min(_MAX_PRICE, _PRICE_OF_ANOTHER * self._times.num_others(request.request_id))

    def _prefetch_if_waiting(self, state: RequestState, link: Link, keys: list[bytes]) -> None:
        """R6."""
        if state.prefetch is Prefetch.DUE:
            for part in self._groups.of_prefix(keys, state.offer.first_block, len(keys)):
                self._prefetch(link, part)
        state.prefetch = Prefetch.DUE if state.prefetch is Prefetch.NOT_DUE else Prefetch.SENT

    def _prefetch(self, link: Link, part: GroupPart) -> None:
        self._session.ask(
            link,
            lambda client, link: client.prefetch(
                link.namespaces[part.group], part.keys, first_needed=part.first_needed
            ),
        )

    def _finish_load(self, request_id: str, output: WorkerOutput) -> None:
        state = self._requests[request_id]
        load, failed = state.load, output.failed_block_ids
        assert load is not None
        filled_from = next((each.first_block for each in output.filled_from if each.request_id == request_id), None)
        num_failed = sum(block_id in failed for block_id in load.block_ids)
        if filled_from is None:
            num_loaded = next((i for i, page in enumerate(load.block_ids) if page in failed), len(load.block_ids))
        else:
            num_loaded = len(load.block_ids) - filled_from
        copied_s = next((each.seconds for each in output.load_times if each.request_id == request_id), None)
        seconds = self._clock.now_s() - load.started_s if copied_s is None else copied_s
        state.load_failed = num_failed > 0
        filled = {i for each in output.slab_filled if each.request_id == request_id for i in each.positions}
        self._release(
            load,
            FAILED if num_failed else LOADED,
            num_loaded=num_loaded,
            seconds=seconds,
            filled=bytes(position in filled for position in load.fills),
        )
        state.load = None
        self._forget_when_done(request_id, state)

    def _cancel_unsent_load(self, request_id: str, state: RequestState) -> None:
        """An aborted request whose load has not gone to the worker yet will never hear of it."""
        unsent = [job for job in self._new_loads if job.request_id == request_id]
        if unsent and state.load is not None:
            self._new_loads = [job for job in self._new_loads if job.request_id != request_id]
            self._release(state.load, CANCELLED)
            state.load = None

    def _release(
        self, load: PendingLoad, outcome: int, *, num_loaded: int = 0, seconds: float = 0.0, filled: bytes = b""
    ) -> None:
        if load.span is not None:
            load.span.end(
                {
                    "kvstore.blocks": len(load.block_ids),
                    "kvstore.blocks_loaded": num_loaded,
                    "kvstore.both_ends": load.from_back,
                    "kvstore.outcome": Outcome.Name(outcome).lower(),
                }
            )
        link = self._session.link
        if link is not None and load.boot_id == link.boot_id:
            for lease_id in load.lease_ids:
                self._session.ask(
                    link,
                    partial(
                        _release,
                        lease_id=lease_id,
                        outcome=outcome,
                        num_loaded=num_loaded,
                        seconds=seconds,
                        filled=filled,
                    ),
                )

    def _leading(self, link: Link) -> bytes:
        """The namespace that a request is planned and counted in."""
        return link.namespaces[self._groups.leader or 0]

    def _load_span(self, request: Request, at_s: float) -> Span | None:
        """From Acquire until the worker's report, if the request is traced."""
        if self._tracer is None or not request.traceparent:
            return None
        return self._tracer.start("kvstore.load", request.traceparent, at_s=at_s, kind="client")

    # --- both ----------------------------------------------------------------------------------------------------------

    def _renew_when_due(self) -> None:
        """One Renew for all leases every third of their time, and after each new connection. A lease not named in it is one
        whose blocks nobody copies any more; it may be one that we never heard of."""
        now_s, link = self._clock.now_s(), self._session.link
        if link is None or (link is self._renewed_link and now_s - self._renewed_s < DEFAULT_LEASE_TTL_S / 3):
            return
        reconnected, self._renewed_link, self._renewed_s = link is not self._renewed_link, link, now_s
        saves = [save for save in self._saves.values() if save.boot_id == link.boot_id]
        lease_ids = [save.lease_id for save in saves if not save.given_up]
        loads = [state.load for state in self._requests.values() if state.load is not None]
        lease_ids += [lease_id for load in loads if load.boot_id == link.boot_id for lease_id in load.lease_ids]
        others_ended = not any(save.given_up for save in saves)
        if lease_ids or reconnected:
            self._session.ask(
                link, lambda client, _: client.renew(lease_ids, DEFAULT_LEASE_TTL_S, others_ended=others_ended)
            )

    def _report_when_due(self) -> None:
        """One Report of this engine's speeds, at most every REPORT_INTERVAL_S, to a sidecar that plans with them."""
        link = self._planning_link
        if link is self._session.link is not None and (speeds := self._times.take_due()) is not None:
            self._session.ask(link, lambda client, link: client.report(self._leading(link), **speeds._asdict()))

    def _state(self, request: Request) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            keys = tuple(request.block_hashes[: request.num_prompt_tokens // self._block_tokens])
            pin_s = request.cache.pin_s
            state = RequestState(PinWish(keys, pin_s) if pin_s and keys else None)
            state.saved = [SavedBlocks() for _ in self._groups.groups]
            self._requests[request.request_id] = state
        return state

    def _forget_when_done(self, request_id: str, state: RequestState) -> None:
        if state.finished and not state.pending:
            self._pin(state)
            del self._requests[request_id]


def _release(
    client: Client, _: Link, *, lease_id: int, outcome: int, num_loaded: int, seconds: float, filled: bytes
) -> None:
    client.release(lease_id, outcome, num_loaded=num_loaded, seconds=seconds, filled=filled)


def _slab_moves(grant: Acquired) -> tuple[SlabMove, ...]:
    indices = [i for i, use in enumerate(grant.slab) if use != SlabUse.NONE]
    slots = zip(indices, grant.slab_offsets.tolist(), grant.slab_generations.tolist(), strict=True)
    return tuple([SlabMove(i, offset, gen, fills=grant.slab[i] == SlabUse.FILL) for i, offset, gen in slots])


def _num_not_declined(statuses: bytes) -> int:
    declined = statuses.find(KeyStatus.DECLINED)
    return len(statuses) if declined < 0 else declined


def _patience_s(plan: FetchPlan) -> float:
    return min(_PATIENCE_S, _PATIENCE_FRACTION * plan.recompute_s) if plan.recompute_s else _PATIENCE_S
