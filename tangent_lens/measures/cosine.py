"""The mean cosine between rows, in closed form from one vector: a first look at anisotropy."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.storage import as_float64


def mean_cosine(unit_row_mean: Float[Tensor, " d"], count: int) -> float:
    """Mean cosine over all pairs of distinct rows: (n |m|^2 - 1) / (n - 1), with m the mean of the n rows made unit.

    The sum of all n^2 cosines is |n m|^2, of which the n rows with themselves hold n. It costs O(n d), not O(n^2 d), and
    equals the average that Ethayarajh (2019, "How contextual are contextualized word representations?") samples.

    Returns:
        Between -1 / (n - 1) and 1: 1 where all rows point one way, about 0 where they point everywhere.

    Raises:
        ValueError: fewer than 2 rows, or a vector that is not finite or longer than 1, so no mean of unit rows.
    """
    if count < 2:
        raise ValueError(f"{count} row makes no pair; a mean cosine needs 2 or more")
    mean = as_float64(unit_row_mean)
    if mean.ndim != 1 or not bool(torch.isfinite(mean).all()):
        raise ValueError(f"the mean of unit rows must be finite and of shape (d,), not {tuple(mean.shape)}")
    square = float(mean.square().sum())
    if square > 1 + 1e-6:
        raise ValueError(
            f"a mean of unit rows is no longer than 1, this one is {square**0.5:.6g}; divide rows by their norm"
        )
    return min((count * square - 1) / (count - 1), 1.0)


def mean_cosine_of(rows: Float[Tensor, "n d"]) -> float:
    """Mean cosine over all pairs of distinct rows.

    Raises:
        ValueError: fewer than 2 rows, a value that is not finite, or a row of zeros, which has no direction.
    """
    units = unit_rows(rows)
    return mean_cosine(units.mean(dim=0), len(units))


def unit_rows(rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """The rows in float64, each divided by its norm.

    Raises:
        ValueError: not of shape (n, d), a value that is not finite, or a row of zeros, which has no direction.
    """
    values = checked_rows(rows)
    largest = values.abs().amax(dim=1, keepdim=True)
    silent = torch.nonzero(largest[:, 0] == 0).flatten()
    if len(silent):
        raise ValueError(
            f"{len(silent)} of {len(values)} rows are zero (the first is row {int(silent[0])}) and have no direction; "
            "leave them out"
        )
    # First by the largest entry, so that no square under- or overflows.
    values = values / largest
    return values / values.norm(dim=1, keepdim=True)


def checked_rows(rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """The rows in float64.

    Raises:
        ValueError: not of shape (n, d) with n and d of 1 or more, or a value that is not finite.
    """
    values = as_float64(rows)
    if values.ndim != 2 or not values.numel():
        raise ValueError(f"rows must be of shape (n, d), not {tuple(values.shape)}; flatten batch and position first")
    if not bool(torch.isfinite(values).all()):
        raise ValueError("the rows hold NaN or infinity; leave such rows out")
    return values
