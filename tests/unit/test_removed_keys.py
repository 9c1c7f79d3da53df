"""Why a block that is not here went."""

import math

import numpy as np
import pytest

from kvstore.removed_keys import DAMAGED, DECLINED, DROPPED, EVICTED, RemovedKeys

NAMESPACE, OTHER = b"namespace one...", b"namespace two..."


def some_keys(count: int, *, seed: int = 1, nbytes: int = 16) -> list[bytes]:
    packed = np.random.default_rng(seed).bytes(count * nbytes)
    return [packed[i : i + nbytes] for i in range(0, len(packed), nbytes)]


@pytest.mark.parametrize("nbytes", [16, 32])
def test_reasons_are_told_apart_and_the_last_one_holds(nbytes: int) -> None:
    removed, keys = RemovedKeys(), some_keys(50, nbytes=nbytes)
    removed.add(NAMESPACE, keys[:40], EVICTED)
    removed.add(NAMESPACE, keys[10:20], DROPPED)
    removed.add(NAMESPACE, keys[20:25], DAMAGED)
    removed.add(NAMESPACE, keys[25:26], DECLINED)

    assert removed.count(NAMESPACE, keys) == {
        "evicted": 24,
        "dropped": 10,
        "damaged": 5,
        "declined": 1,
        "never_stored": 10,
    }
    assert removed.count(OTHER, keys) == {"never_stored": 50}


def test_nothing_was_removed_and_nothing_is_asked() -> None:
    removed = RemovedKeys()

    assert removed.count(NAMESPACE, some_keys(3)) == {"never_stored": 3}
    assert removed.count(NAMESPACE, []) == {}
    removed.add(NAMESPACE, [], EVICTED)
    assert removed.count(NAMESPACE, some_keys(3)) == {"never_stored": 3}


def test_older_ones_are_forgotten_at_the_rate_that_is_stated() -> None:
    size = 1 << 15
    removed, old = RemovedKeys(size=size), some_keys(2000)
    removed.add(NAMESPACE, old, EVICTED)
    removed.add(NAMESPACE, some_keys(size, seed=2), DROPPED)

    kept = removed.count(NAMESPACE, old)["evicted"] / len(old)
    assert abs(kept - math.exp(-1)) < 0.04
    assert "dropped" not in removed.count(NAMESPACE, old)  # no key takes another one's reason


def test_hashes_that_an_engine_counts_up_are_spread_too() -> None:
    removed = RemovedKeys(size=1 << 12)
    counted = [i.to_bytes(16, "little") for i in range(1000)]
    removed.add(NAMESPACE, counted, EVICTED)

    assert removed.count(NAMESPACE, counted)["evicted"] > 850
