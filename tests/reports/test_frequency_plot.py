"""The plot of a report by token frequency draws its numbers."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
from frequency_examples import frequency_report

from tangent_lens.reports.frequency_plot import MOST_PANELS, chosen_sites


def test_every_site_has_its_points_raw_and_corrected():
    report = frequency_report()
    axes = report.plot().axes
    for panel, (name, _, spread) in zip(axes, report.spreads, strict=False):
        raw, corrected = (np.asarray(one.get_offsets()) for one in panel.collections)
        assert np.allclose(raw, np.stack([spread.points.log_frequency, spread.points.distance], axis=1))
        assert np.allclose(corrected, np.stack([spread.points.log_frequency, spread.points.corrected], axis=1))
        title = panel.get_title()
        assert name in title
        for found in (spread.raw, spread.corrected):
            assert f"Pearson {found.pearson.estimate:+.2f}, Spearman {found.spearman.estimate:+.2f}" in title


def test_a_token_far_off_makes_the_scale_logarithmic():
    report = frequency_report(sites=(2,))
    points = report.sites[0].spread.points
    far = dataclasses.replace(points, corrected=np.append(points.corrected[:-1], 900.0))
    spread = dataclasses.replace(report.sites[0].spread, points=far)
    changed = dataclasses.replace(report, sites=(dataclasses.replace(report.sites[0], spread=spread),))
    assert report.plot().axes[0].get_yscale() == "linear"
    assert changed.plot().axes[0].get_yscale() == "log"


def test_lifts_by_bucket_stand_beside():
    report = frequency_report()
    panel = report.plot().axes[3]
    lines = {line.get_label(): line.get_ydata() for line in panel.get_lines()}
    for one in report.sites:
        assert np.allclose(lines[one.site], [bucket.lift for bucket in one.enrichment.buckets])
        assert max(lines[one.site]) < panel.get_ylim()[1]


def test_of_many_sites_some_are_drawn():
    report = frequency_report(sites=tuple(range(9)))
    assert [one.layer for one in chosen_sites(report.sites)] == [0, 3, 5, 8]
    assert [one.layer for one in chosen_sites(report.sites[:2])] == [0, 1]
    panels = [axes for axes in report.plot().axes if axes.get_title()]
    assert len(panels) == MOST_PANELS + 2


def test_without_checkpoints_and_at_one_site_two_panels_are_left(tmp_path):
    from matplotlib import pyplot

    report = dataclasses.replace(frequency_report(sites=(2,)), trajectory=None)
    figure = report.plot()
    assert [axes.get_title().split()[0] for axes in figure.axes] == ["resid_post.2", "gradient"]
    figure.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert pyplot.get_fignums() == []


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "tangent-lens\[plot\]"'):
        frequency_report().plot()
