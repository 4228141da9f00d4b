"""IsoScore* and what removing a subspace does to it. O(d^2) a score, O(d^2 k) a removal, no eigendecomposition."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.measures.energy import monte_carlo_p
from tangent_lens.measures.matrices import CANCELLATION, checked_symmetric, times_frames, without
from tangent_lens.showing import Shown
from tangent_lens.storage import as_float64
from tangent_lens.subspaces.controls import normal_frame_batches
from tangent_lens.subspaces.subspace import Subspace


@dataclass(frozen=True, repr=False)
class IsotropyTest(Shown):
    """IsoScore* of a covariance and its change when the tangent, or a normal control, is removed.

    Attributes:
        score: IsoScore*(C), 0 for one direction, 1 for a multiple of the identity.
        delta: IsoScore* after removing the tangent minus ``score``.
        random: the same for each random normal.
        p_value: (1 + #{random >= delta}) / (m + 1).
        trailing: the same for the least-variance directions; None if the fit could not determine them.
        shrinkage: zeta of the shrinkage towards the trace-matched identity, 0 for none.
        dimension: d after a removal counts as ``ambient`` (d) or ``complement`` (d - k).
        standard_error, delta_standard_error: of ``score`` and ``delta`` where a sketch estimated them; None where exact.
    """

    score: float
    delta: float
    random: tuple[float, ...]
    p_value: float
    trailing: float | None
    shrinkage: float
    dimension: str
    standard_error: float | None = None
    delta_standard_error: float | None = None

    @property
    def random_mean(self) -> float:
        """Mean change when a random normal is removed."""
        return sum(self.random) / len(self.random)


def iso_score(
    covariance: Float[Tensor, "d d"], *, shrinkage: float = 0.0, reference: Float[Tensor, "d d"] | None = None
) -> float:
    """IsoScore*(C) = (PR - 1) / (d - 1), with PR = tr(C)^2 / |C|_F^2 the participation ratio.

    The identity replaces the published recipe's eigendecomposition and is exact (Rudman and Eickhoff, "Stable
    Anisotropic Regularization", ICLR 2024).

    Args:
        covariance: C.
        shrinkage: zeta in [0, 1]: (1 - zeta) C + zeta C_0.
        reference: C_0; the identity times tr(C)/d by default, so that the score does not depend on the scale of the data.

    Raises:
        ValueError: C is zero, not finite, not square, or smaller than 2 x 2; or zeta is outside [0, 1].
    """
    check_shrinkage(shrinkage)
    if reference is not None:
        own, other = as_float64(covariance), as_float64(reference)
        if other.shape != own.shape:
            raise ValueError(f"the reference is {tuple(other.shape)}, the covariance {tuple(own.shape)}")
        return iso_score((1 - shrinkage) * own + shrinkage * other)
    matrix = _checked(covariance)
    trace, square = _trace_and_square(matrix)
    return score_of(trace, shrunk(square, trace, len(matrix), shrinkage), len(matrix))


def iso_score_without(
    covariance: Float[Tensor, "d d"],
    frames: Float[Tensor, "m d k"],
    *,
    shrinkage: float = 0.0,
    dimension: str = "ambient",
) -> Float[Tensor, " m"]:
    """IsoScore* of (I - QQ^T) C (I - QQ^T) for each orthonormal frame Q, without forming any of these matrices.

    tr C' = tr C - tr(Q^T C Q) and |C'|_F^2 = |C|_F^2 - 2 |C Q|_F^2 + |Q^T C Q|_F^2.

    Raises:
        ValueError: as :func:`iso_score`; or a removal that leaves no variance, or an unknown ``dimension``.
    """
    if dimension not in ("ambient", "complement"):
        raise ValueError(f"dimension {dimension!r} must be 'ambient' (d) or 'complement' (d - k)")
    matrix, frames = _checked(covariance), as_float64(frames)
    check_shrinkage(shrinkage)
    if frames.ndim != 3 or frames.shape[1] != len(matrix):
        raise ValueError(
            f"frames are (m, {len(matrix)}, k), not of shape {tuple(frames.shape)}; one basis is basis[None]"
        )
    d, k = frames.shape[1:]
    left = d if dimension == "ambient" else d - k
    if left < 2:
        raise ValueError(f"removing {k} of {d} dimensions leaves {left}; isotropy needs at least 2")
    total, whole = _trace_and_square(matrix)
    through = times_frames(matrix, frames)
    inside = frames.transpose(1, 2) @ through
    traces = total - inside.diagonal(dim1=1, dim2=2).sum(dim=1)
    squares = whole - 2 * through.square().sum(dim=(1, 2)) + inside.square().sum(dim=(1, 2))
    for place in torch.nonzero(traces < CANCELLATION * total).flatten().tolist():
        rest = without(matrix, frames[place])
        traces[place], squares[place] = rest.diagonal().sum(), rest.square().sum()
    if bool((traces <= 1e-12 * total).any()):
        raise ValueError(f"removing {k} directions leaves no variance, so no isotropy; use a smaller rank")
    return torch.stack(
        [
            torch.tensor(score_of(float(t), shrunk(float(s), float(t), left, shrinkage), left), dtype=torch.float64)
            for t, s in zip(traces, squares, strict=True)
        ]
    )


def isotropy_test(
    covariance: Float[Tensor, "d d"],
    tangent: Subspace,
    *,
    controls: int | Float[Tensor, "m d k"] = 20,
    seed: int = 0,
    shrinkage: float = 0.0,
    dimension: str = "ambient",
    name: str = "this covariance",
) -> IsotropyTest:
    """Whether removing the tangent changes isotropy more than removing a normal subspace of the same rank.

    Args:
        covariance: of gradient rows, of the rows of a weight gradient, or of activations.
        controls: how many random normals to draw (a batch at a time, in bounded memory), or frames already drawn.
        name: what errors call it.

    Raises:
        ValueError: as :func:`iso_score_without`, or 2k > d.
    """
    _checked(covariance, name)
    batches = normal_frame_batches(tangent, controls, seed)
    options = {"shrinkage": shrinkage, "dimension": dimension}
    score = iso_score(covariance, shrinkage=shrinkage)
    delta = float(iso_score_without(covariance, tangent.basis[None], **options)[0]) - score
    after = torch.cat([iso_score_without(covariance, frames, **options) for frames in batches])
    random = tuple((after - score).tolist())
    trailing = tangent.rivals.get("trailing")
    return IsotropyTest(
        score=score,
        delta=delta,
        random=random,
        p_value=monte_carlo_p(delta, random),
        trailing=None
        if trailing is None
        else float(iso_score_without(covariance, trailing[None], **options)[0]) - score,
        shrinkage=shrinkage,
        dimension=dimension,
    )


def score_of(trace: float, square: float, d: int) -> float:
    """IsoScore* from tr(C) and |C|_F^2."""
    return min(max((trace**2 / square - 1) / (d - 1), 0.0), 1.0)


def shrunk(square: float, trace: float, d: int, zeta: float) -> float:
    """|(1 - zeta) C + zeta tr(C)/d I|_F^2; the trace stays as it is."""
    return (1 - zeta) ** 2 * square + (2 * zeta * (1 - zeta) + zeta**2) * trace**2 / d


def _trace_and_square(matrix: Tensor) -> tuple[float, float]:
    return float(matrix.diagonal().sum()), float(matrix.square().sum())


def _checked(covariance: Tensor, name: str = "this covariance") -> Tensor:
    matrix = checked_symmetric(covariance, name, "has no variance, so it has no isotropy; the rows are all equal")
    if len(matrix) < 2:
        raise ValueError("isotropy needs at least 2 dimensions; this covariance has 1")
    # No score depends on the scale; at trace 1 no square under- or overflows.
    return matrix / matrix.diagonal().sum()


def check_shrinkage(zeta: float) -> None:
    """Refuse a zeta outside [0, 1]."""
    if not 0 <= zeta <= 1:
        raise ValueError(f"shrinkage {zeta} must lie between 0 (none) and 1")
