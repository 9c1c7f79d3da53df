"""vLLM's native offloading on its CPU backend, which refuses it: its worker's copies by memcpy in place of CUDA streams.

Loaded by servers under test, as the offloading spec. The rest is vLLM's own: scheduler, pool in shared memory, tiers.
"""

import time

import numpy as np
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuTieringSpec(TieringOffloadingSpec):
    """One worker, one layer group, one block a chunk."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """See OffloadingSpec."""
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return MemcpyWorker(kv_caches, region)


class MemcpyWorker(OffloadingWorker):
    """Copies at once; a job has ended when it was submitted."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        (refs,) = kv_caches.group_data_refs
        self._region = region
        self._pages = [kv_caches.tensors[ref.tensor_idx].tensor.numpy() for ref in refs]
        sizes = [ref.page_size_bytes for ref in refs]
        assert [page.shape[1] for page in self._pages] == sizes
        self._chunks = [region.create_next_worker_view(size).numpy() for size in sizes]
        self._results: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: CPULoadStoreSpec) -> bool:
        """See OffloadingWorker."""
        return self._copy(job_id, self._pages, src_spec.block_ids, self._chunks, dst_spec.block_ids)

    def submit_load(self, job_id: int, src_spec: CPULoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """See OffloadingWorker."""
        return self._copy(job_id, self._chunks, src_spec.block_ids, self._pages, dst_spec.block_ids)

    def _copy(
        self,
        job_id: int,
        sources: list[np.ndarray],
        source_ids: np.ndarray,
        targets: list[np.ndarray],
        target_ids: np.ndarray,
    ) -> bool:
        started_s = time.monotonic()
        assert len(source_ids) == len(target_ids)
        for source, target in zip(sources, targets, strict=True):
            target[target_ids] = source[source_ids]
        nbytes = len(source_ids) * sum(source.shape[1] for source in sources)
        self._results.append(TransferResult(job_id, True, nbytes, time.monotonic() - started_s))
        return True

    def get_finished(self) -> list[TransferResult]:
        """See OffloadingWorker."""
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: set[int]) -> None:
        """See OffloadingWorker. All have ended."""

    def shutdown(self) -> None:
        """See OffloadingWorker."""
        self._chunks.clear()
        self._region.cleanup()
