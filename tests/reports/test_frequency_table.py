"""The tables of a report by token frequency show its numbers, at every width."""

from __future__ import annotations

import dataclasses
import re

import pytest
from frequency_examples import frequency_report

from tangent_lens.reports.console import as_text
from tangent_lens.reports.numbers import number, percent


def lines_of(report, width):
    return as_text(report, width).splitlines()


def row(report, width, first):
    """Words of the lines that begin with a site."""
    return [line.split() for line in lines_of(report, width) if line.split()[:1] == [first]]


@pytest.mark.parametrize("width", [80, 100, 140, 160])
def test_nothing_is_cut_and_all_correlations_stand_there(width):
    report = frequency_report()
    shown = lines_of(report, width)
    assert all(len(line) <= width for line in shown)
    assert "…" not in "".join(shown)
    for name, _, spread in report.spreads:
        words = row(report, width, name)[0]
        for found in (spread.raw, spread.corrected):
            for one in (found.pearson, found.spearman):
                assert f"{one.estimate:+.2f}" in [word.rstrip("*") for word in words]


def test_more_room_brings_intervals():
    report = frequency_report()
    one = report.of("resid_post.7").spread
    pearson, spearman = (
        f"{found.low:.2f} to {found.high:.2f}" for found in (one.corrected.pearson, one.corrected.spearman)
    )
    texts = {width: re.sub(" +", " ", as_text(report, width)) for width in (100, 120, 160)}
    assert pearson not in texts[100]
    assert pearson in texts[120] and spearman not in texts[120]
    assert pearson in texts[160] and spearman in texts[160]


def test_raw_and_corrected_are_told_apart_and_the_bias_is_said():
    shown = " ".join(as_text(frequency_report(), 100).split())
    assert "raw corrected" in shown
    assert "biased upwards, most for rare tokens: the mean is fitted to the same n rows" in shown
    assert "raw corr." in " ".join(as_text(frequency_report(), 80).split())


def test_stars_stand_where_p_is_small():
    report = frequency_report()
    spread = report.of("resid_post.2").spread
    faint = dataclasses.replace(spread.raw.pearson, p_value=0.2)
    raw = dataclasses.replace(spread.raw, pearson=faint)
    site = dataclasses.replace(report.sites[0], spread=dataclasses.replace(spread, raw=raw))
    changed = dataclasses.replace(report, sites=(site, report.sites[1]))
    assert spread.raw.pearson.p_value < 0.05
    estimate = f"{faint.estimate:+.2f}"
    assert row(report, 100, "resid_post.2")[0][2] == f"{estimate}*"
    assert row(changed, 100, "resid_post.2")[0][2] == estimate


def test_energies_of_every_bucket():
    report = frequency_report()
    found = report.of("resid_post.7").enrichment
    lifts = [number(one.lift) for one in found.buckets]
    assert row(report, 80, "resid_post.7")[1] == ["resid_post.7", number(found.lift), *lifts]
    wide = row(report, 160, "resid_post.7")[1]
    assert wide[1 : 2 + len(lifts)] == [number(found.lift), *lifts]
    assert wide[-len(lifts) :] == [percent(one.energy_share) for one in found.buckets]
    counts = [line.split()[-2:] for line in lines_of(report, 100) if re.match(r" +\d  ", line)]
    assert counts == [[str(one.tokens), str(one.rows)] for one in found.buckets]


def test_a_bucket_without_gradient_shows_a_dash():
    report = frequency_report()
    found = report.sites[0].enrichment
    empty = dataclasses.replace(found.buckets[1], energy=None, lift=None, expected_random=None)
    changed = dataclasses.replace(found, buckets=(found.buckets[0], empty, *found.buckets[2:]))
    site = dataclasses.replace(report.sites[0], enrichment=changed)
    assert row(dataclasses.replace(report, sites=(site,)), 80, "resid_post.2")[1][3] == "–"
    assert "–" in as_text(changed)


def test_header_and_warnings():
    shown = as_text(frequency_report(), 200)
    for part in (
        "[tiny] model",
        "numbers [0]: 20 sequences, 300 tokens, 40 different ones; frequencies counted there",
        "rank 3, proxies from 10 sequences, gradients from 10 others (next-token loss), tokens of 3 rows or more, seed 0",
        "a sentence to read first",
    ):
        assert part in shown
    settings = dataclasses.replace(frequency_report().settings, frequencies="given", skip_first=True)
    changed = as_text(frequency_report(settings=settings), 200)
    assert "frequencies given" in changed and "first positions left out" in changed


def test_the_parts_have_tables_of_their_own():
    one = frequency_report().sites[0]
    shown = str(one.enrichment)
    assert "gradients at resid_post.2: along 3 of 12 directions" in shown
    for bucket in one.enrichment.buckets:
        assert percent(bucket.energy) in shown and percent(bucket.expected_random) in shown
    correlation = str(one.spread.raw)
    assert "spearman" in correlation and f"{one.spread.raw.pearson.estimate:+.2f}" in correlation
    assert "<pre" in one.spread.raw._repr_html_()
