"""Log lines: every message of ours comes apart into an event and its fields, in both formats."""

import ast
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.logs import JsonFormatter, KeyValueFormatter

ROOT = Path(__file__).parent.parent.parent


def record(message: object, *args: object, exc_info: object = None) -> logging.LogRecord:
    made = logging.LogRecord("kvstore.test", logging.WARNING, "", 0, message, args, exc_info)  # type: ignore[arg-type]
    made.created = 1_790_000_000.25
    return made


def line(message: object, *args: object) -> str:
    return KeyValueFormatter().format(record(message, *args))


def fields(message: object, *args: object) -> dict:
    told = json.loads(JsonFormatter().format(record(message, *args)))
    assert (told.pop("time"), told.pop("level"), told.pop("source")) == (
        "2026-09-21T14:13:20.250Z",
        "WARNING",
        "kvstore.test",
    )
    return told


def test_a_line_is_an_event_and_its_fields() -> None:
    assert line("arena faulted size=%s after_s=%.2f", "8GiB", 1.5) == (
        'time=2026-09-21T14:13:20.250Z level=WARNING source=kvstore.test event="arena faulted" size=8GiB after_s=1.5'
    )


def test_numbers_stay_numbers_in_json() -> None:
    told = fields("leases expired count=%d share=%.3f of=%s", 3, 0.12345, 7)

    assert told == {"event": "leases expired", "count": 3, "share": 0.123, "of": "7"}


@pytest.mark.parametrize(
    "value", ["two words", 'a "quote"', "a=b level=error", "line\nbreak", "", "back\\slash", "ümlaut"]
)
def test_no_value_passes_for_another_field_or_line(value: str) -> None:
    shown = line("peer lost node=%s", value)

    assert "\n" not in shown
    assert fields("peer lost node=%s", value) == {"event": "peer lost", "node": value}
    quoted = shown.partition(" node=")[2]
    assert (json.loads(quoted) if quoted.startswith('"') else quoted) == value


def test_a_reason_takes_the_rest_of_the_line() -> None:
    told = fields("connection closed reason=no Hello within %g s", 2.0)

    assert told == {"event": "connection closed", "reason": "no Hello within 2 s"}
    assert fields("peer refused node=%s reason=%s", "b", "a=b c") == {
        "event": "peer refused",
        "node": "b",
        "reason": "a=b c",
    }


def test_what_is_no_field_is_part_of_the_event() -> None:
    assert fields("nvme %s: %d entries removed", "/mnt/0", 3) == {"event": "nvme /mnt/0: 3 entries removed"}
    assert fields("%d %% sure", 100) == {"event": "100 % sure"}
    assert fields("said by somebody else: a=%s") == {"event": "said by somebody else: a=%s"}
    assert fields("%(name)s is a mapping", {"name": "this"}) == {"event": "this is a mapping"}


def logged_messages() -> Iterator[tuple[str, int]]:
    """Every literal message that our code logs, with how many values it is given."""
    for folder in ("kvstore", "tiers", "transport", "engine_connector"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.Call(
                        func=ast.Attribute(value=ast.Name(id="logger")), args=[ast.Constant(value=message), *rest]
                    ):
                        yield message, len(rest)


def test_every_message_of_ours_comes_apart() -> None:
    """A field glued to a comma, or in the middle of a word, would be lost in the event."""
    messages = set(logged_messages())
    for message, num_values in messages:
        if num_values:
            values = [7] * num_values if "%" in message else []
            event = fields(message, *values)["event"]
            assert not re.search(r"\w=7", event) or "Kubernetes" in message, message

    assert len(messages) > 40


def test_a_traceback_is_one_field() -> None:
    try:
        int("no\nnumber")
    except ValueError:
        made = record("request crashed", exc_info=sys.exc_info())

    assert "\n" not in KeyValueFormatter().format(made)
    assert "ValueError: invalid literal" in json.loads(JsonFormatter().format(made))["exception"]
