"""The connector's contract, in vLLM's verbs (vllm/distributed/kv_transfer/kv_connector/v1/base.py), so that one pair of
implementations serves the included engine and vLLM.

An engine has two sides. The scheduler decides which tokens are computed in a step; the worker owns the pages. They share
nothing but two values that travel once a step: `ConnectorMetadata` (scheduler to worker) and `WorkerOutput` (back).
One step, in order:

    scheduler   get_num_new_matched_tokens -> (allocate) -> update_state_after_alloc -> build_connector_meta
    worker      handle_preemptions(meta) -> start_load(meta) -> forward -> start_save(meta) -> get_output()
    scheduler   update_connector_output(output) -> request_finished for the requests that ended

What an engine may rely on:

- Loads and saves are asynchronous: no verb waits for a block to move, except handle_preemptions.
- Every load asked for in update_state_after_alloc is reported in exactly one WorkerOutput, as finished_loading, whether it
  succeeded or not, within `load_deadline_s`. Failed blocks are named in `failed_block_ids` of the same output; among them
  are those that the store no longer had when it was asked.
- A request whose load failed in any block is not offered another one, so a store that finds what it cannot give costs one
  load and not a loop.
- No verb raises because the store is absent, slow or dies; a store without answer is a store with nothing in it.

What a connector may rely on:

- Page `block_id` of a load is written by nobody else from update_state_after_alloc until the load is reported, nor read,
  except as LayerwiseWorker and BothEndsWorker allow.
- The content of a page in a save does not change from start_save until the save is reported in finished_saving, or until
  handle_preemptions has returned for a step that lists the request as preempted, or the scheduler side has given it up.
- All calls of one side come from one thread. The sides may live in different processes.

An engine may have several workers: tensor-parallel ranks, which have some heads of each block, and pipeline stages, which
have some of its layers. Each has a worker side with a connection of its own (role WORKER, its rank) and Pages that copy its
part of a block. All get the same metadata, and the scheduler side gets their reports as one. A rank whose part another one
writes, since both have the same heads or the same latent, writes nothing and reports it all the same.

A model may have several layer groups (layer_groups.py), each with a KVSpec and Pages of its own, in one order throughout; a
request has a page table for each. Pages are numbered over all groups: at any time a number belongs to one. A load is one hit
for all groups; if any of it fails, all its pages are reported as failed, since a shorter hit would need other blocks.

Block i of a request covers tokens [i * block_tokens, (i + 1) * block_tokens). `block_ids[i]` is the page that holds it.
Only full blocks are loaded and saved. The last token of a prompt is never loaded: it must be computed for its logits.

With one exception, a hand-over (`HandOver`): a prefill instance computes the prompt and its first token, a decode instance goes
on. The producer saves the tail too, the tokens behind the prompt's last full block, as a block of its own key that lives for
TAIL_KEEP_S; the consumer's request comes with its first token generated, so that all of the prompt can be loaded and its first
step is a decode. In the tail's page the tail comes first; what is behind it is to be finite numbers, and means nothing: zeros,
or what a producer computes next while the page is saved.

    producer   [ full ][ full ][ tail | 0 ]         prefill, 1 token
                  |       |        |                saves
    store      [ hash ][ hash ][ tail_hash ]
                  |       |        |                loads
    consumer   [ full ][ full ][ tail | t ]         decode of token t, which came with the request
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import ConfigError
from kvstore.core.limits import MAX_LABEL_BYTES

NO_PAGE = -1
"""In a page table: the engine has no page for that block, since it is out of the group's window, or no checkpoint was kept."""

PageTables = Sequence[int] | Sequence[Sequence[int]]
"""A request's page table; of an engine with several layer groups, one for each."""

MAX_SALT_BYTES = 256
MAX_SESSION_ID_BYTES = 200
"""Both in UTF-8. Longer: ConfigError. They are names, not payloads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """What a request wishes of the caches: of the store through the connector, and of the engine's own pages where said.
    Picklable. Raises ConfigError for a value that means nothing."""

    salt: str = ""  # enters the hash root: blocks of different salts never meet, nor do they in the engine's own pages
    no_read: bool = False  # nothing is found, neither in the store nor in the engine's own pages
    no_store: bool = False  # nothing can be found by others, neither in the store nor in the engine's own pages
    ttl_s: float = 0.0  # time to live of blocks that this request brings into the store; 0: no limit
    pin_s: float = 0.0  # keep the prompt's prefix in the store for so long; 0: no longer than others
    label: str = ""  # what a person calls the prompt: shown with its blocks, and nothing else
    session_id: str = (
        ""  # requests of one conversation: what may be brought nearer before the next turn, and let go after
    )

    def __post_init__(self) -> None:
        for name, limit in (("salt", MAX_SALT_BYTES), ("session_id", MAX_SESSION_ID_BYTES)):
            _check_name(name, getattr(self, name), limit)
        _check_name("label", self.label, MAX_LABEL_BYTES)
        if not self.label.isprintable():
            shown = ascii(self.label)
            raise ConfigError(f"label: {shown} has characters that cannot be printed", field="label", value=shown)
        for name in ("ttl_s", "pin_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}: {value} is out of range; use 0 or more seconds", field=name, value=value)


def _check_name(name: str, value: str, limit: int) -> None:
    try:
        wrong = "" if len(value.encode()) <= limit else f"has {len(value.encode())} bytes"
    except UnicodeEncodeError:
        wrong = "is no UTF-8"
    if wrong:
        shown = ascii(value[:40])
        raise ConfigError(f"{name}: {shown} {wrong}; use at most {limit} bytes of UTF-8", field=name, value=shown)


class FetchPolicy(enum.StrEnum):
    """When blocks that the store has are loaded."""

    PLANNED = "planned"  # as far as they are expected to arrive sooner than they would be computed
    ALWAYS = "always"
    NEVER = "never"  # the engine saves for others, and computes everything itself

    @classmethod
    def named(cls, name: str) -> "FetchPolicy":
        """Raises ConfigError for a name that is none."""
        if name not in list(cls):
            raise ConfigError(f"fetch: {name!r} is not known; use {', '.join(cls)}", field="fetch", value=str(name))
        return cls(name)


class HandOver(enum.StrEnum):
    """An instance's part in handing prompts over. An instance without one neither saves tails nor looks for them."""

    PRODUCER = "producer"  # saves the tails of its prompts
    CONSUMER = "consumer"  # loads tails for requests that come with their first token
    BOTH = "both"  # of a pool in which each instance may hand over to each


class Request(Protocol):
    """What a connector reads of an engine's request. Attributes are the engine's; the connector changes nothing."""

    @property
    def request_id(self) -> str:
        """Unique among the engine's live requests."""
        ...

    @property
    def num_tokens(self) -> int:
        """Prompt plus generated tokens so far."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained hashes of the full blocks of all tokens so far; grows as tokens are generated. May lag behind what a
        step computes: an engine that schedules ahead of its sampler fills a block before it knows the block's tokens."""
        ...

    @property
    def cache(self) -> CacheOptions:
        """Wishes that came with the request. The salt is in `block_hashes` already."""
        ...

    @property
    def traceparent(self) -> str:
        """Of the request's span (kvstore/core/traces.py); "" when it is not traced."""
        ...

    @property
    def tail_hash(self) -> bytes:
        """HashScheme.tail_hash of the prompt's tokens behind its last full block; b"" when there are none, or when this engine
        hands nothing over."""
        ...


class Pages(Protocol):
    """An engine's pages, which are only ever copied whole (kernels/paged.py); or the part of them that one rank has."""

    @property
    def num_pages(self) -> int:
        """Pages are numbered from 0."""
        ...

    @property
    def page_nbytes(self) -> int:
        """Bytes of a stored block, equal to the spec's block_nbytes. A rank's page may hold fewer, and a converted one other."""
        ...

    def copy_in(self, block_id: int, block: NDArray[np.uint8]) -> None:
        """Copy a stored block into a page, of it what this rank has. Called from a background thread; lets the engine compute
        meanwhile."""
        ...

    def copy_out(self, block_id: int, block: NDArray[np.uint8]) -> None:
        """Copy a page into a block's slot; likewise. Bytes that other ranks write are left as they are."""
        ...


@runtime_checkable
class DeviceBlockPages(Pages, Protocol):
    """Pages in a GPU's memory that can be copied from a block which lies there too. Optional: without it an engine reads nothing
    from a slab on a GPU."""

    def copy_in_device(self, block_id: int, block: Any) -> None:
        """As copy_in, of a torch tensor `[page_nbytes] uint8` on the pages' device."""
        ...


@runtime_checkable
class LayeredPages(Pages, Protocol):
    """Pages whose bytes are those of layer 0, then layer 1, and so on, all of one size. Optional: an engine that does not attend
    to a page while it arrives needs no more than Pages."""

    @property
    def num_layers(self) -> int:
        """At least 1; those of this pipeline stage."""
        ...

    def copy_in_layers(self, block_id: int, block: NDArray[np.uint8], layers: range) -> None:
        """As copy_in, of these layers only. `block` is the whole block."""
        ...

    def copy_out_layers(self, block_id: int, block: NDArray[np.uint8], layers: range) -> None:
        """As copy_out; likewise."""
        ...


@runtime_checkable
class BatchedPages(LayeredPages, Protocol):
    """Pages of which many are copied in one call, because a call costs more than a copy: those on a GPU. Optional."""

    def copy_in_blocks(self, block_ids: Sequence[int], blocks: Sequence[NDArray[np.uint8]], layers: range) -> None:
        """As copy_in_layers of each block into its page. No page is named twice."""
        ...

    def copy_out_blocks(self, block_ids: Sequence[int], blocks: Sequence[NDArray[np.uint8]], layers: range) -> None:
        """As copy_out_layers; likewise."""
        ...

    def layers_a_copy(self, num_blocks: int) -> int:
        """How many layers of so many blocks are worth a call, when others wait for the first ones: 1 to num_layers."""
        ...


class BlockMove(NamedTuple):
    """One block between a page of the engine and a slot of the arena."""

    block_id: int  # page
    offset: int  # slot, bytes from the start of the arena
    generation: int  # of the slot, when it was granted


class SlabMove(NamedTuple):
    """What is to be done with a block's slot in the slab, if the worker has it mapped: read it instead of the arena's, or copy
    the arena's there once the load is over."""

    position: int  # of the block among the job's moves
    offset: int  # bytes from the start of the slab
    generation: int
    fills: bool


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Blocks to copy from the arena into pages, in prefix order. `boot_id` names the arena that the offsets belong to.
    `lease_id` is 0 when the store had nothing left to lease."""

    request_id: str
    lease_id: int
    boot_id: bytes
    moves: tuple[BlockMove, ...]
    deadline_s: float  # seconds from now; past it the rest of the blocks are reported as failed
    lost_block_ids: tuple[
        int, ...
    ] = ()  # pages after those of `moves` for which nothing was leased; reported as failed
    by_layers: bool = False  # copy layer 0 of all blocks first, then layer 1: the step attends to them as they arrive
    from_back: bool = False  # copy the last block first, while the engine computes the first ones (BothEndsWorker)
    front_blocks: int | None = None  # of a load from the back: no more is the engine's while the load is in time
    meet_block: int | None = None  # likewise: where front and back are expected to meet
    expected_s: float = 0.0  # likewise: from start_load until the blocks behind meet_block are there
    group: int = 0  # layer group; a request has one load in each that needs blocks, all in one metadata
    whole: bool = False  # a block that fails, in whatever group, fails all of the request's
    slab: tuple[SlabMove, ...] = ()


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Pages to copy into the arena, in prefix order, after the step's forward has filled them."""

    job_id: int
    request_id: str
    boot_id: bytes
    moves: tuple[BlockMove, ...]
    group: int = 0  # layer group


@dataclass(frozen=True, slots=True)
class ConnectorMetadata:
    """What the scheduler side tells the worker side in one step. Picklable; empty tuples when there is nothing to do."""

    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()
    preempted_request_ids: frozenset[str] = frozenset()
    boot_id: bytes = b""  # of the sidecar that the scheduler side speaks to; b"" while it speaks to none
    step: int = field(default=0, compare=False)  # counts the calls that made one; 0: not counted


class FilledFrom(NamedTuple):
    """How a load from the back ended: block `first_block` of it (an index in the load) and all behind it are in their pages. What
    is before it is the engine's to compute: what it claimed, and what failed or was late, which is in `failed_block_ids` too."""

    request_id: str
    first_block: int


class SlabFilled(NamedTuple):
    """Which blocks of a load were copied into the slab."""

    request_id: str
    positions: tuple[int, ...]


class LoadTime(NamedTuple):
    """How long a load took, from start_load until nothing of it was copied any more."""

    request_id: str
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerOutput:
    """What the worker side reports after one step. With several workers, those of all ranks become one (rank_outputs.py)."""

    finished_loading: frozenset[str] = frozenset()  # request ids
    failed_block_ids: frozenset[int] = frozenset()  # pages of finished_loading requests whose content is not to be used
    finished_saving: tuple[tuple[int, tuple[bool, ...]], ...] = ()  # (job_id, for each move whether it was written)
    load_seconds: float = 0.0  # time spent copying since the last output, for Report and metrics
    load_bytes: int = 0
    save_seconds: float = 0.0  # likewise
    save_bytes: int = 0
    filled_from: tuple[FilledFrom, ...] = ()  # for each of finished_loading that was from the back
    load_times: tuple[LoadTime, ...] = field(default=(), compare=False)  # for each of finished_loading
    step: int = field(default=0, compare=False)  # that of the metadata which the worker got last
    slab_filled: tuple[SlabFilled, ...] = ()  # of finished_loading requests


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step, as the scheduler settled it."""

    request: Request
    block_ids: PageTables  # whole tables
    num_computed_tokens: int  # before the step
    num_scheduled_tokens: int  # computed in the step


class SchedulerSide(Protocol):
    """Lives beside the engine's scheduler. Fast: it runs between steps; each call's own deadline is tens of ms."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Tokens the store can give beyond `num_computed_tokens` (a multiple of block_tokens): a contiguous run of full blocks,
        behind them perhaps the prompt's tail; 0 when there is nothing worth loading. Owns nothing; may be asked again, as long
        as the request waits and after each preemption. Who asks twice before update_state_after_alloc says that the request
        waits, and that what it needs may be brought nearer meanwhile."""
        ...

    def update_state_after_alloc(self, request: Request, block_ids: PageTables, num_external_tokens: int) -> None:
        """Pages are there: take the lease of `num_external_tokens` tokens, at most what was matched last, and start the
        load of all of them; 0 means that nothing is loaded. A sample that forks off a request when its prompt is computed (n > 1)
        comes with 0 and was never matched: this is how the connector hears of it.

        `block_ids` is the request's whole table, or tables. With more than 0 tokens the request waits until its id comes back in
        finished_loading; the load rides in the next build_connector_meta. There is no answer, because the engine has
        already settled what it waits for: what the store lost since the match comes back as failed blocks.
        """
        ...

    def build_connector_meta(
        self, scheduled: Sequence[ScheduledRequest], preempted_request_ids: frozenset[str]
    ) -> ConnectorMetadata:
        """Called once a step, also when nothing is scheduled. Reserves slots for the blocks that the step will fill."""
        ...

    def update_connector_output(self, output: WorkerOutput) -> None:
        """Take the worker's report: release leases of finished loads, commit finished saves."""
        ...

    def request_finished(self, request: Request) -> bool:
        """Called exactly once for each request, also for aborted ones. True: pages are still being read or written; keep
        them until `has_pending(request_id)` is False."""
        ...

    def has_pending(self, request_id: str) -> bool:
        """Whether loads or saves of this request are under way."""
        ...

    def close(self) -> None:
        """Give back every lease and close the connection. Safe to call twice."""
        ...


@runtime_checkable
class SessionHints(Protocol):
    """What an engine may tell beyond single requests. Optional: vLLM has no such verbs, and a scheduler side need not have
    them (`isinstance(side, SessionHints)`). Same thread and same speed as SchedulerSide; a hint of an unknown session is 0.
    A session is that of its requests' salt and session_id: the same id with another salt is another session."""

    def expect_session(self, session_id: str, *, salt: str = "") -> int:
        """A request of this session comes soon (the user types, a tool runs): begin to bring nearer what its last one had
        when it finished. How many blocks of it the store has."""
        ...

    def end_session(self, session_id: str, *, salt: str = "") -> int:
        """No request of this session comes any more: forget it, let go of its pins, and give up its blocks before any other,
        except those that other prefixes share. How many blocks of it the store has."""
        ...


@runtime_checkable
class PoolListener(Protocol):
    """What a scheduler side may offer beside SchedulerSide, so that others learn what the engine's own prefix cache holds:
    routers send requests there, and the store gives up its copy first of what every engine has. Optional. Same thread; each
    call costs next to nothing, what is told goes out in batches with build_connector_meta."""

    def pool_has(self, num_blocks: int) -> None:
        """Called once, before the first request: so many blocks fit into the engine's pool."""
        ...

    def blocks_cached(self, parent_hash: bytes, block_hashes: Sequence[bytes]) -> None:
        """Blocks that follow each other can be found in the engine's own pages from now on, behind `parent_hash` (b"": the first
        is the first of its sequence)."""
        ...

    def blocks_forgotten(self, block_hashes: Sequence[bytes]) -> None:
        """They cannot be found there any more."""
        ...

    def cache_cleared(self) -> None:
        """Nothing can be found there any more."""
        ...


@runtime_checkable
class LayerwiseScheduler(Protocol):
    """What a scheduler side may offer beside SchedulerSide, so that an engine computes with blocks while they arrive. Optional,
    as LayerwiseWorker is; an engine uses them if both sides have them, or leaves it.

    The request is scheduled in the very step whose metadata carries its load, with the loaded tokens counted as computed, and
    appears in build_connector_meta like that. If a layer does not come in time (wait_for_layer), the engine voids the request's
    share of the step: what it computed is not used, its SaveJobs of the step are reported as not written without the worker
    seeing them, and the request waits for its load, or goes on after it failed, as it does without layers.
    """

    def load_by_layers(self, request: Request) -> bool:
        """Asked between update_state_after_alloc and build_connector_meta, at most once: whether the load that was just started
        is worth attending to while it arrives. If True, its job says so (LoadJob.by_layers)."""
        ...


@runtime_checkable
class BothEndsScheduler(Protocol):
    """What a scheduler side may offer beside SchedulerSide, so that a load is filled from both ends: the engine computes its
    first blocks, chunk by chunk, while the worker copies its last ones, until they meet. No estimate of either speed is needed
    for that to end near the best moment, and a store that stalls costs nothing. Optional, as BothEndsWorker is; an engine uses
    them if both sides have them, or leaves it.

        front   [ chunk ][ chunk ]>               <[ block ][ block ][ block ]   back
                computed, confirmed     nobody's            copied

    The request waits for its load as any other, but appears in build_connector_meta with what it computes at the front. None
    of its blocks is saved until the load is reported. Where front and back have met, the tokens up to the end of the load
    count as computed, and the pages may be found by others.
    """

    def use_both_ends(self, chunk_tokens: int) -> None:
        """Called once, before the first request, by an engine that asks fill_from_back: it computes so many tokens at a time."""
        ...

    def fill_from_back(self, request: Request) -> bool:
        """Asked between update_state_after_alloc and build_connector_meta, at most once: whether the load that was just started
        is worth filling from both ends. If True, its job says so (LoadJob.from_back)."""
        ...


class WorkerSide(Protocol):
    """Lives beside the engine's pages."""

    def register_pages(self, pages: Pages, *others: Pages) -> None:
        """Called once, before the first step. The pages stay valid and in place until close(). `others`: of further layer
        groups. May raise ConfigError for pages that are no blocks of the specs."""
        ...

    def handle_preemptions(self, meta: ConnectorMetadata) -> None:
        """Wait, at most a deadline, until no save of a preempted request reads its pages any more."""
        ...

    def start_load(self, meta: ConnectorMetadata) -> None:
        """Start the step's loads in the background."""
        ...

    def start_save(self, meta: ConnectorMetadata) -> None:
        """Start the step's saves in the background; called after the forward that filled the pages."""
        ...

    def get_output(self, *, wait_s: float = 0.0) -> WorkerOutput:
        """What finished since the last call. `wait_s` > 0: an engine with nothing else to do waits that long for news."""
        ...

    def close(self) -> None:
        """Stop background work, waiting at most a deadline, and drop the mapping. Safe to call twice."""
        ...


@runtime_checkable
class LayerwiseWorker(Protocol):
    """What a worker side may offer beside WorkerSide (LayerwiseScheduler): loads and saves that go on during the forward.

    One step, in order, of an engine that uses it:

        handle_preemptions -> start_load -> begin_saves -> forward, in each layer:  wait_for_layer  -> start_save -> get_output
                                                           (attention)              layer_computed
    """

    def wait_for_layer(self, request_id: str, layer: int) -> bool:
        """Called before the forward reads layer `layer` of the pages of a load by layers, in the step of its start_load. Waits,
        at most a deadline for all layers together, until it is there in all pages. False: it is not, and may never be.

        True for the last layer says that the whole load is good, and that the next get_output reports it: until then what
        the forward read may turn out to be another's, so nothing of it is to leave the step before.
        """
        ...

    def begin_saves(self, saves: Sequence[SaveJob]) -> None:
        """Those of the step's saves that can begin during the forward: all but those of requests that load by layers in it.
        They are in the metadata of start_save all the same, which says that all their layers are computed."""
        ...

    def layer_computed(self, request_ids: Sequence[str], layer: int) -> None:
        """The forward has written layer `layer` of what these requests' shares fill; from now on it does not change, as if
        start_save had been called for this layer."""
        ...

    def drop_saves(self) -> None:
        """The step broke off between begin_saves and start_save: what was begun is reported as not written. Waits for nothing;
        the pages may change at once."""
        ...


@runtime_checkable
class BothEndsWorker(Protocol):
    """What a worker side may offer beside WorkerSide (BothEndsScheduler): loads from the back."""

    def claim_front(self, request_id: str, num_blocks: int) -> int:
        """Called between start_load and the load's report, by the engine's thread, when it is about to compute the first
        `num_blocks` blocks of a load from the back: how many of them are its to write. The others are copied, or being copied,
        or better left to the back for now: ask again in the next step. What was granted stays granted; waits for nothing.

        Once nothing is left between front and back the load is reported, with the block in `filled_from` from which on its
        pages are filled. A block that fails or is late ends the load too: it and all before it are the engine's.
        """
        ...


class BothEnds(NamedTuple):
    """Both sides of a connector that fills loads from both ends."""

    scheduler: BothEndsScheduler
    worker: BothEndsWorker


class Connector(NamedTuple):
    """Both sides, for an engine that runs scheduler and worker in one process."""

    scheduler: SchedulerSide
    worker: WorkerSide
