"""Interventions: raw torch hooks that replace the rows of a site during the forward pass, on every torch library alike.

All rows are changed, those at padding too: nothing of a padding row reaches a real token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tangent_lens.models.protocol import Model, TapPoint, forward_parameters, read_tensor
from tangent_lens.recording.moments import full_precision
from tangent_lens.recording.taps import SiteNeverFired
from tangent_lens.sites import Site


class Change(Protocol):
    """What becomes of the rows of a site.

    Attributes:
        width: numbers in a row.
    """

    @property
    def width(self) -> int: ...

    def __call__(self, rows: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """The new rows, in the precision of the old ones."""
        ...


@dataclass(frozen=True, eq=False)
class Removal:
    """x - Q Q^T (x - c): the part inside the subspace becomes that of the centre."""

    basis: Float[Tensor, "d k"]
    centre: Float[Tensor, " d"]

    @property
    def width(self) -> int:
        """d."""
        return len(self.basis)

    def __call__(self, rows: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """The rows without the subspace."""
        return rows - _part_inside(rows, self.basis, self.centre)


@dataclass(frozen=True, eq=False)
class Keeping:
    """c + Q Q^T (x - c): everything outside the subspace becomes that of the centre."""

    basis: Float[Tensor, "d k"]
    centre: Float[Tensor, " d"]

    @property
    def width(self) -> int:
        """d."""
        return len(self.basis)

    def __call__(self, rows: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """The rows with nothing but the subspace."""
        return _as(self.centre, rows) + _part_inside(rows, self.basis, self.centre)


@dataclass(frozen=True, eq=False)
class Steering:
    """x + v."""

    vector: Float[Tensor, " d"]

    @property
    def width(self) -> int:
        """d."""
        return len(self.vector)

    def __call__(self, rows: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """The rows, all moved by the same vector."""
        return rows + _as(self.vector, rows)


def _part_inside(rows: Tensor, basis: Tensor, centre: Tensor) -> Tensor:
    basis = _as(basis, rows)
    return ((rows - _as(centre, rows)) @ basis) @ basis.T


def _as(tensor: Tensor, rows: Tensor) -> Tensor:
    # The precision first: some devices have no float64 to move.
    return tensor.to(rows.dtype).to(rows.device)


@contextmanager
def intervene(model: Model, changes: Mapping[Site, Change]) -> Iterator[None]:
    """Inside the block, every forward pass goes on with the changed rows of these sites, and gradients flow through them.

    Products are taken in float32, or wider where the rows are; the result has the tensor's own dtype. Blocks may be nested:
    the inner one acts on what the outer one left. A tap attached inside sees the changed rows. The hooks go at the end,
    also after an exception; nothing else of the model is touched.

    Raises:
        SiteNeverFired: at the end of a block in which nothing passed a site (no forward pass ran, or the host library
            skips that place); or, from inside the forward pass, a tensor that is not the site.
        ValueError: from inside the forward pass, rows of another width than the change.
    """
    silent: dict[tuple[Site, int], str] = {}
    with ExitStack() as stack:
        for site, change in changes.items():
            for number, place in enumerate(places_to_change(model, site)):
                silent[site, number] = f"{site.name} ({place.name})"
                fired = _forgetting(silent, (site, number))
                stack.callback(_attach(place, change, fired, in_place=_passes_beside(site, place)).remove)
        yield
    if silent:
        raise SiteNeverFired(
            f"no tensor passed {', '.join(silent.values())}, so nothing was changed there; run the model inside the with "
            "block, on the object that the lens holds"
        )


def places_to_change(model: Model, site: Site) -> tuple[TapPoint, ...]:
    """Where the tensor of a site must be changed: where it comes out, or everywhere it goes in.

    One tap point is enough to read the input of several maps. To change it, each of them must be handed the new one.
    """
    point = model.tap_point(site)
    readers = [place for one in model.maps if one.reads == site for place in one.inputs]
    alone = all(place.module is not point.module for place in readers)
    if point.side == "output" or _passes_beside(site, point) or alone:
        return (point,)
    return tuple({id(place.module): place for place in (*readers, point)}.values())


def _passes_beside(site: Site, place: TapPoint) -> bool:
    """Whether the stream also goes around the module whose input it is read at, to be added behind it."""
    return site.kind == "resid_mid" and place.side == "input"


def _forgetting(silent: dict[tuple[Site, int], str], key: tuple[Site, int]) -> Callable[[], None]:
    def fired() -> None:
        silent.pop(key, None)

    return fired


def _attach(place: TapPoint, change: Change, fired: Callable[[], None], *, in_place: bool) -> RemovableHandle:
    def replaced(value: Any) -> Any:
        fired()
        tensor = read_tensor(value)
        new = changed_tensor(tensor, place, change)
        if not in_place:
            return _with_first(value, new)
        # The path around the module holds the same tensor, and no hook could hand it another.
        tensor.copy_(new)
        return value

    if place.side == "output":
        return place.module.register_forward_hook(lambda module, args, output: replaced(output))

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return _with_arguments(place, args, kwargs, replaced)

    return place.module.register_forward_pre_hook(before, with_kwargs=True)


def changed_tensor(tensor: Tensor, place: TapPoint, change: Change) -> Tensor:
    """The tensor that passes a place, with the rows of its site changed and every other column as it was.

    Raises:
        TypeError: it holds no floating-point numbers.
        SiteNeverFired: it is not the tensor of the site.
        ValueError: rows of another width than the change.
    """
    if not tensor.is_floating_point():
        raise TypeError(f"{place.name}: {tensor.dtype} passes here, and only floating-point rows can be changed")
    by_heads = tensor.ndim == 4 and place.width == tensor.shape[2] * tensor.shape[3]
    flat = tensor.flatten(2) if by_heads else tensor
    columns = None if place.columns is None else place.columns.to(tensor.device)
    rows = flat if columns is None else flat[..., columns]
    _check_rows(rows, place, change)
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    with full_precision(wide):
        new = change(wide).to(tensor.dtype)
    return (new if columns is None else flat.index_copy(-1, columns, new)).reshape(tensor.shape)


def _check_rows(rows: Tensor, place: TapPoint, change: Change) -> None:
    if place.width is not None and (rows.ndim != 3 or rows.shape[-1] != place.width):
        raise SiteNeverFired(
            f"{place.name}: a tensor of shape {tuple(rows.shape)} passes, and the site is (batch, position, {place.width}); "
            "the model runs in a mode (split inputs for each head, say) in which no one tensor is the site; turn that mode off"
        )
    if rows.ndim < 2 or rows.shape[-1] != change.width:
        raise ValueError(
            f"{place.name}: a tensor of shape {tuple(rows.shape)} passes, and the subspace lives in {change.width} "
            "dimensions; fit it at the same site"
        )


def _with_first(value: Any, new: Tensor) -> Any:
    if isinstance(value, Tensor):
        return new
    if hasattr(value, "_fields"):
        return value._replace(**{value._fields[0]: new})
    return type(value)((new, *value[1:]))


def _with_arguments(
    place: TapPoint, args: Sequence[Any], kwargs: Mapping[str, Any], replaced: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, those that carry the site replaced, by name or by place."""
    by_place, by_name = list(args), dict(kwargs)
    names = forward_parameters(place.module)
    for name in place.arguments:
        number = names.index(name) if name in names else 0
        if by_name.get(name) is not None:
            by_name[name] = replaced(by_name[name])
        elif number < len(by_place) and by_place[number] is not None:
            by_place[number] = replaced(by_place[number])
        else:
            raise SiteNeverFired(f"{place.name}: called without {name}; this module is called oddly")
    return tuple(by_place), by_name
