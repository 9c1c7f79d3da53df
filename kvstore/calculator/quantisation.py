"""How many tokens of KV fit into a memory, by the format they are kept in.

An element of `bits` bits needs bits/8 bytes; a scale of `scale_bytes` serves `scaled_elements` elements of one head's K or V:
    bytes per token = elements * (bits/8 + scale_bytes/scaled_elements)
One scale for each block, head, and K or V serves block_tokens * head_dim elements; one for each token and head, head_dim; a
group, its size. Memory is given out in whole blocks, and a request takes whole blocks.
"""

import math
from typing import NamedTuple

BITS = {"bf16": 16, "fp8": 8, "int8": 8, "int4": 4}
"""Format -> bits of an element. bf16 needs no scales."""


class KvFormat(NamedTuple):
    """How an element is kept."""

    name: str
    bits: float
    scale_bytes: float = 0.0  # 0: no scales, or so few (one a layer) that they do not count
    scaled_elements: float = 1.0

    def bytes_per_token(self, num_elements: float) -> float:
        """Of KV with `num_elements` elements per token, with its scales."""
        return num_elements * self.bits / 8 + self.scale_bytes_per_token(num_elements)

    def scale_bytes_per_token(self, num_elements: float) -> float:
        """Of those, the scales."""
        return num_elements / self.scaled_elements * self.scale_bytes


class Capacity(NamedTuple):
    """What fits."""

    num_blocks: int
    num_tokens: int
    num_requests: int


def capacity(memory_bytes: float, bytes_per_token: float, *, block_tokens: int, request_tokens: int) -> Capacity:
    """Whole blocks of `block_tokens`, and requests of `request_tokens` that have blocks of their own."""
    num_blocks = math.floor(
        memory_bytes / (bytes_per_token * block_tokens) * (1 + 1e-12)
    )  # not one less for a rounding error
    return Capacity(num_blocks, num_blocks * block_tokens, num_blocks // -(-request_tokens // block_tokens))


def kv_memory_bytes(
    gpu_bytes: float, num_gpus: int, weight_bytes: float, *, share: float = 0.9, replicas: float = 1.0
) -> float:
    """What `num_gpus` GPUs have left for KV: `share` of their memory less the weights; where each token's KV is kept
    `replicas` times (more tensor-parallel ranks than KV heads), only as much as counts once. 0 where the weights do not fit."""
    return max(0.0, gpu_bytes * num_gpus * share - weight_bytes) / replicas
