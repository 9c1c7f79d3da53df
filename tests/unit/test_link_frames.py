"""Frames of the TCP link (transport/LINK.md): golden vectors, round trips, and what is refused."""

import contextlib
import hashlib
import hmac
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.blocks import Extent
from kvstore.core.errors import RemoteProtocolError
from kvstore.core.limits import MAX_LINK_REQUEST_EXTENTS, SEGMENT_BYTES
from kvstore.transport import link_frames as frames
from kvstore.transport.link import LinkProblem

ID = bytes(range(16))
NONCE = bytes(range(32))
LEASE = bytes(range(16, 32))

GOLDEN = {
    "descriptor": (
        frames.encode_descriptor(frames.Descriptor("10.0.0.7", 7070, ID, 1 << 36, tls=True)),
        "4b564c54010001009e1b0800" + ID.hex() + "0000000010000000" + b"10.0.0.7".hex(),
    ),
    "hello": (frames.encode_hello(frames.Hello(ID, NONCE)), "4b564c3101000000" + ID.hex() + NONCE.hex()),
    "challenge": (
        frames.encode_challenge(frames.Challenge(LinkProblem.OVERLOADED, NONCE)),
        "4b564c3101000300" + NONCE.hex(),
    ),
    "ready": (frames.encode_ready(frames.Ready(None, NONCE)), "4b564c3100000000" + NONCE.hex()),
    "request": (
        frames.encode_request(7, LEASE, [Extent(1 << 33, 4096, 5), Extent(8192, 1, 1 << 40)], checked=True),
        "51"
        "01"
        "0200"
        "07000000" + LEASE.hex() + "0000000002000000"
        "0500000000000000"
        "00100000"
        "00000000"
        "0020000000000000"
        "0000000000010000"
        "01000000"
        "00000000",
    ),
    "head": (
        frames.encode_head(frames.Statuses(7, (None, LinkProblem.STALE, LinkProblem.REFUSED), 4096)),
        "48000300070000000010000000000000000201",
    ),
    "tail": (
        frames.encode_tail(frames.Statuses(7, (None, LinkProblem.STALE, LinkProblem.REFUSED))),
        "5400030007000000000201",
    ),
}

DECODE: dict[str, Callable[[bytes], object]] = {
    "descriptor": frames.decode_descriptor,
    "hello": frames.decode_hello,
    "challenge": frames.decode_challenge,
    "ready": frames.decode_ready,
    "request": lambda raw: (
        frames.decode_request_header(raw[: frames.REQUEST_NBYTES]),
        frames.decode_extents(raw[frames.REQUEST_NBYTES :]),
    ),
    "head": lambda raw: frames.decode_head(raw, 7),
    "tail": lambda raw: frames.decode_tail(raw, 7),
}

DECODED = {
    "descriptor": frames.Descriptor("10.0.0.7", 7070, ID, 1 << 36, tls=True),
    "hello": frames.Hello(ID, NONCE),
    "challenge": frames.Challenge(LinkProblem.OVERLOADED, NONCE),
    "ready": frames.Ready(None, NONCE),
    "request": (
        frames.RequestHeader(7, LEASE, 2, checked=True),
        [Extent(1 << 33, 4096, 5), Extent(8192, 1, 1 << 40)],
    ),
    "head": frames.Statuses(7, (None, LinkProblem.STALE, LinkProblem.REFUSED), 4096),
    "tail": frames.Statuses(7, (None, LinkProblem.STALE, LinkProblem.REFUSED)),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_vectors(name: str) -> None:
    encoded, golden = GOLDEN[name]

    assert encoded.hex() == golden
    assert DECODE[name](encoded) == DECODED[name]


def test_the_proof_is_over_everything_said_and_who_says_it() -> None:
    hello, challenge = GOLDEN["hello"][0], GOLDEN["challenge"][0]
    message = b"kvstore/link/1 reader\0" + hello + challenge

    assert frames.proof(b"s" * 16, b"reader", hello, challenge) == hmac.digest(b"s" * 16, message, hashlib.sha256)
    assert frames.proof(b"s" * 16, b"owner", hello, challenge) != frames.proof(b"s" * 16, b"reader", hello, challenge)


@pytest.mark.parametrize(
    ("name", "position", "field"),
    [
        ("descriptor", 0, "descriptor magic"),
        ("descriptor", 4, "descriptor version"),
        ("descriptor", 6, "descriptor flags"),
        ("descriptor", 7, "descriptor flags"),
        ("descriptor", 10, "descriptor host"),
        ("descriptor", 40, "descriptor host"),
        ("hello", 3, "hello magic"),
        ("hello", 4, "hello version"),
        ("hello", 6, "hello flags"),
        ("challenge", 0, "challenge magic"),
        ("challenge", 5, "challenge version"),
        ("challenge", 6, "status"),
        ("challenge", 7, "challenge zero"),
        ("ready", 0, "ready magic"),
        ("ready", 4, "status"),
        ("ready", 6, "ready zero"),
        ("request", 0, "request mark"),
        ("request", 1, "request flags"),
        ("request", 3, "request count"),
        ("request", 24 + 19, "extent nbytes"),
        ("request", 24 + 20, "extent zero"),
        ("head", 0, "head mark"),
        ("head", 1, "head zero"),
        ("head", 2, "head count"),
        ("head", 4, "head request id"),
        ("head", 16, "status"),
        ("tail", 0, "tail mark"),
        ("tail", 1, "tail zero"),
        ("tail", 2, "tail count"),
        ("tail", 4, "tail request id"),
        ("tail", 9, "status"),
    ],
)
def test_a_broken_field_is_named(name: str, position: int, field: str) -> None:
    raw = bytearray(GOLDEN[name][0])
    raw[position] ^= 0xF8

    with pytest.raises(RemoteProtocolError) as caught:
        DECODE[name](bytes(raw))

    assert caught.value.fields["field"] == field
    assert field in caught.value.message


def test_counts_and_sizes_have_limits() -> None:
    header = bytearray(GOLDEN["request"][0][: frames.REQUEST_NBYTES])
    for count in (0, MAX_LINK_REQUEST_EXTENTS + 1):
        header[2:4] = count.to_bytes(2, "little")
        with pytest.raises(RemoteProtocolError, match="request count"):
            frames.decode_request_header(bytes(header))
    for nbytes in (0, SEGMENT_BYTES + 1):
        with pytest.raises(RemoteProtocolError, match="extent nbytes"):
            frames.decode_extents(frames.encode_request(1, LEASE, [Extent(0, nbytes, 1)], checked=False)[24:])


@settings(max_examples=40)
@given(st.data())
def test_any_bytes_decode_or_are_refused(data: st.DataObject) -> None:
    """Nothing but RemoteProtocolError comes of bytes of the right length, and of a descriptor of any."""
    for name, (encoded, _) in GOLDEN.items():
        size = data.draw(st.integers(0, 64)) if name == "descriptor" else len(encoded)
        raw = data.draw(st.binary(min_size=size, max_size=size))
        position = data.draw(st.integers(0, len(encoded) - 1))
        flipped = encoded[:position] + bytes([encoded[position] ^ 1]) + encoded[position + 1 :]
        for each in (raw, flipped):
            with contextlib.suppress(RemoteProtocolError):
                DECODE[name](each)
