"""How the clouds of several tokens bend: what each one says, and their mean without the part of noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from scipy.stats import t as student
from torch import Tensor

from tangent_lens.measures.curvature import JointForm, bent_dimension, joint_form
from tangent_lens.measures.explained_normal import explained_share
from tangent_lens.measures.slopes import check_level
from tangent_lens.showing import Shown


@dataclass(frozen=True)
class CloudBend:
    """The rows of one token. Squares of vectors are products of two halves of the rows, so that noise averages to 0.

    Attributes:
        explained: held-out share of the normal variance that the quadratic explains; 0 without a normal part.
        square: mean of kappa(v)^2 over tangent directions v; mean_square: |H|^2.
        bend: mean of (|II(v, v)| |u| / 2)^2 over rows, v the direction in which the way to a row sets out, |u| its tangent
            radius.
        excess: mean of kappa(v)^2 t^2 / 24 over rows.
        near, far: mean of kappa(v)^2 over the nearer and the farther half of the rows, times the mean of t^2.
    """

    explained: float
    square: float
    mean_square: float
    bend: float
    excess: float
    near: float
    far: float


def cloud_bends(
    clouds: Mapping[int, Float[Tensor, "n d"]], m: int, *, nearest: float = 1.0, seed: int = 0
) -> dict[int, CloudBend]:
    """What each cloud says.

    Args:
        m: that the rows determine, see :func:`bent_dimension`.

    Raises:
        ValueError: what :func:`second_fundamental_form` refuses.
    """
    return {
        token: _bend_of(
            joint_form(rows, m, nearest=nearest, seed=seed),
            rows,
            explained_share(rows, m, nearest=nearest, seed=seed) or 0.0,
        )
        for token, rows in clouds.items()
    }


def _bend_of(joint: JointForm, rows: Tensor, explained: float) -> CloudBend:
    m = joint.basis.shape[1]
    traces, squared = float(torch.einsum("iikk->", joint.inner)), float(torch.einsum("ijij->", joint.inner))
    seen = joint.seen_by(rows)
    order = torch.argsort(seen.radius)
    half, scale = len(order) // 2, float(seen.radius.square().mean())
    return CloudBend(
        explained=explained,
        square=(traces + 2 * squared) / (m * (m + 2)),
        mean_square=traces / m**2,
        bend=float((seen.curvature * seen.tangent_radius.square()).mean()) / 4,
        excess=float((seen.curvature * seen.radius.square()).mean()) / 24,
        near=float(seen.curvature[order[:half]].mean()) * scale,
        far=float(seen.curvature[order[half:]].mean()) * scale,
    )


@dataclass(frozen=True, repr=False)
class CurvatureSummary(Shown):
    """How the clouds of several tokens bend.

    Attributes:
        m: tangent dimensions of the quadratic; fewer than were asked for where the rows do not determine its coefficients.
        tokens: behind it.
        explained: mean over tokens of the held-out share of normal variance that the quadratic explains; explained_low and
            explained_high: its interval (None for one token). A token without a normal part counts as 0.
        curvature: root mean square normal curvature over tangent directions, in one over length: of |II(v, v)|^2 averaged over v,
            without the part that noise adds; 0 where noise explains all of it. curvature_low, curvature_high: roots of the ends
            of its square's interval over tokens (None for one token); 0 below where the square may be 0.
        mean_curvature: root of the mean |H|^2, likewise.
        bend: root of the mean over rows of (|II(v, v)| |u| / 2)^2, v the direction in which the way to a row sets out and |u| its
            tangent radius: how far it lies off the tangent plane because of curvature, in units of |u|.
        arc_excess: mean of kappa(v)^2 t^2 / 24: how much longer the way along the surface is than the straight line.
    """

    name: str
    m: int
    tokens: int
    explained: float
    explained_low: float | None
    explained_high: float | None
    curvature: float
    curvature_low: float | None
    curvature_high: float | None
    mean_curvature: float
    bend: float
    arc_excess: float


def curvature_summary(
    clouds: Mapping[int, Float[Tensor, "n d"]],
    m: int,
    *,
    nearest: float = 1.0,
    level: float = 0.95,
    seed: int = 0,
    name: str = "tokens",
) -> CurvatureSummary:
    """Held-out share that a quadratic explains, and curvatures without the part of noise, averaged over tokens.

    Args:
        clouds: rows of each token.
        m: as for :func:`second_fundamental_form`; lowered to what half of the smallest cloud determines.

    Raises:
        ValueError: what :func:`bent_dimension` or :func:`second_fundamental_form` refuse, or a level outside (0, 1).
    """
    check_level(level)
    m = bent_dimension(clouds, m, nearest)
    bends = cloud_bends(clouds, m, nearest=nearest, seed=seed)
    return summarise_curvature(list(bends.values()), m, level=level, name=name)


def summarise_curvature(bends: Sequence[CloudBend], m: int, *, level: float, name: str) -> CurvatureSummary:
    """The mean over clouds."""
    explained, square = [one.explained for one in bends], [one.square for one in bends]
    low, high = _interval(explained, level)
    square_low, square_high = _interval(square, level)
    return CurvatureSummary(
        name=name,
        m=m,
        tokens=len(bends),
        explained=float(np.mean(explained)),
        explained_low=low,
        explained_high=high,
        curvature=_root(square),
        curvature_low=None if square_low is None else _root([square_low]),
        curvature_high=None if square_high is None else _root([square_high]),
        mean_curvature=_root([one.mean_square for one in bends]),
        bend=_root([one.bend for one in bends]),
        arc_excess=max(float(np.mean([one.excess for one in bends])), 0.0),
    )


def _root(values: Sequence[float]) -> float:
    return math.sqrt(max(float(np.mean(values)), 0.0))


def _interval(values: Sequence[float], level: float) -> tuple[float | None, float | None]:
    if len(values) < 2:
        return None, None
    half = float(student.ppf((1 + level) / 2, len(values) - 1)) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(np.mean(values)) - half, float(np.mean(values)) + half
