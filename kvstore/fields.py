"""Protobuf messages as JSON values: every field under its own name, numbers as numbers (null
where they are not finite), bytes in hex."""

import math
from typing import Any

from google.protobuf.message import Message


def fields_of(message: Message) -> dict[str, Any]:
    """All fields, also those that are 0 or empty; a message that is not there is null."""
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def _value(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(value)
    if field.is_repeated:
        return [_plain(each) for each in value]
    if field.message_type is not None and not message.HasField(field.name):
        return None
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return fields_of(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no such numbers
    return value.hex() if isinstance(value, bytes) else value
