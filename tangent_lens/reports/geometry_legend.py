"""What the columns about local geometry mean, what theory expects of them, and what noise gives."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from tangent_lens.measures.geometry_report import GeometryReport

GROWTH = (
    "growth",
    "exponents of t, the distance of a row from the foot of its token's mean: the size of its part in the tangent space (m "
    "dimensions, fitted to other rows) and of the rest, the normal part. Theory: 1 and 2 on a smooth manifold. A normal "
    "exponent near 1 is what noise gives: it grows as t where it is most of t, and less elsewhere. share: of E t² that is "
    "normal. above a floor: exponent of the normal part on the tangent part, above noise that does not grow with it. floor: the "
    "noise's share of the squared normal part at a token's median tangent part; near 100%, the growing part is seen in the "
    "outermost rows only. In brackets: not determined by these rows, the interval reaches the end of the exponents tried, and no "
    "median counts it; a dash: no growth was seen, or there was nothing to measure.",
)
EXPLAINED = (
    "curvature",
    "explained: held-out share of the normal variance that a quadratic of the tangent coordinates explains; below 0 it only "
    "fits noise.",
)
CURVATURE = (
    EXPLAINED[0],
    f"{EXPLAINED[1]} Its m may be smaller, as far as the rows determine its coefficients. bend: how far rows lie off the tangent "
    "plane because of curvature, over their tangent part. arc: how much longer the way along the surface is than the straight "
    "line. far/near: mean squared curvature of the directions that the farther half of the rows shows, over the nearer half; "
    "above 1 curved directions are over-represented far out.",
)
_BUCKETS = (
    "buckets",
    "radius: mean t, of all tokens in the model's own units and of each bucket over that of all. curvature: root mean square "
    "over tangent directions, in one over length, without the part that noise adds.",
)
_SENSITIVITY = (
    "other m",
    "an exponent that changes much with m or nearest says more about that choice than about the model. sites: those whose rows "
    "allow the choice and, above a floor, determine the exponent; each median is over its own sites.",
)
GRADIENTS = (
    "gradients",
    "degenerate (degen.): tokens whose mean tangent gradient is too near to 0 to divide by. normal / tangent: mean gradient "
    "across over along the tangent space, median over the other tokens. tangent gradient degenerate: most tokens are, so that a "
    "ratio would say nothing. single rows: exponents of |signal| times either part; theory 1 and 2 where signals do not depend "
    "on t. mean gradient: exponents of the mean inside a ball that grows.",
)
DEPTH = (
    "depth",
    "TwoNN, MLE: intrinsic dimension; (eff.) rank: exp of the entropy of the covariance's eigenvalues. linear: share of the "
    "variance along the {m}leading principal directions of other rows; 1 for a flat set. agree: share of a row's neighbours "
    "that are occurrences of its own token{expected}. neighbours kept: share that are also neighbours at the site before, the "
    "first and the last{chance}.",
)


_CAPPED = (
    "m",
    "after the stroke, where the rows of a token do not determine so many: the dimension that the rule asks for. A part of what "
    "is called normal there may be tangent.",
)


def report_legend(report: GeometryReport) -> Group:
    """Of the sections that the report has."""
    entries: list[tuple[str, str]] = [GROWTH]
    if any(one.wanted_m > one.everything.order.m for one in report.sites):
        entries.append(_CAPPED)
    if any(one.everything.curvature is not None for one in report.sites):
        entries.append(CURVATURE)
    if len(report.buckets) > 1:
        entries.append(_BUCKETS)
    if any(one.everything.order.others for one in report.sites):
        entries.append(_SENSITIVITY)
    if report.gradients:
        entries.append(GRADIENTS)
    if report.depth is not None:
        first, overlap = report.depth.geometries[0], report.depth.overlap_first[0]
        agreement = first.agreement
        expected = (
            "" if agreement is None else f" (by chance {agreement.expected:.1%}, at most {agreement.attainable:.1%})"
        )
        entries.append(depth_entry(f"{first.m} ", expected, f" (by chance {overlap.expected:.1%})"))
    return legend(entries)


def depth_entry(m: str = "", expected: str = "", chance: str = "") -> tuple[str, str]:
    """The entry about depth, with the numbers that it should be read against."""
    name, text = DEPTH
    return name, text.format(m=m, expected=expected, chance=chance)


def gradient_legend() -> Group:
    """Of one map."""
    text = (
        ". p: of a mean tangent gradient of 0, by random signs. coherence: length of the mean tangent gradient over the mean "
        "length of its rows, 0 where rows cancel."
    )
    return legend([(GRADIENTS[0], GRADIENTS[1].removesuffix(".") + text)])


def legend(entries: Sequence[tuple[str, str]]) -> Group:
    """A paragraph an entry, its name first."""
    return Group(*(Text(f"{name}  ", style="dim bold").append(Text(text, style="dim")) for name, text in entries))
