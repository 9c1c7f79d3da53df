"""Request bodies and headers. Nothing is ignored in silence: a field that we do not know, or do not support beyond its
neutral value, is refused by its name.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Literal, TypeVar

import msgspec

from kvstore.core.errors import ConfigError
from kvstore.core.traces import read_traceparent
from kvstore.engine_connector.engine.api_server.refusals import Refusal
from kvstore.engine_connector.engine.options import RequestOptions
from kvstore.engine_connector.engine.sampler import SamplingParams
from kvstore.engine_connector.protocol import CacheOptions

MAX_CHOICES = 128
"""Prompts times n of one request."""

UNLIMITED_TOKENS = 1 << 30
"""Until the model's context is full."""

COMPLETION_TOKENS = 16
"""OpenAI's default for completions; a chat has no limit but the context."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "functions": (None,),
    "logit_bias": (None, {}),
    "metadata": (),
    "min_tokens": (None, 0),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "user": (),
}
"""Fields that change nothing with these values; () stands for any value."""

_NEUTRAL_IN_MESSAGE: Mapping[str, tuple[object, ...]] = {
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "refusal": (None,),
    "tool_calls": (None, []),
}
"""What OpenAI's own answers carry, so that they can be sent back as part of the conversation."""

_NEUTRAL_IN_TRANSFER: Mapping[str, tuple[object, ...]] = {
    "remote_block_ids": (None,),
    "remote_engine_id": (None,),
    "remote_host": (None,),
    "remote_port": (None,),
    "remote_request_id": (None,),
    "tp_size": (None,),
}
"""What proxies for vLLM send empty, for instances that fetch from each other."""

_S = TypeVar("_S", bound=msgspec.Struct)
_V = TypeVar("_V", int, str)


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How to stream."""

    include_usage: bool | None = None


class CacheFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body's "kvstore": CacheOptions and RequestOptions."""

    salt: str | None = None
    no_store: bool | None = None
    no_read: bool | None = None
    priority: int | None = None
    ttl_s: float | None = None
    pin_s: float | None = None
    session_id: str | None = None
    label: str | None = None
    load_failure: Literal["recompute", "fail"] | None = None


class KVTransferParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A hand-over's part (hand_over.py)."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    first_token_ids: list[int] | None = None
    namespace: str | None = None


class Shared(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of request have. None is a field's default, as OpenAI's clients send it."""

    model: str
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    kvstore: CacheFields | None = None
    kv_transfer_params: KVTransferParams | None = None


class CompletionRequest(Shared, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None


class TextPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A piece of a message; other kinds than text are for other models."""

    type: Literal["text"]
    text: str


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Who says what."""

    role: str
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """All of it."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Shared, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises Refusal."""
    return _convert(_known_fields(body, CompletionRequest), CompletionRequest)


def parse_chat(body: bytes) -> ChatRequest:
    """Raises Refusal."""
    fields = _known_fields(body, ChatRequest)
    messages = fields.get("messages")
    if isinstance(messages, list):
        fields["messages"] = [
            _without_neutral(message, Message, f"messages[{i}].", _NEUTRAL_IN_MESSAGE)
            if isinstance(message, dict)
            else message
            for i, message in enumerate(messages)
        ]
    return _convert(fields, ChatRequest)


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """A text, a list of texts, token ids, or a list of lists of them. Raises Refusal for a mixture, and for too many."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise Refusal(HTTPStatus.BAD_REQUEST, "prompt: empty; give at least one", param="prompt")
    kinds = {type(part) for part in prompt}
    if kinds == {int}:
        return [[part for part in prompt if isinstance(part, int)]]
    if len(kinds) > 1:
        message = "prompt: a mixture; give a text, token ids, a list of texts, or a list of lists of token ids"
        raise Refusal(HTTPStatus.BAD_REQUEST, message, param="prompt")
    if len(prompt) * (request.n or 1) > MAX_CHOICES:
        message = f"n: {len(prompt)} prompts times {request.n or 1} are more than {MAX_CHOICES} choices"
        raise Refusal(HTTPStatus.BAD_REQUEST, message, param="n")
    return [part for part in prompt if not isinstance(part, int)]


def params_of(request: CompletionRequest | ChatRequest) -> SamplingParams:
    """How to sample. OpenAI's defaults: temperature 1; 16 tokens for a completion. Raises ConfigError, Refusal."""
    stop = request.stop or ()
    given: dict[str, Any] = {
        "top_p": request.top_p,
        "top_k": request.top_k,
        "seed": _seed(request.seed),
        "ignore_eos": request.ignore_eos,
        "n": request.n,
        "logprobs": _num_logprobs(request),
    }
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        max_tokens=_max_tokens(request),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        **{name: value for name, value in given.items() if value is not None},
    )


def options_of(request: CompletionRequest | ChatRequest, headers: Mapping[str, str]) -> RequestOptions:
    """What it wishes of queue and caches, wherever it says so. Raises ConfigError, Refusal."""
    fields = request.kvstore or CacheFields()
    salt = {
        "kvstore.salt": fields.salt,
        "cache_salt": request.cache_salt,
        "header x-kvstore-salt": headers.get("x-kvstore-salt"),
    }
    priority = {
        "kvstore.priority": fields.priority,
        "priority": request.priority,
        "header x-priority": _int_header(headers, "x-priority"),
    }
    session = {"kvstore.session_id": fields.session_id, "header x-session-id": headers.get("x-session-id")}
    cache = CacheOptions(
        salt=_one_of(salt, default=""),
        no_read=bool(fields.no_read),
        no_store=bool(fields.no_store),
        ttl_s=fields.ttl_s or 0.0,
        pin_s=fields.pin_s or 0.0,
        label=fields.label or "",
        session_id=_one_of(session, default=""),
    )
    return RequestOptions(
        priority=_one_of(priority, default=0),
        load_failure=fields.load_failure or "recompute",
        cache=cache,
        traceparent=read_traceparent(headers.get("traceparent", "")),
    )


def _known_fields(body: bytes, kind: type[msgspec.Struct]) -> dict[str, Any]:
    fields = _without_neutral(_decode(body), kind)
    transfer = fields.get("kv_transfer_params")
    if isinstance(transfer, dict):
        fields["kv_transfer_params"] = _without_neutral(
            transfer, KVTransferParams, "kv_transfer_params.", _NEUTRAL_IN_TRANSFER
        )
    return fields


def _decode(body: bytes) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError) as err:  # ValueError: a number of thousands of digits
        raise Refusal(HTTPStatus.BAD_REQUEST, f"body: not JSON: {err}", param="body") from err
    if not isinstance(decoded, dict):
        raise Refusal(HTTPStatus.BAD_REQUEST, f"body: a JSON {type(decoded).__name__}; give an object", param="body")
    return decoded


def _without_neutral(
    fields: dict[str, Any],
    kind: type[msgspec.Struct],
    path: str = "",
    neutral: Mapping[str, tuple[object, ...]] = _NEUTRAL,
) -> dict[str, Any]:
    """`fields` without those that change nothing. Raises Refusal for those that we do not know or do not support."""
    rest = {name: value for name, value in fields.items() if name in kind.__struct_fields__}
    unknown = [name for name in fields if name not in rest and name not in neutral]
    if unknown:
        names = ", ".join(repr(path + name[:100]) for name in sorted(unknown)[:20])
        raise Refusal(
            HTTPStatus.BAD_REQUEST, f"unknown fields: {names}", param=path + unknown[0][:100], code="unknown_parameter"
        )
    for name, value in fields.items():
        if name not in rest and neutral[name] and not any(_equal(value, ok) for ok in neutral[name]):
            right = " or ".join(msgspec.json.encode(ok).decode() for ok in neutral[name][1:])
            message = f"{path}{name}: not supported; leave it out" + (f", or give {right}" if right else "")
            raise Refusal(HTTPStatus.BAD_REQUEST, message, param=path + name, code="unsupported_parameter")
    return rest


def _equal(value: object, neutral: object) -> bool:
    """JSON's equality: true is not 1."""
    return value == neutral and isinstance(value, bool) is isinstance(neutral, bool)


def _convert(fields: dict[str, Any], kind: type[_S]) -> _S:
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, OverflowError) as err:  # OverflowError: an integer beyond any float
        message, _, path = str(err).partition(" - at ")
        name = path.strip("`").removeprefix("$.").removeprefix("$") or None
        raise Refusal(HTTPStatus.BAD_REQUEST, f"{name or 'body'}: {message}", param=name) from err


def _num_logprobs(request: CompletionRequest | ChatRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise Refusal(HTTPStatus.BAD_REQUEST, "top_logprobs: needs logprobs: true", param="top_logprobs")
    return None


def _max_tokens(request: CompletionRequest | ChatRequest) -> int:
    if isinstance(request, CompletionRequest):
        return COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    limits = {"max_completion_tokens": request.max_completion_tokens, "max_tokens": request.max_tokens}
    return _one_of(limits, default=UNLIMITED_TOKENS)


def _seed(seed: int | None) -> int | None:
    """OpenAI's seeds are signed; an unsigned one is taken too."""
    if seed is None or 0 <= seed < 1 << 64:
        return seed
    if not -(1 << 63) <= seed < 0:
        raise ConfigError(
            f"seed: {seed} is out of range; use a whole number of 64 bits, -2**63 to 2**64 - 1",
            field="seed",
            value=seed,
        )
    return seed + (1 << 64)


def _one_of(values: Mapping[str, _V | None], *, default: _V) -> _V:
    """The value that is given, in one place or the same in several."""
    given = {place: value for place, value in values.items() if value is not None}
    if len(set(given.values())) > 1:
        told = ", ".join(f"{place} {value!r}" for place, value in given.items())
        raise Refusal(HTTPStatus.BAD_REQUEST, f"contradiction: {told}; give one", param=next(iter(given)))
    return next(iter(given.values()), default)


def _int_header(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    if not (text.removeprefix("-").isascii() and text.removeprefix("-").isdigit() and len(text) < 20):
        raise ConfigError(f"{name}: {text[:40]!r} is not a whole number", field=name, value=text[:40])
    return int(text)
