"""What comes with a request besides its tokens and its sampling: how urgent it is, and what it wishes of the caches."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from kvstore.core.errors import ConfigError
from kvstore.engine_connector.protocol import CacheOptions

LoadFailure = Literal["recompute", "fail"]

MAX_PRIORITY = 1000
"""Priorities are -MAX_PRIORITY to MAX_PRIORITY: each step is worth AGEING_S (sequence.py), so these are hours already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Raises ConfigError for a value out of range.

    `load_failure` says what happens when blocks that the store promised do not come: `recompute` computes from the first
    failed block on and keeps what came before it; `fail` ends the request with finish_reason "error".
    """

    priority: int = 0  # lower is sooner, as in vLLM; then the older one
    load_failure: LoadFailure = "recompute"
    cache: CacheOptions = field(default_factory=CacheOptions)
    traceparent: str = ""  # of the span that the request belongs to (kvstore/core/traces.py); "" begins a trace

    def __post_init__(self) -> None:
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise ConfigError(
                f"priority: {self.priority} is out of range; use {-MAX_PRIORITY} to {MAX_PRIORITY}",
                field="priority",
                value=self.priority,
            )
        if self.load_failure not in get_args(LoadFailure):
            raise ConfigError(
                f"load_failure: {self.load_failure!r} is not known; use recompute or fail",
                field="load_failure",
                value=self.load_failure,
            )
