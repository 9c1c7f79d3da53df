"""Which link to a node is asked first."""

from kvstore.link_choice import RETRY_S, KnownLink, best_first
from kvstore.transport.link import LinkHealth, LinkStats

MB = 1 << 20


class FakeLink:
    def __init__(self) -> None:
        self.carried, self.busy_s, self.queued, self.state = 0, 0.0, 0, "idle"

    def stats(self) -> LinkStats:
        return LinkStats(self.carried, 0, self.busy_s, self.queued, {})

    def health(self) -> LinkHealth:
        return LinkHealth(self.state, "")


def links(count: int = 3) -> tuple[list[FakeLink], list[KnownLink]]:
    fakes = [FakeLink() for _ in range(count)]
    return fakes, [KnownLink(f"link {i}", 1, fake) for i, fake in enumerate(fakes)]  # type: ignore[arg-type]


def names(known: list[KnownLink], now_s: float = 0.0) -> list[str]:
    return [each.name for each in best_first(known, 64 * MB, now_s)]


def test_of_links_that_nobody_has_used_the_preferred_one_is_first():
    _, known = links()
    assert names(known) == ["link 0", "link 1", "link 2"]


def test_what_was_measured_to_be_faster_is_first_but_not_for_a_little():
    fakes, known = links(2)
    for fake, rate in zip(fakes, (1000, 1100), strict=True):
        fake.carried, fake.busy_s = rate * MB, 1.0
    assert names(known)[0] == "link 0"
    fakes[1].carried, fakes[1].busy_s = (1100 + 4000) * MB, 2.0
    assert names(known)[0] == "link 1"


def test_a_busy_link_gives_way_to_one_that_is_idle():
    fakes, known = links(2)
    fakes[0].carried, fakes[0].busy_s, fakes[0].queued = 1000 * MB, 1.0, 64 * MB
    assert names(known)[0] == "link 1"


def test_a_link_that_fails_is_the_last_resort_and_is_tried_again_now_and_then():
    fakes, known = links(2)
    fakes[0].state = "failing"
    assert names(known, 0.0) == ["link 1", "link 0"]
    assert names(known, RETRY_S - 0.1)[0] == "link 1"
    assert names(known, RETRY_S + 0.1)[0] == "link 0"
    assert names(known, 2 * RETRY_S + 0.2)[0] == "link 1"  # it had its try
    fakes[0].state = "ready"
    assert names(known, 2 * RETRY_S + 0.3)[0] == "link 0"


def test_a_speed_follows_what_was_carried_lately():
    fakes, known = links(2)
    fakes[0].carried, fakes[0].busy_s = 10_000 * MB, 1.0
    fakes[1].carried, fakes[1].busy_s = 1_000 * MB, 1.0
    assert names(known)[0] == "link 0"
    fakes[0].carried, fakes[0].busy_s = 10_100 * MB, 2.0
    assert names(known)[0] == "link 1"
