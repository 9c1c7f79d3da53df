"""The forward pass of the Llama family in fp32: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Qwen2 adds a bias to Q, K and V; Qwen3 norms each head of Q and K before the rotation. Both are switches of ModelConfig.

It keeps no state of a request: K and V go through `attention`, which writes them to pages and reads them back. A row's
result must depend neither on who else is in the batch nor on how many rows there are (product.py).
"""

from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)

from kvstore.engine_connector.engine.product import LOW_HEIGHTS, MIN_ROWS, PACKED_LIMIT_BYTES, Product, pad_rows
from kvstore.engine_connector.engine.rope import Rope


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

    def to(self, device: torch.device) -> "LayerWeights":
        """Copies on `device`; the same tensors where they are there."""
        tensors = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(self, **{name: x.to(device) for name, x in tensors.items() if x is not None})


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model, fp32. Tied embeddings: `lm_head` is `embedding`."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [hidden]
    lm_head: torch.Tensor  # [vocab, hidden]

    def to(self, device: torch.device) -> "Weights":
        """Copies on `device`; the same tensors where they are there."""
        embedding = self.embedding.to(device)
        lm_head = embedding if self.lm_head is self.embedding else self.lm_head.to(device)
        return Weights(embedding, tuple(layer.to(device) for layer in self.layers), self.norm.to(device), lm_head)

    @property
    def product_nbytes(self) -> int:
        """Bytes of all matrices that rows are multiplied with."""
        matrices = [
            self.lm_head,
            *(m for layer in self.layers for m in (layer.qkv, layer.attn_out, layer.gate_up, layer.down)),
        ]
        return sum(matrix.nbytes for matrix in matrices)


class Attention(Protocol):
    """What a layer calls: put K and V of these rows into the pages, attend over all that the pages hold (attention.py)."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q `[rows, num_heads, head_dim]`, k and v `[rows, num_kv_heads, head_dim]` -> `[rows, num_heads * head_dim]`.

        Rows beyond the batch's own are padding: nothing is written for them, and zeros come back.
        """
        ...


class Transformer:
    """Weights and rotary tables, on the weights' device; the caller sets torch's threads and inference mode."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self._embedding = weights.embedding
        device = weights.embedding.device
        pack = device.type == "cpu" and weights.product_nbytes <= PACKED_LIMIT_BYTES
        self._layers = tuple(_Layer(config, layer, pack=pack) for layer in weights.layers)
        self._norm = weights.norm
        self._lm_head = Product(weights.lm_head, pack=pack)
        cos, sin = config.rope.tables(config.head_dim, config.context_length)
        self._cos, self._sin = torch.cat([cos, cos], dim=-1).to(device), torch.cat([-sin, sin], dim=-1).to(device)

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Final hidden states `[rows, hidden]`, not yet normed, of `token_ids [rows]` at `positions [rows]`."""
        assert token_ids.shape[0] in LOW_HEIGHTS or token_ids.shape[0] % MIN_ROWS == 0
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        x = self._embedding[token_ids]
        for index, layer in enumerate(self._layers):
            q, k, v = layer.project(x, cos, sin)
            x = x + layer.attn_out(attention(index, q, k, v))
            x = x + layer.feed_forward(x)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[rows, vocab]` of `hidden [rows, hidden]`: give it only the rows that need logits; it pads them itself."""
        normed = F.rms_norm(hidden, (self.config.hidden_size,), self._norm, self.config.rms_eps)
        return self._lm_head(pad_rows(normed))[: hidden.shape[0]]


class _Layer:
    """One layer's steps; adding them up and attention are the model's."""

    def __init__(self, config: ModelConfig, weights: LayerWeights, *, pack: bool) -> None:
        self._config = config
        self._weights = weights
        self._qkv = Product(weights.qkv, weights.qkv_bias, pack=pack)
        self.attn_out = Product(weights.attn_out, pack=pack)
        self._gate_up = Product(weights.gate_up, pack=pack)
        self._down = Product(weights.down, pack=pack)

    def project(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q, K (both rotated) and V `[rows, heads, head_dim]`."""
        config = self._config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = self._qkv(self._normed(x, self._weights.attn_norm)).view(x.shape[0], heads + 2 * kv_heads, dim)
        qk = qkv[:, : heads + kv_heads]
        if self._weights.qk_norm is not None:
            qk = F.rms_norm(qk, (dim,), eps=config.rms_eps) * self._weights.qk_norm
        rotated = _rotate(qk, cos, sin)
        return rotated[:, :heads], rotated[:, heads:], qkv[:, heads + kv_heads :]

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """SwiGLU of the normed rows."""
        gate, up = self._gate_up(self._normed(x, self._weights.ffn_norm)).chunk(2, dim=-1)
        return self._down(F.silu(gate) * up)

    def _normed(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self._config.hidden_size,), scale, self._config.rms_eps)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate dim i with dim i + head_dim / 2 (half-split order, as in the Hugging Face checkpoints); the first half of `sin`
    is negated."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin)
