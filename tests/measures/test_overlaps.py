"""Subspaces beside one another: known angles, chance, and fits that come back."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from explicit import PROPERTY, projector, random_frame
from hypothesis import given
from hypothesis import strategies as st

from tangent_lens.measures.overlaps import (
    compare_subspaces,
    projection_distance,
    stability_over_halves,
    stability_over_seeds,
)
from tangent_lens.recording.moments import SecondMoments
from tangent_lens.recording.row_sample import RowSample
from tangent_lens.subspaces.fits import fit_pca
from tangent_lens.subspaces.subspace import Subspace


def subspace(k, seed, d=9):
    """A random one."""
    return Subspace.spanned_by(random_frame(d, k, seed))


@given(first=st.integers(1, 8), second=st.integers(1, 8), seed=st.integers(0, 500))
@PROPERTY
def test_the_projection_distance_is_that_of_the_projections(first, second, seed):
    one, other = subspace(first, seed), subspace(second, seed + 1)
    expected = np.linalg.norm(projector(one.basis) - projector(other.basis)) / math.sqrt(2)
    assert projection_distance(one, other) == pytest.approx(expected, abs=1e-7)
    assert projection_distance(one, one) == pytest.approx(0, abs=1e-7)


def test_every_pair_is_compared():
    axes = torch.eye(4, dtype=torch.float64)
    turned = torch.stack([axes[0], (axes[1] + axes[2]) / math.sqrt(2)], dim=1)
    found = compare_subspaces(
        {
            "xy": Subspace.spanned_by(axes[:, :2]),
            "turned": Subspace.spanned_by(turned),
            "zw": Subspace.spanned_by(axes[:, 2:]),
        }
    )
    np.testing.assert_allclose(found.overlap, [[1, 0.75, 0], [0.75, 1, 0.25], [0, 0.25, 1]], atol=1e-12)
    np.testing.assert_allclose(found.largest_angle, [[0, 45, 90], [45, 0, 90], [90, 90, 0]], atol=1e-6)
    assert found.expected == ((0.5,) * 3,) * 3
    rows = found.to_pandas()
    assert rows[["first", "second"]].values.tolist() == [["xy", "turned"], ["xy", "zw"], ["turned", "zw"]]
    assert rows["overlap"].tolist() == pytest.approx([0.75, 0, 0.25])


def test_random_subspaces_overlap_as_much_as_expected():
    many = compare_subspaces({str(seed): subspace(5, seed, d=40) for seed in range(30)})
    found = np.array(many.overlap)[np.triu_indices(30, 1)]
    assert found.mean() == pytest.approx(many.expected[0][1], rel=0.03)


def sequences_of_rows(spread, sequences=12):
    """Rows whose first three directions stand out by ``spread``."""
    rows = torch.randn(sequences * 20, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows[:, :3] *= spread
    return RowSample(
        rows, torch.arange(sequences).repeat_interleave(20), torch.zeros(len(rows), dtype=torch.long), len(rows)
    )


def pca(sample):
    """Of a sample's rows."""
    return fit_pca(SecondMoments.of(sample.rows), 3)


def test_clear_directions_come_back_in_both_halves_and_unclear_ones_do_not():
    clear, unclear = (stability_over_halves(sequences_of_rows(spread), pca) for spread in (10, 1))
    assert clear.least > 0.98 and unclear.mean < 0.7
    assert (clear.fits, clear.expected, len(clear.overlaps)) == (10, 0.3, 5)


def test_halves_share_no_sequence():
    seen = []

    def fit(sample):
        seen.append(set(sample.sequences.tolist()))
        return pca(sample)

    stability_over_halves(sequences_of_rows(2, sequences=7), fit, cuts=2)
    for first, second in zip(seen[::2], seen[1::2], strict=True):
        assert not first & second and len(first | second) == 7 and len(first) == 3


def test_fits_that_do_not_depend_on_the_seed_are_stable():
    fixed = stability_over_seeds(lambda seed: subspace(3, 0))
    loose = stability_over_seeds(lambda seed: subspace(3, seed), range(4))
    assert fixed.overlaps == pytest.approx((1.0,) * 10)
    assert len(loose.overlaps) == 6 and loose.mean < 0.9


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="1 subspace cannot be compared"):
        compare_subspaces({"one": subspace(2, 0)})
    with pytest.raises(ValueError, match="live in 8 and 9 dimensions"):
        compare_subspaces({"one": subspace(2, 0), "other": subspace(2, 0, d=8)})
    with pytest.raises(ValueError, match="1 fit cannot be compared"):
        stability_over_seeds(lambda seed: subspace(2, seed), [0])
    with pytest.raises(ValueError, match="3 sequences and 5 cuts make no halves"):
        stability_over_halves(sequences_of_rows(1, sequences=3), pca)
