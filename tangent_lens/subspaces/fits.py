"""Fits: from moments to a concept subspace."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.recording.moments import Moments, SecondMoments
from tangent_lens.storage import as_float64
from tangent_lens.subspaces.ranks import check_rank, noise_floor, resolve_rank
from tangent_lens.subspaces.subspace import Subspace


def fit_pca(moments: Moments | SecondMoments, rank: int | float | str = 16, *, center: bool = True) -> Subspace:
    """The tangent proxy: the span of the k leading principal directions of activations.

    Args:
        moments: of the activations (of a :class:`Moments`, its activations are taken).
        rank: k as an integer, a share of the variance in (0, 1) that the subspace must reach, or a rule by its name
            (see :func:`tangent_lens.subspaces.ranks.rank_by`).
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
    eigenvalues, directions = torch.linalg.eigh(as_float64(matrix))
    floor = noise_floor(eigenvalues)
    variances, directions = eigenvalues.flip(0).clamp(min=0), directions.flip(1)
    total = float(variances.sum())
    # Rows that are all equal leave rounding noise of their mean, which is no variance.
    if total <= 1e-20 * float(stream.mean.square().sum()):
        raise ValueError(f"{stream.name}: all {stream.count} rows are equal, so they have no principal direction")
    k = _checked_rank(rank, eigenvalues, stream, most=stream.count - 1 if center else stream.count)
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


def _checked_rank(rank: int | float | str, eigenvalues: Tensor, stream: SecondMoments, most: int) -> int:
    try:
        k = resolve_rank(rank, eigenvalues, most)
    except ValueError as problem:
        raise ValueError(f"{stream.name}: {problem}") from None
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
