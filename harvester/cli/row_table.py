"""Tables that fit 80 columns: each row is one line, and a narrow table cuts names."""

from collections.abc import Collection

from rich.table import Table
from rich.text import Text

from harvester.cli.audit_command import printable


def row_table(
    *columns: str, names: Collection[str] = (), numbers: Collection[str] = (), title: str = ""
) -> Table:
    """`names`: columns whose texts may have any length and are cut first. `numbers`: columns
    aligned to the right."""
    table = Table(box=None, pad_edge=False, title=title or None, title_justify="left")
    for name in columns:
        table.add_column(name, no_wrap=name not in names)
        if name in numbers:
            table.columns[-1].justify = "right"
    return table


def add_row(table: Table, *cells: object) -> None:
    table.add_row(*map(row_text, cells))


def row_text(cell: object) -> Text:
    shown = printable("" if cell is None else str(cell))
    shown.no_wrap, shown.overflow = True, "ellipsis"
    return shown
