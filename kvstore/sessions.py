"""Who is connected, and whether the processes behind a connection still live.

An *instance* is all processes of one engine. A connection's end takes its holder's rights at once, but not its memory: a
process that still runs may be in the middle of a copy. So an instance is ended, and its limbo freed, only when

    every connection has ended   and   every process is dead         (each process is watched through its pidfd)
                                 and   the drain time is over, if a process could not be watched (another pid namespace,
                                       gRPC) or had registered the arena with CUDA

An engine that closed its connections and lives on keeps its limbo until it connects again and confirms, or dies.
"""

import asyncio
import logging
import os
import select
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvstore.core.blocks import Holder
from kvstore.core.clock import Clock
from kvstore.core.errors import Overloaded, RemoteProtocolError
from kvstore.core.limits import CUDA_DRAIN_S, MAX_PROCESSES_PER_INSTANCE, MAX_SESSIONS, UNVERIFIED_DRAIN_S

logger = logging.getLogger(__name__)


class LeaseEnds(Protocol):
    """What sessions tell the store (kvstore/store.py)."""

    def end_session(self, holder: Holder, now_s: float) -> None:
        """The connection ended: its leases end now, their slots go to limbo."""
        ...

    def end_instance(self, instance: bytes, now_s: float) -> None:
        """Nobody of the instance can touch memory any more."""
        ...

    def instance_in_limbo(self, instance: bytes) -> bool:
        """Whether slots wait for the instance's word or end."""
        ...


class Peer(NamedTuple):
    """The other end of a connection, as its carrier knows it."""

    pid: int  # 0: unknown
    pidfd: int | None  # owned by whoever holds the Peer; None: the process cannot be watched
    local: bool  # descriptors can be passed
    trusted: bool  # it came over a Unix socket that only our own user can open
    close: Callable[[str], None]  # end the connection, for this reason
    verified: bool = False  # it showed a certificate of our authority


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One connection that said Hello."""

    session_id: int
    holder: Holder  # instance b"" for tools
    tenant: str
    role: int
    rank: int
    namespaces: frozenset[bytes]  # named in Hello
    has_arena: bool
    has_slab: bool
    cuda_registered: bool
    peer: Peer


@dataclass(slots=True, eq=False)
class _Process:
    pid: int
    pidfd: int
    sessions: set[Session] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Instance:
    uuid: bytes
    tenant: str
    sessions: set[Session] = field(default_factory=set)
    processes: list[_Process] = field(default_factory=list)  # alive, as far as we know
    unverified: bool = False  # at least one process could not be watched
    cuda_registered: bool = False
    drain: asyncio.TimerHandle | None = None


class Sessions:
    """All of them. Loop thread only; nothing blocks."""

    def __init__(
        self,
        store: LeaseEnds,
        *,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        unverified_drain_s: float = UNVERIFIED_DRAIN_S,
        cuda_drain_s: float = CUDA_DRAIN_S,
    ) -> None:
        self._store = store
        self._loop = loop
        self._clock = clock
        self._unverified_drain_s = unverified_drain_s
        self._cuda_drain_s = cuda_drain_s
        self._sessions: dict[int, Session] = {}
        self._instances: dict[bytes, _Instance] = {}
        self._last_session_id = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_instances(self) -> int:
        """Instances that have a connection, or limbo and no confirmed end."""
        return len(self._instances)

    def namespaces(self) -> set[bytes]:
        """Those that any session named in its Hello."""
        return set().union(*(session.namespaces for session in self._sessions.values()))

    def open(
        self,
        *,
        instance: bytes,
        tenant: str,
        role: int,
        rank: int,
        namespaces: frozenset[bytes],
        has_arena: bool,
        has_slab: bool = False,
        cuda_registered: bool,
        peer: Peer,
    ) -> Session:
        """A connection said Hello. Takes `peer.pidfd`; on an error it stays the caller's. Raises Overloaded, and
        RemoteProtocolError when the instance is known under another tenant."""
        if len(self._sessions) >= MAX_SESSIONS:
            raise Overloaded(f"sessions: {MAX_SESSIONS} are open", limit="MAX_SESSIONS", value=MAX_SESSIONS)
        known = self._instances.get(instance)
        if known is not None:
            _check_joins(known, tenant)
        self._last_session_id += 1
        session = Session(
            session_id=self._last_session_id,
            holder=Holder(instance, self._last_session_id),
            tenant=tenant,
            role=role,
            rank=rank,
            namespaces=namespaces,
            has_arena=has_arena,
            has_slab=has_slab,
            cuda_registered=cuda_registered,
            peer=peer,
        )
        self._sessions[session.session_id] = session
        if instance:
            self._join(session)
        elif peer.pidfd is not None:
            os.close(peer.pidfd)  # a tool holds nothing
        return session

    def end(self, session: Session) -> None:
        """Its connection ended. Its leases end at once; see above for its memory. Idempotent."""
        if self._sessions.pop(session.session_id, None) is None:
            return
        instance = self._instances.get(session.holder.instance)
        if instance is None:
            return
        instance.sessions.discard(session)
        for process in instance.processes:
            process.sessions.discard(session)
        self._store.end_session(session.holder, self._clock.now_s())
        self._settle(instance)

    def may_write(self, session: Session) -> bool:
        """Whether the session or another of its instance was handed the arena."""
        return any(each.has_arena for each in self._of_instance(session))

    def may_use_slab(self, session: Session) -> bool:
        """Likewise the slab."""
        return any(each.has_slab for each in self._of_instance(session))

    def close(self) -> None:
        """Stop watching; close every connection."""
        for session in list(self._sessions.values()):
            session.peer.close("the sidecar stops")
        self._sessions.clear()
        for instance in list(self._instances.values()):
            self._forget(instance)

    def check(self) -> None:
        """Every session with an instance is in it once; a watched process is alive or its end is on its way to us."""
        for uuid, instance in self._instances.items():
            assert instance.uuid == uuid
            assert all(self._sessions[session.session_id] is session for session in instance.sessions)
            watched = [session for process in instance.processes for session in process.sessions]
            assert len(set(watched)) == len(watched)
            assert instance.unverified or set(watched) == instance.sessions
            assert not (instance.sessions and instance.drain)
        assert sum(len(entry.sessions) for entry in self._instances.values()) == sum(
            1 for session in self._sessions.values() if session.holder.instance
        )

    def _of_instance(self, session: Session) -> set[Session]:
        instance = self._instances.get(session.holder.instance)
        return {session} if instance is None else instance.sessions

    def _join(self, session: Session) -> None:
        instance = self._instances.setdefault(
            session.holder.instance, _Instance(session.holder.instance, session.tenant)
        )
        if instance.drain is not None:
            instance.drain.cancel()
            instance.drain = None
        instance.sessions.add(session)
        instance.cuda_registered |= session.cuda_registered
        if session.peer.pidfd is None:
            instance.unverified = True
        else:
            self._watch(instance, session, session.peer.pid, session.peer.pidfd)

    def _watch(self, instance: _Instance, session: Session, pid: int, pidfd: int) -> None:
        """One watch for each process. pid 0 (a process in a namespace we cannot see into) is never taken for another 0."""
        for process in list(instance.processes):
            if pid and process.pid == pid:
                if not _has_ended(process.pidfd):
                    process.sessions.add(session)
                    os.close(pidfd)
                    return
                self._on_process_end(instance, process)  # its number was given to another process already
        process = _Process(pid, pidfd, {session})
        instance.processes.append(process)
        self._loop.add_reader(pidfd, self._on_process_end, instance, process)

    def _on_process_end(self, instance: _Instance, process: _Process) -> None:
        if process not in instance.processes:
            return
        logger.info("process ended pid=%d instance=%s", process.pid, instance.uuid.hex())
        self._unwatch(process)
        instance.processes.remove(process)
        for session in list(process.sessions):  # a forked child may still hold the socket open
            session.peer.close("its process ended")
            self.end(session)
        self._settle(instance)

    def _settle(self, instance: _Instance) -> None:
        """Nobody connected? Then find out whether the instance is over."""
        if instance.sessions or self._instances.get(instance.uuid) is not instance:
            return
        if not self._store.instance_in_limbo(instance.uuid):
            self._forget(instance)
        elif not instance.processes and instance.drain is None:
            drain_s = max(
                self._unverified_drain_s if instance.unverified else 0.0,
                self._cuda_drain_s if instance.cuda_registered else 0.0,
            )
            if drain_s:
                instance.drain = self._loop.call_later(drain_s, self._end_instance, instance)
            else:
                self._end_instance(instance)

    def _end_instance(self, instance: _Instance) -> None:
        assert not instance.sessions
        assert not instance.processes
        logger.info("instance ended instance=%s", instance.uuid.hex())
        self._forget(instance)
        self._store.end_instance(instance.uuid, self._clock.now_s())

    def _forget(self, instance: _Instance) -> None:
        del self._instances[instance.uuid]
        if instance.drain is not None:
            instance.drain.cancel()
        for process in instance.processes:
            self._unwatch(process)

    def _unwatch(self, process: _Process) -> None:
        self._loop.remove_reader(process.pidfd)
        os.close(process.pidfd)


def _check_joins(instance: _Instance, tenant: str) -> None:
    if instance.tenant != tenant:
        raise RemoteProtocolError(
            f"tenant: {tenant!r} given, this instance is connected for another tenant; use a new instance id",
            field="tenant",
            value=tenant,
        )
    if len(instance.processes) >= MAX_PROCESSES_PER_INSTANCE:
        raise Overloaded(
            f"processes: {MAX_PROCESSES_PER_INSTANCE} of this instance are watched",
            limit="MAX_PROCESSES_PER_INSTANCE",
            value=MAX_PROCESSES_PER_INSTANCE,
        )


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
