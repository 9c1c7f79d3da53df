"""What a sidecar's spans say of leases, reads of drives and fetches from other nodes, whatever comes in between."""

import numpy as np
import pytest
from recording_tracer import ABOVE, RecordingTracer

from kvstore.core.blocks import SlotArrays
from kvstore.core.limits import LOAD_SETTLE_S
from kvstore.core.loans import Fetch, FetchDone, LoanProblem
from kvstore.core.moves import DRIVE_SHIFT, BlockRecord, Move, MoveDone, MoveProblem, Urgency
from kvstore.core.plans import ReadGrant
from kvstore.core.traces import read_traceparent
from kvstore.request_traces import RequestTraces

NBYTES = 4096


@pytest.fixture
def tracer() -> RecordingTracer:
    return RecordingTracer()


@pytest.fixture
def traces(tracer: RecordingTracer) -> RequestTraces:
    return RequestTraces(tracer)


def grant(lease_id: int, ready: bytes, first: int = 0) -> ReadGrant:
    """Of as many blocks, in slots from `first` on."""
    offsets = np.arange(first, first + len(ready), dtype=np.uint64) * NBYTES
    return ReadGrant(lease_id, 9.0, len(ready), SlotArrays(offsets, np.ones(len(ready), np.uint64)), NBYTES, ready)


def move(move_id: int, slot: int, *, drive: int = 0, urgency: Urgency = Urgency.READ) -> Move:
    record = BlockRecord(b"n" * 16, b"k" * 16, b"", drive << DRIVE_SHIFT | 512, NBYTES, 1, 0, 0, 0)
    return Move(move_id, urgency, slot * NBYTES, record)


def lease(traces: RequestTraces, given: ReadGrant, *, now_s: float = 1.0, traceparent: str = ABOVE) -> None:
    traces.leased("kvstore.fetch", traceparent, given, {"kvstore.tenant": "t"}, since_s=now_s, now_s=now_s)


def test_reads_of_each_drive_are_one_span_below_the_lease(traces: RequestTraces, tracer: RecordingTracer) -> None:
    lease(traces, grant(1, b"\1\0\0\0"))
    traces.ordered([move(1, 1), move(2, 2, drive=1), move(3, 3), move(4, 9, urgency=Urgency.WRITE)], 1.0)
    traces.moved([MoveDone(1), MoveDone(2), MoveDone(4)], 2.0)
    assert tracer.named("kvstore.read") == []
    traces.moved([MoveDone(3, problem=MoveProblem.CHECKSUM)], 3.0)
    traces.released(1, "partly", 3)

    (fetch,) = tracer.named("kvstore.fetch")
    first, second = tracer.named("kvstore.read")
    assert fetch.above == ABOVE
    assert first.above == second.above == fetch.traceparent
    assert (first.at_s, first.end_s, second.at_s, second.end_s) == (1.0, 3.0, 1.0, 2.0)
    assert first.attributes == {
        "kvstore.tier": "nvme",
        "kvstore.drive": 0,
        "kvstore.blocks": 1,
        "kvstore.bytes": NBYTES,
        "kvstore.failed.checksum": 1,
    }
    assert (second.attributes["kvstore.drive"], second.attributes["kvstore.blocks"]) == (1, 1)
    assert fetch.attributes == {
        "kvstore.tenant": "t",
        "kvstore.blocks_granted": 4,
        "kvstore.blocks_in_ram": 1,
        "kvstore.outcome": "partly",
        "kvstore.blocks_loaded": 3,
    }


def test_a_read_that_a_prefetch_began_is_seen_from_the_lease_on(traces: RequestTraces, tracer: RecordingTracer) -> None:
    traces.ordered([move(1, 0, urgency=Urgency.PREFETCH)], 0.5)
    lease(traces, grant(1, b"\0"))
    lease(traces, grant(2, b"\0"))  # another request waits for the same block
    traces.moved([MoveDone(1)], 2.0)

    reads = tracer.named("kvstore.read")
    assert [(each.at_s, each.end_s) for each in reads] == [(1.0, 2.0)] * 2
    assert {each.above for each in reads} == {each.traceparent for each in tracer.named("kvstore.fetch")}


def test_a_lease_that_ends_before_its_reads_tells_what_came(traces: RequestTraces, tracer: RecordingTracer) -> None:
    lease(traces, grant(1, b"\0\0"))
    traces.ordered([move(1, 0), move(2, 1)], 1.0)
    traces.moved([MoveDone(1)], 1.5)
    traces.released(1, "cancelled", 0)
    traces.moved([MoveDone(2, problem=MoveProblem.CANCELLED)], 2.0)

    (read,) = tracer.named("kvstore.read")
    assert (read.attributes["kvstore.blocks"], read.end_s) == (1, 1.5)
    assert all(span.ended for span in tracer.spans)
    assert not traces._waiting
    assert not traces._moves


def test_a_fetch_carries_the_context_of_its_span_to_the_other_node(
    traces: RequestTraces, tracer: RecordingTracer
) -> None:
    lease(traces, grant(1, b"\1\0\0"))
    mine = Fetch(1, "owner", b"n" * 16, (b"a", b"b", b"c"), 1, (NBYTES, 2 * NBYTES), NBYTES, 1.0)
    others = Fetch(2, "owner", b"n" * 16, (b"d",), 0, (77 * NBYTES,), NBYTES, 1.0)

    sent, untouched = traces.fetching([mine, others], 1.1)

    (borrow,) = tracer.named("kvstore.borrow")
    assert sent == mine._replace(traceparent=borrow.traceparent)
    assert untouched == others
    assert (borrow.above, borrow.kind) == (tracer.named("kvstore.fetch")[0].traceparent, "client")
    traces.fetched([FetchDone(1, 0), FetchDone(2, 0)], 1.5)
    assert not borrow.ended
    traces.fetched([FetchDone(1, 1, LoanProblem.TIMEOUT, settled=False)], 2.0)
    traces.fetched([FetchDone(1, 1, LoanProblem.TIMEOUT)], 2.5)  # its second end
    assert borrow.end_s == 2.0
    assert borrow.attributes == {
        "kvstore.tier": "peer",
        "kvstore.node": "owner",
        "kvstore.blocks": 1,
        "kvstore.bytes": NBYTES,
        "kvstore.failed.timeout": 1,
    }


def test_what_another_holder_is_asked_for_then_is_another_span(traces: RequestTraces, tracer: RecordingTracer) -> None:
    lease(traces, grant(1, b"\0"))
    fetch = Fetch(1, "dead", b"n" * 16, (b"a",), 0, (0,), NBYTES, 1.0)
    traces.fetching([fetch], 1.0)
    traces.fetched([FetchDone(1, 0, LoanProblem.UNREACHABLE)], 1.2)
    traces.fetching([fetch._replace(fetch_id=2, node_id="alive")], 1.2)
    traces.fetched([FetchDone(2, 0)], 1.4)

    assert [(each.attributes["kvstore.node"], each.attributes["kvstore.blocks"]) for each in tracer.spans[1:]] == [
        ("dead", 0),
        ("alive", 1),
    ]
    assert not traces._waiting


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "nonsense",
        f"00-{'A' * 32}-{'b' * 16}-01",
        f"00-{'0' * 32}-{'b' * 16}-01",
        f"00-{'a' * 32}-{'0' * 16}-01",
        f"ff{ABOVE[2:]}",
        ABOVE[:-1],
        f"{ABOVE}-more",
        f"{ABOVE}\n",
    ],
)
def test_what_is_no_context_makes_no_span(traces: RequestTraces, tracer: RecordingTracer, traceparent: str) -> None:
    assert read_traceparent(ABOVE) == ABOVE
    assert read_traceparent(traceparent) == ""
    lease(traces, grant(1, b"\0"), traceparent=traceparent)
    traces.matched(traceparent, 3, None, 1.0)
    traces.released(1, "loaded", 1)

    assert tracer.spans == []


def test_what_the_sampler_declines_has_nothing_below_it() -> None:
    tracer = RecordingTracer(samples=False)
    traces = RequestTraces(tracer)
    lease(traces, grant(1, b"\0"))
    traces.ordered([move(1, 0)], 1.0)
    traces.fetching([Fetch(1, "n", b"n" * 16, (b"a",), 0, (0,), NBYTES, 1.0)], 1.0)
    traces.moved([MoveDone(1)], 2.0)

    assert [span.name for span in tracer.spans] == ["kvstore.fetch"]
    assert not traces._leases


def test_nothing_granted_and_never_released_end_too(traces: RequestTraces, tracer: RecordingTracer) -> None:
    lease(traces, grant(0, b""))
    lease(traces, grant(1, b"\0"))
    lease(traces, grant(1, b"\0"))  # the same call again
    lease(traces, grant(2, b"\1", first=5), now_s=1.0 + LOAD_SETTLE_S)

    assert [span.attributes.get("kvstore.outcome") for span in tracer.spans] == ["not granted", "unknown", None]
    assert list(traces._leases) == [2]
    assert not traces._waiting
