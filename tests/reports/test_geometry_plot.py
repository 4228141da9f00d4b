"""The plots of local geometry draw its numbers."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
from geometry_examples import every_bucket, exponents_of, geometry_report, geometry_run, straight, undetermined

from tangent_lens.reports.geometry_axes import SitePlaces
from tangent_lens.reports.geometry_plot import running_medians


def panel(figure, beginning):
    """The axes whose title begins like this."""
    (found,) = [axes for axes in figure.axes if axes.get_title().startswith(beginning)]
    return found


def lines(axes):
    """Heights of the lines by their labels."""
    return {line.get_label(): np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()}


def words(axes):
    return [text.get_text() for text in axes.texts]


def test_exponents_over_layers():
    report = geometry_report()
    axes = panel(report.plot(), "growth")
    drawn = lines(axes)
    assert np.allclose(drawn["tangent (theory 1)"], exponents_of(report, "tangent"))
    assert np.allclose(drawn["normal (theory 2)"], exponents_of(report, "normal"))
    first = report.sites[0].everything.order.chosen.above_floor
    assert np.allclose(drawn["normal above a floor (theory 2)"], [first.exponent, np.nan], equal_nan=True)
    assert [line.get_ydata()[0] for line in axes.get_lines()[:2]] == [1, 2]
    band = axes.collections[0].get_paths()[0].vertices
    slope = report.sites[0].everything.order.chosen.tangent
    assert {slope.low, slope.high} <= set(band[:, 1])
    assert list(axes.get_lines()[2].get_xdata()) == [3, 9]


def test_undetermined_exponents_are_hollow():
    axes = panel(every_bucket(geometry_report(), undetermined).plot(), "growth")
    (hollow,) = [line for line in axes.get_lines() if line.get_label() == "not determined"]
    assert list(hollow.get_ydata()) == [1.35, 1.35]
    assert hollow.get_markerfacecolor() == "white"
    assert "normal above a floor (theory 2)" not in lines(axes)


def test_rows_of_a_middle_site_and_guides():
    report = geometry_report()
    axes, points = panel(report.plot(), "rows at resid_post.9"), report.of("resid_post.9").points
    for drawn, part in zip(axes.collections, (points.tangent, points.normal), strict=True):
        assert np.allclose(drawn.get_offsets(), np.stack([points.radius, part], axis=1))
    assert axes.get_xscale() == axes.get_yscale() == "log"
    for power in (1, 2):
        (guide,) = [line for line in axes.get_lines() if line.get_label() == f"slope {power}"]
        rise = np.log(guide.get_ydata()[1] / guide.get_ydata()[0]) / np.log(guide.get_xdata()[1] / guide.get_xdata()[0])
        assert rise == pytest.approx(power)


def test_running_medians():
    x = np.arange(100.0)[::-1]
    middle, height = running_medians(x, x**2, 4)
    assert list(middle) == [12, 37, 62, 87]
    assert list(height) == [144, 1369, 3844, 7569]


def test_radii_by_bucket_have_a_density_of_mass_one():
    report = geometry_report()
    axes = panel(report.plot(), "radial density at resid_post.9")
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["60 to 70", "71 to 900"]
    site = report.of("resid_post.9")
    unit = np.median(site.everything.radii)
    longest = np.quantile(site.everything.radii, 0.995) / unit
    bins = np.linspace(0, longest, 41)
    outlines = [patch for patch in axes.patches if patch.get_label() in labels]
    for patch, bucket in zip(outlines, site.buckets, strict=True):
        heights = np.histogram(bucket.radii / unit, bins=bins, density=True)[0]
        assert max(patch.get_xy()[:, 1]) == pytest.approx(heights.max())
    assert axes.get_xlim()[1] == pytest.approx(longest)


def test_explained_share_over_layers():
    report = geometry_report()
    axes = panel(report.plot(), "held-out")
    drawn = lines(axes)
    assert np.allclose(drawn["all tokens"], [one.everything.curvature.explained for one in report.sites])
    for place, label in enumerate(("60 to 70", "71 to 900")):
        assert np.allclose(drawn[label], [one.buckets[place].curvature.explained for one in report.sites])
    first = report.sites[0].everything.curvature
    assert {first.explained_low, first.explained_high} <= set(axes.collections[0].get_paths()[0].vertices[:, 1])


def test_gradients_and_where_the_tangent_one_is_degenerate():
    report = geometry_report()
    axes = panel(report.plot(), "weight gradients")
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["query.3", "mlp_in.3"]
    for container, name in zip(axes.containers, ("tangent", "normal"), strict=True):
        slopes = [getattr(one.order, f"{name}_rows").slope for one in report.gradients]
        assert np.allclose(container.lines[0].get_ydata(), [one.exponent for one in slopes])
        ends = [segment[:, 1] for segment in container.lines[2][0].get_segments()]
        assert np.allclose(ends, [[one.low, one.high] for one in slopes])
    (shaded,) = axes.patches
    assert shaded.get_label() == "tangent gradient degenerate"
    assert shaded.get_x() < 0 < shaded.get_x() + shaded.get_width() < 1


def test_a_row_exponent_that_is_not_there_is_not_drawn():
    report = geometry_report()
    first = report.gradients[0]
    nothing = dataclasses.replace(first.order.normal_rows, slope=None, reason="flat")
    changed = dataclasses.replace(first, order=dataclasses.replace(first.order, normal_rows=nothing))
    axes = panel(dataclasses.replace(report, gradients=(changed,)).plot(), "weight gradients")
    assert len(axes.containers) == 1


def test_depth():
    report = geometry_report()
    figure = report.plot()
    axes, shares = panel(figure, "all tokens together"), figure.axes[-1]
    dimensions, drawn = lines(axes), lines(shares)
    assert np.allclose(dimensions["TwoNN (left)"], [one.two_nn for one in report.depth.geometries])
    assert np.allclose(dimensions["MLE (left)"], [one.mle for one in report.depth.geometries])
    assert np.allclose(drawn["along 3 directions"], [one.linearity for one in report.depth.geometries])
    before = report.depth.overlap_before[1].overlap
    assert np.allclose(drawn["neighbours kept from the site before"], [np.nan, before], equal_nan=True)
    assert len(axes.get_legend().get_texts()) == 5


def test_panels_without_numbers_say_so(tmp_path):
    from matplotlib import pyplot

    report = every_bucket(geometry_report(gradients=(), depth=None), straight)
    figure = report.plot()
    said = [word for axes in figure.axes for word in words(axes)]
    assert said == [
        "too few rows of each token for a quadratic",
        "no weight gradients in this report",
        "depth was not measured",
    ]
    figure.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert pyplot.get_fignums() == []


def test_sites_without_layers_stand_side_by_side():
    report = geometry_report()
    sites = tuple(dataclasses.replace(site, layer=None) for site in report.sites)
    axes = panel(dataclasses.replace(report, sites=sites).plot(), "growth")
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["resid_post.3", "resid_post.9"]
    assert list(axes.get_lines()[2].get_xdata()) == [0, 1]


def test_sites_that_share_a_layer_stand_side_by_side():
    assert list(SitePlaces(["a", "b", "c"], [1, 1, 2]).x) == [0, 1, 2]
    assert list(SitePlaces(["a", "b"], [4, 7]).x) == [4, 7]


def test_a_part_of_zeros_is_left_out_of_logarithms():
    report = geometry_report()
    points = dataclasses.replace(report.sites[1].points, normal=np.zeros_like(report.sites[1].points.normal))
    site = dataclasses.replace(report.sites[1], points=points)
    axes = panel(dataclasses.replace(report, sites=(report.sites[0], site)).plot(), "rows at resid_post.9")
    assert len(axes.collections) == 1 and "normal part" not in lines(axes)


def test_a_run_along_its_steps():
    run = geometry_run()
    figure = run.plot()
    assert len(figure.axes) == 6
    drawn = lines(panel(figure, "exponent: tangent"))
    for site in ("resid_post.3", "resid_post.7", "resid_post.9"):
        expected = [one.report.of(site).everything.order.chosen.tangent.exponent for one in run.points]
        assert np.allclose(drawn[site], expected)
    assert "resid_post.5" not in drawn
    kept = [line.get_ydata() for line in panel(figure, "neighbours").get_lines()]
    overlaps = run.overlaps("resid_post.3")
    assert np.allclose(kept[0], [last.overlap for _, last in overlaps])
    before = [np.nan if one is None else one.overlap for one, _ in overlaps]
    assert np.allclose(np.array(kept[1], dtype=float), before, equal_nan=True)
    flat = panel(figure, "flatness").get_lines()[0].get_ydata()
    assert np.allclose(flat, [one.report.depth.of("resid_post.3").linearity for one in run.points])
    assert figure.axes[0].get_xscale() == "symlog"


def test_a_run_without_depth_has_one_row(tmp_path):
    from matplotlib import pyplot

    figure = geometry_run(depth=False).plot()
    assert [axes.get_title().split(":")[0] for axes in figure.axes] == ["exponent"] * 3
    assert figure.axes[0].get_xlabel() == "training step"
    figure.savefig(tmp_path / "run.png")
    assert pyplot.get_fignums() == []


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for result in (geometry_report(), geometry_run()):
        with pytest.raises(ImportError, match=r'pip install "tangent-lens\[plot\]"'):
            result.plot()
