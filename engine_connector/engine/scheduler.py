"""Which tokens are computed in the next step: continuous batching with chunked prefill, preemption, and waiting for loads.

    add -> waiting -> (pages for the whole prompt) -> running -> finished -> (no save or load pending) -> pages freed
                  \\-> waiting for KV (the store loads) -> running          \\-> preempted -> waiting

Chunks end at absolute multiples of chunk_tokens and are never cut to fit a budget: a request's chunks, and with them the
last bits of its KV, do not depend on who else is there. One token to go is a decode, whatever the token is. All decodes
that have their page are in every step, so none waits longer than one chunk takes.

Requests are served by rank: priority, then age, and waiting makes up for priority (sequence.py). Pages are allocated for a
whole prompt at admission, so two half-admitted prompts never wait for each other; a decode that finds no page preempts
the running request of the last rank, which resumes later from what the prefix cache and the store have of it, generated
tokens included. So the first in rank is never preempted by another and always finishes. A request that could not run with
all pages to itself is refused by LLM before it gets here. The queue's head waits for its pages and nobody passes it.

A request for n samples is prefilled once and forks when its prompt is computed: the samples share all pages, and where
the prompt ends within a page, all but the first get a copy of that one, since each writes it in its next step.

With `layerwise`, a request whose load may go by layers waits for its KV within the step: its next chunk is scheduled in the
same step, as if the load were done, and attends to each layer as it arrives. Until the step is over it counts as loading, so
if the load fails or is late nothing but the chunk is lost:

    waiting -> waiting for KV, chunk in the same step -> load good: the chunk counts, running
                                                      -> load failed: the chunk is void, running from the first failed block
                                                      -> load late, or the step broke off: the chunk is void, waiting for KV

With `both_ends`, a request whose load is filled from the back is computed from the front while it waits: chunks by rank and
within the budget as for running ones, each as long as the worker says that its blocks are the front's. When the load is over
it runs, and where a chunk comes to the first block that is filled it goes on behind the last one, as if all were loaded:

    waiting for KV, chunks at the front -> load over ------------------------------> running, front and back have met
                                        -> load over before the chunks are there --> running, chunks up to what is filled
"""

import bisect
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from kvstore.engine_connector.engine.block_manager import BlockManager
from kvstore.engine_connector.engine.sampler import SampledToken
from kvstore.engine_connector.engine.sequence import Counts, Fill, FinishReason, Rank, Sequence, Status
from kvstore.engine_connector.engine.step import ScheduledSequence, Step
from kvstore.engine_connector.protocol import (
    BothEnds,
    LayerwiseScheduler,
    ScheduledRequest,
    SchedulerSide,
    WorkerOutput,
)

CopyPage = Callable[[int, int], None]
"""Copies the content of one page (the first) to another, at once. Called between steps only."""

_NUM_AHEAD = 4
"""Requests at the head of the queue that the connector hears of before they have pages: those that are admitted next. What it
brings nearer for more of them might be gone again by then."""

_ASKS_AHEAD = 2
"""For each: the second question says that the request waits (protocol.py); more would say nothing new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step. At most `max_batch` samples own pages; a step computes max_batch decodes and one whole chunk, or
    several smaller ones."""

    block_tokens: int
    max_batch: int
    chunk_tokens: int
    max_model_len: int
    prefix_caching: bool


class Scheduler:
    """Owns the sequences and their pages. One thread; `schedule` and `update` (or, when the step broke off,
    `take_output`) alternate, add and abort in between."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        connector: SchedulerSide,
        stop_ids: frozenset[int],
        copy_page: CopyPage,
        *,
        layerwise: LayerwiseScheduler | None = None,
        both_ends: BothEnds | None = None,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._connector = connector
        self._stop_ids = stop_ids
        self._copy_page = copy_page
        self._layerwise = layerwise
        self._both_ends = both_ends
        self.fills_next = False  # a load from the back began in this step: the next one can compute at its front
        self._waiting: list[Sequence] = []  # each list by rank
        self._running: list[Sequence] = []
        self._loading: dict[str, Sequence] = {}
        self._draining: dict[str, Sequence] = {}  # finished; the connector still uses their pages
        self._failed: list[Sequence] = []  # ended by a load; for take_failed
        self._live_ids: set[str] = set()  # of unfinished samples, those that have not forked yet among them
        self._counts_of_finished = Counts()
        self.num_finished: Counter[FinishReason] = Counter()  # samples
        self.num_admitted = 0  # requests that left the queue for the first time

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is waiting, loading or running."""
        return bool(self._waiting or self._running or self._loading)

    @property
    def is_draining(self) -> bool:
        """Whether pages of finished requests are still read or written by the connector."""
        return bool(self._draining)

    @property
    def num_waiting(self) -> int:
        """Sequences without pages: new ones and preempted ones."""
        return len(self._waiting)

    @property
    def num_queued(self) -> int:
        """Of those that wait, the ones for which the batch has no room now: a burst on an idle engine is no queue."""
        return max(0, len(self._waiting) - (self._config.max_batch - self._num_slots()))

    @property
    def num_loading(self) -> int:
        """Sequences that wait for their KV."""
        return len(self._loading)

    @property
    def num_running(self) -> int:
        """Sequences that are computed."""
        return len(self._running)

    @property
    def num_draining(self) -> int:
        """Finished sequences whose pages are still in use."""
        return len(self._draining)

    @property
    def total(self) -> Counts:
        """Of all sequences, those that finished and those that have not. Only grows."""
        total = replace(self._counts_of_finished)
        preempted = [
            sequence for sequence in self._waiting if sequence.counts.preemptions
        ]  # new ones count nothing yet
        for sequence in (*preempted, *self._running, *self._loading.values()):
            total += sequence.counts
        return total

    def add(self, sequence: Sequence) -> None:
        """Queue a new request. None of its sample ids may be `in_use`; its n is at most max_batch."""
        assert not self.in_use(sequence.sample_ids)
        assert sequence.num_samples <= self._config.max_batch
        self._live_ids.update(sequence.sample_ids)
        bisect.insort(self._waiting, sequence, key=_rank)

    def in_use(self, sample_ids: Iterable[str]) -> bool:
        """Whether a live sample, or one whose pages are still in use, has one of these ids."""
        return any(i in self._live_ids or i in self._draining for i in sample_ids)

    def abort(self, sequence: Sequence) -> None:
        """End an unfinished request now; its pages are freed once the connector lets go of them."""
        self._finish(sequence, FinishReason.ABORT)

    def schedule(self) -> Step:
        """Choose the next step's work, by rank, and have the connector add its loads and saves."""
        self._free_drained()
        self.fills_next = False
        preempted: set[str] = set()
        decodes = self._schedule_decodes(preempted)
        chunks = self._schedule_chunks()
        if not preempted:
            self._admit(decodes, chunks)
        self._ask_ahead()
        shares = [
            ScheduledRequest(share.sequence, share.sequence.block_ids, share.start, share.num_tokens)
            for share in (*decodes, *chunks)
        ]
        meta = self._connector.build_connector_meta(shares, frozenset(preempted))
        return Step(tuple(chunks), tuple(decodes), meta)

    def update(
        self, step: Step, sampled: Seq[SampledToken], output: WorkerOutput, void: Collection[str] = ()
    ) -> list[Sequence]:
        """Take a step's results: `num_samples` tokens for each share, in order of `step.scheduled`, except for those of the
        requests `void`, whose load did not come in time. A load that failed may end a request, and its share counts no more.

        Returns the sequences that got a token, new samples among them. They may be finished.
        """
        self.take_output(output)
        shares = [
            share
            for share in step.scheduled
            if share.sequence.request_id not in void and share.sequence.finish_reason is None
        ]
        for share in shares:
            self._advance(share)
        grown: list[Sequence] = []
        first = 0
        for share in shares:
            tokens = sampled[first : first + share.num_samples]
            first += len(tokens)
            grown += self._append(share.sequence, tokens)
        assert first == len(sampled)
        return grown

    def take_output(self, output: WorkerOutput) -> None:
        """Take the connector's news alone. For a step that broke off: what it scheduled is scheduled again."""
        self._connector.update_connector_output(output)
        self._take_loads(output)

    def take_failed(self) -> list[Sequence]:
        """Sequences that a failed load ended since the last call (RequestOptions.load_failure)."""
        failed, self._failed = self._failed, []
        return failed

    def check(self) -> None:
        """Assert the engine's own invariants: each page has as many holders as there are tables with it, only one of them
        when it is still to be written, and states match the lists."""
        self._blocks.check()
        tables = (*self._running, *self._loading.values(), *self._draining.values())
        holders = Counter(page for sequence in tables for page in sequence.block_ids)
        assert holders == Counter({p: n for p in range(self._blocks.num_pages) if (n := self._blocks.num_holders(p))})
        for sequence in (*self._running, *self._loading.values()):
            first_unwritten = sequence.num_computed_tokens // self._config.block_tokens
            assert all(holders[page] == 1 for page in sequence.block_ids[first_unwritten:]), sequence.request_id
        assert not any(sequence.block_ids for sequence in self._waiting)
        for sequences, status in ((self._waiting, Status.WAITING), (self._running, Status.RUNNING)):
            assert all(sequence.status is status for sequence in sequences)
            assert sequences == sorted(sequences, key=_rank)
        assert all(sequence.status is Status.WAITING_FOR_KV for sequence in self._loading.values())
        assert not any(sequence.fill for sequence in (*self._waiting, *self._draining.values()))
        for sequence in (*self._running, *self._loading.values()):
            if fill := sequence.fill:
                assert (fill.filled_from is None) == (sequence.status is Status.WAITING_FOR_KV)
                last = fill.end if fill.filled_from is None else fill.filled_from
                step = self._config.block_tokens
                assert fill.first * step <= sequence.num_computed_tokens <= last * step < sequence.num_tokens
        assert all(sequence.status is Status.FINISHED for sequence in self._draining.values())
        live = (*self._waiting, *self._running, *self._loading.values())
        assert Counter(i for sequence in live for i in sequence.sample_ids) == Counter(self._live_ids)
        assert self._num_slots() <= self._config.max_batch

    def _append(self, first: Sequence, tokens: Seq[SampledToken]) -> list[Sequence]:
        """Add a token to a sequence, or one to each of the samples into which it forks now."""
        if not tokens:
            return []
        samples = [first, *(self._fork(first, index) for index in range(1, len(tokens)))]
        for sequence, token in zip(samples, tokens, strict=True):
            sequence.append(token)
            if reason := self._finish_reason(sequence):
                self._finish(sequence, reason)
        if len(samples) > 1:
            for sequence in reversed(samples):  # the last one to ask, the first in rank, keeps the original
                if sequence.status is Status.RUNNING:
                    self._own_open_page(sequence)
        return samples

    def _fork(self, first: Sequence, index: int) -> Sequence:
        sequence = first.fork(index)
        self._blocks.take(sequence.block_ids)
        self._connector.update_state_after_alloc(sequence, sequence.block_ids, 0)
        bisect.insort(self._running, sequence, key=_rank)
        return sequence

    def _own_open_page(self, sequence: Sequence) -> None:
        """Copy the page that the sequence writes next if others hold it too; without a page for that it resumes later."""
        index = sequence.num_computed_tokens // self._config.block_tokens
        if index == len(sequence.block_ids) or self._blocks.num_holders(sequence.block_ids[index]) == 1:
            return
        if self._blocks.num_free == 0:
            self._preempt(sequence)  # the worker need not hear of it: nothing has been saved in its name yet
            return
        shared, (own,) = sequence.block_ids[index], self._blocks.allocate(1)
        self._copy_page(shared, own)
        self._blocks.free([shared])
        sequence.block_ids[index] = own

    def _schedule_decodes(self, preempted: set[str]) -> list[ScheduledSequence]:
        """By rank; what a decode preempts comes after it, so it has not been scheduled yet, or is the decode itself."""
        ready = [s for s in self._running if s.num_computed_tokens == s.num_tokens - 1]
        return [
            ScheduledSequence(sequence, sequence.num_computed_tokens, 1)
            for sequence in ready
            if sequence.status is Status.RUNNING and self._ensure_page(sequence, preempted)
        ]

    def _ensure_page(self, sequence: Sequence, preempted: set[str]) -> bool:
        """A page for the sequence's last token; preempts from the end, at worst the sequence itself."""
        if len(sequence.block_ids) * self._config.block_tokens >= sequence.num_tokens:
            return True
        while self._blocks.num_free == 0:
            victim = self._running[-1]
            self._preempt(victim)
            preempted.add(victim.request_id)
            if victim is sequence:
                return False
        sequence.block_ids += self._blocks.allocate(1)
        return True

    def _preempt(self, victim: Sequence) -> None:
        """Back to the queue, pages freed: the step's metadata makes the worker side wait for saves that read them."""
        self._running.remove(victim)
        self._blocks.free(victim.block_ids)
        victim.block_ids = []
        victim.num_computed_tokens = 0
        victim.fill = None
        victim.counts.preemptions += 1
        victim.status = Status.WAITING
        bisect.insort(self._waiting, victim, key=_rank)

    def _schedule_chunks(self) -> list[ScheduledSequence]:
        chunks: list[ScheduledSequence] = []
        filling = [sequence for sequence in self._loading.values() if sequence.fill is not None]
        for sequence in sorted((*self._running, *filling), key=_rank) if filling else self._running:
            if sequence.num_computed_tokens < sequence.num_tokens - 1 and not self._add_chunk(sequence, chunks):
                break
        return chunks

    def _add_chunk(self, sequence: Sequence, chunks: list[ScheduledSequence]) -> bool:
        """Schedule the sequence up to the next multiple of chunk_tokens, if this step has room for it; of one whose load is
        filled from the back, what of that is the front's, which may be nothing yet."""
        chunk = self._next_chunk(sequence, sequence.num_computed_tokens)
        if not self._has_room(chunk, chunks):
            return False
        if sequence.status is Status.WAITING_FOR_KV:
            chunk = replace(chunk, num_tokens=self._claimed_end(chunk) - chunk.start)
        if chunk.num_tokens > 0:
            chunks.append(chunk)
        return True

    def _next_chunk(self, sequence: Sequence, start: int) -> ScheduledSequence:
        size, fill = self._config.chunk_tokens, sequence.fill
        end = min((start // size + 1) * size, sequence.num_tokens)
        if fill is not None:
            filled_from = fill.end if fill.filled_from is None else fill.filled_from
            end = min(end, filled_from * self._config.block_tokens)
        return ScheduledSequence(sequence, start, end - start)

    def _claimed_end(self, chunk: ScheduledSequence) -> int:
        """Up to which token the front may compute; whole blocks, since the back copies whole blocks."""
        fill, step = chunk.sequence.fill, self._config.block_tokens
        assert self._both_ends is not None
        assert fill is not None
        wanted = chunk.end // step - fill.first
        return (fill.first + self._both_ends.worker.claim_front(chunk.sequence.request_id, wanted)) * step

    def _has_room(self, chunk: ScheduledSequence, chunks: list[ScheduledSequence]) -> bool:
        return sum(each.num_tokens for each in chunks) + chunk.num_tokens <= self._config.chunk_tokens

    def _attend_while_loading(self, sequence: Sequence, chunks: list[ScheduledSequence]) -> None:
        """Schedule the chunk behind a load that has just started, if the load can go by layers. Not a decode, which would hold
        up the whole batch; nor behind a tail, whose page the chunk would write while it is loaded."""
        start = sequence.num_computed_tokens + sequence.num_loading_tokens
        chunk = replace(self._next_chunk(sequence, start), loading=True)
        is_chunk = start < sequence.num_tokens - 1 and start % self._config.block_tokens == 0
        if self._layerwise is None or not is_chunk or not self._has_room(chunk, chunks):
            return
        if self._layerwise.load_by_layers(sequence):
            chunks.append(chunk)

    def _admit(self, decodes: list[ScheduledSequence], chunks: list[ScheduledSequence]) -> None:
        while self._waiting and self._num_slots() + self._waiting[0].num_samples <= self._config.max_batch:
            sequence = self._waiting[0]
            matched = self._match_local(sequence)
            num_new = -(-sequence.num_tokens // self._config.block_tokens) - len(matched)
            if not self._blocks.can_allocate(matched, num_new):
                return
            del self._waiting[0]
            self._allocate(sequence, matched, num_new)
            if sequence.status is not Status.RUNNING:
                if not self._fill_from_both_ends(sequence):
                    self._attend_while_loading(sequence, chunks)
                continue
            if sequence.num_computed_tokens == sequence.num_tokens - 1:
                decodes.append(ScheduledSequence(sequence, sequence.num_computed_tokens, 1))
            elif not self._add_chunk(sequence, chunks):
                return

    def _fill_from_both_ends(self, sequence: Sequence) -> bool:
        """Whether the load that has just started is from the back. The worker gets it in this step, so the front begins in the
        next one."""
        if self._both_ends is None or not self._both_ends.scheduler.fill_from_back(sequence):
            return False
        step = self._config.block_tokens
        assert sequence.num_loading_tokens % step == 0, "no tail is loaded from the back"
        first = sequence.num_computed_tokens // step
        sequence.fill = Fill(first, first + sequence.num_loading_tokens // step)
        self.fills_next = True
        return True

    def _num_slots(self) -> int:
        return sum(sequence.num_samples for sequence in (*self._running, *self._loading.values()))

    def _ask_ahead(self) -> None:
        """Let the connector hear of requests that wait."""
        for sequence in self._waiting[:_NUM_AHEAD]:
            if sequence.num_asks_ahead < _ASKS_AHEAD:
                sequence.num_asks_ahead += 1
                num_local = len(self._match_local(sequence)) * self._config.block_tokens
                self._connector.get_num_new_matched_tokens(sequence, num_local)

    def _match_local(self, sequence: Sequence) -> list[int]:
        """Pages of the prefix that is in our own cache; the last token is always computed, for its logits."""
        if not self._config.prefix_caching or sequence.cache.no_read:
            return []
        return self._blocks.match(sequence.block_hashes[: self._num_loadable_blocks(sequence)])

    def _num_loadable_blocks(self, sequence: Sequence) -> int:
        return (sequence.num_tokens - 1) // self._config.block_tokens

    def _allocate(self, sequence: Sequence, matched: list[int], num_new: int) -> None:
        """Take pages for all tokens so far, and ask the store for what our own cache lacks."""
        num_local = len(matched) * self._config.block_tokens
        self._blocks.take(matched)
        sequence.block_ids = matched + self._blocks.allocate(num_new)
        sequence.num_computed_tokens = num_local
        sequence.num_asks_ahead = 0
        self.num_admitted += sequence.counts.preemptions == 0
        sequence.counts.local_cached += num_local
        loadable = sequence.num_tokens - 1 - num_local
        wanted = min(self._connector.get_num_new_matched_tokens(sequence, num_local), loadable)
        sequence.num_loading_tokens = wanted
        self._connector.update_state_after_alloc(sequence, sequence.block_ids, wanted)
        if wanted:
            sequence.status = Status.WAITING_FOR_KV
            self._loading[sequence.request_id] = sequence
        else:
            self._run(sequence)

    def _run(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        bisect.insort(self._running, sequence, key=_rank)

    def _take_loads(self, output: WorkerOutput) -> None:
        """Requests whose loads ended go on from the first block that failed, or end there. Loads of aborted requests are not
        ours."""
        for request_id in output.finished_loading & self._loading.keys():
            sequence = self._loading[request_id]
            problem = self._take_load(sequence, output)
            if problem and sequence.options.load_failure == "fail":
                sequence.error = problem
                self._failed.append(sequence)
                self._finish(sequence, FinishReason.ERROR)
            else:
                del self._loading[request_id]
                self._run(sequence)

    def _take_load(self, sequence: Sequence, output: WorkerOutput) -> str:
        """What came counts as computed, if all before it is. What did not, in words; a block that the front has got first is
        none of that."""
        step, fill = self._config.block_tokens, sequence.fill
        if fill is not None:
            filled = [each.first_block for each in output.filled_from if each.request_id == sequence.request_id]
            # Without a word of it the worker never got the load, and its pages are all to be computed.
            fill.filled_from = fill.first + filled[0] if filled else fill.end
            sequence.num_loading_tokens = 0
            self._meet(sequence)
            loaded = sequence.block_ids[fill.first : fill.end]
            return _problem(sum(page in output.failed_block_ids for page in loaded), len(loaded))
        first = sequence.num_computed_tokens // step
        loaded = sequence.block_ids[first : first + -(-sequence.num_loading_tokens // step)]
        good = next((i for i, page in enumerate(loaded) if page in output.failed_block_ids), len(loaded))
        num_loaded = min(good * step, sequence.num_loading_tokens)  # the last block may be the prompt's tail
        sequence.num_loading_tokens = 0
        self._count_fetched(sequence, num_loaded)
        self._publish(sequence, first, first + num_loaded // step)
        return _problem(len(loaded) - good, len(loaded))

    def _meet(self, sequence: Sequence) -> None:
        """If the load is over and the front has come to what it filled, go on behind that."""
        fill, step = sequence.fill, self._config.block_tokens
        if fill is None or fill.filled_from is None or sequence.num_computed_tokens < fill.filled_from * step:
            return
        assert sequence.num_computed_tokens == fill.filled_from * step
        num_filled = (fill.end - fill.filled_from) * step
        self._count_fetched(sequence, num_filled)
        sequence.counts.filled_back += num_filled
        self._publish(sequence, fill.filled_from, fill.end)
        sequence.fill = None

    def _count_fetched(self, sequence: Sequence, num_tokens: int) -> None:
        sequence.num_computed_tokens += num_tokens
        sequence.counts.fetched += num_tokens
        sequence.counts.resumed += num_tokens if sequence.counts.preemptions else 0

    def _advance(self, share: ScheduledSequence) -> None:
        """The share's KV is in the pages: blocks that it completed can be found from now on."""
        sequence, step = share.sequence, self._config.block_tokens
        assert sequence.num_computed_tokens == share.start
        if share.start < sequence.num_prompt_tokens or share.num_tokens > 1:
            sequence.counts.prefilled += share.num_tokens
        sequence.num_computed_tokens = share.end
        self._publish(sequence, share.start // step, share.end // step)
        if sequence.fill is not None:
            sequence.counts.filled_front += share.num_tokens
            if sequence.fill.filled_from is None:
                sequence.num_loading_tokens -= share.num_tokens
            self._meet(sequence)

    def _publish(self, sequence: Sequence, first: int, last: int) -> None:
        if sequence.cache.no_store:
            return
        hashes = sequence.block_hashes
        for index in range(first, last):
            self._blocks.publish(sequence.block_ids[index], hashes[index], hashes[index - 1] if index else b"")

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        if sequence.text.stopped:
            return FinishReason.STOP
        if sequence.token_ids[-1] in self._stop_ids and not sequence.params.ignore_eos:
            return FinishReason.STOP
        if sequence.num_output_tokens >= sequence.params.max_tokens or sequence.num_tokens > self._config.max_model_len:
            return FinishReason.LENGTH
        return None

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self._running.remove(sequence)
        else:
            del self._loading[sequence.request_id]
        sequence.fill = None
        self._live_ids.difference_update(sequence.sample_ids)
        self._counts_of_finished += sequence.counts
        sequence.finish(reason)
        self.num_finished[sequence.finish_reason or reason] += sequence.num_samples
        if self._connector.request_finished(sequence):
            self._draining[sequence.request_id] = sequence
        else:
            self._blocks.free(sequence.block_ids)
            sequence.block_ids = []

    def _free_drained(self) -> None:
        for request_id in [r for r in self._draining if not self._connector.has_pending(r)]:
            sequence = self._draining.pop(request_id)
            self._blocks.free(sequence.block_ids)
            sequence.block_ids = []


def _problem(num_failed: int, num_blocks: int) -> str:
    return f"{num_failed} of {num_blocks} blocks did not come from the store" if num_failed else ""


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank
