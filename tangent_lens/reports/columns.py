"""Tables side by side that share their rows: how a column is shown, and its median."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from tangent_lens.reports.numbers import number

SIGNIFICANT = 0.05
NOTHING = Text("–", style="dim")


@dataclass(frozen=True)
class Column:
    """One column of a group: its title, what a cell shows, and the number whose median stands in the last row."""

    title: str
    cell: Callable[[Any], Text]
    median: Callable[[Any], float | None] | None = None
    show: Callable[[float], str] = lambda value: number(value)


def side_by_side(
    key: str,
    labels: Sequence[str],
    content: Sequence[tuple[Any, ...]],
    groups: Sequence[tuple[str, int, list[Column]]],
    *,
    medians: bool = True,
    gap: int = 2,
) -> Table:
    """Tables that share their rows, each under its own title; a group without any content is left out."""
    together = Table.grid(padding=(0, gap))
    first = plain_table(" ")
    first.add_column(key, justify="right", no_wrap=True)
    for label in labels:
        first.add_row(Text(label))
    if medians:
        first.add_section()
        first.add_row(Text("median", style="dim"))
    parts = [first]
    for title, place, columns in groups:
        cells = [row[place] for row in content]
        if any(cell is not None for cell in cells):
            parts.append(_group_table(title, columns, cells, medians))
    for _ in parts:
        together.add_column(no_wrap=True)
    together.add_row(*parts)
    return together


def _group_table(title: str, columns: Sequence[Column], cells: Sequence[Any], medians: bool) -> Table:
    table = plain_table(title)
    table.min_width = cell_len(title)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for cell in cells:
        table.add_row(*(NOTHING if cell is None else column.cell(cell) for column in columns))
    if medians:
        table.add_section()
        table.add_row(*(_median(column, cells) for column in columns))
    return table


def plain_table(title: str) -> Table:
    """A table with a line below its head and nothing else."""
    return Table(
        title=Text(title),
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        header_style="dim",
    )


def _median(column: Column, cells: Sequence[Any]) -> Text:
    if column.median is None:
        return Text("")
    values = [value for cell in cells if cell is not None and (value := column.median(cell)) is not None]
    return Text(column.show(statistics.median(values)), style="dim") if values else NOTHING


def star(p: float) -> str:
    """A star where p is small, and a blank elsewhere."""
    return "*" if p <= SIGNIFICANT else " "


def no_star(p: float) -> str:
    """Nothing: there is a column for p."""
    return ""


def optional(value: float | None) -> Text:
    """A number, or a dash."""
    return NOTHING if value is None else Text(number(value))


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """All of a few; of many, evenly apart, the first and the last among them."""
    if count >= len(items):
        return list(items)
    if count == 1:
        return [items[0]]
    return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]
