"""Which block to give up next: one policy for each tier, by name.

A policy orders the leaves of the tree of blocks and nothing else: the tail of a prefix always goes before its head.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvstore.eviction.arc import Arc
from kvstore.eviction.lru import LeafLru, LeafLru2
from kvstore.eviction.mix import AdaptiveMix
from kvstore.eviction.policy import Candidates, EvictionPolicy
from kvstore.eviction.s3_fifo import S3Fifo
from kvstore.eviction.value import ValuePerByte
from kvstore.index import BlockIndex

__all__ = ["DEFAULT_POLICY", "POLICIES", "Candidates", "EvictionPolicy", "LeafLru", "MakePolicy"]

MakePolicy = Callable[[BlockIndex, Candidates], EvictionPolicy]

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
