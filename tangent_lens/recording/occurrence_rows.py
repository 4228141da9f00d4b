"""Passes that keep the rows of chosen occurrences, and nothing else: at sites, and at both ends of linear maps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.models.protocol import LinearMap, Model, runs_remotely
from tangent_lens.models.state import evaluation_mode, frozen_parameters
from tangent_lens.progress import Progress
from tangent_lens.recording.kept_rows import KeptRows, KeptSignals, RowSampler
from tangent_lens.recording.losses import Loss
from tangent_lens.recording.passes import (
    attached,
    by_module,
    check_answered,
    check_fired,
    padding_explained,
    passing,
    record_activations,
)
from tangent_lens.recording.receivers import Selection
from tangent_lens.recording.row_sample import RowSample
from tangent_lens.recording.taps import ActivationReceiver, GradientReceiver
from tangent_lens.sites import Site


@dataclass(frozen=True, eq=False)
class MapRows:
    """What passed both ends of some maps, in the order of the batches.

    Attributes:
        inputs: input rows by site (n, d_in); signals: gradients of the outputs by the map's name (n, out).
    """

    inputs: dict[Site, Float[Tensor, "n in"]]
    signals: dict[str, Float[Tensor, "n out"]]


class Counted:
    """A receiver that counts the tensors that pass it and the gradients that come back."""

    def __init__(self, name: str, receive: ActivationReceiver) -> None:
        self.name, self.receive = name, receive
        self.fired = self.answered = 0

    def __call__(self, activation: Tensor) -> GradientReceiver | None:
        """One tensor passes."""
        self.fired += 1
        back = self.receive(activation)
        return None if back is None else partial(self._answer, back)

    def _answer(self, back: GradientReceiver, gradient: Tensor) -> None:
        self.answered += 1
        back(gradient)


def record_site_rows(
    model: Model,
    batches: Iterable[Any],
    sites: Sequence[Site],
    count: int,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    total: int = 0,
) -> dict[Site, RowSample]:
    """All kept rows at every site, in the order of their random numbers, which is the same here and on a server.

    Args:
        batches: of which only chosen positions are kept, ``count`` in all.
        total: how many tokens the batches hold, for the progress display.

    Raises:
        SiteNeverFired: a site through which no tensor passed, or several in one run.
        ValueError: rows that are not finite, or none at all.
    """
    if runs_remotely(model):
        records = record_activations(model, batches, sites, sample=count, seed=seed, progress=progress, tokens=total)
        return {site: record.sample for site, record in records.items() if record.sample is not None}
    selection = Selection()
    samplers = {site: RowSampler(site, selection, count, seed) for site in sites}
    counted = {site: Counted(site.name, sampler) for site, sampler in samplers.items()}
    passes = 0
    with ExitStack() as stack:
        stack.enter_context(evaluation_mode(model.module))
        stack.enter_context(torch.no_grad())
        for site, receiver in counted.items():
            stack.enter_context(attached(model.tap_point(site), receiver))
        for batch in passing(batches, selection, model, "activations", total, progress):
            with padding_explained(batch):
                model.run_without_logits(batch)
            passes += 1
            check_fired(list(counted.values()), passes)
    return {site: sampler.result() for site, sampler in samplers.items()}


def record_map_rows(
    model: Model,
    batches: Iterable[Any],
    maps: Sequence[LinearMap],
    loss: Loss,
    *,
    progress: Progress | None = None,
    total: int = 0,
) -> MapRows:
    """Input rows and backward signals of the maps at all kept positions, in the order of the batches.

    The parameters ask for no gradient meanwhile and come back as they were.

    Raises:
        GradientNeverCame: the loss does not reach a map.
        SiteNeverFired: a place through which no tensor passed, or several in one run.
        ValueError: the loss finds nothing to predict.
    """
    selection = Selection()
    inputs = {site: KeptRows(site, selection, gradients=False) for site in dict.fromkeys(one.reads for one in maps)}
    signals = [KeptSignals(group, selection) for group in by_module(maps)]
    at_inputs = [(model.tap_point(site), Counted(site.name, receiver)) for site, receiver in inputs.items()]
    at_outputs = [(one.maps[0].output.whole, Counted(one.maps[0].name, one)) for one in signals]
    targets = passes = 0
    with ExitStack() as stack:
        stack.enter_context(evaluation_mode(model.module))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(frozen_parameters(model))
        for place, receiver in (*at_inputs, *at_outputs):
            stack.enter_context(attached(place, receiver))
        for batch in passing(batches, selection, model, "gradients", total, progress, loss.prepare):
            with padding_explained(batch):
                output, passes = model.run(batch), passes + 1
                check_fired([receiver for _, receiver in (*at_inputs, *at_outputs)], passes)
                value, count = loss(output, batch)
                value.backward()
            targets += count
            del output, value
            check_answered([receiver for _, receiver in at_outputs])
    if not targets:
        raise ValueError(f"the {loss.name} loss found nothing to predict in the whole corpus")
    return MapRows(
        {site: receiver.result()[0] for site, receiver in inputs.items()},
        {name: rows for receiver in signals for name, rows in receiver.result().items()},
    )
