"""How threads ask the brain loop something."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from kvstore.core.errors import PeerUnavailable
from kvstore.core.limits import GRPC_CALL_DEADLINE_S

P = ParamSpec("P")
T = TypeVar("T")


def call_on_loop(
    loop: asyncio.AbstractEventLoop, deadline_s: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run `function` on the loop's thread and wait, from any other thread. Raises what it raises, and PeerUnavailable when
    the loop did not come to it within the deadline (at most GRPC_CALL_DEADLINE_S); then it is never run."""
    future: Future[T] = Future()

    def run() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*args, **kwargs))
            except Exception as err:  # noqa: BLE001 - carried over to the thread that asked, and raised there
                future.set_exception(err)

    deadline_s = min(deadline_s, GRPC_CALL_DEADLINE_S)
    loop.call_soon_threadsafe(run)
    try:
        return future.result(deadline_s)
    except TimeoutError as err:
        if not future.cancel() and future.done():
            return future.result()  # it was served just now
        raise PeerUnavailable("the sidecar is too busy", peer="brain loop", deadline_s=deadline_s) from err
