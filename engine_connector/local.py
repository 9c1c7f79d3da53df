"""Both sides of the connector over one connection, for an engine whose scheduler and worker share a process."""

import uuid

from kvstore.client import Client
from kvstore.core.clock import MonotonicClock
from kvstore.core.keys import KVSpec
from kvstore.core.traces import Tracer
from kvstore.engine_connector.layer_groups import LayerGroup
from kvstore.engine_connector.protocol import Connector, FetchPolicy, HandOver
from kvstore.engine_connector.scheduler_side import StoreSchedulerSide
from kvstore.engine_connector.session import StoreSession
from kvstore.engine_connector.worker_side import StoreWorkerSide
from kvstore.proto.kvstore_pb2 import BOTH


def open_connector(
    spec: KVSpec,
    *others: KVSpec,
    socket_path: str | None = None,
    tenant: str = "",
    hand_over: HandOver | None = None,
    fetch: str = FetchPolicy.PLANNED,
    tracer: Tracer | None = None,
) -> Connector:
    """Connect to the sidecar at `socket_path` (default: where `kvstore serve` listens). An absent sidecar is no error:
    the engine runs without, and with it as soon as it answers. `others`: of further layer groups, in the order of the
    engine's page tables (protocol.py); they hash as the first one does. `hand_over`: this instance's part in handing prompts
    over. `fetch`: "planned", "always" or "never" (protocol.FetchPolicy); ConfigError for anything else. `tracer`
    (kvstore/tracing.py) is the caller's."""
    policy = FetchPolicy.named(fetch)
    client = Client(
        socket_path, instance=uuid.uuid4().bytes, role=BOTH, tenant=tenant, specs=[spec, *others], want_slab=True
    )
    session = StoreSession(client)
    session.start()
    scheduler = StoreSchedulerSide(
        session,
        block_tokens=spec.hash.block_tokens,
        groups=[LayerGroup.of(each) for each in (spec, *others)],
        clock=MonotonicClock(),
        hand_over=hand_over,
        fetch=policy,
        tracer=tracer,
        uses_slab=True,
    )
    sizes = [each.block_nbytes for each in (spec, *others)]
    return Connector(scheduler, StoreWorkerSide(session, block_nbytes=sizes))
