"""Moments: from rows passing by to sums that stay. Memory is O(width^2) a site, whatever the corpus.

Means and centred second moments are updated pairwise (Chan, Golub, LeVeque 1983), so that rows whose mean is far
larger than their spread lose no more digits than they carried. Sums are float64; the products of one chunk of rows
are taken in the rows' own precision, float32 at the least.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.storage import load_tensors, save_tensors

# Long float32 sums drift; products are taken over at most this many rows before they join the float64 sums.
ROWS_A_PRODUCT = 2048
_SMALLEST_NORM = 1e-12


class NonFiniteRows(ValueError):
    """Rows that hold NaN or infinity."""


class SecondMoments:
    """Count, mean and centred second moment of one stream of rows.

    Attributes:
        width: number of columns d.
        count: number of rows seen.
        mean: their mean (d,), float64.
        scatter: sum of (x - mean)(x - mean)^T (d, d), float64.
    """

    def __init__(self, width: int, *, name: str = "rows", device: torch.device | str = "cpu") -> None:
        if width < 1:
            raise ValueError(f"rows of width {width} hold no numbers; the width must be 1 or more")
        self.width = width
        self.name = name
        self.count = 0
        self.mean = torch.zeros(width, dtype=torch.float64, device=device)
        self.scatter = torch.zeros(width, width, dtype=torch.float64, device=device)

    @classmethod
    def of(cls, rows: Float[Tensor, "n d"], *, name: str = "rows") -> SecondMoments:
        """The moments of rows that are already at hand."""
        moments = cls(_checked_width(rows, name), name=name, device=device_with_float64(rows))
        moments.update(rows)
        return moments

    def update(self, rows: Float[Tensor, "n d"]) -> None:
        """Add rows.

        Raises:
            ValueError: rows of another width, or not a matrix.
            NonFiniteRows: NaN or infinity among them; nothing is added then.
        """
        self.add_checked(self.checked(rows))

    def checked(self, rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """The rows in the precision in which they are summed, or an error as :meth:`update` raises it."""
        return _checked_rows(rows, self.width, self.name, self.mean.device)

    def add_checked(self, rows: Float[Tensor, "n d"]) -> None:
        """Add rows that :meth:`checked` returned."""
        with full_precision(rows):
            for chunk in rows.split(ROWS_A_PRODUCT):
                if len(chunk):
                    self._add(chunk)

    def _add(self, rows: Tensor) -> None:
        count = len(rows)
        centre = rows.mean(dim=0)
        centred = rows - centre
        # The mean was rounded to the rows' precision; what it left over is small, and is carried on in float64.
        left_over = centred.sum(dim=0).double() / count
        self._join(count, centre.double() + left_over, centred.T @ centred, left_over)

    def _join(self, count: int, mean: Tensor, product: Tensor, left_over: Tensor | None = None) -> None:
        self.scatter.add_(product)
        if left_over is not None:
            self.scatter.addr_(left_over, left_over, alpha=-count)
        step = mean - self.mean
        total = self.count + count
        if self.count:
            self.scatter.addr_(step, step, alpha=self.count * count / total)
        self.mean = self.mean + step * (count / total)
        self.count = total

    def merge(self, other: SecondMoments) -> None:
        """Add all that another recording saw; exact up to rounding, in any order."""
        if other.width != self.width:
            raise ValueError(f"{self.name}: width {other.width} cannot be merged into width {self.width}")
        if other.count:
            device = self.mean.device
            self._join(other.count, other.mean.to(device), other.scatter.to(device))

    def sum(self) -> Float[Tensor, " d"]:
        """Sum of the rows."""
        return self.mean * self.count

    def second_moment(self) -> Float[Tensor, "d d"]:
        """Sum of x x^T about the origin (M in ``MEASUREMENTS``: not divided by the count)."""
        self._need(1)
        return self.scatter + self.count * torch.outer(self.mean, self.mean)

    def covariance(self) -> Float[Tensor, "d d"]:
        """Centred covariance, divided by ``count - 1``.

        Raises:
            ValueError: fewer than two rows.
        """
        self._need(2)
        return self.scatter / (self.count - 1)

    def total_variance(self) -> float:
        """Trace of the covariance."""
        self._need(2)
        return float(self.scatter.diagonal().sum() / (self.count - 1))

    def square_total(self) -> float:
        """Sum of |x|^2 about the origin."""
        return float(self.scatter.diagonal().sum() + self.count * self.mean.square().sum())

    def square_along(self, basis: Float[Tensor, "d k"]) -> float:
        """Sum of |Q^T x|^2 about the origin, for orthonormal columns Q."""
        basis = basis.to(self.mean.device)
        return float((basis * (self.scatter @ basis)).sum() + self.count * (basis.T @ self.mean).square().sum())

    def _need(self, rows: int) -> None:
        if self.count < rows:
            raise ValueError(f"{self.name}: {self.count} rows seen, at least {rows} needed; run the model on more text")

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """What a file keeps of it."""
        return {
            f"{prefix}count": torch.tensor(self.count, dtype=torch.int64),
            f"{prefix}mean": self.mean,
            f"{prefix}scatter": self.scatter,
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], prefix: str = "", *, name: str = "rows") -> SecondMoments:
        """The inverse of :meth:`tensors`."""
        moments = cls(len(tensors[f"{prefix}mean"]), name=name)
        moments.count = int(tensors[f"{prefix}count"])
        moments.mean = tensors[f"{prefix}mean"].clone()
        moments.scatter = tensors[f"{prefix}scatter"].clone()
        return moments

    def __repr__(self) -> str:
        return f"SecondMoments({self.name}: {self.count} rows of width {self.width})"


class ProjectedSums:
    """What the shuffled control needs of a map's input rows, for one subspace known beforehand: O(d k), not O(d^2).

    Attributes:
        count: number of rows seen.
        basis: the orthonormal columns Q (d, k) they are projected on.
    """

    def __init__(self, basis: Float[Tensor, "d k"], *, name: str = "rows") -> None:
        self.basis = basis
        self.name = name
        self.width = len(basis)
        self.count = 0
        self._sum = torch.zeros(self.width, dtype=torch.float64)
        self._total = 0.0
        self._along = 0.0

    def update(self, rows: Float[Tensor, "n d"]) -> None:
        """Add rows.

        Raises:
            ValueError, NonFiniteRows: as :meth:`SecondMoments.update`.
        """
        rows = _checked_rows(rows, self.width, self.name, device_with_float64(rows))
        basis = self.basis.to(device=rows.device, dtype=rows.dtype)
        with full_precision(rows):
            for chunk in rows.split(ROWS_A_PRODUCT):
                self._sum += chunk.sum(dim=0).double().cpu()
                self._total += float(torch.linalg.vector_norm(chunk)) ** 2
                self._along += float(torch.linalg.vector_norm(chunk @ basis)) ** 2
                self.count += len(chunk)

    def join(self, count: int, total: Float[Tensor, " d"], squares: float, along: float) -> None:
        """Add the sums of rows that were projected on the same basis elsewhere."""
        self.count, self._sum = self.count + count, self._sum + total
        self._total, self._along = self._total + squares, self._along + along

    def sum(self) -> Float[Tensor, " d"]:
        """Sum of the rows."""
        return self._sum

    def square_total(self) -> float:
        """Sum of |x|^2."""
        return self._total

    def square_along(self, basis: Float[Tensor, "d k"]) -> float:
        """Sum of |Q^T x|^2.

        Raises:
            ValueError: another basis than the one the rows were projected on.
        """
        if basis is not self.basis and not torch.equal(basis, self.basis):
            raise ValueError(
                f"{self.name}: these rows were projected on another subspace; record them again with this one"
            )
        return self._along


class Moments:
    """What stays of one site: moments of its activations and, if gathered, of its gradients and of both together.

    Attributes:
        activations: :class:`SecondMoments` of the activation rows x.
        gradients: the same of the loss gradients g at the same rows; empty when none was gathered.
        cross_scatter: sum of (g - mean g)(x - mean x)^T (d, d); None unless ``cross=True``.
    """

    def __init__(
        self, width: int, *, name: str = "rows", cross: bool = False, device: torch.device | str = "cpu"
    ) -> None:
        self.name = name
        self.activations = SecondMoments(width, name=f"activations at {name}", device=device)
        self.gradients = SecondMoments(width, name=f"gradients at {name}", device=device)
        self.cross_scatter = torch.zeros(width, width, dtype=torch.float64, device=device) if cross else None

    @classmethod
    def of(
        cls,
        activations: Float[Tensor, "n d"],
        gradients: Float[Tensor, "n d"] | None = None,
        *,
        name: str = "rows",
        cross: bool = False,
    ) -> Moments:
        """The moments of rows that are already at hand."""
        device = device_with_float64(activations)
        moments = cls(_checked_width(activations, name), name=name, cross=cross, device=device)
        moments.update(activations, gradients)
        return moments

    @property
    def width(self) -> int:
        """Number of columns d."""
        return self.activations.width

    def update(self, activations: Float[Tensor, "n d"], gradients: Float[Tensor, "n d"] | None = None) -> None:
        """Add rows and, if given, the gradients at the same rows.

        Raises:
            ValueError: widths or numbers of rows that do not fit, or a missing gradient for a cross moment.
            NonFiniteRows: NaN or infinity.
        """
        if gradients is not None and gradients.shape != activations.shape:
            raise ValueError(
                f"{self.name}: gradients of shape {tuple(gradients.shape)} do not belong to activations of shape "
                f"{tuple(activations.shape)}"
            )
        if self.cross_scatter is not None and gradients is None:
            raise ValueError(f"{self.name}: a cross moment needs the gradients of the same rows")
        if gradients is None:
            self.activations.update(activations)
            return
        # Both are checked before either is added, so that an error leaves all sums as they were.
        pair = (self.activations.checked(activations), self.gradients.checked(gradients))
        for x, g in zip(*(rows.split(ROWS_A_PRODUCT) for rows in pair), strict=True):
            if self.cross_scatter is not None and len(x):
                self._add_cross(x.double(), g.double())
            self.activations.add_checked(x)
            self.gradients.add_checked(g)

    def _add_cross(self, x: Tensor, g: Tensor) -> None:
        # Runs before the two streams take the rows in: the pairwise rule needs their counts and means of before.
        part = (g - g.mean(0)).T @ (x - x.mean(0))
        self._join_cross(len(x), x.mean(0), g.mean(0), part)

    def _join_cross(self, count: int, mean_x: Tensor, mean_g: Tensor, part: Tensor) -> None:
        assert self.cross_scatter is not None
        self.cross_scatter.add_(part)
        before = self.activations.count
        if before:
            steps = (mean_g - self.gradients.mean, mean_x - self.activations.mean)
            self.cross_scatter.addr_(*steps, alpha=before * count / (before + count))

    def cross_moment(self) -> Float[Tensor, "d d"]:
        """Sum of g x^T about the origin (K).

        Raises:
            ValueError: it was not gathered.
        """
        if self.cross_scatter is None:
            raise ValueError(f"{self.name}: the cross moment was not gathered; ask for it with cross=True")
        return self.cross_scatter + self.gradients.count * torch.outer(self.gradients.mean, self.activations.mean)

    def merge(self, other: Moments) -> None:
        """Add all that another recording of the same site saw."""
        if other.width != self.width:
            raise ValueError(f"{self.name}: width {other.width} cannot be merged into width {self.width}")
        if (self.cross_scatter is None) != (other.cross_scatter is None):
            raise ValueError(f"{self.name}: a recording with a cross moment and one without cannot be merged")
        if self.cross_scatter is not None and other.cross_scatter is not None and other.activations.count:
            means = (other.activations.mean, other.gradients.mean)
            self._join_cross(other.activations.count, *means, other.cross_scatter)
        self.activations.merge(other.activations)
        self.gradients.merge(other.gradients)

    def check_paired(self) -> None:
        """Refuse a recording in which some rows have an activation but no gradient.

        Raises:
            ValueError: the two counts differ.
        """
        if self.activations.count != self.gradients.count:
            raise ValueError(
                f"{self.name}: {self.activations.count} activation rows but {self.gradients.count} gradient rows; "
                "a backward pass is missing or stopped halfway, so record again"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one ``.safetensors`` file, atomically."""
        tensors = self.activations.tensors("activations.") | self.gradients.tensors("gradients.")
        if self.cross_scatter is not None:
            tensors["cross_scatter"] = self.cross_scatter
        save_tensors(path, "moments", tensors, {"name": self.name})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Moments:
        """Read what :meth:`save` wrote.

        Raises:
            FileProblem: the file is damaged, of another kind, or of a newer format.
        """
        tensors, facts = load_tensors(path, "moments")
        moments = cls(len(tensors["activations.mean"]), name=facts["name"])
        for stream in ("activations", "gradients"):
            name = f"{stream} at {facts['name']}"
            setattr(moments, stream, SecondMoments.from_tensors(tensors, f"{stream}.", name=name))
        moments.cross_scatter = tensors.get("cross_scatter")
        return moments

    def __repr__(self) -> str:
        return (
            f"Moments({self.name}: {self.activations.count} activation rows and {self.gradients.count} gradient rows "
            f"of width {self.width})"
        )


def _checked_width(rows: Tensor, name: str) -> int:
    if rows.ndim != 2:
        raise ValueError(f"{name}: rows must be a matrix (rows, width), not of shape {tuple(rows.shape)}")
    if not rows.is_floating_point():
        raise ValueError(f"{name}: rows must be floating point numbers, not {rows.dtype}")
    return rows.shape[1]


def full_precision(rows: Tensor) -> AbstractContextManager[Any]:
    """Products of these rows in their own precision, also where the model runs under ``torch.autocast``."""
    return torch.autocast(rows.device.type, enabled=False)


def _checked_rows(rows: Tensor, width: int, name: str, device: torch.device) -> Tensor:
    if _checked_width(rows, name) != width:
        raise ValueError(f"{name}: rows of width {rows.shape[1]} cannot join rows of width {width}")
    wide = rows.dtype if rows.dtype == torch.float64 else torch.float32
    rows = rows.detach().to(device=device, dtype=wide)
    # One pass without a copy: the norm is not finite if any entry is not, or if squares overflow.
    norm = float(torch.linalg.vector_norm(rows)) if rows.numel() else 0.0
    if not norm < float("inf"):
        raise _not_finite(rows, name)
    # Squares of float32 numbers this small would vanish.
    return rows.double() if norm < _SMALLEST_NORM else rows


def device_with_float64(rows: Tensor) -> torch.device:
    """Where the float64 sums of these rows can live: their own device, except Apple's, which has no float64."""
    return torch.device("cpu") if rows.device.type == "mps" else rows.device


def _not_finite(rows: Tensor, name: str) -> NonFiniteRows:
    bad = ~torch.isfinite(rows)
    if not bool(bad.any()):
        way_out = "pass float64 rows" if rows.dtype != torch.float64 else "divide the rows by a constant first"
        return NonFiniteRows(
            f"{name}: values up to {float(rows.abs().max()):.3g} overflow when squared in {rows.dtype}; {way_out}"
        )
    row, column = (int(index) for index in bad.nonzero()[0])
    return NonFiniteRows(
        f"{name}: {int(bad.sum())} of {rows.numel()} values are NaN or infinite (first at row {row}, dimension {column}); "
        "find out where the model overflows before measuring (float32 is the safest dtype)"
    )
