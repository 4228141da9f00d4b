"""Local geometry along training as tables: a few sites, and of each one row a step."""

from __future__ import annotations

from functools import partial
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.text import Text

from tangent_lens.dynamics.geometry_run import GeometryRun
from tangent_lens.reports.columns import evenly, side_by_side
from tangent_lens.reports.frame import FirstThatFits, header_lines, warning_lines
from tangent_lens.reports.geometry_columns import (
    Groups,
    SideBySide,
    curvature_groups,
    depth_groups,
    order_groups,
    overlap_column,
)
from tangent_lens.reports.geometry_legend import EXPLAINED, GROWTH, depth_entry, legend
from tangent_lens.reports.geometry_tables import bucket_table, m_line

MOST_SITES = 3


def geometry_run_view(run: GeometryRun) -> Any:
    """The first, a middle and the last site, or all of three; the first checkpoint's model and tokens above."""
    return Group(
        _header(run),
        "",
        Text("tokens, the rarest first; the same at every step", style="bold"),
        bucket_table(run.points[0].report.buckets),
        *(part for site in evenly(run.sites, MOST_SITES) for part in _site_table(run, site)),
        _legend(run),
        *warning_lines(_warnings(run)),
    )


def _header(run: GeometryRun) -> Any:
    first = run.points[0].report
    corpus, settings = first.corpus, first.settings
    ms = (site.everything.order.m for point in run.points for site in point.report.sites)
    lines = [
        (
            "run",
            f"{escape(run.source)}: {len(run.points)} checkpoints, steps {run.points[0].step:,} to {run.points[-1].step:,}",
        ),
        (
            "corpus",
            f"{escape(corpus.name)}: {corpus.sequences:,} sequences, {corpus.tokens:,} tokens; {corpus.chosen:,} tokens "
            f"measured, {corpus.rows:,} rows at every site and step",
        ),
        ("settings", f"{m_line(settings.m, ms)}, {settings.occurrences} occurrences a token, seed {settings.seed}"),
    ]
    return header_lines(first.model, first.versions, lines)


def _site_table(run: GeometryRun, site: str) -> list[Any]:
    """One row a step: growth, curvature and, where it was measured, depth and the neighbours kept along training."""
    overlaps = run.overlaps(site) if has_depth(run) else [None] * len(run.points)
    content = []
    for point, kept in zip(run.points, overlaps, strict=True):
        found, depth = point.report.of(site).everything, point.report.depth
        at = None if depth is None else (depth, depth.sites.index(site))
        content.append((found.order.chosen, found.curvature, found.seen, at, kept))
    # Neighbours are kept from step to step here, not from site to site.
    kept_columns = [overlap_column("before", lambda pair: pair[0]), overlap_column("last", lambda pair: pair[1])]
    depth_columns: Groups = [*depth_groups(rich=False, place=3)[:-1], ("neighbours kept", 4, kept_columns)]
    depth_columns = depth_columns if has_depth(run) else []
    growth, bending = (partial(kind, level=run.points[0].report.settings.level) for kind in (order_groups, _explained))
    bending = bending if any(one[1] is not None for one in content) else lambda _: []
    labels = [f"{point.step:,}" for point in run.points]
    table, below = (partial(kind, "step", labels, content, medians=False) for kind in (side_by_side, SideBySide))
    return [
        Text(site, style="bold"),
        FirstThatFits(
            partial(table, [*growth(1), *bending(1), *depth_columns]),
            lambda: Group(*(table(groups) for groups in (growth(1), [*bending(1), *depth_columns]) if groups)),
            partial(below, [*growth(0), *bending(0), *depth_columns]),
        ),
    ]


def _explained(intervals: int, level: float) -> Groups:
    return curvature_groups(intervals, level)[:1]


def has_depth(run: GeometryRun) -> bool:
    """Whether neighbours can be compared from step to step."""
    return all(point.report.depth is not None for point in run.points)


def _legend(run: GeometryRun) -> Any:
    shown = evenly(run.sites, MOST_SITES)
    entries = [GROWTH, EXPLAINED]
    if has_depth(run):
        name, text = depth_entry()
        kept = text.index("neighbours kept")
        entries.append(
            (name, text[:kept] + "neighbours kept: share that are also neighbours at the step before, and at the last.")
        )
    if len(shown) < len(run.sites):
        entries.append(("sites", f"{len(shown)} of {len(run.sites)}, evenly apart; to_pandas() has all."))
    return legend(entries)


def _warnings(run: GeometryRun) -> list[str]:
    """Each sentence once, with the steps that it belongs to."""
    steps: dict[str, list[int]] = {}
    for point in run.points:
        for sentence in point.report.warnings:
            steps.setdefault(sentence, []).append(point.step)
    every = len(run.points)
    return [
        sentence if len(at) == every else f"step {', '.join(f'{step:,}' for step in at)}: {sentence}"
        for sentence, at in steps.items()
    ]
