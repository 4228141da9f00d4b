"""Training runs as tables: early beside late as the paper's Table 1 has them, then by layer, and along the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from rich.console import Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tangent_lens.dynamics.comparison import DynamicsTable, run_name
from tangent_lens.dynamics.report import KINDS, CheckpointPoint, DynamicsReport, WindowSummary
from tangent_lens.dynamics.windows import EARLY, LATE
from tangent_lens.measures.report import Measurement
from tangent_lens.reports.columns import NOTHING, SIGNIFICANT, Column, no_star, optional, side_by_side, star
from tangent_lens.reports.dynamics_layers import SHORT_NAMES, layers_view
from tangent_lens.reports.dynamics_medians import (
    activations_of,
    median_dimension,
    median_known,
    median_of,
    median_overlap,
)
from tangent_lens.reports.frame import FirstThatFits, header_lines, rank_line, warning_lines
from tangent_lens.reports.layer_rows import extras_said, fit_site_said, loss_said
from tangent_lens.reports.numbers import number, p_value, percent, small, thousandths

NAMES = {"residual": "residual gradient", "attention": "attention weights", "mlp": "MLP weights"}
# Of a run with more checkpoints, the table along it shows so many; the plot and .to_pandas() show all.
_MOST_POINTS = 24
_LONGEST_NAME = 24
_WINDOWS = (EARLY, LATE)
_GREEN = "bold green"
_side_by_side = partial(side_by_side, gap=1)


def dynamics_view(report: DynamicsReport) -> Any:
    """The whole report."""
    parts = [_header(report), "", _summary(report), layers_view(report), _along(report)]
    if report.updates:
        parts.append(_updates(report))
    return Group(*parts, _legend(report), *warning_lines(report.warnings))


def several_view(table: DynamicsTable) -> Any:
    """Several models, one row each, in a table a kind of gradient."""
    parts = []
    short = [name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…" for name in table.names]
    for kind in KINDS:
        rows = [_pair(report.summary(), kind) for report in table.reports]
        if any(pair is not None for pair in rows):
            parts += [Text(NAMES[kind], style="bold"), _summary_table("model", table.names, short, rows)]
    return Group(*parts, Text(_SUMMARY_LEGEND, style="dim"), *warning_lines(table.warnings))


def _header(report: DynamicsReport) -> Table:
    corpus, settings, steps = report.corpus, report.settings, report.steps()
    counted = ", ".join(f"{len(found)} {name} ({_range(found)})" for name, found in _steps_by_window(report))
    ranks = [subspace.rank for subspace in report.subspaces.values()]
    lines = [
        ("checkpoints", f"{len(steps)}, steps {_range(steps)}; {counted}: {escape(report.windows.said)}"),
        (
            "corpus",
            f"{escape(corpus.name)}: proxies from {corpus.fit_sequences} sequences of the early checkpoints, gradients from "
            f"{corpus.test_sequences} others ({corpus.test_rows:,} rows a checkpoint); last {loss_said(corpus, settings)}",
        ),
        (
            "settings",
            f"rank {rank_line(settings.rank, ranks)}, {settings.controls} random normals, seed {settings.seed}, weight "
            f"proxies fitted on {fit_site_said(settings)}{extras_said(settings)}",
        ),
    ]
    return header_lines(report.model, report.versions, lines)


def _steps_by_window(report: DynamicsReport) -> list[tuple[str, tuple[int, ...]]]:
    return [(EARLY, report.windows.early), (LATE, report.windows.late)]


def _range(steps: Sequence[int]) -> str:
    return f"{steps[0]:,} to {steps[-1]:,}" if len(steps) > 1 else f"{steps[0]:,}"


# The paper's Table 1.


def _summary(report: DynamicsReport) -> Any:
    summary = report.summary()
    pairs = {kind: pair for kind in KINDS if (pair := _pair(summary, kind)) is not None}
    labels, short = ([names[kind] for kind in pairs] for names in (NAMES, SHORT_NAMES))
    tables = _summary_table("all layers", labels, short, list(pairs.values()))
    title = Text(f"{run_name(report)}, early and late in training", style="bold")
    return Group(title, tables)


def _pair(summary: Sequence[WindowSummary], kind: str) -> tuple[WindowSummary, ...] | None:
    """Early and late of one kind of gradient."""
    found = {one.window: one for one in summary if one.kind == kind}
    return tuple(found[window] for window in _WINDOWS) if found else None


def _summary_table(
    key: str, labels: Sequence[str], short: Sequence[str], pairs: Sequence[tuple[WindowSummary, ...] | None]
) -> FirstThatFits:
    content = [pair or (None, None) for pair in pairs]
    signal = any(one is not None and one.signal_lift is not None for row in content for one in row)
    views = []
    for columns, names in (
        (_ALL_COLUMNS, labels),
        (_FEWER_COLUMNS, labels),
        (_FEWEST_COLUMNS, short),
        (_LEAST_COLUMNS, short),
    ):
        shown = [column for column in columns if signal or column.title != "signal"]
        groups = [(window, place, shown) for place, window in enumerate(_WINDOWS)]
        views.append(partial(_side_by_side, key, names, content, groups, medians=False))
    return FirstThatFits(*views)


def _summary_lift(marked: Callable[[float], str]) -> Column:
    return Column("lift", lambda one: Text(number(one.lift) + marked(one.p_value), style=_lift_style(one)))


def _summary_delta(marked: Callable[[float], str]) -> Column:
    return Column(
        "Δtan", lambda one: Text(thousandths(one.delta_iso) + marked(one.delta_iso_p_value), style=_delta_style(one))
    )


def _lift_style(one: WindowSummary) -> str:
    return _GREEN if one.p_value <= SIGNIFICANT and one.lift > 1 else ""


def _delta_style(one: WindowSummary) -> str:
    return _GREEN if one.delta_iso_p_value <= SIGNIFICANT and one.delta_iso > 0 else ""


_ENERGY = Column("energy", lambda one: Text(percent(one.energy)))
_TRAILING = Column("/trail", lambda one: optional(one.trailing_ratio))
_P = Column("p", lambda one: Text(p_value(one.p_value), style=_lift_style(one)))
_SIGNAL = Column("signal", lambda one: optional(one.signal_lift))
_DELTA_RANDOM = Column("Δrand", lambda one: Text(thousandths(one.delta_iso_random)))
_DELTA_P = Column("p", lambda one: Text(p_value(one.delta_iso_p_value), style=_delta_style(one)))
_PLAIN = (_summary_lift(no_star), _summary_delta(no_star))
_STARRED = (_summary_lift(star), _summary_delta(star))
_ALL_COLUMNS = [_ENERGY, _PLAIN[0], _TRAILING, _P, _SIGNAL, _PLAIN[1], _DELTA_RANDOM, _DELTA_P]
_FEWER_COLUMNS = [_ENERGY, _STARRED[0], _TRAILING, _SIGNAL, _STARRED[1]]
_FEWEST_COLUMNS = [_STARRED[0], _TRAILING, _SIGNAL, _STARRED[1]]
_LEAST_COLUMNS = [_STARRED[0], _SIGNAL, _STARRED[1]]


# Along the run.


def _along(report: DynamicsReport) -> Any:
    points = _some(report.points)
    content = [(point, point, point if point.refitted else None, point) for point in points]
    labels = [f"{point.step:,}" for point in points]
    about = [
        Column("window", lambda point: Text(point.window) if point.window else NOTHING),
        Column("loss", lambda point: Text(f"{point.loss:.3f}")),
    ]
    measured = [kind for kind in KINDS if median_of(report.points[0].measurements, kind, _lift) is not None]
    early = [_run_lift(kind, lambda point: point.measurements) for kind in measured]
    own = [_run_lift(kind, lambda point: point.refitted) for kind in measured]
    overlap = Column("overlap", lambda point: _two_digits(median_overlap(point)))
    groups = [
        ("checkpoint", 0, about),
        ("lift, early proxy", 1, early),
        ("lift, own proxy", 2, [*own, overlap]),
        ("activations", 3, _shape_columns(report)),
    ]
    table = partial(_side_by_side, "step", labels, content, medians=False)
    halves = [groups[0], groups[1], groups[3]], [groups[0], groups[2]]
    parts = [
        Text("along the run, medians over the layers", style="bold"),
        FirstThatFits(
            lambda: table(groups),
            lambda: Group(*(table(half) for half in (halves if report.points[0].refitted else halves[:1]))),
        ),
    ]
    if len(points) < len(report.points):
        parts.append(
            Text(f"{len(points)} of {len(report.points)} checkpoints; all: .to_pandas() or .plot()", style="dim")
        )
    return Group(*parts)


def _shape_columns(report: DynamicsReport) -> list[Column]:
    """Of the activations; the intrinsic dimension where it was measured."""
    columns = [
        Column("IsoSc*", lambda point: _shown(median_known(one.iso_score for one in activations_of(point)), small)),
        Column("eff.", lambda point: _shown(_effective_rank(point), number)),
    ]
    if any(point.dimensions for point in report.points):
        columns.append(Column("TwoNN", lambda point: _shown(median_dimension(point), number)))
    return columns


def _some(points: Sequence[CheckpointPoint]) -> list[CheckpointPoint]:
    """All, or evenly chosen ones of many, the first and the last among them."""
    places = np.linspace(0, len(points) - 1, min(len(points), _MOST_POINTS)).round().astype(int)
    return [points[place] for place in places]


def _run_lift(kind: str, measured: Callable[[CheckpointPoint], Sequence[Measurement]]) -> Column:
    short = {"residual": "resid", "attention": "attn", "mlp": "MLP"}[kind]
    return Column(short, lambda point: _shown(median_of(measured(point), kind, _lift), number))


def _lift(one: Measurement) -> float:
    return one.energy.lift


def _effective_rank(point: CheckpointPoint) -> float | None:
    return median_known(space.spectrum.effective_rank for space in activations_of(point))


def _shown(value: float | None, show: Callable[[float], str]) -> Text:
    return NOTHING if value is None else Text(show(value))


def _two_digits(value: float | None) -> Text:
    return _shown(value, "{:.2f}".format)


# The embedding.


def _updates(report: DynamicsReport) -> Any:
    found = {(one.window, one.bucket): one for one in report.updates}
    buckets = list(dict.fromkeys(one.bucket for one in report.updates))
    about = {one.bucket: one for one in report.updates}
    content = [(about[bucket], *(found.get((window, bucket)) for window in _WINDOWS)) for bucket in buckets]
    tokens = [
        Column("frequency", lambda one: Text(f"{percent(one.low)}–{percent(one.high)}")),
        Column("tokens", lambda one: Text(f"{one.tokens:,}")),
    ]
    moved = [
        Column("share", lambda one: Text(percent(one.share))),
        Column("energy", lambda one: _shown(one.energy, percent)),
        Column("lift", lambda one: _shown(one.lift, number)),
    ]
    groups = [("tokens", 0, tokens), (EARLY, 1, moved), (LATE, 2, moved)]
    title = Text("updates of the embedding in its early proxy, by token frequency", style="bold")
    return Group(
        title, _side_by_side("bucket", [_bucket_name(one, buckets) for one in buckets], content, groups, medians=False)
    )


def _bucket_name(bucket: int | None, buckets: Sequence[int | None]) -> str:
    last = max((one for one in buckets if one is not None), default=0)
    if bucket is None:
        return "all"
    return "rarest" if bucket == 0 else "commonest" if bucket == last else str(bucket + 1)


_SUMMARY_LEGEND = (
    "energy: share of the gradients' energy inside the tangent proxy that was fitted on the pooled early activations. lift: over "
    "the exact mean of random normals, 1 is chance. /trail: over the directions of least variance. p: of "
    "the mean over layers against random normals. signal: median energy over that of shuffled backward signals. Δ: change of "
    f"IsoScore* in thousandths when the proxy (tan) or a normal (rand) is removed. Green, or starred, where p ≤ {SIGNIFICANT}."
)


def _legend(report: DynamicsReport) -> Padding:
    sentences = [
        _SUMMARY_LEGEND,
        "By layer, lift: energy a direction inside over outside; p corrected over the layers (Benjamini-Hochberg) decides the "
        "mark; medians in the last row.",
        "eff.: entropy rank of the activations.",
    ]
    if report.points[-1].overlaps:
        sentences.append(
            "own proxy: fitted on the checkpoint itself; overlap: with the early one (1 the same), by layer at "
            "the last checkpoint."
        )
    if report.updates:
        sentences.append("Updates: share is of the squared length of all updates from checkpoint to checkpoint.")
    return Padding(Text(" ".join(sentences), style="dim"), (1, 0, 0, 0))
