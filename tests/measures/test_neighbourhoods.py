"""Neighbours against slow loops; overlaps and agreements whose value is known."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from explicit import PROPERTY, array, random_frame, random_rows
from hypothesis import given
from hypothesis import strategies as st

from tangent_lens.measures import neighbourhoods
from tangent_lens.measures.dimension import intrinsic_dimension
from tangent_lens.measures.neighbourhoods import (
    first_of_equals,
    nearest_neighbours,
    neighbourhood_agreement,
    neighbourhood_overlap,
)


def slow_neighbours(rows: torch.Tensor, k: int) -> list[list[int]]:
    """One row at a time; ties to the lower row."""
    values = array(rows)
    found = []
    for place, value in enumerate(values):
        others = [(math.dist(value, other), number) for number, other in enumerate(values) if number != place]
        found.append([number for _, number in sorted(others)[:k]])
    return found


def slow_shares(first: torch.Tensor, second: torch.Tensor, k: int) -> list[float]:
    pairs = zip(slow_neighbours(first, k), slow_neighbours(second, k), strict=True)
    return [sum(one in other for one in mine) / k for mine, other in pairs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("count", "width", "k"), [(2, 3, 1), (40, 1, 39), (90, 5, 7), (120, 300, 30)])
def test_neighbours_are_those_of_a_slow_search(count, width, k, dtype):
    rows = random_rows(count, width, seed=count, dtype=dtype)
    assert nearest_neighbours(rows, k).tolist() == slow_neighbours(rows, k)


def test_ties_go_to_the_lower_row():
    rows = torch.cartesian_prod(torch.arange(7.0), torch.arange(6.0))
    assert nearest_neighbours(rows, 5).tolist() == slow_neighbours(rows, 5)


@pytest.mark.parametrize("shift", [0.0, 1e6])
def test_a_row_is_never_its_own_neighbour_even_among_duplicates(shift):
    rows = random_rows(60, 8) + shift
    rows[10:40] = rows[10]
    found = nearest_neighbours(rows, 4)
    assert not bool((found == torch.arange(60)[:, None]).any())
    assert found[10].tolist() == [11, 12, 13, 14] and found[35].tolist() == [10, 11, 12, 13]
    assert found.tolist() == slow_neighbours(rows, 4)


def test_duplicates_but_for_the_rounding_of_a_model_are_as_near_as_duplicates():
    rows = random_rows(60, 8)
    rows[10:40] = rows[10]
    noise = torch.from_numpy(np.random.default_rng(0).normal(size=(60, 8)))
    assert torch.equal(nearest_neighbours(rows + 1e-7 * noise, 4), nearest_neighbours(rows, 4))


def test_digits_survive_a_far_origin_and_a_huge_row():
    """What a matrix product of these rows says about distances is rounding."""
    rows = random_rows(80, 6)
    expected = nearest_neighbours(rows, 5)
    assert torch.equal(nearest_neighbours(rows * 2.0**20 + 2.0**34, 5), expected)
    huge = torch.cat([rows, torch.full((1, 6), 1e5)])
    assert nearest_neighbours(huge, 5)[:80].tolist() == slow_neighbours(huge, 5)[:80]
    assert torch.equal(nearest_neighbours(rows * 2.0**900, 5), expected)
    assert torch.equal(nearest_neighbours(rows * 2.0**-900, 5), expected)


def test_where_the_candidates_may_be_wrong_every_row_is_asked(monkeypatch):
    rows = random_rows(150, 4)
    expected = slow_neighbours(rows, 3)
    asked = []

    def doubts(sizes, reached, farthest, width):
        asked.append(len(sizes))
        return torch.ones(len(sizes), dtype=torch.bool)

    monkeypatch.setattr(neighbourhoods, "_may_miss", doubts)
    assert nearest_neighbours(rows, 3).tolist() == expected and asked == [150]


def slow_first_of_equals(rows: torch.Tensor) -> list[int]:
    """Every pair; groups grow until nothing changes."""
    values = array(rows)
    radius = 1e-5 * math.sqrt(((values - values.mean(axis=0)) ** 2).sum(axis=1).mean())
    pairs = [
        (one, other) for one in range(len(values)) for other in range(one) if math.dist(*values[[one, other]]) <= radius
    ]
    first, changed = list(range(len(values))), True
    while changed:
        before = list(first)
        for one, other in pairs:
            first[one] = first[other] = min(first[one], first[other])
        changed = before != first
    return first


@pytest.mark.parametrize("width", [1, 3, 30])
def test_equal_rows_are_those_of_slow_pairs(width):
    rows, generator = random_rows(80, width, seed=8), np.random.default_rng(1)
    rows[20:60] = rows[torch.from_numpy(generator.integers(0, 20, size=40))]
    rows[40:60] += torch.from_numpy(1e-6 * generator.normal(size=(20, width)))
    size = float((rows - rows.mean(dim=0)).square().sum(dim=1).mean().sqrt())
    for place in range(61, 66):
        rows[place] = rows[place - 1]
        rows[place, 0] += 0.9e-5 * size
    found = first_of_equals(rows)
    assert found.tolist() == slow_first_of_equals(rows)
    assert found[61:66].tolist() == [60] * 5
    assert len(found.unique()) == intrinsic_dimension(rows).rows


def test_any_chunk_gives_the_same_neighbours(monkeypatch):
    rows = random_rows(101, 6)
    expected = nearest_neighbours(rows, 9)
    monkeypatch.setattr(neighbourhoods, "_CHUNK", 1000)
    assert torch.equal(nearest_neighbours(rows, 9), expected)


def test_overlap_equals_a_slow_one():
    first, second = random_rows(70, 6, seed=1), random_rows(70, 6, seed=1) @ random_rows(6, 9, seed=2)
    found, shares = neighbourhood_overlap(first, second, 8), slow_shares(first, second, 8)
    assert found.overlap == pytest.approx(np.mean(shares))
    assert found.standard_error == pytest.approx(np.std(shares, ddof=1) / math.sqrt(70))
    assert (found.rows, found.k, found.expected) == (70, 8, 8 / 69)
    assert neighbourhood_overlap(second, first, 8) == found


def test_identical_layers_overlap_wholly():
    rows = random_rows(100, 12)
    rows[:50] = rows[0]
    found = neighbourhood_overlap(rows, rows)
    assert (found.overlap, found.standard_error, found.k) == (1.0, 0.0, 30)


def test_unrelated_rows_overlap_as_expected():
    found = neighbourhood_overlap(random_rows(1000, 4, seed=1), random_rows(1000, 7, seed=2), 30)
    assert found.expected == 30 / 999
    assert abs(found.overlap - found.expected) < 0.004


@PROPERTY
@given(
    seed=st.integers(0, 1000),
    scale=st.floats(1e-6, 1e6),
    shift=st.floats(-100, 100),
    zeros=st.integers(0, 3),
    duplicates=st.integers(0, 30),
)
def test_rotation_scale_shift_order_and_empty_columns_change_no_overlap(seed, scale, shift, zeros, duplicates):
    first, second = random_rows(60, 5, seed), random_rows(60, 5, seed) + random_rows(60, 5, seed + 1)
    for rows in (first, second):
        rows[: duplicates + 1] = rows[0].clone()
    turned = torch.nn.functional.pad(scale * (first @ random_frame(5, 5, seed).T + shift), (0, zeros))
    assert neighbourhood_overlap(first, turned, 7).overlap == 1
    found = neighbourhood_overlap(first, second, 7)
    assert neighbourhood_overlap(turned, second, 7) == found
    if not duplicates:
        order = torch.from_numpy(np.random.default_rng(seed).permutation(60))
        assert neighbourhood_overlap(turned[order], second[order], 7).overlap == pytest.approx(found.overlap)


def test_agreement_equals_a_slow_one():
    rows, labels = random_rows(60, 4), np.random.default_rng(0).integers(0, 5, size=60).tolist()
    found = neighbourhood_agreement(rows, labels, 6)
    shares = [
        sum(labels[other] == labels[place] for other in others) / 6
        for place, others in enumerate(slow_neighbours(rows, 6))
    ]
    pairs = [(one, other) for one in range(60) for other in range(60) if one != other]
    reachable = [min(labels.count(label) - 1, 6) / 6 for label in labels]
    assert found.agreement == pytest.approx(np.mean(shares))
    assert found.standard_error == pytest.approx(np.std(shares, ddof=1) / math.sqrt(60))
    assert found.expected == pytest.approx(np.mean([labels[one] == labels[other] for one, other in pairs]))
    assert found.attainable == pytest.approx(np.mean(reachable))
    assert (found.rows, found.k, found.labels) == (60, 6, 5)
    names = ["abcde"[label] for label in labels]
    for same in (torch.tensor(labels), np.array(labels), names):
        assert neighbourhood_agreement(rows, same, 6) == found


def test_agreement_under_shuffled_labels_is_the_expected_one():
    rows, generator = random_rows(80, 3), np.random.default_rng(1)
    labels = np.repeat([0, 1, 2], [50, 25, 5])
    shuffled = [neighbourhood_agreement(rows, generator.permutation(labels), 10) for _ in range(200)]
    assert np.mean([one.agreement for one in shuffled]) == pytest.approx(shuffled[0].expected, abs=0.005)


def test_agreement_of_clusters_is_what_their_sizes_allow():
    labels = [0] * 40 + [1] * 5
    rows = random_rows(45, 3) + 1000 * torch.tensor(labels)[:, None]
    found = neighbourhood_agreement(rows, labels, 10)
    assert found.agreement == pytest.approx((40 + 5 * 0.4) / 45)
    assert found.attainable == pytest.approx(found.agreement)


@pytest.mark.parametrize(
    ("k", "message"),
    [
        (0, "k=0 neighbours do not fit 20 rows, of which each has 19 others; use 1 to 19"),
        (20, "k=20 neighbours do not fit 20 rows"),
        (2.5, "k=2.5 neighbours must be a whole number; 30 is usual"),
        (True, "k=True neighbours must be a whole number"),
        (math.nan, "k=nan neighbours must be a whole number"),
    ],
)
def test_a_number_of_neighbours_that_rows_do_not_have_is_refused(k, message):
    rows = random_rows(20, 3)
    for call in (
        lambda: nearest_neighbours(rows, k),
        lambda: neighbourhood_overlap(rows, rows, k),
        lambda: neighbourhood_agreement(rows, [0, 1] * 10, k),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_bad_rows_are_refused():
    rows = random_rows(20, 3)
    for bad in (math.nan, math.inf):
        broken = rows.clone()
        broken[3, 1] = bad
        with pytest.raises(ValueError, match="NaN or infinity"):
            nearest_neighbours(broken, 3)
    for value in (0.0, 0.1, 1e300):
        with pytest.raises(ValueError, match="all 20 rows are equal, so none is nearer than another"):
            nearest_neighbours(torch.full((20, 3), value, dtype=torch.float64), 3)
    with pytest.raises(ValueError, match=r"rows must be of shape \(n, d\)"):
        nearest_neighbours(rows[None], 3)
    with pytest.raises(ValueError, match="1 row has no neighbour"):
        nearest_neighbours(rows[:1], 1)
    with pytest.raises(ValueError, match="20 rows and 19 rows are not the same ones"):
        neighbourhood_overlap(rows, rows[1:], 3)


def test_labels_that_say_nothing_are_refused():
    rows = random_rows(20, 3)
    with pytest.raises(ValueError, match="the labels of 20 rows are all the same"):
        neighbourhood_agreement(rows, [4] * 20, 3)
    with pytest.raises(ValueError, match="the labels of 20 rows are all different"):
        neighbourhood_agreement(rows, range(20), 3)
    with pytest.raises(ValueError, match="19 labels do not fit 20 rows"):
        neighbourhood_agreement(rows, [0, 1] * 9 + [0], 3)
    with pytest.raises(ValueError, match=r"labels must be of shape \(n,\), not \(20, 1\)"):
        neighbourhood_agreement(rows, torch.zeros(20, 1), 3)
    with pytest.raises(ValueError, match="the label of row 1 is nan, which equals nothing"):
        neighbourhood_agreement(rows, [0.0, math.nan] * 10, 3)


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.neighbors", None)
    with pytest.raises(ImportError, match=r'pip install "tangent-lens\[fits\]"'):
        nearest_neighbours(random_rows(20, 3), 3)
