"""From what a run recorded to its measurements: proxies, controls, energies, isotropy. No model, no files."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from torch import Tensor

from tangent_lens.measures.energy import BackwardSignals, energy_fraction, energy_test
from tangent_lens.measures.isotropy import iso_score, isotropy_test
from tangent_lens.measures.report import Measurement, Settings, Space
from tangent_lens.measures.spectrum import spectrum_of
from tangent_lens.models.protocol import ATTENTION_MAPS
from tangent_lens.progress import NoProgress, Progress
from tangent_lens.recording.moments import ProjectedSums, SecondMoments
from tangent_lens.recording.passes import ActivationRecord, GradientRecord
from tangent_lens.recording.receivers import WeightGradient
from tangent_lens.recording.sketch_receivers import SketchedWeight
from tangent_lens.sites import Site
from tangent_lens.subspaces.controls import random_normals
from tangent_lens.subspaces.fits import fit_pca
from tangent_lens.subspaces.methods import fit, needs_rows
from tangent_lens.subspaces.ranks import known_rank
from tangent_lens.subspaces.subspace import Subspace

_Weight = TypeVar("_Weight", WeightGradient, SketchedWeight)

# From this share on, "most of the variance" sits in one position or one dimension.
_MOST = 0.5


@dataclass(frozen=True)
class _Proxy:
    """A tangent proxy with its random controls, drawn once and used for every gradient of its site."""

    tangent: Subspace
    frames: Tensor


def summarise_space(site: Site, record: ActivationRecord, tangent: Subspace) -> Space:
    """The shape of one site's activations on the fit split."""
    covariance = whole_moments(record).covariance()
    top, top_share, top_rows = top_position(record)
    return Space(
        site=site.name,
        layer=site.layer,
        rank=tangent.rank,
        variance_share=energy_fraction(covariance, tangent.basis),
        iso_score=iso_score(covariance),
        spectrum=spectrum_of(covariance),
        top_position=top,
        top_position_share=top_share,
        top_position_rows=top_rows,
    )


def whole_moments(record: ActivationRecord) -> SecondMoments:
    """The moments of a recording that was not sketched.

    Raises:
        ValueError: it was.
    """
    if not isinstance(record.moments, SecondMoments):
        raise ValueError(
            f"{record.moments.name}: this needs whole moments, and a sketch was recorded; record without one"
        )
    return record.moments


def top_position(record: ActivationRecord) -> tuple[int, float, float]:
    """The early position that holds most of the variance, its share of it, and its share of the rows."""
    if record.positions is None:
        return 0, 0.0, 1.0
    shares = record.positions.shares(record.moments)
    top = int(shares.argmax())
    return top, float(shares[top]), float(record.positions.count[top] / record.moments.count)


def fit_proxies(records: Mapping[Site, ActivationRecord], settings: Settings) -> dict[Site, Subspace]:
    """The tangent proxy of every recorded site.

    Raises:
        ValueError: a rank that a site does not allow.
    """
    return {site: _fitted(record, settings) for site, record in records.items()}


def _fitted(record: ActivationRecord, settings: Settings) -> Subspace:
    if not needs_rows(settings.fit):
        return fit_pca(whole_moments(record), settings.rank, center=settings.center)
    assert record.sample is not None
    # A share or a rule speaks of the variances; the method then fits as many directions as PCA would take.
    rank = known_rank(settings.rank) or fit_pca(whole_moments(record), settings.rank, center=settings.center).rank
    return fit(settings.fit, record.sample, rank, seed=settings.seed)


def given_proxies(sites: Sequence[Site], subspaces: Mapping[str, Subspace]) -> dict[Site, Subspace]:
    """Subspaces that somebody chose, by the site that each belongs to.

    Raises:
        ValueError: a site without one, or one of another site.
    """
    names = [site.name for site in sites]
    missing, unknown = [name for name in names if name not in subspaces], sorted(set(subspaces) - set(names))
    if missing or unknown:
        said = f"no subspace was given for {', '.join(missing)}" if missing else f"{', '.join(unknown)} is not measured"
        raise ValueError(
            f"{said}; this measurement needs one for each of {', '.join(names)} (gradients='residual' needs the sites alone)"
        )
    return {site: subspaces[site.name] for site in sites}


def measure_gradients(
    record: GradientRecord,
    proxies: Mapping[Site, Subspace],
    fit_site_of: Mapping[Site, Site],
    settings: Settings,
    progress: Progress | None = None,
) -> tuple[Measurement, ...]:
    """Every gradient of a run against the proxy of its site.

    Args:
        proxies: by the site at which each was fitted.
        fit_site_of: for the input site of each weight gradient, where its proxy was fitted.

    Raises:
        ValueError: a rank too large for a normal control, or a gradient that is zero everywhere.
    """
    progress = progress or NoProgress()
    progress.start("measures", total=len(record.moments) + len(record.weights), unit="gradients")
    measurements: list[Measurement] = []
    try:
        for site, moments in record.moments.items():
            proxy = _with_controls(site, proxies[site], settings)
            measurements.append(_measurement(*residual_place(site), moments.gradients, proxy, settings))
            progress.advance()
        for site, weights in by_input(record.weights):
            fit_site = fit_site_of[site]
            proxy = _with_controls(fit_site, proxies[fit_site], settings)
            measurements += _weight_measurements(site, fit_site, weights, record.inputs[site], proxy, settings)
            progress.advance(len(weights))
    finally:
        progress.finish()
    return tuple(sorted(measurements, key=lambda one: -1 if one.layer is None else one.layer))


def _with_controls(site: Site, tangent: Subspace, settings: Settings) -> _Proxy:
    # One seed for the run, another stream for each site: controls of two sites are not the same frames.
    seed = zlib.crc32(f"{settings.seed}/{site.name}".encode())
    return _Proxy(tangent, random_normals(tangent, settings.controls, seed))


def by_input(weights: Iterable[_Weight]) -> list[tuple[Site, list[_Weight]]]:
    """Weight gradients grouped by the site that their maps read."""
    ordered = sorted(weights, key=lambda weight: weight.reads.order)
    return [(site, list(group)) for site, group in groupby(ordered, key=lambda weight: weight.reads)]


def _weight_measurements(
    site: Site,
    fit_site: Site,
    weights: Sequence[WeightGradient],
    inputs: SecondMoments | ProjectedSums,
    proxy: _Proxy,
    settings: Settings,
) -> list[Measurement]:
    """One measurement a map, and one of all maps of this input together."""
    measured = []
    together = SecondMoments(inputs.width, name=f"weight gradients at {site}")
    all_signals = []
    for weight in weights:
        rows = SecondMoments.of(weight.gradient.cpu(), name=f"weight gradient {weight.name}")
        signals = BackwardSignals.of(weight.signal_sum, weight.signal_square_sum, inputs)
        measured.append(_measurement(*weight_place(weight, fit_site), rows, proxy, settings, [signals]))
        together.merge(rows)
        all_signals.append(signals)
    place = pooled_place(site, fit_site, weights)
    return [_measurement(*place, together, proxy, settings, all_signals), *measured]


# The first fields of a Measurement: gradient, name, kind, layer, site, fit_site, pooled.
Place = tuple[str, str, str, int | None, str, str, bool]


def residual_place(site: Site) -> Place:
    """Of the gradient of a site's rows."""
    # A site and a map can both be called query.3; the map keeps the plain name.
    name = f"{site.name} (residual)" if site.kind in ATTENTION_MAPS else site.name
    return "residual", name, site.kind, site.layer, site.name, site.name, False


def weight_place(weight: WeightGradient | SketchedWeight, fit_site: Site) -> Place:
    """Of the gradient of one map."""
    return "weight", weight.name, weight.kind, weight.layer, weight.reads.name, fit_site.name, False


def pooled_place(site: Site, fit_site: Site, weights: Sequence[WeightGradient | SketchedWeight]) -> Place:
    """Of the gradients of all maps that read a site."""
    kind = "attention" if weights[0].kind in ATTENTION_MAPS else "mlp"
    return "weight", f"{kind}.{site.layer}", kind, site.layer, site.name, fit_site.name, True


def _measurement(
    gradient: str,
    name: str,
    kind: str,
    layer: int | None,
    site: str,
    fit_site: str,
    pooled: bool,
    rows: SecondMoments,
    proxy: _Proxy,
    settings: Settings,
    signals: Sequence[BackwardSignals] = (),
) -> Measurement:
    energy = energy_test(rows, proxy.tangent, controls=proxy.frames, signals=signals)
    isotropy = isotropy_test(
        rows.covariance(), proxy.tangent, controls=proxy.frames, shrinkage=settings.shrinkage, name=rows.name
    )
    return Measurement(gradient, name, kind, layer, site, fit_site, pooled, energy, isotropy)


def concentration_warnings(spaces: Sequence[Space]) -> tuple[str, ...]:
    """Sentences where one position or one dimension holds most of a site's variance (massive activations)."""
    positions, dimensions = {}, {}
    for space in spaces:
        kind = space.site if space.layer is None else space.site.split(".")[0]
        # In very short sequences one position holds many of the rows by itself; that is no concentration.
        if space.top_position_share > max(_MOST, 5 * space.top_position_rows):
            positions.setdefault((kind, space.top_position), []).append((space.layer, space.top_position_share))
        if space.spectrum.top_share > _MOST:
            dimensions.setdefault((kind, space.spectrum.top_dimension), []).append(
                (space.layer, space.spectrum.top_share)
            )
    sentences = [
        f"massive activations: position {position} holds {_shares(found)} of the variance at {kind}{_layers(found)}"
        + ("; skip_first=True leaves the first position out" if position == 0 else "")
        for (kind, position), found in positions.items()
    ]
    sentences += [
        f"massive activations: dimension {dimension} holds {_shares(found)} of the variance at {kind}{_layers(found)}"
        for (kind, dimension), found in dimensions.items()
    ]
    return tuple(sentences)


def _shares(found: Sequence[tuple[int | None, float]]) -> str:
    low, high = min(share for _, share in found), max(share for _, share in found)
    return f"{low:.1%}" if f"{low:.1%}" == f"{high:.1%}" else f"{low:.1%} to {high:.1%}"


def _layers(found: Sequence[tuple[int | None, float]]) -> str:
    layers = sorted(layer for layer, _ in found if layer is not None)
    if not layers:
        return ""
    runs, start = [], layers[0]
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        if following != layer + 1:
            runs.append(f"{start}" if start == layer else f"{start} to {layer}")
            start = following
    return f", layer{'s' if len(layers) > 1 else ''} {', '.join(runs)}"
