"""The subcommands of `kvstore break-even`, as a user runs them: figures, forms of output, and what is refused and how."""

import csv
import io
import json
import math
import re
from pathlib import Path

import click
import pytest
from break_even_cli import BreakEven
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.cli.break_even_more import COMMANDS
from kvstore.cli.sums.amounts import link
from kvstore.core.errors import KVStoreError
from kvstore.tables.rows import devices

MODEL_8B = ("--model", "Llama-3.1-8B")
EIGHT_B_BY_NUMBERS = (
    *(
        "--params-b",
        8.03,
        "--prefill-params-b",
        6.979,
        "--layers",
        32,
        "--heads",
        32,
        "--kv-heads",
        8,
        "--head-dim",
        128,
    ),
)
PLAN = (*MODEL_8B, "--gpu", "H100", "--prompt", 20_000, "--found", "nvme=8192")
GOOD: dict[str, tuple[object, ...]] = {
    "plan": PLAN,
    "quantisation": (*MODEL_8B, "--memory", "40GiB"),
    "split": (*MODEL_8B, "--gpu", "H100", "--link", "400Gb/s", "--link", "slow=1,5"),
    "speculative": ("--acceptance", 0.8, "--tokens-per-s", 50),
    "cost": ("--usd-per-h", 2, "--decode-tokens-per-s", 100, "--requests", 1000, "--output-tokens", 200),
    "mfu": (*MODEL_8B, "--gpu", "H100", "--tokens-per-s", 150),
    "roofline": (*MODEL_8B, "--gpu", "H100", "--batch", "1,8"),
}


@pytest.fixture
def break_even(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> BreakEven:
    return BreakEven(monkeypatch, capsys)


@pytest.fixture
def latencies(tmp_path: Path) -> Path:
    path = tmp_path / "run.csv"
    path.write_text("ttft_ms,tpot_s,e2e_s,sent_s\n100,0.02,1,0\n700,0.02,2,1\n300,0.9,3,1\n")
    return path


def _good(name: str, latencies: Path) -> tuple[object, ...]:
    return (name, latencies, "--slo", "ttft=500ms,tpot=50ms") if name == "goodput" else (name, *GOOD[name])


NAMES = [command.name or "" for command in COMMANDS]


@pytest.mark.parametrize("name", NAMES)
def test_tables_are_readable_on_80_columns(break_even: BreakEven, latencies: Path, name: str) -> None:
    ran = break_even.run(*_good(name, latencies))

    assert ran.code == 0, ran.err
    assert ran.out.strip()
    assert max(len(line) for line in ran.out.splitlines()) <= 80
    assert "…" not in ran.out, "cut off"


@pytest.mark.parametrize("name", NAMES)
def test_json_is_one_object_of_plain_values(break_even: BreakEven, latencies: Path, name: str) -> None:
    found = break_even.json(*_good(name, latencies))

    assert found
    assert "work" not in found


@pytest.mark.parametrize("name", NAMES)
def test_csv_has_a_head_and_rows_that_stand_alone(break_even: BreakEven, latencies: Path, name: str) -> None:
    ran = break_even.run(*_good(name, latencies), "--csv")

    rows = list(csv.DictReader(io.StringIO(ran.out)))
    assert rows
    assert all(None not in row and None not in row.values() for row in rows)
    figures = {key for key, value in break_even.json(*_good(name, latencies)).items() if not isinstance(value, list)}
    assert figures <= set(rows[0])


@pytest.mark.parametrize("name", NAMES)
def test_the_working_has_every_number_with_formula_and_values(
    break_even: BreakEven, latencies: Path, name: str
) -> None:
    ran = break_even.run(*_good(name, latencies), "--show-work")
    found = break_even.json(*_good(name, latencies), "--show-work")

    assert max(len(line) for line in ran.out.splitlines()) <= 82
    assert found["work"]
    for work in found["work"]:
        assert work["formula"], work
        assert work["result"], work
        assert f"{work['name']} = " in ran.out, work
        substituted = [work["substituted"]] if work["substituted"] else []
        assert all(re.search(r"\d", values) for values in substituted), work
    with_values = [work for work in found["work"] if work["substituted"]]
    assert len(with_values) >= len(found["work"]) - 2, "only what is given has no values put in"


def _recalculated(values: str) -> float | None:
    """What is put into a formula, worked out; None for words."""
    names = {"max": max, "floor": math.floor, "ceil": math.ceil}
    plain = values.replace("^", "**")
    if not re.fullmatch(r"[\d\s.+\-*/(),e]+", re.sub("|".join(names), "", plain)):
        return None
    return float(eval(plain, {"__builtins__": {}}, names))


UNITS = {"B/s": 1, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "%": 0.01}


def test_the_arithmetic_of_the_working_is_right(break_even: BreakEven, latencies: Path) -> None:
    """Every line of numbers, calculated again from what it shows: six figures go in, three have to come out."""
    checked = 0
    for name in NAMES:
        for work in break_even.json(*_good(name, latencies), "--show-work")["work"]:
            again = _recalculated(work["substituted"])
            shown = re.match(r"\$?([\d.]+(?:e[+-]?\d+)?) ?(\S*)", work["result"])
            if again is not None and shown is not None:
                assert again == pytest.approx(float(shown[1]) * UNITS.get(shown[2], 1), rel=2e-3, abs=6e-4), work
                checked += 1
    assert checked > 70


# E1 and its like.


def test_quantisation_without_scales(break_even: BreakEven) -> None:
    arguments = ("--kv-bytes-per-token", 131072, "--memory", "40GiB", "--context", 8192, "--scales", "none")

    formats = {row["format"]: row for row in break_even.json("quantisation", *arguments)["formats"]}

    assert [(formats[name]["tokens"], formats[name]["requests"]) for name in ("bf16", "fp8", "int8", "int4")] == [
        (327_680, 40),
        (655_360, 80),
        (655_360, 80),
        (1_310_720, 160),
    ]
    assert formats["fp8"]["more_tokens"] == 327_680


def test_quantisation_with_scales_of_blocks_tokens_and_groups(break_even: BreakEven) -> None:
    per_token = {}
    for scales in ("block", "token", "group"):
        found = break_even.json("quantisation", *MODEL_8B, "--memory", "40GiB", "--scales", scales)
        per_token[scales] = next(row for row in found["formats"] if row["format"] == "int4")["bytes_per_token"]

    assert per_token == {"block": 32_768 + 128, "token": 32_768 + 65_536 / 128 * 4, "group": 32_768 + 65_536 / 64 * 4}


def test_quantisation_beside_the_weights(break_even: BreakEven) -> None:
    """0.9 x 80 GB - 16.06 GB; and on 16 GPUs each of the 8 KV heads is there twice."""
    one = break_even.json("quantisation", *MODEL_8B, "--gpu", "H100")
    many = break_even.json("quantisation", *MODEL_8B, "--gpu", "H100", "--num-gpus", 16)

    assert one["memory_bytes"] == pytest.approx(0.9 * 80e9 - 16.06e9)
    assert many["memory_bytes"] == pytest.approx((0.9 * 16 * 80e9 - 16.06e9) / 2)


def test_quantisation_where_the_weights_do_not_fit(break_even: BreakEven) -> None:
    ran = break_even.run("quantisation", "--model", "Llama-3.1-70B", "--gpu", "H100")

    assert ran.code == 0
    assert "not one block fits" in ran.out


def test_split_of_the_transfer_of_8k_tokens(break_even: BreakEven) -> None:
    arguments = (
        "--gpu",
        "H100",
        "--efficiency",
        "0.637,0.566",
        "--context",
        8192,
        "--link",
        "400Gb/s",
        "--link",
        "slow=1,5",
    )

    found = break_even.json("split", *MODEL_8B, *arguments)

    fast, slow = found["links"]
    assert found["kv_bytes"] == 1_073_741_824
    assert found["prefill_s"] == pytest.approx(0.21292762887867693)
    assert found["hiding_bytes_per_s"] == pytest.approx(1_073_741_824 / 0.21292762887867693)
    assert fast["transfer_s"] == pytest.approx(0.02147483648)
    assert (fast["hides"], fast["keeps_up"], slow["hides"], slow["keeps_up"]) == (True, True, False, False)
    assert fast["exposed_s"] == pytest.approx(0.02147483648 / 32)
    assert slow["exposed_s"] == pytest.approx(0.005 + 1.073741824 - 0.21292762887867693 * 31 / 32)


def test_split_by_names_of_the_tables_and_by_measurement(break_even: BreakEven) -> None:
    by_names = break_even.json("split", *MODEL_8B, "--gpu", "H100", "--link", "400g ndr/roce")
    measured = break_even.json(
        "split", "--kv-bytes-per-token", 131072, "--layers", 32, "--prefill-ms", 217, "--link", "a=41,0.003"
    )

    assert by_names["links"][0]["name"] == "400G NDR/RoCE"
    assert by_names["links"][0]["bytes_per_s"] == 41e9
    assert measured["links"][0]["transfer_s"] == pytest.approx(by_names["links"][0]["transfer_s"])
    assert measured["prefill_s"] == pytest.approx(by_names["prefill_s"], rel=0.01)


def test_every_device_of_the_table_is_found_by_its_name() -> None:
    """A slash in "400G NDR/RoCE" parts no owner from a model."""
    for name in devices():
        assert link(name).name == name


def test_plan_takes_no_more_than_the_prompt_has_and_computes_its_last_token(break_even: BreakEven) -> None:
    """A whole prompt is found: its last block is computed for the logits."""
    found = break_even.json("plan", *MODEL_8B, "--gpu", "H100", "--prompt", 8192, "--found", "host-memory=8192")

    assert found["fetch_tokens"] == 8192 - 16
    assert [row["fetch_tokens"] for row in found["cuts"]] == [0, 8192 - 16]


def test_plan_shows_a_cut_inside_a_tier_too(break_even: BreakEven) -> None:
    """While the engine is busy fetching is free, until it could begin: there the rest of a slow tier is computed."""
    arguments = ("--prompt", 20_000, "--found", "slow=16000", "--tier", "slow=2,0", "--wait-ms", 300)

    found = break_even.json("plan", *MODEL_8B, "--gpu", "H100", *arguments)

    ends = [row["fetch_tokens"] for row in found["cuts"]]
    assert ends == [0, found["fetch_tokens"], 16_000]
    assert 0 < found["fetch_tokens"] < 16_000
    chosen = found["cuts"][1]
    assert chosen["total_s"] == pytest.approx(found["total_s"])
    assert chosen["total_s"] < min(found["cuts"][0]["total_s"], found["cuts"][2]["total_s"])


@pytest.mark.parametrize(("acceptance", "tokens"), [(0.8, 3.3616), (0.5, 1.9375), (1, 5), (0, 1)])
def test_speculative_tokens_of_a_step(break_even: BreakEven, acceptance: float, tokens: float) -> None:
    found = break_even.json("speculative", "--acceptance", acceptance, "--draft-tokens", 4, "--draft-cost", 0.05)

    assert found["tokens_per_step"] == pytest.approx(tokens)
    assert found["speed_up"] == pytest.approx(tokens / 1.2)


def test_speculative_can_say_no(break_even: BreakEven) -> None:
    ran = break_even.run("speculative", "--acceptance", 0.3, "--draft-cost", 0.5)
    found = break_even.json("speculative", "--acceptance", 0.3, "--draft-cost", 0.5)

    assert (found["best_draft_tokens"], found["best_speed_up"]) == (0, 1.0)
    assert found["speed_up"] < 1
    assert "no draft pays" in ran.out


def test_cost_of_tokens_and_of_requests(break_even: BreakEven) -> None:
    arguments = ("--requests", 1000, "--output-tokens", 200, "--prefill-requests-per-min", 100)

    found = break_even.json("cost", "--usd-per-h", 2, "--decode-tokens-per-s", 100, *arguments)

    assert found["decode_usd_per_million_tokens"] == pytest.approx(5.555555555555556)
    assert found["decode_usd"] == pytest.approx(1.1111111111111112)
    assert found["prefill_usd"] == pytest.approx(0.3333333333333333)
    assert found["total_usd"] == pytest.approx(1.4444444444444444)


def test_cost_with_a_store_and_idle_time(break_even: BreakEven) -> None:
    arguments = ("--prefill-tokens-per-s", 40_000, "--requests", 1000, "--input-tokens", 8000)

    plain = break_even.json("cost", "--gpu", "H100", "--num-gpus", 2, *arguments)
    stored = break_even.json("cost", "--gpu", "H100", "--num-gpus", 2, *arguments, "--hit-rate", 0.75, "--in-use", 0.5)

    assert plain["usd_per_h"] == pytest.approx(5.9)
    assert plain["prefill_usd"] == pytest.approx(8e6 * 5.9 / 3600 / 40_000)
    assert stored["prefill_usd"] == pytest.approx(plain["prefill_usd"] / 4 * 2)
    assert stored["saved_usd"] == pytest.approx(plain["prefill_usd"] * 0.75 * 2)


def test_goodput_of_a_file(break_even: BreakEven, latencies: Path) -> None:
    found = break_even.json("goodput", latencies, "--slo", "ttft=500ms,tpot=50ms", "--target", 0.6)

    assert (found["requests"], found["good"]) == (3, 1)
    assert found["good_share"] == pytest.approx(1 / 3)
    assert found["goodput_per_s"] == pytest.approx(1 / 4)
    ttft, tpot = found["objectives"]
    assert (ttft["share"], ttft["wanted_bound_s"]) == (pytest.approx(2 / 3), pytest.approx(0.3))
    assert (tpot["share"], tpot["wanted_bound_s"]) == (pytest.approx(2 / 3), 0.02)


def test_goodput_of_a_comparison(break_even: BreakEven, tmp_path: Path) -> None:
    entry = {"sent_s": 0.0, "ttft_s": 0.2, "tpot_s": 0.01, "max_itl_s": 0.1, "e2e_s": 1.0, "failure": None}
    sides = [
        {"label": label, "summary": {"duration_s": 2.0}, "requests": [entry | {"ttft_s": ttft_s}]}
        for label, ttft_s in (("A", 0.2), ("B", 0.9))
    ]
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"format": 1, "sides": sides}))

    both = break_even.json("goodput", path, "--slo", "ttft=0.5")
    one = break_even.json("goodput", path, "--slo", "ttft=0.5", "--side", "A")

    assert [(side["side"], side["goodput_per_s"]) for side in both["sides"]] == [("A", 0.5), ("B", 0.0)]
    assert one["goodput_per_s"] == 0.5
    assert "B" in break_even.refusal("goodput", path, "--slo", "ttft=0.5", "--side", "C")


def test_mfu_of_a_published_prefill(break_even: BreakEven) -> None:
    """8B on an H100: 6,852 ms for 100,000 tokens is an MFU near .6."""
    arguments = ("--phase", "prefill", "--context", 100_000, "--tokens-per-s", 100_000 / 6.852)

    found = break_even.json("mfu", *MODEL_8B, "--gpu", "H100", *arguments)

    assert found["mfu"] == pytest.approx((2 * 6.979e9 + 524_288 * 50_000) * 1e5 / 6.852 / 989e12)
    assert 0.59 < found["mfu"] < 0.635
    assert found["bound"] == "compute"


def test_mbu_of_decoding(break_even: BreakEven) -> None:
    found = break_even.json("mfu", *MODEL_8B, "--gpu", "H100", "--context", 1000, "--batch", 4, "--tokens-per-s", 600)

    assert found["mbu"] == pytest.approx((16.06e9 + 4 * 1000 * 131_072) * 150 / 3.35e12)
    assert found["bound"] == "memory"


def test_mfu_above_one_is_said_to_be_wrong(break_even: BreakEven) -> None:
    ran = break_even.run("mfu", *MODEL_8B, "--gpu", "H100", "--tokens-per-s", 1e6)

    assert "above 100 %" in ran.out


def test_roofline_of_the_8b_model(break_even: BreakEven) -> None:
    found = break_even.json("roofline", *MODEL_8B, "--gpu", "H100", "--batch", "1,8", "--context", 1024)

    assert found["ridge_flops_per_byte"] == pytest.approx(295.2, rel=1e-3)
    prefill, one, eight = found["points"]
    assert (prefill["bound"], one["bound"], eight["bound"]) == ("compute", "memory", "memory")
    assert one["tokens_per_s"] == pytest.approx(3.35e12 / (16.06e9 + 1024 * 131_072))
    assert one["tokens_per_s"] < eight["tokens_per_s"] < 8 * one["tokens_per_s"]
    assert prefill["attainable_flops_per_s"] == pytest.approx(989e12)


def test_numbers_do_as_well_as_names(break_even: BreakEven) -> None:
    by_name = break_even.json("roofline", *MODEL_8B, "--gpu", "H100")
    by_numbers = break_even.json(
        "roofline", *EIGHT_B_BY_NUMBERS, "--tflops", 989, "--memory-gb-per-s", 3350, "--gpu-memory-gb", 80
    )

    assert by_numbers == by_name


@pytest.mark.parametrize("suffix", ["html", "png"])
def test_roofline_is_drawn(break_even: BreakEven, tmp_path: Path, suffix: str) -> None:
    if suffix == "png":
        pytest.importorskip("matplotlib")
    path = tmp_path / f"roof.{suffix}"

    ran = break_even.run("roofline", *MODEL_8B, "--gpu", "H100", "--plot", path)

    assert ran.code == 0, ran.err
    start = b"\x89PNG" if suffix == "png" else b"<!DOCTYPE html>"
    assert path.read_bytes().startswith(start)
    if suffix == "html":
        assert "decode, 8,192 tokens" in path.read_text()
        assert "roof" in path.read_text()


# What is refused.

REFUSED: list[tuple[tuple[object, ...], str]] = [
    (("plan", *MODEL_8B, "--gpu", "H100", "--prompt", 9000), "Missing option '--found'"),
    (
        ("plan", *MODEL_8B, "--prompt", 9000, "--found", "nvme=8192"),
        "--efficiency: absent; use --efficiency.*--gpu NAME",
    ),
    (("plan", *PLAN, "--found", "nvme"), "--found: 'nvme'; use TIER=TOKENS, such as nvme=8192"),
    (
        ("plan", *PLAN, "--found", "nvme=100"),
        "--found: 'nvme=100': no whole blocks; use a multiple of --block-tokens 16",
    ),
    (("plan", *PLAN, "--found", "nvme=0"), "--found: 'nvme=0': no whole blocks"),
    (("plan", *PLAN, "--found", "nvmee=160"), "'nvmee' is not known.*nvme"),
    (("plan", *PLAN, "--on-engine", 100), "--on-engine: 100: no whole blocks; use a multiple"),
    (("plan", *PLAN, "--on-engine", 16_000), "--prompt: 20000 tokens, and a prefix of 24192; use 24192 or more"),
    (("plan", *PLAN, "--tier", "a=1,1"), "--tier: 'a': nothing is found there; use --found a=TOKENS, or leave it out"),
    (("plan", *PLAN, "--tier", "nvme=1"), "use NAME=GB/s,ms"),
    (
        ("plan", *PLAN, *(word for name in "abcd" for word in ("--tier", f"{name}=1,1", "--found", f"{name}=16"))),
        "--found: 5 tiers; use at most 4",
    ),
    (("quantisation",), "--kv-bytes-per-token: absent"),
    (("quantisation", *MODEL_8B), "--memory: absent.*--gpu NAME"),
    (("quantisation", *MODEL_8B, "--memory", "40Gb"), "'--memory': '40Gb'; use a size with its unit, such as 40GiB"),
    (("quantisation", *MODEL_8B, "--memory", "40"), "'--memory': '40'; use a size"),
    (("quantisation", "--model", "Llama-3.1-8Q", "--memory", "40GiB"), "'Llama-3.1-8Q' is not known.*Llama-3.1-8B"),
    (("quantisation", *MODEL_8B, "--memory", "4GiB", "--scales", "row"), "'row' is not one of 'block'"),
    (("quantisation", *MODEL_8B, "--config", "x", "--memory", "4GiB"), "--config: given with --model"),
    (("split", *MODEL_8B), "--prefill-ms: absent.*--gpu NAME"),
    (("split", *MODEL_8B, "--gpu", "H1OO"), "'H1OO' is not known; the nearest names are H100"),
    (("split", *MODEL_8B, "--gpu", "H100", "--link", "400G NDR"), "'400G NDR'; use NAME=GB/s,ms.*'400G NDR/RoCE'"),
    (("split", *MODEL_8B, "--gpu", "H100", "--link", "a=0"), "use a bandwidth from 1 B/s"),
    (("split", *MODEL_8B, "--gpu", "H100", "--efficiency", "2,1"), "'2,1'; use two shares"),
    (("split", *MODEL_8B, "--efficiency", ".6,.5"), "--tflops: absent"),
    (("speculative",), "Missing option '--acceptance'"),
    (("speculative", "--acceptance", "1.2"), "'1.2'; use a number from 0 to 1"),
    (("speculative", "--acceptance", "nan"), "'nan'; use a number from 0 to 1"),
    (("speculative", "--acceptance", "0.5", "--draft-tokens", "-1"), "-1 is not in the range"),
    (("cost", "--usd-per-h", 2), "no other rate given"),
    (("cost", "--decode-tokens-per-s", 2), "--usd-per-h: absent.*--gpu NAME"),
    (("cost", "--gpu", "H800", "--decode-tokens-per-s", 2), "--usd-per-h: absent"),
    (("cost", "--usd-per-h", 2, "--decode-tokens-per-s", 0), "'0'; use a number from 1e-12"),
    (("cost", "--usd-per-h", 2, "--decode-tokens-per-s", 9, "--requests", 9), "--output-tokens: absent"),
    (("cost", "--usd-per-h", 2, "--prefill-tokens-per-s", 9, "--requests", 9), "--input-tokens: absent"),
    (
        ("cost", "--usd-per-h", 2, "--prefill-tokens-per-s", 9, "--prefill-requests-per-min", 9),
        "given with --prefill-tokens-per-s",
    ),
    (("cost", "--usd-per-h", 2, "--prefill-requests-per-min", 9, "--hit-rate", 0.5), "--hit-rate: given with"),
    (("goodput",), "Missing argument 'FILE'"),
    (("goodput", "absent.csv", "--slo", "ttft=1"), "'absent.csv' does not exist"),
    (("mfu", "--gpu", "H100", "--tokens-per-s", 1), "--params-b: absent"),
    (("mfu", *MODEL_8B, "--tokens-per-s", 1), "--tflops: absent"),
    (("mfu", *MODEL_8B, "--gpu", "A100", "--precision", "fp8", "--tokens-per-s", 1), "dense fp8 FLOP/s of A100-80 SXM"),
    (("mfu", *MODEL_8B, "--params-b", 1, "--gpu", "H100", "--tokens-per-s", 1), "--active-params-b: 8.03 of 1"),
    (("mfu", *MODEL_8B, "--gpu", "H100", "--tokens-per-s", "1e400"), "'1e400'; use a number"),
    (("roofline", *MODEL_8B, "--gpu", "H100", "--batch", "1,x"), "'1,x'; use whole numbers above 0"),
    (("roofline", *MODEL_8B, "--gpu", "H100", "--batch", "0"), "'0'; use whole numbers above 0"),
    (("roofline", *MODEL_8B, "--gpu", "H100", "--plot", "roof.pdf"), "ends in .png or .html"),
    (("roofline", *MODEL_8B, "--gpu", "H100", "--plot", "absent/roof.html"), "no folder"),
    (("roofline", *MODEL_8B, "--gpu", "H100", "--csv", "--json"), "--csv: given with --json"),
    (("roofline", *MODEL_8B, "--gpus", "H100"), "No such option '--gpus'.*--gpu"),
    (("speculativ", "--acceptance", "0.5"), "No such command 'speculativ'"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=lambda value: " ".join(map(str, value))[:60])
def test_wrong_or_missing_input_is_named_and_exits_with_2(
    break_even: BreakEven, arguments: tuple[object, ...], words: str
) -> None:
    assert re.search(words, break_even.refusal(*arguments))


def test_a_bound_on_what_no_request_has_is_refused(break_even: BreakEven, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("ttft_s\n0.1\n")

    assert "tpot: no request of" in break_even.refusal("goodput", path, "--slo", "tpot=1")
    assert "names are ttft" in break_even.refusal("goodput", path, "--slo", "ttfd=1")
    assert "names are ttft" in break_even.refusal("goodput", path, "--slo", "ttft=1", "--column", "x=y")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: str(command.name))
def test_the_help_has_an_example_that_runs(command: click.Command, latencies: Path, tmp_path: Path) -> None:
    text = command.get_help(click.Context(command))
    example = text.partition("Example:")[2].partition("\n\n")[0].split()[2:]
    places = {"run.json": str(latencies), "roof.html": str(tmp_path / "roof.html")}

    ran = CliRunner().invoke(command, [places.get(word, word) for word in example[1:]])

    assert max(len(line) for line in text.splitlines()) <= 80
    assert example[0] == command.name
    assert ran.exit_code == 0, ran.output


VALUES = (
    *("0", "1", "-1", "8", "0.5", "1e-12", "1e15", "1e308", "281474976710656", "nan", "inf", "x", "", " ", "½"),
    *("H100", "Llama-3.1-8B", "DeepSeek-V3", "gpt-oss-20b", "Gemma-3-4B", "[red]x[/]"),
    *("1,2", "0.1,0.2", "40GiB", "1TB", "400Gb/s", "a=1,2", "ttft=1"),
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_input_ends_in_a_traceback(data: st.DataObject) -> None:
    command = data.draw(st.sampled_from(COMMANDS))
    arguments = [str(word) for word in GOOD.get(command.name or "", (__file__, "--slo", "ttft=1"))]
    for option in data.draw(st.lists(st.sampled_from(command.params), max_size=4)):
        if option.name != "plot":
            is_flag = getattr(option, "is_flag", False)
            arguments += [option.opts[0]] if is_flag else [option.opts[0], data.draw(st.sampled_from(VALUES))]

    ran = CliRunner().invoke(command, arguments)

    assert ran.exit_code in {0, 2} or isinstance(ran.exception, KVStoreError), (arguments, ran.exc_info)
    if ran.exit_code == 0 and "--json" in arguments:
        json.loads(ran.output)
