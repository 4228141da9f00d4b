"""Reports of training dynamics on disk: the folder of every report, under a kind of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tangent_lens.dynamics.report import DynamicsReport, UpdateEnergy
from tangent_lens.dynamics.state import point_of
from tangent_lens.dynamics.windows import Windows
from tangent_lens.measures.plain import build
from tangent_lens.measures.report import Measurement, Settings
from tangent_lens.reports.files import DYNAMICS_REPORT, read_report, shared_fields, write_report
from tangent_lens.subspaces.subspace import Subspace

_SINGLE = ("model", "corpus", "settings", "windows")
_SEVERAL = ("points", "early", "late", "updates")


def save_dynamics(report: DynamicsReport, folder: str | os.PathLike[str]) -> None:
    """Write a report's folder, so that a crash leaves the old report or the new.

    Raises:
        FileProblem: a report of another kind is there, which would be lost.
    """
    content: dict[str, Any] = {name: getattr(report, name) for name in ("warnings", "versions", "created")}
    content |= {name: asdict(getattr(report, name)) for name in _SINGLE}
    content |= {name: [asdict(one) for one in getattr(report, name)] for name in _SEVERAL}
    write_report(folder, DYNAMICS_REPORT, content, report.subspaces)


def load_dynamics(folder: str | os.PathLike[str]) -> DynamicsReport:
    """Read what :func:`save_dynamics` wrote.

    Raises:
        FileNotFoundError: no report is there.
        FileProblem: it is damaged, cut short, of another kind, or of a newer format.
    """
    return read_report(folder, DYNAMICS_REPORT, _dynamics_report_of)


def _dynamics_report_of(document: Mapping[str, Any], subspaces: dict[str, Subspace]) -> DynamicsReport:
    return DynamicsReport(
        **shared_fields(document, Settings),
        windows=build(Windows, document["windows"]),
        points=tuple(point_of(one) for one in document["points"]),
        early=tuple(build(Measurement, one) for one in document["early"]),
        late=tuple(build(Measurement, one) for one in document["late"]),
        updates=tuple(build(UpdateEnergy, one) for one in document["updates"]),
        subspaces=subspaces,
    )
