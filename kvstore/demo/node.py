"""A node of the demo: a sidecar, and a client that looks at it."""

import time
from pathlib import Path

from kvstore.client import Client
from kvstore.core.errors import PeerUnavailable
from kvstore.demo.processes import Sidecar
from kvstore.proto.kvstore_pb2 import TOOL, StatsReply, TierStats

START_DEADLINE_S = 30.0
"""Hello takes under a second; a loaded machine several."""

CALL_DEADLINE_S = 5.0
"""For the sidecar's figures: nothing waits for them, and engines at work may keep the sidecar off every core for a while."""

SAVE_DEADLINE_S = 10.0
"""For the last blocks of a cold prefill to reach the store; they take milliseconds."""

POLL_S = 0.02


class Node:
    """Its sidecar can be killed and started again. `close` ends it."""

    def __init__(self, name: str, run_dir: Path, logs: Path, arena: str, *options: str) -> None:
        self.name = name
        self.socket = run_dir / f"{name}.sock"
        self._run_dir = run_dir
        self._logs = logs
        self._arena = arena
        self._options = options
        self._sidecar = self._make("sidecar")
        self.client = Client(
            str(self.socket), role=TOOL, connect_deadline_s=CALL_DEADLINE_S, call_deadline_s=CALL_DEADLINE_S
        )

    def spawn(self) -> None:
        """Start it without waiting."""
        self._sidecar.start()

    def wait_ready(self) -> None:
        """Until it answers. Raises ProcessFailed."""
        until_s = time.monotonic() + START_DEADLINE_S
        while True:
            try:
                self.client.connect()
            except PeerUnavailable as err:
                if not self._sidecar.running:
                    raise self._sidecar.failure("ended at start") from err
                if time.monotonic() > until_s:
                    raise self._sidecar.failure(f"no answer within {START_DEADLINE_S:.0f} s") from err
                time.sleep(POLL_S)
            else:
                return

    def kill(self) -> None:
        """kill -9. Raises ProcessFailed when it lives on."""
        self._sidecar.kill()
        self._sidecar.stop()

    def restart(self) -> None:
        """After a kill, on the same directories, until all that was on its drives is found again. Raises ProcessFailed."""
        self._sidecar = self._make("sidecar-restarted")
        self.spawn()
        self.wait_ready()
        until_s = time.monotonic() + START_DEADLINE_S
        while any(drive.state == "recovering" for drive in self.tier("nvme").drives):
            if time.monotonic() > until_s:
                raise self._sidecar.failure(f"still recovering after {START_DEADLINE_S:.0f} s")
            time.sleep(POLL_S)

    def stats(self) -> StatsReply:
        """Its figures."""
        return self.client.stats()

    def tier(self, name: str) -> TierStats:
        """Those of one tier."""
        (tier,) = [tier for tier in self.stats().tiers if tier.name == name]
        return tier

    def wait_for_saves(self) -> None:
        """Until nothing is being written any more. Past the deadline we go on: what is missing shows in the rows."""
        until_s = time.monotonic() + SAVE_DEADLINE_S
        while self.tier("pinned").writing_bytes and time.monotonic() < until_s:
            time.sleep(POLL_S)

    def close(self) -> None:
        """End it, whether it runs or not."""
        self.client.close()
        self._sidecar.stop()

    def _make(self, log_name: str) -> Sidecar:
        log = self._logs / f"{self.name}-{log_name}.log"
        return Sidecar(self._run_dir, self.socket, self._arena, log, *self._options)
