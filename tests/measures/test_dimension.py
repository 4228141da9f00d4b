"""Intrinsic dimensions of manifolds whose dimension is known, and TwoNN against a slow one of our own."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from explicit import array, random_frame

from tangent_lens.measures.dimension import intrinsic_dimension


def flat(count: int, k: int, d: int, seed: int = 0) -> torch.Tensor:
    """Uniform points of a k-dimensional cube, turned into d dimensions, far from the origin."""
    points = torch.from_numpy(np.random.default_rng(seed).uniform(size=(count, k)))
    return 100 + points @ random_frame(d, k, seed).T


def sphere(count: int, k: int) -> torch.Tensor:
    points = torch.from_numpy(np.random.default_rng(1).normal(size=(count, k + 1)))
    return points / points.norm(dim=1, keepdim=True)


def slow_two_nn(rows: torch.Tensor, discard_fraction: float = 0.1) -> float:
    """Facco et al. 2017: the line through the origin of -log(1 - F) on log(r2 / r1), one row at a time."""
    values, ratios = array(rows), []
    for place, value in enumerate(values):
        first, second = sorted(np.linalg.norm(np.delete(values, place, axis=0) - value, axis=1))[:2]
        ratios.append(math.log(second / first))
    kept = sorted(ratios)[: int(len(ratios) * (1 - discard_fraction))]
    share = [-math.log(1 - (place + 1) / len(ratios)) for place in range(len(kept))]
    return sum(x * y for x, y in zip(kept, share, strict=True)) / sum(x * x for x in kept)


@pytest.mark.parametrize("method", ["two_nn", "mle"])
@pytest.mark.parametrize("rows", [flat(1500, 2, 40), flat(1500, 3, 6), sphere(1500, 2)], ids=["2", "3", "sphere 2"])
def test_manifolds_of_known_dimension(method, rows, request):
    true = 3 if "3" in request.node.callspec.id.split("-")[0] else 2
    found = intrinsic_dimension(rows, method)
    assert found.dimension == pytest.approx(true, rel=0.12)
    assert (found.method, found.rows, found.duplicates) == (method, 1500, 0)


@pytest.mark.parametrize("width", [5, 40], ids=["tree", "all distances"])
@pytest.mark.parametrize("discarded", [0.1, 0.3])
def test_two_nn_equals_a_slow_one(width, discarded):
    rows = flat(150, 4, width, seed=3)
    found = intrinsic_dimension(rows, discard_fraction=discarded)
    assert found.dimension == pytest.approx(slow_two_nn(rows, discarded), rel=1e-6)


def test_mle_is_levina_and_bickels_with_inverses_averaged():
    rows, inverses = flat(80, 3, 5), []
    for place, value in enumerate(array(rows)):
        near = sorted(np.linalg.norm(np.delete(array(rows), place, axis=0) - value, axis=1))[:7]
        inverses.append(sum(math.log(near[-1] / distance) for distance in near[:-1]) / 6)
    found = intrinsic_dimension(rows, "mle", neighbours=7)
    assert found.dimension == pytest.approx(1 / np.mean(inverses), rel=1e-9)


@pytest.mark.parametrize("method", ["two_nn", "mle"])
def test_duplicates_are_dropped_and_counted(method):
    rows = flat(200, 2, 30)
    rows[0] = 0.0
    repeated = torch.cat([rows, rows[:50], -rows[:1]])
    found = intrinsic_dimension(repeated, method)
    assert (found.rows, found.duplicates) == (200, 51)
    assert found.dimension == pytest.approx(intrinsic_dimension(rows, method).dimension, rel=1e-9)


def test_rows_that_are_equal_but_for_rounding_are_duplicates_too():
    """The same token in batches of two shapes."""
    rows = flat(300, 3, 30)
    noise = torch.from_numpy(np.random.default_rng(5).normal(size=(100, 30)))
    repeated = torch.cat([rows, rows[:100] + 1e-8 * noise])[torch.randperm(400, generator=torch.manual_seed(0))]
    found, expected = intrinsic_dimension(repeated), intrinsic_dimension(rows)
    assert (found.rows, found.duplicates) == (300, 100)
    assert found.dimension == pytest.approx(expected.dimension, rel=1e-4)


def test_one_column_is_a_line():
    assert intrinsic_dimension(flat(1000, 1, 1)).dimension == pytest.approx(1, rel=0.12)


def test_what_has_no_dimension_is_refused():
    with pytest.raises(ValueError, match="2 distinct rows of 60 are too few for 'two_nn', which needs 20"):
        intrinsic_dimension(torch.eye(2).repeat(30, 1))
    with pytest.raises(ValueError, match="30 distinct rows of 30 are too few for 'mle', which needs 41"):
        intrinsic_dimension(flat(30, 2, 4), "mle", neighbours=40)
    with pytest.raises(ValueError, match="method 'pca' must be one of two_nn, mle"):
        intrinsic_dimension(flat(30, 2, 4), "pca")
    with pytest.raises(ValueError, match="neighbours=2 give no estimate"):
        intrinsic_dimension(flat(30, 2, 4), "mle", neighbours=2)
    with pytest.raises(ValueError, match=r"discard_fraction=1 must lie in \[0, 1\)"):
        intrinsic_dimension(flat(30, 2, 4), discard_fraction=1)
    with pytest.raises(ValueError, match="NaN or infinity"):
        intrinsic_dimension(torch.full((30, 2), math.nan))


def test_without_scikit_dimension_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "skdim.id", None)
    with pytest.raises(ImportError, match=r'pip install "tangent-lens\[dimension\]"'):
        intrinsic_dimension(flat(30, 2, 4))
