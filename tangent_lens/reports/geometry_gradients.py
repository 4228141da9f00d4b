"""How weight gradients' two parts grow, as tables: the verdict before any ratio."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from rich.console import Group
from rich.text import Text

from tangent_lens.measures.geometry_report import MapGeometry
from tangent_lens.measures.gradient_order import DEGENERATE, GradientOrder, MeanOrder, RowOrder, TokenOrder
from tangent_lens.reports.columns import NOTHING, Column, evenly, optional, side_by_side
from tangent_lens.reports.frame import FirstThatFits
from tangent_lens.reports.geometry_columns import (
    Groups,
    SideBySide,
    interval_text,
    level_text,
    slope_interval,
    slope_text,
)
from tangent_lens.reports.geometry_legend import gradient_legend
from tangent_lens.reports.numbers import number, p_value

ALARM = "bold red"
_SHOWN_TOKENS = 8


def gradients_section(gradients: Sequence[MapGeometry], level: float) -> list[Any]:
    """One row a map, and why some numbers are missing; nothing where no map was measured."""
    if not gradients:
        return []
    labels, content = [one.map for one in gradients], [(one,) for one in gradients]
    table = partial(side_by_side, "map", labels, content, medians=False)
    reasons = _reasons((one.map, one.order) for one in gradients)
    rich, plain = _groups(True, level), _groups(False, level)
    return [
        Text("weight gradients along and across the tangent spaces of their input rows", style="bold"),
        FirstThatFits(
            partial(table, rich),
            # The mean gradients below.
            lambda: Group(*(table(groups) for groups in (rich[:-1], rich[-1:]))),
            partial(table, plain),
            partial(SideBySide, "map", labels, content, plain, medians=False),
        ),
        *reasons,
        *([""] if reasons else []),
    ]


def _groups(intervals: bool, level: float) -> Groups:
    heading = level_text(level)
    tokens = [
        Column("m", lambda one: Text(str(one.m))),
        Column(
            "degenerate" if intervals else "degen.",
            lambda one: Text(f"{one.order.degenerate:,} of {len(one.order.tokens):,}"),
        ),
    ]
    return [
        (" ", 0, tokens),
        ("normal / tangent", 0, [Column("median", lambda one: verdict_text(one.order))]),
        ("single rows (theory 1, 2)" if intervals else "single rows", 0, _pair(intervals, heading, "rows", _row)),
        ("mean gradient" if intervals else "mean", 0, _pair(intervals, heading, "mean", _mean)),
    ]


def verdict_text(order: GradientOrder) -> Text:
    """The median ratio; where it would say nothing, the verdict in its place."""
    if order.verdict == DEGENERATE:
        return Text(DEGENERATE, style=ALARM)
    return optional(order.median_ratio)


def _pair(intervals: bool, heading: str, kind: str, shown: Any) -> list[Column]:
    columns = []
    for part in ("tangent", "normal"):
        name = f"{part}_{kind}"
        columns.append(Column(part, lambda one, name=name: shown(getattr(one.order, name))[0]))
        if intervals:
            columns.append(Column(heading, lambda one, name=name: shown(getattr(one.order, name))[1]))
    return columns


def _row(found: RowOrder) -> tuple[Text, Text]:
    return slope_text(found.slope), slope_interval(found.slope)


def _mean(found: MeanOrder) -> tuple[Text, Text]:
    exponent = NOTHING if found.exponent is None else Text(f"{found.exponent:.2f}")
    return exponent, interval_text(found.low, found.high)


def _reasons(orders: Iterable[tuple[str, GradientOrder]]) -> list[Text]:
    """Each reason for a dash once, with the maps that it holds for."""
    places: dict[tuple[str, str], list[str]] = {}
    for name, order in orders:
        for kind, found in _exponents(order).items():
            # The verdict stands in the table already.
            if found.reason is not None and found.reason != DEGENERATE:
                places.setdefault((kind, found.reason), []).append(name)
    return [
        Text(f"no exponent of {kind}{_at(names)}: {reason}", style="dim") for (kind, reason), names in places.items()
    ]


def _at(names: Sequence[str]) -> str:
    listed = ", ".join(name for name in names if name)
    return f" at {listed}" if listed else ""


def _exponents(order: GradientOrder) -> dict[str, RowOrder | MeanOrder]:
    return {
        "tangent rows": order.tangent_rows,
        "normal rows": order.normal_rows,
        "the mean tangent gradient": order.tangent_mean,
        "the mean normal gradient": order.normal_mean,
    }


def gradient_view(order: GradientOrder) -> Any:
    """The verdict first, then the exponents, then a few tokens."""
    degenerate = order.verdict == DEGENERATE
    counted = f" in {order.degenerate:,} of {len(order.tokens):,} tokens" if degenerate else ""
    return Group(
        Text(order.verdict, style=ALARM if degenerate else "bold").append(Text(counted, style="")),
        "",
        FirstThatFits(*(partial(_exponent_table, order, intervals) for intervals in (True, False))),
        *_reasons([("", order)]),
        FirstThatFits(*(partial(_token_table, order, why) for why in (True, False))),
        *_left_out(order),
        gradient_legend(),
    )


def _exponent_table(order: GradientOrder, intervals: bool) -> Any:
    heading = level_text(order.level)
    content = [((_row, order.tangent_rows, order.normal_rows),), ((_mean, order.tangent_mean, order.normal_mean),)]
    groups: Groups = []
    for title, place in (("tangent (theory 1)", 1), ("normal (theory 2)", 2)):
        columns = [Column("exponent", lambda pair, place=place: pair[0](pair[place])[0])]
        if intervals:
            columns.append(Column(heading, lambda pair, place=place: pair[0](pair[place])[1]))
        groups.append((title, 0, columns))
    return side_by_side("growth of", ["single rows", "the mean in balls"], content, groups, medians=False)


def _token_table(order: GradientOrder, why: bool) -> Any:
    shown = evenly(order.tokens, _SHOWN_TOKENS)
    columns = [
        Column("rows", lambda one: Text(f"{one.rows:,}")),
        Column("radius", lambda one: Text(number(one.radius))),
    ]
    means = [
        Column("tangent", lambda one: Text(number(one.tangent))),
        Column("normal", lambda one: Text(number(one.normal))),
    ]
    tangent = [
        Column("p", lambda one: Text(p_value(one.p_value))),
        Column("coherence", lambda one: Text(number(one.coherence))),
    ]
    ratio = [Column("ratio", _ratio)]
    if why:
        ratio.append(Column("degenerate, since", lambda one: Text(one.why or "")))
    groups: Groups = [
        (" ", 0, columns),
        ("|mean gradient|", 0, means),
        ("tangent part", 0, tangent),
        ("normal / tangent", 0, ratio),
    ]
    return side_by_side("token", [str(one.token) for one in shown], [(one,) for one in shown], groups, medians=False)


def _ratio(one: TokenOrder) -> Text:
    return Text("degenerate", style=ALARM) if one.degenerate else optional(one.ratio)


def _left_out(order: GradientOrder) -> list[Text]:
    if len(order.tokens) <= _SHOWN_TOKENS:
        return []
    text = f"{_SHOWN_TOKENS} of {len(order.tokens):,} tokens; to_pandas() has all"
    return [Text(text, style="dim")]
