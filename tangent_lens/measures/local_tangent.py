"""The tangent space of a cloud of rows near its mean, and the two parts of a row beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tangent_lens.measures.cosine import checked_rows
from tangent_lens.subspaces.ranks import check_rank, resolve_rank

# Every direction of a tangent space needs some rows that it is fitted to.
ROWS_A_DIRECTION = 3
# Of the largest singular value of a regression's design, in units of the cloud.
_UNRESOLVED = 1e-6
# Of the radius. A normal part that is smaller is the rounding of float64.
ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class TangentParts:
    """Rows as seen from the foot of their mean.

    Attributes:
        radius: t = |x - foot| (n,).
        tangent: coordinates along the tangent space (n, m).
        normal: what is left of x - foot (n, d).
        profile: how the noise of the foot and of the tilt adds to that of the row itself, as a factor of |normal|^2 (n,).
    """

    radius: Float[Tensor, " n"]
    tangent: Float[Tensor, "n m"]
    normal: Float[Tensor, "n d"]
    profile: Float[Tensor, " n"]


@dataclass(frozen=True, eq=False)
class LocalTangent:
    """A tangent space of dimension m.

    Attributes:
        mean: of the rows (d,).
        foot: the point of the fitted surface over the mean (d,). The mean of a bent patch does not lie on it: on a sphere it is
            pulled inwards, and rows seen from there show no normal part that grows.
        basis: orthonormal columns (d, m).
        quadratic: ``full`` where every product of two tangent coordinates was fitted, ``round`` where the rows allow only
            their joint square.
        rows: behind the fit.
    """

    mean: Float[Tensor, " d"]
    foot: Float[Tensor, " d"]
    basis: Float[Tensor, "d m"]
    quadratic: str
    rows: int
    _first: Float[Tensor, "d m"]
    _noise: Float[Tensor, "m1 m1"]

    @property
    def dimension(self) -> int:
        """m."""
        return self.basis.shape[1]

    def parts(self, rows: Float[Tensor, "n d"]) -> TangentParts:
        """Rows, best others than those of the fit, split in two."""
        rows = rows.double()
        seen = rows - self.foot
        tangent = seen @ self.basis
        design = torch.cat([torch.ones(len(rows), 1, dtype=torch.float64), (rows - self.mean) @ self._first], dim=1)
        profile = 1 + ((design @ self._noise) * design).sum(dim=1)
        return TangentParts(seen.norm(dim=1), tangent, seen - tangent @ self.basis.T, profile)


def fit_local_tangent(rows: Float[Tensor, "n d"], m: int, *, nearest: float = 1.0) -> LocalTangent:
    """Tangent space at the foot of the mean: weighted PCA on the nearest rows, then a quadratic that takes curvature off.

    Rows weigh (1 - (t / t_k)^3)^3 (tricube), t from the mean and t_k that of the farthest row used. PCA gives a first basis; a
    weighted regression of what lies beside it on 1, the tangent coordinates and their products gives the foot (its constant)
    and the tilt (its linear part), which turns the basis. (Local quadratic fits: Cleveland and Devlin 1988; of tangent spaces:
    Aamari and Levrard 2019.)

    Args:
        rows: n points.
        m: dimension.
        nearest: share of the rows used, those nearest to the mean. Few are local and noisy; many less so.

    Raises:
        ValueError: m that the rows or the width do not allow, rows all equal, or a share outside (0, 1].
    """
    values = checked_rows(rows)
    mean = values.mean(dim=0)
    radius = (values - mean).norm(dim=1)
    weights = nearness(radius, nearest)
    used = int((weights > 0).sum())
    check_dimension(m, used, values.shape[1])
    # In units of the cloud, or powers of very small and very large coordinates would not be told from rounding.
    unit = unit_of(radius, weights)
    values = (values - mean) / unit
    centre = (weights @ values) / weights.sum()
    first = torch.linalg.svd((values - centre) * weights.sqrt()[:, None], full_matrices=False).Vh[:m].T
    coordinates = values @ first
    beside = values - coordinates @ first.T
    full = products(m) + 1 + m <= used // 3
    curved = squares(coordinates) if full else _joint_square(coordinates, weights)[:, None]
    design = torch.cat([torch.ones(len(values), 1, dtype=torch.float64), coordinates, curved], dim=1)
    solver = weighted_solver(design, weights)
    found, noise = solver @ beside, solver @ solver.T
    tilted = first + found[1 : 1 + m].T
    scales = torch.tensor([1.0] + [unit] * m, dtype=torch.float64)
    return LocalTangent(
        mean=mean,
        foot=mean + unit * found[0],
        basis=torch.linalg.qr(tilted).Q,
        quadratic="full" if full else "round",
        rows=used,
        _first=first,
        _noise=noise[: 1 + m, : 1 + m] / torch.outer(scales, scales),
    )


def crossed_parts(
    rows: Float[Tensor, "n d"], m: int, *, nearest: float = 1.0, seed: int = 0
) -> Iterator[tuple[LocalTangent, Int[Tensor, " half"], TangentParts]]:
    """Both halves of the rows, cut by the seed, each split by the tangent space fitted to the other.

    Yields:
        The tangent space, the places of the rows that it splits, and their parts.

    Raises:
        ValueError: what :func:`fit_local_tangent` refuses.
    """
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    half = len(rows) // 2
    for fitted, seen in ((order[:half], order[half:]), (order[half:], order[:half])):
        tangent = fit_local_tangent(rows[fitted], m, nearest=nearest)
        yield tangent, seen, tangent.parts(rows[seen])


def weighted_solver(design: Float[Tensor, "n p"], weights: Float[Tensor, " n"]) -> Float[Tensor, "p n"]:
    """From what lies beside the rows to the coefficients of weighted least squares.

    What the rows do not tell apart (many copies of few) gets no coefficient, rather than a huge one made of rounding.
    """
    root = weights.sqrt()[:, None]
    return torch.linalg.pinv(root * design, rtol=_UNRESOLVED) * root.T


def local_dimension(clouds: Sequence[Float[Tensor, "n d"]], m: int | float | str, *, nearest: float = 1.0) -> int:
    """One m for all clouds: a whole number as it is; of a share or a rule, the median of what it finds in each.

    Args:
        m: as the rank of :func:`fit_pca`: a whole number, a variance share in (0, 1), or a rule.

    Returns:
        At most what half the rows of the smallest cloud allow, and less than their width.

    Raises:
        ValueError: a whole number beyond that, or what the rules refuse.
    """
    m = check_rank(m)
    check_nearest(nearest)
    width, fewest = common_width(clouds), min(len(one) for one in clouds)
    limit = largest_dimension(m, fewest, width, nearest)
    return max(1, min(wanted_dimension(clouds, m, nearest=nearest), limit))


def largest_dimension(m: int | float | str, rows: int, width: int, nearest: float = 1.0) -> int:
    """What half of so many rows of such a width allow.

    Raises:
        ValueError: m is a whole number beyond that.
    """
    limit = min(_most_directions(int(nearest * (rows // 2))), width - 1)
    if isinstance(m, int) and m > limit:
        raise ValueError(
            f"m {m} needs {ROWS_A_DIRECTION} rows a direction in each half of a token's rows, and fewer than {width} "
            f"directions; use m <= {max(limit, 0)}, or more rows of each token"
        )
    return limit


def wanted_dimension(clouds: Sequence[Float[Tensor, "n d"]], m: int | float | str, *, nearest: float = 1.0) -> int:
    """What a share or a rule finds, the median over clouds, whether or not the rows allow so many directions.

    Raises:
        ValueError: as :func:`local_dimension`.
    """
    if isinstance(m, int):
        return m
    found = torch.tensor([_dimension_of(one, m, nearest) for one in clouds], dtype=torch.float64)
    return round(float(found.quantile(0.5)))


def _dimension_of(rows: Tensor, m: int | float | str, nearest: float) -> int:
    values = checked_rows(rows)
    weights = nearness((values - values.mean(dim=0)).norm(dim=1), nearest)
    centre = (weights @ values) / weights.sum()
    spectrum = torch.linalg.svdvals((values - centre) * weights.sqrt()[:, None]).square() / weights.sum()
    padded = torch.zeros(values.shape[1], dtype=torch.float64)
    padded[: len(spectrum)] = spectrum
    return resolve_rank(m, padded, max(int((weights > 0).sum()) - 1, 1))


def common_width(clouds: Sequence[Float[Tensor, "n d"]]) -> int:
    """The width of all clouds.

    Raises:
        ValueError: no clouds, rows that are not of shape (n, d), or widths that differ.
    """
    if not len(clouds):
        raise ValueError("no token's rows were given; lower the number of occurrences that a token needs")
    for one in clouds:
        if one.ndim != 2:
            raise ValueError(f"a token's rows must be of shape (n, d), not {tuple(one.shape)}")
    widths = {one.shape[1] for one in clouds}
    if len(widths) > 1:
        raise ValueError(f"rows of widths {sorted(widths)} lie in different spaces; measure one site at a time")
    return widths.pop()


def check_dimension(m: int, rows: int, width: int) -> None:
    """Refuse a dimension that leaves nothing beside it, or that so many rows do not determine.

    Raises:
        ValueError: as said.
    """
    if m < 1 or m >= width:
        raise ValueError(
            f"m {m} must lie between 1 and {width - 1}: rows of width {width} need a normal direction, too"
        )
    if m > _most_directions(rows):
        raise ValueError(
            f"m {m} with {rows} rows: use m <= {max(_most_directions(rows), 0)} ({ROWS_A_DIRECTION} rows a direction), "
            "or more rows"
        )


def check_nearest(nearest: float) -> None:
    """Refuse what is no share of the rows.

    Raises:
        ValueError: outside (0, 1].
    """
    if not 0 < nearest <= 1:
        raise ValueError(f"nearest {nearest} must lie in (0, 1]: a share of the rows")


def nearness(radius: Float[Tensor, " n"], nearest: float) -> Float[Tensor, " n"]:
    """Tricube weights of the nearest share of the rows; 0 beyond.

    Raises:
        ValueError: a share outside (0, 1], or all rows at the mean.
    """
    check_nearest(nearest)
    if not float(radius.max()) > 0:
        raise ValueError("all rows are equal, so they have no tangent; leave this token out")
    return tricube(radius, reach_of(radius, nearest))


def reach_of(radius: Float[Tensor, " n"], nearest: float) -> float:
    """The radius at which rows begin to weigh nothing."""
    ordered = radius.sort().values
    used = max(round(nearest * len(radius)), 1)
    # The farthest row used would weigh nothing on its own radius.
    return float(ordered[used]) if used < len(radius) else 1.05 * float(ordered[-1])


def tricube(radius: Float[Tensor, " n"], reach: float) -> Float[Tensor, " n"]:
    """(1 - (t / reach)^3)^3, 0 beyond the reach (Cleveland 1979)."""
    return (1 - (radius / max(reach, 1e-300)).clamp(max=1) ** 3) ** 3


def unit_of(radius: Float[Tensor, " n"], weights: Float[Tensor, " n"]) -> float:
    """Root mean square radius of the weighted rows.

    Raises:
        ValueError: all of these rows at the mean.
    """
    unit = float((weights @ radius.square() / weights.sum()).sqrt())
    if not unit > 0:
        raise ValueError(
            "the rows nearest to the mean are all equal, so they have no tangent; use a larger share of them"
        )
    return unit


def products(m: int) -> int:
    """How many products of two of m coordinates there are."""
    return m * (m + 1) // 2


def squares(coordinates: Float[Tensor, "n m"]) -> Float[Tensor, "n products"]:
    """Every product of two coordinates, as often as it occurs in u'Au: off the diagonal twice."""
    one, other = torch.triu_indices(coordinates.shape[1], coordinates.shape[1])
    twice = torch.where(one == other, 1.0, 2.0).double()
    return coordinates[:, one] * coordinates[:, other] * twice


def quadratic_design(coordinates: Float[Tensor, "n m"]) -> Float[Tensor, "n columns"]:
    """1, the coordinates and their :func:`squares`."""
    constant = torch.ones(len(coordinates), 1, dtype=torch.float64)
    return torch.cat([constant, coordinates, squares(coordinates)], dim=1)


def _joint_square(coordinates: Tensor, weights: Tensor) -> Tensor:
    """|u|^2 in units of the cloud's own tangent spread: stands for the products where these are too many."""
    spread = coordinates.T @ (weights[:, None] * coordinates) / weights.sum()
    return (coordinates @ torch.linalg.pinv(spread, hermitian=True) * coordinates).sum(dim=1)


def _most_directions(rows: int) -> int:
    return (rows - 2) // ROWS_A_DIRECTION
