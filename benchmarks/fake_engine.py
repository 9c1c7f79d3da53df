"""An OpenAI-compatible server that computes nothing: a model of an engine's timing and prefix cache.

A word is a token. Prompts are prefilled one after the other, `prefill_s` for each token that is not cached; then each answers a
token every `token_s`, all side by side. What was prefilled and answered is cached in blocks of 16 tokens, the least recently
used go first. `python -m benchmarks.fake_engine` prints its address when it is ready.
"""

import asyncio
import json
import signal
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import click
from aiohttp import web

BLOCK_TOKENS = 16
_PATHS = ("/v1/completions", "/v1/chat/completions")


class PrefixCache:
    """Of `capacity_tokens`."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_blocks = capacity_tokens // BLOCK_TOKENS
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def num_cached(self, tokens: Sequence[str]) -> int:
        """Tokens of the longest cached prefix; one at least is always computed."""
        num_blocks = 0
        for key in _keys(tokens[: len(tokens) - 1]):
            if key not in self._blocks:
                break
            num_blocks += 1
        return num_blocks * BLOCK_TOKENS

    def add(self, tokens: Sequence[str]) -> None:
        """All of it is cached now; its end is forgotten before its beginning."""
        for key in reversed(_keys(tokens)):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._capacity_blocks:
            self._blocks.popitem(last=False)


def _keys(tokens: Sequence[str]) -> list[int]:
    keys, key = [], 0
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        key = hash((key, *tokens[end - BLOCK_TOKENS : end]))
        keys.append(key)
    return keys


class FakeEngine:
    """The server's state. GET /state tells it."""

    def __init__(self, *, prefill_s: float, token_s: float, capacity_tokens: int) -> None:
        self._prefill_s = prefill_s
        self._token_s = token_s
        self._cache = PrefixCache(capacity_tokens)
        self._gpu = asyncio.Lock()
        self._state = {"requests": 0, "running": 0, "most_running": 0, "hangups": 0}

    def application(self) -> web.Application:
        """Its routes."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/state", self._tell)
        for path in _PATHS:
            app.router.add_post(path, self._generate)
        return app

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model", "owned_by": "fake"}]})

    async def _tell(self, _: web.Request) -> web.Response:
        return web.json_response(self._state)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        state = self._state
        state["requests"] += 1
        state["running"] += 1
        state["most_running"] = max(state["most_running"], state["running"])
        try:
            return await self._answer(request, await request.json())
        except (asyncio.CancelledError, ConnectionError):
            state["hangups"] += 1
            raise
        finally:
            state["running"] -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        is_chat = "messages" in body
        text = " ".join(message["content"] for message in body["messages"]) if is_chat else body["prompt"]
        prompt = text.split()
        async with self._gpu:
            num_cached = self._cache.num_cached(prompt)
            await asyncio.sleep(self._prefill_s * (len(prompt) - num_cached))
            self._cache.add(prompt)
        answer = [f"w{(len(prompt) + number) % 97}" for number in range(body.get("max_tokens") or 16)]
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(answer),
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }
        if not body.get("stream"):
            await asyncio.sleep(self._token_s * len(answer))
            return web.json_response({"choices": [_choice(" ".join(answer), is_chat=is_chat)], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for token in answer:
            await response.write(_event({"choices": [_choice(f" {token}", is_chat=is_chat)]}))
            await asyncio.sleep(self._token_s)
        self._cache.add([*prompt, *answer])
        await response.write(_event({"choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        return response


def _choice(text: str, *, is_chat: bool) -> dict[str, Any]:
    return {"index": 0, "finish_reason": None, **({"delta": {"content": text}} if is_chat else {"text": text})}


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


@click.command()
@click.option("--port", default=0, show_default=True, help="0: any.")
@click.option("--prefill-s", default=50e-6, show_default=True, help="For each token that is not cached.")
@click.option("--token-s", default=1e-3, show_default=True, help="Between two tokens of an answer.")
@click.option("--capacity-tokens", default=1 << 20, show_default=True)
def main(*, port: int, prefill_s: float, token_s: float, capacity_tokens: int) -> None:
    asyncio.run(_serve(port, prefill_s=prefill_s, token_s=token_s, capacity_tokens=capacity_tokens))


async def _serve(port: int, **model: Any) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    app = FakeEngine(**model).application()
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    click.echo(f"fake engine ready url=http://127.0.0.1:{runner.addresses[0][1]}")
    await stop.wait()
    await runner.cleanup()


if __name__ == "__main__":
    main()
