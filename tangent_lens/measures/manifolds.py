"""Manifolds whose curvature at one point is known: where measures of local geometry can be checked against the truth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

# Coordinates (n, m) -> points (n, m+1) with the base point at 0, the tangent plane on the first m axes, and area (n,).
Chart = Callable[[Float[Tensor, "n m"]], tuple[Float[Tensor, "n e"], Float[Tensor, " n"]]]


@dataclass(frozen=True, eq=False)
class ManifoldSample:
    """Points of a manifold around its base point, which lies at 0.

    Attributes:
        rows: (n, d).
        tangent: (d, m) orthonormal basis of the true tangent space at the base point.
        normal: (d,) the direction in which the manifold bends.
        noise: standard deviation of what was added to every coordinate.
    """

    rows: Float[Tensor, "n d"]
    tangent: Float[Tensor, "d m"]
    normal: Float[Tensor, " d"]
    noise: float


@dataclass(frozen=True)
class Manifold:
    """A hypersurface of R^(m+1) near one of its points; made by one of the functions below its name.

    Attributes:
        principal_curvatures: m numbers at the base point, in one over length; what bends towards ``normal`` is positive.
        reach: beyond this extrinsic radius the chart does not go.
    """

    name: str
    principal_curvatures: tuple[float, ...]
    reach: float
    chart: Chart = field(repr=False)

    @property
    def dimension(self) -> int:
        """m."""
        return len(self.principal_curvatures)

    @classmethod
    def flat(cls, dimension: int = 2) -> Manifold:
        """A plane, or a space of more dimensions: no curvature."""
        return cls.paraboloid([0.0] * dimension, name="flat")

    @classmethod
    def sphere(cls, dimension: int = 2, radius: float = 1.0) -> Manifold:
        """A sphere: all curvatures 1 / radius."""
        _positive(radius, "radius")

        def chart(u: Tensor) -> tuple[Tensor, Tensor]:
            # From the pole, by arc length along u.
            angle = u.norm(dim=1, keepdim=True) / radius
            along = torch.where(angle > 0, torch.sin(angle) / angle.clamp(min=1e-300), torch.ones_like(angle))
            points = torch.cat([u * along, radius * (1 - torch.cos(angle))], dim=1)
            # The far hemisphere lies over the same tangent coordinates as the near one, and is left out.
            area = along[:, 0].abs() ** (_dimension(dimension) - 1)
            return points, torch.where(angle[:, 0] > math.pi / 2, 0.0, area)

        return cls("sphere", (1 / radius,) * _dimension(dimension), radius, chart)

    @classmethod
    def paraboloid(cls, curvatures: Sequence[float], *, name: str = "paraboloid") -> Manifold:
        """z = 1/2 sum of kappa_i u_i^2 around its apex, which may also be a saddle."""
        kappa = torch.tensor([float(one) for one in curvatures], dtype=torch.float64)
        _dimension(len(kappa))
        if not bool(torch.isfinite(kappa).all()):
            raise ValueError(f"curvatures {tuple(curvatures)} must be finite numbers")

        def chart(u: Tensor) -> tuple[Tensor, Tensor]:
            height = (u.square() @ kappa) / 2
            return torch.cat([u, height[:, None]], dim=1), (1 + (u * kappa).square().sum(dim=1)).sqrt()

        return cls(name, tuple(kappa.tolist()), math.inf, chart)

    @classmethod
    def torus(cls, ring: float = 2.0, tube: float = 1.0, angle: float = 0.0) -> Manifold:
        """A torus around the point at ``angle`` of its tube, 0 outside and pi inside.

        Curvatures 1 / tube and cos(angle) / (ring + tube cos(angle)).
        """
        _positive(tube, "tube")
        _positive(ring, "ring")
        if not ring > tube:
            raise ValueError(f"ring {ring} must be larger than tube {tube}; a torus crosses itself otherwise")
        if not math.isfinite(angle):
            raise ValueError(f"angle {angle} must be a finite number")

        def chart(u: Tensor) -> tuple[Tensor, Tensor]:
            turn, around = angle + u[:, 0] / tube, u[:, 1] / (ring + tube * math.cos(angle))
            distance = ring + tube * torch.cos(turn)
            x = distance * torch.cos(around) - (ring + tube * math.cos(angle))
            y = distance * torch.sin(around)
            z = tube * (torch.sin(turn) - math.sin(angle))
            upwards = z * math.cos(angle) - x * math.sin(angle)
            inwards = -x * math.cos(angle) - z * math.sin(angle)
            return torch.stack([upwards, y, inwards], dim=1), distance

        curvatures = (1 / tube, math.cos(angle) / (ring + tube * math.cos(angle)))
        # Farther than the width of its hole, a ball would hold both sides of it.
        return cls("torus", curvatures, min(tube, ring + tube * math.cos(angle)), chart)

    @classmethod
    def swiss_roll(cls, pitch: float = 1.0, angle: float = 2 * math.pi) -> Manifold:
        """r = pitch x angle, rolled out along an axis: curvatures (angle^2 + 2) / (pitch (angle^2 + 1)^1.5) and 0."""
        _positive(pitch, "pitch")
        _positive(angle, "angle")
        speed = pitch * math.hypot(1, angle)
        # Unit vector along the spiral at the base point, and the one towards the centre of its bend.
        along = torch.tensor(
            [math.cos(angle) - angle * math.sin(angle), math.sin(angle) + angle * math.cos(angle)], dtype=torch.float64
        ) / math.hypot(1, angle)
        inwards = torch.stack([-along[1], along[0]])

        def chart(u: Tensor) -> tuple[Tensor, Tensor]:
            phi = angle + u[:, 0] / speed
            base = pitch * angle * torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
            points = pitch * phi[:, None] * torch.stack([torch.cos(phi), torch.sin(phi)], dim=1) - base
            columns = [points @ along, u[:, 1], points @ inwards]
            return torch.stack(columns, dim=1), pitch * (1 + phi**2).sqrt()

        curvature = (angle**2 + 2) / (pitch * (angle**2 + 1) ** 1.5)
        return cls("swiss roll", (curvature, 0.0), pitch * min(angle, math.pi) / 2, chart)

    def sample(
        self,
        count: int,
        radius: float,
        *,
        d: int | None = None,
        noise: float = 0.0,
        within: str = "chord",
        seed: int = 0,
    ) -> ManifoldSample:
        """Points spread evenly over the surface, at most ``radius`` away from the base point.

        Args:
            within: how far away is measured: by the straight line (``chord``), or along the tangent plane only (``tangent``). A
                ball of chords holds less of the directions that bend away, and a regression on tangent radii notices.
            d: dimensions of the space, into which the manifold is turned at random; m + 1 or more.
            noise: standard deviation of independent normal noise on every one of the d coordinates.

        Raises:
            ValueError: a radius beyond the chart, d too small, or negative numbers.
        """
        m = self.dimension
        d = m + 1 if d is None else d
        if count < 1 or d < m + 1 or not 0 <= noise < math.inf:
            raise ValueError(
                f"count {count}, d {d} and noise {noise} must be 1 or more, {m + 1} or more, and 0 or more"
            )
        if within not in ("chord", "tangent"):
            raise ValueError(f"within {within!r} must be 'chord' or 'tangent'")
        if not 0 < radius <= self.reach:
            raise ValueError(
                f"radius {radius} must lie in (0, {self.reach:.4g}], which the chart of the {self.name} covers"
            )
        generator = torch.Generator().manual_seed(seed)
        points = self._points(count, radius, within, generator)
        frame = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64)).Q[:, : m + 1]
        rows = points @ frame.T + noise * torch.randn(count, d, generator=generator, dtype=torch.float64)
        return ManifoldSample(rows, frame[:, :m], frame[:, m], noise)

    def _points(self, count: int, radius: float, within: str, generator: torch.Generator) -> Float[Tensor, "n e"]:
        """By rejection: coordinates even in a box that holds the ball, accepted in proportion to the area they stand for."""
        # Inside their reach, arc length on these surfaces is at most pi/2 times the chord.
        side = radius * math.pi / 2
        measured = slice(None) if within == "chord" else slice(0, self.dimension)
        kept: list[Tensor] = []
        while sum(map(len, kept)) < count:
            u = (2 * torch.rand(4 * count + 64, self.dimension, generator=generator, dtype=torch.float64) - 1) * side
            points, area = self.chart(u)
            accepted = torch.rand(len(u), generator=generator, dtype=torch.float64) * area.max() <= area
            kept.append(points[accepted & (points[:, measured].norm(dim=1) <= radius)])
        return torch.cat(kept)[:count]


def _dimension(value: int) -> int:
    if value < 1:
        raise ValueError(f"dimension {value} must be 1 or more")
    return value


def _positive(value: float, name: str) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} {value} must be a positive number")
