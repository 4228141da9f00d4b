"""Intrinsic dimension of rows from the distances between neighbours, computed by scikit-dimension."""

from __future__ import annotations

import importlib
import math
import warnings
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from tangent_lens.measures.cosine import checked_rows
from tangent_lens.measures.neighbourhoods import first_of_equals

METHODS = ("two_nn", "mle")
# The standard error of either estimate is about the dimension over the root of the rows: a quarter of it at 16.
_FEWEST_ROWS = 20


class TooFewRows(ValueError):
    """Fewer distinct rows than an estimate needs."""


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
        TooFewRows: too few distinct rows.
        ValueError: an unknown method or option out of range; rows not of shape (n, d) or not finite; or rows so near to
            each other that their distances are rounding.
    """
    estimator, options, fewest = _chosen(method, neighbours, discard_fraction)
    values = checked_rows(rows)
    distinct = values[first_of_equals(values).unique()]
    if len(distinct) < fewest:
        raise TooFewRows(
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
    estimators = check_installed()
    if method == "mle":
        return estimators.MLE(), {"n_neighbors": neighbours}, max(_FEWEST_ROWS, neighbours + 1)
    return estimators.TwoNN(discard_fraction=discard_fraction), {}, _FEWEST_ROWS


def check_installed() -> Any:
    """scikit-dimension's estimators.

    Raises:
        ImportError: not installed; the sentence says what to install.
    """
    try:
        return importlib.import_module("skdim.id")
    except ImportError as problem:
        raise ImportError(
            f'intrinsic dimensions need scikit-dimension ({problem}): pip install "tangent-lens[dimension]"'
        ) from problem


def _estimated(estimator: Any, options: dict[str, Any], distinct: Float[Tensor, "n d"]) -> float:
    # Distances do not depend on the centre or the scale, but how many of their digits survive does.
    centred = distinct - distinct.mean(dim=0)
    centred = centred / centred.abs().max()
    if centred.shape[1] == 1:
        # scikit-dimension refuses a single column; a column of zeros changes no distance.
        centred = pad(centred, (0, 1))
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
