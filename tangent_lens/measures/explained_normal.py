"""How much of the normal part of rows a quadratic explains that was fitted to others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.measures.local_tangent import (
    ROUNDING,
    fit_local_tangent,
    nearness,
    quadratic_design,
    reach_of,
    tricube,
    unit_of,
    weighted_solver,
)

FOLDS = 5


@dataclass(frozen=True)
class ExplainedNormal:
    """How much of the normal variance of rows that were left out of the fit a quadratic explains.

    Attributes:
        share: 1 - squared error of the quadratic over that of the tangent plane alone; below 0 where it only fits noise.
        rows: predicted, each once.
    """

    share: float
    rows: int


def explained_normal(
    rows: Float[Tensor, "n d"], m: int, *, nearest: float = 1.0, folds: int = FOLDS, seed: int = 0
) -> ExplainedNormal:
    """Predict the normal part of each fold from the quadratic that the other folds give.

    Both the plane and the quadratic may have their own constant and linear part, so that only bending counts. Errors weigh as
    the rows of the fit do, by their nearness to its mean: a quadratic that is good near the mean may be anything far out.

    Raises:
        ValueError: fewer than two folds, too few rows for the fit, or rows without a normal part.
    """
    share = explained_share(rows, m, nearest=nearest, folds=folds, seed=seed)
    if share is None:
        raise ValueError("these rows have no normal part at all, so a quadratic has nothing to explain")
    return ExplainedNormal(share, len(rows))


def explained_share(
    rows: Float[Tensor, "n d"], m: int, *, nearest: float = 1.0, folds: int = FOLDS, seed: int = 0
) -> float | None:
    """As :func:`explained_normal`; None for rows without a normal part but rounding."""
    if folds < 2 or folds > len(rows):
        raise ValueError(f"{folds} folds of {len(rows)} rows: use between 2 and {len(rows)}")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    bent = plain = total = 0.0
    for fold in range(folds):
        out = order[fold::folds]
        kept = rows[torch.isin(torch.arange(len(rows)), out, invert=True)].double()
        tangent = fit_local_tangent(kept, m, nearest=nearest)
        if tangent.quadratic != "full":
            raise ValueError(f"{len(kept)} rows are too few for a quadratic of m {m}; use a smaller m, or more rows")
        radius = (kept - tangent.mean).norm(dim=1)
        weights = nearness(radius, nearest)
        unit = unit_of(radius, weights)
        fitted, seen = tangent.parts(kept), tangent.parts(rows[out])
        counted = tricube((rows[out].double() - tangent.mean).norm(dim=1), reach_of(radius, nearest))
        total += float(counted @ seen.radius.square())
        for columns in (slice(0, 1 + m), slice(None)):
            design = quadratic_design(fitted.tangent / unit)[:, columns]
            found = weighted_solver(design, weights) @ fitted.normal
            error = float(
                counted @ (seen.normal - quadratic_design(seen.tangent / unit)[:, columns] @ found).square().sum(dim=1)
            )
            if columns.stop is None:
                bent += error
            else:
                plain += error
    return 1 - bent / plain if plain > ROUNDING**2 * total else None
