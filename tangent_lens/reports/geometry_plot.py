"""Local geometry as a matplotlib figure (``plot`` extra): exponents, rows about a mean, radii, bending, gradients, depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tangent_lens.measures.geometry_report import BucketGeometry, GeometryReport, MapGeometry, SiteGeometry
from tangent_lens.measures.gradient_order import DEGENERATE, RowOrder
from tangent_lens.reports.geometry_axes import (
    BUCKET_COLOURS,
    DIMENSION_COLOURS,
    LINE,
    NORMAL,
    SHARE_COLOURS,
    TANGENT,
    Estimate,
    SitePlaces,
    draw_exponents,
    line_with_band,
    room_above,
    say_nothing_there,
)
from tangent_lens.reports.plots import import_pyplot

_BINS = 40
_MEDIANS = 12


def plot_geometry(report: GeometryReport) -> Any:
    """Six panels; one that the report has no numbers for says so.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pyplot = import_pyplot()
    figure, panels = pyplot.subplots(2, 3, figsize=(16, 9), layout="constrained")
    places = SitePlaces([one.site for one in report.sites], [one.layer for one in report.sites])
    middle = middle_site(report.sites)
    _exponents_panel(panels[0, 0], report, places)
    _points_panel(panels[0, 1], middle)
    _radii_panel(panels[0, 2], middle, report)
    _bending_panel(panels[1, 0], report, places)
    _gradients_panel(panels[1, 1], report.gradients)
    _depth_panel(panels[1, 2], report)
    for axes in panels.flat:
        axes.spines["top"].set_visible(False)
    figure.suptitle(f"{report.model.name}: local geometry of {report.corpus.chosen} tokens on {report.corpus.name}")
    # A notebook shows the returned figure; left open, pyplot would show it a second time.
    pyplot.close(figure)
    return figure


def middle_site(sites: Sequence[SiteGeometry]) -> SiteGeometry:
    """The one whose rows the figure draws."""
    return sites[len(sites) // 2]


def _exponents_panel(axes: Any, report: GeometryReport, places: SitePlaces) -> None:
    draw_exponents(axes, places.x, [one.everything.order.chosen for one in report.sites])
    axes.set_title("growth with distance t from a token's mean", fontsize="medium")
    low, high = axes.get_ylim()
    axes.set_ylim(max(min(low, 0.9), 0), max(high, 2.1))
    room_above(axes)
    axes.legend(fontsize="small", frameon=False, loc="upper left", ncols=2, columnspacing=1, handlelength=1.5)
    places.label(axes)


def _points_panel(axes: Any, site: SiteGeometry) -> None:
    """Rows, running medians, and what theory says through the median row."""
    points, m = site.points, site.everything.order.m
    for part, power, colour, label in (
        (points.tangent, 1, TANGENT, "tangent part"),
        (points.normal, 2, NORMAL, "normal part"),
    ):
        # What is 0 but for rounding has no place on a logarithmic axis.
        seen = part > 1e-9 * points.radius
        if not seen.any():
            continue
        radius, size = points.radius[seen], part[seen]
        axes.scatter(radius, size, s=5, color=colour, alpha=0.25, linewidths=0, rasterized=True)
        axes.plot(*running_medians(radius, size), color=colour, label=label, **(LINE | {"markersize": 5}))
        ends = np.quantile(radius, [0.005, 0.995])
        axes.plot(
            ends,
            np.median(size) * (ends / np.median(radius)) ** power,
            color=colour,
            linestyle="--",
            linewidth=1.2,
            label=f"slope {power}",
        )
    axes.set(xscale="log", yscale="log", xlabel="t over the token's median t", ylabel="size over the median t")
    _few_ticks(axes)
    axes.set_title(f"rows at {site.site}, m = {m} (dots joined: medians)", fontsize="medium")
    axes.legend(fontsize="small", frameon=False, loc="upper left")


def _few_ticks(axes: Any) -> None:
    from matplotlib.ticker import LogLocator

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")


def running_medians(x: np.ndarray, y: np.ndarray, count: int = _MEDIANS) -> tuple[np.ndarray, np.ndarray]:
    """Of equally many rows each, in the order of x."""
    parts = np.array_split(np.argsort(x, kind="stable"), min(count, len(x)))
    return np.array([np.median(x[part]) for part in parts]), np.array([np.median(y[part]) for part in parts])


def _radii_panel(axes: Any, site: SiteGeometry, report: GeometryReport) -> None:
    unit = float(np.median(site.everything.radii))
    longest = float(np.quantile(site.everything.radii, 0.995)) / unit
    bins = np.linspace(0, longest, _BINS + 1)
    for one, label, colour in zip(site.buckets, bucket_labels(report), _colours(site.buckets), strict=True):
        axes.hist(one.radii / unit, bins=bins, density=True, histtype="stepfilled", color=colour, alpha=0.15)
        axes.hist(one.radii / unit, bins=bins, density=True, histtype="step", color=colour, linewidth=1.5, label=label)
    axes.set(xlim=(0, longest), xlabel="t over the median t of all", ylabel="density g(t)")
    axes.set_title(f"radial density at {site.site}, by occurrences of the token", fontsize="medium")
    axes.legend(title="occurrences", fontsize="small", title_fontsize="small", frameon=False, loc="upper right")


def bucket_labels(report: GeometryReport) -> list[str]:
    """How often the tokens of each bucket occur."""
    return [f"{one.low:,}" if one.low == one.high else f"{one.low:,} to {one.high:,}" for one in report.buckets]


def _colours(buckets: Sequence[BucketGeometry]) -> list[str]:
    return [BUCKET_COLOURS[place % len(BUCKET_COLOURS)] for place in range(len(buckets))]


def _bending_panel(axes: Any, report: GeometryReport, places: SitePlaces) -> None:
    title = "held-out normal variance that a quadratic explains"
    everything = [_explained(one.everything) for one in report.sites]
    if all(value is None for value, _, _ in everything):
        say_nothing_there(axes, title, "too few rows of each token for a quadratic")
        return
    axes.axhline(0, color="grey", linewidth=1, linestyle="--", zorder=0)
    for place, (label, colour) in enumerate(zip(bucket_labels(report), _colours(report.sites[0].buckets), strict=True)):
        found = [_explained(one.buckets[place])[0] for one in report.sites]
        values = [np.nan if one is None else one for one in found]
        axes.plot(places.x, values, color=colour, label=label, **(LINE | {"markersize": 2.5, "linewidth": 1}))
    line_with_band(axes, places.x, everything, "#333333", "all tokens")
    axes.set_title(title + "\n(below 0: it fits noise)", fontsize="medium")
    axes.set_ylabel("share")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}" if value < 1.001 else "")
    room_above(axes)
    axes.legend(fontsize="small", frameon=False, loc="upper left", ncols=2, columnspacing=1, handlelength=1.5)
    places.label(axes)


def _explained(one: BucketGeometry) -> Estimate:
    found = one.curvature
    return (None, None, None) if found is None else (found.explained, found.explained_low, found.explained_high)


def _gradients_panel(axes: Any, gradients: Sequence[MapGeometry]) -> None:
    title = "weight gradients: growth of single rows' parts"
    if not gradients:
        say_nothing_there(axes, title, "no weight gradients in this report")
        return
    for height in (1, 2):
        axes.axhline(height, color="grey", linewidth=1, linestyle="--", zorder=0)
    shaded = [place for place, one in enumerate(gradients) if one.order.verdict == DEGENERATE]
    for place in shaded:
        label = DEGENERATE if place == shaded[0] else None
        style = {"facecolor": "#f4c7c3", "alpha": 0.6, "linewidth": 0, "zorder": -1, "label": label}
        # The legend stands above.
        axes.axvspan(place - 0.45, place + 0.45, ymax=0.77, **style)
    for name, shift, colour, marker, theory in (
        ("tangent", -0.12, TANGENT, "o", 1),
        ("normal", 0.12, NORMAL, "s", 2),
    ):
        orders = [getattr(one.order, f"{name}_rows") for one in gradients]
        _error_bars(axes, orders, shift, color=colour, marker=marker, label=f"{name} (theory {theory})")
    low, high = axes.get_ylim()
    axes.set(xlim=(-0.6, len(gradients) - 0.4), ylim=(min(low, 0.9), max(high, 2.1)), ylabel="exponent")
    axes.set_xticks(range(len(gradients)), [one.map for one in gradients], rotation=40, ha="right", fontsize="small")
    axes.set_title(title, fontsize="medium")
    room_above(axes)
    axes.legend(fontsize="small", framealpha=1, edgecolor="none", loc="upper left", ncols=2)


def _error_bars(axes: Any, orders: Sequence[RowOrder], shift: float, **style: Any) -> None:
    found = [(place + shift, one.slope) for place, one in enumerate(orders) if one.slope is not None]
    if not found:
        return
    x, values = [place for place, _ in found], [slope.exponent for _, slope in found]
    errors = [
        [slope.exponent - slope.low for _, slope in found],
        [slope.high - slope.exponent for _, slope in found],
    ]
    axes.errorbar(x, values, yerr=errors, linestyle="", markersize=5, capsize=3, linewidth=1.4, **style)


def _depth_panel(axes: Any, report: GeometryReport) -> None:
    title = "all tokens together along depth"
    depth = report.depth
    if depth is None:
        say_nothing_there(axes, title, "depth was not measured")
        return
    layers = {one.site: one.layer for one in report.sites}
    places = SitePlaces(depth.sites, [layers.get(site) for site in depth.sites])
    shares = axes.twinx()
    for name, label, colour in zip(("two_nn", "mle"), ("TwoNN", "MLE"), DIMENSION_COLOURS, strict=True):
        values = [np.nan if (one := getattr(found, name)) is None else one for found in depth.geometries]
        axes.plot(places.x, values, color=colour, label=f"{label} (left)", **LINE)
    agreement = [np.nan if one.agreement is None else one.agreement.agreement for one in depth.geometries]
    overlap = [np.nan if one is None else one.overlap for one in depth.overlap_before]
    linearity = [one.linearity for one in depth.geometries]
    drawn = (
        (linearity, f"along {depth.geometries[0].m} directions"),
        (agreement, "neighbours of the same token"),
        (overlap, "neighbours kept from the site before"),
    )
    for (values, label), colour in zip(drawn, SHARE_COLOURS, strict=True):
        shares.plot(
            places.x, values, color=colour, label=label, linestyle="--", **(LINE | {"marker": "s", "markersize": 3})
        )
    # Below the ticks, which names need more room for.
    _finish_depth(axes, shares, -0.14 if places.by_layer else -0.32)
    axes.set_title(title, fontsize="medium")
    places.label(axes)


def _finish_depth(axes: Any, shares: Any, legend_at: float) -> None:
    """Both axes from 0, and one legend below for both."""
    axes.set_ylim(bottom=0)
    axes.set_ylabel("intrinsic dimension")
    shares.set(ylim=(0, 1.03), ylabel="share (dashed lines)")
    shares.spines["top"].set_visible(False)
    handles, labels = (
        first + second
        for first, second in zip(axes.get_legend_handles_labels(), shares.get_legend_handles_labels(), strict=True)
    )
    axes.legend(
        handles, labels, fontsize="small", frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, legend_at)
    )
