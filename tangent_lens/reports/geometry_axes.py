"""What plots about local geometry share: colours, places of sites along an axis, lines with bands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tangent_lens.measures.tangent_order import OrderNumbers

TANGENT, NORMAL, ABOVE_FLOOR = "#4477aa", "#cc6677", "#228833"
BUCKET_COLOURS = ("#ddaa33", "#66aacc", "#aa3377", "#999933", "#332288")
DIMENSION_COLOURS = ("#4477aa", "#66ccee")
SHARE_COLOURS = ("#228833", "#aa3377", "#ddaa33")
LINE: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 1.4}
_MOST_NAMES = 12

# A value with the ends of its interval; None where there is none.
Estimate = tuple[float | None, float | None, float | None]


class SitePlaces:
    """Where sites stand along an axis: at their layers or, where these are unknown or shared, one after the other."""

    def __init__(self, names: Sequence[str], layers: Sequence[int | None]) -> None:
        known = [layer for layer in layers if layer is not None]
        self.by_layer = len(set(known)) == len(names)
        self._names = names
        self.x = np.array(known if self.by_layer else range(len(names)), dtype=float)

    def label(self, axes: Any) -> None:
        """Ticks, and what they are."""
        from matplotlib.ticker import MaxNLocator

        if self.by_layer:
            axes.set_xlabel("layer")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            return
        shown = np.unique(np.linspace(0, len(self.x) - 1, min(_MOST_NAMES, len(self.x))).round().astype(int))
        axes.set_xticks(
            self.x[shown], [self._names[place] for place in shown], rotation=40, ha="right", fontsize="small"
        )


def line_with_band(axes: Any, x: np.ndarray, found: Sequence[Estimate], colour: str, label: str, **style: Any) -> None:
    """Through the places that have a value; the band is its interval."""
    values = np.array([one if one is not None else np.nan for one, _, _ in found])
    if np.isnan(values).all():
        return
    axes.plot(x, values, color=colour, label=label, **(LINE | style))
    low, high = (np.array([np.nan if one[end] is None else one[end] for one in found], dtype=float) for end in (1, 2))
    axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    # A band of one place alone has no width.
    seen = np.isfinite(low) & np.isfinite(high)
    beside = np.pad(seen, 1)
    alone = seen & ~beside[:-2] & ~beside[2:]
    if alone.any():
        axes.vlines(x[alone], low[alone], high[alone], color=colour, alpha=0.5, linewidth=1.4)


def slope_estimates(orders: Sequence[OrderNumbers], name: str) -> list[Estimate]:
    """Of the tangent or the normal part."""
    slopes = [getattr(one, name) for one in orders]
    return [(None, None, None) if one is None else (one.exponent, one.low, one.high) for one in slopes]


def above_floor_estimates(orders: Sequence[OrderNumbers]) -> list[Estimate]:
    """Of the normal part above its floor, where the rows determine it."""
    found = [one.above_floor for one in orders]
    return [
        (one.exponent, one.low, one.high) if one is not None and one.determined else (None, None, None) for one in found
    ]


def draw_exponents(axes: Any, x: np.ndarray, orders: Sequence[OrderNumbers]) -> None:
    """Tangent, normal and normal above a floor, what theory says, and hollow what the rows do not determine."""
    for height in (1, 2):
        axes.axhline(height, color="grey", linewidth=1, linestyle="--", zorder=0)
    line_with_band(axes, x, slope_estimates(orders, "tangent"), TANGENT, "tangent (theory 1)")
    line_with_band(axes, x, slope_estimates(orders, "normal"), NORMAL, "normal (theory 2)")
    line_with_band(axes, x, above_floor_estimates(orders), ABOVE_FLOOR, "normal above a floor (theory 2)")
    unsure, values = undetermined_exponents(x, orders)
    if len(unsure):
        hollow = {"marker": "o", "markersize": 5, "markerfacecolor": "white", "color": ABOVE_FLOOR}
        axes.plot(unsure, values, linestyle="", label="not determined", **hollow)
    axes.set_ylabel("exponent")


def undetermined_exponents(x: np.ndarray, orders: Sequence[OrderNumbers]) -> tuple[list[float], list[float]]:
    """Places and exponents above a floor that the rows do not determine."""
    found = [
        (float(place), one.above_floor.exponent)
        for place, one in zip(x, orders, strict=True)
        if one.above_floor is not None and one.above_floor.exponent is not None and not one.above_floor.determined
    ]
    return [place for place, _ in found], [exponent for _, exponent in found]


def room_above(axes: Any, share: float = 0.3) -> None:
    """For a legend over the lines."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + share * (high - low))


def say_nothing_there(axes: Any, title: str, sentence: str) -> None:
    """A panel without numbers."""
    axes.set_title(title, fontsize="medium")
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, sentence, transform=axes.transAxes, ha="center", va="center", color="grey")
