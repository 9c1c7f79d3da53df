"""Engines that share a slab (in host memory) on a real sidecar: the same tokens, read from the slab; and what is left of an
engine that is killed while it fills a slot."""

import uuid
from pathlib import Path

import numpy as np
import pytest
from block_client import content, keys_of, put
from click.testing import CliRunner
from engines import BLOCK, Bench, Engine, SplitEngine
from sidecar_process import BLOCK_NBYTES, SPEC, SidecarProcess, running_sidecar, tool, wait_until, wait_until_faulted
from test_fencing import client_process

from kvstore.cli.main import cli
from kvstore.client import Acquired, Client
from kvstore.core.errors import ConfigError, ProtocolError
from kvstore.core.plans import SlabUse
from kvstore.proto import kvstore_pb2 as pb

pytestmark = pytest.mark.e2e
SLAB = ("--no-grpc", "--hbm-slab", "4MiB", "--hbm-device", "host")
WAIT_S = 10.0


def slab_of(sidecar: SidecarProcess) -> tuple[pb.TierStats, dict[str, int]]:
    with tool(sidecar) as client:
        stats = client.stats()
    (tier,) = [tier for tier in stats.tiers if tier.name == "slab"]
    used = tier.ready_bytes + tier.writing_bytes + tier.leaving_bytes + tier.limbo_bytes
    assert used + tier.free_bytes == tier.capacity_bytes
    return tier, dict(stats.counters)


@pytest.mark.parametrize("made_by", [Engine, SplitEngine])
def test_what_the_second_reader_copied_there_the_third_reads_there(
    bench: Bench, tmp_path: Path, made_by: type[Engine]
) -> None:
    prompt, other = bench.prompts(201, 31)
    num_blocks = 200 // BLOCK
    with running_sidecar(tmp_path, *SLAB) as sidecar, bench.own_engines():
        a, b, c = (bench.engine(sidecar.socket, made_by=made_by, slab=True) for _ in range(3))
        unaware = bench.engine(sidecar.socket)
        outputs = [engine.ask(prompt) for engine in (a, unaware, b)]  # writes, reads, reads a second time and copies
        tier, _ = slab_of(sidecar)
        assert tier.ready_blocks == num_blocks

        _overwrite_arena(sidecar, a.llm.spec, prompt[:200])
        outputs.append(c.ask(prompt))

        _, counters = slab_of(sidecar)
        assert counters["slab_read_blocks_total"] == num_blocks
        assert outputs[-1][0].num_fetched_tokens == 200
        for output in outputs:
            bench.expect_same(output, prompt)
        for engine in (a, unaware, b, c):
            bench.expect_same(engine.ask(other), other)


def _overwrite_arena(sidecar: SidecarProcess, spec, tokens: list[int]) -> None:
    """Whoever reads these from the arena now computes other tokens: so who does not has read them elsewhere."""
    client = Client(str(sidecar.socket), instance=uuid.uuid4().bytes, role=pb.BOTH, specs=[spec])
    with client:
        keys = spec.hash.hash_blocks(tokens)
        grant = client.acquire("rogue", client.namespaces[0].namespace, keys)
        assert grant.num_blocks == len(keys)
        assert client.arena is not None
        for offset in grant.offsets.tolist():
            client.arena.array[offset : offset + spec.block_nbytes].view(np.float16)[:] = 3.0
        client.release(grant.lease_id, pb.LOADED)


def test_a_slab_that_is_too_small_for_all_serves_what_it_has(bench: Bench, tmp_path: Path) -> None:
    prompts = bench.prompts(121, 121, 121, seed=3)
    flags = ("--no-grpc", "--hbm-slab", "64KiB", "--segment", "64KiB")
    with running_sidecar(tmp_path, *flags, arena="4MiB") as sidecar, bench.own_engines():
        a, b = (bench.engine(sidecar.socket, slab=True, num_pages=60) for _ in range(2))
        for _ in range(3):
            for engine in (a, b):
                for prompt in prompts:
                    bench.expect_same(engine.ask(prompt), prompt)
        tier, counters = slab_of(sidecar)

    assert tier.limbo_bytes == tier.writing_bytes == 0
    assert tier.ready_blocks > 0
    assert counters["slab_evicted_blocks_total"] > 0
    assert counters["slab_read_blocks_total"] > 0


# --- processes that die --------------------------------------------------------------------------------------------------


def connect(sidecar: SidecarProcess) -> Client:
    client = Client(
        str(sidecar.socket),
        instance=uuid.uuid4().bytes,
        role=pb.BOTH,
        specs=[SPEC],
        want_slab=True,
        call_deadline_s=5.0,
    )
    client.connect()
    return client


def read(client: Client, keys: list[bytes]) -> Acquired:
    return client.acquire(uuid.uuid4().hex, client.namespaces[0].namespace, keys, slab=True)


def test_an_engine_that_is_killed_in_mid_copy_leaves_nothing_that_can_be_read(tmp_path: Path) -> None:
    keys = keys_of(1, 16)
    with running_sidecar(tmp_path, *SLAB) as sidecar, connect(sidecar) as client:
        wait_until_faulted(client)
        assert client.slab is not None
        put(client, keys)
        client.release(read(client, keys).lease_id, pb.LOADED)
        with client_process("hold-fill", sidecar, 1) as filler:
            _, _, offset = filler.line().split()
            seen = read(client, keys)
            assert set(seen.slab) <= {SlabUse.NONE}, "it is another's to fill"
            client.release(seen.lease_id, pb.LOADED)
            assert slab_of(sidecar)[0].writing_blocks == 16
        wait_until(lambda: slab_of(sidecar)[0].free_bytes == 4 << 20, "its slots are free again", WAIT_S)

        again = read(client, keys)
        assert list(again.slab) == [SlabUse.FILL] * 16
        assert int(offset) in again.slab_offsets.tolist()
        for key, slot in zip(keys, again.slab_offsets.tolist(), strict=True):
            client.slab.write(slot, content(key))
        client.release(again.lease_id, pb.LOADED, filled=b"\1" * 16)
        last = read(client, keys)
        assert list(last.slab) == [SlabUse.READ] * 16
        for key, slot, generation in zip(keys, last.slab_offsets.tolist(), last.slab_generations.tolist(), strict=True):
            assert client.slab.is_current(slot, generation)
            assert (client.slab.slot(slot, BLOCK_NBYTES) == content(key)).all()


def test_old_and_new_know_each_other(tmp_path: Path) -> None:
    """A client that does not ask for the slab gets two descriptors; one that asks where there is none goes on without."""
    keys = keys_of(2, 4)
    with running_sidecar(tmp_path, *SLAB) as sidecar:
        plain = Client(str(sidecar.socket), instance=uuid.uuid4().bytes, role=pb.BOTH, specs=[SPEC])
        with plain:
            wait_until_faulted(plain)
            assert plain.slab is None
            assert put(plain, keys) == 4
            for _ in range(3):
                grant = plain.acquire(uuid.uuid4().hex, plain.namespaces[0].namespace, keys)
                assert (grant.slab, len(grant.slab_offsets)) == (b"", 0)
                plain.release(grant.lease_id, pb.LOADED)
    with running_sidecar(tmp_path, "--no-grpc") as sidecar, connect(sidecar) as client:
        wait_until_faulted(client)
        assert client.slab is None
        assert put(client, keys) == 4
        assert read(client, keys).slab == b""


def test_who_has_not_mapped_the_slab_cannot_say_that_it_filled_a_slot(tmp_path: Path) -> None:
    """Else whoever maps it would read there what nobody wrote."""
    keys = keys_of(3, 4)
    with running_sidecar(tmp_path, *SLAB) as sidecar, connect(sidecar) as client:
        wait_until_faulted(client)
        put(client, keys)
        client.release(read(client, keys).lease_id, pb.LOADED)
        for want_arena in (True, False):
            instance = uuid.uuid4().bytes
            with Client(
                str(sidecar.socket), instance=instance, role=pb.BOTH, specs=[SPEC], want_arena=want_arena
            ) as other:
                grant = read(other, keys)
                assert grant.num_blocks == 4
                assert not any(grant.slab)
                with pytest.raises(ProtocolError):
                    other.release(grant.lease_id, pb.LOADED, filled=b"\1" * 4)
                other.release(grant.lease_id, pb.LOADED)

        assert list(read(client, keys).slab) == [SlabUse.FILL] * 4


@pytest.mark.parametrize(
    ("flags", "field", "said"),
    [
        (("--segment", "1MiB", "--hbm-slab", "4MiB", "--hbm-device", "cuda:0"), "hbm_device", "cuda:0 cannot be used"),
        (("--hbm-slab", "4MiB", "--hbm-device", "gpu"), "hbm_device", "use cuda:N, or host"),
        (("--hbm-slab", "4KiB"), "hbm_slab_bytes", "use at least one segment"),
    ],
)
def test_a_slab_that_cannot_be_had_is_refused_in_a_sentence(
    tmp_path: Path, flags: tuple[str, ...], field: str, said: str
) -> None:
    if "cuda:0" in flags and Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU")
    arguments = ["serve", "--socket", str(tmp_path / "s"), "--no-grpc", "--arena", "64MiB", *flags]

    result = CliRunner().invoke(cli, arguments)

    assert isinstance(result.exception, ConfigError), result.output
    assert result.exception.fields["field"] == field
    assert said in result.exception.message
