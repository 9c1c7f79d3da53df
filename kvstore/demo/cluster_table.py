"""The cluster demo's rows as a table for people."""

from rich import box
from rich.table import Table

from kvstore.demo.cluster_outcome import ClusterRow
from kvstore.demo.cluster_run import ClusterResult

_COLUMNS = ("TTFT\ns", "prefilled", "own\npool", "fetched")

CAPTION = (
    "TTFT: request in to first token out, inside the engine process. Where from: blocks by tier, as `kvstore explain` has "
    "them; failed: asked of a node that was gone, then computed. Output: against the first answer about the same document, "
    "which was computed."
)


def make_table(result: ClusterResult) -> Table:
    """All cases in order."""
    rows = result.rows
    table = Table(
        title=f"three nodes, documents of {rows[0].answer.prompt_tokens:,} tokens",
        caption=CAPTION,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("node: case", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("where\nfrom", min_width=len("92 failed"))
    table.add_column("output", min_width=len("identical"))
    for row in rows:
        table.add_row(row.case.text, *_cells(row))
    return table


def _cells(row: ClusterRow) -> tuple[str, ...]:
    answer = row.answer
    return (
        f"{answer.ttft_s:.3f}",
        f"{answer.prefilled_tokens:,}",
        f"{answer.local_cached_tokens:,}",
        f"{answer.fetched_tokens:,}",
        row.source,
        row.sameness.how if row.sameness.same else f"[bold red]{row.sameness.how}[/bold red]",
    )
