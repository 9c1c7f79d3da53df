"""The demo's rows as a table for people."""

from rich import box
from rich.table import Table

from kvstore.demo.outcome import TIE_EPSILON, Row
from kvstore.demo.run import DemoResult

_TITLES = {
    "off": "store off",
    "cold_a": "A, cold",
    "warm_a": "A again, own pool",
    "warm_b": "B, store",
    "restarted_a": "A restarted, store",
    "restarted_b": "B restarted, store",
    "sidecar_killed": "B, sidecar killed",
    "other_question": "B, other question",
}

_COLUMNS = ("TTFT\ns", "speed\nup", "prefilled", "own\npool", "fetched", "MB\nmoved")

CAPTION = (
    "TTFT: request in to first token out, inside the engine process. Every engine process answered one short, unrelated "
    "prompt before. Speed-up: against A, cold. Output: against the store switched off; a tie is a step at which that "
    f"run's two best logits lie closer than {TIE_EPSILON}."
)


def make_table(result: DemoResult) -> Table:
    """All cases in order, then the other question."""
    rows = (*result.rows, result.other_question)
    cold_s = next(row.answer.ttft_s for row in rows if row.case == "cold_a")
    table = Table(
        title=f"one document of {rows[0].answer.prompt_tokens:,} tokens",
        caption=CAPTION,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("case", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("output", min_width=len("identical"))
    for row in rows:
        table.add_row(_TITLES[row.case], *_cells(row, cold_s))
    return table


def _cells(row: Row, cold_s: float) -> tuple[str, ...]:
    answer = row.answer
    return (
        f"{answer.ttft_s:.3f}",
        f"{cold_s / answer.ttft_s:.1f}",
        f"{answer.prefilled_tokens:,}",
        f"{answer.local_cached_tokens:,}",
        f"{answer.fetched_tokens:,}",
        f"{row.moved_bytes / 1e6:.1f}",
        row.sameness.how if row.sameness.same else f"[bold red]{row.sameness.how}[/bold red]",
    )
