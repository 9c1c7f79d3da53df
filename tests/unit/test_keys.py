"""Identity: the same bytes in every process, and never the same name for different bytes."""

import dataclasses
import hashlib
import json
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import SpecMismatch
from kvstore.core.keys import QUANTISATIONS, HashScheme, KVSpec, differing_fields, pack_keys, unpack_keys

SPEC = KVSpec(weights="xxh3:0011", num_layers=30, num_kv_heads=3, head_dim=64, dtype="float16", rope="theta=100000")
FP8 = dataclasses.replace(SPEC, stored_format="kvstore:LHTPD:fp8_e4m3")

TOKENS = list(range(100, 140))


def reference_hashes(tokens: list[int], digest, seed: str, block_tokens: int) -> list[bytes]:
    """The definition in transport/WIRE.md section 3, written out."""
    parent = digest(b"kvstore/root/1\0" + seed.encode())
    hashes = []
    for start in range(0, len(tokens) // block_tokens * block_tokens, block_tokens):
        parent = digest(parent + b"".join(struct.pack("<I", t) for t in tokens[start : start + block_tokens]))
        hashes.append(parent)
    return hashes


def test_golden_vectors_of_xxh3() -> None:
    scheme = HashScheme()

    assert scheme.root().hex() == "13e012a02ea0e9462e2544699a76a8db"
    assert [h.hex() for h in scheme.hash_blocks(TOKENS)] == [
        "b2738fce5aee1cf81f0066a6abd6af9c",
        "c7b19907c82f47f534538fd22f6f786e",
    ]
    assert HashScheme(seed="s").root().hex() == "d898689c17c64113fdc5a420f010149b"
    assert scheme.root([b"lora:x"]).hex() == "5eaed6237ec7dcc2ce9ab83989ce2d88"
    assert scheme.hash_blocks(TOKENS, extra_keys={1: [b"img"]})[1].hex() == "f6d2bb55d44a91104af4ff1b3cae11c4"


def test_golden_vectors_of_sha256() -> None:
    scheme = HashScheme(algorithm="sha256")

    assert scheme.root().hex() == "56c82bf4d6883479ff84b39cfb98a068b95dc3b22ea1658210b431f5abc514a7"
    assert scheme.hash_blocks(TOKENS)[1].hex() == "1c5e2eecb09ce83f7a748caaa94ff9943c1ec8a38b89b0b1a3f725d4ecad751f"


@pytest.mark.parametrize(
    ("algorithm", "behind_two_blocks", "behind_none"),
    [
        ("xxh3_128", "27b7569d27d3c06c5727318c0220a0f0", "c7300e89b28f33ae418039078c471a6a"),
        (
            "sha256",
            "142cf0bfa270fb4fc78541c6d41bbe0b3823ace3706f3382f22947ec41e583e5",
            "1d555ce336dcc79808f22f2f185bef1108956245867d32500da0eb9483f8b84c",
        ),
    ],
)
def test_golden_vectors_of_a_tail(algorithm: str, behind_two_blocks: str, behind_none: str) -> None:
    scheme = HashScheme(algorithm=algorithm)

    assert scheme.tail_hash(TOKENS[32:], parent=scheme.hash_blocks(TOKENS)[-1]).hex() == behind_two_blocks
    assert scheme.tail_hash(TOKENS[:3]).hex() == behind_none


def test_golden_vectors_of_the_spec() -> None:
    assert SPEC.canonical() == (
        b'{"block_tokens":16,"dtype":"float16","group":"full","hash":{"algorithm":"xxh3_128","block_tokens":16'
        b',"digest_nbytes":16,"seed":""},"head_dim":64,"num_kv_heads":3,"num_layers":30,"opaque_block_nbytes":'
        b'0,"page_format":"kvstore:LHTPD","planes":2,"rope":"theta=100000","stored_format":"kvstore:LHTPD","weights":"xxh3:0011"}'
    )
    assert SPEC.namespace().hex() == "3d30f5a6e22a9cc1353e75c30a539694"
    assert SPEC.namespace("tenant-a").hex() == "85ef5f17ab5f8a4b17965b19132d9371"
    assert FP8.canonical() == SPEC.canonical().replace(
        b'"stored_format":"kvstore:LHTPD"', b'"stored_format":"kvstore:LHTPD:fp8_e4m3"'
    )
    assert FP8.namespace().hex() == "885d6b8734b8b2000870e2238203a1a5"


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_quantised_block_has_one_byte_for_a_number_and_a_scale_for_each_tile(quantisation: str, dtype: str) -> None:
    spec = dataclasses.replace(SPEC, stored_format=f"kvstore:LHTPD:{quantisation}", dtype=dtype)

    assert spec.quantisation == quantisation
    assert spec.block_nbytes == 30 * 3 * 2 * (16 * 64 + 4)
    assert SPEC.quantisation == ""


@pytest.mark.parametrize(
    ("algorithm", "digest"),
    [("xxh3_128", xxhash.xxh3_128_digest), ("sha256", lambda b: hashlib.sha256(b).digest())],
)
@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=100),
    seed=st.text(max_size=8).filter(lambda s: s.isprintable()),
    block_tokens=st.sampled_from([1, 3, 16]),
)
def test_hashes_follow_their_definition(algorithm, digest, tokens, seed, block_tokens) -> None:
    scheme = HashScheme(algorithm=algorithm, seed=seed, block_tokens=block_tokens)

    assert scheme.hash_blocks(tokens) == reference_hashes(tokens, digest, seed, block_tokens)


@given(st.lists(st.integers(0, 49151), min_size=32, max_size=200), st.integers(0, 5))
def test_a_chain_can_be_continued_from_any_block(tokens: list[int], blocks: int) -> None:
    scheme = HashScheme()
    whole = scheme.hash_blocks(tokens)
    cut = min(blocks, len(whole))
    head = scheme.hash_blocks(tokens[: cut * 16])

    tail = scheme.hash_blocks(tokens[cut * 16 :], parent=head[-1] if head else None)

    assert head + tail == whole


@pytest.mark.parametrize(
    "kind", [tuple, np.array, lambda t: np.array(t, dtype=np.uint32), lambda t: np.array(t, np.int64)]
)
def test_any_sequence_of_tokens_hashes_alike(kind) -> None:
    assert HashScheme().hash_blocks(kind(TOKENS)) == HashScheme().hash_blocks(TOKENS)


def test_extra_keys_separate_sequences_and_do_not_run_together() -> None:
    scheme = HashScheme()
    roots = {scheme.root(extra) for extra in ([], [b""], [b"ab"], [b"a", b"b"], [b"b", b"a"], [b"ab", b""])}

    assert len(roots) == 6


def test_tails_meet_no_other_tail_and_no_block() -> None:
    scheme = HashScheme()
    (parent,) = scheme.hash_blocks(TOKENS[:16])
    tails = {scheme.tail_hash(TOKENS[16 : 16 + count], parent=parent) for count in range(1, 16)}
    tails |= {scheme.tail_hash(TOKENS[16:20]), scheme.tail_hash(TOKENS[16:20], parent=scheme.root([b"salt"]))}

    assert len(tails) == 17
    assert tails.isdisjoint(HashScheme(block_tokens=4).hash_blocks(TOKENS[16:20], parent=parent))


@pytest.mark.parametrize("count", [0, 16])
def test_a_tail_is_part_of_a_block(count: int) -> None:
    with pytest.raises(AssertionError):
        HashScheme().tail_hash(TOKENS[:count])


def test_another_process_makes_the_same_bytes() -> None:
    """PYTHONHASHSEED and the locale must not matter."""
    code = (
        "from kvstore.core.keys import *\n"
        f"print(HashScheme(seed='x').hash_blocks({TOKENS})[-1].hex())\n"
        "print(KVSpec(weights='w', num_layers=1, num_kv_heads=1, head_dim=8, dtype='int8').namespace('t').hex())"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, check=True, timeout=60
        ).stdout
        for env in ({"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2", "LC_ALL": "C"})
    }

    assert len(runs) == 1


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_ids_out_of_range_are_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        HashScheme(block_tokens=1).hash_blocks([token])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights", "xxh3:0012"),
        ("num_layers", 31),
        ("num_kv_heads", 4),
        ("head_dim", 128),
        ("dtype", "bfloat16"),
        ("rope", ""),
        ("planes", 1),
        ("block_tokens", 32),
        ("group", "window:512"),
        ("stored_format", "kvstore:LHTPD:fp8_e4m3"),
        ("stored_format", "kvstore:LHTPD:int8"),
        ("hash", HashScheme(seed="other")),
        ("hash", HashScheme(algorithm="sha256")),
    ],
)
def test_specs_that_differ_anywhere_never_share(field: str, value: object) -> None:
    other = dataclasses.replace(SPEC, **{field: value})

    assert other.namespace() != SPEC.namespace()
    assert {name.split(".")[0] for name in differing_fields(SPEC, other)} == {field}


def test_tenants_never_share() -> None:
    assert len({SPEC.namespace(t) for t in ("", "a", "b", "ab")}) == 4


def test_a_spec_survives_its_encoding() -> None:
    opaque = dataclasses.replace(
        SPEC, page_format="opaque:x:y", stored_format="opaque:x:y", opaque_block_nbytes=4096, dtype="whatever"
    )

    for spec in (SPEC, opaque, FP8):
        assert KVSpec.from_canonical(spec.canonical()) == spec
    assert opaque.block_nbytes == 4096
    assert SPEC.block_nbytes == 30 * 3 * 16 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"num_layers": "30"}, "num_layers"),
        ({"num_layers": True}, "num_layers"),
        ({"weights": ""}, "weights"),
        ({"dtype": "float12"}, "dtype"),
        ({"planes": 3}, "planes"),
        ({"block_tokens": 24}, "block_tokens"),
        ({"page_format": "mine"}, "page_format"),
        ({"page_format": "opaque:e:b"}, "opaque_block_nbytes"),
        ({"page_format": "opaque:e:b", "opaque_block_nbytes": 4096}, "stored_format"),
        ({"stored_format": "opaque:e:b"}, "stored_format"),
        ({"stored_format": "kvstore:LHTPD:fp8"}, "stored_format"),
        ({"stored_format": "kvstore:LHTPD:"}, "stored_format"),
        ({"stored_format": "kvstore:LHTPD:int8", "dtype": "int8"}, "dtype"),
        ({"opaque_block_nbytes": 1}, "opaque_block_nbytes"),
        ({"hash": {"algorithm": "md5"}}, "hash.algorithm"),
        ({"hash": {"digest_nbytes": 20}}, "hash.digest_nbytes"),
        ({"hash": {"algorithm": "engine:vllm", "digest_nbytes": 0}}, "hash.digest_nbytes"),
        ({"hash": 7}, "hash."),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_wrong_spec_names_the_field(change: dict[str, object], field: str) -> None:
    fields = json.loads(SPEC.canonical())
    for name, value in change.items():
        fields[name] = {**fields[name], **value} if isinstance(value, dict) else value

    with pytest.raises(SpecMismatch) as caught:
        KVSpec.from_canonical(json.dumps(fields).encode())
    assert caught.value.fields["field"] == field
    assert field.rstrip(".") in caught.value.message


@pytest.mark.parametrize("encoded", [b"", b"{", b"\xff", b"[]", b"null", b"{}"])
def test_a_spec_that_is_no_object_is_refused(encoded: bytes) -> None:
    with pytest.raises(SpecMismatch):
        KVSpec.from_canonical(encoded)


def test_keys_travel_packed_and_a_cut_one_is_refused() -> None:
    keys = [bytes([i]) * 16 for i in range(5)]

    assert unpack_keys(pack_keys(keys), 16) == keys
    assert unpack_keys(b"", 16) == []
    with pytest.raises(SpecMismatch, match="79 bytes"):
        unpack_keys(pack_keys(keys)[:-1], 16)
