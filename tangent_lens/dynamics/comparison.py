"""Several models early and late in training, as the paper's Table 1 shows them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from tangent_lens.dynamics.report import DynamicsReport
from tangent_lens.showing import Shown

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False, eq=False)
class DynamicsTable(Shown):
    """One row a model, early and late side by side; it shows itself as tables, one a kind of gradient.

    Attributes:
        reports: in the order of the rows.
        names: what the rows are called.
        warnings: where the reports are not of one protocol.
    """

    reports: tuple[DynamicsReport, ...]
    names: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_pandas(self) -> pandas.DataFrame:
        """One row a model, kind of gradient and window."""
        import pandas

        rows = [
            {"model": name} | asdict(one)
            for name, report in zip(self.names, self.reports, strict=True)
            for one in report.summary()
        ]
        return pandas.DataFrame(rows)


def dynamics_table(reports: Iterable[DynamicsReport]) -> DynamicsTable:
    """Reports of several models side by side: the paper's Table 1, one row a model.

    Raises:
        ValueError: no report.
    """
    found = tuple(reports)
    if not found:
        raise ValueError("no report was given; pass reports that measure_checkpoints returned, or DynamicsReport.load")
    return DynamicsTable(found, _names(found), tuple(_differences(found)))


def run_name(report: DynamicsReport) -> str:
    """What the run is called: of saved folders, the folder that holds the checkpoints."""
    return report.model.name.rstrip("/").removesuffix(f"/{report.points[-1].name}")


def _names(reports: tuple[DynamicsReport, ...]) -> tuple[str, ...]:
    """The last part of each run's name; the whole, or with a number, where two are the same."""
    whole = [run_name(report).removesuffix("-intermediate-checkpoints") for report in reports]
    last = [name.split("/")[-1] for name in whole]
    found = [short if last.count(short) == 1 else name for short, name in zip(last, whole, strict=True)]
    return tuple(
        name if found.count(name) == 1 else f"{last[place]} ({found[: place + 1].count(name)})"
        for place, name in enumerate(found)
    )


def _differences(reports: tuple[DynamicsReport, ...]) -> Iterable[str]:
    """What keeps the rows from being compared, in sentences."""
    asked = {
        "corpora": [report.corpus.name for report in reports],
        "ranks": [report.settings.rank for report in reports],
        "numbers of random normals": [report.settings.controls for report in reports],
        "places where weight proxies are fitted": [report.settings.fit_site for report in reports],
        "windows": [report.windows.said for report in reports],
    }
    for what, values in asked.items():
        different = list(dict.fromkeys(values))
        if len(different) > 1:
            yield f"these runs have different {what}: {', '.join(str(one) for one in different)}"
