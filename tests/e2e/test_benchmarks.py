"""Each benchmark runs with tiny sizes and answers in one shape. Its timings are not judged here."""

import json
import math
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import all as all_benchmarks  # noqa: E402 (benchmarks is not installed)
from benchmarks import (  # noqa: E402
    blocks,
    disaggregation,
    hashing,
    index_memory,
    kv_quality,
    layerwise,
    link_tcp,
    metrics_cost,
    no_regret,
    nvme,
    nvme_restart,
    overhead,
    rpc,
)
from benchmarks.harness import (  # noqa: E402
    Report,
    Samples,
    as_markdown,
    at_least,
    at_most,
    interleave,
    paired_ratio,
)

sys.path.append(str(ROOT / "tests" / "engine"))
TINY = {
    "hashing": (hashing.main, ["--tokens", "64", "--rounds", "3"], 2),
    "rpc": (rpc.main, ["--keys", "8", "--rounds", "3"], 7),
    "blocks": (blocks.main, ["--pool-mib", "64", "--batch", "4", "--rounds", "2"], 3),
    "metrics_cost": (metrics_cost.main, ["--num-blocks", "5000", "--rounds", "1", "--requests", "1"], 6),
    "nvme": (nvme.main, ["--pool-mib", "16", "--run-mib", "4", "--rounds", "2"], 22),
    "nvme_restart": (nvme_restart.main, ["--large", "32", "--small", "5000", "--rounds", "2"], 6),
    "link_tcp": (link_tcp.main, ["--pool-mib", "32", "--batch", "4", "--rounds", "2", "--singles", "3"], 6),
}


def check_report(report: dict) -> None:
    assert report["question"]
    assert report["command"].startswith("python -m benchmarks.")
    assert len({tuple(row) for row in report["rows"]}) == 1, "all rows have the same columns"
    assert report["goals"]
    for goal in report["goals"]:
        assert isinstance(goal["met"], bool)
        assert "goal: at" in goal["text"]
    assert {"cpu", "cores", "kernel", "python", "load"} <= report["machine"].keys()


@pytest.mark.e2e
@pytest.mark.parametrize("name", TINY)
def test_a_benchmark_prints_one_json_object(name: str) -> None:
    main, arguments, num_rows = TINY[name]

    result = CliRunner().invoke(main, [*arguments, "--json"], catch_exceptions=False)

    report = json.loads(result.stdout)
    check_report(report)
    assert len(report["rows"]) == num_rows
    for row in report["rows"]:
        assert row["n"] > 0
        assert 0 < row["p50_ms"] <= row["p99_ms"]


@pytest.mark.e2e
def test_the_overhead_benchmark_prints_one_json_object(tmp_path: Path) -> None:
    from tiny_llama import random_tensors, write_gguf

    model = write_gguf(tmp_path / "tiny.gguf", random_tensors())
    arguments = ["--model", str(model), "--prompt-tokens", "64", "--pairs", "2", "--json"]

    result = CliRunner().invoke(overhead.main, arguments, catch_exceptions=False)

    report = json.loads(result.stdout)
    check_report(report)
    assert [row["store"] for row in report["rows"]] == ["off", "on"]
    assert [row["n"] for row in report["rows"]] == [2, 2]


@pytest.mark.e2e
def test_the_disaggregation_benchmark_hands_every_prompt_over(tmp_path: Path) -> None:
    from tiny_llama import random_tensors, write_gguf

    model = write_gguf(tmp_path / "tiny.gguf", random_tensors())
    sizes = ["--prompt-tokens", "40", "--max-tokens", "4", "--requests", "3", "--rounds", "1"]

    result = CliRunner().invoke(disaggregation.main, ["--model", str(model), *sizes, "--json"], catch_exceptions=False)

    report = json.loads(result.stdout)
    check_report(report)
    assert [row["n"] for row in report["rows"]] == [6, 6]
    assert all(0 < row["itl_p50_ms"] <= row["itl_max_ms"] for row in report["rows"])
    (prefilled,) = (goal for goal in report["goals"] if "prefilled" in goal["text"])
    assert prefilled["met"]


@pytest.mark.e2e
def test_the_layerwise_benchmark_fetches_the_warm_part_each_time(tmp_path: Path) -> None:
    from tiny_llama import random_tensors, write_gguf

    model = write_gguf(tmp_path / "tiny.gguf", random_tensors())
    sizes = ["--warm-tokens", "96", "--new-tokens", "5", "--rounds", "2", "--arena-mib", "64"]

    result = CliRunner().invoke(layerwise.main, ["--model", str(model), *sizes, "--json"], catch_exceptions=False)

    report = json.loads(result.stdout)
    check_report(report)
    assert [(row["load"], row["n"]) for row in report["rows"]] == [("whole", 2), ("layer by layer", 2)]


@pytest.mark.e2e
def test_the_no_regret_benchmark_asks_every_policy_at_every_bandwidth(tmp_path: Path) -> None:
    from tiny_llama import random_tensors, write_gguf

    model, plot = write_gguf(tmp_path / "tiny.gguf", random_tensors()), tmp_path / "plot.html"
    sizes = {"contexts": (96,), "learn_tokens": 48, "change_context": 80, "num_pages": 64, "chunk_tokens": 32}

    report = no_regret.run(
        model=model,
        folder=tmp_path,
        paces=(1e6, math.inf),
        changes=((10e6, 1e6),),
        rounds=1,
        arena_mib=64,
        plot=plot,
        **sizes,
    )

    assert [(row["context_tokens"], row["bandwidth"], row["n"]) for row in report.rows] == [
        (96, "1 MB/s", 1),
        (96, "unlimited", 1),
        (80, "10 MB/s, then 1 MB/s", 1),
    ]
    assert all(row[f"{arm}_ms"] > 0 for row in report.rows for arm in no_regret.ARMS)
    assert [goal.text.partition(" (")[0] for goal in report.goals][:3] == [
        "planned / better of always and never, 96 tokens at 1 MB/s",
        "planned / better of always and never, 96 tokens at unlimited",
        "planned / better of always and never, 80 tokens at 10 MB/s, then 1 MB/s",
    ]
    assert "planned, 96 tokens" in plot.read_text()


def test_a_point_is_judged_by_medians_and_the_middle_where_both_are_nearest() -> None:
    def runs(always: float, never: float, planned: float) -> no_regret.Runs:
        seconds = {"always": always, "never": never, "planned": planned}
        by_arm = {
            arm: [no_regret.Run(each_s * factor, 0, hopeless=False) for factor in (0.1, 1.0, 9.0)]
            for arm, each_s in seconds.items()
        }
        return no_regret.Runs(by_arm)

    found = {
        no_regret.Point(1000, 3e6): runs(7.0, 2.0, 2.2),
        no_regret.Point(1000, 10e6): runs(2.5, 2.0, 1.2),
        no_regret.Point(1000, 30e6): runs(0.8, 2.0, 1.0),
        no_regret.Point(2000, 30e6, 3e6): runs(9.0, 4.0, 5.0),
    }

    goals = no_regret._goals(found)

    assert [(goal.found, goal.met) for goal in goals] == [
        (1.1, True),
        (0.6, True),
        (1.25, False),
        (1.25, False),
        (0.6, True),
    ]
    assert "both are nearest, 1000 tokens at 10 MB/s" in goals[-1].text


def test_the_table_is_for_people() -> None:
    result = CliRunner().invoke(hashing.main, ["--tokens", "64", "--rounds", "3"], catch_exceptions=False)

    assert "xxh3_128" in result.stdout
    assert "goal: at most" in result.stdout


def test_every_benchmark_is_in_the_list() -> None:
    shared = {"__init__", "all", "harness", "sidecar", "paced_file", "paced_sidecar", "echo", "reference_model"}
    shared |= {"fake_engine", "link_owner", "open_gate", "rdma_owner"}
    shared |= {"vllm_side_by_side", "sglang_pages"}  # run in those engines' environments
    shared |= {"gpu"}  # make gpu-bench
    files = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - shared

    assert files == set(all_benchmarks.NAMES)


def test_all_writes_a_section_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "RESULTS.md"
    monkeypatch.setattr(hashing, "run", lambda: REPORT)

    result = CliRunner().invoke(
        all_benchmarks.main, ["--only", "hashing", "--markdown", str(written)], catch_exceptions=False
    )

    assert result.exit_code == 0
    assert "## How long?" in written.read_text()
    assert "| kernel |" in written.read_text()


REPORT = Report(
    question="How long?",
    command="python -m benchmarks.x",
    rows=[{"case": "a", "p50_ms": 1.5, "n": 3}, {"case": "b", "p50_ms": 12.0, "n": 3}],
    goals=[at_most("a", 1.5, 2.0), at_least("b", 12.0, 13.0)],
    remarks=["noted"],
)


def test_markdown_has_rows_goals_and_the_command() -> None:
    text = as_markdown(REPORT)

    assert text.startswith("## How long?\n\n`python -m benchmarks.x`\n")
    assert "| case | p50_ms | n |\n| --- | --- | --- |\n| a | 1.5 | 3 |\n| b | 12 | 3 |" in text
    assert "- a (goal: at most 2): 1.5, met" in text
    assert "- b (goal: at least 13): 12, NOT met" in text
    assert "- noted" in text


@pytest.mark.parametrize(("found", "met"), [(1.9, True), (2.0, True), (2.1, False)])
def test_a_goal_is_met_at_its_limit(found: float, met: bool) -> None:
    assert at_most("x", found, 2.0).met is met
    assert at_least("x", -found, -2.0).met is met


def test_cases_take_turns_in_alternating_order() -> None:
    order: list[str] = []

    samples = interleave({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3, warm_up=1)

    assert "".join(order) == "ba" + "ab" + "ba" + "ab"
    assert [len(taken) for taken in samples.values()] == [3, 3]


def test_samples_quote_median_and_tail() -> None:
    samples = Samples(tuple(float(i) for i in range(1, 201)))

    assert samples.median_s == 100.5
    assert samples.p99_s == 199.0
    assert Samples((3.0, 1.0)).p99_s == 3.0


def test_a_paired_ratio_ignores_a_slow_minute() -> None:
    assert paired_ratio(Samples((1.0, 10.0, 1.2)), Samples((1.0, 10.0, 1.0))) == 1.0


def test_index_memory_is_measured_in_a_process_of_its_own() -> None:
    report = index_memory.run(num_blocks=2000)

    assert [row["blocks"] for row in report.rows] == [2000] * len(report.rows)


@pytest.mark.e2e
def test_the_quality_benchmark_scores_every_token_behind_what_was_loaded(tmp_path: Path) -> None:
    from tiny_llama import random_tensors, write_gguf

    model = write_gguf(tmp_path / "tiny.gguf", random_tensors())
    sizes = ["--num-tokens", "128", "--chunk-tokens", "32", "--num-threads", "1", "--arena-mib", "64"]

    result = CliRunner().invoke(kv_quality.main, ["--model", str(model), *sizes, "--json"], catch_exceptions=False)

    report = json.loads(result.stdout)
    check_report(report)
    rows = {row["stored"]: row for row in report["rows"]}
    assert list(rows) == ["bfloat16", "fp8_e4m3", "int8"]
    assert {(row["tokens_scored"], row["tokens_fetched"]) for row in rows.values()} == {(96, 32 + 64 + 96)}
    assert len({row["perplexity"] for row in rows.values()}) == 3, "each has read something else"
