"""What concentration near a point hides of a surface's curvature, as a matplotlib figure (``plot`` extra)."""

from __future__ import annotations

from typing import Any

import numpy as np

from tangent_lens.measures.curvature_visibility import CurvatureVisibility, VisibilitySweep, curvature_visibility
from tangent_lens.measures.geodesics import chord_arc, geodesics
from tangent_lens.reports.plots import import_pyplot

FIXED_RADII = (0.25, 0.5, 1.0)  # of the largest
_FLAT, _CURVED = "#4477aa", "#cc6677"
_SHADES = ("#a8d0b0", "#57a773", "#14532d")
_GROUPS = 20


def plot_visibility(sweep: VisibilitySweep) -> Any:
    """Arc length beyond the radius, the directions seen at fixed radii, and the ratio over concentrations.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pyplot = import_pyplot()
    figure, panels = pyplot.subplots(1, 3, figsize=(14, 4.3), layout="constrained")
    first = sweep.results[0]
    _chord_panel(panels[0], first, sweep.largest)
    _density_panel(panels[1], first, sweep.largest)
    _ratio_panel(panels[2], sweep)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    curvatures = ", ".join(f"{one:g}" for one in first.principal_curvatures)
    uniform = "direction and arc length" if first.measure == "arc" else "volume"
    figure.suptitle(f"Paraboloid of curvatures ({curvatures}), points uniform in {uniform}, seen from the apex")
    # A notebook shows the returned figure; left open, pyplot would show it a second time.
    pyplot.close(figure)
    return figure


def _chord_panel(axes: Any, first: CurvatureVisibility, largest: float) -> None:
    places = sorted({int(first.curvature.argmin()), int(first.curvature.argmax())}, key=lambda at: first.curvature[at])
    units = first.directions[places]
    paths = geodesics(first.principal_curvatures, units, largest, first.steps, along="radius", jacobian=False)
    colours = (_FLAT, _CURVED)[-len(places) :]
    highest = float((paths.arc - paths.radius).max())
    for column, (place, colour) in enumerate(zip(places, colours, strict=True)):
        curvature, radius = float(first.curvature[place]), paths.radius[:, column]
        # A cosine of 90 degrees is 6e-17.
        shown = 0.0 if curvature < 1e-12 * first.curvature.max() else curvature
        axes.plot(radius, paths.arc[:, column] - radius, color=colour, linewidth=2, label=f"|κ| = {shown:.3g}")
        axes.plot(radius, chord_arc(curvature, radius) - radius, color=colour, linewidth=1.2, linestyle="--")
    # The expansion leaves far above what is true.
    axes.set(xlim=(0, largest), ylim=(-0.03 * highest, 1.5 * highest))
    axes.set_title("how much longer the way along the surface is\n(dashed: κ²t³/24)", fontsize="medium")
    axes.set(xlabel="radius t (straight line)", ylabel="arc length s − t")
    axes.legend(title="direction", fontsize="small", title_fontsize="small", frameon=False, loc="upper left")


def _density_panel(axes: Any, first: CurvatureVisibility, largest: float) -> None:
    for share, shade in zip(FIXED_RADII, _SHADES, strict=True):
        seen = _seen_at(first, share * largest)
        label = f"t = {share * largest:.3g}"
        if first.m == 2:
            _density_over_angle(axes, seen, shade, label)
        else:
            _density_over_curvature(axes, seen, shade, label)
    axes.axhline(1, color="grey", linewidth=1, linestyle="--")
    said = "dashed: all alike" if first.m == 2 else "lines: groups of like curvature; dashed: all alike"
    axes.set_title(f"directions seen at a fixed radius\n({said})", fontsize="medium")
    axes.set(ylabel="density over uniform")
    axes.legend(fontsize="small", frameon=False)


def _seen_at(first: CurvatureVisibility, radius: float) -> CurvatureVisibility:
    return curvature_visibility(
        first.principal_curvatures,
        [radius],
        measure=first.measure,
        directions=len(first.directions),
        seed=first.seed,
        steps=first.steps,
    )


def _density_over_angle(axes: Any, seen: CurvatureVisibility, shade: str, label: str) -> None:
    angles = np.degrees(np.arctan2(seen.directions[:, 1], seen.directions[:, 0]))
    half = np.flatnonzero((angles > -1e-9) & (angles < 180 + 1e-9))
    axes.plot(angles[half], seen.density[half], color=shade, linewidth=2, label=label)
    axes.set(xlim=(0, 180), xticks=range(0, 181, 45))
    axes.set_xlabel(f"angle to the direction of κ = {seen.principal_curvatures[0]:g} (degrees)")


def _density_over_curvature(axes: Any, seen: CurvatureVisibility, shade: str, label: str) -> None:
    axes.scatter(seen.curvature, seen.density, s=4, color=shade, alpha=0.25, linewidths=0)
    groups = np.array_split(np.argsort(seen.curvature, kind="stable"), min(_GROUPS, len(seen.curvature)))
    middle = [(seen.curvature[own].mean(), seen.density[own].mean()) for own in groups]
    axes.plot(*zip(*middle, strict=True), color=shade, marker="o", markersize=3, linewidth=2, label=label)
    axes.set_xlabel("normal curvature |κ(v)| of the direction")


def _ratio_panel(axes: Any, sweep: VisibilitySweep) -> None:
    order = np.argsort(sweep.concentrations)
    concentrations = np.array(sweep.concentrations)[order]
    found = np.array([one.ratio for one in sweep.results])[order]
    expected = np.array([one.predicted_ratio for one in sweep.results])[order]
    axes.axhline(1, color="grey", linewidth=1)
    axes.plot(concentrations, found, color=_CURVED, marker="o", markersize=5, linewidth=2, label="integrated")
    axes.plot(
        concentrations, expected, color="#444444", marker="o", markersize=3, linestyle="--", label="second order in t"
    )
    reach = max(float(np.abs(found - 1).max()), 1e-4)
    top = 1 + max(1.6 * reach, min(4 * reach, 1.05 * float((expected - 1).max())))
    axes.set(xscale="log", ylim=(min(1 - 0.25 * reach, 1 + 1.25 * float((found - 1).min())), top))
    _plain_ticks(axes, concentrations)
    axes.set_title("curvature seen, over that of uniform directions\n(grey: none stands out)", fontsize="medium")
    axes.set(xlabel="concentration c of the radii near 0 (1: flat ball)", ylabel="mean κ² seen / mean κ² uniform")
    axes.legend(fontsize="small", frameon=False)


def _plain_ticks(axes: Any, concentrations: np.ndarray) -> None:
    """The concentrations themselves under the axis, some of many; ratios in full rather than from an offset."""
    shown = concentrations[np.unique(np.linspace(0, len(concentrations) - 1, min(8, len(concentrations))).astype(int))]
    axes.set_xticks(shown, [f"{one:g}" for one in shown])
    axes.set_xticks([], minor=True)
    axes.ticklabel_format(axis="y", useOffset=False)
