"""Whether whole matrices are summed, or only sketches of them: from the widths, the places and the memory that is there."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from tangent_lens.measures.plan import Plan, why_no_sketch
from tangent_lens.measures.report import Settings
from tangent_lens.models.protocol import ATTENTION_MAPS, Model, runs_remotely, width_of
from tangent_lens.sites import Site

AUTO, EXACT, SKETCH = "auto", "exact", "sketch"
# The model's own activations, copies that measures make and other programs need the rest.
SHARE_OF_MEMORY = 0.5
# Bytes of float64 sums; every job brings them in float32, by halves where they are symmetric.
MOST_TO_TRAVEL = 4e9


def choose_statistics(model: Model, plan: Plan, settings: Settings) -> str:
    """``exact`` or ``sketch``.

    ``auto`` sketches where the whole sums would take more than half of the memory that is free on the model's device, or,
    of a model on a server, more than a few gigabytes, and the settings allow it.
    """
    if settings.statistics != AUTO:
        return settings.statistics
    free = available_memory(model.device)
    limit = math.inf if free is None else SHARE_OF_MEMORY * free
    if runs_remotely(model):
        limit = min(limit, MOST_TO_TRAVEL)
    return EXACT if exact_bytes(model, plan) <= limit or why_no_sketch(settings) else SKETCH


def exact_bytes(model: Model, plan: Plan) -> int:
    """Of all float64 sums at once: one d x d a fitted site, two a residual site, out x in a map."""
    shape = model.description

    def numbers(sites: Iterable[Site], times: int) -> int:
        return sum(times * (width_of(shape, site) or 0) ** 2 for site in sites)

    maps = sum(_output_width(model, one.kind, one.layer) * (width_of(shape, one.reads) or 0) for one in plan.maps)
    return 8 * (numbers(plan.fit_sites, 1) + numbers(plan.residual_sites, 2) + maps)


def _output_width(model: Model, kind: str, layer: int) -> int:
    if kind in ATTENTION_MAPS:
        return width_of(model.description, Site(kind, layer)) or 0
    # An MLP is usually four times as wide as the stream; its exact width is not needed for a limit.
    return 4 * model.description.d_model


def available_memory(device: torch.device) -> int | None:
    """Bytes that can still be had on a device; None where that cannot be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        # Linux counts what caches would give back; "available pages" of sysconf does not.
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, OSError, ValueError):
        return None
