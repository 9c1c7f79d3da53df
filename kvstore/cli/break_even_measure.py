"""`kvstore break-even --measure`: what this machine does. Copies in memory, the included engine's prefill, a sidecar's tiers."""

import importlib.util
import statistics
import time
from typing import NamedTuple

import numpy as np

from kvstore.calculator.case import Model
from kvstore.calculator.fit import Point
from kvstore.calculator.prefill_shape import PrefillShape
from kvstore.calculator.tier import Tier
from kvstore.core.errors import ConfigError
from kvstore.costs import LoadCost
from kvstore.models import find_model

_COPY_BYTES = 64 << 20
_COPY_ROUNDS = 7
_LONGEST_PROMPT = 1024
_SHORTER = 4
"""The second length is so many times shorter: between nearly equal ones noise would decide what attention costs."""

_PREFILL_ROUNDS = 3
_TOKEN_IDS = 64  # of any vocabulary
_SIDECAR_DEADLINE_S = 5.0
_PLANS = 32


class Measured(NamedTuple):
    """Of this machine."""

    model: Model
    points: list[Point]
    tiers: list[Tier]
    notes: list[str]


def measure(*, socket: str | None, engine_model: str | None) -> Measured:
    """Takes some ten seconds with a small model on a CPU.

    Raises ConfigError if the engine or its model is missing, PeerUnavailable if the sidecar is."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "--measure: the included engine is not installed; use pip install 'kvstore-tiered[engine]', or give --measured",
            field="--measure",
            value="",
        )
    path = find_model(engine_model)
    tiers, notes = (
        [_host_memory()],
        [f"measured on this machine, with whatever else it had to do: {path.name}"],
    )
    if socket is not None:
        found, said = _sidecar(socket)
        tiers, notes = [*tiers, *found], [*notes, *said]
    model, points = _prefill(str(path), path.name)
    taken = ", ".join(f"{point.num_tokens:,.0f} tokens in {point.seconds:.3g} s" for point in points)
    notes[0] += f"; {taken}, the best of {_PREFILL_ROUNDS}"
    return Measured(model, points, tiers, notes)


def _host_memory() -> Tier:
    """np.copyto between two arrays that were touched before: what the arena gives an engine."""
    source, target = np.ones(_COPY_BYTES, np.uint8), np.ones(_COPY_BYTES, np.uint8)
    rates = []
    for _ in range(_COPY_ROUNDS):
        started = time.perf_counter()
        np.copyto(target, source)
        rates.append(_COPY_BYTES / (time.perf_counter() - started))
    return Tier("host-memory", LoadCost(0.0, statistics.median(rates)), 0.0, f"np.copyto, median of {_COPY_ROUNDS}")


def _sidecar(socket: str) -> tuple[list[Tier], list[str]]:
    """Its tiers as its last plans believed them to be, and what it holds."""
    from kvstore.client import Client
    from kvstore.proto import kvstore_pb2 as pb

    deadline_s = _SIDECAR_DEADLINE_S
    with Client(socket, role=pb.TOOL, connect_deadline_s=deadline_s, call_deadline_s=deadline_s) as client:
        stats, plans = client.stats(), client.explain(last=_PLANS)
    tiers: dict[str, Tier] = {}
    for plan in plans:  # newest first
        for share in plan.tiers:
            if share.usable and share.bytes_per_s > 0 and share.tier not in tiers:
                load = LoadCost(share.latency_s, share.bytes_per_s)
                tiers[share.tier] = Tier(
                    f"sidecar: {share.tier}", load, float(share.queued_bytes), "a plan of the sidecar"
                )
    held = ", ".join(
        f"{tier.name} {tier.ready_bytes / 1e9:.3g} of {tier.capacity_bytes / 1e9:.3g} GB" for tier in stats.tiers
    )
    notes = [f"the sidecar holds {stats.num_blocks:,} blocks: {held}"]
    if not tiers:
        notes.append("the sidecar has made no plan yet, so it has no speeds to tell")
    return list(tiers.values()), notes


def _prefill(path: str, name: str) -> tuple[Model, list[Point]]:
    """The engine's time to one token, of random prompts of two lengths."""
    from kvstore.engine_connector.engine.llm import LLM
    from kvstore.engine_connector.engine.sampler import SamplingParams

    with LLM(path, prefix_caching=False) as engine:
        spec = engine.spec
        rng = np.random.default_rng(0)
        one = SamplingParams(max_tokens=1, temperature=0.0)
        longest = min(_LONGEST_PROMPT, engine.max_model_len - 1)
        lengths = (max(longest // _SHORTER, 1), longest)
        took: dict[int, list[float]] = {length: [] for length in lengths}
        engine.generate([[0] * lengths[0]], one)  # warms it up
        for _ in range(_PREFILL_ROUNDS):
            for length in lengths:
                prompt = [int(token) for token in rng.integers(0, _TOKEN_IDS, length)]
                started = time.perf_counter()
                engine.generate([prompt], one)
                took[length].append(time.perf_counter() - started)
    points = [Point(length, min(seconds)) for length, seconds in took.items()]
    per_token = spec.block_nbytes // spec.block_tokens
    shape = PrefillShape(name, per_token, 0.0, 0.0)
    return Model(shape, "block_nbytes/block_tokens", f"{spec.block_nbytes}/{spec.block_tokens}"), points
