"""A move by layers is waited for until enough is there, or until nothing more comes, or until the time is up."""

import threading
from collections.abc import Callable

import pytest

from kvstore.engine_connector.layers import ALL_LAYERS, LayerProgress

WAIT_S = 10.0


def test_what_is_there_is_not_waited_for() -> None:
    progress = LayerProgress()
    progress.advance(3)

    assert progress.wait(3, 0.0)
    assert not progress.wait(4, 0.0)
    assert not progress.wait(4, -1.0), "a time that is over already"


def test_layers_that_are_there_stay_there() -> None:
    progress = LayerProgress()
    progress.advance(3)
    progress.advance(1)

    assert progress.wait(3, 0.0)


@pytest.mark.parametrize(
    ("news", "found"),
    [
        (lambda progress: progress.advance(2), True),
        (lambda progress: progress.end(ALL_LAYERS), True),
        (lambda progress: progress.end(0), False),
    ],
    ids=["there", "all there", "failed"],
)
def test_news_end_the_wait(news: Callable[[LayerProgress], None], found: bool) -> None:
    progress = LayerProgress()
    progress.advance(1)
    threading.Timer(0.02, news, [progress]).start()

    assert progress.wait(2, WAIT_S) is found


def test_a_move_that_failed_has_nothing_whatever_is_said_later() -> None:
    progress = LayerProgress()
    progress.advance(5)
    progress.end(0)
    progress.advance(9)
    progress.end(ALL_LAYERS)

    assert not progress.wait(1, WAIT_S)


def test_a_move_that_is_done_stays_done() -> None:
    progress = LayerProgress()
    progress.end(ALL_LAYERS)
    progress.end(0)

    assert progress.wait(1000, 0.0)
