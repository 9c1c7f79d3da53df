"""`kvstore replay` and `kvstore size` on a trace that is in the repository."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvstore.cli.main import cli
from kvstore.core.errors import ConfigError
from kvstore.replay.trace import read_trace

TRACE = Path(__file__).parent.parent / "data" / "conversation_trace_1000.jsonl.gz"


def run(*args: str) -> str:
    found = CliRunner().invoke(cli, [*args], catch_exceptions=False, env={"COLUMNS": "80"})
    assert found.exit_code == 0
    return found.output


def run_json(*args: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*args, "--json"))
    return found


def run_wrong(*args: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(cli, [*args], catch_exceptions=False)
    return caught.value


def write_trace(path: Path, *prompts: list[int], block_tokens: int = 512) -> Path:
    lines = [
        {"timestamp": 1000 * number, "input_length": len(ids) * block_tokens, "output_length": 1, "hash_ids": ids}
        for number, ids in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_one_run_prints_what_scripts_rely_on(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [1, 2, 3], [1, 2, 4], [1, 2, 3, 5])

    found = run_json("replay", str(trace), "--policy", "lru", "--capacity", "10")

    wanted = {"requests": 3, "blocks": 10, "hits": 5, "block_hit": 0.5, "token_hit": 0.5}
    assert {name: found[name] for name in wanted} == wanted
    assert found["hit_tokens"] == 5 * 512
    assert found["saved_gpu_s"] > 0
    assert 0 < found["ttft_p50_s"] <= found["ttft_p99_s"]


def test_a_block_is_its_id_behind_all_before_it(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [1, 2, 3], [2, 3], [1, 2, 3])

    found = run_json("replay", str(trace), "--policy", "lru", "--capacity", "10")

    assert found["hits"] == 3


def test_policies_and_capacities_are_compared_in_a_table_of_eighty_columns() -> None:
    args = ("replay", str(TRACE), "--compare", "lru,adaptive", "--sweep", "300,1000", "--limit", "300")

    text = run(*args)
    runs = run_json(*args)["runs"]

    assert max(map(len, text.splitlines())) <= 80
    assert [(row["policy"], row["capacity"]) for row in runs] == [
        ("lru", 300), ("lru", 1000), ("adaptive", 300), ("adaptive", 1000)
    ]  # fmt: skip
    assert runs[0]["block_hit"] <= runs[1]["block_hit"]
    rows = list(csv.DictReader(io.StringIO(run(*args, "--csv"))))
    assert [float(row["block_hit"]) for row in rows] == [row["block_hit"] for row in runs]


@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
def test_a_drive_below_adds_hits_and_counts_writes(write_policy: str) -> None:
    args = ("replay", str(TRACE), "--policy", "lru", "--capacity", "400", "--limit", "200")

    alone = run_json(*args)
    both = run_json(*args, "--nvme", "20000", "--write-policy", write_policy)

    assert both["nvme_hits"] > 0 or write_policy == "write_through_selective"
    assert both["hits"] >= alone["hits"]
    assert both["hits"] == both["ram_hits"] + both["nvme_hits"]
    assert both["hit_tokens"] == both["ram_hit_tokens"] + both["nvme_hit_tokens"]
    for tier in ("ram", "nvme"):
        assert 511 * both[f"{tier}_hits"] < both[f"{tier}_hit_tokens"] + 512 * 200, "a prompt's last block may be short"
        assert both[f"{tier}_hit_tokens"] <= 512 * both[f"{tier}_hits"]
    assert 0 < both["nvme_written_blocks"] <= both["blocks"]
    if write_policy == "write_through":
        assert both["hits"] == run_json(*args[:-4], "--capacity", "20000", "--limit", "200")["hits"]


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    for command, args in (("replay", ("--sweep", "300,1000")), ("size", ())):
        page = tmp_path / f"{command}.html"
        run(command, str(TRACE), *args, "--limit", "200", "--plot", str(page))
        assert "<svg" in page.read_text()


def test_size_says_where_the_curve_stops_rising_and_what_pays() -> None:
    exact = run_json("size", str(TRACE), "--exact", "--capacity", "1000,3000,100000")
    lru = run_json("replay", str(TRACE), "--policy", "lru", "--sweep", "1000,3000,100000")["runs"]

    assert [row["block_hit"] for row in exact["sizes"]] == pytest.approx([row["block_hit"] for row in lru])
    assert exact["best_block_hit"] == pytest.approx(lru[-1]["block_hit"])
    assert exact["sizes"][-1]["ram_usd_per_h"] > exact["sizes"][-1]["nvme_usd_per_h"]
    assert {row["best"] for row in exact["sizes"]} <= {"RAM", "NVMe", "none"}
    assert max(map(len, run("size", str(TRACE)).splitlines())) <= 80


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (("replay", str(TRACE)), "capacity"),
        (("replay", str(TRACE), "--capacity", "10", "--sweep", "10,20"), "capacity"),
        (("replay", str(TRACE), "--capacity", "10", "--policy", "lfu"), "policy"),
        (("replay", str(TRACE), "--capacity", "10", "--policy", "lru", "--compare", "arc"), "policy"),
        (("replay", str(TRACE), "--capacity", "10", "--compare", "lru,mru"), "compare"),
        (("replay", str(TRACE), "--sweep", "10,many"), "sweep"),
        (("replay", str(TRACE), "--capacity", "10", "--plot", "x.png"), "plot"),
        (("replay", "absent.jsonl", "--capacity", "10"), "trace"),
        (("replay", str(TRACE), "--capacity", "4GiB"), "capacity"),
        (("replay", str(TRACE), "--capacity", "10", "--nvme", "many"), "nvme"),
        (("replay", str(TRACE), "--capacity", "9" * 30), "capacity"),
        (("replay", str(TRACE), "--sweep", "10," + "9" * 12), "sweep"),
        (("replay", str(TRACE), "--capacity", "10", "--nvme", "9" * 12), "nvme"),
        (("size", str(TRACE), "--capacity", "0"), "capacity"),
        (("size", str(TRACE), "--live"), "trace"),
        (("size",), "trace"),
    ],
)
def test_a_wrong_option_is_named(args: tuple[str, ...], field: str) -> None:
    assert run_wrong(*args).fields["field"] == field


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("not json", "trace"),
        ("[1]", "line"),
        ('{"timestamp": 0, "input_length": 512}', "hash_ids"),
        ('{"timestamp": -1, "input_length": 512, "hash_ids": [1]}', "timestamp"),
        ('{"timestamp": 0, "input_length": 0, "hash_ids": [1]}', "input_length"),
        ('{"timestamp": 0, "input_length": 512, "hash_ids": [1, 2]}', "hash_ids"),
        ('{"timestamp": 0, "input_length": 512, "hash_ids": [true]}', "hash_ids"),
        ('{"timestamp": 0, "input_length": 512, "hash_ids": [1], "tenant": 3}', "tenant"),
        ("", "trace"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, field: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(line + "\n")

    with pytest.raises(ConfigError) as caught:
        read_trace(path)

    assert caught.value.fields["field"] == field


def test_a_prompt_that_does_not_fill_its_last_block_can_be_replayed_without_it(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n')

    assert read_trace(path).num_references == 2
    assert read_trace(path, full_blocks=True).num_references == 1
