"""Medians over the layers of one checkpoint, for the table and the plot of a training run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from tangent_lens.dynamics.report import CheckpointPoint, of_kind
from tangent_lens.measures.report import Measurement, Space


def median_of(
    measurements: Sequence[Measurement], kind: str, value: Callable[[Measurement], float | None]
) -> float | None:
    """Of one kind of gradient; None where none was measured."""
    return median_known(value(one) for one in of_kind(measurements, kind))


def median_known(values: Iterable[float | None]) -> float | None:
    """Of the values that there are."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def activations_of(point: CheckpointPoint) -> list[Space]:
    """The spaces at the sites of the residual gradients; all where none was measured."""
    sites = {one.site for one in point.measurements if one.gradient == "residual"}
    return [space for space in point.spaces if space.site in sites or not sites]


def median_dimension(point: CheckpointPoint) -> float | None:
    """TwoNN at the same sites."""
    sites = [space.site for space in activations_of(point)]
    return median_known(point.dimensions.get(site) for site in sites)


def median_overlap(point: CheckpointPoint) -> float | None:
    """Of the point's own proxies with the early ones."""
    return median_known(point.overlaps.values())
