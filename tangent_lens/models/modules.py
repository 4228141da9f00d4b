"""Any other torch module, measured at places that the person names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tangent_lens.models.placement import input_device
from tangent_lens.models.protocol import Inputs, LinearMap, ModelDescription, TapPoint
from tangent_lens.models.quantisation import parameter_count, precision_of
from tangent_lens.sites import NAMED, Site


class ModuleModel:
    """The :class:`~tangent_lens.models.protocol.Model` of a ``torch.nn.Module`` of unknown structure.

    A site is what comes out of a submodule: a tensor (..., width), or a tuple whose first entry it is. All but the last
    dimension count as rows.

    Args:
        module: is not changed.
        sites: by the name you give it, a submodule or its path in ``module.named_modules()``.

    Raises:
        ValueError: no site, a path that is not there, or a submodule of another module.
    """

    maps: tuple[LinearMap, ...] = ()
    absent: Mapping[str, str] = {}
    misleading_names: Mapping[str, str] = {}
    tokenizer: Any = None
    longest_sequence: int | None = None
    objective = ""
    padding_sides: tuple[str, ...] = ("right", "left")

    def __init__(
        self,
        module: nn.Module,
        sites: Mapping[str, nn.Module | str],
        *,
        name: str | None = None,
        revision: str | None = None,
    ) -> None:
        if not sites:
            raise ValueError("no site was named; pass sites={'a name': submodule or path}")
        self.module = module
        self._name, self._revision = name or type(module).__name__, revision or "unknown"
        self._places = {label: _place(module, label, place) for label, place in sites.items()}
        self.sites = tuple(Site(NAMED, label=label) for label in sites)

    @property
    def description(self) -> ModelDescription:
        """Name and size; the shapes of a transformer are 0."""
        return ModelDescription(
            name=self._name,
            revision=self._revision,
            library=f"torch {torch.__version__}",
            architecture=type(self.module).__name__,
            weights="as stored",
            dtype=precision_of(self.module),
            parameters=parameter_count(self.module),
            **dict.fromkeys(("n_layers", "d_model", "n_heads", "n_key_value_heads", "d_head", "vocabulary"), 0),
        )

    @property
    def device(self) -> torch.device:
        """Where its inputs must lie."""
        return input_device(self.module)

    def tap_point(self, site: Site) -> TapPoint:
        """Where the tensor of a site passes."""
        return self._places[site.label]

    def gradient_starts(self) -> tuple[TapPoint, ...]:
        """Every site: nothing is known of what stands before them."""
        return tuple(self._places.values())

    def run(self, batch: Inputs) -> Any:
        """Call the module: with a mapping by name, with a tuple by place, with anything else as its one argument."""
        if isinstance(batch.value, Mapping):
            return self.module(**batch.value)
        return self.module(*batch.value) if isinstance(batch.value, (tuple, list)) else self.module(batch.value)

    def run_without_logits(self, batch: Inputs) -> None:
        """Call the module."""
        self.run(batch)


def _place(root: nn.Module, label: str, place: nn.Module | str) -> TapPoint:
    if not isinstance(label, str) or not label or label != label.strip() or "," in label or label == "*":
        raise ValueError(f"{label!r} cannot name a site; use words without commas or blanks around them")
    modules = dict(root.named_modules(remove_duplicate=False))
    if isinstance(place, str):
        if place not in modules:
            raise ValueError(f"site {label!r}: {type(root).__name__} has no submodule {place!r}; see named_modules()")
        return TapPoint(modules[place], "output", place or type(root).__name__)
    path = next((path for path, module in modules.items() if module is place), None)
    if path is None:
        raise ValueError(f"site {label!r}: this {type(place).__name__} is no submodule of {type(root).__name__}")
    return TapPoint(place, "output", path or type(root).__name__)
