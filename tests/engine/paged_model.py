"""A model with pages of its own, to be driven chunk by chunk and step by step."""

import numpy as np
import torch

from kvstore.core.layout import BlockLayout
from kvstore.engine_connector.engine.attention import DecodeBatch, PrefillChunk
from kvstore.engine_connector.engine.model import Transformer
from kvstore.engine_connector.engine.product import pad_rows
from kvstore.kernels.paged import allocate_pages

BLOCK = 4
NUM_PAGES = 400


class Paged:
    """A model with pages; each sequence gets pages scattered over the cache."""

    def __init__(self, model: Transformer, dtype: str = "float16", seed: int = 0) -> None:
        config = model.config
        layout = BlockLayout(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            block_tokens=BLOCK,
            planes=2,
            head_dim=config.head_dim,
            item_nbytes=4 if dtype == "float32" else 2,
        )
        self.model = model
        self.pages = allocate_pages(NUM_PAGES, layout, dtype)
        self._free = np.random.default_rng(seed).permutation(NUM_PAGES).tolist()

    def table(self, num_tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(-(-num_tokens // BLOCK))]

    def prefill(self, tokens: list[int], table: list[int], start: int = 0, end: int | None = None) -> torch.Tensor:
        """Logits of every row of the chunk [start, end)."""
        end = len(tokens) if end is None else end
        chunk = PrefillChunk(self.pages, table, start, end)
        ids, positions = torch.tensor(tokens[start:end]), torch.arange(start, end)
        return self.model.logits(self.model.hidden(pad_rows(ids), pad_rows(positions), chunk)[: end - start])

    def decode(self, tokens: list[int], positions: list[int], tables: list[list[int]]) -> torch.Tensor:
        batch = DecodeBatch(self.pages, tables, positions)
        hidden = self.model.hidden(pad_rows(torch.tensor(tokens)), pad_rows(torch.tensor(positions)), batch)
        return self.model.logits(hidden[: len(tokens)])
