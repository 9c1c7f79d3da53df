"""Frames of the TCP link as pure code: bytes in, values out, no socket (transport/LINK.md)."""

import hashlib
import hmac
import struct
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.core.blocks import Extent
from kvstore.core.errors import RemoteProtocolError
from kvstore.core.limits import MAX_LINK_REQUEST_EXTENTS, SEGMENT_BYTES
from kvstore.transport.link import LEASE_NBYTES, LinkProblem

VERSION = 1
MAGIC = b"KVL1"
ID_NBYTES = 16
NONCE_NBYTES = 32
MAC_NBYTES = 32

_HELLO = struct.Struct(f"<4sHH{ID_NBYTES}s{NONCE_NBYTES}s")
_CHALLENGE = struct.Struct(f"<4sHBB{NONCE_NBYTES}s")
_READY = struct.Struct(f"<4sB3s{MAC_NBYTES}s")
_REQUEST = struct.Struct(f"<BBHI{LEASE_NBYTES}s")
_EXTENT = struct.Struct("<QQII")
_HEAD = struct.Struct("<BBHIQ")
_TAIL = struct.Struct("<BBHI")
_DESCRIPTOR = struct.Struct(f"<4sHBBHH{ID_NBYTES}sQ")

HELLO_NBYTES, CHALLENGE_NBYTES, READY_NBYTES = _HELLO.size, _CHALLENGE.size, _READY.size
REQUEST_NBYTES, EXTENT_NBYTES = _REQUEST.size, _EXTENT.size

_REQUEST_MARK, _HEAD_MARK, _TAIL_MARK = 0x51, 0x48, 0x54  # Q, H, T
_DESCRIPTOR_MAGIC = b"KVLT"
_TLS = 1
MAX_REQUEST_ID = 0xFFFF_FFFF

OK = 0
_STATUSES = {
    LinkProblem.REFUSED: 1,
    LinkProblem.STALE: 2,
    LinkProblem.OVERLOADED: 3,
    LinkProblem.GONE: 4,
    LinkProblem.BROKEN: 5,
}
_PROBLEM_OF = {status: problem for problem, status in _STATUSES.items()}


class Descriptor(NamedTuple):
    """Where a TCP endpoint listens, and which one it is."""

    host: str
    port: int
    endpoint_id: bytes
    arena_nbytes: int
    tls: bool


class Hello(NamedTuple):
    """A reader's first frame."""

    endpoint_id: bytes
    nonce: bytes


class Challenge(NamedTuple):
    """The owner's first frame."""

    problem: LinkProblem | None
    nonce: bytes


class Ready(NamedTuple):
    """The owner's second frame."""

    problem: LinkProblem | None
    mac: bytes


class RequestHeader(NamedTuple):
    """The fixed part of a request."""

    request_id: int
    lease: bytes
    num_extents: int
    checked: bool


class Statuses(NamedTuple):
    """What an owner says of a request's extents: before their bytes (head), and for good behind them (tail)."""

    request_id: int
    problems: tuple[LinkProblem | None, ...]
    nbytes: int = 0  # head: of the bytes that follow


def encode_descriptor(descriptor: Descriptor) -> bytes:
    """The bytes that peers are introduced by."""
    host = descriptor.host.encode("ascii")
    fixed = _DESCRIPTOR.pack(
        _DESCRIPTOR_MAGIC,
        VERSION,
        _TLS if descriptor.tls else 0,
        0,
        descriptor.port,
        len(host),
        descriptor.endpoint_id,
        descriptor.arena_nbytes,
    )
    return fixed + host


def decode_descriptor(raw: bytes) -> Descriptor:
    """Raises RemoteProtocolError for what is none."""
    if len(raw) < _DESCRIPTOR.size:
        raise _broken("descriptor", len(raw), f"at least {_DESCRIPTOR.size} bytes are needed")
    magic, version, flags, zero, port, host_nbytes, endpoint_id, arena_nbytes = _DESCRIPTOR.unpack_from(raw)
    host = raw[_DESCRIPTOR.size :]
    _require(magic == _DESCRIPTOR_MAGIC, "descriptor magic", magic.hex(), f"expected {_DESCRIPTOR_MAGIC.hex()}")
    _require(version == VERSION, "descriptor version", version, f"this side speaks {VERSION}")
    _require(not flags & ~_TLS and not zero, "descriptor flags", flags | zero << 8, "known is 1 (TLS)")
    _require(port > 0, "descriptor port", port, "expected 1 to 65535")
    _require(len(host) == host_nbytes > 0, "descriptor host", len(host), f"{host_nbytes} bytes were announced")
    try:
        name = host.decode("ascii")
    except UnicodeError as err:
        raise _broken("descriptor host", host.hex(), "expected a host name or an address") from err
    return Descriptor(name, port, endpoint_id, arena_nbytes, tls=bool(flags & _TLS))


def encode_hello(hello: Hello) -> bytes:
    """HELLO_NBYTES."""
    return _HELLO.pack(MAGIC, VERSION, 0, hello.endpoint_id, hello.nonce)


def decode_hello(raw: bytes) -> Hello:
    """Raises RemoteProtocolError."""
    magic, version, flags, endpoint_id, nonce = _HELLO.unpack(raw)
    _require(magic == MAGIC, "hello magic", magic.hex(), f"expected {MAGIC.hex()}")
    _require(version == VERSION, "hello version", version, f"this side speaks {VERSION}")
    _require(flags == 0, "hello flags", flags, "zero in this version")
    return Hello(endpoint_id, nonce)


def encode_challenge(challenge: Challenge) -> bytes:
    """CHALLENGE_NBYTES."""
    return _CHALLENGE.pack(MAGIC, VERSION, _status(challenge.problem), 0, challenge.nonce)


def decode_challenge(raw: bytes) -> Challenge:
    """Raises RemoteProtocolError."""
    magic, version, status, zero, nonce = _CHALLENGE.unpack(raw)
    _require(magic == MAGIC, "challenge magic", magic.hex(), f"expected {MAGIC.hex()}")
    _require(version == VERSION, "challenge version", version, f"this side speaks {VERSION}")
    _require(zero == 0, "challenge zero", zero, "zero in this version")
    return Challenge(_problem(status), nonce)


def encode_ready(ready: Ready) -> bytes:
    """READY_NBYTES."""
    return _READY.pack(MAGIC, _status(ready.problem), bytes(3), ready.mac)


def decode_ready(raw: bytes) -> Ready:
    """Raises RemoteProtocolError."""
    magic, status, zero, mac = _READY.unpack(raw)
    _require(magic == MAGIC, "ready magic", magic.hex(), f"expected {MAGIC.hex()}")
    _require(zero == bytes(3), "ready zero", zero.hex(), "zero in this version")
    return Ready(_problem(status), mac)


def proof(secret: bytes, who: bytes, hello: bytes, challenge: bytes) -> bytes:
    """What a side (b"reader" or b"owner") shows to prove that it knows the secret: over everything said so far."""
    return hmac.digest(secret, b"kvstore/link/1 " + who + b"\0" + hello + challenge, hashlib.sha256)


def encode_request(request_id: int, lease: bytes, extents: Sequence[Extent], *, checked: bool) -> bytes:
    """A whole request. `checked`: the reader has a checksum for each of these extents."""
    assert 0 < len(extents) <= MAX_LINK_REQUEST_EXTENTS
    assert len(lease) == LEASE_NBYTES
    parts = [_REQUEST.pack(_REQUEST_MARK, checked, len(extents), request_id, lease)]
    parts += [_EXTENT.pack(offset, generation, nbytes, 0) for offset, nbytes, generation in extents]
    return b"".join(parts)


def decode_request_header(raw: bytes | memoryview) -> RequestHeader:
    """The first REQUEST_NBYTES. Raises RemoteProtocolError."""
    mark, flags, num_extents, request_id, lease = _REQUEST.unpack(raw)
    _require(mark == _REQUEST_MARK, "request mark", mark, f"expected {_REQUEST_MARK}")
    _require(flags in {0, 1}, "request flags", flags, "known is 1 (checked)")
    _require(
        0 < num_extents <= MAX_LINK_REQUEST_EXTENTS, "request count", num_extents, f"1 to {MAX_LINK_REQUEST_EXTENTS}"
    )
    return RequestHeader(request_id, lease, num_extents, checked=bool(flags))


def decode_extents(raw: bytes | memoryview) -> list[Extent]:
    """What follows: EXTENT_NBYTES each. Raises RemoteProtocolError. Offsets are any u64."""
    extents = []
    for offset, generation, nbytes, zero in _EXTENT.iter_unpack(raw):
        _require(zero == 0, "extent zero", zero, "zero in this version")
        _require(0 < nbytes <= SEGMENT_BYTES, "extent nbytes", nbytes, f"1 to {SEGMENT_BYTES}")
        extents.append(Extent(offset, nbytes, generation))
    return extents


def head_nbytes(num_extents: int) -> int:
    """Size of the head of a reply."""
    return _HEAD.size + num_extents


def tail_nbytes(num_extents: int) -> int:
    """Size of its tail."""
    return _TAIL.size + num_extents


def encode_head(statuses: Statuses) -> bytes:
    """What stands before the bytes."""
    request_id, problems, nbytes = statuses
    return _HEAD.pack(_HEAD_MARK, 0, len(problems), request_id, nbytes) + _statuses(problems)


def decode_head(raw: bytes | bytearray | memoryview, request_id: int) -> Statuses:
    """Of the reply to `request_id`; as many extents as `raw` has room for. Raises RemoteProtocolError."""
    mark, zero, count, found_id, nbytes = _HEAD.unpack_from(raw)
    _require(mark == _HEAD_MARK, "head mark", mark, f"expected {_HEAD_MARK}")
    _require(zero == 0, "head zero", zero, "zero in this version")
    _require(found_id == request_id, "head request id", found_id, f"the reply to {request_id} is due")
    _require(_HEAD.size + count == len(raw), "head count", count, f"asked for {len(raw) - _HEAD.size}")
    return Statuses(request_id, _problems(raw[_HEAD.size :]), nbytes)


def encode_tail(statuses: Statuses) -> bytes:
    """What stands behind the bytes."""
    request_id, problems, _ = statuses
    return _TAIL.pack(_TAIL_MARK, 0, len(problems), request_id) + _statuses(problems)


def decode_tail(raw: bytes | bytearray | memoryview, request_id: int) -> Statuses:
    """As `decode_head`."""
    mark, zero, count, found_id = _TAIL.unpack_from(raw)
    _require(mark == _TAIL_MARK, "tail mark", mark, f"expected {_TAIL_MARK}")
    _require(zero == 0, "tail zero", zero, "zero in this version")
    _require(found_id == request_id, "tail request id", found_id, f"the reply to {request_id} is due")
    _require(_TAIL.size + count == len(raw), "tail count", count, f"asked for {len(raw) - _TAIL.size}")
    return Statuses(request_id, _problems(raw[_TAIL.size :]))


def _statuses(problems: Sequence[LinkProblem | None]) -> bytes:
    return bytes(map(_status, problems))


def _problems(raw: bytes | bytearray | memoryview) -> tuple[LinkProblem | None, ...]:
    return tuple(map(_problem, raw)) if any(raw) else (None,) * len(raw)


def _status(problem: LinkProblem | None) -> int:
    return OK if problem is None else _STATUSES[problem]


def _problem(status: int) -> LinkProblem | None:
    if status == OK:
        return None
    _require(status in _PROBLEM_OF, "status", status, f"known are 0 to {max(_PROBLEM_OF)}")
    return _PROBLEM_OF[status]


def _require(is_right: bool, field: str, value: str | int, right: str) -> None:  # noqa: FBT001 - a condition, like assert's
    if not is_right:
        raise _broken(field, value, right)


def _broken(field: str, value: str | int, right: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"{field}: {value} is not right; {right}", field=field, value=value)
