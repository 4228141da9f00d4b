"""Choosing subspaces through the front door: fits by name, subspaces of one's own, samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conformance.families import tiny_model

import tangent_lens as tln
from tangent_lens.measures.report import Report
from tangent_lens.subspaces.methods import FITS, fit

SEQUENCES = [np.random.default_rng(length).integers(5, 100, size=length) for length in range(6, 24)]
BY_ROWS = [name for name, method in FITS.items() if method.needs == "rows" and name != "nmf"]


@pytest.fixture(scope="module")
def lens():
    """A tiny model in float64."""
    return tln.Lens(tiny_model("llama", torch.float64))


@pytest.mark.parametrize("method", BY_ROWS)
def test_a_run_uses_the_fit_it_names(lens, method, tmp_path):
    report = lens.measure(SEQUENCES, "resid_post.1", fit=method, rank=3, gradients="residual", progress=False)
    fitted, _ = lens.corpus(SEQUENCES).split(0.5, 0)
    (sample,) = lens.sample(fitted, "resid_post.1", progress=False).values()
    expected = fit(method, sample, 3, 0)
    assert report.subspaces["resid_post.1"].overlap(expected) == pytest.approx(1, abs=1e-9)
    assert report.settings.fit == method and method in " ".join(str(report).split())
    covariance = torch.cov(sample.rows.T)
    share = tln.energy_fraction(covariance, expected.basis)
    assert report.spaces[0].variance_share == pytest.approx(share, rel=1e-9)
    report.save(tmp_path)
    assert Report.load(tmp_path).measurements == report.measurements


def test_the_fit_alone_is_the_fit_of_the_run(lens):
    fitted, _ = lens.corpus(SEQUENCES).split(0.5, 0)
    alone = lens.fit(fitted, "resid_post.*", rank=3, progress=False)
    report = lens.measure(SEQUENCES, rank=3, gradients="residual", progress=False)
    assert [site.name for site in alone] == list(report.subspaces)
    for site, one in alone.items():
        assert one.overlap(report.subspaces[site.name]) == pytest.approx(1)


def test_a_rule_chooses_the_rank_of_every_site(lens):
    report = lens.measure(SEQUENCES, rank="participation_ratio", gradients="residual", progress=False)
    fitted, _ = lens.corpus(SEQUENCES).split(0.5, 0)
    for site, record in lens.record(fitted, gradients=False, progress=False).items():
        ratio = tln.participation_ratio(record.activations.covariance())
        assert report.subspaces[site.name].rank == round(ratio)
    assert "by participation ratio" in str(report)
    by_rows = lens.fit(fitted, "resid_post.1", "kmeans", rank="participation_ratio", progress=False)
    assert [one.rank for one in by_rows.values()] == [report.subspaces["resid_post.1"].rank]


def test_subspaces_of_ones_own_are_measured_as_they_are(lens):
    own = tln.Subspace.spanned_by(torch.eye(32, dtype=torch.float64)[:, :2])
    report = lens.measure(
        SEQUENCES, "resid_post.1", subspaces={"resid_post.1": own}, gradients="residual", progress=False
    )
    assert torch.equal(report.subspaces["resid_post.1"].basis, own.basis)
    assert "subspaces given" in str(report)
    _, test = lens.corpus(SEQUENCES).split(0.5, 0)
    (moments,) = lens.record(test, "resid_post.1", progress=False).values()
    expected = tln.energy_fraction(moments.gradients.second_moment(), own.basis)
    assert report.of("resid_post.1").energy.energy == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"fit": "umap"}, "no fit 'umap'; there are pca"),
        ({"fit": "ica", "center": False}, "center=False is of PCA"),
        ({"rank": "elbow"}, r"rank 'elbow' must be.*marchenko_pastur"),
        ({"subspaces": {}}, "no subspace was given for resid_post.1"),
        ({"subspaces": {"resid_post.1": None, "query.0": None}}, r"query.0 is not measured"),
        ({"fit": "nmf"}, "semi"),
    ],
)
def test_what_cannot_be_fitted_is_refused(lens, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        lens.measure(SEQUENCES, "resid_post.1", **({"rank": 3, "gradients": "residual", "progress": False} | options))
