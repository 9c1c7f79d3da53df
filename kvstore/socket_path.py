"""The sidecar's claim to a socket path, without a race between two that start at once.

<path>         the local socket           a lock on <path>.lock says that its owner lives; the kernel drops it with the
<path>.grpc    gRPC                       process, however that ends. So a file without a lock behind it is stale.
<path>.lock
"""

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.core.errors import ConfigError

_PROBE_DEADLINE_S = 1.0
_LOCK_ATTEMPTS = 100  # each lost to another sidecar that ended just then


class SocketPath:
    """Holds the claim from `claim` until `release`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.grpc_path = path + ".grpc"
        self._lock_path = path + ".lock"
        self._lock_fd = -1

    def claim(self) -> None:
        """Lock and remove what a dead sidecar left. Raises ConfigError when a live one, or anything else, is there."""
        self._lock_fd = self._lock()
        try:
            for path in (self.path, self.grpc_path):
                _remove_stale(path)
        except ConfigError:
            self._unlock()
            raise

    def bind(self) -> socket.socket:
        """A listening socket at `path`, for its owner only."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            with private_files():
                listener.bind(self.path)
            listener.listen(socket.SOMAXCONN)
        except OSError as err:
            listener.close()
            raise _refused(self.path, err.strerror or str(err)) from err
        return listener

    def release(self) -> None:
        """Remove our files and let go. Idempotent."""
        if self._lock_fd < 0:
            return
        for path in (self.path, self.grpc_path):
            Path(path).unlink(missing_ok=True)
        self._unlock()

    def _unlock(self) -> None:
        Path(self._lock_path).unlink(missing_ok=True)
        os.close(self._lock_fd)
        self._lock_fd = -1

    def _lock(self) -> int:
        for _ in range(_LOCK_ATTEMPTS):
            try:
                fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as err:
                raise _refused(self.path, f"cannot create {self._lock_path}: {err.strerror}") from err
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as err:
                os.close(fd)
                raise _refused(self.path, "a running sidecar has it; stop that one or choose another path") from err
            if _is_file(fd, self._lock_path):
                return fd
            os.close(fd)  # its owner removed the file between our open and our lock
        raise _refused(self.path, f"{self._lock_path} keeps changing")


@contextmanager
def private_files() -> Iterator[None]:
    """Files created meanwhile, sockets too, are for their owner only. Process-wide: no other thread creates any then."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def _remove_stale(path: str) -> None:
    try:
        mode = Path(path).lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as err:
        raise _refused(path, err.strerror or str(err)) from err
    if not stat.S_ISSOCK(mode):
        raise _refused(path, "a file that is no socket is there; remove it or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.settimeout(_PROBE_DEADLINE_S)
        outcome = probe.connect_ex(path)
    if outcome != errno.ECONNREFUSED:
        raise _refused(path, "somebody else serves it; choose another path")
    Path(path).unlink(missing_ok=True)


def _is_file(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), Path(path).stat())
    except FileNotFoundError:
        return False


def _refused(path: str, reason: str) -> ConfigError:
    return ConfigError(f"socket: {path} cannot be used: {reason}", field="socket", value=path)
