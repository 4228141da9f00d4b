"""Tables show the numbers of the result, at every width, in every place."""

import dataclasses
import io
import math
import re

import pytest
from rich.console import Console

import tangent_lens as tln
from tangent_lens.reports import tables
from tangent_lens.reports.console import TerminalProgress, as_html, as_text


def lines_of(report, width):
    return as_text(report, width=width).splitlines()


def row_of(report, width, label, occurrence=0):
    rows = [line for line in lines_of(report, width) if re.match(rf"\s+{label}\s", line)]
    return rows[occurrence].split()


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_nothing_is_wider_than_the_console_nor_cut(report, width):
    for line in lines_of(report, width):
        assert len(line.rstrip()) <= width
    body = "\n".join(line for line in lines_of(report, width) if re.match(r"\s+(\d+|median)\s", line))
    assert "…" not in body


def test_the_row_of_a_layer_holds_the_numbers_of_its_measurements(report):
    residual, attention, mlp = (report.of(name).energy for name in ("resid_post.1", "attention.1", "mlp.1"))
    expected = ["1"]
    for energy in (residual, attention, mlp):
        expected += [tables.percent(energy.energy), tables.number(energy.lift)]
        if energy.signal_lift is not None:
            expected.append(tables.number(energy.signal_lift))
        expected.append(tables.p_value(energy.p_value))
    assert row_of(report, 100, "1") == expected


def test_the_isotropy_row_holds_its_measurements(report):
    space = next(space for space in report.spaces if space.site == "resid_post.2")
    expected = ["2", tables.small(space.iso_score), tables.percent(space.variance_share)]
    for name in ("resid_post.2", "attention.2", "mlp.2"):
        test = report.of(name).isotropy
        expected += [tables.small(test.score), tables.thousandths(test.delta), tables.p_value(test.p_value)]
    assert row_of(report, 100, "2", occurrence=1) == expected


def test_a_wide_console_shows_the_other_controls(report):
    assert "/trail" in as_text(report, width=160)
    assert "/trail" not in as_text(report, width=120)
    assert tables.number(report.of("mlp.0").energy.following_ratio) in row_of(report, 160, "0")


def test_medians_close_the_table(report):
    lifts = sorted(report.of(f"resid_post.{layer}").energy.lift for layer in range(3))
    assert tables.number(lifts[1]) in row_of(report, 100, "median")


def test_the_header_says_what_was_measured_and_escapes_markup(report):
    text = " ".join(as_text(report, width=160).split())
    assert "[tiny] model, revision step7" in text
    for part in ("transformers", "weights as stored", "float64", "numbers", "12 sequences", "rank 3", "seed 4"):
        assert part in text


def test_warnings_are_shown(report):
    warned = dataclasses.replace(report, warnings=("position 0 holds 96% of the variance",))
    assert "warning  position 0 holds 96%" in as_text(warned, width=120)


@pytest.mark.parametrize(
    ("p", "q", "starred"), [(1 / 21, 1 / 21, True), (1 / 21, 0.2, False), (1 / 21, None, True), (0.5, None, False)]
)
def test_significance_is_a_star_where_p_has_no_room(report, p, q, starred):
    """Corrected over the layers; of reports that know no correction, the single test's."""
    first = report.of("attention.0")
    energy = dataclasses.replace(first.energy, p_value=p, lift=3.21)
    one = dataclasses.replace(first, energy=energy, energy_q_value=q)
    shown = as_text(dataclasses.replace(report, measurements=(one,)), width=80)
    assert ("3.21*" in shown) == starred


def test_significance_is_a_colour_where_p_has_room(report):
    first = report.of("attention.0")
    strong = dataclasses.replace(
        first, energy=dataclasses.replace(first.energy, p_value=1 / 21, lift=3.21), energy_q_value=1 / 21
    )
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="standard")
    console.print(dataclasses.replace(report, measurements=(strong,)))
    assert re.search(r"\x1b\[1;32m\s*3\.21", console.file.getvalue())


def test_a_residual_only_report_has_no_weight_columns(report):
    residual = tuple(one for one in report.measurements if one.gradient == "residual")
    shown = as_text(dataclasses.replace(report, measurements=residual), width=120)
    assert "residual gradient" in shown
    assert "attention weights" not in shown


def test_several_residual_sites_of_a_layer_have_a_row_each(report):
    one = report.of("resid_post.0")
    other = dataclasses.replace(one, name="resid_pre.0", kind="resid_pre", site="resid_pre.0")
    shown = as_text(dataclasses.replace(report, measurements=(other, *report.measurements)), width=140)
    assert re.search(r"^\s+resid_pre\.0\s", shown, re.MULTILINE)
    assert re.search(r"^\s+resid_post\.0\s", shown, re.MULTILINE)


def test_every_single_map_has_a_row(report):
    console = Console(file=io.StringIO(), width=120)
    console.print(report.maps())
    shown = console.file.getvalue()
    for kind in ("query", "key", "value", "mlp_in", "mlp_gate"):
        assert f"{kind}.2" in shown


def test_small_results_have_tables(report):
    one = report.of("query.1")
    assert tables.number(one.energy.lift) in repr(one.energy)
    assert "signal lift" in repr(one.energy)
    assert "signal lift" not in repr(report.of("resid_post.1").energy)
    assert "change, tangent" in repr(one.isotropy)
    assert "participation ratio" in repr(report.spaces[0].spectrum)
    undetermined = dataclasses.replace(one.energy, trailing=None)
    assert "not determined" in repr(undetermined)


def test_repr_and_html_and_show_agree(report, capsys):
    report.show(width=100)
    printed = capsys.readouterr().out
    assert printed.rstrip() == as_text(report, width=100)
    html = report._repr_html_()
    assert html.startswith("<pre") and "attention weights" in html
    assert as_html(report) == html


def test_unknown_results_have_no_table():
    with pytest.raises(TypeError, match="int has no table"):
        tables.table_of(3)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (tables.percent(0.77153), "77.2%"),
        (tables.percent(0.00041), "0.041%"),
        (tables.number(118.19), "118"),
        (tables.number(22.07), "22.1"),
        (tables.number(1.0329), "1.03"),
        (tables.number(0.047), "0.047"),
        (tables.number(84481.8), "8.4e+04"),
        (tables.number(math.inf), "∞"),
        (tables.number(None), "–"),
        (tables.p_value(1 / 21), ".048"),
        (tables.p_value(1.0), "1"),
        (tables.p_value(1 / 2001), "5e-04"),
        (tables.small(0.352), ".352"),
        (tables.small(0.00085), "8.5e-4"),
        (tables.thousandths(0.0222), "+22.2"),
        (tables.thousandths(-0.00045), "-0.45"),
    ],
)
def test_numbers_read_well(shown, expected):
    assert shown == expected


def test_progress_shows_speed_and_leaves_nothing_behind():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    progress = TerminalProgress(console)
    progress.start("gradients", total=100, unit="tokens")
    progress.advance(50)
    progress.advance(50, note="loss 3.2")
    progress.finish()
    progress.finish()
    assert "gradients" in console.file.getvalue()
    assert progress._display is None


def test_no_progress_where_there_is_no_terminal(monkeypatch):
    from tangent_lens.reports import console

    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert console.terminal_progress() is None


def test_pandas_has_one_row_a_measurement_and_the_same_numbers(report):
    frame = report.to_pandas()
    assert len(frame) == len(report.measurements)
    row = frame[frame.name == "key.2"].iloc[0]
    assert row.lift == report.of("key.2").energy.lift
    assert row.delta_iso_random == report.of("key.2").isotropy.random_mean
    assert isinstance(report, tln.Report)


def test_titles_name_the_maps_that_were_measured(report):
    kept = tuple(one for one in report.measurements if one.pooled or one.kind in ("query", "mlp_in"))
    shown = as_text(dataclasses.replace(report, measurements=kept), width=120)
    assert "attention weights (q)" in shown
    assert "MLP weights (in)" in shown


def test_long_labels_cost_columns_and_no_digits(report):
    one = report.of("resid_post.0")
    long = dataclasses.replace(one, name="query.0 (residual)", kind="query")
    shown = as_text(dataclasses.replace(report, measurements=(*report.measurements, long)), width=100)
    rows = [line for line in shown.splitlines() if "query.0 (residual)" in line]
    assert rows and not any("…" in row for row in rows)


def test_a_share_of_variance_is_shown_with_its_ranks(report):
    shared = dataclasses.replace(report, settings=dataclasses.replace(report.settings, rank=0.9))
    assert "for 90.0% of the variance (k = 3 to 3)" in " ".join(as_text(shared, width=160).split())


def test_single_measurements_and_maps_show_themselves(report):
    assert "signal lift" in repr(report.of("query.1")) and "change, tangent" in repr(report.of("query.1"))
    assert "mlp_gate.2" in repr(report.maps())
