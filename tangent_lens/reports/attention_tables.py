"""Attention-score tangent dominance as rich tables. Everything shown is read from the result, but for medians."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tangent_lens.measures.attention import PARTS, SHARES, AttentionDominance, Spread
from tangent_lens.measures.attention_report import AttentionHeads, AttentionReport
from tangent_lens.reports.attention_axes_table import AXES, SCALING_LEGEND, axes_of_heads, axes_of_layers, layer_name
from tangent_lens.reports.columns import NOTHING, SIGNIFICANT, Column, no_star, side_by_side, star
from tangent_lens.reports.frame import FirstThatFits, header_lines, rank_line, warning_lines
from tangent_lens.reports.heat_map import HeatMap
from tangent_lens.reports.numbers import number, p_value, percent, whole_percent


@dataclass(frozen=True)
class _Row:
    """One layer or one head: its numbers by name (of a layer, medians over heads), and what only a layer has.

    Attributes:
        span: least and largest D of a layer; None for a head.
        p_values: of every head, or of the one.
    """

    label: str
    values: Mapping[str, float]
    span: Spread | None
    p_values: tuple[float, ...]

    @property
    def largest_p(self) -> float:
        return max((p for p in self.p_values if not math.isnan(p)), default=math.nan)


@dataclass(frozen=True)
class _Layout:
    """What a row shows: p as a column or as a star, how many of the largest shares by name, or all of them.

    Attributes:
        brief: shorter titles and whole percent for the variance baseline.
    """

    p: bool
    largest: int
    all_shares: bool = False
    brief: bool = False


_FIVE = f"{SIGNIFICANT}".removeprefix("0")
# Richest first.
_LAYOUTS = (
    _Layout(p=True, largest=0, all_shares=True),
    _Layout(p=True, largest=2),
    _Layout(p=True, largest=2, brief=True),
    _Layout(p=True, largest=1),
    _Layout(p=False, largest=1),
    _Layout(p=False, largest=1, brief=True),
    _Layout(p=False, largest=0, brief=True),
)


def attention_report_view(report: AttentionReport) -> Group:
    """Header, one row a layer, the heat map of every head, the axes that were measured, and what it all means."""
    names = [layer_name(one) for one in report.layers]
    table = _main_table("layer", [_layer_row(one) for one in report.layers])
    heat = HeatMap("D of every head, in percent", names, [one.dominance for one in report.layers])
    parts = [attention_header(report), "", table, heat, axes_of_layers(report.layers)]
    return Group(*parts, _legend(report, "layer"), *warning_lines(report.warnings))


def attention_heads_view(view: AttentionHeads) -> Group:
    """One row a layer and head."""
    rows = [row for one in view.report.layers for row in _head_rows(one, f"{layer_name(one)}.")]
    return Group(_main_table("head", rows), _legend(view.report, "head"))


def attention_layer_view(one: AttentionDominance) -> Group:
    """One layer: a row a head, and every axis that was measured head by head."""
    controls = len(one.random[0]) if one.random else 0
    heading = f"attention scores of layer {layer_name(one)}: {one.heads} heads, {max(one.rows, default=0):,} query rows"
    heading += f", {max(one.pairs, default=0):,} pairs, {controls} random normals"
    return Group(Text(heading, style="bold"), _main_table("head", _head_rows(one, "")), axes_of_heads(one))


def attention_header(report: AttentionReport) -> Table:
    """Model, corpus, settings, and how exactly the parts add up, in a few lines."""
    corpus, settings = report.corpus, report.settings
    said = [
        (settings.skip_first, "first positions left out"),
        (settings.skip_special, "special tokens left out"),
        (not settings.center, "not centred"),
    ]
    extras = "".join(f", {sentence}" for holds, sentence in said if holds)
    rank = rank_line(settings.rank, (space.rank for space in report.spaces))
    lines = [
        (
            "corpus",
            f"{escape(corpus.name)}: proxies from {corpus.fit_sequences} sequences ({corpus.fit_rows:,} rows), scores of "
            f"{corpus.test_sequences} others ({corpus.test_rows:,} query rows)",
        ),
        (
            "settings",
            f"rank {rank}, {settings.controls} random normals{_sampled(report)}, seed {settings.seed}{extras}",
        ),
        ("exact", f"parts add up to the model's own queries and keys within {report.worst_sum:.0e} of the largest"),
    ]
    return header_lines(report.model, report.versions, lines)


def _sampled(report: AttentionReport) -> str:
    """On how many query rows the random normals were measured, where not on all of them."""
    of_controls, of_all = (
        max((max(rows, default=0) for rows in per_layer), default=0)
        for per_layer in ([one.random_rows for one in report.layers], [one.rows for one in report.layers])
    )
    return f" on {of_controls:,} of the query rows" if of_controls < of_all else ""


def _layer_row(one: AttentionDominance) -> _Row:
    summary = one.summary
    values = {name: spread.median for name, spread in summary.items()}
    return _Row(layer_name(one), values | _baseline(one), summary["dominance"], one.p_value)


def _head_rows(one: AttentionDominance, prefix: str) -> list[_Row]:
    named = {name: getattr(one, name) for name in ("dominance", "random_mean", "p_value", "kl", "random_kl_mean")}
    columns = {**named, **one.shares}
    return [
        _Row(
            f"{prefix}{head}",
            {name: values[head] for name, values in columns.items()} | _baseline(one),
            None,
            (named["p_value"][head],),
        )
        for head in range(one.heads)
    ]


def _baseline(one: AttentionDominance) -> dict[str, float]:
    return {"variance_baseline": math.nan if one.variance_baseline is None else one.variance_baseline}


def _main_table(key: str, rows: Sequence[_Row]) -> FirstThatFits:
    return FirstThatFits(*(partial(_laid_out, key, rows, layout) for layout in _LAYOUTS))


def _laid_out(key: str, rows: Sequence[_Row], layout: _Layout) -> Table:
    tangent, random = ("tan", "rand") if layout.brief else ("tangent", "random")
    groups = [
        ("tangent dominance D", 0, _dominance_columns(rows, layout)),
        ("KL (nats)", 0, [_numbers(tangent, "kl", number), _numbers(random, "random_kl_mean", number)]),
        *_share_groups(rows, layout),
    ]
    return side_by_side(key, [row.label for row in rows], [(row,) for row in rows], groups)


def _dominance_columns(rows: Sequence[_Row], layout: _Layout) -> list[Column]:
    of_layers = any(row.span is not None for row in rows)
    marked = no_star if layout.p else star
    columns = [
        Column(
            "median" if of_layers else "D",
            lambda row: _coloured(row, _dash(row.values["dominance"], percent) + marked(row.largest_p)),
            lambda row: _known(row.values["dominance"]),
            percent,
        ),
        _numbers("random", "random_mean", percent),
        _numbers("ρ²", "variance_baseline", whole_percent if layout.brief else percent),
    ]
    if of_layers:
        columns.insert(1, Column("range", lambda row: Text(_range(row.span))))
    if layout.p:
        columns.insert(-1, _p_column(rows))
    return columns


def _p_column(rows: Sequence[_Row]) -> Column:
    """p of a head; of a layer how many heads are significant, or the largest p where the controls are too few for that."""
    if all(row.span is None for row in rows):
        return Column("p", lambda row: _coloured(row, _dash(row.largest_p, p_value)))
    if not any(p <= SIGNIFICANT for row in rows for p in row.p_values):
        return Column("max p", lambda row: Text(_dash(row.largest_p, p_value)))
    return Column(
        f"p≤{_FIVE}",
        lambda row: _coloured(row, f"{sum(p <= SIGNIFICANT for p in row.p_values)}/{len(row.p_values)}"),
    )


def _share_groups(rows: Sequence[_Row], layout: _Layout) -> list[tuple[str, int, list[Column]]]:
    if not layout.all_shares:
        columns = [Column("query×key", partial(_large_share, place=place)) for place in range(layout.largest)]
        title = "largest shares of the scores" if layout.largest > 1 else "largest share"
        return [(title, 0, columns)] if columns else []
    groups = [
        (f"shares: {query} ×", 0, [_numbers(key, f"{query}_{key}", whole_percent) for key in PARTS]) for query in PARTS
    ]
    if any(row.values["bias"] for row in rows):
        groups.append(("bias", 0, [_numbers("", "bias", whole_percent)]))
    return groups


def _large_share(row: _Row, place: int) -> Text:
    """A share by its name: the largest in size, whatever its sign, at place 0."""
    known = [(row.values[name], name) for name in SHARES if not math.isnan(row.values[name])]
    ordered = sorted(known, key=lambda one: -abs(one[0]))
    if place >= len(ordered):
        return NOTHING
    value, name = ordered[place]
    return Text(f"{name.replace('_', '×')} {whole_percent(value)}")


def _numbers(title: str, name: str, show: Callable[[float], str]) -> Column:
    return Column(
        title,
        lambda row: Text(_dash(row.values[name], show), style="dim" if math.isnan(row.values[name]) else ""),
        lambda row: _known(row.values[name]),
        show,
    )


def _coloured(row: _Row, shown: str) -> Text:
    """Green where D of every head is above what random normals reach."""
    significant = bool(row.p_values) and all(p <= SIGNIFICANT for p in row.p_values)
    return Text(shown, style="bold green" if significant else "")


def _range(span: Spread | None) -> str:
    if span is None or math.isnan(span.median):
        return "–"
    return f"{100 * span.minimum:.0f}–{100 * span.maximum:.0f}%"


def _dash(value: float, show: Callable[[float], str]) -> str:
    return "–" if math.isnan(value) else show(value)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _legend(report: AttentionReport, key: str) -> Text:
    """What the columns mean, in plain words."""
    layer, controls = key == "layer", report.settings.controls
    p = f"p≤{_FIVE}: heads whose D at most 1 in 20 of them reach" if layer else "p: share of them that reach D"
    sentences = [
        "A score is the sum of nine parts, query×key: each centre (mean row, biases), tangent (inside the proxy) or "
        "normal (the rest); what all keys share is taken off. D: share of tangent×tangent in the squares of the four parts "
        f"without a centre{', median and range over heads' if layer else ''}. random: D of {controls} random normal subspaces "
        f"of this rank, mean. {p}; coloured or starred. ρ²: about the D of a head without preference; above it the head "
        "favours the tangent. KL: how far the attention pattern moves if only tangent×tangent stays of these four parts, and "
        "the same with a random normal. Shares: of the square of the scores; they sum to 100% and may be negative.",
    ]
    if layer and any(pick(report.layers[0]) for pick in AXES):
        sentences.append("Below: medians over heads; – where a bucket holds no pairs.")
    if layer and report.layers[0].scaling is not None:
        sentences.append(SCALING_LEGEND)
    return Text(" ".join([*sentences, "Medians in the last row."]), style="dim")
