"""Inspect as messages: what is asked, checked, and what is told of a block or a namespace."""

import re
from collections.abc import Sequence

from kvstore.core.blocks import PlacementState
from kvstore.field_checks import wrong
from kvstore.index import Namespace
from kvstore.inspection import BlockView, TierContents
from kvstore.leases import Lease
from kvstore.plan_log import PlanRecord
from kvstore.plan_messages import record_reply
from kvstore.proto import kvstore_pb2 as pb
from kvstore.transport.directory import Holding

_HEX = re.compile(r"[0-9a-f]{4,64}")


def read_hex(text: str) -> str:
    """InspectRequest.hex, in lower case."""
    if not _HEX.fullmatch(text.lower()):
        raise wrong("hex", text, "use 4 to 64 hex digits: what a block's hash or a namespace begins with")
    return text.lower()


def block_reply(
    view: BlockView, holdings: Sequence[Holding], pools: Sequence[bytes], plans: Sequence[PlanRecord], now_s: float
) -> pb.InspectedBlock:
    """What Inspect tells of a block."""
    return pb.InspectedBlock(
        namespace=view.namespace,
        key=view.chain[-1],
        parent=view.chain[-2] if len(view.chain) > 1 else b"",
        children=view.children,
        num_children=view.num_children,
        position=len(view.chain) - 1,
        hits=view.hits,
        num_uses_since=view.num_uses_since,
        pinned=view.pinned,
        mortal=view.mortal,
        label=view.label,
        copies=[
            pb.BlockCopy(
                tier=copy.tier,
                state=copy.state,
                offset=copy.offset,
                bytes=copy.nbytes,
                generation=copy.generation,
                users=copy.users,
            )
            for copy in view.copies
        ],
        leases=[_lease(lease, now_s) for lease in view.leases],
        peers=[
            pb.NodeHolding(
                node_id=holding.node.node_id, address=holding.node.control_address, num_blocks=holding.num_blocks
            )
            for holding in holdings
        ],
        plans=[record_reply(plan, now_s) for plan in plans],
        pools=pools,
    )


def namespace_reply(entry: Namespace, tiers: Sequence[TierContents]) -> pb.InspectedNamespace:
    """What Inspect tells of a namespace."""
    return pb.InspectedNamespace(
        namespace=entry.namespace,
        tenant=entry.tenant,
        spec=entry.spec.canonical(),
        block_bytes=entry.spec.block_nbytes,
        num_rows=len(entry.rows),
        tiers=[_contents(entry, tier) for tier in tiers],
    )


def _contents(entry: Namespace, tier: TierContents) -> pb.TierStats:
    nbytes = {state: tier.counts[state] * entry.slot_nbytes for state in PlacementState}
    return pb.TierStats(
        name=tier.tier,
        ready_bytes=nbytes[PlacementState.READY],
        writing_bytes=nbytes[PlacementState.WRITING] + nbytes[PlacementState.ARRIVING],
        leaving_bytes=nbytes[PlacementState.LEAVING],
        ready_blocks=tier.counts[PlacementState.READY],
    )


def _lease(lease: Lease, now_s: float) -> pb.BlockLease:
    return pb.BlockLease(
        lease_id=lease.lease_id,
        kind=lease.kind.name.lower(),
        instance=lease.holder.instance,
        request_id=lease.request_id,
        expires_in_s=lease.expires_s - now_s,
        expired=lease.expired,
    )
