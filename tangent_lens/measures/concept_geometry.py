"""The geometry of a concept, that is of a set of rows, along depth: how many dimensions, how flat, which neighbours."""

from __future__ import annotations

import numbers
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tangent_lens.measures.dimension import TooFewRows, intrinsic_dimension
from tangent_lens.measures.neighbourhoods import (
    NeighbourhoodAgreement,
    NeighbourhoodOverlap,
    agreement_of_neighbours,
    checked_neighbours,
    checked_spread,
    first_of_equals,
    label_groups,
    labels_tell,
    nearest_neighbours,
    overlap_of_neighbours,
)
from tangent_lens.measures.spectrum import effective_rank
from tangent_lens.recording.row_sample import RowSample
from tangent_lens.showing import Shown
from tangent_lens.subspaces.ranks import noise_floor

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class ConceptGeometry:
    """The rows of one concept at one site.

    Attributes:
        rows: used; seen: given, of which ``seed`` chose them; d: dimensions of the space.
        two_nn, mle: intrinsic dimension by either method of
            :func:`~tangent_lens.measures.dimension.intrinsic_dimension`, with its own options; None where there are too
            few distinct rows for it.
        effective_rank: exp of the entropy of the eigenvalues of the covariance; participation_ratio: (sum of them)^2 /
            sum of their squares.
        m: principal directions behind the two below.
        linearity: share of the variance that lies along the m leading principal directions of the other half of the
            rows, about its mean, both halves in turn. 1 for a flat set of m dimensions.
        linearity_fitted: the same along the directions of all rows themselves; the larger, the more so the fewer rows.
        agreement: how many neighbours share a label; None without labels, or where all are the same or all different.
    """

    rows: int
    seen: int
    seed: int
    d: int
    two_nn: float | None
    mle: float | None
    effective_rank: float
    participation_ratio: float
    m: int
    linearity: float
    linearity_fitted: float
    agreement: NeighbourhoodAgreement | None = None


@dataclass(frozen=True, repr=False, eq=False)
class DepthGeometry(Shown):
    """One concept along the sites of a model.

    Attributes:
        sites: names, in the order in which they were given.
        geometries: one a site.
        overlap_before: of the neighbours of a site with those of the one before it; None at the first.
        overlap_first, overlap_last: with those of the first and of the last site; 1 of either with itself.
        neighbours: of every row used, one array (n, k) a site: to compare with the same rows elsewhere, as at another checkpoint.
    """

    sites: tuple[str, ...]
    geometries: tuple[ConceptGeometry, ...]
    overlap_before: tuple[NeighbourhoodOverlap | None, ...]
    overlap_first: tuple[NeighbourhoodOverlap, ...]
    overlap_last: tuple[NeighbourhoodOverlap, ...]
    neighbours: tuple[Int[Tensor, "n k"], ...]

    def of(self, site: str) -> ConceptGeometry:
        """The geometry at one site.

        Raises:
            KeyError: not measured.
        """
        if site not in self.sites:
            raise KeyError(f"{site!r} was not measured; measured: {', '.join(self.sites)}")
        return self.geometries[self.sites.index(site)]

    def to_pandas(self) -> pandas.DataFrame:
        """One row a site, one column a number; one that is not there is NaN."""
        import pandas

        return pandas.DataFrame([self._flat(place) for place in range(len(self.sites))])

    def _flat(self, place: int) -> dict[str, object]:
        before, one = self.overlap_before[place], self.geometries[place]
        agreement = one.agreement
        found = {
            "site": self.sites[place],
            **{name: value for name, value in asdict(one).items() if name != "agreement"},
            "neighbours": self.overlap_first[place].k,
            "agreement": agreement and agreement.agreement,
            "agreement_expected": agreement and agreement.expected,
            "agreement_attainable": agreement and agreement.attainable,
            "overlap_before": before and before.overlap,
            "overlap_first": self.overlap_first[place].overlap,
            "overlap_last": self.overlap_last[place].overlap,
            "overlap_expected": self.overlap_first[place].expected,
        }
        return {name: float("nan") if value is None else value for name, value in found.items()}


def concept_geometry(
    rows: Float[Tensor, "n d"],
    *,
    m: int,
    labels: Sequence[Hashable] | Tensor | None = None,
    neighbours: int = 30,
    most: int = 2000,
    seed: int = 0,
) -> ConceptGeometry:
    """Dimension, flatness and, with labels, neighbours of the rows of a concept.

    No number depends on rotation, shift or scale of the rows. Their order matters to the choice of at most ``most`` and
    of the halves of ``linearity``, so for those it is as good as another seed. Equal rows, such as a token's at
    position 0, count as often as they occur (but once in the intrinsic dimensions) and may fall in both halves.

    Args:
        rows: the occurrences.
        m: principal directions to hold the rows against; 1 to d.
        labels: one a row, such as its token.
        neighbours: of each row, for the agreement of labels.
        most: rows used; of more, that many are chosen by ``seed``.
        seed: of that choice and of the halves.

    Raises:
        ImportError: scikit-dimension or, with labels, scikit-learn is not installed.
        ValueError: rows that are not (n, d), not finite or all equal; fewer than 2 (m + 1) used; m, most, seed or
            neighbours out of range; labels that are not one a row; or distances between rows that are rounding.

    Source: participation ratio and effective rank (Roy and Vetterli 2007) as in
    :mod:`~tangent_lens.measures.spectrum`; the halves are cross-validated PCA with two folds.
    """
    groups = None if labels is None else label_groups(labels, len(rows))
    places = _chosen_rows(len(rows), most, seed)
    values = _checked(rows, places, m)
    agreement = None
    if groups is not None:
        neighbours = checked_neighbours(neighbours, len(values))
        if labels_tell(groups[places]):
            agreement = agreement_of_neighbours(nearest_neighbours(values, neighbours), groups[places])
    return _geometry(values, len(rows), m, seed, agreement)


def depth_geometry(
    samples: Mapping[str, RowSample], *, m: int = 16, neighbours: int = 30, most: int = 2000, seed: int = 0
) -> DepthGeometry:
    """:func:`concept_geometry` at every site, with tokens as labels, and the overlap of neighbourhoods between sites.

    The same rows are used at every site, chosen once by ``seed``.

    Args:
        samples: from name of a site to its sample, in the order of depth; the same rows in the same order.
        m, neighbours, most, seed: as for :func:`concept_geometry`; ``neighbours`` also for the overlaps.

    Raises:
        ImportError: scikit-dimension or scikit-learn is not installed.
        ValueError: no samples, samples of different rows, or at some site, which is named, what
            :func:`concept_geometry` refuses.
    """
    tokens = _shared_tokens(samples)
    places = _chosen_rows(len(tokens), most, seed)
    used = tokens[places]
    geometries: list[ConceptGeometry] = []
    found: list[Int[Tensor, "n k"]] = []
    for site, sample in samples.items():
        with _naming(site):
            values = _checked(sample.rows, places, m)
            nearest = nearest_neighbours(values, neighbours)
            agreement = agreement_of_neighbours(nearest, used) if labels_tell(used) else None
            geometries.append(_geometry(values, len(tokens), m, seed, agreement))
        found.append(nearest)
    before = [overlap_of_neighbours(one, other) for one, other in pairwise(found)]
    return DepthGeometry(
        sites=tuple(samples),
        geometries=tuple(geometries),
        overlap_before=(None, *before),
        overlap_first=tuple(overlap_of_neighbours(found[0], one) for one in found),
        overlap_last=tuple(overlap_of_neighbours(found[-1], one) for one in found),
        neighbours=tuple(one.int() for one in found),
    )


def _shared_tokens(samples: Mapping[str, RowSample]) -> Int[Tensor, " n"]:
    """The tokens of the rows, which every sample has in the same order."""
    if not samples:
        raise ValueError("no samples, so there is no depth; give one a site")
    (first, model), *others = samples.items()
    for name, sample in others:
        same = torch.equal(sample.tokens.cpu(), model.tokens.cpu())
        if not same or not torch.equal(sample.sequences.cpu(), model.sequences.cpu()):
            raise ValueError(
                f"{name} holds {len(sample)} rows of other tokens or sequences than the {len(model)} of {first}; "
                "sample all sites in one pass, or with the same texts, number of rows and seed"
            )
    return model.tokens.cpu()


@contextmanager
def _naming(site: str) -> Iterator[None]:
    try:
        yield
    except ValueError as problem:
        raise ValueError(f"{site}: {problem}") from problem


def _chosen_rows(count: int, most: int, seed: int) -> Int[Tensor, " n"]:
    """Places of the rows to use, ascending."""
    for name, value in (("most", most), ("seed", seed)):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
            raise ValueError(f"{name}={value!r} must be a whole number, 0 or more")
    if count <= most:
        return torch.arange(count)
    return torch.from_numpy(np.sort(np.random.default_rng(seed).choice(count, size=most, replace=False)))


def _geometry(
    values: Float[Tensor, "n d"], seen: int, m: int, seed: int, agreement: NeighbourhoodAgreement | None
) -> ConceptGeometry:
    centred = values - values.mean(dim=0)
    eigenvalues = _eigenvalues(centred)
    shares = eigenvalues / eigenvalues.sum()
    # Of many equal rows the pairs would fill the memory, and the dimensions leave them out anyway.
    distinct = values[first_of_equals(values).unique()]
    return ConceptGeometry(
        rows=len(values),
        seen=seen,
        seed=seed,
        d=values.shape[1],
        two_nn=_dimension(distinct, "two_nn"),
        mle=_dimension(distinct, "mle"),
        effective_rank=effective_rank(eigenvalues),
        participation_ratio=1 / float(shares.square().sum()),
        m=m,
        linearity=_held_out_linearity(centred, m, seed),
        linearity_fitted=min(float(shares[:m].sum()), 1.0),
        agreement=agreement,
    )


def _checked(rows: Float[Tensor, "n d"], places: Int[Tensor, " u"], m: int) -> Float[Tensor, "u d"]:
    """The rows to use, in float64 and about 1 in size."""
    if isinstance(m, bool) or not isinstance(m, numbers.Integral) or m < 1:
        raise ValueError(f"m={m!r} principal directions must be a whole number from 1 on")
    used = len(places)
    if used < 2 * (m + 1):
        smaller = f", or m <= {used // 2 - 1}" if used >= 4 else ""
        raise ValueError(
            f"{used} of {len(rows)} rows do not determine m={m} principal directions in each half; use {2 * (m + 1)} "
            f"rows or more, and a value of most that allows them{smaller}"
        )
    if rows.ndim == 2 and m > rows.shape[1]:
        raise ValueError(
            f"m={m} principal directions do not fit in {rows.shape[1]} dimensions; use m <= {rows.shape[1]}"
        )
    if not bool(torch.isfinite(rows).all()):
        raise ValueError("the rows hold NaN or infinity; leave such rows out")
    return checked_spread(rows[places])


def _dimension(distinct: Float[Tensor, "n d"], method: str) -> float | None:
    try:
        return intrinsic_dimension(distinct, method).dimension
    except TooFewRows:
        return None


def _eigenvalues(centred: Float[Tensor, "n d"]) -> Float[Tensor, " r"]:
    """Sums of squares along the principal directions, in descending order; 0 where they are rounding."""
    n, d = centred.shape
    found = torch.linalg.eigvalsh(centred.T @ centred if d <= n else centred @ centred.T).flip(0)
    return torch.where(found > noise_floor(found), found, 0.0)


def _principal_directions(centred: Float[Tensor, "n d"], m: int, floor: float) -> Float[Tensor, "d m"]:
    """The m leading ones; fewer where no more hold a sum of squares above the floor: further ones would be anywhere."""
    n, d = centred.shape
    values, vectors = torch.linalg.eigh(centred.T @ centred if d <= n else centred @ centred.T)
    kept = min(m, int((values > max(floor, noise_floor(values))).sum()))
    leading = vectors.flip(1)[:, :kept]
    if d <= n:
        return leading
    along = centred.T @ leading
    # The smallest of them have lost digits as eigenvectors of the smaller matrix.
    return torch.linalg.qr(along / along.norm(dim=0)).Q


def _held_out_linearity(centred: Float[Tensor, "n d"], m: int, seed: int) -> float:
    """Variance along the directions of the other half over all variance, each about the mean of that other half."""
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(centred)))
    halves = centred[order[: len(order) // 2]], centred[order[len(order) // 2 :]]
    floor = 1e-10 * float(centred.square().sum())
    along = total = 0.0
    for fitted, held_out in (halves, halves[::-1]):
        centre = fitted.mean(dim=0)
        basis = _principal_directions(fitted - centre, m, floor)
        along += float(((held_out - centre) @ basis).square().sum())
        total += float((held_out - centre).square().sum())
    return min(along / total, 1.0)
