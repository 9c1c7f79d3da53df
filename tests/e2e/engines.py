"""Included engines on a tiny model, connected to a real sidecar, whose copies a test can watch, hold up and break."""

import contextlib
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tiny_llama import random_prompt, random_tensors, same_tokens, write_gguf

from kvstore.client import Client
from kvstore.core.clock import MonotonicClock
from kvstore.core.keys import KVSpec
from kvstore.engine_connector.engine.llm import LLM, RequestOutput
from kvstore.engine_connector.engine.sampler import SamplingParams
from kvstore.engine_connector.protocol import Connector, FetchPolicy, HandOver, LayeredPages, Pages
from kvstore.engine_connector.scheduler_side import StoreSchedulerSide
from kvstore.engine_connector.session import StoreSession
from kvstore.engine_connector.worker_side import StoreWorkerSide
from kvstore.proto import kvstore_pb2 as pb

BLOCK = 4
SMALL: dict[str, Any] = {"num_pages": 128, "block_tokens": BLOCK, "chunk_tokens": 32, "num_threads": 1}
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
PATIENT_S = 5.0  # a call's deadline on a busy machine, where the store is expected to answer

Hook = Callable[[str, int], None]


@dataclass
class WatchedPages:
    """The engine's pages; `before` is called on the copying thread with "in" or "out" and the number of the copy."""

    pages: Pages
    before: Hook
    num_copies: dict[str, int] = field(default_factory=lambda: {"in": 0, "out": 0})

    @property
    def num_pages(self) -> int:
        return self.pages.num_pages

    @property
    def page_nbytes(self) -> int:
        return self.pages.page_nbytes

    def copy_in(self, block_id: int, block: np.ndarray) -> None:
        self._count("in")
        self.pages.copy_in(block_id, block)

    def copy_out(self, block_id: int, block: np.ndarray) -> None:
        self._count("out")
        self.pages.copy_out(block_id, block)

    @property
    def num_layers(self) -> int:
        assert isinstance(self.pages, LayeredPages)
        return self.pages.num_layers

    def copy_in_layers(self, block_id: int, block: np.ndarray, layers: range) -> None:
        assert isinstance(self.pages, LayeredPages)
        self._count("in")
        self.pages.copy_in_layers(block_id, block, layers)

    def copy_out_layers(self, block_id: int, block: np.ndarray, layers: range) -> None:
        assert isinstance(self.pages, LayeredPages)
        self._count("out")
        self.pages.copy_out_layers(block_id, block, layers)

    def _count(self, way: str) -> None:
        self.num_copies[way] += 1
        self.before(way, self.num_copies[way])


class WatchedWorker(StoreWorkerSide):
    def __init__(self, session: StoreSession, before: Hook) -> None:
        super().__init__(session)
        self._before_copy = before

    def register_pages(self, pages: Pages) -> None:
        super().register_pages(WatchedPages(pages, self._before_copy))


class Engine:
    """An LLM with a store, checked after every request and when it closes."""

    def __init__(
        self,
        model: Path,
        socket: Path,
        *,
        before: Hook,
        call_deadline_s: float,
        hand_over: HandOver | None = None,
        fetch: FetchPolicy = FetchPolicy.ALWAYS,  # so tiny a model computes sooner than anything is fetched
        slab: bool = False,
        **settings: Any,
    ) -> None:
        self._fetch = fetch
        self._slab = slab
        self._socket, self._before, self._call_deadline_s = socket, before, call_deadline_s
        self._hand_over = hand_over
        self.llm = LLM(model, connector_factory=self._connect, **(SMALL | settings))

    def _connect(self, spec: KVSpec) -> Connector:
        self.session = self._open_session(instance=uuid.uuid4().bytes, role=pb.BOTH, specs=[spec])
        self.scheduler = StoreSchedulerSide(
            self.session,
            block_tokens=BLOCK,
            clock=MonotonicClock(),
            hand_over=self._hand_over,
            fetch=self._fetch,
            uses_slab=self._slab,
        )
        return Connector(self.scheduler, WatchedWorker(self.session, self._before))

    def _open_session(self, **hello: Any) -> StoreSession:
        client = Client(
            str(self._socket),
            call_deadline_s=self._call_deadline_s,
            connect_deadline_s=PATIENT_S,
            want_slab=self._slab,
            **hello,
        )
        session = StoreSession(client, backoff_s=(0.01, 0.05))
        session.start()
        return session

    def ask(self, *prompts: list[int], params: SamplingParams = GREEDY) -> list[RequestOutput]:
        outputs = self.llm.generate(prompts, params)
        self.check()
        return outputs

    def check(self) -> None:
        """No page leaked, and the connector holds nothing for requests that have ended."""
        self.llm.check()
        self.scheduler.check()
        assert not self.llm.is_draining
        assert not self.scheduler._saves
        assert not self.scheduler._requests

    def close(self) -> None:
        self.llm.close()
        self.check()


class SplitEngine(Engine):
    """An engine whose two sides have a connection each, as in vLLM: the worker's only maps the arena."""

    def _connect(self, spec: KVSpec) -> Connector:
        instance = uuid.uuid4().bytes
        self.session = self._open_session(instance=instance, role=pb.SCHEDULER, specs=[spec], want_arena=False)
        self.worker_session = self._open_session(instance=instance, role=pb.WORKER)
        self.scheduler = StoreSchedulerSide(
            self.session,
            block_tokens=BLOCK,
            clock=MonotonicClock(),
            hand_over=self._hand_over,
            fetch=self._fetch,
            uses_slab=self._slab,
        )
        return Connector(self.scheduler, WatchedWorker(self.worker_session, self._before))

    def close(self) -> None:
        super().close()
        self.worker_session.close()


class Bench:
    """The tiny model, what the storeless engine says, and engines with the store that are closed at the end."""

    def __init__(self, folder: Path) -> None:
        self.model = write_gguf(folder / "tiny.gguf", random_tensors())
        self._off = LLM(self.model, prefix_caching=False, **SMALL)
        self._stack = contextlib.ExitStack()
        self._stack.callback(self._off.close)

    def engine(
        self,
        socket: Path,
        *,
        before: Hook = lambda way, number: None,
        call_deadline_s: float = PATIENT_S,
        made_by: type[Engine] = Engine,
        **settings: Any,
    ) -> Engine:
        engine = made_by(self.model, socket, before=before, call_deadline_s=call_deadline_s, **settings)
        self._stack.callback(engine.close)
        return engine

    def prompts(self, *lengths: int, seed: int = 0) -> list[list[int]]:
        rng = np.random.default_rng(seed)
        return [random_prompt(rng, length) for length in lengths]

    def expect_same(self, outputs: list[RequestOutput], *prompts: list[int], params: SamplingParams = GREEDY) -> None:
        """The tokens of the engine without a store (ARCHITECTURE.md, "the same tokens")."""
        for prompt, output in zip(prompts, outputs, strict=True):
            (expected,) = self._off.generate([prompt], params)
            same_tokens(expected, output)

    @contextlib.contextmanager
    def own_engines(self) -> Iterator[None]:
        """Engines opened meanwhile are closed at the end; the storeless one and the model stay."""
        outer, self._stack = self._stack, contextlib.ExitStack()
        try:
            with self._stack:
                yield
        finally:
            self._stack = outer

    def close(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def open_bench(folder: Path) -> Iterator[Bench]:
    with contextlib.closing(Bench(folder)) as bench:
        yield bench
