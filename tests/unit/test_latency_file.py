"""Latency files: what is read from each kind, what is refused and where, and the goodput of what was read."""

import contextlib
import json
import math
import tempfile
from pathlib import Path

import pytest
from bench_samples import sample
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.bench.measures import summarise
from kvstore.bench.options import make_arrivals, make_workload
from kvstore.bench.plan import Plan, Result, SideResult, Target
from kvstore.bench.report import as_json
from kvstore.bench.sample import Failure, Usage
from kvstore.calculator.goodput import goodput
from kvstore.calculator.latency_file import Request, Requests, read_latencies
from kvstore.core.errors import ConfigError


def _file(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode())
    return path


CSV = """request,ttft_ms,tpot,e2e_s,sent_s,error
a,100,0.02,1.0,10,
b,600,0.03,2.0,10.5,
c,200,,2.5,11,
d,,,,12,timeout
"""


def test_a_csv_with_units_empty_cells_and_a_failure(tmp_path: Path) -> None:
    (found,) = read_latencies(_file(tmp_path, "run.csv", CSV))

    assert [request.ok for request in found.requests] == [True, True, True, False]
    assert found.requests[0].latencies_s == {"ttft": pytest.approx(0.1), "tpot": 0.02, "e2e": 1.0}
    assert "tpot" not in found.requests[2].latencies_s
    assert found.duration_s == pytest.approx(3.5)


def test_jsonl_lines_may_have_different_fields(tmp_path: Path) -> None:
    lines = '{"ttft_s": 0.1, "failure": null}\n\n{"ttft_s": 0.3, "tpot_ms": 20, "failure": {"kind": "broken"}}\n'

    (found,) = read_latencies(_file(tmp_path, "run.jsonl", lines))

    assert [request.ok for request in found.requests] == [True, False]
    assert found.requests[1].latencies_s == {"ttft": 0.3, "tpot": pytest.approx(0.02)}
    assert found.duration_s is None


def test_the_json_of_bench_serve_has_its_sides(tmp_path: Path) -> None:
    entry = {
        "request": "0.0",
        "sent_s": 0.0,
        "ttft_s": 0.2,
        "tpot_s": None,
        "max_itl_s": 0.05,
        "e2e_s": 1.0,
        "failure": None,
    }
    failed = entry | {
        "ttft_s": None,
        "e2e_s": None,
        "failure": {"kind": "refused", "message": "429", "retry_after_s": 1.0},
    }
    sides = [
        {"label": "A", "summary": {"duration_s": 4.0}, "requests": [entry, failed]},
        {"label": "B", "summary": {"duration_s": 2.0}, "requests": [entry]},
    ]

    first, second = read_latencies(_file(tmp_path, "run.json", json.dumps({"format": 1, "sides": sides})))

    assert (first.label, first.duration_s, [r.ok for r in first.requests]) == ("A", 4.0, [True, False])
    assert first.requests[0].latencies_s == {"ttft": 0.2, "itl": 0.05, "e2e": 1.0}
    assert goodput(second, {"ttft": 0.2}, 0.9).good_per_s == 0.5


def test_a_report_as_bench_serve_writes_it(tmp_path: Path) -> None:
    """Its goodput and this one agree."""
    slo = {"ttft": 1.2, "tpot": 0.6}
    samples = [
        sample(0, times_s=(1.0, 1.5, 2.0)),
        sample(1, times_s=(1.5, 1.6, 2.0)),
        sample(2, times_s=(), failure=Failure("refused", "429", 1.0)),
        sample(3, times_s=(1.0,), usage=Usage(10, 1)),
    ]
    workload = make_workload("random", 0, {"requests": 4})
    target = Target("A", "http://127.0.0.1:1", {})
    plan = Plan(
        workload=workload, arrivals=make_arrivals("closed", workload, {}), targets=(target,), api="chat", slo=slo
    )
    summary = summarise(samples, 4.0, slo)
    side = SideResult(target, "model", "", samples, 4.0, summary, None)
    report = as_json(Result(plan, [side], None))

    (found,) = read_latencies(_file(tmp_path, "run.json", json.dumps(report)))

    good = goodput(found, slo, 0.9)
    assert (good.requests, good.succeeded, good.good) == (4, 3, 2)
    assert (good.good, good.good_per_s) == (summary.good, summary.goodput_per_s)


def test_the_json_of_vllm_and_sglang_has_lists(tmp_path: Path) -> None:
    """TPOT is by the tokens after the first, as theirs; a request with an error failed."""
    report = {"duration": 5.0, "ttfts": [0.5, 0.2, 0.0], "itls": [[0.1, 0.3], [], []], "errors": ["", "", "429"]}

    (found,) = read_latencies(_file(tmp_path, "vllm.json", json.dumps(report | {"output_lens": [5, 1, 0]})))

    assert [request.ok for request in found.requests] == [True, True, False]
    assert found.requests[0].latencies_s == {"ttft": 0.5, "itl": 0.3, "e2e": 0.9, "tpot": pytest.approx(0.1)}
    assert found.requests[1].latencies_s == {"ttft": 0.2}
    assert found.duration_s == 5.0


def test_a_column_may_be_named(tmp_path: Path) -> None:
    path = _file(tmp_path, "run.csv", "first token (ms)\n250\n")

    with pytest.raises(ConfigError, match=r"has no latency among its columns \(first token \(ms\)\)"):
        read_latencies(path)
    path = _file(tmp_path, "run.csv", "first_token_ms\n250\n")
    (found,) = read_latencies(path, {"ttft": "first_token_ms"})
    assert found.requests[0].latencies_s == {"ttft": 0.25}


BAD = [
    ("a.csv", "ttft_s,tpot_s\n0.1,0.2\n0.1\n", "line 3: 1 cells, where the head has 2"),
    ("a.csv", "ttft_s\n0.1\n-1\n", "line 3: ttft_s: '-1'; use a number, 0 or more"),
    ("a.csv", "ttft_s\nnan\n", "line 2: ttft_s: 'nan'"),
    ("a.csv", 'note,ttft_s\n"two\nlines",0.1\nx,y\n', "line 4: ttft_s: 'y'"),
    ("a.csv", "ttft_s,ttft_s\n1,2\n", "line 1: column 'ttft_s' is there twice"),
    ("a.csv", "", "has no request"),
    ("a.csv", "ttft_s\n", "has no request"),
    ("a.csv", 'ttft_s\n"1\n', "is not CSV"),
    ("a.jsonl", '{"ttft_s": 1}\n{"ttft_s": "x"}\n', "line 2: ttft_s: 'x'"),
    ("a.jsonl", '{"ttft_s": 1}\n{"ttft_s": true}\n', "line 2: ttft_s: True"),
    ("a.jsonl", '{"ttft_s": 1}\n{"ttft_s"\n', "line 2: is not JSON"),
    ("a.jsonl", "[1]\n", r"line 1: \[1\] is not an object"),
    ("a.jsonl", '{"ttft_s": 1e999}\n', "line 1: ttft_s: inf"),
    ("a.jsonl", '{"ttft_s": ' + "1" * 5000 + "}\n", "line 1: "),
    ("a.jsonl", "[" * 200_000 + "\n", "line 1: is nested too deeply"),
    ("a.json", "{\n\n]", "line 3: is not JSON"),
    ("a.json", "[]", "neither the list `sides`"),
    ("a.json", '{"sides": [{"label": "A"}]}', r"sides\[0\]: has no list `requests`"),
    ("a.json", '{"sides": [{"requests": [7]}]}', r"sides\[0\].requests\[0\]: 7 is not an object"),
    ("a.json", '{"sides": [{"requests": [{"ttft_s": "x"}]}]}', r"sides\[0\].requests\[0\]: ttft_s: 'x'"),
    ("a.json", '{"ttfts": [1]}', "no list `itls` as long as `ttfts`; use a result with --save-detailed"),
    ("a.json", '{"ttfts": 1}', "no list `ttfts`"),
    (
        "a.json",
        '{"ttfts": [1, "x"], "itls": [[], []], "errors": ["", ""], "output_lens": [1, 1]}',
        "request 1: ttft_s: 'x'",
    ),
    ("a.json", '{"ttfts": [1], "itls": [[0, null, -2]], "errors": [""], "output_lens": [1]}', r"itls\[0\]: gap 2: -2"),
    ("a.json", '{"ttfts": [1], "itls": [7.5], "errors": [""], "output_lens": ["x"]}', r"itls\[0\]: 7.5 is not a list"),
    ("a.txt", "x", "is of no known kind"),
]


@pytest.mark.parametrize(("name", "text", "words"), BAD)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_latencies(_file(tmp_path, name, text))


def test_a_column_that_is_not_there_is_refused_with_the_nearest(tmp_path: Path) -> None:
    path = _file(tmp_path, "a.csv", "ttft_ms,other\n1,2\n")

    with pytest.raises(ConfigError, match="has no column 'ttft'; the nearest names are ttft_ms"):
        read_latencies(path, {"ttft": "ttft"})


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"ttft_s\n\xff\n")

    with pytest.raises(ConfigError, match="not UTF-8"):
        read_latencies(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_latencies(tmp_path / "absent.csv")


def test_failed_requests_are_never_good_and_an_answer_of_one_token_has_no_tpot() -> None:
    requests = [
        Request(ok=True, latencies_s={"ttft": 0.1, "tpot": 0.2}),
        Request(ok=True, latencies_s={"ttft": 0.1}),
        Request(ok=False, latencies_s={"ttft": 0.1, "tpot": 0.01}),
        Request(ok=True, latencies_s={"ttft": 0.9, "tpot": 0.01}),
    ]

    found = goodput(Requests("", requests, 2.0), {"ttft": 0.5, "tpot": 0.1}, 0.75)

    assert (found.requests, found.succeeded, found.good, found.share) == (4, 3, 1, 0.25)
    assert found.good_per_s == 0.5
    assert [(one.latency, one.share, one.wanted_bound_s) for one in found.objectives] == [
        ("ttft", 0.5, 0.9),
        ("tpot", 0.5, 0.2),
    ]


latencies = st.dictionaries(st.sampled_from(["ttft", "tpot", "e2e"]), st.floats(0, 10))
some_requests = st.lists(st.builds(Request, ok=st.booleans(), latencies_s=latencies), min_size=1, max_size=30)


@settings(deadline=None)
@given(some_requests, st.floats(0.01, 10), st.floats(0.01, 10), st.floats(0.01, 1))
def test_goodput_is_no_more_than_any_objective_and_the_least_bound_is_the_least(
    requests: list[Request], ttft_s: float, tpot_s: float, wanted: float
) -> None:
    found = goodput(Requests("", requests, None), {"ttft": ttft_s, "tpot": tpot_s}, wanted)

    assert found.share <= min(one.share for one in found.objectives)
    assert found.good <= found.succeeded <= found.requests
    for one in found.objectives:
        if one.wanted_bound_s is None:
            assert found.succeeded < wanted * found.requests + 1e-9
        else:
            there = goodput(Requests("", requests, None), {one.latency: one.wanted_bound_s}, wanted)
            assert there.share >= wanted - 1e-9
            below = goodput(Requests("", requests, None), {one.latency: one.wanted_bound_s - 1e-9}, wanted)
            assert one.wanted_bound_s == 0 or below.share < wanted


names = st.sampled_from(["ttft_s", "ttft_ms", "tpot", "e2e_s", "sent_s", "failure", "duration_s", "other", ""])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400)
report_names = st.sampled_from(
    ["sides", "requests", "summary", "label", "ttfts", "itls", "errors", "output_lens", "duration"]
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(report_names | names, inner, max_size=5),
    max_leaves=12,
)
reports = st.fixed_dictionaries(
    {name: st.lists(anything, min_size=1, max_size=1) for name in ("ttfts", "itls", "errors", "output_lens")}
) | st.builds(lambda entry: {"sides": [{"requests": [entry]}]}, anything)
tables = st.text(max_size=80) | st.text('0123456789.,\n-e"x').map("ttft_s,tpot\n{}".format)
lines = st.lists(st.dictionaries(names, anything, max_size=4), max_size=4)


@settings(deadline=None, max_examples=100)
@given(st.data(), st.sampled_from([".csv", ".jsonl", ".json"]))
def test_whatever_a_file_has_it_is_read_or_refused(data: st.DataObject, suffix: str) -> None:
    """A number in a Request is finite and not negative, whatever was in the file."""
    if suffix == ".csv":
        text = data.draw(tables)
    elif suffix == ".jsonl":
        text = "\n".join(json.dumps(line) for line in data.draw(lines))
    else:
        text = json.dumps(data.draw(reports | anything))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a{suffix}"
        path.write_bytes(text.encode(errors="surrogatepass"))
        sides: list[Requests] = []
        with contextlib.suppress(ConfigError):
            sides = read_latencies(path)
    for side in sides:
        for request in side.requests:
            assert all(0 <= value < math.inf for value in request.latencies_s.values())
        assert 0 <= goodput(side, {"ttft": 0.5}, 0.9).share <= 1
