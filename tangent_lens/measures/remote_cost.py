"""What a run on a server will cost, before it runs: jobs, bytes over the wire, and memory for the sums there."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tangent_lens.measures.plan import Plan
from tangent_lens.measures.report import Settings
from tangent_lens.measures.sketched_analysis import PROBES
from tangent_lens.measures.sketched_matrix import gradient_probe_columns, left_rows
from tangent_lens.models.protocol import width_of
from tangent_lens.recording.receivers import WATCHED_POSITIONS
from tangent_lens.recording.remote_request import output_width
from tangent_lens.sites import Site
from tangent_lens.subspaces.sketched import sketch_columns

FLOAT32, FLOAT64 = 4, 8


@dataclass(frozen=True)
class RemoteCost:
    """Of one whole measurement.

    Attributes:
        jobs: how many, in all passes.
        sent_bytes, received_bytes: over the wire in all jobs, before compression (which saves about a tenth).
        server_bytes: the largest sums that one job holds on the server, beside the model and its activations.
    """

    jobs: int
    sent_bytes: int
    received_bytes: int
    server_bytes: int


@dataclass(frozen=True)
class _Pass:
    """One pass over part of the corpus: what each of its jobs sends and receives, and holds on the server."""

    sent: int
    received: int
    held: int


def remote_cost(
    model: Any, plan: Plan, settings: Settings, *, fit_batches: int, test_batches: int, batches_per_job: int = 8
) -> RemoteCost:
    """The cost of a measurement with ``settings.statistics`` of ``exact`` or ``sketch``; the rank must be a number.

    Args:
        model: whose shapes count; no weights are needed.
        fit_batches, test_batches: of the two halves of the corpus.
    """
    sketch = settings.statistics == "sketch"
    fits = _sketched_fits(model, plan, settings) if sketch else [_exact_fit(model, plan)]
    gradients = _sketched_gradients(model, plan, settings) if sketch else _exact_gradients(model, plan, settings)
    runs = [(one, math.ceil(fit_batches / batches_per_job)) for one in fits]
    runs.append((gradients, math.ceil(test_batches / batches_per_job)))
    return RemoteCost(
        jobs=sum(jobs for _, jobs in runs),
        sent_bytes=sum(jobs * one.sent for one, jobs in runs),
        received_bytes=sum(jobs * one.received for one, jobs in runs),
        server_bytes=max(one.held for one, _ in runs),
    )


def _widths(model: Any, sites: Iterable[Site]) -> list[int]:
    return [width_of(model.description, site) or 0 for site in sites]


def _triangle(width: int) -> int:
    return width * (width + 1) // 2


def _small(width: int) -> int:
    """Means, and the sums at watched positions."""
    return FLOAT64 * width + FLOAT32 * WATCHED_POSITIONS * width


def _exact_fit(model: Any, plan: Plan) -> _Pass:
    widths = _widths(model, plan.fit_sites)
    received = sum(FLOAT32 * _triangle(d) + _small(d) for d in widths)
    return _Pass(0, received, sum(FLOAT64 * d * d for d in widths))


def _exact_gradients(model: Any, plan: Plan, settings: Settings) -> _Pass:
    residual = _widths(model, plan.residual_sites)
    inputs = _widths(model, plan.fit_site_of)
    maps = _map_shapes(model, plan)
    received = sum(FLOAT32 * _triangle(d) + FLOAT64 * d for d in residual) + sum(FLOAT64 * d for d in inputs)
    received += sum(FLOAT32 * out * width + 2 * FLOAT64 * out for out, width in maps)
    sent = sum(FLOAT32 * d * int(settings.rank) for d in inputs)
    held = FLOAT64 * (sum(d * d for d in residual) + sum(out * width for out, width in maps))
    return _Pass(sent, received, held)


def _sketched_fits(model: Any, plan: Plan, settings: Settings) -> list[_Pass]:
    """Two passes: one to find where to look, one to look."""
    found = []
    for probes in (0, PROBES):
        widths, sent, received, held = _widths(model, plan.fit_sites), 0, 0, 0
        for d in widths:
            columns = sketch_columns(int(settings.rank), d)
            received += FLOAT32 * d * (columns + probes) + FLOAT64 * d + _small(d)
            held += FLOAT64 * d * (columns + probes)
            sent += FLOAT32 * d * columns if probes else 0
        shared = {d: probes or sketch_columns(int(settings.rank), d) for d in widths}
        found.append(_Pass(sent + sum(FLOAT32 * d * columns for d, columns in shared.items()), received, held))
    return found


def _sketched_gradients(model: Any, plan: Plan, settings: Settings) -> _Pass:
    k = int(settings.rank)
    own, probes, left = 2 * k, gradient_probe_columns(k, settings.controls), left_rows(k) + 1
    residual, inputs = _widths(model, plan.residual_sites), _widths(model, plan.fit_site_of)
    columns = own + probes
    received = sum(FLOAT32 * d * columns + 2 * FLOAT64 * d for d in residual) + sum(FLOAT64 * d for d in inputs)
    held = sum(FLOAT64 * d * columns for d in residual)
    for out, width in _map_shapes(model, plan):
        received += FLOAT32 * (out * columns + left * width) + 2 * FLOAT64 * out
        held += FLOAT64 * (out * columns + left * width)
    sent = sum(FLOAT32 * d * own for d in (*residual, *inputs)) + sum(FLOAT32 * d * k for d in inputs)
    return _Pass(sent + sum(FLOAT32 * d * probes for d in {*residual, *inputs}), received, held)


def _map_shapes(model: Any, plan: Plan) -> list[tuple[int, int]]:
    return [(output_width(one), width_of(model.description, one.reads) or 0) for one in plan.maps]
