"""Every named limit, with what sets its size and what happens when it is reached."""

# --- messages -------------------------------------------------------------------------------------------------------
MAX_FRAME_BYTES = 8 << 20
"""A frame's body. 65,536 keys of 32 bytes are 2 MiB. Larger: RemoteProtocolError, and the connection is closed."""

MAX_KEYS_PER_CALL = 65536
"""Keys in one call (a million tokens at 16 a block). More: Overloaded."""

MAX_REQUEST_ID_BYTES = 256
"""A request id. Longer: RemoteProtocolError."""

MAX_LABEL_BYTES = 64
"""What a prompt may be called (kvstore/labels.py), in UTF-8, printable. Others: ConfigError in an engine, RemoteProtocolError
in the sidecar."""

MAX_LABELS = 4096
"""Different ones at a time. Beyond that, new ones are not shown until blocks with others are gone."""

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

MAX_GRPC_SESSIONS = MAX_SESSIONS // 2
"""Of them those over gRPC, so that whoever reaches the port does not keep engines from the local socket. More: Overloaded."""

MAX_UNPROVEN_SESSIONS = MAX_GRPC_SESSIONS // 2
"""And of those all that are no peers, who alone show a proof. More: Overloaded."""

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

CORRELATED_USE_S = 2.0
"""Uses of a block so close to one that counted are that one again: a request looks, leases and stores in so long."""

MAX_GHOSTS = 1 << 22
"""Evicted blocks that a policy remembers, at most 64 MiB. A tier of fewer than 131,072 blocks remembers 32 times its number."""

MAX_PIN_S = 86400.0
"""A longer wish is cut to this."""

MAX_PINNED_FRACTION = 0.25
"""Part of the arena that pins may keep from eviction, all together. A pin that would exceed it is cut."""

# --- plans ------------------------------------------------------------------------------------------------------------
MAX_POOL_BLOCKS = 1 << 20
"""Blocks in engines' own pools that are known of, over all engines; some 120 MB. What is beyond is not noted, and counted."""

MAX_POOL_BLOCKS_PER_INSTANCE = 1 << 17
"""And of one engine: two million tokens at 16 a block. Forgetting them takes some 20 ms."""

MAX_POOL_CAPACITY_BLOCKS = 1 << 24
"""Blocks that an engine may say fit into its pool: 268 million tokens at 16 a block. The sum of many is far below 2^64 bytes."""

MAX_REPORTED_BLOCKS = 8192
"""Blocks of a pool in one Report, those that came and those that went; some 4 ms. More: Overloaded."""

MAX_REPORTED_RUNS = 512
"""Runs of blocks that came, in one Report; some 1.5 ms to parse. More: Overloaded."""

INSPECT_SLICE_ROWS = 1 << 15
"""Blocks whose hashes one Inspect looks at, 2 to 4 ms; its caller asks for the next."""

MAX_INSPECTED_BLOCKS = 8
"""Blocks that one Inspect tells all about. More that fit are counted."""

MAX_PLANS_OF_BLOCK = 5
"""Plans that Inspect tells of one block."""

MAX_REMEMBERED_PLANS = 4096
"""Plans that Explain can tell of, some 1 KiB each. The oldest is forgotten."""

MAX_MEASURED_ENGINES = 256
"""Engines (by namespace) whose speeds are remembered. The one that was heard of longest ago is forgotten."""

MAX_PREFILL_SAMPLES = 1024
"""Steps in one Report. More: RemoteProtocolError; an engine that reports once a second has some hundred."""

MAX_PROMPT_TOKENS = 1 << 24
"""Tokens of a request that is to be planned. More: RemoteProtocolError."""

MAX_DURATION_S = 1e9
"""Any time that comes over the wire, some 30 years. More: RemoteProtocolError; sums of such stay numbers."""

MAX_EXPLAINED_PLANS = 1000
"""Plans in one Explain reply; a larger wish is cut to this."""

# --- what is counted ----------------------------------------------------------------------------------------------------
REQUEST_SETTLE_S = 5.0
"""A request that was matched and not leased for so long is counted as it stands: an engine asks again while one waits."""

LOAD_SETTLE_S = 60.0
"""A lease that was not released for so long is counted as a load that came to nothing."""

MAX_OPEN_REQUESTS = 8192
"""Requests that wait for either. More: the oldest is counted as it stands."""

REMEMBERED_REMOVALS = 1 << 20
"""Words of the table that knows why a block is not here any more, 8 MiB. A newer removal takes an older one's place."""

MAX_TENANT_LABELS = 50
"""Tenants that metrics name. The others are shown as one; who comes to twice the least of those named takes its place."""

MAX_TENANT_CANDIDATES = 256
"""Others whose tokens are counted for that. Beyond it the least is forgotten."""

MAX_QUEUED_RECORD_BYTES = 8 << 20
"""Keys of requests that are to be recorded (--record) and are not yet. More: they are dropped, and counted."""

MAX_REMEMBERED_IDS = 1 << 16
"""Keys whose number in a recording is remembered, some 10 MB. More: all are forgotten, and made again when they come."""

LAG_INTERVAL_S = 0.25
"""How often the loop's lag is looked at."""

# --- memory -----------------------------------------------------------------------------------------------------------
SEGMENT_BYTES = 64 << 20
"""A segment of the arena, given to one size class at a time. A block larger than this is refused at Hello."""

SLOT_ALIGN_BYTES = 4096
"""Slots start at and are rounded up to pages: direct I/O and DMA registration want it."""

EVICTION_SLICE_BLOCKS = 256
"""Victims whose slots are freed together; then reserve looks again whether there is room."""

# --- drives -----------------------------------------------------------------------------------------------------------
MAX_IO_BYTES = 4 << 20
"""Bytes in one request to a drive: moves of neighbouring slots are joined up to this. Larger ones were no faster, and the
first block of them is ready later."""

DRIVE_THREADS = 8
"""I/Os in flight on a drive; at most half of them writes, so that a read waits for a part of one write at most."""

MAX_WRITES_IN_FLIGHT_BYTES = 64 << 20
"""Demotions ordered and not done, over all drives. More wait in the backlog, where they pin nothing."""

MAX_WRITING_FRACTION = 0.25
"""And at most this part of the arena, since a block that is being written cannot be evicted."""

MAX_WRITES_PER_TURN = 512
"""Writes that the loop orders in one turn; some 10 ms. The rest is ordered when the first of them have ended."""

MAX_WRITE_BACKLOG_BLOCKS = 65536
"""Blocks that wait to be written. Beyond it the oldest are passed over and counted; they may earn their write again."""

INDEX_COMMIT_INTERVAL_S = 0.05
"""The longest that a group commit waits for company; a thousand entries do not wait."""

INDEX_COMMIT_ENTRIES = 1000
"""Entries at which a group commit does not wait any longer."""

INDEX_RETRY_S = 1.0
"""Pause after a group commit that failed (full disk); what it held is kept, and writes stop meanwhile."""

DRIVE_RETRY_S = (1.0, 60.0)
"""First and longest pause before a drive that refused writes is tried again; doubles in between."""

MAX_DRIVE_ERRORS = 8
"""Reads in a row that a drive failed with EIO. Then it is degraded: not read again before the same pauses."""

MAX_PROBE_BYTES = 16 << 20
"""Read from all drives together at the start, to learn how fast they are."""

PROBE_DEADLINE_S = 1.0
"""Time for that, beside serving. What was learned by then is told."""

RECENCY_FLUSH_S = 30.0
"""How often the recency of blocks on the drives is written down. A crash loses so much of the order, and nothing else."""

MAX_TOUCHES_PER_TURN = 2048
"""Blocks whose recency the loop takes down in one turn; some 5 ms. The rest waits for the next tick."""

RESTORE_SLICE_BLOCKS = 2048
"""Blocks that recovery gives to the loop at once; some 3 ms."""

MAX_REPORTS_PER_TURN = 64
"""Ends of moves and removals that the loop takes in one turn; some 2 ms. The rest waits for the next, requests go between."""

# --- links between nodes ----------------------------------------------------------------------------------------------
MAX_DESCRIPTOR_BYTES = 16 << 10
"""What an endpoint says of itself so that peers can connect. Longer: RemoteProtocolError."""

MAX_LINK_EXTENTS = 8192
"""Extents queued and in flight on one link; some 1 MiB of small tuples. A batch that goes beyond: OVERLOADED, whole."""

MAX_LINK_REQUEST_EXTENTS = 512
"""Extents in one request of the TCP link, 12 KiB. A reader sends more in several; an owner closes the connection."""

LINK_STREAMS = 4
"""Connections of a TCP link, made when there is enough to read: one cannot fill a fast network."""

LINK_REQUEST_BYTES = 8 << 20
"""Asked for in one request, or one block that is larger. Its blocks are told together, so a few milliseconds' worth."""

LINK_WINDOW_REQUESTS = 4
"""Requests of one connection that are not answered: the owner must not wait for the next one."""

LINK_CONNECT_DEADLINE_S = 1.0
"""Connecting and the handshake of a link, either side."""

LINK_IDLE_S = 30.0
"""A reader closes a connection without work for so long; an owner after four times that."""

LINK_STALL_S = 5.0
"""An owner closes a connection whose reader takes no byte for so long; the kernel, one that acknowledges none."""

LINK_REQUEST_DEADLINE_S = 60.0
"""And one whose reader has not taken a whole request's bytes by then, however it trickles."""

MAX_LINK_CONNECTIONS = 1024
"""Connections that an owner serves, a thread each. More: OVERLOADED. 64 more may be in the handshake, others wait."""
# --- peers ------------------------------------------------------------------------------------------------------------
MAX_FETCH_BLOCKS = 4096
"""Blocks of one fetch from a peer. More of a prefix are found by the next Match, when these are there."""

PEER_PATIENCE_S = 0.1
"""A fetch from a peer may take twice what was predicted and so much more; then its blocks are asked of another, or computed."""

PEER_FIRST_PATIENCE_S = 1.0
"""Instead of that, for the first fetches from a node: connecting and saying Hello are among them, and it may be far away."""

PEER_RETRY_S = (0.5, 30.0)
"""First and longest pause before a peer that failed is asked again; doubles in between."""

PEER_LEASE_TTL_S = 5.0
"""What a node lends to another it lends for so long at most."""

MAX_LOANS_PER_PEER = 64
"""Live loans of one node. More: LeaseRefused."""

# --- events for routers ---------------------------------------------------------------------------------------------
MAX_QUEUED_EVENT_BLOCKS = 1 << 18
"""Blocks in events that are not sent yet, some 25 MiB. More: all of them are dropped, and everything held is told anew."""

EVENT_SLICE_ROWS = 4096
"""Blocks looked at in one turn of the loop while everything is told anew; some 3 ms."""

EVENT_DRAIN_DEADLINE_S = 10.0
"""For the thread to send what is queued, while everything is told anew. Past it that begins again."""

EVENT_RETELL_S = 10.0
"""Everything is told anew for a subscriber who asks for what is forgotten, but not more often than this."""

MAX_REPLAY_BATCHES = 10_000
"""Batches of events kept for replay, as vLLM has it."""

MAX_REPLAY_BYTES = 64 << 20
"""And at most so many bytes of them. Beyond either the oldest are forgotten."""

# --- client -----------------------------------------------------------------------------------------------------------
CALL_DEADLINE_S = 0.25
"""A client's call on the engine's path. Past it: PeerUnavailable, the connection is dropped and the breaker opens."""

CONNECT_DEADLINE_S = 1.0
"""Connecting and Hello."""

POOL_REPORT_INTERVAL_S = 0.25
"""An engine tells what changed in its own pool at most so often, MAX_REPORTED_BLOCKS at a time."""

RECONNECT_BACKOFF_S = (0.1, 5.0)
"""First and longest pause of the breaker between attempts to reach the sidecar again; doubles in between."""

LOAD_DEADLINE_S = 10.0
"""A load that has not arrived by then is recomputed."""

SAVE_DEADLINE_S = 120.0
"""A save that a worker has not reported by then is given up: its blocks are never committed, its slots not reused while that
worker may write into them."""

ARRIVAL_POLL_S = (0.0002, 0.002)
"""First and longest pause between two looks at the generation of a slot whose block is still being read."""

TAIL_KEEP_S = 60.0
"""Life of a prompt's tail that a prefill instance left for a decode instance. Who comes later computes those tokens."""

MAX_RECENT_SESSIONS = 1024
"""Sessions whose last blocks a connector remembers, 16 bytes for each 16 tokens. The one that spoke first is forgotten."""
