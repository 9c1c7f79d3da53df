"""Blocks stored in half the bytes: on a real sidecar, through one engine that saves and another that loads."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engines import BLOCK, GREEDY, Bench, Engine, SplitEngine
from sidecar_process import SidecarProcess, connected, running_sidecar, tool, wait_until

from kvstore.cli import engine as engine_cli
from kvstore.core.keys import QUANTISATIONS
from kvstore.kernels.block_part import QUANTISED

pytestmark = pytest.mark.e2e

FORMATS = ("same", *QUANTISATIONS)
HALF_A_STEP = {"fp8_e4m3": (1 / 16, 1 / 458_752), "int8": (0.0, 1 / 254)}
"""How far a number may be off: a part of its own magnitude, and a part of its tile's largest one (kernels/pack.py)."""

PAGE_ROUNDING = 2.0**-10
"""Of a 16-bit page, as a part of the number."""


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    """One for all: each test has prompts of its own."""
    with running_sidecar(tmp_path_factory.mktemp("formats"), "--no-grpc") as process:
        yield process


def pages_of(engine: Engine, prompt: list[int]) -> torch.Tensor:
    """`[blocks, L, H, T, P, D]`: the engine's pages of the prompt's loadable blocks, in float32."""
    hashes = engine.llm.spec.hash.hash_blocks(prompt[:-1])
    block_ids = engine.llm._blocks.match(hashes)
    assert len(block_ids) == len(hashes)
    return engine.llm._runner._pages[block_ids].float()


def test_the_kernels_know_the_formats_that_may_be_stored() -> None:
    assert tuple(QUANTISED) == QUANTISATIONS


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("stored_format", FORMATS)
def test_a_loaded_page_is_as_near_as_its_format_promises(
    bench: Bench, sidecar: SidecarProcess, stored_format: str, layerwise: bool
) -> None:
    (prompt,) = bench.prompts(16 * BLOCK + 1, seed=1 + layerwise)
    writer = bench.engine(sidecar.socket, stored_format=stored_format, layerwise=layerwise)
    reader = bench.engine(sidecar.socket, stored_format=stored_format, layerwise=layerwise, made_by=SplitEngine)

    writer.ask(prompt)
    (output,) = reader.ask(prompt)

    assert output.num_fetched_tokens == 16 * BLOCK
    ours, theirs = pages_of(writer, prompt), pages_of(reader, prompt)
    if stored_format == "same":
        assert torch.equal(ours, theirs)
        bench.expect_same([output], prompt)
        return
    relative, of_tile = HALF_A_STEP[stored_format]
    largest = ours.abs().amax((-3, -1), keepdim=True)
    bound = (relative + PAGE_ROUNDING) * ours.abs() + (of_tile + PAGE_ROUNDING / 100) * largest
    assert ((ours - theirs).abs() <= bound).all()
    assert not torch.equal(ours, theirs)


@pytest.mark.parametrize(("flag", "quantisation"), [("fp8", "fp8_e4m3"), ("int8", "int8"), ("same", "")])
def test_the_servers_flag_says_the_format(bench: Bench, flag: str, quantisation: str) -> None:
    context = engine_cli.serve.make_context("serve", [str(bench.model), "--no-store", "--kv-store-format", flag])

    with engine_cli._open_llm(context.params, bench.model, None) as llm:
        assert llm.spec.quantisation == quantisation


def test_formats_never_meet_and_hello_says_what_differs(bench: Bench, sidecar: SidecarProcess) -> None:
    (prompt,) = bench.prompts(8 * BLOCK + 1, seed=3)
    for stored_format in FORMATS:
        engine = bench.engine(sidecar.socket, stored_format=stored_format)
        (output,) = engine.ask(prompt)
        assert output.num_fetched_tokens == 0, "another format's blocks are not ours"
        with connected(sidecar, spec=engine.llm.spec) as client:
            (space,) = client.namespaces
        assert space.num_blocks >= 8
        assert len(space.near_misses) >= FORMATS.index(stored_format)
        assert {miss.differing_fields for miss in space.near_misses} <= {("stored_format",)}


def test_ram_and_drives_hold_the_stored_bytes(bench: Bench, tmp_path: Path) -> None:
    (prompt,) = bench.prompts(4 * 128 + 1)
    used: dict[str, list[int]] = {}
    for stored_format in ("same", "fp8_e4m3"):
        folder = tmp_path / stored_format
        folder.mkdir()
        with running_sidecar(folder, "--no-grpc", "--nvme", str(folder / "nvme"), "--nvme-bytes", "4MiB") as sidecar:
            engine = bench.engine(sidecar.socket, stored_format=stored_format, block_tokens=128, chunk_tokens=128)
            engine.llm.generate([prompt], GREEDY)
            with tool(sidecar) as look:
                wait_until(lambda: look.stats().tiers[1].ready_blocks == 4, "written")
                used[stored_format] = [tier.ready_bytes for tier in look.stats().tiers[:2]]
            engine.close()
    assert used["same"] == [4 * 65536] * 2
    assert used["fp8_e4m3"] == [4 * (32768 + 4096)] * 2, "half, and a page for the scales"
