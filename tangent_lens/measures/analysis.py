"""From what a run recorded to its measurements: proxies, controls, energies, isotropy. No model, no files."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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


# The first fields of a Measurement: gradient, name, kind, layer, site, fit_site, pooled.
Place = tuple[str, str, str, int | None, str, str, bool]


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
    total = len(record.moments) + len(record.weights) + len({weight.reads for weight in record.weights})
    return measure_gathered(gather_gradients(record, fit_site_of), proxies, settings, progress, total)


@dataclass(frozen=True, eq=False)
class GatheredGradient:
    """The rows of one gradient, summed: of one record, or of several that were merged.

    Attributes:
        place: the first fields of its :class:`Measurement`.
        fit_site: where its proxy is fitted.
        rows: second moments of its rows.
        signals: what the shuffled control needs, one entry a map and record; () for a residual gradient.
    """

    place: Place
    fit_site: Site
    rows: SecondMoments
    signals: tuple[BackwardSignals, ...] = ()

    @property
    def name(self) -> str:
        """As in a report: ``resid_post.3``, ``query.3``, ``attention.3``."""
        return self.place[1]

    def merged(self, other: GatheredGradient) -> GatheredGradient:
        """This gradient with the rows of another record of the same place; both stay as they are."""
        rows = SecondMoments(self.rows.width, name=self.rows.name)
        for one in (self.rows, other.rows):
            rows.merge(one)
        return replace(self, rows=rows, signals=self.signals + other.signals)


def gather_gradients(record: GradientRecord, fit_site_of: Mapping[Site, Site]) -> Iterator[GatheredGradient]:
    """Every gradient of a run: of each site, of each map, and of all maps of an input together. One at a time: each of a map
    takes d x d numbers.
    """
    for site, moments in record.moments.items():
        yield GatheredGradient(residual_place(site), site, moments.gradients)
    for site, weights in by_input(record.weights):
        yield from _gathered_weights(site, fit_site_of[site], weights, record.inputs[site])


def measure_gathered(
    gathered: Iterable[GatheredGradient],
    proxies: Mapping[Site, Subspace],
    settings: Settings,
    progress: Progress | None = None,
    total: int | None = None,
) -> tuple[Measurement, ...]:
    """Each gradient against the proxy of its site, in the order of the layers.

    Args:
        total: how many there are, for the progress display.

    Raises: as :func:`measure_gradients`.
    """
    progress = progress or NoProgress()
    progress.start("measures", total=total, unit="gradients")
    drawn: dict[Site, _Proxy] = {}
    measurements: list[Measurement] = []
    try:
        for one in gathered:
            if one.fit_site not in drawn:
                drawn = {one.fit_site: _with_controls(one.fit_site, proxies[one.fit_site], settings)}
            measurements.append(_measurement(one, drawn[one.fit_site], settings))
            progress.advance()
    finally:
        progress.finish()
    return _in_order(measurements)


def _in_order(measurements: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """By layer; within it as they came, but all maps of an input together before each alone."""
    places: dict[tuple[str, str], int] = {}

    def order(one: Measurement) -> tuple[int, int, bool]:
        layer = -1 if one.layer is None else one.layer
        return layer, places.setdefault((one.gradient, one.site), len(places)), not one.pooled

    return tuple(sorted(measurements, key=order))


def _with_controls(site: Site, tangent: Subspace, settings: Settings) -> _Proxy:
    # One seed for the run, another stream for each site: controls of two sites are not the same frames.
    seed = zlib.crc32(f"{settings.seed}/{site.name}".encode())
    return _Proxy(tangent, random_normals(tangent, settings.controls, seed))


def by_input(weights: Iterable[_Weight]) -> list[tuple[Site, list[_Weight]]]:
    """Weight gradients grouped by the site that their maps read."""
    ordered = sorted(weights, key=lambda weight: weight.reads.order)
    return [(site, list(group)) for site, group in groupby(ordered, key=lambda weight: weight.reads)]


def _gathered_weights(
    site: Site, fit_site: Site, weights: Sequence[WeightGradient], inputs: SecondMoments | ProjectedSums
) -> Iterator[GatheredGradient]:
    """Each map of this input, and then all of them together."""
    together, signals = SecondMoments(inputs.width, name=f"weight gradients at {site}"), []
    for weight in weights:
        rows = SecondMoments.of(weight.gradient.cpu(), name=f"weight gradient {weight.name}")
        signals.append(BackwardSignals.of(weight.signal_sum, weight.signal_square_sum, inputs))
        yield GatheredGradient(weight_place(weight, fit_site), fit_site, rows, (signals[-1],))
        together.merge(rows)
    yield GatheredGradient(pooled_place(site, fit_site, weights), fit_site, together, tuple(signals))


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


def _measurement(gathered: GatheredGradient, proxy: _Proxy, settings: Settings) -> Measurement:
    rows = gathered.rows
    energy = energy_test(rows, proxy.tangent, controls=proxy.frames, signals=gathered.signals)
    isotropy = isotropy_test(
        rows.covariance(), proxy.tangent, controls=proxy.frames, shrinkage=settings.shrinkage, name=rows.name
    )
    return Measurement(*gathered.place, energy, isotropy)


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
