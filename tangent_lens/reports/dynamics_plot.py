"""A training run as a matplotlib figure (the ``plot`` extra): six panels over the steps, the windows shaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tangent_lens.dynamics.comparison import run_name
from tangent_lens.dynamics.report import KINDS, CheckpointPoint, DynamicsReport
from tangent_lens.measures.report import Measurement
from tangent_lens.reports.dynamics_medians import (
    activations_of,
    median_dimension,
    median_known,
    median_of,
    median_overlap,
)
from tangent_lens.reports.dynamics_tables import NAMES
from tangent_lens.reports.plots import import_pyplot

_COLOURS = {"residual": "#4477aa", "attention": "#cc6677", "mlp": "#ddaa33"}
_WINDOW_COLOURS = ("#bbccee", "#ccddaa")
_LINE = {"marker": "o", "markersize": 3, "linewidth": 1.3}
_PointValue = Callable[[CheckpointPoint], float | None]


def plot_dynamics(report: DynamicsReport) -> Any:
    """Loss, lifts, changes of isotropy and the shape of the activations along training; medians over the layers.

    Returns:
        A ``matplotlib.figure.Figure``; ``figure.savefig("run.png")`` keeps it.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pyplot = import_pyplot()
    figure, panels = pyplot.subplots(2, 3, figsize=(15, 7.5), sharex=True, layout="constrained")
    draws = (_loss_panel, _lift_panel, _signal_panel, _isotropy_panel, _activations_panel, _dimension_panel)
    for axes, draw in zip(panels.flat, draws, strict=True):
        _shade_windows(axes, report)
        draw(axes, report)
    scale_steps(panels[0, 0], report.steps())
    for axes in panels[1]:
        axes.set_xlabel("training step")
    rank = report.settings.rank
    figure.suptitle(f"{run_name(report)}: gradients along training and the early tangent proxy of rank {rank}")
    # A notebook shows the returned figure; left open, pyplot would show it a second time.
    pyplot.close(figure)
    return figure


def scale_steps(axes: Any, steps: Sequence[int]) -> None:
    """Logarithmic, with room for step 0."""
    least = min((step for step in steps if step > 0), default=1)
    if steps[0] > 0:
        axes.set_xscale("log")
    else:
        axes.set_xscale("symlog", linthresh=least)
        axes.set_xlim(left=-0.1 * least)


def _shade_windows(axes: Any, report: DynamicsReport) -> None:
    for steps, colour in zip((report.windows.early, report.windows.late), _WINDOW_COLOURS, strict=True):
        axes.axvspan(steps[0], steps[-1], facecolor=colour, alpha=0.45, linewidth=0)
        # A window of one checkpoint has no width.
        axes.axvline(steps[0], color=colour, linewidth=1, zorder=0)


def _loss_panel(axes: Any, report: DynamicsReport) -> None:
    _line(axes, report, lambda point: point.loss, color="#222222")
    axes.set(title="loss on the test sequences (shaded: early, late)", ylabel=f"nats a {report.corpus.loss_unit}")


def _lift_panel(axes: Any, report: DynamicsReport) -> None:
    _kinds(axes, report, lambda one: one.energy.lift)
    axes.axhline(1, color="grey", linewidth=1, linestyle=":")
    axes.set(yscale="log", title="lift over a random normal" + _own_said(report), ylabel="lift")
    axes.legend(fontsize="small")


def _signal_panel(axes: Any, report: DynamicsReport) -> None:
    _kinds(axes, report, lambda one: one.energy.signal_lift)
    axes.axhline(1, color="grey", linewidth=1, linestyle=":")
    axes.set(yscale="log", title="signal lift over shuffled backward signals", ylabel="signal lift")
    # All near 1, where powers of ten are hard to read.
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which("{x:.3g}")


def _isotropy_panel(axes: Any, report: DynamicsReport) -> None:
    _kinds(axes, report, lambda one: one.isotropy.delta)
    axes.axhline(0, color="grey", linewidth=1, linestyle=":")
    axes.set_yscale("symlog", linthresh=1e-4)
    axes.set(title="change of IsoScore* without the proxy" + _own_said(report), ylabel="ΔIsoScore*")


def _activations_panel(axes: Any, report: DynamicsReport) -> None:
    iso_score = _of_activations(lambda space: space.iso_score)
    share = _of_activations(lambda space: space.variance_share)
    _line(axes, report, iso_score, color="#228833", label="IsoScore* of activations")
    _line(axes, report, share, color="#4477aa", label="variance in their own proxy")
    _line(axes, report, median_overlap, color="#aa3377", label="overlap of own and early proxy")
    axes.set(title="activations and their proxies", ylim=(-0.02, 1.02))
    axes.legend(fontsize="small")


def _dimension_panel(axes: Any, report: DynamicsReport) -> None:
    rank = _of_activations(lambda space: space.spectrum.effective_rank)
    _line(axes, report, rank, color="#228833", label="effective rank")
    _line(axes, report, median_dimension, color="#aa3377", label="intrinsic dimension (TwoNN)")
    axes.set(title="dimensions that activations use", yscale="log", ylabel="dimensions")
    axes.legend(fontsize="small")


def _own_said(report: DynamicsReport) -> str:
    return " (dashed: own proxy)" if any(point.refitted for point in report.points) else ""


def _kinds(axes: Any, report: DynamicsReport, value: Callable[[Measurement], float | None]) -> None:
    """A line a kind of gradient: solid against the early proxy, dashed against the checkpoint's own."""
    for kind in KINDS:
        style = {"color": _COLOURS[kind]}
        _line(
            axes,
            report,
            lambda point, kind=kind: median_of(point.measurements, kind, value),
            label=NAMES[kind],
            **style,
        )
        _line(axes, report, lambda point, kind=kind: median_of(point.refitted, kind, value), linestyle="--", **style)


def _of_activations(value: Callable[[Any], float]) -> _PointValue:
    return lambda point: median_known(value(space) for space in activations_of(point))


def _line(axes: Any, report: DynamicsReport, value: _PointValue, **style: Any) -> None:
    """Through the checkpoints that have this number; nothing where none has."""
    found = [(point.step, shown) for point in report.points if (shown := value(point)) is not None]
    if found:
        axes.plot([step for step, _ in found], [shown for _, shown in found], **(_LINE | style))
