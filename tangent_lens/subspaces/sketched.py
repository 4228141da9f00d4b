"""Principal directions from a sketch of the covariance: one product C W instead of C itself."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.recording.sketch import SketchedMoments, gaussian_directions
from tangent_lens.storage import as_float64
from tangent_lens.subspaces.ranks import check_whole_rank, known_rank, noise_floor
from tangent_lens.subspaces.subspace import Subspace

# Columns of the range finder, a direction of the fit. On 15 sites of SmolLM2-135M (d = 576, k = 16, spectra that fall
# slowly), one pass with Gaussian columns overlaps the exact fit by 0.75 to 0.93 at 4 a direction and by 0.984 to 0.999 at
# 16; after one power iteration, which takes a second pass, by 0.995 and more at 6 and by 0.998 and more at 8.
COLUMNS_A_DIRECTION, FEWEST_COLUMNS = 8, 64


def sketch_columns(rank: int, width: int) -> int:
    """How many columns the test matrix of a fit has."""
    return min(max(COLUMNS_A_DIRECTION * rank, FEWEST_COLUMNS), width)


def check_sketched_rank(rank: int | float | str) -> int:
    """A rank that a sketch can serve.

    Raises:
        ValueError: a share or a rule, which needs the whole spectrum.
    """
    if not isinstance(known_rank(rank), int):
        raise ValueError(
            f"rank {rank!r} needs the whole spectrum, and a sketch holds its leading part only; give a whole number, or "
            "statistics='exact'"
        )
    return check_whole_rank(rank)


def range_directions(sketch: SketchedMoments, *, center: bool = True) -> Float[Tensor, "d w"]:
    """Orthonormal directions that span what a first sketch saw, C W (or M W): the test matrix of a second pass.

    One power iteration of the randomised range finder (Halko, Martinsson, Tropp 2011, Algorithm 4.3).
    """
    return torch.linalg.qr(as_float64(sketch.through if center else sketch.second_moment_through())).Q


def fit_sketched_pca(sketch: SketchedMoments, rank: int = 16, *, center: bool = True) -> Subspace:
    """The span of the k leading principal directions, as far as a sketch shows it.

    The Nystroem approximation (C W)(W^T C W)^+ (C W)^T is at most C and is exact along W; its leading eigenvectors are the
    directions, its leading eigenvalues lower bounds of C's.

    Args:
        sketch: of activations. Gaussian directions are a start; :func:`range_directions` of a first sketch are far better.
        rank: k, a whole number.
        center: False uses the second moment about zero instead of the covariance.

    Returns:
        A subspace with its rival ``next`` where the sketch determines it; the directions of least variance are beyond it.

    Raises:
        ValueError: a rank that is no whole number, or that the sketch or the rows do not determine; rows all equal.

    Source: Tropp, Yurtsever, Udell, Cevher 2017, "Fixed-rank approximation of a positive-semidefinite matrix from streaming
    data", Algorithm 3; a cut at the noise of W^T C W takes the place of its shift.
    """
    k = check_sketched_rank(rank)
    through = sketch.covariance_through() if center else sketch.second_moment_through() / sketch.count
    total = sketch.total_variance() if center else sketch.square_total() / sketch.count
    if total <= 1e-20 * float(sketch.mean.square().sum()) or not total > 0:
        raise ValueError(f"{sketch.name}: all {sketch.count} rows are equal, so they have no principal direction")
    factor = nystroem(*orthonormal(as_float64(sketch.directions), as_float64(through)))
    directions, values, _ = torch.linalg.svd(factor, full_matrices=False)
    variances = values.square()
    known = int((variances > noise_floor(variances)).sum())
    most = min(known, sketch.count - 1 if center else sketch.count)
    if k > most:
        raise ValueError(
            f"{sketch.name}: {sketch.count} rows seen through {sketch.through.shape[1]} directions determine at most "
            f"{most} of their own, rank {k} was asked; use more text or a smaller rank"
        )
    return Subspace(
        basis=directions[:, :k].contiguous(),
        centre=as_float64(sketch.mean) if center else torch.zeros(sketch.width, dtype=torch.float64),
        origin={
            "method": "pca (sketched)" if center else "pca (sketched, not centred)",
            "fitted_on": sketch.name,
            "rows": sketch.count,
            "rank": k,
            "asked_rank": k,
            "columns": sketch.through.shape[1],
            "variance_share": float(variances[:k].sum()) / total,
        },
        rivals={"next": directions[:, k : 2 * k].contiguous()} if 2 * k <= min(known, sketch.width) else {},
    )


def fit_directions(width: int, rank: int, seed: int) -> Float[Tensor, "width w"]:
    """The Gaussian test matrix of the first pass of a fit, the same for all sites of one width."""
    return gaussian_directions(width, sketch_columns(rank, width), f"{seed}/fit")


def orthonormal(directions: Float[Tensor, "d w"], through: Float[Tensor, "d w"]) -> tuple[Tensor, Tensor]:
    """P and A P, from W and A W: orthonormal columns of the same span, dependent ones left out."""
    basis, values, mixing = torch.linalg.svd(directions, full_matrices=False)
    kept = values > 1e-9 * values[0]
    return basis[:, kept], through @ (mixing.T[:, kept] / values[kept])


def nystroem(basis: Float[Tensor, "d w"], through: Float[Tensor, "d w"]) -> Float[Tensor, "d r"]:
    """F with F F^T = (A P)(P^T A P)^+ (A P)^T for a positive-semidefinite A and orthonormal P.

    Directions along which P^T A P is no more than rounding are left out.
    """
    core = basis.T @ through
    values, vectors = torch.linalg.eigh((core + core.T) / 2)
    kept = values > max(noise_floor(values), 0.0)
    return through @ (vectors[:, kept] / values[kept].sqrt())
