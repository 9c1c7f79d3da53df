"""Kinds of numbers on the command line: text in, value out. click adds the option's name to what is refused here."""

import math
import re
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import click

from kvstore.costs import LoadCost
from kvstore.tables.names import nearest, simple
from kvstore.tables.rows import devices

_DECIMAL = {f"{prefix}b": 1000.0**power for power, prefix in enumerate(("", "k", "m", "g", "t"))}
_BINARY = {f"{prefix}ib": 1024.0**power for power, prefix in enumerate(("k", "m", "g", "t"), start=1)}
_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)"

_LARGEST = 1e18  # bytes; and what is squared, or divided by another such, stays finite

MAX_LIST = 32
"""Entries of a list: each is a line of a table."""


class Link(NamedTuple):
    """A way for bytes, as it is called."""

    name: str
    cost: LoadCost


def number(*, above: float | None = None, least: float | None = None, most: float = math.inf) -> Callable[[str], float]:
    """A type for click: finite, in the range."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        low = value > above if above is not None else least is None or value >= least
        if not math.isfinite(value) or not low or value > most:
            raise click.BadParameter(f"{text!r}; use {right}")
        return value

    start = f" above {above:g}" if above is not None else "" if least is None else f" from {least:g}"
    right = f"a number{start}" + (f" to {most:g}" if most < math.inf else "")
    return number


def whole(least: int, most: int) -> Callable[[str], int]:
    """A type for click, as its IntRange, but its help does not show a bound that nobody comes near."""

    def integer(text: str) -> int:
        digits = str(text).strip()
        if not re.fullmatch(r"\d{1,18}", digits, re.ASCII) or not least <= int(digits) <= most:
            raise click.BadParameter(f"{text!r}; use a whole number from {least:,} to {most:,}")
        return int(digits)

    return integer


COUNT = whole(1, 1 << 48)
POSITIVE = number(least=1e-12, most=1e15)
NOT_NEGATIVE = number(least=0, most=1e15)
SHARE = number(least=0, most=1)
POSITIVE_SHARE = number(above=0, most=1)


def size(text: str) -> float:
    """Bytes, above 0, with a unit, decimal or binary: 40GiB, 80GB."""
    found = re.fullmatch(rf"\s*{_NUMBER}\s*([A-Za-z]*[B])\s*", text, re.ASCII)  # a small b would be bits
    unit = (_DECIMAL | _BINARY).get(found[2].lower()) if found else None
    if not found or unit is None or not 1 <= float(found[1]) * unit <= _LARGEST:
        raise click.BadParameter(f"{text!r}; use a size with its unit, such as 40GiB or 80GB")
    return float(found[1]) * unit


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers above 0, separated by commas, such as 1,8,32: in order, each once, at most MAX_LIST."""
    parts = [part.strip() for part in text.split(",")]
    whole = all(re.fullmatch(r"\d{1,12}", part, re.ASCII) and int(part) for part in parts)
    if not whole or len(parts) > MAX_LIST:
        raise click.BadParameter(f"{text!r}; use whole numbers above 0, at most {MAX_LIST} of them, such as 1,8,32")
    return tuple(sorted({int(part) for part in parts}))


def efficiency(text: str) -> tuple[float, float]:
    """Two shares of a peak, of GEMMs and of attention: 0.64,0.57."""
    found = re.fullmatch(rf"\s*{_NUMBER}\s*,\s*{_NUMBER}\s*", text, re.ASCII)
    if not found or not all(0 < float(part) <= 1 for part in found.groups()):
        raise click.BadParameter(f"{text!r}; use two shares above 0 to 1, of GEMMs and of attention, such as 0.64,0.57")
    return float(found[1]), float(found[2])


def link(text: str) -> Link:
    """NAME=GB/s,ms; or a rate, 400Gb/s (bits) or 50GB/s (bytes); or a device of the table of hardware by name."""
    named = re.fullmatch(rf"([^=]*[^=\s])\s*=\s*{_NUMBER}\s*(?:,\s*{_NUMBER}\s*)?", text, re.ASCII)
    if named:
        return _checked(text, Link(named[1].strip(), LoadCost(float(named[3] or 0) / 1e3, float(named[2]) * 1e9)))
    rate = re.fullmatch(rf"\s*{_NUMBER}\s*([kKMGT]?)(bit|b|B)(?:/s|ps)\s*", text, re.ASCII)
    if rate:
        bytes_per_s = float(rate[1]) * _DECIMAL[f"{rate[2].lower()}b"] / (1 if rate[3] == "B" else 8)
        return _checked(text, Link(text.strip(), LoadCost(0.0, bytes_per_s)))
    for row in devices().values():
        if simple(row.name) == simple(text):
            return Link(row.name, LoadCost(row.latency_s, row.bytes_per_s))
    near = ", ".join(repr(name) for name in nearest(text, list(devices())))
    raise click.BadParameter(
        f"{text!r}; use NAME=GB/s,ms (such as ndr=41,0.003), a rate (400Gb/s, 50GB/s), or a device; the nearest are {near}"
    )


def refuse(option: str, problem: str, right: str) -> NoReturn:
    """Raise UsageError: a value that is wrong beside others, or absent."""
    raise click.UsageError(f"{option}: {problem}; use {right}")


def _checked(text: str, found: Link) -> Link:
    if not 1 <= found.cost.bytes_per_s <= _LARGEST or not found.cost.latency_s <= _LARGEST:
        raise click.BadParameter(f"{text!r}; use a bandwidth from 1 B/s to 1 EB/s, such as ndr=41,0.003")
    return found
