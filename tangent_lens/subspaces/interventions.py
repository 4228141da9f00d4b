"""Remove, keep or steer along subspaces while a model runs: does the tangent matter to the model?"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.models.protocol import Model, width_of
from tangent_lens.recording.interventions import Change, Keeping, Removal, Steering, intervene
from tangent_lens.sites import Site, SiteSelection
from tangent_lens.storage import as_float64
from tangent_lens.subspaces.subspace import Subspace

# How the moments of a site are named, in which the name of the site is what counts.
_FITTED_ON = "activations at "
Subspaces = Subspace | Mapping[str, Subspace] | Mapping[Site, Subspace]


class HoldsModel(Protocol):
    """What is needed of a :class:`~tangent_lens.lens.Lens`."""

    @property
    def model(self) -> Model: ...

    def resolve(self, sites: SiteSelection) -> tuple[Site, ...]:
        """The sites that a selection names."""
        ...


def remove(
    lens: HoldsModel, subspaces: Subspaces, site: SiteSelection | None = None, *, about: str = "centre"
) -> AbstractContextManager[None]:
    """In a ``with`` block: every forward pass of the model goes on without these subspaces, x - Q Q^T (x - c).

    All rows of a site are changed, at every position. See :func:`~tangent_lens.recording.interventions.intervene`.

    Args:
        lens: holds the model; run the model yourself, or measure with the lens, inside the block.
        subspaces: by the name of their site; or one, at the site it was fitted at.
        site: of one subspace, where to change the model: one site or several.
        about: ``centre`` sets the part inside to that of the centre; ``zero`` removes it, Q Q^T x.

    Raises:
        ValueError: a site the model does not have, another width, or a subspace that does not know its site.
        SiteNeverFired: at the end of a block in which the model did not run through the site.
    """
    return _intervene(lens, subspaces, site, lambda one: Removal(one.basis, point_about(one, about)))


def keep(
    lens: HoldsModel, subspaces: Subspaces, site: SiteSelection | None = None, *, about: str = "centre"
) -> AbstractContextManager[None]:
    """In a ``with`` block: every forward pass goes on with nothing but these subspaces, c + Q Q^T (x - c).

    Args:
        about: ``centre`` sets the part outside to that of the centre; ``zero`` removes it and leaves Q Q^T x.
        lens, subspaces, site: as of :func:`remove`, and so are the errors.
    """
    return _intervene(lens, subspaces, site, lambda one: Keeping(one.basis, point_about(one, about)))


def steer(
    lens: HoldsModel, subspaces: Subspaces, strength: float | Float[Tensor, " k"], site: SiteSelection | None = None
) -> AbstractContextManager[None]:
    """In a ``with`` block: every forward pass goes on with rows moved along these subspaces, x + Q a.

    Args:
        strength: the coordinates a (k,) in the basis; a number is the coordinate along its first column. The unit is that of
            the activations: a row moves by the length of a, whatever the length of the row.
        lens, subspaces, site: as of :func:`remove`.

    Raises:
        ValueError: as :func:`remove`; or a strength that is not finite or not (k,).
    """
    return _intervene(lens, subspaces, site, lambda one: Steering(one.basis @ _coordinates(strength, one)))


def point_about(subspace: Subspace, about: str) -> Float[Tensor, " d"]:
    """The point (d,) that parts are measured from: ``centre`` or ``zero``.

    Raises:
        ValueError: another word.
    """
    if about not in ("centre", "zero"):
        raise ValueError(f"about={about!r} must be 'centre' (the point the subspace was fitted about) or 'zero'")
    return subspace.centre if about == "centre" else torch.zeros_like(subspace.centre)


def site_fitted_at(subspace: Subspace) -> str:
    """The name of the site at which a subspace was fitted.

    Raises:
        ValueError: it does not say.
    """
    fitted_on = subspace.origin.get("fitted_on")
    if not isinstance(fitted_on, str) or not fitted_on.startswith(_FITTED_ON):
        raise ValueError(
            f"{subspace} does not know its site (fitted_on is {fitted_on!r}); say where: site='resid_post.3', or pass "
            "{'resid_post.3': subspace}"
        )
    return fitted_on.removeprefix(_FITTED_ON)


def check_width(model: Model, site: Site, subspace: Subspace) -> None:
    """Refuse a subspace that cannot live at a site.

    Raises:
        ValueError: the site is of another width.
    """
    width = width_of(model.description, site)
    if width is not None and width != subspace.d:
        raise ValueError(
            f"{site}: rows of width {width} pass there, and the subspace lives in {subspace.d} dimensions; fit it at the "
            "same site of the same model"
        )


def _intervene(
    lens: HoldsModel, subspaces: Subspaces, site: SiteSelection | None, change: Callable[[Subspace], Change]
) -> AbstractContextManager[None]:
    placed = _placed(lens, subspaces, site)
    for place, subspace in placed.items():
        check_width(lens.model, place, subspace)
    return intervene(lens.model, {place: change(subspace) for place, subspace in placed.items()})


def _placed(lens: HoldsModel, subspaces: Subspaces, site: SiteSelection | None) -> dict[Site, Subspace]:
    if isinstance(subspaces, Subspace):
        where = site_fitted_at(subspaces) if site is None else site
        return dict.fromkeys(lens.resolve(where), subspaces)
    if site is not None:
        raise ValueError(f"site={site!r}: several subspaces already say where they belong; leave site out")
    if not subspaces:
        raise ValueError("no subspace was given, so nothing would be changed; pass {'resid_post.3': subspace}")
    placed: dict[Site, Subspace] = {}
    for where, subspace in subspaces.items():
        for place in lens.resolve(where):
            if place in placed:
                raise ValueError(f"{place}: two subspaces are named for this site; nest two with blocks instead")
            placed[place] = subspace
    return placed


def _coordinates(strength: float | Tensor, subspace: Subspace) -> Float[Tensor, " k"]:
    if isinstance(strength, numbers.Real) and not isinstance(strength, bool):
        coordinates = torch.zeros(subspace.rank, dtype=torch.float64)
        coordinates[0] = float(strength)
    elif hasattr(strength, "shape"):
        coordinates = as_float64(strength)  # pyright: ignore[reportArgumentType]
    else:
        raise ValueError(f"strength {strength!r} must be a number, or a tensor of {subspace.rank} coordinates")
    if coordinates.shape != (subspace.rank,) or not math.isfinite(float(coordinates.abs().sum())):
        raise ValueError(
            f"strength of shape {tuple(coordinates.shape)} must hold {subspace.rank} finite coordinates, one a column of the "
            f"basis; got {strength!r}"
        )
    return coordinates
