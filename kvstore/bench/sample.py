"""What became of one request: when it was sent, when each piece of the answer came, and how it ended.

        due      sent          first token   ...    last token    done
    ─────┼────────┼──────────────────┼────────────────────┼──────────┼──>
         └ lag ───┴────── TTFT ──────┴── ITL, ITL, ... ───┘          │
                  └──────────────────── E2E ────────────────────────┘

TTFT  sent to the first chunk that has text; a chat's first chunk, which has only a role, does not count. Sent is when we begin:
      where a connection has to be made first, that is part of it
ITL   between two such chunks: a server that sends several tokens in one chunk has fewer and longer ones
TPOT  first to last such chunk, divided by the output tokens after the first; none for answers of one token
E2E   sent to the end of the stream
"""

import hashlib
from dataclasses import dataclass
from itertools import pairwise

REFUSED = "refused"
SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request has no answer.

    refused     429; `retry_after_s` is what the server asked for, and nothing is asked again
    http_NNN    another status
    connect     no connection
    deadline    no end within the request's deadline
    broken      the stream ended or the connection broke before data: [DONE]
    malformed   the answer is not a stream of OpenAI's chunks
    server      the stream carried an error object
    skipped     not sent: an earlier turn of its conversation failed
    """

    kind: str
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as the server reports them; `cached_tokens` is None when it does not say."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its answer; times in seconds of the client's clock."""

    sent_s: float
    done_s: float
    token_times_s: tuple[float, ...] = ()
    text: str = ""
    finish_reason: str = ""
    usage: Usage | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """An exchange in its run; all times in seconds since the run began. `due_s` is None in a closed loop and for later turns."""

    conversation: int
    turn: int
    asked_prompt_tokens: int
    asked_output_tokens: int
    due_s: float | None
    exchange: Exchange

    @property
    def name(self) -> str:
        """How reports call the request."""
        return f"{self.conversation}.{self.turn}"

    @property
    def ok(self) -> bool:
        """Whether the answer is complete."""
        return self.exchange.failure is None

    @property
    def ttft_s(self) -> float | None:
        """None when no text came."""
        times = self.exchange.token_times_s
        return times[0] - self.exchange.sent_s if times else None

    @property
    def e2e_s(self) -> float:
        """From sent to the end, good or bad."""
        return self.exchange.done_s - self.exchange.sent_s

    @property
    def itl_s(self) -> list[float]:
        """Every gap."""
        return [after - before for before, after in pairwise(self.exchange.token_times_s)]

    @property
    def tpot_s(self) -> float | None:
        """None for fewer than two output tokens, or when all came in one chunk."""
        times, count = self.exchange.token_times_s, self.output_tokens
        return (times[-1] - times[0]) / (count - 1) if count > 1 and len(times) > 1 else None

    @property
    def lag_s(self) -> float | None:
        """How late we sent it. Large: the client, not the server, was the limit."""
        return None if self.due_s is None else self.exchange.sent_s - self.due_s

    @property
    def prompt_tokens(self) -> int:
        """The server's count, else what was asked for."""
        return self.exchange.usage.prompt_tokens if self.exchange.usage else self.asked_prompt_tokens

    @property
    def output_tokens(self) -> int:
        """The server's count, else the number of chunks."""
        return self.exchange.usage.output_tokens if self.exchange.usage else len(self.exchange.token_times_s)

    @property
    def cached_tokens(self) -> int | None:
        """None when the server does not say."""
        return self.exchange.usage.cached_tokens if self.exchange.usage else None

    def output_digest(self) -> str:
        """Equal for equal answers; a failed request's is that of its failure's kind."""
        failure = self.exchange.failure
        answer = ("failed", failure.kind) if failure else (self.exchange.text, self.exchange.finish_reason)
        return hashlib.sha256(repr(answer).encode()).hexdigest()[:16]
