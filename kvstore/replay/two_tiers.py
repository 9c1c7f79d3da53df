"""RAM and NVMe under replay: the whole store, with its verbs, leases and write policies. Moves end at once."""

from kvstore.core.blocks import Holder
from kvstore.core.limits import MAX_KEYS_PER_CALL
from kvstore.core.moves import MoveDone, Urgency
from kvstore.core.plans import TIERS
from kvstore.core.ports import DriveSlots, SlotSpace
from kvstore.eviction import MakePolicy
from kvstore.replay.cache import block_key, replay_spec
from kvstore.replay.run import Found
from kvstore.replay.trace import ReplayRequest, ReplayStore, ReplayUse, Space
from kvstore.spill import SpillPolicy
from kvstore.store import Store

_HOLDER = Holder(b"replay".ljust(16, b"."), 1)
_LEASE_S = 30.0
_RAM, _NVME = (TIERS.index(name) for name in ("pinned", "nvme"))


class TwoTiers:
    """A request asks what there is, fetches it, and stores the rest: an engine that computes in no time."""

    def __init__(
        self,
        pinned: SlotSpace,
        nvme: DriveSlots,
        make_policy: MakePolicy,
        spill: SpillPolicy,
    ) -> None:
        self.store = Store(pinned=pinned, nvme=nvme, spill=spill, make_policy=make_policy)
        self.store.start_spilling({}, 0.0)
        self._namespaces: dict[Space, bytes] = {}
        self.num_written = 0

    @property
    def num_evicted(self) -> int:
        """Blocks that RAM gave up."""
        return self.store.stats().counters["evicted_blocks_total"]

    def replay(self, request: ReplayRequest) -> Found:
        """See run.Replayed."""
        store, now_s = self.store, request.at_s
        namespace = self._namespace(request.space)
        keys = [block_key(block) for block in request.blocks[:MAX_KEYS_PER_CALL]]
        match = store.match(namespace, keys, now_s)
        if match.num_blocks:
            self._load(namespace, keys[: match.num_blocks], now_s)
        parent = keys[match.num_blocks - 1] if match.num_blocks else b""
        self._store(namespace, parent, keys[match.num_blocks : request.num_stored], now_s)
        return Found(match.tiers.count(_RAM), match.tiers.count(_NVME))

    def follow(self, step: ReplayStore | ReplayUse) -> None:
        """See run.Replayed."""
        namespace, keys = self._namespace(step.space), [block_key(block) for block in step.blocks[:MAX_KEYS_PER_CALL]]
        if isinstance(step, ReplayUse):
            self._load(namespace, keys, step.at_s)
        else:
            self._store(namespace, block_key(step.behind) if step.behind >= 0 else b"", keys, step.at_s)

    def _load(self, namespace: bytes, keys: list[bytes], now_s: float) -> None:
        lease_id = self.store.acquire(_HOLDER, "", namespace, keys, 0, _LEASE_S, now_s).lease_id
        self._settle(now_s)
        if lease_id:
            self.store.release(_HOLDER, lease_id, now_s)

    def _store(self, namespace: bytes, parent: bytes, keys: list[bytes], now_s: float) -> None:
        if keys:
            lease_id = self.store.reserve(_HOLDER, "", namespace, parent, keys, _LEASE_S, now_s).lease_id
            if lease_id:
                self.store.commit(_HOLDER, lease_id, None, now_s)
        self.store.tick(now_s)
        self._settle(now_s)

    def _namespace(self, space: Space) -> bytes:
        namespace = self._namespaces.get(space)
        if namespace is None:
            namespace = self.store.open_namespace(replay_spec(space), space.tenant).namespace
            self._namespaces[space] = namespace
        return namespace

    def _settle(self, now_s: float) -> None:
        """What is ordered ends well at once."""
        while any(orders := self.store.take_orders(now_s)):
            self.num_written += sum(move.urgency is Urgency.WRITE for move in orders.moves)
            self.store.finish_moves([MoveDone(move.move_id, 0, None) for move in orders.moves], now_s)
            self.store.finish_forgets(orders.forgets)
