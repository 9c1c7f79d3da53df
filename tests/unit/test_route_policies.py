"""Which engine a request goes to: affinity, and that no policy starves or floods an engine."""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.errors import ConfigError
from kvstore.route.engines import read_urls
from kvstore.route.policies import NAMES, Load, Policy, make_policy
from kvstore.route.prompts import CHUNK_BYTES, MAX_CHUNKS, read_keys


def policy_of(name: str = "prefix", *, max_lead: int = 8, max_chunks: int = 1000) -> Policy:
    return make_policy(name, max_lead=max_lead, max_chunks=max_chunks, expiry_s=600.0)


def idle(*names: str) -> list[Load]:
    return [Load(name, 0, 0) for name in names]


def send(policy: Policy, loads: list[Load], keys: tuple[int, ...]) -> tuple[str, str]:
    choice = policy.choose(loads, keys, 0.0)
    policy.sent(choice.name, keys, 0.0)
    return choice.name, choice.reason


def chat(name: int, length: int = 10) -> tuple[int, ...]:
    return tuple(range(1000 * name, 1000 * name + length))


def test_a_chats_next_turn_goes_where_the_last_one_went_and_new_chats_are_spread() -> None:
    policy = policy_of()
    first = [send(policy, idle("a", "b", "c"), chat(number)) for number in range(6)]
    second = [send(policy, idle("a", "b", "c"), chat(number, 20)) for number in reversed(range(6))]

    assert Counter(first) == {("a", "new"): 2, ("b", "new"): 2, ("c", "new"): 2}
    assert second == [(name, "prefix") for name, _ in reversed(first)]


def test_an_engine_too_far_ahead_is_passed_over_whatever_it_has() -> None:
    policy = policy_of(max_lead=2)
    policy.sent("a", chat(1, 100), 0.0)

    assert send(policy, [Load("a", 3, 0), Load("b", 1, 0)], chat(1, 100)) == ("a", "prefix")
    assert send(policy, [Load("a", 4, 0), Load("b", 1, 0)], chat(1, 100)) == ("b", "load")


def test_waiting_behind_much_text_costs_more_than_a_short_prefix_saves() -> None:
    policy = policy_of()
    policy.sent("a", chat(1, 10), 0.0)

    assert send(policy, [Load("a", 1, 9), Load("b", 0, 0)], chat(1, 12)) == ("a", "prefix")
    assert send(policy, [Load("a", 1, 13), Load("b", 0, 0)], chat(1, 12)) == ("b", "load")


def test_a_system_prompt_that_most_chats_share_does_not_draw_them_all_to_one_engine() -> None:
    policy = policy_of()
    system = chat(99, 50)
    homes = [send(policy, idle("a", "b"), (*system, *chat(number)))[0] for number in range(20)]
    again = [send(policy, idle("a", "b"), (*system, *chat(number, 20)))[0] for number in range(20)]

    assert min(Counter(homes).values()) >= 8
    assert again == homes


def test_a_document_that_few_ask_about_stays_where_it_is() -> None:
    policy = policy_of()
    for number in range(30):
        send(policy, idle("a", "b"), chat(number))
    home = send(policy, idle("a", "b"), (*chat(50, 50), *chat(100)))[0]

    asked = [send(policy, idle("a", "b"), (*chat(50, 50), *chat(100 + number))) for number in range(1, 9)]

    assert asked == [(home, "prefix")] * 8


def test_what_an_engine_had_before_it_went_down_counts_no_more() -> None:
    policy = policy_of()
    home, _ = send(policy, idle("a", "b"), chat(1))
    policy.forget(home)

    assert send(policy, idle("a", "b"), chat(1))[1] == "new"
    assert policy.num_chunks() in ({"a": 10, "b": 0}, {"a": 0, "b": 10})


def test_round_robin_takes_turns_and_least_loaded_takes_the_least_busy() -> None:
    turns = policy_of("round_robin")
    least = policy_of("least_loaded")

    assert [send(turns, idle("a", "b", "c"), ())[0] for _ in range(6)] == list("abcabc")
    assert [send(turns, idle("a", "c"), ())[0] for _ in range(4)] == list("acac")
    assert send(least, [Load("a", 2, 0), Load("b", 1, 9)], ())[0] == "b"
    assert [send(least, idle("a", "b"), ())[0] for _ in range(4)] == ["a", "b", "a", "b"]


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="policy: 'random'"):
        policy_of("random")


REQUESTS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30), st.integers(0, 6)), min_size=1, max_size=60)


@settings(max_examples=150, deadline=None)
@given(requests=REQUESTS, num_engines=st.integers(1, 4), max_lead=st.integers(0, 5), name=st.sampled_from(NAMES))
def test_no_engine_gets_further_ahead_than_it_may(
    requests: list[tuple[int, int, int]], num_engines: int, max_lead: int, name: str
) -> None:
    """Requests come and end in any order. Before it gets one, an engine has at most `max_lead` more than the least busy;
    with least_loaded, none; and round robin differs by one at most in what it has given to each."""
    policy = policy_of(name, max_lead=max_lead, max_chunks=40)
    busy = Counter({f"e{number}": 0 for number in range(num_engines)})
    given_out: Counter[str] = Counter()
    under_way: list[str] = []
    for prompt, length, num_ended in requests:
        loads = [Load(engine, count, 3 * count) for engine, count in busy.items()]
        engine, _ = send(policy, loads, chat(prompt, length))
        lead = busy[engine] - min(busy.values())
        assert lead <= {"prefix": max_lead, "least_loaded": 0}.get(name, lead)
        busy[engine] += 1
        given_out[engine] += 1
        under_way.append(engine)
        for _ in range(min(num_ended, len(under_way))):
            busy[under_way.pop(0)] -= 1
    if name == "round_robin":
        assert max(given_out.values()) - min(given_out[engine] for engine in busy) <= 1


# --- prompts --------------------------------------------------------------------------------------------------------


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def messages(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def shared(one: bytes, other: bytes, **headers: str) -> int:
    """Chunks of their common beginning."""
    pairs = zip(read_keys(one, {}), read_keys(other, headers), strict=False)
    return next(
        (at for at, (a, b) in enumerate(pairs) if a != b), min(len(read_keys(one, {})), len(read_keys(other, {})))
    )


def test_a_chats_next_turn_begins_with_the_whole_turn_before() -> None:
    first = body(messages=messages("x" * 1000))
    second = body(messages=messages("x" * 1000, "answer", "y" * 500), temperature=1)

    assert len(read_keys(first, {})) == len(json.dumps(messages("x" * 1000)[0])) // CHUNK_BYTES == 8
    assert shared(first, second) == 8


@pytest.mark.parametrize("prompt", ["x" * 1000, list(range(100, 400)), ["x" * 1000, "y"]])
def test_completions_share_as_much_as_their_prompts(prompt: Any) -> None:
    longer = prompt + ("z" * 500 if isinstance(prompt, str) else [prompt[-1]] * 100)
    changed = ("q" if isinstance(prompt, str) else ["q" if isinstance(prompt[0], str) else 1]) + prompt

    keys = read_keys(body(prompt=prompt), {})
    assert shared(body(prompt=prompt), body(prompt=longer)) == len(keys) > 5
    assert shared(body(prompt=prompt), body(prompt=changed)) == 0


@pytest.mark.parametrize(
    "fields",
    [{"model": "other"}, {"cache_salt": "s"}, {"kvstore": {"salt": "s"}}, {"tools": [{"type": "function"}]}],
)
def test_what_separates_caches_separates_keys(fields: dict[str, Any]) -> None:
    text = messages("x" * 1000)

    assert shared(body(messages=text), body(messages=text, **fields)) == 0
    assert shared(body(messages=text), body(messages=text), **{"x-kvstore-salt": "s"}) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"\xff",
        b'{"messages": "hi"}',
        b'{"messages": [1, 2]}',
        b"[" * 100_000,
        b'{"prompt": null}',
    ],
)
def test_a_body_that_is_no_prompt_has_no_keys(wrong: bytes) -> None:
    assert read_keys(wrong, {}) == ()


def test_the_end_of_an_endless_prompt_does_not_matter() -> None:
    assert len(read_keys(body(prompt="x" * (2 * MAX_CHUNKS * CHUNK_BYTES)), {})) == MAX_CHUNKS


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "ftp://a:1",
        "http://",
        "http://a:0",
        "http://a:x",
        "http://a:70000",
        "http://[::1",
        "http://a/?q",
    ],
)
def test_a_wrong_engine_url_is_refused_with_what_would_be_right(url: str) -> None:
    with pytest.raises(ConfigError, match=r"use http://HOST:PORT"):
        read_urls([url])


def test_engines_are_named_without_their_v1_and_once() -> None:
    assert [engine.url for engine in read_urls(["http://a:1/v1/", "http://b"])] == ["http://a:1", "http://b"]
    with pytest.raises(ConfigError, match="twice"):
        read_urls(["http://a:1", "http://a:1/v1"])
    with pytest.raises(ConfigError, match="none given"):
        read_urls([])
