"""How many dimensions a covariance uses. Several answers, each under its own name."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.measures.matrices import checked_symmetric
from tangent_lens.showing import Shown
from tangent_lens.storage import as_float64
from tangent_lens.subspaces.fits import noise_floor

# Stringer et al. 2019 fit these; the first ten follow no power law, and beyond lies what the rows do not determine.
FIRST, LAST = 11, 500
FEWEST = 10
_NO_VARIANCE = "has no variance, so it uses no dimension; the rows are all equal"


@dataclass(frozen=True, repr=False)
class Spectrum(Shown):
    """Dimension counts of one covariance, each between 1 and d.

    Attributes:
        participation_ratio: tr(C)^2 / |C|_F^2.
        effective_rank: exp of the entropy of the normalised **eigenvalues** of C (Roy and Vetterli 2007 on C).
        effective_rank_singular: the same of the normalised **singular values** of the centred rows, which are the
            square roots of the eigenvalues; RankMe (:func:`rank_me`) but for its epsilon and the centring. Always the
            larger of the two.
        top_dimension: the coordinate that holds the largest share of the variance, and ``top_share``, that share.
        stable_rank: tr(C) / its largest eigenvalue.
        alpha: exponent of the eigenvalues' power law over the indices ``alpha_first`` to ``alpha_last``, see
            :func:`power_law`; None where that range holds fewer than 10 eigenvalues above the noise.

    The last four are None in reports of before they were measured.
    """

    d: int
    participation_ratio: float
    effective_rank: float
    effective_rank_singular: float
    top_dimension: int
    top_share: float
    stable_rank: float | None = None
    alpha: float | None = None
    alpha_first: int | None = None
    alpha_last: int | None = None


@dataclass(frozen=True)
class PowerLaw:
    """eigenvalue_n about proportional to n^-alpha, for n from ``first`` to ``last`` (the largest is n = 1).

    Attributes:
        standard_error: of alpha, as if the residuals were independent; those of a sorted spectrum are not, so it is
            a lower limit.
        r_squared: share of the (weighted) variance of log eigenvalues that the line explains; 1 for a constant spectrum.
    """

    alpha: float
    standard_error: float
    first: int
    last: int
    r_squared: float


def participation_ratio(covariance: Float[Tensor, "d d"]) -> float:
    """tr(C)^2 / |C|_F^2: d for a multiple of the identity, 1 for a single direction.

    Raises:
        ValueError: C has no variance.
    """
    matrix = checked_symmetric(covariance, "this covariance", _NO_VARIANCE)
    return 1 / float((matrix / matrix.diagonal().sum()).square().sum())


def stable_rank(covariance: Float[Tensor, "d d"]) -> float:
    """|X|_F^2 / |X|_2^2 = tr(C) / lambda_max: between 1 and the rank, and steady under small perturbations.

    Raises:
        ValueError: C has no variance.

    Source: Rudelson and Vershynin 2007, "Sampling from large matrices".
    """
    matrix = checked_symmetric(covariance, "this covariance", _NO_VARIANCE)
    matrix = matrix / matrix.diagonal().sum()
    return 1 / float(torch.linalg.eigvalsh(matrix)[-1])


def rank_me(singular_values: Float[Tensor, " d"], epsilon: float = 1e-7) -> float:
    """RankMe: exp(-sum p log p) with p = sigma / sum(sigma) + epsilon.

    Args:
        singular_values: of the rows; the published measure does not centre them first.
        epsilon: the published one; 0 gives :func:`effective_rank`. It raises the result, in a wide space without
            variance noticeably: the p no longer sum to 1.

    Raises:
        ValueError: a negative or not finite value, or all zero; a negative epsilon.

    Source: Garrido, Balestriero, Najman and LeCun 2023, "RankMe", equation (1).
    """
    if not epsilon >= 0:
        raise ValueError(f"epsilon {epsilon} must be 0 or more; 1e-7 is the published one")
    return float(torch.exp(torch.special.entr(_shares(singular_values, "RankMe") + epsilon).sum()))


def power_law(eigenvalues: Float[Tensor, " d"], *, first: int = FIRST, last: int = LAST) -> PowerLaw:
    """alpha: minus the slope of log eigenvalue on log index, over a stated range of indices, each weighted by 1 / index.

    The weights make every stretch of the logarithmic axis count the same. The range is cut at the last eigenvalue
    above the noise floor; the result says which indices were used.

    Args:
        eigenvalues: of a covariance, in any order.
        first, last: indices of the range, both included, counted from 1.

    Raises:
        ValueError: values not finite, or without a positive one; a range that is none; or fewer than 10 eigenvalues in it
            above the noise.

    Source: Stringer, Pachitariu, Steinmetz, Carandini and Harris 2019 (their published code weights so); as a measure of
    representations, alpha-ReQ: Agrawal, Mondal, Ghosh and Richards 2022.
    """
    values = as_float64(eigenvalues)
    if values.ndim != 1 or not bool(torch.isfinite(values).all()) or not bool((values > 0).any()):
        raise ValueError("a power law needs finite eigenvalues of shape (d,), of which some are positive")
    if not 1 <= first < last:
        raise ValueError(f"indices {first} to {last} are no range; eigenvalues are counted from 1, the largest")
    values = values.sort(descending=True).values
    last = min(last, int((values > noise_floor(values)).sum()))
    if last - first + 1 < FEWEST:
        raise ValueError(
            f"{max(last - first + 1, 0)} eigenvalues above the noise from index {first} on are too few for a power law, "
            f"which needs {FEWEST}; use more rows or a smaller first"
        )
    return _fitted(values[first - 1 : last], first, last)


def _fitted(values: Float[Tensor, " n"], first: int, last: int) -> PowerLaw:
    index = torch.arange(first, last + 1, dtype=torch.float64)
    weights = 1 / index
    weights = weights / weights.sum()
    x, y = index.log(), values.log()
    x, y = x - (weights * x).sum(), y - (weights * y).sum()
    spread, total = float((weights * x.square()).sum()), float((weights * y.square()).sum())
    slope = float((weights * x * y).sum()) / spread
    left = float((weights * (y - slope * x).square()).sum())
    error = math.sqrt(left / (len(values) - 2) / spread)
    # Below this, logarithms of equal numbers differ by their rounding only.
    return PowerLaw(-slope, error, first, last, 1 - left / total if total > 1e-24 else 1.0)


def effective_rank(values: Float[Tensor, " d"]) -> float:
    """exp of the Shannon entropy of values / sum(values) (Roy and Vetterli 2007).

    Args:
        values: eigenvalues of a covariance, or singular values of centred rows. The two give different numbers;
            a report must say which.

    Raises:
        ValueError: a negative or not finite value, or all zero.
    """
    return float(torch.exp(torch.special.entr(_shares(values, "an effective rank")).sum()))


def _shares(values: Float[Tensor, " d"], name: str) -> Float[Tensor, " d"]:
    values = as_float64(values)
    if not bool(torch.isfinite(values).all()) or bool((values < 0).any()) or not float(values.sum()) > 0:
        raise ValueError(f"{name} needs finite values >= 0 that are not all zero")
    return values / values.sum()


def spectrum_of(covariance: Float[Tensor, "d d"]) -> Spectrum:
    """All counts of one covariance; costs one eigendecomposition.

    Raises:
        ValueError: C has no variance, or is not finite.
    """
    matrix = checked_symmetric(covariance, "this covariance", _NO_VARIANCE)
    eigenvalues = torch.linalg.eigvalsh(matrix)
    eigenvalues = torch.where(eigenvalues > noise_floor(eigenvalues), eigenvalues, 0.0)
    shares = matrix.diagonal() / matrix.diagonal().sum()
    enough = int((eigenvalues > 0).sum()) >= FIRST + FEWEST - 1
    law = power_law(eigenvalues) if enough else None
    return Spectrum(
        d=len(matrix),
        participation_ratio=participation_ratio(matrix),
        effective_rank=effective_rank(eigenvalues),
        effective_rank_singular=effective_rank(eigenvalues.sqrt()),
        top_dimension=int(shares.argmax()),
        top_share=float(shares.max()),
        stable_rank=float(eigenvalues.sum() / eigenvalues.max()),
        alpha=None if law is None else law.alpha,
        alpha_first=None if law is None else law.first,
        alpha_last=None if law is None else law.last,
    )
