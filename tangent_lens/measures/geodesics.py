"""Geodesics of a paraboloid from its apex: how long they are at a straight-line distance, and how they spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

_LONGEST_ARRAY = 2_000_000  # numbers in one array of Jacobi fields; more directions are done in turn
_SLOWEST = 0.05  # of dt/ds: below it, a geodesic is about to turn back
_DRIFT = 1e-6  # of the squared unit speed: above it, the steps were too long
_LIMIT = 1e150  # what can be squared


@dataclass(frozen=True, eq=False)
class Geodesics:
    """Geodesics of unit speed from the apex, one column a direction, one row a step; the first row is the apex.

    Attributes:
        directions: unit tangent vectors (N, m) they leave in.
        arc: arc length s (steps + 1, N).
        radius: straight-line distance t from the apex (steps + 1, N).
        slope: dt/ds (steps + 1, N), 1 at the apex.
        jacobian: determinant of the exponential map's derivative (steps + 1, N), 1 at the apex and 1 - Ric(v,v) s^2/6
            near it; s^(m-1) times it is the volume a direction and a unit of arc length hold. Not above 0 where
            neighbouring geodesics have crossed. None where it was not asked for.
        ends: tangent coordinates u (N, m) after the last step.
    """

    directions: np.ndarray
    arc: np.ndarray
    radius: np.ndarray
    slope: np.ndarray
    jacobian: np.ndarray | None
    ends: np.ndarray

    def __repr__(self) -> str:
        count, m = self.directions.shape
        return f"Geodesics({count} of dimension {m}, to arc length {self.arc.max():.4g}, {len(self.arc) - 1} steps)"


def geodesics(
    principal_curvatures: Float[np.ndarray, " m"] | Sequence[float],
    directions: Float[np.ndarray, "N m"],
    length: float,
    steps: int = 256,
    *,
    along: Literal["arc", "radius"] = "arc",
    jacobian: bool = True,
) -> Geodesics:
    """Geodesics of the paraboloid z = f(u) = ½ Σ κ_i u_i^2 from its apex, by Runge-Kutta steps of order 4.

    u'' = -∇f (u'^T K u') / (1 + |∇f|^2), the geodesic equation of a graph (its Christoffel symbols are
    Γ^k_ij = f_k f_ij / (1 + |∇f|^2)). Fields J_i = ∂u/∂v_i follow the linearised equation from J_i = 0, J_i' = e_i; the
    exponential map's derivative is J / s, its determinant in the surface's metric det(J / s) (1 + |∇f|^2)^½.

    Args:
        directions: unit vectors; length: how far to go, in the unit of one over the curvatures.
        along: steps even in ``"arc"`` length or in straight-line ``"radius"``.
        jacobian: whether to find it, which takes m^3 times as long.

    Raises:
        ValueError: directions that are no unit vectors of dimension m, a length or steps below what can be walked, steps
            too long to keep the speed at 1, or (along ``"radius"``) a geodesic that turns back before ``length`` (none was
            met: in trials from nearly flat to 1000 to 1, dt/ds stayed above 0.79).
    """
    curvatures = np.array(checked_curvatures(principal_curvatures))
    units = _checked_directions(directions, len(curvatures))
    check_positive(length, "length")
    if steps < 8:
        raise ValueError(f"{steps} steps are too few to follow a geodesic; use 8 or more")
    if along not in ("arc", "radius"):
        raise ValueError(f"steps run along 'arc' or 'radius', not {along!r}")
    # In units of the largest curvature, so that neither tiny nor huge ones leave the range of floating point.
    scale = float(np.abs(curvatures).max()) or 1.0
    if not 1 / _LIMIT < length * scale < _LIMIT:
        raise ValueError(f"a length of {length} and a curvature of {scale} leave the range of numbers; change the unit")
    at_once = max(1, _LONGEST_ARRAY // len(curvatures) ** 2) if jacobian else len(units)
    parts = [
        _walk(
            curvatures / scale,
            units[start : start + at_once],
            length * scale / steps,
            steps,
            along == "radius",
            jacobian,
        )
        for start in range(0, len(units), at_once)
    ]
    arc, radius, slope, volume, ends = (np.concatenate(part, axis=-1) for part in zip(*parts, strict=True))
    return Geodesics(units, arc / scale, radius / scale, slope, volume if jacobian else None, ends.T / scale)


def _walk(
    curvatures: np.ndarray, units: np.ndarray, step: float, steps: int, by_radius: bool, jacobian: bool
) -> tuple[np.ndarray, ...]:
    count, m = units.shape
    state = [np.zeros((count, m)), units, np.zeros(count)]
    if jacobian:
        state += [np.zeros((count, m, m)), np.broadcast_to(np.eye(m), (count, m, m))]
    rows = [(np.zeros(count), np.zeros(count), np.ones(count), np.ones(count))]
    for number in range(steps):
        state = _runge_kutta(state, curvatures, step, by_radius)
        _check_step(state, curvatures, number / steps, by_radius, steps)
        rows.append((state[2], *_radius_and_slope(state, curvatures), _exponential_determinant(state, curvatures)))
    arc, radius, slope, volume = (np.stack(row) for row in zip(*rows, strict=True))
    return arc, radius, slope, volume, state[0].T


def _runge_kutta(state: list[np.ndarray], curvatures: np.ndarray, step: float, by_radius: bool) -> list[np.ndarray]:
    def moved(rates: list[np.ndarray], by: float) -> list[np.ndarray]:
        return [one + by * rate for one, rate in zip(state, rates, strict=True)]

    first = _rates(state, curvatures, by_radius)
    second = _rates(moved(first, step / 2), curvatures, by_radius)
    third = _rates(moved(second, step / 2), curvatures, by_radius)
    last = _rates(moved(third, step), curvatures, by_radius)
    mean = [(a + 2 * b + 2 * c + d) / 6 for a, b, c, d in zip(first, second, third, last, strict=True)]
    return moved(mean, step)


def _rates(state: list[np.ndarray], curvatures: np.ndarray, by_radius: bool) -> list[np.ndarray]:
    place, speed = state[:2]
    gradient = curvatures * place
    metric = 1 + np.square(gradient).sum(axis=1)
    bend = (curvatures * np.square(speed)).sum(axis=1) / metric
    rates = [speed, -gradient * bend[:, None], np.ones(len(place))]
    if len(state) > 3:
        lean, turn = curvatures * state[3], curvatures * state[4]
        swing = 2 * (np.einsum("nj,nij->ni", speed, turn) - bend[:, None] * np.einsum("nj,nij->ni", gradient, lean))
        swing /= metric[:, None]
        rates += [state[4], -lean * bend[:, None, None] - swing[:, :, None] * gradient[:, None, :]]
    if by_radius:
        # Of a geodesic that turns back the step is refused afterwards; until then the rates stay finite.
        slope = np.maximum(_radius_and_slope(state, curvatures)[1], _SLOWEST / 2)
        rates = [rate / slope.reshape(-1, *[1] * (rate.ndim - 1)) for rate in rates]
    return rates


def _radius_and_slope(state: list[np.ndarray], curvatures: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    place, speed = state[:2]
    height = (curvatures * np.square(place)).sum(axis=1) / 2
    climb = (curvatures * place * speed).sum(axis=1)
    radius = np.sqrt(np.square(place).sum(axis=1) + np.square(height))
    outward = (place * speed).sum(axis=1) + height * climb
    return radius, np.divide(outward, radius, out=np.ones_like(radius), where=radius > 0)


def _exponential_determinant(state: list[np.ndarray], curvatures: np.ndarray) -> np.ndarray:
    if len(state) == 3:
        return np.ones(len(state[0]))
    metric = 1 + np.square(curvatures * state[0]).sum(axis=1)
    return np.linalg.det(state[3] / state[2][:, None, None]) * np.sqrt(metric)


def _check_step(state: list[np.ndarray], curvatures: np.ndarray, reached: float, by_radius: bool, steps: int) -> None:
    place, speed = state[:2]
    square = np.square(speed).sum(axis=1) + np.square((curvatures * place * speed).sum(axis=1))
    if not bool((np.abs(square - 1) < _DRIFT).all()):
        raise ValueError(
            f"{steps} steps are too long: after {reached:.1%} of the way the speed of a geodesic is no longer 1; use more "
            f"steps, or go less far"
        )
    if by_radius and bool((_radius_and_slope(state, curvatures)[1] < _SLOWEST).any()):
        raise ValueError(
            f"after {reached:.1%} of the way a geodesic turns back to the base point, and beyond that one radius has no "
            f"one arc length; go less far"
        )


def chord_arc(curvature: Float[np.ndarray, "*any"] | float, t: Float[np.ndarray, "*any"] | float) -> Any:
    """Arc length s = t + κ^2 t^3 / 24 + O(t^5) of a curve of curvature κ at straight-line distance t (broadcast).

    Inverse of the expansion t^2 = s^2 - κ^2 s^4 / 12 (do Carmo, "Differential Geometry of Curves and Surfaces", 1-5 and
    1-6); a curvature that changes along the curve adds a term of s^5 there.

    Raises:
        ValueError: a value that is not finite, or a negative distance.
    """
    bends, chords = np.asarray(curvature, dtype=np.float64), np.asarray(t, dtype=np.float64)
    if not (np.isfinite(bends).all() and np.isfinite(chords).all()) or (chords < 0).any():
        raise ValueError("curvatures must be finite, and distances finite and 0 or more")
    found = chords + np.square(bends) * chords**3 / 24
    return found if found.ndim else float(found)


def checked_curvatures(principal_curvatures: Any) -> tuple[float, ...]:
    """One float a dimension.

    Raises:
        ValueError: not of shape (m,), m of 1 or more, or not finite.
    """
    values = np.asarray(principal_curvatures, dtype=np.float64)
    if values.ndim != 1 or not values.size or not (np.abs(values) < _LIMIT).all():
        raise ValueError(
            f"principal curvatures must be 1 or more finite numbers, one a dimension, not {principal_curvatures!r}"
        )
    return tuple(values.tolist())


def check_positive(value: float, name: str) -> None:
    """Refuse what is not positive and finite, with a ValueError."""
    if not (np.isfinite(value) and value > 0):
        raise ValueError(f"a {name} of {value} reaches nowhere; it must be positive and finite")


def _checked_directions(directions: Any, m: int) -> np.ndarray:
    values = np.asarray(directions, dtype=np.float64)
    if values.ndim != 2 or values.shape[1] != m or not len(values):
        raise ValueError(f"directions must be of shape (N, {m}), one column a principal curvature, not {values.shape}")
    if not bool((np.abs(np.square(values).sum(axis=1) - 1) < 1e-9).all()):
        raise ValueError("directions must be unit vectors; divide each by its norm")
    return values
