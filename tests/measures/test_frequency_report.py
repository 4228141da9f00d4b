"""What a run by token frequency reports: the correlations of the spreads it was given, points within bounds, frames."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from frequency_examples import frequency_report, spread_of

from tangent_lens.measures.frequency import TokenFrequencies, TokenSpread, frequency_correlation
from tangent_lens.measures.frequency_measure import spread_tokens
from tangent_lens.measures.frequency_report import spread_correlations

COUNTS = TokenFrequencies(np.arange(1, 41) ** 2)


def test_correlations_are_of_the_numbers_that_their_names_say():
    spread = spread_of(COUNTS)
    found = spread_correlations(spread, COUNTS)
    log = np.log(COUNTS.counts / COUNTS.counts.sum())
    distance = spread.mean_distance
    corrected = distance * np.sqrt(spread.occurrences / (spread.occurrences - 1))
    for name, values in (
        ("raw", distance),
        ("corrected", corrected),
        ("variance", spread.mean_square - distance**2),
    ):
        expected = frequency_correlation(log, values)
        assert getattr(found, name).pearson == expected.pearson, name
        assert getattr(found, name).spearman.estimate == pytest.approx(expected.spearman.estimate), name
    assert found.raw.pearson.estimate != pytest.approx(found.corrected.pearson.estimate, abs=1e-3)
    assert found.tokens == 40 and found.rows == spread.occurrences.sum()
    assert found.mean == pytest.approx(corrected.mean())


def test_all_points_are_kept_of_a_few():
    spread = spread_of(COUNTS)
    points = spread_correlations(spread, COUNTS, most=40).points
    assert points.tokens.tolist() == list(range(40)) and len(points) == 40
    assert points.distance.tolist() == spread.mean_distance.tolist()
    assert points.log_frequency.tolist() == COUNTS.log(range(40)).tolist()


def test_of_many_the_seed_chooses_and_the_correlation_is_of_all():
    spread = spread_of(COUNTS)
    first, again, other = (spread_correlations(spread, COUNTS, seed=seed, most=9) for seed in (1, 1, 2))
    chosen = first.points.tokens
    assert len(set(chosen.tolist())) == 9 and chosen.tolist() == again.points.tokens.tolist()
    assert chosen.tolist() != other.points.tokens.tolist()
    assert first.points.corrected.tolist() == spread.corrected_distance[chosen].tolist()
    assert first.raw.pearson.n == first.tokens == 40


def test_a_spread_of_one_pass_is_refused():
    spread = spread_of(COUNTS)
    once = TokenSpread("here", spread.tokens, spread.occurrences, spread.mean_square)
    with pytest.raises(ValueError, match="needs a second pass"):
        spread_correlations(once, COUNTS)


class TestTokens:
    def test_are_those_seen_often_enough_that_have_a_frequency(self):
        given = COUNTS.counts.copy()
        given[[38, 2]] = 0
        assert spread_tokens(COUNTS, COUNTS, 1300).tolist() == [36, 37, 38, 39]
        assert spread_tokens(COUNTS, TokenFrequencies(given), 1200).tolist() == [34, 35, 36, 37, 39]

    @pytest.mark.parametrize(
        ("known", "fewest", "message"),
        [
            (COUNTS, 1, "min_count 1 must be 2 or more"),
            (COUNTS, 1400, "3 tokens occur 1400 times or more, and a correlation with its interval needs 4"),
            (COUNTS, 9999, "no token has a count of 9999 or more"),
            (TokenFrequencies(np.ones(8)), 4, "token 39 of the texts is outside the 8 that have a frequency"),
        ],
    )
    def test_too_few_are_refused(self, known, fewest, message):
        with pytest.raises(ValueError, match=message):
            spread_tokens(COUNTS, known, fewest)


class TestReport:
    def test_one_row_a_site_a_number_and_a_method(self):
        report = frequency_report()
        frame = report.to_pandas()
        assert len(frame) == (2 + 1) * 3 * 2
        row = frame[(frame.site == "resid_post.7") & (frame.number == "corrected") & (frame.method == "spearman")]
        expected = report.of("resid_post.7").spread.corrected.spearman
        assert row[["estimate", "low", "high", "p_value", "n"]].to_numpy().tolist() == [
            [expected.estimate, expected.low, expected.high, expected.p_value, expected.n]
        ]
        assert set(frame.site) == {"resid_post.2", "resid_post.7", "trajectory"}

    def test_buckets_and_points_as_frames(self):
        report = frequency_report()
        buckets = report.buckets()
        assert buckets[buckets.site == "resid_post.7"].lift.tolist() == [
            one.lift for one in report.of("resid_post.7").enrichment.buckets
        ]
        points = report.points()
        assert len(points) == sum(len(spread.points) for _, _, spread in report.spreads) == 120

    def test_a_run_without_checkpoints_has_no_trajectory(self):
        report = dataclasses.replace(frequency_report(), trajectory=None)
        assert [name for name, _, _ in report.spreads] == ["resid_post.2", "resid_post.7"]

    def test_names_what_it_holds(self):
        with pytest.raises(KeyError, match=r"resid_post.3 was not measured; measured: resid_post.2, resid_post.7"):
            frequency_report().of("resid_post.3")

    def test_cannot_be_changed(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            frequency_report().created = ""
