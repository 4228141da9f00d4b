"""A measurement by sketches: which test matrices each pass needs, and what becomes of what they saw."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from tangent_lens.measures.analysis import by_input, pooled_place, residual_place, top_position, weight_place
from tangent_lens.measures.energy import BackwardSignals
from tangent_lens.measures.report import Measurement, Settings, Space
from tangent_lens.measures.sketched import Sketched, sketched_energy_test, sketched_isotropy_test
from tangent_lens.measures.sketched_matrix import gradient_directions, gradient_probes, left_rows
from tangent_lens.measures.sketched_spectrum import sketched_iso_score, sketched_spectrum, variance_share
from tangent_lens.progress import NoProgress, Progress
from tangent_lens.recording.passes import ActivationRecord, GradientRecord
from tangent_lens.recording.sketch import SketchedMoments, gaussian_directions
from tangent_lens.recording.sketch_receivers import ActivationSketch, GradientSketch, SketchDirections
from tangent_lens.sites import Site
from tangent_lens.subspaces.sketched import fit_directions, fit_sketched_pca, range_directions, sketch_columns
from tangent_lens.subspaces.subspace import Subspace

# Probes beside the range finder: they say what it leaves of |C|_F^2.
PROBES = 64

Records = dict[Site, ActivationRecord]


def record_sketched_activations(
    passing: Callable[[ActivationSketch], Records], settings: Settings, subspaces: Mapping[Site, Subspace] | None
) -> Records:
    """Sketches of the activations: of two passes to fit on, of one where the subspaces are given.

    Args:
        passing: runs the fit split with given test matrices.
        subspaces: by site; None to fit them.
    """
    probes: dict[int, torch.Tensor] = {}

    def with_probes(directions: torch.Tensor) -> SketchDirections:
        width = len(directions)
        if width not in probes:
            probes[width] = gaussian_directions(width, PROBES, f"{settings.seed}/probes")
        return SketchDirections(directions, probes[width])

    if subspaces is not None:
        given = subspaces
        return passing(lambda site, width: with_probes(_beside(given[site], width, settings.seed)))
    rank = int(settings.rank)
    first = passing(lambda site, width: SketchDirections(fit_directions(width, rank, settings.seed)))
    ranges = {site: range_directions(_sketch(record), center=settings.center) for site, record in first.items()}
    return passing(lambda site, width: with_probes(ranges[site]))


def _beside(given: Subspace, width: int, seed: int) -> torch.Tensor:
    if given.d != width:
        raise ValueError(
            f"a subspace of {given.d} dimensions does not fit a site of width {width}; fit it at the same site"
        )
    columns = min(sketch_columns(given.rank, width), width)
    return torch.cat([given.basis, gaussian_directions(width, columns, f"{seed}/fit")], dim=1)


def fit_sketched_proxies(records: Mapping[Site, ActivationRecord], settings: Settings) -> dict[Site, Subspace]:
    """The tangent proxy of every site.

    Raises:
        ValueError: a rank that a site does not allow.
    """
    rank, center = int(settings.rank), settings.center
    return {site: fit_sketched_pca(_sketch(record), rank, center=center) for site, record in records.items()}


def summarise_sketched_space(site: Site, record: ActivationRecord, tangent: Subspace) -> Space:
    """The shape of one site's activations on the fit split."""
    sketch = _sketch(record)
    iso_score = sketched_iso_score(sketch)
    top, top_share, top_rows = top_position(record)
    return Space(
        site=site.name,
        layer=site.layer,
        rank=tangent.rank,
        variance_share=variance_share(sketch, tangent.basis),
        iso_score=iso_score.value,
        spectrum=sketched_spectrum(sketch),
        top_position=top,
        top_position_share=top_share,
        top_position_rows=top_rows,
        standard_error=iso_score.standard_error,
    )


def _sketch(record: ActivationRecord) -> SketchedMoments:
    assert isinstance(record.moments, SketchedMoments)
    return record.moments


def gradient_sketch(
    sites: Iterable[Site],
    fit_site_of: Mapping[Site, Site],
    proxies: Mapping[Site, Subspace],
    settings: Settings,
    device: torch.device | str = "cpu",
) -> GradientSketch:
    """The test matrices of the gradient pass: the proxy of every place, its rivals, and what its controls are made of.

    Args:
        sites: of the residual gradients.
        fit_site_of: for the input site of each map, where its proxy was fitted.
        device: where the probes, one tensor for all places, shall lie.
    """
    # Apple's devices have no float64, and sums of their rows are kept on the CPU.
    place = torch.device("cpu") if torch.device(device).type == "mps" else torch.device(device)
    shared: dict[tuple[int, int], torch.Tensor] = {}

    def matrix(fitted: Site) -> SketchDirections:
        tangent = proxies[fitted]
        shape = (tangent.d, tangent.rank)
        if shape not in shared:
            shared[shape] = gradient_probes(*shape, settings.controls, settings.seed).to(place)
        return SketchDirections(gradient_directions(tangent).to(place), shared[shape])

    return GradientSketch(
        at_sites={site: matrix(site) for site in sites},
        at_inputs={reads: matrix(fitted) for reads, fitted in fit_site_of.items()},
        left_rows={reads: left_rows(proxies[fitted].rank) for reads, fitted in fit_site_of.items()},
        seed=settings.seed,
    )


def measure_sketched_gradients(
    record: GradientRecord,
    proxies: Mapping[Site, Subspace],
    fit_site_of: Mapping[Site, Site],
    settings: Settings,
    progress: Progress | None = None,
) -> tuple[Measurement, ...]:
    """Every sketched gradient of a run against the proxy of its site.

    Raises:
        ValueError: a rank too large for a normal control, or a gradient that is zero everywhere.
    """
    progress = progress or NoProgress()
    progress.start("measures", total=len(record.sketches) + len(record.sketched_weights), unit="gradients")
    measurements: list[Measurement] = []
    try:
        for site, sketch in record.sketches.items():
            measurements.append(_measurement(residual_place(site), sketch, proxies[site], settings))
            progress.advance()
        for site, weights in by_input(record.sketched_weights):
            fit_site, inputs = fit_site_of[site], record.inputs[site]
            tangent, gradients = proxies[fit_site], [weight.gradient for weight in weights]
            signals = [BackwardSignals.of(one.signal_sum, one.signal_square_sum, inputs) for one in gradients]
            pooled = pooled_place(site, fit_site, weights)
            measurements.append(_measurement(pooled, gradients, tangent, settings, signals))
            for weight, own in zip(weights, signals, strict=True):
                place = weight_place(weight, fit_site)
                measurements.append(_measurement(place, weight.gradient, tangent, settings, [own]))
            progress.advance(len(weights))
    finally:
        progress.finish()
    return tuple(sorted(measurements, key=lambda one: -1 if one.layer is None else one.layer))


def _measurement(
    place: tuple[str, str, str, int | None, str, str, bool],
    gradient: Sketched,
    tangent: Subspace,
    settings: Settings,
    signals: list[BackwardSignals] | None = None,
) -> Measurement:
    energy = sketched_energy_test(gradient, tangent, controls=settings.controls, signals=signals or ())
    isotropy = sketched_isotropy_test(gradient, tangent, controls=settings.controls, shrinkage=settings.shrinkage)
    return Measurement(*place, energy, isotropy)
