"""`kvstore serve` on a machine whose kernel has memory for one segment of the arena, which is noticed after a second.

python tests/e2e/poor_sidecar.py serve ...
"""

import errno
import os

from kvstore.cli.main import main
from kvstore.core.errors import TierIOError
from kvstore.tiers.arena import Arena


class PoorArena(Arena):
    def fault_segment(self, segment: int) -> None:
        if segment > 0:
            reason = os.strerror(errno.ENOMEM)
            raise TierIOError(f"arena: no memory for segment {segment}: {reason}", tier="pinned", errno=errno.ENOMEM)
        super().fault_segment(segment)


if __name__ == "__main__":
    import kvstore.health
    import kvstore.sidecar

    kvstore.sidecar.Arena = PoorArena  # type: ignore[misc]
    kvstore.health.ARENA_DEADLINE_S = 1.0
    main()
