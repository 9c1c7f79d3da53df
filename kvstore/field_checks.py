"""Checks of fields that came over the wire. Each raises RemoteProtocolError, which names the field, the value and what would
be right."""

from collections.abc import Mapping

from kvstore.core.errors import RemoteProtocolError
from kvstore.core.limits import MAX_DURATION_S, MAX_LABEL_BYTES, MAX_REQUEST_ID_BYTES


def wrong(field: str, value: object, right: str) -> RemoteProtocolError:
    """What to raise."""
    return RemoteProtocolError(f"{field}: {value} is not right; {right}", field=field, value=str(value))


def check_request_id(request_id: str, field: str = "request_id") -> None:
    """Neither empty nor endless."""
    nbytes = len(request_id.encode())
    if not 0 < nbytes <= MAX_REQUEST_ID_BYTES:
        raise wrong(field, f"{nbytes} bytes", f"use 1 to {MAX_REQUEST_ID_BYTES}")


def check_label(label: str, field: str = "label") -> None:
    """A short text that tools can show as it is."""
    if len(label.encode()) > MAX_LABEL_BYTES or not label.isprintable():
        raise wrong(field, ascii(label[:80]), f"use at most {MAX_LABEL_BYTES} bytes of UTF-8, printable")


def check_first_needed(first_needed: int, num_keys: int, field: str = "first_needed") -> None:
    """One of the keys, or behind them."""
    if first_needed > num_keys:
        raise wrong(field, first_needed, f"{num_keys} keys are given")


def check_duration(field: str, value_s: float) -> None:
    """Seconds."""
    if not 0 <= value_s <= MAX_DURATION_S:
        raise wrong(field, value_s, f"use seconds, 0 to {MAX_DURATION_S:g} (0: the default)")


def check_enum(field: str, value: int, known: Mapping[int, str]) -> None:
    """One of the known numbers."""
    if value not in known:
        raise wrong(field, value, "use " + ", ".join(f"{number} ({name})" for number, name in known.items()))
