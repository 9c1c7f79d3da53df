"""Server-sent events, as far as OpenAI's streams use them: bytes in, the text of `data` fields out.

data: {...}\n            lines end in \n, \r\n or \r; an empty line ends an event; several data lines are joined by \n;
\n                       comments (": ping") and other fields are read over (HTML standard, section 9.2.6)
"""

MAX_EVENT_BYTES = 8 << 20
"""One event; a chunk is some hundred bytes. Longer: EventTooLong."""


class EventTooLong(ValueError):
    """An event grew past MAX_EVENT_BYTES without its end."""


class EventReader:
    """Feed it what arrives, in any pieces."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0
        self._after_cr = False

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes. Raises EventTooLong; the reader is of no use afterwards."""
        if self._after_cr and data:
            data = data.removeprefix(b"\n")  # the other half of a \r\n that was cut in two
            self._after_cr = False
        if data.endswith(b"\r"):
            self._after_cr = True
        # bytes.splitlines parts at \n, \r and \r\n, and at nothing else.
        lines = (self._rest + data).splitlines(keepends=True)
        self._rest = lines.pop() if lines and lines[-1][-1:] not in {b"\n", b"\r"} else b""
        events = [event for line in lines if (event := self._take(line.rstrip(b"\r\n"))) is not None]
        if len(self._rest) + self._size > MAX_EVENT_BYTES:
            raise EventTooLong(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return events

    def _take(self, line: bytes) -> bytes | None:
        if not line:
            event = b"\n".join(self._data) if self._data else None
            self._data, self._size = [], 0
            return event
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
            self._size += len(value)
        return None
