"""Local geometry along training as a matplotlib figure (``plot`` extra): a few sites, one colour each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tangent_lens.dynamics.geometry_run import GeometryRun
from tangent_lens.measures.concept_geometry import ConceptGeometry
from tangent_lens.measures.tangent_order import OrderNumbers
from tangent_lens.reports.columns import evenly
from tangent_lens.reports.dynamics_plot import scale_steps
from tangent_lens.reports.geometry_axes import (
    LINE,
    Estimate,
    above_floor_estimates,
    line_with_band,
    room_above,
    slope_estimates,
    undetermined_exponents,
)
from tangent_lens.reports.geometry_run_table import MOST_SITES, has_depth
from tangent_lens.reports.plots import import_pyplot

_SITE_COLOURS = ("#4477aa", "#ddaa33", "#aa3377")
_Orders = dict[str, list[OrderNumbers]]


def plot_geometry_run(run: GeometryRun) -> Any:
    """Exponents above, dimensions, flatness and neighbours below (these only where depth was measured).

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pyplot = import_pyplot()
    rows = 2 if has_depth(run) else 1
    figure, panels = pyplot.subplots(
        rows, 3, figsize=(15, 4.2 * rows), sharex=True, layout="constrained", squeeze=False
    )
    steps = np.array([point.step for point in run.points], dtype=float)
    sites = evenly(run.sites, MOST_SITES)
    _exponent_panels(panels[0], run, steps, sites)
    if rows == 2:
        _dimension_panel(panels[1, 0], run, steps, sites)
        _flatness_panel(panels[1, 1], run, steps, sites)
        _overlap_panel(panels[1, 2], run, steps, sites)
    scale_steps(panels[0, 0], [point.step for point in run.points])
    for axes in panels[-1]:
        axes.set_xlabel("training step")
    for axes in panels.flat:
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{run.source}: local geometry along training")
    # A notebook shows the returned figure; left open, pyplot would show it a second time.
    pyplot.close(figure)
    return figure


def _exponent_panels(panels: Sequence[Any], run: GeometryRun, steps: np.ndarray, sites: Sequence[str]) -> None:
    orders = {site: [point.report.of(site).everything.order.chosen for point in run.points] for site in sites}
    draws: tuple[tuple[str, int, Callable[[list[OrderNumbers]], list[Estimate]]], ...] = (
        ("tangent part\n(theory 1)", 1, lambda found: slope_estimates(found, "tangent")),
        ("normal part\n(theory 2; noise alone about 1)", 2, lambda found: slope_estimates(found, "normal")),
        ("normal part above a floor\n(theory 2; hollow: not determined)", 2, above_floor_estimates),
    )
    for axes, (title, theory, estimates) in zip(panels, draws, strict=True):
        axes.axhline(theory, color="grey", linewidth=1, linestyle="--", zorder=0)
        for (site, found), colour in zip(orders.items(), _SITE_COLOURS, strict=False):
            line_with_band(axes, steps, estimates(found), colour, site)
        axes.set_title(f"exponent: {title}", fontsize="medium")
    _hollow(panels[2], steps, orders)
    panels[0].set_ylabel("exponent")
    panels[0].legend(fontsize="small", frameon=False)


def _hollow(axes: Any, steps: np.ndarray, orders: _Orders) -> None:
    for found, colour in zip(orders.values(), _SITE_COLOURS, strict=False):
        x, values = undetermined_exponents(steps, found)
        axes.plot(x, values, linestyle="", marker="o", markersize=5, color=colour, markerfacecolor="white")


def _dimension_panel(axes: Any, run: GeometryRun, steps: np.ndarray, sites: Sequence[str]) -> None:
    """Effective rank may be ten times the others."""
    drawn = (("two_nn", "TwoNN", "-"), ("mle", "MLE", "--"), ("effective_rank", "effective rank", ":"))
    for name, label, style in drawn:
        _site_lines(axes, run, steps, sites, lambda one, name=name: getattr(one, name), style, label)
    axes.set(yscale="log", ylabel="dimensions")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_title("dimensions of all tokens together", fontsize="medium")
    _styles_legend(axes)


def _flatness_panel(axes: Any, run: GeometryRun, steps: np.ndarray, sites: Sequence[str]) -> None:
    m = _geometries(run, sites[0])[0].m
    _site_lines(axes, run, steps, sites, lambda one: one.linearity, "-", f"variance along {m} directions of other rows")
    _site_lines(axes, run, steps, sites, _agreement, "--", "neighbours of the same token")
    axes.set(ylabel="share", ylim=(0, 1.03))
    axes.set_title("flatness, and tokens told apart", fontsize="medium")
    _styles_legend(axes, loc="lower right")


def _agreement(one: ConceptGeometry) -> float | None:
    return None if one.agreement is None else one.agreement.agreement


def _overlap_panel(axes: Any, run: GeometryRun, steps: np.ndarray, sites: Sequence[str]) -> None:
    for site, colour in zip(sites, _SITE_COLOURS, strict=False):
        pairs = run.overlaps(site)
        before = [np.nan if one is None else one.overlap for one, _ in pairs]
        axes.plot(steps, [last.overlap for _, last in pairs], color=colour, linestyle="-", **LINE)
        axes.plot(steps, before, color=colour, linestyle="--", **LINE)
    axes.plot([], [], color="#333333", linestyle="-", label="as at the last step")
    axes.plot([], [], color="#333333", linestyle="--", label="as at the step before")
    axes.set(ylabel="share", ylim=(0, 1.03))
    axes.set_title("neighbours that a row keeps", fontsize="medium")
    _styles_legend(axes, loc="lower right")


def _site_lines(
    axes: Any,
    run: GeometryRun,
    steps: np.ndarray,
    sites: Sequence[str],
    value: Callable[[ConceptGeometry], float | None],
    style: str,
    label: str,
) -> None:
    """A line a site, and one entry of the legend for all of them."""
    for site, colour in zip(sites, _SITE_COLOURS, strict=False):
        values = [np.nan if (one := value(found)) is None else one for found in _geometries(run, site)]
        axes.plot(steps, values, color=colour, linestyle=style, **LINE)
    axes.plot([], [], color="#333333", linestyle=style, label=label)


def _geometries(run: GeometryRun, site: str) -> list[ConceptGeometry]:
    return [point.report.depth.of(site) for point in run.points if point.report.depth is not None]


def _styles_legend(axes: Any, loc: str = "best") -> None:
    if loc == "best":
        room_above(axes, 0.15)
    axes.legend(fontsize="small", frameon=False, loc=loc)
