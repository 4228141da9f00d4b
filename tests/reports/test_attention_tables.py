"""The tables of attention scores show the numbers of the result, at every width, for any number of heads."""

from __future__ import annotations

import ast
import dataclasses
import io
import math
import re
import statistics
from pathlib import Path

import pytest
from attention_examples import buckets, layer_of, report_of, unknown_head
from rich.console import Console

import tangent_lens as tln
from tangent_lens.measures.attention import SHARES
from tangent_lens.reports import attention_tables
from tangent_lens.reports.console import as_html, as_text
from tangent_lens.reports.numbers import number, p_value, percent, whole_percent

WIDTHS = (80, 100, 116, 160)
PARTS = ("centre", "tangent", "normal")


@pytest.fixture(scope="module")
def attention_report():
    return report_of(layer_of(number) for number in (0, 1, 5))


@pytest.fixture(scope="module")
def measured():
    """Of a real run on a tiny model."""
    import numpy as np
    from conftest import tiny_model

    sequences = np.random.default_rng(0).integers(2, 100, size=(16, 12)).tolist()
    axes = {"distance_edges": (1, 4), "frequency_buckets": 3, "scaling": True}
    return tln.Lens(tiny_model("llama")).attention(sequences, rank=3, progress=False, **axes)


def rows_of(shown: str, label: str) -> list[list[str]]:
    """The rows with this label, one a table, in their order."""
    return [line.split() for line in shown.splitlines() if re.match(rf"\s+{re.escape(label)}\s", line)]


def named(row: list[str]) -> list[str]:
    return [word for word in row if "×" in word]


def ordered_shares(one) -> list[str]:
    medians = {name: one.summary[name].median for name in SHARES}
    return sorted(medians, key=lambda name: -abs(medians[name]))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("heads", [1, 4, 12, 64])
@pytest.mark.parametrize(
    "view", [lambda report: report, lambda report: report.by_head(), lambda report: report.layers[0]]
)
def test_nothing_is_wider_than_the_console_nor_cut(width, heads, view):
    report = report_of([layer_of(0, heads), unknown_head(layer_of(31, heads)), layer_of(104, heads)])
    shown = as_text(view(report), width=width)
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= width
    assert "…" not in shown


@pytest.mark.parametrize("width", WIDTHS)
def test_a_real_report_fits(measured, width):
    for view in (measured, measured.by_head(), measured.layer(1)):
        shown = as_text(view, width=width)
        assert "…" not in shown and not re.search(r"\bnan", shown)
        assert max(len(line.rstrip()) for line in shown.splitlines()) <= width


def test_the_row_of_a_layer_holds_medians_and_range_over_its_heads(attention_report):
    one = attention_report.layer(0)
    expected = ["0", percent(statistics.median(one.dominance))]
    expected.append(f"{100 * min(one.dominance):.0f}–{100 * max(one.dominance):.0f}%")
    expected += [percent(statistics.median(one.random_mean)), "4/4", percent(one.variance_baseline)]
    expected += [number(statistics.median(one.kl)), number(statistics.median(one.random_kl_mean))]
    for name in ordered_shares(one)[:2]:
        expected += [name.replace("_", "×"), whole_percent(one.summary[name].median)]
    assert rows_of(as_text(attention_report, 116), "0")[0] == expected


def test_narrow_consoles_name_one_share_and_star_what_random_normals_do_not_reach(attention_report):
    shown = as_text(attention_report, 80)
    for layer, star in ((0, "*"), (1, ""), (5, "")):
        row, one = rows_of(shown, str(layer))[0], attention_report.layer(layer)
        assert row[1] == percent(one.summary["dominance"].median) + star
        assert named(row) == [ordered_shares(one)[0].replace("_", "×")]
    assert "p≤" not in rows_of(shown, "layer")[0]


def test_wide_consoles_show_all_nine_shares(attention_report):
    row = rows_of(as_text(attention_report, 160), "5")[0]
    one = attention_report.layer(5)
    assert row[-9:] == [whole_percent(one.summary[f"{query}_{key}"].median) for query in PARTS for key in PARTS]


def test_a_bias_has_a_share_of_its_own_where_there_is_one():
    one = layer_of(0)
    biased = dataclasses.replace(one, shares={**one.shares, "bias": (0.5,) * 4})
    assert rows_of(as_text(report_of([biased]), 160), "0")[0][-1] == "50%"
    assert "bias" not in "".join(rows_of(as_text(report_of([one]), 160), "layer")[0])


def test_p_counts_heads_or_says_the_largest_where_controls_are_too_few(attention_report):
    assert rows_of(as_text(attention_report, 100), "1")[0][4] == "3/4"
    few = report_of([layer_of(0, controls=5)])
    shown = as_text(few, 100)
    assert "max p" in shown
    assert rows_of(shown, "0")[0][4] == p_value(1 / 6)


def test_medians_close_the_table(attention_report):
    middle = statistics.median(one.summary["dominance"].median for one in attention_report.layers)
    assert rows_of(as_text(attention_report, 100), "median")[0][1] == percent(middle)


def test_every_head_has_a_row(attention_report):
    shown = as_text(attention_report.by_head(), 160)
    one = attention_report.layer(5)
    for head in range(4):
        (row,) = rows_of(shown, f"5.{head}")
        expected = [percent(one.dominance[head]), percent(one.random_mean[head]), p_value(one.p_value[head])]
        expected += [percent(one.variance_baseline), number(one.kl[head]), number(one.random_kl_mean[head])]
        assert row[1:7] == expected
        assert row[7:] == [whole_percent(one.shares[f"{query}_{key}"][head]) for query in PARTS for key in PARTS]


def test_a_layer_shows_itself_head_by_head(attention_report):
    one = attention_report.layer(1)
    shown = as_text(one, 116)
    assert "attention scores of layer 1: 4 heads, 1,000 query rows, 32,000 pairs, 20 random normals" in shown
    first, axes = rows_of(shown, "2")[:2]
    assert first[1] == percent(one.dominance[2])
    assert axes[1:5] == [percent(value) for value in one.by_distance.dominance[2]]


def test_heads_without_numbers_are_dashes_and_left_out_of_medians():
    one = unknown_head(layer_of(0))
    shown = as_text(report_of([one]), 116)
    assert not re.search(r"\bnan", shown)
    assert rows_of(shown, "0")[0][1] == percent(statistics.median(one.dominance[1:]))
    (row,) = rows_of(as_text(report_of([one]).by_head(), 80), "0.0")
    assert row[1:3] == ["–", "–"] and row[-1] == "–"
    all_unknown = dataclasses.replace(one, dominance=(math.nan,) * 4)
    assert rows_of(as_text(report_of([all_unknown]), 116), "0")[0][1:3] == ["–", "–"]


def test_a_layer_without_baseline_or_number_shows_a_dash():
    one = layer_of(None, variance_baseline=None)
    shown = as_text(report_of([one]), 116)
    row = rows_of(shown, "–")[0]
    assert row[5] == "–"
    assert "layer –" in as_text(one, 100)


def test_the_axes_show_medians_over_heads_where_they_were_measured(attention_report):
    one = attention_report.layer(5)
    row = rows_of(as_text(attention_report, 100), "5")[2]
    columns = [list(zip(*axis.dominance, strict=True)) for axis in (one.by_distance, one.by_frequency)]
    assert row[1:] == [percent(statistics.median(values)) for axis in columns for values in axis]
    shown = as_text(report_of([layer_of(0, axes=False)]), 160)
    for title in ("key distance", "frequency", "radius", "Exponents", "Below"):
        assert title not in shown


def test_exponents_stand_beside_the_theory_with_their_errors(attention_report):
    shown = as_text(attention_report, 100)
    assert "TT (theory 2)  TN, NT (theory 3)  NN (theory 4)" in shown
    scaling = attention_report.layer(0).scaling
    row = rows_of(shown, "0")[3]
    for place, name in enumerate(("tangent_tangent", "mixed", "normal_normal")):
        medians = [statistics.median(of[name]) for of in (scaling.exponent, scaling.standard_error)]
        assert row[1 + 3 * place : 4 + 3 * place] == [f"{medians[0]:.2f}", "±", f"{medians[1]:.2f}"]


def test_a_slope_of_two_radii_is_not_shown():
    one = layer_of(0)
    unsure = {**one.scaling.standard_error, "mixed": (math.nan,) * 4}
    scaling = dataclasses.replace(one.scaling, standard_error=unsure)
    row = rows_of(as_text(report_of([dataclasses.replace(one, scaling=scaling)]), 100), "0")[3]
    assert row[4] == "–" and len(row) == 1 + 3 + 1 + 3


def test_buckets_that_do_not_fit_stand_below_one_another():
    import numpy as np

    many = [f"{start}-{start + 99}" for start in range(1000, 3000, 100)]
    one = layer_of(0, by_distance=buckets("key distance", many, 4, np.random.default_rng(0)))
    shown = as_text(report_of([one]), 80)
    assert all(label in shown for label in many)
    expected = [percent(statistics.median(values)) for values in zip(*one.by_distance.dominance, strict=True)]
    found = [cell for row in rows_of(shown, "0")[2:] for cell in row[1:]]
    assert found[: len(expected)] == expected


def test_the_header_says_what_was_measured_and_how_exactly_the_parts_add_up(attention_report):
    text = " ".join(as_text(attention_report, 160).split())
    for part in (
        "[tiny] model, revision step7",
        "numbers [1]: proxies from 12 sequences (1,200 rows), scores of 13 others (1,287 query rows)",
        "rank 3, 20 random normals, seed 4",
        "within 3e-07 of the largest",
    ):
        assert part in text
    settings = dataclasses.replace(
        attention_report.settings, skip_first=True, skip_special=True, center=False, rank=0.5
    )
    text = " ".join(as_text(report_of(attention_report.layers, settings=settings), 160).split())
    assert "rank for 50.0% of the variance (k = 3 to 3)" in text
    assert "seed 4, first positions left out, special tokens left out, not centred" in text


def test_the_header_says_where_the_random_normals_were_measured_on_fewer_rows():
    fewer = layer_of(0, random_rows=(256,) * 4)
    assert "20 random normals on 256 of the query rows, seed 4" in " ".join(as_text(report_of([fewer]), 160).split())


def test_warnings_are_shown(attention_report):
    assert "warning  position 0 holds 96%" in as_text(attention_report, 120)


def test_repr_html_and_show_agree(attention_report, capsys):
    attention_report.show(width=100)
    assert capsys.readouterr().out.rstrip() == as_text(attention_report, width=100).rstrip()
    html = attention_report._repr_html_()
    assert html == as_html(attention_report)
    assert html.startswith("<pre") and "background-color" in html


def test_significance_is_coloured(attention_report):
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="standard")
    console.print(attention_report)
    shown = console.file.getvalue()
    for layer, coloured in ((0, True), (1, False)):
        median = percent(attention_report.layer(layer).summary["dominance"].median)
        assert bool(re.search(rf"\x1b\[1;32m\s*{median}", shown)) == coloured


def test_reports_of_attention_compute_nothing_but_medians():
    """They import nothing that could: no numpy, no torch, and of the measures only names, results and the median."""
    allowed = {"PARTS", "SHARES", "THEORY", "AttentionDominance", "AttentionScaling", "DominanceByBucket", "Spread"}
    allowed |= {"AttentionHeads", "AttentionReport", "AttentionSettings"}
    for path in Path(attention_tables.__file__).parent.glob("attention_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not {alias.name for alias in node.names} & {"numpy", "torch", "scipy", "statistics"}, path.name
            if isinstance(node, ast.ImportFrom) and "measures" in (node.module or ""):
                assert {alias.name for alias in node.names} <= allowed, path.name
