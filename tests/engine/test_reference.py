"""The real model gives the tokens that transformers gives, whatever the batch, the chunks, and the store's mood: combinations of
these, each with a long prompt and some short ones, on the real connector and a real sidecar. `make soak` runs all of them
(REFERENCE_CASES=all), `make test` half, in which every store meets both batches and both chunk sizes.

"The same tokens" as ARCHITECTURE.md defines it, with transformers as the reference: equal up to the first step at which
the reference's own two best logits lie closer than TIE_EPSILON. The reference computes each prompt alone and at once.
"""

import functools
import itertools
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from engines import BLOCK, PATIENT_S, Engine
from sidecar_process import SidecarProcess, running_sidecar, tool, wait_until
from tiny_llama import TIE_EPSILON

from benchmarks.reference_model import llama_of_gguf
from kvstore.client import Acquired, Client
from kvstore.core.errors import PeerUnavailable
from kvstore.core.keys import KVSpec
from kvstore.engine_connector.engine import llm as llm_module
from kvstore.engine_connector.engine.llm import LLM, RequestOutput
from kvstore.engine_connector.engine.options import RequestOptions
from kvstore.engine_connector.engine.sampler import SamplingParams
from kvstore.engine_connector.protocol import CacheOptions, Connector
from kvstore.engine_connector.session import StoreSession

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

LONG = (3000, 1500, 1000, 600)
SHORT = (
    10,
    13,
    17,
    23,
    30,
    40,
    53,
    64,
    65,
    80,
    96,
    112,
    128,
    144,
    160,
    200,
)  # 64, 65, 128: at and just over a block's end
LENGTHS = (*LONG, *SHORT)
NUM_SHORT = 7  # of a case; of all cases together some 44,000 prompt tokens are computed
MAX_TOKENS = 6
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
CHUNKED, UNCHUNKED = 256, 4096
SEED = 11
ARENA_MIB = 448
NUM_KIND_CALLS = 6  # the first prompts are looked for at once: a cut there would leave nothing to load
HOLD_S = 60.0  # until a request must have been preempted


class Case(NamedTuple):
    """`preempted` resumes by fetching when chunked, and by computing again when not."""

    store: str
    batch: int
    chunk_tokens: int

    def __str__(self) -> str:
        return f"{self.store}-batch{self.batch}-chunk{self.chunk_tokens}"


STORES = ("off", "cold", "warm", "failing", "preempted")
WAYS = list(itertools.product((1, 8), (CHUNKED, UNCHUNKED)))
CASES = [Case(store, *way) for store in STORES for way in WAYS]
FILLS = Case("cold", 8, CHUNKED)  # the run with all prompts, which leaves the store warm for others


def cases_to_run() -> list[Case]:
    if os.environ.get("REFERENCE_CASES") == "all":
        return CASES
    both = ((0, 3), (1, 2))  # each pair of ways has both batches and both chunk sizes
    return [Case(store, *WAYS[way]) for number, store in enumerate(STORES) for way in both[number % 2]]


def lengths_of(case: Case) -> tuple[int, ...]:
    """A long prompt, so that over the cases every store and every way meet each of them, and the next few short ones."""
    if case == FILLS:
        return LENGTHS
    number = CASES.index(case)
    store, way = divmod(number, len(WAYS))
    first = number * NUM_SHORT
    return (LONG[(store + way) % len(LONG)], *(SHORT[(first + i) % len(SHORT)] for i in range(NUM_SHORT)))


def test_every_store_meets_every_prompt_and_every_way_each_long_one() -> None:
    for store in STORES:
        assert {n for case in CASES if case.store == store for n in lengths_of(case)} == set(LENGTHS)
    for way in WAYS:
        assert {n for case in CASES if case[1:] == way for n in lengths_of(case)} >= set(LONG)


# --- the reference -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """The reference's tokens for one prompt, and how far its two best logits were apart at each."""

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]

    @property
    def num_certain(self) -> int:
        """Tokens before the first toss-up."""
        return next((i for i, gap in enumerate(self.gaps) if gap < TIE_EPSILON), len(self.gaps))


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def weights_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm_module, "load_model", functools.cache(llm_module.load_model))
        yield


@pytest.fixture(scope="session")
def prompts(real_model: Path) -> dict[int, list[int]]:
    """By length: pieces of the Python reference, each from a place of its own."""
    tokenizer = llm_module.load_model(real_model).tokenizer
    tokens = tokenizer.encode("\n\n".join(str(topics[name]) for name in sorted(topics)))
    starts = np.random.default_rng(SEED).integers(0, len(tokens) - max(LENGTHS), len(LENGTHS)).tolist()
    return {length: tokens[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)}


@pytest.fixture(scope="session")
def reference(real_model: Path, prompts: dict[int, list[int]]) -> dict[int, Expected]:
    """By length of the prompt; computed once."""
    model = llama_of_gguf(real_model)
    return {length: greedy(model, prompt) for length, prompt in prompts.items()}


@torch.inference_mode()
def greedy(model: Any, prompt: list[int]) -> Expected:
    tokens, gaps = [], []
    feed, cache = torch.tensor([prompt]), None
    for _ in range(MAX_TOKENS):
        result = model(feed, cache=cache, use_cache=True, logits_to_keep=1)
        best, ids = result.logits[0, -1].topk(2)
        tokens.append(int(ids[0]))
        gaps.append(float(best[0] - best[1]))
        feed, cache = ids[None, :1], result.past_key_values
    return Expected(tuple(tokens), tuple(gaps))


# --- stores that work, and one that does not ----------------------------------------------------------------------------


class FaultPlan:
    """What goes wrong, from a seed, and how often it did. Each kind has its own numbers: they are drawn on several threads."""

    CHANCES: ClassVar = {"cut before": 0.02, "cut after": 0.02, "stale grant": 0.6, "in": 0.001, "out": 0.01}

    def __init__(self, seed: int) -> None:
        self._rngs = {kind: np.random.default_rng([seed, i]) for i, kind in enumerate(self.CHANCES)}
        self.counts: Counter[str] = Counter()

    def strikes(self, kind: str) -> bool:
        strikes = bool(self._rngs[kind].random() < self.CHANCES[kind])
        self.counts[kind] += strikes
        return strikes

    def choose(self, kind: str, below: int) -> int:
        return int(self._rngs[kind].integers(below))

    def before_copy(self, way: str, number: int) -> None:
        if self.strikes(way):
            raise ValueError(f"copy {number} {way} breaks")


class FaultyClient(Client):
    """Its connection breaks, before the sidecar hears of a call or after it has answered; and blocks are gone by the time they
    are read, as if they had been evicted."""

    def __init__(self, plan: FaultPlan, path: str, **hello: Any) -> None:
        super().__init__(path, **hello)
        self._plan = plan
        self._num_calls = 0

    def _call(self, *call: Any) -> Any:
        self._num_calls += 1
        if self._num_calls <= NUM_KIND_CALLS:
            return super()._call(*call)
        before, after = self._plan.strikes("cut before"), self._plan.strikes("cut after")
        if before:
            self._cut()
        reply = super()._call(*call)
        if after:
            self._cut()
            raise PeerUnavailable(f"{self.path}: the answer got lost", peer=self.path, deadline_s=0.0)
        return reply

    def _cut(self) -> None:
        if self._socket is not None:
            self._socket.shutdown(socket.SHUT_RDWR)

    def acquire(self, *args: Any, **more: Any) -> Acquired:
        grant = super().acquire(*args, **more)
        if not self._plan.strikes("stale grant"):
            return grant
        first = self._plan.choose("stale grant", len(grant.generations))
        return grant._replace(generations=np.append(grant.generations[:first], grant.generations[first:] + 2))


class MisplacingClient(Client):
    """Every prompt gets the blocks of the one before it. In another order its own would do: keys carry their positions."""

    _others: Acquired | None = None

    def acquire(self, *args: Any, **more: Any) -> Acquired:
        grant = super().acquire(*args, **more)
        others, self._others = self._others or grant, grant
        size = len(grant.offsets)
        return grant._replace(offsets=np.resize(others.offsets, size), generations=np.resize(others.generations, size))


class StoreEngine(Engine):
    """On the real model, with pages for `batch` of the case's prompts."""

    def __init__(self, model: Path, sidecar: SidecarProcess, case: Case, **more: Any) -> None:
        self._make_client = more.pop("make_client", Client)
        settings = settings_of(case) | {"call_deadline_s": PATIENT_S, "before": lambda way, number: None} | more
        super().__init__(model, sidecar.socket, **settings)

    def _open_session(self, **hello: Any) -> StoreSession:
        client = self._make_client(
            str(self._socket), call_deadline_s=self._call_deadline_s, connect_deadline_s=PATIENT_S, **hello
        )
        session = StoreSession(client, backoff_s=(0.01, 0.05))
        session.start()
        return session

    def answer(self, prompts: list[list[int]], cache: CacheOptions | None = None) -> list[RequestOutput]:
        """What it says, once it has given all back and is closed."""
        with self.llm:
            outputs = self.llm.generate(prompts, GREEDY, options=RequestOptions(cache=cache or CacheOptions()))
            self.check()
        return outputs


class CrampedEngine(StoreEngine):
    """Whoever has ended keeps its pages until somebody was preempted: nothing is saved before."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self._preempted = threading.Event()
        super().__init__(*args, before=self._before_copy, **more)

    def _before_copy(self, way: str, number: int) -> None:
        assert way == "in" or self._preempted.wait(HOLD_S), "nobody was preempted"

    def _connect(self, spec: KVSpec) -> Connector:
        connector = super()._connect(spec)
        build = self.scheduler.build_connector_meta

        def build_and_note(scheduled: Any, preempted_request_ids: frozenset[str]) -> Any:
            if preempted_request_ids:
                self._preempted.set()
            return build(scheduled, preempted_request_ids)

        self.scheduler.build_connector_meta = build_and_note
        return connector


def num_pages(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


def settings_of(case: Case) -> dict[str, Any]:
    largest = sorted(lengths_of(case))[-case.batch :]
    return {
        "block_tokens": BLOCK,
        "max_batch": case.batch,
        "chunk_tokens": case.chunk_tokens,
        "num_threads": 2,
        "num_pages": sum(num_pages(length + MAX_TOKENS) for length in largest),
        "prefix_caching": False,
    }


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    with running_sidecar(tmp_path_factory.mktemp("sidecar"), "--no-grpc", arena=f"{ARENA_MIB}MiB") as process:
        with tool(process) as client:
            wait_until(lambda: client.stats().tiers[0].capacity_bytes == ARENA_MIB << 20, "arena faulted", 60.0)
        yield process


@pytest.fixture(scope="module")
def when_filled(real_model: Path, sidecar: SidecarProcess, prompts: dict[int, list[int]]) -> list[RequestOutput]:
    """The case FILLS: what it answered. From now on the store has all prompts."""
    engine = StoreEngine(real_model, sidecar, FILLS)
    return engine.answer([prompts[length] for length in LENGTHS])


class Run:
    """One case, and the proof that what gives it its name happened."""

    def __init__(self, case: Case, model: Path, sidecar: SidecarProcess, prompts: dict[int, list[int]]) -> None:
        self._case, self._model, self._sidecar = case, model, sidecar
        self.lengths = lengths_of(case)
        if case.store == "preempted":
            self.lengths = (self.lengths[1], self.lengths[0], *self.lengths[2:])
        self._prompts = [prompts[length] for length in self.lengths]
        self._num_loadable = sum((length - 1) // BLOCK * BLOCK for length in self.lengths)

    def off(self) -> list[RequestOutput]:
        with LLM(self._model, **settings_of(self._case)) as llm:
            outputs = llm.generate(self._prompts, GREEDY)
            llm.check()
        return outputs

    def cold(self) -> list[RequestOutput]:
        engine = StoreEngine(self._model, self._sidecar, self._case, hash_seed=str(self._case))
        outputs = engine.answer(self._prompts)

        assert sum(output.num_fetched_tokens for output in outputs) == 0
        assert self._drop(engine.llm.spec) >= self._num_loadable // BLOCK
        return outputs

    def warm(self) -> list[RequestOutput]:
        outputs = StoreEngine(self._model, self._sidecar, self._case).answer(self._prompts)

        assert sum(output.num_fetched_tokens for output in outputs) == self._num_loadable
        return outputs

    def failing(self) -> list[RequestOutput]:
        plan = FaultPlan(seed=CASES.index(self._case))
        make_client = functools.partial(FaultyClient, plan)
        engine = StoreEngine(self._model, self._sidecar, self._case, make_client=make_client, before=plan.before_copy)
        outputs = engine.answer(self._prompts)

        assert 0 < sum(output.num_fetched_tokens for output in outputs) < self._num_loadable
        assert plan.counts["stale grant"] > 0
        assert plan.counts.total() > 1, plan.counts
        return outputs

    def preempted(self) -> list[RequestOutput]:
        """The first prompt's request ends, the second, long one finds no page for what it generates."""
        kept, long = self.lengths[0] + MAX_TOKENS - 1, self.lengths[1]
        engine = CrampedEngine(
            self._model,
            self._sidecar,
            self._case,
            hash_seed=str(self._case),
            num_pages=num_pages(kept) + num_pages(long),
        )
        fetches = self._case.chunk_tokens == CHUNKED
        outputs = engine.answer(self._prompts, CacheOptions(no_read=not fetches))
        self._drop(engine.llm.spec)

        assert outputs[1].num_preemptions > 0
        assert (outputs[1].num_resumed_tokens > 0) is fetches
        assert (outputs[1].num_prefilled_tokens > 1.9 * long) is not fetches
        return outputs

    def _drop(self, spec: KVSpec) -> int:
        """The arena is for those who come after too."""
        with tool(self._sidecar) as client:
            return client.drop(spec.namespace())


@pytest.mark.parametrize("case", cases_to_run(), ids=str)
def test_greedy_tokens_are_those_of_transformers(
    case: Case,
    real_model: Path,
    sidecar: SidecarProcess,
    prompts: dict[int, list[int]],
    reference: dict[int, Expected],
    request: pytest.FixtureRequest,
) -> None:
    run = Run(case, real_model, sidecar, prompts)
    if case.store in ("warm", "failing") or case == FILLS:
        when_filled = request.getfixturevalue("when_filled")
    outputs = when_filled if case == FILLS else getattr(run, case.store)()

    compared = 0
    for length, output in zip(run.lengths, outputs, strict=True):
        certain = reference[length].num_certain
        assert output.token_ids[:certain] == reference[length].token_ids[:certain], f"prompt of {length} tokens"
        compared += certain
    assert compared > 0.8 * MAX_TOKENS * len(outputs), "too many toss-ups: the comparison shows too little"


def test_the_comparison_notices_wrong_pages(
    real_model: Path,
    sidecar: SidecarProcess,
    prompts: dict[int, list[int]],
    reference: dict[int, Expected],
    when_filled: list[RequestOutput],
) -> None:
    """A store that gives one prompt's blocks to another must not pass for the same tokens."""
    case = Case("warm", 8, CHUNKED)
    lengths = lengths_of(case)
    engine = StoreEngine(real_model, sidecar, case, make_client=MisplacingClient)
    outputs = engine.answer([prompts[length] for length in lengths])

    assert sum(output.num_fetched_tokens for output in outputs) > 100 * BLOCK
    assert any(
        output.token_ids[: reference[n].num_certain] != reference[n].token_ids[: reference[n].num_certain]
        for n, output in zip(lengths, outputs, strict=True)
    )
