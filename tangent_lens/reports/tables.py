"""Results as rich tables. Everything shown is read from the result; nothing is computed anew but medians."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import singledispatch
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tangent_lens.dynamics.comparison import DynamicsTable
from tangent_lens.dynamics.geometry_run import GeometryRun
from tangent_lens.dynamics.report import DynamicsReport
from tangent_lens.measures.ablation import AblationReport
from tangent_lens.measures.activation_shape import ShapeReport
from tangent_lens.measures.attention import AttentionDominance
from tangent_lens.measures.attention_report import AttentionHeads, AttentionReport
from tangent_lens.measures.comparison import Comparison
from tangent_lens.measures.concept_geometry import DepthGeometry
from tangent_lens.measures.curvature_summary import CurvatureSummary
from tangent_lens.measures.curvature_visibility import VisibilitySweep
from tangent_lens.measures.energy import EnergyTest
from tangent_lens.measures.enrichment import TangentEnrichment
from tangent_lens.measures.frequency import FrequencyCorrelation
from tangent_lens.measures.frequency_report import FrequencyReport
from tangent_lens.measures.geometry_report import GeometryReport
from tangent_lens.measures.gradient_order import GradientOrder
from tangent_lens.measures.isotropy import IsotropyTest
from tangent_lens.measures.overlaps import Overlaps, Stability
from tangent_lens.measures.report import MapsView, Measurement, Report, Space
from tangent_lens.measures.seen_curvature import SeenCurvature
from tangent_lens.measures.spectrum import Spectrum
from tangent_lens.measures.tangent_order import TangentOrder
from tangent_lens.models.protocol import ATTENTION_MAPS, MLP_MAPS
from tangent_lens.reports.ablation_table import ablation_table
from tangent_lens.reports.attention_tables import attention_heads_view, attention_layer_view, attention_report_view
from tangent_lens.reports.columns import SIGNIFICANT, Column, no_star, optional, side_by_side, star
from tangent_lens.reports.comparison_table import comparison_table
from tangent_lens.reports.dynamics_tables import dynamics_view, several_view
from tangent_lens.reports.frame import fits, header_lines, rank_line, warning_lines
from tangent_lens.reports.frequency_table import correlation_view, enrichment_view, frequency_view
from tangent_lens.reports.geometry_gradients import gradient_view
from tangent_lens.reports.geometry_parts import curvature_view, depth_view, order_view, seen_view, sweep_view
from tangent_lens.reports.geometry_run_table import geometry_run_view
from tangent_lens.reports.geometry_tables import geometry_view
from tangent_lens.reports.layer_rows import extras_said, fit_site_said, loss_said, rows_by_layer
from tangent_lens.reports.numbers import number, p_value, percent, signed, small, thousandths
from tangent_lens.reports.overlap_tables import overlaps_view, stability_view
from tangent_lens.reports.shape_table import shape_view
from tangent_lens.reports.sketch_lines import sketched_legend, sketched_line

# Consoles: below NARROW the p columns give way to a star; from WIDE on there is room for more controls.
NARROW, WIDE = 96, 150
_SHORT_NAMES = {"query": "q", "key": "k", "value": "v", "mlp_in": "in", "mlp_gate": "gate"}


@singledispatch
def table_of(result: Any) -> Any:
    """The table of a result.

    Raises:
        TypeError: a kind of result without a table.
    """
    raise TypeError(f"a {type(result).__name__} has no table")


@table_of.register
def _(report: Report) -> Any:
    tables = (_ByWidth(report, view) for view in (energy_table, isotropy_table, notes))
    return Group(header(report), "", *tables)


@table_of.register
def _(view: MapsView) -> Any:
    return maps_table(view.report)


@table_of.register
def _(comparison: Comparison) -> Any:
    return _ByWidth(comparison, comparison_table)


for _kind, _view in (
    (AttentionReport, attention_report_view),
    (AttentionHeads, attention_heads_view),
    (AttentionDominance, attention_layer_view),
    (AblationReport, ablation_table),
    (ShapeReport, shape_view),
    (DynamicsReport, dynamics_view),
    (DynamicsTable, several_view),
    (Overlaps, overlaps_view),
    (Stability, stability_view),
    (FrequencyReport, frequency_view),
    (FrequencyCorrelation, correlation_view),
    (TangentEnrichment, enrichment_view),
    (GeometryReport, geometry_view),
    (GeometryRun, geometry_run_view),
    (TangentOrder, order_view),
    (CurvatureSummary, curvature_view),
    (SeenCurvature, seen_view),
    (GradientOrder, gradient_view),
    (DepthGeometry, depth_view),
    (VisibilitySweep, sweep_view),
):
    table_of.register(_kind, _view)


@table_of.register
def _(one: Measurement) -> Any:
    heading = f"{one.name}: {one.gradient} gradient at {one.site}, proxy fitted at {one.fit_site}"
    return Group(Text(heading, style="bold"), table_of(one.energy), table_of(one.isotropy))


@table_of.register
def _(test: EnergyTest) -> Any:
    rows = [
        (
            "energy",
            _with_error(test.energy, test.standard_error, percent),
            f"share of the gradient along the {test.rank} of {test.d} directions",
        ),
        ("lift", number(test.lift), "energy a direction inside, over energy a direction outside"),
        ("p", number(test.p_value), f"of {len(test.random)} random normals that reach this energy"),
        ("p, exact null", _or_nothing(test.exact_p_value, small), "from the null's exact mean, variance and skewness"),
        ("random normal", f"{percent(test.expected_random)} ± {percent(test.expected_random_sd)}", "exact mean and sd"),
        ("sampled", f"{percent(test.random_mean)} ± {percent(test.random_sd)}", f"{len(test.random)} random normals"),
        ("next", _or_nothing(test.following, percent), "principal directions k+1 to 2k, the hardest rival"),
        ("trailing", _or_nothing(test.trailing, percent), "directions of least activation variance"),
        ("oracle", percent(test.oracle), f"the most that any subspace of this rank holds{_sketched_bound(test)}"),
        ("alignment", number(test.alignment), "energy / oracle"),
    ]
    if test.signal_lift is not None:
        rows.insert(2, ("signal lift", number(test.signal_lift), "over shuffled backward signals"))
    return _facts("Gradient energy in the tangent proxy", rows)


@table_of.register
def _(test: IsotropyTest) -> Any:
    rows = [
        ("IsoScore*", _with_error(test.score, test.standard_error, number), "0 for one direction, 1 for a ball"),
        (
            "change, tangent",
            _with_error(test.delta, test.delta_standard_error, signed),
            "IsoScore* after removing the tangent proxy, minus before",
        ),
        ("change, normal", signed(test.random_mean), f"the same for {len(test.random)} random normals, mean"),
        ("p", number(test.p_value), "of random normals whose removal raises IsoScore* as much"),
        ("change, trailing", _or_nothing(test.trailing, signed), "the same for the directions of least variance"),
    ]
    return _facts("Isotropy without the tangent proxy", rows)


@table_of.register
def _(spectrum: Spectrum) -> Any:
    rows = [
        ("participation ratio", number(spectrum.participation_ratio), f"tr(C)² / |C|², of {spectrum.d}"),
        ("effective rank", number(spectrum.effective_rank), "entropy of the eigenvalues"),
        ("effective rank", number(spectrum.effective_rank_singular), "entropy of the singular values (as RankMe)"),
        ("stable rank", _or_nothing(spectrum.stable_rank, number), "trace over the largest eigenvalue"),
        (
            "power law α",
            _or_nothing(spectrum.alpha, number),
            f"over eigenvalues {spectrum.alpha_first} to {spectrum.alpha_last}",
        ),
        ("largest dimension", str(spectrum.top_dimension), f"holds {percent(spectrum.top_share)} of the variance"),
    ]
    return _facts("Dimensions in use", rows)


def header(report: Report) -> Table:
    """Model, corpus and settings in a few lines."""
    corpus, settings = report.corpus, report.settings
    lines = [
        (
            "corpus",
            f"{escape(corpus.name)}: proxies from {corpus.fit_sequences} sequences ({corpus.fit_rows:,} rows), gradients "
            f"from {corpus.test_sequences} others ({corpus.test_rows:,} rows), {loss_said(corpus, settings)}",
        ),
        (
            "settings",
            f"{_method(report)}, {settings.controls} random normals, "
            f"seed {settings.seed}, weight proxies fitted on {fit_site_said(settings)}{extras_said(settings)}"
            f"{sketched_line(report)}",
        ),
    ]
    return header_lines(report.model, report.versions, lines)


def _method(report: Report) -> str:
    """The rank of the subspaces and, where it was not by PCA, how they came about."""
    settings, ranks = report.settings, [space.rank for space in report.spaces]
    if settings.fit == "given":
        return f"subspaces given, of rank {' to '.join(str(rank) for rank in sorted({min(ranks), max(ranks)}))}"
    rank = f"rank {rank_line(settings.rank, ranks)}"
    return (
        rank
        if settings.fit.startswith("pca")
        else f"subspaces by {settings.fit} of {settings.fit_rows:,} rows at most, {rank}"
    )


def _energy_columns(weight: bool, width: int, intervals: bool = False) -> list[Column]:
    # Where intervals take the place of p, a star stands for it.
    with_p = width >= (WIDE if intervals else NARROW)
    marked = no_star if with_p else star
    columns = [
        Column("energy", lambda one: Text(percent(one.energy.energy)), lambda one: one.energy.energy, percent),
        Column(
            "lift",
            lambda one: _by_significance(one, number(one.energy.lift) + marked(one.corrected_energy_p)),
            lambda one: one.energy.lift,
        ),
    ]
    if intervals and width >= NARROW:
        columns.append(Column("95%", _lift_interval))
    if weight:
        columns.append(
            Column("signal", lambda one: Text(number(one.energy.signal_lift)), lambda one: one.energy.signal_lift)
        )
    if with_p:
        columns.append(Column("p", lambda one: _by_significance(one, p_value(one.energy.p_value))))
    if width >= WIDE:
        columns += [
            Column("/next", lambda one: optional(one.energy.following_ratio), lambda one: one.energy.following_ratio),
            Column("/trail", lambda one: optional(one.energy.trailing_ratio), lambda one: one.energy.trailing_ratio),
            Column("align", lambda one: Text(number(one.energy.alignment)), lambda one: one.energy.alignment),
        ]
    return columns


def _lift_interval(one: Measurement) -> Text:
    if one.uncertainty is None:
        return Text("")
    interval = one.uncertainty.lift_interval
    return Text(f"{number(interval.bca_low)}–{number(interval.bca_high)}", style="dim")


class _ByWidth:
    """A part of the report that shows as much as the console has room for."""

    def __init__(self, report: Any, view: Callable[[Any, int], Any]) -> None:
        self._report, self._view = report, view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        view = self._view(self._report, options.max_width)
        for narrower in (WIDE - 1, NARROW - 1):
            # Long labels take the room that the columns needed: fewer columns, rather than numbers cut short.
            if isinstance(view, Table) and narrower < options.max_width and not fits(view, console, options):
                view = self._view(self._report, narrower)
        yield view


def energy_table(report: Report, width: int = 100) -> Table:
    """Energy, lift, signal lift and p of every layer; from 150 characters on, also next, trailing and alignment."""
    rows, intervals = rows_by_layer(report.measurements), report.settings.bootstrap > 0
    titles = ("residual", "attention weights", "MLP weights")
    if width >= NARROW:
        maps = [_maps_measured(report, kinds) for kinds in (ATTENTION_MAPS, MLP_MAPS)]
        titles = ("residual gradient", f"attention weights ({maps[0]})", f"MLP weights ({maps[1]})")
    groups = [
        (titles[0], 0, _energy_columns(False, width, intervals)),
        (titles[1], 1, _energy_columns(True, width, intervals)),
        (titles[2], 2, _energy_columns(True, width, intervals)),
    ]
    return side_by_side("layer", [label for label, _ in rows], [cells for _, cells in rows], groups)


def isotropy_table(report: Report, width: int = 100) -> Table:
    """IsoScore* of activations and gradients, and its change without the tangent proxy, of every layer.

    From 150 characters on, also the change without a random normal.
    """
    rows = rows_by_layer(report.measurements)
    spaces = {space.site: space for space in report.spaces}
    content = [(_space_of(cells, spaces), *cells) for _, cells in rows]
    activations = [
        Column("IsoSc*", lambda one: Text(small(one.iso_score)), lambda one: one.iso_score, small),
        Column("in proxy", lambda one: Text(percent(one.variance_share)), lambda one: one.variance_share, percent),
    ]
    titles = (
        ("residual", "attention", "MLP")
        if width < NARROW
        else ("residual gradient", "attention weights", "MLP weights")
    )
    groups = [("activations", 0, activations if width >= NARROW else activations[:1])]
    groups += [(title, place, _isotropy_columns(width)) for place, title in enumerate(titles, start=1)]
    return side_by_side("layer", [label for label, _ in rows], content, groups)


def _isotropy_columns(width: int) -> list[Column]:
    marked = star if width < NARROW else no_star
    score = Column("IsoSc*", lambda one: Text(small(one.isotropy.score)), lambda one: one.isotropy.score, small)
    without_tangent = Column(
        "Δtan",
        lambda one: _by_isotropy(one, thousandths(one.isotropy.delta) + marked(one.corrected_isotropy_p)),
        lambda one: one.isotropy.delta,
        thousandths,
    )
    without_normal = Column(
        "Δrand",
        lambda one: Text(thousandths(one.isotropy.random_mean)),
        lambda one: one.isotropy.random_mean,
        thousandths,
    )
    p = Column("p", lambda one: _by_isotropy(one, p_value(one.isotropy.p_value)))
    if width < NARROW:
        return [score, without_tangent]
    return [score, without_tangent, without_normal, p] if width >= WIDE else [score, without_tangent, p]


def maps_table(report: Report) -> Any:
    """One row a linear map: query, key, value, MLP in and gate of every layer."""
    single = [one for one in report.measurements if one.gradient == "weight" and not one.pooled]
    if not single:
        return Text("no weight gradient was measured in this run")
    content = [(one,) for one in single]
    return side_by_side(
        "map", [one.name for one in single], content, [("weight gradient", 0, _energy_columns(True, WIDE))]
    )


def notes(report: Report, width: int = 100) -> Any:
    """What the columns mean, and what a reader must know before believing them."""
    intervals = report.settings.bootstrap > 0
    significance = "starred" if width < (WIDE if intervals else NARROW) else "coloured"
    legend = (
        "energy: share of the gradient's energy inside the tangent proxy. lift: energy a direction inside over outside "
        "(1 is chance). signal: energy over that of shuffled backward signals; above 1 the signals themselves prefer the "
        f"tangent. p: share of {report.settings.controls} random normals that do as well; {significance} where p (of "
        f"energies that of the controls' exact null), corrected over the layers (Benjamini-Hochberg), is ≤ {SIGNIFICANT}"
        "{more}. IsoSc*: IsoScore*, 0 for one direction, 1 for a ball. Δ: its change in thousandths when the proxy (tan) "
        "or a random normal (rand) is removed. Medians in the last row."
    ).replace("{more}", _WIDE_LEGEND if width >= WIDE else "")
    if intervals:
        legend += (
            f" 95%: BCa interval of the lift over {report.settings.bootstrap:,} corpora resampled from the "
            f"{report.corpus.test_sequences} test sequences, the subspaces held as they are."
        )
    legend += sketched_legend(report)
    return Group(Text(legend, style="dim"), *warning_lines(report.warnings))


_WIDE_LEGEND = (
    ". /next, /trail: energy over that of the next principal and of the least-variance directions. align: energy over "
    "the most that any subspace of this rank holds"
)


def _maps_measured(report: Report, kinds: Sequence[str]) -> str:
    measured = {one.kind for one in report.measurements if one.gradient == "weight" and not one.pooled}
    return " ".join(_SHORT_NAMES[kind] for kind in kinds if kind in measured)


def _space_of(cells: Sequence[Measurement | None], spaces: dict[str, Space]) -> Space | None:
    first = next((one for one in cells if one is not None), None)
    return None if first is None else spaces.get(first.fit_site)


def _facts(title: str, rows: Sequence[tuple[str, str | Text, str]]) -> Table:
    table = Table(title=title, title_style="bold", title_justify="left", box=box.SIMPLE, show_header=False)
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify)
    for name, value, meaning in rows:
        table.add_row(name, value, Text(meaning, style="dim"))
    return table


def _by_significance(one: Measurement, shown: str) -> Text:
    return Text(shown, style="bold green" if one.corrected_energy_p <= SIGNIFICANT and one.energy.lift > 1 else "")


def _by_isotropy(one: Measurement, shown: str) -> Text:
    return Text(shown, style="bold green" if one.corrected_isotropy_p <= SIGNIFICANT and one.isotropy.delta > 0 else "")


def _or_nothing(value: float | None, shown: Callable[[float], str]) -> str:
    return "not determined by these rows" if value is None else shown(value)


def _with_error(value: float, error: float | None, shown: Callable[[float], str]) -> str:
    # A sketch that sees everything leaves rounding, which is no error worth a line.
    seen = error is not None and error > 1e-9 * abs(value)
    return f"{shown(value)} ± {shown(error).lstrip('+')}" if seen else shown(value)  # pyright: ignore[reportArgumentType]


def _sketched_bound(test: EnergyTest) -> str:
    return "" if test.standard_error is None else ", or more: a sketch sees a lower bound"
