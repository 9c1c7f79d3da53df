"""The forward pass of the Llama family in fp32: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Qwen2 adds a bias to Q, K and V; Qwen3 norms each head of Q and K before the rotation. Both are switches of ModelConfig.

It keeps no state of a request: K and V go through `attention`, which writes them to pages and reads them back. A row's
result must depend neither on who else is in the batch nor on how many rows there are: matrix products are padded to
multiples of MIN_ROWS rows (below it the CPU's library sums in another order: 5e-5 in fp32; from it on, rows come out bit-equal
whatever the height, on the machines we measured).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)

from kvstore.engine_connector.engine.rope import Rope

MIN_ROWS = 16
"""Heights of matrix products are multiples of this; a decode step of up to 16 sequences always has this height."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The numbers that shape a model, and what tells one architecture from another."""

    architecture: str  # llama, qwen2 or qwen3: for messages; the switches below decide
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    context_length: int
    rms_eps: float
    rope: Rope
    tied_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False

    def describe_positions(self) -> str:
        """What decides K besides the weights: the rotation, and the eps of the norms before it (KVSpec.rope)."""
        return f"{self.rope.describe(self.head_dim)}:eps={self.rms_eps!r}"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, fp32, each matrix `[out, in]`; projections that read the same input are stacked."""

    attn_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(num_heads + 2 num_kv_heads) * head_dim, hidden], Q/K rows in half-split rotary order
    qkv_bias: torch.Tensor | None  # [(num_heads + 2 num_kv_heads) * head_dim]
    qk_norm: torch.Tensor | None  # [num_heads + num_kv_heads, head_dim]: the Q norm for each head, then the K norm
    attn_out: torch.Tensor  # [hidden, num_heads * head_dim]
    ffn_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 ffn, hidden]
    down: torch.Tensor  # [hidden, ffn]


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model, fp32. Tied embeddings: `lm_head` is `embedding`."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [hidden]
    lm_head: torch.Tensor  # [vocab, hidden]


class Attention(Protocol):
    """What a layer calls: put K and V of these rows into the pages, attend over all that the pages hold (attention.py)."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q `[rows, num_heads, head_dim]`, k and v `[rows, num_kv_heads, head_dim]` -> `[rows, num_heads * head_dim]`.

        Rows beyond the batch's own are padding: nothing is written for them, and zeros come back.
        """
        ...


class Transformer:
    """Weights and rotary tables; the caller sets torch's threads and inference mode."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self._weights = weights
        self._cos, self._sin = config.rope.tables(config.head_dim, config.context_length)

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Final hidden states `[rows, hidden]`, not yet normed, of `token_ids [rows]` at `positions [rows]`."""
        assert token_ids.shape[0] % MIN_ROWS == 0
        eps, width = self.config.rms_eps, (self.config.hidden_size,)
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        x = self._weights.embedding[token_ids]
        for index, layer in enumerate(self._weights.layers):
            q, k, v = self._project(layer, F.rms_norm(x, width, layer.attn_norm, eps), cos, sin)
            x = x + F.linear(attention(index, q, k, v), layer.attn_out)
            gate, up = F.linear(F.rms_norm(x, width, layer.ffn_norm, eps), layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[rows, vocab]` of `hidden [rows, hidden]`: give it only the rows that need logits; it pads them itself."""
        normed = F.rms_norm(hidden, (self.config.hidden_size,), self._weights.norm, self.config.rms_eps)
        return F.linear(pad_rows(normed), self._weights.lm_head)[: hidden.shape[0]]

    def _project(
        self, layer: LayerWeights, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(x.shape[0], heads + 2 * kv_heads, self.config.head_dim)
        qk = qkv[:, : heads + kv_heads]
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (self.config.head_dim,), eps=self.config.rms_eps) * layer.qk_norm
        rotated = _rotate(qk, cos, sin)
        return rotated[:, :heads], rotated[:, heads:], qkv[:, heads + kv_heads :]


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """`x [rows, ...]` with zero rows appended up to a multiple of MIN_ROWS."""
    missing = -x.shape[0] % MIN_ROWS
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate dim i with dim i + head_dim / 2 (half-split order, as in the Hugging Face checkpoints)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
