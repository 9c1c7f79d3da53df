"""Log lines that programs read: an event in words, and its fields.

    logger.info("arena faulted size=%s", "8GiB")

    keyvalue   time=2026-07-29T21:04:11.250Z level=INFO source=kvstore.sidecar event="arena faulted" size=8GiB
    json       {"time": "2026-07-29T21:04:11.250Z", "level": "INFO", ..., "event": "arena faulted", "size": "8GiB"}

Fields are the `name=%s` of the message as it stands in the code, so that no value can pass for one. `reason=` and `error=` come
last and take the rest of the line.
"""

import json
import logging
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["keyvalue", "json"]
Field = str | int | float

_PLACEHOLDER = re.compile(r"%(?:%|[#0\- +]*\d*(?:\.\d+)?[a-zA-Z])")
_REST = re.compile(r"(?<!\S)(reason|error)=(.*)$", re.DOTALL)
_FIELD = re.compile(r"(?<!\S)(\w+)=(%[#0\- +]*\d*(?:\.\d+)?[a-zA-Z])(?!\S)")
_PLAIN = re.compile(r'[^\s"=\\]+')


def configure(level: str, log_format: LogFormat) -> None:
    """Log to standard error from now on, for the whole process."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else KeyValueFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class KeyValueFormatter(logging.Formatter):
    """A line of name=value; values with spaces or quotes are JSON strings. A traceback is one value too."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        return " ".join(f"{name}={_quoted(value)}" for name, value in _fields(record, self))


class JsonFormatter(logging.Formatter):
    """An object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        return json.dumps(dict(_fields(record, self)))


def _fields(record: logging.LogRecord, formatter: logging.Formatter) -> Iterator[tuple[str, Field]]:
    at = datetime.fromtimestamp(record.created, UTC)
    yield "time", f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03d}Z"
    yield "level", record.levelname
    yield "source", record.name
    event, fields = _split(record)
    yield "event", event
    yield from fields
    if record.exc_info:
        yield "exception", formatter.formatException(record.exc_info)


def _split(record: logging.LogRecord) -> tuple[str, list[tuple[str, Field]]]:
    """The event, and the fields of a message."""
    template, args = str(record.msg), record.args
    if not isinstance(args, tuple) or not args or len(_placeholders(template)) != len(args):
        return record.getMessage(), []
    left = iter(args)
    rest = _REST.search(template)
    words = template[: rest.start()] if rest else template
    fields: list[tuple[str, Field]] = []
    event, end = [], 0
    for field in _FIELD.finditer(words):
        event.append(_filled(words[end : field.start()], left))
        fields.append((field[1], _value(field[2], next(left))))
        end = field.end()
    event.append(_filled(words[end:], left))
    if rest:
        fields.append((rest[1], _filled(rest[2], left)))
    return " ".join("".join(event).split()), fields


def _placeholders(template: str) -> list[str]:
    return [each for each in _PLACEHOLDER.findall(template) if each != "%%"]


def _filled(template: str, args: Iterator[object]) -> str:
    return template % tuple(next(args) for _ in _placeholders(template))


def _value(placeholder: str, arg: object) -> Field:
    text = placeholder % (arg,)
    if isinstance(arg, int | float) and not isinstance(arg, bool) and placeholder[-1] != "s":
        return int(text) if placeholder[-1] in "di" else float(text)
    return text


def _quoted(value: Field) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
