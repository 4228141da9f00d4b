"""Energy along a tangent proxy, bucket of frequency by bucket."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from explicit import PROPERTY, array, energy, random_frame, random_rows
from hypothesis import given
from hypothesis import strategies as some

from tangent_lens.measures.attention_run import frequency_buckets
from tangent_lens.measures.energy import energy_test
from tangent_lens.measures.enrichment import FrequencyBuckets, tangent_enrichment
from tangent_lens.measures.frequency import TokenFrequencies, token_frequencies
from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.moments import SecondMoments
from tangent_lens.recording.token_sums import BucketSums
from tangent_lens.subspaces.subspace import Subspace

COUNTS = TokenFrequencies(np.array([4, 1, 0, 2, 8, 1, 16]))
TOKENS = torch.from_numpy(np.random.default_rng(3).integers(0, 7, size=400))
ROWS = random_rows(400, 9)
BASIS = random_frame(9, 2)


def gathered(buckets, rows=ROWS, tokens=TOKENS, basis=BASIS):
    sums = BucketSums(basis, buckets.bucket_of, name="here")
    sums.update(rows, tokens)
    return sums


class TestBuckets:
    def test_of_equal_mass(self):
        buckets = FrequencyBuckets.by_mass(COUNTS, 2)
        assert buckets.bucket_of.tolist() == [0, 0, -1, 0, 0, 0, 1]
        assert buckets.mass == pytest.approx((0.5, 0.5)) and buckets.tokens == (5, 1)
        assert buckets.low == pytest.approx((1 / 32, 0.5)) and buckets.high == pytest.approx((0.25, 0.5))

    def test_between_edges(self):
        edges = [math.log(1.5 / 32), math.log(8 / 32), math.log(0.9)]
        buckets = FrequencyBuckets.by_edges(COUNTS, edges)
        assert buckets.bucket_of.tolist() == [1, 0, -1, 1, 2, 0, 2]
        assert buckets.tokens == (2, 2, 2) and len(buckets) == 3

    @PROPERTY
    @given(some.lists(some.integers(0, 50), min_size=1, max_size=60).filter(any), some.integers(1, 9))
    def test_rise_and_keep_equal_frequencies_together(self, counts, number):
        frequencies = TokenFrequencies(np.array(counts))
        buckets = FrequencyBuckets.by_mass(frequencies, number)
        place = buckets.bucket_of.numpy()
        assert 1 <= len(buckets) <= number and sum(buckets.mass) == pytest.approx(1)
        assert sorted(set(place[place >= 0])) == list(range(len(buckets)))
        assert ((place < 0) == (np.array(counts) == 0)).all()
        assert all(high < low for high, low in zip(buckets.high, buckets.low[1:], strict=False))

    @PROPERTY
    @given(some.lists(some.integers(0, 50), min_size=1, max_size=60).filter(any), some.integers(1, 9))
    def test_hold_the_tokens_whose_middle_lies_there_in_exact_arithmetic(self, counts, number):
        total = sum(counts)
        below = {count: Fraction(sum(other for other in counts if other < count), total) for count in set(counts) - {0}}
        middle = {count: start + Fraction(count * counts.count(count), 2 * total) for count, start in below.items()}
        place = {count: min(int(one * number), number - 1) for count, one in middle.items()}
        used = sorted(set(place.values()))
        expected = [used.index(place[count]) if count else -1 for count in counts]
        found = FrequencyBuckets.by_mass(TokenFrequencies(np.array(counts)), number)
        assert found.bucket_of.tolist() == expected

    @PROPERTY
    @given(some.lists(some.integers(0, 9), min_size=30, max_size=60), some.integers(1, 5))
    def test_are_those_of_the_attention_measures(self, tokens, number):
        corpus = Corpus.from_tokens([tokens])
        places, _ = frequency_buckets(corpus.sequences, 10, number)
        found = FrequencyBuckets.by_mass(token_frequencies(corpus, 10), number)
        assert torch.equal(found.bucket_of, places)

    def test_refuse_what_makes_none(self):
        with pytest.raises(ValueError, match="0 buckets hold nothing"):
            FrequencyBuckets.by_mass(COUNTS, 0)
        for edges in ([], [1.0, 1.0], [2.0, 1.0], [math.nan]):
            with pytest.raises(ValueError, match="finite numbers in rising order"):
                FrequencyBuckets.by_edges(COUNTS, edges)


class TestEnrichment:
    def test_is_the_energy_of_each_buckets_rows_alone(self):
        buckets = FrequencyBuckets.by_mass(COUNTS, 3)
        found = tangent_enrichment(gathered(buckets), buckets)
        assert len(found.buckets) == 3 and found.left_out == int((TOKENS == 2).sum()) > 0
        total = float(ROWS[TOKENS != 2].square().sum())
        for place, one in enumerate(found.buckets):
            own = ROWS[buckets.bucket_of[TOKENS] == place]
            expected = energy(own.T @ own, BASIS)
            assert one.rows == len(own) > 10 and one.tokens == buckets.tokens[place]
            assert one.energy == pytest.approx(expected, rel=1e-12)
            assert one.lift == pytest.approx(expected * 7 / (2 * (1 - expected)), rel=1e-10)
            assert one.energy_share == pytest.approx(float((array(own) ** 2).sum()) / total, rel=1e-12)
        assert sum(one.energy_share for one in found.buckets) == pytest.approx(1)
        assert sum(one.energy_share * one.energy for one in found.buckets) == pytest.approx(found.energy)

    def test_of_one_bucket_is_the_energy_test(self):
        buckets = FrequencyBuckets.by_mass(COUNTS, 1)
        found = tangent_enrichment(gathered(buckets), buckets)
        expected = energy_test(SecondMoments.of(ROWS[TOKENS != 2]), Subspace(BASIS, torch.zeros(9)), controls=2)
        (one,) = found.buckets
        assert (found.energy, found.lift) == pytest.approx((expected.energy, expected.lift), rel=1e-10)
        assert (one.energy, one.lift) == pytest.approx((expected.energy, expected.lift), rel=1e-10)
        assert one.expected_random == pytest.approx(expected.expected_random, rel=1e-10)

    def test_finds_the_bucket_whose_rows_lie_in_the_tangent(self):
        rows = ROWS.clone()
        rare = TOKENS != 6
        rows[rare] = rows[rare] @ BASIS @ BASIS.T
        buckets = FrequencyBuckets.by_mass(COUNTS, 2)
        found = tangent_enrichment(gathered(buckets, rows), buckets)
        assert found.buckets[0].energy == pytest.approx(1) and found.buckets[0].lift > 1e9
        assert found.buckets[1].energy < 0.9
        frame = found.to_pandas()
        assert list(frame.rows) == [one.rows for one in found.buckets] and frame.energy[0] == found.buckets[0].energy

    def test_a_bucket_without_gradient_has_no_energy(self):
        buckets = FrequencyBuckets.by_mass(COUNTS, 2)
        rows = torch.where((TOKENS == 6)[:, None], ROWS, 0.0)
        rare, frequent = tangent_enrichment(gathered(buckets, rows), buckets).buckets
        assert (rare.energy, rare.lift, rare.expected_random, rare.energy_share) == (None, None, None, 0)
        assert frequent.energy_share == 1 and rare.rows > 0

    def test_refusals(self):
        buckets = FrequencyBuckets.by_mass(COUNTS, 2)
        with pytest.raises(ValueError, match="here: these sums were gathered by other buckets"):
            tangent_enrichment(gathered(buckets), FrequencyBuckets.by_mass(COUNTS, 3))
        with pytest.raises(ValueError, match="here: the gradient is zero everywhere"):
            tangent_enrichment(gathered(buckets, 0 * ROWS), buckets)
        with pytest.raises(ValueError, match="here: a subspace of rank 9 fills all 9 dimensions"):
            tangent_enrichment(gathered(buckets, basis=random_frame(9, 9)), buckets)
