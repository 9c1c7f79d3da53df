"""find_model: what the user names wins; the packaged model is found without importing its package."""

import sys
from pathlib import Path

import pytest

from kvstore.core.errors import ConfigError
from kvstore.models import INSTALL_LINE, MODEL_ENV, MODEL_PACKAGE, find_model


@pytest.fixture(autouse=True)
def no_model_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MODEL_ENV, raising=False)


def install_package(folder: Path, monkeypatch: pytest.MonkeyPatch, *, files: tuple[str, ...]) -> Path:
    """A package of the model's name, first on the path, whose import fails as the real one's does."""
    package = folder / MODEL_PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('the model package must not be imported')\n")
    for name in files:
        (package / name).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(folder))
    return package


def test_a_named_file_wins_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, other = tmp_path / "named.gguf", tmp_path / "other.gguf"
    named.write_bytes(b"GGUF")
    other.write_bytes(b"GGUF")
    monkeypatch.setenv(MODEL_ENV, str(other))

    assert find_model(str(named)) == named
    assert find_model(None) == other


def test_the_packaged_model_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = install_package(tmp_path, monkeypatch, files=("b.gguf", "a.gguf", "notes.txt"))

    assert find_model(None) == package / "a.gguf"
    assert MODEL_PACKAGE not in sys.modules


def test_no_model_anywhere_tells_the_line_that_installs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ConfigError) as caught:
        find_model(None)

    assert caught.value.fields["field"] == "model"
    assert INSTALL_LINE in caught.value.message


def test_a_package_without_a_model_file_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_package(tmp_path, monkeypatch, files=("notes.txt",))

    with pytest.raises(ConfigError, match="not installed"):
        find_model(None)


@pytest.mark.parametrize(("field", "from_environment"), [("model", False), (MODEL_ENV, True)])
def test_a_file_that_cannot_be_read_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, from_environment: bool
) -> None:
    missing = str(tmp_path / "missing.gguf")
    if from_environment:
        monkeypatch.setenv(MODEL_ENV, missing)

    with pytest.raises(ConfigError, match="No such file") as caught:
        find_model(None if from_environment else missing)

    assert caught.value.fields == {"field": field, "value": missing}


def test_a_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        find_model(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"GGU", b"not a model"])
def test_a_file_of_another_kind_is_no_model(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)

    with pytest.raises(ConfigError, match="is not a GGUF file"):
        find_model(str(file))
