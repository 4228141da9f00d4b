"""Intrinsic dimension of rows from the distances between neighbours, computed by scikit-dimension."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tangent_lens.measures.cosine import checked_rows

METHODS = ("two_nn", "mle")
# The standard error of either estimate is about the dimension over the root of the rows: a quarter of it at 16.
_FEWEST_ROWS = 20
# One token in two batches of different shapes gives rows that differ by this much of a row's size, in float32.
_ROUNDING = 1e-5


@dataclass(frozen=True)
class IntrinsicDimension:
    """How many coordinates the rows need near any of them.

    Attributes:
        method: ``two_nn`` or ``mle``.
        dimension: the estimate.
        rows: distinct rows it was made of.
        duplicates: rows that were left out because an equal one was there already.
    """

    method: str
    dimension: float
    rows: int
    duplicates: int


def intrinsic_dimension(
    rows: Float[Tensor, "n d"], method: str = "two_nn", *, neighbours: int = 20, discard_fraction: float = 0.1
) -> IntrinsicDimension:
    """Estimate the intrinsic dimension of rows; duplicates, whose distance is 0 or rounding, are dropped and counted.

    Costs O(n^2 d) time; take a sample of a few thousand rows. Both estimates fall below the truth in high
    dimensions, so compare only equal numbers of rows.

    Args:
        rows: n points; equal tokens at position 0 give equal rows.
        method: ``two_nn`` (Facco, d'Errico, Rodriguez and Laio 2017: the line through the logarithms of the ratios of
            second to first neighbour distances) or ``mle`` (Levina and Bickel 2004, inverses averaged over the rows
            as MacKay and Ghahramani 2005 correct it).
        neighbours: for ``mle``, how many each row is compared with.
        discard_fraction: for ``two_nn``, the share of largest ratios left out of the fit.

    Raises:
        ImportError: scikit-dimension is not installed.
        ValueError: an unknown method or option out of range; rows not of shape (n, d) or not finite; too few distinct
            rows; or rows so near to each other that their distances are rounding.
    """
    estimator, options, fewest = _chosen(method, neighbours, discard_fraction)
    values = checked_rows(rows)
    distinct = values[_first_of_equals(values)]
    if len(distinct) < fewest:
        raise ValueError(
            f"{len(distinct)} distinct rows of {len(values)} are too few for {method!r}, which needs {fewest}; use more text"
        )
    dimension = _estimated(estimator, options, distinct)
    return IntrinsicDimension(method, dimension, len(distinct), len(values) - len(distinct))


def _chosen(method: str, neighbours: int, discard_fraction: float) -> tuple[Any, dict[str, Any], int]:
    """The estimator, what its fit takes, and the fewest rows it can use."""
    if method not in METHODS:
        raise ValueError(f"method {method!r} must be one of {', '.join(METHODS)}")
    if neighbours < 3:
        raise ValueError(f"neighbours={neighbours} give no estimate; use 3 or more (20 is usual)")
    if not 0 <= discard_fraction < 1:
        raise ValueError(f"discard_fraction={discard_fraction} must lie in [0, 1); 0.1 is usual")
    try:
        from skdim.id import MLE, TwoNN  # pyright: ignore[reportMissingImports]
    except ImportError as problem:
        raise ImportError(
            f'intrinsic dimensions need scikit-dimension ({problem}): pip install "tangent-lens[dimension]"'
        ) from problem
    if method == "mle":
        return MLE(), {"n_neighbors": neighbours}, max(_FEWEST_ROWS, neighbours + 1)
    return TwoNN(discard_fraction=discard_fraction), {}, _FEWEST_ROWS


def _first_of_equals(rows: Float[Tensor, "n d"]) -> Int[Tensor, " m"]:
    """Places of the rows without those that equal an earlier one up to the rounding of the model that made them."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import connected_components
    from scipy.spatial import KDTree

    centred = rows - rows.mean(dim=0)
    radius = _ROUNDING * float(centred.square().sum(dim=1).mean().sqrt())
    # Four directions tell almost all rows apart; whole rows are compared only where these do not.
    along = torch.linalg.svd(centred[: 4 * len(rows[0])], full_matrices=False).Vh[:4]
    pairs = KDTree((centred @ along.T).numpy()).query_pairs(radius, output_type="ndarray")
    near = torch.from_numpy(pairs).long()
    near = near[(rows[near[:, 0]] - rows[near[:, 1]]).norm(dim=1) <= radius]
    count = len(rows)
    graph = csr_matrix((torch.ones(len(near)).numpy(), (near[:, 0].numpy(), near[:, 1].numpy())), shape=(count, count))
    _, group = connected_components(graph, directed=False)
    groups = torch.from_numpy(group).long()
    first = torch.full((int(groups.max()) + 1,), count).scatter_reduce_(0, groups, torch.arange(count), "amin")
    return first.sort().values


def _estimated(estimator: Any, options: dict[str, Any], distinct: Float[Tensor, "n d"]) -> float:
    # Distances do not depend on the centre or the scale, but how many of their digits survive does.
    centred = distinct - distinct.mean(dim=0)
    centred = centred / centred.abs().max()
    if centred.shape[1] == 1:
        # scikit-dimension refuses a single column; a column of zeros changes no distance.
        centred = torch.nn.functional.pad(centred, (0, 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dimension = float(estimator.fit(centred.numpy(), **options).dimension_)
    if caught or not math.isfinite(dimension) or dimension <= 0:
        reason = f" ({caught[0].message})" if caught else ""
        raise ValueError(
            f"these rows gave no dimension but {dimension}{reason}: some are so near to each other that their distance "
            "is rounding; round the rows, so that they become equal and are dropped, or leave them out"
        )
    return dimension
