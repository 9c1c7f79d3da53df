"""The store's worker side under an engine that Ctrl-C interrupts: what it may not publish any more, it does not."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from kvstore.engine_connector.protocol import BlockMove, ConnectorMetadata, SaveJob
from kvstore.engine_connector.worker_side import StoreWorkerSide

WAIT_S = 5.0


class GatedPages:
    """Pages whose copy stops half-way until the test lets it go on."""

    page_nbytes = 4096

    def __init__(self) -> None:
        self.reached, self.gate = threading.Event(), threading.Event()

    def copy_out(self, _block_id: int, dst: np.ndarray) -> None:
        self.reached.set()
        assert self.gate.wait(WAIT_S)
        dst[:] = 7


class Session:
    """An arena of one slot, always there."""

    def __init__(self) -> None:
        self._arena = SimpleNamespace(array=np.zeros(4096, np.uint8), generations=np.zeros(1, np.uint64))

    def follow(self, _boot_id: bytes) -> None:
        return

    def arena(self, _boot_id: bytes) -> SimpleNamespace:
        return self._arena


def test_a_save_is_called_off_when_the_wait_for_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The preempted request's pages are given away by then: what the copy reads from now on may be another's KV."""
    pages, worker = GatedPages(), StoreWorkerSide(Session())
    worker.register_pages(pages)
    worker.start_save(ConnectorMetadata(saves=(SaveJob(1, "r", b"boot", (BlockMove(0, 0, 0),)),)))
    assert pages.reached.wait(WAIT_S)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Condition, "wait_for", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            worker.handle_preemptions(ConnectorMetadata(preempted_request_ids=frozenset({"r"})))
    pages.gate.set()

    assert worker.get_output(wait_s=WAIT_S).finished_saving == ((1, (False,)),)
    worker.close()
