"""Tables without lines, as the commands print them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.table import Table

from alto_core import wording
from alto_core.early_exit.audit import RankAgreement

GAP = 2
"""Between columns."""


def bare_table() -> Table:
    """A table without lines and without columns yet."""
    return Table(box=None, pad_edge=False, header_style="dim", padding=(0, GAP, 0, 0))


def plain_table(*names: str, left: Collection[str] = (), whole: Collection[str] = ()) -> Table:
    """A table with these columns, numbers to the right.

    Args:
        left: columns of text, to the left.
        whole: columns that are never broken into lines.
    """
    table = bare_table()
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name in whole, overflow="fold")
    return table


def agreement_table(agreement: Sequence[RankAgreement]) -> Table:
    """How early rankings agree with the end."""
    table = plain_table("ranking at", "jobs", "Spearman with the end", "top quarter covered", "best in it")
    for line in agreement:
        table.add_row(
            f"{100 * line.fraction:g} %",
            str(line.num_jobs),
            f"{line.spearman:.2f}",
            wording.share(line.top_quarter_coverage),
            "yes" if line.keeps_best else "no",
        )
    return table
