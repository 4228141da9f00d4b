"""Which directions of a manifold of known curvature are seen from a base point, by how far from it the points lie.

The surface is the paraboloid z = ½ Σ κ_i u_i^2 in m + 1 dimensions, seen from its apex. Its geodesics are integrated, so
that what is found holds at every radius; the expansions near radius 0 stand beside it as ``predicted_ratio``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Float

from tangent_lens.measures.geodesics import check_positive, checked_curvatures, geodesics
from tangent_lens.showing import Shown

if TYPE_CHECKING:
    import pandas

Measure = Literal["arc", "volume"]


@dataclass(frozen=True, eq=False)
class CurvatureVisibility:
    """How often each direction is seen at given radii, against the curvature of the surface along it.

    Attributes:
        m: dimension of the surface; principal_curvatures: its κ at the apex.
        measure: ``"arc"`` or ``"volume"``, what the points are uniform in.
        radii: number of radii averaged over; mean_square_radius: E[t^2]; largest_radius: the longest.
        directions: unit tangent vectors (N, m); seed: of random ones; steps: of the integration.
        curvature: |κ(v)| of each (N,), in one over the unit of the radii.
        density: how often each is seen (N,), relative to uniform, of mean 1.
        ratio: mean κ(v)^2 of the directions seen over that of uniform directions; above 1, curved ones are over-seen.
        top_ratio: share of what is seen in the tenth of directions of the highest |κ|, over that tenth.
        predicted_ratio: ``ratio`` by the second-order expansion, 1 + E[t^2] cov(κ^2, q) / E[κ^2] over these directions.
    """

    m: int
    principal_curvatures: tuple[float, ...]
    measure: Measure
    radii: int
    mean_square_radius: float
    largest_radius: float
    directions: np.ndarray
    seed: int
    steps: int
    curvature: np.ndarray
    density: np.ndarray
    ratio: float
    top_ratio: float
    predicted_ratio: float

    def __repr__(self) -> str:
        curvatures = ", ".join(f"{one:g}" for one in self.principal_curvatures)
        return (
            f"CurvatureVisibility(κ = {curvatures}; {self.measure}; root mean square radius "
            f"{self.mean_square_radius**0.5:.4g}; ratio {self.ratio:.4f}, predicted {self.predicted_ratio:.4f})"
        )


@dataclass(frozen=True, eq=False, repr=False)
class VisibilitySweep(Shown):
    """The same surface, with points that crowd more and more around the base point.

    Attributes:
        concentrations: c of ``radii_of``, in the order given; 1 is the flat ball.
        largest: the largest radius, the same for all.
        results: one a concentration.
    """

    concentrations: tuple[float, ...]
    largest: float
    results: tuple[CurvatureVisibility, ...]

    def to_pandas(self) -> pandas.DataFrame:
        """One row a concentration."""
        import pandas

        names = ("mean_square_radius", "largest_radius", "ratio", "predicted_ratio", "top_ratio")
        rows = zip(self.concentrations, self.results, strict=True)
        return pandas.DataFrame(
            [{"concentration": c, **{name: getattr(one, name) for name in names}} for c, one in rows]
        )

    def plot(self) -> Any:
        """Chord and arc, the directions seen at fixed radii, and the ratio over concentrations (``plot`` extra)."""
        from tangent_lens.reports.visibility_plot import plot_visibility

        return plot_visibility(self)


def curvature_visibility(
    principal_curvatures: Float[np.ndarray, " m"] | Sequence[float],
    radii: Float[np.ndarray, " n"] | Sequence[float],
    *,
    measure: Measure = "arc",
    directions: int = 2000,
    seed: int = 0,
    steps: int = 256,
) -> CurvatureVisibility:
    """Which directions are seen at given straight-line radii (``curvature_visibility`` of section 9 of ``MEASUREMENTS``).

    With points uniform in direction and density s^(m-1) ds in arc length (``"arc"``), those at radius t have directions
    of density w(v; t) ∝ s^(m-1) ds/dt = t^(m-1) (1 + q t^2 + O(t^4)), q = (m+2) κ(v)^2 / 24: curved directions are
    over-represented, and the less so the nearer to 0 the radii are. With points uniform on the surface (``"volume"``), the
    Jacobian of the exponential map adds -Ric(v,v) / 6 to q, Ric(v,v) = tr(K) v'Kv - |Kv|^2 (Gauss equation).

    Where that holds (*ours*). In m = 2 Ric(v,v) is the same in all directions, and q stays. In m = 3 it weakens the
    effect or strengthens it (tr K near 0) and never undoes it: cov(κ^2, q) / var(κ^2), 5/24 without it, is at least 1/48
    (found numerically). From m = 4 on it can undo it: κ = (1, 1, 1, 0) and (1, -1, -1, -1) have ratios *below* 1, and all
    convex surfaces near a sphere have from m = 7 on, where q varies by (6 - m) / 12 times κ. A single curved direction,
    κ = (k, 0, .., 0), has Ric = 0. And all this is for t far below 1 / max|κ|: curvature falls off along the paraboloid,
    so from half that radius on the ratio falls behind ``predicted_ratio``, and far out it can be on the other side of
    1 in either measure.

    Radii are averaged over one by one, w(v; t) over its own mean over v: however many points lie at a radius, they share
    out over the directions. Time grows as ``steps * directions`` (times m^3 for ``"volume"``), memory as that product; the
    number of radii hardly matters, since w is interpolated between the steps (cubic, error of the order of steps^-4).

    Args:
        principal_curvatures: κ_1 .. κ_m, of any sign, not all 0; in one over the unit of the radii.
        radii: distances from the base point, such as |x - mean| of a token's occurrences.
        directions: how many; evenly spaced for m = 2, random for m >= 3, the two there are for m = 1.
        seed: of the random directions.
        steps: of the integration from 0 to the largest radius.

    Raises:
        ValueError: curvatures that are all 0, so that there is nothing to see; radii that are negative, not finite or all
            0, or where geodesics turn back or (for ``"volume"``) cross; too few directions or steps.
    """
    curvatures, distances = checked_curvatures(principal_curvatures), _checked_radii(radii)
    field = _field(curvatures, float(distances.max()), measure, directions, seed, steps)
    return field.seen_at(distances)


def visibility_by_concentration(
    principal_curvatures: Float[np.ndarray, " m"] | Sequence[float],
    concentrations: Sequence[float],
    largest: float,
    *,
    measure: Measure = "arc",
    directions: int = 2000,
    seed: int = 0,
    steps: int = 256,
    count: int = 1000,
) -> VisibilitySweep:
    """``curvature_visibility`` at ``count`` radii of each concentration of ``radii_of``. Geodesics are integrated once.

    Raises:
        ValueError: no concentration, or what ``radii_of`` and ``curvature_visibility`` refuse.
    """
    if not len(concentrations):
        raise ValueError("no concentration to look at; give one or more, such as (1, 3, 10, 30)")
    curvatures = checked_curvatures(principal_curvatures)
    radii = [radii_of(one, largest, len(curvatures), count) for one in concentrations]
    field = _field(curvatures, float(largest), measure, directions, seed, steps)
    return VisibilitySweep(
        concentrations=tuple(float(one) for one in concentrations),
        largest=float(largest),
        results=tuple(field.seen_at(one) for one in radii),
    )


def radii_of(concentration: float, largest: float, m: int, count: int = 1000) -> Float[np.ndarray, " count"]:
    """Quantiles of the radial density g(t) ∝ t^(m/c - 1) on 0 < t <= T, at (i + ½) / count: T ((i + ½) / count)^(c/m).

    Concentration c = 1 is the flat ball, t^(m-1); a larger one crowds near 0, E[t^2] = T^2 m / (m + 2c).

    Args:
        largest: T, in the unit of the radii.

    Raises:
        ValueError: a concentration or T that is not positive and finite, or an m or count below 1.
    """
    check_positive(concentration, "concentration")
    check_positive(largest, "largest radius")
    if m < 1 or count < 1:
        raise ValueError(f"{count} radii in dimension {m} are nothing to look at; use 1 or more of both")
    return largest * ((np.arange(count) + 0.5) / count) ** (concentration / m)


@dataclass(frozen=True, eq=False)
class _Field:
    """``shares`` (steps + 1, N): density of each direction at radii 0, ``step``, 2 ``step``, .., of mean 1 in a row."""

    principal_curvatures: tuple[float, ...]
    measure: Measure
    directions: np.ndarray
    seed: int
    step: float
    shares: np.ndarray

    def seen_at(self, radii: np.ndarray) -> CurvatureVisibility:
        density = _interpolation_weights(radii / self.step, len(self.shares)) @ self.shares
        scale = max(abs(one) for one in self.principal_curvatures)
        normal, order = _orders(self.principal_curvatures, self.directions, scale, self.measure)
        square, second = np.square(normal), float(np.square(radii * scale).mean())
        uniform = float(square.mean())
        # Deviations rather than products, so that a sphere is at 1 exactly.
        excess = float(((square - uniform) * (density - 1)).mean())
        expected = float(((square - uniform) * (order - order.mean())).mean()) * second
        top = np.argsort(-np.abs(normal), kind="stable")[: max(1, round(len(normal) / 10))]
        return CurvatureVisibility(
            m=len(self.principal_curvatures),
            principal_curvatures=self.principal_curvatures,
            measure=self.measure,
            radii=len(radii),
            mean_square_radius=float(np.square(radii).mean()),
            largest_radius=float(radii.max()),
            directions=self.directions,
            seed=self.seed,
            steps=len(self.shares) - 1,
            curvature=np.abs(normal) * scale,
            density=density,
            ratio=1 + excess / uniform,
            top_ratio=float(density[top].mean()),
            predicted_ratio=1 + expected / uniform,
        )


def _field(
    curvatures: tuple[float, ...], largest: float, measure: Measure, directions: int, seed: int, steps: int
) -> _Field:
    if measure not in ("arc", "volume"):
        raise ValueError(f"points are uniform in 'arc' or in 'volume', not in {measure!r}")
    if not any(curvatures):
        raise ValueError(
            "all principal curvatures are 0: a flat surface has no curvature to see; give one that is not 0"
        )
    m, by_volume = len(curvatures), measure == "volume"
    units = _spread_directions(m, directions, seed)
    paths = geodesics(curvatures, units, largest, steps, along="radius", jacobian=by_volume)
    stretch = np.ones_like(paths.arc)
    np.divide(paths.arc, paths.radius, out=stretch, where=paths.radius > 0)
    weight = stretch ** (m - 1) / paths.slope
    if paths.jacobian is not None:
        _check_uncrossed(paths.jacobian, largest / steps)
        weight *= paths.jacobian
    return _Field(curvatures, measure, units, seed, largest / steps, weight / weight.mean(axis=1, keepdims=True))


def _check_uncrossed(jacobian: np.ndarray, step: float) -> None:
    crossed = np.flatnonzero((jacobian <= 0).any(axis=1))
    if len(crossed):
        raise ValueError(
            f"at radius {crossed[0] * step:.4g} neighbouring geodesics from the base point cross, so beyond it a point has "
            f"more than one direction; use radii below, or measure='arc'"
        )


def _orders(
    curvatures: tuple[float, ...], units: np.ndarray, scale: float, measure: Measure
) -> tuple[np.ndarray, np.ndarray]:
    """Normal curvature and q of each direction, both in units of the largest curvature."""
    scaled, m = np.array(curvatures) / scale, len(curvatures)
    normal = np.square(units) @ scaled
    order = (m + 2) * np.square(normal) / 24
    if measure == "volume":
        order = order - (scaled.sum() * normal - np.square(units) @ np.square(scaled)) / 6
    return normal, order


def _interpolation_weights(places: np.ndarray, nodes: int) -> np.ndarray:
    """Mean over places (in steps from 0) of the cubic Lagrange weights of the four nodes around each."""
    start = np.clip(np.floor(places).astype(np.int64) - 1, 0, nodes - 4)
    total = np.zeros(nodes)
    for own in range(4):
        product = np.ones(len(places))
        for other in set(range(4)) - {own}:
            product *= (places - start - other) / (own - other)
        total += np.bincount(start + own, weights=product, minlength=nodes)
    return total / len(places)


def _spread_directions(m: int, count: int, seed: int) -> np.ndarray:
    if m == 1:
        return np.array([[1.0], [-1.0]])
    if count < 10:
        raise ValueError(f"{count} directions have no tenth of the highest curvature; use 10 or more")
    if m == 2:
        angles = 2 * np.pi * np.arange(count) / count
        return np.stack([np.cos(angles), np.sin(angles)], axis=1)
    drawn = np.random.default_rng(seed).standard_normal((count, m))
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def _checked_radii(radii: Any) -> np.ndarray:
    values = np.asarray(radii, dtype=np.float64)
    if values.ndim != 1 or not values.size:
        raise ValueError(f"radii must be of shape (n,), n of 1 or more, not {values.shape}")
    # Squares of longer ones overflow.
    if not ((values >= 0) & (values < 1e150)).all():
        raise ValueError("the radii hold NaN, infinity or a negative number; they are distances from the base point")
    if not values.any():
        raise ValueError("all radii are 0, at the base point itself, where no direction is seen; give longer ones")
    return values
