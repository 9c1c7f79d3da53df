"""Server-sent events, whole and in pieces."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.bench.sse import MAX_EVENT_BYTES, EventReader, EventTooLong

STREAM = (
    b': ping\n\ndata: {"a": 1}\n\ndata:two\r\ndata:  lines\r\n\r\nevent: x\nid: 3\ndata\ndata: \n\nretry: 1\n\n'
    b"data: cr\r\rdata: \xe2\x80\xa8 \x0b \x1c not a line's end\n\ndata: [DONE]\n\ndata: cut off"
)
EVENTS = [b'{"a": 1}', b"two\n lines", b"\n", b"cr", b"\xe2\x80\xa8 \x0b \x1c not a line's end", b"[DONE]"]


def test_a_whole_stream() -> None:
    assert EventReader().feed(STREAM) == EVENTS


def test_byte_by_byte() -> None:
    reader = EventReader()

    assert [event for at in range(len(STREAM)) for event in reader.feed(STREAM[at : at + 1])] == EVENTS


@given(st.lists(st.integers(0, len(STREAM))))
def test_in_any_pieces(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    reader = EventReader()

    assert [e for low, high in pairwise(edges) for e in reader.feed(STREAM[low:high])] == EVENTS


@given(st.lists(st.sampled_from([b"data: x", b"data", b"\n", b"\r", b"\r\n", b":c", b"id: 1"])), st.data())
def test_pieces_never_matter(parts: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(parts)
    cut = data.draw(st.integers(0, len(stream)))
    reader = EventReader()

    assert reader.feed(stream[:cut]) + reader.feed(stream[cut:]) == EventReader().feed(stream)


@pytest.mark.parametrize("piece", [b"data: " + b"x" * (1 << 20), b"data: " + b"x" * (1 << 20) + b"\n"])
def test_an_event_without_end_is_refused(piece: bytes) -> None:
    reader = EventReader()

    for _ in range(MAX_EVENT_BYTES // (1 << 20) - 1):
        assert reader.feed(piece) == []

    with pytest.raises(EventTooLong):
        reader.feed(piece + piece)
