"""Plots draw the numbers of the report."""

import dataclasses
import sys

import numpy as np
import pytest


def test_the_lift_panel_draws_every_layer(report):
    figure = report.plot()
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    for label, prefix in (
        ("residual gradient", "resid_post"),
        ("attention weights", "attention"),
        ("MLP weights", "mlp"),
    ):
        expected = [report.of(f"{prefix}.{layer}").energy.lift for layer in range(3)]
        assert np.allclose(lines[label].get_ydata(), expected)


def test_it_saves_and_leaves_pyplot_empty(report, tmp_path):
    from matplotlib import pyplot

    report.plot().savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert pyplot.get_fignums() == []


def test_a_report_of_one_gradient_can_be_drawn(report):
    weights = tuple(one for one in report.measurements if one.gradient == "weight")
    figure = dataclasses.replace(report, measurements=weights).plot()
    assert "residual gradient" not in [line.get_label() for line in figure.axes[0].get_lines()]


def test_without_matplotlib_it_says_what_to_install(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "tangent-lens\[plot\]"'):
        report.plot()
