"""`kvstore break-even speculative`: what a draft of k tokens brings."""

import click

from kvstore.calculator.speculative import Speculation, best_speculation, speculate
from kvstore.cli.output import (
    Column,
    Figure,
    Form,
    Report,
    Rows,
    Work,
    as_count,
    as_number,
    as_term,
    output_options,
    write,
)
from kvstore.cli.sums.amounts import NOT_NEGATIVE, POSITIVE, SHARE

_LIMIT = 64
_COLUMNS = (
    Column("draft_tokens", "draft k", as_count),
    Column("tokens_per_step", "tokens a step", as_number),
    Column("step_cost", "cost of a step", as_number),
    Column("speed_up", "speed-up", as_number),
    Column("tokens_per_s", "tokens/s", as_number),
)


@click.command(short_help="Tokens per step with a draft, and the best k.")
@click.option("--acceptance", type=SHARE, required=True, help="Share of draft tokens that are accepted: 0 to 1.")
@click.option("--draft-tokens", type=click.IntRange(0, _LIMIT), default=4, show_default=True, help="k: drafted a step.")
@click.option(
    "--draft-cost", type=NOT_NEGATIVE, default=0.05, show_default=True, help="A draft's step, in steps of the model."
)
@click.option(
    "--check-cost",
    type=NOT_NEGATIVE,
    default=0.0,
    show_default=True,
    help="Of each more token to check, in steps of the model; above 0 when decoding is bound by arithmetic.",
)
@click.option("--max-draft-tokens", type=click.IntRange(1, _LIMIT), default=12, show_default=True, help="To look at.")
@click.option("--tokens-per-s", type=POSITIVE, help="Without a draft, for rates beside ratios.")
@output_options
def speculative(
    *,
    acceptance: float,
    draft_tokens: int,
    draft_cost: float,
    check_cost: float,
    max_draft_tokens: int,
    tokens_per_s: float | None,
    form: Form,
) -> None:
    """Expected tokens per step of speculative decoding, its speed-up, and the best number of draft tokens.

    \b
    Example:
      kvstore break-even speculative --acceptance 0.8 --draft-cost 0.05
    """
    asked = speculate(acceptance, draft_tokens, draft_cost, check_cost)
    best = best_speculation(acceptance, draft_cost, check_cost, max_draft_tokens=max_draft_tokens)
    shown = [speculate(acceptance, k, draft_cost, check_cost) for k in range(max_draft_tokens + 1)]
    rate = tokens_per_s * asked.speed_up if tokens_per_s else None
    figures = [
        Figure("acceptance", "acceptance a", acceptance, as_number),
        Figure("draft_tokens", "draft tokens k", draft_tokens, as_count),
        Figure("tokens_per_step", "tokens a step", asked.tokens_per_step, as_number),
        Figure("speed_up", "speed-up", asked.speed_up, as_number),
        Figure("best_draft_tokens", "best k", best.draft_tokens, as_count),
        Figure("best_speed_up", "its speed-up", best.speed_up, as_number),
        *([Figure("tokens_per_s", "tokens/s", rate, as_number)] if rate else []),
    ]
    rows = [one._asdict() | ({"tokens_per_s": tokens_per_s * one.speed_up} if tokens_per_s else {}) for one in shown]
    columns = _COLUMNS if tokens_per_s else _COLUMNS[:-1]
    table = Rows("by_draft_tokens", columns, rows)
    write(
        Report(figures, [table], _work(acceptance, draft_cost, check_cost, [*shown, asked], best), _notes(best)), form
    )


def _notes(best: Speculation) -> list[str]:
    return ["no draft pays: its steps cost more than the tokens they bring"] if best.draft_tokens == 0 else []


def _work(a: float, draft_cost: float, check_cost: float, shown: list[Speculation], best: Speculation) -> list[Work]:
    work = []
    for one in {one.draft_tokens: one for one in shown}.values():
        k = one.draft_tokens
        substituted = f"(1 - {a:g}^{k + 1}) / (1 - {a:g})" if a < 1 else f"1 * {k + 1}"
        formula = "1 + a + ... + a^k = (1 - a^(k+1)) / (1 - a)"
        work.append(Work(f"E({k})", formula, substituted, f"{as_term(one.tokens_per_step)} tokens"))
        costs = f"{as_term(one.tokens_per_step)} / (1 + {k} * ({check_cost:g} + {draft_cost:g}))"
        work.append(Work(f"speed-up({k})", "E(k) / (1 + k * (check cost + draft cost))", costs, as_term(one.speed_up)))
    tried = f"the largest of k = 0 to {max(one.draft_tokens for one in shown)}"
    return [*work, Work("best k", "argmax of speed-up(k)", tried, str(best.draft_tokens))]
