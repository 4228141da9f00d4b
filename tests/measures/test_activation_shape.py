"""The shape of activations: each number is that of its own measure on the same rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conformance.families import tiny_model

import tangent_lens as tln
from tangent_lens.measures.cosine import mean_cosine_of
from tangent_lens.measures.dimension import intrinsic_dimension
from tangent_lens.measures.partition import partition_isotropy
from tangent_lens.measures.spectrum import spectrum_of

SEQUENCES = [np.random.default_rng(length).integers(5, 100, size=length) for length in range(6, 24)]


@pytest.fixture(scope="module")
def lens():
    """A tiny model in float64."""
    return tln.Lens(tiny_model("llama", torch.float64))


@pytest.fixture(scope="module")
def report(lens):
    """Of all layers, from a sample of 100 rows."""
    return lens.shape(SEQUENCES, rows=100, progress=False, name="numbers")


def test_every_number_is_that_of_its_measure(lens, report):
    site = lens.resolve("resid_post.1")[0]
    moments = lens.record(SEQUENCES, site, gradients=False, progress=False)[site].activations
    rows = lens.sample(SEQUENCES, site, rows=100, progress=False)[site].rows
    one = report.of("resid_post.1")
    assert (one.rows, one.sampled) == (sum(map(len, SEQUENCES)), 100)
    assert one.iso_score == pytest.approx(tln.iso_score(moments.covariance()))
    assert one.spectrum == spectrum_of(moments.covariance())
    assert one.mean_cosine == pytest.approx(mean_cosine_of(rows))
    assert one.partition == partition_isotropy(rows, unit_norm=True)
    assert one.dimensions == tuple(intrinsic_dimension(rows, method) for method in ("two_nn", "mle"))


def test_rows_of_pandas_are_the_sites(report):
    frame = report.to_pandas()
    assert frame["site"].tolist() == ["resid_post.0", "resid_post.1", "resid_post.2"]
    assert frame["dimension_mle"].tolist() == [one.dimensions[1].dimension for one in report.shapes]
    with pytest.raises(KeyError, match=r"'resid_post.7' was not measured; measured: resid_post.0"):
        report.of("resid_post.7")


@pytest.mark.parametrize("width", [60, 100])
def test_the_table_shows_every_site_and_is_not_cut(report, width):
    from tangent_lens.reports.console import as_text

    shown = as_text(report, width=width)
    assert all(one.site in shown for one in report.shapes)
    assert f"{report.shapes[0].mean_cosine:.3f}" in shown and "…" not in shown
    assert ("stable" in shown.split("Of at most")[0]) == (width == 100)


def test_dimensions_can_be_left_out(lens):
    report = lens.shape(SEQUENCES, "resid_post.0", rows=30, dimensions=(), progress=False)
    assert report.shapes[0].dimensions == ()
    assert "TwoNN" not in str(report)


def test_first_positions_can_be_left_out(lens):
    report = lens.shape(SEQUENCES, "resid_post.0", skip_first=True, dimensions=(), progress=False)
    assert report.shapes[0].rows == sum(map(len, SEQUENCES)) - len(SEQUENCES)
