"""Which block to give up next: one policy for each tier, by name.

A policy orders the leaves of the tree of blocks and nothing else: the tail of a prefix always goes before its head.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from kvstore.eviction.arc import Arc
from kvstore.eviction.lru import LeafLru, LeafLru2
from kvstore.eviction.mix import AdaptiveMix
from kvstore.eviction.policy import Candidates, EvictionPolicy, TierRows
from kvstore.eviction.quota import TenantQuota
from kvstore.eviction.s3_fifo import S3Fifo
from kvstore.eviction.value import ValuePerByte
from kvstore.index import BlockIndex

__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "Candidates",
    "EvictionPolicy",
    "LeafLru",
    "MakePolicy",
    "TierRows",
    "make_policy",
]

MakePolicy = Callable[[BlockIndex, TierRows], EvictionPolicy]

POLICIES: Mapping[str, MakePolicy] = MappingProxyType(
    {
        "adaptive": AdaptiveMix,
        "lru": LeafLru,
        "lru2": LeafLru2,
        "s3fifo": S3Fifo,
        "arc": Arc,
        "value": ValuePerByte,
    }
)

DEFAULT_POLICY = "adaptive"


def make_policy(name: str, *, tenant_quota: float = 1.0) -> MakePolicy:
    """The policy of that name, one of POLICIES; with a quota (part of a tier) for each tenant if it is below 1."""
    make = POLICIES[name]
    return make if tenant_quota >= 1 else partial(TenantQuota, make_policy=make, fraction=tenant_quota)
