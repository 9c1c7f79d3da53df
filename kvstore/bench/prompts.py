"""Made-up prompts: a prompt is a row of pieces, and a piece's text depends on the seed and its name alone.

    prompt:  | piece ("system",) 500 tokens | piece ("question", 7) 40 tokens |

Pieces with equal names are equal text, and a shorter one is a prefix of a longer one: a trace's hash ids, a shared system
prompt and a document asked about twice are all said that way. Text is made when it is sent, since a trace of 10,000 requests
of 20,000 tokens would not fit into memory.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvstore.bench.words import WORDS

Name = tuple[str | int, ...]
"""What a piece is called."""

_WORDS = [" " + word for word in WORDS]


class Piece(NamedTuple):
    """Part of a prompt: `num_tokens` tokens of the endless text that goes by `name`."""

    name: Name
    num_tokens: int


Pieces = tuple[Piece, ...]


def num_tokens(pieces: Sequence[Piece]) -> int:
    """Length that was asked for; a server's own count differs by its template and tokenizer."""
    return sum(piece.num_tokens for piece in pieces)


def make_text(seed: int, pieces: Sequence[Piece]) -> str:
    """Words, each with a space before it, so that pieces join without changing one another's tokens."""
    words = _WORDS
    return "".join([words[draw] for piece in pieces for draw in _draw(seed, piece, len(words))])


def make_token_ids(seed: int, pieces: Sequence[Piece], *, first: int, last: int) -> list[int]:
    """Token ids from `first` to `last`, both included."""
    return [draw + first for piece in pieces for draw in _draw(seed, piece, last - first + 1)]


def generator(seed: int, *name: str | int) -> np.random.Generator:
    """A stream of its own for every name, the same on every machine."""
    digest = hashlib.sha256(repr((seed, name)).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def _draw(seed: int, piece: Piece, choices: int) -> list[int]:
    """From raw 64-bit draws: NumPy promises those to stay as they are, but not what `integers` makes of them. The modulo's
    bias, choices / 2^64, does not matter here."""
    raw = generator(seed, "piece", *piece.name).bit_generator.random_raw(piece.num_tokens)
    drawn: list[int] = (raw % np.uint64(choices)).tolist()
    return drawn
