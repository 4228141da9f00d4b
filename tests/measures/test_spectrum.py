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
from tangent_lens.measures.spectrum import effective_rank, participation_ratio, spectrum_of
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
