"""Overlaps of subspaces as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from tangent_lens.measures.overlaps import Overlaps, Stability
from tangent_lens.reports.columns import plain_table
from tangent_lens.reports.frame import FirstThatFits
from tangent_lens.reports.heat_map import colour_of
from tangent_lens.reports.numbers import number


def overlaps_view(overlaps: Overlaps) -> Any:
    """The whole matrix where there is room; else every subspace against the next."""
    return Group(FirstThatFits(lambda: _matrix(overlaps), lambda: _neighbours(overlaps)), _legend(overlaps))


def stability_view(stability: Stability) -> Any:
    """Mean and least overlap beside chance."""
    between = "every two fits" if stability.over == "seeds" else "the two halves of each cut"
    text = Text("overlap ").append(f"{stability.mean:.2f}", style="bold")
    text.append(
        f" on average between {between} ({stability.fits} fits), {stability.least:.2f} at least; chance is "
        f"{number(stability.expected)} (rank {stability.rank} of {stability.d})"
    )
    return text


def _matrix(overlaps: Overlaps) -> Table:
    table = plain_table("overlap")
    table.add_column("", no_wrap=True)
    for name in _short(overlaps.names):
        table.add_column(Text(name), justify="right", no_wrap=True)
    for place, name in enumerate(overlaps.names):
        table.add_row(Text(name), *(_cell(value) for value in overlaps.overlap[place]))
    return table


def _short(names: Sequence[str]) -> list[str]:
    """The layers alone where that is all that tells the names apart."""
    starts, ends = zip(*(name.rpartition(".")[::2] for name in names), strict=True)
    return list(ends) if len(set(starts)) == 1 and all(starts) else list(names)


def _neighbours(overlaps: Overlaps) -> Table:
    table = plain_table("overlap with the next")
    for heading in ("from", "to", "overlap", "angle", "distance"):
        table.add_column(heading, justify="left" if heading in ("from", "to") else "right", no_wrap=True)
    for place in range(len(overlaps.names) - 1):
        table.add_row(
            Text(overlaps.names[place]),
            Text(overlaps.names[place + 1]),
            _cell(overlaps.overlap[place][place + 1]),
            f"{overlaps.largest_angle[place][place + 1]:.0f}°",
            number(overlaps.distance[place][place + 1]),
        )
    return table


def _cell(share: float) -> Text:
    red, green, blue = colour_of(share)
    return Text(f"{share:.2f}", style=f"rgb({red},{green},{blue})" if share > 0.25 else "dim")


def _legend(overlaps: Overlaps) -> Text:
    chance = sorted({value for row in overlaps.expected for value in row})
    said = number(chance[0]) if len(chance) == 1 else f"{number(chance[0])} to {number(chance[-1])}"
    return Text(
        f"overlap: |Q1ᵀQ2|² / min(k1, k2), 1 where one subspace holds the other; random subspaces of {overlaps.d} dimensions "
        f"have {said}. Largest principal angles and projection distances of every pair: .to_pandas()",
        style="dim",
    )
