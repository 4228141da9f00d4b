"""The rank rules on spectra with a known answer, and their constants against simulation and the literature."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from explicit import PROPERTY, random_frame, random_rows
from hypothesis import given
from hypothesis import strategies as st

from tangent_lens.recording.moments import SecondMoments
from tangent_lens.subspaces import fits, ranks
from tangent_lens.subspaces.fits import fit_pca
from tangent_lens.subspaces.ranks import RULES, check_rank, hard_threshold, known_rank, marchenko_pastur_median, rank_by

NOISE_RULES = ("marchenko_pastur", "gavish_donoho", "parallel_analysis")
SHAPES = [(2000, 100), (100, 300), (300, 300)]


def spiked_rows(count: int, d: int, spikes: int, seed: int = 0, noise: float = 1.0) -> torch.Tensor:
    """Isotropic noise plus some directions far above it."""
    generator = np.random.default_rng(seed)
    strengths = np.linspace(12, 8, spikes)
    signal = (
        generator.normal(size=(count, spikes))
        * strengths
        @ np.asarray(random_frame(d, max(spikes, 1), seed)).T[:spikes]
    )
    return torch.from_numpy(noise * (generator.normal(size=(count, d)) + signal))


def eigenvalues(rows: torch.Tensor) -> torch.Tensor:
    return torch.linalg.eigvalsh(torch.cov(rows.T))


@pytest.mark.parametrize("rule", NOISE_RULES)
@pytest.mark.parametrize(("count", "d"), SHAPES)
@pytest.mark.parametrize("spikes", [1, 5])
def test_planted_directions_are_counted(rule, count, d, spikes):
    assert rank_by(rule, eigenvalues(spiked_rows(count, d, spikes)), count - 1) == spikes


@pytest.mark.parametrize("rule", NOISE_RULES)
@pytest.mark.parametrize(("count", "d"), SHAPES)
def test_a_direction_that_noise_hides_is_not_counted(rule, count, d):
    # Below the phase transition at sqrt(d/n) (Baik, Ben Arous and Péché 2005) a spike leaves no trace in the spectrum.
    rows = spiked_rows(count, d, 2)
    hidden = rows + 0.05 * math.sqrt(d / count) * rows[:, :1].roll(1, 0)
    assert rank_by(rule, eigenvalues(hidden), count - 1) == 2


@pytest.mark.parametrize("rule", ["gavish_donoho", "parallel_analysis"])
def test_noise_alone_is_refused(rule):
    with pytest.raises(ValueError, match=f"{rule}: no direction stands above noise; give a whole number as the rank"):
        rank_by(rule, eigenvalues(spiked_rows(500, 50, 0)), 499)


def test_flat_spectra_are_refused_by_the_marchenko_pastur_edge():
    with pytest.raises(ValueError, match="marchenko_pastur: no direction stands above noise"):
        rank_by("marchenko_pastur", torch.ones(20), 1000)


@pytest.mark.parametrize("rule", RULES)
def test_neither_scale_nor_order_matters(rule):
    values = eigenvalues(spiked_rows(400, 40, 3))
    expected = rank_by(rule, values, 399)
    assert rank_by(rule, values.flip(0) * 1e-9, 399) == expected
    assert rank_by(rule, values[torch.randperm(40)] * 1e9, 399) == expected


@given(equal=st.integers(1, 12))
@PROPERTY
def test_equal_variances_have_their_number_as_rank(equal):
    values = torch.cat([torch.full((equal,), 3.0), torch.zeros(5)])
    assert rank_by("effective_rank", values, 100) == rank_by("participation_ratio", values, 100) == equal


def test_soft_ranks_of_a_known_spectrum():
    values = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0])
    assert rank_by("participation_ratio", values, 100) == round(16**2 / 86)
    assert rank_by("effective_rank", values, 100) == round(2**1.875)


@pytest.mark.parametrize("rule", NOISE_RULES)
def test_rows_in_a_plane_count_only_what_is_not_rounding(rule):
    flat = random_rows(200, 4, seed=1) @ random_frame(30, 4).T
    assert 1 <= rank_by(rule, eigenvalues(flat), 199) <= 4


@pytest.mark.parametrize("aspect", [0.1, 0.5, 1.0])
def test_the_median_of_noise_is_that_of_simulated_noise(aspect):
    d = 400
    noise = torch.from_numpy(np.random.default_rng(0).normal(size=(round(d / aspect), d)))
    simulated = float(torch.linalg.eigvalsh(noise.T @ noise / len(noise)).quantile(0.5))
    assert marchenko_pastur_median(aspect) == pytest.approx(simulated, rel=0.02)


@pytest.mark.parametrize("aspect", [0.05, 0.2, 0.5, 0.8, 1.0])
def test_the_threshold_is_near_the_published_cubic(aspect):
    cubic = 0.56 * aspect**3 - 0.95 * aspect**2 + 1.82 * aspect + 1.43
    assert hard_threshold(aspect) == pytest.approx(cubic, abs=0.02)  # the accuracy the paper states


def test_the_threshold_of_a_square_matrix_is_the_published_one():
    assert hard_threshold(1.0) == pytest.approx(2.858, abs=5e-4)


@pytest.mark.parametrize(("d", "count"), [(20, 60), (60, 20)])
def test_noise_percentiles_are_those_of_drawn_rows(d, count):
    generator = np.random.default_rng(1)
    draws = []
    for _ in range(400):
        rows = generator.normal(size=(count, d))
        draws.append(np.linalg.svd(rows, compute_uv=False) ** 2 / count)
    expected = np.percentile(draws, 95, axis=0)
    assert np.allclose(ranks._noise_percentiles(d, count), expected, rtol=0.08, atol=0.01)


@pytest.mark.parametrize("rule", RULES)
def test_a_fit_takes_the_rule_and_remembers_its_name(rule):
    rows = spiked_rows(300, 30, 4)
    subspace = fit_pca(SecondMoments.of(rows, name="here"), rule)
    assert subspace.rank == subspace.origin["rank"] == rank_by(rule, eigenvalues(rows), 299)
    assert subspace.origin["asked_rank"] == rule


def test_the_fit_names_the_site_in_which_a_rule_found_nothing():
    with pytest.raises(ValueError, match="here: gavish_donoho: no direction stands above noise"):
        fit_pca(SecondMoments.of(spiked_rows(500, 50, 0), name="here"), "gavish_donoho")


@pytest.mark.parametrize(
    ("rule", "values", "rows", "taught"),
    [
        ("elbow", torch.ones(3), 9, "no rank rule 'elbow'; there are effective_rank, participation_ratio"),
        ("effective_rank", torch.zeros(3), 9, "the largest eigenvalue is 0.0, so there is no variance"),
        ("effective_rank", torch.tensor([1.0, math.nan]), 9, "eigenvalues must be finite numbers"),
        ("effective_rank", torch.ones(2, 2), 9, r"not of shape \(2, 2\)"),
        ("effective_rank", torch.ones(3), 0, "0 independent rows determine no spectrum; use 1 or more"),
    ],
)
def test_what_has_no_rank_is_refused(rule, values, rows, taught):
    with pytest.raises(ValueError, match=taught):
        rank_by(rule, values, rows)


def test_ranks_known_before_the_rows():
    assert [known_rank(rank) for rank in (3, 3.0, 0.9, "gavish_donoho")] == [3, 3, None, None]
    assert check_rank("gavish_donoho") == "gavish_donoho"
    assert fits.check_rank is check_rank
    with pytest.raises(ValueError, match=r"rank 'elbow' must be a whole number.*or a rule \(effective_rank"):
        known_rank("elbow")
