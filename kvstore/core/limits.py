"""Every named limit, with what sets its size and what happens when it is reached."""

# --- messages -------------------------------------------------------------------------------------------------------
MAX_FRAME_BYTES = 8 << 20
"""A frame's body. 65,536 keys of 32 bytes are 2 MiB. Larger: RemoteProtocolError, and the connection is closed."""

MAX_KEYS_PER_CALL = 65536
"""Keys in one call (a million tokens at 16 a block). More: Overloaded."""

MAX_REQUEST_ID_BYTES = 256
"""A request id. Longer: RemoteProtocolError."""

MAX_SPECS_PER_HELLO = 64
"""Layer groups of one engine. More: RemoteProtocolError."""

# --- sessions and leases ----------------------------------------------------------------------------------------------
MAX_SESSIONS = 1024
"""Connections that said Hello. More: Overloaded, the connection is closed."""

MAX_NAMESPACES = 4096
"""Namespaces that know a block or are open in a session; others are closed when there is need. More: Overloaded at Hello."""

MAX_PROCESSES_PER_INSTANCE = 256
"""Watched processes of one engine, those included whose connections ended. More: Overloaded, the connection is closed."""

HELLO_DEADLINE_S = 5.0
"""A connection that has not said Hello by then is closed."""

FRAME_DEADLINE_S = 10.0
"""A connection that has sent part of a frame and not the rest by then is closed: it holds up to MAX_FRAME_BYTES."""

MAX_UNREAD_REPLY_BYTES = 16 << 20
"""Replies that a client has not read. Two of the largest; beyond them the connection is closed."""

MAX_FRAMES_PER_TURN = 64
"""Requests of one connection served before the others have their turn; some 5 ms."""

DEFAULT_LEASE_TTL_S = 30.0
"""Time to copy what was leased; a 64k-token prefix of a 70B model takes seconds. Renew extends."""

MAX_LEASE_TTL_S = 300.0
"""A longer wish is cut to this."""

MAX_LEASES_PER_INSTANCE = 8192
"""Live leases of one engine. More: LeaseRefused."""

MAX_LIMBO_FRACTION = 0.25
"""Part of the arena that one instance's ended leases may keep in limbo. Beyond: LeaseRefused for new leases."""

SESSION_IDLE_S = 60.0
"""A gRPC session (it has no connection of its own) without a call for so long ends."""

GRPC_CALL_DEADLINE_S = 5.0
"""A call from another thread (gRPC, metrics) that the brain loop has not come to by then: PeerUnavailable; never served."""

MAX_GRPC_CALLS = 256
"""gRPC calls under way at once. More: RESOURCE_EXHAUSTED."""

UNVERIFIED_DRAIN_S = 60.0
"""Limbo of an instance whose processes cannot be watched (another pid namespace) after its last connection ended."""

CUDA_DRAIN_S = 2.0
"""After the end of a process that registered the arena with CUDA: the driver ends its copies after the process is gone."""

STOP_DEADLINE_S = 3.0
"""A sidecar told to stop is gone by then."""

# --- memory -----------------------------------------------------------------------------------------------------------
SEGMENT_BYTES = 64 << 20
"""A segment of the arena, given to one size class at a time. A block larger than this is refused at Hello."""

SLOT_ALIGN_BYTES = 4096
"""Slots start at and are rounded up to pages: direct I/O and DMA registration want it."""

EVICTION_SLICE_BLOCKS = 256
"""Victims whose slots are freed together; then reserve looks again whether there is room."""

# --- client -----------------------------------------------------------------------------------------------------------
CALL_DEADLINE_S = 0.25
"""A client's call on the engine's path. Past it: PeerUnavailable, the connection is dropped and the breaker opens."""

CONNECT_DEADLINE_S = 1.0
"""Connecting and Hello."""

RECONNECT_BACKOFF_S = (0.1, 5.0)
"""First and longest pause of the breaker between attempts to reach the sidecar again; doubles in between."""

LOAD_DEADLINE_S = 10.0
"""A load that has not arrived by then is recomputed."""
