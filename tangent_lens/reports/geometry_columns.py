"""Columns about local geometry that several tables share, and tables that continue below where a line has no room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from tangent_lens.measures.concept_geometry import DepthGeometry
from tangent_lens.measures.curvature_summary import CurvatureSummary
from tangent_lens.measures.neighbourhoods import NeighbourhoodOverlap
from tangent_lens.measures.seen_curvature import SeenCurvature
from tangent_lens.measures.slopes import FlooredPower, Slope
from tangent_lens.measures.tangent_order import OrderNumbers
from tangent_lens.reports.columns import NOTHING, Column, optional, side_by_side
from tangent_lens.reports.frame import fits
from tangent_lens.reports.numbers import number, percent, whole_percent

Groups = list[tuple[str, int, list[Column]]]


class SideBySide:
    """Groups of columns beside each other; those that find no room go into further tables of the same rows below."""

    def __init__(
        self,
        key: str,
        labels: Sequence[str],
        content: Sequence[tuple[Any, ...]],
        groups: Groups,
        *,
        medians: bool = True,
    ) -> None:
        self._rows = (key, labels, content)
        self._groups = [group for group in groups if any(row[group[1]] is not None for row in content)]
        self._medians = medians

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        waiting = self._groups
        while waiting:
            counts = range(len(waiting), 0, -1)
            fitting = (count for count in counts if fits(self._table(waiting[:count]), console, options))
            count = next(fitting, 1)
            yield self._table(waiting[:count])
            waiting = waiting[count:]

    def _table(self, groups: Groups) -> Any:
        return side_by_side(*self._rows, groups, medians=self._medians)


def order_groups(intervals: int, level: float = 0.95, place: int = 0) -> Groups:
    """Of :class:`OrderNumbers`: how both parts grow.

    Args:
        intervals: 0 for none, 1 for those of the exponents, 2 for that of the floor as well.
    """
    heading = level_text(level)
    share = Column("share", lambda one: Text(percent(one.normal_share)), lambda one: one.normal_share, percent)
    above_floor = Column("exponent", lambda one: above_floor_text(one.above_floor), above_floor_value, _exponent)
    floor = Column("floor", _floor, _floor_value, whole_percent)
    theory = (" (theory 1)", " (theory 2)") if intervals else ("", "")
    return [
        (" ", place, [Column("m", lambda one: Text(str(one.m)))]),
        ("tangent" + theory[0], place, _with(intervals, _slope("tangent"), _slope_interval("tangent", heading))),
        ("normal" + theory[1], place, [*_with(intervals, _slope("normal"), _slope_interval("normal", heading)), share]),
        (
            "above a floor" + theory[1],
            place,
            [
                *_with(intervals, above_floor, Column(heading, _above_floor_interval)),
                *_with(intervals - 1, floor, Column(heading, _floor_interval)),
            ],
        ),
    ]


def curvature_groups(intervals: int, level: float = 0.95, *, curvature: int = 1, seen: int = 2) -> Groups:
    """Of :class:`CurvatureSummary` and :class:`SeenCurvature`: how clouds bend, and which of it near and far rows show."""
    heading = level_text(level)
    explained = Column("explained", lambda one: Text(whole_percent(one.explained)), explained_value, whole_percent)
    ratio = Column("far/near", lambda one: optional(one.ratio), lambda one: one.ratio)
    return [
        ("by a quadratic", curvature, _with(intervals, explained, Column(heading, _explained_interval))),
        (
            "bending",
            curvature,
            [
                Column("m", lambda one: Text(str(one.m))),
                Column("bend", lambda one: Text(number(one.bend)), lambda one: one.bend),
                Column("arc", lambda one: Text(percent(one.arc_excess)), lambda one: one.arc_excess, percent),
            ],
        ),
        ("κ² seen", seen, _with(intervals, ratio, Column(heading, _seen_interval))),
    ]


def level_text(level: float) -> str:
    """``95%``: the heading of intervals."""
    return f"{100 * level:.3g}%"


def depth_groups(rich: bool, place: int = 0) -> Groups:
    """Of pairs of a :class:`DepthGeometry` and a place in it: dimensions, flatness, and whose neighbours a row has."""

    def of(name: str) -> Callable[[Any], float | None]:
        return lambda at: getattr(at[0].geometries[at[1]], name)

    def numbered(title: str, name: str) -> Column:
        return Column(title, lambda at: optional(of(name)(at)), of(name))

    rank = [numbered("eff. rank" if rich else "rank", "effective_rank")]
    linear = [Column("linear", lambda at: _share(of("linearity")(at)), of("linearity"), percent)]
    if rich:
        rank.append(numbered("part. ratio", "participation_ratio"))
        linear.append(Column("fitted", lambda at: _share(of("linearity_fitted")(at)), of("linearity_fitted"), percent))
    return [
        ("dimensions", place, [numbered("TwoNN", "two_nn"), numbered("MLE", "mle"), *rank]),
        ("flat", place, linear),
        (
            "token",
            place,
            [Column("agree", lambda at: _share(agreement_of(*at)), lambda at: agreement_of(*at), percent)],
        ),
        ("neighbours kept", place, [_overlap(title, name) for title, name in _OVERLAPS]),
    ]


_OVERLAPS = (("before", "overlap_before"), ("first", "overlap_first"), ("last", "overlap_last"))


def agreement_of(depth: DepthGeometry, place: int) -> float | None:
    """Share of a row's neighbours that are occurrences of its own token."""
    found = depth.geometries[place].agreement
    return None if found is None else found.agreement


def overlap_column(title: str, which: Callable[[Any], NeighbourhoodOverlap | None]) -> Column:
    """A share of neighbours in two digits, as shares that are compared with each other."""

    def value(cell: Any) -> float | None:
        found = which(cell)
        return None if found is None else found.overlap

    return Column(title, lambda cell: _two_digits(value(cell)), value, "{:.2f}".format)


def _overlap(title: str, name: str) -> Column:
    return overlap_column(title, lambda at: getattr(at[0], name)[at[1]])


def _two_digits(value: float | None) -> Text:
    return NOTHING if value is None else Text(f"{value:.2f}")


def _share(value: float | None) -> Text:
    return NOTHING if value is None else Text(percent(value))


def _with(intervals: int, column: Column, interval: Column) -> list[Column]:
    return [column, interval] if intervals > 0 else [column]


def _exponent(value: float) -> str:
    """``1.08``, and a blank where others have a bracket."""
    return f"{value:.2f} "


def interval_text(low: float | None, high: float | None, show: Callable[[float], str] = "{:.2f}".format) -> Text:
    """``1.05 to 1.11``, dim; a dash where there is none."""
    return NOTHING if low is None or high is None else Text(f"{show(low)} to {show(high)}", style="dim")


def slope_text(slope: Slope | None) -> Text:
    """An exponent, or a dash."""
    return NOTHING if slope is None else Text(f"{slope.exponent:.2f}")


def slope_interval(slope: Slope | None) -> Text:
    """Its interval, or a dash."""
    return NOTHING if slope is None else interval_text(slope.low, slope.high)


def above_floor_text(found: FlooredPower | None) -> Text:
    """An exponent above a floor; in brackets where the rows do not determine it, and a dash where they show none."""
    if found is None or found.exponent is None:
        return NOTHING
    shown = _exponent(found.exponent)
    return Text(shown) if found.determined else Text(f"({shown.strip()})", style="dim")


def above_floor_value(one: OrderNumbers) -> float | None:
    """The exponent above the floor where it is determined."""
    found = one.above_floor
    return found.exponent if found is not None and found.determined else None


def explained_value(one: CurvatureSummary) -> float:
    """Held-out share that a quadratic explains."""
    return one.explained


def _slope(name: str) -> Column:
    def value(one: OrderNumbers) -> float | None:
        slope = getattr(one, name)
        return None if slope is None else slope.exponent

    return Column("exponent", lambda one: slope_text(getattr(one, name)), value, "{:.2f}".format)


def _slope_interval(name: str, heading: str) -> Column:
    return Column(heading, lambda one: slope_interval(getattr(one, name)))


def _above_floor_interval(one: OrderNumbers) -> Text:
    found = one.above_floor
    return interval_text(found.low, found.high) if found is not None and found.determined else NOTHING


def _floor(one: OrderNumbers) -> Text:
    return NOTHING if one.above_floor is None else Text(whole_percent(one.above_floor.floor))


def _floor_value(one: OrderNumbers) -> float | None:
    return None if one.above_floor is None else one.above_floor.floor


def _floor_interval(one: OrderNumbers) -> Text:
    found = one.above_floor
    return NOTHING if found is None else interval_text(found.floor_low, found.floor_high, whole_percent)


def _explained_interval(one: CurvatureSummary) -> Text:
    return interval_text(one.explained_low, one.explained_high, whole_percent)


def _seen_interval(one: SeenCurvature) -> Text:
    return interval_text(one.low, one.high, number)
