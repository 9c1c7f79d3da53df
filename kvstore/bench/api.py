"""OpenAI's shapes: request bodies, and the chunks of a streamed answer. No I/O."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvstore.bench.sample import Usage
from kvstore.core.errors import ConfigError

PATHS = {"completions": "/completions", "chat": "/chat/completions"}
"""Below the base address, which ends in /v1."""

OURS = ("model", "prompt", "messages", "stream", "stream_options", "max_tokens", "temperature", "seed", "ignore_eos")
"""Fields that the benchmark sets itself."""

_MAX_MESSAGE = 300
DONE = b"[DONE]"


class Message(NamedTuple):
    """Part of a prompt: who says what."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class RequestForm:
    """What all requests of a run have in common. `extra` goes into the body as it is."""

    api: str
    model: str
    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.extra:
            if name in OURS:
                raise ConfigError(
                    f"extra-body: {name!r} is set by the benchmark; leave it out, or use its own option",
                    field="extra-body",
                    value=name,
                )

    def body(
        self, prompt: list[Message] | list[int], max_tokens: int, more: Mapping[str, Mapping[str, Any] | str]
    ) -> bytes:
        """JSON. `more` is added to `extra`, objects to objects of the same name. Token ids need the completions API, which
        gets the text of messages in a row."""
        fields: dict[str, Any] = {"model": self.model}
        if self.api == "chat":
            fields["messages"] = [message._asdict() for message in prompt if isinstance(message, Message)]
        elif prompt and isinstance(prompt[0], int):
            fields["prompt"] = prompt
        else:
            fields["prompt"] = "".join(message.content for message in prompt if isinstance(message, Message))
        fields |= {"max_tokens": max_tokens, "temperature": self.temperature}
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.seed is not None:
            fields["seed"] = self.seed
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return json.dumps(fields | _merged(self.extra, more)).encode()


def _merged(extra: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        name: {**extra[name], **more[name]}
        for name in extra.keys() & more.keys()
        if isinstance(extra[name], dict) and isinstance(more[name], dict)
    }
    return {**extra, **more, **both}


class MalformedChunk(ValueError):
    """An event that is not a chunk."""


class ServerFault(ValueError):
    """An error object in the stream."""


class AnswerReader:
    """Puts the events of one stream together."""

    def __init__(self, api: str) -> None:
        self._api = api
        self._texts: list[str] = []
        self.finish_reason = ""
        self.usage: Usage | None = None
        self.done = False

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._texts)

    def take(self, event: bytes) -> bool:
        """Whether `event` brought text. Raises MalformedChunk, ServerFault."""
        if self.done:
            raise MalformedChunk(f"more after [DONE]: {_shown(event)}")
        if event.strip() == DONE:
            self.done = True
            return False
        try:
            chunk = json.loads(event)
        except ValueError as err:  # UnicodeDecodeError is one
            raise MalformedChunk(f"not JSON: {_shown(event)}") from err
        if not isinstance(chunk, dict):
            raise MalformedChunk(f"not an object: {_shown(event)}")
        if chunk.get("error"):
            raise ServerFault(error_message(event))
        choices = chunk.get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise MalformedChunk(f"no list of choices: {_shown(event)}")
        if chunk.get("usage") is not None:
            self.usage = _usage(chunk["usage"], event)
        texts = [self._text_of(choice, event) for choice in choices]
        self._texts += texts
        return any(texts)

    def _text_of(self, choice: dict[str, Any], event: bytes) -> str:
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            self.finish_reason = reason
        if self._api == "completions":
            parts = [choice.get("text")]
        else:
            delta = choice.get("delta")
            if not isinstance(delta, dict):
                raise MalformedChunk(f"a choice without delta: {_shown(event)}")
            # Reasoning models stream their thoughts under either name; they are tokens that someone waits for.
            parts = [delta.get(name) for name in ("reasoning_content", "reasoning", "content")]
        if not all(part is None or isinstance(part, str) for part in parts):
            raise MalformedChunk(f"text that is not a string: {_shown(event)}")
        return "".join(part for part in parts if part)


def error_message(body: bytes) -> str:
    """The message of OpenAI's error JSON, else the body's beginning."""
    try:
        error = json.loads(body)["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError):
        return _shown(body)
    return str(message)[:_MAX_MESSAGE]


def _usage(usage: Any, event: bytes) -> Usage:
    fields = usage if isinstance(usage, dict) else {}
    details = fields.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    prompt, output = fields.get("prompt_tokens"), fields.get("completion_tokens")
    for count in (prompt, output, 0 if cached is None else cached):
        if not isinstance(count, int) or count < 0:
            raise MalformedChunk(f"usage without whole counts: {_shown(event)}")
    return Usage(int(prompt or 0), int(output or 0), cached)


def _shown(data: bytes) -> str:
    return data[:_MAX_MESSAGE].decode(errors="replace").strip() or "(empty)"
