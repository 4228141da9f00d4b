"""A training as it goes: its loss, and what a recorder measures, in a live display or line by line."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tangent_lens.dynamics.recorder import TrainingPoint
from tangent_lens.reports.numbers import number, percent, small

BARS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 40
# Drawing is paid from the training's time.
_SECONDS_BETWEEN = 0.25
_LINES_BESIDE_TABLE = 12
_COLUMNS = {
    "weight lift": "weight_lift",
    "signal lift": "weight_signal_lift",
    "residual lift": "residual_lift",
    "IsoScore*": "iso_score",
}


def sparkline(values: Sequence[float], width: int = SPARKLINE_WIDTH, *, logarithmic: bool = False) -> str:
    """Values as a row of bars from the smallest to the largest; of more than ``width`` values, means of neighbours.

    Values that are not finite (or, on a logarithmic scale, not above 0) leave a gap.
    """
    count = min(width, len(values))
    cuts = [round(place * len(values) / count) for place in range(count + 1)] if count else []
    heights = [_height(values[start:end], logarithmic) for start, end in itertools.pairwise(cuts)]
    known = [height for height in heights if math.isfinite(height)]
    if not known:
        return " " * len(heights)
    low, spread = min(known), max(known) - min(known)
    steps = len(BARS) - 1
    return "".join(
        BARS[round((height - low) / spread * steps) if spread > 0 else 0] if math.isfinite(height) else " "
        for height in heights
    )


class TrainingDisplay:
    """Shows a training in a ``with`` block; give :meth:`step` every loss and :meth:`point` every point.

    Where the output is no terminal, every point is one line.

    Args:
        steps: how many there will be; None if that is not known.
        tokens: in one step, for the speed.
        console: where; standard error by default.
    """

    def __init__(self, steps: int | None, tokens: int, console: Console | None = None) -> None:
        self._steps, self._tokens = steps, tokens
        self._console = console or Console(stderr=True)
        self._losses: list[float] = []
        self._points: list[TrainingPoint] = []
        self._live: Live | None = None
        self._began = self._shown = time.monotonic()

    def __enter__(self) -> TrainingDisplay:
        self._began = self._shown = time.monotonic()
        if self._console.is_terminal:
            self._live = Live(self, console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live is not None:
            self._live.update(self, refresh=True)
            self._live.stop()

    def step(self, loss: float) -> None:
        """One more training step."""
        self._losses.append(loss)
        self._refresh(_SECONDS_BETWEEN)

    def point(self, point: TrainingPoint) -> None:
        """One more measured step."""
        self._points.append(point)
        if self._live is None:
            self._console.print(point_line(point), highlight=False, soft_wrap=True)
        self._refresh(0.0)

    def _refresh(self, after: float) -> None:
        if self._live is not None and time.monotonic() - self._shown >= after:
            self._live.update(self, refresh=True)
            self._shown = time.monotonic()

    def __rich__(self) -> Group:
        room = max(self._console.height - _LINES_BESIDE_TABLE, 4)
        return Group(self._headline(), "", self._sparklines(), "", points_table(self._points[-room:]))

    def _headline(self) -> Text:
        done, seconds = len(self._losses), time.monotonic() - self._began
        line = Text("training  ", style="bold").append(Text(f"step {done:,}", style=""))
        if self._steps is not None:
            line.append(f" of {self._steps:,}", style="")
        if done and seconds > 0:
            line.append(f", {done * self._tokens / seconds:,.0f} tokens/s", style="dim")
            if self._steps is not None:
                left = round(seconds / done * (self._steps - done))
                line.append(f", {left // 60}:{left % 60:02d} left", style="dim")
            spent = sum(point.seconds for point in self._points)
            line.append(f", measuring {percent(spent / seconds)} of the time", style="dim")
        return line

    def _sparklines(self) -> Table:
        table = Table.grid(padding=(0, 2))
        rows = {"training loss": (self._losses, False)}
        medians = [point.medians for point in self._points]
        for heading, name in _COLUMNS.items():
            values = [found[name] for found in medians if name in found]
            if values:
                rows[f"{heading}, measured steps"] = (values, "lift" in heading)
        for heading, (values, logarithmic) in rows.items():
            if values:
                bars = sparkline(values, logarithmic=logarithmic)
                table.add_row(heading, number(values[0]), Text(bars, style="cyan"), number(values[-1]))
        return table


def points_table(points: Sequence[TrainingPoint]) -> Table:
    """One row a measured step, medians over the layers."""
    table = Table(box=None, padding=(0, 2), title_justify="left")
    for heading in ("step", "held-out loss", *_COLUMNS):
        table.add_column(heading, justify="right")
    for point in points:
        medians = point.medians
        shown = [
            small(medians[name]) if name == "iso_score" else number(medians.get(name)) for name in _COLUMNS.values()
        ]
        table.add_row(f"{point.step:,}", f"{point.loss:.2f}", *shown)
    return table


def point_line(point: TrainingPoint) -> str:
    """One point in one line."""
    medians = point.medians
    found = [f"{heading} {number(medians[name])}" for heading, name in _COLUMNS.items() if name in medians]
    return f"step {point.step:,}: " + ", ".join([f"held-out loss {point.loss:.2f}", *found])


def _height(values: Sequence[float], logarithmic: bool) -> float:
    if logarithmic:
        values = [math.log(value) if value > 0 else math.nan for value in values]
    return sum(values) / len(values)
