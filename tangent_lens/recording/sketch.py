"""Sketches: what linear test matrices see of sums that are too large to keep. Memory is O(width * columns) a site.

A second moment C (d, d) is kept as its diagonal and its products C W with the columns of a test matrix W (d, w); a weight
gradient G (out, in) as G W and Psi G. All of it is linear in what passes, so parts add up exactly, in any order and in any
batches, as the whole sums do. Which numbers follow from it, and how precisely, is for the fits and measures to say.

Source: Tropp, Yurtsever, Udell, Cevher 2017, "Practical sketching algorithms for low-rank matrix approximation".
"""

from __future__ import annotations

import zlib

import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.recording.moments import (
    ROWS_A_PRODUCT,
    NonFiniteRows,
    _checked_rows,
    _checked_width,
    device_with_float64,
    full_precision,
)


def gaussian_directions(width: int, columns: int, seed: int | str) -> Float[Tensor, "width columns"]:
    """Standard normal numbers (width, columns), float64 on the CPU, decided by the three arguments alone."""
    generator = torch.Generator().manual_seed(gaussian_number(width, columns, seed))
    return torch.randn(width, columns, generator=generator, dtype=torch.float64)


def gaussian_number(width: int, columns: int, seed: int | str) -> int:
    """What seeds torch's generator for them, wherever they are drawn."""
    return zlib.crc32(f"{seed}/{width}x{columns}".encode())


class SketchedMoments:
    """Count, mean, variances and products with fixed directions of one stream of rows: O(d w), not O(d^2).

    Attributes:
        width: number of columns d.
        own: the first columns of the test matrix W (d, w), float64: those that this site chose.
        probes: its last columns: standard normal, independent of the others, and the same tensor for many sites. Estimates
            come from these.
        count: number of rows seen.
        mean: their mean (d,), float64.
        diagonal: sum of (x - mean)^2, entry by entry (d,), float64.
        through: sum of (x - mean)(x - mean)^T W (d, w), float64.
    """

    def __init__(
        self,
        own: Float[Tensor, "d w"],
        probes: Float[Tensor, "d n"] | None = None,
        *,
        name: str = "rows",
        device: torch.device | str = "cpu",
    ) -> None:
        """No rows yet.

        Raises:
            ValueError: directions that are no finite matrix, or of two widths.
        """
        self.own, self.probes = _checked_directions(own, probes, name, device)
        self.width = len(own)
        columns = self.own.shape[1] + self.probes.shape[1]
        self.name = name
        self.count = 0
        self.mean = torch.zeros(self.width, dtype=torch.float64, device=device)
        self.diagonal = torch.zeros(self.width, dtype=torch.float64, device=device)
        self.through = torch.zeros(self.width, columns, dtype=torch.float64, device=device)

    @classmethod
    def of(
        cls,
        rows: Float[Tensor, "n d"],
        own: Float[Tensor, "d w"],
        probes: Float[Tensor, "d n"] | None = None,
        *,
        name: str = "rows",
    ) -> SketchedMoments:
        """The sketch of rows that are already at hand."""
        sketch = cls(own, probes, name=name, device=device_with_float64(rows))
        sketch.update(rows)
        return sketch

    @property
    def directions(self) -> Float[Tensor, "d w+n"]:
        """The whole test matrix W."""
        return torch.cat([self.own, self.probes], dim=1)

    def update(self, rows: Float[Tensor, "n d"]) -> None:
        """Add rows.

        Raises:
            ValueError: rows of another width, or not a matrix.
            NonFiniteRows: NaN or infinity among them; nothing is added then.
        """
        rows = _checked_rows(rows, self.width, self.name, self.mean.device)
        directions = self.directions
        with full_precision(rows):
            for chunk in rows.split(ROWS_A_PRODUCT):
                if len(chunk):
                    self._add(chunk, directions)

    def _add(self, rows: Tensor, directions: Tensor) -> None:
        count, centre = len(rows), rows.mean(dim=0)
        centred = rows - centre
        # The mean was rounded to the rows' precision; what it left over is small, and is carried on in float64.
        left_over = centred.sum(dim=0).double() / count
        through = (centred.T @ (centred @ directions.to(rows.dtype))).double()
        through.addr_(left_over, left_over @ directions, alpha=-count)
        diagonal = centred.square().sum(dim=0).double() - count * left_over.square()
        self.join(count, centre.double() + left_over, diagonal, through)

    def join(
        self,
        count: int,
        mean: Float[Tensor, " d"],
        diagonal: Float[Tensor, " d"],
        through: Float[Tensor, "d w"],
    ) -> None:
        """Add sums of other rows with the same directions, wherever they were computed (Chan, Golub, LeVeque 1983).

        Args:
            count, mean: of those rows.
            diagonal, through: about that mean, as the attributes of this class.

        Raises:
            ValueError: sums of other shapes, or a negative count.
            NonFiniteRows: NaN or infinity among them.
        """
        if not count:
            return
        mean, diagonal, through = (self._checked_part(part, name) for part, name in (
            (mean, "mean"), (diagonal, "diagonal"), (through, "through")
        ))  # fmt: skip
        step, total = mean - self.mean, self.count + count
        weight = self.count * count / total
        self.through += through
        self.diagonal += diagonal + weight * step.square()
        if self.count:
            self.through.addr_(step, step @ self.directions, alpha=weight)
        self.mean = self.mean + step * (count / total)
        self.count = total

    def _checked_part(self, part: Tensor, name: str) -> Tensor:
        own = getattr(self, name)
        if part.shape != own.shape:
            raise ValueError(f"{self.name}: a {name} of shape {tuple(part.shape)} cannot join {tuple(own.shape)}")
        part = part.to(device=own.device, dtype=torch.float64)
        if not bool(torch.isfinite(part).all()):
            raise NonFiniteRows(f"{self.name}: the {name} that joins holds NaN or infinity; look where it was computed")
        return part

    def merge(self, other: SketchedMoments) -> None:
        """Add all that another recording saw; exact up to rounding, in any order.

        Raises:
            ValueError: it was sketched with other directions.
        """
        if not _same(self.own, other.own) or not _same(self.probes, other.probes):
            raise ValueError(
                f"{self.name}: sketches with different directions cannot be merged; record both with the same seed, rank "
                "and subspace"
            )
        self.join(other.count, other.mean, other.diagonal, other.through)

    def sum(self) -> Float[Tensor, " d"]:
        """Sum of the rows."""
        return self.mean * self.count

    def square_total(self) -> float:
        """Sum of |x|^2 about the origin: the trace of the second moment."""
        return float(self.diagonal.sum() + self.count * self.mean.square().sum())

    def total_variance(self) -> float:
        """Trace of the covariance."""
        self._need(2)
        return float(self.diagonal.sum() / (self.count - 1))

    def second_moment_through(self) -> Float[Tensor, "d w"]:
        """M W, with M the sum of x x^T about the origin."""
        self._need(1)
        return self.through + self.count * torch.outer(self.mean, self.mean @ self.directions)

    def covariance_through(self) -> Float[Tensor, "d w"]:
        """C W, with C the centred covariance, divided by ``count - 1``.

        Raises:
            ValueError: fewer than two rows.
        """
        self._need(2)
        return self.through / (self.count - 1)

    def _need(self, rows: int) -> None:
        if self.count < rows:
            raise ValueError(f"{self.name}: {self.count} rows seen, at least {rows} needed; run the model on more text")

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """What a file keeps of it."""
        names = ("own", "probes", "mean", "diagonal", "through")
        sums = {f"{prefix}{name}": getattr(self, name) for name in names}
        return {f"{prefix}count": torch.tensor(self.count, dtype=torch.int64)} | sums

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], prefix: str = "", *, name: str = "rows") -> SketchedMoments:
        """The inverse of :meth:`tensors`."""
        sketch = cls(tensors[f"{prefix}own"], tensors[f"{prefix}probes"], name=name)
        sums = (tensors[f"{prefix}{part}"] for part in ("mean", "diagonal", "through"))
        sketch.join(int(tensors[f"{prefix}count"]), *sums)
        return sketch

    def __repr__(self) -> str:
        return (
            f"SketchedMoments({self.name}: {self.count} rows of width {self.width}, {self.through.shape[1]} directions)"
        )


class SketchedGradient:
    """A weight gradient G = sum of delta_i u_i^T (out, in) seen from both sides: O((out + in) w), not O(out in).

    Attributes:
        own, probes: the test matrix W (in, w) of the input side, as of :class:`SketchedMoments`.
        left_directions: the test matrix Psi (s, out) of the output side. Its last row is all ones, so that the mean row of
            G is known exactly; the others are standard normal. Kept in the dtype it comes in.
        rows: number of rows summed.
        through: G W (out, w), float64.
        left: Psi G (s, in), float64.
        signal_sum: sum of delta_i (out,); signal_square_sum: sum of delta_i squared, entry by entry (out,).
    """

    def __init__(
        self,
        own: Float[Tensor, "in w"],
        left_directions: Float[Tensor, "s out"],
        probes: Float[Tensor, "in n"] | None = None,
        *,
        name: str = "weight gradient",
        device: torch.device | str = "cpu",
    ) -> None:
        self.own, self.probes = _checked_directions(own, probes, name, device)
        self.left_directions = _checked_directions(left_directions, None, name, device)[0].to(left_directions.dtype)
        self.name = name
        width, columns = len(own), self.own.shape[1] + self.probes.shape[1]
        left_rows, out = left_directions.shape
        self.rows = 0
        shapes = {"through": (out, columns), "left": (left_rows, width), "signal_sum": (out,)}
        shapes["signal_square_sum"] = (out,)
        self.through, self.left, self.signal_sum, self.signal_square_sum = (
            torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes.values()
        )

    @classmethod
    def of(
        cls,
        gradient: Float[Tensor, "out in"],
        own: Float[Tensor, "in w"],
        left_directions: Float[Tensor, "s out"],
        probes: Float[Tensor, "in n"] | None = None,
        *,
        name: str = "weight gradient",
    ) -> SketchedGradient:
        """The sketch of a gradient that is already at hand; without backward signals."""
        sketch = cls(own, left_directions, probes, name=name)
        gradient = gradient.double().cpu()
        none = torch.zeros(len(gradient), dtype=torch.float64)
        sketch.join(0, gradient @ sketch.directions, sketch.left_directions.double() @ gradient, none, none)
        return sketch

    @property
    def directions(self) -> Float[Tensor, "in w+n"]:
        """The whole test matrix W."""
        return torch.cat([self.own, self.probes], dim=1)

    def update(self, delta: Float[Tensor, "n out"], inputs: Float[Tensor, "n in"]) -> None:
        """Add the products of backward signals with the map's input rows, one chunk of rows at a time.

        Raises:
            ValueError, NonFiniteRows: as :meth:`SketchedMoments.update`; nothing is added then.
        """
        device = self.through.device
        inputs = _checked_rows(inputs, len(self.own), f"inputs of {self.name}", device)
        delta = _checked_rows(delta, len(self.through), f"signals of {self.name}", device)
        inputs, delta = (rows.to(torch.promote_types(inputs.dtype, delta.dtype)) for rows in (inputs, delta))
        right, left = (matrix.to(inputs.dtype) for matrix in (self.directions, self.left_directions))
        with full_precision(inputs):
            for d, u in zip(delta.split(ROWS_A_PRODUCT), inputs.split(ROWS_A_PRODUCT), strict=True):
                self.join(len(d), d.T @ (u @ right), (left @ d.T) @ u, d.sum(dim=0), d.square().sum(dim=0))

    def join(self, rows: int, through: Tensor, left: Tensor, signal_sum: Tensor, signal_square_sum: Tensor) -> None:
        """Add sums over other rows with the same test matrices, shaped as the attributes, wherever they were computed.

        Raises:
            ValueError: other shapes.
            NonFiniteRows: NaN or infinity among them; nothing is added then.
        """
        parts = {"through": through, "left": left, "signal_sum": signal_sum, "signal_square_sum": signal_square_sum}
        for name, part in parts.items():
            if part.shape != getattr(self, name).shape:
                raise ValueError(
                    f"{self.name}: a {name} of shape {tuple(part.shape)} cannot join {tuple(getattr(self, name).shape)}"
                )
            if not bool(torch.isfinite(part).all()):
                raise NonFiniteRows(
                    f"{self.name}: the {name} that joins holds NaN or infinity; look where it was computed"
                )
        for name, part in parts.items():
            own = getattr(self, name)
            own.add_(part.to(device=own.device, dtype=torch.float64))
        self.rows += rows

    def merge(self, other: SketchedGradient) -> None:
        """Add what another recording of the same map saw.

        Raises:
            ValueError: it was sketched with other test matrices.
        """
        if not all(_same(getattr(self, name), getattr(other, name)) for name in ("own", "probes", "left_directions")):
            raise ValueError(
                f"{self.name}: sketches with different directions cannot be merged; record both with the same seed, rank "
                "and subspace"
            )
        self.join(other.rows, other.through, other.left, other.signal_sum, other.signal_square_sum)

    def __repr__(self) -> str:
        return (
            f"SketchedGradient({self.name}: {self.rows} rows, {tuple(self.through.shape)} and {tuple(self.left.shape)})"
        )


def left_directions(out: int, rows: int, seed: int | str) -> Float[Tensor, "rows+1 out"]:
    """The test matrix of the output side of a weight gradient: standard normal rows, and one of ones."""
    drawn = gaussian_directions(out, rows, left_seed(seed)).T
    return torch.cat([drawn, torch.ones(1, out, dtype=torch.float64)])


def left_seed(seed: int | str) -> str:
    """The seed of the output side."""
    return f"{seed}/left"


def _checked_directions(
    own: Tensor, probes: Tensor | None, name: str, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    probes = own[:, :0] if probes is None else probes
    for one in (own, probes):
        if _checked_width(one, name) and not bool(torch.isfinite(one).all()):
            raise ValueError(f"{name}: the directions hold NaN or infinity")
    if not own.numel() or len(own) != len(probes):
        raise ValueError(
            f"{name}: directions are columns (d, w) with w of 1 or more and probes (d, n), not {tuple(own.shape)} and "
            f"{tuple(probes.shape)}"
        )
    return own.detach().to(device, torch.float64), probes.detach().to(device, torch.float64)


def _same(one: Tensor, two: Tensor) -> bool:
    return one is two or (one.shape == two.shape and torch.equal(one, two.to(one.device)))
