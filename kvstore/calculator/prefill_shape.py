"""The facts of a model that a prefill and a fetch cost by: from a row of the table, or from numbers."""

import math
from typing import NamedTuple

from kvstore.core.errors import ConfigError
from kvstore.tables.rows import ModelRow

_BF16_BYTES = 2
_TOLERANCE = 0.05
"""Counts of parameters that differ by more than this are of different models; a vision tower makes 9 %."""

_SPARSE_TOKENS = 2048
"""Sparse attention (DeepSeek-V3.2) lets a query see so many tokens, those that its indexer finds."""


class PrefillShape(NamedTuple):
    """A model as prefill and fetch see it. 0 stands for "not known"."""

    name: str
    kv_bytes_per_token: float  # of the whole replica
    prefill_params: float  # that every token passes: no embedding, no LM head, of experts those chosen
    attn_flops_per_pair: float  # over all layers that see everything
    window_flops_per_pair: float = 0.0  # over the others
    window_tokens: int = 0
    layers: int = 0
    hidden: int = 0
    kv_heads: int = 0
    total_params: float = 0.0
    is_moe: bool = False
    is_mla: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def is_dense(self) -> bool:
        """Whether every token passes all weights, in the usual kind of attention."""
        return not self.is_moe and not self.is_mla


def shape_of_row(row: ModelRow) -> PrefillShape:
    """Raises ConfigError for a model whose prefill the table does not know enough of."""
    prefill_params = row.prefill_params or row.active_params
    per_pair, full, window_tokens = row.attn_flops_per_pair, row.attn_flops_per_pair_full, row.window_tokens
    if per_pair is None and row.mla_rank:
        per_pair, full, window_tokens = attn_flops_per_pair(row), 0.0, _SPARSE_TOKENS
    if per_pair is None or not prefill_params:
        raise ConfigError(
            f"--model: FLOPs of {row.name} are not known: give --prefill-params-b and --attn-flops-per-pair",
            field="--model",
            value=row.name,
        )
    if not window_tokens or full is None:
        full, window_tokens = per_pair, 0
    return PrefillShape(
        name=row.name,
        kv_bytes_per_token=row.kv_bytes_per_token,
        prefill_params=prefill_params,
        attn_flops_per_pair=full,
        window_flops_per_pair=per_pair - full,
        window_tokens=window_tokens,
        layers=row.layers,
        hidden=row.hidden,
        kv_heads=row.kv_heads,
        total_params=row.total_params,
        is_moe=row.active_params < row.total_params / 1.5,
        is_mla=bool(row.mla_rank),
        warnings=tuple(check_row(row)),
    )


def check_row(row: ModelRow) -> list[str]:
    """What of the row contradicts its own shape. A public calculator gives one model another one's entry: so each is rebuilt."""
    wrong = []
    kv_bytes, flops = kv_bytes_per_token(row), attn_flops_per_pair(row)
    if kv_bytes != row.kv_bytes_per_token:
        found = f"{row.kv_bytes_per_token:,} B of KV a token in the table, {kv_bytes:,} B by its layers and heads"
        wrong.append(f"{row.name}: {found}{_because(row)}")
    if row.check_params is not None and not math.isclose(row.check_params, row.total_params, rel_tol=_TOLERANCE):
        found = f"{row.total_params / 1e9:.2f} B parameters in the table, {row.check_params / 1e9:.2f} B by its shape"
        wrong.append(f"{row.name}: {found}{_because(row)}")
    if row.attn_flops_per_pair is not None and not math.isclose(flops, row.attn_flops_per_pair, rel_tol=0.001):
        wrong.append(f"{row.name}: {row.attn_flops_per_pair:,.0f} FLOPs a pair in the table, {flops:,.0f} by its heads")
    return wrong


def kv_bytes_per_token(row: ModelRow) -> int:
    """Rebuilt from the shape, in bf16: K and V of each KV head, or the latent of MLA."""
    if row.mla_rank:
        return row.layers * (row.mla_rank + row.rope_dim) * _BF16_BYTES
    return row.attending_layers * 2 * row.kv_heads * row.qk_dim * _BF16_BYTES


def attn_flops_per_pair(row: ModelRow) -> float:
    """QK^T and PV, 2 FLOP for each multiply and add. Query heads count; KV heads do not."""
    return 2.0 * row.attending_layers * row.heads * (row.qk_dim + row.v_dim)


def _because(row: ModelRow) -> str:
    return f" ({row.note})" if row.note else " (a vision tower, or layers for speculation, are not in the shape)"
