"""One engine in a process of its own: requests come in as JSON lines on standard input, answers go out on standard output.

    <- {"event": "ready", "load_s": 4.1}
    -> {"question": "...", "prompt_tokens": 4000, "max_tokens": 32, "document": 0}
    <- {"event": "answer", ...Answer's fields}           or {"event": "error", "code": ..., "message": ..., "fields": ...}

Whatever else a library prints goes to standard error. When standard input ends, by the starter's wish or its death, we
are gone at once, in the middle of a prefill too; the sidecar must bear that anyway.
"""

import dataclasses
import json
import os
import queue
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, TextIO

from kvstore.core.errors import KVStoreError
from kvstore.core.keys import pack_keys
from kvstore.demo.document import WARM_UP, document_prompt
from kvstore.demo.outcome import Answer
from kvstore.engine_connector.engine.llm import LLM
from kvstore.engine_connector.engine.sampler import SamplingParams
from kvstore.engine_connector.local import open_connector

LESSONS_TOKENS = (32, 64, 96, 128)
"""A step more than the sidecar's estimate needs, of different lengths."""


def main(arguments: list[str]) -> int:
    """`MODEL [SOCKET [learn]]`: without a socket the engine runs without a store; `learn`: its sidecar gets to know its speed."""
    answers = _take_stdout()
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests,), name="requests", daemon=True).start()
    try:
        engine = _open_engine(*arguments, answers=answers)
    except KVStoreError as err:
        _send(answers, _error(err))
        return 1
    while True:
        _send(answers, engine.answer(json.loads(requests.get())))


class _Engine:
    """The LLM and what the demo asks of it."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def warm_up(self) -> None:
        """Pay for thread pools and first allocations before anything is timed."""
        self._llm.generate([WARM_UP], SamplingParams(max_tokens=2))

    def learn(self) -> None:
        """Compute prompts of which nobody else has a block: so many steps that the sidecar knows what computing costs here."""
        vocabulary = self._llm.tokenizer.vocab_size
        for num_tokens in LESSONS_TOKENS:
            prompt = [secrets.randbelow(vocabulary) for _ in range(num_tokens)]
            self._llm.generate([prompt], SamplingParams(max_tokens=1))

    def answer(self, request: Mapping[str, Any]) -> dict[str, object]:
        """Run one request, nothing else beside it."""
        try:
            return self._answer(**request)
        except KVStoreError as err:
            return _error(err)

    def _answer(self, question: str, prompt_tokens: int, max_tokens: int, document: int) -> dict[str, object]:
        prompt = document_prompt(self._llm.tokenizer, question, prompt_tokens, document)
        (output,) = self._llm.generate([prompt], SamplingParams(max_tokens=max_tokens))
        assert output.ttft_s is not None
        spec = self._llm.spec
        answer = Answer(
            ttft_s=output.ttft_s,
            prompt_tokens=output.num_prompt_tokens,
            prefilled_tokens=output.num_prefilled_tokens,
            local_cached_tokens=output.num_local_cached_tokens,
            fetched_tokens=output.num_fetched_tokens,
            fetched_bytes=output.num_fetched_tokens // spec.block_tokens * spec.block_nbytes,
            token_ids=tuple(output.token_ids),
            logit_gaps=tuple(output.logit_gaps),
            text=output.text,
            namespace=spec.namespace().hex(),
            keys=pack_keys(spec.hash.hash_blocks(prompt)).hex(),
        )
        return {"event": "answer", **dataclasses.asdict(answer)}


def _open_engine(model: str, socket: str = "", learn: str = "", *, answers: TextIO) -> _Engine:
    started_s = time.monotonic()
    factory = (lambda spec: open_connector(spec, socket_path=socket)) if socket else None
    engine = _Engine(LLM(model, connector_factory=factory))
    engine.warm_up()
    if learn:
        engine.learn()
    _send(answers, {"event": "ready", "load_s": time.monotonic() - started_s})
    return engine


def _take_stdout() -> TextIO:
    """The real standard output, for answers alone; descriptor 1 becomes standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def _read_requests(requests: "queue.SimpleQueue[str]") -> None:
    """Reader thread."""
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)


def _error(err: KVStoreError) -> dict[str, object]:
    return {"event": "error", "code": err.code, "message": err.message, "fields": err.fields}


def _send(answers: TextIO, message: Mapping[str, object]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
