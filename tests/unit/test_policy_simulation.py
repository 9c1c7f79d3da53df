"""The policy on simulated tiers: near the oracle though what it believes is wrong, and never much worse than either end."""

import functools
import gzip
import json
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.policy_simulation import (  # noqa: E402 (benchmarks is not installed)
    REGIMES,
    Regime,
    main,
    simulate,
    synthetic_lengths,
    trace_lengths,
    worst_of_better,
)

LENGTHS = [min(tokens, 16_384) for tokens in synthetic_lengths(80)]  # the longest ones only take long
simulated = functools.cache(functools.partial(simulate, lengths=LENGTHS))


@pytest.mark.parametrize("regime", REGIMES, ids=lambda regime: regime.name)
def test_the_policy_is_near_the_oracle_and_no_worse_than_either_end(regime: Regime) -> None:
    times = simulated(regime)

    assert times["stealing"].mean() <= 1.15 * times["oracle"].mean()
    assert (times["oracle"] <= times["stealing"] * (1 + 1e-9)).all(), "the oracle is one"
    if regime.is_stationary:
        assert times["stealing"].mean() <= 1.1 * min(times["load"].mean(), times["compute"].mean())
        assert worst_of_better(times) <= 1.1


def test_a_measured_cut_recovers_what_a_static_one_loses_on_a_slower_tier() -> None:
    times = simulated(next(regime for regime in REGIMES if regime.name.endswith("truly 2")))

    assert times["static"].mean() > 1.3 * times["compute"].mean()
    assert times["ewma"].mean() < 1.1 * min(times["load"].mean(), times["compute"].mean())


def test_the_benchmark_prints_one_json_object(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl.gz"
    lines = [{"hash_ids": list(range(4 * (number % 3 + 1)))} for number in range(12)]
    trace.write_bytes(gzip.compress("\n".join(json.dumps(line) for line in lines).encode()))

    result = CliRunner().invoke(main, ["--trace", str(trace), "--json"], catch_exceptions=False)

    report = json.loads(result.stdout)
    assert [row["regime"] for row in report["rows"]] == [regime.name for regime in REGIMES]
    assert report["goals"]


def test_cached_lengths_are_the_leading_blocks_seen_before(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    requests = [[1, 2, 3], [1, 2, 3, 4], [1, 9, 3], [1, 2, 3, 4, 5], [7]]
    trace.write_text("\n".join(json.dumps({"hash_ids": ids}) for ids in requests))

    assert trace_lengths(trace) == [3 * 512, 4 * 512]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [(None, "is no file"), ("{}", "line 1"), ("nonsense", "line 1"), ('{"hash_ids": [1]}', "two cached blocks")],
)
def test_a_trace_that_is_none_is_named(tmp_path: Path, text: str | None, wrong: str) -> None:
    trace = tmp_path / "trace.jsonl"
    if text is not None:
        trace.write_text(text)

    with pytest.raises(click.BadParameter, match=wrong):
        trace_lengths(trace)
