"""What real engines hold in their own pages, as a router, an operator and a scrape of the sidecar see it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from click.testing import CliRunner
from engines import BLOCK, SMALL, Bench, Engine, SplitEngine
from sidecar_process import SidecarProcess, running_sidecar, tool, wait_until
from test_kv_events_sidecar import addresses, index_of, replayed

from kvstore.cli.main import cli
from kvstore.proto import kvstore_pb2 as pb

pytestmark = pytest.mark.e2e
WAIT_S = 10.0


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


def on_gpu(context: zmq.Context, folder: Path) -> set[int]:
    return {number for medium, number in index_of(replayed(context, folder)) if medium == "GPU"}


def numbers(engine: Engine, tokens: list[int]) -> list[int]:
    hashes = engine.llm.spec.hash.hash_blocks(tokens)
    return [int.from_bytes(each[8:], "big") for each in hashes]


def hbm(sidecar: SidecarProcess) -> pb.TierStats | None:
    with tool(sidecar) as client:
        return next((tier for tier in client.stats().tiers if tier.name == "hbm"), None)


@pytest.mark.parametrize("made_by", [Engine, SplitEngine])
def test_what_an_engine_has_itself_is_known_until_its_pages_are_taken_or_it_goes(
    bench: Bench, tmp_path: Path, context: zmq.Context, made_by: type[Engine]
) -> None:
    first, second = bench.prompts(41, 45)
    with running_sidecar(tmp_path, "--no-grpc", *addresses(tmp_path)) as sidecar, bench.own_engines():
        a = bench.engine(sidecar.socket, made_by=made_by, num_pages=32)
        b = bench.engine(sidecar.socket, made_by=made_by)
        outputs = [a.ask(first), b.ask(first), b.ask(second)]
        spec, namespace = a.llm.spec, a.llm.spec.namespace("")
        keys = spec.hash.hash_blocks(first)

        held = {*numbers(a, first), *numbers(b, second)}
        wait_until(lambda: on_gpu(context, tmp_path) >= held, "both engines' pools are told", WAIT_S)
        with tool(sidecar) as client:
            pools = client.locate_pools(namespace, [*keys, b"?" * 16])
            (block,) = client.inspect(keys[3].hex()).blocks
        shown = CliRunner().invoke(cli, ["inspect", keys[3].hex(), "--socket", str(sidecar.socket)]).output
        tier = hbm(sidecar)
        assert [pool.num_blocks for pool in pools] == [len(keys), len(keys)]
        assert sorted(block.pools) == sorted(pool.instance for pool in pools)
        assert len(set(block.pools)) == 2
        assert all(f"engine {pool.instance.hex()} has it in its own pool" in shown for pool in pools)
        assert tier is not None
        assert tier.capacity_bytes == (32 + SMALL["num_pages"]) * spec.block_nbytes
        assert tier.ready_blocks >= 2 * len(keys) + len(numbers(b, second))

        (crowd,) = bench.prompts(32 * BLOCK - 20, seed=1)  # takes nearly all of a's pages
        outputs.append(a.ask(crowd))
        with tool(sidecar) as client:
            farthest, *rest = client.locate_pools(namespace, keys)
        assert farthest.num_blocks == len(keys), "b has it still"
        assert all(pool.num_blocks <= 2 for pool in rest), "a has at most two pages left for it"
        b.llm.reset_prefix_cache()
        outputs.append(b.ask(second))
        wait_until(lambda: not on_gpu(context, tmp_path) & set(numbers(a, first)[2:]), "b forgot all", WAIT_S)
        a.close()
        wait_until(
            lambda: on_gpu(context, tmp_path) <= set(numbers(b, second) + answers(b, second, outputs[2])),
            "a is gone",
            WAIT_S,
        )
        for output, prompt in zip(outputs, (first, first, second, crowd, second), strict=True):
            bench.expect_same(output, prompt)


def answers(engine: Engine, prompt: list[int], outputs: list) -> list[int]:
    return numbers(engine, [*prompt, *outputs[0].token_ids])


def test_an_engine_tells_all_anew_to_the_next_sidecar(bench: Bench, tmp_path: Path) -> None:
    (prompt,) = bench.prompts(41)
    with running_sidecar(tmp_path, "--no-grpc") as sidecar:
        engine = bench.engine(sidecar.socket)
        engine.ask(prompt)
        assert (before := hbm(sidecar)) is not None
    assert before.ready_blocks > 0

    with running_sidecar(tmp_path, "--no-grpc") as sidecar:
        assert hbm(sidecar) is None
        engine.session.follow(b"another")
        wait_until(lambda: engine.session.link is not None, "connected again", WAIT_S)
        bench.expect_same(engine.ask(prompt), prompt)

        after = hbm(sidecar)

    assert after is not None
    assert after.ready_blocks == before.ready_blocks
