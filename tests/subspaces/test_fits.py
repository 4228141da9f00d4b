"""The tangent proxy against scikit-learn and NumPy, its rank rules, and the rivals it may and may not name."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from explicit import PROPERTY, array, projector, random_frame, random_rows
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import PCA

from tangent_lens.recording.moments import Moments, SecondMoments
from tangent_lens.subspaces.fits import fit_pca

seeds = st.integers(0, 10_000)


def fitted(rows: torch.Tensor, rank: int | float = 3, **options):
    return fit_pca(SecondMoments.of(rows, name="here"), rank, **options)


def eigenvectors(matrix: np.ndarray) -> np.ndarray:
    """As columns, of the largest eigenvalue first."""
    return np.linalg.eigh(matrix)[1][:, ::-1]


def spans_equal(basis: torch.Tensor, columns: np.ndarray, atol: float = 1e-9) -> bool:
    return np.allclose(projector(basis), columns @ columns.T, rtol=0, atol=atol)


def rows_of_variances(*variances: float, count: int = 400) -> torch.Tensor:
    """Rows whose covariance has exactly these eigenvalues."""
    d = len(variances)
    white = np.linalg.qr(array(random_rows(count, d + 1, seed=4)) - array(random_rows(count, d + 1, seed=4)).mean(0))[0]
    scaled = white[:, :d] * np.sqrt((count - 1) * np.array(variances))
    return torch.from_numpy(scaled @ array(random_frame(d, d, seed=9)).T)


@pytest.mark.parametrize("k", [1, 3, 10])
def test_centred_pca_equals_scikit_learn(k):
    rows = random_rows(200, 10)
    subspace, reference = fitted(rows, k), PCA(n_components=k, svd_solver="full").fit(array(rows))
    assert spans_equal(subspace.basis, reference.components_.T)
    for found, expected in zip(array(subspace.basis).T, reference.components_, strict=True):
        assert abs(found @ expected) == pytest.approx(1, abs=1e-9)
    assert np.allclose(array(subspace.centre), reference.mean_, rtol=1e-12)
    assert subspace.origin["variance_share"] == pytest.approx(reference.explained_variance_ratio_.sum(), rel=1e-12)


def test_float32_rows_give_the_same_subspace_up_to_their_rounding():
    rows = random_rows(200, 10, dtype=torch.float32)
    reference = PCA(n_components=3, svd_solver="full").fit(array(rows))
    assert spans_equal(fitted(rows).basis, reference.components_.T, atol=1e-5)


def test_uncentred_pca_is_the_second_moment_about_zero():
    rows = random_rows(200, 10) + 3
    moment = array(rows).T @ array(rows)
    subspace = fitted(rows, center=False)
    values = np.linalg.eigvalsh(moment)[::-1]
    assert spans_equal(subspace.basis, eigenvectors(moment)[:, :3])
    assert not subspace.centre.any()
    assert subspace.origin["variance_share"] == pytest.approx(values[:3].sum() / values.sum(), rel=1e-12)
    assert not spans_equal(fitted(rows).basis, eigenvectors(moment)[:, :3], atol=1e-2)


def test_the_origin_says_how_it_was_made():
    origin = fitted(random_rows(50, 6), 2).origin
    assert {name: origin[name] for name in ("method", "fitted_on", "rows", "rank", "asked_rank")} == {
        "method": "pca",
        "fitted_on": "here",
        "rows": 50,
        "rank": 2,
        "asked_rank": 2,
    }
    assert fitted(random_rows(50, 6), 2, center=False).origin["method"] == "pca (not centred)"


def test_of_a_recording_the_activations_are_taken():
    activations, gradients = random_rows(50, 6, seed=1), random_rows(50, 6, seed=2)
    assert torch.equal(
        fit_pca(Moments.of(activations, gradients), 2).basis, fit_pca(SecondMoments.of(activations), 2).basis
    )


def test_rows_that_come_later_do_not_change_the_subspace():
    moments = SecondMoments.of(random_rows(50, 6))
    subspace = fit_pca(moments, 2)
    basis, centre = subspace.basis.clone(), subspace.centre.clone()
    moments.update(random_rows(50, 6, seed=1) + 10)
    assert torch.equal(subspace.basis, basis)
    assert torch.equal(subspace.centre, centre)


@given(seed=seeds)
@PROPERTY
def test_row_order_does_not_matter(seed):
    rows = random_rows(80, 6)
    shuffled = rows[np.random.default_rng(seed).permutation(80)]
    assert fitted(rows, 2).overlap(fitted(shuffled, 2)) == pytest.approx(1, abs=1e-12)


@given(exponent=st.integers(-9, 9), shift=st.floats(-100, 100))
@PROPERTY
def test_neither_scale_nor_shift_changes_the_subspace(exponent, shift):
    rows = random_rows(80, 6)
    moved = fitted((rows + shift) * 10.0**exponent, 2)
    assert moved.overlap(fitted(rows, 2)) == pytest.approx(1, abs=1e-10)
    assert moved.origin["variance_share"] == pytest.approx(fitted(rows, 2).origin["variance_share"], rel=1e-10)


@given(seed=seeds)
@PROPERTY
def test_a_rotation_turns_the_subspace(seed):
    rows, turn = random_rows(80, 6), random_frame(6, 6, seed)
    turned = fitted(rows @ turn.T, 2)
    assert np.allclose(projector(turned.basis), projector(turn @ fitted(rows, 2).basis), rtol=0, atol=1e-10)


@given(seed=seeds, share=st.floats(0.01, 0.999))
@PROPERTY
def test_a_share_takes_the_smallest_rank_that_reaches_it(seed, share):
    rows = random_rows(60, 8, seed)
    shares = np.cumsum(np.linalg.eigvalsh(np.cov(array(rows).T))[::-1])
    k = fitted(rows, share).rank
    assert shares[k - 1] / shares[-1] >= share * (1 - 1e-12)
    assert k == 1 or shares[k - 2] / shares[-1] < share * (1 + 1e-12)


@pytest.mark.parametrize(("share", "rank"), [(0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.9, 3), (0.96, 4)])
def test_shares_of_a_known_spectrum(share, rank):
    subspace = fitted(rows_of_variances(10, 6, 3, 1), share)
    assert subspace.rank == subspace.origin["rank"] == rank
    assert subspace.origin["asked_rank"] == share


def test_a_share_just_below_one_takes_no_more_directions_than_there_are():
    for seed in range(40):
        subspace = fitted(random_rows(50, 7, seed), math.nextafter(1, 0))
        assert subspace.origin["rank"] == subspace.rank


@pytest.mark.parametrize(
    ("rank", "taught"),
    [
        (0, "rank 0 spans nothing; use 1 or more"),
        (0.0, "rank 0 spans nothing"),
        (-3, "rank -3 spans nothing"),
        (1.5, "rank 1.5 must be a whole number, or a variance share between 0 and 1"),
        (-0.5, "rank -0.5 must be a whole number, or a variance share"),
        (math.nan, "rank nan must be a whole number, or a variance share"),
        (math.inf, "rank inf must be a whole number, or a variance share"),
        (True, "rank True must be a whole number, or a variance share"),
        ("3", "rank '3' must be a whole number, or a variance share"),
        (7, "rank 7 does not fit in 6 dimensions; use rank <= 6"),
    ],
)
def test_ranks_that_mean_nothing_are_refused(rank, taught):
    with pytest.raises(ValueError, match=taught):
        fitted(random_rows(50, 6), rank)


def test_a_rank_that_the_rows_do_not_determine_is_refused():
    rows = random_rows(4, 6)
    assert fitted(rows, 3).rank == 3
    with pytest.raises(
        ValueError, match="here: 4 rows determine at most 3 directions, rank 4 was asked; use more text"
    ):
        fitted(rows, 4)


def test_numpy_and_whole_float_ranks_are_whole_numbers():
    assert fitted(random_rows(50, 6), 2.0).rank == 2
    assert fitted(random_rows(50, 6), np.int64(2)).rank == 2


@pytest.mark.parametrize("value", [0.0, 1e-8, 0.1, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equal_rows_have_no_direction(value, dtype):
    with pytest.raises(ValueError, match="here: all 50 rows are equal, so they have no principal direction"):
        fitted((value * torch.linspace(-1, 2, 6, dtype=dtype)).expand(50, 6), 2)


def test_too_few_rows_are_named():
    with pytest.raises(ValueError, match="here: 1 rows seen, at least 2 needed"):
        fitted(torch.ones(1, 6), 1)
    with pytest.raises(ValueError, match="here: 0 rows seen, at least 1 needed"):
        fit_pca(SecondMoments(6, name="here"), 1, center=False)


@pytest.mark.parametrize("center", [True, False])
def test_rivals_are_the_following_and_the_last_directions(center):
    rows = random_rows(200, 10)
    matrix = np.cov(array(rows).T) if center else array(rows).T @ array(rows)
    subspace, directions = fitted(rows, 3, center=center), eigenvectors(matrix)
    assert subspace.rivals.keys() == {"next", "trailing"}
    assert spans_equal(subspace.rivals["next"], directions[:, 3:6])
    assert spans_equal(subspace.rivals["trailing"], directions[:, 7:])
    for rival in subspace.rivals.values():
        assert float((subspace.basis.T @ rival).abs().max()) < 1e-13
        assert np.allclose(array(rival.T @ rival), np.eye(3), rtol=0, atol=1e-13)


def test_at_half_the_width_both_rivals_are_the_whole_complement():
    subspace = fitted(random_rows(200, 6), 3)
    outside = np.eye(6) - projector(subspace.basis)
    for name in ("next", "trailing"):
        assert np.allclose(projector(subspace.rivals[name]), outside, rtol=0, atol=1e-12)


def test_beyond_half_the_width_there_is_no_room_for_rivals():
    assert fitted(random_rows(200, 7), 4).rivals == {}


# 40 rows have 39 directions of variance. The other 25 of 64 do not vary at all: together they are the least, fewer of
# them are a matter of chance.
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rank", "rivals"),
    [
        pytest.param(4, {"next"}, id="rank 4"),
        pytest.param(16, {"next"}, id="rank 16"),
        pytest.param(19, {"next"}, id="rank 19"),
        pytest.param(20, set(), id="rank 20"),
        pytest.param(24, set(), id="rank 24"),
        pytest.param(25, {"trailing"}, id="rank 25"),
    ],
)
def test_rivals_that_few_rows_do_not_determine_are_absent(rank, rivals, dtype):
    assert fitted(random_rows(40, 64, dtype=dtype), rank).rivals.keys() == rivals


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_rivals_that_rows_in_a_plane_do_not_determine_are_absent(dtype):
    flat = random_rows(200, 4, seed=1) @ random_frame(64, 4).T
    assert fitted(flat.to(dtype), 3).rivals.keys() == set()


def test_small_variances_that_the_rows_determine_still_count():
    rows = rows_of_variances(1, 0.1, 1e-3, 1e-4, 1e-5, 1e-6)
    assert fitted(rows, 2).rivals.keys() == {"next", "trailing"}
