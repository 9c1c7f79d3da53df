"""A small OpenAI-compatible server on a real socket, in a thread of its own: answers from the prompt, misbehaves on demand."""

import asyncio
import contextlib
import hashlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Misbehave = Callable[[int, web.Request, dict[str, Any]], Awaitable[web.StreamResponse | None]]
START_DEADLINE_S = 10.0


def chunk(chat: bool, text: str | None, **more: Any) -> bytes:
    choice = {"index": 0, "finish_reason": None}
    choice |= (
        {"delta": {"content": text} if text is not None else {"role": "assistant", "content": ""}}
        if chat
        else {"text": text or ""}
    )
    return b"data: " + json.dumps({"choices": [choice | more.pop("choice", {})], **more}).encode() + b"\n\n"


@dataclass
class OpenAIServer:
    """`misbehave(number, request, body)` may answer instead; `number` counts the generations from 0. A prompt's words that
    were seen at the front of an earlier one, under the same salt, count as cached. `twist` changes the answers."""

    misbehave: Misbehave | None = None
    twist: str = ""
    owned_by: str = "somebody"
    sidecar: str | None = None
    token_s: float = 0.0
    with_usage: bool = True
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    sent_at: list[float] = field(default_factory=list)
    _seen: set[tuple[str, tuple[Any, ...]]] = field(default_factory=set)

    async def models(self, _: web.Request) -> web.Response:
        model = {"id": "tiny", "object": "model", "owned_by": self.owned_by}
        if self.sidecar is not None:
            model["sidecar"] = self.sidecar
        return web.json_response({"object": "list", "data": [model]})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.sent_at.append(asyncio.get_running_loop().time())
        if self.misbehave and (answer := await self.misbehave(number, request, body)) is not None:
            return answer
        return await self.answer(request, body)

    async def answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        chat = "messages" in body
        prompt = self.words(body)
        response = await start_stream(request)
        if chat:
            await response.write(chunk(chat, None))
        digest = hashlib.sha256(repr((prompt, self.twist)).encode()).hexdigest()
        for number in range(body["max_tokens"]):
            await asyncio.sleep(self.token_s)
            await response.write(chunk(chat, f" {digest[number % 60 : number % 60 + 4]}"))
        await response.write(chunk(chat, "", choice={"finish_reason": "length"}))
        if self.with_usage:
            usage = {
                "prompt_tokens": len(prompt),
                "completion_tokens": body["max_tokens"],
                "prompt_tokens_details": {"cached_tokens": self.cached(body, prompt)},
            }
            await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    @staticmethod
    def words(body: dict[str, Any]) -> tuple[Any, ...]:
        if "messages" in body:
            return tuple(word for message in body["messages"] for word in message["content"].split())
        return tuple(body["prompt"] if isinstance(body["prompt"], list) else body["prompt"].split())

    def cached(self, body: dict[str, Any], prompt: tuple[Any, ...]) -> int:
        salt = str(body.get("kvstore", {}).get("salt", "")) + str(body.get("cache_salt", ""))
        prefixes = [(salt, prompt[:size]) for size in range(4, len(prompt) + 1, 4)]
        hit = max((len(prefix) for salt, prefix in prefixes if (salt, prefix) in self._seen), default=0)
        self._seen.update(prefixes)
        return hit


async def start_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


@contextlib.contextmanager
def serving(server: OpenAIServer) -> Iterator[OpenAIServer]:
    """Serve on a free port until the block ends."""
    loop = asyncio.new_event_loop()
    ready, stop = threading.Event(), asyncio.Event()

    async def run() -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/v1/models", server.models)
        app.router.add_post("/v1/completions", server.generate)
        app.router.add_post("/v1/chat/completions", server.generate)
        runner = web.AppRunner(app, shutdown_timeout=0.2)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    try:
        assert ready.wait(START_DEADLINE_S)
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(START_DEADLINE_S)
        assert not thread.is_alive()
        loop.close()
