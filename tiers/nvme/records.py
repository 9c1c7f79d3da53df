"""What is on a drive, byte by byte (FORMAT.md): the data file's header, the index's entries. No I/O.

Everything is little-endian. An entry carries a check word over its key and its fields, and is encoded and decoded in bulk:
recovery reads a million of them.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.core.errors import ConfigError, SpecMismatch
from kvstore.core.keys import NAMESPACE_NBYTES, KVSpec
from kvstore.core.limits import SLOT_ALIGN_BYTES
from kvstore.core.moves import BlockRecord

FORMAT_VERSION = 1
HEADER_NBYTES = SLOT_ALIGN_BYTES
"""The header has the data file's first page for itself, so that slots begin on a page."""

MAGIC = b"kvblocks"
DRIVE_ID_NBYTES = 16
_HEADER = struct.Struct(
    "<8sII16sQ"
)  # magic, version, zero, drive id, segment_bytes; then u64 xxh3_64 of these 40 bytes
_META = struct.Struct("<I16sQQ")  # version, drive id, segment_bytes, nbytes; then u64 xxh3_64 of these 36 bytes
_CHECK = struct.Struct("<Q")

DIGEST_NBYTES = (16, 32)
"""Lengths of prefix hashes. The entries of each lie in a table of their own, so that all rows of a table are equally long."""

Rows = NDArray[np.void]
"""Entries as they lie in the index, key and value side by side; see `row_dtype`."""


def row_dtype(digest_nbytes: int) -> np.dtype[np.void]:
    """One entry: the first two fields are its key in the table, the others its value."""
    return np.dtype(
        [
            ("namespace", f"V{NAMESPACE_NBYTES}"),
            ("key", f"V{digest_nbytes}"),
            ("offset", "<u8"),  # in this drive, from the start of its slots
            ("generation", "<u8"),
            ("checksum", "<u8"),
            ("last_use", "<i8"),
            ("nbytes", "<u8"),
            ("hits", "<u4"),
            ("check", "<u4"),
            ("parent", f"V{digest_nbytes}"),  # the first block of a sequence has its own key here
        ]
    )


ROW_DTYPES = {digest_nbytes: row_dtype(digest_nbytes) for digest_nbytes in DIGEST_NBYTES}


def key_nbytes(digest_nbytes: int) -> int:
    """Length of a table's keys."""
    return NAMESPACE_NBYTES + digest_nbytes


def value_nbytes(digest_nbytes: int) -> int:
    """Length of a table's values: 64 or 80 bytes."""
    return ROW_DTYPES[digest_nbytes].itemsize - key_nbytes(digest_nbytes)


def encode_rows(records: Sequence[BlockRecord], digest_nbytes: int, offset_mask: int) -> Rows:
    """Records whose keys have `digest_nbytes` as rows, complete with their check words. `offset_mask` takes the drive out."""
    rows = np.zeros(len(records), ROW_DTYPES[digest_nbytes])
    columns = list(zip(*records, strict=True)) if records else [()] * len(BlockRecord._fields)
    by_name = dict(zip(BlockRecord._fields, columns, strict=True))
    parents = [parent or key for parent, key in zip(by_name["parent"], by_name["key"], strict=True)]
    for name, values in (("namespace", by_name["namespace"]), ("key", by_name["key"]), ("parent", parents)):
        rows[name] = np.frombuffer(b"".join(values), rows.dtype[name])
    rows["offset"] = np.array(by_name["offset"], np.int64) & offset_mask
    for name in ("generation", "checksum", "last_use", "nbytes"):
        rows[name] = np.array(by_name[name], rows.dtype[name])
    rows["hits"] = np.minimum(np.array(by_name["hits"], np.int64), 0xFFFFFFFF)
    rows["check"] = check_words(rows)
    return rows


def row_items(rows: Rows) -> list[tuple[bytes, bytes]]:
    """(key, value) of each row, as the table takes them."""
    split = key_nbytes(rows.dtype["key"].itemsize)
    packed, nbytes = rows.tobytes(), rows.dtype.itemsize
    starts = range(0, len(packed), nbytes)
    return [(packed[start : start + split], packed[start + split : start + nbytes]) for start in starts]


def decode_rows(joined: bytes | bytearray, digest_nbytes: int) -> Rows:
    """The inverse, from keys and values joined. Writable when `joined` is; whether a row is whole, `intact` says."""
    return np.frombuffer(joined, ROW_DTYPES[digest_nbytes])


def intact(rows: Rows) -> NDArray[np.bool_]:
    """Which rows have the check word that belongs to them."""
    return np.asarray(rows["check"] == check_words(rows))


def check_words(rows: Rows) -> NDArray[np.uint32]:
    """The upper half of sum(word[i] * factor[i]) mod 2**64 over a row's 64-bit words, its own place counted as zero.

    Not xxh3: one call for each row would cost recovery half of its time; this is a few passes over a matrix.
    """
    words = rows.view(np.uint64).reshape(len(rows), rows.dtype.itemsize // 8)
    own = rows.dtype.fields["check"][1] // 8  # type: ignore[index]  # a structured dtype has fields
    total = np.full(
        len(rows), _FACTORS[words.shape[1]], np.uint64
    )  # so that zeros are not intact, nor the other length
    for column in range(words.shape[1]):
        word = words[:, column] & np.uint64(0xFFFFFFFF) if column == own else words[:, column]
        total += word * _FACTORS[column]
    return (total >> np.uint64(32)).astype(np.uint32)


_FACTORS = np.array([xxhash.xxh3_64_intdigest(bytes([i])) | 1 for i in range(17)], np.uint64)
"""Odd, so that no change of one word maps to no change of the sum."""


class Header(NamedTuple):
    """What the data file says of itself."""

    version: int
    drive_id: bytes
    segment_bytes: int


class Meta(NamedTuple):
    """What the index says of its drive."""

    version: int
    drive_id: bytes  # the header's
    segment_bytes: int
    nbytes: int  # of the data file's slots, whole segments


def encode_header(header: Header) -> bytes:
    """The data file's first page."""
    packed = _HEADER.pack(MAGIC, header.version, 0, header.drive_id, header.segment_bytes)
    return (packed + _CHECK.pack(xxhash.xxh3_64_intdigest(packed))).ljust(HEADER_NBYTES, b"\0")


def decode_header(page: bytes) -> Header | None:
    """The inverse; None when it is not whole. A newer version may have other fields: it is told by magic and version alone."""
    if len(page) < HEADER_NBYTES or not page.startswith(MAGIC):
        return None
    _, version, _, drive_id, segment_bytes = _HEADER.unpack_from(page)
    if version <= FORMAT_VERSION and not _is_checked(page, _HEADER.size):
        return None
    return Header(version, drive_id, segment_bytes)


def encode_meta(meta: Meta) -> bytes:
    """The value of `drive` in the index's table `meta`."""
    packed = _META.pack(*meta)
    return packed + _CHECK.pack(xxhash.xxh3_64_intdigest(packed))


def decode_meta(packed: bytes) -> Meta | None:
    """The inverse; None when it is not whole."""
    if len(packed) < _META.size:
        return None
    meta = Meta(*_META.unpack_from(packed))
    if meta.version <= FORMAT_VERSION and not _is_checked(packed, _META.size):
        return None
    return meta


def require_known_version(version: int, where: str) -> None:
    """Raises ConfigError for a version newer than ours."""
    if version > FORMAT_VERSION:
        raise ConfigError(
            f"nvme: {where} has format version {version}, this release reads up to {FORMAT_VERSION}; "
            "use the release that wrote it, or another directory",
            field="nvme",
            value=where,
            version=version,
        )


def _is_checked(packed: bytes, nbytes: int) -> bool:
    if len(packed) < nbytes + _CHECK.size:
        return False
    return bool(_CHECK.unpack_from(packed, nbytes)[0] == xxhash.xxh3_64_intdigest(packed[:nbytes]))


class Namespace(NamedTuple):
    """Whose blocks they are, and what decides their bytes."""

    tenant: str
    canonical: bytes  # of the KVSpec
    nbytes: int  # of a block
    digest_nbytes: int


def encode_namespace(tenant: str, canonical: bytes) -> bytes:
    """The value of a namespace in the table `namespaces`."""
    tenant_utf8 = tenant.encode()
    return struct.pack("<I", len(tenant_utf8)) + tenant_utf8 + canonical


def decode_namespace(namespace: bytes, packed: bytes) -> Namespace | None:
    """The inverse; None when it is not whole, which shows since `namespace` is a digest of it."""
    try:
        (length,) = struct.unpack_from("<I", packed)
        tenant, canonical = packed[4 : 4 + length].decode(), packed[4 + length :]
        spec = KVSpec.from_canonical(canonical)
    except (struct.error, UnicodeDecodeError, SpecMismatch):
        return None
    if spec.namespace(tenant) != namespace or spec.canonical() != canonical:
        return None
    return Namespace(tenant, canonical, spec.block_nbytes, spec.hash.digest_nbytes)


class Quarantined(NamedTuple):
    """A slot that is not used again."""

    offset: int
    nbytes: int
    reason: str


_QUARANTINE_KEY = struct.Struct(">Q")  # big-endian: the table's order is the drive's
_QUARANTINE = struct.Struct("<QQ")  # nbytes, xxh3_64 of (key + nbytes + reason); then the reason


def encode_quarantined(slot: Quarantined) -> tuple[bytes, bytes]:
    """Key and value in the table `quarantine`."""
    key, reason = _QUARANTINE_KEY.pack(slot.offset), slot.reason.encode()
    check = xxhash.xxh3_64_intdigest(key + struct.pack("<Q", slot.nbytes) + reason)
    return key, _QUARANTINE.pack(slot.nbytes, check) + reason


def decode_quarantined(key: bytes, packed: bytes) -> Quarantined | None:
    """The inverse; None when it is not whole."""
    if len(key) != _QUARANTINE_KEY.size or len(packed) < _QUARANTINE.size:
        return None
    nbytes, check = _QUARANTINE.unpack_from(packed)
    reason = packed[_QUARANTINE.size :]
    if check != xxhash.xxh3_64_intdigest(key + packed[:8] + reason):
        return None
    return Quarantined(_QUARANTINE_KEY.unpack(key)[0], nbytes, reason.decode(errors="replace"))


_HOUR = struct.Struct(">Q")


def encode_written(hour: int, nbytes: int) -> tuple[bytes, bytes]:
    """Key and value in the table `written`: bytes written in that hour since 1970, UTC."""
    return _HOUR.pack(hour), _CHECK.pack(nbytes)


def decode_written(key: bytes, packed: bytes) -> tuple[int, int] | None:
    """The inverse; None when it is not whole."""
    if len(key) != _HOUR.size or len(packed) != _CHECK.size:
        return None
    return _HOUR.unpack(key)[0], _CHECK.unpack(packed)[0]
