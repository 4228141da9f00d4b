"""How a result shows itself: as a rich table in a console, in a notebook and in a plain Python prompt alike.

Results are plain frozen data; drawing lives in ``reports/``, which is loaded only when something is shown.
"""

from __future__ import annotations

from typing import Any


class Shown:
    """A result with a table. ``reports.tables.table_of`` knows how each kind looks."""

    def show(self, width: int | None = None) -> None:
        """Print the table, in colour where the output is a terminal."""
        from tangent_lens.reports.console import show

        show(self, width=width)

    def __rich__(self) -> Any:
        from tangent_lens.reports.tables import table_of

        return table_of(self)

    def __repr__(self) -> str:
        from tangent_lens.reports.console import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from tangent_lens.reports.console import as_html

        return as_html(self)
