"""Models of several layer groups on a real sidecar: one hit for all groups, and no more stored or loaded than it needs."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from group_engine import BLOCK, GroupEngine, Request, open_engine, spec
from sidecar_process import SidecarProcess, running_sidecar, tool

from kvstore.client import Client
from kvstore.core.errors import ConfigError
from kvstore.core.keys import KVSpec
from kvstore.engine_connector.layer_groups import LayerGroup
from kvstore.engine_connector.protocol import FetchPolicy, HandOver, WorkerOutput
from kvstore.engine_connector.scheduler_side import StoreSchedulerSide

MODELS = {
    "full and window": ["full", "window:40"],
    "window first": ["window:40", "full"],
    "two windows": ["full", "window:20", "window:70"],
    "state": ["full", "state"],
    "one window": ["window:40"],
    "window and state, nothing full": ["window:40", "state"],
}


def specs_of(model: str, seed: int) -> list:
    return [
        spec(group, block_tokens=4 * BLOCK if group == "state" else BLOCK, weights=f"{model} {seed}")
        for group in MODELS[model]
    ]


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> SidecarProcess:
    with running_sidecar(tmp_path_factory.mktemp("groups"), "--no-grpc", arena="64MiB") as process:
        yield process


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(2))
def test_a_hit_is_the_longest_prefix_whose_needed_blocks_are_stored(
    model: str, seed: int, sidecar: SidecarProcess
) -> None:
    """Of random requests that share prefixes, served by two engines; every loaded page is compared."""
    rng = random.Random(f"{model} {seed}")
    hits = []
    with (
        open_engine(sidecar.socket, specs_of(model, seed)) as one,
        open_engine(sidecar.socket, specs_of(model, seed)) as other,
    ):
        other.stored = one.stored
        texts: list[list[int]] = [[]]
        for number in range(12):
            engine, text = rng.choice([one, other]), rng.choice(texts)
            cut = rng.randint(0, len(text))
            tokens = text[:cut] + [rng.randrange(50_000) for _ in range(rng.randint(1, 24 * BLOCK))]
            request = engine.request(f"r{number}", tokens[: 40 * BLOCK])
            expected = engine.supported(request, one.stored)
            hits.append(engine.serve(request, chunk_blocks=rng.randint(1, 9)))
            assert hits[-1] == expected
            texts.append(request.token_ids)
        one.close()
        other.close()
    assert sum(hits) > 0


def test_out_of_window_blocks_are_neither_stored_nor_loaded(sidecar: SidecarProcess) -> None:
    specs = [spec("full", weights="thrift"), spec("window:40", weights="thrift")]
    with open_engine(sidecar.socket, specs) as engine, open_engine(sidecar.socket, specs) as other:
        request = engine.request("r", list(range(32 * BLOCK + 1)))
        engine.serve(request, chunk_blocks=16)
        again = other.request("again", request.token_ids)
        assert other.match(again) == 32
        tables = other.tables(again, 32)
        told = other.load(again, 32, tables)
        assert other.wrong_pages(again, tables, 32) == []
        other.finish(again, tables)
        full, window = (each.block_nbytes for each in specs)
        assert told.load_bytes == 32 * full + 3 * window
        with tool(sidecar) as look:
            held = [
                look.match(each.namespace(), look_up) for each, look_up in zip(specs, [request.hashes] * 2, strict=True)
            ]
            kept = [look.match(specs[1].namespace(), [key]).num_blocks for key in request.hashes]
    assert held[0].num_blocks == 32
    assert [i for i, stored in enumerate(kept) if stored] == [13, 14, 15, 29, 30, 31], "the windows at the steps' ends"


def calls(sidecar: SidecarProcess) -> dict[str, int]:
    with tool(sidecar) as look:
        return dict(look.stats().counters)


@pytest.mark.parametrize(
    ("groups", "num_calls"), [(["full"], 1), (["full", "window:40"], 2), (["full", "window:20", "state"], 3)]
)
def test_a_hit_costs_one_match_and_one_acquire_for_each_group(
    groups: list[str], num_calls: int, sidecar: SidecarProcess
) -> None:
    specs = [
        spec(group, block_tokens=4 * BLOCK if group == "state" else BLOCK, weights=f"calls {groups}")
        for group in groups
    ]
    with open_engine(sidecar.socket, specs) as engine, open_engine(sidecar.socket, specs) as other:
        request = engine.request("r", list(range(16 * BLOCK + 1)))
        engine.serve(request)
        before = calls(sidecar)
        assert other.serve(other.request("again", request.token_ids)) == 16
        after = calls(sidecar)
    asked = {
        verb: after[f"calls_{verb}_total"] - before.get(f"calls_{verb}_total", 0)
        for verb in ("match", "acquire", "release")
    }
    assert asked == {"match": num_calls, "acquire": num_calls, "release": num_calls}


def test_the_full_groups_plan_decides_and_tokens_are_counted_once(tmp_path: Path) -> None:
    specs = [spec("window:40"), spec("full")]
    with (
        running_sidecar(tmp_path, "--no-grpc") as own,
        open_engine(own.socket, specs, fetch=FetchPolicy.PLANNED) as engine,
    ):
        request = engine.request("r", list(range(16 * BLOCK + 1)))
        engine.serve(request)
        assert engine.serve(engine.request("again", request.token_ids)) == 16
        with tool(own) as look:
            (plan, *_) = look.explain(last=1)
            assert (plan.request_id, plan.num_found, plan.outcome) == ("again", 16, "loaded")
            stats = look.stats()
    assert (stats.usage.num_requests, stats.num_open_requests) == (1, 1), (
        "the first one found nothing, and is not settled"
    )
    assert stats.usage.requested_tokens == request.num_tokens
    assert dict(stats.usage.hit_tokens) == {"pinned": 16 * BLOCK}


class Failed(NamedTuple):
    """A load of the 16 blocks that another engine had found: one went before it began."""

    engine: GroupEngine
    request: Request
    tables: list[list[int]]
    told: WorkerOutput
    look: Client


@contextlib.contextmanager
def failed_load(sidecar: SidecarProcess, specs: list[KVSpec], *, group: int, block: int) -> Iterator[Failed]:
    with (
        open_engine(sidecar.socket, specs) as writer,
        open_engine(sidecar.socket, specs) as engine,
        tool(sidecar) as look,
    ):
        written = writer.request("r", list(range(16 * BLOCK + 1)))
        writer.serve(written)
        request = engine.request("again", written.token_ids)
        assert engine.match(request) == 16
        look.drop(specs[group].namespace(), [request.hashes[block]])
        tables = engine.tables(request, 16)
        yield Failed(engine, request, tables, engine.load(request, 16, tables), look)


def test_a_block_that_went_fails_the_whole_load(sidecar: SidecarProcess) -> None:
    """A shorter hit would need other blocks of the window, so all pages are the engine's to compute."""
    specs = [spec("full", weights="lost"), spec("window:40", weights="lost")]
    with failed_load(sidecar, specs, group=1, block=14) as (engine, request, tables, told, look):
        assert told.failed_block_ids == {page for table in tables for page in table if page >= 0}
        assert engine.match(request) == 0, "a request whose load failed is not offered another one"
        for table in tables:
            engine.give_back(table, range(len(table)))
        anew: list[list[int]] = [[], []]
        engine.compute(request, 0, anew, chunk_blocks=4)
        engine.finish(request, anew)
        assert look.stats().num_leases == 0
        assert engine.serve(engine.request("third", request.token_ids)) == 16


def test_a_load_of_one_window_is_whole_or_nothing(sidecar: SidecarProcess) -> None:
    specs = [spec("window:40", weights="one window lost")]
    with failed_load(sidecar, specs, group=0, block=15) as (engine, request, tables, told, look):
        assert told.failed_block_ids == {page for page in tables[0] if page >= 0}
        assert look.stats().num_leases == 0
        engine.finish(request, tables)


def test_windows_are_pinned_with_the_rest(tmp_path: Path) -> None:
    """A prompt that is kept from eviction is of use only with its windows."""
    from kvstore.engine_connector.protocol import CacheOptions

    specs = [spec("full"), spec("window:40")]
    with running_sidecar(tmp_path, "--no-grpc", arena="4MiB") as own, open_engine(own.socket, specs) as engine:
        kept = engine.request("kept", list(range(16 * BLOCK + 1)))
        kept.cache = CacheOptions(pin_s=600.0)
        engine.serve(kept)
        for number in range(60):
            engine.serve(engine.request(f"other {number}", [number + 1, *range(16 * BLOCK)]))
        with tool(own) as look:
            assert dict(look.stats().counters)["evicted_blocks_total"] > 0
        assert engine.match(engine.request("again", kept.token_ids)) == 16


def test_tails_of_several_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="hand_over: producer with 2 layer groups"):
        StoreSchedulerSide(
            None,  # type: ignore[arg-type]  # refused before it is looked at
            block_tokens=BLOCK,
            clock=None,  # type: ignore[arg-type]
            hand_over=HandOver.PRODUCER,
            groups=[LayerGroup(), LayerGroup(num_needed=3)],
        )
