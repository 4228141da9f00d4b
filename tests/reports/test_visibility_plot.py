"""The plot of a sweep over concentrations draws its numbers."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tangent_lens.measures.curvature_visibility import (
    VisibilitySweep,
    curvature_visibility,
    visibility_by_concentration,
)
from tangent_lens.measures.geodesics import chord_arc
from tangent_lens.reports.visibility_plot import FIXED_RADII


def sweep_of(*curvatures: float, **options) -> VisibilitySweep:
    return visibility_by_concentration(curvatures, (10, 1, 3), 0.5, **{"directions": 100, "steps": 64, **options})


def lines(axes) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {line.get_label(): (np.asarray(line.get_xdata()), np.asarray(line.get_ydata())) for line in axes.get_lines()}


def test_arcs_are_drawn_against_the_expansion():
    axes = sweep_of(2.0, 0.5).plot().axes[0]
    assert {"|κ| = 0.5", "|κ| = 2"} < set(lines(axes))
    whole, dashed = axes.get_lines()[2:4]
    radius = np.asarray(whole.get_xdata())
    assert np.allclose(dashed.get_ydata(), chord_arc(2.0, radius) - radius)
    x = radius / np.sqrt((1 + np.sqrt(1 + 4 * radius**2)) / 2)  # x^2 + x^4 = t^2
    assert np.allclose(whole.get_ydata(), (x * np.sqrt(1 + 4 * x**2) + np.arcsinh(2 * x) / 2) / 2 - radius, atol=1e-7)


def test_directions_of_a_surface_are_drawn_over_the_angle():
    axes = sweep_of(2.0, 0.5).plot().axes[1]
    for share in FIXED_RADII:
        angle, density = lines(axes)[f"t = {share * 0.5:.3g}"]
        seen = curvature_visibility([2.0, 0.5], [share * 0.5], directions=100, steps=64)
        assert len(angle) == 51 and angle[0] == 0 and angle[-1] == pytest.approx(180)
        assert np.allclose(density, seen.density[:51])
    assert "κ = 2" in axes.get_xlabel()


def test_directions_of_more_dimensions_are_drawn_over_their_curvature():
    axes = sweep_of(2.0, 1.0, 0.0, measure="volume", seed=3).plot().axes[1]
    for share, points in zip(FIXED_RADII, axes.collections, strict=True):
        seen = curvature_visibility([2.0, 1.0, 0.0], [share * 0.5], measure="volume", directions=100, seed=3, steps=64)
        assert np.allclose(points.get_offsets(), np.stack([seen.curvature, seen.density], axis=1))
        assert lines(axes)[f"t = {share * 0.5:.3g}"][1].mean() == pytest.approx(1)


def test_ratios_stand_in_the_order_of_concentration():
    sweep = sweep_of(2.0, 0.5)
    axes = sweep.plot().axes[2]
    first, second, third = sweep.results
    assert np.allclose(lines(axes)["integrated"], ([1, 3, 10], [second.ratio, third.ratio, first.ratio]))
    assert np.allclose(lines(axes)["second order in t"][1][0], second.predicted_ratio)
    assert axes.get_xscale() == "log" and axes.get_ylim()[0] < 1 < second.ratio < axes.get_ylim()[1]
    assert [one.get_text() for one in axes.get_xticklabels()] == ["1", "3", "10"]


def test_ratios_below_one_are_inside():
    sweep = visibility_by_concentration((2, 2, 0), (1, 10), 1.0, measure="volume", directions=200)
    low, high = sweep.plot().axes[2].get_ylim()
    assert low < sweep.results[0].ratio < 1 < high


@pytest.mark.parametrize("curvatures", [(1.5,), (1.0, 1.0), (1.0, -1.0, 0.5, 0.2)])
def test_any_dimension_is_drawn_and_no_figure_stays_open(curvatures, tmp_path):
    from matplotlib import pyplot

    figure = sweep_of(*curvatures).plot()
    figure.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert ", ".join(f"{one:g}" for one in curvatures) in figure.get_suptitle()
    assert pyplot.get_fignums() == []


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "tangent-lens\[plot\]"'):
        sweep_of(2.0, 0.5).plot()
