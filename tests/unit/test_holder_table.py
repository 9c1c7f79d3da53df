"""The table of (block, node) pairs says what a dict of sets would."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.transport import holder_table
from kvstore.transport.directory import Fingerprints
from kvstore.transport.holder_table import MAX_SPILLED_HOLDERS, HolderTable

KEYS = np.unique(np.random.default_rng(7).integers(1, 1 << 62, 3000, dtype=np.uint64) << np.uint64(2))
CROWDED = np.uint64(0x1234 << 48) | (np.arange(40, dtype=np.uint64) << np.uint64(20))
"""All of one bucket, whatever the table's size in these tests."""


def found(table: HolderTable, keys: Fingerprints) -> set[tuple[int, int]]:
    positions, nodes = table.find(keys)
    pairs = set(zip(positions.tolist(), nodes.tolist(), strict=True))
    assert len(pairs) == len(positions)
    return pairs


Step = tuple[str, int, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "remove", "remove_node"]),
        st.integers(1, 12),
        st.integers(0, 2900),
        st.integers(1, 100),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_any_history_equals_a_set_of_pairs(steps: list[Step]) -> None:
    table, model, keys = HolderTable(), set[tuple[int, int]](), np.concatenate([CROWDED, KEYS])

    for verb, node, start, length in steps:
        span = range(start, min(start + length, len(keys)))
        if verb == "add":
            table.add(keys[span], node)
            model |= {(position, node) for position in span}
        elif verb == "remove":
            table.remove(keys[span], node)
            model -= {(position, node) for position in span}
        else:
            table.remove_nodes({node})
            model = {pair for pair in model if pair[1] != node}
        table.check()

    assert found(table, keys) == model
    assert table.num_entries == len(model)


def test_it_grows_and_forgets_nothing() -> None:
    """A hundred thousand entries of five nodes, some 1 % of them beside their buckets."""
    keys = np.random.default_rng(3).integers(0, 1 << 63, 100_000, dtype=np.uint64) << np.uint64(1)
    table = HolderTable()

    for node in range(1, 6):
        table.add(keys[node::5], node)

    table.check()
    positions, nodes = table.find(keys)
    assert len(positions) == 100_000 - 1
    assert (nodes == np.where(positions % 5, positions % 5, 5)).all()
    assert table.nbytes <= 33 * table.num_entries


def test_what_nobody_holds_is_not_found() -> None:
    generator = np.random.default_rng(5)
    held, others = (generator.integers(0, 1 << 63, 50_000, dtype=np.uint64) << np.uint64(1) for _ in range(2))
    table = HolderTable()
    table.add(held, 1)

    positions, _ = table.find(np.setdiff1d(others, held))

    assert len(positions) == 0


def test_holders_of_one_block_are_limited() -> None:
    """A system prompt that all nodes hold: some holders are known, and which goes first makes no difference to the others."""
    table, hot = HolderTable(), KEYS[:3]

    for node in range(1, 101):
        table.add(hot, node)
    table.check()

    holders = {node for position, node in found(table, hot) if position == 1}
    assert 8 <= len(holders) <= 8 + MAX_SPILLED_HOLDERS
    for node in holders:
        table.remove(hot, node)
    table.check()
    assert not found(table, hot)


@pytest.mark.parametrize("seed", range(3))
def test_lookups_while_another_thread_changes_the_table(seed: int) -> None:
    """Node 1 holds its keys all the time, node 2 comes and goes; whoever looks sees all of node 1's and nothing invented."""
    import threading

    keys = np.unique(np.random.default_rng(seed).integers(0, 1 << 63, 4000, dtype=np.uint64) << np.uint64(1))
    steady, moving = keys[:1000], keys[1000:]
    table = HolderTable()
    table.add(steady, 1)
    order = random.Random(seed)
    done = threading.Event()

    def churn() -> None:
        for _ in range(60):
            start = order.randrange(len(moving))
            table.add(moving[start:], 2)
            table.remove(moving[: start + 500], 2)
        done.set()

    thread = threading.Thread(target=churn)
    thread.start()
    looks = 0
    while not done.is_set() or not looks:
        positions, nodes = table.find(steady)
        assert (nodes == 1).all()
        assert len(positions) == 1000
        looks += 1
    thread.join(10)
    table.check()


def test_names_that_are_not_spread_cost_no_step_each_when_the_table_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer chooses what it says that it holds. All in one half of the buckets, a seventh of it lies beside."""
    table = HolderTable()
    half = np.random.default_rng(1).integers(0, 1 << 62, 1 << 16, np.uint64) << np.uint64(1)
    table.add(half[: 1 << 15], 1)
    assert len(table._buckets.beside) > 1000
    insert, steps = holder_table._insert, []

    def counted(buckets: Any, wanted: Any) -> int:
        steps.append(len(wanted))
        return insert(buckets, wanted)

    monkeypatch.setattr(holder_table, "_insert", counted)
    table.add(half[1 << 15 :], 2)
    assert len(steps) < 8
    table.check()
    assert table.num_entries == 1 << 16
