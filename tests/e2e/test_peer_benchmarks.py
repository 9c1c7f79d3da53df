"""The benchmarks of peers run with tiny sizes and answer in the shape of the others. Their timings are not judged here."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from kvstore.transport.nixl import is_installed

pytestmark = pytest.mark.e2e


def report_of(name: str, *arguments: str) -> dict:
    import importlib

    main = importlib.import_module(f"benchmarks.{name}").main
    result = CliRunner().invoke(main, [*arguments, "--json"], catch_exceptions=False)
    report = json.loads(result.stdout)
    assert len({tuple(row) for row in report["rows"]}) == 1, "all rows have the same columns"
    assert all("goal: at" in goal["text"] for goal in report["goals"])
    return report


@pytest.mark.skipif(not is_installed(), reason="NIXL is not installed: pip install --no-deps nixl-cu12")
def test_one_sided_reads() -> None:
    report = report_of("link_rdma", "--pool-mib", "16", "--batch", "2", "--rounds", "2", "--singles", "2")

    assert [row["case"] for row in report["rows"]] == ["raw one-sided read", "link, not verified", "link, verified"]
    assert all(row["gb_per_s"] > 0 for row in report["rows"])


def test_directory_scale() -> None:
    pytest.importorskip("redis", reason="the `cluster` extra is not installed")

    report = report_of("directory_scale", "--nodes", "2,20", "--blocks", "1000", "--per-s", "5000", "--rounds", "5")

    small, large = report["rows"]
    assert (small["sample_every"], large["sample_every"]) == (1, 4)
    assert (small["entries"], large["entries"]) == (2 * 1000 + 2 * 512, 20 * 250 + 3 * 512)
    assert large["server_out_mb_per_s"] == pytest.approx(20 * large["node_in_kb_per_s"] / 1e3)
