"""How many directions to take: a whole number, a share of the variance, or a rule about the eigenvalues."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float
from scipy.integrate import quad
from scipy.linalg import eigh_tridiagonal
from scipy.optimize import brentq
from torch import Tensor

from tangent_lens.storage import as_float64

_DRAWS = 50


def rank_by(rule: str, eigenvalues: Float[Tensor, " d"], rows: int) -> int:
    """The rank that a rule finds in the spectrum of a covariance.

    Args:
        rule: ``effective_rank`` exp of the entropy of the eigenvalues, rounded (Roy and Vetterli 2007);
            ``participation_ratio`` (sum)^2 / sum of squares, rounded;
            ``marchenko_pastur`` eigenvalues above the upper edge of those of noise (Marchenko and Pastur 1967). Noise
            alone passes its edge in about one sample out of six;
            ``gavish_donoho`` singular values above the threshold that reconstructs best under noise of unknown size
            (Gavish and Donoho 2014);
            ``parallel_analysis`` leading eigenvalues above the 95th percentile of those of noise with the same total
            variance (Horn 1965).
        eigenvalues: of the covariance, in any order, with the small negative ones that rounding leaves.
        rows: independent rows behind the covariance: one fewer than were seen where their mean was taken off.

    Returns:
        1 or more.

    Raises:
        ValueError: an unknown rule, a spectrum without variance, or one in which nothing stands above noise.
    """
    if rule not in RULES:
        raise ValueError(f"no rank rule {rule!r}; there are {', '.join(RULES)}")
    values = as_float64(eigenvalues)
    if values.ndim != 1 or not len(values) or not bool(torch.isfinite(values).all()):
        raise ValueError(f"eigenvalues must be finite numbers (d,), not of shape {tuple(values.shape)}")
    if rows < 1:
        raise ValueError(f"{rows} independent rows determine no spectrum; use 1 or more")
    if not float(values.max()) > 0:
        raise ValueError(f"the largest eigenvalue is {float(values.max())}, so there is no variance to find a rank in")
    floor = noise_floor(values)
    values = values.sort(descending=True).values
    return RULES[rule](torch.where(values > floor, values, 0.0), rows)


def noise_floor(eigenvalues: Float[Tensor, " d"]) -> float:
    """Below this, an eigenvalue of a covariance is rounding and not data.

    A covariance has no negative eigenvalue, so the most negative one that was computed shows how large rounding is
    (float32 products leave far more of it than the float64 sums do).
    """
    return max(1e-10 * float(eigenvalues.max()), -8 * float(eigenvalues.min()))


def check_rank(rank: int | float | str) -> int | float | str:
    """A rank that can mean something: a whole number from 1 on, a variance share in (0, 1), or the name of a rule.

    Raises:
        ValueError: anything else.
    """
    meanings = f"a whole number, or a variance share between 0 and 1, or a rule ({', '.join(RULES)})"
    if isinstance(rank, str) and rank in RULES:
        return rank
    if isinstance(rank, (bool, str)) or not isinstance(rank, numbers.Real) or not math.isfinite(rank):
        raise ValueError(f"rank {rank!r} must be {meanings}")
    if float(rank) == int(rank):
        return check_whole_rank(rank)
    if not 0 < rank < 1:
        raise ValueError(f"rank {rank} must be {meanings}")
    return float(rank)


def check_whole_rank(rank: int | float | str) -> int:
    """A rank for a fit that has no variances to share out or to apply a rule to.

    Raises:
        ValueError: not a whole number from 1 on.
    """
    if isinstance(rank, (bool, str)) or not isinstance(rank, numbers.Real) or not float(rank).is_integer():
        raise ValueError(f"rank {rank!r} must be a whole number here; shares and rules need the variances of fit_pca")
    if int(rank) < 1:
        raise ValueError(f"rank {int(rank)} spans nothing; use 1 or more")
    return int(rank)


def known_rank(rank: int | float | str) -> int | None:
    """The rank where it is known before any row is seen; None for a share or a rule, which only the rows decide.

    Raises:
        ValueError: what :func:`check_rank` refuses.
    """
    checked = check_rank(rank)
    return checked if isinstance(checked, int) else None


def resolve_rank(rank: int | float | str, eigenvalues: Float[Tensor, " d"], rows: int) -> int:
    """A rank as a whole number.

    Args:
        rank: as :func:`check_rank` allows.
        eigenvalues: of the covariance, with the small negative ones that rounding leaves.
        rows: independent rows behind the covariance.

    Raises:
        ValueError: a rank that means nothing or that the width does not allow, or a rule that finds nothing.
    """
    rank = check_rank(rank)
    if isinstance(rank, str):
        return rank_by(rank, eigenvalues, rows)
    width = len(eigenvalues)
    if rank < 1:
        variances = eigenvalues.sort(descending=True).values.clamp(min=0)
        return min(int((variances.cumsum(0) / variances.sum() < rank).sum()) + 1, width)
    if rank > width:
        raise ValueError(f"rank {rank} does not fit in {width} dimensions; use rank <= {width}")
    return int(rank)


def _effective_rank(values: Tensor, rows: int) -> int:
    shares = values[values > 0] / values.sum()
    return round(float(torch.exp(-(shares * shares.log()).sum())))


def _participation_ratio(values: Tensor, rows: int) -> int:
    shares = values / values.sum()
    return round(1 / float(shares.square().sum()))


def _marchenko_pastur(values: Tensor, rows: int) -> int:
    spectrum, aspect = _as_singular_values(values, rows)
    noise = _median(spectrum) / math.sqrt(marchenko_pastur_median(aspect))
    return _found(spectrum > noise * (1 + math.sqrt(aspect)), "marchenko_pastur")


def _gavish_donoho(values: Tensor, rows: int) -> int:
    spectrum, aspect = _as_singular_values(values, rows)
    return _found(spectrum > hard_threshold(aspect) * _median(spectrum), "gavish_donoho")


def _parallel_analysis(values: Tensor, rows: int) -> int:
    d = len(values)
    noise = torch.from_numpy(_noise_percentiles(d, rows))
    above = values[: len(noise)] > noise * float(values.sum()) / d
    # Only up to the first that noise explains: later ones have nothing left to compare with.
    return _found(above.cumprod(0).bool(), "parallel_analysis")


RULES: dict[str, Callable[[Tensor, int], int]] = {
    "effective_rank": _effective_rank,
    "participation_ratio": _participation_ratio,
    "marchenko_pastur": _marchenko_pastur,
    "gavish_donoho": _gavish_donoho,
    "parallel_analysis": _parallel_analysis,
}


def hard_threshold(aspect: float) -> float:
    """omega(beta), the best hard threshold in units of the median singular value, for an aspect ratio in (0, 1].

    Source: Gavish and Donoho 2014, IEEE Transactions on Information Theory 60(8), equations 4 and 5.
    """
    known_noise = 2 * (aspect + 1) + 8 * aspect / (aspect + 1 + math.sqrt(aspect**2 + 14 * aspect + 1))
    return math.sqrt(known_noise / marchenko_pastur_median(aspect))


@lru_cache(maxsize=256)
def marchenko_pastur_median(aspect: float) -> float:
    """Median eigenvalue of the covariance of unit noise, for an aspect ratio in (0, 1].

    Source: Marchenko and Pastur 1967, Mathematics of the USSR-Sbornik 1(4).
    """
    low, high = (1 - math.sqrt(aspect)) ** 2, (1 + math.sqrt(aspect)) ** 2

    # x = low + (high - low) sin^2(angle) takes away the square roots at both edges of the density.
    def density(angle: float) -> float:
        x = low + (high - low) * math.sin(angle) ** 2
        return ((high - low) * math.sin(2 * angle) / 2) ** 2 / (math.pi * aspect * x)

    half = brentq(lambda angle: quad(density, 0, angle)[0] - 0.5, 0, math.pi / 2, xtol=1e-13)
    return low + (high - low) * math.sin(half) ** 2  # pyright: ignore[reportArgumentType]


def _as_singular_values(values: Tensor, rows: int) -> tuple[Tensor, float]:
    """Singular values of the rows over the root of the longer side, and the aspect ratio, which is at most 1.

    With fewer rows than dimensions the rest of the spectrum is zero, and the rows are as good as columns.
    """
    short, long = sorted((len(values), rows))
    return (values[:short] * (rows / long)).sqrt(), short / long


def _median(values: Tensor) -> float:
    return float(values.quantile(0.5))


def _found(above: Tensor, rule: str) -> int:
    count = int(above.sum())
    if not count:
        raise ValueError(f"{rule}: no direction stands above noise; give a whole number as the rank")
    return count


@lru_cache(maxsize=32)
def _noise_percentiles(d: int, rows: int) -> np.ndarray:
    """95th percentile of each ordered eigenvalue of the covariance of unit noise, from seeded draws.

    A Wishart matrix is orthogonally similar to a tridiagonal one with independent chi-distributed parts, so a draw needs
    neither the rows nor a full matrix. Source: Dumitriu and Edelman 2002, Journal of Mathematical Physics 43(11).
    """
    generator = np.random.default_rng(0)
    short, long = sorted((d, rows))
    draws = []
    for _ in range(_DRAWS):
        diagonal = np.sqrt(generator.chisquare(long - np.arange(short)))
        beside = np.sqrt(generator.chisquare(np.arange(short - 1, 0, -1)))
        squares = diagonal**2
        squares[1:] += beside**2
        draws.append(eigh_tridiagonal(squares, beside * diagonal[:-1], eigvals_only=True)[::-1])
    return np.percentile(draws, 95, axis=0) / rows
