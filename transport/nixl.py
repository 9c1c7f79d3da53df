"""NIXL (UCX inside) as far as a link needs it: register, exchange metadata, post one-sided reads, ask how they go.

No other file knows the library. It carries bytes by RDMA where there are devices, by the kernel's process_vm_readv between
processes of one host; which of them is UCX's choice, and nothing here depends on it. One thread calls everything.
"""

import importlib
import importlib.util
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import PeerUnavailable, RemoteProtocolError

Rows = NDArray[np.uint64]
"""[n, 3]: address, bytes, device (0 in host memory); or [n, 5] with stride and count: that many a row."""

Places = list[tuple[int, int, int]]
"""The same as a list of (address, bytes, device): faster when there are few."""

_MODULES = ("nixl", "nixl_cu12", "nixl_cu13")
_ERRORS = (
    "nixlBackendError",
    "nixlCancelledError",
    "nixlInvalidParamError",
    "nixlMismatchError",
    "nixlNotAllowedError",
    "nixlNotFoundError",
    "nixlNotPostedError",
    "nixlNotSupportedError",
    "nixlRemoteDisconnectError",
    "nixlRepostActiveError",
    "nixlUnknownError",
)


class TransferFailed(Exception):
    """The library says that a read cannot be posted or did not succeed: the peer is not there, or not reachable."""


def is_installed() -> bool:
    """Whether there is such a library; it is not loaded."""
    return any(importlib.util.find_spec(name) for name in _MODULES)


def load_library() -> ModuleType:
    """NIXL's module. Raises PeerUnavailable when none is installed."""
    # What a dead peer makes the library print for each read is told by the link; read once, when the library is loaded.
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise PeerUnavailable(f"rdma: none of {', '.join(_MODULES)} is installed; install kvstore-tiered[rdma]", peer="")


class Agent:
    """A node's end of the library. Its threads are off: they would poll without a pause; whoever owns this calls
    `progress` now and then."""

    def __init__(self, name: str) -> None:
        library = load_library()
        bindings = importlib.import_module(f"{library.__name__}._bindings")
        self.name = name
        self._errors: tuple[type[Exception], ...] = tuple(getattr(bindings, error) for error in _ERRORS)
        self._malformed = (bindings.nixlMismatchError, bindings.nixlInvalidParamError)
        try:
            self._agent: Any = library.nixl_agent(name, library.nixl_agent_config(enable_prog_thread=False))
        except self._errors as err:
            raise PeerUnavailable(f"rdma: the library finds no transport it can use ({err})", peer="") from err
        self._registered: list[Any] = []

    def register(self, arrays: Sequence[NDArray[Any]]) -> None:
        """Pin them for devices. They stay mapped until `close` has returned."""
        regions = [(array.ctypes.data, array.nbytes, 0, "") for array in arrays]
        try:
            self._registered.append(self._agent.register_memory(regions, "DRAM"))
        except self._errors as err:
            raise PeerUnavailable(
                f"rdma: the arena cannot be registered ({err}); is memlock limited?", peer=""
            ) from err

    def metadata(self) -> bytes:
        """What a peer's `load` takes; of all that is registered."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def load(self, metadata: bytes) -> str:
        """Know a peer; its name. Raises RemoteProtocolError when it is no metadata, or of another version; TransferFailed when
        nobody is there."""
        try:
            name: bytes = self._agent.add_remote_agent(metadata)
        except self._malformed as err:
            raise RemoteProtocolError(f"descriptor: {err}", field="descriptor", value=len(metadata)) from err
        except self._errors as err:
            raise TransferFailed(str(err)) from err
        return name.decode()

    def forget(self, name: str) -> None:
        """End the connection to that peer."""
        try:
            self._agent.remove_remote_agent(name)
        except self._errors:
            return  # not known, or gone already: what was asked for is the case

    def prepare(self, name: str, rows: Rows) -> Any:
        """Descriptors to choose from by index, of a peer or ("") of our own. Raises TransferFailed."""
        try:
            return self._agent.prep_xfer_dlist(name, rows, "DRAM")
        except self._errors as err:
            raise TransferFailed(str(err)) from err

    def read_prepared(self, local: Any, local_at: NDArray[np.int32], remote: Any, remote_at: NDArray[np.int32]) -> Any:
        """Post a read of prepared descriptors, pair by pair. The transfer is the caller's to release. Raises TransferFailed."""
        try:
            return self._post(self._agent.make_prepped_xfer("READ", local, local_at, remote, remote_at))
        except self._errors as err:
            raise TransferFailed(str(err)) from err

    def read(self, name: str, local: Rows | Places, remote: Rows | Places) -> Any:
        """Post a read of any places, pair by pair. As `read_prepared`."""
        try:
            local_descs = self._agent.get_xfer_descs(local, "DRAM")
            remote_descs = self._agent.get_xfer_descs(remote, "DRAM")
            return self._post(self._agent.initialize_xfer("READ", local_descs, remote_descs, name))
        except self._errors as err:
            raise TransferFailed(str(err)) from err

    def is_done(self, transfer: Any) -> bool:
        """Whether the bytes are there. Moves things on. Raises TransferFailed."""
        try:
            return self._is_done(self._agent.check_xfer_state(transfer))
        except self._errors as err:
            raise TransferFailed(str(err)) from err

    def release(self, transfer: Any) -> bool:
        """Give a transfer or a prepared list back, cancelled if it is under way. False when that is not possible: try again."""
        try:
            transfer.release()
        except self._errors:
            return False
        return True

    def progress(self) -> None:
        """Move on what peers have begun: a connection. Costs a microsecond."""
        self._agent.get_new_notifs()

    def close(self) -> None:
        """Unregister all, end everything."""
        for region in self._registered:
            self._agent.deregister_memory(region)
        self._registered.clear()
        self._agent = None

    def _post(self, transfer: Any) -> Any:
        try:
            self._is_done(self._agent.transfer(transfer))
        except TransferFailed:
            self.release(transfer)
            raise
        except self._errors as err:
            self.release(transfer)
            raise TransferFailed(str(err)) from err
        return transfer

    @staticmethod
    def _is_done(state: str) -> bool:
        if state not in ("DONE", "PROC"):
            raise TransferFailed(f"the transfer's state is {state}")
        return state == "DONE"
