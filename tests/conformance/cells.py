"""One cell: a family in a library of one version, and whether tangent_lens reads it right there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from conformance.backends import NotOffered, library_of
from conformance.judging import LIBRARY_DIFFERS, NOT_OFFERED, OK, REFUSED, WRONG, Check, Judge
from conformance.places import lacking
from conformance.refusals import Crashed, Refused, or_refused

from tangent_lens.lens import Lens

_COMPARED = ("activation", "gradient", "weight gradients", "loss")


@dataclass(frozen=True)
class Cell:
    """All checks of one family in one library.

    Attributes:
        sentence: why it is not offered or refused, how the library differs, or what is wrong.
        lacks: what the contract gives and this model lacks, and why.
    """

    family: str
    backend: str
    library: str
    verdict: str
    sentence: str = ""
    checks: tuple[Check, ...] = field(default=())
    lacks: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def error(self) -> float | None:
        """The worst of all float64 comparisons with the reference."""
        wide = (check for check in self.checks if check.name.startswith(_COMPARED) and "float32" not in check.name)
        return max((check.error for check in wide if check.error is not None), default=None)

    @property
    def refused(self) -> dict[str, str]:
        """What of it tangent_lens refuses, and how."""
        return self._with_outcome(REFUSED)

    @property
    def library_fails(self) -> dict[str, str]:
        """Where the library itself is wrong or falls over, and how."""
        return self._with_outcome(LIBRARY_DIFFERS)

    @property
    def wrong(self) -> dict[str, str]:
        """What is wrong, and how."""
        return self._with_outcome(WRONG)

    def _with_outcome(self, outcome: str) -> dict[str, str]:
        return {check.name: check.detail for check in self.checks if check.outcome == outcome}


def run_cell(name: str, backend: str, lens_of: Callable[[Any], Any] = Lens) -> Cell:
    """Every check of a cell.

    Args:
        lens_of: what stands for tangent_lens; tests put a broken one here.
    """
    identity, note = (name, backend, library_of(backend)), ""
    try:
        judge = Judge(name, backend, torch.float64, lens_of)
    except NotOffered as reason:
        try:
            judge, note = Judge(name, backend, torch.float32, lens_of), f"float64: {reason}"
        except NotOffered:
            return Cell(*identity, NOT_OFFERED, str(reason))
    if not judge.library_is_right(judge.alone):
        size = judge.library_error(judge.alone).size
        return Cell(*identity, LIBRARY_DIFFERS, f"its logits are off by {size:.0e} of the largest")
    try:
        lens = or_refused(lens_of, judge.hosted.model)
    except Refused as refusal:
        return Cell(*identity, REFUSED, str(refusal))
    except Crashed as crash:
        return Cell(*identity, WRONG, f"Lens(model) crashed: {crash}")
    fallen = (Check("library float64", LIBRARY_DIFFERS, detail=note),) if note else ()
    checks = (*fallen, *judge.checks(lens))
    wrong = [f"{check.name}: {check.detail}" for check in checks if check.outcome == WRONG]
    return Cell(*identity, WRONG if wrong else OK, "; ".join(wrong), checks, lacking(lens, name))
