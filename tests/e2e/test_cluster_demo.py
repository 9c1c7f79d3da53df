"""`kvstore demo --cluster` as a user runs it, on the packaged model, with short prompts."""

import json
import shutil
from pathlib import Path

import pytest
from test_demo import RUN_DEADLINE_S, demo, model, private_tmp  # noqa: F401 (fixtures)

from kvstore.demo.cluster_outcome import CASES, DIRECTORY_CASES, PEER
from kvstore.demo.redis_server import why_not

pytestmark = pytest.mark.e2e

PROMPT_TOKENS = 400


@pytest.mark.timeout(RUN_DEADLINE_S + 60)
def test_nodes_share_a_prefill_and_outlive_each_other(model: Path, private_tmp: Path) -> None:  # noqa: F811
    options = ("--prompt-tokens", str(PROMPT_TOKENS), "--max-tokens", "2", "--model", str(model))
    run = demo("--cluster", "--json", *options)

    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout)
    cases = CASES if why_not() else CASES + DIRECTORY_CASES
    assert [row["case"] for row in rows] == [case.name for case in cases]
    for row, case in zip(rows, cases, strict=True):
        assert row["same_output"] is True
        assert row["prefilled_tokens"] + row["local_cached_tokens"] + row["fetched_tokens"] == PROMPT_TOKENS
        assert (row["peer_blocks"] >= PROMPT_TOKENS // 16 - 4) == (case.source == PEER), row
        assert (row["tiers"].get("peer", 0) > 0) or case.source != PEER
    assert "kill -9 of node 1" in run.stderr
    assert ("no Redis" in run.stderr) == bool(why_not())


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="says what happens without it, which is so here")
def test_why_there_is_no_redis_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert why_not() == ""

    monkeypatch.setenv("PATH", str(tmp_path))

    assert why_not() == "redis-server is not installed (Debian's package redis-server)"
