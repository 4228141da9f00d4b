"""The tables of local geometry show its numbers, at every width."""

from __future__ import annotations

import dataclasses
import re

import pytest
from geometry_examples import (
    BUCKETS,
    bucket_geometry,
    clouds_at,
    depth_of,
    every_bucket,
    geometry_report,
    geometry_run,
    gradients_of,
    straight,
    undetermined,
)

from tangent_lens.measures.curvature_visibility import visibility_by_concentration
from tangent_lens.reports.columns import evenly
from tangent_lens.reports.console import as_text
from tangent_lens.reports.geometry_tables import m_line, other_choices_of
from tangent_lens.reports.numbers import number, percent, whole_percent

WIDTHS = [80, 100, 120, 160]
SWEEP = visibility_by_concentration((1.0, 0.2), (1, 3, 10), 1.0, directions=100)


def joined(result, width=100):
    """The text with every run of blanks as one."""
    return " ".join(as_text(result, width).split())


def rows(result, width, first):
    """Words of the lines that begin with it."""
    return [words[1:] for line in as_text(result, width).splitlines() if (words := line.split())[:1] == [first]]


def everywhere(result, width, first):
    """All words that stand behind it in any table."""
    return [word for words in rows(result, width, first) for word in words]


def without_dots():
    """A report none of whose tokens is an ellipsis."""
    report = geometry_report()
    texts = tuple(text.replace("…", ".") for text in BUCKETS[1].texts)
    return dataclasses.replace(report, buckets=(BUCKETS[0], dataclasses.replace(BUCKETS[1], texts=texts)))


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_cut(width):
    order = bucket_geometry("all", clouds_at(3), sensitivity=True)
    parts = (order.order, order.curvature, order.seen, depth_of((3, 9)), SWEEP)
    for result in (without_dots(), geometry_run(), gradients_of(True), gradients_of(False), *parts):
        shown = as_text(result, width)
        assert "…" not in shown.replace("'…'", "")
        assert all(len(line) <= width for line in shown.splitlines())


@pytest.mark.parametrize("width", WIDTHS)
def test_growth_and_bending_of_every_site(width):
    report = geometry_report()
    for site in report.sites:
        one, words = site.everything, everywhere(report, width, site.site)
        chosen = one.order.chosen
        for shown in (str(chosen.m), f"{chosen.tangent.exponent:.2f}", f"{chosen.normal.exponent:.2f}"):
            assert shown in words
        for shown in (
            percent(chosen.normal_share),
            whole_percent(chosen.above_floor.floor),
            number(one.curvature.bend),
        ):
            assert shown in words
        assert whole_percent(one.curvature.explained) in words
        assert percent(one.curvature.arc_excess) in words


def test_intervals_stand_where_there_is_room():
    report = geometry_report()
    chosen = report.sites[0].everything.order.chosen
    exponents = [f"{one.low:.2f} to {one.high:.2f}" for one in (chosen.tangent, chosen.normal, chosen.above_floor)]
    floor = f"{whole_percent(chosen.above_floor.floor_low)} to {whole_percent(chosen.above_floor.floor_high)}"
    row = {width: " ".join(rows(report, width, "resid_post.3")[0]) for width in (80, 120, 160)}
    assert not any(one in row[80] for one in exponents)
    assert all(one in row[120] for one in exponents)
    assert all(one in row[160] for one in (*exponents, floor))


@pytest.mark.parametrize("width", WIDTHS)
def test_numbers_by_bucket(width):
    report = geometry_report()
    for site in report.sites:
        words = everywhere(report, width, site.site)
        for one in site.buckets:
            assert number(one.order.radius / site.everything.order.radius) in words
            assert f"{one.order.chosen.normal.exponent:.2f}" in words
            assert percent(one.order.chosen.normal_share) in words
            assert number(one.curvature.curvature) in words
            assert percent(one.curvature.arc_excess) in words
            assert one.seen.ratio is None or number(one.seen.ratio) in words


def test_one_bucket_needs_no_table_of_its_own():
    report = geometry_report()
    alone = dataclasses.replace(report, buckets=BUCKETS[:1])
    assert "by bucket" in joined(report) and "by bucket" not in joined(alone)


def test_token_texts_are_escaped_and_seen():
    shown = as_text(geometry_report(), 160)
    for text in ("' or'", "'[/bold]'", r"'\n'", "' [red]of'"):
        assert text in shown
    assert re.search(r"1 +60 to 70 +3 ", shown) and re.search(r"2 +71 to 900 +3 ", shown)


def test_a_long_token_is_folded_rather_than_cut():
    long = dataclasses.replace(BUCKETS[0], texts=("x" * 200, "a", "b"))
    shown = as_text(geometry_report(buckets=(long, BUCKETS[1])), 80)
    assert shown.count("x") >= 200
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_an_exponent_that_is_not_determined_stands_in_brackets():
    report = every_bucket(geometry_report(), undetermined)
    words = rows(report, 80, "resid_post.3")[0]
    assert "(1.35)" in words
    assert "0.10 to 4.00" not in joined(report, 160)
    assert rows(report, 80, "median")[0][3] == "–"
    assert "In brackets: not determined" in joined(report)


def test_what_is_not_there_is_a_dash():
    report = every_bucket(geometry_report(), straight)
    words = rows(report, 80, "resid_post.3")[0]
    chosen = report.sites[0].everything.order.chosen
    assert words == ["2", f"{chosen.tangent.exponent:.2f}", "–", "0%", "–", "–"]
    shown = joined(report)
    assert "far/near" not in shown and "other m" not in shown


def test_noise_and_the_floor_are_explained():
    shown = joined(geometry_report())
    assert "A normal exponent near 1 is what noise gives" in shown
    assert "near 100%, the growing part is seen in the outermost rows only" in shown
    assert "Theory: 1 and 2 on a smooth manifold" in shown


def test_sensitivity_shows_medians_over_the_sites():
    report = geometry_report()
    choices = [other_choices_of(site.everything.order) for site in report.sites]
    for name in ("as chosen", "m = 1", "m doubled"):
        found = [one[name].tangent.exponent for one in choices]
        (line,) = [line for line in as_text(report, 160).splitlines() if line.strip().startswith(name)]
        assert f"{sum(found) / 2:.2f}" in line
        assert f"{min(found):.2f} to {max(found):.2f}" in line


def test_choices_are_found_by_their_numbers():
    order = geometry_report().sites[0].everything.order
    found = other_choices_of(order)
    assert found["as chosen"] is order.chosen
    assert (found["m doubled"].m, found["m = 1"].m, found["m halved"].m) == (4, 1, 1)
    assert found["nearest halved"].nearest == 0.5
    assert other_choices_of(dataclasses.replace(order, others=()))["m doubled"] is None


@pytest.mark.parametrize("width", WIDTHS)
def test_a_degenerate_tangent_gradient_catches_the_eye(width):
    report = geometry_report()
    assert "tangent gradient degenerate" in " ".join(rows(report, width, "query.3")[0])
    other = report.gradients[1].order
    assert rows(report, width, "query.3")[0][:4] == ["1", "9", "of", "9"]
    words = everywhere(report, width, "mlp_in.3")
    for shown in (number(other.median_ratio), f"{other.tangent_rows.slope.exponent:.2f}"):
        assert shown in words
    for shown in (f"{other.tangent_mean.exponent:.2f}", f"{other.normal_mean.exponent:.2f}"):
        assert shown in words


def test_the_ratio_of_a_few_tokens_is_not_shown_beside_a_degenerate_verdict():
    report = geometry_report()
    first = report.gradients[0]
    told = dataclasses.replace(gradients_of(False).tokens[0], ratio=77.7)
    order = dataclasses.replace(first.order, tokens=(told, *first.order.tokens[1:]))
    changed = dataclasses.replace(report, gradients=(dataclasses.replace(first, order=order),))
    assert order.median_ratio == 77.7
    words = rows(changed, 100, "query.3")[0]
    assert words[:7] == ["1", "8", "of", "9", "tangent", "gradient", "degenerate"]
    assert "77.7" not in words


def test_the_verdict_is_in_colour():
    assert re.search(
        r'style="[^"]*font-weight: bold[^"]*">tangent gradient degenerate', gradients_of(True)._repr_html_()
    )


def test_why_an_exponent_is_missing_is_said_once():
    order = gradients_of(False)
    without = dataclasses.replace(order, normal_mean=dataclasses.replace(order.normal_mean, exponent=None, reason="so"))
    report = geometry_report()
    maps = tuple(dataclasses.replace(one, order=without) for one in report.gradients)
    assert "no exponent of the mean normal gradient at query.3, mlp_in.3: so" in joined(
        dataclasses.replace(report, gradients=maps)
    )
    assert "no exponent of the mean normal gradient: so" in joined(without)


@pytest.mark.parametrize("width", WIDTHS)
def test_depth(width):
    report = geometry_report()
    depth = report.depth
    for place, site in enumerate(depth.sites):
        one, words = depth.geometries[place], everywhere(report, width, site)
        for shown in (number(one.two_nn), number(one.mle), number(one.effective_rank), percent(one.linearity)):
            assert shown in words
        assert percent(one.agreement.agreement) in words
        assert f"{depth.overlap_first[place].overlap:.2f}" in words
        assert f"{depth.overlap_last[place].overlap:.2f}" in words
    assert "–" in rows(report, width, "resid_post.3")[-1]


def test_parts_that_were_not_asked_for_have_no_section():
    shown = joined(geometry_report(gradients=(), depth=None))
    assert "weight gradients" not in shown and "TwoNN" not in shown and "degenerate" not in shown
    assert "growth of both parts" in shown and "a sentence to read first" in shown


def test_header_and_warnings():
    shown = as_text(geometry_report(), 200)
    for part in (
        "[tiny] model",
        "numbers [0]: 20 sequences, 3,000 tokens; of 8 that occur often enough 6 were measured, 360 rows at every site",
        "1.50 MB in all",
        "m = 2, tangent spaces from half of a token's rows, 60 occurrences a token, seed 0, first positions left out",
    ):
        assert part in shown
    assert shown.splitlines()[-1].startswith("warning  a sentence to read first")


def test_the_rule_for_m_is_said_with_what_it_came_to():
    assert m_line("participation_ratio", [4, 6, 5]) == "m by participation ratio (m = 4 to 6)"
    assert m_line(0.9, [3, 3]) == "m for 90.0% of the variance (m = 3)"
    assert m_line(7, [7]) == "m = 7"


def test_an_m_that_the_rows_do_not_determine_is_told():
    report = geometry_report()
    site = dataclasses.replace(report.sites[0], wanted_m=31)
    changed = dataclasses.replace(report, sites=(site, report.sites[1]))
    assert rows(changed, 80, "resid_post.3")[0][0] == "2/31"
    assert rows(changed, 80, "resid_post.9")[0][0] == "2"
    assert "the dimension that the rule asks for" in joined(changed)
    assert "the dimension that the rule asks for" not in joined(report)


def test_some_of_many():
    assert evenly("abcde", 3) == ["a", "c", "e"]
    assert evenly("ab", 3) == ["a", "b"]
    assert evenly("abc", 1) == ["a"]


def test_growth_alone():
    order = bucket_geometry("common [words]", clouds_at(3), sensitivity=True).order
    shown = joined(order, 160)
    assert "common [words]: 6 tokens, 360 rows of 8 dimensions" in shown
    for one in (order.chosen, *order.others):
        assert f"{one.tangent.low:.2f} to {one.tangent.high:.2f}" in shown
        assert f"{one.normal.exponent:.2f} {one.normal.low:.2f} to {one.normal.high:.2f}" in shown
    assert shown.count("nearest 50%") == 1


def test_curvature_alone():
    found = bucket_geometry("all", clouds_at(3))
    curvature = joined(found.curvature)
    assert f"{number(found.curvature.curvature)} ({number(found.curvature.curvature_low)} to" in curvature
    assert whole_percent(found.curvature.explained) in curvature and percent(found.curvature.arc_excess) in curvature
    alone = dataclasses.replace(found.curvature, curvature_low=None, curvature_high=None)
    assert "curvature 1.0" in joined(alone) and f"{number(alone.curvature)} (" not in joined(alone)
    seen = found.seen
    assert f"{number(seen.ratio)} ({number(seen.low)} to {number(seen.high)})" in joined(seen)


def test_curvature_below_the_noise_has_no_ratio():
    seen = dataclasses.replace(bucket_geometry("all", clouds_at(3)).seen, near=-0.2, ratio=None, low=None, high=None)
    shown = joined(seen)
    assert "far / near –" in shown and "-0.20" in shown and "none above noise" in shown


def test_gradients_alone_begin_with_the_verdict():
    vanishing, other = gradients_of(True), gradients_of(False)
    assert as_text(vanishing, 100).splitlines()[0] == "tangent gradient degenerate in 9 of 9 tokens"
    assert as_text(other, 100).splitlines()[0] == other.verdict
    assert "8 of 9 tokens; to_pandas() has all" in joined(other)
    assert number(other.tokens[0].ratio) in rows(other, 100, "0")[0]
    assert "degenerate" in rows(vanishing, 100, "0")[0]
    assert vanishing.tokens[0].why in joined(vanishing, 160)


def test_what_concentration_hides():
    for concentration, one in zip(SWEEP.concentrations, SWEEP.results, strict=True):
        words = rows(SWEEP, 80, f"{concentration:g}")[0]
        numbers = [f"{value:.4f}" for value in (one.ratio, one.predicted_ratio, one.top_ratio)]
        assert words == [number(one.mean_square_radius), *numbers]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_run_has_a_row_a_step_of_a_few_sites(width):
    run = geometry_run()
    shown = as_text(run, width).splitlines()
    named = [line for line in shown if line in run.sites]
    assert named == ["resid_post.3", "resid_post.7", "resid_post.9"]
    assert "3 of 4, evenly apart" in joined(run)
    before, last = run.overlaps("resid_post.9")[1]
    words = [words for words in rows(run, width, "10") if f"{last.overlap:.2f}" in words][-1]
    assert words[-2:] == [f"{before.overlap:.2f}", f"{last.overlap:.2f}"]
    assert len(rows(run, width, "1,000")) == len(rows(run, width, "10")) >= 3
    chosen = run.points[2].report.of("resid_post.9").everything.order.chosen
    assert any(f"{chosen.tangent.exponent:.2f}" in words for words in rows(run, width, "1,000"))


def test_a_run_says_its_steps_and_warnings():
    run = geometry_run()
    shown = as_text(run, 160)
    assert "a [run]: 3 checkpoints, steps 0 to 1,000" in shown
    assert "warning  a sentence to read first" in shown
    first = dataclasses.replace(run.points[0], report=dataclasses.replace(run.points[0].report, warnings=("once",)))
    assert "warning  step 0: once" in as_text(dataclasses.replace(run, points=(first, *run.points[1:])), 160)


def test_a_run_without_depth_has_no_neighbours():
    run = geometry_run(depth=False)
    shown = joined(run)
    assert "neighbours kept" not in shown and "TwoNN" not in shown
    assert "above a floor" in shown
