"""Fingerprints follow content, never names."""

import os

import pytest

from kvstore.core.errors import ConfigError
from kvstore.engine_connector import fingerprint
from kvstore.engine_connector.fingerprint import weights_fingerprint


@pytest.fixture
def small_regions(monkeypatch):
    """A sampled file's parts at a thousandth of their size."""
    monkeypatch.setattr(fingerprint, "_HEADER_BYTES", 16 << 10)
    monkeypatch.setattr(fingerprint, "_REGION_BYTES", 64 << 10)
    monkeypatch.setattr(fingerprint, "_PAGE_BYTES", 1 << 10)


def test_equal_content_under_another_name_is_the_same(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"weights" * 1000)
    (tmp_path / "b.bin").write_bytes(b"weights" * 1000)

    assert weights_fingerprint(tmp_path / "a.gguf") == weights_fingerprint(tmp_path / "b.bin")


def test_one_flipped_bit_anywhere_is_another(tmp_path):
    path = tmp_path / "w"
    content = bytearray(os.urandom(2000))
    seen = set()
    for position in range(0, 2000, 97):
        content[position] ^= 1
        path.write_bytes(content)
        seen.add(weights_fingerprint(path))

    assert len(seen) == len(range(0, 2000, 97))


def test_other_weights_under_the_same_path_are_noticed_in_the_same_process(tmp_path):
    path = tmp_path / "w"
    path.write_bytes(b"a" * 4096)
    before = weights_fingerprint(path)
    (tmp_path / "new").write_bytes(b"b" * 4096)
    (tmp_path / "new").replace(path)

    assert weights_fingerprint(path) != before


def test_an_unchanged_file_is_read_once(tmp_path, monkeypatch):
    path = tmp_path / "w"
    path.write_bytes(os.urandom(4096))
    before = weights_fingerprint(path)

    monkeypatch.setattr(fingerprint, "_hash_whole", None)

    assert weights_fingerprint(path) == before


@pytest.mark.usefixtures("small_regions")
def test_a_sampled_file_notices_header_size_and_other_weights(tmp_path):
    path = tmp_path / "w"
    content = bytearray(os.urandom(300 << 10))
    fingerprints = []
    for change in ("none", "header", "grown", "trained"):
        if change == "header":
            content[5] ^= 1
        elif change == "grown":
            content += b"\0"
        elif change == "trained":
            content[16 << 10 :] = os.urandom(len(content) - (16 << 10))
        path.write_bytes(content)
        fingerprints.append(weights_fingerprint(path, whole_file_limit_bytes=1 << 10))

    assert len(set(fingerprints)) == 4
    assert all(value.startswith("sample:") for value in fingerprints)


@pytest.mark.usefixtures("small_regions")
def test_a_sampled_page_in_every_region_counts(tmp_path):
    path = tmp_path / "w"
    size = 300 << 10
    content = bytearray(os.urandom(size))
    path.write_bytes(content)
    seen = {weights_fingerprint(path, whole_file_limit_bytes=1)}
    for start in range(16 << 10, size, 64 << 10):
        content[start : start + (64 << 10)] = os.urandom(min(64 << 10, size - start))
        path.write_bytes(content)
        seen.add(weights_fingerprint(path, whole_file_limit_bytes=1))

    assert len(seen) == 1 + len(range(16 << 10, size, 64 << 10))


def test_a_directory_is_the_set_of_its_shards(tmp_path):
    for name, shards in {"x": ("1", "2"), "y": ("b", "a"), "z": ("1",)}.items():
        folder = tmp_path / name
        folder.mkdir()
        for index, shard in enumerate(shards):
            (folder / f"{shard}.safetensors").write_bytes(b"%d" % index * 100)
        (folder / "config.json").write_text(name)

    assert weights_fingerprint(tmp_path / "x") == weights_fingerprint(tmp_path / "y")
    assert weights_fingerprint(tmp_path / "x") != weights_fingerprint(tmp_path / "z")


@pytest.mark.parametrize("what", ["missing", "empty folder"])
def test_nothing_to_read_is_a_config_error_that_names_the_path(tmp_path, what):
    path = tmp_path / "missing" if what == "missing" else tmp_path

    with pytest.raises(ConfigError, match=str(path)) as caught:
        weights_fingerprint(path)

    assert caught.value.fields == {"field": "weights", "value": str(path)}
