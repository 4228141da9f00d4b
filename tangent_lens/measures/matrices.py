"""Checks and projections of symmetric matrices, shared by the measures."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.storage import as_float64

# Below this share of the trace, differences of large numbers would lose too many digits.
CANCELLATION = 1e-2


def checked_symmetric(matrix: Tensor, name: str, if_zero: str) -> Float[Tensor, "d d"]:
    """The matrix in float64.

    Args:
        name: what an error calls it.
        if_zero: what it means that nothing is there.

    Raises:
        ValueError: not square, smaller than 1 x 1, not finite, or without any trace.
    """
    matrix = as_float64(matrix)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        raise ValueError(
            f"{name} must be a matrix (d, d), not of shape {tuple(matrix.shape)}; pass rows to SecondMoments.of first"
        )
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError(f"{name} holds NaN or infinity")
    if not float(matrix.diagonal().sum()) > 0:
        raise ValueError(f"{name} {if_zero}")
    return matrix


def without(matrix: Float[Tensor, "d d"], basis: Float[Tensor, "d k"]) -> Float[Tensor, "d d"]:
    """(I - QQ^T) M (I - QQ^T), formed explicitly."""
    once = matrix - basis @ (basis.T @ matrix)
    return once - (once @ basis) @ basis.T


def times_frames(matrix: Float[Tensor, "d d"], frames: Float[Tensor, "m d k"]) -> Float[Tensor, "m d k"]:
    """M Q of every frame in one product: as many small ones would take three times as long."""
    m, d, k = frames.shape
    return (matrix @ frames.transpose(0, 1).reshape(d, m * k)).view(d, m, k).transpose(0, 1)
