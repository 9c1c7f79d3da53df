"""Turns a conversation's next turn into a request body."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.bench.api import Message, RequestForm
from kvstore.bench.prompts import Piece, Pieces, make_text, make_token_ids
from kvstore.bench.workload import Conversation, Span
from kvstore.core.errors import ConfigError

COLD_BY = ("kvstore", "cache_salt", "prefix")
_PREFIX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Cold:
    """Makes every request miss every cache.

    kvstore      a salt of its own for each request, in the body's kvstore.salt
    cache_salt   the same in the body's cache_salt (vLLM)
    prefix       16 words of its own before the prompt, for every other server. Two servers get the same ones, so that their
                 answers can be compared: use a salt when they share a store

    `nonce` tells runs apart. It is the one thing that does not come from the seed, unless given: a second run with the first
    one's salts would be warm.
    """

    by: str
    nonce: str

    def __post_init__(self) -> None:
        if self.by not in COLD_BY:
            raise ConfigError(f"cold-by: {self.by!r}; use {', '.join(COLD_BY)}", field="cold-by", value=self.by)


class Composer:
    """For one server (`label`). `token_ids` is the range of ids to draw instead of words, completions only."""

    def __init__(
        self, seed: int, form: RequestForm, *, label: str = "", token_ids: Span | None = None, cold: Cold | None = None
    ) -> None:
        assert token_ids is None or form.api == "completions"
        self._seed, self._form, self._label, self._token_ids, self._cold = seed, form, label, token_ids, cold

    def body(self, conversation: Conversation, turn: int, answers: Sequence[str]) -> bytes:
        """Of turn `turn`; `answers` are the server's to the turns before it."""
        assert len(answers) == turn
        prefix = self._prefix(conversation, turn)
        max_tokens = conversation.turns[turn].output_tokens
        if self._token_ids is not None:
            assert turn == 0  # an answer comes as text
            pieces = (*prefix, *conversation.system, *conversation.turns[0].question)
            ids = make_token_ids(self._seed, pieces, first=self._token_ids.low, last=self._token_ids.high)
            return self._form.body(ids, max_tokens, self._salt(conversation, turn))
        messages = self._messages(conversation, turn, answers, prefix)
        return self._form.body(messages, max_tokens, self._salt(conversation, turn))

    def _messages(self, conversation: Conversation, turn: int, answers: Sequence[str], prefix: Pieces) -> list[Message]:
        system = (*prefix, *conversation.system)
        messages = [Message("system", make_text(self._seed, system))] if system else []
        for number, entry in enumerate(conversation.turns[: turn + 1]):
            messages.append(Message("user", make_text(self._seed, entry.question)))
            if number < turn:
                messages.append(Message("assistant", answers[number]))
        return messages

    def _prefix(self, conversation: Conversation, turn: int) -> Pieces:
        if self._cold is None or self._cold.by != "prefix":
            return ()
        return (Piece(("cold", self._cold.nonce, conversation.index, turn), _PREFIX_TOKENS),)

    def _salt(self, conversation: Conversation, turn: int) -> dict[str, dict[str, Any] | str]:
        if self._cold is None or self._cold.by == "prefix":
            return {}
        salt = f"{self._cold.nonce}-{self._label}-{conversation.index}.{turn}"
        return {"kvstore": {"salt": salt}} if self._cold.by == "kvstore" else {"cache_salt": salt}
