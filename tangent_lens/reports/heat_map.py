"""A heat map in a console: one coloured cell a head, readable without colour too."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rich.color import Color
from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.text import Text

LABELS = 9
# From 0 to 1: dark violet, blue, green, yellow (points of matplotlib's viridis).
_STOPS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))


class HeatMap:
    """Shares between 0 and 1, layers down and heads across, each a cell of whole percent.

    Heads that the console has no room for stand in a further block below.
    """

    def __init__(self, title: str, labels: Sequence[str], shares: Sequence[Sequence[float]]) -> None:
        self._title, self._labels, self._shares = title, labels, shares

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        heads = max((len(row) for row in self._shares), default=0)
        yield Text(f"{' ' * LABELS}{self._title}\n", style="bold")
        for number, (start, stop, cell) in enumerate(_blocks(heads, options.max_width)):
            yield from self._block(start, stop, cell, first=number == 0)
        yield Text("")

    def _block(self, start: int, stop: int, cell: int, first: bool) -> Iterator[Text]:
        heads = "".join(f"{head:>3}".ljust(cell) for head in range(start, stop))
        yield Text(("" if first else "\n") + f"{'layer':>{LABELS - 2}}  {heads}".rstrip(), style="dim")
        for label, row in zip(self._labels, self._shares, strict=True):
            line = Text(f"{label:>{LABELS - 2}}  ", no_wrap=True)
            for share in row[start:stop]:
                line.append_text(_cell(share, cell))
            yield line


def _blocks(heads: int, width: int) -> list[tuple[int, int, int]]:
    """First head, last head + 1 and characters a cell, of as few and as equal blocks as the width allows."""
    cell = 4 if 4 * heads <= width - LABELS else 3
    blocks = math.ceil(heads / max(1, (width - LABELS) // cell))
    size = math.ceil(heads / max(1, blocks))
    return [(start, min(start + size, heads), cell) for start in range(0, heads, max(1, size))]


def _cell(share: float, width: int) -> Text:
    if math.isnan(share):
        return Text("  –".ljust(width), style="dim")
    background = colour_of(share)
    light = 0.299 * background[0] + 0.587 * background[1] + 0.114 * background[2] > 100
    ink = (0, 0, 0) if light else (255, 255, 255)
    style = Style(color=Color.from_rgb(*ink), bgcolor=Color.from_rgb(*background))
    return Text(f"{100 * share:>3.0f}".ljust(width), style=style)


def colour_of(share: float) -> tuple[int, int, int]:
    """Red, green and blue of a share; what lies outside [0, 1] has the colour of the nearer end."""
    place = min(max(share, 0.0), 1.0) * (len(_STOPS) - 1)
    lower = min(int(place), len(_STOPS) - 2)
    (low, high), inside = list(pairwise(_STOPS))[lower], place - lower
    red, green, blue = (round(one + inside * (other - one)) for one, other in zip(low, high, strict=True))
    return red, green, blue
