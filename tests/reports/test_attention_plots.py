"""Plots of attention scores draw the numbers of the report."""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys

import numpy as np
import pytest
from attention_examples import layer_of, report_of, unknown_head


@pytest.fixture(scope="module")
def attention_report():
    return report_of(layer_of(number) for number in (0, 1, 5))


def panels(report):
    return {axes.get_title().split(",")[0].split(" (")[0]: axes for axes in report.plot().axes if axes.get_title()}


def drawn(axes):
    return np.asarray(axes.images[0].get_array().filled(np.nan))


def test_heat_maps_hold_d_its_control_and_its_ratio_to_the_baseline(attention_report):
    found = panels(attention_report)
    dominance = np.array([one.dominance for one in attention_report.layers])
    baseline = np.array([[one.variance_baseline] for one in attention_report.layers])
    assert np.allclose(drawn(found["tangent dominance D"]), dominance)
    assert np.allclose(drawn(found["D of 20 random normals"]), [one.random_mean for one in attention_report.layers])
    assert np.allclose(drawn(found["D / ρ²"]), np.log2(dominance / baseline))
    assert [label.get_text() for label in found["tangent dominance D"].get_yticklabels()] == ["0", "1", "5"]


def test_axes_have_a_panel_where_they_were_measured(attention_report):
    found = panels(attention_report)
    for title, pick in (("D by key distance", "by_distance"), ("D by query token frequency", "by_frequency")):
        lines = found[title].get_lines()
        for line, one in zip(lines, attention_report.layers, strict=True):
            columns = zip(*getattr(one, pick).dominance, strict=True)
            assert np.allclose(line.get_ydata(), [statistics.median(column) for column in columns])
    assert "D by radius" in found
    plain = panels(report_of([layer_of(0, axes=False)]))
    assert list(plain) == ["tangent dominance D", "D of 20 random normals", "D / ρ²"]


def test_exponents_are_drawn_beside_the_theory(attention_report):
    axes = panels(attention_report)["exponent of the radius"]
    dashed = sorted(line.get_ydata()[0] for line in axes.get_lines() if line.get_linestyle() == "--")
    assert dashed == [2, 3, 4]
    slopes = axes.containers[1].lines[0].get_ydata()
    assert np.allclose(slopes, [statistics.median(one.scaling.exponent["mixed"]) for one in attention_report.layers])


def test_gaps_are_drawn_as_gaps(attention_report):
    uneven = report_of([unknown_head(layer_of(0)), layer_of(1, heads=2, variance_baseline=None)])
    found = panels(uneven)
    image = drawn(found["tangent dominance D"])
    assert math.isnan(image[0, 0]) and math.isnan(image[1, 3]) and image[1, 1] == uneven.layers[1].dominance[1]
    assert "D / ρ²" not in found
    none = dataclasses.replace(layer_of(0, axes=False), random=((0.0,) * 20,) * 4, dominance=(0.0,) * 4)
    report_of([none]).plot()


def test_it_saves_and_leaves_pyplot_empty(attention_report, tmp_path):
    from matplotlib import pyplot

    attention_report.plot().savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert pyplot.get_fignums() == []


def test_without_matplotlib_it_says_what_to_install(attention_report, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "tangent-lens\[plot\]"'):
        attention_report.plot()
