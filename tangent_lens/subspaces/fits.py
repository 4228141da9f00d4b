"""Fits: from moments to a concept subspace."""

from __future__ import annotations

import math
import numbers

import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.recording.moments import Moments, SecondMoments
from tangent_lens.storage import as_float64
from tangent_lens.subspaces.subspace import Subspace


def fit_pca(moments: Moments | SecondMoments, rank: int | float = 16, *, center: bool = True) -> Subspace:
    """The tangent proxy: the span of the k leading principal directions of activations.

    Args:
        moments: of the activations (of a :class:`Moments`, its activations are taken).
        rank: k as an integer, or a share of the variance in (0, 1) that the subspace must reach.
        center: False uses the second moment about zero instead of the covariance.

    Returns:
        A subspace that also knows its rivals for controls, as far as the rows determine them:
        ``next`` (directions k+1..2k) and ``trailing`` (the k of least variance).

    Raises:
        ValueError: a rank that the width or the number of rows does not allow, or activations without variance.

    Source: Section 2 of the paper (arXiv 2604.08764).
    """
    stream = moments.activations if isinstance(moments, Moments) else moments
    matrix = stream.covariance() if center else stream.second_moment() / stream.count
    variances, directions = torch.linalg.eigh(as_float64(matrix))
    floor = noise_floor(variances)
    variances, directions = variances.flip(0).clamp(min=0), directions.flip(1)
    total = float(variances.sum())
    # Rows that are all equal leave rounding noise of their mean, which is no variance.
    if total <= 1e-20 * float(stream.mean.square().sum()):
        raise ValueError(f"{stream.name}: all {stream.count} rows are equal, so they have no principal direction")
    k = _as_integer(rank, variances, stream, most=stream.count - 1 if center else stream.count)
    return Subspace(
        basis=directions[:, :k].contiguous(),
        centre=as_float64(stream.mean) if center else torch.zeros(stream.width, dtype=torch.float64),
        origin={
            "method": "pca" if center else "pca (not centred)",
            "fitted_on": stream.name,
            "rows": stream.count,
            "rank": k,
            "asked_rank": check_rank(rank),
            "variance_share": float(variances[:k].sum()) / total,
        },
        rivals=_rivals(variances, directions, k, floor),
    )


def noise_floor(eigenvalues: Float[Tensor, " d"]) -> float:
    """Below this, an eigenvalue of a covariance is rounding and not data.

    A covariance has no negative eigenvalue, so the most negative one that was computed shows how large rounding is
    (float32 products leave far more of it than the float64 sums do).
    """
    return max(1e-10 * float(eigenvalues.max()), -8 * float(eigenvalues.min()))


def check_rank(rank: int | float) -> int | float:
    """A rank that can mean something: a whole number from 1 on, or a variance share in (0, 1).

    Raises:
        ValueError: anything else.
    """
    if isinstance(rank, bool) or not isinstance(rank, numbers.Real) or not math.isfinite(rank):
        raise ValueError(f"rank {rank!r} must be a whole number, or a variance share between 0 and 1")
    if float(rank) == int(rank):
        if rank < 1:
            raise ValueError(f"rank {int(rank)} spans nothing; use 1 or more")
        return int(rank)
    if not 0 < rank < 1:
        raise ValueError(f"rank {rank} must be a whole number, or a variance share between 0 and 1")
    return float(rank)


def _as_integer(rank: int | float, variances: Tensor, stream: SecondMoments, most: int) -> int:
    rank = check_rank(rank)
    if rank < 1:
        shares = variances.cumsum(0) / variances.sum()
        return min(int((shares < rank).sum()) + 1, len(variances))
    k = int(rank)
    if k > stream.width:
        raise ValueError(f"rank {k} does not fit in {stream.width} dimensions; use rank <= {stream.width}")
    if k > most:
        raise ValueError(
            f"{stream.name}: {stream.count} rows determine at most {most} directions, rank {k} was asked; "
            "use more text or a smaller rank"
        )
    return k


def _rivals(
    variances: Float[Tensor, " d"], directions: Float[Tensor, "d d"], k: int, floor: float
) -> dict[str, Tensor]:
    d = len(variances)
    if 2 * k > d:
        return {}
    rivals = {}
    if variances[2 * k - 1] > floor:
        rivals["next"] = directions[:, k : 2 * k].contiguous()
    # Where even the dimension before them has no variance, which k directions are "the least" is chance.
    if variances[d - k - 1] > floor:
        rivals["trailing"] = directions[:, d - k :].contiguous()
    return rivals
