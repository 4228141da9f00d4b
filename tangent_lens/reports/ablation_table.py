"""What removing the tangent does to the loss, site by site."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tangent_lens.measures.ablation import Ablation, AblationReport
from tangent_lens.reports.columns import NOTHING, SIGNIFICANT
from tangent_lens.reports.frame import FirstThatFits, header_lines
from tangent_lens.reports.numbers import number, p_value, signed

_HEADINGS = ("site", "rank", "tangent", "p", "random normals", "ratio", "next", "trailing", "kept")


def ablation_table(report: AblationReport) -> Group:
    """The model, the loss before, then a row a site."""
    lines = [
        ("corpus", f"{escape(report.corpus)}: {report.sequences:,} sequences, {report.tokens:,} tokens"),
        (
            "loss",
            f"{report.loss:.4f} nats a {report.loss_unit} untouched ({report.loss_name}, {report.targets:,} targets)",
        ),
        ("settings", f"{report.controls} random normals, seed {report.seed}, removed parts set to {report.about}"),
    ]
    legend = (
        "Changes of the loss, positive is worse: without the tangent; without random normals of the same rank (mean, sd); "
        "p: share of them whose removal harms as much; ratio of the two; without the next principal and the least-variance "
        "directions; kept: with everything but the tangent removed."
    )
    views = (
        partial(_table, report, without)
        for without in ((), ("ratio", "trailing"), ("ratio", "trailing", "next", "rank"))
    )
    return Group(
        header_lines(report.model, report.versions, lines), "", FirstThatFits(*views), Text(legend, style="dim")
    )


def _table(report: AblationReport, without: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    shown = [place for place, heading in enumerate(_HEADINGS) if heading not in without]
    for place in shown:
        table.add_column(_HEADINGS[place], justify="right" if place else "left", no_wrap=True)
    for one in report.ablations:
        cells = _cells(one)
        table.add_row(*(cells[place] for place in shown))
    return table


def _cells(one: Ablation) -> list[Text]:
    matters = one.p_value <= SIGNIFICANT and one.removed > 0
    spread = "" if math.isnan(one.random_sd) else f" ± {number(one.random_sd)}"
    return [
        Text(one.site),
        Text(str(one.rank)),
        Text(signed(one.removed), style="bold green" if matters else ""),
        Text(p_value(one.p_value)),
        Text(signed(one.random_mean) + spread),
        NOTHING if one.ratio is None else Text(f"{one.ratio:.3g}"),
        *(NOTHING if change is None else Text(signed(change)) for change in (one.following, one.trailing)),
        Text(signed(one.kept)),
    ]
