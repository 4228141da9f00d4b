"""Where the gradients of rare and of frequent tokens point: energy along a subspace within buckets of frequency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tangent_lens.measures.energy import lift_of
from tangent_lens.measures.frequency import TokenFrequencies
from tangent_lens.recording.token_sums import BucketSums
from tangent_lens.showing import Shown

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, eq=False)
class FrequencyBuckets:
    """Tokens by frequency, the rarest first.

    Attributes:
        bucket_of: bucket of every token (vocabulary,), -1 for those that never occur.
        tokens: number of tokens in each; mass: their share of all occurrences.
        low, high: smallest and largest frequency in each.
    """

    bucket_of: torch.Tensor
    tokens: tuple[int, ...]
    mass: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def by_mass(cls, frequencies: TokenFrequencies, buckets: int = 5) -> FrequencyBuckets:
        """Buckets of about equal mass. Tokens of one frequency stay together, so that fewer may come back.

        Raises:
            ValueError: fewer than one bucket.
        """
        if buckets < 1:
            raise ValueError(f"{buckets} buckets hold nothing; use 1 or more")
        values, inverse, tokens = np.unique(frequencies.counts, return_inverse=True, return_counts=True)
        mass = values * tokens
        # Of whole counts these sums are exact, so that rounding moves no token over an edge.
        middle = (np.cumsum(mass) - mass / 2) * buckets / mass.sum()
        place = np.minimum(middle.astype(np.int64), buckets - 1)
        return cls._of(frequencies, place[inverse])

    @classmethod
    def by_edges(cls, frequencies: TokenFrequencies, edges: Sequence[float]) -> FrequencyBuckets:
        """Buckets between given edges in log f (natural); what lies outside makes a first and a last one. Empty ones vanish.

        Raises:
            ValueError: edges that do not rise.
        """
        steps = np.asarray(edges, dtype=np.float64)
        if steps.ndim != 1 or not len(steps) or not np.isfinite(steps).all() or (np.diff(steps) <= 0).any():
            raise ValueError(f"edges {list(edges)} must be one or more finite numbers in rising order")
        shares = frequencies.shares
        logs = np.log(np.where(shares > 0, shares, 1))
        return cls._of(frequencies, np.searchsorted(steps, logs, side="right"))

    @classmethod
    def _of(cls, frequencies: TokenFrequencies, place: np.ndarray) -> FrequencyBuckets:
        shares = frequencies.shares
        used, numbers = np.unique(place[shares > 0], return_inverse=True)
        bucket_of = np.full(len(shares), -1, dtype=np.int64)
        bucket_of[shares > 0] = numbers
        inside = [shares[bucket_of == bucket] for bucket in range(len(used))]
        return cls(
            bucket_of=torch.from_numpy(bucket_of),
            tokens=tuple(len(own) for own in inside),
            mass=tuple(float(own.sum()) for own in inside),
            low=tuple(float(own.min()) for own in inside),
            high=tuple(float(own.max()) for own in inside),
        )

    def __repr__(self) -> str:
        return f"FrequencyBuckets({len(self)} buckets of {', '.join(map(str, self.tokens))} tokens)"


@dataclass(frozen=True)
class BucketEnergy:
    """Gradient energy of the rows of one bucket of tokens.

    Attributes:
        low, high: smallest and largest frequency in the bucket; tokens: how many it holds.
        rows: gradient rows at these tokens.
        energy_share: their part of the |g|^2 of all buckets.
        energy: E(Q_T) of these rows alone; lift: R; expected_random: exact mean of E over Haar-random normals,
            k (1-E) / (d-k). None where the rows have no gradient at all.
    """

    low: float
    high: float
    tokens: int
    rows: int
    energy_share: float
    energy: float | None
    lift: float | None
    expected_random: float | None


@dataclass(frozen=True, repr=False)
class TangentEnrichment(Shown):
    """Gradient energy along a tangent proxy, bucket by bucket, the rarest tokens first.

    Attributes:
        name: what the rows are.
        rank, d: of the subspace.
        energy, lift: over all buckets together.
        left_out: rows at tokens in no bucket.
    """

    name: str
    rank: int
    d: int
    energy: float
    lift: float
    buckets: tuple[BucketEnergy, ...]
    left_out: int

    def to_pandas(self) -> pandas.DataFrame:
        """One row a bucket."""
        import pandas

        return pandas.DataFrame([vars(one) for one in self.buckets])


def tangent_enrichment(sums: BucketSums, buckets: FrequencyBuckets) -> TangentEnrichment:
    """E(Q_T) and R within frequency buckets (``tangent_enrichment`` of section 7 of ``MEASUREMENTS``).

    Raises:
        ValueError: sums of other buckets, a subspace that fills its space, or no gradient at all.
    """
    (d, k), total = sums.basis.shape, float(sums.total.sum())
    if not torch.equal(sums.bucket_of, buckets.bucket_of):
        raise ValueError(f"{sums.name}: these sums were gathered by other buckets; pass the ones they were gathered by")
    if k >= d:
        raise ValueError(
            f"{sums.name}: a subspace of rank {k} fills all {d} dimensions and leaves none to compare with"
        )
    if not total > 0:
        raise ValueError(f"{sums.name}: the gradient is zero everywhere, so it has no direction")
    rows = zip(sums.count.tolist(), sums.total.tolist(), sums.along.tolist(), strict=True)
    energy = min(float(sums.along.sum()) / total, 1.0)
    return TangentEnrichment(
        name=sums.name,
        rank=k,
        d=d,
        energy=energy,
        lift=lift_of(energy, k, d),
        buckets=tuple(_bucket(buckets, place, *own, total, k, d) for place, own in enumerate(rows)),
        left_out=sums.left_out,
    )


def _bucket(
    buckets: FrequencyBuckets, place: int, rows: int, square: float, along: float, total: float, k: int, d: int
) -> BucketEnergy:
    energy = min(along / square, 1.0) if square > 0 else None
    return BucketEnergy(
        low=buckets.low[place],
        high=buckets.high[place],
        tokens=buckets.tokens[place],
        rows=rows,
        energy_share=square / total,
        energy=energy,
        lift=None if energy is None else lift_of(energy, k, d),
        expected_random=None if energy is None else k * (1 - energy) / (d - k),
    )
