"""Parts of local geometry that stand alone, as tables: the growth of some tokens, their curvature, depth, and what is seen."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from tangent_lens.measures.concept_geometry import DepthGeometry
from tangent_lens.measures.curvature_summary import CurvatureSummary
from tangent_lens.measures.curvature_visibility import CurvatureVisibility, VisibilitySweep
from tangent_lens.measures.seen_curvature import SeenCurvature
from tangent_lens.measures.tangent_order import TangentOrder
from tangent_lens.reports.columns import Column, side_by_side
from tangent_lens.reports.frame import FirstThatFits
from tangent_lens.reports.geometry_columns import Groups, SideBySide, depth_groups, order_groups
from tangent_lens.reports.geometry_legend import GROWTH, depth_entry, legend
from tangent_lens.reports.geometry_tables import m_line
from tangent_lens.reports.numbers import counted, number, percent, whole_percent


def order_view(order: TangentOrder) -> Any:
    """One row a choice of m and nearest, the chosen one first."""
    choices = (order.chosen, *order.others)
    labels = [
        f"{'chosen' if one is order.chosen else 'other'}, nearest {whole_percent(one.nearest)}" for one in choices
    ]
    content, level = [(one,) for one in choices], order.chosen.tangent.level
    heading = Text(
        f"{order.name}: {counted(order.tokens, 'token')}, {order.rows:,} rows of {order.d} dimensions", style="bold"
    )
    measured = (
        f"{m_line(order.rule, [order.m])}; mean distance t {number(order.radius)}, within a token ± "
        f"{percent(order.radius_variation)}"
    )
    table = partial(side_by_side, "choice", labels, content, medians=False)
    return Group(
        heading,
        Text.from_markup(measured),
        FirstThatFits(
            *(partial(table, order_groups(intervals, level)) for intervals in (2, 1)),
            partial(SideBySide, "choice", labels, content, order_groups(0), medians=False),
        ),
        legend([GROWTH]),
    )


def curvature_view(found: CurvatureSummary) -> Table:
    """One row a number."""
    rows = [
        (
            "explained",
            _between(whole_percent(found.explained), found.explained_low, found.explained_high, whole_percent),
            "of held-out normal variance, by a quadratic; below 0 it only fits noise",
        ),
        (
            "curvature",
            _between(number(found.curvature), found.curvature_low, found.curvature_high, number),
            "root mean square over tangent directions, in one over length",
        ),
        ("mean curvature", number(found.mean_curvature), "root of the mean |H|²"),
        ("bend", number(found.bend), "off the tangent plane because of curvature, over the tangent part"),
        (
            "arc excess",
            percent(found.arc_excess),
            "how much longer the way along the surface is than the straight line",
        ),
    ]
    return _facts(f"{found.name}: curvature of the clouds of {counted(found.tokens, 'token')}, m = {found.m}", rows)


def seen_view(found: SeenCurvature) -> Table:
    """One row a number."""
    rows = [
        (
            "far / near",
            _between(number(found.ratio), found.low, found.high, number),
            "above 1, curved directions are over-represented far out",
        ),
        ("near", _signed(found.near), "mean κ² t² of the directions that the nearer half of the rows shows"),
        ("far", _signed(found.far), "of those that the farther half shows; noise taken off both"),
    ]
    title = f"{found.name}: curvature seen near and far, {counted(found.tokens, 'token')}, m = {found.m}"
    if found.ratio is None:
        title += " (the nearer half shows none above noise)"
    return _facts(title, rows)


def _signed(value: float) -> str:
    """What noise was taken off may be below 0."""
    return number(value) if value >= 0 else f"-{number(-value)}"


def _between(shown: str, low: float | None, high: float | None, show: Any) -> str:
    return shown if low is None or high is None else f"{shown} ({show(low)} to {show(high)})"


def _facts(title: str, rows: Sequence[tuple[str, str, str]]) -> Table:
    table = Table(title=Text(title), title_style="bold", title_justify="left", box=box.SIMPLE, show_header=False)
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify)
    for name, value, meaning in rows:
        table.add_row(name, value, Text(meaning, style="dim"))
    return table


def depth_view(depth: DepthGeometry) -> Any:
    """One row a site."""
    first, overlap = depth.geometries[0], depth.overlap_first[0]
    content, labels = [((depth, place),) for place in range(len(depth.sites))], list(depth.sites)
    heading = f"geometry along depth: {first.rows:,} of {first.seen:,} rows, {overlap.k} neighbours of each, seed {first.seed}"
    agreement = first.agreement
    expected = "" if agreement is None else f" (by chance {percent(agreement.expected)})"
    return Group(
        Text(heading, style="bold"),
        FirstThatFits(
            partial(side_by_side, "site", labels, content, depth_groups(rich=True)),
            partial(SideBySide, "site", labels, content, depth_groups(rich=False)),
        ),
        legend([depth_entry(f"{first.m} ", expected, f" (by chance {percent(overlap.expected)})")]),
    )


def sweep_view(sweep: VisibilitySweep) -> Any:
    """One row a concentration."""
    first = sweep.results[0]
    curvatures = ", ".join(f"{one:g}" for one in first.principal_curvatures)
    uniform = "direction and arc length" if first.measure == "arc" else "volume"
    heading = (
        f"paraboloid of curvatures {curvatures}, seen from its apex to radius {sweep.largest:g}; points uniform in "
        f"{uniform}"
    )
    content = [(one,) for one in sweep.results]
    groups: Groups = [
        ("radius", 0, [_plain("mean square", lambda one: number(one.mean_square_radius))]),
        (
            "mean κ² seen",
            0,
            [
                _plain("ratio", lambda one: f"{one.ratio:.4f}"),
                _plain("predicted", lambda one: f"{one.predicted_ratio:.4f}"),
            ],
        ),
        ("most curved tenth", 0, [_plain("ratio", lambda one: f"{one.top_ratio:.4f}")]),
    ]
    labels = [f"{one:g}" for one in sweep.concentrations]
    text = (
        "concentration: 1 spreads the radii as a flat ball does, more crowds them near 0. ratio: mean κ² of the directions seen "
        "over that of uniform directions; above 1 curved ones are over-seen. predicted: its expansion near radius 0. most curved "
        "tenth: how often the tenth of directions of highest |κ| is seen, over a tenth. The nearer to 0 the radii, the nearer "
        "all are to 1, and the less curvature shows."
    )
    return Group(
        Text(heading, style="bold"),
        side_by_side("concentration", labels, content, groups, medians=False),
        Text(text, style="dim"),
    )


def _plain(title: str, show: Any) -> Column:
    def cell(one: CurvatureVisibility) -> Text:
        return Text(show(one))

    return Column(title, cell)
