"""Taps for a person who runs the model: attach, run your own forward and backward, read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tangent_lens.models.protocol import Model, TapPoint
from tangent_lens.recording.moments import Moments
from tangent_lens.recording.receivers import MomentsReceiver, RowsReceiver, Selection
from tangent_lens.recording.row_choice import RowChoice
from tangent_lens.recording.taps import GradientNeverCame, SiteNeverFired, attach_tap, host_function
from tangent_lens.sites import Site


class Tap:
    """What has passed one site.

    Attributes:
        site: where it sits.
    """

    def __init__(self, site: Site, selection: Selection, *, gradients: bool, keep: str) -> None:
        self.site = site
        self._wants_gradients = gradients
        self._rows = RowsReceiver(site, selection, gradients=gradients) if keep == "rows" else None
        self._moments = MomentsReceiver(site, selection, gradients=gradients) if keep == "moments" else None

    @property
    def receiver(self) -> MomentsReceiver | RowsReceiver:
        """What takes the tensors in."""
        receiver = self._rows or self._moments
        assert receiver is not None
        return receiver

    @property
    def fired(self) -> int:
        """How many forward passes came by."""
        return self.receiver.fired

    @property
    def activations(self) -> Float[Tensor, "batch pos width"]:
        """Activations of all forward passes so far, one under the other.

        Raises:
            SiteNeverFired: none came by.
            ValueError: rows were not kept, or the passes had sequences of different lengths (read ``batches``).
        """
        return _stacked([activations for activations, _ in self.batches], self.site)

    @property
    def gradients(self) -> Float[Tensor, "batch pos width"]:
        """Loss gradients of the same entries as ``activations``.

        Raises:
            GradientNeverCame: no backward pass reached this site, or not after every forward pass.
        """
        gradients = [gradient for _, gradient in self.batches]
        if not self._wants_gradients:
            raise GradientNeverCame(f"{self.site}: gradients were not asked for; attach with gradients=True")
        missing = sum(gradient is None for gradient in gradients)
        if missing:
            raise GradientNeverCame(
                f"{self.site}: {missing} of {len(gradients)} forward passes brought no gradient; call .backward() on a "
                "loss that depends on this site, after each forward pass"
            )
        return _stacked([gradient for gradient in gradients if gradient is not None], self.site)

    @property
    def batches(self) -> list[tuple[Tensor, Tensor | None]]:
        """(activations, gradients or None) of each forward pass.

        Raises:
            SiteNeverFired: none came by.
            ValueError: rows were not kept.
        """
        if self._rows is None:
            raise ValueError(f"{self.site}: only moments were kept; attach with keep='rows' to read rows")
        self._check_fired()
        return list(zip(self._rows.activations, self._rows.gradients, strict=True))

    def moments(self) -> Moments:
        """Moments of what passed, gradients included if they came; positions a mask left out are not in them.

        Raises:
            SiteNeverFired: no forward pass came by.
        """
        self._check_fired()
        if self._moments is not None:
            return self._moments.result()
        assert self._rows is not None
        moments = Moments(self._rows.activations[0].shape[-1], name=self.site.name)
        for (activations, gradients), choice in zip(self.batches, self._rows.choices, strict=True):
            moments.activations.update(choice.rows(activations))
            if gradients is not None:
                moments.gradients.update(choice.rows(gradients))
        return moments

    def _check_fired(self) -> None:
        if not self.fired:
            raise SiteNeverFired(f"{self.site}: no forward pass came by; run the model inside the with block")

    def __repr__(self) -> str:
        return f"Tap({self.site}: {self.fired} forward passes, {self.receiver.answered} gradients)"


class Taps(Mapping["str | int | Site", Tap]):
    """Taps at several sites, attached inside a ``with`` block and always removed at its end.

    ``taps["resid_post.3"]`` finds a tap by name; ``taps[3]`` by its layer, where one kind of site is tapped.

    Raises:
        SiteNeverFired: at the end of a block in which no forward pass ran.
    """

    def __init__(self, model: Model, sites: Sequence[Site], *, gradients: bool = False, keep: str = "rows") -> None:
        if keep not in ("rows", "moments"):
            raise ValueError(f"keep={keep!r} must be 'rows' (everything) or 'moments' (sums only)")
        self._selection = Selection()
        self._taps = {site: Tap(site, self._selection, gradients=gradients, keep=keep) for site in sites}
        self._points = {site: model.tap_point(site) for site in sites}
        self._handles: list[RemovableHandle] = []
        self._fired_before: dict[Site, int] = {}

    def use_mask(self, mask: Bool[Tensor, "batch pos"] | None) -> None:
        """Which positions of the coming forward passes enter ``moments()``: an attention mask, or None for all."""
        self._selection.current = RowChoice(None if mask is None else mask.bool())

    def __enter__(self) -> Taps:
        if self._handles:
            raise RuntimeError("these taps are attached already; make new ones with lens.attach(...)")
        self._fired_before = {site: tap.fired for site, tap in self._taps.items()}
        try:
            for site, tap in self._taps.items():
                self._handles.append(attach_tap(self._points[site], tap.receiver))
        except BaseException:
            self.detach()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()
        silent = [site.name for site, tap in self._taps.items() if tap.fired == self._fired_before[site]]
        if kind is None and silent:
            raise SiteNeverFired(
                f"no tensor passed {', '.join(silent)}; run the model inside the with block, on the object that the lens holds"
            )

    def detach(self) -> None:
        """Remove the hooks; what was gathered stays."""
        while self._handles:
            self._handles.pop().remove()

    def __getitem__(self, key: str | int | Site) -> Tap:
        found = [tap for site, tap in self._taps.items() if key in (site, site.name, site.layer)]
        if len(found) == 1:
            return found[0]
        names = ", ".join(site.name for site in self._taps)
        if found:
            raise KeyError(f"layer {key} has {len(found)} taps; name one of {names}")
        raise KeyError(f"{key} is not tapped; tapped: {names}")

    def __iter__(self) -> Iterator[Site]:
        return iter(self._taps)

    def __len__(self) -> int:
        return len(self._taps)

    def __repr__(self) -> str:
        return f"Taps({', '.join(repr(tap) for tap in self._taps.values())})"


class HostHook:
    """A tap in the host library's own style: a name and a function, to be registered by the person.

    It unpacks as ``(name, function)``, so that a list of them goes straight into
    ``model.run_with_hooks(fwd_hooks=...)`` or ``with model.hooks(fwd_hooks=...)`` of TransformerLens. On a HuggingFace
    model :meth:`register` does what ``register_forward_hook`` does. It can be used again and again; what passed
    is in ``tap`` (or use :meth:`take` to read and empty it).

    Attributes:
        name: the host library's name of the place.
        function: what the host library calls.
        tap: what has passed.
    """

    def __init__(self, site: Site, point: TapPoint, *, gradients: bool, keep: str) -> None:
        if not point.hookable:
            raise ValueError(
                f"{site} is no hook point of this library ({point.name} is a module); tap it with lens.attach({site.name!r})"
            )
        self.site = site
        self.name = point.name
        self._point = point
        self._options: dict[str, Any] = {"gradients": gradients, "keep": keep}
        self._selection = Selection()
        self.tap = Tap(site, self._selection, **self._options)
        self.function: Callable[..., Tensor | None] = host_function(
            point, lambda activation: self.tap.receiver(activation)
        )

    def use_mask(self, mask: Bool[Tensor, "batch pos"] | None) -> None:
        """Which positions of the coming forward passes enter ``tap.moments()``."""
        self._selection.current = RowChoice(None if mask is None else mask.bool())

    def take(self) -> Tap:
        """What has passed so far; the hook starts anew."""
        taken, self.tap = self.tap, Tap(self.site, self._selection, **self._options)
        return taken

    def register(self) -> RemovableHandle:
        """Register on the torch module itself; remove it with the handle's ``remove()``."""
        return attach_tap(self._point, lambda activation: self.tap.receiver(activation))

    def __iter__(self) -> Iterator[Any]:
        return iter((self.name, self.function))

    def __repr__(self) -> str:
        return f"HostHook({self.name!r}, {self.tap!r})"


def _stacked(tensors: Sequence[Tensor], site: Site) -> Tensor:
    lengths = sorted({tensor.shape[1] for tensor in tensors})
    if len(lengths) > 1:
        raise ValueError(f"{site}: the forward passes had {lengths} positions and cannot be stacked; read tap.batches")
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
