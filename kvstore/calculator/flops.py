"""What the sums need of a model: parameters, bytes of KV, FLOP."""

from typing import NamedTuple, Self

from kvstore.calculator.prefill_shape import shape_of_row
from kvstore.tables.rows import ModelRow


class ModelShape(NamedTuple):
    """Sizes in bf16. `active_params` are those a token passes, with embedding and LM head; `prefill_params` those without."""

    total_params: float
    active_params: float
    prefill_params: float
    kv_bytes_per_token: float  # all layers, K and V, 2 bytes an element
    attn_flops_per_pair: float  # of a query and a key, over the layers that see everything
    window_flops_per_pair: float = 0.0  # over those that see the last `window_tokens`
    window_tokens: float = 0.0

    @classmethod
    def from_row(cls, row: ModelRow) -> Self:
        """Of a model in the table. ConfigError where that does not know enough of it."""
        shape = shape_of_row(row)
        return cls(
            total_params=row.total_params,
            active_params=max(row.active_params, shape.prefill_params),  # published counts are rounded
            prefill_params=shape.prefill_params,
            kv_bytes_per_token=shape.kv_bytes_per_token,
            attn_flops_per_pair=shape.attn_flops_per_pair,
            window_flops_per_pair=shape.window_flops_per_pair,
            window_tokens=shape.window_tokens,
        )

    def prefill_flops(self, num_tokens: float) -> float:
        """2 P n + A n^2/2: two FLOP (multiply, add) for each parameter and token, and attention of each token to itself and
        all before it, half of a square; with a window w on A_w of it n^2/2 becomes w n - w^2/2 beyond w."""
        seen = min(num_tokens, self.window_tokens)
        return (
            2 * self.prefill_params * num_tokens
            + self.attn_flops_per_pair * num_tokens**2 / 2
            + self.window_flops_per_pair * seen * (num_tokens - seen / 2)
        )

    def decode_flops(self, context_tokens: float) -> float:
        """2 P + A n for one token behind n: the LM head runs for each, so P are all active parameters (the embedding, which
        is only looked up, counts too, as it does in most published figures: 7 % of an 8B model, 1 % of a 70B one)."""
        return (
            2 * self.active_params
            + self.attn_flops_per_pair * context_tokens
            + self.window_flops_per_pair * min(context_tokens, self.window_tokens)
        )

    def kv_read_bytes(self, context_tokens: float) -> float:
        """KV in bf16 that a token behind `context_tokens` looks at: layers with a window (as large a part of the KV as of A)
        look at no more than that."""
        attention = self.attn_flops_per_pair + self.window_flops_per_pair
        windowed = self.window_flops_per_pair / attention if attention else 0.0
        seen = (1 - windowed) * context_tokens + windowed * min(context_tokens, self.window_tokens)
        return self.kv_bytes_per_token * seen

    def weights_read_bytes(self, num_tokens: float, bytes_per_param: float) -> float:
        """Weights that a step with `num_tokens` tokens reads. A dense model's: all. Of experts each token calls for the share
        s = active/total, so t tokens leave (1 - s)^t of them alone, if experts are chosen evenly and independently."""
        unread: float = (1 - self.active_params / self.total_params) ** num_tokens
        return self.total_params * (1 - unread) * bytes_per_param
