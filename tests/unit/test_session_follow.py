"""A session that only maps the arena asks nothing, so it learns of another sidecar from the engine's other process."""

import threading
from collections.abc import Iterator

import pytest
from in_process_sidecar import InProcessClient, InProcessSidecar
from test_session import wait_until

from kvstore.core.keys import KVSpec
from kvstore.engine_connector.session import StoreSession

SPEC = KVSpec(weights="w", num_layers=1, num_kv_heads=1, head_dim=64, dtype="float16")
NEVER_S = 60.0  # the pause between attempts: whoever connects before has not waited for it
DEADLINE_S = 5.0


class CountingClient(InProcessClient):
    """Lets a test wait for the n-th attempt to connect."""

    num_attempts = 0
    attempted: threading.Condition

    def connect(self) -> None:
        try:
            super().connect()
        finally:
            with self.attempted:
                self.num_attempts += 1
                self.attempted.notify_all()

    def wait_for_attempts(self, num: int) -> None:
        with self.attempted:
            assert self.attempted.wait_for(lambda: self.num_attempts >= num, DEADLINE_S)


@pytest.fixture
def sidecar() -> InProcessSidecar:
    return InProcessSidecar()


@pytest.fixture
def client(sidecar: InProcessSidecar) -> CountingClient:
    client = CountingClient(sidecar, SPEC)
    client.attempted = threading.Condition()
    return client


@pytest.fixture
def session(client: CountingClient) -> Iterator[StoreSession]:
    session = StoreSession(client, backoff_s=(NEVER_S, NEVER_S))
    session.start()
    yield session
    session.close()


def test_another_boot_is_connected_to_without_a_pause(sidecar, client, session):
    sidecar.restart()
    boot_id = sidecar.arena.boot_id
    assert session.arena(boot_id) is None

    session.follow(boot_id)

    client.wait_for_attempts(2)
    assert session.arena(boot_id) is sidecar.arena


def test_the_boot_it_speaks_to_and_none_at_all_are_no_news(sidecar, client, session):
    session.follow(sidecar.arena.boot_id)
    session.follow(b"")

    assert session.link
    assert client.num_attempts == 1


def test_a_boot_that_does_not_answer_is_tried_once_and_then_left_to_the_pauses(sidecar, client, session):
    sidecar.away = True

    for _ in range(3):
        session.follow(b"another boot".ljust(16))
        client.wait_for_attempts(2)

    assert client.num_attempts == 2
    assert not session.link


def test_news_of_another_boot_during_a_connection_attempt_is_not_lost(sidecar, client, session):
    """A second restart, told while we connect to the boot before: the next step tells it again, and it is heard."""
    connect = client.connect

    def connect_and_hear_news() -> None:
        connect()
        sidecar.restart()
        session.follow(sidecar.arena.boot_id)
        client.connect = connect

    sidecar.restart()
    client.connect = connect_and_hear_news
    session.follow(sidecar.arena.boot_id)
    wait_until(lambda: session.link is not None and session.boot_id != b"")

    session.follow(sidecar.arena.boot_id)

    wait_until(lambda: session.arena(sidecar.arena.boot_id) is sidecar.arena)
