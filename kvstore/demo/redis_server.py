"""The directory server of the cluster's demo: a real Redis on a Unix socket, holding everything in memory only."""

import shutil
import time
from pathlib import Path

from kvstore.demo.processes import Guarded

START_DEADLINE_S = 15.0
_POLL_S = 0.02
_CALL_DEADLINE_S = 0.5


def why_not() -> str:
    """Why there can be no server here; empty: there can."""
    if shutil.which("redis-server") is None:
        return "redis-server is not installed (Debian's package redis-server)"
    try:
        import redis  # noqa: F401 - whether it is there
    except ImportError:
        return "the extra `cluster` (redis) is not installed"
    return ""


class RedisServer:
    """Can be killed, which loses all that it knew, and started again. `close` ends it."""

    def __init__(self, run_dir: Path, logs: Path) -> None:
        self._run_dir = run_dir
        self._log = logs / "redis.log"
        self._socket = run_dir / "redis.sock"
        self._process = self._make()

    @property
    def url(self) -> str:
        """For `kvstore serve --directory`."""
        return f"unix://{self._socket}"

    def start(self) -> None:
        """Until it answers. Raises ProcessFailed."""
        import redis

        self._process.start()
        until_s = time.monotonic() + START_DEADLINE_S
        client = redis.Redis.from_url(self.url, socket_timeout=_CALL_DEADLINE_S)
        with client:
            while True:
                try:
                    client.ping()
                except redis.RedisError as err:
                    if not self._process.running:
                        raise self._process.failure("ended at start") from err
                    if time.monotonic() > until_s:
                        raise self._process.failure(f"no answer within {START_DEADLINE_S:.0f} s") from err
                    time.sleep(_POLL_S)
                else:
                    return

    def kill(self) -> None:
        """kill -9. Raises ProcessFailed when it lives on."""
        self._process.kill()
        self._process.stop()
        self._socket.unlink(missing_ok=True)
        self._process = self._make()

    def close(self) -> None:
        """End it, whether it runs or not."""
        self._process.stop()

    def _make(self) -> Guarded:
        command = ["redis-server", "--port", "0", "--unixsocket", str(self._socket)]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._run_dir)]
        return Guarded("redis-server", self._run_dir, command, self._log)
