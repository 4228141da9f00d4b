"""The closed mean cosine against the loop over all pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from explicit import PROPERTY, array, random_frame, random_rows
from hypothesis import given
from hypothesis import strategies as st

from tangent_lens.measures.cosine import mean_cosine, mean_cosine_of

seeds = st.integers(0, 10_000)


def mean_over_pairs(rows: torch.Tensor) -> float:
    """One pair of distinct rows at a time."""
    values = array(rows)
    cosines = [
        one @ other / (np.linalg.norm(one) * np.linalg.norm(other))
        for place, one in enumerate(values)
        for other in values[:place]
    ]
    return sum(cosines) / len(cosines)


@given(seed=seeds, count=st.integers(2, 30), width=st.integers(1, 8))
@PROPERTY
def test_it_equals_the_loop_over_pairs(seed, count, width):
    rows = random_rows(count, width, seed)
    assert mean_cosine_of(rows) == pytest.approx(mean_over_pairs(rows), abs=1e-12)


@given(seed=seeds, exponent=st.integers(-200, 200))
@PROPERTY
def test_neither_rotation_nor_the_scale_of_rows_changes_it(seed, exponent):
    rows = random_rows(20, 6)
    factors = 10.0**exponent * torch.arange(1, 21, dtype=torch.float64)[:, None]
    assert mean_cosine_of(factors * rows @ random_frame(6, 6, seed)) == pytest.approx(mean_cosine_of(rows), abs=1e-12)


def test_known_means():
    axes = torch.eye(5, dtype=torch.float64)
    assert mean_cosine_of(torch.ones(7, 3)) == pytest.approx(1, abs=1e-12)
    assert mean_cosine_of(axes) == pytest.approx(0, abs=1e-12)
    assert mean_cosine_of(axes - axes.mean(dim=0)) == pytest.approx(-1 / 4, abs=1e-12)
    assert mean_cosine(torch.zeros(3), 11) == pytest.approx(-1 / 10)


def test_what_has_no_mean_cosine_is_refused():
    with pytest.raises(ValueError, match="1 row makes no pair; a mean cosine needs 2 or more"):
        mean_cosine_of(torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"1 of 3 rows are zero \(the first is row 1\)"):
        mean_cosine_of(torch.tensor([[1.0, 0], [0, 0], [0, 1]]))
    with pytest.raises(ValueError, match="NaN or infinity"):
        mean_cosine_of(torch.tensor([[1.0, math.nan], [0, 1]]))
    with pytest.raises(ValueError, match=r"no longer than 1, this one is 2; divide rows by their norm"):
        mean_cosine(torch.tensor([2.0, 0.0]), 5)
    with pytest.raises(ValueError, match=r"\(n, d\), not \(2, 3, 4\)"):
        mean_cosine_of(torch.ones(2, 3, 4))
