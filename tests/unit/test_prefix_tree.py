"""The router's memory of what an engine was sent: whole prefixes, bounded, forgotten in time; against a plain model."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.route.prefix_tree import PrefixTree
from kvstore.route.prompts import Keys


def path(name: str) -> Keys:
    """Keys of a text whose chunks are letters: equal for equal beginnings, and only then."""
    return tuple(hash(name[:end]) for end in range(1, len(name) + 1))


def tree_of(*names: str, max_chunks: int = 100, expiry_s: float = 100.0) -> PrefixTree:
    tree = PrefixTree(max_chunks=max_chunks, expiry_s=expiry_s)
    for at_s, name in enumerate(names):
        tree.record(path(name), float(at_s))
        tree.check()
    return tree


def test_the_longest_known_beginning_is_found() -> None:
    tree = tree_of("abcd", "abxy")

    assert [len(tree.match(path(name), 2.0)) for name in ("abcdef", "abxz", "b", "")] == [4, 3, 0, 0]


def test_it_tells_how_many_conversations_share_each_prefix() -> None:
    tree = tree_of("abc", "abd", "abde", "q", "ab")

    assert tree.match(path("abde"), 9.0) == [2, 2, 1, 1]
    assert tree.num_leaves == 3


def test_beyond_its_size_the_ends_of_what_was_used_longest_ago_go_first() -> None:
    tree = tree_of("abcd", "xyz", "ab", max_chunks=7)
    tree.record(path("pq"), 3.0)

    assert [len(tree.match(path(name), 3.0)) for name in ("abcd", "xyz", "pq")] == [2, 3, 2]


def test_a_prompt_longer_than_the_tree_keeps_its_beginning() -> None:
    tree = tree_of("abcdefgh", max_chunks=3)

    assert len(tree) == len(tree.match(path("abcdefgh"), 0.0)) == 3


def test_what_is_not_used_is_forgotten_and_what_is_used_with_all_above_it_is_not() -> None:
    tree = tree_of("abc", "abx", expiry_s=10.0)

    assert len(tree.match(path("abc"), 9.9)) == 3
    assert len(tree.match(path("abc"), 10.0)) == 2
    assert len(tree.match(path("abx"), 11.0)) == 0
    assert len(tree) == tree.num_leaves == 0


def test_cleared_it_knows_nothing() -> None:
    tree = tree_of("abc", "abx")
    tree.clear()
    tree.check()

    assert tree.match(path("abc"), 2.0) == []


STEPS = st.lists(st.tuples(st.text("abc", max_size=6), st.floats(0, 4), st.booleans()), max_size=40)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, max_chunks=st.integers(1, 12), expiry_s=st.floats(1, 10))
def test_it_agrees_with_a_list_of_prefixes(
    steps: list[tuple[str, float, bool]], max_chunks: int, expiry_s: float
) -> None:
    """The model: a list of prefixes by last use, an ancestor used a moment after its descendants."""
    tree = PrefixTree(max_chunks=max_chunks, expiry_s=expiry_s)
    used: dict[str, float] = {}  # oldest first
    now_s = 0.0
    for name, pause_s, records in steps:
        now_s += pause_s
        used = {prefix: at_s for prefix, at_s in used.items() if at_s + expiry_s > now_s}
        if records:
            tree.record(path(name), now_s)
            for end in range(min(len(name), max_chunks), 0, -1):
                used.pop(name[:end], None)
                used[name[:end]] = now_s
            used = dict(list(used.items())[-max_chunks:])
        known = 0
        while known < len(name) and name[: known + 1] in used:
            known += 1
        assert len(tree.match(path(name), now_s)) == known
        assert len(tree) == len(used)
        tree.check()
