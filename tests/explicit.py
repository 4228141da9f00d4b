"""Slow and plain float64 NumPy versions of what the library computes, for the tests to compare it with."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import settings
from torch import Tensor

from tangent_lens.subspaces.subspace import Subspace

# The same examples in every run, and few of them: each is a whole numerical comparison.
PROPERTY = settings(max_examples=20, deadline=None, derandomize=True)


def random_rows(count: int, width: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Correlated rows of unequal variances about a mean that is not zero."""
    generator = np.random.default_rng(seed)
    mixing = generator.normal(size=(width, width)) * np.linspace(2, 0.2, width)
    rows = generator.normal(size=(count, width)) @ mixing + generator.normal(size=width)
    return torch.from_numpy(rows).to(dtype)


def array(tensor: Tensor) -> np.ndarray:
    """The same numbers in NumPy and float64."""
    return tensor.detach().double().numpy()


def scatter(rows: Tensor) -> np.ndarray:
    """Sum of (x - mean)(x - mean)^T, one row at a time."""
    values = array(rows)
    mean = values.mean(axis=0)
    return sum(np.outer(value - mean, value - mean) for value in values)


def cross(gradients: Tensor, activations: Tensor) -> np.ndarray:
    """Sum of g x^T, one row at a time."""
    return sum(np.outer(g, x) for g, x in zip(array(gradients), array(activations), strict=True))


def random_frame(d: int, k: int, seed: int = 0) -> Tensor:
    """k orthonormal columns in d dimensions."""
    return torch.from_numpy(np.linalg.qr(np.random.default_rng(seed).normal(size=(d, k)))[0])


def random_subspace(d: int, k: int, seed: int = 0) -> Subspace:
    """A subspace that nothing was fitted to."""
    return Subspace(random_frame(d, k, seed), torch.zeros(d, dtype=torch.float64))


def random_moment(d: int, seed: int = 0) -> Tensor:
    """A positive definite (d, d) matrix of unequal eigenvalues."""
    rows = array(random_rows(3 * d, d, seed))
    return torch.from_numpy(rows.T @ rows)


def energy(moment: Tensor, basis: Tensor) -> float:
    """tr(Q^T M Q) / tr(M), one direction at a time."""
    matrix, directions = array(moment), array(basis).T
    return sum(direction @ matrix @ direction for direction in directions) / np.trace(matrix)


def projector(basis: Tensor) -> np.ndarray:
    """Q Q^T of orthonormal columns."""
    return array(basis) @ array(basis).T


def without(covariance: Tensor, basis: Tensor) -> np.ndarray:
    """(I - QQ^T) C (I - QQ^T)."""
    outside = np.eye(len(covariance)) - projector(basis)
    return outside @ array(covariance) @ outside


def published_iso_score(covariance: np.ndarray) -> float:
    """IsoScore* by the published recipe, from the eigenvalues of a covariance."""
    d = len(covariance)
    eigenvalues = np.linalg.eigvalsh(covariance)
    normalised = np.sqrt(d) * eigenvalues / np.linalg.norm(eigenvalues)
    defect = np.linalg.norm(normalised - 1) / np.sqrt(2 * (d - np.sqrt(d)))
    phi = (d - defect**2 * (d - np.sqrt(d))) ** 2 / d**2
    return (d * phi - 1) / (d - 1)
