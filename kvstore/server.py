"""The local socket: frames in, frames out, in order, and the arena's descriptors with the answer to Hello.

A connection goes through two stages, since uvloop's transports cannot pass descriptors:

    accept -> raw socket: one Hello within HELLO_DEADLINE_S -> reply + descriptors -> transport: requests until it ends
              (a task of its own)                                                     (a Protocol)
"""

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any, cast

from google.protobuf.message import Message

from kvstore.core.errors import KVStoreError, RemoteProtocolError
from kvstore.core.limits import (
    FRAME_DEADLINE_S,
    HELLO_DEADLINE_S,
    MAX_FRAMES_PER_TURN,
    MAX_SESSIONS,
    MAX_UNREAD_REPLY_BYTES,
    STOP_DEADLINE_S,
)
from kvstore.dispatcher import Dispatcher
from kvstore.proto import kvstore_pb2 as pb
from kvstore.sessions import Peer, Session, Sessions
from kvstore.socket_path import SocketPath
from kvstore.transport.frames import FROM_CLIENT, BrokenHeader, Frame, FrameDecoder, Kind, Verb, encode_frame

logger = logging.getLogger(__name__)

_SO_PEERPIDFD = 77  # asm-generic/socket.h, Linux 6.5: the peer's pidfd, without a race against reuse of its number
_UCRED = struct.Struct("iII")  # pid, uid, gid
_RECEIVE_BYTES = 64 << 10
_ACCEPT_PAUSE_S = 0.1  # after an accept that failed, most likely for lack of descriptors


class LocalServer:
    """Serves `dispatcher` on a claimed path. Loop thread only.

    `descriptors` are the arena and its generation table, `slab_descriptors` likewise where there is a slab; they stay open until
    `close` has returned.
    """

    def __init__(
        self,
        path: SocketPath,
        *,
        dispatcher: Dispatcher,
        sessions: Sessions,
        descriptors: tuple[int, int],
        slab_descriptors: tuple[int, ...] = (),
        hello_deadline_s: float = HELLO_DEADLINE_S,
        frame_deadline_s: float = FRAME_DEADLINE_S,
    ) -> None:
        self._path = path
        self._dispatcher = dispatcher
        self._sessions = sessions
        self._descriptors = descriptors
        self._slab_descriptors = slab_descriptors
        self._hello_deadline_s = hello_deadline_s
        self._frame_deadline_s = frame_deadline_s
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # the accept loop and greetings

    async def start(self) -> None:
        """Bind and accept. Raises ConfigError."""
        self._listener = self._path.bind()
        self._spawn(self._accept(self._listener))

    async def close(self) -> None:
        """Accept nobody any more; end greetings. Sessions are closed by their owner."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_DEADLINE_S)
        if self._listener is not None:
            self._listener.close()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as err:
                logger.warning("connection not accepted reason=%s", err.strerror)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if len(self._sessions) + len(self._tasks) > MAX_SESSIONS:
                logger.warning("connection refused limit=MAX_SESSIONS value=%d", MAX_SESSIONS)
                sock.close()
                continue
            self._spawn(self._greet(sock))

    async def _greet(self, sock: socket.socket) -> None:
        """Until the Hello is answered and the socket handed over, or closed."""
        connection = _Connection(self._dispatcher, self._sessions, self._frame_deadline_s)
        try:
            async with asyncio.timeout(self._hello_deadline_s):
                try:
                    answer, descriptors = self._hello(sock, await _first_frame(sock, connection.decoder), connection)
                except BrokenHeader as err:
                    answer, descriptors = _broken_answer(err, self._dispatcher), ()
                await _send(sock, answer, descriptors)
            if connection.session is not None:
                await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, sock)
        except TimeoutError:
            logger.info("connection closed reason=no Hello within %g s", self._hello_deadline_s)
        except OSError as err:
            logger.info("connection closed reason=%s", err)
        finally:
            if not connection.handed_over:
                sock.close()
                connection.end()

    def _hello(self, sock: socket.socket, frame: Frame, connection: "_Connection") -> tuple[bytes, tuple[int, ...]]:
        """The answer to the first frame, which opens the connection's session if it may."""
        try:
            _check_is_hello(frame)
            request = self._dispatcher.parse(frame.verb, frame.body)
            assert isinstance(request, pb.HelloRequest)
            with ExitStack() as not_taken:
                peer = _identify(sock, connection.close)
                if peer.pidfd is not None:
                    not_taken.callback(os.close, peer.pidfd)
                connection.session, reply = self._dispatcher.hello(request, peer)
                not_taken.pop_all()
        except KVStoreError as err:
            return _error_answer(frame, self._dispatcher.error_reply(err)), ()
        except Exception as err:  # noqa: BLE001 - outermost frame of a request: logged, counted, answered, connection closed
            return _error_answer(frame, self._dispatcher.crashed(err)), ()
        descriptors = self._descriptors if request.want_arena else ()
        return _answer(frame, reply), (*descriptors, *self._slab_descriptors) if request.want_slab else descriptors


class _Connection(asyncio.Protocol):
    """A connection from its Hello to its end. `session` is None before Hello is answered."""

    def __init__(self, dispatcher: Dispatcher, sessions: Sessions, frame_deadline_s: float) -> None:
        self.decoder = FrameDecoder(FROM_CLIENT)
        self.session: Session | None = None
        self._dispatcher = dispatcher
        self._sessions = sessions
        self._frame_deadline_s = frame_deadline_s
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None  # for the rest of a frame, or for the last answer to be read
        self._turn_waits = False
        self._closing = False

    @property
    def handed_over(self) -> bool:
        """Whether a transport owns the socket."""
        return self._transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The raw socket has become a transport; frames that came right behind Hello are waiting."""
        self._transport = transport = cast("asyncio.Transport", transport)  # uvloop's does not inherit from it
        transport.set_write_buffer_limits(high=MAX_UNREAD_REPLY_BYTES)
        if self._closing:
            transport.abort()
        else:
            self._turn()

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        self.decoder.feed(data)
        if not self._turn_waits and not self._closing:
            self._turn()

    def pause_writing(self) -> None:
        """More than MAX_UNREAD_REPLY_BYTES wait for a client that does not read."""
        self.close(f"more than {MAX_UNREAD_REPLY_BYTES} bytes of replies unread")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """The transport is gone, for whatever reason."""
        self.end()

    def close(self, reason: str) -> None:
        """End the connection now, answers that are under way included."""
        if self._closing:
            return
        logger.info("connection closed session=%s reason=%s", self.session and self.session.session_id, reason)
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    def end(self) -> None:
        """Its rights end. Idempotent."""
        self._closing = True
        self._set_deadline(None, "")
        if self.session is not None:
            self._sessions.end(self.session)

    def _turn(self) -> None:
        """Serve what is there, but not more than the turn allows."""
        assert self._transport is not None
        self._turn_waits = False
        answers: list[bytes] = []
        trusted = True
        while trusted and len(answers) < MAX_FRAMES_PER_TURN:
            try:
                frame = self.decoder.next_frame()
            except BrokenHeader as err:
                answers.append(_broken_answer(err, self._dispatcher))
                trusted = False
                break
            if frame is None:
                break
            answer, trusted = self._serve(frame)
            answers.append(answer)
        if answers:
            self._transport.write(b"".join(answers))
        if not trusted:
            self._close_after_answer()
        elif len(answers) == MAX_FRAMES_PER_TURN:
            self._turn_waits = True
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._next_turn)
        elif self.decoder.buffered_nbytes == 0:
            self._set_deadline(None, "")
        elif answers or self._deadline is None:
            self._set_deadline(self._frame_deadline_s, "half a frame and then silence")

    def _next_turn(self) -> None:
        if not self._closing:
            assert self._transport is not None
            self._transport.resume_reading()
            self._turn()

    def _serve(self, frame: Frame) -> tuple[bytes, bool]:
        """The answer, and whether the connection may go on."""
        assert self.session is not None
        try:
            request = self._dispatcher.parse(frame.verb, frame.body)
            return _answer(frame, self._dispatcher.call(self.session, frame.verb, request)), True
        except KVStoreError as err:
            return _error_answer(frame, self._dispatcher.error_reply(err)), True
        except Exception as err:  # noqa: BLE001 - outermost frame of a request: logged, counted, answered, connection closed
            return _error_answer(frame, self._dispatcher.crashed(err)), False

    def _close_after_answer(self) -> None:
        """The framing or our own state cannot be trusted: rights end now, the answer has a while to be read."""
        assert self._transport is not None
        self.end()
        self._transport.close()
        asyncio.get_running_loop().call_later(self._frame_deadline_s, self._transport.abort)

    def _set_deadline(self, seconds: float | None, reason: str) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if seconds is not None:
            self._deadline = asyncio.get_running_loop().call_later(seconds, self.close, reason)


async def _first_frame(sock: socket.socket, decoder: FrameDecoder) -> Frame:
    """Raises BrokenHeader, ConnectionResetError."""
    loop = asyncio.get_running_loop()
    while (frame := decoder.next_frame()) is None:
        chunk = await loop.sock_recv(sock, _RECEIVE_BYTES)
        if not chunk:
            raise ConnectionResetError("it ended before Hello")
        decoder.feed(chunk)
    return frame


def _check_is_hello(frame: Frame) -> None:
    if frame.verb is not Verb.HELLO:
        name = frame.verb.name
        raise RemoteProtocolError(f"verb: {name} is not right; Hello comes first", field="verb", value=name)


async def _send(sock: socket.socket, answer: bytes, descriptors: tuple[int, ...]) -> None:
    """The descriptors travel with the first byte. A new socket's buffer is empty, so that byte never waits."""
    sent = socket.send_fds(sock, [answer], descriptors) if descriptors and answer else 0
    await asyncio.get_running_loop().sock_sendall(sock, answer[sent:])


def _identify(sock: socket.socket, close: Callable[[str], None]) -> Peer:
    """Who connected. A peer in a pid namespace that we cannot see into has pid 0."""
    pid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0]
    try:
        pidfd: int | None = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pidfd = _pidfd_of(pid, sock)
    return Peer(pid, pidfd, local=True, trusted=True, close=close)


def _pidfd_of(pid: int, sock: socket.socket) -> int | None:
    """For kernels before 6.5: by number, and the connection must still be open afterwards, so that the number was not
    another process's already."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as err:
        logger.warning("process cannot be watched pid=%d reason=%s", pid, err.strerror)
        return None
    try:
        ended = not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        ended = False
    if ended:
        os.close(pidfd)
        return None
    return pidfd


def _answer(frame: Frame, reply: Message) -> bytes:
    return encode_frame(frame.verb, Kind.REPLY, frame.call_id, reply.SerializeToString())


def _error_answer(frame: Frame, reply: pb.ErrorReply) -> bytes:
    return encode_frame(frame.verb, Kind.ERROR, frame.call_id, reply.SerializeToString())


def _broken_answer(err: BrokenHeader, dispatcher: Dispatcher) -> bytes:
    """Nothing when the call id cannot be told."""
    reply = dispatcher.error_reply(err).SerializeToString()
    return encode_frame(err.verb_number, Kind.ERROR, err.call_id, reply) if err.call_id else b""
