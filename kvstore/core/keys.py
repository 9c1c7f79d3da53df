"""Identity: what makes two KV blocks the same block, on any process of any machine.

A block's address is (namespace, prefix hash). The namespace is the digest of everything that decides the block's bytes
(`KVSpec`) and of the tenant; the prefix hash is chained over the tokens, so one hash names a whole prefix:

    root            = H("kvstore/root/1\\0" + seed)                          seed is UTF-8
    root with extra = H(root + for each extra key: u32le length + bytes)      LoRA, cache salt; only when there are any
    hash[i]         = H(hash[i-1] + token ids of block i as u32le + for each extra key of block i: u32le length + bytes)
    tail            = H(hash before it + its token ids as u32le + u32le length of "kvstore/tail" + "kvstore/tail")

Only full blocks have a hash, and the tail of a prompt that one instance hands over to another. Nothing here reads the
environment or calls `hash()`. The bytes are fixed by golden vectors in tests/unit/test_keys.py and written down in
transport/WIRE.md. Chaining as in vLLM's prefix cache (vllm/v1/core/kv_cache_utils.py); ours differs in having a canonical byte
encoding instead of pickle, and in keeping the model's identity in the namespace, which vLLM's hashes lack.
"""

import dataclasses
import hashlib
import json
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import xxhash

from kvstore.core.errors import SpecMismatch

_ROOT_DOMAIN = b"kvstore/root/1\0"
_NAMESPACE_DOMAIN = b"kvstore/namespace/1\0"
_TAIL_KEY = b"kvstore/tail"
NAMESPACE_NBYTES = 16

KVSTORE_PAGE_FORMAT = "kvstore:LHTPD"
"""Pages that `BlockLayout` describes. Anything else is `opaque:<engine>:<backend>` and only copied whole."""

QUANTISATIONS = ("fp8_e4m3", "int8")
"""What may be stored instead of the pages' own numbers, as `kvstore:LHTPD:<quantisation>`: one byte for a number, and a float32
scale for each layer, head and plane of a block. Lossy: an operator's choice, never a default."""

SCALE_NBYTES = 4

DTYPE_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
_QUANTISED_DTYPES = ("float32", "bfloat16", "float16")


def _sha256(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest()


_ALGORITHMS: dict[str, tuple[int, Callable[[bytes], bytes]]] = {
    "xxh3_128": (16, xxhash.xxh3_128_digest),  # fast; not collision-proof against an attacker
    "sha256": (32, _sha256),  # for tenants that must not trust each other
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HashScheme:
    """How prefix hashes are made. Engines whose schemes differ in any field never share a block.

    `algorithm` is `xxh3_128` or `sha256` (computed here), or `engine:<name>` for hashes an engine computes itself and we
    use verbatim; then `digest_nbytes` says how long they are (16 or 32).
    """

    algorithm: str = "xxh3_128"
    seed: str = ""
    block_tokens: int = 16
    digest_nbytes: int = 0

    def __post_init__(self) -> None:
        if self.algorithm in _ALGORITHMS:
            known = _ALGORITHMS[self.algorithm][0]
            if self.digest_nbytes not in (0, known):
                raise SpecMismatch(
                    f"hash.digest_nbytes: {self.digest_nbytes} given, {self.algorithm} makes {known}",
                    field="hash.digest_nbytes",
                    value=self.digest_nbytes,
                )
            object.__setattr__(self, "digest_nbytes", known)
        elif not self.algorithm.startswith("engine:"):
            raise SpecMismatch(
                f"hash.algorithm: {self.algorithm!r} is not known; use xxh3_128, sha256 or engine:<name>",
                field="hash.algorithm",
                value=self.algorithm,
            )
        if self.digest_nbytes not in (16, 32):
            raise SpecMismatch(
                f"hash.digest_nbytes: {self.digest_nbytes} given; keys are 16 or 32 bytes",
                field="hash.digest_nbytes",
                value=self.digest_nbytes,
            )
        _require_range("hash.block_tokens", self.block_tokens, 1, 4096)

    def root(self, extra_keys: Sequence[bytes] = ()) -> bytes:
        """The parent of a sequence's first block. `extra_keys` (LoRA name, cache salt) separate whole sequences."""
        digest = self._digest()
        root = digest(_ROOT_DOMAIN + self.seed.encode())
        return digest(root + _encode_extra(extra_keys)) if extra_keys else root

    def hash_blocks(
        self,
        token_ids: Sequence[int],
        *,
        parent: bytes | None = None,
        extra_keys: Mapping[int, Sequence[bytes]] | None = None,
    ) -> list[bytes]:
        """Hashes of the full blocks of `token_ids`; a trailing partial block has none.

        `parent` is the hash of the block before `token_ids` (default: `root()`). `extra_keys[i]` joins the hash of the
        i-th block here (an image that overlaps it). Token ids must lie in [0, 2**32). Costs about 0.5 ms for 8,192
        tokens with xxh3_128 (benchmarks/hashing.py).
        """
        digest = self._digest()
        packed = _pack_tokens(token_ids)
        step = 4 * self.block_tokens
        prefix = self.root() if parent is None else parent
        assert len(prefix) == self.digest_nbytes
        hashes: list[bytes] = []
        append = hashes.append
        if not extra_keys:
            for start in range(0, len(packed) - step + 1, step):
                prefix = digest(prefix + packed[start : start + step])
                append(prefix)
            return hashes
        for index, start in enumerate(range(0, len(packed) - step + 1, step)):
            prefix = digest(prefix + packed[start : start + step] + _encode_extra(extra_keys.get(index, ())))
            append(prefix)
        return hashes

    def tail_hash(self, token_ids: Sequence[int], *, parent: bytes | None = None) -> bytes:
        """Hash of the tokens behind a prompt's last full block, of which `parent` is the hash (default: `root()`). No block's
        hash and no other tail's: one that is a token longer shares nothing with it."""
        assert 0 < len(token_ids) < self.block_tokens
        prefix = self.root() if parent is None else parent
        assert len(prefix) == self.digest_nbytes
        return self._digest()(prefix + _pack_tokens(token_ids) + _encode_extra([_TAIL_KEY]))

    def _digest(self) -> Callable[[bytes], bytes]:
        assert self.algorithm in _ALGORITHMS, f"{self.algorithm} hashes are made by the engine"
        return _ALGORITHMS[self.algorithm][1]


def _pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as u32le. array('I') packs a list twice as fast as numpy; its item is 4 bytes on every CPython we run."""
    packed = array("I", token_ids)
    assert packed.itemsize == 4
    return packed.tobytes()


def _encode_extra(extra_keys: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(key)) + key for key in extra_keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """Everything that decides the bytes of one layer group's blocks. Two specs that differ anywhere never share.

    `weights` is a fingerprint of the weights' content (engine_connector/fingerprint.py), never a path or a display name.
    `planes` is 2 for K and V, 1 for an MLA latent. `group` names the layer group (its attention kind: `full`, `window:<n>`,
    `state`, with a suffix where a model has several of a kind). `page_format` is `kvstore:LHTPD` or `opaque:<engine>:<backend>`;
    an opaque block's size cannot be derived, so `opaque_block_nbytes` gives it. `dtype` is that of the engine's pages.
    `stored_format` equals `page_format` unless the operator chose a lossy one (QUANTISATIONS). `block_nbytes` is what is stored.
    """

    weights: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    rope: str = ""
    planes: int = 2
    block_tokens: int = 16
    group: str = "full"
    hash: HashScheme = dataclasses.field(default_factory=HashScheme)
    page_format: str = KVSTORE_PAGE_FORMAT
    stored_format: str = KVSTORE_PAGE_FORMAT
    opaque_block_nbytes: int = 0

    def __post_init__(self) -> None:
        if not self.weights:
            raise SpecMismatch("weights: empty; give the fingerprint of the weights", field="weights", value="")
        for name, low, high in (
            ("num_layers", 1, 4096),
            ("num_kv_heads", 1, 65536),
            ("head_dim", 1, 65536),
            ("planes", 1, 2),
            ("block_tokens", 1, 4096),
        ):
            _require_range(name, getattr(self, name), low, high)
        if self.block_tokens % self.hash.block_tokens:
            raise SpecMismatch(
                f"block_tokens: {self.block_tokens} is not a multiple of hash.block_tokens {self.hash.block_tokens}",
                field="block_tokens",
                value=self.block_tokens,
            )
        if self.page_format == KVSTORE_PAGE_FORMAT and self.dtype not in DTYPE_NBYTES:
            raise SpecMismatch(
                f"dtype: {self.dtype!r} is not known; use one of {', '.join(DTYPE_NBYTES)}",
                field="dtype",
                value=self.dtype,
            )
        if self.page_format != KVSTORE_PAGE_FORMAT:
            if not self.page_format.startswith("opaque:"):
                raise SpecMismatch(
                    f"page_format: {self.page_format!r} is not known; use {KVSTORE_PAGE_FORMAT} or opaque:<engine>:<backend>",
                    field="page_format",
                    value=self.page_format,
                )
            _require_range("opaque_block_nbytes", self.opaque_block_nbytes, 1, 1 << 40)
        elif self.opaque_block_nbytes:
            raise SpecMismatch(
                "opaque_block_nbytes: only an opaque page_format has one",
                field="opaque_block_nbytes",
                value=self.opaque_block_nbytes,
            )
        self._check_stored_format()

    def _check_stored_format(self) -> None:
        lossy = [f"{KVSTORE_PAGE_FORMAT}:{name}" for name in QUANTISATIONS if self.page_format == KVSTORE_PAGE_FORMAT]
        if self.stored_format not in (self.page_format, *lossy):
            raise SpecMismatch(
                f"stored_format: {self.stored_format!r} cannot hold {self.page_format} pages; use "
                + " or ".join((self.page_format, *lossy)),
                field="stored_format",
                value=self.stored_format,
            )
        if self.quantisation and self.dtype not in _QUANTISED_DTYPES:
            raise SpecMismatch(
                f"dtype: {self.dtype} pages are not stored as {self.quantisation}; it is made of {', '.join(_QUANTISED_DTYPES)}",
                field="dtype",
                value=self.dtype,
            )

    @property
    def quantisation(self) -> str:
        """One of QUANTISATIONS; "" when pages are stored bit for bit."""
        return self.stored_format.removeprefix(self.page_format).removeprefix(":")

    @property
    def block_nbytes(self) -> int:
        """Bytes of one stored block over all layers, heads and planes, scales included."""
        if self.opaque_block_nbytes:
            return self.opaque_block_nbytes
        tiles = self.num_layers * self.num_kv_heads * self.planes
        numbers = self.block_tokens * self.head_dim
        return tiles * (numbers + SCALE_NBYTES if self.quantisation else numbers * DTYPE_NBYTES[self.dtype])

    def canonical(self) -> bytes:
        """The one encoding that is hashed and sent: JSON, keys sorted, no spaces, ASCII only."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":")).encode("ascii")

    @classmethod
    def from_canonical(cls, encoded: bytes) -> Self:
        """Read `canonical()` back. Raises SpecMismatch naming the field that is missing, unknown or of the wrong type."""
        try:
            fields = json.loads(encoded)
        except ValueError as err:
            raise SpecMismatch("spec: not valid JSON", field="spec", value=str(err)) from err
        scheme = _typed(HashScheme, fields.pop("hash", None) if isinstance(fields, dict) else None, "hash.")
        return cls(**_typed(cls, fields, "", skip=("hash",)), hash=HashScheme(**scheme))

    def namespace(self, tenant: str = "") -> bytes:
        """The 16-byte namespace of these blocks for `tenant`; tenants never meet, whatever their tokens."""
        tenant_utf8 = tenant.encode()
        payload = _NAMESPACE_DOMAIN + struct.pack("<I", len(tenant_utf8)) + tenant_utf8 + self.canonical()
        return _sha256(payload)[:NAMESPACE_NBYTES]


def differing_fields(left: KVSpec, right: KVSpec) -> list[str]:
    """Names of the fields in which two specs differ, `hash.` fields spelt out: what Hello tells about a near miss."""
    return [name for name in _differing(left, right) if name != "hash"] + [
        f"hash.{name}" for name in _differing(left.hash, right.hash)
    ]


def _differing(left: Any, right: Any) -> list[str]:
    """Names of the fields of a dataclass in which two differ; asdict, which copies all of them, takes ten times as long."""
    return [name for name in left.__dataclass_fields__ if getattr(left, name) != getattr(right, name)]


def pack_keys(hashes: Sequence[bytes]) -> bytes:
    """Many prefix hashes as one bytes field, as they travel."""
    return b"".join(hashes)


def unpack_keys(packed: bytes, digest_nbytes: int) -> list[bytes]:
    """The inverse of `pack_keys`. Raises SpecMismatch when the last key is cut off."""
    if len(packed) % digest_nbytes:
        raise SpecMismatch(
            f"keys: {len(packed)} bytes are not a whole number of {digest_nbytes}-byte keys",
            field="keys",
            value=len(packed),
        )
    keys: list[bytes] = np.frombuffer(packed, f"V{digest_nbytes}").tolist()  # 512 keys: 10 us; slicing takes 40
    return keys


def _require_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise SpecMismatch(f"{name}: {value} is out of range; use {low} to {high}", field=name, value=value)


def _typed(cls: type[Any], fields: object, prefix: str, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """Check a decoded JSON object against a dataclass's field names and types."""
    if not isinstance(fields, dict):
        raise SpecMismatch(f"{prefix or 'spec'}: expected an object", field=prefix or "spec", value=str(fields))
    wanted = {field.name: field.type for field in dataclasses.fields(cls) if field.name not in skip}
    for name in wanted.keys() ^ fields.keys():
        problem = "missing" if name in wanted else "not a field of the spec"
        raise SpecMismatch(f"{prefix}{name}: {problem}", field=prefix + name, value="")
    for name, kind in wanted.items():
        if type(fields[name]) is not kind:
            raise SpecMismatch(
                f"{prefix}{name}: {fields[name]!r} is not of type {getattr(kind, '__name__', kind)}",
                field=prefix + name,
                value=str(fields[name]),
            )
    return fields
