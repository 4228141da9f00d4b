"""Plots of training runs draw the numbers of the report over its steps."""

from __future__ import annotations

import dataclasses
import statistics
import sys

import numpy as np
import pytest
from dynamics_examples import STEPS, at_later_steps, run_report

from tangent_lens.dynamics.report import KINDS, of_kind

TITLES = ["loss on", "lift over", "signal lift", "change of", "activations", "dimensions"]


def panels(report):
    return list(report.plot().axes)


def curves(axes, linestyle: str = "-") -> list[np.ndarray]:
    """Of lines with markers: not of chance and of windows."""
    return [
        line.get_ydata() for line in axes.get_lines() if line.get_marker() == "o" and line.get_linestyle() == linestyle
    ]


@pytest.fixture(scope="module")
def drawn():
    return panels(run_report())


def test_six_panels_over_all_steps(drawn):
    assert len(drawn) == 6
    for axes, title in zip(drawn, TITLES, strict=True):
        assert axes.get_title().startswith(title)
        for line in axes.get_lines():
            assert line.get_marker() != "o" or tuple(line.get_xdata()) == STEPS


def test_loss_and_medians_of_the_layers(drawn):
    report = run_report()
    (loss,) = curves(drawn[0])
    assert loss == pytest.approx([point.loss for point in report.points])
    for style, proxy in (("-", "measurements"), ("--", "refitted")):
        for lift, delta, kind in zip(curves(drawn[1], style), curves(drawn[3], style), KINDS, strict=True):
            found = [of_kind(getattr(point, proxy), kind) for point in report.points]
            assert lift == pytest.approx([statistics.median(one.energy.lift for one in layers) for layers in found])
            assert delta == pytest.approx([statistics.median(one.isotropy.delta for one in layers) for layers in found])
    assert len(curves(drawn[2])) == 2, "residual gradients have no signal lift"


def test_activations_overlap_and_dimensions(drawn):
    report = run_report()
    overlap = curves(drawn[4])[2]
    assert overlap == pytest.approx([statistics.median(point.overlaps.values()) for point in report.points])
    sites = [f"resid_post.{layer}" for layer in range(3)]
    assert curves(drawn[5])[1] == pytest.approx(
        [statistics.median(point.dimensions[site] for site in sites) for point in report.points]
    )


def test_windows_are_shaded_and_step_0_is_seen(drawn):
    for axes in drawn:
        spans = [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in axes.patches]
        assert spans == [(0, 3), (8, 10)]
        assert axes.get_xscale() == "symlog" and axes.get_xlim()[0] < 0
    later = at_later_steps(run_report())
    without_zero = dataclasses.replace(later, points=later.points[1:])
    assert panels(without_zero)[0].get_xscale() == "log"


def test_without_refit_nothing_is_dashed():
    axes = panels(run_report(refit=False, dimensions=False))
    assert curves(axes[1]) and not curves(axes[1], "--")
    assert "dashed" not in axes[1].get_title()
    assert (len(curves(axes[4])), len(curves(axes[5]))) == (2, 1)


def test_it_saves_and_leaves_pyplot_empty(tmp_path):
    from matplotlib import pyplot

    run_report().plot().savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert pyplot.get_fignums() == []


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "tangent-lens\[plot\]"'):
        run_report().plot()
