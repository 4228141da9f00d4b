"""Reports side by side: who was measured, then one table a gradient with a group of columns a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tangent_lens.measures.comparison import Comparison
from tangent_lens.measures.report import Measurement
from tangent_lens.reports.columns import SIGNIFICANT, Column, side_by_side, star
from tangent_lens.reports.frame import warning_lines
from tangent_lens.reports.numbers import number, percent, small

# Names beyond it are numbered, so that no table is cut.
LONGEST_NAME = 16
_GRADIENTS = (
    ("residual gradient", "residual", ""),
    ("attention weight gradients", "weight", "attention"),
    ("MLP weight gradients", "weight", "mlp"),
)


def comparison_table(comparison: Comparison, width: int = 100) -> Group:
    """The runs, then energy, lift and IsoScore* of each gradient, as many reports side by side as there is room for."""
    names = _short_names(comparison.names)
    parts: list[Any] = [_runs(comparison, names)]
    for title, gradient, kind in _GRADIENTS:
        rows = comparison.measurements(gradient, kind)
        if rows:
            parts.append(Text(f"\n{title}", style="bold"))
            parts += _gradient_tables(rows, names, _columns(gradient == "weight"), width)
    legend = (
        "energy: share of the gradient inside the tangent proxy. lift: energy a direction inside over outside (1 is chance), "
        f"starred where p, corrected over the layers, is ≤ {SIGNIFICANT}. signal: energy over that of shuffled backward signals. "
        "IsoSc*: IsoScore* of the gradient. Medians in the last row"
    )
    parts.append(Text(legend, style="dim"))
    return Group(*parts, *warning_lines(comparison.warnings))


def _runs(comparison: Comparison, names: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for heading in ("run", "model", "read by", "weights", "loss"):
        table.add_column(heading, overflow="fold")
    for short, name, report in zip(names, comparison.names, comparison.reports, strict=True):
        model, corpus = report.model, report.corpus
        table.add_row(
            f"[b]{escape(name)}[/b]" if short == name else f"[b]{short}[/b]: {escape(name)}",
            f"{escape(model.name)} ({model.architecture})",
            f"{model.library}, {model.dtype}",
            model.weights,
            f"{corpus.loss:.4f} a {corpus.loss_unit}",
        )
    return table


def _short_names(names: Sequence[str]) -> tuple[str, ...]:
    if all(cell_len(name) <= LONGEST_NAME for name in names):
        return tuple(names)
    return tuple(f"run {place}" for place in range(1, len(names) + 1))


def _gradient_tables(
    rows: Sequence[tuple[str, tuple[Measurement | None, ...]]], names: Sequence[str], columns: list[Column], width: int
) -> list[Table]:
    """All reports that have this gradient side by side; in several tables where there is no room for all."""
    kinds = {one.kind for _, cells in rows for one in cells if one is not None}
    labels = [_label(name, cells, len(kinds) == 1) for name, cells in rows]
    measured = [place for place in range(len(names)) if any(cells[place] is not None for _, cells in rows)]
    content, key = [cells for _, cells in rows], "layer" if len(kinds) == 1 else "site"

    def tables(shown: list[Column], together: int) -> list[Table]:
        cuts = (measured[start : start + together] for start in range(0, len(measured), together))
        return [side_by_side(key, labels, content, [(names[place], place, shown) for place in cut]) for cut in cuts]

    # All reports side by side if the last column or two may go; otherwise as many as there is room for.
    choices = [(columns[:kept], len(measured)) for kept in range(len(columns), 1, -1)]
    choices += [(columns, together) for together in range(len(measured) - 1, 0, -1)]
    choices += [(columns[:kept], 1) for kept in range(len(columns) - 1, 0, -1)]
    return next((found for choice in choices if _fit(found := tables(*choice), width)), tables(columns[1:2], 1))


def _fit(tables: Sequence[Table], width: int) -> bool:
    endless = Console(width=10_000)
    return all(endless.measure(table).maximum <= width for table in tables)


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
    significant = one.corrected_energy_p <= SIGNIFICANT and one.energy.lift > 1
    return Text(number(one.energy.lift) + star(one.corrected_energy_p), style="bold green" if significant else "")
