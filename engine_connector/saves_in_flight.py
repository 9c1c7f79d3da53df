"""The record by which the worker side's verbs wait for saves, or call them off."""

import threading
from collections.abc import Iterable

from kvstore.engine_connector.protocol import SaveJob


class SavesInFlight:
    """Which save jobs still read pages. A job is wanted until it is called off, or settle() has waited for it in vain."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._request_ids: dict[int, str] = {}
        self._called_off: set[int] = set()

    def add(self, job: SaveJob) -> None:
        """It begins to read pages."""
        with self._changed:
            self._request_ids[job.job_id] = job.request_id

    def remove(self, job: SaveJob) -> None:
        """It reads pages no more."""
        with self._changed:
            del self._request_ids[job.job_id]
            self._called_off.discard(job.job_id)
            self._changed.notify_all()

    def wanted(self, job: SaveJob) -> bool:
        """Whether what it copies may count: nobody has called it off."""
        with self._changed:
            return job.job_id not in self._called_off

    def call_off(self, job_ids: Iterable[int]) -> None:
        """Of these jobs, those that still read pages."""
        with self._changed:
            self._called_off |= self._request_ids.keys() & set(job_ids)

    def settle(self, request_ids: frozenset[str], deadline_s: float) -> None:
        """Return when no wanted save of these requests is under way."""
        with self._changed:
            try:
                self._changed.wait_for(lambda: not self._jobs_of(request_ids), deadline_s)
            finally:  # also when a Ctrl-C ends the wait: the pages are about to be used again
                self._called_off |= self._jobs_of(request_ids)

    def _jobs_of(self, request_ids: frozenset[str]) -> set[int]:
        return {job_id for job_id, request_id in self._request_ids.items() if request_id in request_ids}
