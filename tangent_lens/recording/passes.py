"""One pass of a corpus through a model: forward only, or forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from tangent_lens.models.protocol import Batch, LinearMap, Model, TapPoint, runs_remotely
from tangent_lens.models.state import evaluation_mode, frozen_parameters
from tangent_lens.progress import NoProgress, Progress
from tangent_lens.recording.kept_rows import KeptRows, KeptSignals, RowSampler
from tangent_lens.recording.losses import CausalLoss, Loss
from tangent_lens.recording.moments import Moments, NonFiniteRows, ProjectedSums, SecondMoments
from tangent_lens.recording.receivers import (
    InputReceiver,
    MomentsReceiver,
    PositionVariance,
    Selection,
    WeightGradient,
    WeightReceiver,
)
from tangent_lens.recording.row_choice import RowChoice
from tangent_lens.recording.row_sample import RowSample
from tangent_lens.recording.sketch import SketchedMoments
from tangent_lens.recording.sketch_receivers import (
    ActivationSketch,
    GradientSketch,
    SketchedWeight,
    SketchedWeightReceiver,
    SketchReceiver,
)
from tangent_lens.recording.taps import ActivationReceiver, GradientNeverCame, SiteNeverFired, attach_tap
from tangent_lens.sites import Site


class Fires(Protocol):
    """A receiver that counts the tensors that passed it."""

    fired: int

    @property
    def name(self) -> str:
        """What an error calls it."""
        ...


class Answers(Fires, Protocol):
    """And the gradients that came back."""

    answered: int


@dataclass(frozen=True)
class ActivationRecord:
    """What the forward pass leaves of one site.

    Attributes:
        moments: sketched where test matrices were given.
        positions: None where rows have no place in a sequence.
        sample: some of the rows, if they were asked for.
    """

    moments: SecondMoments | SketchedMoments
    positions: PositionVariance | None
    sample: RowSample | None = None


@dataclass(frozen=True)
class GradientRecord:
    """What the forward and backward pass leaves of all sites.

    Attributes:
        moments: moments of the gradient rows (and of the activations, if asked), by site.
        inputs: sums of the input rows of the maps, by site.
        weights: one weight gradient a map.
        sketches, sketched_weights: what takes the place of moments and weights where test matrices were given.
        loss: mean loss a target: a token predicted, or a sequence where the loss is a function of a person's own.
        targets: number of targets.
        kept_gradients: gradient rows and their sequences, by site; kept_inputs: the same of the maps' input rows.
        kept_signals: backward signals by the map's name. All three are empty unless rows were to be kept.
    """

    moments: dict[Site, Moments]
    inputs: dict[Site, SecondMoments | ProjectedSums]
    weights: tuple[WeightGradient, ...]
    loss: float
    targets: int
    kept_gradients: Mapping[Site, tuple[Tensor, Tensor]] = field(default_factory=dict)
    kept_inputs: Mapping[Site, tuple[Tensor, Tensor]] = field(default_factory=dict)
    kept_signals: Mapping[str, Tensor] = field(default_factory=dict)
    sketches: Mapping[Site, SketchedMoments] = field(default_factory=dict)
    sketched_weights: tuple[SketchedWeight, ...] = ()

    @property
    def rows(self) -> int:
        """How many rows each gradient was gathered from."""
        counts = [moments.gradients.count for moments in self.moments.values()]
        counts += [sketch.count for sketch in self.sketches.values()]
        return [*counts, *(weight.rows for weight in (*self.weights, *self.sketched_weights))][0]


def record_activations(
    model: Model,
    batches: Iterable[Any],
    sites: Sequence[Site],
    *,
    loss: Loss | None = None,
    sample: int = 0,
    seed: int = 0,
    sketch: ActivationSketch | None = None,
    progress: Progress | None = None,
    tokens: int = 0,
) -> dict[Site, ActivationRecord]:
    """Stream activations of these sites into moments, without gradients.

    Args:
        batches: read once.
        loss: that prepares the batches as it does for gradients (a masked-token loss masks); None leaves them as they are.
        sample: rows of each site to keep as they are, chosen by ``seed``.
        sketch: the test matrix of each site; without it full second moments are summed.
        tokens: how many tokens the batches hold, for the progress display.

    Raises:
        SiteNeverFired: a site through which no tensor passed, or several in one run.
        NonFiniteRows: NaN or infinity at a site.
        ValueError: no position is kept.
    """
    if runs_remotely(model):
        from tangent_lens.recording.remote import record_activations_remotely

        options = {
            "loss": loss,
            "sample": sample,
            "seed": seed,
            "sketch": sketch,
            "progress": progress,
            "tokens": tokens,
        }
        return record_activations_remotely(model, batches, sites, **options)  # pyright: ignore[reportArgumentType]
    selection = Selection()
    receivers: list[Any] = [
        MomentsReceiver(site, selection, watch_positions=True)
        if sketch is None
        else SketchReceiver(site, selection, sketch)
        for site in sites
    ]
    samplers = {site: RowSampler(site, selection, sample, seed) for site in sites} if sample else {}
    prepare = loss.prepare if loss is not None else None
    passes = 0
    with ExitStack() as stack:
        stack.enter_context(evaluation_mode(model.module))
        stack.enter_context(torch.no_grad())
        for receiver in (*receivers, *samplers.values()):
            stack.enter_context(attached(model.tap_point(receiver.site), receiver))
        for batch in passing(batches, selection, model, "activations", tokens, progress, prepare):
            with padding_explained(batch):
                model.run_without_logits(batch)
            passes += 1
            check_fired(receivers, passes)
    _check_any_kept(receivers)
    return {
        one.site: ActivationRecord(
            one.result() if sketch is not None else one.result().activations,
            one.positions,
            samplers[one.site].result() if samplers else None,
        )
        for one in receivers
    }


def record_gradients(
    model: Model,
    batches: Iterable[Any],
    sites: Sequence[Site] = (),
    maps: Sequence[LinearMap] = (),
    *,
    loss: Loss | None = None,
    activations: bool = False,
    cross: bool = False,
    input_bases: Mapping[Site, Tensor] | None = None,
    keep_rows: bool = False,
    sketch: GradientSketch | None = None,
    progress: Progress | None = None,
    tokens: int = 0,
) -> GradientRecord:
    """Stream gradients of a summed loss at these sites, and the weight gradients of these maps.

    The parameters ask for no gradient meanwhile and come back as they were.

    Args:
        loss: what is differentiated; the next-token loss by default.
        activations: gather the sites' activations too.
        cross: and the cross moment of both.
        input_bases: for input sites of maps, the subspace (d, k) of the shuffled control, where it is known already;
            then their rows leave O(d) sums. Without it they leave full second moments.
        keep_rows: keep all gradient rows, input rows and backward signals with their sequences; memory grows with the corpus.
        sketch: the test matrices of every site and map; without it whole moments and weight gradients are summed.

    Raises:
        GradientNeverCame: the loss does not reach a site.
        SiteNeverFired: a site through which no tensor passed, or several in one run.
        NonFiniteRows: NaN or infinity at a site.
        ValueError: no position is kept, or the loss finds nothing to predict.
    """
    if runs_remotely(model):
        from tangent_lens.recording.remote import record_gradients_remotely, refuse_rows

        refuse_rows(cross=cross, keep_rows=keep_rows)
        options = {"loss": loss, "activations": activations, "sketch": sketch, "progress": progress, "tokens": tokens}
        return record_gradients_remotely(model, batches, sites, maps, input_bases=input_bases, **options)  # pyright: ignore[reportArgumentType]
    if sketch is not None and (activations or cross):
        raise ValueError("a sketch of gradients holds no activations and no cross moment; record these without it")
    loss = loss or CausalLoss()
    selection = Selection()
    wanted = {"activations": activations or cross, "gradients": True, "cross": cross}
    at_sites = _site_receivers(sites, selection, wanted, sketch)
    bases = input_bases or {}
    at_inputs = [InputReceiver(site, selection, bases.get(site)) for site in dict.fromkeys(one.reads for one in maps)]
    at_maps = [
        WeightReceiver(group, selection) if sketch is None else SketchedWeightReceiver(group, selection, sketch)
        for group in by_module(maps)
    ]
    kept = [KeptRows(site, selection, gradients=True) for site in sites] if keep_rows else []
    inputs = [KeptRows(receiver.site, selection, gradients=False) for receiver in at_inputs] if keep_rows else []
    signals = [KeptSignals(group, selection) for group in by_module(maps)] if keep_rows else []
    loss_sum, targets, passes = 0.0, 0, 0
    with ExitStack() as stack:
        stack.enter_context(evaluation_mode(model.module))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(frozen_parameters(model))
        for receiver in (*at_sites, *at_inputs, *kept, *inputs):
            stack.enter_context(attached(model.tap_point(receiver.site), receiver))
        for receiver in signals:
            stack.enter_context(attached(receiver.maps[0].output.whole, receiver))
        for receiver in at_maps:
            for place in receiver.maps[0].inputs:
                stack.enter_context(attached(place, receiver.take_input))
            stack.enter_context(attached(receiver.maps[0].output.whole, receiver.take_output))
        for batch in passing(batches, selection, model, "gradients", tokens, progress, loss.prepare):
            with padding_explained(batch):
                output, passes = model.run(batch), passes + 1
                check_fired([*at_sites, *at_inputs, *at_maps], passes)
                value, count = loss(output, batch)
                value.backward()
            loss_sum, targets = loss_sum + float(value.detach()), targets + count
            del output, value
            check_answered([*at_sites, *at_maps])
    _check_any_kept([*at_sites, *at_inputs])
    if not targets:
        raise ValueError(f"the {loss.name} loss found nothing to predict in the whole corpus")
    found = {receiver.site: receiver.result() for receiver in at_sites}
    weights = tuple(result for receiver in at_maps for result in receiver.results())
    summed = {"moments": found, "weights": weights}
    if sketch is not None:
        summed = {"moments": {}, "weights": (), "sketches": found, "sketched_weights": weights}
    return GradientRecord(
        **summed,
        inputs={receiver.site: receiver.result() for receiver in at_inputs},
        loss=loss_sum / targets,
        targets=targets,
        kept_gradients={receiver.site: receiver.result() for receiver in kept},
        kept_inputs={receiver.site: receiver.result() for receiver in inputs},
        kept_signals={name: rows for receiver in signals for name, rows in receiver.result().items()},
    )


def _site_receivers(
    sites: Sequence[Site], selection: Selection, wanted: Mapping[str, bool], sketch: GradientSketch | None
) -> list[Any]:
    if sketch is None:
        return [MomentsReceiver(site, selection, **wanted) for site in sites]
    matrices = sketch.at_sites
    return [SketchReceiver(site, selection, lambda site, width: matrices[site], gradients=True) for site in sites]


def activations_only(site: Site, activations: SecondMoments | SketchedMoments) -> Moments:
    """Moments of a site at which no gradient was recorded.

    Raises:
        ValueError: they were sketched.
    """
    if isinstance(activations, SketchedMoments):
        raise ValueError(f"{site}: a sketch was recorded, and it is no whole moment; record without one")
    moments = Moments(activations.width, name=site.name)
    moments.activations = activations
    return moments


@contextmanager
def attached(point: TapPoint, receive: ActivationReceiver) -> Iterator[None]:
    """A tap for as long as the block lasts."""
    handle = attach_tap(point, receive)
    try:
        yield
    finally:
        handle.remove()


def by_module(maps: Sequence[LinearMap]) -> list[list[LinearMap]]:
    """The maps, those that share one module together."""
    groups: dict[int, list[LinearMap]] = {}
    for one in maps:
        groups.setdefault(id(one.output.module), []).append(one)
    return list(groups.values())


def passing(
    batches: Iterable[Any],
    selection: Selection,
    model: Model,
    description: str,
    tokens: int,
    progress: Progress | None,
    prepare: Callable[[Any], Any] | None = None,
) -> Iterator[Any]:
    """Each batch on the model's device, made current for the receivers, its progress shown."""
    progress = progress or NoProgress()
    vocabulary, device = model.description.vocabulary, model.device
    seen = sequences = 0
    progress.start(description, total=tokens or None, unit="tokens")
    try:
        for batch in batches:
            batch.check_fits(vocabulary, model.longest_sequence)
            batch = (batch if prepare is None else prepare(batch)).to(device)
            selection.current = RowChoice.of(batch, sequences)
            yield batch
            seen += 1
            sequences += len(batch.tokens) if isinstance(batch, Batch) else batch.size
            progress.advance(batch.size)
    finally:
        progress.finish()
    if not seen:
        raise ValueError(f"no batch to record {description} from; the corpus is empty")


@contextmanager
def padding_explained(batch: Any) -> Iterator[None]:
    """Say of NaN in a padded batch that the padding may be why."""
    try:
        yield
    except NonFiniteRows as problem:
        if not getattr(batch, "padded", False):
            raise
        raise NonFiniteRows(
            f"{problem}. This batch is padded, and some libraries give NaN where a padding row may look at nothing (eager "
            "attention in float64; TransformerLens 3 in compatibility mode): padding_side='right' helps most models, "
            "batch_size=1 all of them"
        ) from problem


def check_fired(receivers: Sequence[Fires], passes: int) -> None:
    """Refuse a receiver that did not see one tensor a forward pass.

    Raises:
        SiteNeverFired: it saw none, or several in one pass.
    """
    for receiver in receivers:
        if receiver.fired == 0:
            raise SiteNeverFired(f"{receiver.name}: the model ran, but no tensor passed here; it skips that module")
        if receiver.fired != passes:
            raise SiteNeverFired(
                f"{receiver.name}: {receiver.fired} tensors passed in {passes} forward passes; gradient checkpointing or "
                "shared layers run a module more than once, and are not supported"
            )


def check_answered(receivers: Sequence[Answers]) -> None:
    """Refuse a receiver that did not get one gradient a forward pass.

    Raises:
        GradientNeverCame: the loss does not depend on its place.
    """
    for receiver in receivers:
        if receiver.answered != receiver.fired:
            raise GradientNeverCame(
                f"{receiver.name}: {receiver.answered} gradients came for {receiver.fired} forward passes; "
                "the loss does not depend on this place"
            )


def _check_any_kept(receivers: Sequence[Any]) -> None:
    for receiver in receivers:
        found = receiver.result()
        count = found.activations.count + found.gradients.count if isinstance(found, Moments) else found.count
        if count == 0:
            raise ValueError(
                "no position is left for the statistics: skip_first and skip_special leave out every token of this corpus"
            )
