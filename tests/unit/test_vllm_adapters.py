"""LoRA adapters: content tells them apart, and files of which it is not known whether they are loaded count for none."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore.engine_connector.vllm_adapters import Adapters

LATER_NS = 3600 * 10**9


@pytest.fixture
def adapters():
    """Of an engine that starts in an hour."""
    return Adapters(time.time_ns() + LATER_NS)


def make(directory: Path, weights: bytes = b"weights", config: str = '{"lora_alpha": 16}'):
    directory.mkdir()
    (directory / "adapter_model.safetensors").write_bytes(weights)
    (directory / "adapter_config.json").write_text(config)
    (directory / "README.md").write_text(str(directory))
    return SimpleNamespace(lora_name="a", lora_path=str(directory))


def test_equal_content_is_one_adapter_wherever_it_lies_and_other_content_another(adapters, tmp_path):
    first = adapters.salt(make(tmp_path / "first"))

    assert first
    assert adapters.salt(make(tmp_path / "copy")) == first
    assert adapters.salt(make(tmp_path / "weights", weights=b"others")) not in (None, first)
    assert adapters.salt(make(tmp_path / "config", config='{"lora_alpha": 32}')) not in (None, first)


def test_files_that_changed_after_the_start_are_not_believed_even_with_an_old_date(tmp_path, caplog):
    lora = make(tmp_path / "a")
    assert Adapters(time.time_ns() + LATER_NS).salt(lora) is not None
    os.utime(tmp_path / "a" / "adapter_model.safetensors", (0, 0))

    adapters = Adapters((tmp_path / "a" / "adapter_model.safetensors").stat().st_ctime_ns)

    assert adapters.salt(lora) is None
    assert adapters.salt(lora) is None
    assert caplog.text.count("adapter not shared name=a") == 1
    assert "has changed since this engine started" in caplog.text


@pytest.mark.parametrize("link", ["current", "models/current"])
def test_a_link_that_was_turned_after_the_start_is_not_believed_however_old_the_files_are(tmp_path, link):
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
        make(tmp_path / name / "a", weights=name.encode())
    (tmp_path / "models").mkdir()
    current = tmp_path / link
    current.symlink_to(tmp_path / "v1")
    (tmp_path / "link").symlink_to(current)
    lora = SimpleNamespace(lora_name="a", lora_path=str(tmp_path / "link" / "a"))
    time.sleep(0.02)  # more than a tick of the clock that dates files
    adapters = Adapters(time.time_ns())
    assert adapters.salt(lora) is not None
    time.sleep(0.02)

    current.unlink()
    current.symlink_to(tmp_path / "v2")

    assert adapters.salt(lora) is None


@pytest.mark.parametrize("path", ["somebody/adapter-on-the-hub", "empty"])
def test_what_is_no_local_adapter_is_not_shared(adapters, tmp_path, path):
    (tmp_path / "empty").mkdir()

    assert adapters.salt(SimpleNamespace(lora_name="a", lora_path=str(tmp_path / path))) is None
