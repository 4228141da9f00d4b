"""Which steps are due, and how much time they may take."""

from __future__ import annotations

import time

import pytest

from tangent_lens.dynamics.schedule import ListedSteps, LogSpaced, check_share, schedule_of, seconds_allowed


def first_steps(schedule, at_most):
    """All due steps up to one."""
    found, step = [], schedule.after(-1)
    while step is not None and step <= at_most:
        found.append(step)
        step = schedule.after(step)
    return found


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (LogSpaced(), [0, 1, 2, 4, 8, 16, 32, 64]),
        (LogSpaced(factor=1.5), [0, 1, 2, 3, 4, 6, 9, 14, 21, 32, 48, 72]),
        (LogSpaced(every=10), [0, 1, 2, 4, 8, 16, 26, 36, 46, 56, 66, 76]),
        (LogSpaced(every=1), list(range(81))),
        (ListedSteps((64, 3, 3)), [3, 64]),
    ],
)
def test_due_steps(schedule, expected):
    assert first_steps(schedule, 80) == expected


@pytest.mark.parametrize("schedule", [LogSpaced(), LogSpaced(1.01), LogSpaced(every=7), ListedSteps((0, 5, 40))])
def test_the_next_due_step_from_anywhere_is_the_one_that_counting_finds(schedule):
    due = first_steps(schedule, 300)
    for step in range(-1, 40):
        assert schedule.after(step) == next(one for one in due if one > step)


def test_a_late_step_is_found_at_once():
    began = time.perf_counter()
    assert LogSpaced(every=2).after(10**9) == 10**9 + 2
    assert time.perf_counter() - began < 0.1


def test_after_the_last_listed_step_nothing_is_due():
    assert ListedSteps((2, 5)).after(5) is None


def test_what_a_person_asks_for():
    assert schedule_of(None) == LogSpaced()
    assert schedule_of([5, 1]) == ListedSteps((1, 5))
    assert schedule_of(range(2)) == ListedSteps((0, 1))
    assert schedule_of(LogSpaced(3.0)) == LogSpaced(3.0)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: LogSpaced(factor=1), "factor 1 must be above 1"),
        (lambda: LogSpaced(factor=float("nan")), "factor nan"),
        (lambda: LogSpaced(every=0), "every 0 must be 1 step or more"),
        (lambda: schedule_of([]), "must name one training step"),
        (lambda: schedule_of([-1, 4]), r"steps \(-1, 4\)"),
        (lambda: check_share(5), "budget 5 must be a share"),
        (lambda: check_share(0.0), "budget 0.0"),
    ],
)
def test_what_means_nothing_is_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_seconds_allowed():
    assert seconds_allowed(0.05, 100, None) == pytest.approx(5)
    # Half of the rest ahead at the beginning, nothing more than the share at the end.
    assert seconds_allowed(0.05, 0, 100) == pytest.approx(2.5)
    assert seconds_allowed(0.05, 50, 100) == pytest.approx(3.75)
    assert seconds_allowed(0.05, 100, 100) == pytest.approx(5)
    assert seconds_allowed(0.05, 120, 100) == pytest.approx(6)
