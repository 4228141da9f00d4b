"""Which rows are neighbours, and what becomes of the neighbourhoods from one layer to another."""

from __future__ import annotations

import math
import numbers
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tangent_lens.measures.cosine import checked_rows

_ROUNDING = 1e-5
# Rows whose greatest difference is this share of their greatest entry are equal in float64.
_EQUAL = 1e-12
# Numbers in the largest temporary: 64 MiB.
_CHUNK = 2**23


@dataclass(frozen=True)
class NeighbourhoodOverlap:
    """How far the same rows have the same neighbours in two spaces.

    Attributes:
        rows: compared; k: neighbours of each.
        overlap: mean share of a row's k nearest in one space that are among its k nearest in the other.
        expected: the overlap of neighbourhoods that have nothing to do with each other, k / (rows - 1).
        standard_error: of the overlap, as if rows were independent; rows that share neighbours are not, so it is a
            lower limit.
    """

    rows: int
    k: int
    overlap: float
    expected: float
    standard_error: float


@dataclass(frozen=True)
class NeighbourhoodAgreement:
    """How far neighbours carry the same label.

    Attributes:
        rows: compared; k: neighbours of each; labels: how many different ones.
        agreement: mean share of a row's k nearest that carry its own label.
        expected: the agreement under shuffled labels, sum of n_c (n_c - 1) / (n (n - 1)) over labels c of n_c rows.
        attainable: the largest agreement that these counts allow: a label of k rows or fewer never fills k places.
        standard_error: of the agreement, as if rows were independent, so a lower limit.
    """

    rows: int
    k: int
    labels: int
    agreement: float
    expected: float
    attainable: float
    standard_error: float


def nearest_neighbours(rows: Float[Tensor, "n d"], k: int) -> Int[Tensor, "n k"]:
    """The k nearest other rows of each row, the nearest first, by Euclidean distance.

    A row is never its own neighbour, whatever equals it. Rows that differ by no more than the rounding of a model
    (:func:`first_of_equals`) count as equal, and of equally distant rows the lower comes first. So the neighbours of
    duplicates, and duplicates as neighbours, are the same ones at every layer.

    scikit-learn finds candidates through one matrix product of the centred rows, which loses digits; these are ordered
    by the lengths of the differences, and where a row that is no candidate could be as near as the k-th up to that
    loss, all rows are. Costs O(n^2 d) time and, beside a few copies of the rows and the result, 64 MiB or the distances
    of one row from all, whichever is more; 32 bytes a pair of rows that are equal but for rounding come on top.

    Args:
        rows: n points.
        k: 1 to n - 1.

    Returns:
        Places of rows.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: rows that are not (n, d), not finite, or all equal; k out of range.
    """
    values = checked_spread(rows)
    k = checked_neighbours(k, len(values))
    values = values[first_of_equals(values)]
    centred = values - values.mean(dim=0)
    count = min(len(values), k + 1 + max(k // 2, 8))
    search = _search(centred, count)
    step = max(1, _CHUNK // max(count * values.shape[1], len(values)))
    parts = [
        _nearest_of(search, values, centred, torch.arange(start, min(start + step, len(values))), k)
        for start in range(0, len(values), step)
    ]
    return torch.cat(parts)


def first_of_equals(rows: Float[Tensor, "n d"]) -> Int[Tensor, " n"]:
    """For each row the place of the first that equals it, its own where it is that.

    Rows are equal that a chain of others joins, each within 1e-5 of the root mean square distance to the mean: one
    token in two batches of different shapes gives rows that differ by so much.
    """
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import connected_components

    # Exact copies first: of these there may be many, and their pairs would be very many.
    distinct, copy_of = torch.unique(rows, dim=0, return_inverse=True)
    centred = rows - rows.mean(dim=0)
    near = _near_pairs(distinct, _ROUNDING * float(centred.square().sum(dim=1).mean().sqrt()))
    graph = csr_matrix((np.ones(len(near)), (near[:, 0].numpy(), near[:, 1].numpy())), shape=(len(distinct),) * 2)
    count, group = connected_components(graph, directed=False)
    groups = torch.from_numpy(group).long()[copy_of]
    first = torch.full((int(count),), len(rows)).scatter_reduce_(0, groups, torch.arange(len(rows)), "amin")
    return first[groups]


def _near_pairs(rows: Float[Tensor, "n d"], radius: float) -> Int[Tensor, "p 2"]:
    from scipy.spatial import KDTree

    # A few directions tell almost all rows apart; whole rows are compared only where these do not.
    width = rows.shape[1]
    few = torch.from_numpy(np.linalg.qr(np.random.default_rng(0).normal(size=(width, min(width, 8))))[0])
    pairs = KDTree(((rows - rows.mean(dim=0)) @ few).numpy()).query_pairs(radius, output_type="ndarray")
    parts = torch.from_numpy(pairs).long().split(max(1, _CHUNK // width))
    return torch.cat([part[(rows[part[:, 0]] - rows[part[:, 1]]).norm(dim=1) <= radius] for part in parts])


def neighbourhood_overlap(
    first: Float[Tensor, "n d"], second: Float[Tensor, "n e"], k: int = 30
) -> NeighbourhoodOverlap:
    """Mean share of each row's k nearest neighbours in one space that are also among its k nearest in the other.

    It is 1 for two spaces that differ by a rotation, a shift and a scale, and the same whichever of the two comes
    first. Rows that are equal in both, such as those of one token at position 0, are neighbours in both and raise it.

    Args:
        first, second: the same n rows in the same order, say at two layers; widths may differ.
        k: 1 to n - 1; the published work takes 30.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: numbers of rows that differ, or what :func:`nearest_neighbours` refuses.

    Source: Doimo, Glielmo, Ansuini and Laio 2020, "Hierarchical nucleation in deep neural networks";
    along the layers of transformers, Valeriani et al. 2023, "The geometry of hidden representations of large
    transformer models".
    """
    if len(first) != len(second):
        raise ValueError(
            f"{len(first)} rows and {len(second)} rows are not the same ones; an overlap compares one set of rows in "
            "two spaces, in one order"
        )
    return overlap_of_neighbours(nearest_neighbours(first, k), nearest_neighbours(second, k))


def neighbourhood_agreement(
    rows: Float[Tensor, "n d"], labels: Sequence[Hashable] | Tensor, k: int = 30
) -> NeighbourhoodAgreement:
    """Mean share of a row's k nearest neighbours that carry its own label, such as its token.

    Args:
        rows: n points.
        labels: one a row.
        k: 1 to n - 1.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: what :func:`nearest_neighbours` refuses; labels that are not one a row, or not equal to themselves
            (NaN); or all equal or all different, where the share is 1 or 0 whatever the rows.

    Source: the overlap with the ground truth of Doimo et al. 2020, "Hierarchical nucleation in deep neural networks".
    """
    groups = label_groups(labels, len(rows))
    if not labels_tell(groups):
        kind = "all different" if int(groups.max()) else "all the same"
        raise ValueError(
            f"the labels of {len(groups)} rows are {kind}, so the rows have no say in how many neighbours agree; use "
            "two labels or more, of which one has two rows or more"
        )
    return agreement_of_neighbours(nearest_neighbours(rows, k), groups)


def overlap_of_neighbours(first: Int[Tensor, "n k"], second: Int[Tensor, "n k"]) -> NeighbourhoodOverlap:
    """:func:`neighbourhood_overlap` of neighbours that were found before."""
    rows, k = first.shape
    both = torch.cat([first, second], dim=1).sort(dim=1).values
    # No place is twice among the neighbours of one row, so a repeated one is in both.
    shares = (both[:, 1:] == both[:, :-1]).sum(dim=1).double() / k
    return NeighbourhoodOverlap(rows, k, float(shares.mean()), k / (rows - 1), _error(shares))


def agreement_of_neighbours(neighbours: Int[Tensor, "n k"], groups: Int[Tensor, " n"]) -> NeighbourhoodAgreement:
    """:func:`neighbourhood_agreement` of neighbours and groups that were found before."""
    rows, k = neighbours.shape
    shares = (groups[neighbours] == groups[:, None]).double().mean(dim=1)
    counts = groups.unique(return_counts=True)[1]
    others = (counts - 1).double()
    return NeighbourhoodAgreement(
        rows=rows,
        k=k,
        labels=len(counts),
        agreement=float(shares.mean()),
        expected=float((counts * others).sum()) / (rows * (rows - 1)),
        attainable=float((counts * others.clamp(max=k)).sum()) / (rows * k),
        standard_error=_error(shares),
    )


def label_groups(labels: Sequence[Hashable] | Tensor, rows: int) -> Int[Tensor, " n"]:
    """Labels as numbers from 0 on, in the order in which they first occur.

    Raises:
        ValueError: not one a row, or a label that is not equal to itself (NaN).
    """
    if isinstance(labels, (Tensor, np.ndarray)) and labels.ndim != 1:
        raise ValueError(f"labels must be of shape (n,), not {tuple(labels.shape)}; one a row")
    listed: list[Any] = labels.tolist() if isinstance(labels, (Tensor, np.ndarray)) else list(labels)
    if len(listed) != rows:
        raise ValueError(f"{len(listed)} labels do not fit {rows} rows; give one a row, in their order")
    for place, label in enumerate(listed):
        if label != label:
            raise ValueError(f"the label of row {place} is {label!r}, which equals nothing; leave such rows out")
    number = {label: place for place, label in enumerate(Counter(listed))}
    return torch.tensor([number[label] for label in listed], dtype=torch.long)


def labels_tell(groups: Int[Tensor, " n"]) -> bool:
    """Whether the agreement can depend on the rows: more than one label, and one that some row shares."""
    return 1 < len(groups.unique()) < len(groups)


def checked_spread(rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """The rows in float64, divided by a power of two so that no square under- or overflows.

    Raises:
        ValueError: not of shape (n, d) with 2 rows or more, not finite, or all equal.
    """
    values = checked_rows(rows)
    if len(values) < 2:
        raise ValueError(f"{len(values)} row has no neighbour; use 2 or more")
    exponent = math.frexp(float(values.abs().max()))[1]
    values = torch.from_numpy(np.ldexp(values.numpy(), -exponent))
    spread = float((values - values[0]).abs().max())
    if spread <= _EQUAL:
        raise ValueError(
            f"all {len(values)} rows are equal, so none is nearer than another; where the input embeddings of one "
            "token are, take a later layer"
        )
    # Again, by the spread: rows far from the origin may differ by little.
    return torch.from_numpy(np.ldexp(values.numpy(), -math.frexp(spread)[1]))


def checked_neighbours(k: int, rows: int) -> int:
    """A number of neighbours that the rows have.

    Raises:
        ValueError: not a whole number from 1 to rows - 1.
    """
    if isinstance(k, bool) or not isinstance(k, numbers.Real) or not float(k).is_integer():
        raise ValueError(f"k={k!r} neighbours must be a whole number; 30 is usual")
    if not 1 <= k <= rows - 1:
        raise ValueError(
            f"k={k} neighbours do not fit {rows} rows, of which each has {rows - 1} others; use 1 to {rows - 1}"
        )
    return int(k)


def _search(centred: Float[Tensor, "n d"], count: int) -> Any:
    try:
        from sklearn.neighbors import NearestNeighbors
    except ImportError as problem:
        raise ImportError(
            f'neighbourhoods need scikit-learn ({problem}): pip install "tangent-lens[fits]"'
        ) from problem
    # Trees gain nothing in hundreds of dimensions.
    return NearestNeighbors(n_neighbors=count, algorithm="brute").fit(centred.numpy())


def _nearest_of(
    search: Any, values: Float[Tensor, "n d"], centred: Float[Tensor, "n d"], places: Int[Tensor, " c"], k: int
) -> Int[Tensor, "c k"]:
    """The neighbours of some rows."""
    reached, candidates = (torch.from_numpy(found) for found in search.kneighbors(centred[places].numpy()))
    candidates = candidates.long().sort(dim=1).values
    distances = _distances(values[places][:, None], values[candidates])[:, 0]
    found, farthest = _ordered(distances, candidates, places, k)
    if candidates.shape[1] == len(values):
        return found
    unsure = _may_miss(centred[places].norm(dim=1), reached[:, -1], farthest, values.shape[1])
    if bool(unsure.any()):
        own = places[unsure]
        everyone = torch.arange(len(values)).expand(len(own), -1)
        found[unsure] = _ordered(_distances(values[own], values), everyone, own, k)[0]
    return found


def _distances(first: Tensor, second: Tensor) -> Tensor:
    return torch.cdist(first, second, compute_mode="donot_use_mm_for_euclid_dist")


def _ordered(
    distances: Float[Tensor, "c m"], candidates: Int[Tensor, "c m"], places: Int[Tensor, " c"], k: int
) -> tuple[Int[Tensor, "c k"], Float[Tensor, " c"]]:
    """The k nearest candidates, which come in ascending order, and the distance of the k-th."""
    distances = distances.masked_fill(candidates == places[:, None], math.inf)
    ordered = distances.sort(dim=1, stable=True)
    return candidates.gather(1, ordered.indices[:, :k]), ordered.values[:, k - 1]


def _may_miss(
    sizes: Float[Tensor, " c"], reached: Float[Tensor, " c"], farthest: Float[Tensor, " c"], width: int
) -> Bool[Tensor, " c"]:
    """Whether some row that is no candidate may be as near as the k-th neighbour.

    |x|^2 - 2 x.y + |y|^2 errs by no more than about (d + 8) epsilon (|x| + |y|)^2, and a row y within the distance r of
    x is no longer than |x| + r.
    """
    loss = (width + 8) * torch.finfo(torch.float64).eps * (2 * sizes + farthest).square()
    return reached.square() - loss <= farthest.square()


def _error(shares: Float[Tensor, " n"]) -> float:
    return float(shares.std() / math.sqrt(len(shares)))
