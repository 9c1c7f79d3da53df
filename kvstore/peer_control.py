"""Control calls to another node: Hello once, then Lend, Release, Digest; each within its deadline. Import it
late: grpc costs 60 ms and 15 MB."""

import threading
import time
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from kvstore.core.errors import KVStoreError, PeerUnavailable, RemoteProtocolError, error_from_wire
from kvstore.core.limits import MAX_FRAME_BYTES
from kvstore.peer_identity import Identity, proof
from kvstore.proto import kvstore_pb2 as pb

_SERVICE = "/kvstore.v1.KVStore/"
_SESSION_METADATA = "kvstore-session"
_ERROR_METADATA = "kvstore-error-bin"
_PROTOCOL_VERSION = 1
_MAX_TOKEN_BYTES = 256
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),  # the default, 1 s growing to 120, is longer than a restart takes
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_AWAY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})

Reply = TypeVar("Reply", bound=Message)


class PeerControl:
    """Calls to the node at `address`. Any thread; connects when there is something to say. Raises PeerUnavailable when the node
    does not answer in time, and what it answers as an error."""

    def __init__(self, address: str, identity: Identity) -> None:
        self.address = address
        self._identity = identity
        self._lock = threading.Lock()
        self._channel: Any = None
        self._token = ""

    def lend(self, request: pb.LendRequest, deadline_s: float) -> pb.LendReply:
        """Ask for a loan."""
        return self._call("Lend", request, pb.LendReply, deadline_s)

    def prefetch(self, request: pb.PrefetchRequest, deadline_s: float) -> pb.PrefetchReply:
        """Invite it to fetch what others have."""
        return self._call("Prefetch", request, pb.PrefetchReply, deadline_s)

    def release(self, request: pb.ReleaseRequest, deadline_s: float) -> pb.ReleaseReply:
        """Give one back."""
        return self._call("Release", request, pb.ReleaseReply, deadline_s)

    def digest(self, body: bytes, deadline_s: float) -> bytes:
        """A question of transport/static_directory.py."""
        return self._call("Digest", pb.DigestRequest(body=body), pb.DigestReply, deadline_s).body

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()
            self._channel, self._token = None, ""

    def _call(self, verb: str, request: Message, reply_class: type[Reply], deadline_s: float) -> Reply:
        until_s = time.monotonic() + deadline_s
        channel, token = self._session(until_s)
        try:
            return self._send(channel, verb, request, reply_class, until_s, token)
        except RemoteProtocolError as err:
            if err.fields.get("field") != _SESSION_METADATA:
                raise
            if self._token == token:  # it was restarted, or forgot us: introduce ourselves anew, once
                self._token = ""
            channel, token = self._session(until_s)
            return self._send(channel, verb, request, reply_class, until_s, token)

    def _session(self, until_s: float) -> tuple[Any, str]:
        if not self._lock.acquire(timeout=max(0.0, until_s - time.monotonic())):
            raise PeerUnavailable(f"{self.address}: another call still waits for its Hello", peer=self.address)
        try:
            if self._channel is None:
                make = self._identity.credentials
                self._channel = (
                    grpc.insecure_channel(self.address, _OPTIONS)
                    if make is None
                    else grpc.secure_channel(self.address, make(), _OPTIONS)
                )
            if not self._token:
                us = self._identity
                hello = pb.HelloRequest(
                    protocol_version=_PROTOCOL_VERSION,
                    instance=us.instance,
                    role=pb.PEER,
                    node_id=us.node_id,
                    proof=proof(us.secret, us.node_id, us.instance),
                )
                reply = self._send(self._channel, "Hello", hello, pb.HelloReply, until_s, "")
                self._token = _checked(reply.session_token)
            return self._channel, self._token
        finally:
            self._lock.release()

    def _send(  # noqa: PLR0917 - a private call
        self, channel: Any, verb: str, request: Message, reply_class: type[Reply], until_s: float, token: str
    ) -> Reply:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise PeerUnavailable(f"{self.address}: no time left for {verb}", peer=self.address)
        try:
            body = channel.unary_unary(_SERVICE + verb)(
                request.SerializeToString(),
                timeout=left_s,
                metadata=((_SESSION_METADATA, token),) if token else (),
                wait_for_ready=False,
            )
            return reply_class.FromString(body)
        except grpc.RpcError as err:
            raise self._error(err, left_s) from err
        except ValueError as err:  # what grpcio raises for a channel that was closed meanwhile
            raise PeerUnavailable(f"{self.address}: {err}", peer=self.address) from err
        except DecodeError as err:
            raise RemoteProtocolError(f"body: no {reply_class.__name__}: {err}", field="body", value=verb) from err

    def _error(self, err: Any, deadline_s: float) -> KVStoreError:
        for name, value in err.trailing_metadata() or ():
            if name == _ERROR_METADATA:
                try:
                    reply = pb.ErrorReply.FromString(value)
                except DecodeError:
                    break
                return error_from_wire(reply.code, reply.message, dict(reply.fields))
        if err.code() in _AWAY:
            return PeerUnavailable(f"{self.address}: {err.details()}", peer=self.address, deadline_s=deadline_s)
        return RemoteProtocolError(f"{self.address}: {err.details()}", field="grpc", value=str(err.code()))


def _checked(token: bytes) -> str:
    """A token that can be sent back as metadata."""
    if not (0 < len(token) <= _MAX_TOKEN_BYTES and all(0x21 <= byte <= 0x7E for byte in token)):
        raise RemoteProtocolError(
            f"session_token: {token[:64]!r} is not right; expected 1 to {_MAX_TOKEN_BYTES} visible ASCII characters",
            field="session_token",
            value=token[:64].hex(),
        )
    return token.decode("ascii")
