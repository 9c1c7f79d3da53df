"""How threads ask the brain loop something."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import ParamSpec, TypeVar

from kvstore.core.errors import PeerUnavailable
from kvstore.core.limits import GRPC_CALL_DEADLINE_S

P = ParamSpec("P")
T = TypeVar("T")


def call_on_loop(
    loop: asyncio.AbstractEventLoop, deadline_s: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run `function` on the loop's thread and wait, from any other thread. Raises what it raises, and PeerUnavailable when
    the loop did not come to it within the deadline (at most GRPC_CALL_DEADLINE_S) or is closed; then it is never run.

    Once it runs, its end is awaited, since it has its effect whatever we answer. Only of a function that hangs for another
    GRPC_CALL_DEADLINE_S nothing is known; that PeerUnavailable says so.
    """
    future: Future[T] = Future()

    def run() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*args, **kwargs))
            except Exception as err:  # noqa: BLE001 - carried over to the thread that asked, and raised there
                future.set_exception(err)

    deadline_s = min(deadline_s, GRPC_CALL_DEADLINE_S)
    try:
        loop.call_soon_threadsafe(run)
    except RuntimeError as err:  # what asyncio raises for a closed loop
        raise PeerUnavailable("the sidecar has stopped", peer="brain loop", deadline_s=deadline_s) from err
    wait([future], deadline_s)
    if future.cancel():
        raise PeerUnavailable("the sidecar is too busy", peer="brain loop", deadline_s=deadline_s)
    wait([future], GRPC_CALL_DEADLINE_S)
    if not future.done():
        raise PeerUnavailable(
            "the sidecar hangs in this call, which may or may not have been served",
            peer="brain loop",
            deadline_s=deadline_s + GRPC_CALL_DEADLINE_S,
        )
    return future.result()
