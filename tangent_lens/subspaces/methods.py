"""The fits by name, for code that lets a person choose one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from tangent_lens.recording.moments import Moments, SecondMoments
from tangent_lens.recording.row_sample import RowSample
from tangent_lens.subspaces.factorizations import fit_dictionary, fit_ica, fit_kmeans, fit_nmf
from tangent_lens.subspaces.fits import fit_pca
from tangent_lens.subspaces.semi_nmf import fit_semi_nmf
from tangent_lens.subspaces.subspace import Subspace


@dataclass(frozen=True)
class FitMethod:
    """How a fit is called.

    Attributes:
        needs: what it works on: ``moments`` (a bounded sum over any number of rows) or ``rows`` (a sample of them).
        call: (what it needs, rank, seed) to a subspace.
    """

    needs: Literal["moments", "rows"]
    call: Callable[[Any, Any, int], Subspace]


FITS: dict[str, FitMethod] = {
    "pca": FitMethod("moments", lambda moments, rank, seed: fit_pca(moments, rank)),
    "pca_uncentred": FitMethod("moments", lambda moments, rank, seed: fit_pca(moments, rank, center=False)),
    "semi_nmf": FitMethod("rows", lambda sample, rank, seed: fit_semi_nmf(sample, rank, seed=seed)),
    "nmf": FitMethod("rows", lambda sample, rank, seed: fit_nmf(sample, rank, seed=seed)),
    "ica": FitMethod("rows", lambda sample, rank, seed: fit_ica(sample, rank, seed=seed)),
    "kmeans": FitMethod("rows", lambda sample, rank, seed: fit_kmeans(sample, rank, seed=seed)),
    "dictionary": FitMethod("rows", lambda sample, rank, seed: fit_dictionary(sample, rank, seed=seed)),
}


def fit_method(method: str) -> FitMethod:
    """The fit of a name.

    Raises:
        ValueError: there is none.
    """
    if method not in FITS:
        raise ValueError(f"no fit {method!r}; there are {', '.join(FITS)}")
    return FITS[method]


def fit(
    method: str,
    data: RowSample | Moments | SecondMoments | Float[Tensor, "n d"],
    rank: int | float | str = 16,
    seed: int = 0,
) -> Subspace:
    """A subspace by the name of the fit.

    Args:
        method: a name in ``FITS``.
        data: the moments or the rows that the fit needs.
        rank: a whole number; shares and rules for the fits on moments only.
        seed: of the fits that start at random.

    Raises:
        ValueError: no such fit, the wrong kind of data, or what the fit itself refuses.
    """
    found = fit_method(method)
    has_moments = isinstance(data, (Moments, SecondMoments))
    if found.needs == "moments" and not has_moments:
        raise ValueError(f"{method} needs moments, not {type(data).__name__}; SecondMoments.of(rows) makes them")
    if found.needs == "rows" and has_moments:
        raise ValueError(f"{method} needs rows, and moments keep none; record a RowSample")
    return found.call(data, rank, seed)


# What a report says where a person brought the subspaces.
GIVEN = "given"


def check_method(method: str) -> str:
    """The name of a fit, or ``given``.

    Raises:
        ValueError: no such fit.
    """
    if method != GIVEN:
        fit_method(method)
    return method


def needs_rows(method: str) -> bool:
    """Whether a fit works on a sample of rows; the others need moments, or nothing at all."""
    return method != GIVEN and fit_method(method).needs == "rows"
