"""What comes back after a restart: the entries of all drives made one set of blocks that the brains can take as it is."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.core.blocks import slot_nbytes
from kvstore.core.moves import DRIVE_SHIFT
from kvstore.tiers.nvme.records import Namespace, Quarantined, Rows, encode_quarantined
from kvstore.tiers.nvme.tables import BLOCK_TABLES, Erase, Scan

_LISTED_AT_ONCE = 16384


class RecoveredBlocks(NamedTuple):
    """Blocks of one namespace as columns of equal length, parents before their children."""

    tenant: str
    canonical: bytes  # of the KVSpec
    nbytes: int  # of a block
    keys: list[bytes]
    parents: list[bytes]  # b"": the first of a sequence
    offsets: NDArray[np.int64]  # with the drive
    generations: NDArray[np.uint64]
    checksums: NDArray[np.uint64]
    last_use: NDArray[np.int64]
    hits: NDArray[np.uint32]


class Recovered(NamedTuple):
    """All drives together. Slots do not overlap, lie inside one segment each, and a segment has slots of one size."""

    namespaces: tuple[RecoveredBlocks, ...]
    quarantined: tuple[tuple[int, int], ...]  # (offset with the drive, nbytes)
    next_generation: int
    written: dict[int, int]  # UTC hour since 1970 -> bytes
    waiting: tuple[
        tuple[int, int], ...
    ] = ()  # as quarantined: slots of blocks whose parents may lie on a drive that is off


class DriveScan(NamedTuple):
    """One drive's part."""

    drive: int
    scan: Scan
    nbytes: int  # of its slots; entries beyond it are not of this file


class _Part(NamedTuple):
    """Rows of one namespace on one drive."""

    drive: int
    rows: Rows


def merge(
    drives: Sequence[DriveScan], *, segment_bytes: int, all_there: bool = True
) -> tuple[Recovered, dict[int, list[Erase]]]:
    """The blocks, and by drive the entries to remove: of no namespace, of no possible slot, older copies of a key, and
    those whose parents are not all there (a prefix is usable from its start only).

    Not `all_there`: a drive of the tier is off, and may be back at the next start with those parents. Until then such entries
    and their slots stay as they are."""
    erase = {drive: list(scan.damaged) for drive, scan, _ in drives}
    specs: dict[bytes, Namespace] = {}
    parts: dict[bytes, list[_Part]] = {}
    quarantined: list[tuple[int, int]] = []
    for drive, scan, nbytes in drives:
        specs |= scan.namespaces
        usable = usable_rows(scan, erase[drive])
        slots = take_slots(usable, scan, nbytes, segment_bytes, erase[drive])
        quarantined += [(drive << DRIVE_SHIFT | slot.offset, slot.nbytes) for slot in slots]
        for namespace, rows in usable.items():
            if len(rows):
                parts.setdefault(namespace, []).append(_Part(drive, rows))
    waiting: list[tuple[int, int]] | None = None if all_there else []
    blocks = [_blocks_of(specs[namespace], parts[namespace], erase, waiting) for namespace in parts]
    for drive, scan, _ in drives:
        used = {namespace for namespace in parts if any(part.drive == drive for part in parts[namespace])}
        erase[drive] += [Erase("namespaces", namespace) for namespace in scan.namespaces.keys() - used]
    newest = [int(rows["generation"].max()) for _, scan, _ in drives for rows in scan.rows.values() if len(rows)]
    recovered = Recovered(
        namespaces=tuple(part for part in blocks if part.keys),
        quarantined=tuple(quarantined),
        next_generation=max(newest, default=0) + 1,
        written=_sum_written(drives),
        waiting=tuple(sorted(waiting or ())),
    )
    return recovered, erase


def usable_rows(scan: Scan, erase: list[Erase]) -> dict[bytes, Rows]:
    """Rows by namespace, without those whose namespace is not known or has blocks of another size."""
    usable: dict[bytes, Rows] = {}
    for digest_nbytes, rows in scan.rows.items():
        for namespace, group in _by_namespace(rows):
            spec = scan.namespaces.get(namespace)
            if spec is None or spec.digest_nbytes != digest_nbytes:
                erase += erasures(group)
                continue
            right = group["nbytes"] == spec.nbytes
            usable[namespace] = _without(group, right, erase)
    return usable


def _by_namespace(rows: Rows) -> Iterator[tuple[bytes, Rows]]:
    """Rows lie sorted by namespace."""
    if not len(rows):
        return
    names = np.ascontiguousarray(rows["namespace"]).view(np.uint64).reshape(-1, 2)
    starts = np.flatnonzero((names[1:] != names[:-1]).any(axis=1)) + 1
    for group in np.split(rows, starts):
        yield group["namespace"][0].tobytes(), group


def take_slots(
    usable: dict[bytes, Rows], scan: Scan, nbytes: int, segment_bytes: int, erase: list[Erase]
) -> list[Quarantined]:
    """Remove from `usable` what does not fit the drive's slots, and choose the quarantined slots that do."""
    sizes = {namespace: slot_nbytes(int(rows["nbytes"][0])) for namespace, rows in usable.items() if len(rows)}
    offsets = _column(usable, "offset").astype(np.int64)
    widths = np.repeat(np.array([sizes.get(namespace, 0) for namespace in usable], np.int64), _lengths(usable))
    fits = fitting(offsets, widths, _column(usable, "generation"), nbytes=nbytes, segment_bytes=segment_bytes)
    size_of = np.zeros(nbytes // segment_bytes + 1, np.int64)
    size_of[offsets[fits] // segment_bytes] = widths[fits]
    kept: list[Quarantined] = []
    for slot in scan.quarantined:
        width = slot_nbytes(slot.nbytes)
        inside = slot.nbytes > 0 and slot.offset + width <= nbytes
        segment = min(slot.offset, nbytes) // segment_bytes
        if inside and slot.offset % segment_bytes % width == 0 and size_of[segment] in (0, width):
            size_of[segment] = width
            kept.append(slot)
        else:
            erase.append(Erase("quarantine", encode_quarantined(slot)[0]))
    if kept:
        fits &= ~np.isin(offsets, [slot.offset for slot in kept])
    if not fits.all():
        ends = np.cumsum(_lengths(usable))[:-1]
        for (namespace, rows), right in zip(list(usable.items()), np.split(fits, ends), strict=True):
            usable[namespace] = _without(rows, right, erase)
    return kept


def fitting(
    offsets: NDArray[np.int64],
    widths: NDArray[np.int64],
    generations: NDArray[np.uint64],
    *,
    nbytes: int,
    segment_bytes: int,
) -> NDArray[np.bool_]:
    """Which slots can all be in use at once. Where two cannot, the one written later (its generation) stays."""
    inside = (offsets >= 0) & (offsets <= nbytes - widths)
    inside &= (offsets % segment_bytes) % np.maximum(widths, 1) == 0
    inside &= offsets % segment_bytes + widths <= segment_bytes
    inside &= widths > 0
    rows = np.flatnonzero(inside)
    rows = rows[np.argsort(generations[rows], kind="stable")]
    segments = offsets[rows] // segment_bytes
    width_of = np.zeros(nbytes // segment_bytes + 1, np.int64)
    width_of[segments] = widths[rows]  # of several the last stays
    rows = rows[width_of[segments] == widths[rows]]
    by_offset = rows[np.argsort(offsets[rows], kind="stable")]  # within one offset by generation still
    newest = np.ones(len(by_offset), np.bool_)
    newest[:-1] = offsets[by_offset[1:]] != offsets[by_offset[:-1]]
    fits = np.zeros(len(offsets), np.bool_)
    fits[by_offset[newest]] = True
    return fits


def _blocks_of(
    spec: Namespace, parts: list[_Part], erase: dict[int, list[Erase]], waiting: list[tuple[int, int]] | None
) -> RecoveredBlocks:
    rows = parts[0].rows if len(parts) == 1 else np.concatenate([part.rows for part in parts])
    drives = np.repeat([part.drive for part in parts], [len(part.rows) for part in parts])
    if len(parts) > 1:
        rows, drives = _newest_copies(rows, drives, erase)
    depth = _depths(rows)
    rooted = depth > 0
    if waiting is None:
        _erase_each(rows, drives, ~rooted, erase)
    else:
        waiting += [(offset, spec.nbytes) for offset in _offsets(rows, drives)[~rooted].tolist()]
    order = np.flatnonzero(rooted)
    order = order[np.argsort(_narrow(depth[order]), kind="stable")]
    rows, drives = _pick(rows, order), drives[order]
    num_roots = int((depth[order] == 1).sum())
    return RecoveredBlocks(
        tenant=spec.tenant,
        canonical=spec.canonical,
        nbytes=spec.nbytes,
        keys=_listed(rows["key"]),
        parents=[b""] * num_roots + _listed(rows["parent"][num_roots:]),
        offsets=_offsets(rows, drives),
        generations=rows["generation"].astype(np.uint64),
        checksums=rows["checksum"].astype(np.uint64),
        last_use=rows["last_use"].astype(np.int64),
        hits=rows["hits"].astype(np.uint32),
    )


def _offsets(rows: Rows, drives: NDArray[np.int64]) -> NDArray[np.int64]:
    return drives.astype(np.int64) << DRIVE_SHIFT | rows["offset"].astype(np.int64)


def _newest_copies(
    rows: Rows, drives: NDArray[np.int64], erase: dict[int, list[Erase]]
) -> tuple[Rows, NDArray[np.int64]]:
    """One copy of each key, the one written last: a drive that was away comes back with old ones."""
    order = np.argsort(rows["generation"], kind="stable")
    rows, drives = rows[order], drives[order]
    keys = rows["key"].tolist()
    last = dict(zip(keys, range(len(keys)), strict=True))
    newest = np.fromiter(map(last.__getitem__, keys), np.int64, len(keys)) == np.arange(len(keys))
    _erase_each(rows, drives, ~newest, erase)
    return rows[newest], drives[newest]


def _depths(rows: Rows) -> NDArray[np.int32]:
    """Each block's place in its sequence, from 1; 0 when the chain of parents does not reach a first block.

    Pointer doubling: in round r every block knows its ancestor 2**r above, so that a chain of a million takes 20 rounds.
    """
    count = len(rows)
    root, missing = count, count + 1
    above = np.append(_rows_of_parents(rows, missing), [root, missing]).astype(np.int32)
    above[:count][above[:count] == np.arange(count)] = root
    depth = np.ones(count + 2, np.int32)
    depth[count:] = 0
    for _ in range(count.bit_length() + 1):
        if (above >= count).all():
            break
        depth += depth[above]
        above = above[above]
    return np.where(above == root, depth, 0)[:count].astype(np.int32)


def _rows_of_parents(rows: Rows, missing: int) -> NDArray[np.int64]:
    """For each row the row of its parent. Joined over the first 8 bytes of the keys, sorted: a third of the time that a
    dict takes. Hashes of ours differ in those; where an engine's do not, the dict it is."""
    keys, parents = _words(rows["key"]), _words(rows["parent"])
    order = np.argsort(keys[:, 0])
    heads = keys[order, 0]
    if (heads[1:] == heads[:-1]).any():
        row_of = dict(zip(rows["key"].tolist(), range(len(rows)), strict=True))
        return np.fromiter(map(row_of.get, rows["parent"].tolist(), itertools.repeat(missing)), np.int64, len(rows))
    by_head = np.argsort(parents[:, 0])  # neighbours in memory are then looked up one after the other
    found = np.empty(len(rows), np.int64)
    found[by_head] = order[np.minimum(np.searchsorted(heads, parents[by_head, 0]), len(rows) - 1)]
    return np.where((keys[found] == parents).all(axis=1), found, missing)


def _listed(keys: NDArray[np.void]) -> list[bytes]:
    """As a list, a part at a time: a million at once would keep every other thread waiting for a tenth of a second."""
    listed: list[bytes] = []
    for start in range(0, len(keys), _LISTED_AT_ONCE):
        listed += keys[start : start + _LISTED_AT_ONCE].tolist()
    return listed


def _words(keys: NDArray[np.void]) -> NDArray[np.uint64]:
    return np.ascontiguousarray(keys).view(np.uint64).reshape(len(keys), keys.dtype.itemsize // 8)


def _pick(rows: Rows, order: NDArray[np.int64]) -> Rows:
    """`rows[order]`, with rows moved as a whole and not field by field."""
    return rows.view(f"V{rows.dtype.itemsize}")[order].view(rows.dtype)


def _narrow(depth: NDArray[np.int32]) -> NDArray[np.int32] | NDArray[np.uint16]:
    """As 16 bits where they do: numpy sorts those by radix, ten times as fast."""
    return depth.astype(np.uint16) if not len(depth) or depth.max() <= np.iinfo(np.uint16).max else depth


def erasures(rows: Rows) -> list[Erase]:
    """What removes these entries."""
    table = BLOCK_TABLES[rows.dtype["key"].itemsize]
    keys = zip(rows["namespace"].tolist(), rows["key"].tolist(), strict=True)
    return [Erase(table, namespace + key) for namespace, key in keys]


def _erase_each(rows: Rows, drives: NDArray[np.int64], which: NDArray[np.bool_], erase: dict[int, list[Erase]]) -> None:
    for drive in np.unique(drives[which]).tolist():
        erase[drive] += erasures(rows[which & (drives == drive)])


def _without(rows: Rows, right: NDArray[np.bool_], erase: list[Erase]) -> Rows:
    if right.all():
        return rows
    erase += erasures(rows[~right])
    return rows[right]


def _column(usable: dict[bytes, Rows], name: str) -> NDArray[np.uint64]:
    columns = [rows[name] for rows in usable.values()]
    return np.concatenate(columns) if columns else np.empty(0, np.uint64)


def _lengths(usable: dict[bytes, Rows]) -> NDArray[np.int64]:
    return np.array([len(rows) for rows in usable.values()], np.int64)


def _sum_written(drives: Sequence[DriveScan]) -> dict[int, int]:
    written: dict[int, int] = {}
    for _, scan, _ in drives:
        for hour, nbytes in scan.written.items():
            written[hour] = written.get(hour, 0) + nbytes
    return written
