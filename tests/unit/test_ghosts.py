"""What is remembered of evicted blocks."""

from still_tier import StillTier, index_of_single_blocks

from kvstore.core.limits import MAX_GHOSTS
from kvstore.eviction.ghosts import HISTORY, Ghosts
from kvstore.index import Rows


class Remembering:
    def __init__(self, num_blocks: int, num_rows: int) -> None:
        self.index, self.rows = index_of_single_blocks(num_rows)
        self.ghosts = Ghosts(self.index, StillTier(num_blocks))

    def forget_use(self) -> None:
        self.index.last_use[:] = 0
        self.index.uses[:] = 0

    def take_first(self, rows: Rows) -> object:
        return self.ghosts.take_first(rows)


def test_an_evicted_block_is_known_once_with_its_last_use_and_who_evicted_it() -> None:
    known = Remembering(100, 10)
    known.index.use(known.rows)
    known.ghosts.add(3, 1)
    last_use = known.index.last_use_at[3]
    known.index.use(known.rows[:5])

    ghost = known.ghosts.take(3)

    assert ghost is not None
    assert (ghost.mark, ghost.last_use, ghost.uses, ghost.age) == (1, last_use, 1, 5 / 100)
    assert known.ghosts.take(3) is None
    assert known.ghosts.take(4) is None


def test_a_new_block_gets_its_last_use_back_and_the_first_one_is_judged() -> None:
    known = Remembering(100, 10)
    known.index.use(known.rows)
    known.index.use(known.rows[5:])
    before = known.index.last_use.copy()
    for row in (4, 5, 6):
        known.ghosts.add(row, row % 2)
    known.forget_use()

    ghost = known.ghosts.take_first(known.rows[2:7])

    assert ghost is not None
    assert ghost.last_use == before[4]
    assert known.index.last_use[[2, 3, 4, 5, 6]].tolist() == [0, 0, *before[4:7].tolist()]
    assert known.index.uses[[2, 3, 4, 5, 6]].tolist() == [0, 0, 1, 2, 2]


def test_nearly_all_of_a_history_of_32_tiers_is_kept_and_memory_stays_as_it_was() -> None:
    num_blocks = 128
    known = Remembering(num_blocks, 3 * HISTORY * num_blocks)
    known.index.use(known.rows)
    for row in known.rows.tolist():
        known.ghosts.add(row, 0)
    nbytes = known.ghosts.nbytes
    recent = known.rows[-HISTORY * num_blocks // 2 :].tolist()

    kept = sum(known.ghosts.take(row) is not None for row in recent)

    assert nbytes <= 2 * HISTORY * num_blocks * 16
    assert kept > 0.97 * len(recent)


def test_of_keys_that_share_their_slots_the_last_eight_are_kept() -> None:
    """Evicted one by one with look-ups between them, and all at once."""
    for looks_between in (True, False):
        known = Remembering(100, 40)
        known.index.keys[:20] = [(number << 32 | 5).to_bytes(8, "little") + bytes(8) for number in range(1, 21)]
        known.index.use(known.rows)
        for row in range(40):
            known.ghosts.add(row, row % 4)
            if looks_between:
                assert known.ghosts.take(row) is not None
                known.ghosts.add(row, row % 4)

        ghosts = [known.ghosts.take(row) for row in range(20)]

        kept = range(16, 20) if looks_between else range(12, 20)  # what was taken has had a slot of the eight too
        assert [row for row, ghost in enumerate(ghosts) if ghost] == list(kept)
        assert [ghost.mark for ghost in ghosts if ghost] == [row % 4 for row in kept]


def test_a_large_tier_remembers_no_more_than_the_limit() -> None:
    known = Remembering(MAX_GHOSTS, 2)
    known.ghosts.add(0, 0)

    assert known.ghosts.nbytes <= 17 * MAX_GHOSTS
