"""Reports side by side: who was measured, then one table a gradient with a group of columns a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tangent_lens.measures.comparison import Comparison
from tangent_lens.measures.report import Measurement
from tangent_lens.reports.columns import SIGNIFICANT, Column, side_by_side, star
from tangent_lens.reports.numbers import number, percent, small

# Characters of the labels, of each column, and between two groups.
LABELS, COLUMN, GAP = 12, 8, 4
_GRADIENTS = (
    ("residual gradient", "residual", ""),
    ("attention weight gradients", "weight", "attention"),
    ("MLP weight gradients", "weight", "mlp"),
)


def comparison_table(comparison: Comparison, width: int = 100) -> Group:
    """The runs, then energy, lift and IsoScore* of each gradient, as many reports side by side as there is room for."""
    parts: list[Any] = [_runs(comparison)]
    for title, gradient, kind in _GRADIENTS:
        rows = comparison.measurements(gradient, kind)
        if rows:
            columns, together = _fitting(_columns(gradient == "weight"), len(comparison.reports), width)
            parts.append(Text(f"\n{title}", style="bold"))
            for start in range(0, len(comparison.reports), together):
                parts.append(_gradient_table(rows, comparison.names[start:], start, together, columns))
    legend = (
        "energy: share of the gradient inside the tangent proxy. lift: energy a direction inside over outside (1 is chance), "
        f"starred where p ≤ {SIGNIFICANT}. signal: energy over that of shuffled backward signals. IsoSc*: IsoScore* of the "
        "gradient. Medians in the last row"
    )
    parts.append(Text(legend, style="dim"))
    parts += [
        Padding(Text("warning  ", style="bold yellow").append(Text(sentence, style="")), (1, 0, 0, 0))
        for sentence in comparison.warnings
    ]
    return Group(*parts)


def _runs(comparison: Comparison) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for heading in ("run", "model", "read by", "weights", "loss"):
        table.add_column(heading, overflow="fold")
    for name, report in zip(comparison.names, comparison.reports, strict=True):
        model, corpus = report.model, report.corpus
        table.add_row(
            f"[b]{escape(name)}[/b]",
            f"{escape(model.name)} ({model.architecture})",
            f"{model.library}, {model.dtype}",
            model.weights,
            f"{corpus.loss:.4f} a {corpus.loss_unit}",
        )
    return table


def _fitting(columns: list[Column], reports: int, width: int) -> tuple[list[Column], int]:
    """Columns, and how many reports side by side: all of them, if need be without the last column or two."""
    for fewer in (columns, columns[:-1], columns[:2]):
        room = (width - LABELS) // (COLUMN * len(fewer) + GAP)
        if room >= reports:
            return fewer, reports
    return columns, max(1, (width - LABELS) // (COLUMN * len(columns) + GAP))


def _gradient_table(
    rows: Sequence[tuple[str, tuple[Measurement | None, ...]]],
    names: Sequence[str],
    start: int,
    together: int,
    columns: list[Column],
) -> Table:
    kinds = {one.kind for _, cells in rows for one in cells if one is not None}
    labels = [_label(name, cells, len(kinds) == 1) for name, cells in rows]
    groups = [(name, start + place, columns) for place, name in enumerate(names[:together])]
    return side_by_side("layer" if len(kinds) == 1 else "site", labels, [cells for _, cells in rows], groups)


def _label(name: str, cells: Sequence[Measurement | None], alone: bool) -> str:
    layer = next(one.layer for one in cells if one is not None)
    return str(layer) if alone and layer is not None else name


def _columns(weight: bool) -> list[Column]:
    columns = [
        Column("energy", lambda one: Text(percent(one.energy.energy)), lambda one: one.energy.energy, percent),
        Column("lift", _lift, lambda one: one.energy.lift),
    ]
    if weight:
        columns.append(
            Column("signal", lambda one: Text(number(one.energy.signal_lift)), lambda one: one.energy.signal_lift)
        )
    columns.append(Column("IsoSc*", lambda one: Text(small(one.isotropy.score)), lambda one: one.isotropy.score, small))
    return columns


def _lift(one: Measurement) -> Text:
    significant = one.energy.p_value <= SIGNIFICANT and one.energy.lift > 1
    return Text(number(one.energy.lift) + star(one.energy.p_value), style="bold green" if significant else "")
