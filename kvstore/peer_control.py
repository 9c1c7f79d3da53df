"""Control calls to another node: Hello once, then Lend, Release, Digest; each within its deadline."""

import hmac
import threading
from collections.abc import Callable
from hashlib import sha256
from typing import Any, NamedTuple, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from kvstore.core.errors import KVStoreError, PeerUnavailable, RemoteProtocolError, error_from_wire
from kvstore.core.limits import MAX_FRAME_BYTES
from kvstore.proto import kvstore_pb2 as pb

_SERVICE = "/kvstore.v1.KVStore/"
_SESSION_METADATA = "kvstore-session"
_ERROR_METADATA = "kvstore-error-bin"
_PROOF_LABEL = b"kvstore/peer/1\0"
_PROTOCOL_VERSION = 1
_AWAY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})

Reply = TypeVar("Reply", bound=Message)


class Identity(NamedTuple):
    """Who we are to other nodes. `instance` is new at each start. `credentials` make a channel secure; None: it is not."""

    node_id: str
    instance: bytes
    secret: bytes
    credentials: Callable[[], Any] | None


def proof(secret: bytes, node_id: str, instance: bytes) -> bytes:
    """By which a node shows that it knows the secret of its cluster (HelloRequest.proof)."""
    return hmac.digest(secret, _PROOF_LABEL + instance + node_id.encode(), sha256) if secret else b""


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
        channel, token = self._session(deadline_s)
        try:
            return self._send(channel, verb, request, reply_class, deadline_s, token)
        except RemoteProtocolError:
            if self._token == token:  # it was restarted, or forgot us: introduce ourselves anew, once
                self._token = ""
            channel, token = self._session(deadline_s)
            return self._send(channel, verb, request, reply_class, deadline_s, token)

    def _session(self, deadline_s: float) -> tuple[Any, str]:
        with self._lock:
            if self._channel is None:
                options = (("grpc.max_receive_message_length", MAX_FRAME_BYTES),)
                make = self._identity.credentials
                self._channel = (
                    grpc.insecure_channel(self.address, options)
                    if make is None
                    else grpc.secure_channel(self.address, make(), options)
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
                reply = self._send(self._channel, "Hello", hello, pb.HelloReply, deadline_s, "")
                self._token = reply.session_token.decode("ascii", "replace")
            return self._channel, self._token

    def _send(  # noqa: PLR0917 - a private call
        self, channel: Any, verb: str, request: Message, reply_class: type[Reply], deadline_s: float, token: str
    ) -> Reply:
        call = channel.unary_unary(_SERVICE + verb)
        try:
            body = call(
                request.SerializeToString(),
                timeout=deadline_s,
                metadata=((_SESSION_METADATA, token),) if token else (),
                wait_for_ready=False,
            )
            return reply_class.FromString(body)
        except grpc.RpcError as err:
            raise self._error(err, deadline_s) from err
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
