"""Worked examples of the cost model, with the numbers that are expected of it, and the rows of the tables they use."""

import csv
import importlib.resources
import json
from pathlib import Path

from kvstore.costs import LoadCost, PrefillCost

EXAMPLES = {
    example["id"]: example
    for example in json.loads((Path(__file__).parent.parent / "data" / "worked_examples.json").read_text())
}
H100_FLOPS = 989e12
H100_USD_PER_S = 2.95 / 3600


def table(name: str) -> list[dict[str, str]]:
    """A table that comes with the package."""
    text = importlib.resources.files("kvstore.tables").joinpath(f"{name}.csv").read_text()
    return list(csv.DictReader(text.splitlines()))


def model(name: str) -> dict[str, str]:
    """A row of the table of models."""
    return next(row for row in table("models") if row["name"] == name)


def kv_bytes(name: str) -> float:
    return float(model(name)["kv_bytes_per_token_bf16"])


def prefill_of(name: str, num_gpus: int, efficiency: float, *, peak_flops: float = H100_FLOPS) -> PrefillCost:
    row = model(name)
    return PrefillCost.from_flops(
        float(row["prefill_params_B"]) * 1e9,
        float(row["attn_flops_per_pair"]),
        peak_flops * num_gpus,
        linear_efficiency=efficiency,
        attention_efficiency=efficiency,
    )


def llama_8b_on_h100() -> PrefillCost:
    """E3's constants, which E4, E5 and the 8B row of E7 use too."""
    given = EXAMPLES["E3"]["inputs"]
    return PrefillCost.from_flops(
        given["P"],
        given["A"],
        given["G"],
        linear_efficiency=given["eta_l"],
        attention_efficiency=given["eta_a"],
    )


def tiers_of_e3() -> dict[str, LoadCost]:
    return {
        name: LoadCost(latency_s, bytes_per_s)
        for name, (bytes_per_s, latency_s) in EXAMPLES["E3"]["inputs"]["tiers"].items()
    }
