"""Engines on several nodes share a prefix: the same tokens, and the plan says where the blocks were."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from cluster_nodes import ClusterNode, cluster_in
from engines import BLOCK, Bench, Engine
from sidecar_process import tool, wait_until

from kvstore.cli.main import cli
from kvstore.engine_connector.protocol import FetchPolicy

pytestmark = pytest.mark.e2e

PROMPT_TOKENS = 121
LOADABLE = 120


@pytest.fixture
def nodes(tmp_path: Path, bench: Bench) -> Iterator[list[ClusterNode]]:
    with cluster_in(tmp_path) as cluster, bench.own_engines():
        yield cluster.start("n1", "n2")


def wait_until_found(node: ClusterNode, engine: Engine, prompt: list[int]) -> None:
    """Another node's engine has stored all of it."""
    spec = engine.llm.spec
    keys = spec.hash.hash_blocks(prompt)[: LOADABLE // BLOCK]
    with tool(node) as client:
        wait_until(
            lambda: max((each.num_blocks for each in client.locate(spec.namespace(), keys)), default=0) == len(keys),
            "the prompt is found",
        )


def test_what_one_engine_computed_another_nodes_engine_loads(bench: Bench, nodes: list[ClusterNode]) -> None:
    first, second = nodes
    prompt, planned = bench.prompts(PROMPT_TOKENS, PROMPT_TOKENS, seed=3)
    one, two = bench.engine(first.socket), bench.engine(second.socket)
    planning = bench.engine(second.socket, fetch=FetchPolicy.PLANNED)
    bench.expect_same(one.ask(prompt, planned), prompt, planned)
    wait_until_found(second, two, prompt)
    wait_until_found(second, two, planned)

    (output,) = two.ask(prompt)
    bench.expect_same([output], prompt)
    if not second.failed():  # a busy machine may have made the peer late; then it was computed
        assert output.num_fetched_tokens == LOADABLE
        assert second.counter("fetched_blocks_total") == LOADABLE // BLOCK

    bench.expect_same(planning.ask(planned), planned)
    with tool(second) as client:
        (plan,) = client.explain()
    (share,) = plan.tiers
    assert (share.tier, share.num_blocks) == ("peer", LOADABLE // BLOCK)
    assert "peer" in plan.words
    assert "peer" in CliRunner().invoke(cli, ["explain", "--socket", str(second.socket)]).stdout
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(cli, ["stat", "--socket", str(second.socket)]).stdout
    assert "n1" in shown
    for node in nodes:
        node.expect_nothing_held()


def test_the_other_node_dies_while_an_engine_loads_and_the_tokens_stay_the_same(
    bench: Bench, nodes: list[ClusterNode]
) -> None:
    first, second = nodes
    prompts = bench.prompts(*[PROMPT_TOKENS] * 6, seed=4)
    one = bench.engine(first.socket)
    one.ask(*prompts)

    def before(way: str, number: int) -> None:
        if (way, number) == ("in", 1):
            first.kill()

    two = bench.engine(second.socket, before=before)
    for prompt in prompts:
        wait_until_found(second, two, prompt)
    outputs = [output for prompt in prompts for output in two.ask(prompt)]

    bench.expect_same(outputs, *prompts)
    assert outputs[-1].num_fetched_tokens == 0
    second.expect_nothing_held()
