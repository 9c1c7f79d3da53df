"""A connector without a store: nothing is ever found, loaded or saved. The engine's path with it is the same path."""

from collections.abc import Sequence

from kvstore.engine_connector.protocol import (
    Connector,
    ConnectorMetadata,
    Pages,
    PageTables,
    Request,
    ScheduledRequest,
    WorkerOutput,
)


class _NoStoreScheduler:
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:  # noqa: ARG002
        return 0

    def update_state_after_alloc(
        self,
        request: Request,  # noqa: ARG002
        block_ids: PageTables,  # noqa: ARG002
        num_external_tokens: int,
    ) -> None:
        assert num_external_tokens == 0

    def build_connector_meta(
        self,
        scheduled: Sequence[ScheduledRequest],  # noqa: ARG002
        preempted_request_ids: frozenset[str],
    ) -> ConnectorMetadata:
        return ConnectorMetadata(preempted_request_ids=preempted_request_ids)

    def update_connector_output(self, output: WorkerOutput) -> None:
        assert output == WorkerOutput()

    def request_finished(self, request: Request) -> bool:  # noqa: ARG002
        return False

    def has_pending(self, request_id: str) -> bool:  # noqa: ARG002
        return False

    def close(self) -> None:
        return


class _NoStoreWorker:
    def register_pages(self, pages: Pages, *others: Pages) -> None:  # noqa: ARG002
        return

    def handle_preemptions(self, meta: ConnectorMetadata) -> None:  # noqa: ARG002
        return

    def start_load(self, meta: ConnectorMetadata) -> None:
        assert not meta.loads

    def start_save(self, meta: ConnectorMetadata) -> None:
        assert not meta.saves

    def get_output(self, *, wait_s: float = 0.0) -> WorkerOutput:  # noqa: ARG002
        return WorkerOutput()

    def close(self) -> None:
        return


def no_store() -> Connector:
    """A connector whose store has nothing in it."""
    return Connector(_NoStoreScheduler(), _NoStoreWorker())
