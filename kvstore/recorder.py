"""Writes down the traffic of a sidecar, for `kvstore replay` and `kvstore size`: which blocks were asked for and stored.

    brain loop --- wanted, stored: keys as they came ---> bounded queue ---> thread: ids, JSON, gzip, file

One JSON object a line, as in Mooncake's traces with a few fields more; times in ms since the start of the recording:

    {"kvstore_recording": 1, "arena_bytes": ..., "segment_bytes": ..., "eviction": "adaptive", "tenant_quota": 1.0}
    {"namespace": 0, "tenant": "t0", "block_tokens": 16, "block_bytes": 2097152}
    {"timestamp": 27482, "input_length": 6955, "output_length": 0, "hash_ids": [46, ...], "had": 0, "found": 12,
     "namespace": 0}
    {"timestamp": 27511, "stored_ids": [471, 472], "behind": 470, "namespace": 0}
    {"timestamp": 27513, "used_ids": [901, 902], "namespace": 1}

The first line says who recorded; each namespace is named before it is used. A request is one that `usage` counts, as it
first asked: its tokens, its whole blocks, how many of the leading ones its engine had, and how many the sidecar found. What an
engine stores follows when it does, generated blocks too; with `behind` null it is the start of a sequence. Who replays with
less room has found blocks stored again where they are missing: the engine would have computed them.

Nothing of a prompt is in it. A key is a hash of tokens already; an id is 53 bits of a keyed hash of it, with a key that is made
anew for each recording and never written, so that nobody can try out prompts on a recording, or join two. Tenants are numbered.

Blocks of a model's further layer groups are read with a request that is counted already: `used_ids`. Not in it: Drop, Pin,
times to live, blocks of other nodes (they count as found). A replay with LRU gives the hits of the sidecar to the token; with a
policy that counts uses, to a percent: which uses are one depends on milliseconds.

A recording that has reached its limit ends there (with the next 64 KiB): its start is cold, as the sidecar was. A file that is
there is kept as FILE.before, in place of an older one, if there is something in it; one that another sidecar writes is left
alone, and its name refused. When the queue is full, records are dropped and counted. When the disk is, the recording ends, and
what would have come is counted as dropped.
"""

import contextlib
import errno
import fcntl
import gzip
import hashlib
import json
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from kvstore.core.errors import ConfigError
from kvstore.core.keys import KVSpec, unpack_keys
from kvstore.core.limits import MAX_QUEUED_RECORD_BYTES, MAX_REMEMBERED_IDS

logger = logging.getLogger(__name__)

HEADER, FORMAT = "kvstore_recording", 1

_FLUSH_S = 1.0
_WRITE_BYTES = 1 << 16  # of lines put together
_SALT_NBYTES = 32
_ID_NBYTES, _ID_SHIFT = 8, 11  # 53 bits: whole numbers in any JSON reader
_RECORD_NBYTES = 256  # beside its keys
_COMPRESSION = 3
_KEYS_AT_ONCE = 256  # some 0.3 ms


class _Record(NamedTuple):
    at_s: float
    namespace: bytes
    tenant: str
    spec: KVSpec
    keys: bytes
    fields: dict[str, Any]
    ids: Literal["hash_ids", "stored_ids", "used_ids"]  # what `keys` are


class Recorder:
    """`wanted` and `stored` are the loop's, and never wait; `open` and `close` may be called from any thread, once each."""

    def __init__(self, path: Path, limit_bytes: int, header: Mapping[str, Any]) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._header = {HEADER: FORMAT, **header}
        self._queue: queue.SimpleQueue[_Record | None] = queue.SimpleQueue()
        self._put_bytes = 0  # the loop's alone
        self._taken_bytes = 0  # the thread's alone
        self._started_s: float | None = None
        self._running = False
        self._failed = False  # it ended before its limit, by its disk
        self._num_dropped = 0  # by the loop
        self._num_lost = 0  # by the thread
        self._num_lines = 0
        self._num_bytes = 0
        self._ids = _Ids()
        self._spaces: dict[bytes, int] = {}
        self._tenants: dict[str, int] = {}
        self._out: gzip.GzipFile | BinaryIO
        self._file: BinaryIO
        self._thread = threading.Thread(target=self._run, name="kvstore-record", daemon=True)

    def open(self) -> None:
        """Begin the file. Raises ConfigError."""
        try:
            if self._path.exists():
                self._set_aside()
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            _lock(descriptor, self._path)
        except OSError as err:
            raise ConfigError(
                f"record: cannot write {self._path}: {err}; use a file of this sidecar's own, in a directory that is there",
                field="record",
                value=str(self._path),
            ) from err
        self._file = os.fdopen(descriptor, "wb")
        if self._path.suffix == ".gz":
            self._out = gzip.GzipFile(fileobj=self._file, mode="wb", compresslevel=_COMPRESSION)
        else:
            self._out = self._file
        self._running = True
        self._thread.start()

    def wanted(
        self,
        namespace: bytes,
        tenant: str,
        spec: KVSpec,
        keys: bytes,
        now_s: float,
        *,
        num_tokens: int,
        num_had: int,
        num_found: int,
    ) -> None:
        """A request asked for these blocks, packed keys; so many leading ones its engine had itself, and so many were found."""
        fields = {"input_length": num_tokens, "output_length": 0, "had": num_had, "found": num_found}
        self._put(_Record(now_s, namespace, tenant, spec, keys, fields, "hash_ids"))

    def stored(self, namespace: bytes, tenant: str, spec: KVSpec, parent: bytes, keys: bytes, now_s: float) -> None:  # noqa: PLR0917
        """An engine stores these behind the block `parent`; b"": they are the first."""
        self._put(_Record(now_s, namespace, tenant, spec, keys, {"behind": parent}, "stored_ids"))

    def used(self, namespace: bytes, tenant: str, spec: KVSpec, keys: bytes, now_s: float) -> None:
        """A request that is counted already reads these too, of another layer group."""
        self._put(_Record(now_s, namespace, tenant, spec, keys, {}, "used_ids"))

    def counters(self) -> dict[str, int]:
        """As in kvstore/counters.py."""
        return {
            "recorded_lines_total": self._num_lines,
            "recorded_bytes_total": self._num_bytes,
            "dropped_records_total": self._num_dropped + self._num_lost,
        }

    def close(self, deadline_s: float) -> bool:
        """Write what is queued, end the file; whether that was done by then."""
        self._queue.put(None)
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _set_aside(self) -> None:
        """What is there, unless somebody writes it now. Raises OSError."""
        if not self._path.is_file():
            raise FileExistsError(errno.EEXIST, "it is there, and no file", str(self._path))
        with self._path.open("ab") as before:
            _lock(before.fileno(), self._path)
            if before.tell():
                self._path.replace(self._path.with_name(self._path.name + ".before"))
            else:
                self._path.unlink()

    def _put(self, record: _Record) -> None:
        nbytes = len(record.keys) + _RECORD_NBYTES
        if self._failed or self._put_bytes - self._taken_bytes + nbytes > MAX_QUEUED_RECORD_BYTES:
            self._num_dropped += 1
            return
        if not self._running:
            return
        self._put_bytes += nbytes
        self._queue.put(record)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._follow()
            self._out.close()
            self._file.close()
        except OSError as err:
            self._failed = True
            logger.warning("recording ended path=%s reason=%s", self._path, err)
            with contextlib.suppress(OSError):  # what is still in buffers: the same disk, the same reason
                self._out.close()
            with contextlib.suppress(OSError):
                self._file.close()
        finally:
            self._running = False
            while not self._queue.empty():
                self._num_lost += self._queue.get() is not None

    def _follow(self) -> None:
        """Until `close`, or the limit."""
        lines = [_line(self._header)]
        flush_s = time.monotonic() + _FLUSH_S
        is_open = True
        while is_open:
            try:
                record = self._queue.get(timeout=max(0.0, flush_s - time.monotonic()))
            except queue.Empty:
                pass
            else:
                is_open = record is not None
                if record is not None:
                    self._taken_bytes += len(record.keys) + _RECORD_NBYTES
                    lines += self._lines(record)
            if is_open and time.monotonic() < flush_s and sum(map(len, lines)) < _WRITE_BYTES:
                continue
            self._flush(lines)
            lines, flush_s = [], time.monotonic() + _FLUSH_S
            if self._num_bytes >= self._limit_bytes:
                logger.info("recording is full path=%s bytes=%d", self._path, self._num_bytes)
                return

    def _flush(self, lines: list[bytes]) -> None:
        if lines:
            try:
                self._out.write(b"".join(lines))
                self._out.flush()
                self._file.flush()
            except OSError:
                self._num_lost += len(lines)
                raise
            self._num_lines += len(lines)
            self._num_bytes = self._file.tell()

    def _lines(self, record: _Record) -> list[bytes]:
        """That of a record, behind that of its namespace when it is the first one of it."""
        lines = []
        number = self._spaces.get(record.namespace)
        if number is None:
            number = self._spaces[record.namespace] = len(self._spaces)
            tenant = self._tenants.setdefault(record.tenant, len(self._tenants))
            tokens, nbytes = record.spec.block_tokens, record.spec.block_nbytes
            space = {"namespace": number, "tenant": f"t{tenant}", "block_tokens": tokens, "block_bytes": nbytes}
            lines.append(_line(space))
        if self._started_s is None:
            self._started_s = record.at_s
        ids = self._ids.of(record.namespace, unpack_keys(record.keys, record.spec.hash.digest_nbytes))
        fields = {"timestamp": round(1000 * (record.at_s - self._started_s), 3), **record.fields, record.ids: ids}
        if record.ids == "stored_ids":
            parent = fields["behind"]
            fields["behind"] = self._ids.of(record.namespace, [parent])[0] if parent else None
        return [*lines, _line({**fields, "namespace": number})]


class _Ids:
    """Numbers that stand for keys in one recording."""

    def __init__(self) -> None:
        self._salt = secrets.token_bytes(_SALT_NBYTES)
        self._known: dict[
            bytes, int
        ] = {}  # a keyed hash costs twenty times a look-up, and prefixes come again and again

    def of(self, namespace: bytes, keys: list[bytes]) -> list[int]:
        """One for each."""
        if len(self._known) > MAX_REMEMBERED_IDS:
            self._known.clear()
        numbers: list[int] = []
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            named = [namespace + key for key in keys[start : start + _KEYS_AT_ONCE]]
            numbers += [self._known.get(each) or self._add(each) for each in named]
            time.sleep(0)  # the loop may have the interpreter
        return numbers

    def _add(self, named: bytes) -> int:
        digest = hashlib.blake2b(named, digest_size=_ID_NBYTES, key=self._salt).digest()
        number = self._known[named] = int.from_bytes(digest, "little") >> _ID_SHIFT
        return number


def _lock(descriptor: int, path: Path) -> None:
    """Until it is closed, by the end of the process at the latest. Raises OSError if another process has it; where files cannot
    be locked none has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as err:
        raise FileExistsError(errno.EEXIST, "another sidecar records there", str(path)) from err
    except OSError as err:
        logger.info("recording is not locked path=%s reason=%s", path, err)


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"
