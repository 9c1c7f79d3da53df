"""The error tree. A miss, a full tier and a declined put are values, not errors.

Each class carries its facts as fields, so that callers and tests match type and fields and never parse text.
`code` is the class's name on the wire (transport/WIRE.md); `retryable` says whether the same call may succeed later.
"""

from typing import ClassVar


class KVStoreError(Exception):
    """Root of every error this project raises on purpose."""

    code: ClassVar[str] = "KVStoreError"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, /, **fields: str | int | float) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields


class ConfigError(KVStoreError):
    """A setting or argument is wrong; the message names the field, the value and what would be right."""

    code = "ConfigError"


class SpecMismatch(KVStoreError):
    """A KVSpec cannot be served: malformed, or its block is larger than a segment. Fields: field, value."""

    code = "SpecMismatch"


class ProtocolError(KVStoreError):
    """A frame or message breaks the protocol. Fields: field, value."""

    code = "ProtocolError"


class LocalProtocolError(ProtocolError):
    """We were about to break the protocol: a bug on this side."""

    code = "LocalProtocolError"


class RemoteProtocolError(ProtocolError):
    """The other side broke the protocol; its connection is closed when its framing cannot be trusted any more."""

    code = "RemoteProtocolError"


class Overloaded(KVStoreError):
    """A named limit was reached (core/limits.py). Fields: limit, value."""

    code = "Overloaded"
    retryable = True


class LeaseRefused(KVStoreError):
    """The holder may not have another lease now: too many leases, or too much of it in limbo. Fields: limit, value."""

    code = "LeaseRefused"
    retryable = True


class LeaseExpired(KVStoreError):
    """The lease has ended: its rights are gone and nothing was published. Fields: lease_id."""

    code = "LeaseExpired"


class UnknownLease(KVStoreError):
    """No such lease for this holder: never granted, ended, or granted before a restart. Fields: lease_id."""

    code = "UnknownLease"


class StaleExtent(KVStoreError):
    """An extent's generation is not its slot's: the slot has been reused. Fields: offset, generation, found."""

    code = "StaleExtent"


class CorruptBlock(KVStoreError):
    """A block's bytes do not match their checksum. Fields: tier, key."""

    code = "CorruptBlock"


class TierIOError(KVStoreError):
    """A tier's device failed. Fields: tier, errno."""

    code = "TierIOError"
    retryable = True


class PeerUnavailable(KVStoreError):
    """The sidecar or a peer does not answer: absent, hung past the deadline, or gone. Fields: peer, deadline_s."""

    code = "PeerUnavailable"
    retryable = True


def _classes(root: type[KVStoreError]) -> dict[str, type[KVStoreError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _classes(child)
    return found


def error_from_wire(code: str, message: str, fields: dict[str, str]) -> KVStoreError:
    """Rebuild an error that the other side raised; an unknown code becomes plain KVStoreError."""
    return _classes(KVStoreError).get(code, KVStoreError)(message, **fields)
