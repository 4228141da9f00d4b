"""Semi-nonnegative matrix factorisation: rows as sums, never differences, of a few directions of any sign."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.recording.row_sample import RowSample
from tangent_lens.subspaces.sampled import as_sample, checked_rows, sample_origin, span_of
from tangent_lens.subspaces.subspace import Subspace, unit_columns

# Codes stay above this: the updates multiply, so that a zero could never grow again. Rows are scaled to about 1.
_SMALLEST_CODE = 1e-16
_NOTHING = 1e-300
# Updates of the codes for each update of the directions. They cost n k^2 each, and their preparation n k d.
_CODE_UPDATES = 10
_CLUSTERING_ROUNDS = 5
# Directions for each of the rank in which the first part of the work is done.
_LEADING = 4


@dataclass(frozen=True, eq=False)
class SemiNmf:
    """A factorisation X ~ A D.

    Attributes:
        codes: A (n, k), not negative.
        directions: D (k, d), of any sign.
        relative_errors: |X - A D|_F / |X|_F before the first iteration and after each, none higher than the one before.
        converged: whether the last iteration gained less than the tolerance.
    """

    codes: Float[Tensor, "n k"]
    directions: Float[Tensor, "k d"]
    relative_errors: tuple[float, ...]
    converged: bool


def fit_semi_nmf(
    sample: RowSample | Float[Tensor, "n d"],
    rank: int,
    *,
    seed: int = 0,
    iterations: int = 300,
    tolerance: float = 3e-6,
    center: bool = False,
) -> Subspace:
    """The span of the directions of a semi-NMF X ~ A D with A >= 0.

    Args:
        sample: the rows.
        rank: how many directions, k.
        seed: of the first codes.
        iterations: at most.
        tolerance: stop when an iteration lowers |X - A D|_F by less than this share of it.
        center: take the mean off the rows first.

    Returns:
        A subspace whose ``directions`` are the rows of D, each of length 1 (A takes up any length), the one with the
        largest share in the reconstruction first; ``origin`` has iterations, relative_error and converged.

    Raises:
        ValueError: a rank that the rows do not allow, or directions that came out dependent.

    Source: Ding, Li and Jordan 2010, IEEE TPAMI 32(1), Section 2.
    """
    sample = as_sample(sample)
    rows, centre = checked_rows(sample, rank, center=center)
    found = semi_nmf(rows, rank, seed=seed, iterations=iterations, tolerance=tolerance)
    shares = found.codes.square().sum(dim=0) * found.directions.square().sum(dim=1)
    directions = unit_columns(found.directions[shares.argsort(descending=True)].T)
    origin = sample_origin(
        sample,
        "semi_nmf" if not center else "semi_nmf (centred)",
        seed=seed,
        iterations=len(found.relative_errors) - 1,
        relative_error=found.relative_errors[-1],
        converged=found.converged,
    )
    return span_of(directions, rank, centre, origin)


def semi_nmf(
    rows: Float[Tensor, "n d"], rank: int, *, seed: int = 0, iterations: int = 300, tolerance: float = 3e-6
) -> SemiNmf:
    """The factorisation itself: alternate the best D for A with multiplicative updates of A for D.

    The updates are equations 9 and 10 of the paper. A is updated several times for each D, as Gillis and Glineur 2012
    (Neural Computation 24(4)) do for NMF: what an update needs of the rows is then computed once. No step raises the
    error.

    Args:
        rows: X, float64, not all zero.
        rank: k.
        seed: of the first codes.
        iterations: at most.
        tolerance: stop when an iteration lowers the error by less than this share of it.

    Raises:
        ValueError: no iteration was asked for, or a tolerance below 0.
    """
    if iterations < 1 or not tolerance >= 0:
        raise ValueError(f"iterations={iterations} and tolerance={tolerance} must be 1 or more, and 0 or more")
    scale = rows.square().mean().sqrt()
    rows = rows / scale
    total = float(rows.square().sum())
    codes = _first_codes(rows, rank, seed)
    errors: list[float] = []
    directions, converged = rows[:0], False
    for view in (_leading_part(rows, _LEADING * rank), rows):
        directions, error = _best_directions(view, codes, total)
        errors[-1:] = [error]
        converged = False
        while len(errors) <= iterations and not converged:
            codes = _better_codes(view, codes, directions)
            directions, error = _best_directions(view, codes, total)
            converged = errors[-1] - error <= tolerance * errors[-1]
            errors.append(error)
    return SemiNmf(codes, directions * scale, tuple(errors), converged)


def _leading_part(rows: Float[Tensor, "n d"], count: int) -> Float[Tensor, "n r"]:
    """The rows in their leading principal directions, where nearly all of the work can be done at a lower price.

    What D' finds there has, as D = D'V^T, the same products with the codes in all d dimensions.
    """
    if count >= rows.shape[1]:
        return rows
    _, directions = torch.linalg.eigh(rows.T @ rows)
    return rows @ directions[:, -count:]


def _best_directions(
    rows: Float[Tensor, "n d"], codes: Float[Tensor, "n k"], total: float
) -> tuple[Float[Tensor, "k d"], float]:
    """D of least error for A, and the relative error that it leaves."""
    products = codes.T @ rows
    # The pseudo-inverse, as codes of two directions can come to be proportional.
    directions = torch.linalg.pinv(codes.T @ codes, hermitian=True) @ products
    left = total - float((directions * products).sum())
    return directions, max(left / total, 0.0) ** 0.5


def _better_codes(
    rows: Float[Tensor, "n d"], codes: Float[Tensor, "n k"], directions: Float[Tensor, "k d"]
) -> Float[Tensor, "n k"]:
    products, gram = rows @ directions.T, directions @ directions.T
    wanted, unwanted = products.clamp(min=0), (-products).clamp(min=0)
    raising, lowering = (-gram).clamp(min=0), gram.clamp(min=0)
    for _ in range(_CODE_UPDATES):
        above = torch.addmm(wanted, codes, raising)
        below = torch.addmm(unwanted, codes, lowering)
        # Only a direction of zeros, whose codes mean nothing, has nothing below.
        ratio = above.div_(below.clamp_(min=_NOTHING)).sqrt_()
        codes = ratio.mul_(codes).clamp_(min=_SMALLEST_CODE)
    return codes


def _first_codes(rows: Float[Tensor, "n d"], rank: int, seed: int) -> Float[Tensor, "n k"]:
    """Cluster membership plus 0.2, as the paper starts."""
    generator = torch.Generator().manual_seed(seed)
    lengths = rows.square().sum(dim=1)
    centres = _spread_centres(rows, lengths, rank, generator)
    member = rows.new_zeros(len(rows), rank)
    for _ in range(_CLUSTERING_ROUNDS):
        nearest = (centres.square().sum(dim=1) - 2 * (rows @ centres.T)).argmin(dim=1)
        member = (nearest[:, None] == torch.arange(rank)).to(rows.dtype)
        counts = member.sum(dim=0)[:, None]
        centres = torch.where(counts > 0, (member.T @ rows) / counts.clamp(min=1), centres)
    return member + 0.2


def _spread_centres(
    rows: Float[Tensor, "n d"], lengths: Float[Tensor, " n"], rank: int, generator: torch.Generator
) -> Float[Tensor, "k d"]:
    """Rows far from one another (k-means++: Arthur and Vassilvitskii 2007)."""
    chosen = [int(torch.randint(len(rows), (1,), generator=generator))]
    distances = torch.full_like(lengths, torch.inf)
    while len(chosen) < rank:
        latest = rows[chosen[-1]]
        distances = torch.minimum(distances, (lengths + latest.square().sum() - 2 * (rows @ latest)).clamp(min=0))
        # Where all rows are already chosen, any will do.
        weights = distances if float(distances.sum()) > 0 else torch.ones_like(distances)
        cumulated = weights.cumsum(0)
        drawn = torch.rand(1, generator=generator, dtype=rows.dtype) * cumulated[-1]
        chosen.append(min(int(torch.searchsorted(cumulated, drawn)), len(rows) - 1))
    return rows[chosen]
