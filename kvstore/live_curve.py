"""What this sidecar would have hit with more RAM or less, from its own traffic, all the time.

    Match   -> wanted: each block counts once a request, with its tokens       (dispatcher, when usage takes it for a new one)
               Acquire of a further layer group uses blocks with them, which take room
    Reserve -> stored: prompts and what was generated behind them; what an engine does not store is no hit either

A block has the size of its slot in RAM, so that namespaces with blocks of different sizes share one curve over bytes, and hits
are counted in tokens, as in the account of tokens. Tenants and namespaces never share a block. The curve is that of leaf-first
LRU with everything stored that was offered: what a planner declines, a drive loses or a quota takes is not in it. What was
counted counts for half after HALF_LIFE_S, and a block that was not used for a day is forgotten, so that "without end" means a
day's blocks kept. Of blocks that come and go a sample is followed, which never grows beyond a megabyte; a flood of new blocks
makes it sparser for good. Loop thread only.
"""

from typing import NamedTuple

import numpy as np

from kvstore.core.blocks import slot_nbytes
from kvstore.core.keys import KVSpec
from kvstore.core.limits import SLOT_ALIGN_BYTES
from kvstore.reuse_curve import Hashes, ReuseCurve

EPOCH_S = 3600.0
HALF_LIFE_S = 6 * EPOCH_S
FORGET_S = 24 * EPOCH_S

CAPACITIES = {"0.5x": 0.5, "1x": 1.0, "2x": 2.0, "4x": 4.0, "8x": 8.0}
"""Of the RAM that there is."""
WITH_DRIVES, ENDLESS = "drives", "endless"

_STEPS_PER_DOUBLING = 2
_DOUBLINGS = 6  # of the RAM, up and down, that the curve shows
_MAX_STEPS = 64
_FEW_TOKENS = 10_000  # tell nothing
_HASH_NBYTES = 8
_ODD, _HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)  # multiplicative hashing, with the golden ratio


class CapacityHits(NamedTuple):
    """Hits of a tier of some size. Named as in kvstore.proto."""

    capacity: str
    bytes: int  # 0: without end
    hit_rate: float  # part of the requested tokens


class CurveFigures(NamedTuple):
    """The curve as it is told. Named as in kvstore.proto."""

    requested_tokens: float
    followed_part: float
    followed_blocks: int
    memory_bytes: int
    capacities: tuple[CapacityHits, ...]
    bytes: tuple[float, ...]  # ascending; with hit_rates, the curve
    hit_rates: tuple[float, ...]
    words: str


class LiveCurve:
    """Told of what engines want and store; time comes in."""

    def __init__(self) -> None:
        self._curve = ReuseCurve()
        self._epoch_ends_s: float | None = None

    def wanted(
        self,
        namespace: bytes,
        spec: KVSpec,
        keys: bytes,
        now_s: float,
        *,
        num_tokens: int,
        num_had: int,
        num_found: int,
    ) -> None:
        """A request wants `num_tokens`, most of them in the blocks of `keys` (packed). Of the leading ones its engine has so many
        itself, and so many were found: those may have been stored before our start."""
        self._age(now_s)
        hashes = _hashes(namespace, spec, keys)
        self._curve.wanted(
            hashes,
            size=_size(spec),
            value=float(spec.block_tokens),
            num_had=num_had,
            num_found=num_found,
            extra=float(max(0, num_tokens - len(hashes) * spec.block_tokens)),
        )

    def used(self, namespace: bytes, spec: KVSpec, keys: bytes) -> None:
        """A request that is counted already uses these too: blocks of a further layer group take room and have no tokens."""
        self._curve.used(_hashes(namespace, spec, keys), size=_size(spec))

    def stored(self, namespace: bytes, spec: KVSpec, keys: bytes) -> None:
        """Blocks are offered for storage, whether or not there is room now."""
        self._curve.stored(_hashes(namespace, spec, keys), size=_size(spec))

    def figures(self, ram_bytes: int, drive_bytes: int) -> CurveFigures:
        """Around the RAM that there is, and up to the drives. They hold what RAM has too, so the larger of the two counts."""
        curve = self._curve
        named = {name: int(part * ram_bytes) for name, part in CAPACITIES.items()}
        if drive_bytes:
            named[WITH_DRIVES] = max(ram_bytes, drive_bytes)
        sizes = _steps(ram_bytes, drive_bytes)
        rates = curve.hit_rates([each / SLOT_ALIGN_BYTES for each in (*named.values(), *sizes)])
        capacities = [*map(CapacityHits, named, named.values(), rates), CapacityHits(ENDLESS, 0, curve.best_hit_rate())]
        return CurveFigures(
            requested_tokens=curve.total,
            followed_part=curve.rate,
            followed_blocks=curve.num_followed,
            memory_bytes=curve.nbytes,
            capacities=tuple(capacities),
            bytes=tuple(sizes),
            hit_rates=tuple(rates[len(named) :]),
            words=_words(curve.total, {each.capacity: each for each in capacities}),
        )

    def _age(self, now_s: float) -> None:
        if self._epoch_ends_s is None:
            self._epoch_ends_s = now_s + EPOCH_S
        if now_s >= self._epoch_ends_s:
            num_epochs = 1 + int((now_s - self._epoch_ends_s) // EPOCH_S)
            self._curve.age(0.5 ** (num_epochs * EPOCH_S / HALF_LIFE_S), num_epochs, round(FORGET_S / EPOCH_S))
            self._epoch_ends_s += num_epochs * EPOCH_S


def _hashes(namespace: bytes, spec: KVSpec, keys: bytes) -> Hashes:
    """A number for each block, of all of its key, other ones in another namespace. Keys are hashes; those of an engine that
    counts instead are spread all the same, or the sample would be all of them, or none."""
    words = np.frombuffer(keys, "<u8").reshape(-1, spec.hash.digest_nbytes // _HASH_NBYTES)
    numbers: Hashes = words[:, 0] ^ np.frombuffer(namespace, "<u8", count=1)
    for column in range(1, words.shape[1]):
        numbers = numbers * _ODD ^ words[:, column]
    numbers *= _ODD
    numbers ^= numbers >> _HALF
    numbers *= _ODD
    return numbers


def _size(spec: KVSpec) -> int:
    """In pages."""
    return slot_nbytes(spec.block_nbytes) // SLOT_ALIGN_BYTES


def _steps(ram_bytes: int, drive_bytes: int) -> list[float]:
    """Sizes to draw: steps of a half doubling from a small part of the RAM to many times it, and beyond the drives."""
    if not ram_bytes:
        return []
    end = max(ram_bytes * 2.0**_DOUBLINGS, 2.0 * drive_bytes)
    sizes = [ram_bytes * 2.0 ** (step / _STEPS_PER_DOUBLING - _DOUBLINGS) for step in range(_MAX_STEPS)]
    return [each for each in sizes if each <= end]


def _words(tokens: float, hits: dict[str, CapacityHits]) -> str:
    """All of it in a sentence."""
    if tokens < _FEW_TOKENS:
        return "Too little was asked for so far to say what more RAM would bring."
    now, twice, endless = (_percent(hits[name].hit_rate) for name in ("1x", "2x", ENDLESS))
    drives = f", the drives {_percent(hits[WITH_DRIVES].hit_rate)}" if WITH_DRIVES in hits else ""
    more = f"twice the RAM would have hit {twice} instead of {now}{drives}"
    return f"Of the tokens asked for lately, {more}, and a day's blocks without end {endless}."


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"
