"""Early and late: who is in which, and what has no answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangent_lens.dynamics.windows import early_and_late

LOG_SPACED = (0, 1, 2, 4, 8, 16, 32, 64, 100)


def test_by_step_on_even_checkpoints():
    windows = early_and_late(range(0, 101, 10))
    assert (windows.early, windows.late) == ((0, 10, 20, 30), (70, 80, 90, 100))
    assert [windows.of(step) for step in (30, 40, 70)] == ["early", "", "late"]


def test_by_step_and_by_count_differ_on_log_spaced_checkpoints():
    assert early_and_late(LOG_SPACED).early == (0, 1, 2, 4, 8, 16)
    assert early_and_late(LOG_SPACED).late == (100,)
    by_count = early_and_late(LOG_SPACED, by="count")
    assert (by_count.early, by_count.late) == ((0, 1, 2), (32, 64, 100))


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=30, unique=True), st.sampled_from(["step", "count"]))
def test_windows_are_disjoint_ends(steps, by):
    try:
        windows = early_and_late(steps, by=by)
    except ValueError:
        # Only a late part can be empty by step: of checkpoints that all come early. The last one is always late.
        assert by == "step" or len(steps) < 4
        return
    assert not set(windows.early) & set(windows.late)
    assert max(windows.early) < min(windows.late)
    assert max(steps) in windows.late and min(steps) in windows.early


@pytest.mark.parametrize(
    ("steps", "options", "words"),
    [
        ((5,), {}, "1 checkpoint"),
        ((90, 100), {}, "no checkpoint is early.*by='count'"),
        ((0, 10), {"early": 0.6, "late": 0.6}, "do not overlap"),
        ((0, 10), {"early": 0}, "above 0"),
        ((0, 10), {"by": "loss"}, "'step' or 'count'"),
    ],
)
def test_what_has_no_answer_is_told(steps, options, words):
    with pytest.raises(ValueError, match=words):
        early_and_late(steps, **options)
