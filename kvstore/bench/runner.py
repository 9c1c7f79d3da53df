"""Asks one server a row of conversations, and gives back a sample for every request."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.bench.arrivals import Arrivals
from kvstore.bench.composer import Composer
from kvstore.bench.http_client import HttpClient
from kvstore.bench.sample import SKIPPED, Exchange, Failure, Sample
from kvstore.bench.workload import Conversation, asked_tokens
from kvstore.core.clock import Clock


class Part(NamedTuple):
    """What a run, or one round of it, brought; it took `duration_s` to the end of its last request."""

    samples: list[Sample]
    duration_s: float


class Runner:
    """For one server. `on_sample` is called as each request ends."""

    def __init__(
        self,
        client: HttpClient,
        composer: Composer,
        *,
        api: str,
        deadline_s: float,
        clock: Clock,
        on_sample: Callable[[Sample], None],
    ) -> None:
        self._client, self._composer, self._api = client, composer, api
        self._deadline_s, self._clock, self._on_sample = deadline_s, clock, on_sample
        self._origin_s = 0.0
        self._samples: list[Sample] = []

    async def run(self, conversations: Sequence[Conversation], arrivals: Arrivals, *, start_s: float = 0.0) -> Part:
        """Ends when each request has: each has a deadline. Times in the samples begin at `start_s`."""
        self._origin_s = self._clock.now_s() - start_s
        self._samples = []
        if arrivals.offsets_s:
            await self._run_open(conversations, arrivals.offsets_s, start_s)
        else:
            await self._run_closed(conversations, arrivals.concurrency)
        end_s = max((sample.exchange.done_s for sample in self._samples), default=start_s)
        return Part(self._samples, end_s - start_s)

    async def _run_open(
        self, conversations: Sequence[Conversation], offsets_s: Sequence[float], start_s: float
    ) -> None:
        async with asyncio.TaskGroup() as tasks:
            for conversation, offset_s in zip(conversations, offsets_s, strict=True):
                # Made before it is due: a prompt of 100,000 words takes some ten milliseconds.
                body = self._composer.body(conversation, 0, ())
                due_s = start_s + offset_s
                await asyncio.sleep(max(0.0, self._origin_s + due_s - self._clock.now_s()))
                tasks.create_task(self._converse(conversation, due_s, body))

    async def _run_closed(self, conversations: Sequence[Conversation], concurrency: int) -> None:
        waiting = iter(conversations)

        async def keep_asking() -> None:
            for conversation in waiting:
                await self._converse(conversation, None, self._composer.body(conversation, 0, ()))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(concurrency, len(conversations))):
                tasks.create_task(keep_asking())

    async def _converse(self, conversation: Conversation, due_s: float | None, body: bytes) -> None:
        answers: list[str] = []
        for turn, entry in enumerate(conversation.turns):
            if turn:
                body = self._composer.body(conversation, turn, answers)
                await asyncio.sleep(entry.think_s)
            exchange = await self._client.ask(self._api, body, self._deadline_s)
            self._record(conversation, turn, due_s if turn == 0 else None, exchange)
            if exchange.failure:
                self._skip(conversation, turn)
                return
            answers.append(exchange.text)

    def _skip(self, conversation: Conversation, failed: int) -> None:
        now_s = self._clock.now_s()
        failure = Failure(SKIPPED, f"turn {failed} of its conversation failed")
        for turn in range(failed + 1, len(conversation.turns)):
            self._record(conversation, turn, None, Exchange(now_s, now_s, failure=failure))

    def _record(self, conversation: Conversation, turn: int, due_s: float | None, exchange: Exchange) -> None:
        sample = Sample(
            conversation=conversation.index,
            turn=turn,
            asked_prompt_tokens=asked_tokens(conversation, turn),
            asked_output_tokens=conversation.turns[turn].output_tokens,
            due_s=due_s,
            exchange=dataclasses.replace(
                exchange,
                sent_s=exchange.sent_s - self._origin_s,
                done_s=exchange.done_s - self._origin_s,
                token_times_s=tuple(at_s - self._origin_s for at_s in exchange.token_times_s),
            ),
        )
        self._samples.append(sample)
        self._on_sample(sample)
