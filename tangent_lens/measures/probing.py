"""Numbers of a matrix that only its products with random probes are known of, with their standard errors.

B is symmetric, positive-semidefinite and seen through products with standard normal probes w: E[w^T B w] = tr(B),
E[|B w|^2] = E[(w1^T B w2)^2] = tr(B^2), E[(w1^T B w2)(w2^T B w3)(w3^T B w1)] = tr(B^3). An approximation F F^T of B, made
from other probes than those it is compared on, takes most of the variance away: its own number is exact, and the probes
estimate only what it leaves. (Meyer, Musco, Musco, Woodruff 2021, "Hutch++", with a control variate in place of the
projection.) Two halves of the probes take turns, and both results are averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

_STEP = 1e-5


@dataclass(frozen=True, eq=False)
class Estimate:
    """A number, and what each probe contributes to its error.

    Attributes:
        influences: for each half of the probes, the contribution of each of its probes (n,); none where it is exact.
    """

    value: float
    influences: tuple[Float[Tensor, " n"], ...] = ()

    @property
    def standard_error(self) -> float:
        """As if both halves erred together, which is an upper bound of what averaging them leaves; 0 where exact."""
        errors = [float(one.std() / len(one) ** 0.5) for one in self.influences]
        return sum(errors) / len(errors) if errors else 0.0


def propagated(function: Callable[..., float], *estimates: Estimate) -> Estimate:
    """A smooth function of estimates from the same probes, its error to the first order."""
    values = [one.value for one in estimates]
    influences: tuple[Tensor, ...] = ()
    for place, one in enumerate(estimates):
        if not one.influences:
            continue
        step = _STEP * (abs(one.value) or 1.0)
        ends = [function(*values[:place], one.value + sign * step, *values[place + 1 :]) for sign in (1, -1)]
        slope = (ends[0] - ends[1]) / (2 * step)
        own = tuple(slope * part for part in one.influences)
        influences = tuple(a + b for a, b in zip(influences, own, strict=True)) if influences else own
    return Estimate(function(*values), influences)


@dataclass(frozen=True, eq=False)
class Fold:
    """Half of the probes, and an approximation of B made from the other half.

    Attributes:
        factor: F (d, r) with F F^T about B.
        probes: w (d, n), standard normal in the space that B acts on.
        gram: w^T B w (n, n).
        image_squares: |B w|^2 of each probe (n,); None where only the gram matrix is known.
    """

    factor: Float[Tensor, "d r"]
    probes: Float[Tensor, "d n"]
    gram: Float[Tensor, "n n"]
    image_squares: Float[Tensor, " n"] | None = None


def estimated_trace(folds: Sequence[Fold]) -> Estimate:
    """tr(B)."""
    return averaged(
        (fold.factor.square().sum(), fold.gram.diagonal() - (fold.factor.T @ fold.probes).square().sum(dim=0))
        for fold in folds
    )


def estimated_square(folds: Sequence[Fold]) -> Estimate:
    """tr(B^2) = |B|_F^2."""
    return averaged(map(_square, folds))


def _square(fold: Fold) -> tuple[Tensor, Tensor]:
    inner = fold.factor.T @ fold.factor
    along = fold.factor.T @ fold.probes
    base = inner.square().sum()
    if fold.image_squares is not None:
        return base, fold.image_squares - (along * (inner @ along)).sum(dim=0)
    pairs = _off_diagonal(fold.gram).square() - _off_diagonal(along.T @ along).square()
    means = pairs.sum(dim=1) / (len(pairs) - 1)
    # A mean over pairs: each probe takes part in two of its arguments (Hoeffding 1948).
    return base, 2 * means - means.mean()


def estimated_cube(folds: Sequence[Fold]) -> Estimate:
    """tr(B^3)."""
    return averaged(map(_cube, folds))


def _cube(fold: Fold) -> tuple[Tensor, Tensor]:
    inner = fold.factor.T @ fold.factor
    along = fold.factor.T @ fold.probes
    triples = _closed_triples(fold.gram) - _closed_triples(along.T @ along)
    return ((inner @ inner) * inner).sum(), 3 * triples - 2 * triples.mean()


def _closed_triples(gram: Tensor) -> Float[Tensor, " n"]:
    """For each probe, the mean of g_ij g_jl g_li over the pairs of others."""
    gram, n = _off_diagonal(gram), len(gram)
    return ((gram @ gram) * gram).sum(dim=1) / max((n - 1) * (n - 2), 1)


def _off_diagonal(gram: Tensor) -> Tensor:
    return gram - torch.diag(gram.diagonal())


def averaged(halves: object) -> Estimate:
    """From (exact number of the approximation, what each probe adds to it) of each half."""
    parts = list(halves)  # pyright: ignore[reportArgumentType, reportCallIssue]
    values = [float(base + rest.mean()) for base, rest in parts]
    return Estimate(sum(values) / len(values), tuple(rest - rest.mean() for _, rest in parts))
