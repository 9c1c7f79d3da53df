"""Labels are given last wins, forgotten with their blocks, and bounded."""

import numpy as np
import pytest
from small_store import SmallStore

from kvstore.core.errors import ConfigError
from kvstore.engine_connector.protocol import CacheOptions
from kvstore.index import BlockIndex, Rows
from kvstore.labels import Labels

PAGE = 4096


@pytest.fixture
def index() -> BlockIndex:
    return BlockIndex()


def rows_of(index: BlockIndex, count: int) -> Rows:
    entry = index.find_namespace(b"n" * 16) or index.open_namespace(b"n" * 16, SmallStore().spec, "", PAGE)
    rows = index.new_rows(count)
    index.add(entry, [int(row).to_bytes(16, "big") for row in rows], np.full(count, -1), rows)
    index.touch(rows)
    return rows


def test_the_last_one_given_counts_and_others_keep_theirs(index: BlockIndex) -> None:
    labels, rows = Labels(index), rows_of(index, 4)

    labels.give(rows[:3], "contract")
    labels.give(rows[:2], "manual")

    assert [labels.of(row) for row in rows] == ["manual", "manual", "contract", ""]
    labels.check()


def test_a_block_that_is_forgotten_loses_its_label(index: BlockIndex) -> None:
    labels, rows = Labels(index), rows_of(index, 1)
    labels.give(rows, "contract")

    index.forget(int(rows[0]))

    assert labels.of(int(rows_of(index, 1)[0])) == ""
    labels.check()


def test_there_are_only_so_many_and_those_that_no_block_has_make_room(index: BlockIndex) -> None:
    labels, rows = Labels(index, max_labels=3), rows_of(index, 4)
    for row, text in zip(rows[:3], "abc", strict=True):
        assert labels.give(np.array([row]), text)

    assert not labels.give(rows[3:], "d")
    assert labels.of(int(rows[3])) == ""
    assert labels.give(rows[3:], "a")
    labels.check()

    index.forget(int(rows[1]))
    rows_of(index, 3)  # as many uses as there are labels: it is looked again
    assert labels.give(rows[3:], "d")
    assert not labels.give(rows[3:], "b")
    assert [labels.of(int(row)) for row in (rows[0], rows[2], rows[3])] == ["a", "c", "d"]
    labels.check()


@pytest.mark.parametrize("label", ["x" * 65, "é" * 33, "two\nlines", "\x1b[31m", "\u202eright to left", "\ud800"])
def test_what_cannot_be_shown_is_refused(label: str) -> None:
    with pytest.raises(ConfigError, match=r"^label: "):
        CacheOptions(label=label)


def test_html_is_text_like_any_other() -> None:
    assert CacheOptions(label="<b>&amp; [red]").label == "<b>&amp; [red]"
