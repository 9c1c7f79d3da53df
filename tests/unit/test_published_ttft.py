"""The calculator against published times to the first token: what was promised holds, for the rows at hand and for set-ups of
which only the achieved FLOPs were published."""

import csv
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import published_ttft as published  # noqa: E402 (benchmarks is not installed)
from kvstore.calculator.fit import (  # noqa: E402
    Point,
    band,
    fit_load,
    fit_prefill,
    fit_prefill_alone,
    unfitted,
)
from kvstore.calculator.prefill_shape import shape_of_row  # noqa: E402
from kvstore.calculator.priors import Setup, kernel_cost, prior, scaled  # noqa: E402
from kvstore.cli.main import cli  # noqa: E402
from kvstore.core.errors import ConfigError  # noqa: E402
from kvstore.tables import rows as tables  # noqa: E402


@pytest.fixture(scope="module")
def scored() -> list[published.Scored]:
    known, _ = published.groups(published.read())
    return [entry for group in known for entry in published.score(group)]


def setup_of(model: str, gpu: str, num_gpus: int) -> Setup:
    return Setup(shape_of_row(tables.model(model)), tables.gpu(gpu), num_gpus)


def test_every_promise_holds() -> None:
    report = published.run()

    assert [goal.text for goal in report.goals if not goal.met] == []
    assert len(report.goals) == 5
    assert len({tuple(row) for row in report.rows}) == 1


def test_between_the_ends_only_unseen_rows_are_scored(scored: list[published.Scored]) -> None:
    between = [entry for entry in scored if entry.how == "between"]
    fitted = {(entry.row.id, entry.kind) for entry in scored if entry.how == "fitted"}

    assert len(between) == 30
    assert {(entry.row.id, entry.kind) for entry in between} & fitted == set()


def test_the_calculator_says_no_where_fetching_lost(scored: list[published.Scored]) -> None:
    known, _ = published.groups(published.read())
    told = [sign for group in known for sign in published.signs(group, published.score(group))]

    assert len(told) == 24
    assert [sign.row.id for sign in told if not sign.predicted] == ["P068"]


def test_a_wrong_prediction_would_be_told(tmp_path: Path) -> None:
    """The same data with one row's time doubled: the gates are not met."""
    lines = list(csv.DictReader(published.DATA.read_text().splitlines()))
    for line in lines:
        if line["id"] == "P041":
            line["recompute_ttft_ms"] = "608"
    path = tmp_path / "changed.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)

    report = published.run(path)

    assert [goal.text for goal in report.goals if not goal.met] == [
        "error between the fitted ends, worst (goal: at most 0.25)"
    ]


@pytest.mark.parametrize(
    ("model", "gpu", "num_gpus", "lengths", "utilisation"),
    [
        ("QwQ-32B", "H100", 4, (4000, 8000, 16000, 32000), (0.30, 0.37, 0.42, 0.45)),
        ("QwQ-32B", "H20", 2, (4000, 8000, 16000, 32000), (0.81, 0.84, 0.86, 0.88)),
        ("Llama-3.1-70B", "A800", 8, (8192, 16384, 32768, 65536, 131072), (0.52, 0.55, 0.57, 0.58, 0.59)),
        ("DeepSeek-V3", "H20", 16, (1024, 4096, 8192, 16384, 32768), (0.08, 0.10, 0.12, 0.13, 0.14)),
    ],
)
def test_other_set_ups_are_fitted_by_two_points(
    model: str, gpu: str, num_gpus: int, lengths: tuple[int, ...], utilisation: tuple[float, ...]
) -> None:
    """Of these only the range of the achieved part of the peak was published; the values between are put in evenly."""
    setup = setup_of(model, gpu, num_gpus)
    shape = setup.shape
    flops = [2 * shape.prefill_params * n + shape.attn_flops_per_pair * n * n / 2 for n in lengths]
    points = [
        Point(n, work / (setup.attn_flops_per_s * part))
        for n, work, part in zip(lengths, flops, utilisation, strict=True)
    ]

    fitted = fit_prefill([points[0], points[-1]], prior(setup))

    errors = [abs(fitted.prefill_s(point.num_tokens) / point.seconds - 1) for point in points]
    assert max(errors[0], errors[-1]) < 0.03
    assert max(errors[1:-1]) < 0.20


def test_a_step_floor_is_fitted_by_two_points() -> None:
    """Qwen3-8B on 8 H800: some 46 ms for each chunk of 2,048 tokens whatever is in it."""
    points = [Point(n, 0.046 * math.ceil(n / 2048) + 0.005) for n in (1024, 2048, 4096, 8192, 16384, 32768)]

    fitted = fit_prefill([points[0], points[-1]], prior(setup_of("Qwen3-8B", "H800", 8)))

    errors = [abs(fitted.prefill_s(point.num_tokens) / point.seconds - 1) for point in points[1:-1]]
    assert max(errors) < 0.25
    assert sorted(errors)[len(errors) // 2] < 0.10


@pytest.mark.parametrize("row", tables.efficiencies(), ids=lambda row: f"{row.model} {row.num_gpus}x{row.gpu}")
def test_a_tabled_set_up_has_its_own_kernels_in_its_prior(row: tables.EfficiencyRow) -> None:
    fp8 = row.peak_flops_per_s > tables.gpu(row.gpu).bf16_flops_per_s * 1.01
    setup = setup_of(row.model, row.gpu, row.num_gpus)._replace(fp8=fp8)

    expected, kernels = prior(setup).cost, kernel_cost(setup, row)

    assert expected.a_s == pytest.approx(kernels.a_s * 1.1)
    assert expected.b_s == pytest.approx(kernels.b_s * 1.1)
    assert expected.t0_s > kernels.t0_s


def test_the_form_reproduces_the_kernels_utilisation() -> None:
    assert max(abs(error) for error in published.form_errors()) < 0.05


def test_set_ups_put_together_come_near_those_of_the_table() -> None:
    """Each row again, as if it were not in the table: dense ones within a quarter, those with experts within a factor of two."""
    for row in tables.efficiencies():
        fp8 = row.peak_flops_per_s > tables.gpu(row.gpu).bf16_flops_per_s * 1.01
        setup = setup_of(row.model, row.gpu, row.num_gpus)._replace(fp8=fp8)
        unknown = setup._replace(shape=setup.shape._replace(name="another name"))

        ratio = unfitted(prior(unknown)).prefill_s(8192) / (kernel_cost(setup, row).prefill_s(8192) * 1.1)

        limit = 1.25 if setup.shape.is_dense else 2.0
        assert 1 / limit < ratio < limit, f"{row.model} on {row.num_gpus} x {row.gpu}: {ratio:.2f}"


def test_a_fit_of_any_two_points_is_positive_and_grows() -> None:
    """Nonsense included: no constant is ever negative, and a longer prompt never takes less."""
    rng = np.random.default_rng(5)
    expected = prior(setup_of("Qwen3-32B", "H100", 2))
    for _ in range(200):
        short, long = sorted(int(n) for n in rng.choice(200_000, 2, replace=False) + 16)
        points = [Point(float(n), float(10 ** rng.uniform(-3, 2))) for n in (short, long)]

        for fitted in (fit_prefill(points, expected), fit_prefill_alone(points)):
            assert min(fitted.cost.t0_s, fitted.cost.a_s, fitted.cost.b_s) >= 0
            seconds = [fitted.prefill_s(n) for n in (16, 1000, 10_000, 100_000)]
            assert seconds == sorted(seconds)
            assert all(map(math.isfinite, seconds))


def test_points_of_a_known_cost_give_it_back() -> None:
    """However wrong the expectation was: four lengths, a true cost that is 1.5, 2 and 0.7 times the expected one."""
    expected = prior(setup_of("Llama-3.1-70B", "A100", 8))
    true = scaled(expected.cost, linear=2.0, attention=0.7, t0_s=expected.cost.t0_s * 1.5)
    points = [Point(n, true.prefill_s(n)) for n in (500, 4000, 30_000, 120_000)]

    fitted = fit_prefill(points, expected)

    for n in (1000, 10_000, 60_000, 250_000):
        assert fitted.prefill_s(n) == pytest.approx(true.prefill_s(n), rel=0.03)


def test_bands_narrow_where_something_was_measured() -> None:
    expected = prior(setup_of("DeepSeek-V3", "H20", 16))
    points = [Point(1024, 0.4), Point(32768, 15.1)]

    before, after = unfitted(expected), fit_prefill(points, expected)

    assert after.error_of(1024) < after.error_of(8192) < before.error_of(8192)
    assert after.error_of(1024) < 0.06
    assert band(1.0, 0.1) == pytest.approx((math.exp(-0.164), math.exp(0.164)))


def test_published_points_lie_within_the_bands(scored: list[published.Scored]) -> None:
    """Nine of ten, as the command says; of the 16 prefills between the ends."""
    known, _ = published.groups(published.read())
    inside = []
    for group in known:
        timed = [row for row in group.rows if row.recompute_s is not None]
        if len(timed) < 3:
            continue
        ends = [Point(row.context, row.recompute_s or math.nan) for row in (timed[0], timed[-1])]
        fitted = fit_prefill(ends, prior(group.setup))
        for row in timed[1:-1]:
            low, high = band(fitted.prefill_s(row.context), fitted.error_of(row.context))
            inside.append(low <= (row.recompute_s or math.nan) <= high)

    assert len(inside) == 15
    assert sum(inside) / len(inside) >= 0.9


def test_loads_of_a_known_tier_give_it_back_with_a_suffix_or_without() -> None:
    fitted = unfitted(prior(setup_of("QwQ-32B", "H100", 2)))
    kv_bytes, latency_s, rate = 262_144.0, 0.008, 15e9
    points = []
    for loaded, prompt in ((3200, 4000), (25600, 32000)):
        rest_s = fitted.prefill_s(prompt - loaded, loaded)
        points.append(Point(prompt, latency_s + kv_bytes * loaded / rate + rest_s, loaded))

    found = fit_load(points, kv_bytes, fitted)

    assert found.latency_s == pytest.approx(latency_s)
    assert found.bytes_per_s == pytest.approx(rate)
    with pytest.raises(ConfigError, match="no bandwidth in these points"):
        fit_load([Point(1000, 0.1, 1000), Point(2000, 0.1, 2000)], kv_bytes, fitted)


def test_the_command_predicts_what_the_library_does(scored: list[published.Scored]) -> None:
    (entry,) = (e for e in scored if (e.row.id, e.kind, e.how) == ("P020", "recompute", "between"))
    arguments = ["--model", "DeepSeek-R1-AWQ", "--gpu", "H100", "--num-gpus", "8", "--context", "16000", "--csv"]

    result = CliRunner().invoke(
        cli, ["break-even", *arguments, "--measured", "4000:376.96,32000:2937.73"], catch_exceptions=False
    )

    line = next(csv.DictReader(result.stdout.splitlines()))
    assert float(line["prefill_s"]) == pytest.approx(entry.predicted_s)
