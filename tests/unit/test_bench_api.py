"""Request bodies and the chunks of answers."""

import json
from typing import Any

import pytest

from kvstore.bench.api import AnswerReader, MalformedChunk, Message, RequestForm, ServerFault, error_message
from kvstore.bench.composer import Cold, Composer
from kvstore.bench.sample import Usage
from kvstore.bench.workload import Lengths, Span, multi_turn, random_prompts
from kvstore.core.errors import ConfigError

LENGTHS = Lengths(Span(3, 3), Span(5, 5))
CHAT = multi_turn(1, conversations=2, turns=3, lengths=LENGTHS, system_tokens=4, think_s=0).conversations


def body(api: str, turn: int = 0, *, conversation: int = 0, seed: int = 1, **more: Any) -> dict[str, Any]:
    form = RequestForm(api=api, model="m", extra=more.pop("extra", {}))
    answers = [f" answer {number}" for number in range(turn)]
    parsed: dict[str, Any] = json.loads(Composer(seed, form, **more).body(CHAT[conversation], turn, answers))
    return parsed


def test_a_chats_turn_sends_the_whole_history_and_the_answers() -> None:
    messages = body("chat", 2)["messages"]

    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert [message["content"] for message in messages if message["role"] == "assistant"] == [" answer 0", " answer 1"]
    assert messages[:2] == body("chat", 0)["messages"]


def test_completions_get_the_same_as_one_text_that_only_grows() -> None:
    first, last = body("completions", 0)["prompt"], body("completions", 2)["prompt"]

    assert last.startswith(first + " answer 0 ")
    assert last == "".join(message["content"] for message in body("chat", 2)["messages"])


def test_every_request_asks_for_a_stream_with_usage() -> None:
    fields = body("chat")

    assert fields["stream"] is True
    assert fields["stream_options"] == {"include_usage": True}
    assert (fields["model"], fields["max_tokens"], fields["temperature"]) == ("m", 5, 0.0)
    assert "ignore_eos" not in fields


def test_token_ids() -> None:
    single = random_prompts(1, requests=1, lengths=LENGTHS).conversations[0]
    composer = Composer(1, RequestForm(api="completions", model="m"), token_ids=Span(10, 19))
    prompt = json.loads(composer.body(single, 0, ()))["prompt"]

    assert len(prompt) == 3
    assert set(prompt) <= set(range(10, 20))


def test_a_salt_is_of_each_request_and_joins_the_users_own_fields() -> None:
    cold = {"cold": Cold("kvstore", "n0"), "label": "A", "extra": {"kvstore": {"no_store": True}}}
    salts = [body("chat", turn, conversation=c, **cold)["kvstore"] for c in (0, 1) for turn in (0, 1)]

    assert len({entry["salt"] for entry in salts}) == 4
    assert all(entry["no_store"] for entry in salts)
    assert body("chat", **cold | {"label": "B"})["kvstore"]["salt"] not in {entry["salt"] for entry in salts}
    assert isinstance(body("chat", cold=Cold("cache_salt", "n0"))["cache_salt"], str)
    assert body("chat", cold=Cold("kvstore", "n0"))["messages"] == body("chat")["messages"]


def test_a_prefix_is_new_for_each_request_and_run_but_the_same_for_two_servers() -> None:
    def front(turn: int, nonce: str, label: str = "A") -> str:
        messages = body("chat", turn, cold=Cold("prefix", nonce), label=label)["messages"]
        assert messages[0]["role"] == "system"
        text: str = messages[0]["content"]
        assert text.endswith(body("chat")["messages"][0]["content"])
        return text

    assert len({front(0, "n0"), front(1, "n0"), front(0, "n1")}) == 3
    assert front(0, "n0") == front(0, "n0", "B")
    assert len(front(0, "n0").split()) == 16 + 4


def test_a_field_that_the_benchmark_sets_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="'stream' is set by the benchmark") as caught:
        RequestForm(api="chat", model="m", extra={"stream": False})

    assert caught.value.fields["field"] == "extra-body"


def test_a_way_to_be_cold_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="kvstore, cache_salt, prefix"):
        Cold("salt", "n")


def take(api: str, *chunks: object) -> tuple[AnswerReader, list[bool]]:
    reader = AnswerReader(api)
    return reader, [reader.take(c if isinstance(c, bytes) else json.dumps(c).encode()) for c in chunks]


def test_a_chats_chunks() -> None:
    reader, brought_text = take(
        "chat",
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": None}], "usage": None},
        {"choices": [{"index": 0, "delta": {"content": " Paris"}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {"content": None}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": None}},
        b"[DONE]",
    )

    assert brought_text == [False, True, True, False, False, False]
    assert (reader.text, reader.finish_reason, reader.done) == ("hm Paris", "stop", True)
    assert reader.usage == Usage(7, 2, None)


def test_a_completions_chunks_and_what_was_cached() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
    reader, brought_text = take("completions", {"choices": [{"text": "x", "finish_reason": "length"}], "usage": usage})

    assert brought_text == [True]
    assert (reader.finish_reason, reader.usage, reader.done) == ("length", Usage(7, 1, 0), False)


@pytest.mark.parametrize(
    "chunk",
    [
        b"{",
        b"",
        b"\xff",
        b"[]",
        b"3",
        {},
        {"choices": None},
        {"choices": [3]},
        {"choices": [{}]},
        {"choices": [{"delta": "x"}]},
        {"choices": [{"delta": {"content": 3}}]},
        {"choices": [], "usage": 3},
        {"choices": [], "usage": {"prompt_tokens": 1}},
        {"choices": [], "usage": {"prompt_tokens": -1, "completion_tokens": 1}},
        {
            "choices": [],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": "1"}},
        },
    ],
    ids=repr,
)
def test_what_is_no_chunk_is_malformed(chunk: object) -> None:
    with pytest.raises(MalformedChunk):
        take("chat", chunk)


def test_anything_after_the_end_is_malformed() -> None:
    with pytest.raises(MalformedChunk, match="more after"):
        take("chat", b"[DONE]", {"choices": []})


def test_an_error_in_the_stream_is_the_servers() -> None:
    with pytest.raises(ServerFault, match="out of memory"):
        take("chat", {"error": {"message": "out of memory", "code": 500}})


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b'{"error": {"message": "full"}}', "full"),
        (b'{"error": "full"}', "full"),
        (b'{"detail": "x"}', '{"detail": "x"}'),
        (b"<html>", "<html>"),
        (b"[1]", "[1]"),
        (b"", "(empty)"),
        (b"\xff", "\ufffd"),
    ],
)
def test_error_messages(reply: bytes, message: str) -> None:
    assert error_message(reply) == message


def test_messages_are_plain_pairs() -> None:
    assert Message("user", "x")._asdict() == {"role": "user", "content": "x"}
