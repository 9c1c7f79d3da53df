"""The Llama forward pass in fp32: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

It keeps no state of a request: K and V go through `attention`, which writes them to pages and reads them back. A row's
result must depend neither on who else is in the batch nor on how many rows there are: matrix products are padded to
multiples of MIN_ROWS rows (below it the CPU's library sums in another order: 5e-5 in fp32; from it on, rows come out bit-equal
whatever the height, on the machines we measured).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)

MIN_ROWS = 16
"""Heights of matrix products are multiples of this; a decode step of up to 16 sequences always has this height."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The numbers that shape a Llama model. `rope_theta` is the base of the rotary frequencies, `rope_dim` = head_dim."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    context_length: int
    rope_theta: float
    rms_eps: float


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, fp32, each matrix `[out, in]`; projections that read the same input are stacked."""

    attn_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(num_heads + 2 num_kv_heads) * head_dim, hidden], Q/K rows in half-split rotary order
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
    rope_factors: torch.Tensor | None = None  # [head_dim / 2], divides the frequencies (Llama 3)


class Attention(Protocol):
    """What a layer calls: put K and V of these rows into the pages, attend over all that the pages hold (attention.py)."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q `[rows, num_heads, head_dim]`, k and v `[rows, num_kv_heads, head_dim]` -> `[rows, num_heads * head_dim]`.

        Rows beyond the batch's own are padding: nothing is written for them, and zeros come back.
        """
        ...


class LlamaModel:
    """Weights and rotary tables; the caller sets torch's threads and inference mode."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self._weights = weights
        self._cos, self._sin = _rotary_tables(config, weights.rope_factors)

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
        qkv = F.linear(x, layer.qkv).view(x.shape[0], heads + 2 * kv_heads, self.config.head_dim)
        rotated = _rotate(qkv[:, : heads + kv_heads], cos, sin)
        return rotated[:, :heads], rotated[:, heads:], qkv[:, heads + kv_heads :]


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """`x [rows, ...]` with zero rows appended up to a multiple of MIN_ROWS."""
    missing = -x.shape[0] % MIN_ROWS
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def _rotary_tables(config: ModelConfig, factors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin `[context_length, head_dim / 2]`; angles in float64, since position x frequency reaches thousands."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    if factors is not None:
        frequencies = frequencies / factors.double()
    angles = torch.outer(torch.arange(config.context_length, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate dim i with dim i + head_dim / 2 (half-split order, as in the Hugging Face checkpoints)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
