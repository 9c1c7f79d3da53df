"""`kvstore serve` with two bugs of a kind that it is not known to have: Pin hangs the brain loop, Drop meets a wrong type.

python tests/e2e/buggy_sidecar.py serve ...
"""

import time
from typing import Any

from kvstore.cli.main import main
from kvstore.dispatcher import Dispatcher

HANG_S = 7.0
"""Longer than anybody waits for the loop (GRPC_CALL_DEADLINE_S)."""


class BuggyDispatcher(Dispatcher):
    def _pin(self, *_: Any) -> Any:
        time.sleep(HANG_S)
        raise AssertionError

    def _drop(self, *_: Any) -> Any:
        return None + 1  # type: ignore[operator]  # the bug


if __name__ == "__main__":
    import kvstore.sidecar

    kvstore.sidecar.Dispatcher = BuggyDispatcher  # type: ignore[misc]
    main()
