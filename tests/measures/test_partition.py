"""Partition-function isotropy against loops over rows and directions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from explicit import PROPERTY, array, random_frame, random_rows
from hypothesis import given
from hypothesis import strategies as st

from tangent_lens.measures.partition import partition_isotropy

seeds = st.integers(0, 10_000)


def slow(rows: torch.Tensor, both_signs: bool) -> float:
    """Z of each eigenvector of X^T X, one row at a time."""
    values = array(rows)
    sums = []
    for direction in np.linalg.eig(values.T @ values)[1].real.T:
        oriented = direction if sum(value @ direction for value in values) >= 0 else -direction
        for one in (oriented, -oriented) if both_signs else (oriented,):
            sums.append(sum(math.exp(one @ value) for value in values))
    return min(sums) / max(sums)


@given(seed=seeds, width=st.integers(1, 6), both_signs=st.booleans())
@PROPERTY
def test_it_equals_the_slow_loops(seed, width, both_signs):
    rows = random_rows(25, width, seed) / 5
    found = partition_isotropy(rows, both_signs=both_signs)
    assert found.isotropy == pytest.approx(slow(rows, both_signs), rel=1e-8)
    assert found.log_isotropy == pytest.approx(math.log(found.isotropy), abs=1e-12)
    assert (found.rows, found.unit_norm, found.both_signs) == (25, False, both_signs)


# The published recipe leaves each sign to its library; whatever it takes, both signs see no less anisotropy.
@given(seed=seeds)
@PROPERTY
def test_both_signs_bound_every_choice_of_signs(seed):
    rows, generator = random_rows(25, 5, seed) / 5, np.random.default_rng(seed)
    directions = np.linalg.eigh(array(rows.T @ rows))[1] * generator.choice([-1, 1], size=5)
    sums = np.exp(array(rows) @ directions).sum(axis=0)
    assert partition_isotropy(rows).isotropy <= sums.min() / sums.max() * (1 + 1e-9)


def test_rows_too_large_for_an_exponential_have_a_logarithm():
    rows = 1e4 * random_rows(30, 4)
    found = partition_isotropy(rows)
    along = array(rows) @ np.linalg.eigh(array(rows.T @ rows))[1]
    largest = np.concatenate([along.max(axis=0), -along.min(axis=0)])
    assert found.isotropy == 0
    assert found.log_isotropy == pytest.approx(largest.min() - largest.max(), rel=1e-6)


def test_the_scale_of_rows_matters_unless_they_are_made_unit():
    rows = random_rows(40, 4)
    assert partition_isotropy(3 * rows).log_isotropy < partition_isotropy(rows).log_isotropy
    units = partition_isotropy(rows, unit_norm=True)
    assert partition_isotropy(3 * rows, unit_norm=True).log_isotropy == pytest.approx(units.log_isotropy, rel=1e-9)
    assert units.log_isotropy == pytest.approx(partition_isotropy(rows / rows.norm(dim=1, keepdim=True)).log_isotropy)
    turned = partition_isotropy(rows @ random_frame(4, 4)).log_isotropy
    assert turned == pytest.approx(partition_isotropy(rows).log_isotropy, rel=1e-9)


def test_opposite_axes_are_isotropic():
    axes = torch.eye(4, dtype=torch.float64)
    assert partition_isotropy(torch.cat([axes, -axes])).isotropy == pytest.approx(1, rel=1e-12)


def test_what_has_no_isotropy_is_refused():
    with pytest.raises(ValueError, match="all 3 rows are zero, so no direction differs"):
        partition_isotropy(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="1 of 2 rows are zero"):
        partition_isotropy(torch.tensor([[0.0, 0], [1, 0]]), unit_norm=True)
    with pytest.raises(ValueError, match="NaN or infinity"):
        partition_isotropy(torch.full((3, 2), math.inf))
    with pytest.raises(ValueError, match=r"\(n, d\)"):
        partition_isotropy(torch.ones(3))
