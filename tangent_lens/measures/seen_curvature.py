"""Which curvature the directions of a token's occurrences show, near its mean and far from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor

from tangent_lens.measures.curvature import bent_dimension
from tangent_lens.measures.curvature_summary import CloudBend, cloud_bends
from tangent_lens.measures.slopes import RESAMPLES, check_level, check_resamples
from tangent_lens.showing import Shown


@dataclass(frozen=True, repr=False)
class SeenCurvature(Shown):
    """Mean kappa(v)^2 of the directions seen by the farther half of each token's rows, over that by the nearer half.

    Above 1, directions of high curvature are over-represented far out, as the chord-arc expansion expects
    (:func:`curvature_visibility`); but so they are where the rows spread most along directions that bend.

    Attributes:
        near, far: mean kappa^2 t0^2, t0 the root mean square radius of the token; no unit. Without the part that noise adds.
        ratio: far / near; low, high: its interval by resampling tokens. None where the nearer half shows no curvature above
            noise.
    """

    name: str
    m: int
    tokens: int
    near: float
    far: float
    ratio: float | None
    low: float | None
    high: float | None
    level: float


def seen_curvature(
    clouds: Mapping[int, Float[Tensor, "n d"]],
    m: int,
    *,
    nearest: float = 1.0,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
    name: str = "tokens",
) -> SeenCurvature:
    """The statistic of ``curvature_visibility`` on rows whose manifold is not known.

    The second fundamental form comes from two halves of each token's rows, whose product has no part that noise adds.

    Args:
        clouds: rows of each token.
        m: as of :func:`curvature_summary`.

    Raises:
        ValueError: as :func:`curvature_summary`, or no resamples.
    """
    check_level(level)
    check_resamples(resamples)
    m = bent_dimension(clouds, m, nearest)
    bends = cloud_bends(clouds, m, nearest=nearest, seed=seed)
    return summarise_seen(list(bends.values()), m, level=level, resamples=resamples, seed=seed, name=name)


def summarise_seen(
    bends: Sequence[CloudBend], m: int, *, level: float, resamples: int = RESAMPLES, seed: int = 0, name: str
) -> SeenCurvature:
    """The ratio of the means over clouds."""
    pairs = np.array([(one.near, one.far) for one in bends])
    near, far = pairs.mean(axis=0)
    weights = np.random.default_rng(seed).multinomial(len(pairs), np.full(len(pairs), 1 / len(pairs)), size=resamples)
    draws = weights @ pairs / len(pairs)
    # Where a resample shows no curvature near the mean, the ratio may be anything.
    shown = bool(near > 0) and len(pairs) > 1 and bool((draws[:, 0] > 0).mean() >= level)
    ratio = float(far / near) if shown or (len(pairs) == 1 and near > 0) else None
    low = high = None
    if shown:
        kept = draws[draws[:, 0] > 0]
        low, high = (float(one) for one in np.quantile(kept[:, 1] / kept[:, 0], [(1 - level) / 2, (1 + level) / 2]))
    return SeenCurvature(name, m, len(pairs), float(near), float(far), ratio, low, high, level)
