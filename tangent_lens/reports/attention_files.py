"""Reports of attention scores on disk: the folder of every report, under a kind of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tangent_lens.measures.attention import AttentionDominance
from tangent_lens.measures.attention_report import AttentionReport, AttentionSettings
from tangent_lens.reports.files import ATTENTION_REPORT, build, read_report, shared_fields, spaces_of
from tangent_lens.subspaces.subspace import Subspace


def load_attention_report(folder: str | os.PathLike[str]) -> AttentionReport:
    """Read what ``save_report`` wrote of attention scores.

    Raises:
        FileNotFoundError: no report is there.
        FileProblem: it is damaged, cut short, of another kind, or of a newer format.
    """
    return read_report(folder, ATTENTION_REPORT, _attention_report_of)


def _attention_report_of(document: Mapping[str, Any], subspaces: dict[str, Subspace]) -> AttentionReport:
    return AttentionReport(
        **shared_fields(document, AttentionSettings),
        spaces=spaces_of(document),
        layers=tuple(build(AttentionDominance, one) for one in document["layers"]),
        worst_sum=float(document["worst_sum"]),
        subspaces=subspaces,
    )
