"""Attention-score tangent dominance as a matplotlib figure (the ``plot`` extra): heat maps, and the axes that were measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tangent_lens.measures.attention import THEORY, AttentionDominance, DominanceByBucket, Spread
from tangent_lens.measures.attention_report import AttentionReport
from tangent_lens.reports.attention_axes_table import known_exponents
from tangent_lens.reports.plots import import_pyplot

_SERIES = (
    ("tangent_tangent", "tangent×tangent", "#cc6677"),
    ("mixed", "mixed", "#ddaa33"),
    ("normal_normal", "normal×normal", "#4477aa"),
)
_LEGEND_ENTRIES = 6


def plot_attention(report: AttentionReport) -> Any:
    """Heat maps over layers and heads: D, its random control, and D over the variance baseline; then the measured axes.

    Returns:
        A ``matplotlib.figure.Figure``; ``figure.savefig("heads.png")`` keeps it.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pyplot = import_pyplot()
    draws = [_dominance_map, _random_map, *([_ratio_map] if _has_baseline(report) else []), *_axis_panels(report)]
    rows = math.ceil(len(draws) / 3)
    height = max(3.6, 1.2 + 0.17 * len(report.layers))
    figure, panels = pyplot.subplots(
        rows, 3, figsize=(13, height + 3.6 * (rows - 1)), layout="constrained", squeeze=False,
        height_ratios=[height] + [3.6] * (rows - 1),
    )  # fmt: skip
    for axes, draw in zip(panels.flat, draws, strict=False):
        draw(axes, report)
    for axes in panels.flat[len(draws) :]:
        axes.set_visible(False)
    figure.suptitle(f"{report.model.name}: attention scores and the tangent proxy of rank {report.settings.rank}")
    # A notebook shows the returned figure; left open, pyplot would show it a second time.
    pyplot.close(figure)
    return figure


def _has_baseline(report: AttentionReport) -> bool:
    return all(one.variance_baseline for one in report.layers)


def _axis_panels(report: AttentionReport) -> list[Callable[[Any, AttentionReport], None]]:
    measured = report.layers[0]
    panels = (
        (measured.by_distance, (_distance_panel,)),
        (measured.by_frequency, (_frequency_panel,)),
        (measured.scaling, (_exponent_panel, _radius_panel)),
    )
    return [panel for found, of_axis in panels if found is not None for panel in of_axis]


def _dominance_map(axes: Any, report: AttentionReport) -> None:
    image = _heat_map(axes, report, [one.dominance for one in report.layers], vmin=0, vmax=1)
    axes.set(title="tangent dominance D", ylabel="layer")
    axes.figure.colorbar(image, ax=axes)


def _random_map(axes: Any, report: AttentionReport) -> None:
    values = [one.random_mean for one in report.layers]
    image = _heat_map(axes, report, values, norm="log" if any(value > 0 for row in values for value in row) else None)
    axes.set(title=f"D of {report.settings.controls} random normals, mean (log scale)")
    axes.figure.colorbar(image, ax=axes)


def _ratio_map(axes: Any, report: AttentionReport) -> None:
    """Doublings of D over the baseline: 0 is a head without preference."""
    values = [
        [math.log2(value / one.variance_baseline) if value > 0 else math.nan for value in one.dominance]
        for one in report.layers
        if one.variance_baseline
    ]
    reach = max((abs(value) for row in values for value in row if math.isfinite(value)), default=1.0)
    image = _heat_map(axes, report, values, cmap="RdBu_r", vmin=-reach, vmax=reach)
    axes.set(title="D / ρ² (red: prefers the tangent)")
    bar = axes.figure.colorbar(image, ax=axes)
    bar.formatter = lambda doublings, _: f"{2**doublings:.2g}"
    bar.update_ticks()


def _heat_map(axes: Any, report: AttentionReport, values: Sequence[Sequence[float]], **options: Any) -> Any:
    """Layers down, heads across; grey where there is no number."""
    heads = max(len(row) for row in values)
    padded = [[*row, *[math.nan] * (heads - len(row))] for row in values]
    axes.set_facecolor("lightgrey")
    image = axes.imshow(padded, aspect="auto", interpolation="nearest", **options)
    step = math.ceil(len(values) / 30)
    axes.set_yticks(range(0, len(values), step), [str(one.layer) for one in report.layers][::step], fontsize="small")
    axes.set_xticks(range(0, heads, math.ceil(heads / 16)))
    axes.set_xlabel("head")
    return image


def _distance_panel(axes: Any, report: AttentionReport) -> None:
    _bucket_lines(axes, report, lambda one: one.by_distance)
    axes.set(title="D by key distance, median of the heads", xlabel="key distance")


def _frequency_panel(axes: Any, report: AttentionReport) -> None:
    _bucket_lines(axes, report, lambda one: one.by_frequency)
    axes.set(title="D by query token frequency, median of the heads", xlabel="occurrences in the corpus")


def _bucket_lines(
    axes: Any, report: AttentionReport, pick: Callable[[AttentionDominance], DominanceByBucket | None]
) -> None:
    for place, one in enumerate(report.layers):
        found = pick(one)
        if found is not None:
            medians = [Spread.of(column).median for column in zip(*found.dominance, strict=True)]
            titles = [label.removesuffix(" times").replace(" to ", "–") for label in found.labels]
            axes.plot(titles, medians, marker="o", markersize=3, linewidth=1, **_layer_style(report, place))
    axes.set(ylabel="D", ylim=(0, None))
    _layer_legend(axes)


def _layer_style(report: AttentionReport, place: int) -> dict[str, Any]:
    """Dark to bright with depth; a few layers are named, first and last among them."""
    from matplotlib import colormaps

    last = len(report.layers) - 1
    named = {round(entry * last / (_LEGEND_ENTRIES - 1)) for entry in range(_LEGEND_ENTRIES)}
    label = str(report.layers[place].layer) if place in named else None
    return {"color": colormaps["viridis"](0.9 * place / max(last, 1)), "label": label}


def _layer_legend(axes: Any) -> None:
    small = {"fontsize": "x-small", "title": "layer", "title_fontsize": "x-small"}
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, **small)


def _exponent_panel(axes: Any, report: AttentionReport) -> None:
    """Median exponent and standard error over the heads of each layer, beside the theory's (dashed)."""
    layers = [str(one.layer) for one in report.layers]
    for name, label, colour in _SERIES:
        found = [one.scaling for one in report.layers if one.scaling is not None]
        slopes = [Spread.of(known_exponents(one, name)).median for one in found]
        errors = [Spread.of(one.standard_error[name]).median for one in found]
        axes.errorbar(layers, slopes, yerr=errors, color=colour, marker="o", markersize=3, linewidth=1, label=label)
        axes.axhline(THEORY[name], color=colour, linewidth=1, linestyle="--")
    step = math.ceil(len(layers) / 10)
    axes.set_xticks(range(0, len(layers), step), layers[::step])
    axes.set(title="exponent of the radius (dashed: theory)", xlabel="layer", ylabel="exponent")
    axes.legend(fontsize="x-small")


def _radius_panel(axes: Any, report: AttentionReport) -> None:
    """D against the radius of the rows, one line a layer."""
    for place, one in enumerate(report.layers):
        if one.scaling is None:
            continue
        radii, medians = (
            [Spread.of(column).median for column in zip(*values, strict=True)]
            for values in (one.scaling.radius, one.scaling.dominance)
        )
        axes.plot(radii, medians, marker="o", markersize=2, linewidth=1, **_layer_style(report, place))
    axes.set(
        title="D by radius, median of the heads", xlabel="radius of the pair", ylabel="D", xscale="log", ylim=(0, None)
    )
    _layer_legend(axes)
