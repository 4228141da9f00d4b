"""How sure the numbers of a measurement are: intervals from resampled test sequences, and p-values over many layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from tangent_lens.measures.bootstrap import Interval, Statistic, Uncertainty, adjusted_p_values, bootstrap
from tangent_lens.measures.energy import lift_of
from tangent_lens.measures.report import Measurement, Settings
from tangent_lens.measures.sequence_sums import RowsBySequence, WeightsBySequence
from tangent_lens.models.protocol import LinearMap, ModelDescription, width_of
from tangent_lens.progress import NoProgress, Progress
from tangent_lens.recording.passes import GradientRecord
from tangent_lens.sites import Site
from tangent_lens.subspaces.subspace import Subspace

# Kept rows beyond this are refused before the model runs.
MOST_BYTES = 6 * 2**30


def with_uncertainty(
    measurements: Sequence[Measurement],
    record: GradientRecord,
    proxies: Mapping[Site, Subspace],
    settings: Settings,
    progress: Progress | None = None,
) -> tuple[Measurement, ...]:
    """The same measurements with bootstrap intervals of energy, lift and, for residual gradients, delta_iso.

    Args:
        record: with kept rows.
        proxies: by the site at which each was fitted.
    """
    progress = progress or NoProgress()
    fitted = {site.name: proxy for site, proxy in proxies.items()}
    progress.start("bootstrap", total=len(measurements), unit="gradients")
    try:
        forms: dict[str, WeightsBySequence] = {}
        found = {}
        # Single maps first: a pooled measurement is the sum of theirs.
        for one in sorted(measurements, key=lambda one: one.pooled):
            tangent = fitted[one.fit_site]
            if one.gradient == "residual":
                found[one.name] = _of_rows(record, one, tangent, settings)
            else:
                form = _pooled(forms, one, measurements) if one.pooled else _form(record, one, tangent)
                forms[one.name] = form
                found[one.name] = _intervals(form, tangent, settings)
            progress.advance()
    finally:
        progress.finish()
    return tuple(replace(one, uncertainty=found[one.name]) for one in measurements)


def with_adjusted_p_values(measurements: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """The same measurements with p-values corrected over the layers of their kind (Benjamini and Hochberg 1995)."""
    groups: dict[tuple[str, str, bool], list[Measurement]] = {}
    for one in measurements:
        groups.setdefault((one.gradient, one.kind, one.pooled), []).append(one)
    energies: dict[str, float] = {}
    isotropies: dict[str, float] = {}
    for group in groups.values():
        names = [one.name for one in group]
        energies |= dict(zip(names, adjusted_p_values([_energy_p(one) for one in group]), strict=True))
        isotropies |= dict(zip(names, adjusted_p_values([one.isotropy.p_value for one in group]), strict=True))
    return tuple(
        replace(one, energy_q_value=energies[one.name], isotropy_q_value=isotropies[one.name]) for one in measurements
    )


def _energy_p(one: Measurement) -> float:
    """The exact null's, which can be as small as it is; that of 20 sampled normals cannot survive many layers."""
    exact = one.energy.exact_p_value
    return one.energy.p_value if exact is None else exact


def check_kept_rows(shape: ModelDescription, sites: Sequence[Site], maps: Sequence[LinearMap], tokens: int) -> None:
    """Refuse a bootstrap whose kept rows would fill the memory, before the model runs.

    Raises:
        ValueError: with the size, the limit and the way out.
    """
    size = kept_bytes(shape, sites, maps, tokens)
    if size > MOST_BYTES:
        raise ValueError(
            f"the bootstrap keeps the rows of {tokens:,} test tokens at {len(sites)} sites and {len(maps)} maps, about "
            f"{size / 2**30:.0f} GiB, and {MOST_BYTES / 2**30:.0f} are allowed; measure fewer sites or layers, fewer "
            "max_sequences, or gradients='residual'"
        )


def kept_bytes(shape: ModelDescription, sites: Sequence[Site], maps: Sequence[LinearMap], rows: int) -> int:
    """What so many rows take in float32 at these sites, at the maps' inputs and at their outputs."""
    inputs = {one.reads for one in maps}
    places = [*(site for site in (*sites, *inputs)), *(Site(one.kind, one.layer) for one in maps if one.kind in _HEADS)]
    numbers = sum(width_of(shape, site) or 0 for site in places)
    # An MLP is usually four times as wide as the stream; its exact width is not needed for a limit.
    numbers += sum(4 * shape.d_model for one in maps if one.kind not in _HEADS)
    return 4 * numbers * rows


_HEADS = ("query", "key", "value")


def _of_rows(record: GradientRecord, one: Measurement, tangent: Subspace, settings: Settings) -> Uncertainty:
    rows, sequences = _at(record.kept_gradients, one.site)
    form = RowsBySequence.of(rows, sequences, tangent.basis)
    delta = None if settings.shrinkage else _bootstrap(form.delta_iso, form.sequences, settings)
    return replace(_intervals(form, tangent, settings), delta_iso_interval=delta)


def _form(record: GradientRecord, one: Measurement, tangent: Subspace) -> WeightsBySequence:
    inputs, sequences = _at(record.kept_inputs, one.site)
    return WeightsBySequence.of(inputs, record.kept_signals[one.name], sequences, tangent.basis)


def _at(kept: Mapping[Site, tuple[Tensor, Tensor]], name: str) -> tuple[Tensor, Tensor]:
    return next(rows for site, rows in kept.items() if site.name == name)


def _pooled(
    forms: Mapping[str, WeightsBySequence], pooled: Measurement, measurements: Sequence[Measurement]
) -> WeightsBySequence:
    parts = [
        forms[one.name]
        for one in measurements
        if one.gradient == "weight" and not one.pooled and one.layer == pooled.layer and one.site == pooled.site
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _intervals(form: RowsBySequence | WeightsBySequence, tangent: Subspace, settings: Settings) -> Uncertainty:
    def lift(weights: np.ndarray) -> np.ndarray:
        return np.array([lift_of(energy, tangent.rank, tangent.d) for energy in form.energy(weights)])

    return Uncertainty(
        energy_interval=_bootstrap(form.energy, form.sequences, settings),
        lift_interval=_bootstrap(lift, form.sequences, settings),
    )


def _bootstrap(statistic: Statistic, sequences: int, settings: Settings) -> Interval:
    return bootstrap(statistic, sequences, replicates=settings.bootstrap, seed=settings.seed)
