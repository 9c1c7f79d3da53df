"""A prompt handed over from one server to another, as a proxy asks for it: prefilled at the producer, decoded at the consumer.

    proxy     producer   {..., "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": true}}
      |   <- answer      {..., "kv_transfer_params": {"do_remote_prefill": true, "first_token_ids": [7], "namespace": ...}}
      +---- consumer     {..., "kv_transfer_params": (what the producer answered)}
          <- answer      whole, its first token among it

The field and its switches are those of vLLM's connectors, so a proxy written for them needs no change; the blocks go through
the store and not from instance to instance, so nobody is told where anyone lives.
"""

from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any, NamedTuple

from kvstore.core.errors import ConfigError
from kvstore.engine_connector.engine.api_server.refusals import Refusal
from kvstore.engine_connector.engine.api_server.wire import ChatRequest, CompletionRequest
from kvstore.engine_connector.engine.outputs import RequestOutput
from kvstore.engine_connector.engine.sampler import SamplingParams
from kvstore.engine_connector.engine.sequence import FinishReason
from kvstore.engine_connector.protocol import HandOver

SAVE_DEADLINE_S = 10.0
"""A producer answers when all is saved, or after so long; then the consumer computes what it does not find."""

_FIELD = "kv_transfer_params"


class Part(NamedTuple):
    """A server's part in one request."""

    params: SamplingParams
    prefills: bool = False  # another server decodes
    first_token_ids: tuple[int, ...] = ()  # another server generated them


class HandOvers:
    """What a server of this role does with `kv_transfer_params`. `namespace` is that of its blocks."""

    def __init__(self, role: HandOver | None, namespace: str) -> None:
        self._role = role
        self._namespace = namespace

    def part_in(
        self,
        asked: CompletionRequest | ChatRequest,
        params: SamplingParams,
        prompts: Sequence[Sequence[int]],
        room: int,
    ) -> Part:
        """`room`: the most tokens of a prompt. Raises Refusal for what this server has no part in, ConfigError for blocks that
        are not its own."""
        given = asked.kv_transfer_params
        if given is not None and given.first_token_ids and not given.do_remote_prefill:
            raise _refusal("first_token_ids", "needs do_remote_prefill: true")
        if given is None or not (given.do_remote_decode or given.do_remote_prefill):
            return Part(params)
        if given.do_remote_decode and given.do_remote_prefill:
            raise _refusal("do_remote_decode", "and do_remote_prefill are both true; a server does one of the two")
        if given.do_remote_decode:
            self._need(HandOver.PRODUCER, "do_remote_decode")
            if asked.stream:
                raise _refusal(
                    "do_remote_decode", "needs stream: false; what the consumer needs comes with a whole answer"
                )
            return Part(replace(params, max_tokens=1), prefills=True)
        self._need(HandOver.CONSUMER, "do_remote_prefill")
        if given.namespace not in (None, self._namespace):
            raise ConfigError(
                f"{_FIELD}.namespace: the blocks of {given.namespace[:64]!r} are not ours ({self._namespace!r}); use servers of "
                "one model, block_tokens, kv_dtype, hash_seed and tenant",
                field=f"{_FIELD}.namespace",
                value=given.namespace[:64],
            )
        return Part(params, first_token_ids=_first_tokens(given.first_token_ids or (), params, prompts, room))

    def to_consumer(self, outputs: Sequence[RequestOutput]) -> dict[str, Any] | None:
        """What a producer answers: None when there is nothing to decode. With several samples no token is handed over; the
        consumer finds the prompts' full blocks and draws all tokens itself."""
        if all(output.finish_reason is not FinishReason.LENGTH for output in outputs):
            return None
        first = list(outputs[0].token_ids) if len(outputs) == 1 else []
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "first_token_ids": first,
            "namespace": self._namespace,
        }

    def _need(self, role: HandOver, switch: str) -> None:
        if self._role not in (role, HandOver.BOTH):
            is_now = f"is a {self._role}" if self._role else "hands nothing over"
            raise _refusal(switch, f"this server {is_now}; start it with --hand-over {role} or both")


def _first_tokens(
    given: Sequence[int], params: SamplingParams, prompts: Sequence[Sequence[int]], room: int
) -> tuple[int, ...]:
    """Those to go on from. None where the answer has no room for more than them, or is to have their logprobs, which only who
    draws them has: then the prompt's full blocks are fetched, and the rest is computed here."""
    if len(prompts) > 1 and given:
        raise _refusal("first_token_ids", f"{len(prompts)} prompts; hand over one at a time")
    ends = len(given) >= params.max_tokens or len(prompts[0]) + len(given) > room
    return () if ends or params.logprobs is not None else tuple(given)


def _refusal(name: str, problem: str) -> Refusal:
    return Refusal(HTTPStatus.BAD_REQUEST, f"{_FIELD}.{name}: {problem}", param=f"{_FIELD}.{name}")
