"""What each sequence adds to a measurement, so that a corpus can be resampled without running the model again.

Every number here is a function of weights w: how often each sequence counts. Energies are ratios of quadratic forms in w;
an isotropy needs inner products of whole second moments, which follow from inner products of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tangent_lens.storage import as_float64

# Inner products of rows are taken this many rows at a time.
ROWS_AT_ONCE = 1024


@dataclass(frozen=True, eq=False)
class RowsBySequence:
    """Gradient rows of one site with the sequence that each came from.

    Attributes:
        inside, whole: tr(Q^T M_s Q) and tr(M_s) of every sequence, M_s the sum of its g g^T.
        plain, rejected: what the isotropy of all rows, and of their parts normal to Q, needs.
    """

    inside: Float[np.ndarray, " sequences"]
    whole: Float[np.ndarray, " sequences"]
    plain: ScatterForm
    rejected: ScatterForm

    @classmethod
    def of(
        cls, rows: Float[Tensor, "n d"], sequences: Int[Tensor, " n"], basis: Float[Tensor, "d k"]
    ) -> RowsBySequence:
        """From kept rows; ``sequences`` numbers them from 0 and need not be sorted."""
        rows, basis = as_float64(rows), as_float64(basis)
        along = rows @ basis
        count = int(sequences.max()) + 1
        sums = (_by_sequence(part.square().sum(dim=1), sequences, count) for part in (along, rows))
        inside, whole = (part.numpy() for part in sums)
        rejected = rows - along @ basis.T
        return cls(inside, whole, ScatterForm.of(rows, sequences), ScatterForm.of(rejected, sequences))

    @property
    def sequences(self) -> int:
        """How many."""
        return len(self.whole)

    def energy(self, weights: Float[np.ndarray, "b sequences"]) -> Float[np.ndarray, " b"]:
        """E(Q) of each weighting."""
        return (weights @ self.inside) / (weights @ self.whole)

    def delta_iso(self, weights: Float[np.ndarray, "b sequences"]) -> Float[np.ndarray, " b"]:
        """IsoScore* without Q minus IsoScore* of each weighting, in ambient dimensions."""
        return self.rejected.iso_score(weights) - self.plain.iso_score(weights)


@dataclass(frozen=True, eq=False)
class ScatterForm:
    """The scatter K(w) = sum w_s M_s - m m^T / n about the weighted mean m / n, known by its trace and its square alone.

    |K|_F^2 = w^T H w - (2 / n) sum_s w_s |X_s m|^2 + |m|^4 / n^2, with H_st = <M_s, M_t> = |X_s X_t^T|_F^2.

    Attributes:
        d: width of a row.
        rows: of each sequence.
        squares: tr(M_s).
        gram: H.
        mean_gram: <m_s, m_t>, with m_s the sum of the rows of a sequence.
        met: X m_t of every row and sequence.
        sequence_of: the sequence of each row of ``met``.
    """

    d: int
    rows: Float[np.ndarray, " sequences"]
    squares: Float[np.ndarray, " sequences"]
    gram: Float[np.ndarray, "sequences sequences"]
    mean_gram: Float[np.ndarray, "sequences sequences"]
    met: Float[np.ndarray, "n sequences"]
    sequence_of: Int[np.ndarray, " n"]

    @classmethod
    def of(cls, rows: Float[Tensor, "n d"], sequences: Int[Tensor, " n"]) -> ScatterForm:
        """From float64 rows."""
        count = int(sequences.max()) + 1
        sums = torch.zeros(count, rows.shape[1], dtype=rows.dtype).index_add_(0, sequences, rows)
        squares = _by_sequence(rows.square().sum(dim=1), sequences, count)
        numbers = torch.bincount(sequences, minlength=count).double()
        gram = _squared_products(rows, _members(sequences, rows))
        met = rows @ sums.T
        return cls(rows.shape[1], *(part.numpy() for part in (numbers, squares, gram, sums @ sums.T, met, sequences)))

    def iso_score(self, weights: Float[np.ndarray, "b sequences"]) -> Float[np.ndarray, " b"]:
        """(PR - 1) / (d - 1) of the covariance of each weighting; not a number where nothing varies."""
        count = weights @ self.rows
        mean_square = np.einsum("bs,st,bt->b", weights, self.mean_gram, weights, optimize=True)
        trace = weights @ self.squares - mean_square / count
        crossed = np.concatenate([self._crossed(some) for some in np.array_split(weights, -(-len(weights) // 64))])
        whole = np.einsum("bs,st,bt->b", weights, self.gram, weights, optimize=True)
        square = whole - 2 * crossed / count + mean_square**2 / count**2
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where((trace > 0) & (square > 0), trace**2 / square, np.nan)
        return np.clip((ratio - 1) / (self.d - 1), 0, 1)

    def _crossed(self, weights: Float[np.ndarray, "b sequences"]) -> Float[np.ndarray, " b"]:
        """sum_s w_s |X_s m|^2."""
        along = self.met @ weights.T
        return np.sum(weights.T[self.sequence_of] * along**2, axis=0)


@dataclass(frozen=True, eq=False)
class WeightsBySequence:
    """Inner products of the sequences' weight gradients G_s = sum of delta u^T: all that the energy of their sum needs.

    Attributes:
        inside: <G_s Q, G_t Q>; whole: <G_s, G_t>.
    """

    inside: Float[np.ndarray, "sequences sequences"]
    whole: Float[np.ndarray, "sequences sequences"]

    @classmethod
    def of(
        cls,
        inputs: Float[Tensor, "n d"],
        signals: Float[Tensor, "n out"],
        sequences: Int[Tensor, " n"],
        basis: Float[Tensor, "d k"],
    ) -> WeightsBySequence:
        """From the input rows of a map and the backward signals at its output.

        <G_s, G_t> is the sum over rows i of s and j of t of (u_i . u_j) (delta_i . delta_j).
        """
        inputs, signals = (side if side.dtype == torch.float64 else side.float() for side in (inputs, signals))
        along, members = inputs @ basis.to(inputs), _members(sequences, inputs)
        inside, whole = (torch.zeros(members.shape[1], members.shape[1], dtype=torch.float64) for _ in range(2))
        for start in range(0, len(inputs), ROWS_AT_ONCE):
            some = slice(start, start + ROWS_AT_ONCE)
            met = signals[some] @ signals.T
            for total, side in ((inside, along), (whole, inputs)):
                total += _blocks(met * (side[some] @ side.T), members[some], members)
        return cls(inside.numpy(), whole.numpy())

    def __add__(self, other: WeightsBySequence) -> WeightsBySequence:
        """Two maps together, each with its own weight gradient: their inner products add."""
        return WeightsBySequence(self.inside + other.inside, self.whole + other.whole)

    @property
    def sequences(self) -> int:
        """How many."""
        return len(self.whole)

    def energy(self, weights: Float[np.ndarray, "b sequences"]) -> Float[np.ndarray, " b"]:
        """E(Q) of each weighting: |G Q|^2 / |G|^2 of G = sum w_s G_s."""
        inside, whole = (
            np.einsum("bs,st,bt->b", weights, form, weights, optimize=True) for form in (self.inside, self.whole)
        )
        return np.clip(inside / whole, 0, 1)


def _squared_products(rows: Float[Tensor, "n d"], members: Float[Tensor, "n s"]) -> Float[Tensor, "s s"]:
    """|X_s X_t^T|_F^2 of every two sequences."""
    total = torch.zeros(members.shape[1], members.shape[1], dtype=torch.float64)
    for start in range(0, len(rows), ROWS_AT_ONCE):
        some = slice(start, start + ROWS_AT_ONCE)
        total += _blocks((rows[some] @ rows.T).square_(), members[some], members)
    return total


def _members(sequences: Int[Tensor, " n"], like: Tensor) -> Float[Tensor, "n s"]:
    """1 where a row belongs to a sequence."""
    return torch.nn.functional.one_hot(sequences).to(like)


def _blocks(products: Float[Tensor, "some n"], own: Float[Tensor, "some s"], other: Float[Tensor, "n s"]) -> Tensor:
    """Sums of the entries of every block of two sequences."""
    return own.T.double() @ (products @ other).double()


def _by_sequence(values: Float[Tensor, " n"], sequences: Int[Tensor, " n"], count: int) -> Float[Tensor, " sequences"]:
    return torch.zeros(count, dtype=torch.float64).index_add_(0, sequences, values.double())
