"""What tangent_lens says of a layout: row by row through taps, and as sums through its recording passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import nnsight
import torch
from conformance.backends import tokenizer
from conformance.batching import GivenTargets, Layout, without_targets
from conformance.comparing import Error, worst_rows
from conformance.families import FAMILIES, tiny_model
from conformance.reference import Reference, summed_loss
from rehearsal.backend import HereServer
from torch import Tensor

from tangent_lens.models.loading import wrap
from tangent_lens.models.ndif import remotely
from tangent_lens.models.protocol import logits_of
from tangent_lens.models.remote_jobs import Remote
from tangent_lens.recording.masking import MaskedLoss
from tangent_lens.recording.passes import record_activations, record_gradients

TASKS = {"causal": "text-generation", "masked": "fill-mask"}


@dataclass(frozen=True)
class Rows:
    """What taps saw: by site name one (position, width) tensor a sequence."""

    activations: dict[str, list[Tensor]]
    gradients: dict[str, list[Tensor]]


@dataclass(frozen=True)
class Sums:
    """What recording leaves.

    Attributes:
        weights: weight gradient of each map.
        activations, gradients: sum of x x^T at each site.
        loss: summed over all targets.
    """

    weights: dict[str, Tensor]
    activations: dict[str, Tensor]
    gradients: dict[str, Tensor]
    loss: float


def tapped_rows(lens: Any, layout: Layout) -> Rows:
    """Forward and backward through ``lens.attach``, the loss formed here from the model's logits."""
    with lens.gradients(), lens.attach(lens.sites, gradients=True) as taps:
        for batch in layout.batches:
            assert batch.targets is not None
            summed_loss(logits_of(lens.model.run(batch)), batch.targets).backward()
    activations, gradients = {}, {}
    for site in lens.sites:
        passed = taps[site].batches
        activations[site.name] = layout.own_parts([rows for rows, _ in passed])
        gradients[site.name] = layout.own_parts([gradient for _, gradient in passed])
    return Rows(activations, gradients)


def recorded_sums(lens: Any, layout: Layout, name: str, masked: Any = None) -> Sums:
    """A causal model takes tangent_lens's own loss, which finds its targets itself.

    Args:
        masked: the loss of a masked model, whose targets are given.
    """
    causal = FAMILIES[name].objective == "causal"
    batches = without_targets(layout.batches) if causal else layout.batches
    loss = None if causal else masked or GivenTargets()
    recorded = record_gradients(lens.model, batches, lens.sites, lens.maps, loss=loss)
    activations = record_activations(lens.model, batches, lens.sites)
    return Sums(
        {weight.name: weight.gradient for weight in recorded.weights},
        {site.name: record.moments.second_moment() for site, record in activations.items()},
        {site.name: moments.gradients.second_moment() for site, moments in recorded.moments.items()},
        recorded.loss * recorded.targets,
    )


def remote_sums(name: str, dtype: torch.dtype, layout: Layout, folder: str) -> Sums:
    """The sums that come back when the functions for a server run on this family: as payloads, with frozen weights.

    Args:
        folder: for what an interrupted run would go on with.
    """
    held = nnsight.TransformersModel(
        tiny_model(name, dtype), task=TASKS[FAMILIES[name].objective], tokenizer=tokenizer()
    )
    held._module.eval()
    held.to_model_key = lambda: name
    options = Remote(backend=HereServer(held).backend, batches_per_job=2, folder=folder, poll_seconds=0.01)
    model = remotely(wrap(held), options)
    lens = SimpleNamespace(model=model, sites=model.sites, maps=model.maps)
    return recorded_sums(lens, layout, name, MaskedLoss())


def library_error(
    logits_of_library: Callable[[Tensor, Tensor | None, Tensor], Tensor],
    reference: Reference,
    layout: Layout,
    shift_free: bool,
) -> Error:
    """How the library's own logits differ from HuggingFace's; ``shift_free``: up to a constant in each row."""
    with torch.no_grad():
        logits = [
            logits_of_library(batch.tokens, batch.attention_mask if batch.padded else None, batch.positions)
            for batch in layout.batches
        ]
    found, expected = layout.own_parts(logits), reference.logits
    if shift_free:
        found, expected = ([one.log_softmax(-1) for one in tensors] for tensors in (found, expected))
    return worst_rows({"logits": found}, {"logits": expected})
