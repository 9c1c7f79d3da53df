"""The cluster demo's route: three nodes, each a sidecar and an engine, and a Redis that tells them of each other.

    all up                  ->  cold_1 -> peer_2 -> peer_3 -> other_1
    kill -9 of node 1       ->  lost_2 -> survivor_3
    kill -9 of Redis        ->  alone_1 -> no_redis_2
    Redis started again     ->  healed_3

One case runs at a time. Without a Redis the nodes have a list of each other, and the last three cases are left out.
"""

import contextlib
import secrets
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from kvstore.core.errors import KVStoreError
from kvstore.demo.cluster_outcome import BLOCK_TOKENS, CASES, COMPUTED, DIRECTORY_CASES, Case, ClusterRow
from kvstore.demo.engines import Engines
from kvstore.demo.node import POLL_S, Node
from kvstore.demo.options import DemoOptions
from kvstore.demo.outcome import Answer, compare
from kvstore.demo.processes import Engine
from kvstore.demo.progress import Progress
from kvstore.demo.redis_server import RedisServer, why_not
from kvstore.proto import kvstore_pb2 as pb

NUM_NODES = 3

KNOWN_DEADLINE_S = 15.0
"""For a node to hear of what another has: a turn of the directory, 0.2 s; after its server was killed up to 2 s more."""

SETTLE_DEADLINE_S = 5.0
"""For a load's end to be told to the sidecar, after the engine's first token."""

_MEETING_DOCUMENT, _MEETING_TOKENS = 3, 200
"""Of no case."""

_LOAD_ENDED = frozenset({"loaded", "partly", "failed", "cancelled", "recompute"})


@dataclass(frozen=True, slots=True)
class ClusterResult:
    """Rows in order, the cases that there should be, and why there was no Redis, if there was none."""

    rows: tuple[ClusterRow, ...]
    cases: tuple[Case, ...]
    no_redis: str


class NotShared(KVStoreError):
    """A node did not hear in time of what another has. Fields: node."""

    code = "NotShared"


def run_cluster_demo(options: DemoOptions, progress: Progress) -> ClusterResult:
    """Run all cases. Raises KVStoreError when a process fails; leaves no process, socket or folder behind in any case."""
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-demo-", ignore_cleanup_errors=True) as run_dir,
        contextlib.closing(_Run(options, Path(run_dir), progress)) as run,
    ):
        return run.all_cases()


class _Run:
    """One run's processes. `close` ends them."""

    def __init__(self, options: DemoOptions, run_dir: Path, progress: Progress) -> None:
        self._progress = progress
        self._logs = options.log_dir if options.log_dir is not None else run_dir
        self._no_redis = why_not()
        self._redis = None if self._no_redis else RedisServer(run_dir, self._logs)
        self._nodes = self._make_nodes(options, run_dir)
        self._engines = Engines(options, self._logs, progress)
        self._started: list[Engine] = []
        self._rows: list[ClusterRow] = []
        self._killed = ""

    def all_cases(self) -> ClusterResult:
        """See the module's docstring."""
        self._logs.mkdir(parents=True, exist_ok=True)
        self._start()
        cold, *others = CASES
        self._run(cold)
        for case in others[:2]:
            self._run_when_known(case)
        other, lost, survivor = others[2:]
        self._run(other)
        self._wait_until_known(lost.engine - 1, self._last(lost.document))
        with self._progress.step("kill -9 of node 1's sidecar"):
            self._nodes[0].kill()
            self._killed = "node-1"
        self._run(lost)
        self._run_when_known(survivor)
        if self._redis is not None:
            self._lose_redis(self._redis)
        cases = CASES if self._redis is None else CASES + DIRECTORY_CASES
        return ClusterResult(tuple(self._rows), cases, self._no_redis)

    def close(self) -> None:
        """End every process, the directory server last."""
        self._engines.close()
        for node in self._nodes:
            node.close()
        if self._redis is not None:
            self._redis.close()

    def _make_nodes(self, options: DemoOptions, run_dir: Path) -> list[Node]:
        secret = run_dir / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32))
        addresses = [f"127.0.0.1:{port}" for port in _free_ports(NUM_NODES)]
        if self._redis is not None:
            others = ["--directory", self._redis.url]
        else:
            others = [word for address in addresses for word in ("--peers", address)]
        return [
            Node(
                f"node{number}",
                run_dir,
                self._logs,
                options.arena,
                *("--node-id", f"node-{number}", "--grpc-tcp", address, "--peer-secret-file", str(secret), *others),
            )
            for number, address in enumerate(addresses, 1)
        ]

    def _start(self) -> None:
        if self._redis is None:
            self._progress.note(f"no Redis: {self._no_redis}; the nodes have a list of each other")
        else:
            with self._progress.step("starting Redis"):
                self._redis.start()
        with self._progress.step(f"starting {NUM_NODES} sidecars"):
            for node in self._nodes:
                node.spawn()
            for node in self._nodes:
                node.wait_ready()
        with self._progress.step(f"loading the model in {NUM_NODES} engine processes, one at each sidecar"):
            self._started = self._engines.start(
                {str(number): node.socket for number, node in enumerate(self._nodes, 1)}, learn=True
            )
        first = self._meet(0)
        for other in (1, 2):
            self._wait_until_known(other, first)
            self._meet(other)

    def _meet(self, at: int) -> Answer:
        """One short prompt, the same on all nodes, before anything is timed: connections are made at the first fetch."""
        text = f"engine {at + 1}, a short prompt that all get"
        return self._engines.ask(
            self._started[at], "before", text, document=_MEETING_DOCUMENT, prompt_tokens=_MEETING_TOKENS
        )

    def _lose_redis(self, redis: RedisServer) -> None:
        alone, down, healed = DIRECTORY_CASES
        with self._progress.step("kill -9 of Redis"):
            redis.kill()
        self._run(alone)
        self._run(down)
        with self._progress.step("starting Redis again, empty, and waiting for node 3 to hear of node 2's blocks"):
            redis.start()
            self._wait_until_known(healed.engine - 1, self._last(healed.document))
        self._run(healed)

    def _run_when_known(self, case: Case) -> None:
        self._wait_until_known(case.engine - 1, self._last(case.document))
        self._run(case)

    def _run(self, case: Case) -> None:
        node = self._nodes[case.engine - 1]
        has_node = case.name != "alone_1"
        before = _moved(node.stats()) if has_node else (0, 0)
        answer = self._engines.ask(self._started[case.engine - 1], case.name, case.text, document=case.document)
        plan, after = (self._settle(node), _moved(node.stats())) if has_node else (None, (0, 0))
        computed = self._computed(case) or answer
        self._rows.append(
            ClusterRow(
                case=case,
                answer=answer,
                tiers=tuple((tier.tier, tier.num_blocks) for tier in plan.tiers) if plan else (),
                outcome=plan.outcome if plan else "",
                words=plan.words if plan else "",
                peer_blocks=after[0] - before[0],
                failed_blocks=after[1] - before[1],
                sameness=compare(computed, answer),
            )
        )

    def _computed(self, case: Case) -> Answer | None:
        """The first answer about the same document, which was computed."""
        of_document = (row for row in self._rows if row.case.document == case.document)
        return next((row.answer for row in of_document if row.case.source == COMPUTED), None)

    def _settle(self, node: Node) -> pb.PlanRecord | None:
        """The newest plan, when all that its request moved has been told. Past the deadline we go on: it shows in the row."""
        node.wait_for_saves()
        until_s = time.monotonic() + SETTLE_DEADLINE_S
        while True:
            plan = next(iter(node.client.explain(last=1)), None)
            if plan is None or plan.outcome in _LOAD_ENDED or time.monotonic() > until_s:
                return plan
            time.sleep(POLL_S)

    def _wait_until_known(self, at: int, answer: Answer) -> None:
        """Until that node has heard of this prompt's blocks at another. Raises NotShared."""
        node = self._nodes[at]
        namespace, keys = bytes.fromhex(answer.namespace), bytes.fromhex(answer.keys)
        until_s = time.monotonic() + KNOWN_DEADLINE_S
        while not any(self._has_all(holding, answer) for holding in node.client.locate(namespace, keys)):
            if time.monotonic() > until_s:
                raise NotShared(
                    f"{node.name} did not hear within {KNOWN_DEADLINE_S:.0f} s of blocks that another node has",
                    node=node.name,
                )
            time.sleep(POLL_S)

    def _has_all(self, holding: pb.NodeHolding, answer: Answer) -> bool:
        """Whether this is a living node with all full blocks of the prompt."""
        return holding.node_id != self._killed and holding.num_blocks == answer.prompt_tokens // BLOCK_TOKENS

    def _last(self, document: int) -> Answer:
        return next(row.answer for row in reversed(self._rows) if row.case.document == document)


def _moved(stats: pb.StatsReply) -> tuple[int, int]:
    """Blocks that came from other nodes, and blocks that were asked for and did not."""
    failed = [count for name, count in stats.counters.items() if name.startswith("failed_fetches_")]
    return stats.counters["fetched_blocks_total"], sum(failed)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
