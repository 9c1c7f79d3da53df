"""The dashboard's side of the sidecar: samples in a thread of its own, and the pages behind `/`.

    brain loop  <--- every 2 s ---  sampler: Stats, alarms, history; every 10 s the hot prefixes
                                       |
    /  /web/...   static               v
    /api/now      the last sample, and how old it is; asks the loop nothing
    /api/history  ?span=600 seconds, of the rings
    /api/plans    the last plans in words, at most a second old

Read-only. Nothing here is secret: it is what /metrics and `kvstore explain` tell.
"""

import asyncio
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from copy import copy
from importlib import resources
from itertools import islice
from typing import Any, NamedTuple, Protocol

from kvstore.alarms import alarms
from kvstore.core.clock import Clock
from kvstore.core.errors import KVStoreError
from kvstore.core.limits import GRPC_CALL_DEADLINE_S
from kvstore.dispatcher import Dispatcher
from kvstore.fields import fields_of
from kvstore.figures import figures
from kvstore.history import History
from kvstore.inspection import HotPrefix, hottest
from kvstore.loop_calls import call_on_loop
from kvstore.plan_log import PlanRecord
from kvstore.plan_messages import record_reply
from kvstore.proto import kvstore_pb2 as pb
from kvstore.store import Store
from kvstore.usage import MISSES

logger = logging.getLogger(__name__)

SAMPLE_EVERY_S = 2.0
_HOT_EVERY_S = 10.0
_LATELY_S = 30.0  # between the snapshots that alarms compare
_NUM_LATELY = 20
_NUM_PLANS = 40
_NUM_HOT = 10
_PLANS_AGE_S = 1.0
_SPANS_S = (600, 3600, 6 * 3600, 24 * 3600)
_STATIC = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/web/dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
    "/web/dashboard.js": ("dashboard.js", "text/javascript; charset=utf-8"),
    "/web/theme.js": ("theme.js", "text/javascript; charset=utf-8"),
    "/web/chart.js": ("chart.js", "text/javascript; charset=utf-8"),
    "/web/format.js": ("format.js", "text/javascript; charset=utf-8"),
}


class Source(Protocol):
    """What the dashboard asks of the brain loop, from its own threads. Raises KVStoreError when the loop does not answer."""

    def stats(self) -> pb.StatsReply:
        """The snapshot that /metrics shows too."""
        ...

    def plans(self, count: int) -> tuple[list[PlanRecord], float]:
        """The last plans, newest first, as they are now, and the time on their clock."""
        ...

    def hot_prefixes(self, count: int) -> list[HotPrefix]:
        """Those that saved most."""
        ...


class LoopSource:
    """Source over the real loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, dispatcher: Dispatcher, store: Store, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._dispatcher = dispatcher
        self._store = store

    def stats(self) -> pb.StatsReply:  # noqa: D102 - see Source
        return call_on_loop(self._loop, GRPC_CALL_DEADLINE_S, self._dispatcher.stats)

    def plans(self, count: int) -> tuple[list[PlanRecord], float]:  # noqa: D102
        def look() -> tuple[list[PlanRecord], float]:
            newest = islice(self._dispatcher.advisor.records("", None), count)
            return [copy(record) for record in newest], self._clock.now_s()

        return call_on_loop(self._loop, GRPC_CALL_DEADLINE_S, look)

    def hot_prefixes(self, count: int) -> list[HotPrefix]:  # noqa: D102
        inspector = self._store.inspector()
        columns = call_on_loop(self._loop, GRPC_CALL_DEADLINE_S, inspector.columns)
        rows = hottest(columns, count).tolist()
        return call_on_loop(self._loop, GRPC_CALL_DEADLINE_S, inspector.hot_prefixes, rows)


class Answer(NamedTuple):
    """A page; `static` ones may be kept by browsers for a while."""

    content_type: str
    body: bytes
    static: bool = False


class Dashboard:
    """Samples `source` from `start` to `stop`; `pages` may be asked from any thread meanwhile."""

    def __init__(
        self, source: Source, *, every_s: float = SAMPLE_EVERY_S, wall_s: Callable[[], float] = time.time
    ) -> None:
        self._source = source
        self._every_s = every_s
        self._wall_s = wall_s
        self._lock = threading.Lock()  # over all that follows
        self._history = History(every_s=every_s)
        self._stats: pb.StatsReply | None = None
        self._sampled_s = 0.0
        self._problem = "nothing was sampled yet"
        self._lately: deque[tuple[float, pb.StatsReply]] = deque(maxlen=_NUM_LATELY)
        self._hot: list[HotPrefix] = []
        self._hot_s = 0.0
        self._plans: tuple[float, Answer] | None = None
        self._stopping = threading.Event()
        self._static = {path: _read_static(*file) for path, file in _STATIC.items()}

    def start(self) -> None:
        """Sample in the background."""
        threading.Thread(target=self._run, name="kvstore-dashboard", daemon=True).start()

    def stop(self) -> None:
        """No more samples after the one that is being taken."""
        self._stopping.set()

    def pages(self) -> dict[str, Callable[[Mapping[str, str]], Answer]]:
        """Path to what answers it, given the query."""
        static = {path: (lambda _, page=page: page) for path, page in self._static.items()}
        return {**static, "/api/now": self._now, "/api/history": self._table, "/api/plans": self._last_plans}

    def sample(self) -> None:
        """Take one sample. The sampler's thread, or a test's."""
        try:
            stats = self._source.stats()
            at_s = self._wall_s()
            hot = self._source.hot_prefixes(_NUM_HOT) if not self._hot or at_s - self._hot_s >= _HOT_EVERY_S else None
        except KVStoreError as err:
            with self._lock:
                self._problem = err.message
            return
        with self._lock:
            self._stats, self._sampled_s, self._problem = stats, at_s, ""
            self._history.add(at_s, figures(stats))
            if not self._lately or at_s - self._lately[-1][0] >= _LATELY_S:
                self._lately.append((at_s, stats))
            if hot is not None:
                self._hot, self._hot_s = hot, at_s

    def _run(self) -> None:
        while True:
            try:
                self.sample()
            except Exception:
                logger.exception("dashboard sample crashed")  # outermost frame of the thread; the next sample follows
                with self._lock:
                    self._problem = "the dashboard has a bug; the sidecar's log says more"
            if self._stopping.wait(self._every_s):
                return

    def _now(self, _query: Mapping[str, str]) -> Answer:
        with self._lock:
            stats, hot, problem, sampled_s = self._stats, self._hot, self._problem, self._sampled_s
            lately = [each for _, each in self._lately]
        age_s = self._wall_s() - sampled_s
        if stats is None:
            return _json({"stats": None, "problem": problem, "every_s": self._every_s})
        before, earlier = lately[len(lately) // 2], lately[0]
        return _json(
            {
                "at_s": sampled_s,
                "age_s": age_s,
                "every_s": self._every_s,
                "problem": problem,
                "alarms": [alarm._asdict() for alarm in alarms(stats, before, earlier)],
                "stats": fields_of(stats),
                "figures": figures(stats),
                "hot_prefixes": [prefix._asdict() | _in_hex(prefix) for prefix in hot],
            }
        )

    def _table(self, query: Mapping[str, str]) -> Answer:
        span_s = next((span_s for span_s in _SPANS_S if query.get("span") == str(span_s)), _SPANS_S[0])
        with self._lock:
            table = self._history.table(self._wall_s() - span_s - self._every_s)
            nbytes = self._history.nbytes
        return _json(
            {"span_s": span_s, "spans_s": _SPANS_S, "memory_bytes": nbytes, "misses": MISSES, **table._asdict()}
        )

    def _last_plans(self, _query: Mapping[str, str]) -> Answer:
        """One question to the loop a second at most, however many look."""
        with self._lock:
            kept = self._plans
        if kept is not None and self._wall_s() - kept[0] < _PLANS_AGE_S:
            return kept[1]
        records, now_s = self._source.plans(_NUM_PLANS)
        answer = _json({"plans": [fields_of(record_reply(record, now_s)) for record in records]})
        with self._lock:
            self._plans = self._wall_s(), answer
        return answer


def _read_static(name: str, content_type: str) -> Answer:
    return Answer(content_type, resources.files("kvstore.web").joinpath(name).read_bytes(), static=True)


def _in_hex(prefix: HotPrefix) -> dict[str, str]:
    return {"namespace": prefix.namespace.hex(), "key": prefix.key.hex()}


def _json(value: Any) -> Answer:
    return Answer("application/json", json.dumps(value, separators=(",", ":"), allow_nan=False).encode())
