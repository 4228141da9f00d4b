"""Token frequency as tables: correlations with spread, one row a site, and gradient energy by bucket below."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tangent_lens.measures.enrichment import BucketEnergy, TangentEnrichment
from tangent_lens.measures.frequency import Correlation, FrequencyCorrelation
from tangent_lens.measures.frequency_report import FrequencyReport
from tangent_lens.reports.columns import NOTHING, SIGNIFICANT, Column, plain_table, side_by_side, star
from tangent_lens.reports.frame import FirstThatFits, header_lines, rank_line, warning_lines
from tangent_lens.reports.numbers import number, p_value, percent

_METHODS = (("Pearson r", "pearson"), ("Spearman ρ", "spearman"))
# What the columns of the two distances are called; the shortest view leaves the rest out.
_LONG, _SHORT, _SHORTEST = "corrected", "corr.", "corr"


def frequency_view(report: FrequencyReport) -> Any:
    """As many intervals and numbers of each bucket as there is room for."""
    both, one, none = ("pearson", "spearman"), ("pearson",), ()
    richest_first = ((both, _LONG), (both, _SHORT), (one, _LONG), (none, _LONG), (none, _SHORT), (none, _SHORTEST))
    return Group(
        _header(report),
        "",
        Text("log frequency of a token with the spread of its rows", style="bold"),
        FirstThatFits(*(partial(_correlations, report, *how) for how in richest_first)),
        "",
        Text("residual gradient along the tangent proxy, by frequency of the token at the row", style="bold"),
        bucket_table(report.sites[0].enrichment, alone=False),
        FirstThatFits(*(partial(_energies, report, groups) for groups in (3, 2, 1))),
        _legend(report),
        *warning_lines(report.warnings),
    )


def enrichment_view(found: TangentEnrichment) -> Any:
    """One row a bucket."""
    text = (
        f"energy {percent(found.energy)}, lift {number(found.lift)} over all buckets; {found.left_out:,} rows in none"
    )
    heading = Text(f"{found.name}: along {found.rank} of {found.d} directions", style="bold")
    return Group(heading, bucket_table(found, alone=True), Text(text, style="dim"))


def correlation_view(found: FrequencyCorrelation) -> Any:
    """One row a method."""
    table = plain_table("")
    for heading in ("log f with it", "r", f"{found.pearson.level:.0%}", "p", "tokens"):
        table.add_column(heading, justify="right" if table.columns else "left", no_wrap=True)
    for one in (found.pearson, found.spearman):
        table.add_row(one.method, _signed(one.estimate), _interval(one), p_value(one.p_value), f"{one.n:,}")
    return table


def bucket_table(found: TangentEnrichment, *, alone: bool) -> Table:
    """The buckets, the rarest first; ``alone`` with the energies of the one site."""
    table = plain_table("")
    columns: dict[str, Callable[[BucketEnergy], Any]] = {
        "frequency": lambda one: _range(one),
        "tokens": lambda one: f"{one.tokens:,}",
        "rows": lambda one: f"{one.rows:,}",
    }
    if alone:
        columns |= {
            "of |g|²": lambda one: percent(one.energy_share),
            "energy": lambda one: NOTHING if one.energy is None else percent(one.energy),
            "random": lambda one: NOTHING if one.expected_random is None else percent(one.expected_random),
            "lift": lambda one: NOTHING if one.lift is None else number(one.lift),
        }
    table.add_column("bucket", justify="right", no_wrap=True)
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for place, one in enumerate(found.buckets, start=1):
        table.add_row(str(place), *(cell(one) for cell in columns.values()))
    return table


def _header(report: FrequencyReport) -> Table:
    corpus, settings = report.corpus, report.settings
    origin = "counted there" if settings.frequencies == "corpus" else "given"
    skipped = [
        (settings.skip_first, ", first positions left out"),
        (settings.skip_special, ", special tokens left out"),
    ]
    lines = [
        (
            "corpus",
            f"{escape(corpus.name)}: {corpus.sequences:,} sequences, {corpus.tokens:,} tokens, {corpus.different:,} different "
            f"ones; frequencies {origin}",
        ),
        (
            "settings",
            f"rank {rank_line(settings.rank, (one.enrichment.rank for one in report.sites))}, proxies from "
            f"{corpus.fit_sequences} sequences, gradients from {corpus.test_sequences} others ({escape(settings.loss)} loss), "
            f"tokens of {settings.min_count} rows or more, seed {settings.seed}"
            + "".join(said for holds, said in skipped if holds),
        ),
    ]
    return header_lines(report.model, report.versions, lines)


def _correlations(report: FrequencyReport, with_interval: tuple[str, ...], heading: str) -> Table:
    groups: list[tuple[str, int, list[Column]]] = []
    for title, method in _METHODS:
        columns = []
        for name, shown in (("raw", "raw"), ("corrected", heading)):
            columns.append(Column(shown, partial(_estimate, name, method)))
            if method in with_interval:
                columns.append(Column("95%", partial(_interval_of, name, method)))
        groups.append((title, 0, columns))
    if heading != _SHORTEST:
        tokens = Column("tokens", lambda one: Text(f"{one.tokens:,}"))
        variance = [Column(title[-1], partial(_estimate, "variance", method)) for title, method in _METHODS]
        groups = [(" ", 0, [tokens]), *groups, ("variance", 0, variance)]
    spreads = report.spreads
    labels = [name for name, _, _ in spreads]
    return side_by_side("site", labels, [(spread,) for _, _, spread in spreads], groups, medians=False)


def _energies(report: FrequencyReport, shown: int) -> Table:
    buckets = range(len(report.sites[0].enrichment.buckets))
    whole = (
        ("lift", [Column("all", lambda one: Text(number(one.lift)))], "lift", number),
        ("energy", [Column("all", lambda one: Text(percent(one.energy)))], "energy", percent),
        ("share of |g|²", [], "energy_share", percent),
    )
    groups = [
        (title, 0, [*columns, *(Column(str(place + 1), partial(_bucket, place, field, show)) for place in buckets)])
        for title, columns, field, show in whole[:shown]
    ]
    content = [(one.enrichment,) for one in report.sites]
    return side_by_side("site", [one.site for one in report.sites], content, groups, medians=False)


def _bucket(place: int, field: str, show: Callable[[float], str], found: TangentEnrichment) -> Text:
    value = getattr(found.buckets[place], field)
    return NOTHING if value is None else Text(show(value))


def _estimate(name: str, method: str, spread: Any) -> Text:
    one: Correlation = getattr(getattr(spread, name), method)
    return Text(_signed(one.estimate) + star(one.p_value), style="bold" if one.p_value <= SIGNIFICANT else "")


def _interval_of(name: str, method: str, spread: Any) -> Text:
    return Text(_interval(getattr(getattr(spread, name), method)), style="dim")


def _interval(one: Correlation) -> str:
    return f"{one.low:.2f} to {one.high:.2f}"


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-0.00", "+0.00")


def _range(one: BucketEnergy) -> str:
    low, high = percent(one.low), percent(one.high)
    return low if low == high else f"{low} to {high}"


def _legend(report: FrequencyReport) -> Text:
    text = (
        "raw: with the mean distance of a token's rows to their own mean. It is biased upwards, most for rare tokens: the "
        "mean is fitted to the same n rows and shortens their distances. corrected (corr.): with the distance times "
        "√(n/(n-1)), exact where rows are normally distributed. variance: of the distance. Starred where p ≤ "
        f"{SIGNIFICANT}, tokens counted as independent, sites not corrected for. Buckets hold about equal mass, the rarest "
        "tokens first. energy: share of the gradient's energy inside the proxy; lift: energy a direction inside over "
        "outside (1 is chance)."
    )
    if report.trajectory is not None:
        text += f" trajectory: {report.trajectory.name}; every row has as many checkpoints, so that raw and corrected agree."
    return Text(text, style="dim")
