"""The session: never raises, never waits for a connection on the engine's thread, and comes back by itself."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from in_process_sidecar import InProcessClient, InProcessSidecar

from kvstore.core.errors import LeaseExpired, PeerUnavailable
from kvstore.core.keys import KVSpec
from kvstore.engine_connector.session import Link, StoreSession

SPEC = KVSpec(weights="w", num_layers=1, num_kv_heads=1, head_dim=64, dtype="float16")
FAST_S = (0.001, 0.004)
WAIT_S = 10.0


class CountingClient(InProcessClient):
    """Notes when, and on which thread, a connection was tried."""

    def __init__(self, sidecar: InProcessSidecar) -> None:
        super().__init__(sidecar, SPEC)
        self.tries_s: list[float] = []
        self.threads: set[str] = set()

    def connect(self) -> None:
        self.tries_s.append(time.monotonic())
        self.threads.add(threading.current_thread().name)
        super().connect()


@pytest.fixture
def sidecar() -> InProcessSidecar:
    return InProcessSidecar()


@pytest.fixture
def open_session(sidecar: InProcessSidecar) -> Iterator[Callable[..., StoreSession]]:
    made: list[StoreSession] = []

    def start(backoff_s: tuple[float, float] = FAST_S) -> StoreSession:
        session = StoreSession(CountingClient(sidecar), backoff_s=backoff_s)
        made.append(session)
        session.start()
        return session

    yield start
    for session in made:
        session.close()


def wait_until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.001)


def lose(session: StoreSession, sidecar: InProcessSidecar) -> None:
    sidecar.away = True
    assert session.ask(session.link, lambda client, link: client.match(link.namespace, [bytes(16)])) is None
    assert not session.link


def test_a_sidecar_that_is_there_is_up_after_start(open_session: Callable, sidecar: InProcessSidecar) -> None:
    session = open_session()

    assert session.link
    assert session.boot_id == sidecar.arena.boot_id
    assert session.link.namespace == SPEC.namespace()
    assert session.link.number == 1
    assert session.ask(session.link, lambda client, link: client.match(link.namespace, [bytes(16)])).num_blocks == 0


def test_an_absent_sidecar_is_no_error_and_is_found_when_it_comes(
    open_session: Callable, sidecar: InProcessSidecar
) -> None:
    sidecar.away = True
    session = open_session()
    assert (session.link, session.boot_id) == (None, b"")
    assert session.ask(session.link, lambda client, _: pytest.fail("asked while away")) is None

    sidecar.away = False

    wait_until(lambda: session.link)
    assert session.boot_id == sidecar.arena.boot_id


def test_a_lost_call_answers_none_and_the_background_thread_alone_reconnects(
    open_session: Callable, sidecar: InProcessSidecar
) -> None:
    session = open_session()
    lose(session, sidecar)
    assert session.boot_id == b"", "no job is made for a sidecar that does not answer"
    session._client.threads.clear()

    sidecar.away = False

    wait_until(lambda: session.link)
    assert session._client.threads == {"kvstore-reconnect"}
    assert session.link.number == 2


def test_a_declined_call_answers_none_and_keeps_the_connection(open_session: Callable) -> None:
    session = open_session()

    def decline(client: InProcessClient, _: Link) -> None:
        raise LeaseExpired("ended", lease_id=1)

    assert session.ask(session.link, decline) is None
    assert session.link


def test_our_own_bugs_are_not_swallowed(open_session: Callable) -> None:
    session = open_session()

    with pytest.raises(ZeroDivisionError):
        session.ask(session.link, lambda client, _: 1 // 0)


def test_pauses_grow_to_the_longest_and_start_over_after_success(
    open_session: Callable, sidecar: InProcessSidecar
) -> None:
    session = open_session((0.03, 0.96))
    lose(session, sidecar)
    tries_s = session._client.tries_s
    tries_s[:] = [time.monotonic()]
    wait_until(lambda: len(tries_s) >= 6)

    pauses_s = [later - earlier for earlier, later in itertools.pairwise(tries_s)]
    for pause_s, at_least_s in zip(pauses_s, (0.03, 0.06, 0.12, 0.24, 0.48), strict=False):
        assert pause_s >= 0.9 * at_least_s
    sidecar.away = False
    wait_until(lambda: session.link)
    lose(session, sidecar)
    lost_s, num_tries = time.monotonic(), len(tries_s)
    wait_until(lambda: len(tries_s) > num_tries)
    assert tries_s[num_tries] - lost_s < 0.9, "the first pause is short again"


def test_the_arena_of_another_boot_is_none(open_session: Callable, sidecar: InProcessSidecar) -> None:
    session = open_session()
    boot_id = session.boot_id
    assert session.arena(boot_id) is sidecar.arena
    sidecar.restart()
    lose(session, sidecar)
    sidecar.away = False
    wait_until(lambda: session.link)

    assert session.arena(boot_id) is None
    assert session.arena(session.boot_id) is sidecar.arena


def test_following_another_boot_connects_to_it(open_session: Callable, sidecar: InProcessSidecar) -> None:
    """A worker's session asks nothing; its scheduler's metadata tells it of the restart."""
    session = open_session((5.0, 5.0))
    sidecar.restart()
    session.follow(b"")
    assert session.link

    session.follow(sidecar.arena.boot_id)

    wait_until(lambda: session.boot_id == sidecar.arena.boot_id)


def test_following_the_boot_it_speaks_to_changes_nothing(open_session: Callable) -> None:
    session = open_session()
    session.follow(session.boot_id)

    assert session.link
    assert session.link.number == 1


@pytest.mark.parametrize("away", [True, False])
def test_close_ends_everything_and_may_be_repeated(
    open_session: Callable, sidecar: InProcessSidecar, away: bool
) -> None:
    sidecar.away = away
    session = open_session((5.0, 5.0))
    started_s = time.monotonic()

    session.close()
    session.close()

    assert time.monotonic() - started_s < 2.0, "the pause of five seconds is cut short"
    assert session._client.closed
    assert not session._thread.is_alive()
    assert session.ask(session.link, lambda client, _: pytest.fail("asked after close")) is None


def test_a_session_that_was_not_started_closes(sidecar: InProcessSidecar) -> None:
    StoreSession(CountingClient(sidecar)).close()


def test_near_misses_are_told(
    open_session: Callable, sidecar: InProcessSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    """No silent hit rate of nothing: what the store holds for the same weights and another seed is named."""
    from kvstore.core.plans import NearMiss

    def connect_with_near_miss(client: CountingClient) -> None:
        InProcessClient.connect(client)
        miss = NearMiss(bytes(16), ("hash.seed",), 7)
        client.namespaces = (client.namespaces[0]._replace(near_misses=(miss,)),)

    session = StoreSession(CountingClient(sidecar))
    session._client.connect = lambda: connect_with_near_miss(session._client)
    session.start()
    session.close()

    assert "num_blocks=7 differing_fields=hash.seed" in caplog.text


def test_an_error_while_connecting_is_as_good_as_absence(
    open_session: Callable, sidecar: InProcessSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore.core.errors import SpecMismatch

    client = CountingClient(sidecar)
    errors: list[Exception] = [SpecMismatch("too large", field="block", value=1), PeerUnavailable("absent")]

    def connect() -> None:
        if errors:
            raise errors.pop(0)
        InProcessClient.connect(client)

    monkeypatch.setattr(client, "connect", connect)
    session = StoreSession(client, backoff_s=FAST_S)
    session.start()
    wait_until(lambda: session.link)
    session.close()


def test_an_absent_sidecar_is_warned_of_once_and_not_at_every_try(
    open_session: Callable, sidecar: InProcessSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    sidecar.away = True
    session = open_session()

    wait_until(lambda: len(session._client.tries_s) >= 4)

    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.getMessage() for record in warned] == [
        "store not reached, recomputing code=PeerUnavailable reason=absent"
    ]
