"""Engines on a sidecar with a drive that is killed, comes back with what the drive holds, and holds damaged blocks: the same
tokens as without a store, fewer prefilled, and no engine is started anew."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from drive import (
    Drive,
    acquire,
    kill_and_restart,
    nvme_of,
    running_on,
    stats_of,
    wait_until_durable,
    wait_until_recovered,
)
from engines import BLOCK, GREEDY, Bench, Engine, SplitEngine
from sidecar_process import SidecarProcess, wait_until

from kvstore.engine_connector.engine.sampler import SamplingParams
from kvstore.proto import kvstore_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.crash]

PROMPT_TOKENS = 401
LOADABLE = 400
NUM_LOADABLE = LOADABLE // BLOCK


@pytest.fixture
def drive(tmp_path: Path) -> Drive:
    return Drive(tmp_path / "drive")


@pytest.fixture
def sidecar(drive: Drive, tmp_path: Path) -> Iterator[SidecarProcess]:
    with running_on(drive, tmp_path) as process:
        yield process


@pytest.fixture
def prompt(bench: Bench) -> list[int]:
    return bench.prompts(PROMPT_TOKENS)[0]


def expect_fetched(bench: Bench, engine: Engine, prompt: list[int], num_fetched: int = LOADABLE) -> None:
    """Of an engine that has nothing of it in its own pages."""
    (output,) = engine.ask(prompt)
    bench.expect_same([output], prompt)
    assert (output.num_local_cached_tokens, output.num_fetched_tokens) == (0, num_fetched)
    assert output.num_prefilled_tokens == PROMPT_TOKENS - num_fetched


def expect_nothing_held(sidecar: SidecarProcess) -> None:
    stats = stats_of(sidecar)
    assert stats.num_leases == 0
    for tier in stats.tiers:
        assert (tier.writing_bytes, tier.leaving_bytes, tier.limbo_bytes) == (0, 0, 0), tier.name


# --- restarts --------------------------------------------------------------------------------------------------------------


def test_a_live_engine_hits_again_after_kill_9_of_its_sidecar(
    bench: Bench, sidecar: SidecarProcess, drive: Drive, prompt: list[int]
) -> None:
    """It reconnects, maps the new arena, and finds in the drive what it had stored. What it computes meanwhile is stored too."""
    engine, other = bench.engine(sidecar.socket), bench.prompts(PROMPT_TOKENS, seed=1)[0]
    bench.expect_same(engine.ask(prompt), prompt)
    wait_until_durable(sidecar, drive)

    sidecar.kill()
    bench.expect_same(engine.ask(other), other)
    assert engine.session.link is None
    sidecar.start()
    wait_until(lambda: engine.session.link, "reconnected")
    wait_until_recovered(sidecar)

    engine.llm.reset_prefix_cache()
    expect_fetched(bench, engine, prompt)
    bench.expect_same(engine.ask(other), other)
    expect_fetched(bench, bench.engine(sidecar.socket), other)
    expect_nothing_held(sidecar)


def test_engines_go_on_through_restart_after_restart(
    bench: Bench, sidecar: SidecarProcess, drive: Drive, prompt: list[int]
) -> None:
    engines = [bench.engine(sidecar.socket) for _ in range(2)]
    engines[0].ask(prompt)
    wait_until_durable(sidecar, drive)

    for _ in range(4):
        kill_and_restart(sidecar)
        for engine in engines:
            engine.llm.reset_prefix_cache()
            if engine.session.link is None or engine.session.boot_id != boot_id_of(sidecar):
                engine.session.ask(engine.session.link, lambda client, link: client.match(link.namespace, []))
                wait_until(lambda engine=engine: engine.session.link, "reconnected")
            expect_fetched(bench, engine, prompt)
    assert stats_of(sidecar).counters["promoted_blocks_total"] == NUM_LOADABLE, "for both, in the last boot"
    expect_nothing_held(sidecar)


def test_the_first_load_after_a_restart_waits_for_the_workers_own_mapping(
    bench: Bench, sidecar: SidecarProcess, drive: Drive, prompt: list[int]
) -> None:
    """As in vLLM: a worker with a connection of its own hears of the new sidecar in the step that brings the load."""
    engine = bench.engine(sidecar.socket, made_by=SplitEngine)
    engine.ask(prompt)
    wait_until_durable(sidecar, drive)

    for _ in range(3):
        kill_and_restart(sidecar)
        engine.session.ask(engine.session.link, lambda client, link: client.match(link.namespace, []))
        wait_until(lambda: engine.session.boot_id == boot_id_of(sidecar), "the scheduler's side reconnected")
        assert engine.worker_session.boot_id != engine.session.boot_id

        engine.llm.reset_prefix_cache()
        expect_fetched(bench, engine, prompt)
    expect_nothing_held(sidecar)


def boot_id_of(sidecar: SidecarProcess) -> bytes:
    return stats_of(sidecar).boot_id


def test_a_sidecar_killed_while_blocks_are_on_their_way_costs_no_deadline(
    bench: Bench, sidecar: SidecarProcess, drive: Drive, prompt: list[int]
) -> None:
    """It is stopped once it has granted them, so that some never arrive, then killed. The load's deadline is longer than
    the test's."""
    bench.engine(sidecar.socket).ask(prompt)
    wait_until_durable(sidecar, drive)
    kill_and_restart(sidecar)
    engine, killed = bench.engine(sidecar.socket), threading.Event()
    engine.scheduler._load_deadline_s = 3600.0
    client = engine.session._client
    grant = client.acquire

    def acquire_and_die(*args: object, **kwargs: object) -> object:
        granted = grant(*args, **kwargs)
        os.kill(sidecar.pid, signal.SIGSTOP)
        threading.Timer(0.1, lambda: (sidecar.kill(), killed.set())).start()
        client.acquire = grant
        return granted._replace(expires_in_s=3600.0)

    client.acquire = acquire_and_die

    bench.expect_same(engine.ask(prompt), prompt)

    assert killed.wait(10.0)
    sidecar.start()
    wait_until(lambda: engine.session.link, "reconnected")
    wait_until_recovered(sidecar)
    engine.llm.reset_prefix_cache()
    expect_fetched(bench, engine, prompt)


# --- the drive under the arena ---------------------------------------------------------------------------------------------


def test_a_working_set_larger_than_ram_is_fetched_from_the_drive(bench: Bench, drive: Drive, tmp_path: Path) -> None:
    """1 MiB of RAM has 256 slots; six prompts have 100 blocks each."""
    prompts = bench.prompts(*[PROMPT_TOKENS] * 6, seed=3)
    with running_on(drive, tmp_path, arena="1MiB") as sidecar:
        writer = bench.engine(sidecar.socket)
        for each in prompts:
            bench.expect_same(writer.ask(each), each)
            wait_until_durable(sidecar, drive)

        reader = bench.engine(sidecar.socket)
        for each in prompts:
            reader.llm.reset_prefix_cache()
            expect_fetched(bench, reader, each)

        assert stats_of(sidecar).counters["promoted_blocks_total"] > 0
        expect_nothing_held(sidecar)


def test_what_a_waiting_request_needs_is_in_ram_before_its_turn_comes(
    bench: Bench, sidecar: SidecarProcess, drive: Drive, prompt: list[int]
) -> None:
    """The engine serves one request at a time, and the first one is far from its end."""
    bench.engine(sidecar.socket).ask(prompt)
    wait_until_durable(sidecar, drive)
    kill_and_restart(sidecar)
    engine, other = bench.engine(sidecar.socket, max_batch=1), bench.prompts(50, seed=9)[0]
    engine.llm.add_request(other, SamplingParams(max_tokens=400, ignore_eos=True))
    waiting = engine.llm.add_request(prompt, GREEDY)

    for _ in range(5):
        engine.llm.step()
    wait_until(lambda: stats_of(sidecar).counters["promoted_blocks_total"] == NUM_LOADABLE, "in RAM")
    outputs = {}
    while engine.llm.has_unfinished:
        outputs |= {delta.request_id: delta.output for delta in engine.llm.step() if delta.output is not None}
    assert engine.llm.drain(10.0)

    assert sum(len(output.token_ids) == 400 for output in outputs.values()) == 1, "the first had not ended"
    bench.expect_same([outputs[waiting]], prompt)
    assert outputs[waiting].num_fetched_tokens == LOADABLE
    assert stats_of(sidecar).counters["calls_prefetch_total"] == 1


def test_a_batch_of_requests_for_one_prefix_reads_it_once(bench: Bench, sidecar: SidecarProcess, drive: Drive) -> None:
    document, *tails = bench.prompts(120, 1, 3, 4, 17, 40, seed=1)
    prompts = [document + tail for tail in tails]
    bench.engine(sidecar.socket).ask(document + document[:5])
    num_stored = wait_until_durable(sidecar, drive)
    kill_and_restart(sidecar)

    engines = [bench.engine(sidecar.socket) for _ in range(3)]
    for engine in engines:
        outputs = engine.ask(*prompts)
        bench.expect_same(outputs, *prompts)
        for output in outputs:
            assert output.num_fetched_tokens + output.num_local_cached_tokens >= len(document)

    assert stats_of(sidecar).counters["promoted_blocks_total"] <= num_stored
    expect_nothing_held(sidecar)


# --- damage ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damaged", [0, 1, 57, NUM_LOADABLE - 1])
def test_tokens_are_the_same_with_a_block_damaged_on_the_drive(
    bench: Bench, sidecar: SidecarProcess, drive: Drive, prompt: list[int], damaged: int
) -> None:
    """Every block before it is fetched, it and all behind it are computed; and the next engine has them all from the store."""
    writer = bench.engine(sidecar.socket)
    bench.expect_same(writer.ask(prompt), prompt)
    wait_until_durable(sidecar, drive)
    block = stored_block(writer, prompt, damaged)
    sidecar.kill()
    drive.flip(block, at=len(block) // 2)
    sidecar.start()
    wait_until_recovered(sidecar)

    expect_fetched(bench, bench.engine(sidecar.socket), prompt, damaged * BLOCK)

    assert stats_of(sidecar).counters["failed_reads_checksum_total"] == 1
    expect_fetched(bench, bench.engine(sidecar.socket), prompt)
    wait_until(lambda: drive.num_quarantined == 1, "quarantined for good")
    wait_until_durable(sidecar, drive)
    kill_and_restart(sidecar)
    expect_fetched(bench, bench.engine(sidecar.socket), prompt)
    assert nvme_of(stats_of(sidecar)).quarantined_bytes > 0


def stored_block(engine: Engine, prompt: list[int], number: int) -> np.ndarray:
    """The bytes of one of the prompt's blocks, as the engine stored them."""
    client = engine.session._client
    keys = engine.llm.spec.hash.hash_blocks(prompt)[: number + 1]
    grant = acquire(client, keys)
    assert (grant.num_blocks, set(grant.ready)) == (number + 1, {1})
    offset = int(grant.offsets[number])
    block = client.arena.array[offset : offset + engine.llm.spec.block_nbytes].copy()
    client.release(grant.lease_id, pb.LOADED)
    return block
