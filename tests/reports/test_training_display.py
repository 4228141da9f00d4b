"""The live display of a training."""

from __future__ import annotations

import io

import pytest
from conftest import tiny_model
from plain_reference import random_tokens
from rich.console import Console

from tangent_lens.dynamics.recorder import TangentRecorder
from tangent_lens.reports.numbers import number
from tangent_lens.reports.training_display import TrainingDisplay, point_line, points_table, sparkline


@pytest.fixture(scope="module")
def points():
    recorder = TangentRecorder(random_tokens(6, 10, seed=5), rank=3, controls=5, budget=None)
    model = tiny_model("llama")
    for step in (0, 1000):
        recorder.step(model, step)
    return recorder.points


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], "▁▂▃▄▅▆▇█"),
        ([8, 1], "█▁"),
        ([5, 5, 5], "▁▁▁"),
        ([], ""),
        ([1, float("nan"), 2], "▁ █"),
        ([float("inf")], " "),
    ],
)
def test_sparkline(values, expected):
    assert sparkline(values) == expected


def test_sparkline_of_many_values_is_their_means():
    assert sparkline([0, 2, 4, 4, 7, 9], width=3) == "▁▄█"
    assert len(sparkline(list(range(1000)), width=40)) == 40


def test_sparkline_on_a_logarithmic_scale():
    assert sparkline([1, 10, 100], logarithmic=True) == "▁▅█" or sparkline([1, 10, 100], logarithmic=True) == "▁▄█"
    assert sparkline([1, 10, 100])[1] == "▂"
    assert sparkline([0, 1, 10], logarithmic=True) == " ▁█"


def test_piped_output_is_one_line_a_point(points):
    console = Console(file=io.StringIO(), width=60)
    with TrainingDisplay(1000, 64, console) as display:
        for point in points:
            display.step(3.0)
            display.point(point)
    lines = console.file.getvalue().splitlines()
    assert lines == [point_line(point) for point in points]
    assert lines[1].startswith(f"step 1,000: held-out loss {points[1].loss:.2f}, weight lift ")


@pytest.mark.parametrize("steps", [1000, None])
def test_the_live_display_shows_losses_lifts_and_points(points, steps):
    console = Console(file=io.StringIO(), width=110, height=30, force_terminal=True, color_system=None)
    with TrainingDisplay(steps, 64, console) as display:
        for loss in (7.0, 5.0, 3.0):
            display.step(loss)
        for point in points:
            display.point(point)
    last = console.file.getvalue().split("training  step")[-1]
    assert last.startswith(" 3 of 1,000" if steps else " 3, ")
    assert ("left" in last) == (steps is not None)
    assert "▁" in last and "tokens/s" in last and "measuring" in last
    for point in points:
        assert number(point.medians["weight_lift"]) in last
    assert "1,000" in last


def test_an_exception_ends_the_display(points):
    console = Console(file=io.StringIO(), force_terminal=True)
    with pytest.raises(KeyboardInterrupt), TrainingDisplay(10, 64, console) as display:
        display.step(1.0)
        raise KeyboardInterrupt
    # The cursor is shown again.
    assert console.file.getvalue().rstrip().endswith("\x1b[?25h")


def test_only_what_was_measured_is_shown():
    recorder = TangentRecorder(random_tokens(6, 10, seed=5), rank=3, controls=5, gradients="residual")
    point = recorder.step(tiny_model("llama"), 0)
    assert "weight" not in point_line(point) and "residual lift" in point_line(point)
    console = Console(file=io.StringIO(), width=100)
    console.print(points_table([point]))
    assert "–" in console.file.getvalue()
