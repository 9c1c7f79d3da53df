"""What the scheduler side remembers of sessions, for hints about them (protocol.SessionHints)."""

from collections import OrderedDict

from kvstore.core.keys import pack_keys
from kvstore.core.limits import MAX_RECENT_SESSIONS
from kvstore.engine_connector.protocol import Request


class RecentSessions:
    """The blocks that each session's last finished request had, of the MAX_RECENT_SESSIONS that spoke last. They are looked
    for in whatever boot of the sidecar answers then: its drives may have them.

    A session is named by its salt and its id: who does not know the salt learns nothing of the session, and ends nothing.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[tuple[str, str], bytes] = (
            OrderedDict()
        )  # packed, as they travel; the latest session last

    def remember(self, request: Request) -> None:
        """A request of a session has ended."""
        session = (request.cache.salt, request.cache.session_id)
        if request.cache.session_id:
            self._keys[session] = pack_keys(request.block_hashes)
            self._keys.move_to_end(session)
            if len(self._keys) > MAX_RECENT_SESSIONS:
                self._keys.popitem(last=False)

    def keys(self, session_id: str, salt: str) -> bytes:
        """Empty when the session is not known."""
        return self._keys.get((salt, session_id), b"")

    def forget(self, session_id: str, salt: str) -> bytes:
        """The same, for the last time."""
        return self._keys.pop((salt, session_id), b"")
