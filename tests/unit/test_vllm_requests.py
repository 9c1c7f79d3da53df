"""vLLM's requests on their way through the scheduler side: who is served, and whose pages vLLM must keep."""

import pickle
from dataclasses import dataclass, field

import pytest
from recording_tracer import ABOVE

from kvstore.engine_connector.protocol import (
    NO_PAGE,
    BlockMove,
    ConnectorMetadata,
    LoadTime,
    SaveJob,
    ScheduledRequest,
    WorkerOutput,
)
from kvstore.engine_connector.vllm_requests import TrackedRequest, VllmRequests


@dataclass
class FakeRequest:
    """A vLLM request of 4 full blocks."""

    request_id: str = "r"
    num_tokens: int = 130
    num_prompt_tokens: int = 130
    num_computed_tokens: int = 64
    block_hashes: list[bytes] = field(default_factory=lambda: [bytes([i]) * 32 for i in range(4)])
    lora_request: object = None
    resumable: bool = False
    skip_reading_prefix_cache: bool = False
    trace_headers: dict[str, str] | None = None


@dataclass
class FakeTables:
    tables: dict[str, list[int]]

    def get_block_ids(self, req_id):
        return (self.tables[req_id],)


@dataclass
class FakeCached:
    """Pages that running requests got, for each layer group."""

    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)


@dataclass
class FakeOutput:
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted_req_ids: set[str] | None = None
    kv_connector_block_state: FakeTables = field(default_factory=lambda: FakeTables({"r": [7, 8, 9, 10, 11]}))
    scheduled_cached_reqs: FakeCached = field(default_factory=FakeCached)


class FakeSide:
    """A scheduler side that matches 96 tokens and remembers what it was asked."""

    def __init__(self):
        self.pending = set()
        self.matched = []
        self.loads = []
        self.scheduled = []
        self.preempted = frozenset()
        self.finished = []
        self.saves = ()

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.matched.append(list(request.block_hashes))
        return 96

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        self.loads.append((request.request_id, block_ids, num_external_tokens))
        self.pending.add(request.request_id)

    def build_connector_meta(self, scheduled, preempted_request_ids):
        self.scheduled, self.preempted = list(scheduled), preempted_request_ids
        saves, self.saves = self.saves, ()
        return ConnectorMetadata(saves=saves)

    def update_connector_output(self, output):
        self.pending -= output.finished_loading

    def request_finished(self, request):
        self.finished.append(request.request_id)
        return request.request_id in self.pending

    def has_pending(self, request_id):
        return request_id in self.pending

    def tiers_of(self, request):
        return bytes([0, 0, 1])

    def close(self):
        pass


class FakeAdapters:
    """Knows one adapter."""

    def salt(self, lora):
        return b"known" if lora == "known" else None


@pytest.fixture
def side():
    return FakeSide()


@pytest.fixture
def requests(side):
    return VllmRequests(side, FakeAdapters(), block_tokens=32)


def test_a_scheduled_request_is_passed_on_with_its_whole_table(requests, side):
    request = FakeRequest()
    requests.add(request)

    requests.build_meta(FakeOutput({"r": 32}, {"p"}))

    assert side.scheduled == [ScheduledRequest(side.scheduled[0].request, [7, 8, 9, 10, 11], 64, 32)]
    assert side.scheduled[0].request.block_hashes == request.block_hashes
    assert side.preempted == {"p"}


@pytest.mark.parametrize("refused", [{"lora_request": "unknown"}, {"resumable": True}])
def test_a_request_whose_hashes_do_not_name_its_kv_is_left_alone(requests, side, refused):
    request = FakeRequest(**refused)
    requests.add(request)

    requests.build_meta(FakeOutput({"r": 32}))

    assert requests.match(request, 0) == 0
    assert side.matched == side.scheduled == []
    assert requests.finish("r") is False


def test_an_adapter_that_is_known_has_keys_of_its_own(requests, side):
    plain, adapted = FakeRequest("p"), FakeRequest("a", lora_request="known")
    for request in (plain, adapted):
        requests.add(request)
        requests.match(request, 0)

    assert side.matched[0] == plain.block_hashes
    assert len(side.matched[1]) == len(plain.block_hashes)
    assert not set(side.matched[1]) & set(plain.block_hashes)
    assert {len(key) for key in side.matched[1]} == {32}


def test_hits_are_counted_by_the_tier_in_which_they_lay(requests):
    request = FakeRequest()
    requests.add(request)
    requests.allocated("r", ([7, 8, 9],), requests.match(request, 0))
    output = WorkerOutput(
        finished_loading=frozenset({"r"}),
        failed_block_ids=frozenset({9}),
        finished_saving=((1, (True, True, False)),),
        load_seconds=0.5,
        load_bytes=200,
        save_seconds=0.25,
        save_bytes=300,
        load_times=(LoadTime("r", 0.75),),
    )
    requests.take(output)

    assert requests.hit_tokens("r", 96) == {"pinned": 64, "nvme": 32}
    assert requests.hit_tokens("r", 32) == {"pinned": 32}
    assert requests.hit_tokens("of another", 32) == {}
    assert requests.take_counts() == {
        "loads": 1,
        "hit_tokens_pinned": 64,
        "hit_tokens_nvme": 32,
        "load_seconds": 0.5,
        "load_bytes": 200,
        "load_wait_seconds": 0.75,
        "failed_load_blocks": 1,
        "save_seconds": 0.25,
        "save_bytes": 300,
        "saved_blocks": 2,
        "failed_save_blocks": 1,
    }
    assert requests.take_counts() == {}


def test_a_request_that_must_compute_its_prompt_is_not_matched_but_saved(requests, side):
    request = FakeRequest(skip_reading_prefix_cache=True)
    requests.add(request)

    requests.build_meta(FakeOutput({"r": 32}))

    assert requests.match(request, 0) == 0
    assert len(side.scheduled) == 1


def test_pages_under_a_save_are_held_until_it_has_ended_and_let_go_once(requests, side):
    requests.add(FakeRequest())
    side.pending.add("r")

    assert requests.finish("r") is True
    assert requests.build_meta(FakeOutput()).let_go == frozenset()
    side.pending.clear()
    assert requests.build_meta(FakeOutput()).let_go == {"r"}
    assert requests.build_meta(FakeOutput()).let_go == frozenset()


def test_pages_of_an_aborted_load_are_left_to_vllm(requests, side):
    """vLLM keeps them until finished_recving; to name the request in finished_sending too would be one too many."""
    request = FakeRequest()
    requests.add(request)
    requests.allocated("r", ([7, 8, 9],), requests.match(request, 0))

    assert requests.finish("r") is False
    requests.take(WorkerOutput(finished_loading=frozenset({"r"})))

    assert side.loads == [("r", [7, 8, 9], 96)]
    assert requests.build_meta(FakeOutput()).let_go == frozenset()
    assert side.finished == ["r"]


def test_pages_saved_after_a_load_are_held(requests, side):
    request = FakeRequest()
    requests.add(request)
    requests.allocated("r", ([7, 8, 9],), requests.match(request, 0))
    requests.take(WorkerOutput(finished_loading=frozenset({"r"})))
    side.pending.add("r")

    assert requests.finish("r") is True


def test_after_a_reset_no_key_is_one_of_before_and_live_requests_are_left_alone(requests, side):
    before, after = FakeRequest("r"), FakeRequest("new")
    requests.add(before)
    requests.reset()
    requests.add(after)

    requests.build_meta(FakeOutput({"r": 32}))

    assert requests.match(before, 0) == 0
    assert side.scheduled == []
    assert requests.match(after, 0) == 96
    (salted,) = side.matched
    assert len(set(salted)) == 4
    assert {len(key) for key in salted} == {32}
    assert not set(salted) & set(after.block_hashes)
    assert requests.finish("r") is False
    assert side.finished == ["r"]


def test_hashes_after_a_reset_follow_a_growing_request(requests, side):
    requests.reset()
    request = FakeRequest()
    requests.add(request)

    requests.match(request, 0)
    request.block_hashes.append(bytes(32))
    requests.match(request, 0)

    first, second = side.matched
    assert second[:4] == first
    assert len(second) == 5


def test_what_travels_between_the_processes_can_be_pickled():
    meta = ConnectorMetadata(preempted_request_ids=frozenset({"r"}), boot_id=b"b" * 16)
    output = WorkerOutput(finished_loading=frozenset({"r"}), finished_saving=((1, (True, False)),))

    assert pickle.loads(pickle.dumps((meta, output))) == (meta, output)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (None, ""),
        ({}, ""),
        ({"traceparent": "nonsense"}, ""),
        ({"traceparent": ABOVE, "tracestate": "a=b"}, ABOVE),
    ],
)
def test_the_trace_context_is_that_of_the_engines_http_request(headers, expected):
    assert TrackedRequest(FakeRequest(trace_headers=headers)).traceparent == expected


class GroupTables(FakeTables):
    def get_block_ids(self, req_id):
        return self.tables[req_id]


@pytest.fixture
def grouped(side):
    return VllmRequests(side, FakeAdapters(), block_tokens=32, has_windows=True)


def step(**changes):
    tables = GroupTables({"r": ([7, 8, 9], [0, 0, 5])})
    return FakeOutput(kv_connector_block_state=tables, **changes)


def test_with_layer_groups_a_request_has_a_table_for_each_and_vllms_page_0_is_none(grouped, side):
    request = FakeRequest()
    grouped.add(request)
    grouped.allocated("r", ([7, 8, 9], [0, 0, 5]), grouped.match(request, 0))
    grouped.build_meta(step(num_scheduled_tokens={"r": 32}))

    assert side.loads == [("r", [[7, 8, 9], [NO_PAGE, NO_PAGE, 5]], 96)]
    assert side.scheduled[0].block_ids == [[7, 8, 9], [NO_PAGE, NO_PAGE, 5]]


@pytest.mark.parametrize("given_to", ["a running request", "a new request"])
def test_a_save_whose_page_is_given_to_another_is_waited_for_in_that_step(grouped, side, given_to):
    """A page that left the window: vLLM does not say so, but that somebody has it now."""
    grouped.add(FakeRequest())
    side.saves = (SaveJob(1, "r", b"", (BlockMove(5, 0, 1),)), SaveJob(2, "s", b"", (BlockMove(6, 0, 1),)))
    grouped.build_meta(step(num_scheduled_tokens={"r": 32}))

    grouped.build_meta(step(scheduled_cached_reqs=FakeCached([None, ([11], [12])])))
    assert side.preempted == frozenset()

    if given_to == "a new request":
        grouped.allocated("new", ([], [5]), 0)
    others = [([], [5])] if given_to == "a running request" else []
    grouped.build_meta(step(scheduled_cached_reqs=FakeCached(others)))
    assert side.preempted == {"r"}

    grouped.build_meta(step())
    assert side.preempted == frozenset()


def test_one_layer_group_with_a_window_is_no_less_careful(grouped, side):
    grouped.add(FakeRequest())
    side.saves = (SaveJob(1, "r", b"", (BlockMove(5, 0, 1),)),)
    tables = GroupTables({"r": ([0, 0, 5],)})
    grouped.build_meta(FakeOutput(kv_connector_block_state=tables, num_scheduled_tokens={"r": 32}))
    assert side.scheduled[0].block_ids == [NO_PAGE, NO_PAGE, 5]

    grouped.build_meta(step(scheduled_cached_reqs=FakeCached([([5],)])))

    assert side.preempted == {"r"}


def test_a_save_that_was_reported_reads_no_page(grouped, side):
    grouped.add(FakeRequest())
    side.saves = (SaveJob(1, "r", b"", (BlockMove(5, 0, 1),)),)
    grouped.build_meta(step(num_scheduled_tokens={"r": 32}))
    grouped.take(WorkerOutput(finished_saving=((1, (True,)),)))

    grouped.build_meta(step(scheduled_cached_reqs=FakeCached([([], [5])])))

    assert side.preempted == frozenset()
