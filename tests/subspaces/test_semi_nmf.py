"""Semi-NMF against the updates of the paper written out slowly, against overcomplete, and on planted factors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from explicit import PROPERTY, array, projector, random_frame, random_rows
from hypothesis import given
from hypothesis import strategies as st

from tangent_lens.recording.row_sample import RowSample
from tangent_lens.subspaces.semi_nmf import _CODE_UPDATES, _better_codes, fit_semi_nmf, semi_nmf

seeds = st.integers(0, 10_000)


def planted_rows(count: int = 300, d: int = 20, parts: int = 4, noise: float = 0.0, seed: int = 0) -> torch.Tensor:
    """Sums of a few directions of any sign, with sparse codes that are not negative."""
    generator = np.random.default_rng(seed)
    codes = generator.exponential(size=(count, parts)) * (generator.random((count, parts)) < 0.5)
    directions = generator.normal(size=(parts, d))
    return torch.from_numpy(codes @ directions + noise * generator.normal(size=(count, d)))


def published_update(rows: np.ndarray, codes: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """Equation 10 of Ding, Li and Jordan 2010, one entry at a time."""
    products, gram = rows @ directions.T, directions @ directions.T
    updated = np.empty_like(codes)
    for i in range(len(codes)):
        for j in range(codes.shape[1]):
            above = max(products[i, j], 0) + sum(codes[i, m] * max(-gram[m, j], 0) for m in range(len(gram)))
            below = max(-products[i, j], 0) + sum(codes[i, m] * max(gram[m, j], 0) for m in range(len(gram)))
            updated[i, j] = codes[i, j] * np.sqrt(above / below)
    return updated


@given(seed=seeds)
@PROPERTY
def test_codes_follow_the_published_update(seed):
    generator = torch.Generator().manual_seed(seed)
    rows = planted_rows(12, 6, 3, noise=0.3, seed=seed)
    codes = torch.rand(12, 3, generator=generator, dtype=torch.float64) + 0.1
    directions = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    expected = array(codes)
    for _ in range(_CODE_UPDATES):
        expected = published_update(array(rows), expected, array(directions))
    assert np.allclose(array(_better_codes(rows, codes, directions)), expected, rtol=1e-9, atol=2e-16)


@given(seed=seeds, rank=st.integers(1, 6))
@PROPERTY
def test_the_error_never_rises_and_is_the_one_left(seed, rank):
    rows = random_rows(60, 30, seed)
    found = semi_nmf(rows, rank, seed=seed, iterations=60, tolerance=0)
    assert (np.diff(found.relative_errors) <= 1e-12).all()
    left = np.linalg.norm(array(rows) - array(found.codes) @ array(found.directions)) / np.linalg.norm(array(rows))
    assert found.relative_errors[-1] == pytest.approx(left, rel=1e-9)
    assert bool((found.codes >= 0).all())
    assert len(found.relative_errors) - 1 <= 60


def test_the_directions_are_the_best_for_the_codes():
    rows = random_rows(60, 30)
    found = semi_nmf(rows, 4)
    best = np.linalg.lstsq(array(found.codes), array(rows), rcond=None)[0]
    assert np.allclose(array(found.directions), best, rtol=0, atol=1e-9)


def test_planted_factors_are_found():
    rows = planted_rows()
    subspace = fit_semi_nmf(rows, 4, iterations=1000, tolerance=0)
    assert subspace.origin["relative_error"] < 0.02
    assert subspace.overlap(fit_semi_nmf(rows, 4, seed=1)) == pytest.approx(1, abs=1e-9)
    truth = np.linalg.svd(array(rows), full_matrices=False)[2][:4].T
    assert np.allclose(projector(subspace.basis), truth @ truth.T, rtol=0, atol=1e-8)


def test_it_reaches_the_error_of_overcomplete():
    optimization = pytest.importorskip("overcomplete.optimization")
    rows = planted_rows(500, 40, 12, noise=0.3)
    torch.manual_seed(0)
    codes, directions = optimization.SemiNMF(6).fit(rows.float())
    theirs = float((rows - codes.double() @ directions.double()).norm() / rows.norm())
    assert semi_nmf(rows, 6).relative_errors[-1] <= theirs * 1.002


def test_no_error_lies_below_that_of_the_singular_values():
    rows = planted_rows(noise=0.3)
    values = np.linalg.svd(array(rows), compute_uv=False)
    bound = np.sqrt((values[6:] ** 2).sum() / (values**2).sum())
    assert bound <= semi_nmf(rows, 6).relative_errors[-1] < 1.1 * bound


def test_the_subspace_keeps_unit_directions_with_the_largest_share_first():
    rows = planted_rows(noise=0.2)
    subspace, found = fit_semi_nmf(rows, 3), semi_nmf(rows, 3)
    directions = array(subspace.directions)
    assert np.allclose(np.linalg.norm(directions, axis=0), 1)
    assert np.allclose(projector(subspace.basis) @ directions, directions, rtol=0, atol=1e-12)
    shares = (array(found.codes) ** 2).sum(0) * (array(found.directions) ** 2).sum(1)
    expected = array(found.directions)[np.argsort(-shares)].T
    assert np.allclose(directions, expected / np.linalg.norm(expected, axis=0), rtol=0, atol=1e-12)
    assert subspace.condition_number > 1


def test_the_origin_records_sample_seed_and_convergence():
    sample = RowSample(planted_rows(50), torch.zeros(50).long(), torch.zeros(50).long(), 900, "here", 7)
    origin = fit_semi_nmf(sample, 2, seed=3, iterations=2).origin
    assert {name: origin[name] for name in ("method", "fitted_on", "rows", "rows_seen", "seed", "iterations")} == {
        "method": "semi_nmf",
        "fitted_on": "here",
        "rows": 50,
        "rows_seen": 900,
        "seed": 3,
        "iterations": 2,
    }
    assert origin["converged"] is False
    assert fit_semi_nmf(sample, 2, iterations=5000).origin["converged"] is True


def test_one_seed_gives_one_answer_and_leaves_the_global_state():
    rows, state = planted_rows(noise=0.3), torch.get_rng_state()
    assert torch.equal(fit_semi_nmf(rows, 3).basis, fit_semi_nmf(rows, 3).basis)
    assert torch.equal(torch.get_rng_state(), state)


@given(seed=seeds, exponent=st.integers(-9, 9))
@PROPERTY
def test_a_rotation_turns_it_and_scale_does_not_matter(seed, exponent):
    rows, turn = planted_rows(80, 8, 3, noise=0.2), random_frame(8, 8, seed)
    turned = fit_semi_nmf(10.0**exponent * rows @ turn.T, 3, iterations=20)
    expected = projector(turn @ fit_semi_nmf(rows, 3, iterations=20).basis)
    assert np.allclose(projector(turned.basis), expected, rtol=0, atol=1e-7)


def test_centred_rows_are_fitted_about_their_mean():
    rows = planted_rows(noise=0.2)
    subspace = fit_semi_nmf(rows + 5, 3, center=True)
    assert np.allclose(array(subspace.centre), array(rows + 5).mean(0))
    assert subspace.overlap(fit_semi_nmf(rows - rows.mean(0), 3)) == pytest.approx(1, abs=1e-9)
    assert not fit_semi_nmf(rows, 3).centre.any()


def test_repeated_rows_and_zero_rows_leave_no_nan():
    few = random_rows(3, 10).repeat(20, 1)
    few = torch.cat([few, torch.zeros(5, 10, dtype=torch.float64)])
    assert fit_semi_nmf(few, 3).origin["relative_error"] < 0.05
    found = semi_nmf(few, 8, iterations=50)
    assert bool(torch.isfinite(found.codes).all()) and bool(torch.isfinite(found.directions).all())


@pytest.mark.parametrize(
    ("rows", "rank", "options", "taught"),
    [
        (torch.zeros(9, 4), 2, {}, "rows: all 9 rows are zero, so they have no direction"),
        (torch.ones(9, 4), 2, {"center": True}, "rows: all 9 rows are equal, so they have no direction"),
        (torch.ones(9, 4), 2, {}, "directions span only 1 dimensions, rank 2 was asked; use rank <= 1"),
        (torch.eye(4), 5, {}, "rank 5 does not fit in 4 dimensions"),
        (torch.eye(9)[:3], 4, {}, "3 rows determine at most 3 directions, rank 4 was asked; use more rows"),
        (torch.eye(4), 0, {}, "rank 0 spans nothing"),
        (torch.eye(4), 0.9, {}, "rank 0.9 must be a whole number here"),
        (torch.eye(4), "gavish_donoho", {}, "rank 'gavish_donoho' must be a whole number here"),
        (torch.eye(4), 2, {"iterations": 0}, "iterations=0 and tolerance"),
        (torch.eye(4), 2, {"tolerance": float("nan")}, "tolerance=nan must be"),
        (torch.full((9, 4), float("nan")), 2, {}, "some rows are NaN or infinite"),
        (torch.ones(4), 1, {}, "rows must be a RowSample or a tensor"),
    ],
)
def test_what_has_no_factors_is_refused(rows, rank, options, taught):
    with pytest.raises(ValueError, match=taught):
        fit_semi_nmf(rows, rank, **options)
