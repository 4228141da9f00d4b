"""Results as matplotlib figures (the ``plot`` extra)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tangent_lens.measures.report import Measurement, Report

_SERIES = (
    ("residual gradient", "#4477aa", lambda one: one.gradient == "residual"),
    ("attention weights", "#cc6677", lambda one: one.pooled and one.kind == "attention"),
    ("MLP weights", "#ddaa33", lambda one: one.pooled and one.kind == "mlp"),
)


def plot_report(report: Report) -> Any:
    """Four panels over layers: lift, signal lift, the change of isotropy, and the activations' own shape.

    Returns:
        A ``matplotlib.figure.Figure``; ``figure.savefig("lift.png")`` keeps it.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no measurement has a layer.
    """
    if all(one.layer is None for one in report.measurements):
        raise ValueError("this report has no layers to draw over; read its table, or to_pandas()")
    pyplot = import_pyplot()
    figure, panels = pyplot.subplots(2, 2, figsize=(11, 7), sharex=True, layout="constrained")
    _lift_panel(panels[0, 0], report)
    _signal_panel(panels[0, 1], report)
    _isotropy_panel(panels[1, 0], report)
    _activations_panel(panels[1, 1], report)
    rank = report.settings.rank
    figure.suptitle(f"{report.model.name}: gradients and the tangent proxy of rank {rank}")
    # A notebook shows the returned figure; left open, pyplot would show it a second time.
    pyplot.close(figure)
    return figure


def import_pyplot() -> Any:
    """matplotlib's pyplot.

    Raises:
        ImportError: not installed; the sentence says what to install.
    """
    try:
        from matplotlib import pyplot
    except ImportError as missing:
        raise ImportError('plots need matplotlib; install it with: pip install "tangent-lens[plot]"') from missing
    return pyplot


def _lift_panel(axes: Any, report: Report) -> None:
    _lines(axes, report, lambda one: one.energy.lift)
    _mark_insignificant(axes, report)
    axes.axhline(1, color="grey", linewidth=1, linestyle="--")
    axes.set(yscale="log", title="lift over a random normal (dashed: chance; hollow: p > 0.05)", ylabel="lift")
    axes.legend(fontsize="small")


def _signal_panel(axes: Any, report: Report) -> None:
    _lines(axes, report, lambda one: one.energy.signal_lift)
    axes.axhline(1, color="grey", linewidth=1, linestyle="--")
    axes.set(yscale="log", title="signal lift over shuffled backward signals", ylabel="signal lift")


def _isotropy_panel(axes: Any, report: Report) -> None:
    _lines(axes, report, lambda one: one.isotropy.delta)
    for _, color, belongs in _SERIES:
        series = _series(report, belongs, lambda one: one.isotropy.random_mean)
        axes.plot(*series, color=color, linewidth=1, linestyle=":")
    axes.axhline(0, color="grey", linewidth=1, linestyle="--")
    axes.set_yscale("symlog", linthresh=1e-4)
    axes.set(title="change of IsoScore* without the proxy (dotted: random normal)", xlabel="layer", ylabel="ΔIsoScore*")


def _activations_panel(axes: Any, report: Report) -> None:
    sites = {one.site for one in report.measurements if one.gradient == "residual"}
    spaces = [space for space in report.spaces if (space.site in sites or not sites) and space.layer is not None]
    layers = [space.layer for space in spaces]
    axes.plot(
        layers,
        [space.variance_share for space in spaces],
        color="#4477aa",
        marker="o",
        markersize=3,
        label="variance in the proxy",
    )
    axes.plot(
        layers, [space.iso_score for space in spaces], color="#228833", marker="s", markersize=3, label="IsoScore*"
    )
    axes.set(title="activations at the residual sites", xlabel="layer", ylim=(-0.02, 1.02))
    axes.legend(fontsize="small")


def _lines(axes: Any, report: Report, value: Callable[[Measurement], float | None]) -> None:
    for label, color, belongs in _SERIES:
        layers, values = _series(report, belongs, value)
        if layers:
            axes.plot(layers, values, color=color, marker="o", markersize=4, linewidth=1.3, label=label)


def _mark_insignificant(axes: Any, report: Report) -> None:
    for _, color, belongs in _SERIES:
        weak = [
            one for one in report.measurements if belongs(one) and one.layer is not None and one.energy.p_value > 0.05
        ]
        layers, values = [one.layer for one in weak], [one.energy.lift for one in weak]
        axes.plot(layers, values, linestyle="", marker="o", markersize=4, markerfacecolor="white", color=color)


def _series(
    report: Report, belongs: Callable[[Measurement], bool], value: Callable[[Measurement], float | None]
) -> tuple[Sequence[int], Sequence[float]]:
    points = [
        (one.layer, shown)
        for one in report.measurements
        if belongs(one) and one.layer is not None and (shown := value(one)) is not None
    ]
    return [layer for layer, _ in points], [shown for _, shown in points]
