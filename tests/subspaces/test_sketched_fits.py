"""Principal directions from a sketch: those of the exact fit, or a sentence."""

import numpy as np
import pytest
import torch

from tangent_lens.recording.moments import SecondMoments
from tangent_lens.recording.sketch import SketchedMoments, gaussian_directions
from tangent_lens.subspaces.fits import fit_pca
from tangent_lens.subspaces.sketched import (
    fit_directions,
    fit_sketched_pca,
    nystroem,
    orthonormal,
    range_directions,
    sketch_columns,
)


def rows_of(d=300, count=800, power=0.5, mean=2.0, seed=0):
    """A power-law spectrum in a random basis: as slow a decay as real activations show."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, d, generator=generator, dtype=torch.float64) * torch.arange(1, d + 1).double() ** -power
    turned, _ = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
    return rows @ turned + mean * turned[-1]


def two_passes(rows, rank, seed=0, center=True):
    first = SketchedMoments.of(rows, fit_directions(rows.shape[1], rank, seed))
    return SketchedMoments.of(rows, range_directions(first, center=center))


@pytest.mark.parametrize("seed", range(3))
def test_two_passes_find_the_exact_fit(seed):
    rows = rows_of(power=1.0, seed=seed)
    found, exact = fit_sketched_pca(two_passes(rows, 6, seed), 6), fit_pca(SecondMoments.of(rows), 6)
    assert found.overlap(exact) > 0.999
    assert float((found.rivals["next"].T @ exact.rivals["next"]).square().sum()) > 0.95 * 6
    assert found.origin["variance_share"] == pytest.approx(exact.origin["variance_share"], rel=2e-3)
    assert found.origin["variance_share"] <= exact.origin["variance_share"] + 1e-12
    assert found.origin["method"] == "pca (sketched)" and "trailing" not in found.rivals
    torch.testing.assert_close(found.centre, exact.centre)


def test_the_second_pass_is_needed():
    """On a slow spectrum one pass is far off: the reason for reading the fit split twice."""
    rows = rows_of(power=0.3)
    exact = fit_pca(SecondMoments.of(rows), 6)
    once = SketchedMoments.of(rows, fit_directions(300, 6, 0))
    assert fit_sketched_pca(once, 6).overlap(exact) < 0.95
    assert fit_sketched_pca(two_passes(rows, 6), 6).overlap(exact) > 0.99


def test_as_many_directions_as_dimensions_are_exact():
    rows = rows_of(d=40, power=0.7)
    found, exact = fit_sketched_pca(two_passes(rows, 5), 5), fit_pca(SecondMoments.of(rows), 5)
    assert found.overlap(exact) == pytest.approx(1, abs=1e-10)
    assert found.origin["variance_share"] == pytest.approx(exact.origin["variance_share"], abs=1e-10)


def test_rows_of_low_rank_need_one_pass_only():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(100, 4, generator=generator).double() @ torch.randn(4, 200, generator=generator).double()
    sketch = SketchedMoments.of(rows, gaussian_directions(200, 12, 0))
    assert fit_sketched_pca(sketch, 4).overlap(fit_pca(SecondMoments.of(rows), 4)) == pytest.approx(1, abs=1e-9)
    assert "next" not in fit_sketched_pca(sketch, 4).rivals
    with pytest.raises(ValueError, match="at most 4 of their own, rank 5"):
        fit_sketched_pca(sketch, 5)


def test_it_turns_with_the_rows():
    rows = rows_of(d=120, power=1.0)
    turn, _ = torch.linalg.qr(gaussian_directions(120, 120, "turn"))
    plain = SketchedMoments.of(rows, fit_directions(120, 4, 0))
    turned = SketchedMoments.of(rows @ turn, turn.T @ fit_directions(120, 4, 0))
    one, two = fit_sketched_pca(plain, 4).basis, fit_sketched_pca(turned, 4).basis
    assert float((one.T @ turn @ two).square().sum()) == pytest.approx(4, abs=1e-8)


def test_not_centred_is_about_zero():
    rows = rows_of(d=150, mean=30.0, power=1.0)
    sketch = two_passes(rows, 3, center=False)
    found, exact = fit_sketched_pca(sketch, 3, center=False), fit_pca(SecondMoments.of(rows), 3, center=False)
    assert found.overlap(exact) > 0.99 and not bool(found.centre.any())
    assert fit_sketched_pca(sketch, 3).overlap(exact) < 0.9


def test_a_massive_direction_in_float32_hides_nothing():
    rows = rows_of(d=200, power=0.8).float()
    rows[:, 0] += 300 * (torch.arange(len(rows)) % 50 == 0)
    found, exact = fit_sketched_pca(two_passes(rows, 6), 6), fit_pca(SecondMoments.of(rows.double()), 6)
    assert exact.origin["variance_share"] > 0.99 and found.overlap(exact) > 0.99


@pytest.mark.parametrize("rank", [0.9, "effective_rank", True, 0, "six"])
def test_ranks_that_need_the_whole_spectrum_are_refused(rank):
    with pytest.raises(ValueError, match="rank"):
        fit_sketched_pca(SketchedMoments.of(rows_of(d=30), gaussian_directions(30, 10, 0)), rank)


def test_equal_rows_have_no_direction():
    with pytest.raises(ValueError, match="all 9 rows are equal"):
        fit_sketched_pca(SketchedMoments.of(torch.full((9, 30), 0.1), gaussian_directions(30, 10, 0)), 2)


@pytest.mark.parametrize(
    ("rank", "width", "columns"), [(16, 8192, 128), (2, 8192, 64), (16, 100, 100), (np.int64(3), 32, 32)]
)
def test_columns_grow_with_the_rank_up_to_the_width(rank, width, columns):
    assert sketch_columns(rank, width) == columns


def test_the_nystroem_approximation_is_exact_along_its_directions_and_nowhere_above():
    rows = rows_of(d=50, power=0.5)
    matrix = SecondMoments.of(rows).covariance()
    basis, through = orthonormal(gaussian_directions(50, 12, 0), matrix @ gaussian_directions(50, 12, 0))
    torch.testing.assert_close(through, matrix @ basis)
    factor = nystroem(basis, through)
    torch.testing.assert_close(factor @ (factor.T @ basis), matrix @ basis)
    assert float(torch.linalg.eigvalsh(matrix - factor @ factor.T)[0]) > -1e-10
