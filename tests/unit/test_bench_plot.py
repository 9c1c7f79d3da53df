"""The line through the points of the picture, and what is refused before anything runs."""

from pathlib import Path

import pytest

from kvstore.bench.plot import check_plot, medians
from kvstore.core.errors import ConfigError


def test_medians_are_of_groups_of_like_length() -> None:
    points = [(length, float(length % 5)) for length in range(20)]

    assert medians(points[::-1], bins=2) == [(4.5, 2.0), (14.5, 2.0)]


def test_few_points_make_few_groups() -> None:
    assert medians([(1, 1.0), (3, 5.0)]) == [(2.0, 3.0)]
    assert len(medians([(at, 0.0) for at in range(11)])) == 3
    assert medians([]) == []


@pytest.mark.parametrize("name", ["a.gif", "png", "a.png.txt"])
def test_a_name_of_no_known_kind_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"\.png, \.svg or \.pdf"):
        check_plot(Path(name))
