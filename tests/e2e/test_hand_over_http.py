"""Two `kvstore engine serve` on one sidecar behind a proxy that was written for vLLM's P/D: the prompt is prefilled at one, the
other prefills nothing, and the client gets what one server alone answers."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from api_server_process import MODEL, ApiServerProcess, running_api_server
from openai import OpenAI
from sidecar_process import SidecarProcess, running_sidecar, tool
from tiny_llama import TOKENS, random_tensors, write_gguf

from kvstore.engine_connector.engine.llm import LLM
from kvstore.engine_connector.engine.outputs import RequestOutput
from kvstore.engine_connector.engine.sampler import SamplingParams

pytestmark = pytest.mark.e2e

NUM_TOKENS = 12
EMPTY = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
Json = dict[str, Any]


class Proxy:
    """Asks as vLLM's disaggregated proxies do: all that it knows of the hand-over is to pass `kv_transfer_params` on."""

    def __init__(self, producer: ApiServerProcess, consumer: ApiServerProcess) -> None:
        self.producer, self.consumer = producer.client(), consumer.client()
        self.transfer: Json | None = None  # what the producer answered last

    def ask(self, path: str, body: Json) -> Json:
        self.prefill(path, body)
        return self.post(self.consumer, path, body | {"kv_transfer_params": self.transfer})

    def prefill(self, path: str, body: Json) -> Json:
        transfer = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(EMPTY)
        changes: Json = {"kv_transfer_params": transfer, "stream": False, "max_tokens": 1}
        if "max_completion_tokens" in body:
            changes["max_completion_tokens"] = 1
        answer = self.post(self.producer, path, {k: v for k, v in body.items() if k != "stream_options"} | changes)
        self.transfer = answer["kv_transfer_params"]
        return answer

    @staticmethod
    def post(client: OpenAI, path: str, body: Json) -> Json:
        answer = client.post(path, body={"model": MODEL} | body, cast_to=object)
        assert isinstance(answer, dict)
        return answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hand-over")
    write_gguf(folder / "tiny.gguf", random_tensors())
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[LLM]:
    with LLM(folder / "tiny.gguf", num_pages=256, block_tokens=4, chunk_tokens=32, num_threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def sidecar(folder: Path) -> Iterator[SidecarProcess]:
    with running_sidecar(folder, "--no-grpc") as process:
        yield process


@pytest.fixture(scope="module")
def consumer(folder: Path, sidecar: SidecarProcess) -> Iterator[ApiServerProcess]:
    flags = ("--socket", str(sidecar.socket), "--hand-over", "consumer", "--layerwise", "--fetch", "always")
    with running_api_server(folder / "tiny.gguf", "consumer", *flags) as process:
        yield process
        process.wait_until_idle()


@pytest.fixture(scope="module")
def proxy(folder: Path, sidecar: SidecarProcess, consumer: ApiServerProcess) -> Iterator[Proxy]:
    flags = ("--socket", str(sidecar.socket), "--hand-over", "producer")
    with running_api_server(folder / "tiny.gguf", "producer", *flags) as producer:
        proxy = Proxy(producer, consumer)
        with contextlib.closing(proxy.producer), contextlib.closing(proxy.consumer):
            yield proxy
        producer.wait_until_idle()
    with tool(sidecar) as watcher:
        assert watcher.stats().num_leases == 0


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    return [3 + (seed * 37 + i * i) % (len(TOKENS) - 3) for i in range(num_tokens)]


def body_of(prompt: list[int] | str, **more: Any) -> Json:
    return {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True} | more


def expect(alone: LLM, prompt: list[int] | str, **params: Any) -> RequestOutput:
    (output,) = alone.generate([prompt], SamplingParams(**({"max_tokens": NUM_TOKENS, "ignore_eos": True} | params)))
    return output


def num_prefilled(server: ApiServerProcess) -> float:
    return server.figures()["kvstore_engine_prefill_tokens_total prefilled"]


@pytest.mark.parametrize("num_tokens", [1, 4, 42, 63])
def test_the_consumer_prefills_nothing_and_the_answer_is_that_of_one_server(
    proxy: Proxy, consumer: ApiServerProcess, alone: LLM, num_tokens: int
) -> None:
    prompt, before = prompt_of(num_tokens, num_tokens), num_prefilled(consumer)

    answer = proxy.ask("/completions", body_of(prompt))

    expected = expect(alone, prompt)
    assert answer["choices"][0]["text"] == expected.text
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == NUM_TOKENS
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == num_tokens
    assert num_prefilled(consumer) == before
    assert proxy.transfer is not None
    assert proxy.transfer["first_token_ids"] == [expected.token_ids[0]]
    assert "kv_transfer_params" not in answer


def test_a_chat_is_handed_over_and_streamed(proxy: Proxy, consumer: ApiServerProcess, alone: LLM) -> None:
    messages: list[Any] = [{"role": "user", "content": "the 12 moons and what they are called by others"}]
    body = {"messages": messages, "max_completion_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    proxy.prefill("/chat/completions", body)
    before = num_prefilled(consumer)

    chunks = proxy.consumer.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_completion_tokens=NUM_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "kv_transfer_params": proxy.transfer},
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    assert text == expect(alone, alone.tokenizer.encode_chat(messages)).text
    assert num_prefilled(consumer) == before


def test_seeded_samples_go_on_where_the_producer_stopped(proxy: Proxy, alone: LLM) -> None:
    prompt = prompt_of(5, 30)

    answer = proxy.ask("/completions", body_of(prompt, temperature=1, seed=11))

    assert answer["choices"][0]["text"] == expect(alone, prompt, temperature=1.0, seed=11).text


def test_an_answer_of_one_token_is_the_consumers_own(proxy: Proxy, alone: LLM) -> None:
    """There is nothing to go on with behind the producer's; full blocks are fetched, so the tail alone is computed."""
    prompt = prompt_of(6, 30)

    answer = proxy.ask("/completions", body_of(prompt, max_tokens=1))

    assert answer["choices"][0]["text"] == expect(alone, prompt, max_tokens=1).text
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 28


def test_an_answer_that_ended_at_the_producer_is_not_handed_over(proxy: Proxy, alone: LLM) -> None:
    prompt = prompt_of(7, 30)
    stop = expect(alone, prompt, max_tokens=1).text
    assert stop

    answer = proxy.ask("/completions", body_of(prompt, stop=[stop]))

    assert proxy.transfer is None
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "stop")


def test_with_logprobs_every_token_has_one(proxy: Proxy, alone: LLM) -> None:
    prompt = prompt_of(8, 30)

    answer = proxy.ask("/completions", body_of(prompt, logprobs=1))

    choice = answer["choices"][0]
    assert choice["text"] == expect(alone, prompt).text
    assert len(choice["logprobs"]["tokens"]) == NUM_TOKENS
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 28


def test_several_samples_are_drawn_by_the_consumer(proxy: Proxy) -> None:
    prompt = prompt_of(9, 30)

    answer = proxy.ask("/completions", body_of(prompt, n=2, temperature=1, seed=3))

    assert proxy.transfer is not None
    assert proxy.transfer["first_token_ids"] == []
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 2 * NUM_TOKENS
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 28


def test_a_salt_is_the_same_at_both(proxy: Proxy, alone: LLM) -> None:
    prompt = prompt_of(10, 30)
    proxy.prefill("/completions", body_of(prompt, kvstore={"salt": "ours"}))

    theirs, ours = (
        proxy.post(
            proxy.consumer,
            "/completions",
            body_of(prompt, kvstore={"salt": salt}, kv_transfer_params=proxy.transfer),
        )
        for salt in ("theirs", "ours")
    )

    assert [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (theirs, ours)] == [0, 30]
    assert theirs["choices"][0]["text"] == ours["choices"][0]["text"] == expect(alone, prompt).text


def test_both_say_which_sidecar_they_use(proxy: Proxy, sidecar: SidecarProcess) -> None:
    proxy.ask("/completions", body_of(prompt_of(12, 30)))
    with tool(sidecar) as watcher:
        boot_id = watcher.stats().boot_id.hex()

    for client in (proxy.producer, proxy.consumer):
        (model,) = client.models.list().data
        assert model.model_extra is not None
        assert model.model_extra["sidecar"] == boot_id


DECODE, PREFILL = {"do_remote_decode": True}, {"do_remote_prefill": True}


@pytest.mark.parametrize(
    ("at", "body", "param", "says"),
    [
        ("consumer", {"kv_transfer_params": DECODE}, "do_remote_decode", "this server is a consumer; start it with"),
        ("producer", {"kv_transfer_params": PREFILL}, "do_remote_prefill", "--hand-over consumer or both"),
        ("producer", {"kv_transfer_params": DECODE, "stream": True}, "do_remote_decode", "needs stream: false"),
        ("producer", {"kv_transfer_params": DECODE | PREFILL}, "do_remote_decode", "one of the two"),
        ("consumer", {"kv_transfer_params": PREFILL | {"namespace": "00"}}, "namespace", "are not ours"),
        ("consumer", {"kv_transfer_params": PREFILL | {"remote_host": "a"}}, "remote_host", "leave it out"),
        ("consumer", {"kv_transfer_params": PREFILL | {"spare": 1}}, "spare", "unknown fields"),
        ("consumer", {"kv_transfer_params": PREFILL | {"first_token_ids": ["a"]}}, "first_token_ids[0]", "int"),
        (
            "producer",
            {"kv_transfer_params": DECODE | {"first_token_ids": [7]}},
            "first_token_ids",
            "needs do_remote_pre",
        ),
        ("consumer", {"kv_transfer_params": {"first_token_ids": [7]}}, "first_token_ids", "needs do_remote_prefill"),
        (
            "consumer",
            {"prompt": [[5], [6]], "kv_transfer_params": PREFILL | {"first_token_ids": [7]}},
            "first_token_ids",
            "hand over one at a time",
        ),
    ],
)
def test_what_a_server_has_no_part_in_is_refused(proxy: Proxy, at: str, body: Json, param: str, says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        proxy.post(getattr(proxy, at), "/completions", body_of([5, 6, 7]) | body)

    assert caught.value.param == f"kv_transfer_params.{param}"


@pytest.mark.parametrize("transfer", [None, {}, {"do_remote_decode": False, "do_remote_prefill": False}])
def test_a_request_without_a_hand_over_is_one_like_any_other(proxy: Proxy, alone: LLM, transfer: Json | None) -> None:
    prompt = prompt_of(11, 30)

    for client in (proxy.producer, proxy.consumer):
        answer = proxy.post(client, "/completions", body_of(prompt, kv_transfer_params=transfer))
        assert answer["choices"][0]["text"] == expect(alone, prompt).text
