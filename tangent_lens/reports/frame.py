"""What stands around a report's tables: lines about the model above, warnings below, and the choice of what fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.measure import Measurement as Extent
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tangent_lens.models.protocol import ModelDescription

UNLIMITED = 10_000


def header_lines(model: ModelDescription, versions: Mapping[str, str], further: Iterable[tuple[str, str]]) -> Table:
    """Model and libraries in a line each, then further lines of a name and a text in markup."""
    lines = Table.grid(padding=(0, 2, 0, 0))
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column()
    shape = f", {model.n_layers} layers, d_model {model.d_model}" if model.n_layers else ""
    lines.add_row(
        "model",
        f"[b]{escape(model.name)}[/b], revision {escape(model.revision)}; {model.architecture}, "
        f"{_count(model.parameters)} parameters{shape}",
    )
    lines.add_row(
        "read by", f"{model.library}, weights {model.weights}, {model.dtype}; tangent-lens {versions['tangent-lens']}"
    )
    for line in further:
        lines.add_row(*line)
    return lines


def _count(parameters: int) -> str:
    """In millions, or as they are where these would round to nothing."""
    return f"{parameters / 1e6:,.1f}M" if parameters >= 100_000 else f"{parameters:,}"


def rank_line(rank: int | float | str, found: Iterable[int]) -> str:
    """The rank asked for and, where it was a share of the variance or a rule, the ranks it came to."""
    ranks = sorted(set(found))
    if isinstance(rank, str):
        return f"by {rank.replace('_', ' ')} (k = {ranks[0]} to {ranks[-1]})" if ranks else f"by {rank}"
    if rank >= 1 or not ranks:
        return str(rank)
    return f"for {rank:.1%} of the variance (k = {ranks[0]} to {ranks[-1]})"


def warning_lines(sentences: Iterable[str]) -> list[Padding]:
    """What a reader must know before believing the numbers."""
    warnings = [Text("warning  ", style="bold yellow").append(Text(sentence, style="")) for sentence in sentences]
    return [Padding(warning, (1, 0, 0, 0)) for warning in warnings]


class FirstThatFits:
    """The first of several views of the same numbers, richest first, that the console has room for; else the last."""

    def __init__(self, *views: Callable[[], Any]) -> None:
        self._views: Sequence[Callable[[], Any]] = views

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        *richer, last = self._views
        yield next((shown for view in richer if fits(shown := view(), console, options)), None) or last()


def fits(shown: Any, console: Console, options: ConsoleOptions) -> bool:
    """Whether the console has room for it without cutting anything."""
    return Extent.get(console, options.update(max_width=UNLIMITED), shown).maximum <= options.max_width
