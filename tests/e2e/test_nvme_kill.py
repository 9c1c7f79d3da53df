"""kill -9, over and over and at any moment, with two drives under load: what was durable is there and right afterwards,
nothing wrong is ever served, and nothing on the drives is damaged.

`make soak` runs 1,000 rounds; KILL_ROUNDS and KILL_SEED choose others.
"""

import contextlib
import dataclasses
import itertools
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from drive import nvme_of, stats_of
from drive_index import Entry, damage_in, entries_in, is_settled
from engine_load import Load, LoadClient
from sidecar_process import ROOT, SPEC, SidecarProcess, wait_until

from kvstore.core.keys import KVSpec
from kvstore.tiers.nvme.check import check_drive

ROUNDS = int(os.environ.get("KILL_ROUNDS", "25"))
FIRST_STARTS = max(3, ROUNDS // 16)
SEED = int(os.environ.get("KILL_SEED", "0")) or random.randrange(1, 1 << 32)
ROUND_DEADLINE_S = 20.0
SETTLE_DEADLINE_S = 60.0
"""Group commits one after the other, on a drive that others keep busy."""
NUM_CHAINS = 24
CHAIN_BLOCKS = 24

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.crash,
    pytest.mark.timeout(120 + ROUNDS * ROUND_DEADLINE_S),
]

SPECS = SPEC, dataclasses.replace(SPEC, weights="tests-wide", num_layers=3)
"""Blocks of 16 and 24 KiB: segments go from one size to the other and back."""

PLAN = ("loaded",) * 5 + ("settled",) * 2 + ("recovering", "starting", "stopping")
"""What the sidecar does when it is killed, for ten rounds; shuffled."""
JUDGED = {"loaded", "settled", "stopping"}
"""Before which everything that was durable is read."""
FLIP_CHANCE = 0.3
MAX_FLIPS = 30  # of 220 slots or so, which they take away for good


def chains_of(spec: KVSpec) -> list[list[bytes]]:
    num_tokens = CHAIN_BLOCKS * spec.block_tokens
    return [spec.hash.hash_blocks([number, *range(num_tokens - 1)]) for number in range(NUM_CHAINS)]


class KillLoop:
    """A sidecar with less RAM than drives, and less drives than blocks; two engines that want them all."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.drives = folder / "drive0", folder / "drive1"
        flags = itertools.chain.from_iterable(("--nvme", str(drive)) for drive in self.drives)
        sizes = "--segment", "256KiB", "--nvme-bytes", "2MiB"
        self.sidecar = SidecarProcess(folder / "kvstore.sock", "--no-grpc", *flags, *sizes, arena="2MiB")
        self.loads = [Load(LoadClient(self.sidecar.socket, spec, chains_of(spec)), rng.random()) for spec in SPECS]
        self.judges = [LoadClient(self.sidecar.socket, spec, chains_of(spec)) for spec in SPECS]
        self.durable: set[tuple[bytes, bytes]] = set()  # namespace and key, of usable prefixes, at the last kill
        self.rotten: dict[Path, set[int]] = {drive: set() for drive in self.drives}  # slots in which a bit was flipped
        self._rotten_names: set[tuple[bytes, bytes]] = (
            set()
        )  # of blocks that have an entry there: new, or not removed yet
        self.seen: Counter[str] = Counter()
        self._rng = rng
        self._start_s = 0.5  # how long a start takes

    def round(self, kind: str) -> None:
        """Start, do, kill, look."""
        before = self.durable
        if kind in JUDGED and self._rng.random() < FLIP_CHANCE and sum(map(len, self.rotten.values())) < MAX_FLIPS:
            self._flip()
        getattr(self, f"_kill_{kind}")()
        with contextlib.ExitStack() as stack:
            for load in self.loads:
                stack.callback(load.stop)
        self._look()
        if kind == "starting":
            assert self.durable == before, "a start that was killed changed something"

    def start(self) -> None:
        """From here on all that is on the drives can be found."""
        since_s = time.monotonic()
        self.sidecar.start()
        self._start_s = time.monotonic() - since_s
        wait_until(self._is_recovered, "recovered", SETTLE_DEADLINE_S)

    def judge(self) -> None:
        """Everything that was durable at the last kill is found, nothing else is, and every byte of it is right. In
        `durable` a chain has only its first blocks, so how many they are says which."""
        for judge in self.judges:
            judge.client.connect()
            for chain in judge.chains:
                names = [(judge.namespace, key) for key in chain]
                expected = sum(name in self.durable for name in names)
                assert judge.num_found(chain) == expected
                found = judge.get(chain)
                if rotten := self._rotten_names.intersection(names[:expected]):
                    num_before = min(map(names.index, rotten))
                    assert found["right"] >= num_before
                    assert found["right"] + found["lost"] == expected > found["right"]
                    assert judge.num_found(chain) == num_before, "a block with a flipped bit is found again"
                    self.seen["flipped bits found"] += 1
                else:
                    assert found == Counter(right=expected)
            self.seen["blocks judged"] += judge.tally["right"]
            judge.tally.clear()
            judge.client.close()

    def close(self) -> None:
        if self.sidecar._child is not None:
            self.sidecar.stop()
        for load in self.loads:
            load.stop()
            load.engine.client.close()

    def _kill_loaded(self) -> None:
        self.start()
        self.judge()
        self._load_until(self._rng.randint(2, 60))
        self.sidecar.kill()

    def _kill_settled(self) -> None:
        """With reads under way, at a moment when everything that the drives have is durable."""
        self.start()
        self.judge()
        self._load_until(self._rng.randint(4, 16))
        for load in self.loads:
            load.stop()
        wait_until(self._is_settled, "durable", SETTLE_DEADLINE_S)
        before = self._usable()
        assert len(before) > CHAIN_BLOCKS
        self._load_until(self._rng.randint(2, 20), reads_only=True)
        self.sidecar.kill()
        assert self._usable() == before, "what was durable is lost, or something came out of nowhere"

    def _kill_recovering(self) -> None:
        for load in self.loads:
            load.start()
        self.sidecar.start()
        self._spin(0.01)
        self.sidecar.kill()
        self.seen["killed before recovery was over"] += self._num_recoveries() == self.seen["recoveries"]

    def _kill_starting(self) -> None:
        self.sidecar.spawn()
        wait_for_output(self.sidecar, self._rng.uniform(0.3, 1.1) * self._start_s)
        self.sidecar.kill()

    def _kill_stopping(self) -> None:
        self.start()
        self.judge()
        self._load_until(self._rng.randint(2, 20))
        os.kill(self.sidecar.pid, signal.SIGTERM)
        self._spin(0.1)
        self.sidecar.kill()

    def _load_until(self, num_calls: int, *, reads_only: bool = False) -> None:
        """Keep the engines busy; back after so many of their calls, with some under way."""
        for load in self.loads:
            load.start(reads_only=reads_only)
        wait_until(lambda: sum(load.num_calls for load in self.loads) >= num_calls, "calls", ROUND_DEADLINE_S)
        self._spin(0.002)

    def _spin(self, longest_s: float) -> None:
        """For a moment that nobody can foresee."""
        until_s = time.monotonic() + self._rng.uniform(0, longest_s)
        while time.monotonic() < until_s:
            pass

    def _is_recovered(self) -> bool:
        return {drive.state for drive in nvme_of(stats_of(self.sidecar)).drives} == {"ready"}

    def _is_settled(self) -> bool:
        return is_settled(self.sidecar, self.drives) and not any(
            entry.start in self.rotten[drive] for drive in self.drives for entry in entries_in(drive)
        )

    def _flip(self) -> None:
        """One bit of a block that would be found. Its slot is not used again: an entry that points there is only ever the
        one whose removal was not durable yet."""
        drive = self._rng.choice(self.drives)
        usable = [entry for entry in entries_in(drive) if (entry.namespace, entry.key) in self.durable]
        if not usable:
            return
        entry = self._rng.choice(usable)
        self.rotten[drive].add(entry.start)
        self._rotten_names.add((entry.namespace, entry.key))
        with (drive / "blocks.kv").open("r+b") as file:
            file.seek(entry.start + self._rng.randrange(entry.nbytes))
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1 << self._rng.randrange(8)]))

    def _num_recoveries(self) -> int:
        return self.sidecar.log.count(" recovered blocks=")

    def _usable(self) -> set[tuple[bytes, bytes]]:
        """What lies on the drives with all blocks before it."""
        entries = {(entry.namespace, entry.key) for entry in self._entries()}
        chains = [[(judge.namespace, key) for key in chain] for judge in self.judges for chain in judge.chains]
        return {name for chain in chains for name in itertools.takewhile(entries.__contains__, chain)}

    def _entries(self) -> list[Entry]:
        return [entry for drive in self.drives for entry in entries_in(drive)]

    def _look(self) -> None:
        """After a kill: at the drives, and at what the engines were given."""
        for drive in self.drives:
            assert damage_in(drive, known=self.rotten[drive]) == []
            num_rotten = sum(entry.start in self.rotten[drive] for entry in entries_in(drive))
            report = check_drive(drive, repair=False, progress=lambda *_: None, threads=2)
            assert report.problems == ({"checksum": num_rotten} if num_rotten else {}), report.findings
        for load in self.loads:
            assert load.engine.wrong == []
        self._rotten_names = {
            (entry.namespace, entry.key)
            for drive in self.drives
            for entry in entries_in(drive)
            if entry.start in self.rotten[drive]
        }
        usable = self._usable()
        self.seen["rounds"] += 1
        self.seen["blocks that became durable"] += len(usable - self.durable)
        self.seen["blocks that left the drives"] += len(self.durable - usable)
        self.seen["entries without their prefix"] += len(self._entries()) - len(usable)
        self.seen["recoveries"] = self._num_recoveries()
        self.durable = usable


def run_check(drive: Path) -> int:
    """`kvstore check`; its exit status."""
    command = [sys.executable, "-m", "kvstore.cli.main", "check", str(drive)]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, check=False, cwd=ROOT, env=environ, timeout=60).returncode


def wait_for_output(sidecar: SidecarProcess, longest_s: float) -> None:
    assert sidecar._child is not None
    assert sidecar._child.stdout is not None
    select.select([sidecar._child.stdout], [], [], longest_s)


@contextlib.contextmanager
def kill_loop(folder: Path, rng: random.Random) -> Iterator[KillLoop]:
    folder.mkdir()
    loop = KillLoop(folder, rng)
    try:
        yield loop
    finally:
        loop.close()


def test_kill_9_over_and_over_loses_nothing_durable_and_serves_nothing_wrong(tmp_path: Path) -> None:
    print(f"KILL_SEED={SEED} KILL_ROUNDS={ROUNDS}")
    rng = random.Random(SEED)
    with kill_loop(tmp_path / "loop", rng) as loop:
        loop.start()  # how it makes its directories is the next test's subject
        loop.sidecar.kill()
        kinds: list[str] = []
        since_s = time.monotonic()
        for number in range(1, ROUNDS + 1):
            kinds = kinds or rng.sample(PLAN, len(PLAN))
            kind = kinds.pop()
            loop.round(kind)
            loop.seen[f"killed {kind}"] += 1
            if number % 50 == 0:
                print(f"{number} rounds in {time.monotonic() - since_s:.0f} s: {dict(loop.seen)}", flush=True)
        loop.start()
        loop.judge()
        assert loop.sidecar.stop() == 0
        for drive in loop.drives:
            assert run_check(drive) == 0
        served: Counter[str] = Counter()
        for load in loop.loads:
            served += load.engine.tally
        print(dict(served))

        assert "Traceback" not in loop.sidecar.log
        assert " level=ERROR" not in loop.sidecar.log
        assert served["wrong"] == 0
        assert loop.seen["blocks that became durable"] > ROUNDS
        assert loop.seen["blocks that left the drives"] > 0, "the drives were never full"
        assert loop.seen["blocks judged"] > 10 * ROUNDS
        assert loop.seen["flipped bits found"] > 0


def test_kill_9_while_it_makes_its_directory_leaves_one_that_it_can_use(tmp_path: Path) -> None:
    """At the first start on a drive, from the moment on at which its directory appears."""
    print(f"KILL_SEED={SEED}")
    rng = random.Random(SEED)
    for number in range(FIRST_STARTS):
        with kill_loop(tmp_path / f"first{number}", rng) as loop:
            loop.sidecar.spawn()
            until_s = time.monotonic() + ROUND_DEADLINE_S
            while not loop.drives[number % 2].exists():
                assert time.monotonic() < until_s, "never begun"
                time.sleep(0.0005)
            loop._spin(0.02)
            loop.sidecar.kill()

            loop.start()
            engine = loop.judges[0]
            engine.client.connect()
            assert engine.put(engine.chains[0]) == CHAIN_BLOCKS
            wait_until(loop._is_settled, "durable", SETTLE_DEADLINE_S)
            loop.sidecar.kill()
            loop._look()
            assert len(loop.durable) == CHAIN_BLOCKS

            loop.start()
            loop.judge()
