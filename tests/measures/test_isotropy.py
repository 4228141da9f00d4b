"""IsoScore* against the published recipe and package, and removals against explicit projections."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from explicit import (
    PROPERTY,
    array,
    published_iso_score,
    random_frame,
    random_moment,
    random_rows,
    random_subspace,
    without,
)
from hypothesis import given
from hypothesis import strategies as st
from IsoScore import IsoScore

from tangent_lens.measures.energy import monte_carlo_p
from tangent_lens.measures.isotropy import iso_score, iso_score_without, isotropy_test
from tangent_lens.recording.moments import SecondMoments
from tangent_lens.subspaces.controls import random_normals
from tangent_lens.subspaces.subspace import Subspace

# The package takes one square root and its ones in float32.
PACKAGE_ROUNDING = 1e-6
seeds = st.integers(0, 10_000)
shrinkages = st.sampled_from([0.0, 0.2, 0.7, 1.0])


def shrunk(covariance: np.ndarray, zeta: float, dimensions: int | None = None) -> np.ndarray:
    """(1 - zeta) C + zeta tr(C)/d I."""
    d = dimensions or len(covariance)
    return (1 - zeta) * covariance + zeta * np.trace(covariance) / d * np.eye(d)


def within_complement(covariance: torch.Tensor, basis: torch.Tensor) -> np.ndarray:
    """The covariance of what is left, in coordinates of the complement."""
    d, k = basis.shape
    whole = np.linalg.qr(np.hstack([array(basis), array(random_frame(d, d - k, seed=77))]))[0]
    rest = whole[:, k:]
    return rest.T @ array(covariance) @ rest


def diagonal(*variances: float) -> torch.Tensor:
    return torch.diag(torch.tensor(variances, dtype=torch.float64))


def axis_subspace(d: int, k: int) -> Subspace:
    return Subspace(torch.eye(d, dtype=torch.float64)[:, :k], torch.zeros(d, dtype=torch.float64))


@given(seed=seeds, d=st.integers(2, 12))
@PROPERTY
def test_the_score_is_the_published_recipe(seed, d):
    covariance = random_moment(d, seed)
    found = iso_score(covariance)
    assert found == pytest.approx(published_iso_score(array(covariance)), abs=1e-12)
    assert 0 <= found <= 1


@given(seed=seeds, d=st.integers(2, 12))
@PROPERTY
def test_the_score_equals_the_published_package(seed, d):
    rows = random_rows(60, d, seed)
    expected = float(IsoScore.IsoScore(array(rows)))
    assert iso_score(SecondMoments.of(rows).covariance()) == pytest.approx(expected, abs=PACKAGE_ROUNDING)


@pytest.mark.parametrize("zeta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_shrinkage_towards_a_reference_equals_the_published_package(zeta, seed):
    rows, reference = random_rows(60, 8, seed), random_moment(8, seed + 1) / 20
    expected = float(IsoScore.IsoScore_star(array(rows), reference, zeta))
    found = iso_score(SecondMoments.of(rows).covariance(), shrinkage=zeta, reference=reference)
    assert found == pytest.approx(expected, abs=PACKAGE_ROUNDING)


@given(seed=seeds, zeta=shrinkages)
@PROPERTY
def test_shrinkage_without_a_reference_keeps_the_trace(seed, zeta):
    covariance = random_moment(8, seed)
    expected = published_iso_score(shrunk(array(covariance), zeta))
    assert iso_score(covariance, shrinkage=zeta) == pytest.approx(expected, abs=1e-12)


def test_scores_of_known_shapes():
    assert iso_score(torch.eye(7)) == pytest.approx(1, abs=1e-12)
    assert iso_score(diagonal(3, 0, 0, 0)) == pytest.approx(0, abs=1e-12)
    assert iso_score(torch.ones(6, 6)) == pytest.approx(0, abs=1e-12)
    # k equal variances of d: the participation ratio is k.
    assert iso_score(diagonal(2, 2, 2, 0, 0)) == pytest.approx((3 - 1) / (5 - 1), abs=1e-12)
    assert iso_score(diagonal(3, 0, 0, 0), shrinkage=1) == pytest.approx(1, abs=1e-12)


@given(seed=seeds)
@PROPERTY
def test_a_rotation_does_not_change_the_score(seed):
    covariance, turn = random_moment(8), random_frame(8, 8, seed)
    assert iso_score(turn @ covariance @ turn.T) == pytest.approx(iso_score(covariance), rel=1e-10)


@given(exponent=st.integers(-9, 9), zeta=shrinkages)
@PROPERTY
def test_the_scale_of_the_data_does_not_change_the_score_even_with_shrinkage(exponent, zeta):
    covariance, frames = random_moment(8), random_normals(random_subspace(8, 2), 2)
    scaled = 10.0**exponent * covariance
    assert iso_score(scaled, shrinkage=zeta) == pytest.approx(iso_score(covariance, shrinkage=zeta), rel=1e-10)
    removed = iso_score_without(scaled, frames, shrinkage=zeta)
    assert torch.allclose(removed, iso_score_without(covariance, frames, shrinkage=zeta), rtol=1e-10)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_scales_whose_squares_no_float_holds(scale):
    assert iso_score(scale * random_moment(8)) == pytest.approx(iso_score(random_moment(8)), rel=1e-10)


@given(seed=seeds, k=st.integers(1, 5), zeta=shrinkages)
@PROPERTY
def test_a_removal_equals_the_explicit_projection(seed, k, zeta):
    covariance, frames = random_moment(8, seed), torch.stack([random_frame(8, k, seed + place) for place in range(3)])
    expected = [published_iso_score(shrunk(without(covariance, frame), zeta)) for frame in frames]
    found = iso_score_without(covariance, frames, shrinkage=zeta)
    assert found.shape == (3,)
    assert np.allclose(array(found), expected, rtol=0, atol=1e-10)


@given(seed=seeds, k=st.integers(1, 5), zeta=shrinkages)
@PROPERTY
def test_a_removal_within_the_complement_counts_what_is_left(seed, k, zeta):
    covariance, frame = random_moment(8, seed), random_frame(8, k, seed)
    expected = published_iso_score(shrunk(within_complement(covariance, frame), zeta))
    found = iso_score_without(covariance, frame[None], shrinkage=zeta, dimension="complement")
    assert float(found) == pytest.approx(expected, abs=1e-10)


def test_removals_of_known_shapes():
    axes = torch.eye(5, dtype=torch.float64)
    left = iso_score_without(diagonal(100, 1, 1, 1, 1), axes[None, :, :1])
    assert float(left) == pytest.approx((4 - 1) / (5 - 1), abs=1e-12)
    complement = iso_score_without(diagonal(100, 1, 1, 1, 1), axes[None, :, :1], dimension="complement")
    assert float(complement) == pytest.approx(1, abs=1e-12)
    only_one = iso_score_without(diagonal(100, 1, 0, 0, 0), axes[None, :, :1])
    assert float(only_one) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("ratio", [1e2, 1e4, 1e6, 1e8, 1e10])
def test_removing_a_dominant_direction_keeps_the_score_of_the_rest(ratio):
    variances = torch.linspace(0.2, 2, 32, dtype=torch.float64)
    variances[0] = ratio
    frame = random_frame(32, 32)
    rest = array(variances[2:])
    expected = (rest.sum() ** 2 / np.square(rest).sum() - 1) / 31
    found = iso_score_without((frame * variances) @ frame.T, frame[None, :, :2])
    assert float(found) == pytest.approx(expected, rel=1e-4)


def test_removing_all_variance_is_an_error():
    axes = torch.eye(5, dtype=torch.float64)
    with pytest.raises(
        ValueError, match="removing 2 directions leaves no variance, so no isotropy; use a smaller rank"
    ):
        iso_score_without(diagonal(3, 1, 0, 0, 0), axes[None, :, :2])


def test_removals_that_leave_too_few_dimensions_are_refused():
    frames = torch.eye(3, dtype=torch.float64)[None, :, :2]
    with pytest.raises(ValueError, match="removing 2 of 3 dimensions leaves 1; isotropy needs at least 2"):
        iso_score_without(diagonal(3, 2, 1), frames, dimension="complement")
    assert float(iso_score_without(diagonal(3, 2, 1), frames)) == pytest.approx(0, abs=1e-12)


def test_an_unknown_dimension_is_refused():
    with pytest.raises(ValueError, match=r"dimension 'half' must be 'ambient' \(d\) or 'complement' \(d - k\)"):
        iso_score_without(torch.eye(4), torch.eye(4)[None, :, :1].double(), dimension="half")


@pytest.mark.parametrize(
    ("covariance", "taught"),
    [
        (torch.zeros(4, 4), "this covariance has no variance, so it has no isotropy; the rows are all equal"),
        (torch.ones(4, 3), r"must be a matrix \(d, d\), not of shape \(4, 3\); pass rows to SecondMoments"),
        (torch.ones(1, 1), "at least 2 dimensions; this covariance has 1"),
        (torch.ones(4), r"not of shape \(4,\)"),
        (torch.full((4, 4), math.nan), "this covariance holds NaN or infinity"),
        (diagonal(math.inf, 1, 1, 1), "this covariance holds NaN or infinity"),
    ],
)
def test_matrices_without_an_isotropy_are_refused(covariance, taught):
    with pytest.raises(ValueError, match=taught):
        iso_score(covariance)
    with pytest.raises(ValueError, match=taught):
        iso_score_without(covariance, torch.eye(4, dtype=torch.float64)[None, :, :1])


@pytest.mark.parametrize("zeta", [-0.1, 1.5, math.nan])
def test_shrinkage_outside_the_unit_interval_is_refused(zeta):
    message = rf"shrinkage {zeta} must lie between 0 \(none\) and 1"
    with pytest.raises(ValueError, match=message):
        iso_score(torch.eye(4), shrinkage=zeta)
    with pytest.raises(ValueError, match=message):
        iso_score_without(torch.eye(4), torch.eye(4, dtype=torch.float64)[None, :, :1], shrinkage=zeta)


def test_a_reference_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"the reference is \(3, 3\), the covariance \(4, 4\)"):
        iso_score(torch.eye(4), shrinkage=0.5, reference=torch.eye(3))


@pytest.mark.parametrize("dimension", ["ambient", "complement"])
@pytest.mark.parametrize("zeta", [0.0, 0.4])
def test_every_field_of_an_isotropy_test(dimension, zeta):
    covariance, frame = random_moment(9, seed=2), random_frame(9, 9)
    tangent = Subspace(frame[:, :2], torch.zeros(9, dtype=torch.float64), {}, {"trailing": frame[:, 7:]})
    result = isotropy_test(covariance, tangent, controls=15, seed=3, shrinkage=zeta, dimension=dimension)
    score = published_iso_score(shrunk(array(covariance), zeta))

    def change(basis: torch.Tensor) -> float:
        left = without(covariance, basis) if dimension == "ambient" else within_complement(covariance, basis)
        return published_iso_score(shrunk(left, zeta)) - score

    sampled = [change(control) for control in random_normals(tangent, 15, seed=3)]
    assert result.score == pytest.approx(score, abs=1e-11)
    assert result.delta == pytest.approx(change(tangent.basis), abs=1e-10)
    assert result.random == pytest.approx(sampled, abs=1e-10)
    assert result.random_mean == pytest.approx(np.mean(sampled), abs=1e-10)
    assert result.p_value == monte_carlo_p(result.delta, result.random)
    assert result.trailing == pytest.approx(change(frame[:, 7:]), abs=1e-10)
    assert (result.shrinkage, result.dimension) == (zeta, dimension)


def test_removing_what_dominates_makes_the_rest_more_isotropic_than_any_normal():
    covariance = diagonal(50, 50, 3, 2, 1, 1, 1, 1)
    result = isotropy_test(covariance, axis_subspace(8, 2))
    assert result.delta > 0 > max(result.random)
    assert result.p_value == pytest.approx(1 / 21)


def test_a_rival_that_is_not_known_stays_out():
    assert isotropy_test(random_moment(8), random_subspace(8, 2)).trailing is None


def test_controls_already_drawn_are_those_of_their_seed():
    covariance, tangent = random_moment(9), random_subspace(9, 2)
    drawn = isotropy_test(covariance, tangent, controls=random_normals(tangent, 8, seed=4))
    assert drawn.random == isotropy_test(covariance, tangent, controls=8, seed=4).random


def test_controls_of_another_rank_are_refused():
    with pytest.raises(ValueError, match="rank"):
        isotropy_test(random_moment(9), random_subspace(9, 2), controls=random_normals(random_subspace(9, 1), 8))


def test_no_room_for_normals_is_an_error():
    with pytest.raises(ValueError, match=r"rank 5 needs 2\*rank <= d = 9 for a normal control; use rank <= 4"):
        isotropy_test(random_moment(9), random_subspace(9, 5))


def test_a_covariance_without_variance_is_told_by_its_name():
    tangent = Subspace.spanned_by(torch.eye(6, dtype=torch.float64)[:, :2])
    with pytest.raises(ValueError, match=r"gradients at resid_post\.3 has no variance, so it has no isotropy"):
        isotropy_test(torch.zeros(6, 6), tangent, name="gradients at resid_post.3")
