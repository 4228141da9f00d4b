"""Dimension counts against explicit entropies, and on spectra whose counts are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from explicit import PROPERTY, array, random_frame, random_moment, random_rows
from hypothesis import given
from hypothesis import strategies as st

from tangent_lens.measures.isotropy import iso_score
from tangent_lens.measures.spectrum import (
    effective_rank,
    participation_ratio,
    power_law,
    rank_me,
    spectrum_of,
    stable_rank,
)
from tangent_lens.recording.moments import SecondMoments

seeds = st.integers(0, 10_000)


def exponential_entropy(values: np.ndarray) -> float:
    """exp of the Shannon entropy of values / sum(values), one value at a time."""
    total = sum(values)
    return math.exp(-sum(value / total * math.log(value / total) for value in values if value > 0))


def singular_values(rows: torch.Tensor) -> np.ndarray:
    return np.linalg.svd(array(rows) - array(rows).mean(axis=0), compute_uv=False)


@given(seed=seeds, d=st.integers(1, 10))
@PROPERTY
def test_all_counts_equal_explicit_ones(seed, d):
    rows = random_rows(40, d, seed)
    spectrum, values = spectrum_of(SecondMoments.of(rows).covariance()), singular_values(rows)
    assert spectrum.d == d
    assert spectrum.effective_rank == pytest.approx(exponential_entropy(values**2), rel=1e-9)
    assert spectrum.effective_rank_singular == pytest.approx(exponential_entropy(values), rel=1e-9)
    assert spectrum.participation_ratio == pytest.approx((values**2).sum() ** 2 / (values**4).sum(), rel=1e-9)


@given(seed=seeds, d=st.integers(1, 10))
@PROPERTY
def test_counts_lie_between_one_and_d_in_their_order(seed, d):
    spectrum = spectrum_of(random_moment(d, seed))
    assert 1 - 1e-12 <= spectrum.participation_ratio <= spectrum.effective_rank * (1 + 1e-12)
    assert spectrum.effective_rank <= spectrum.effective_rank_singular * (1 + 1e-12)
    assert spectrum.effective_rank_singular <= d * (1 + 1e-12)


@given(seed=seeds)
@PROPERTY
def test_the_isotropy_score_is_the_participation_ratio_rescaled(seed):
    covariance = random_moment(6, seed)
    assert iso_score(covariance) == pytest.approx((participation_ratio(covariance) - 1) / 5, abs=1e-12)


@given(exponent=st.integers(-250, 250), seed=seeds)
@PROPERTY
def test_neither_scale_nor_rotation_changes_a_count(exponent, seed):
    covariance, turn = random_moment(6), random_frame(6, 6, seed)
    before, after = spectrum_of(covariance), spectrum_of(10.0**exponent * turn @ covariance @ turn.T)
    for name in ("participation_ratio", "effective_rank", "effective_rank_singular"):
        assert getattr(after, name) == pytest.approx(getattr(before, name), rel=1e-9)


@pytest.mark.parametrize("d", [1, 5])
def test_the_identity_uses_every_dimension(d):
    spectrum = spectrum_of(3 * torch.eye(d))
    counts = (spectrum.participation_ratio, spectrum.effective_rank, spectrum.effective_rank_singular)
    assert counts == pytest.approx((d, d, d), rel=1e-12)
    assert spectrum.top_share == pytest.approx(1 / d)


def test_one_direction_is_one_dimension():
    direction = torch.from_numpy(np.random.default_rng(0).normal(size=8))
    spectrum = spectrum_of(torch.outer(direction, direction))
    assert spectrum.participation_ratio == pytest.approx(1, abs=1e-12)
    assert spectrum.effective_rank == pytest.approx(1, abs=1e-9)
    assert spectrum.effective_rank_singular == pytest.approx(1, abs=1e-5)


def test_the_two_effective_ranks_are_different_numbers():
    spectrum = spectrum_of(torch.diag(torch.tensor([9.0, 1.0])))
    assert spectrum.effective_rank == pytest.approx(exponential_entropy(np.array([0.9, 0.1])), rel=1e-12)
    assert spectrum.effective_rank_singular == pytest.approx(exponential_entropy(np.array([0.75, 0.25])), rel=1e-12)


def test_the_top_dimension_is_a_coordinate_not_a_direction():
    spectrum = spectrum_of(torch.diag(torch.tensor([1.0, 2.0, 5.0, 2.0])))
    assert spectrum.top_dimension == 2
    assert spectrum.top_share == pytest.approx(0.5)


# 20 rows vary in 19 directions, whatever the width; the rounding of float32 products must not add to them.
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_few_rows_in_a_wide_space_use_no_more_dimensions_than_they_have(dtype):
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(20, 512))).to(dtype)
    spectrum = spectrum_of(SecondMoments.of(rows).covariance())
    assert spectrum.effective_rank == pytest.approx(exponential_entropy(singular_values(rows) ** 2), rel=1e-3)
    assert spectrum.effective_rank_singular <= 19
    assert spectrum.effective_rank_singular == pytest.approx(exponential_entropy(singular_values(rows)), rel=2e-3)


def test_effective_rank_of_values():
    assert effective_rank(torch.tensor([1.0, 1, 1, 0, 0])) == pytest.approx(3, rel=1e-12)
    assert effective_rank(torch.tensor([7.0, 0, 0])) == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("values", [[0.0, 0.0], [1.0, -0.1], [1.0, math.nan], [1.0, math.inf], []])
def test_values_without_an_entropy_are_refused(values):
    with pytest.raises(ValueError, match="an effective rank needs finite values >= 0 that are not all zero"):
        effective_rank(torch.tensor(values))


def spoiled(row: int, column: int, value: float) -> torch.Tensor:
    covariance = torch.eye(3)
    covariance[row, column] = value
    return covariance


@pytest.mark.parametrize("measure", [participation_ratio, spectrum_of])
@pytest.mark.parametrize("covariance", [torch.zeros(3, 3), -torch.eye(3)], ids=["zero", "negative"])
def test_no_variance_is_refused(measure, covariance):
    with pytest.raises(ValueError, match="this covariance has no variance"):
        measure(covariance)


@pytest.mark.parametrize("measure", [participation_ratio, spectrum_of])
@pytest.mark.parametrize("place", [(1, 1), (0, 1), (1, 0)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_refused_wherever_it_stands(measure, place, value):
    with pytest.raises(ValueError, match=r"finite|NaN"):
        measure(spoiled(*place, value))


def test_a_matrix_that_is_not_square_is_no_covariance():
    with pytest.raises(ValueError, match=r"\(3, 2\)"):
        participation_ratio(torch.ones(3, 2))


@given(seed=seeds, d=st.integers(1, 10), exponent=st.integers(-250, 250))
@PROPERTY
def test_the_stable_rank_is_the_ratio_of_two_norms(seed, d, exponent):
    rows = random_rows(40, d, seed)
    centred = array(rows) - array(rows).mean(axis=0)
    expected = (np.linalg.norm(centred) / np.linalg.norm(centred, 2)) ** 2
    covariance = SecondMoments.of(rows).covariance()
    assert stable_rank(10.0**exponent * covariance) == pytest.approx(expected, rel=1e-9)
    assert spectrum_of(covariance).stable_rank == pytest.approx(expected, rel=1e-9)


def test_rank_me_follows_its_definition():
    values = np.array([5.0, 2, 1, 0])
    shares = values / values.sum() + 1e-3
    assert rank_me(torch.from_numpy(values), 1e-3) == pytest.approx(math.exp(-(shares * np.log(shares)).sum()))
    assert rank_me(torch.from_numpy(values), 0) == pytest.approx(effective_rank(torch.from_numpy(values)), rel=1e-12)
    with pytest.raises(ValueError, match="epsilon -1 must be 0 or more"):
        rank_me(torch.ones(3), -1)
    with pytest.raises(ValueError, match="RankMe needs finite values"):
        rank_me(torch.zeros(3))


@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0, 2.3])
def test_an_exact_power_law_is_found(alpha):
    values = 3 * torch.arange(1, 101, dtype=torch.float64) ** -alpha
    found = power_law(values.flip(0), first=5, last=60)
    assert (found.first, found.last) == (5, 60)
    assert found.alpha == pytest.approx(alpha, abs=1e-12)
    assert found.standard_error == pytest.approx(0, abs=1e-12)
    assert found.r_squared == pytest.approx(1, abs=1e-12)


@given(seed=seeds, first=st.integers(1, 20), exponent=st.integers(-250, 250))
@PROPERTY
def test_a_power_law_equals_the_published_weighted_fit(seed, first, exponent):
    index = np.arange(1, 81)
    values = np.sort(index**-1.2 * np.exp(np.random.default_rng(seed).normal(size=80) / 3))[::-1].copy()
    used = slice(first - 1, 70)
    # NumPy weights residuals, not squares: the root of 1 / index.
    line, covariance = np.polyfit(np.log(index[used]), np.log(values[used]), 1, w=index[used] ** -0.5, cov=True)
    found = power_law(10.0**exponent * torch.from_numpy(values), first=first, last=70)
    assert found.alpha == pytest.approx(-line[0], rel=1e-9)
    assert found.standard_error == pytest.approx(math.sqrt(covariance[0, 0]), rel=1e-9)
    assert 0 < found.r_squared < 1


def test_eigenvalues_that_are_noise_are_not_fitted():
    values = torch.arange(1, 101, dtype=torch.float64) ** -1.0
    values[40:] = 1e-14
    found = power_law(values)
    assert (found.first, found.last) == (11, 40)
    assert found.alpha == pytest.approx(1, abs=1e-12)


def test_a_spectrum_names_the_range_of_its_power_law():
    spectrum = spectrum_of(torch.diag(torch.arange(1, 41, dtype=torch.float64) ** -1.5))
    assert (spectrum.alpha_first, spectrum.alpha_last) == (11, 40)
    assert spectrum.alpha == pytest.approx(1.5, rel=1e-9)
    short = spectrum_of(torch.eye(19))
    assert (short.alpha, short.alpha_first, short.alpha_last) == (None, None, None)


def test_what_follows_no_power_law_is_refused():
    with pytest.raises(ValueError, match="9 eigenvalues above the noise from index 11 on are too few"):
        power_law(torch.ones(19))
    with pytest.raises(ValueError, match="0 eigenvalues above the noise"):
        power_law(torch.ones(5))
    with pytest.raises(ValueError, match="indices 0 to 500 are no range"):
        power_law(torch.ones(50), first=0)
    for values in ([0.0, 0.0], [math.nan, 1.0]):
        with pytest.raises(ValueError, match="a power law needs finite eigenvalues"):
            power_law(torch.tensor(values))
