"""How many dimensions a covariance uses. Several answers, each under its own name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.measures.matrices import checked_symmetric
from tangent_lens.showing import Shown
from tangent_lens.storage import as_float64
from tangent_lens.subspaces.fits import noise_floor

_NO_VARIANCE = "has no variance, so it uses no dimension; the rows are all equal"


@dataclass(frozen=True, repr=False)
class Spectrum(Shown):
    """Dimension counts of one covariance, each between 1 and d.

    Attributes:
        participation_ratio: tr(C)^2 / |C|_F^2.
        effective_rank: exp of the entropy of the normalised **eigenvalues** of C (Roy and Vetterli 2007 on C).
        effective_rank_singular: the same of the normalised **singular values** of the centred rows, which are the
            square roots of the eigenvalues; the convention of RankMe. Always the larger of the two.
        top_dimension: the coordinate that holds the largest share of the variance, and ``top_share``, that share.
    """

    d: int
    participation_ratio: float
    effective_rank: float
    effective_rank_singular: float
    top_dimension: int
    top_share: float


def participation_ratio(covariance: Float[Tensor, "d d"]) -> float:
    """tr(C)^2 / |C|_F^2: d for a multiple of the identity, 1 for a single direction.

    Raises:
        ValueError: C has no variance.
    """
    matrix = checked_symmetric(covariance, "this covariance", _NO_VARIANCE)
    return 1 / float((matrix / matrix.diagonal().sum()).square().sum())


def effective_rank(values: Float[Tensor, " d"]) -> float:
    """exp of the Shannon entropy of values / sum(values) (Roy and Vetterli 2007).

    Args:
        values: eigenvalues of a covariance, or singular values of centred rows. The two give different numbers;
            a report must say which.

    Raises:
        ValueError: a negative or not finite value, or all zero.
    """
    values = as_float64(values)
    if not bool(torch.isfinite(values).all()) or bool((values < 0).any()) or not float(values.sum()) > 0:
        raise ValueError("an effective rank needs finite values >= 0 that are not all zero")
    shares = values / values.sum()
    return float(torch.exp(torch.special.entr(shares).sum()))


def spectrum_of(covariance: Float[Tensor, "d d"]) -> Spectrum:
    """All counts of one covariance; costs one eigendecomposition.

    Raises:
        ValueError: C has no variance, or is not finite.
    """
    matrix = checked_symmetric(covariance, "this covariance", _NO_VARIANCE)
    eigenvalues = torch.linalg.eigvalsh(matrix)
    eigenvalues = torch.where(eigenvalues > noise_floor(eigenvalues), eigenvalues, 0.0)
    shares = matrix.diagonal() / matrix.diagonal().sum()
    return Spectrum(
        d=len(matrix),
        participation_ratio=participation_ratio(matrix),
        effective_rank=effective_rank(eigenvalues),
        effective_rank_singular=effective_rank(eigenvalues.sqrt()),
        top_dimension=int(shares.argmax()),
        top_share=float(shares.max()),
    )
