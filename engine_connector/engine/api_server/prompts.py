"""Text to token ids on threads of their own: a long prompt takes the tokenizer a while, and neither the event loop nor the
engine waits for it.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus

from kvstore.core.errors import Overloaded
from kvstore.engine_connector.engine.api_server.refusals import Refusal
from kvstore.engine_connector.engine.api_server.wire import ChatRequest, CompletionRequest, prompts_of
from kvstore.engine_connector.engine.tokenizer import BPETokenizer, CheckLength

MAX_TOKENIZING = 64
"""Requests whose prompts wait for the tokenizer or are there. More: 429."""

TOKENIZE_DEADLINE_S = 30.0

_NUM_THREADS = 2


class Prompts:
    """Encodes for one model. A text that `check_length` refuses is not encoded."""

    def __init__(self, tokenizer: BPETokenizer, check_length: CheckLength) -> None:
        self._tokenizer = tokenizer
        self._check_length = check_length
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenizer")
        self._num_waiting = 0

    async def encode(self, request: CompletionRequest | ChatRequest) -> list[list[int]]:
        """Token ids of each prompt. Raises ConfigError for messages that the model does not take, Overloaded, Refusal."""
        if isinstance(request, CompletionRequest):
            prompts = prompts_of(request)
            if not any(isinstance(prompt, str) for prompt in prompts):
                return [list(prompt) for prompt in prompts if not isinstance(prompt, str)]
            texts = [prompt for prompt in prompts if isinstance(prompt, str)]
            return await self._run(
                lambda: [self._tokenizer.encode(text, check_length=self._check_length) for text in texts]
            )
        messages = [{"role": message.role, "content": message.text} for message in request.messages]
        return await self._run(lambda: [self._tokenizer.encode_chat(messages, check_length=self._check_length)])

    def close(self) -> None:
        """What runs is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, encode: Callable[[], list[list[int]]]) -> list[list[int]]:
        if self._num_waiting >= MAX_TOKENIZING:
            raise Overloaded(
                f"MAX_TOKENIZING: {MAX_TOKENIZING} prompts are being encoded",
                limit="MAX_TOKENIZING",
                value=MAX_TOKENIZING,
            )
        self._num_waiting += 1
        try:
            future = self._threads.submit(encode)
        except RuntimeError as err:  # shut down
            self._num_waiting -= 1
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "the server is stopping") from err
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._count_down))
        try:
            async with asyncio.timeout(TOKENIZE_DEADLINE_S):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise Refusal(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"prompt: not encoded within {TOKENIZE_DEADLINE_S:g} s",
                retry_after_s=1.0,
            ) from None

    def _count_down(self) -> None:
        self._num_waiting -= 1
