"""The tables of training runs show the numbers of the report, at every width, whatever was measured."""

from __future__ import annotations

import dataclasses
import itertools
import re
import statistics

import pytest
from dynamics_examples import STEPS, at_later_steps, run_report

import tangent_lens as tln
from tangent_lens.dynamics.report import KINDS, of_kind
from tangent_lens.reports.console import as_html, as_text
from tangent_lens.reports.dynamics_tables import NAMES
from tangent_lens.reports.numbers import number, p_value, percent, small, thousandths

WIDTHS = (80, 90, 100, 116, 130, 160)


def shown(report, width: int) -> str:
    return as_text(report, width)


def section(text: str, heading: str) -> list[list[str]]:
    """The words of the lines that follow a heading, up to the next empty ones after its rows."""
    lines = text.splitlines()
    start = next(place for place, line in enumerate(lines) if heading in line)
    found, rule = [], False
    for line in lines[start + 1 :]:
        rule = rule or "──" in line
        if rule and not line.strip():
            break
        if rule and "──" not in line:
            found.append(line.split())
    return found


@pytest.fixture(scope="module")
def whole():
    return run_report()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "options",
    [{}, {"refit": False, "dimensions": False}, {"gradients": "residual"}, {"gradients": "weight"}, {"layers": 9}],
    ids=str,
)
def test_nothing_is_cut_at_any_width(options, width):
    for report in (run_report(**options), at_later_steps(run_report(**options))):
        text = shown(report, width)
        assert "…" not in text
        assert max(len(line) for line in text.splitlines()) <= width
        assert ("own proxy" in text) == options.get("refit", True)
        assert ("TwoNN" in text) == options.get("dimensions", True)


def test_the_header_says_what_was_read_and_which_steps_are_early(whole):
    text = " ".join(shown(whole, 160).split())
    assert "tiny/[run]" in text and "numbers: proxies from 8 sequences" in text
    assert "8, steps 0 to 10; 4 early (0 to 3), 3 late (8 to 10): first 30% and last 30% by step" in text
    assert "rank 3, 19 random normals, seed 4" in text


def test_early_stands_beside_late_as_in_table_1(whole):
    rows = section(shown(whole, 160), "early and late in training")
    summary = whole.summary()
    assert len(rows) == len(KINDS) == 3 and len(summary) == 6
    for row, kind in zip(rows, KINDS, strict=True):
        expected = NAMES[kind].split()
        for one in (one for one in summary if one.kind == kind):
            signal = "–" if one.signal_lift is None else number(one.signal_lift)
            expected += [
                percent(one.energy),
                number(one.lift),
                number(one.trailing_ratio),
                p_value(one.p_value),
                signal,
            ]
            expected += [thousandths(one.delta_iso), thousandths(one.delta_iso_random), p_value(one.delta_iso_p_value)]
        assert row == expected
    assert rows[0][2:10] != rows[0][10:]


def test_stars_take_the_place_of_p_where_there_is_no_room(whole):
    rows = section(shown(whole, 80), "early and late in training")
    summary = {(one.kind, one.window): one for one in whole.summary()}
    starred = [summary[kind, window].p_value <= 0.05 for kind in KINDS for window in ("early", "late")]
    assert [row[place].endswith("*") for row in rows for place in (1, 5)] == starred
    assert True in starred
    deltas = [summary[kind, window].delta_iso_p_value <= 0.05 for kind in KINDS for window in ("early", "late")]
    assert [row[place].endswith("*") for row in rows for place in (4, 8)] == deltas
    assert {True, False} == set(deltas)


def test_every_layer_has_a_row_and_medians_stand_below(whole):
    rows = section(shown(whole, 160), "residual early")
    assert [row[0] for row in rows] == ["0", "1", "2"]
    early, late = of_kind(whole.early, "mlp"), of_kind(whole.late, "mlp")
    for row, before, after in zip(rows, early, late, strict=True):
        # After the label: lift, p and Δ of early and late, of residual, attention and MLP; then the overlap.
        assert row[13] == number(before.energy.lift) and row[16] == number(after.energy.lift)
        assert row[18] == thousandths(after.isotropy.delta)
        overlap = whole.points[-1].overlaps[f"resid_post.{row[0]}"]
        assert row[19] == f"{overlap:.2f}" and 0 < overlap < 0.99
    medians = next(line for line in shown(whole, 160).splitlines() if line.strip().startswith("median")).split()
    assert medians[1] == number(statistics.median(one.energy.lift for one in of_kind(whole.early, "residual")))


def test_narrow_consoles_get_lifts_and_changes_one_below_the_other(whole):
    text = shown(whole, 80)
    assert text.index("Δ early") > text.index(" early   late")
    rows = section(text, "Δ early")
    assert len(rows) == 3
    assert rows[1][1].rstrip("*") == thousandths(of_kind(whole.early, "residual")[1].isotropy.delta)


def test_the_run_has_a_row_a_checkpoint(whole):
    rows = section(shown(whole, 130), "along the run")
    assert [row[0] for row in rows] == [str(step) for step in STEPS]
    assert [row[1] for row in rows] == ["early"] * 4 + ["–"] + ["late"] * 3
    for row, point in zip(rows, whole.points, strict=True):
        lifts = [
            number(statistics.median(one.energy.lift for one in of_kind(measured, kind)))
            for measured in (point.measurements, point.refitted)
            for kind in KINDS
        ]
        spaces = [space for space in point.spaces if space.site.startswith("resid_post")]
        assert len(spaces) == 3 < len(point.spaces)
        shape = [
            small(statistics.median(space.iso_score for space in spaces)),
            number(statistics.median(space.spectrum.effective_rank for space in spaces)),
            number(statistics.median(point.dimensions[space.site] for space in spaces)),
        ]
        overlap = f"{statistics.median(point.overlaps.values()):.2f}"
        assert row[2:] == [f"{point.loss:.3f}", *lifts, overlap, *shape]


def test_of_a_long_run_evenly_chosen_rows_are_shown_and_said(whole):
    points = tuple(dataclasses.replace(whole.points[1], step=step) for step in range(101))
    text = shown(dataclasses.replace(whole, points=points), 130)
    rows = section(text, "along the run")
    steps = [int(row[0]) for row in rows]
    assert len(steps) == 24 and (steps[0], steps[-1]) == (0, 100)
    assert {after - before for before, after in itertools.pairwise(steps)} <= {4, 5}
    assert "24 of 101 checkpoints" in text


def test_the_embedding_has_a_row_a_bucket(whole):
    rows = section(shown(whole, 100), "updates of the embedding")
    early = [one for one in whole.updates if one.window == "early"]
    late = [one for one in whole.updates if one.window == "late"]
    assert len(rows) == len(early) == len(late) > 2
    assert [rows[0][0], rows[1][0], rows[-1][0]] == ["all", "rarest", "commonest"]
    for row, *moved in zip(rows, early, late, strict=True):
        expected = [text for one in moved for text in (percent(one.share), percent(one.energy), number(one.lift))]
        assert row[3:] == expected
    assert "updates of the embedding" not in shown(dataclasses.replace(whole, updates=()), 100)


def test_warnings_and_html(whole):
    warned = dataclasses.replace(whole, warnings=("one [position] rules",))
    assert "warning  one [position] rules" in shown(warned, 100)
    assert "along the run" in as_html(whole)


class TestSeveralModels:
    def test_one_row_a_model_in_a_table_a_kind(self, whole):
        other = run_report(model="tiny/other", gradients="residual")
        table = tln.dynamics_table([whole, other])
        text = as_text(table, 160)
        residual, weights = section(text, "residual gradient"), section(text, "attention weights")
        assert [row[0] for row in residual] == ["[run]", "other"]
        early = next(one for one in whole.summary() if (one.window, one.kind) == ("early", "attention"))
        assert weights[0][1:3] == [percent(early.energy), number(early.lift)]
        assert set(weights[1][1:]) == {"–"}
        assert "warning" not in text

    @pytest.mark.parametrize("width", WIDTHS)
    def test_nothing_is_cut(self, whole, width):
        text = as_text(tln.dynamics_table([whole, at_later_steps(whole)]), width)
        assert "…" not in text and max(len(line) for line in text.splitlines()) <= width

    def test_models_of_one_name_are_told_apart_by_its_rest(self, whole):
        model = dataclasses.replace(whole.model, name="mine/[run]")
        table = tln.dynamics_table([whole, dataclasses.replace(whole, model=model)])
        assert table.names == ("tiny/[run]", "mine/[run]")

    @pytest.mark.parametrize("width", WIDTHS)
    def test_the_models_of_the_paper_fit(self, whole, width):
        long = ("almanach/ModernCamemBERT-base", "HuggingFaceTB/SmolLM2-1.7B-intermediate-checkpoints", "a/" + 40 * "x")
        reports = [dataclasses.replace(whole, model=dataclasses.replace(whole.model, name=name)) for name in long]
        text = as_text(tln.dynamics_table(reports), width)
        assert max(len(line) for line in text.splitlines()) <= width
        rows = section(text, "residual gradient")
        lifts = [one.lift for one in whole.summary() if one.kind == "residual"]
        assert [row[0] for row in rows[:2]] == ["ModernCamemBERT-base", "SmolLM2-1.7B"]
        for row in rows:
            assert {number(lift) for lift in lifts} <= {word.rstrip("*") for word in row}
            assert "…" not in "".join(row[1:])

    def test_a_run_of_folders_is_called_by_the_folder_that_holds_them(self, whole):
        saved = dataclasses.replace(whole, model=dataclasses.replace(whole.model, name="/runs/mine/step 10"))
        assert tln.dynamics_table([saved]).names == ("mine",)
        assert tln.dynamics_table([saved, whole, saved]).names == ("mine (1)", "[run]", "mine (2)")

    def test_runs_of_other_settings_are_warned_of(self, whole):
        changed = dataclasses.replace(whole, settings=dataclasses.replace(whole.settings, rank=4))
        text = " ".join(as_text(tln.dynamics_table([whole, changed]), 160).split())
        assert re.search(r"warning these runs have different ranks: 3, 4$", text)

    def test_numbers_as_a_table(self, whole):
        frame = tln.dynamics_table([whole]).to_pandas()
        assert len(frame) == 6
        row = frame[(frame.kind == "mlp") & (frame.window == "late")].iloc[0]
        assert row.lift == next(one.lift for one in whole.summary() if (one.window, one.kind) == ("late", "mlp"))

    def test_none_is_an_error(self):
        with pytest.raises(ValueError, match="no report was given; pass reports that measure_checkpoints returned"):
            tln.dynamics_table([])
