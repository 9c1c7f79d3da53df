"""The frames of the local socket: golden vectors, whole against byte by byte, truncations, flipped bits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import LocalProtocolError
from kvstore.core.limits import MAX_FRAME_BYTES
from kvstore.transport.frames import (
    FROM_CLIENT,
    FROM_SERVER,
    HEADER_NBYTES,
    BrokenHeader,
    Frame,
    FrameDecoder,
    Kind,
    Verb,
    decode_header,
    encode_frame,
)

GOLDEN = [
    (Frame(Verb.HELLO, Kind.REQUEST, 1, b""), "00000000 01 00 0000 01000000"),
    (Frame(Verb.MATCH, Kind.REQUEST, 7, b"abc"), "03000000 02 00 0000 07000000 616263"),
    (Frame(Verb.RESERVE, Kind.REPLY, 0x01020304, b"\xff"), "01000000 06 01 0000 04030201 ff"),
    (Frame(Verb.STATS, Kind.ERROR, 0xFFFFFFFF, b"no"), "02000000 0a 02 0000 ffffffff 6e6f"),
    (Frame(Verb.ACQUIRE, Kind.EVENT, 0, b""), "00000000 03 03 0000 00000000"),
]
ALL_KINDS = FROM_CLIENT | FROM_SERVER

frames = st.builds(
    lambda verb, kind, call_id, body: Frame(verb, kind, 0 if kind is Kind.EVENT else call_id, body),
    st.sampled_from(Verb),
    st.sampled_from(Kind),
    st.integers(1, 0xFFFF_FFFF),
    st.binary(max_size=300),
)


def decode_all(decoder: FrameDecoder) -> list[Frame]:
    found = []
    while (frame := decoder.next_frame()) is not None:
        found.append(frame)
    return found


@pytest.mark.parametrize(("frame", "encoded"), GOLDEN)
def test_golden_vectors(frame: Frame, encoded: str) -> None:
    decoder = FrameDecoder(ALL_KINDS)

    decoder.feed(bytes.fromhex(encoded))

    assert encode_frame(*frame) == bytes.fromhex(encoded)
    assert decode_all(decoder) == [frame]
    assert decoder.buffered_nbytes == 0


@given(st.lists(frames, max_size=5), st.integers(1, 40))
def test_frames_come_back_however_the_bytes_are_cut(sent: list[Frame], step: int) -> None:
    stream = b"".join(encode_frame(*frame) for frame in sent)
    whole, pieces = FrameDecoder(ALL_KINDS), FrameDecoder(ALL_KINDS)

    whole.feed(stream)
    received = []
    for start in range(0, len(stream), step):
        pieces.feed(stream[start : start + step])
        received += decode_all(pieces)

    assert decode_all(whole) == sent
    assert received == sent
    assert pieces.buffered_nbytes == 0


def test_byte_by_byte_gives_each_frame_with_its_last_byte() -> None:
    first, second = encode_frame(Verb.MATCH, Kind.REQUEST, 1, b"x" * 20), encode_frame(Verb.STATS, Kind.REQUEST, 2, b"")
    decoder = FrameDecoder(FROM_CLIENT)

    given_at = []
    for position, value in enumerate(first + second):
        decoder.feed(bytes([value]))
        given_at += [(position, frame.call_id) for frame in decode_all(decoder)]

    assert given_at == [(len(first) - 1, 1), (len(first) + len(second) - 1, 2)]


def test_every_truncation_gives_nothing_and_counts_what_waits() -> None:
    stream = encode_frame(Verb.COMMIT, Kind.REQUEST, 9, bytes(range(50)))

    for length in range(len(stream)):
        decoder = FrameDecoder(FROM_CLIENT)
        decoder.feed(stream[:length])
        assert decoder.next_frame() is None
        assert decoder.buffered_nbytes == length


def test_every_flipped_header_bit_is_an_error_or_another_valid_header() -> None:
    """A flip in the length, verb or call id can give another valid frame; anything else must be refused, naming the field."""
    body = b"b" * 5
    stream = encode_frame(Verb.MATCH, Kind.REQUEST, 3, body)
    outcomes = {"frame": 0, "waits": 0, "length": 0, "verb": 0, "kind": 0, "zero": 0}
    named = []

    for bit in range(8 * HEADER_NBYTES):
        flipped = bytearray(stream)
        flipped[bit // 8] ^= 1 << bit % 8
        decoder = FrameDecoder(FROM_CLIENT)
        decoder.feed(flipped)
        try:
            frame = decoder.next_frame()
        except BrokenHeader as err:
            outcomes[str(err.fields["field"])] += 1
            named.append((err.verb_number, err.call_id) == (flipped[4], int.from_bytes(flipped[8:12], "little")))
        else:
            outcomes["frame" if frame else "waits"] += 1
            assert frame is None or frame.verb in Verb

    assert all(named)
    # length 5: bits 0 and 2 make it shorter, others longer, 9 of them (24 to 31 and 23) too long; MAX is 8 MiB = bit 23.
    unknown = sum(Verb.MATCH ^ 1 << bit not in set(Verb) for bit in range(8))
    frames = 96 - 9 - 21 - unknown - 8 - 16
    assert outcomes == {"length": 9, "waits": 21, "verb": unknown, "kind": 8, "zero": 16, "frame": frames}


@pytest.mark.parametrize(
    ("encoded", "field"),
    [
        ("01008000 02 00 0000 01000000", "length"),  # MAX_FRAME_BYTES + 1
        ("00000000 00 00 0000 01000000", "verb"),
        ("00000000 0c 00 0000 01000000", "verb"),
        ("00000000 02 01 0000 01000000", "kind"),  # a reply to a server
        ("00000000 02 04 0000 01000000", "kind"),
        ("00000000 02 00 0001 01000000", "zero"),
        ("00000000 02 00 0000 00000000", "call_id"),
    ],
)
def test_broken_header_names_its_field_and_stays_broken(encoded: str, field: str) -> None:
    decoder = FrameDecoder(FROM_CLIENT)
    decoder.feed(bytes.fromhex(encoded))

    with pytest.raises(BrokenHeader) as first:
        decoder.next_frame()
    decoder.feed(encode_frame(Verb.MATCH, Kind.REQUEST, 1, b""))
    with pytest.raises(BrokenHeader) as second:
        decoder.next_frame()

    assert first.value.fields["field"] == field
    assert second.value is first.value
    assert decoder.buffered_nbytes == 0


def test_limit_itself_is_allowed() -> None:
    header = decode_header(bytes.fromhex("00008000 02 00 0000 01000000"), FROM_CLIENT)

    assert header.nbytes == MAX_FRAME_BYTES
    with pytest.raises(LocalProtocolError, match="at most"):
        encode_frame(Verb.MATCH, Kind.REQUEST, 1, bytes(MAX_FRAME_BYTES + 1))
