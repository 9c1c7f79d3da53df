"""Names for the prefixes of a prompt: equal names, equal beginnings.

    body's text   | 128 bytes | 128 bytes | 128 bytes | rest |
    keys              k1          k2          k3                 k_i = hash(chunk i, seeded with k_i-1)

k0 is a hash of what separates caches though the text be equal: model, salt, tools. The text is the JSON as the client wrote it;
a chat's next turn repeats the messages before it byte for byte. Whatever cannot be read here has no keys and goes to the
engine as it is, which says what is wrong with it.
"""

from collections.abc import Mapping

import msgspec
import xxhash

CHUNK_BYTES = 128
"""Some 30 tokens: two blocks of 16."""

MAX_CHUNKS = 8192
"""Of one prompt, 1 MiB of text. What comes behind does not matter for the choice."""

Keys = tuple[int, ...]


class _Body(msgspec.Struct):
    """The fields that decide what is cached."""

    model: msgspec.Raw = msgspec.Raw()
    messages: list[msgspec.Raw] | None = None
    prompt: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()
    kvstore: msgspec.Raw = msgspec.Raw()  # may hold a salt; requests that differ in the rest are few


def read_keys(body: bytes, headers: Mapping[str, str]) -> Keys:
    """Of a request for /v1/chat/completions or /v1/completions."""
    try:
        fields = msgspec.json.decode(body, type=_Body)
    except (msgspec.DecodeError, RecursionError):
        return ()
    apart = (fields.model, fields.tools, fields.cache_salt, fields.kvstore, headers.get("x-kvstore-salt", "").encode())
    text = bytes(fields.prompt)[:-1]  # without the quote or bracket that ends it
    if fields.messages is not None:
        text = b"".join(bytes(message) for message in fields.messages)
    return _chained(text, xxhash.xxh3_64_intdigest(b"\0".join(bytes(part) for part in apart)))


def _chained(text: bytes, key: int) -> Keys:
    keys = []
    for end in range(CHUNK_BYTES, min(len(text), MAX_CHUNKS * CHUNK_BYTES) + 1, CHUNK_BYTES):
        key = xxhash.xxh3_64_intdigest(text[end - CHUNK_BYTES : end], key)
        keys.append(key)
    return tuple(keys)
