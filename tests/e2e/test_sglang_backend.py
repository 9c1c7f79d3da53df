"""SGLang's backend over a plain host pool and a real sidecar, where SGLang is not installed. What SGLang is was recorded; the
real thing is in tests/sglang."""

import hashlib
import inspect
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from recorded_sglang import CONTRACT, load_backend
from sidecar_process import SidecarProcess, running_sidecar

from kvstore.core.errors import ConfigError

LAYERS, PAGE, WIDTH, NUM_PAGES = 2, 16, 64, 40


class HostPool:
    """As SGLang's with layout page_first: K of a page, V of a page."""

    layout, page_size, layer_num, head_num, head_dim, dtype, start_layer = (
        "page_first",
        PAGE,
        LAYERS,
        2,
        32,
        torch.int16,
        0,
    )

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (2, NUM_PAGES * PAGE, LAYERS, WIDTH)
        self.buffer = torch.randint(0, 1 << 15, shape, dtype=torch.int16, generator=generator)

    def page(self, index: int) -> torch.Tensor:
        return self.buffer[:, index * PAGE : (index + 1) * PAGE].flatten()

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pieces = [self.buffer[p, token : token + PAGE] for token in indices.tolist()[::PAGE] for p in (0, 1)]
        return [piece.data_ptr() for piece in pieces], [piece.nbytes for piece in pieces]


def hashes(num_pages: int, name: str = "a") -> list[str]:
    """A chain."""
    steps = itertools.accumulate(range(num_pages), lambda prior, i: prior + bytes([i]), initial=name.encode())
    return [hashlib.sha256(step).hexdigest() for step in itertools.islice(steps, 1, None)]


def tokens_of(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


@pytest.fixture(scope="module")
def sglang() -> ModuleType:
    return load_backend()


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[SidecarProcess]:
    with running_sidecar(tmp_path) as process:
        yield process


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text(json.dumps({"rope_theta": 1e4}))
    return folder


@pytest.fixture
def open_backend(sglang: ModuleType, tmp_path: Path, model: Path) -> Iterator[Callable[..., Any]]:
    made = []

    def start(pool: HostPool, *, extra: dict[str, object] | None = None, **config: object) -> Any:
        extra = {"interface_v1": 1, "socket": str(tmp_path / "kvstore.sock"), "model_path": str(model)} | (extra or {})
        alone = {name: 1 if name.endswith("size") else 0 for name in ("tp_rank", "tp_size", "pp_rank", "pp_size")}
        alone |= {"attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False, "model_name": "name"}
        alone |= {"enable_storage_metrics": False, "is_page_first_layout": True}
        backend = sglang.KVStoreHiCache(sglang.HiCacheStorageConfig(extra_config=extra, **alone | config), {})
        made.append(backend)
        backend.register_mem_pool_host(pool)
        backend.on_host_pools_registered()
        return backend

    yield start
    for backend in made:
        backend.close()


def test_every_call_of_sglang_s_is_understood(sglang: ModuleType) -> None:
    """By position and by name; nothing that SGLang leaves out is needed."""
    for name, parameters in CONTRACT["methods"].items():
        taken = list(inspect.signature(getattr(sglang.KVStoreHiCache, name)).parameters.values())[1:]
        if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in taken):
            continue  # inherited
        assert [each.name for each in taken] == [parameter.removesuffix("?") for parameter in parameters], name
        needed = {each.name for each in taken if each.default is inspect.Parameter.empty}
        assert needed <= {parameter for parameter in parameters if not parameter.endswith("?")}, name
    assert not inspect.isabstract(sglang.KVStoreHiCache)


def test_pages_go_from_one_engine_to_another(open_backend: Callable[..., Any], sidecar: SidecarProcess) -> None:
    one, other = HostPool(1), HostPool(2)
    first, second = open_backend(one), open_backend(other)
    keys = hashes(4)

    assert first.batch_set_v1(keys, tokens_of(7, 1, 5, 3)) == [True] * 4

    assert second.batch_exists([*keys, *hashes(1, "b")]) == 4
    assert second.batch_get_v1([*keys, *hashes(1, "b")], tokens_of(0, 1, 2, 3, 4)) == [True] * 4 + [False]
    for place, page in enumerate((7, 1, 5, 3)):
        assert torch.equal(other.page(place), one.page(page))


def test_single_pages_are_the_same_blocks(open_backend: Callable[..., Any], sidecar: SidecarProcess) -> None:
    pool = HostPool()
    backend = open_backend(pool)
    (first, second), flat = hashes(2), torch.zeros(2 * PAGE * LAYERS * WIDTH, dtype=torch.int16)
    backend.batch_set_v1([first], tokens_of(3))

    assert backend.get(first, flat) is flat
    assert torch.equal(flat, pool.page(3))
    assert backend.set(second, pool.page(4))
    assert backend.exists(second)
    assert backend.batch_get_v1([second], tokens_of(9)) == [True]
    assert torch.equal(pool.page(9), pool.page(4))
    assert backend.get(hashes(1, "b")[0], flat) is None
    assert not backend.set(second, torch.zeros(5, dtype=torch.int16))
    assert not backend.set("no hash", pool.page(4))


def test_ranks_with_other_heads_do_not_share_and_copies_of_one_page_do(
    open_backend: Callable[..., Any], sidecar: SidecarProcess
) -> None:
    pool, keys = HostPool(), hashes(2)
    ranks = [open_backend(pool, tp_rank=rank, tp_size=2) for rank in range(2)]
    ranks[0].batch_set_v1(keys, tokens_of(0, 1))
    assert [rank.batch_exists(keys) for rank in ranks] == [2, 0]

    replicas = [open_backend(pool, tp_rank=rank, tp_size=2, is_mla_model=True) for rank in range(2)]
    replicas[0].batch_set_v1(keys, tokens_of(0, 1))
    assert [replica.batch_exists(keys) for replica in replicas] == [2, 2]


def test_without_a_sidecar_every_call_answers_at_once(open_backend: Callable[..., Any]) -> None:
    backend = open_backend(HostPool())
    started_s = time.monotonic()

    for _ in range(100):
        assert backend.batch_exists(hashes(3)) == 0
        assert backend.batch_get_v1(hashes(3), tokens_of(0, 1, 2)) == [False] * 3
        assert backend.batch_set_v1(hashes(3), tokens_of(0, 1, 2)) == [False] * 3
        backend.clear()

    assert time.monotonic() - started_s < 2.0


def test_a_killed_sidecar_is_used_again_when_it_is_back(
    open_backend: Callable[..., Any], sidecar: SidecarProcess
) -> None:
    pool, keys = HostPool(), hashes(3)
    backend = open_backend(pool)
    assert all(backend.batch_set_v1(keys, tokens_of(0, 1, 2)))

    sidecar.kill()
    assert backend.batch_get_v1(keys, tokens_of(4, 5, 6)) == [False] * 3
    sidecar.start()

    deadline_s = time.monotonic() + 10.0
    while not all(backend.batch_set_v1(keys, tokens_of(0, 1, 2))):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert all(backend.batch_get_v1(keys, tokens_of(4, 5, 6)))
    assert torch.equal(pool.page(4), pool.page(0))


def test_prefix_keys_that_are_off_are_told_once(
    open_backend: Callable[..., Any], sidecar: SidecarProcess, sglang: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    backend = open_backend(HostPool())
    with caplog.at_level(logging.WARNING):
        caplog.clear()  # it may have said that it is connected
        backend.batch_set_v1(hashes(1), tokens_of(0), sglang.HiCacheStorageExtraInfo(prefix_keys=[]))
        assert not caplog.messages
        for _ in range(3):
            backend.batch_set_v1(hashes(1), tokens_of(0), sglang.HiCacheStorageExtraInfo())

    assert [message.split(":")[0] for message in caplog.messages] == ["hicache_storage_pass_prefix_keys"]


def test_a_model_whose_weights_are_not_known_is_refused(open_backend: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="model_path: SGLang has not said which model it serves"):
        open_backend(HostPool(), extra={"model_path": ""})
