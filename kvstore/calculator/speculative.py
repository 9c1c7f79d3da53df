"""Speculative decoding: a draft proposes k tokens, the model checks them in one step and keeps those before the first miss.

With each proposal accepted independently with probability a, a step yields (Leviathan et al., "Fast inference from
transformers via speculative decoding", section 3)
    E(k) = 1 + a + ... + a^k = (1 - a^(k+1)) / (1 - a)         tokens; the last is the model's own
and costs k draft steps of c each, in units of the model's own step, and a step with k tokens more, which is dearer by
v for each of them (about 0 while decoding is bound by memory):
    speed-up(k) = E(k) / (1 + k v + k c)
"""

from typing import NamedTuple


class Speculation(NamedTuple):
    """For one k."""

    draft_tokens: int
    tokens_per_step: float
    step_cost: float  # in plain decode steps
    speed_up: float  # over decoding without a draft; below 1 the draft does harm


def tokens_per_step(acceptance: float, draft_tokens: int) -> float:
    """E(k). A sum, since the quotient is 0/0 at a = 1 and loses digits near it."""
    return sum(acceptance**number for number in range(draft_tokens + 1))


def speculate(acceptance: float, draft_tokens: int, draft_cost: float, check_cost: float = 0.0) -> Speculation:
    """`draft_cost`: of a draft step; `check_cost`: of each more token to check; both in steps of the model."""
    expected = tokens_per_step(acceptance, draft_tokens)
    cost = 1 + draft_tokens * (check_cost + draft_cost)
    return Speculation(draft_tokens, expected, cost, expected / cost)


def best_speculation(
    acceptance: float, draft_cost: float, check_cost: float = 0.0, *, max_draft_tokens: int
) -> Speculation:
    """The k with the largest speed-up, the least of equals; 0 when no draft pays."""
    candidates = (speculate(acceptance, k, draft_cost, check_cost) for k in range(max_draft_tokens + 1))
    return max(candidates, key=lambda one: (one.speed_up, -one.draft_tokens))
