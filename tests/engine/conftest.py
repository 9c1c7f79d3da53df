"""One tiny model for the session, and engines on it that are checked and closed."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiny_llama import TinyModel, random_tensors, write_gguf

from kvstore.engine_connector.engine.llm import LLM
from kvstore.models import find_model

sys.path.append(str(Path(__file__).parent.parent.parent))  # for benchmarks/, which is not installed
sys.path.append(str(Path(__file__).parent.parent / "e2e"))  # for real sidecars
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    tensors = random_tensors()
    return TinyModel(write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", tensors), tensors)


@pytest.fixture
def make_llm(tiny: TinyModel) -> Iterator[Callable[..., LLM]]:
    """Engines with small blocks and chunks, so that a short prompt has many of both."""
    made: list[LLM] = []

    def make(**settings: object) -> LLM:
        small: dict = {"num_pages": 128, "block_tokens": 4, "chunk_tokens": 32, "num_threads": 1}
        made.append(LLM(tiny.path, **(small | settings)))
        return made[-1]

    yield make
    for llm in made:
        llm.close()
        llm.check()
        assert not llm.is_draining


@pytest.fixture(scope="session")
def real_model() -> Path:
    """`make test` installs it; without it these tests fail, and say how to get it."""
    return find_model()
