"""Intervals and corrected p-values of a whole run: against runs on corpora that really are resampled."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import scipy.stats
import torch
from conformance.families import tiny_model

import tangent_lens as tln
from tangent_lens.measures import uncertainty
from tangent_lens.measures.bootstrap import bootstrap, resampled_weights
from tangent_lens.measures.report import Report

SEQUENCES = [np.random.default_rng(seed).integers(5, 100, size=4 + seed % 5) for seed in range(24)]
OPTIONS = {"rank": 4, "controls": 5, "progress": False}


@pytest.fixture(scope="module")
def lens():
    """A tiny model in float64, with fused queries, keys and values."""
    return tln.Lens(tiny_model("gpt2", torch.float64))


@pytest.fixture(scope="module")
def report(lens):
    """One run with intervals."""
    return lens.measure(SEQUENCES, bootstrap=200, **OPTIONS)


def test_the_estimates_are_the_measured_numbers(report):
    for one in report.measurements:
        found = one.uncertainty
        assert found.energy_interval.estimate == pytest.approx(one.energy.energy, rel=1e-9)
        assert found.lift_interval.estimate == pytest.approx(one.energy.lift, rel=1e-9)
        assert found.energy_interval.low <= one.energy.energy <= found.energy_interval.high
        if one.gradient == "residual":
            assert found.delta_iso_interval.estimate == pytest.approx(one.isotropy.delta, abs=1e-10)
        else:
            assert found.delta_iso_interval is None


def test_an_interval_is_that_of_runs_on_resampled_corpora(lens, report):
    """Every replicate measured anew by running the model: the same energies, and so the same interval."""
    _, test = lens.corpus(SEQUENCES).split(0.5, 0)
    ordered = sorted(test.sequences, key=len, reverse=True)
    subspaces = {site: one for site, one in report.subspaces.items() if site.startswith("resid_post.1")}
    options = {**OPTIONS, "gradients": "residual", "subspaces": subspaces}

    def by_running(weights):
        found = []
        for counts in weights.astype(int):
            copies = [ordered[place] for place, count in enumerate(counts) for _ in range(count)]
            # The fit half is not looked at: as many sequences again, in any order, split as the seed says.
            record = lens.record(copies, "resid_post.1", progress=False)
            (moments,) = record.values()
            found.append(tln.energy_fraction(moments.gradients.second_moment(), subspaces["resid_post.1"].basis))
        return np.array(found)

    weights = resampled_weights(len(ordered), 5, seed=0)
    expected = by_running(weights)
    again = lens.measure(SEQUENCES, "resid_post.1", bootstrap=100, **options)
    assert again.of("resid_post.1").energy.energy == pytest.approx(report.of("resid_post.1").energy.energy)
    interval = again.of("resid_post.1").uncertainty.energy_interval
    assert interval.sequences == len(ordered)
    some = bootstrap(_statistic(lens, test, subspaces["resid_post.1"]), len(ordered), replicates=100, seed=0)
    assert (some.low, some.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
    assert _statistic(lens, test, subspaces["resid_post.1"])(weights) == pytest.approx(expected, rel=1e-9)


def _statistic(lens, test, subspace):
    """Energies from each sequence's own gradients, gathered one sequence a run."""
    ordered = sorted(test.sequences, key=len, reverse=True)
    sums = []
    for sequence in ordered:
        (moments,) = lens.record([sequence], "resid_post.1", progress=False).values()
        matrix = moments.gradients.second_moment()
        sums.append((float((subspace.basis.T @ matrix @ subspace.basis).trace()), float(matrix.trace())))
    inside, whole = np.array(sums).T
    return lambda weights: (weights @ inside) / (weights @ whole)


def test_p_values_are_corrected_over_the_layers_of_their_kind(report):
    for kind, pooled in (("resid_post", False), ("attention", True), ("query", False)):
        group = [one for one in report.measurements if (one.kind, one.pooled) == (kind, pooled)]
        assert len(group) == 3
        expected = scipy.stats.false_discovery_control([one.energy.exact_p_value for one in group])
        assert [one.energy_q_value for one in group] == pytest.approx(expected)
        expected = scipy.stats.false_discovery_control([one.isotropy.p_value for one in group])
        assert [one.isotropy_q_value for one in group] == pytest.approx(expected)


def test_no_interval_depends_on_batches_or_padding(lens, report):
    other = lens.measure(SEQUENCES, bootstrap=200, batch_size=3, padding_side="left", **OPTIONS)
    for one, same in zip(report.measurements, other.measurements, strict=True):
        mine, others = (dataclasses.astuple(found.uncertainty.lift_interval) for found in (one, same))
        assert mine == pytest.approx(others, rel=1e-6)


def test_intervals_are_kept_in_files_tables_and_pandas(report, tmp_path):
    report.save(tmp_path)
    again = Report.load(tmp_path)
    assert again.measurements == report.measurements
    first = report.of("resid_post.0")
    row = report.to_pandas().set_index("name").loc["resid_post.0"]
    assert row["lift_low"] == first.uncertainty.lift_interval.bca_low
    assert row["q_value"] == first.energy_q_value
    assert "95%" in str(report) and "200 corpora resampled from the 12 test sequences" in " ".join(str(report).split())


def test_rows_that_would_fill_the_memory_are_refused_before_the_model_runs(lens, monkeypatch):
    monkeypatch.setattr(uncertainty, "MOST_BYTES", 10_000)
    monkeypatch.setattr(type(lens.model), "run", lambda *_: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match=r"keeps the rows of \d+ test tokens at 3 sites.*gradients='residual'"):
        lens.measure(SEQUENCES, bootstrap=100, **OPTIONS)


@pytest.mark.parametrize(
    ("replicates", "sentence"), [(50, "50 resampled corpora give no interval"), (-1, "bootstrap -1")]
)
def test_too_few_replicates_are_refused(lens, replicates, sentence):
    with pytest.raises(ValueError, match=sentence):
        lens.measure(SEQUENCES, bootstrap=replicates, **OPTIONS)


def test_too_few_sequences_are_refused(lens):
    with pytest.raises(ValueError, match="4 sequences are too few to resample"):
        lens.measure(SEQUENCES[:8], bootstrap=100, **OPTIONS)
