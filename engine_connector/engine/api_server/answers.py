"""The engine's tokens as OpenAI's objects: one form for completions, one for chats; whole, or chunk by chunk."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from kvstore.engine_connector.engine.outputs import RequestOutput, TokenDelta
from kvstore.engine_connector.engine.tokenizer import BPETokenizer

Json = dict[str, Any]


def usage_of(outputs: Mapping[tuple[str, int], RequestOutput]) -> Json:
    """Tokens of the whole request. A prompt counts once, however many samples it has; what the engine had in its own pages
    and what it fetched from the store are both cached."""
    first = [output for (_, index), output in outputs.items() if index == 0]
    num_prompt = sum(output.num_prompt_tokens for output in first)
    num_output = sum(len(output.token_ids) for output in outputs.values())
    num_cached = sum(cached_tokens(output) for output in first)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def cached_tokens(output: RequestOutput) -> int:
    """Of the prompt; after a preemption the counts are those of several tries."""
    return min(output.num_prompt_tokens, output.num_local_cached_tokens + output.num_fetched_tokens)


class AnswerForm(Protocol):
    """Makes the JSON of one request's answer; `number` is that of a choice."""

    def opening(self, number: int) -> Json | None:
        """The chunk before a choice's first token, if it has one."""
        ...

    def chunk(self, number: int, deltas: Sequence[TokenDelta]) -> Json:
        """A choice's next tokens."""
        ...

    def usage_chunk(self, usage: Json) -> Json:
        """The chunk after all choices."""
        ...

    def whole(self, choices: Sequence[Sequence[TokenDelta]], usage: Json) -> Json:
        """Everything at once: the tokens of each choice, in order."""
        ...


class _Form:
    """What both forms share. `with_usage`: every chunk has a usage, null but in the last."""

    prefix = ""
    chunk_object = ""
    whole_object = ""

    def __init__(self, model: str, fingerprint: str, tokenizer: BPETokenizer, *, with_usage: bool) -> None:
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._tokens = _TokenNames(tokenizer)
        self._no_usage: Json = {"usage": None} if with_usage else {}

    def usage_chunk(self, usage: Json) -> Json:
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": usage}

    def _chunk(self, choice: Json) -> Json:
        return {**self._head, "object": self.chunk_object, "choices": [choice], **self._no_usage}

    def _whole(self, choices: list[Json], usage: Json) -> Json:
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": usage}


class CompletionForm(_Form):
    """/v1/completions."""

    prefix = "cmpl"
    chunk_object = whole_object = "text_completion"

    def __init__(self, model: str, fingerprint: str, tokenizer: BPETokenizer, *, with_usage: bool) -> None:
        super().__init__(model, fingerprint, tokenizer, with_usage=with_usage)
        self._offsets: dict[int, int] = {}  # characters of each choice's tokens so far

    def opening(self, number: int) -> Json | None:  # noqa: ARG002 - the other form's has one
        """None."""
        return None

    def chunk(self, number: int, deltas: Sequence[TokenDelta]) -> Json:
        """See AnswerForm."""
        return self._chunk(self._choice(number, deltas))

    def whole(self, choices: Sequence[Sequence[TokenDelta]], usage: Json) -> Json:
        """See AnswerForm."""
        return self._whole([self._choice(number, deltas) for number, deltas in enumerate(choices)], usage)

    def _choice(self, number: int, deltas: Sequence[TokenDelta]) -> Json:
        return {
            "index": number,
            "text": _text(deltas),
            "logprobs": self._logprobs(number, deltas),
            "finish_reason": _finish_reason(deltas),
        }

    def _logprobs(self, number: int, deltas: Sequence[TokenDelta]) -> Json | None:
        """Offsets are those in the tokens' own text, which runs ahead of the choice's where a stop string may begin."""
        entries = [(d.token_id, d.logprob) for d in deltas if d.logprob is not None and d.token_id is not None]
        if not entries:
            return None
        names = [self._tokens.name(token_id) for token_id, _ in entries]
        offsets = []
        for name in names:
            offsets.append(self._offsets.get(number, 0))
            self._offsets[number] = offsets[-1] + len(name)
        return {
            "tokens": names,
            "token_logprobs": [logprob.logprob for _, logprob in entries],
            "top_logprobs": [{self._tokens.name(i): value for i, value in logprob.top} for _, logprob in entries],
            "text_offset": offsets,
        }


class ChatForm(_Form):
    """/v1/chat/completions."""

    prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def opening(self, number: int) -> Json | None:
        """Who speaks."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"index": number, "delta": delta, "logprobs": None, "finish_reason": None})

    def chunk(self, number: int, deltas: Sequence[TokenDelta]) -> Json:
        """See AnswerForm."""
        text = _text(deltas)
        return self._chunk({"index": number, "delta": {"content": text} if text else {}, **self._rest(deltas)})

    def whole(self, choices: Sequence[Sequence[TokenDelta]], usage: Json) -> Json:
        """See AnswerForm."""
        whole = []
        for number, deltas in enumerate(choices):
            message = {"role": "assistant", "content": _text(deltas), "refusal": None}
            whole.append({"index": number, "message": message, **self._rest(deltas)})
        return self._whole(whole, usage)

    def _rest(self, deltas: Sequence[TokenDelta]) -> Json:
        return {"logprobs": self._logprobs(deltas), "finish_reason": _finish_reason(deltas)}

    def _logprobs(self, deltas: Sequence[TokenDelta]) -> Json | None:
        content = [
            {
                **self._tokens.entry(delta.token_id, delta.logprob.logprob),
                "top_logprobs": [self._tokens.entry(token_id, value) for token_id, value in delta.logprob.top],
            }
            for delta in deltas
            if delta.logprob is not None and delta.token_id is not None
        ]
        return {"content": content, "refusal": None} if content else None


class _TokenNames:
    """Tokens as text, though not every token is one."""

    def __init__(self, tokenizer: BPETokenizer) -> None:
        self._tokenizer = tokenizer

    def name(self, token_id: int) -> str:
        """Its text; a control token's name; bytes that are no UTF-8 as OpenAI writes them, `bytes:\\xf0\\x9f`."""
        data = self._tokenizer.bytes_of(token_id)
        if not data:
            return self._tokenizer.name_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def entry(self, token_id: int, logprob: float) -> Json:
        """A token in a chat's logprobs."""
        data = self._tokenizer.bytes_of(token_id)
        return {"token": self.name(token_id), "logprob": logprob, "bytes": list(data) or None}


def choice_numbers(request_ids: Sequence[str], n: int) -> dict[tuple[str, int], int]:
    """The number of each choice: the samples of the first prompt, then those of the next."""
    keys: Iterator[tuple[str, int]] = ((request_id, index) for request_id in request_ids for index in range(n))
    return {key: number for number, key in enumerate(keys)}


def _text(deltas: Sequence[TokenDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def _finish_reason(deltas: Sequence[TokenDelta]) -> str | None:
    output = deltas[-1].output if deltas else None
    return None if output is None else str(output.finish_reason)
