"""Frames of the local socket as pure code: bytes in, frames out, no socket (transport/WIRE.md, section 1).

     0        4      5      6      8           12
     +--------+------+------+------+-----------+------------------ - -
     | length | verb | kind | zero | call id   | body: one protobuf message
     | u32le  | u8   | u8   | u16  | u32le     | `length` bytes
     +--------+------+------+------+-----------+------------------ - -

In the manner of h11: `feed` takes whatever the socket gave, `next_frame` gives whole frames, and after the first broken
header nothing more is read, since the framing can no longer be trusted.
"""

import enum
import struct
from typing import NamedTuple

from kvstore.core.errors import LocalProtocolError, RemoteProtocolError
from kvstore.core.limits import MAX_FRAME_BYTES

_HEADER = struct.Struct("<IBBHI")
HEADER_NBYTES = _HEADER.size
MAX_CALL_ID = 0xFFFF_FFFF


class Verb(enum.IntEnum):
    """What a frame is about. 12 and 16 are kept."""

    HELLO = 1
    MATCH = 2
    ACQUIRE = 3
    RELEASE = 4
    RENEW = 5
    RESERVE = 6
    COMMIT = 7
    ABORT = 8
    DROP = 9
    STATS = 10
    PREFETCH = 11
    REPORT = 13
    EXPLAIN = 14
    PIN = 15
    LOCATE = 17
    LEND = 18
    DIGEST = 19
    INSPECT = 20


class Kind(enum.IntEnum):
    """Who says it, and whether it went well."""

    REQUEST = 0
    REPLY = 1
    ERROR = 2  # body: ErrorReply
    EVENT = 3  # server to client, unasked; call id 0


FROM_CLIENT = frozenset({Kind.REQUEST})
FROM_SERVER = frozenset({Kind.REPLY, Kind.ERROR, Kind.EVENT})

_VERBS = {int(verb): verb for verb in Verb}
_KINDS = {int(kind): kind for kind in Kind}


class Header(NamedTuple):
    """The first twelve bytes of a frame, checked."""

    nbytes: int  # of the body
    verb: Verb
    kind: Kind
    call_id: int


class Frame(NamedTuple):
    """One whole frame."""

    verb: Verb
    kind: Kind
    call_id: int
    body: bytes


class BrokenHeader(RemoteProtocolError):
    """A header that breaks the protocol. `verb_number` and `call_id` are as they came, for the answer."""

    verb_number = 0
    call_id = 0


def encode_frame(verb: int, kind: Kind, call_id: int, body: bytes) -> bytes:
    """The bytes of one frame. `verb` may be an unknown number only in an error that answers it."""
    if len(body) > MAX_FRAME_BYTES:
        raise LocalProtocolError(
            f"length: a body of {len(body)} bytes is over the limit; send at most {MAX_FRAME_BYTES} bytes a frame",
            field="length",
            value=len(body),
        )
    assert kind is Kind.ERROR or verb in _VERBS
    assert 0 <= call_id <= MAX_CALL_ID
    assert (call_id == 0) == (kind is Kind.EVENT)
    return _HEADER.pack(len(body), verb, kind, 0, call_id) + body


def decode_header(buffer: bytes | bytearray | memoryview, expect: frozenset[Kind], offset: int = 0) -> Header:
    """The header at `offset` of `buffer`, which holds at least HEADER_NBYTES there. Raises BrokenHeader."""
    nbytes, verb, kind, zero, call_id = _HEADER.unpack_from(buffer, offset)
    known_verb, known_kind = _VERBS.get(verb), _KINDS.get(kind)
    if nbytes > MAX_FRAME_BYTES:
        problem = "length", nbytes, f"at most {MAX_FRAME_BYTES} bytes are allowed"
    elif known_verb is None:
        problem = "verb", verb, f"known are {min(_VERBS)} to {max(_VERBS)}"
    elif known_kind is None or known_kind not in expect:
        problem = "kind", kind, f"expected {' or '.join(str(int(kind)) for kind in sorted(expect))}"
    elif zero:
        problem = "zero", zero, "bytes 6 and 7 are zero in this version"
    elif (call_id == 0) != (known_kind is Kind.EVENT):
        problem = "call_id", call_id, "events carry 0, everything else a number from 1 on"
    else:
        return Header(nbytes, known_verb, known_kind, call_id)
    field, value, right = problem
    broken = BrokenHeader(f"frame {field}: {value} is not right; {right}", field=field, value=value)
    broken.verb_number, broken.call_id = verb, call_id
    raise broken


class FrameDecoder:
    """Turns a stream of bytes into frames. One per connection; not thread-safe.

    Holds at most one header and one body that is not whole yet, plus whatever one `feed` brought behind it.
    """

    def __init__(self, expect: frozenset[Kind]) -> None:
        self._expect = expect
        self._buffer = bytearray()
        self._header: Header | None = None  # of the frame that is under way
        self._broken: BrokenHeader | None = None

    @property
    def buffered_nbytes(self) -> int:
        """Bytes fed and not yet given out as frames."""
        return len(self._buffer) + (HEADER_NBYTES if self._header else 0)

    def feed(self, chunk: bytes | bytearray | memoryview) -> None:
        """Take what the socket gave."""
        if self._broken is None:
            self._buffer += chunk

    def next_frame(self) -> Frame | None:
        """The next whole frame, or None when more bytes are needed. After BrokenHeader it raises the same again."""
        if self._broken is not None:
            raise self._broken
        if self._header is None:
            if len(self._buffer) < HEADER_NBYTES:
                return None
            self._header = self._take_header()
        nbytes, verb, kind, call_id = self._header
        if len(self._buffer) < nbytes:
            return None
        body = bytes(self._buffer[:nbytes])
        del self._buffer[:nbytes]
        self._header = None
        return Frame(verb, kind, call_id, body)

    def _take_header(self) -> Header:
        try:
            header = decode_header(self._buffer, self._expect)
        except BrokenHeader as err:
            self._broken = err
            self._buffer.clear()
            raise
        del self._buffer[:HEADER_NBYTES]
        return header
