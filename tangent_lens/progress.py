"""How long work tells how far it is. The rich display lives in ``reports/``; nothing here draws."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """One task at a time: start, advance, finish."""

    def start(self, description: str, total: float | None = None, unit: str = "") -> None:
        """Begin a task of ``total`` units; ``None`` when its length is not known."""
        ...

    def advance(self, amount: float = 1.0, note: str = "") -> None:
        """``amount`` more units are done."""
        ...

    def finish(self) -> None:
        """The task is over, whether it was completed or not."""
        ...


class NoProgress:
    """Shows nothing."""

    def start(self, description: str, total: float | None = None, unit: str = "") -> None:
        """Nothing to show."""

    def advance(self, amount: float = 1.0, note: str = "") -> None:
        """Nothing to show."""

    def finish(self) -> None:
        """Nothing to show."""


def chosen_progress(wanted: bool | Progress) -> Progress | None:
    """The display a person asked for: their own, one on the terminal (none where output is no terminal), or none."""
    if not isinstance(wanted, bool):
        return wanted
    if not wanted:
        return None
    from tangent_lens.reports.console import terminal_progress

    return terminal_progress()
