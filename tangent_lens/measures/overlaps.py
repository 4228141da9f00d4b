"""Subspaces beside one another: layers, checkpoints, methods, seeds, halves of a corpus."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tangent_lens.recording.row_sample import RowSample
from tangent_lens.showing import Shown
from tangent_lens.subspaces.subspace import Subspace

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class Overlaps(Shown):
    """Every subspace against every other.

    Attributes:
        names: of the subspaces.
        ranks: of each.
        d: dimensions of the space that they share.
        overlap: |Q1^T Q2|_F^2 / min(k1, k2), 1 where one holds the other.
        expected: the overlap of two random subspaces of these ranks, max(k1, k2) / d.
        largest_angle: largest principal angle, in degrees.
        distance: projection distance |P1 - P2|_F / sqrt(2), 0 for the same subspace.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    d: int
    overlap: tuple[tuple[float, ...], ...]
    expected: tuple[tuple[float, ...], ...]
    largest_angle: tuple[tuple[float, ...], ...]
    distance: tuple[tuple[float, ...], ...]

    def to_pandas(self) -> pandas.DataFrame:
        """One row a pair."""
        import pandas

        rows = [
            {
                "first": self.names[one],
                "second": self.names[other],
                **{name: getattr(self, name)[one][other] for name in _NUMBERS},
            }
            for one in range(len(self.names))
            for other in range(one + 1, len(self.names))
        ]
        return pandas.DataFrame(rows, columns=["first", "second", *_NUMBERS])

    def plot(self) -> Any:
        """The overlaps as a heat map, as a matplotlib figure (needs the ``plot`` extra)."""
        from tangent_lens.reports.overlap_plot import plot_overlaps

        return plot_overlaps(self)


_NUMBERS = ("overlap", "expected", "largest_angle", "distance")


@dataclass(frozen=True, repr=False)
class Stability(Shown):
    """How much of a subspace comes back when it is fitted again.

    Attributes:
        over: what changed between the fits: ``seeds`` or ``halves``.
        fits: how many.
        rank, d: of the subspaces.
        overlaps: of every two fits (``seeds``) or of the two halves of each cut (``halves``).
        expected: the overlap of random subspaces of this rank, k / d.
    """

    over: str
    fits: int
    rank: int
    d: int
    overlaps: tuple[float, ...]
    expected: float

    @property
    def mean(self) -> float:
        """Mean overlap."""
        return float(np.mean(self.overlaps))

    @property
    def least(self) -> float:
        """The smallest overlap of all."""
        return min(self.overlaps)


def compare_subspaces(subspaces: Mapping[str, Subspace]) -> Overlaps:
    """Every subspace against every other: overlaps, principal angles, projection distances.

    Args:
        subspaces: two or more by name, all of one space: ``report.subspaces``, fits of one site by several methods, one
            site's fits at several checkpoints.

    Raises:
        ValueError: fewer than two, or spaces of different dimensions.
    """
    names, found = tuple(str(name) for name in subspaces), tuple(subspaces.values())
    if len(found) < 2:
        raise ValueError(f"{len(found)} subspace cannot be compared; pass two or more")
    widths = sorted({one.d for one in found})
    if len(widths) > 1:
        raise ValueError(
            f"these subspaces live in {' and '.join(map(str, widths))} dimensions; compare those of one kind of site, for "
            "example the resid_post of every layer"
        )

    def table(number: Callable[[Subspace, Subspace], float]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(number(one, other) for other in found) for one in found)

    return Overlaps(
        names=names,
        ranks=tuple(one.rank for one in found),
        d=widths[0],
        overlap=table(lambda one, other: min(one.overlap(other), 1.0)),
        expected=table(lambda one, other: max(one.rank, other.rank) / one.d),
        largest_angle=table(lambda one, other: math.degrees(float(one.principal_angles(other)[-1]))),
        distance=table(projection_distance),
    )


def projection_distance(one: Subspace, other: Subspace) -> float:
    """|P1 - P2|_F / sqrt(2) of the orthogonal projections: sqrt(sum of sin^2 of the principal angles) for equal ranks."""
    inside = one.overlap(other) * min(one.rank, other.rank)
    return math.sqrt(max((one.rank + other.rank) / 2 - inside, 0.0))


def stability_over_seeds(fit: Callable[[int], Subspace], seeds: Sequence[int] = range(5)) -> Stability:
    """Fit again with other seeds, and compare every two fits.

    Args:
        fit: from a seed to a subspace: ``lambda seed: fit_semi_nmf(sample, 16, seed=seed)``.

    Raises:
        ValueError: fewer than two seeds.
    """
    found = [fit(seed) for seed in seeds]
    if len(found) < 2:
        raise ValueError(f"{len(found)} fit cannot be compared with another; use two seeds or more")
    pairs = tuple(one.overlap(other) for place, one in enumerate(found) for other in found[place + 1 :])
    return Stability("seeds", len(found), found[0].rank, found[0].d, pairs, found[0].rank / found[0].d)


def stability_over_halves(
    sample: RowSample, fit: Callable[[RowSample], Subspace], *, cuts: int = 5, seed: int = 0
) -> Stability:
    """Cut the sequences in two at random, fit on each half, compare; several times.

    Args:
        fit: from rows to a subspace: ``lambda rows: fit_kmeans(rows, 16)``.

    Raises:
        ValueError: fewer than four sequences, or no cut.
    """
    sequences = sample.sequences.unique()
    if len(sequences) < 4 or cuts < 1:
        raise ValueError(
            f"{len(sequences)} sequences and {cuts} cuts make no halves to compare; use 4 sequences or more, and 1 cut or more"
        )
    generator, pairs = torch.Generator().manual_seed(seed), []
    for _ in range(cuts):
        order = sequences[torch.randperm(len(sequences), generator=generator)]
        first = torch.isin(sample.sequences, order[: len(order) // 2])
        pairs.append((fit(_some(sample, first)), fit(_some(sample, ~first))))
    one = pairs[0][0]
    overlaps = tuple(first.overlap(second) for first, second in pairs)
    return Stability("halves", 2 * cuts, one.rank, one.d, overlaps, one.rank / one.d)


def _some(sample: RowSample, chosen: torch.Tensor) -> RowSample:
    rows = sample.rows[chosen]
    return RowSample(
        rows, sample.sequences[chosen], sample.tokens[chosen], len(rows), f"half of {sample.name}", sample.seed
    )
