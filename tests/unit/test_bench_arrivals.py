"""When conversations start."""

from itertools import pairwise

import pytest

from kvstore.bench.arrivals import burst, closed, from_trace, poisson


def test_poisson_gaps_have_the_mean_and_the_spread_of_an_exponential() -> None:
    offsets = poisson(1, 4000, 5.0).offsets_s
    gaps = [after - before for before, after in pairwise((0.0, *offsets))]

    assert min(gaps) >= 0
    assert sum(gaps) / len(gaps) == pytest.approx(0.2, rel=0.05)
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)


def test_the_seed_decides_and_another_rate_scales_the_same_times() -> None:
    assert poisson(1, 50, 2.0) == poisson(1, 50, 2.0)
    assert poisson(1, 50, 2.0) != poisson(2, 50, 2.0)
    assert poisson(1, 50, 4.0).offsets_s == pytest.approx([at / 2 for at in poisson(1, 50, 2.0).offsets_s])


def test_bursts_come_together_at_the_mean_rate() -> None:
    assert burst(5, size=2, rate_per_s=4.0).offsets_s == (0.0, 0.0, 0.5, 0.5, 1.0)
    assert burst(3).offsets_s == (0.0, 0.0, 0.0)


def test_a_part_keeps_the_gap_before_it() -> None:
    arrivals = from_trace((0.0, 1.0, 3.0, 7.0))

    assert arrivals.part(0, 2).offsets_s == (0.0, 1.0)
    assert arrivals.part(2, 2).offsets_s == (2.0, 6.0)
    assert closed(3).part(2, 2) == closed(3)
