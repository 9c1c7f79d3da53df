"""Is an lmdb file safe to open? lmdb trusts its pages: a wrong pointer in one, or a file cut short, kills the process.

Walks every tree of the newest meta page, a level at a time, and looks at what lmdb would follow without looking: page
numbers, kinds, bounds of the node table, lengths of nodes. Values have checks of their own (records.py). Format: LMDB 0.9,
lmdb.h/mdb.c (MDB_DATA_VERSION 1), 64-bit little-endian; a file of another version is left to lmdb, which names it.

    page   | pgno u64 | pad u16 | flags u16 | lower u16 | upper u16 | node offsets u16 ... | free | nodes |
    node   | lo u16 | hi u16 | flags u16 | key length u16 | key | value, or number of its pages, or a tree |
"""

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import TierIOError

DATA_MDB = "data.mdb"
"""The file of an environment, in its folder."""

_MAGIC = 0xBEEFC0DE
_VERSION = 1
_BRANCH, _LEAF, _OVERFLOW, _META = 1, 2, 4, 8
_BIG, _TREE = 1, 2  # node flags: value on pages of its own; value is a tree
_PAGE_HEADER = 16
_NODE_HEADER = 8
_TREE_RECORD = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, branch, leaf and overflow pages, entries, root
_META_FIELDS = struct.Struct(
    "<IIQQ48s48sQQ"
)  # magic, version, address, map size, free tree, main tree, last page, txn id
_LARGEST_PAGE = 65536
_NO_PAGE = (1 << 64) - 1
_PAGES_AT_ONCE = 2048
_READ_NBYTES = 1 << 20

Pages = NDArray[np.uint8]


class _Damaged(Exception):
    """Never leaves this file."""


class _Tree(NamedTuple):
    depth: int
    root: int


def require_sound(folder: Path) -> None:
    """Raises TierIOError when lmdb must not open the environment in `folder`, OSError when it cannot be read. None there,
    or an empty one: sound. A gigabyte takes about a second."""
    path = folder / DATA_MDB
    if not path.exists() or not path.stat().st_size:
        return
    try:
        _check(path)
    except _Damaged as err:
        raise TierIOError(
            f"nvme: {path} is damaged ({err}); kvstore check --repair makes an empty index", tier="nvme", errno=0
        ) from err


def is_another_version(folder: Path) -> bool:
    """Whole for all we know, but of an lmdb that we do not: both meta pages name one other version. Raises OSError."""
    path = folder / DATA_MDB
    if not path.exists():
        return False
    with path.open("rb") as file:
        head = file.read(_LARGEST_PAGE + _PAGE_HEADER + _META_FIELDS.size)
    if len(head) < _PAGE_HEADER + _META_FIELDS.size:
        return False
    magic, version, *_, free, _, _, _ = _META_FIELDS.unpack_from(head, _PAGE_HEADER)
    second = struct.unpack_from("<I", free)[0] + _PAGE_HEADER  # behind the first page, whose size is there
    return magic == _MAGIC and version != _VERSION and head[second : second + 8] == struct.pack("<II", magic, version)


def _check(path: Path) -> None:
    _read_once(path)
    _check_pages(np.memmap(path, np.uint8, "r"))


def _read_once(path: Path) -> None:
    """A sector that cannot be read is an OSError here; in a mapping, ours or lmdb's, it would be SIGBUS. Warms the cache."""
    buffer = bytearray(_READ_NBYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _check_pages(raw: Pages) -> None:
    metas = _metas(raw)
    if metas is None:
        return
    page_nbytes, free, main, last_page = metas
    if (last_page + 1) * page_nbytes > len(raw):
        raise _Damaged(f"cut short: {len(raw)} bytes, {(last_page + 1) * page_nbytes} belong to it")
    pages = raw[: (last_page + 1) * page_nbytes].reshape(last_page + 1, page_nbytes)
    seen = np.zeros(last_page + 1, np.bool_)
    for tree in (free, main):
        for subtree in _walk(pages, tree, seen):
            _walk(pages, subtree, seen)


def _metas(raw: Pages) -> tuple[int, _Tree, _Tree, int] | None:
    """Page size, both trees and last page of the newest meta page; None: of another version."""
    if len(raw) < _PAGE_HEADER + _META_FIELDS.size:
        raise _Damaged(f"{len(raw)} bytes")
    first = _META_FIELDS.unpack_from(raw.data, _PAGE_HEADER)
    if first[0] != _MAGIC:
        raise _Damaged("not an lmdb file")
    if first[1] != _VERSION:
        return None
    page_nbytes = struct.unpack_from("<I", first[4])[0]
    if (
        page_nbytes < 512
        or page_nbytes > _LARGEST_PAGE
        or page_nbytes & (page_nbytes - 1)
        or len(raw) < 2 * page_nbytes
    ):
        raise _Damaged(f"page size {page_nbytes}")
    metas = [first, _META_FIELDS.unpack_from(raw.data, page_nbytes + _PAGE_HEADER)]
    for number, meta in enumerate(metas):
        flags = struct.unpack_from("<H", raw.data, number * page_nbytes + 10)[0]
        if meta[:2] != (_MAGIC, _VERSION) or not flags & _META:
            raise _Damaged(f"meta page {number}")
    newest = max(metas, key=lambda meta: meta[7])
    return page_nbytes, _tree(newest[4]), _tree(newest[5]), newest[6]


def _tree(record: bytes) -> _Tree:
    _, _, depth, *_, root = _TREE_RECORD.unpack(record)
    return _Tree(depth, root)


def _walk(pages: Pages, tree: _Tree, seen: NDArray[np.bool_]) -> list[_Tree]:
    """Check every page of `tree`, mark them in `seen`; the trees that its leaves hold."""
    if tree.root == _NO_PAGE:
        return []
    if not 0 < tree.depth < 32:
        raise _Damaged(f"a tree of depth {tree.depth}")
    level = np.array([tree.root], np.uint64)
    for _ in range(tree.depth - 1):
        _claim(level, seen)
        level = np.concatenate([_children(part, pages) for part in _parts(level)])
    _claim(level, seen)
    return [subtree for part in _parts(level) for subtree in _check_leaves(part, pages, seen)]


def _parts(level: NDArray[np.uint64]) -> list[NDArray[np.uint64]]:
    return np.array_split(level, -(-len(level) // _PAGES_AT_ONCE))


def _claim(numbers: NDArray[np.uint64], seen: NDArray[np.bool_]) -> None:
    """A page belongs to one tree once; so walking ends."""
    if (numbers >= len(seen)).any() or (numbers < 2).any():
        raise _Damaged("a pointer out of the file")
    if seen[numbers].any() or len(np.unique(numbers)) != len(numbers):
        raise _Damaged("a page in two places")
    seen[numbers] = True


def _nodes(numbers: NDArray[np.uint64], pages: Pages, kind: int) -> tuple[Pages, NDArray[np.intp], NDArray[np.int64]]:
    """These pages flat, and of each node the page (index into `numbers`) and its start; bounds checked."""
    found = pages[numbers]
    page_nbytes = found.shape[1]
    head = found[:, :_PAGE_HEADER].copy()
    pgno = head.view(np.uint64)[:, 0]
    flags, lower, upper = (head.view(np.uint16)[:, column].astype(np.int64) for column in (5, 6, 7))
    if (pgno != numbers).any() or ((flags & 0xF) != kind).any():
        raise _Damaged("a page of another place or kind")
    if ((lower < _PAGE_HEADER + 2) | (lower > upper) | (upper > page_nbytes) | (lower % 2 == 1)).any():
        raise _Damaged("a page's node table")
    counts = (lower - _PAGE_HEADER) // 2
    table = found[:, _PAGE_HEADER : _PAGE_HEADER + 2 * int(counts.max())].copy().view(np.uint16)
    page, column = np.nonzero(np.arange(table.shape[1]) < counts[:, None])
    starts = table[page, column].astype(np.int64)
    if ((starts < upper[page]) | (starts + _NODE_HEADER > page_nbytes) | (starts % 2 == 1)).any():
        raise _Damaged("a node's place")
    return found.reshape(-1), page, starts


def _fields(flat: Pages, page: NDArray[np.intp], starts: NDArray[np.int64], page_nbytes: int) -> NDArray[np.int64]:
    """lo, hi, flags, key length of each node; nodes start at even addresses."""
    words = (page * page_nbytes + starts) // 2
    fields: NDArray[np.int64] = flat.view(np.uint16)[words[:, None] + np.arange(4)].astype(np.int64)
    return fields


def _children(numbers: NDArray[np.uint64], pages: Pages) -> NDArray[np.uint64]:
    flat, page, starts = _nodes(numbers, pages, _BRANCH)
    low, high, top, key_nbytes = _fields(flat, page, starts, pages.shape[1]).T
    if (starts + _NODE_HEADER + key_nbytes > pages.shape[1]).any():
        raise _Damaged("a key's length")
    children: NDArray[np.uint64] = (low | high << 16 | top << 32).astype(np.uint64)
    return children


def _check_leaves(numbers: NDArray[np.uint64], pages: Pages, seen: NDArray[np.bool_]) -> list[_Tree]:
    flat, page, starts = _nodes(numbers, pages, _LEAF)
    low, high, flags, key_nbytes = _fields(flat, page, starts, pages.shape[1]).T
    value_nbytes = low | high << 16
    inside_nbytes = np.where(flags & _BIG, 8, value_nbytes)
    if (starts + _NODE_HEADER + key_nbytes + inside_nbytes > pages.shape[1]).any() or (flags & ~(_BIG | _TREE)).any():
        raise _Damaged("a node's length")
    if ((flags & _TREE != 0) & (value_nbytes != _TREE_RECORD.size)).any():
        raise _Damaged("the record of a tree")
    values = page * pages.shape[1] + starts + _NODE_HEADER + key_nbytes
    for node in np.flatnonzero(flags & _BIG):
        _check_overflow(
            int(flat[values[node] : values[node] + 8].view(np.uint64)[0]), int(value_nbytes[node]), pages, seen
        )
    trees = values[np.flatnonzero(flags & _TREE)]
    return [_tree(flat[value : value + _TREE_RECORD.size].tobytes()) for value in trees]


def _check_overflow(first: int, value_nbytes: int, pages: Pages, seen: NDArray[np.bool_]) -> None:
    count = -(-(_PAGE_HEADER + value_nbytes) // pages.shape[1])
    if first + count > len(pages):
        raise _Damaged("a long value out of the file")
    _claim(np.arange(first, first + count, dtype=np.uint64), seen)
    number, _, flags, used = struct.unpack_from("<QHHI", pages[first].data)
    if number != first or (flags & 0xF) != _OVERFLOW or used < count:
        raise _Damaged("a long value's pages")
