"""Which checkpoints are early, and which are late."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

EARLY, LATE = "early", "late"


@dataclass(frozen=True)
class Windows:
    """The two ends of a training run.

    Attributes:
        early, late: their steps.
        said: how they were cut, in words.
    """

    early: tuple[int, ...]
    late: tuple[int, ...]
    said: str

    def of(self, step: int) -> str:
        """``early``, ``late``, or "" between."""
        return EARLY if step in self.early else LATE if step in self.late else ""


def early_and_late(steps: Sequence[int], early: float = 0.3, late: float = 0.3, *, by: str = "step") -> Windows:
    """The checkpoints of the first and of the last part of training.

    Args:
        steps: of all checkpoints, rising.
        early, late: shares of the training.
        by: ``step``: up to this share of the last step; ``count``: this share of the checkpoints. On checkpoints at
            log-spaced steps, ``count`` makes "early" mean the untrained model.

    Raises:
        ValueError: shares that overlap, or a part without a checkpoint.

    Source: the paper (arXiv 2604.08764) takes the first and the last 30 % of training.
    """
    if by not in ("step", "count"):
        raise ValueError(f"by {by!r} must be 'step' or 'count'")
    if not (early > 0 and late > 0 and early + late <= 1):
        raise ValueError(
            f"early {early} and late {late} must be shares above 0 that do not overlap, such as 0.3 and 0.3"
        )
    ordered = sorted(steps)
    if len(ordered) < 2:
        raise ValueError(f"{len(ordered)} checkpoint has no early and late part; give two or more")
    if by == "count":
        first, last = math.ceil(early * len(ordered)), math.ceil(late * len(ordered))
        parts = ordered[:first], ordered[-last:]
    else:
        end = ordered[-1]
        parts = [one for one in ordered if one <= early * end], [one for one in ordered if one >= (1 - late) * end]
    for name, part, share in zip((EARLY, LATE), parts, (early, late), strict=True):
        if not part:
            raise ValueError(
                f"no checkpoint is {name}: steps {ordered[0]} to {ordered[-1]}, of which the {share:.0%} at this end hold none; "
                "take a larger share, by='count', or more checkpoints"
            )
    if set(parts[0]) & set(parts[1]):
        raise ValueError("the same checkpoint is early and late; take smaller shares or more checkpoints")
    return Windows(tuple(parts[0]), tuple(parts[1]), f"first {early:.0%} and last {late:.0%} by {by}")
