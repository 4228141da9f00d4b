"""What a reader must know of numbers that come from sketches: that they do, and how precise they are."""

from __future__ import annotations

from tangent_lens.measures.report import Report
from tangent_lens.reports.numbers import percent


def sketched_line(report: Report) -> str:
    """For the header: how the sums were kept; empty where they are whole."""
    return ", sums sketched" if report.settings.statistics == "sketch" else ""


def sketched_legend(report: Report) -> str:
    """The standard errors of what a sketch estimates, each at its largest; empty where sums are whole."""
    if report.settings.statistics != "sketch" or not report.measurements:
        return ""
    energies = [
        (one.energy.standard_error or 0.0) / one.energy.energy for one in report.measurements if one.energy.energy
    ]
    scores = [
        (one.isotropy.standard_error or 0.0) / one.isotropy.score for one in report.measurements if one.isotropy.score
    ]
    changes = [one.isotropy.delta_standard_error or 0.0 for one in report.measurements]
    return (
        " Sketched sums: energies of residual gradients are exact, those of weight gradients "
        f"± {_largest(energies)}; IsoScore* of gradients ± {_largest(scores)}, Δ ± {1000 * max(changes):.2g} "
        "(standard errors, the largest of the table); align is an upper bound, and effective ranks of activations are "
        "extrapolated."
    )


def _largest(relative: list[float]) -> str:
    # Less is rounding, of a sketch that sees everything.
    largest = max(relative, default=0.0)
    return f"{percent(largest)} of their value" if largest > 1e-9 else "0"
