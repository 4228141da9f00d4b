"""Overlaps of subspaces as a matplotlib heat map (the ``plot`` extra)."""

from __future__ import annotations

from typing import Any

from tangent_lens.measures.overlaps import Overlaps
from tangent_lens.reports.plots import import_pyplot

# More names than this would be written over one another.
MOST_LABELS = 32
WRITTEN_UP_TO = 12


def plot_overlaps(overlaps: Overlaps) -> Any:
    """Overlap of every two subspaces, from 0 to 1.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pyplot = import_pyplot()
    count = len(overlaps.names)
    size = min(3.5 + 0.28 * count, 12)
    figure, axes = pyplot.subplots(figsize=(size + 1, size), layout="constrained")
    image = axes.imshow(overlaps.overlap, vmin=0, vmax=1, cmap="viridis")
    every = range(0, count, -(-count // MOST_LABELS))
    axes.set_xticks(every, [overlaps.names[place] for place in every], rotation=90)
    axes.set_yticks(every, [overlaps.names[place] for place in every])
    if count <= WRITTEN_UP_TO:
        for row, values in enumerate(overlaps.overlap):
            for column, value in enumerate(values):
                ink = "black" if value > 0.5 else "white"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=ink, fontsize=8)
    chance = max(max(row) for row in overlaps.expected)
    axes.set_title(f"overlap of subspaces in {overlaps.d} dimensions (chance at most {chance:.3f})")
    figure.colorbar(image, ax=axes)
    pyplot.close(figure)
    return figure
