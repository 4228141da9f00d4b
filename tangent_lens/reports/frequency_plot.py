"""Token frequency as a matplotlib figure: spread against log frequency, token by token, and energy by bucket (``plot`` extra)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tangent_lens.measures.frequency import FrequencyCorrelation
from tangent_lens.measures.frequency_report import FrequencyReport, SiteFrequency, SpreadCorrelations
from tangent_lens.reports.columns import evenly
from tangent_lens.reports.plots import import_pyplot

MOST_PANELS = 4
_COLOURS = ("#4477aa", "#cc6677", "#ddaa33", "#228833", "#aa3377")


def plot_frequency(report: FrequencyReport) -> Any:
    """One panel of points a site (of many sites, some that are evenly apart), the embedding's trajectory, lift by bucket.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pyplot = import_pyplot()
    chosen = chosen_sites(report.sites)
    spreads = [(one.site, one.spread) for one in chosen]
    if report.trajectory is not None:
        spreads.append(("trajectory of embedding rows", report.trajectory))
    panels = len(spreads) + 1
    columns = 2 if panels in (2, 4) else 3
    rows = -(-panels // columns)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(4.6 * columns, 4 * rows), layout="constrained", squeeze=False
    )
    places = list(grid.flat)
    for axes, (title, spread), colour in zip(places, spreads, _COLOURS, strict=False):
        _points(axes, title, spread, colour)
    _lifts(places[len(spreads)], chosen)
    for axes in places[panels:]:
        axes.set_axis_off()
    figure.suptitle(f"{report.model.name}: token frequency on {report.corpus.name}")
    # A notebook shows the returned figure; left open, pyplot would show it a second time.
    pyplot.close(figure)
    return figure


def chosen_sites(sites: Sequence[SiteFrequency], most: int = MOST_PANELS) -> list[SiteFrequency]:
    """All of a few; of many, evenly apart, the first and the last among them."""
    return evenly(sites, most)


def _points(axes: Any, title: str, spread: SpreadCorrelations, colour: str) -> None:
    points = spread.points
    axes.scatter(points.log_frequency, points.distance, s=10, facecolors="none", edgecolors="#999999", linewidths=0.6)
    axes.scatter(points.log_frequency, points.corrected, s=9, color=colour, alpha=0.6, linewidths=0)
    axes.set_title(
        f"{title} ({_shown(spread)})\nraw (hollow): {_said(spread.raw)}\ncorrected (full): {_said(spread.corrected)}",
        fontsize="small",
    )
    # One token with a massive activation would press all others onto the axis.
    if points.distance.min() > 0 and points.corrected.max() > 4 * np.median(points.corrected):
        axes.set_yscale("log")
    axes.set(xlabel="log frequency (natural)", ylabel="mean distance to the token's mean")


def _shown(spread: SpreadCorrelations) -> str:
    shown = len(spread.points)
    return f"{spread.tokens:,} tokens" if shown == spread.tokens else f"{shown:,} of {spread.tokens:,} tokens"


def _said(found: FrequencyCorrelation) -> str:
    return f"Pearson {found.pearson.estimate:+.2f}, Spearman {found.spearman.estimate:+.2f}"


def _lifts(axes: Any, sites: Sequence[SiteFrequency]) -> None:
    highest = 1.0
    for one, colour in zip(sites, _COLOURS, strict=False):
        buckets = one.enrichment.buckets
        lifts = [np.nan if bucket.lift is None else bucket.lift for bucket in buckets]
        highest = max(highest, np.nanmax(lifts))
        axes.plot(range(1, len(buckets) + 1), lifts, color=colour, marker="o", markersize=4, label=one.site)
    axes.axhline(1, color="grey", linewidth=1, linestyle="--")
    axes.set_xticks(range(1, len(sites[0].enrichment.buckets) + 1))
    axes.set_title("gradient along the tangent proxy\nlift by frequency (dashed: chance)", fontsize="small")
    axes.set(xlabel="bucket of frequency (1: the rarest tokens)", ylabel="lift", ylim=(0, 1.15 * highest))
    axes.legend(fontsize="small")
