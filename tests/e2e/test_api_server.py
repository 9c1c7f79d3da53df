"""`kvstore engine serve` with the real `openai` package: what it answers is what the library says, in OpenAI's shapes."""

import contextlib
import http.client
import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from api_server_process import ANSWER_DEADLINE_S, BLOCK, MODEL, ApiServerProcess, running_api_server
from openai import OpenAI
from sidecar_process import SidecarProcess, running_sidecar, tool, wait_until
from tiny_llama import TOKENS, random_tensors, write_gguf

from kvstore.engine_connector.engine.llm import LLM
from kvstore.engine_connector.engine.outputs import RequestOutput
from kvstore.engine_connector.engine.sampler import SamplingParams

pytestmark = pytest.mark.e2e

PROMPT = "there are 12 moons, and then the other"
MESSAGES: list[Any] = [{"role": "system", "content": "short"}, {"role": "user", "content": "the 12 <|im_end|>"}]
FULL = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api")
    write_gguf(folder / "tiny.gguf", random_tensors())
    return folder


@pytest.fixture(scope="module")
def sidecar(folder: Path) -> Iterator[SidecarProcess]:
    with running_sidecar(folder) as process:
        yield process


@pytest.fixture(scope="module")
def server(folder: Path, sidecar: SidecarProcess) -> Iterator[ApiServerProcess]:
    flags = ("--socket", str(sidecar.socket), "--max-body-bytes", "100000")
    with running_api_server(folder / "tiny.gguf", "engine", *flags) as process:
        yield process
        process.wait_until_idle()
        with tool(sidecar) as watcher:
            assert watcher.stats().num_leases == 0


@pytest.fixture(scope="module")
def client(server: ApiServerProcess) -> Iterator[OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def library(folder: Path) -> Iterator[LLM]:
    """The same engine without server and store."""
    with LLM(folder / "tiny.gguf", num_pages=256, block_tokens=BLOCK, chunk_tokens=32, num_threads=1) as llm:
        yield llm


def greedy(library: LLM, prompt: str | list[int] = PROMPT, **changes: Any) -> RequestOutput:
    (output,) = library.generate([prompt], SamplingParams(**{"max_tokens": 24, "ignore_eos": True} | changes))
    return output


# --- what is answered ---------------------------------------------------------------------------------------------------


def test_the_model_is_listed(client: OpenAI) -> None:
    (listed,) = client.models.list().data

    assert listed.id == MODEL
    assert listed.owned_by == "kvstore"
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="model"):
        client.models.retrieve("other/model")


def test_a_completion_is_what_the_library_says(client: OpenAI, library: LLM) -> None:
    expected = greedy(library)

    answer = client.completions.create(model=MODEL, prompt=PROMPT, **FULL)

    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.num_prompt_tokens
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == expected.num_prompt_tokens + 24


def test_openais_defaults_hold(client: OpenAI) -> None:
    """16 tokens; temperature 1, so that two seeds differ."""
    body = {"ignore_eos": True}
    texts = set()
    for seed in range(3):
        answer = client.completions.create(model=MODEL, prompt=PROMPT, seed=seed, extra_body=body)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 16
        texts.add(answer.choices[0].text)

    assert len(texts) == 3


def test_streamed_pieces_are_the_whole(client: OpenAI, library: LLM) -> None:
    chunks = list(
        client.completions.create(
            model=MODEL, prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **FULL
        )
    )

    *pieces, last = chunks
    assert len(pieces) > 4
    assert "".join(chunk.choices[0].text for chunk in pieces) == greedy(library).text
    assert [chunk.choices[0].finish_reason for chunk in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in pieces)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 24


def test_a_chat_goes_through_the_models_template(client: OpenAI, library: LLM) -> None:
    """What a message says in control tokens stays text."""
    prompt = library.tokenizer.encode_chat(MESSAGES)
    expected = greedy(library, prompt)
    in_parts = [
        MESSAGES[0],
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("the 12 ", "<|im_end|>")]},
    ]

    for messages in (MESSAGES, in_parts):
        answer = client.chat.completions.create(model=MODEL, messages=messages, **FULL)

        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].message.content == expected.text
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(prompt)


def test_a_streamed_chat_begins_with_who_speaks(client: OpenAI, library: LLM) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, **FULL))

    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices for chunk in chunks), "usage that nobody asked for"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == greedy(library, library.tokenizer.encode_chat(MESSAGES)).text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_chat_answer_can_be_sent_back(client: OpenAI) -> None:
    """With the nulls that OpenAI's clients put into messages, and the second turn finds the first one's tokens."""
    first = client.chat.completions.create(model=MODEL, messages=MESSAGES, **FULL)
    said = first.choices[0].message.model_dump(exclude={"content"}) | {"content": "a fixed answer"}

    second = client.chat.completions.create(
        model=MODEL, messages=[*MESSAGES, said, {"role": "user", "content": "go on"}], **FULL
    )

    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= 16


def test_without_a_limit_a_chat_ends_with_the_context(client: OpenAI, server: ApiServerProcess) -> None:
    (listed,) = client.models.list().data
    longest = listed.max_model_len  # type: ignore[attr-defined]

    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
    )

    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == longest + 1


def test_samples_differ_and_repeat_with_their_seed(client: OpenAI) -> None:
    def ask(seed: int, n: int) -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt=PROMPT, n=n, seed=seed, max_tokens=12, extra_body={"ignore_eos": True}
        )
        assert [choice.index for choice in answer.choices] == list(range(n))
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 12 * n
        return [choice.text for choice in answer.choices]

    first = ask(-5, 4)

    assert len(set(first)) == 4
    assert ask(-5, 4) == first
    assert ask(-5, 1) == first[:1]
    assert ask(6, 4) != first


def test_samples_stream_side_by_side(client: OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "n": 3, "seed": 8, "max_tokens": 10}
    whole = client.completions.create(**body, extra_body={"ignore_eos": True})
    texts, ends = ["", "", ""], dict.fromkeys(range(3), 0)

    for chunk in client.completions.create(**body, stream=True, extra_body={"ignore_eos": True}):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        ends[choice.index] += choice.finish_reason is not None

    assert texts == [choice.text for choice in whole.choices]
    assert set(ends.values()) == {1}


def test_several_prompts_have_their_choices_in_order(client: OpenAI, library: LLM) -> None:
    prompts = [PROMPT, "1", "the end"]
    ids = [library.tokenizer.encode(prompt) for prompt in prompts]
    expected = [greedy(library, prompt).text for prompt in prompts]

    for asked in (prompts, ids):
        answer = client.completions.create(model=MODEL, prompt=asked, n=2, **FULL)

        assert [choice.text for choice in answer.choices] == [text for text in expected for _ in range(2)]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, ids))
    single = client.completions.create(model=MODEL, prompt=ids[0], **FULL)
    assert single.choices[0].text == expected[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(client: OpenAI, library: LLM, stream: bool) -> None:
    text = greedy(library).text
    stop = text[8:10]
    at = text.index(stop)

    answer = client.completions.create(model=MODEL, prompt=PROMPT, stop=["never said", stop], stream=stream, **FULL)

    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]  # type: ignore[union-attr]
    assert "".join(choice.text for choice in choices) == text[:at]
    assert choices[-1].finish_reason == "stop"


def test_logprobs_of_a_completion(client: OpenAI, library: LLM) -> None:
    expected = greedy(library, logprobs=3)
    assert expected.logprobs is not None

    answer = client.completions.create(model=MODEL, prompt=PROMPT, logprobs=3, **FULL)

    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs == pytest.approx([entry.logprob for entry in expected.logprobs], abs=1e-3)
    assert [len(top) for top in found.top_logprobs or []] == [3] * 24
    for token, chosen, top in zip(found.tokens, found.token_logprobs or [], found.top_logprobs or [], strict=True):
        assert chosen == max(top.values()), "greedy takes the best"
        assert top[token] == chosen
    assert found.text_offset == [sum(map(len, found.tokens[:i])) for i in range(24)]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat(client: OpenAI, library: LLM, stream: bool) -> None:
    expected = greedy(library, library.tokenizer.encode_chat(MESSAGES), logprobs=2)
    assert expected.logprobs is not None

    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2, stream=stream, **FULL
    )

    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]  # type: ignore[union-attr]
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or []]
    assert [entry.logprob for entry in entries] == pytest.approx([e.logprob for e in expected.logprobs], abs=1e-3)
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode(errors="replace") == expected.text
    for entry in entries:
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )
        assert entry.token == entry.top_logprobs[0].token
        assert math.exp(entry.logprob) <= 1


# --- caches -------------------------------------------------------------------------------------------------------------


def cached(client: OpenAI, prompt: list[int], *, headers: dict[str, str] | None = None, **body: Any) -> int:
    answer = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=2, temperature=0, extra_body=body, extra_headers=headers
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def prompt_of(seed: int) -> list[int]:
    """41 tokens, of which ten blocks can be found."""
    return [3 + (seed * 41 + i * i) % (len(TOKENS) - 3) for i in range(41)]


def test_salts_keep_prefixes_apart_wherever_they_are_given(client: OpenAI) -> None:
    prompt = prompt_of(1)

    assert cached(client, prompt) == 0
    assert cached(client, prompt) == 40
    assert cached(client, prompt, kvstore={"salt": "a"}) == 0
    assert cached(client, prompt, cache_salt="a") == 40
    assert cached(client, prompt, headers={"x-kvstore-salt": "a"}) == 40
    assert cached(client, prompt, headers={"x-kvstore-salt": "b"}) == 0
    assert cached(client, prompt, kvstore={"salt": "a"}, cache_salt="a") == 40, "the same twice is no contradiction"


def test_a_request_may_neither_read_nor_store(client: OpenAI) -> None:
    prompt = prompt_of(2)

    assert cached(client, prompt, kvstore={"no_store": True}) == 0
    assert cached(client, prompt) == 0
    assert cached(client, prompt, kvstore={"no_read": True}) == 0
    assert cached(client, prompt, kvstore={"no_read": False, "no_store": None}, priority=-2) == 40


def test_another_engine_fetches_what_this_one_computed(
    client: OpenAI, server: ApiServerProcess, sidecar: SidecarProcess, folder: Path
) -> None:
    prompt = prompt_of(3)
    assert cached(client, prompt, kvstore={"session_id": "one", "load_failure": "fail"}) == 0
    server.wait_until_idle()
    assert server.get("/kvstore/sessions/one/prefetch", "POST") == (200, b'{"session_id":"one","blocks":10}')

    with running_api_server(folder / "tiny.gguf", "other", "--socket", str(sidecar.socket)) as other:
        with other.client() as its_client:
            assert cached(its_client, prompt) == 40
        figures = other.figures()
        assert figures["kvstore_engine_cached_tokens_total fetched"] == 40
        assert figures["kvstore_engine_cached_tokens_total local"] == 0

    salted = {"x-kvstore-salt": "another"}
    assert server.get("/kvstore/sessions/one", "DELETE", **salted) == (200, b'{"session_id":"one","blocks":0}')
    assert server.get("/kvstore/sessions/one", "DELETE") == (200, b'{"session_id":"one","blocks":10}')
    assert server.get("/kvstore/sessions/one", "DELETE") == (200, b'{"session_id":"one","blocks":0}')


# --- what is refused ----------------------------------------------------------------------------------------------------


CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
LONG = [5] * 2000

WRONG = [
    ({"model": "other"}, 404, "model"),
    ({"model": 7}, 400, "model"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": ["a", 3]}, 400, "prompt"),
    ({"prompt": [[3, "a"]]}, 400, "prompt[0][1]"),
    ({"prompt": [100_000]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": LONG}, 400, "prompt"),
    ({"prompt": None}, 400, "prompt"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": 1.5}, 400, "max_tokens"),
    ({"temperature": -1}, 400, "temperature"),
    ({"temperature": 10**400}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_k": -1}, 400, "top_k"),
    ({"n": 0}, 400, "n"),
    ({"n": 17}, 400, "n"),
    ({"n": True}, 400, "n"),
    ({"n": 8, "prompt": ["a"] * 17}, 400, "n"),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"stop": [""]}, 400, "stop"),
    ({"stop": ["x"] * 17}, 400, "stop"),
    ({"seed": 1 << 70}, 400, "seed"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, 400, "stream_options"),
    ({"echo": True}, 400, "echo"),
    ({"best_of": 3}, 400, "best_of"),
    ({"best_of": True}, 400, "best_of"),
    ({"suffix": "end"}, 400, "suffix"),
    ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
    ({"presence_penalty": 0.5}, 400, "presence_penalty"),
    ({"guided_json": {}}, 400, "guided_json"),
    ({"messages": MESSAGES}, 400, "messages"),
    ({"kvstore": {"salty": "a"}}, 400, "kvstore"),
    ({"kvstore": {"ttl_s": -1}}, 400, "ttl_s"),
    ({"kvstore": {"pin_s": "1"}}, 400, "kvstore.pin_s"),
    ({"kvstore": {"label": "two\nlines"}}, 400, "label"),
    ({"kvstore": {"label": "l" * 65}}, 400, "label"),
    ({"kvstore": {"load_failure": "ignore"}}, 400, "kvstore.load_failure"),
    ({"kvstore": {"salt": "a" * 5000}}, 400, "salt"),
    ({"kvstore": {"salt": "a"}, "cache_salt": "b"}, 400, "kvstore.salt"),
    ({"kvstore": {"priority": 1}, "priority": 2}, 400, "kvstore.priority"),
    ({"priority": 1 << 40}, 400, "priority"),
]
WRONG_CHAT = [
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0]"),
    ({"messages": [{"role": "user", "content": None}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, 400, "messages[0].name"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, 400, "messages[0].tool_calls"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        400,
        "messages[0].content[0].type",
    ),
    ({"messages": "hello"}, 400, "messages"),
    ({"top_logprobs": 2}, 400, "top_logprobs"),
    ({"logprobs": 2}, 400, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "logprobs"),
    ({"max_completion_tokens": 3}, 400, "max_completion_tokens"),
    ({"tools": [{"type": "function"}]}, 400, "tools"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format"),
    ({"prompt": "a"}, 400, "prompt"),
]


@pytest.mark.parametrize(("change", "status", "param"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_completion_is_refused_by_field(
    client: OpenAI, change: dict[str, Any], status: int, param: str
) -> None:
    check_refused(client, "/completions", COMPLETION | change, status, param)


@pytest.mark.parametrize(("change", "status", "param"), WRONG_CHAT, ids=lambda value: str(value)[:40])
def test_a_wrong_chat_is_refused_by_field(client: OpenAI, change: dict[str, Any], status: int, param: str) -> None:
    check_refused(client, "/chat/completions", CHAT | change, status, param)


def check_refused(client: OpenAI, path: str, body: dict[str, Any], status: int, param: str) -> None:
    with pytest.raises(openai.APIStatusError) as refusal:
        client.post(path, body=body, cast_to=object)

    error = refusal.value
    assert error.status_code == status
    assert error.param == param
    assert param.rpartition(".")[2].split("[")[0] in error.message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"stop": [""]}, "stop: '' has 0 characters; use texts of 1 to 256 characters"),
        ({"seed": -(1 << 63) - 1}, "use a whole number of 64 bits, -2**63 to 2**64 - 1"),
    ],
)
def test_a_refusal_says_what_would_be_right(client: OpenAI, change: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.post("/completions", body=COMPLETION | change, cast_to=object)

    assert says in refusal.value.message


def test_all_unknown_fields_are_named(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.post("/completions", body=COMPLETION | {"one": 1, "two": None}, cast_to=object)

    assert "'one', 'two'" in refusal.value.message


def test_harmless_fields_are_taken(client: OpenAI) -> None:
    """What clients send with its neutral value."""
    body = {
        "user": "me",
        "metadata": {"a": "b"},
        "best_of": 1,
        "echo": False,
        "logit_bias": {},
        "presence_penalty": 0.0,
    }

    assert client.post("/completions", body=COMPLETION | body | {"suffix": None, "n": None}, cast_to=object)


@pytest.mark.parametrize("header", ["x-priority", "x-session-id", "x-kvstore-salt"])
def test_wrong_headers_are_refused(client: OpenAI, header: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model=MODEL, prompt=PROMPT, extra_headers={header: "a" * 5000})

    assert refusal.value.param in {"x-priority", "session_id", "salt"}


def test_bodies_and_paths_that_cannot_be_served(server: ApiServerProcess) -> None:
    json_type = {"Content-Type": "application/json"}
    cases = [
        (b"{" + b" " * 100_000 + b"}", json_type, 413),
        (b"{}", {"Content-Type": "text/plain"}, 415),
        (b"{}", json_type | {"Content-Encoding": "gzip"}, 415),
        (b"not json", json_type, 400),
        (b"[" * 50_000, json_type, 400),
        (b'{"model": "\\ud800"}', json_type, 400),
        (b'{"model": "\xff"}', json_type, 400),
        (b'{"n": ' + b"1" * 5000 + b"}", json_type, 400),
        (b"[]", json_type, 400),
        (b"", json_type, 400),
    ]
    for body, headers, status in cases:
        assert post(server, body, headers) == (status, "invalid_request_error"), body[:20]
    for method, path, status in (("GET", "/v1/completions", 405), ("POST", "/nowhere", 404), ("PUT", "/metrics", 405)):
        answered, error = server.get(path, method)
        assert answered == status
        assert path in json.loads(error)["error"]["message"]


def post(server: ApiServerProcess, body: bytes, headers: dict[str, str]) -> tuple[int, str]:
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_DEADLINE_S)
    ) as connection:
        connection.request("POST", "/v1/completions", body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())["error"]["type"]


# --- figures ------------------------------------------------------------------------------------------------------------


def test_figures_move_with_what_is_answered(client: OpenAI, server: ApiServerProcess) -> None:
    prompt = prompt_of(4)
    cached(client, prompt)
    before = server.figures()

    for _ in client.completions.create(model=MODEL, prompt=prompt, stream=True, **FULL):
        pass

    server.wait_until_idle()
    after = server.figures()
    moved = {name: after[name] - before[name] for name in before if after[name] != before[name]}
    assert moved["kvstore_engine_output_tokens_total"] == 24
    assert moved["kvstore_engine_prompt_tokens_total"] == 41
    assert moved["kvstore_engine_cached_tokens_total local"] == 40
    assert moved["kvstore_engine_prefill_tokens_total local_cached"] == 40
    assert moved["kvstore_engine_ttft_seconds_count"] == 1
    assert moved["kvstore_engine_itl_seconds_count"] == 23
    assert moved["kvstore_engine_samples_total length"] == 1
    assert server.get("/healthz") == (200, b"ok\n")


# --- clients that misbehave, and the end ------------------------------------------------------------------------------------


@pytest.fixture
def small(folder: Path) -> Iterator[ApiServerProcess]:
    """One request at a time, one in the queue, few unread bytes."""
    flags = ("--no-store", "--max-batch", "1", "--max-waiting", "1", "--max-unsent-bytes", "4096")
    with running_api_server(folder / "tiny.gguf", "small", *flags) as process:
        yield process


def open_stream(server: ApiServerProcess, *, read_buffer: int | None = None, **changes: Any) -> socket.socket:
    """A completion is asked for; nothing is read."""
    body = json.dumps(COMPLETION | {"max_tokens": 1000, "stream": True, "ignore_eos": True} | changes).encode()
    sock = socket.socket()
    if read_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, read_buffer)
    sock.settimeout(ANSWER_DEADLINE_S)
    sock.connect(("127.0.0.1", server.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)
    return sock


def read_until(sock: socket.socket, mark: bytes) -> bool:
    """Whether `mark` comes before the end."""
    seen = b""
    while mark not in seen and (data := sock.recv(1 << 16)):
        seen = seen[-len(mark) :] + data
    return mark in seen


def test_a_full_queue_says_when_to_come_back(small: ApiServerProcess) -> None:
    """And whoever waits or runs is not touched."""
    streams = [open_stream(small, max_tokens=400), open_stream(small, max_tokens=400)]
    wait_until(lambda: small.figures()["kvstore_engine_requests waiting"] == 1, "one runs, one waits")

    with small.client() as client, pytest.raises(openai.RateLimitError) as refusal:
        client.completions.create(model=MODEL, prompt=PROMPT)

    assert int(refusal.value.response.headers["Retry-After"]) >= 1
    assert refusal.value.code == "queue_full"
    for stream in streams:
        with stream:
            assert read_until(stream, b"data: [DONE]")
    small.wait_until_idle()


def test_prompts_are_queued_all_or_none(small: ApiServerProcess) -> None:
    with open_stream(small, max_tokens=400) as stream:
        wait_until(lambda: small.figures()["kvstore_engine_requests running"] == 1, "one runs")
        prefilled = small.figures()["kvstore_engine_prefill_tokens_total prefilled"]

        with small.client() as client, pytest.raises(openai.RateLimitError):
            client.completions.create(model=MODEL, prompt=["one", "two"], max_tokens=900)

        assert read_until(stream, b"data: [DONE]")
    small.wait_until_idle()
    assert small.figures()["kvstore_engine_prefill_tokens_total prefilled"] == prefilled


def test_more_prompts_than_ever_find_room_are_not_told_to_come_back(small: ApiServerProcess) -> None:
    """One runs and one waits: three at once are refused by an idle server too."""
    with small.client() as client, pytest.raises(openai.BadRequestError, match="3 prompts") as refusal:
        client.completions.create(model=MODEL, prompt=["one", "two", "three"])

    assert refusal.value.param == "prompt"
    small.wait_until_idle()
    assert small.figures()["kvstore_engine_refused_total"] == 0


def test_a_reader_who_does_not_read_is_cut_off(small: ApiServerProcess) -> None:
    """What fits nowhere is not kept: the request ends long before its last token, and the next one is served."""
    with open_stream(small, read_buffer=4096, logprobs=20):
        wait_until(lambda: small.figures()["kvstore_engine_hangups_total"] == 1, "cut off", ANSWER_DEADLINE_S)
        small.wait_until_idle()
        assert small.figures()["kvstore_engine_output_tokens_total"] == 0, "it was not answered in full"
    with small.client() as client:
        assert client.completions.create(model=MODEL, prompt=PROMPT, **FULL).choices[0].finish_reason == "length"


def test_sigterm_tells_streams_and_ends(small: ApiServerProcess) -> None:
    errors: list[openai.APIError] = []

    def read() -> None:
        with small.client() as client:
            stream = client.completions.create(
                model=MODEL, prompt=PROMPT, max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
            )
            try:
                for _ in stream:
                    running.set()
            except openai.APIError as err:
                errors.append(err)

    running = threading.Event()
    reader = threading.Thread(target=read)
    reader.start()
    assert running.wait(ANSWER_DEADLINE_S)
    started_s = time.monotonic()
    small.terminate()
    reader.join(ANSWER_DEADLINE_S)
    assert small.stop() == 0

    assert time.monotonic() - started_s < 10
    assert [err.message for err in errors] == ["the server is stopping"]
