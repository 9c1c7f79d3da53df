"""Samples that fork, and requests that lose their pages and come back, on a real sidecar: nothing is lost, in the engine or
in the connector, and what was generated before a preemption is fetched and not computed again."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import Bench, Engine, open_bench
from sidecar_process import SidecarProcess, running_sidecar

from kvstore.engine_connector.engine.sampler import SamplingParams

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with open_bench(tmp_path_factory.mktemp("model")) as bench, bench.own_engines():
        yield bench


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[SidecarProcess]:
    with running_sidecar(tmp_path, "--no-grpc", arena="64MiB") as process:
        yield process


def drained(engine: Engine) -> None:
    engine.check()
    stats = engine.llm.stats()
    assert stats.num_free_pages == stats.num_pages


def test_samples_of_a_fetched_prompt_are_those_of_a_computed_one(bench: Bench, sidecar: SidecarProcess) -> None:
    (prompt,) = bench.prompts(83)
    params = SamplingParams(n=4, temperature=0.8, seed=5, max_tokens=20, ignore_eos=True)
    first, second = (bench.engine(sidecar.socket) for _ in range(2))

    computed = first.ask(prompt, params=params)
    fetched = second.ask(prompt, params=params)

    assert [output.num_fetched_tokens for output in computed] == [0] * 4
    assert fetched[0].num_fetched_tokens == 80
    assert [output.num_prefilled_tokens for output in fetched] == [3, 0, 0, 0]
    assert [output.token_ids for output in fetched] == [output.token_ids for output in computed]
    assert len({output.token_ids for output in computed}) == 4
    drained(first), drained(second)


def test_preempted_requests_resume_from_the_store(bench: Bench, sidecar: SidecarProcess) -> None:
    """Its own pages find nothing, so that all that is not computed twice comes from the store."""
    prompts = bench.prompts(40, 40, 40, seed=3)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    engine = bench.engine(sidecar.socket, num_pages=45, prefix_caching=False)

    outputs = engine.ask(*prompts, params=params)

    resumed = [output for output in outputs if output.num_preemptions]
    assert resumed
    for output in resumed:
        assert output.num_resumed_tokens > 40, "generated tokens among them"
        assert output.num_prefilled_tokens <= 40 + 4 * output.num_preemptions
    assert [len(output.token_ids) for output in outputs] == [60] * 3
    drained(engine)
