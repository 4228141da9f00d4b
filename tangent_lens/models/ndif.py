"""A model whose weights are on an NDIF server. What can be had of it are sums: they are made where the model is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tangent_lens.models.nnsight import NNsightModel, order_of_calls
from tangent_lens.models.protocol import Batch, LinearMap, ModelDescription, TapPoint
from tangent_lens.models.remote_jobs import Jobs, Remote
from tangent_lens.sites import Site

# Where a model cannot be run without numbers, parts of a block are taken to be reached in this order.
_USUAL_ORDER = (
    "embedding", "resid_pre", "attention_input", "query", "key", "value", "resid_mid", "mlp_input", "mlp_gate", "mlp_in",
    "resid_post",
)  # fmt: skip


class NdifModel:
    """The structure of a model, and jobs that compute sums of its activations and gradients on the server.

    Attributes:
        jobs: what has been sent and received.
    """

    def __init__(self, structure: NNsightModel, options: Remote) -> None:
        self._structure = structure
        self._order = order_of_calls(structure)
        self._dtype: str | None = None
        self.jobs = Jobs(structure.envoy, options)
        self.sites = structure.sites
        self.maps: tuple[LinearMap, ...] = structure.maps
        self.absent: Mapping[str, str] = structure.absent
        self.misleading_names = structure.misleading_names
        self.tokenizer = structure.tokenizer
        self.longest_sequence = structure.longest_sequence
        self.objective = structure.objective
        self.padding_sides = structure.padding_sides

    @property
    def description(self) -> ModelDescription:
        """Name and shapes; the dtype is the server's, once a job has told it."""
        here = self._structure.description
        return replace(here, library=f"{here.library}, remote", dtype=self._dtype or here.dtype)

    @property
    def device(self) -> torch.device:
        """Where what is sent lies before it is sent."""
        return torch.device("cpu")

    def tap_point(self, site: Site) -> TapPoint:
        """Where the tensor of a site passes."""
        return self._structure.tap_point(site)

    @property
    def start(self) -> TapPoint:
        """Where gradients start."""
        return self._structure.gradient_starts()[0]

    def arguments(self, batch: Batch) -> dict[str, Any]:
        """What the model is called with."""
        found = self._structure._arguments(batch, self._structure.module)
        return found | {"attention_mask": batch.attention_mask.long()}

    def place_in_order(self, point: TapPoint, kind: str, layer: int | None) -> tuple[int, ...]:
        """A sorting key: nnsight serves the tensors of one pass in the order in which the model reaches them."""
        known = self._order.get((point.name, point.side))
        if known is not None:
            return (0, known)
        return (1, -1 if layer is None else layer, _USUAL_ORDER.index(kind), int(point.side == "output"))

    def tell_dtype(self, dtype: str) -> None:
        """What the server says of itself."""
        self._dtype = dtype.removeprefix("torch.")


def remotely(model: Any, options: Remote) -> NdifModel:
    """A model seen on the server.

    Raises:
        ValueError: a model that nnsight cannot name to a server.
    """
    import nnsight

    if not hasattr(nnsight, "TransformersModel"):
        raise ValueError(
            f"runs on NDIF need nnsight 0.8 or newer, here is {nnsight.__version__}: pip install --upgrade nnsight"
        )
    if not isinstance(model, NNsightModel) or not hasattr(model.envoy, "to_model_key"):
        raise ValueError(
            "remote=True needs a model that NDIF can load by name: "
            "Lens(nnsight.TransformersModel('meta-llama/Llama-3.1-70B', task='text-generation')). "
            "What you hold is here already: leave remote out"
        )
    _name_folders_by_path(model.envoy)
    return NdifModel(model, options)


def _name_folders_by_path(envoy: Any) -> None:
    """nnsight asks the hub for a model's canonical name. A folder has none: a server on this machine knows it by its path."""
    from nnsight.modeling import huggingface

    path = str(getattr(envoy, "repo_id", ""))
    if os.path.isdir(path):
        huggingface._ID_CACHE.setdefault(path, path)
