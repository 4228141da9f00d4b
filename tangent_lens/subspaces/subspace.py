"""A concept subspace: an orthonormal basis, the centre it was fitted about, and where it came from."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.sites import SiteSelection
from tangent_lens.storage import as_float64, load_tensors, save_tensors

if TYPE_CHECKING:
    from tangent_lens.subspaces.interventions import HoldsModel

# Rounding of a float64 orthonormalisation; a basis further off than this was not orthonormalised at all.
_ORTHONORMALITY = 1e-8


@dataclass(frozen=True, eq=False)
class Subspace:
    """k orthonormal directions of a d-dimensional space.

    Attributes:
        basis: Q (d, k), orthonormal columns, float64.
        centre: the point it was fitted about (d,); zeros if it was not centred.
        origin: how it was made, in plain values (method, rows, rank, share of variance ...).
        rivals: other directions known from the same fit, each (d, k) and orthogonal to Q:
            ``next`` (principal directions k+1..2k) and ``trailing`` (those of least variance).
            A rival that the fitted rows do not determine is absent.
        directions: the fit's own directions (d, m), whose span is the basis: neither orthogonal nor of one length, and
            more than k where they are dependent, such as centred class means. None where the basis is all there is.

    Raises:
        ValueError: a basis that is not (d, k) with 1 <= k <= d, not finite, or not orthonormal, or directions that are
            not finite columns of the same width.
    """

    basis: Float[Tensor, "d k"]
    centre: Float[Tensor, " d"]
    origin: Mapping[str, Any] = field(default_factory=dict)
    rivals: Mapping[str, Tensor] = field(default_factory=dict)
    directions: Float[Tensor, "d m"] | None = None

    def __post_init__(self) -> None:
        for name in ("basis", "centre"):
            object.__setattr__(self, name, as_float64(getattr(self, name)))
        check_orthonormal(self.basis)
        if self.centre.shape != self.basis.shape[:1]:
            raise ValueError(
                f"a centre of shape {tuple(self.centre.shape)} does not fit a basis in {self.d} dimensions"
            )
        if self.directions is not None:
            object.__setattr__(self, "directions", check_directions(self.directions, self.d))

    @classmethod
    def spanned_by(
        cls,
        directions: Float[Tensor, "d k"],
        origin: Mapping[str, Any] | None = None,
        centre: Float[Tensor, " d"] | None = None,
    ) -> Subspace:
        """The span of any linearly independent directions, given as columns, which it keeps.

        Args:
            directions: the columns; their lengths do not matter.
            origin: how they were made.
            centre: the point they are measured from; zeros by default.

        Raises:
            ValueError: directions that are not finite or not linearly independent.
        """
        directions = check_directions(directions)
        units = unit_columns(directions)
        rank = int(torch.linalg.matrix_rank(units))
        if rank < directions.shape[1]:
            raise ValueError(
                f"{directions.shape[1]} directions span only {rank} dimensions; leave out the dependent ones"
            )
        basis, _ = torch.linalg.qr(units)
        if centre is None:
            centre = torch.zeros(len(basis), dtype=torch.float64)
        return cls(basis, centre, dict(origin or {"method": "spanned_by"}), directions=directions)

    @property
    def d(self) -> int:
        """Dimensions of the space around it."""
        return self.basis.shape[0]

    @property
    def rank(self) -> int:
        """Its own dimensions, k."""
        return self.basis.shape[1]

    @property
    def condition_number(self) -> float:
        """How well its own directions determine it: 1 for orthogonal ones, growing as they lean on one another.

        The largest over the k-th singular value of the directions, each scaled to length 1; 1 where there are none.
        """
        if self.directions is None:
            return 1.0
        values = torch.linalg.svdvals(unit_columns(self.directions))
        return float(values[0] / values[self.rank - 1]) if len(values) >= self.rank else math.inf

    def coordinates(self, rows: Float[Tensor, "n d"]) -> Float[Tensor, "n k"]:
        """Coordinates of rows in the basis, measured from the centre."""
        return (self._checked(rows) - self.centre) @ self.basis

    def project(self, rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """The part of each row (measured from the centre) that lies in the subspace."""
        return self.coordinates(rows) @ self.basis.T

    def reject(self, rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """The part of each row (measured from the centre) that is normal to the subspace."""
        return self._checked(rows) - self.centre - self.project(rows)

    def principal_angles(self, other: Subspace) -> Float[Tensor, " k"]:
        """Angles between the two subspaces in radians, smallest first (Björck and Golub 1973).

        Sines are used for small angles, where a cosine would lose half the digits.
        """
        self._same_space(other)
        small, large = sorted((self.basis, other.basis), key=lambda basis: basis.shape[1])
        cosines = torch.linalg.svdvals(large.T @ small).clamp(max=1)
        sines = torch.linalg.svdvals(small - large @ (large.T @ small)).clamp(max=1).flip(0)
        return torch.where(cosines.square() > 0.5, torch.asin(sines), torch.acos(cosines))

    def overlap(self, other: Subspace) -> float:
        """|Q1^T Q2|_F^2 / min(k1, k2): 1 when one holds the other, 0 when they are orthogonal."""
        self._same_space(other)
        return float((self.basis.T @ other.basis).square().sum() / min(self.rank, other.rank))

    def remove(
        self, lens: HoldsModel, site: SiteSelection | None = None, *, about: str = "centre"
    ) -> AbstractContextManager[None]:
        """In a ``with`` block, the model of the lens runs without this subspace, x - Q Q^T (x - c), at the site it was
        fitted at or at those given; ``about="zero"`` removes Q Q^T x. See :func:`tangent_lens.subspaces.interventions.remove`.
        """
        from tangent_lens.subspaces.interventions import remove

        return remove(lens, self, site, about=about)

    def keep(
        self, lens: HoldsModel, site: SiteSelection | None = None, *, about: str = "centre"
    ) -> AbstractContextManager[None]:
        """In a ``with`` block, the model of the lens runs with nothing but this subspace there, c + Q Q^T (x - c)."""
        from tangent_lens.subspaces.interventions import keep

        return keep(lens, self, site, about=about)

    def steer(
        self, lens: HoldsModel, strength: float | Float[Tensor, " k"], site: SiteSelection | None = None
    ) -> AbstractContextManager[None]:
        """In a ``with`` block, rows move by Q a in the units of the activations: ``strength`` is a (k,), or its first entry."""
        from tangent_lens.subspaces.interventions import steer

        return steer(lens, self, strength, site)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one ``.safetensors`` file, atomically."""
        save_tensors(path, "subspace", self.tensors(), {"origin": dict(self.origin)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Subspace:
        """Read what :meth:`save` wrote.

        Raises:
            FileProblem: the file is damaged, of another kind, or of a newer format.
        """
        tensors, facts = load_tensors(path, "subspace")
        return cls.from_tensors(tensors, facts["origin"])

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """What a file keeps of it, beside its origin."""
        rivals = {f"{prefix}rivals.{name}": directions for name, directions in self.rivals.items()}
        own = {} if self.directions is None else {f"{prefix}directions": self.directions}
        return {f"{prefix}basis": self.basis, f"{prefix}centre": self.centre} | own | rivals

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], origin: Mapping[str, Any], prefix: str = "") -> Subspace:
        """The inverse of :meth:`tensors`."""
        start = f"{prefix}rivals."
        rivals = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
        # Files written before fits kept their own directions have none.
        own = tensors.get(f"{prefix}directions")
        return cls(tensors[f"{prefix}basis"], tensors[f"{prefix}centre"], dict(origin), rivals, own)

    def _checked(self, rows: Tensor) -> Tensor:
        rows = as_float64(rows)
        if rows.shape[-1] != self.d:
            raise ValueError(f"rows of width {rows.shape[-1]} do not live in the {self.d} dimensions of this subspace")
        return rows

    def _same_space(self, other: Subspace) -> None:
        if self.d != other.d:
            raise ValueError(f"subspaces of {self.d} and of {other.d} dimensions cannot be compared")

    def __repr__(self) -> str:
        return f"Subspace(rank {self.rank} of {self.d}, {self.origin.get('method', 'given')})"


def check_orthonormal(basis: Tensor) -> None:
    """Refuse a matrix whose columns are not orthonormal.

    Raises:
        ValueError: with the shape or the deviation.
    """
    if basis.ndim != 2 or not 1 <= basis.shape[1] <= basis.shape[0]:
        raise ValueError(f"a basis is (d, k) with 1 <= k <= d, not of shape {tuple(basis.shape)}")
    gram = basis.T @ basis
    deviation = float((gram - torch.eye(len(gram), dtype=gram.dtype)).abs().max())
    if not deviation < _ORTHONORMALITY:
        raise ValueError(
            f"these columns are not orthonormal (off by {deviation:.2g}); use Subspace.spanned_by(directions) instead"
        )


def check_directions(directions: Float[Tensor, "d m"], width: int | None = None) -> Float[Tensor, "d m"]:
    """Directions as columns in float64, refused where they could not be any.

    Raises:
        ValueError: not finite, not a matrix, or of another width.
    """
    directions = as_float64(directions)
    if directions.ndim != 2 or not bool(torch.isfinite(directions).all()):
        raise ValueError(f"directions must be finite columns (d, k), not of shape {tuple(directions.shape)}")
    if width is not None and (len(directions) != width or not directions.shape[1]):
        raise ValueError(
            f"directions of shape {tuple(directions.shape)} do not fit a basis in {width} dimensions; "
            f"they are columns ({width}, m)"
        )
    return directions


def unit_columns(directions: Float[Tensor, "d m"]) -> Float[Tensor, "d m"]:
    """Each column scaled to length 1; a column of zeros stays as it is."""
    lengths = torch.linalg.vector_norm(directions, dim=0)
    return directions / torch.where(lengths > 0, lengths, 1.0)
