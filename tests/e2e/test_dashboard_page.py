"""The dashboard in a real browser, over a real sidecar with drives that three engines use. Screenshots go to tests/artifacts."""

import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import told_figures
from browser import Browser, find_chromium, running_browser
from busy_node import BusyNode, filled_dashboard
from cluster_nodes import free_ports
from engine_traffic import Traffic
from sidecar_process import SidecarProcess, running_sidecar, tool, wait_until

from kvstore.http_server import HttpServer
from kvstore.inspection import HotPrefix
from kvstore.plan_log import PlanRecord
from kvstore.proto import kvstore_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]

ARTIFACTS = Path(__file__).parent.parent / "artifacts"
LOAD_S = float(os.environ.get("LOAD_S", "0"))
WRITTEN_S = 30.0
SCREENS = {"desktop": (1440, 900), "phone": (390, 844)}
_LOADED = "document.querySelector('.tile .value') !== null && document.querySelector('.plan') !== null"


class Shown(NamedTuple):
    sidecar: SidecarProcess
    browser: Browser
    url: str

    def figure(self, metric: str) -> int:
        return int(self.browser.evaluate(f"document.querySelector('[data-metric=\"{metric}\"]').dataset.value"))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    """A sidecar that has had some seconds of load, and a browser."""
    find_chromium()
    folder = tmp_path_factory.mktemp("page")
    (port,) = free_ports(1)
    flags = ("--metrics-port", str(port), "--nvme", str(folder / "drive"), "--nvme-bytes", "64MiB", "--no-grpc")
    with running_sidecar(folder, *flags, arena="24MiB") as sidecar, running_browser(folder) as browser:
        yield Shown(sidecar, browser, f"http://127.0.0.1:{port}")


def show(shown: Shown, screen: str = "desktop", theme: str = "dark") -> None:
    width, height = SCREENS[screen]
    shown.browser.open(f"{shown.url}/", width=width, height=height, theme=theme, mobile=screen == "phone")
    shown.browser.wait_for(_LOADED)


def num_to_write(stats: pb.StatsReply) -> int:
    return sum(
        each.length for each in stats.queues if each.queue in {"write_backlog", "writes_behind_parent", "drive_writes"}
    ) + int(stats.tiers[1].writing_bytes)


@pytest.mark.timeout(90 + LOAD_S)
def test_figures_move_while_engines_work_and_are_the_same_everywhere_at_rest(shown: Shown) -> None:
    """Without a reload; to the token, and as the engines counted them themselves. `make load`: after half an hour."""
    shown.browser.open(f"{shown.url}/", width=1440, height=900, theme="dark")
    with Traffic(str(shown.sidecar.socket), pause_s=0.05 if LOAD_S else 0.01) as traffic:
        shown.browser.wait_for(_LOADED)
        shown.browser.wait_for("document.querySelectorAll('#chart-hits path').length > 0")
        first = shown.figure("kvstore_requested_tokens")
        shown.browser.wait_for(
            f"Number(document.querySelector('[data-metric=kvstore_requested_tokens]').dataset.value) > {first}"
        )
        until_s = time.monotonic() + LOAD_S
        while time.monotonic() < until_s:
            time.sleep(1.0)
            shown.figure("kvstore_requests")  # the browser goes on telling what it does, and somebody has to read it
    asked = dict(traffic.asked)
    with tool(shown.sidecar) as client:
        wait_until(lambda: client.stats().usage.num_requests == asked["requests"], "all settled")
        wait_until(lambda: num_to_write(client.stats()) == 0, "what waits for the drive is written", WRITTEN_S)
        stats = client.stats()
    for metric, value in (("requests", asked["requests"]), ("demoted_blocks", stats.counters["demoted_blocks_total"])):
        shown.browser.wait_for(f"document.querySelector('[data-metric=kvstore_{metric}]').dataset.value == {value}")

    exported = told_figures.of_metrics(shown.url)
    exported["missed_tokens"] = sum(value for name, value in exported.items() if name.startswith("missed_tokens|"))
    page = told_figures.of_page(shown.browser)
    told = {
        "client": asked,
        "/metrics": exported,
        "/api/now": told_figures.of_api(shown.url),
        "page": page,
        "top": told_figures.of_top(shown.sidecar),
        "stat": told_figures.of_stat(shown.sidecar),
    }
    print(told_figures.table(told))

    assert len(page) >= 12
    assert {name: exported[name] for name in page} == page
    assert {"hit_tokens|pinned", "hit_tokens|hbm", "tenant_requested_tokens|search"} <= asked.keys()
    for place, figures in told.items():
        assert len(figures.keys() & asked.keys()) >= 6, place
        assert {name: figures[name] for name in figures.keys() & asked.keys()} == {
            name: asked[name] for name in figures.keys() & asked.keys()
        }, place
    assert "%" in shown.browser.evaluate("document.querySelector('.tile .value').textContent")


def test_the_capacity_curve_says_what_stats_say(shown: Shown) -> None:
    """Behind the load of the test before."""
    show(shown)
    browser = shown.browser
    browser.wait_for("document.querySelectorAll('#chart-capacity path').length == 2")
    with tool(shown.sidecar) as client:
        curve = client.stats().capacity_curve
    now = {each.capacity: each.hit_rate for each in curve.capacities}["1x"]

    assert 0 < now < 1
    shown_words = browser.evaluate("document.querySelector('#chart-capacity figcaption p').textContent")
    assert shown_words.replace("\u202f", " ") == curve.words
    legend = browser.evaluate("document.querySelector('#chart-capacity .legend b').textContent")
    assert abs(float(legend.rstrip("\u2009%")) / 100 - now) < 0.006
    label = browser.evaluate("document.querySelector('#chart-capacity svg').getAttribute('aria-label')")
    assert label.startswith("Hit rate by size of RAM at 24")
    marks = browser.evaluate("document.querySelectorAll('#chart-capacity .mark-line').length")
    assert marks == 2  # RAM and drives


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("screen", SCREENS)
def test_it_fits_any_screen_and_can_be_read_in_both_themes(shown: Shown, screen: str, theme: str) -> None:
    show(shown, screen, theme)

    shown.browser.screenshot(ARTIFACTS / f"dashboard-{screen}-{theme}.png", whole=True)

    width = SCREENS[screen][0]
    assert shown.browser.evaluate("document.documentElement.scrollWidth") <= width
    assert shown.browser.evaluate(_PALE) == []


_PALE = """(() => {
  const parse = text => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (; element; element = element.parentElement) {
      const color = parse(getComputedStyle(element).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const pale = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.getClientRects().length || element.closest("noscript")) continue;
    const style = getComputedStyle(element), text = parse(element.namespaceURI.endsWith("svg") ? style.fill : style.color);
    const [a, b] = [light(text), light(behind(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05), large = parseFloat(style.fontSize) >= 24;
    if (ratio < (large ? 3 : 4.5)) pale.push(`${element.tagName} ${element.textContent.slice(0, 20)} ${ratio.toFixed(2)}`);
  }
  return pale;
})()"""
"""Texts whose contrast is below 4.5 to 1 (WCAG 2.2, 1.4.3; 3 to 1 where they are large)."""


def test_everything_has_a_name_and_the_keyboard_reaches_it(shown: Shown) -> None:
    show(shown)
    browser = shown.browser

    assert browser.evaluate("document.querySelectorAll('main, header, footer').length") == 3
    assert browser.evaluate("document.documentElement.lang") == "en"
    nameless = (
        "[...document.querySelectorAll('section, [role=img], [role=region], button')]"
        ".filter(each => !(each.getAttribute('aria-label') || each.getAttribute('aria-labelledby') || "
        "each.getAttribute('title') || each.textContent.trim())).map(each => each.outerHTML.slice(0, 80))"
    )
    assert browser.evaluate(nameless) == []

    seen = []
    for _ in range(40):
        browser.key("Tab", 9)
        seen.append(browser.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"theme", "svg", "SUMMARY", "BUTTON"} <= set(seen)

    browser.evaluate("document.querySelector('#chart-hits svg').focus()")
    browser.key("ArrowLeft", 37)
    assert re.fullmatch(r"\d\d:\d\d:\d\d", browser.evaluate("document.querySelector('#chart-hits .when').textContent"))
    browser.evaluate("document.querySelector('#chart-hits summary').click()")
    browser.wait_for("document.querySelectorAll('#chart-hits tbody tr').length > 1")


def test_a_chosen_theme_and_span_stay(shown: Shown) -> None:
    show(shown, theme="dark")
    browser = shown.browser
    background = "getComputedStyle(document.documentElement).backgroundColor"
    dark = browser.evaluate(background)

    browser.evaluate("document.querySelector('#theme').click()")
    browser.evaluate("document.querySelector('#spans button[value=\"3600\"]').click()")

    assert browser.evaluate(background) != dark
    assert browser.evaluate("document.querySelector('#spans [aria-pressed=true]').textContent") == "1 h"
    show(shown, theme="dark")
    assert browser.evaluate(background) != dark
    browser.evaluate("localStorage.clear()")


class HostileNode(BusyNode):
    """Names that would do harm if they were taken for HTML."""

    NAME = "<img src=x onerror=alert(1)>"

    def stats(self) -> pb.StatsReply:
        stats = super().stats()
        for each in stats.tenants:
            each.tenant = self.NAME
        for peer in stats.peers:
            peer.node_id = self.NAME
        stats.problems[0].reason = self.NAME
        return stats

    def hot_prefixes(self, count: int) -> list[HotPrefix]:
        return [each._replace(label=self.NAME) for each in super().hot_prefixes(count)]

    def plans(self, count: int) -> tuple[list[PlanRecord], float]:
        records, now_s = super().plans(count)
        return [replace(each, wish=each.wish._replace(label=self.NAME)) for each in records], now_s


def test_names_are_text_and_a_loop_that_is_stuck_is_the_first_alarm(shown: Shown) -> None:
    node, browser = HostileNode(), shown.browser
    dashboard = filled_dashboard(node, hours=0.3)
    server = HttpServer("127.0.0.1", 0, node.stats, dashboard)
    server.start()
    try:
        width, height = SCREENS["desktop"]
        browser.open(f"http://127.0.0.1:{server.port}/", width=width, height=height, theme="light")
        browser.wait_for(_LOADED)
        assert browser.evaluate("document.querySelectorAll('img').length") == 0
        assert browser.evaluate("document.querySelector('#tenants tbody th').textContent") == node.NAME
        assert browser.evaluate("document.querySelector('#prefixes tbody td').textContent") == node.NAME
        assert node.NAME in browser.evaluate("document.querySelector('.plan').textContent")
        assert browser.evaluate("document.querySelectorAll('.alarm').length") == 2
        browser.screenshot(ARTIFACTS / "dashboard-alarms.png", whole=True)

        node.away = True
        dashboard.sample()

        browser.wait_for("document.querySelector('.alarm strong').textContent == 'The brain loop does not answer'")
        assert browser.evaluate("document.querySelector('#live').textContent").startswith("Stale")
    finally:
        server.stop()
        browser.open("about:blank", width=width, height=height, theme="light")
        browser.requests[:] = [url for url in browser.requests if f":{server.port}/" not in url]


def test_a_sidecar_that_is_gone_is_said_and_no_page_asked_anybody_else(shown: Shown) -> None:
    """The last one of this file: it ends the sidecar."""
    show(shown)
    browser = shown.browser
    assert browser.problems == []
    assert [url for url in browser.requests if not url.startswith((f"{shown.url}/", "data:", "about:"))] == []
    assert len(browser.requests) > 10

    shown.sidecar.kill()

    browser.wait_for("document.querySelector('#live').textContent.startsWith('No answer')")
    assert browser.evaluate("document.querySelector('main').classList.contains('stale')")
    assert browser.evaluate("document.querySelector('.tile .value').textContent") != ""
