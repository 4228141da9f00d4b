"""Numbers as short text: as many digits as a reader needs, and no more."""

from __future__ import annotations


def percent(share: float) -> str:
    """``77.2%``, ``0.041%``: three digits that count."""
    return f"{share:.1%}" if share >= 0.01 else f"{100 * share:.2g}%"


def number(value: float | None) -> str:
    """``118``, ``22.1``, ``1.03``, ``0.047``, ``8.4e+04``: about three digits."""
    if value is None:
        return "–"
    if value >= 10_000 or 0 < value < 0.001:
        return f"{value:.1e}" if value < float("inf") else "∞"
    return (
        f"{value:.0f}"
        if value >= 100
        else f"{value:.1f}"
        if value >= 10
        else f"{value:.2f}"
        if value >= 0.1
        else f"{value:.3f}"
    )


def p_value(value: float) -> str:
    """``.048``, ``1``: never more digits than controls allow."""
    return "1" if value >= 0.9995 else f"{value:.3f}".removeprefix("0") if value >= 0.001 else f"{value:.0e}"


def small(value: float) -> str:
    """An IsoScore*: ``.352``, ``8.5e-4``."""
    return f"{value:.3f}".removeprefix("0") if value >= 0.01 else f"{value:.1e}".replace("e-0", "e-")


def signed(value: float) -> str:
    """``+0.0222``, ``-3.8e-03``."""
    return f"{value:+.4f}" if abs(value) >= 0.001 or value == 0 else f"{value:+.1e}"


def thousandths(value: float) -> str:
    """A change in thousandths: ``+22.2``, ``-0.45``, ``+0.00``."""
    scaled = 1000 * value
    return f"{scaled:+.1f}" if abs(scaled) >= 10 else f"{scaled:+.2f}"


def whole_percent(share: float) -> str:
    """``77%``, ``-4%``, ``0%``: of shares that are compared with each other."""
    return f"{share:.0%}".replace("-0%", "0%") if abs(share) < 0.01 else f"{share:.0%}"


def counted(count: int, what: str) -> str:
    """``1 token``, ``1,200 tokens``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
