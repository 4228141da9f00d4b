"""Local geometry as tables: exponents and curvature of every site, by bucket below, then gradients and depth."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tangent_lens.measures.geometry_report import BucketGeometry, GeometryReport, SiteGeometry, TokenBucket
from tangent_lens.measures.tangent_order import OrderNumbers, TangentOrder
from tangent_lens.reports.columns import NOTHING, Column, evenly, plain_table, side_by_side
from tangent_lens.reports.frame import FirstThatFits, header_lines, warning_lines
from tangent_lens.reports.geometry_columns import (
    Groups,
    SideBySide,
    above_floor_text,
    above_floor_value,
    curvature_groups,
    depth_groups,
    explained_value,
    order_groups,
)
from tangent_lens.reports.geometry_gradients import gradients_section
from tangent_lens.reports.geometry_legend import report_legend
from tangent_lens.reports.numbers import number, percent, whole_percent

# Token texts of a bucket that are shown where there is room.
_EXAMPLES = (15, 12, 10, 8, 6, 5, 4, 3, 2)


def geometry_view(report: GeometryReport) -> Any:
    """All sites, first with all tokens together, then by bucket; what is not in the report has no section."""
    return Group(
        _header(report),
        "",
        Text("tokens, the rarest first", style="bold"),
        bucket_table(report.buckets),
        Text("growth of both parts with the distance t from a token's mean", style="bold"),
        _all_tokens(report),
        *_by_bucket(report),
        *_sensitivity(report),
        *gradients_section(report.gradients, report.settings.level),
        *_depth(report),
        report_legend(report),
        *warning_lines(report.warnings),
    )


def bucket_table(buckets: Sequence[TokenBucket]) -> FirstThatFits:
    """One row a bucket, with as many of its token texts as there is room for."""
    return FirstThatFits(*(partial(_buckets, buckets, count) for count in _EXAMPLES), partial(_buckets, buckets, 1))


def _buckets(buckets: Sequence[TokenBucket], count: int) -> Table:
    table = plain_table("")
    for heading in ("bucket", "occurrences", "tokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("for example", overflow="fold")
    for place, one in enumerate(buckets, start=1):
        occurrences = f"{one.low:,}" if one.low == one.high else f"{one.low:,} to {one.high:,}"
        # As Python writes them, so that blanks and line breaks are seen.
        texts = Text("  ".join(repr(text) for text in evenly(one.texts, count)))
        table.add_row(str(place), occurrences, f"{len(one.tokens):,}", texts)
    return table


def _header(report: GeometryReport) -> Table:
    corpus, settings = report.corpus, report.settings
    skipped = [
        (settings.skip_first, ", first positions left out"),
        (settings.skip_special, ", special tokens left out"),
    ]
    lines = [
        (
            "corpus",
            f"{escape(corpus.name)}: {corpus.sequences:,} sequences, {corpus.tokens:,} tokens; of {corpus.eligible:,} that occur "
            f"often enough {corpus.chosen:,} were measured, {corpus.rows:,} rows at every site, "
            f"{number(corpus.megabytes)} MB in all",
        ),
        (
            "settings",
            f"{m_line(settings.m, (one.everything.order.m for one in report.sites))}, tangent spaces from "
            f"{_nearest(settings.nearest)} of a token's rows, {settings.occurrences} occurrences a token, "
            f"seed {settings.seed}" + "".join(said for holds, said in skipped if holds),
        ),
    ]
    return header_lines(report.model, report.versions, lines)


def m_line(rule: int | float | str, found: Iterable[int]) -> str:
    """The dimension asked for and, where it was a share of the variance or a rule, those it came to."""
    ms = sorted(set(found))
    came = "" if not ms else f" (m = {ms[0]})" if len(ms) == 1 else f" (m = {ms[0]} to {ms[-1]})"
    if isinstance(rule, str):
        return f"m by {escape(rule.replace('_', ' '))}{came}"
    return f"m = {rule}" if rule >= 1 else f"m for {rule:.1%} of the variance{came}"


def _nearest(share: float) -> str:
    return "half" if share == 1 else f"the nearest {percent(share)} of half"


def _all_tokens(report: GeometryReport) -> Any:
    """Growth and curvature in one table where there is room, else one below the other."""
    level, labels = report.settings.level, [one.site for one in report.sites]
    content = [
        (one.everything.order.chosen, one.everything.curvature, one.everything.seen, one) for one in report.sites
    ]
    table, below = (partial(kind, "site", labels, content) for kind in (side_by_side, SideBySide))
    bending = partial(curvature_groups, level=level)

    def growth(intervals: int) -> Groups:
        return [(" ", 3, [Column("m", _m_of_site)]), *order_groups(intervals, level)[1:]]

    def as_fits(*kinds: Any) -> FirstThatFits:
        *richer, last = kinds
        return FirstThatFits(*(partial(table, groups) for groups in richer), partial(below, last))

    apart = [as_fits(growth(2), growth(1), growth(0))]
    if any(curvature is not None for _, curvature, _, _ in content):
        apart.append(as_fits(bending(1), bending(0)))
    return FirstThatFits(partial(table, [*growth(2), *bending(1)]), partial(Group, *apart))


def _m_of_site(site: SiteGeometry) -> Text:
    """With what the rule asks for, where the rows do not determine so many directions."""
    m = site.everything.order.m
    return Text(f"{m}/{site.wanted_m}" if site.wanted_m > m else str(m))


def _by_bucket(report: GeometryReport) -> list[Any]:
    """Nothing where one bucket holds all tokens."""
    if len(report.buckets) < 2:
        return []
    return [
        Text("by bucket of tokens (1: the rarest)", style="bold"),
        SideBySide(
            "site",
            [one.site for one in report.sites],
            [(one, one if _bent(one) else None) for one in report.sites],
            [
                ("radius", 0, [_whole_radius(), *_each_bucket(report, _relative_radius, number)]),
                ("normal exponent", 0, _each_bucket(report, _normal_exponent, "{:.2f}".format)),
                ("above a floor", 0, _each_bucket(report, _above_floor_exponent, "{:.2f} ".format, _above_floor_cell)),
                ("normal share", 0, _each_bucket(report, lambda _, one: one.order.chosen.normal_share, percent)),
                ("explained", 1, _each_bucket(report, _explained, whole_percent)),
                ("curvature", 1, _each_bucket(report, _curvature, number)),
                ("arc", 1, _each_bucket(report, _arc_excess, percent)),
                ("κ² seen far/near", 1, _each_bucket(report, _seen_ratio, number)),
            ],
        ),
    ]


def _bent(site: SiteGeometry) -> bool:
    return any(one.curvature is not None for one in site.buckets)


def _each_bucket(
    report: GeometryReport,
    value: Callable[[SiteGeometry, BucketGeometry], float | None],
    show: Callable[[float], str],
    cell: Callable[[BucketGeometry], Text] | None = None,
) -> list[Column]:
    def column(place: int) -> Column:
        def found(site: SiteGeometry) -> float | None:
            return value(site, site.buckets[place])

        def shown(site: SiteGeometry) -> Text:
            if cell is not None:
                return cell(site.buckets[place])
            return NOTHING if (number_ := found(site)) is None else Text(show(number_))

        return Column(str(place + 1), shown, found, show)

    return [column(place) for place in range(len(report.buckets))]


def _whole_radius() -> Column:
    return Column("all", lambda site: Text(number(site.everything.order.radius)))


def _relative_radius(site: SiteGeometry, one: BucketGeometry) -> float:
    return one.order.radius / site.everything.order.radius


def _normal_exponent(_: SiteGeometry, one: BucketGeometry) -> float | None:
    return None if one.order.chosen.normal is None else one.order.chosen.normal.exponent


def _above_floor_exponent(_: SiteGeometry, one: BucketGeometry) -> float | None:
    return above_floor_value(one.order.chosen)


def _above_floor_cell(one: BucketGeometry) -> Text:
    return above_floor_text(one.order.chosen.above_floor)


def _explained(_: SiteGeometry, one: BucketGeometry) -> float | None:
    return None if one.curvature is None else explained_value(one.curvature)


def _curvature(_: SiteGeometry, one: BucketGeometry) -> float | None:
    return None if one.curvature is None else one.curvature.curvature


def _arc_excess(_: SiteGeometry, one: BucketGeometry) -> float | None:
    return None if one.curvature is None else one.curvature.arc_excess


def _seen_ratio(_: SiteGeometry, one: BucketGeometry) -> float | None:
    return None if one.seen is None else one.seen.ratio


def _sensitivity(report: GeometryReport) -> list[Any]:
    """Medians over the sites at other m and nearest; each site's own numbers are in ``report.sensitivity()``."""
    orders = [one.everything.order for one in report.sites]
    if not any(order.others for order in orders):
        return []
    return [
        Text("with other m and nearest: medians over the sites", style="bold"),
        FirstThatFits(*(partial(_sensitivity_table, orders, ranges) for ranges in (True, False))),
    ]


_Found = list[OrderNumbers]


def other_choices_of(order: TangentOrder) -> dict[str, OrderNumbers | None]:
    """The choices of ``tangent_order`` by their names; None for one that the rows did not allow."""
    measured = {(one.m, one.nearest): one for one in (order.chosen, *order.others)}
    m, nearest = order.m, order.chosen.nearest
    named = {
        "as chosen": (m, nearest),
        "m = 1": (1, nearest),
        "m halved": (max(m // 2, 1), nearest),
        "m doubled": (2 * m, nearest),
        "nearest halved": (m, nearest / 2),
    }
    return {name: measured.get(key) for name, key in named.items()}


def _sensitivity_table(orders: Sequence[TangentOrder], ranges: bool) -> Table:
    tables = [other_choices_of(order) for order in orders]
    content = []
    for name in tables[0]:
        found = [one for table in tables if (one := table[name]) is not None]
        content.append((found or None,))
    groups = [
        (" ", 0, [Column("sites", lambda found: Text(str(len(found))))]),
        ("tangent", 0, _median_columns(lambda one: one.tangent.exponent, "{:.2f}".format, ranges)),
        ("normal", 0, _median_columns(_normal_estimate, "{:.2f}".format, ranges)),
        ("above a floor", 0, [*_median_columns(above_floor_value, "{:.2f}".format, ranges), _determined()]),
        ("normal share", 0, _median_columns(lambda one: one.normal_share, percent, ranges)),
    ]
    return side_by_side("choice", list(tables[0]), content, groups, medians=False)


def _normal_estimate(one: OrderNumbers) -> float | None:
    return None if one.normal is None else one.normal.exponent


def _determined() -> Column:
    return Column("sites", lambda found: Text(str(sum(above_floor_value(one) is not None for one in found))))


def _median_columns(
    value: Callable[[OrderNumbers], float | None], show: Callable[[float], str], ranges: bool
) -> list[Column]:
    def known(found: _Found) -> list[float]:
        return [shown for one in found if (shown := value(one)) is not None]

    def median(found: _Found) -> Text:
        return Text(show(statistics.median(known(found)))) if known(found) else NOTHING

    def extent(found: _Found) -> Text:
        values = known(found)
        return Text(f"{show(min(values))} to {show(max(values))}", style="dim") if values else NOTHING

    columns = [Column("median", median)]
    return [*columns, Column("least to most", extent)] if ranges else columns


def _depth(report: GeometryReport) -> list[Any]:
    depth = report.depth
    if depth is None:
        return []
    content = [((depth, place),) for place in range(len(depth.sites))]
    used = depth.geometries[0]
    heading = f"all tokens together along depth: {used.rows:,} rows, {depth.overlap_first[0].k} neighbours of each"
    table = partial(side_by_side, "site", list(depth.sites), content)
    return [
        Text(heading, style="bold"),
        FirstThatFits(
            partial(table, depth_groups(rich=True)),
            partial(SideBySide, "site", list(depth.sites), content, depth_groups(rich=False)),
        ),
    ]
