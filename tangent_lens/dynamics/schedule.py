"""When to look at a training run: log-spaced steps, and a share of its time that is not exceeded."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class Schedule(Protocol):
    """Which training steps are due."""

    def after(self, step: int) -> int | None:
        """The first due step after this one (-1 is before the first); None when there is none any more."""
        ...


@dataclass(frozen=True)
class LogSpaced:
    """Steps 0, 1, 2, 4, 8, ...: each ``factor`` times the one before, and never more than ``every`` steps after it.

    Attributes:
        factor: above 1; 2 by default.
        every: longest gap, for looking as closely at the end of a run as at its beginning; None for none.

    Raises:
        ValueError: a factor that does not grow, or a gap below one step.
    """

    factor: float = 2.0
    every: int | None = None

    def __post_init__(self) -> None:
        if not self.factor > 1:
            raise ValueError(f"factor {self.factor} must be above 1, for example 2: steps 1, 2, 4, 8, ...")
        if self.every is not None and self.every < 1:
            raise ValueError(f"every {self.every} must be 1 step or more, or None for no longest gap")

    def after(self, step: int) -> int | None:
        """The first due step after this one."""
        due = 0
        while due <= step:
            due = self._following(due, step)
        return due

    def _following(self, due: int, step: int) -> int:
        grown = max(due + 1, round(due * self.factor))
        if self.every is None or grown <= due + self.every:
            return grown
        # From here on every gap is the longest one, so that a late step need not be counted up to.
        return due + self.every * max(1, (step - due) // self.every)


@dataclass(frozen=True)
class ListedSteps:
    """Exactly these steps.

    Raises:
        ValueError: none, or a step below 0.
    """

    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(sorted({int(step) for step in self.steps})))
        if not self.steps or self.steps[0] < 0:
            raise ValueError(f"steps {self.steps} must name one training step or more, from 0 on")

    def after(self, step: int) -> int | None:
        """The first due step after this one."""
        place = bisect.bisect_right(self.steps, step)
        return self.steps[place] if place < len(self.steps) else None


def schedule_of(steps: Schedule | Iterable[int] | None) -> Schedule:
    """What a person asked for: a schedule, steps one by one, or None for 0, 1, 2, 4, 8, ...

    Raises:
        ValueError: no steps.
    """
    if steps is None:
        return LogSpaced()
    return ListedSteps(tuple(steps)) if isinstance(steps, Iterable) else steps


def check_share(share: float | None) -> None:
    """Refuse a share of the training time that is none.

    Raises:
        ValueError: outside (0, 1).
    """
    if share is not None and not 0 < share < 1:
        raise ValueError(f"budget {share} must be a share of the training time such as 0.05, or None for no limit")


def seconds_allowed(share: float, trained: float, whole: float | None) -> float:
    """How many seconds of measuring a run has earned so far.

    Args:
        share: of the training time.
        trained: seconds of training so far, without measuring.
        whole: seconds the whole training will take, as far as one can tell; None if its end is not known. Half of what is
            still to come may be spent ahead, since most log-spaced steps come early.
    """
    ahead = 0.0 if whole is None else max(whole - trained, 0.0) / 2
    return share * (trained + ahead)
