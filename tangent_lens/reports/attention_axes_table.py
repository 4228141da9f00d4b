"""The optional axes of attention scores as tables: key distance, frequency of the query token, radius of the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from tangent_lens.measures.attention import THEORY, AttentionDominance, AttentionScaling, Spread
from tangent_lens.reports.columns import NOTHING, Column, side_by_side
from tangent_lens.reports.frame import fits
from tangent_lens.reports.numbers import percent

SCALING_LEGEND = (
    "Exponents: how tangent×tangent (TT), the mixed parts (TN, NT) and normal×normal (NN) grow with the rows' distance "
    "from their centre, ± standard error, – with fewer than three radii; the theory says 2, 3 and 4."
)
_ORDERS = {"tangent_tangent": "TT", "mixed": "TN, NT", "normal_normal": "NN"}
# One row of one axis: a number a column and its error, if it has one.
_Numbers: TypeAlias = "list[tuple[float, float | None]]"
_Group: TypeAlias = "tuple[str, int, list[Column]]"


@dataclass(frozen=True)
class _Axis:
    """One axis: its title, the titles of its columns, and a number a head and column, with or without its error."""

    title: str
    columns: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    errors: tuple[tuple[float, ...], ...] | None = None
    show: Callable[[float], str] = lambda value: percent(value)


def _distance(one: AttentionDominance) -> _Axis | None:
    found = one.by_distance
    return found and _Axis("D by key distance", found.labels, found.dominance)


def _frequency(one: AttentionDominance) -> _Axis | None:
    found = one.by_frequency
    if found is None:
        return None
    titles = tuple(label.removesuffix(" times").replace(" to ", "–") for label in found.labels)
    return _Axis("D by query token frequency", titles, found.dominance)


def _scaling(one: AttentionDominance) -> _Axis | None:
    found = one.scaling
    if found is None:
        return None
    titles = tuple(f"{short} (theory {THEORY[name]})" for name, short in _ORDERS.items())
    values = tuple(zip(*(known_exponents(found, name) for name in _ORDERS), strict=True))
    errors = tuple(zip(*(found.standard_error[name] for name in _ORDERS), strict=True))
    return _Axis("exponent of the radius", titles, values, errors, "{:.2f}".format)


def known_exponents(scaling: AttentionScaling, name: str) -> tuple[float, ...]:
    """Of every head; not a number where two radii alone made a slope, whose error nothing tells."""
    both = zip(scaling.exponent[name], scaling.standard_error[name], strict=True)
    return tuple(math.nan if math.isnan(error) else slope for slope, error in both)


AXES = (_distance, _frequency, _scaling)


def axes_of_layers(layers: Sequence[AttentionDominance]) -> _Packed:
    """One row a layer, medians over its heads."""
    labels = [layer_name(one) for one in layers]
    rows = [tuple(_over_heads(pick(one)) for pick in AXES) for one in layers]
    return _Packed("layer", labels, rows, [_group(pick(layers[0]), place) for place, pick in enumerate(AXES)])


def axes_of_heads(one: AttentionDominance) -> _Packed:
    """One row a head."""
    axes = [pick(one) for pick in AXES]
    rows = [tuple(_of_head(axis, head) for axis in axes) for head in range(one.heads)]
    labels = [str(head) for head in range(one.heads)]
    return _Packed("head", labels, rows, [_group(axis, place) for place, axis in enumerate(axes)])


def layer_name(one: AttentionDominance) -> str:
    """Its number, or a dash where it was not said."""
    return "–" if one.layer is None else str(one.layer)


class _Packed:
    """Groups of columns that share their rows: as many side by side as the console has room for, the rest below."""

    def __init__(
        self, key: str, labels: Sequence[str], rows: Sequence[tuple[_Numbers | None, ...]], groups: Sequence[_Group]
    ) -> None:
        self._key, self._labels, self._rows = key, labels, rows
        self._groups = [group for group in groups if group[2]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines: list[list[_Group]] = []
        for group in self._groups:
            for part in self._split(group, console, options):
                if lines and fits(self._table([*lines[-1], part]), console, options):
                    lines[-1].append(part)
                else:
                    lines.append([part])
        yield from (self._table(line) for line in lines)

    def _split(self, group: _Group, console: Console, options: ConsoleOptions) -> list[_Group]:
        """A group that is too wide alone, in halves."""
        title, place, columns = group
        if len(columns) == 1 or fits(self._table([group]), console, options):
            return [group]
        middle = len(columns) // 2
        halves = [(title, place, columns[:middle]), (title, place, columns[middle:])]
        return [part for half in halves for part in self._split(half, console, options)]

    def _table(self, groups: list[_Group]) -> Table:
        return side_by_side(self._key, self._labels, self._rows, groups)


def _group(axis: _Axis | None, place: int) -> _Group:
    if axis is None:
        return ("", place, [])
    return (axis.title, place, [_column(title, number, axis.show) for number, title in enumerate(axis.columns)])


def _column(title: str, place: int, show: Callable[[float], str]) -> Column:
    def cell(numbers: _Numbers) -> Text:
        value, error = numbers[place]
        if math.isnan(value):
            return NOTHING
        return Text(show(value) + ("" if error is None else f" ± {'–' if math.isnan(error) else show(error)}"))

    return Column(title, cell, lambda numbers: None if math.isnan(numbers[place][0]) else numbers[place][0], show)


def _of_head(axis: _Axis | None, head: int) -> _Numbers | None:
    if axis is None:
        return None
    errors = axis.errors[head] if axis.errors else [None] * len(axis.columns)
    return list(zip(axis.values[head], errors, strict=True))


def _over_heads(axis: _Axis | None) -> _Numbers | None:
    """Medians, column by column; heads without a number are left out."""
    if axis is None:
        return None
    values, errors = (
        [Spread.of(column).median for column in zip(*numbers, strict=True)] if numbers else [None] * len(axis.columns)
        for numbers in (axis.values, axis.errors)
    )
    return list(zip(values, errors, strict=True))  # pyright: ignore[reportReturnType]
