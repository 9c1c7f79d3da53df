"""The dashboard's data: rings of samples, alarms, and what /api answers."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import cache
from urllib.parse import parse_qsl

import numpy as np
import pytest
from busy_node import BusyNode, filled_dashboard

from kvstore.alarms import alarms
from kvstore.dashboard import Dashboard
from kvstore.figures import STATES, figures
from kvstore.history import MAX_SERIES, History
from kvstore.http_server import HttpServer
from kvstore.proto import kvstore_pb2 as pb

HOUR = 3600.0

# --- history ------------------------------------------------------------------------------------------------------------


@cache
def history_of(num_samples: int, every_s: float = 2.0) -> History:
    history = History(every_s=every_s)
    for i in range(num_samples):
        history.add(every_s * (i + 1), {"sum": float(i + 1)})
    return history


def test_the_last_ten_minutes_are_there_to_the_sample() -> None:
    table = history_of(1000).table(2000.0 - 600.0)

    assert table.at_s == [1402.0 + 2 * i for i in range(300)]
    assert table.series["sum"] == [float(701 + i) for i in range(300)]


@pytest.mark.parametrize(
    ("num_samples", "every_s"), [(1, 2.0), (2, 2.0), (299, 2.0), (300, 2.0), (301, 2.0), (2000, 2.0), (5000, 20.0)]
)
@pytest.mark.parametrize("span_s", [600.0, HOUR, 6 * HOUR, 24 * HOUR])
def test_any_span_is_in_order_ends_with_the_newest_and_is_bounded(
    num_samples: int, every_s: float, span_s: float
) -> None:
    newest_s = every_s * num_samples

    table = history_of(num_samples, every_s).table(newest_s - span_s)

    assert table.at_s == sorted(set(table.at_s))
    assert table.at_s[-1] == newest_s
    assert table.series["sum"][-1] == num_samples
    assert table.at_s[0] >= newest_s - span_s
    assert table.at_s[0] <= max(newest_s - span_s, every_s) + span_s / 100 + 60.0  # it reaches back as far as asked
    assert len(table.at_s) <= 300


def test_a_day_is_kept_and_nothing_older() -> None:
    """Two days in minutes."""
    table = history_of(2 * 1440, every_s=60.0).table(0.0, max_samples=10_000)

    assert table.at_s[0] == 60.0 * (1440 + 1)
    assert len(table.at_s) == 1440


def test_its_memory_does_not_grow() -> None:
    history = History()
    before = history.nbytes
    for i in range(10):
        history.add(float(i), {f"figure {j}": 1.0 for j in range(100 * i)})

    assert history.nbytes == before == 1740 * (1 + MAX_SERIES) * 8
    assert len(history.table(0.0).series) == MAX_SERIES


def test_a_figure_that_comes_late_or_goes_is_unknown_then() -> None:
    history = History()
    history.add(1.0, {"a": 1.0, "gone": 5.0})
    history.add(2.0, {"a": 2.0, "late": 7.0})

    assert history.table(0.0).series == {"a": [1.0, 2.0], "gone": [5.0, None], "late": [None, 7.0]}


def test_no_samples_are_an_empty_table() -> None:
    assert history_of(0).table(0.0) == ([], {})
    assert history_of(5).table(100.0) == ([], {})


# --- alarms -------------------------------------------------------------------------------------------------------------


def usage(requested: int, hit: int, **counters: int) -> pb.StatsReply:
    return pb.StatsReply(
        usage=pb.Usage(
            requested_tokens=requested, hit_tokens={"pinned": hit}, missed_tokens={"evicted": requested - hit}
        ),
        counters={f"{name}_total": count for name, count in counters.items()},
    )


def test_a_node_that_is_well_has_no_alarm() -> None:
    node = BusyNode()
    node.well = True

    assert alarms(node.stats(), node.stats(), node.stats()) == []


def test_problems_are_told_in_words_the_critical_first() -> None:
    told = alarms(
        pb.StatsReply(
            problems=[
                pb.Problem(problem="peer_suspect", subject="node-c", reason="timed out"),
                pb.Problem(problem="disk_full", subject="/mnt/0", reason="off: no_space"),
                pb.Problem(problem="something_new", reason="because"),
            ]
        )
    )

    assert [alarm.level for alarm in told] == ["critical", "warning", "warning"]
    assert told[0].title == "A drive is full: /mnt/0"
    assert told[0].why == "off: no_space"
    assert told[2].title == "something new"


@pytest.mark.parametrize(
    ("counter", "level", "title"),
    [
        ("failed_reads_checksum", "critical", "Blocks were damaged"),
        ("failed_fetches_corrupt", "critical", "Blocks were damaged"),
        ("failed_reads_eio", "warning", "Blocks could not be read from a drive"),
        ("failed_writes_no_space", "warning", "Blocks could not be written to a drive"),
        ("failed_fetches_timeout", "warning", "Blocks could not be fetched"),
        ("declined_blocks_no_space", "warning", "Blocks were not stored for lack of room"),
        ("skipped_writes_backlog", "warning", "Drives do not keep up"),
        ("crashes", "critical", "Requests met a bug"),
    ],
)
def test_what_went_wrong_lately_is_an_alarm_until_it_is_long_ago(counter: str, level: str, title: str) -> None:
    before, now = usage(0, 0, **{counter: 4}), usage(0, 0, **{counter: 7})

    (alarm,) = alarms(now, before)

    assert (alarm.level, alarm.title) == (level, title)
    assert "3" in alarm.why
    assert alarms(now, now) == []
    assert alarms(now) == []


def test_blocks_that_a_peer_no_longer_has_are_no_alarm() -> None:
    assert alarms(usage(0, 0, failed_fetches_absent=9), usage(0, 0)) == []


@pytest.mark.parametrize(("recent_hits", "alarmed"), [(80_000, False), (45_000, False), (30_000, True), (0, True)])
def test_a_hit_rate_that_fell_is_an_alarm(recent_hits: int, alarmed: bool) -> None:
    earlier, before, now = usage(0, 0), usage(100_000, 80_000), usage(200_000, 80_000 + recent_hits)

    assert bool(alarms(now, before, earlier)) == alarmed


def test_a_few_tokens_say_nothing_of_the_hit_rate() -> None:
    assert alarms(usage(110_000, 80_000), usage(100_000, 80_000), usage(0, 0)) == []


def test_a_restart_is_no_change() -> None:
    now, before = usage(0, 0, crashes=5), usage(0, 0)
    now.boot_id = b"another"

    assert alarms(now, before, before) == []


def test_slow_fetches_are_an_alarm() -> None:
    def after(num: int, actual_s: float) -> pb.StatsReply:
        slow = pb.Prediction(kind="fetch", num=num, ratio=2.4)
        return pb.StatsReply(predictions=[slow], seconds={"predicted_fetch": 1.0, "actual_fetch": actual_s})

    (alarm,) = alarms(after(50, 2.4))

    assert alarm.title == "Fetches take longer than predicted"
    assert alarms(after(5, 2.4)) == []
    assert alarms(after(50, 1.1)) == []  # 2 ms each


# --- figures ------------------------------------------------------------------------------------------------------------


def test_figures_keep_the_laws_of_what_they_are_made_of() -> None:
    shown = figures(BusyNode().stats())

    parts = sum(value for name, value in shown.items() if name.startswith(("tokens.hit.", "tokens.missed.")))
    assert parts == shown["tokens.requested"] > 0
    for tier in ("pinned", "nvme"):
        assert sum(shown[f"bytes.{tier}.{state}"] for state in STATES) == shown[f"capacity.{tier}"]
    assert shown["removed.pinned.evicted"] > 0
    assert len(shown) < MAX_SERIES


def test_a_hundred_peers_do_not_push_out_the_rest() -> None:
    stats = BusyNode().stats()
    stats.peers.extend(pb.PeerStats(node_id=f"extra-{i}") for i in range(100))

    assert len(figures(stats)) < MAX_SERIES


# --- answers ------------------------------------------------------------------------------------------------------------

END_S = 1_700_000_000.0


class Served:
    """A dashboard, behind the real HTTP server when somebody asks it."""

    def __init__(self) -> None:
        self.node = BusyNode()
        self.wall_s = END_S
        self.dashboard = Dashboard(self.node, wall_s=lambda: self.wall_s)
        self._server: HttpServer | None = None

    def get(self, path: str, **headers: str) -> tuple[dict[str, str], bytes]:
        if self._server is None:
            self._server = HttpServer("127.0.0.1", 0, self.node.stats, self.dashboard)
            self._server.start()
        url = f"http://127.0.0.1:{self._server.port}{path}"
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return dict(answer.headers), answer.read()

    def json(self, path: str) -> dict:
        path, _, query = path.partition("?")
        return json.loads(self.dashboard.pages()[path](dict(parse_qsl(query))).body)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.stop()


def test_the_page_asks_nothing_of_anybody_else(served: Served) -> None:
    headers, body = served.get("/")
    text = body.decode()

    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    linked = [part.split('"')[0] for part in text.split('src="')[1:] + text.split('href="web')[1:]]
    assert linked
    for path in ("theme.js", "dashboard.js", "chart.js", "format.js", "dashboard.css"):
        headers, body = served.get(f"/web/{path}")
        assert b"http" not in body.replace(b"http://www.w3.org/2000/svg", b"")
        assert body


def test_large_answers_are_compressed_for_those_who_can_read_it(served: Served) -> None:
    import gzip

    headers, body = served.get("/web/dashboard.js", **{"Accept-Encoding": "gzip"})
    plain_headers, plain = served.get("/web/dashboard.js")

    assert headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(body) == plain
    assert "Content-Encoding" not in plain_headers


def test_before_the_first_sample_there_are_no_stats(served: Served) -> None:
    assert served.json("/api/now") == {"stats": None, "problem": "nothing was sampled yet", "every_s": 2.0}
    assert served.json("/api/history")["at_s"] == []


def test_now_is_the_last_sample_with_its_age(served: Served) -> None:
    served.dashboard.sample()
    served.wall_s += 1.5

    now = served.json("/api/now")

    stats = served.node.stats()
    assert (now["at_s"], now["age_s"], now["problem"]) == (END_S, 1.5, "")
    assert now["stats"]["usage"]["requested_tokens"] == stats.usage.requested_tokens
    assert now["stats"]["boot_id"] == stats.boot_id.hex()
    assert now["figures"] == figures(stats)
    assert [alarm["level"] for alarm in now["alarms"]] == ["critical", "warning"]
    prefix = now["hot_prefixes"][0]
    assert (len(prefix["key"]), prefix["hits"]) == (32, 91_204)


def test_when_the_loop_does_not_answer_the_last_figures_stay_and_it_is_said(served: Served) -> None:
    served.dashboard.sample()
    served.node.away = True
    served.wall_s += 30.0

    served.dashboard.sample()

    now = served.json("/api/now")
    assert (now["problem"], now["age_s"]) == ("the sidecar is too busy", 30.0)
    assert now["stats"] is not None
    served.node.away = False
    served.dashboard.sample()
    assert served.json("/api/now")["problem"] == ""


def test_history_has_every_series_as_long_as_its_times(served: Served) -> None:
    for _ in range(5):
        served.dashboard.sample()
        served.wall_s += 2.0
        served.node.now_s += 2.0

    table = served.json("/api/history?span=3600")

    assert table["span_s"] == 3600
    assert len(table["at_s"]) == 5
    assert {len(values) for values in table["series"].values()} == {5}
    requested = np.diff(table["series"]["tokens.requested"])
    assert (requested > 0).all()
    assert served.json("/api/history?span=12345")["span_s"] == 600
    assert served.json("/api/history?span=%00&span[]=x")["span_s"] == 600


def test_plans_are_told_in_words_and_asked_once_a_second(served: Served) -> None:
    plans = served.json("/api/plans")["plans"]
    served.node.now_s += 100.0

    assert served.json("/api/plans")["plans"] == plans
    assert len(plans) == 40
    assert all(plan["words"] and plan["outcome"] for plan in plans)
    served.wall_s += 2.0
    assert served.json("/api/plans")["plans"][0]["words"]


def test_there_is_nothing_else(served: Served) -> None:
    for path in ("/web/", "/web/../http_server.py", "/api", "/api/secrets", "/web/index.html"):
        with pytest.raises(urllib.error.HTTPError) as error:
            served.get(path)
        with error.value:
            assert error.value.code == 404


def test_the_api_is_served_too(served: Served) -> None:
    served.dashboard.sample()

    for path in ("/api/now", "/api/history?span=600", "/api/plans"):
        headers, body = served.get(path)
        assert headers["Content-Type"] == "application/json"
        assert headers["Cache-Control"] == "no-store"
        assert json.loads(body)


def test_a_page_opened_now_shows_the_last_hours() -> None:
    dashboard = filled_dashboard(BusyNode(), hours=6.0, end_s=END_S)

    table = json.loads(dashboard.pages()["/api/history"]({"span": "21600"}).body)

    assert table["at_s"] == []  # seen from today it is long ago
    answer = dashboard._history.table(END_S - 6 * HOUR)
    assert answer.at_s[-1] - answer.at_s[0] > 5.9 * HOUR
