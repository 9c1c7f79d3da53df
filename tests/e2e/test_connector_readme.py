"""The program in engine_connector/README.md runs, its engine uses the store, and survives what the page says it does."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sidecar_process import ROOT, SidecarProcess, running_sidecar, tool

from kvstore.engine_connector import requests

pytestmark = pytest.mark.e2e

README = ROOT / "engine_connector" / "README.md"
TEXT = README.read_text()
PROGRAM = "\n".join(re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE))


@pytest.fixture
def sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SidecarProcess]:
    """Where open_connector looks for it."""
    with running_sidecar(tmp_path, "--no-grpc") as process:
        monkeypatch.setenv("KVSTORE_SOCKET", str(process.socket))
        yield process


@pytest.fixture
def readme(sidecar: SidecarProcess) -> dict[str, Any]:
    """What the program defines, after it has run with its own assertions."""
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(PROGRAM, str(README), "exec"), names)
    return names


def computed_alone(readme: dict[str, Any], prompt: list[int], num_new: int) -> list[int]:
    """The toy's model, written out."""
    tokens, value = [], 0
    for token in prompt:
        value = (value * 31 + token) % 256
    for _ in range(num_new):
        tokens.append(value * (readme["SPEC"].block_nbytes // readme["BLOCK"]))
        value = (value * 31 + tokens[-1]) % 256
    return tokens


def test_the_program_runs_and_its_second_engine_loads(readme: dict[str, Any], sidecar: SidecarProcess) -> None:
    assert readme["first"].token_ids[100:] == computed_alone(readme, readme["PROMPT"], 20)
    with tool(sidecar) as client:
        stats = client.stats()
    assert stats.num_leases == 0
    assert stats.num_blocks == (100 + 20 - 1) // readme["BLOCK"], "the answer's full blocks too"


def test_a_wrong_byte_changes_its_tokens(readme: dict[str, Any]) -> None:
    """Else it would show nothing."""
    engine = readme["ToyEngine"](readme["open_connector"](readme["SPEC"], fetch="always"))
    copy_in = engine.pages.copy_in

    def copy_wrong(block_id: int, block: np.ndarray) -> None:
        copy_in(block_id, block ^ 1)

    engine.pages.copy_in = copy_wrong
    assert readme["answer"](engine, "wrong").token_ids != readme["first"].token_ids


@pytest.mark.parametrize("num_good", [0, 2])
def test_what_fails_to_load_is_computed(readme: dict[str, Any], num_good: int) -> None:
    engine = readme["ToyEngine"](readme["open_connector"](readme["SPEC"], fetch="always"))
    copy_in, numbers = engine.pages.copy_in, itertools.count()

    def break_down(block_id: int, block: np.ndarray) -> None:
        if next(numbers) == num_good:
            raise ValueError("a copy that breaks")
        copy_in(block_id, block)

    engine.pages.copy_in = break_down
    request = readme["answer"](engine, "fails")

    assert request.token_ids == readme["first"].token_ids
    assert request.num_prefilled >= 100 - num_good * readme["BLOCK"]


def test_it_runs_with_a_dead_sidecar(readme: dict[str, Any], sidecar: SidecarProcess) -> None:
    engine = readme["ToyEngine"](readme["open_connector"](readme["SPEC"], fetch="always"))
    sidecar.kill()

    request = readme["answer"](engine, "alone")

    assert request.token_ids == readme["first"].token_ids
    assert request.num_prefilled == 100


def test_its_wishes_are_heard(readme: dict[str, Any]) -> None:
    engine = readme["ToyEngine"](readme["open_connector"](readme["SPEC"], fetch="always"))
    wishes = readme["CacheOptions"](no_read=True, session_id="s")
    request = readme["ToyRequest"]("wishes", list(readme["PROMPT"]), cache=wishes)

    engine.generate(request, 1)

    assert request.num_prefilled == 100
    assert engine.scheduler.expect_session("s") == 100 // readme["BLOCK"]
    engine.close()


def test_the_page_shows_the_states_and_invariants_of_the_code() -> None:
    assert requests.__doc__ is not None
    picture = requests.__doc__.split("\n\n")[1]
    assert picture in TEXT
    assert re.findall(r"^(R\d+) ", requests.__doc__, re.MULTILINE) == re.findall(r"^\| (R\d+) \|", TEXT, re.MULTILINE)


def test_the_pages_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)

    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []
