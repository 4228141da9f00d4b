"""A training run layer by layer: early and late side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Group
from rich.text import Text

from tangent_lens.dynamics.report import KINDS, DynamicsReport
from tangent_lens.dynamics.windows import EARLY, LATE
from tangent_lens.measures.report import Measurement
from tangent_lens.reports.columns import SIGNIFICANT, Column, no_star, side_by_side, star
from tangent_lens.reports.frame import FirstThatFits
from tangent_lens.reports.layer_rows import rows_by_layer
from tangent_lens.reports.numbers import number, p_value, thousandths

SHORT_NAMES = {"residual": "residual", "attention": "attention", "mlp": "MLP"}
_WINDOWS = (EARLY, LATE)
_OVERLAP = ("own proxy", len(KINDS), [Column("overlap", lambda share: Text(f"{share:.2f}"), float, "{:.2f}".format)])
_Groups = list[tuple[str, int, list[Column]]]


def layers_view(report: DynamicsReport) -> FirstThatFits:
    """Lift, p and change of IsoScore* of every layer; narrow consoles get them in two tables, with stars in place of p."""
    early, late = (dict(rows_by_layer(report.of(window))) for window in _WINDOWS)
    content = [
        (*_pairs(early[label], late[label]), _overlap_of(early[label], report.points[-1].overlaps)) for label in early
    ]
    table = partial(side_by_side, "layer", list(early), content, gap=1)
    lifts, changes = ("", _lift), ("Δ ", _delta)
    return FirstThatFits(
        lambda: table(_all_in_one()),
        lambda: table([*_starred(lifts, changes), _OVERLAP]),
        lambda: Group(table(_starred(lifts)), table([*_starred(changes), _OVERLAP])),
    )


def _pairs(
    early: Sequence[Measurement | None], late: Sequence[Measurement | None]
) -> list[tuple[Measurement, Measurement] | None]:
    """Early and late of each kind of gradient in one row."""
    return [None if one is None or other is None else (one, other) for one, other in zip(early, late, strict=True)]


def _overlap_of(row: Sequence[Measurement | None], overlaps: Mapping[str, float]) -> float | None:
    """Of the first gradient that the row shows."""
    first = next((one for one in row if one is not None), None)
    return None if first is None else overlaps.get(first.fit_site)


def _all_in_one() -> _Groups:
    """A group for each kind and window."""
    return [
        (
            f"{SHORT_NAMES[kind]} {window}",
            place,
            [_lift("lift", which, no_star), _p(which), _delta("Δtan", which, no_star)],
        )
        for place, kind in enumerate(KINDS)
        for which, window in enumerate(_WINDOWS)
    ] + [_OVERLAP]


def _starred(*columns: tuple[str, Callable[..., Column]]) -> _Groups:
    """A group for each kind: early and late of each of these columns, under their titles' beginnings."""
    return [
        (
            SHORT_NAMES[kind],
            place,
            [column(begin + window, which, star) for begin, column in columns for which, window in enumerate(_WINDOWS)],
        )
        for place, kind in enumerate(KINDS)
    ]


def _lift(title: str, which: int, marked: Callable[[float], str]) -> Column:
    def cell(pair: Any) -> Text:
        one = pair[which]
        good = one.corrected_energy_p <= SIGNIFICANT and one.energy.lift > 1
        return Text(number(one.energy.lift) + marked(one.corrected_energy_p), style="bold green" if good else "")

    return Column(title, cell, lambda pair: pair[which].energy.lift)


def _p(which: int) -> Column:
    return Column("p", lambda pair: Text(p_value(pair[which].energy.p_value)))


def _delta(title: str, which: int, marked: Callable[[float], str]) -> Column:
    def cell(pair: Any) -> Text:
        one = pair[which]
        good = one.corrected_isotropy_p <= SIGNIFICANT and one.isotropy.delta > 0
        shown = thousandths(one.isotropy.delta) + marked(one.corrected_isotropy_p)
        return Text(shown, style="bold green" if good else "")

    return Column(title, cell, lambda pair: pair[which].isotropy.delta, thousandths)
