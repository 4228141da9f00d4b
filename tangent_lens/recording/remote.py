"""The passes of ``passes`` on a server: what is asked there, and what the sums that come back are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tangent_lens.models.ndif import NdifModel
from tangent_lens.models.protocol import Batch, LinearMap
from tangent_lens.progress import NoProgress, Progress
from tangent_lens.recording.losses import CausalLoss, Loss
from tangent_lens.recording.moments import Moments, ProjectedSums, SecondMoments
from tangent_lens.recording.passes import ActivationRecord, GradientRecord
from tangent_lens.recording.receivers import PositionVariance, WeightGradient
from tangent_lens.recording.remote_request import SumsRequest, check_finite, output_width
from tangent_lens.recording.remote_sample import ChosenSample, chosen_sample
from tangent_lens.recording.remote_store import RunStore, Sums, identity_of
from tangent_lens.recording.sketch import SketchedGradient, SketchedMoments
from tangent_lens.recording.sketch_receivers import ActivationSketch, GradientSketch, SketchDirections, SketchedWeight
from tangent_lens.sites import Site


def record_activations_remotely(
    model: NdifModel,
    batches: Iterable[Batch],
    sites: Sequence[Site],
    *,
    loss: Loss | None = None,
    sample: int = 0,
    seed: int = 0,
    sketch: ActivationSketch | None = None,
    progress: Progress | None = None,
    tokens: int = 0,
) -> dict[Site, ActivationRecord]:
    """As :func:`~tangent_lens.recording.passes.record_activations`, where the model is.

    Raises:
        NonFiniteRows: NaN or infinity at a site.
        RemoteRunFailed: the server could not do it.
        ValueError: no position is kept.
    """
    request = SumsRequest(model)
    matrices = {} if sketch is None else {site: sketch(site, _width(model, site)) for site in sites}
    for site in sites:
        names = _sent(request, site, matrices.get(site))
        point = model.tap_point(site)
        request.ask("activations", f"{site} activations", point, site.kind, site.layer, directions=names, watch=True)
    prepared = [batch if loss is None else loss.prepare(batch) for batch in batches]
    chosen = chosen_sample(prepared, sample, seed) if sample else None
    sums = _run(request, prepared, loss, "activations", progress, tokens, chosen)
    return {
        site: ActivationRecord(
            _summed(sums, site, "activations", matrices.get(site)),
            _positions(sums, site),
            None if chosen is None else chosen.of(_stream(sums, f"{site} activations/sample")["rows"], site),
        )
        for site in sites
    }


def record_gradients_remotely(
    model: NdifModel,
    batches: Iterable[Batch],
    sites: Sequence[Site] = (),
    maps: Sequence[LinearMap] = (),
    *,
    loss: Loss | None = None,
    activations: bool = False,
    input_bases: Mapping[Site, Tensor] | None = None,
    sketch: GradientSketch | None = None,
    progress: Progress | None = None,
    tokens: int = 0,
) -> GradientRecord:
    """As :func:`~tangent_lens.recording.passes.record_gradients`, where the model is.

    Raises:
        GradientsRefused: the server takes no gradients for this key.
        NonFiniteRows, RemoteRunFailed, ValueError: as :func:`record_activations_remotely`.
    """
    bases = input_bases or {}
    request = SumsRequest(model, gradients=True)
    for site in sites:
        for stream in ("activations", "gradients") if activations else ("gradients",):
            names = _sent(request, site, None if sketch is None else sketch.at_sites[site])
            point = model.tap_point(site)
            request.ask(stream, f"{site} {stream}", point, site.kind, site.layer, directions=names)
    for site in dict.fromkeys(one.reads for one in maps):
        names = [request.send(f"basis at {site}", bases[site])] if site in bases else []
        duty = "inputs" if names else "activations"
        request.ask(duty, f"{site} inputs", model.tap_point(site), site.kind, site.layer, directions=names)
    for one in maps:
        _ask_for_weight(request, one, sketch)
    loss = loss or CausalLoss()
    sums = _run(request, [loss.prepare(batch) for batch in batches], loss, "gradients", progress, tokens)
    targets = int(sums["loss"]["targets"])
    if not targets:
        raise ValueError(f"the {loss.name} loss found nothing to predict in the whole corpus")
    inputs = {site: _inputs(sums, site, bases.get(site)) for site in dict.fromkeys(one.reads for one in maps)}
    mean_loss = float(sums["loss"]["loss"]) / targets
    if sketch is None:
        moments = {site: _moments(sums, site, activations) for site in sites}
        return GradientRecord(moments, inputs, tuple(_weight_gradient(sums, one) for one in maps), mean_loss, targets)
    return GradientRecord(
        moments={},
        inputs=inputs,
        weights=(),
        loss=mean_loss,
        targets=targets,
        sketches={site: _sketched(sums, site, "gradients", sketch.at_sites[site]) for site in sites},
        sketched_weights=tuple(_sketched_weight(sums, one, sketch) for one in maps),
    )


def refuse_rows(*, cross: bool, keep_rows: bool) -> None:
    """What would have all rows travel.

    Raises:
        ValueError: it was asked for.
    """
    if keep_rows:
        raise ValueError("a bootstrap keeps every gradient row, and all of them would have to travel; use bootstrap=0")
    if cross:
        raise ValueError("cross moments are not summed on a server; use cross=False, or record where the model is")


def _run(
    request: SumsRequest,
    batches: Sequence[Batch],
    loss: Loss | None,
    description: str,
    progress: Progress | None,
    tokens: int,
    chosen: ChosenSample | None = None,
) -> Sums:
    """Send the batches job by job, and join what comes back."""
    progress, jobs, written = progress or NoProgress(), request.model.jobs, request.written()
    if not batches:
        raise ValueError(f"no batch to record {description} from; the corpus is empty")
    sent = [request.batch(batch, loss) for batch in batches]
    for number, batch in enumerate(sent):
        batch["sampled"] = None if chosen is None else chosen.masks[number]
    size = jobs.options.batches_per_job
    cuts = [sent[start : start + size] for start in range(0, len(sent), size)]
    identity = identity_of(jobs.model_key, written, sent, size)
    store = RunStore(jobs.options.folder, identity, resume=jobs.options.resume)
    progress.start(f"{description}, remote", total=tokens or None, unit="tokens")
    try:
        for number, cut in enumerate(cuts):
            if number in store.done:
                jobs.kept += 1
            else:
                sums = jobs.run(written, cut, progress, f"job {number + 1} of {len(cuts)}")
                check_finite(sums)
                store.add(number, sums, written)
            progress.advance(sum(batch["size"] for batch in cut))
    finally:
        progress.finish()
    assert store.sums is not None
    request.model.tell_dtype(store.sums["facts"]["dtype"])
    jobs.remember(store)
    return store.sums


def _width(model: NdifModel, site: Site) -> int:
    width = model.tap_point(site).width
    assert width is not None, "every HuggingFace site has a known width"
    return width


def _sent(request: SumsRequest, site: Site, matrix: SketchDirections | None) -> list[str]:
    """The names of a site's test matrix, which travels with the request; none where whole sums are wanted."""
    if matrix is None:
        return []
    parts = {f"own of {site}": matrix.own, f"probes of {site}": matrix.probes}
    return [request.send(name, part) for name, part in parts.items() if part is not None and part.shape[1]]


def _ask_for_weight(request: SumsRequest, one: LinearMap, sketch: GradientSketch | None) -> None:
    key, names, left = f"{one.name} weight", [], None
    if sketch is not None:
        names = _sent(request, one.reads, sketch.at_inputs[one.reads])
        left = sketch.left_recipe(one, output_width(one))
    request.ask("map input", key, one.inputs[-1], one.kind, one.layer)
    request.ask("map output", key, one.output, one.kind, one.layer, directions=names, left=left)


def _stream(sums: Sums, key: str) -> Mapping[str, Any]:
    if key not in sums:
        raise ValueError(
            "no position is left for the statistics: skip_first and skip_special leave out every token of this corpus"
        )
    return sums[key]


def _second_moments(sums: Sums, site: Site, stream: str) -> SecondMoments:
    found = _stream(sums, f"{site} {stream}")
    tensors = {"count": torch.tensor(found["count"]), "mean": found["mean"], "scatter": found["scatter"]}
    return SecondMoments.from_tensors(tensors, name=f"{stream} at {site}")


def _sketched(sums: Sums, site: Site, stream: str, matrix: SketchDirections) -> SketchedMoments:
    found = _stream(sums, f"{site} {stream}")
    sketch = SketchedMoments(matrix.own.cpu(), _cpu(matrix.probes), name=f"{stream} at {site}")
    sketch.join(int(found["count"]), found["mean"], found["diagonal"], found["through"])
    return sketch


def _summed(sums: Sums, site: Site, stream: str, matrix: SketchDirections | None) -> SecondMoments | SketchedMoments:
    return _second_moments(sums, site, stream) if matrix is None else _sketched(sums, site, stream, matrix)


def _sketched_weight(sums: Sums, one: LinearMap, sketch: GradientSketch) -> SketchedWeight:
    found, matrix, left = (
        _stream(sums, f"{one.name} weight"),
        sketch.at_inputs[one.reads],
        sketch.left(one, output_width(one)),
    )
    if not math.isclose(
        _stream(sums, f"{one.name} weight/check")["sum"], float(left.sum()), rel_tol=1e-6, abs_tol=1e-6
    ):
        raise RuntimeError(
            f"{one.name}: the server's torch draws other random numbers from the same seed, so its sketch cannot be read here; "
            "use the server's version of torch, or statistics='exact'"
        )
    gradient = SketchedGradient(matrix.own.cpu(), left, _cpu(matrix.probes), name=f"weight gradient {one.name}")
    numbers = (found["through"], found["left"], found["signal_sum"], found["signal_square_sum"])
    gradient.join(int(found["rows"]), *numbers)
    return SketchedWeight(one.kind, one.layer, one.reads, gradient)


def _cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cpu()


def _positions(sums: Sums, site: Site) -> PositionVariance:
    found = _stream(sums, f"{site} activations/positions")
    positions = PositionVariance(found["sum"].shape[1])
    positions.count, positions.sum, positions.square_sum = found["count"], found["sum"], found["square_sum"]
    return positions


def _moments(sums: Sums, site: Site, activations: bool) -> Moments:
    gradients = _second_moments(sums, site, "gradients")
    moments = Moments(gradients.width, name=site.name)
    moments.gradients = gradients
    if activations:
        moments.activations = _second_moments(sums, site, "activations")
    return moments


def _inputs(sums: Sums, site: Site, basis: Tensor | None) -> SecondMoments | ProjectedSums:
    if basis is None:
        return _second_moments(sums, site, "inputs")
    found = _stream(sums, f"{site} inputs")
    inputs = ProjectedSums(basis, name=f"inputs at {site}")
    inputs.join(int(found["count"]), found["sum"], float(found["total"]), float(found["along"]))
    return inputs


def _weight_gradient(sums: Sums, one: LinearMap) -> WeightGradient:
    found = _stream(sums, f"{one.name} weight")
    numbers = (found["gradient"], int(found["rows"]), found["signal_sum"], found["signal_square_sum"])
    return WeightGradient(one.kind, one.layer, one.reads, *numbers)
