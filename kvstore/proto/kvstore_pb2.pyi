from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    SCHEDULER: _ClassVar[Role]
    WORKER: _ClassVar[Role]
    BOTH: _ClassVar[Role]
    TOOL: _ClassVar[Role]
    PEER: _ClassVar[Role]

class Order(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FRONT: _ClassVar[Order]
    BACK: _ClassVar[Order]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    LOADED: _ClassVar[Outcome]
    FAILED: _ClassVar[Outcome]
    CANCELLED: _ClassVar[Outcome]
ROLE_UNSPECIFIED: Role
SCHEDULER: Role
WORKER: Role
BOTH: Role
TOOL: Role
PEER: Role
FRONT: Order
BACK: Order
OUTCOME_UNSPECIFIED: Outcome
LOADED: Outcome
FAILED: Outcome
CANCELLED: Outcome

class HelloRequest(_message.Message):
    __slots__ = ("protocol_version", "instance", "role", "rank", "tenant", "specs", "want_arena", "cuda_registered", "session_token", "node_id", "proof", "want_slab")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SPECS_FIELD_NUMBER: _ClassVar[int]
    WANT_ARENA_FIELD_NUMBER: _ClassVar[int]
    CUDA_REGISTERED_FIELD_NUMBER: _ClassVar[int]
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    WANT_SLAB_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    instance: bytes
    role: Role
    rank: int
    tenant: str
    specs: _containers.RepeatedScalarFieldContainer[bytes]
    want_arena: bool
    cuda_registered: bool
    session_token: bytes
    node_id: str
    proof: bytes
    want_slab: bool
    def __init__(self, protocol_version: _Optional[int] = ..., instance: _Optional[bytes] = ..., role: _Optional[_Union[Role, str]] = ..., rank: _Optional[int] = ..., tenant: _Optional[str] = ..., specs: _Optional[_Iterable[bytes]] = ..., want_arena: bool = ..., cuda_registered: bool = ..., session_token: _Optional[bytes] = ..., node_id: _Optional[str] = ..., proof: _Optional[bytes] = ..., want_slab: bool = ...) -> None: ...

class NearMiss(_message.Message):
    __slots__ = ("namespace", "differing_fields", "num_blocks")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    DIFFERING_FIELDS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    differing_fields: _containers.RepeatedScalarFieldContainer[str]
    num_blocks: int
    def __init__(self, namespace: _Optional[bytes] = ..., differing_fields: _Optional[_Iterable[str]] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class NamespaceReply(_message.Message):
    __slots__ = ("namespace", "block_nbytes", "num_blocks", "near_misses")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NBYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEAR_MISSES_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    block_nbytes: int
    num_blocks: int
    near_misses: _containers.RepeatedCompositeFieldContainer[NearMiss]
    def __init__(self, namespace: _Optional[bytes] = ..., block_nbytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., near_misses: _Optional[_Iterable[_Union[NearMiss, _Mapping]]] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("protocol_version", "server_version", "boot_id", "session_id", "namespaces", "arena_nbytes", "segment_nbytes", "faulted_nbytes", "lease_ttl_s", "session_token", "slab_nbytes", "slab_device")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    ARENA_NBYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_NBYTES_FIELD_NUMBER: _ClassVar[int]
    FAULTED_NBYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_S_FIELD_NUMBER: _ClassVar[int]
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SLAB_NBYTES_FIELD_NUMBER: _ClassVar[int]
    SLAB_DEVICE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    server_version: str
    boot_id: bytes
    session_id: int
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceReply]
    arena_nbytes: int
    segment_nbytes: int
    faulted_nbytes: int
    lease_ttl_s: float
    session_token: bytes
    slab_nbytes: int
    slab_device: str
    def __init__(self, protocol_version: _Optional[int] = ..., server_version: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., session_id: _Optional[int] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceReply, _Mapping]]] = ..., arena_nbytes: _Optional[int] = ..., segment_nbytes: _Optional[int] = ..., faulted_nbytes: _Optional[int] = ..., lease_ttl_s: _Optional[float] = ..., session_token: _Optional[bytes] = ..., slab_nbytes: _Optional[int] = ..., slab_device: _Optional[str] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("namespace", "keys", "wish", "request_id", "traceparent", "further_group", "each")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    WISH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    FURTHER_GROUP_FIELD_NUMBER: _ClassVar[int]
    EACH_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    keys: bytes
    wish: PlanWish
    request_id: str
    traceparent: str
    further_group: bool
    each: bool
    def __init__(self, namespace: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., wish: _Optional[_Union[PlanWish, _Mapping]] = ..., request_id: _Optional[str] = ..., traceparent: _Optional[str] = ..., further_group: bool = ..., each: bool = ...) -> None: ...

class PlanWish(_message.Message):
    __slots__ = ("request_id", "first_needed", "num_tokens", "chunk_tokens", "compute_wait_s", "compute_price", "both_ends", "deadline_s", "label")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_NEEDED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_PRICE_FIELD_NUMBER: _ClassVar[int]
    BOTH_ENDS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    first_needed: int
    num_tokens: int
    chunk_tokens: int
    compute_wait_s: float
    compute_price: float
    both_ends: bool
    deadline_s: float
    label: str
    def __init__(self, request_id: _Optional[str] = ..., first_needed: _Optional[int] = ..., num_tokens: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., compute_wait_s: _Optional[float] = ..., compute_price: _Optional[float] = ..., both_ends: bool = ..., deadline_s: _Optional[float] = ..., label: _Optional[str] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("plan_id", "num_blocks", "both_ends", "front_blocks", "fetch_s", "recompute_s", "total_s", "deadline_s", "reason")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BOTH_ENDS_FIELD_NUMBER: _ClassVar[int]
    FRONT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FETCH_S_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    plan_id: int
    num_blocks: int
    both_ends: bool
    front_blocks: int
    fetch_s: float
    recompute_s: float
    total_s: float
    deadline_s: float
    reason: str
    def __init__(self, plan_id: _Optional[int] = ..., num_blocks: _Optional[int] = ..., both_ends: bool = ..., front_blocks: _Optional[int] = ..., fetch_s: _Optional[float] = ..., recompute_s: _Optional[float] = ..., total_s: _Optional[float] = ..., deadline_s: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class MatchReply(_message.Message):
    __slots__ = ("num_blocks", "tiers", "boot_id", "plan")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    tiers: bytes
    boot_id: bytes
    plan: Plan
    def __init__(self, num_blocks: _Optional[int] = ..., tiers: _Optional[bytes] = ..., boot_id: _Optional[bytes] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("request_id", "namespace", "keys", "first_needed", "ttl_s", "order", "plan_id", "traceparent", "further_group", "slab")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    FIRST_NEEDED_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    FURTHER_GROUP_FIELD_NUMBER: _ClassVar[int]
    SLAB_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    namespace: bytes
    keys: bytes
    first_needed: int
    ttl_s: float
    order: Order
    plan_id: int
    traceparent: str
    further_group: bool
    slab: bool
    def __init__(self, request_id: _Optional[str] = ..., namespace: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., first_needed: _Optional[int] = ..., ttl_s: _Optional[float] = ..., order: _Optional[_Union[Order, str]] = ..., plan_id: _Optional[int] = ..., traceparent: _Optional[str] = ..., further_group: bool = ..., slab: bool = ...) -> None: ...

class AcquireReply(_message.Message):
    __slots__ = ("lease_id", "expires_in_s", "num_blocks", "offsets", "generations", "ready", "boot_id", "slab", "slab_offsets", "slab_generations")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SLAB_FIELD_NUMBER: _ClassVar[int]
    SLAB_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    SLAB_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    expires_in_s: float
    num_blocks: int
    offsets: bytes
    generations: bytes
    ready: bytes
    boot_id: bytes
    slab: bytes
    slab_offsets: bytes
    slab_generations: bytes
    def __init__(self, lease_id: _Optional[int] = ..., expires_in_s: _Optional[float] = ..., num_blocks: _Optional[int] = ..., offsets: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., ready: _Optional[bytes] = ..., boot_id: _Optional[bytes] = ..., slab: _Optional[bytes] = ..., slab_offsets: _Optional[bytes] = ..., slab_generations: _Optional[bytes] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_id", "outcome", "num_loaded", "seconds", "filled")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    NUM_LOADED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    FILLED_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    outcome: Outcome
    num_loaded: int
    seconds: float
    filled: bytes
    def __init__(self, lease_id: _Optional[int] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., num_loaded: _Optional[int] = ..., seconds: _Optional[float] = ..., filled: _Optional[bytes] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ("boot_id",)
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: bytes
    def __init__(self, boot_id: _Optional[bytes] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("lease_ids", "ttl_s", "others_ended")
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    OTHERS_ENDED_FIELD_NUMBER: _ClassVar[int]
    lease_ids: bytes
    ttl_s: float
    others_ended: bool
    def __init__(self, lease_ids: _Optional[bytes] = ..., ttl_s: _Optional[float] = ..., others_ended: bool = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("ended_lease_ids", "boot_id")
    ENDED_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ended_lease_ids: bytes
    boot_id: bytes
    def __init__(self, ended_lease_ids: _Optional[bytes] = ..., boot_id: _Optional[bytes] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("request_id", "namespace", "parent", "keys", "ttl_s", "keep_s", "label")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    KEEP_S_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    namespace: bytes
    parent: bytes
    keys: bytes
    ttl_s: float
    keep_s: float
    label: str
    def __init__(self, request_id: _Optional[str] = ..., namespace: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., ttl_s: _Optional[float] = ..., keep_s: _Optional[float] = ..., label: _Optional[str] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("lease_id", "expires_in_s", "statuses", "offsets", "generations", "declined_reason", "boot_id")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    DECLINED_REASON_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    expires_in_s: float
    statuses: bytes
    offsets: bytes
    generations: bytes
    declined_reason: str
    boot_id: bytes
    def __init__(self, lease_id: _Optional[int] = ..., expires_in_s: _Optional[float] = ..., statuses: _Optional[bytes] = ..., offsets: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., declined_reason: _Optional[str] = ..., boot_id: _Optional[bytes] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("lease_id", "keys")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    keys: bytes
    def __init__(self, lease_id: _Optional[int] = ..., keys: _Optional[bytes] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("num_committed", "boot_id")
    NUM_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    num_committed: int
    boot_id: bytes
    def __init__(self, num_committed: _Optional[int] = ..., boot_id: _Optional[bytes] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    def __init__(self, lease_id: _Optional[int] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ("boot_id",)
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: bytes
    def __init__(self, boot_id: _Optional[bytes] = ...) -> None: ...

class DropRequest(_message.Message):
    __slots__ = ("namespace", "keys", "all")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    keys: bytes
    all: bool
    def __init__(self, namespace: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., all: bool = ...) -> None: ...

class DropReply(_message.Message):
    __slots__ = ("num_dropped", "boot_id")
    NUM_DROPPED_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    num_dropped: int
    boot_id: bytes
    def __init__(self, num_dropped: _Optional[int] = ..., boot_id: _Optional[bytes] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("namespace", "keys", "first_needed")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    FIRST_NEEDED_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    keys: bytes
    first_needed: int
    def __init__(self, namespace: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., first_needed: _Optional[int] = ...) -> None: ...

class PrefetchReply(_message.Message):
    __slots__ = ("num_blocks", "num_started", "boot_id")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_STARTED_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_started: int
    boot_id: bytes
    def __init__(self, num_blocks: _Optional[int] = ..., num_started: _Optional[int] = ..., boot_id: _Optional[bytes] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("namespace", "keys", "pin_s", "cool")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PIN_S_FIELD_NUMBER: _ClassVar[int]
    COOL_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    keys: bytes
    pin_s: float
    cool: bool
    def __init__(self, namespace: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., pin_s: _Optional[float] = ..., cool: bool = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("num_blocks", "boot_id")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    boot_id: bytes
    def __init__(self, num_blocks: _Optional[int] = ..., boot_id: _Optional[bytes] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("namespace", "prefill", "copy_bytes", "copy_s", "cleared", "removed", "stored", "pool_blocks")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    COPY_BYTES_FIELD_NUMBER: _ClassVar[int]
    COPY_S_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    POOL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    prefill: bytes
    copy_bytes: int
    copy_s: float
    cleared: bool
    removed: bytes
    stored: _containers.RepeatedCompositeFieldContainer[HeldRun]
    pool_blocks: int
    def __init__(self, namespace: _Optional[bytes] = ..., prefill: _Optional[bytes] = ..., copy_bytes: _Optional[int] = ..., copy_s: _Optional[float] = ..., cleared: bool = ..., removed: _Optional[bytes] = ..., stored: _Optional[_Iterable[_Union[HeldRun, _Mapping]]] = ..., pool_blocks: _Optional[int] = ...) -> None: ...

class HeldRun(_message.Message):
    __slots__ = ("parent", "keys")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    parent: bytes
    keys: bytes
    def __init__(self, parent: _Optional[bytes] = ..., keys: _Optional[bytes] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ("boot_id",)
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: bytes
    def __init__(self, boot_id: _Optional[bytes] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id", "last")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    last: int
    def __init__(self, request_id: _Optional[str] = ..., last: _Optional[int] = ...) -> None: ...

class TierShare(_message.Message):
    __slots__ = ("tier", "num_blocks", "bytes_per_s", "latency_s", "queued_bytes", "usable")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    USABLE_FIELD_NUMBER: _ClassVar[int]
    tier: str
    num_blocks: int
    bytes_per_s: float
    latency_s: float
    queued_bytes: int
    usable: bool
    def __init__(self, tier: _Optional[str] = ..., num_blocks: _Optional[int] = ..., bytes_per_s: _Optional[float] = ..., latency_s: _Optional[float] = ..., queued_bytes: _Optional[int] = ..., usable: bool = ...) -> None: ...

class PlanRecord(_message.Message):
    __slots__ = ("request_id", "namespace", "age_s", "wish", "block_tokens", "block_bytes", "num_found", "tiers", "plan", "outcome", "num_loaded", "actual_s", "words", "prefill_a_s", "prefill_b_s", "prefill_t0_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    WISH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_FOUND_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    NUM_LOADED_FIELD_NUMBER: _ClassVar[int]
    ACTUAL_S_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_A_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_B_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_T0_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    namespace: bytes
    age_s: float
    wish: PlanWish
    block_tokens: int
    block_bytes: int
    num_found: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierShare]
    plan: Plan
    outcome: str
    num_loaded: int
    actual_s: float
    words: str
    prefill_a_s: float
    prefill_b_s: float
    prefill_t0_s: float
    def __init__(self, request_id: _Optional[str] = ..., namespace: _Optional[bytes] = ..., age_s: _Optional[float] = ..., wish: _Optional[_Union[PlanWish, _Mapping]] = ..., block_tokens: _Optional[int] = ..., block_bytes: _Optional[int] = ..., num_found: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierShare, _Mapping]]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., outcome: _Optional[str] = ..., num_loaded: _Optional[int] = ..., actual_s: _Optional[float] = ..., words: _Optional[str] = ..., prefill_a_s: _Optional[float] = ..., prefill_b_s: _Optional[float] = ..., prefill_t0_s: _Optional[float] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("plans", "boot_id")
    PLANS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    plans: _containers.RepeatedCompositeFieldContainer[PlanRecord]
    boot_id: bytes
    def __init__(self, plans: _Optional[_Iterable[_Union[PlanRecord, _Mapping]]] = ..., boot_id: _Optional[bytes] = ...) -> None: ...

class LocateRequest(_message.Message):
    __slots__ = ("namespace", "keys")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    keys: bytes
    def __init__(self, namespace: _Optional[bytes] = ..., keys: _Optional[bytes] = ...) -> None: ...

class NodeHolding(_message.Message):
    __slots__ = ("node_id", "address", "num_blocks", "here")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HERE_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    address: str
    num_blocks: int
    here: bool
    def __init__(self, node_id: _Optional[str] = ..., address: _Optional[str] = ..., num_blocks: _Optional[int] = ..., here: bool = ...) -> None: ...

class LocateReply(_message.Message):
    __slots__ = ("holders", "boot_id", "pools")
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    holders: _containers.RepeatedCompositeFieldContainer[NodeHolding]
    boot_id: bytes
    pools: _containers.RepeatedCompositeFieldContainer[PoolHolding]
    def __init__(self, holders: _Optional[_Iterable[_Union[NodeHolding, _Mapping]]] = ..., boot_id: _Optional[bytes] = ..., pools: _Optional[_Iterable[_Union[PoolHolding, _Mapping]]] = ...) -> None: ...

class PoolHolding(_message.Message):
    __slots__ = ("instance", "num_blocks")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    instance: bytes
    num_blocks: int
    def __init__(self, instance: _Optional[bytes] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class LendRequest(_message.Message):
    __slots__ = ("namespace", "keys", "first_needed", "deadline_s", "traceparent")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    FIRST_NEEDED_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    keys: bytes
    first_needed: int
    deadline_s: float
    traceparent: str
    def __init__(self, namespace: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., first_needed: _Optional[int] = ..., deadline_s: _Optional[float] = ..., traceparent: _Optional[str] = ...) -> None: ...

class LendReply(_message.Message):
    __slots__ = ("lease_id", "loan", "num_blocks", "offsets", "generations", "checksums", "expires_in_s", "boot_id")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LOAN_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    loan: bytes
    num_blocks: int
    offsets: bytes
    generations: bytes
    checksums: bytes
    expires_in_s: float
    boot_id: bytes
    def __init__(self, lease_id: _Optional[int] = ..., loan: _Optional[bytes] = ..., num_blocks: _Optional[int] = ..., offsets: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., checksums: _Optional[bytes] = ..., expires_in_s: _Optional[float] = ..., boot_id: _Optional[bytes] = ...) -> None: ...

class DigestRequest(_message.Message):
    __slots__ = ("body",)
    BODY_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    def __init__(self, body: _Optional[bytes] = ...) -> None: ...

class DigestReply(_message.Message):
    __slots__ = ("body",)
    BODY_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    def __init__(self, body: _Optional[bytes] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DriveStats(_message.Message):
    __slots__ = ("path", "state", "reason", "capacity_bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    state: str
    reason: str
    capacity_bytes: int
    def __init__(self, path: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., capacity_bytes: _Optional[int] = ...) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("name", "capacity_bytes", "ready_bytes", "writing_bytes", "leaving_bytes", "limbo_bytes", "free_bytes", "ready_blocks", "quarantined_bytes", "drives", "writing_blocks", "leaving_blocks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    READY_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITING_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEAVING_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMBO_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    READY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRIVES_FIELD_NUMBER: _ClassVar[int]
    WRITING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    name: str
    capacity_bytes: int
    ready_bytes: int
    writing_bytes: int
    leaving_bytes: int
    limbo_bytes: int
    free_bytes: int
    ready_blocks: int
    quarantined_bytes: int
    drives: _containers.RepeatedCompositeFieldContainer[DriveStats]
    writing_blocks: int
    leaving_blocks: int
    def __init__(self, name: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., ready_bytes: _Optional[int] = ..., writing_bytes: _Optional[int] = ..., leaving_bytes: _Optional[int] = ..., limbo_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., ready_blocks: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., drives: _Optional[_Iterable[_Union[DriveStats, _Mapping]]] = ..., writing_blocks: _Optional[int] = ..., leaving_blocks: _Optional[int] = ...) -> None: ...

class PeerStats(_message.Message):
    __slots__ = ("node_id", "address", "state", "links", "fetched_bytes", "queued_bytes", "bytes_per_s", "latency_s")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    address: str
    state: str
    links: _containers.RepeatedScalarFieldContainer[str]
    fetched_bytes: int
    queued_bytes: int
    bytes_per_s: float
    latency_s: float
    def __init__(self, node_id: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., links: _Optional[_Iterable[str]] = ..., fetched_bytes: _Optional[int] = ..., queued_bytes: _Optional[int] = ..., bytes_per_s: _Optional[float] = ..., latency_s: _Optional[float] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("num_requests", "requested_tokens", "hit_tokens", "missed_tokens")
    class HitTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class MissedTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    requested_tokens: int
    hit_tokens: _containers.ScalarMap[str, int]
    missed_tokens: _containers.ScalarMap[str, int]
    def __init__(self, num_requests: _Optional[int] = ..., requested_tokens: _Optional[int] = ..., hit_tokens: _Optional[_Mapping[str, int]] = ..., missed_tokens: _Optional[_Mapping[str, int]] = ...) -> None: ...

class TenantUsage(_message.Message):
    __slots__ = ("tenant", "usage", "held_bytes")
    class HeldBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TENANT_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    usage: Usage
    held_bytes: _containers.ScalarMap[str, int]
    def __init__(self, tenant: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., held_bytes: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("name", "labels", "bounds", "counts", "sum")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    name: str
    labels: _containers.RepeatedScalarFieldContainer[str]
    bounds: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    def __init__(self, name: _Optional[str] = ..., labels: _Optional[_Iterable[str]] = ..., bounds: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ...) -> None: ...

class QueueDepth(_message.Message):
    __slots__ = ("queue", "length", "limit")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    queue: str
    length: int
    limit: int
    def __init__(self, queue: _Optional[str] = ..., length: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class Removals(_message.Message):
    __slots__ = ("tier", "policy", "reason", "num_blocks", "nbytes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    tier: str
    policy: str
    reason: str
    num_blocks: int
    nbytes: int
    def __init__(self, tier: _Optional[str] = ..., policy: _Optional[str] = ..., reason: _Optional[str] = ..., num_blocks: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class WriteBudget(_message.Message):
    __slots__ = ("policy", "bytes_per_s", "bytes_per_day", "written_bytes", "day_bytes")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_DAY_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    DAY_BYTES_FIELD_NUMBER: _ClassVar[int]
    policy: str
    bytes_per_s: int
    bytes_per_day: int
    written_bytes: int
    day_bytes: int
    def __init__(self, policy: _Optional[str] = ..., bytes_per_s: _Optional[int] = ..., bytes_per_day: _Optional[int] = ..., written_bytes: _Optional[int] = ..., day_bytes: _Optional[int] = ...) -> None: ...

class Prediction(_message.Message):
    __slots__ = ("kind", "num", "num_close", "ratio")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_FIELD_NUMBER: _ClassVar[int]
    NUM_CLOSE_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    kind: str
    num: int
    num_close: int
    ratio: float
    def __init__(self, kind: _Optional[str] = ..., num: _Optional[int] = ..., num_close: _Optional[int] = ..., ratio: _Optional[float] = ...) -> None: ...

class DirectoryStats(_message.Message):
    __slots__ = ("num_nodes", "num_entries", "table_nbytes", "own_blocks", "sent_bytes", "received_bytes", "failures", "resyncs", "dropped_updates", "age_s")
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    NUM_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    TABLE_NBYTES_FIELD_NUMBER: _ClassVar[int]
    OWN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    RESYNCS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_UPDATES_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    num_nodes: int
    num_entries: int
    table_nbytes: int
    own_blocks: int
    sent_bytes: int
    received_bytes: int
    failures: int
    resyncs: int
    dropped_updates: int
    age_s: float
    def __init__(self, num_nodes: _Optional[int] = ..., num_entries: _Optional[int] = ..., table_nbytes: _Optional[int] = ..., own_blocks: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., received_bytes: _Optional[int] = ..., failures: _Optional[int] = ..., resyncs: _Optional[int] = ..., dropped_updates: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...

class CapacityHits(_message.Message):
    __slots__ = ("capacity", "bytes", "hit_rate")
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    capacity: str
    bytes: int
    hit_rate: float
    def __init__(self, capacity: _Optional[str] = ..., bytes: _Optional[int] = ..., hit_rate: _Optional[float] = ...) -> None: ...

class CapacityCurve(_message.Message):
    __slots__ = ("requested_tokens", "followed_part", "followed_blocks", "memory_bytes", "capacities", "bytes", "hit_rates", "words")
    REQUESTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWED_PART_FIELD_NUMBER: _ClassVar[int]
    FOLLOWED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITIES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    HIT_RATES_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    requested_tokens: float
    followed_part: float
    followed_blocks: int
    memory_bytes: int
    capacities: _containers.RepeatedCompositeFieldContainer[CapacityHits]
    bytes: _containers.RepeatedScalarFieldContainer[float]
    hit_rates: _containers.RepeatedScalarFieldContainer[float]
    words: str
    def __init__(self, requested_tokens: _Optional[float] = ..., followed_part: _Optional[float] = ..., followed_blocks: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., capacities: _Optional[_Iterable[_Union[CapacityHits, _Mapping]]] = ..., bytes: _Optional[_Iterable[float]] = ..., hit_rates: _Optional[_Iterable[float]] = ..., words: _Optional[str] = ...) -> None: ...

class Problem(_message.Message):
    __slots__ = ("problem", "subject", "reason")
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    problem: str
    subject: str
    reason: str
    def __init__(self, problem: _Optional[str] = ..., subject: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("boot_id", "server_version", "uptime_s", "tiers", "num_blocks", "num_namespaces", "num_sessions", "num_leases", "counters", "seconds", "peers", "usage", "tenants", "histograms", "queues", "removals", "write_budget", "predictions", "problems", "loop_lag_s", "num_expired_leases", "directory", "capacity_curve", "num_open_requests")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class SecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    HISTOGRAMS_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    REMOVALS_FIELD_NUMBER: _ClassVar[int]
    WRITE_BUDGET_FIELD_NUMBER: _ClassVar[int]
    PREDICTIONS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    LOOP_LAG_S_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPIRED_LEASES_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_CURVE_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    boot_id: bytes
    server_version: str
    uptime_s: float
    tiers: _containers.RepeatedCompositeFieldContainer[TierStats]
    num_blocks: int
    num_namespaces: int
    num_sessions: int
    num_leases: int
    counters: _containers.ScalarMap[str, int]
    seconds: _containers.ScalarMap[str, float]
    peers: _containers.RepeatedCompositeFieldContainer[PeerStats]
    usage: Usage
    tenants: _containers.RepeatedCompositeFieldContainer[TenantUsage]
    histograms: _containers.RepeatedCompositeFieldContainer[Histogram]
    queues: _containers.RepeatedCompositeFieldContainer[QueueDepth]
    removals: _containers.RepeatedCompositeFieldContainer[Removals]
    write_budget: WriteBudget
    predictions: _containers.RepeatedCompositeFieldContainer[Prediction]
    problems: _containers.RepeatedCompositeFieldContainer[Problem]
    loop_lag_s: float
    num_expired_leases: int
    directory: DirectoryStats
    capacity_curve: CapacityCurve
    num_open_requests: int
    def __init__(self, boot_id: _Optional[bytes] = ..., server_version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[TierStats, _Mapping]]] = ..., num_blocks: _Optional[int] = ..., num_namespaces: _Optional[int] = ..., num_sessions: _Optional[int] = ..., num_leases: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., seconds: _Optional[_Mapping[str, float]] = ..., peers: _Optional[_Iterable[_Union[PeerStats, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., tenants: _Optional[_Iterable[_Union[TenantUsage, _Mapping]]] = ..., histograms: _Optional[_Iterable[_Union[Histogram, _Mapping]]] = ..., queues: _Optional[_Iterable[_Union[QueueDepth, _Mapping]]] = ..., removals: _Optional[_Iterable[_Union[Removals, _Mapping]]] = ..., write_budget: _Optional[_Union[WriteBudget, _Mapping]] = ..., predictions: _Optional[_Iterable[_Union[Prediction, _Mapping]]] = ..., problems: _Optional[_Iterable[_Union[Problem, _Mapping]]] = ..., loop_lag_s: _Optional[float] = ..., num_expired_leases: _Optional[int] = ..., directory: _Optional[_Union[DirectoryStats, _Mapping]] = ..., capacity_curve: _Optional[_Union[CapacityCurve, _Mapping]] = ..., num_open_requests: _Optional[int] = ...) -> None: ...

class ErrorReply(_message.Message):
    __slots__ = ("code", "message", "fields", "retryable", "boot_id")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    fields: _containers.ScalarMap[str, str]
    retryable: bool
    boot_id: bytes
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., fields: _Optional[_Mapping[str, str]] = ..., retryable: bool = ..., boot_id: _Optional[bytes] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ("hex", "first_row")
    HEX_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    hex: str
    first_row: int
    def __init__(self, hex: _Optional[str] = ..., first_row: _Optional[int] = ...) -> None: ...

class BlockCopy(_message.Message):
    __slots__ = ("tier", "state", "offset", "bytes", "generation", "users")
    TIER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    tier: str
    state: str
    offset: int
    bytes: int
    generation: int
    users: int
    def __init__(self, tier: _Optional[str] = ..., state: _Optional[str] = ..., offset: _Optional[int] = ..., bytes: _Optional[int] = ..., generation: _Optional[int] = ..., users: _Optional[int] = ...) -> None: ...

class BlockLease(_message.Message):
    __slots__ = ("lease_id", "kind", "instance", "request_id", "expires_in_s", "expired")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    kind: str
    instance: bytes
    request_id: str
    expires_in_s: float
    expired: bool
    def __init__(self, lease_id: _Optional[int] = ..., kind: _Optional[str] = ..., instance: _Optional[bytes] = ..., request_id: _Optional[str] = ..., expires_in_s: _Optional[float] = ..., expired: bool = ...) -> None: ...

class InspectedBlock(_message.Message):
    __slots__ = ("namespace", "key", "parent", "children", "num_children", "position", "hits", "num_uses_since", "pinned", "mortal", "copies", "leases", "peers", "plans", "label", "pools")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    NUM_CHILDREN_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_USES_SINCE_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    MORTAL_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    key: bytes
    parent: bytes
    children: _containers.RepeatedScalarFieldContainer[bytes]
    num_children: int
    position: int
    hits: int
    num_uses_since: int
    pinned: bool
    mortal: bool
    copies: _containers.RepeatedCompositeFieldContainer[BlockCopy]
    leases: _containers.RepeatedCompositeFieldContainer[BlockLease]
    peers: _containers.RepeatedCompositeFieldContainer[NodeHolding]
    plans: _containers.RepeatedCompositeFieldContainer[PlanRecord]
    label: str
    pools: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, namespace: _Optional[bytes] = ..., key: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., children: _Optional[_Iterable[bytes]] = ..., num_children: _Optional[int] = ..., position: _Optional[int] = ..., hits: _Optional[int] = ..., num_uses_since: _Optional[int] = ..., pinned: bool = ..., mortal: bool = ..., copies: _Optional[_Iterable[_Union[BlockCopy, _Mapping]]] = ..., leases: _Optional[_Iterable[_Union[BlockLease, _Mapping]]] = ..., peers: _Optional[_Iterable[_Union[NodeHolding, _Mapping]]] = ..., plans: _Optional[_Iterable[_Union[PlanRecord, _Mapping]]] = ..., label: _Optional[str] = ..., pools: _Optional[_Iterable[bytes]] = ...) -> None: ...

class InspectedNamespace(_message.Message):
    __slots__ = ("namespace", "tenant", "spec", "block_bytes", "num_rows", "tiers")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    tenant: str
    spec: bytes
    block_bytes: int
    num_rows: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierStats]
    def __init__(self, namespace: _Optional[bytes] = ..., tenant: _Optional[str] = ..., spec: _Optional[bytes] = ..., block_bytes: _Optional[int] = ..., num_rows: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierStats, _Mapping]]] = ...) -> None: ...

class Absence(_message.Message):
    __slots__ = ("namespace", "reason")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    reason: str
    def __init__(self, namespace: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class InspectReply(_message.Message):
    __slots__ = ("namespaces", "blocks", "next_row", "num_found", "boot_id", "absences")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_ROW_FIELD_NUMBER: _ClassVar[int]
    NUM_FOUND_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ABSENCES_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[InspectedNamespace]
    blocks: _containers.RepeatedCompositeFieldContainer[InspectedBlock]
    next_row: int
    num_found: int
    boot_id: bytes
    absences: _containers.RepeatedCompositeFieldContainer[Absence]
    def __init__(self, namespaces: _Optional[_Iterable[_Union[InspectedNamespace, _Mapping]]] = ..., blocks: _Optional[_Iterable[_Union[InspectedBlock, _Mapping]]] = ..., next_row: _Optional[int] = ..., num_found: _Optional[int] = ..., boot_id: _Optional[bytes] = ..., absences: _Optional[_Iterable[_Union[Absence, _Mapping]]] = ...) -> None: ...
