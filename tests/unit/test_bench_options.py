"""The command line's values: each refusal names the option, its value and what would be right."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.bench import options
from kvstore.bench.workload import Span
from kvstore.core.errors import ConfigError


@pytest.mark.parametrize(("text", "span"), [("512", Span(512, 512)), ("1-10000000", Span(1, 10_000_000))])
def test_lengths(text: str, span: Span) -> None:
    assert options.parse_span("input-tokens", text) == span


@pytest.mark.parametrize("text", ["", "0", "-5", "9-3", "1-", "1.5", "1-2-3", "10000001", "12 ", "²"])
def test_wrong_lengths(text: str) -> None:
    with pytest.raises(ConfigError, match="128-2048") as caught:
        options.parse_span("input-tokens", text)

    assert caught.value.fields == {"field": "input-tokens", "value": repr(text)}


def test_an_slo_in_seconds_or_milliseconds() -> None:
    assert options.parse_slo("ttft=500ms, tpot=.05,e2e=3s") == {"ttft": 0.5, "tpot": 0.05, "e2e": 3.0}


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=", "ttft=0", "ttft=-1", "ttft=1,ttft=2", "tbt=1", "ttft=1m", "ttft=nan"]
)
def test_a_wrong_slo(text: str) -> None:
    with pytest.raises(ConfigError, match="ttft, tpot, itl, e2e") as caught:
        options.parse_slo(text)

    assert caught.value.fields["field"] == "slo"


@pytest.mark.parametrize("text", ["", "5", "5-", "9-3"])
def test_wrong_token_ids(text: str) -> None:
    with pytest.raises(ConfigError, match="1000-30000"):
        options.parse_token_ids(text)


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_a_wrong_body(text: str) -> None:
    with pytest.raises(ConfigError, match="object"):
        options.parse_object("extra-body", text)


def test_one_server() -> None:
    assert options.parse_targets(["http://h:1/"], None, {"x": 1}, None) == (
        options.Target("A", "http://h:1/v1", {"x": 1}),
    )


def test_two_servers_with_and_without_labels() -> None:
    targets = options.parse_targets(["on=http://h:1/v1"], "https://h/base", {}, None)

    assert [(target.label, target.url) for target in targets] == [("on", "http://h:1/v1"), ("B", "https://h/base/v1")]


def test_an_equals_sign_in_an_address_makes_no_label() -> None:
    assert options.parse_targets(["http://h/a=b"], None, {}, None)[0].url == "http://h/a=b/v1"


def test_one_server_asked_in_two_ways() -> None:
    targets = options.parse_targets(["http://h:1"], None, {"a": 1}, {"a": 1, "b": 2})

    assert [(target.label, target.url, target.extra) for target in targets] == [
        ("A", "http://h:1/v1", {"a": 1}),
        ("B", "http://h:1/v1", {"a": 1, "b": 2}),
    ]


@pytest.mark.parametrize(
    ("urls", "compare", "other", "right"),
    [
        ([], None, None, "one --url"),
        (["http://a", "http://b"], "http://c", None, "one --url"),
        (["http://a"], "http://b", {}, "one variable at a time"),
        (["x=http://a", "x=http://b"], None, None, "another label"),
        (["a:8000"], None, None, "http://HOST:PORT"),
        (["ftp://a"], None, None, "http://HOST:PORT"),
        (["http://"], None, None, "http://HOST:PORT"),
        (["http://a:port"], None, None, "http://HOST:PORT"),
        (["http://a:99999"], None, None, "http://HOST:PORT"),
        (["http://a/?x=1"], None, None, "http://HOST:PORT"),
    ],
)
def test_wrong_servers(urls: list[str], compare: str | None, other: dict[str, Any] | None, right: str) -> None:
    with pytest.raises(ConfigError, match=right):
        options.parse_targets(urls, compare, {}, other)


@pytest.mark.parametrize("name", ["random", "shared-system", "multi-turn", "document-qa"])
def test_every_workload_has_defaults(name: str) -> None:
    assert options.make_workload(name, 1, {}).name == name


@pytest.mark.parametrize(
    ("name", "given", "right"),
    [
        ("chat", {}, "random, shared-system, multi-turn, document-qa, trace"),
        ("random", {"turns": 3}, "--workload multi-turn"),
        ("trace", {}, "Mooncake"),
        ("shared-system", {"system_tokens": 0}, "1 or more"),
        ("random", {"input_tokens": "x"}, "128-2048"),
    ],
)
def test_wrong_workloads(name: str, given: dict[str, Any], right: str) -> None:
    with pytest.raises(ConfigError, match=right):
        options.make_workload(name, 1, given)


@pytest.mark.parametrize(
    ("given", "kind"), [({}, "closed"), ({"rate": 2.0}, "poisson"), ({"concurrency": 2}, "closed")]
)
def test_arrivals_follow_from_what_is_given(given: dict[str, Any], kind: str) -> None:
    assert options.make_arrivals(None, options.make_workload("random", 1, {}), given).kind == kind


def test_a_trace_comes_at_its_own_times_unless_told_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"timestamp": 5, "input_length": 3, "output_length": 2, "hash_ids": [7]}\n')
    trace = options.make_workload("trace", 1, {"trace": str(file)})

    assert options.make_arrivals(None, trace, {}).kind == "trace"
    assert options.make_arrivals(None, trace, {"concurrency": 1}).kind == "closed"
    assert options.make_arrivals("burst", trace, {}).kind == "burst"


@pytest.mark.parametrize(
    ("name", "given", "right"),
    [
        ("uniform", {}, "poisson, burst, closed, trace"),
        ("trace", {}, "has no times of its own"),
        ("closed", {"rate": 2.0}, "--arrival poisson or burst"),
        ("burst", {"rate": 2.0}, "--rate: 2 without --burst-size; use both"),
        ("burst", {"burst_size": 2}, "--burst-size: 2 without --rate; use both"),
        (None, {"rate": 1.0, "concurrency": 2}, "--arrival closed"),
    ],
)
def test_wrong_arrivals(name: str | None, given: dict[str, Any], right: str) -> None:
    with pytest.raises(ConfigError, match=right):
        options.make_arrivals(name, options.make_workload("random", 1, {}), given)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: options.parse_span("input-tokens", "x"),
        lambda: options.parse_slo("x"),
        lambda: options.make_workload("x", 1, {}),
        lambda: options.parse_targets(["x"], None, {}, None),
    ],
)
def test_every_refusal_has_a_field_a_value_and_a_way_out(wrong: Callable[[], object]) -> None:
    with pytest.raises(ConfigError) as caught:
        wrong()

    assert caught.value.fields.keys() == {"field", "value"}
    assert caught.value.message.startswith(f"--{caught.value.fields['field']}: ")
    assert "; use " in caught.value.message
