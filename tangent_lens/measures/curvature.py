"""How a cloud of rows bends: its second fundamental form, from the normal part regressed on products of tangent coordinates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.measures.local_tangent import (
    check_nearest,
    common_width,
    fit_local_tangent,
    nearness,
    products,
    quadratic_design,
    unit_of,
    weighted_solver,
)


@dataclass(frozen=True, eq=False)
class SecondFundamentalForm:
    """II at the foot of a cloud: the normal part of a row at tangent coordinates u is 1/2 II(u, u).

    Attributes:
        foot: the point of the fitted surface over the mean (d,).
        basis: of the tangent space there (d, m).
        form: II(e_i, e_j) as vectors of the space (m, m, d), symmetric; in one over length.
        noise: variance of the coefficients for one unit of residual variance (products, products).
        residual: variance of what the quadratic leaves, summed over the d - m normal directions.
    """

    foot: Float[Tensor, " d"]
    basis: Float[Tensor, "d m"]
    form: Float[Tensor, "m m d"]
    noise: Float[Tensor, "p p"]
    residual: float

    @property
    def dimension(self) -> int:
        """m."""
        return self.basis.shape[1]

    @property
    def mean_curvature(self) -> Float[Tensor, " d"]:
        """H = 1/m sum II(e_i, e_i) (d,)."""
        return self.form.diagonal(dim1=0, dim2=1).mean(dim=-1)

    @property
    def mean_curvature_square(self) -> float:
        """|H|^2 without the part that noise adds to the square of a long vector; noise alone leaves it about 0, also below."""
        one, other = torch.triu_indices(self.dimension, self.dimension)
        picks = (one == other).double() / self.dimension
        return float(self.mean_curvature.square().sum()) - self.residual * float(picks @ self.noise @ picks)

    @property
    def square(self) -> float:
        """|II|^2 = sum |II(e_i, e_j)|^2, without the part that noise adds."""
        one, other = torch.triu_indices(self.dimension, self.dimension)
        times = torch.where(one == other, 1.0, 2.0).double()
        return float(self.form.square().sum()) - self.residual * float(times @ self.noise.diagonal())

    @property
    def scalar_curvature(self) -> float:
        """|tr II|^2 - |II|^2 (Gauss equation), without the parts that noise adds; m (m-1) / r^2 on a sphere."""
        return self.dimension**2 * self.mean_curvature_square - self.square

    @property
    def bending_direction(self) -> Float[Tensor, " d"]:
        """The unit normal along which the form is largest; it points to where the cloud bends on average (d,).

        Raises:
            ValueError: a form of zeros, which bends nowhere.
        """
        flat = self.form.flatten(0, 1)
        if not float(flat.abs().max()) > 0:
            raise ValueError("this second fundamental form is zero, so it bends in no direction")
        direction = torch.linalg.svd(flat, full_matrices=False).Vh[0]
        bent = torch.linalg.eigvalsh(self.form @ direction)
        return direction if float(bent.sum()) >= 0 else -direction

    def along(self, directions: Float[Tensor, "n m"]) -> Float[Tensor, "n d"]:
        """II(v, v) of tangent directions, which need not be of length 1."""
        return torch.einsum("ni,nj,ijd->nd", directions, directions, self.form)

    def principal_curvatures(self, direction: Float[Tensor, " d"] | None = None) -> Float[Tensor, " m"]:
        """Eigenvalues of the shape operator <II, direction>, the largest first (m,).

        Args:
            direction: a normal one of any length; :attr:`bending_direction` by default. Fitted to the same rows, that one also
                points to their noise: see the function :func:`principal_curvatures`.

        Raises:
            ValueError: a direction of length 0, or a form of zeros.
        """
        chosen = self.bending_direction if direction is None else direction.double()
        length = float(chosen.norm())
        if not length > 0:
            raise ValueError("a normal direction of length 0 has no shape operator; give another one")
        return torch.linalg.eigvalsh(self.form @ (chosen / length)).flip(0)


def second_fundamental_form(rows: Float[Tensor, "n d"], m: int, *, nearest: float = 1.0) -> SecondFundamentalForm:
    """Weighted least squares of the normal part on 1, the tangent coordinates and their products, at the foot of the mean.

    Args:
        rows: n points; 3 a coefficient, of which there are 1 + m + m (m+1) / 2.
        m, nearest: as of :func:`fit_local_tangent`.

    Raises:
        ValueError: too few rows, or what :func:`fit_local_tangent` refuses.
    """
    tangent = fit_local_tangent(rows, m, nearest=nearest)
    if tangent.quadratic != "full":
        raise ValueError(
            f"a quadratic of {m} tangent coordinates has {1 + m + products(m)} coefficients and needs 3 rows of each, not "
            f"{tangent.rows}; use a smaller m, or more rows"
        )
    values = rows.double()
    parts = tangent.parts(values)
    radius = (values - tangent.mean).norm(dim=1)
    weights = nearness(radius, nearest)
    unit = unit_of(radius, weights)
    design = quadratic_design(parts.tangent / unit)
    solver = weighted_solver(design, weights)
    found, spread = solver @ parts.normal, solver @ solver.T
    left = parts.normal - design @ found
    # Residuals are shorter than the noise: each fitted coefficient takes its share.
    freedom = float(weights.sum() - (weights[:, None] * design * solver.T).sum())
    residual = float((weights[:, None] * left.square()).sum()) / freedom
    form = torch.zeros(m, m, values.shape[1], dtype=torch.float64)
    one, other = torch.triu_indices(m, m)
    # The regression is on u_i u_j, twice off the diagonal; the normal part is half of II.
    form[one, other] = form[other, one] = 2 * found[1 + m :] / unit**2
    noise = 4 * spread[1 + m :, 1 + m :] / unit**4
    return SecondFundamentalForm(tangent.foot, tangent.basis, form, noise, residual)


def principal_curvatures(
    rows: Float[Tensor, "n d"], m: int, *, nearest: float = 1.0, seed: int = 0
) -> Float[Tensor, " m"]:
    """Curvatures along the bending direction, which one half of the rows gives and the other half is read along.

    So noise in that direction makes them smaller, and never larger, as it does where one half gives both. Noise in the form
    that is read still drives equal curvatures apart, as it does any eigenvalues.

    Returns:
        (m,), the largest first, averaged over the two ways round; in one over length.

    Raises:
        ValueError: as :func:`second_fundamental_form`, of half the rows.
    """
    one, other = (second_fundamental_form(half, m, nearest=nearest) for half in halves(rows, seed))
    first, second = one.bending_direction, other.bending_direction
    # A direction and its opposite serve one form equally well; both halves must mean the same one.
    second = second if float(first @ second) >= 0 else -second
    return (one.principal_curvatures(second) + other.principal_curvatures(first)) / 2


def halves(rows: Float[Tensor, "n d"], seed: int) -> tuple[Tensor, Tensor]:
    """The rows cut in two by the seed."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return rows[order[: len(rows) // 2]], rows[order[len(rows) // 2 :]]


def most_bent_dimension(rows: int, nearest: float = 1.0) -> int:
    """The largest m whose quadratic half of so many rows, or the nearest share of that half, determine; 0 where none."""
    half, m = round(nearest * (rows // 2)), 0
    while 3 * (2 + m + products(m + 1)) <= half:
        m += 1
    return m


def bent_dimension(clouds: Mapping[int, Float[Tensor, "n d"]], m: int, nearest: float = 1.0) -> int:
    """m, lowered to what half of the smallest cloud determines.

    Raises:
        ValueError: no clouds, widths that differ, m below 1, or so few rows in a cloud that they determine no quadratic.
    """
    common_width(list(clouds.values()))
    check_nearest(nearest)
    if m < 1:
        raise ValueError(f"m {m} must be 1 or more")
    fewest = min(len(one) for one in clouds.values())
    most = most_bent_dimension(fewest, nearest)
    if most < 1:
        raise ValueError(f"{fewest} rows of a token determine no quadratic; use {math.ceil(18 / nearest)} or more")
    return min(m, most)


@dataclass(frozen=True, eq=False)
class SeenDirections:
    """What the rows of a cloud see of its curvature.

    Attributes:
        radius: t from the foot (n,); tangent_radius: of its tangent part (n,).
        curvature: kappa(v)^2 of the direction v in which the way along the surface to each row sets out (n,). Below 0 where
            noise is larger than what is there.
    """

    radius: Float[Tensor, " n"]
    tangent_radius: Float[Tensor, " n"]
    curvature: Float[Tensor, " n"]


@dataclass(frozen=True, eq=False)
class JointForm:
    """Two second fundamental forms of one cloud, from half its rows each, in one tangent basis.

    Attributes:
        foot: between the two (d,); basis: (d, m).
        inner: <II(e_i, e_j), II'(e_k, e_l)> (m, m, m, m). Squares of II read off this have no part that noise adds, since the
            halves share none.
    """

    foot: Float[Tensor, " d"]
    basis: Float[Tensor, "d m"]
    inner: Float[Tensor, "m m m m"]

    def seen_by(self, rows: Float[Tensor, "n d"]) -> SeenDirections:
        """Curvature in the direction of every row.

        A way along the surface that sets out in direction v bends away from it: u = s v - s^3 / 6 S(v) + ..., with <S(v), e> =
        <II(v, v), II(v, e)>. The direction is turned back by that much; that of the chord sees less curvature than was there.
        """
        middle = rows.double() - self.foot
        coordinates = middle @ self.basis
        turned = coordinates + torch.einsum("ni,nj,nk,ijkl->nl", coordinates, coordinates, coordinates, self.inner) / 6
        unit = turned / turned.norm(dim=1, keepdim=True).clamp(min=1e-300)
        curvature = torch.einsum("ni,nj,nk,nl,ijkl->n", unit, unit, unit, unit, self.inner)
        return SeenDirections(middle.norm(dim=1), coordinates.norm(dim=1), curvature)


def joint_form(rows: Float[Tensor, "n d"], m: int, *, nearest: float = 1.0, seed: int = 0) -> JointForm:
    """The forms of both halves of the rows, against each other.

    Raises:
        ValueError: as :func:`second_fundamental_form`, of half the rows.
    """
    one, other = (second_fundamental_form(half, m, nearest=nearest) for half in halves(rows, seed))
    basis = torch.linalg.qr(one.basis + other.basis @ (other.basis.T @ one.basis)).Q
    first, second = (_in_basis(half, basis) for half in (one, other))
    inner = torch.einsum("ijd,kld->ijkl", first, second)
    return JointForm((one.foot + other.foot) / 2, basis, (inner + inner.permute(2, 3, 0, 1)) / 2)


def _in_basis(found: SecondFundamentalForm, joint: Tensor) -> Tensor:
    turn = found.basis.T @ joint
    return torch.einsum("ia,jb,ijd->abd", turn, turn, found.form)
