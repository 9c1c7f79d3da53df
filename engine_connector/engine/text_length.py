"""The fewest tokens that a text can have, from its length in bytes: what is refused by it need not be encoded first."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

_NFC_SHRINKS = 4
"""Composed, no character is shorter than a fourth of what it is composed of: the worst is U+0390, 7 bytes to 2."""

_ALL_BYTES = frozenset(range(256))
_RARE_BYTES = frozenset([*range(0x20), 0x7F, 0xC0, 0xC1, *range(0xF1, 0x100)])
"""Control characters, what begins planes without characters, and what is in no UTF-8. Vocabularies lack some of them, and what a
vocabulary lacks is dropped. Characters without them have none when they are composed either."""


class TextLength(NamedTuple):
    """Of one tokenizer."""

    most_bytes: int  # of a text that one token can stand for; 0: not known, any amount of it may be dropped
    dropped: bytes  # values that no token stands for

    def least_tokens(self, text: str) -> int:
        """0 when there is no telling."""
        if not self.most_bytes:
            return 0
        return -(-len(text.encode(errors="replace").translate(None, self.dropped)) // self.most_bytes)


def text_length(pipeline: Tokenizer, bytes_of_id: Sequence[bytes]) -> TextLength:
    """What can be said of `pipeline`, whose tokens stand for `bytes_of_id`."""
    parts = json.loads(pipeline.to_str())
    added = parts["added_tokens"]
    normalizers = [part["type"] for part in _steps(parts["normalizer"], "normalizers")]
    lacking = _ALL_BYTES.difference(data[0] for data in bytes_of_id if len(data) == 1)
    drops = (
        any(kind != "NFC" for kind in normalizers)
        or any(not _keeps_all(part) for part in _steps(parts["pre_tokenizer"], "pretokenizers"))
        or any(token["lstrip"] or token["rstrip"] for token in added)
        or not lacking <= _RARE_BYTES
    )
    if drops:
        return TextLength(0, b"")
    longest = max(len(data) for data in (*bytes_of_id, *(token["content"].encode() for token in added)))
    return TextLength(longest * (_NFC_SHRINKS if normalizers else 1), bytes(sorted(lacking)))


def _steps(part: dict[str, Any] | None, name: str) -> Iterator[dict[str, Any]]:
    if part is None:
        return
    if part["type"] == "Sequence":
        for each in part[name]:
            yield from _steps(each, name)
    else:
        yield part


def _keeps_all(pre_tokenizer: dict[str, Any]) -> bool:
    if pre_tokenizer["type"] == "Split":
        return bool(pre_tokenizer["behavior"] != "Removed")
    return pre_tokenizer["type"] in {"ByteLevel", "Digits"}
