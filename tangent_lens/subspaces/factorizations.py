"""Fits of scikit-learn on rows: non-negative factors, independent components, clusters, sparse dictionaries."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.recording.row_sample import RowSample
from tangent_lens.subspaces.sampled import as_sample, checked_rows, sample_origin, span_of
from tangent_lens.subspaces.subspace import Subspace, unit_columns

# Of rows in float32; what varies less than this beside the largest is rounding.
_ROUNDING = 1e-7


def fit_nmf(
    sample: RowSample | Float[Tensor, "n d"],
    rank: int,
    *,
    seed: int = 0,
    iterations: int = 500,
    tolerance: float = 1e-4,
) -> Subspace:
    """The span of the parts of a non-negative matrix factorisation X ~ A D with A >= 0 and D >= 0.

    Args:
        sample: the rows, none of them negative (after a ReLU, say).
        rank: how many parts.
        seed: of the start.
        iterations: at most.
        tolerance: of scikit-learn's stopping rule.

    Returns:
        A subspace about zero whose ``directions`` are the parts, each of length 1.

    Raises:
        ImportError: scikit-learn is missing.
        ValueError: negative rows, a rank that the rows do not allow, or parts that came out dependent.

    Source: Lee and Seung 1999, Nature 401; scikit-learn's coordinate descent.
    """
    sample = as_sample(sample)
    rows, centre = checked_rows(sample, rank, center=False)
    if float(rows.min()) < 0:
        raise ValueError(
            f"{sample.name}: NMF needs rows without negative numbers, and the least is {float(rows.min()):.3g}; "
            "use fit_semi_nmf, which takes any"
        )
    _check_span(rows, rank, sample.name)
    model, converged = _fitted(
        "decomposition.NMF",
        rows.numpy(),
        n_components=rank,
        init="nndsvda",
        random_state=seed,
        max_iter=iterations,
        tol=tolerance,
    )
    error = float(model.reconstruction_err_) / float(torch.linalg.vector_norm(rows))
    origin = sample_origin(
        sample, "nmf", seed=seed, iterations=int(model.n_iter_), relative_error=error, converged=converged
    )
    return span_of(unit_columns(torch.from_numpy(model.components_.T)), rank, centre, origin)


def fit_ica(
    sample: RowSample | Float[Tensor, "n d"],
    rank: int,
    *,
    seed: int = 0,
    iterations: int = 500,
    tolerance: float = 1e-4,
) -> Subspace:
    """The span of independent components: their mixing directions.

    The span is that of as many principal directions, in which FastICA looks; the directions inside it are its own.

    Args:
        sample: the rows.
        rank: how many components.
        seed: of the start.
        iterations: at most.
        tolerance: of scikit-learn's stopping rule.

    Returns:
        A subspace about the mean whose ``directions`` are what one standard deviation of each source adds to a row.

    Raises:
        ImportError: scikit-learn is missing.
        ValueError: a rank that the rows do not allow.

    Source: Hyvärinen 1999, IEEE Transactions on Neural Networks 10(3); scikit-learn's FastICA.
    """
    sample = as_sample(sample)
    rows, centre = checked_rows(sample, rank, center=True)
    _check_span(rows, rank, sample.name)
    model, converged = _fitted(
        "decomposition.FastICA",
        rows.numpy(),
        n_components=rank,
        whiten="unit-variance",
        random_state=seed,
        max_iter=iterations,
        tol=tolerance,
    )
    origin = sample_origin(sample, "ica", seed=seed, iterations=int(model.n_iter_), converged=converged)
    return span_of(torch.from_numpy(model.mixing_), rank, centre, origin)


def fit_kmeans(
    sample: RowSample | Float[Tensor, "n d"], rank: int, *, seed: int = 0, iterations: int = 300, starts: int = 4
) -> Subspace:
    """The span of the centres of rank + 1 clusters about the mean of the rows.

    One cluster more than the rank, as the mean of the rows is a mixture of the centres.

    Args:
        sample: the rows.
        rank: dimensions, one fewer than the clusters.
        seed: of the starts.
        iterations: at most, in each start.
        starts: the best of so many.

    Returns:
        A subspace about the mean whose ``directions`` are the centres minus the mean (d, rank + 1).

    Raises:
        ImportError: scikit-learn is missing.
        ValueError: a rank that the rows do not allow, or centres that span less.

    Source: Lloyd 1982, IEEE Transactions on Information Theory 28(2); scikit-learn's KMeans.
    """
    sample = as_sample(sample)
    rows, centre = checked_rows(sample, rank, center=True)
    model, found_clusters = _fitted(
        "cluster.KMeans",
        rows.numpy(),
        n_clusters=rank + 1,
        n_init=starts,
        random_state=seed,
        max_iter=iterations,
    )
    origin = sample_origin(
        sample,
        "kmeans",
        seed=seed,
        clusters=rank + 1,
        iterations=int(model.n_iter_),
        relative_error=(float(model.inertia_) / float(rows.square().sum())) ** 0.5,
        converged=found_clusters and int(model.n_iter_) < iterations,
    )
    return span_of(torch.from_numpy(model.cluster_centers_.T), rank, centre, origin)


def fit_dictionary(
    sample: RowSample | Float[Tensor, "n d"],
    rank: int,
    *,
    seed: int = 0,
    iterations: int = 50,
    penalty: float = 1.0,
) -> Subspace:
    """The span of the atoms of a sparse dictionary, learned in small batches.

    Args:
        sample: the rows.
        rank: how many atoms.
        seed: of the start and of the batches.
        iterations: passes over the rows, at most.
        penalty: of the absolute codes, for rows scaled to a mean square of 1 in each dimension.

    Returns:
        A subspace about the mean whose ``directions`` are the atoms, each of length 1.

    Raises:
        ImportError: scikit-learn is missing.
        ValueError: a rank that the rows do not allow, a penalty that is not positive, or atoms that came out dependent.

    Source: Mairal, Bach, Ponce and Sapiro 2009, ICML; scikit-learn's MiniBatchDictionaryLearning.
    """
    sample = as_sample(sample)
    rows, centre = checked_rows(sample, rank, center=True)
    if not penalty > 0:
        raise ValueError(f"penalty={penalty} must be above 0; without one no code is sparse")
    _check_span(rows, rank, sample.name)
    model, converged = _fitted(
        "decomposition.MiniBatchDictionaryLearning",
        (rows / rows.square().mean().sqrt()).numpy(),
        n_components=rank,
        alpha=penalty,
        fit_algorithm="cd",
        transform_algorithm="lasso_cd",
        batch_size=min(256, len(rows)),
        max_iter=iterations,
        random_state=seed,
    )
    origin = sample_origin(
        sample,
        "dictionary",
        seed=seed,
        penalty=penalty,
        iterations=int(model.n_iter_),
        converged=converged and int(model.n_iter_) < iterations,
    )
    return span_of(unit_columns(torch.from_numpy(model.components_.T)), rank, centre, origin)


def _check_span(rows: Float[Tensor, "n d"], rank: int, name: str) -> None:
    """Refuse what would be filled up with directions of chance, or divided by no variance."""
    values = torch.linalg.svdvals(rows)
    spanned = int((values > _ROUNDING * values[0]).sum())
    if rank > spanned:
        raise ValueError(
            f"{name}: the rows span only {spanned} dimensions, rank {rank} was asked; use rank <= {spanned}"
        )


def _fitted(name: str, rows: np.ndarray, **options: Any) -> tuple[Any, bool]:
    """A fitted model of scikit-learn, and whether it did without a warning that it had not converged."""
    module, _, model = name.rpartition(".")
    try:
        kind = getattr(importlib.import_module(f"sklearn.{module}"), model)
        from sklearn.exceptions import ConvergenceWarning
    except ImportError as missing:
        raise ImportError('this fit needs scikit-learn; install it with: pip install "tangent-lens[fits]"') from missing
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        fitted = kind(**options).fit(rows)
    others = [one for one in caught if not issubclass(one.category, ConvergenceWarning)]
    for other in others:
        warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
    return fitted, len(others) == len(caught)
