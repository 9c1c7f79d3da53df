"""What hits are worth in a replay: time to first token, GPU seconds, dollars, by the cost model."""

from typing import NamedTuple

from kvstore.calculator.prefill_shape import shape_of_row
from kvstore.calculator.priors import Setup, prior
from kvstore.calculator.tier import default_tiers
from kvstore.costs import LoadCost, PrefillCost
from kvstore.tables import rows


class ReplayCosts(NamedTuple):
    """A deployment."""

    model: str
    gpu: str
    num_gpus: int
    prefill: PrefillCost
    kv_bytes_per_token: float
    ram: LoadCost
    nvme: LoadCost
    gpus_usd_per_s: float

    def ttft_s(self, num_tokens: int, ram_tokens: int, nvme_tokens: int) -> float:
        """Seconds of computing a prompt whose leading tokens are fetched, or computed if that is sooner. The last token always
        is. Nothing queues: these are what the store changes of a TTFT, and no more."""
        cached = min(ram_tokens + nvme_tokens, num_tokens - 1)
        from_ram = min(ram_tokens, cached)
        best_s = self.prefill.prefill_s(num_tokens)
        for fetched in (from_ram, cached):
            load_s = max(self._load_s(self.ram, from_ram), self._load_s(self.nvme, fetched - from_ram))
            best_s = min(best_s, load_s + self.prefill.prefill_s(num_tokens - fetched, fetched))
        return best_s

    def saved_s(self, num_tokens: int, cached_tokens: int) -> float:
        """GPU work that cached tokens save."""
        return self.prefill.work_s(min(cached_tokens, num_tokens - 1))

    def _load_s(self, load: LoadCost, num_tokens: int) -> float:
        return load.load_s(num_tokens * self.kv_bytes_per_token)


def make_costs(model: str, gpu: str, num_gpus: int) -> ReplayCosts:
    """From the tables of models and hardware. Raises ConfigError with the nearest names."""
    shape, row = shape_of_row(rows.model(model)), rows.gpu(gpu)
    host, nvme = default_tiers(row, num_gpus)[:2]
    cost = prior(Setup(shape, row, num_gpus)).cost
    per_s = row.usd_per_h * num_gpus / 3600
    return ReplayCosts(
        shape.name, row.name, num_gpus, cost, shape.kv_bytes_per_token, host.load, nvme.load, gpus_usd_per_s=per_s
    )
