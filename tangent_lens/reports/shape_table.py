"""The shape of activations as a table: one row a site."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from tangent_lens.measures.activation_shape import ActivationShape, ShapeReport
from tangent_lens.reports.columns import NOTHING, plain_table
from tangent_lens.reports.frame import FirstThatFits
from tangent_lens.reports.numbers import number, small

_FIRST_TO_GO, _NEXT_TO_GO = ("effective", "stable"), ("RankMe", "α", "log I")
_NAMES = {"two_nn": "TwoNN", "mle": "MLE"}


def shape_view(report: ShapeReport) -> Any:
    """As many columns as there is room for."""
    return Group(
        Text(f"{report.model.name}: activations on {report.corpus}", style="bold"),
        FirstThatFits(
            *(partial(_table, report, without) for without in ((), _FIRST_TO_GO, (*_FIRST_TO_GO, *_NEXT_TO_GO)))
        ),
        _legend(report),
    )


def _table(report: ShapeReport, without: Sequence[str]) -> Table:
    rows = [{name: cell for name, cell in _cells(one).items() if name not in without} for one in report.shapes]
    table = plain_table("")
    for heading in rows[0]:
        table.add_column(heading, justify="left" if heading == "site" else "right", no_wrap=True)
    for cells in rows:
        table.add_row(*cells.values())
    return table


def _cells(one: ActivationShape) -> dict[str, str | Text]:
    spectrum = one.spectrum
    return {
        "site": one.site,
        "IsoSc*": small(one.iso_score),
        "PR": number(spectrum.participation_ratio),
        "effective": number(spectrum.effective_rank),
        "RankMe": number(spectrum.effective_rank_singular),
        "stable": NOTHING if spectrum.stable_rank is None else number(spectrum.stable_rank),
        "α": NOTHING if spectrum.alpha is None else f"{spectrum.alpha:.2f}",
        "cosine": f"{one.mean_cosine:.3f}",
        "log I": f"{one.partition.log_isotropy:.2f}",
    } | {_NAMES[found.method]: number(found.dimension) for found in one.dimensions}


def _legend(report: ShapeReport) -> Text:
    first = report.shapes[0]
    spectrum, width = first.spectrum, max(one.spectrum.d for one in report.shapes)
    ranges = "" if spectrum.alpha is None else f" over eigenvalues {spectrum.alpha_first} to {spectrum.alpha_last}"
    dropped = max((found.duplicates for one in report.shapes for found in one.dimensions), default=0)
    text = (
        f"Of at most {width} dimensions, from the covariance of {first.rows:,} rows: PR participation ratio, effective: entropy "
        "rank of the eigenvalues, RankMe: of the singular values of the centred rows, stable: trace over largest eigenvalue, "
        f"α: power law of the spectrum{ranges}. From {first.sampled:,} rows: mean cosine of all pairs, log I: "
        "partition-function isotropy of unit rows (0 is isotropic)"
    )
    if first.dimensions:
        text += f", intrinsic dimensions (up to {dropped:,} equal rows dropped; both read low in high dimensions)"
    return Text(text + ".", style="dim")
