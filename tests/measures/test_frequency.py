"""Frequencies, spreads of tokens over contexts and over training, and how they go together."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from explicit import PROPERTY, array, random_rows
from hypothesis import given
from hypothesis import strategies as some
from scipy import stats

from tangent_lens.measures.frequency import (
    TokenFrequencies,
    TokenSpread,
    contextual_spread,
    frequency_correlation,
    token_frequencies,
    trajectory_spread,
)
from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.token_sums import TokenDistances, TokenSums

CORPUS = Corpus.from_tokens([[1, 2, 2], [5, 2, 1, 0], [2, 5]], special_ids=[0, 5])
TOKENS = torch.from_numpy(np.random.default_rng(1).integers(0, 6, size=200))
ROWS = random_rows(200, 5)
# One embedding matrix a checkpoint.
MATRICES = tuple(random_rows(9, 4, seed) for seed in range(6))


def recorded(rows=ROWS, tokens=TOKENS, chosen=range(6)):
    sums = TokenSums(list(chosen), rows.shape[1], name="here")
    sums.update(rows, tokens)
    distances = TokenDistances(sums)
    distances.update(rows, tokens)
    return sums, distances


def distances_of(rows):
    """Of every row to the mean of all, one at a time."""
    values = array(rows)
    mean = values.mean(axis=0)
    return np.array([math.dist(value, mean) for value in values])


class TestFrequencies:
    def test_are_counted_over_a_corpus(self):
        found = token_frequencies(CORPUS, 8)
        assert found.counts.tolist() == [1, 2, 4, 0, 0, 2, 0, 0]
        assert found.shares.sum() == pytest.approx(1) and found.shares[2] == pytest.approx(4 / 9)
        assert token_frequencies(CORPUS).counts.tolist() == [1, 2, 4, 0, 0, 2]
        assert token_frequencies(CORPUS, 8, skip_special=True).counts.tolist() == [0, 2, 4, 0, 0, 0, 0, 0]

    @pytest.mark.parametrize(
        "given_as", [{1: 0.5, 3: 0.25}, [0, 0.5, 0, 0.25], np.array([0, 0.5, 0, 0.25]), torch.tensor([0, 0.5, 0, 0.25])]
    )
    def test_may_be_given(self, given_as):
        found = token_frequencies(given_as)
        assert found.counts.tolist() == [0, 0.5, 0, 0.25]
        assert found.log([3, 1]).tolist() == pytest.approx([math.log(1 / 3), math.log(2 / 3)])
        assert found.seen(0.3).tolist() == [1] and found.seen(0).tolist() == [1, 3]

    @PROPERTY
    @given(some.permutations(range(3)), some.integers(2, 4))
    def test_depend_on_no_order_and_no_cut(self, order, length):
        turned = Corpus.from_tokens([CORPUS.sequences[place] for place in order])
        assert token_frequencies(turned, 8).counts.tolist() == token_frequencies(CORPUS, 8).counts.tolist()
        whole = Corpus.from_tokens([list(range(2 * length))])
        assert token_frequencies(whole.limited(length)).counts.tolist() == token_frequencies(whole).counts.tolist()

    @pytest.mark.parametrize(
        ("source", "vocabulary", "message"),
        [
            (CORPUS, 5, "token ids 0 to 5 do not fit a vocabulary of 5"),
            ({9: 1.0}, 5, "token ids 9 to 9 do not fit a vocabulary of 5"),
            ({-1: 1.0, 2: 1.0}, 5, "token ids -1 to 2 do not fit"),
            ([1.0, 2.0], 5, "2 frequencies do not fit a vocabulary of 5"),
            ([1.0, -2.0], None, "finite numbers of 0 or more"),
            ([1.0, math.nan], None, "finite numbers of 0 or more"),
            ([[1.0]], None, r"not of shape \(1, 1\)"),
            ([0.0, 0.0], None, "all 2 frequencies are zero"),
            ({}, None, "all 0 frequencies are zero"),
        ],
    )
    def test_that_are_none_are_refused(self, source, vocabulary, message):
        with pytest.raises(ValueError, match=message):
            token_frequencies(source, vocabulary)

    def test_refuse_what_they_do_not_know(self):
        found = token_frequencies(CORPUS, 8)
        with pytest.raises(ValueError, match="token 3 has frequency 0"):
            found.log([2, 3])
        with pytest.raises(ValueError, match="tokens 2 to 8 are not all among the 8"):
            found.log([2, 8])
        with pytest.raises(ValueError, match=r"no token has a count of 10 or more \(the largest is 4\)"):
            found.seen()
        with pytest.raises(ValueError, match="only a corpus knows its special tokens"):
            token_frequencies([1.0], skip_special=True)


class TestContextualSpread:
    def test_is_that_of_each_tokens_rows(self):
        spread = contextual_spread(*recorded())
        assert spread.tokens.tolist() == list(range(6)) and spread.occurrences.min() >= 10
        for place, token in enumerate(spread.tokens):
            distances = distances_of(ROWS[token == TOKENS])
            assert spread.occurrences[place] == len(distances)
            assert spread.mean_distance[place] == pytest.approx(distances.mean(), rel=1e-12)
            assert spread.distance_variance[place] == pytest.approx(distances.var(), rel=1e-10)
            assert spread.mean_square[place] == pytest.approx((distances**2).mean(), rel=1e-12)
            variance = array(ROWS[token == TOKENS]).var(axis=0, ddof=1).sum()
            assert spread.corrected_square[place] == pytest.approx(variance, rel=1e-12)
        ratio = spread.corrected_distance / spread.mean_distance
        assert ratio == pytest.approx(np.sqrt(spread.occurrences / (spread.occurrences - 1)))

    def test_leaves_rare_tokens_out(self):
        counts = torch.bincount(TOKENS)
        limit = int(counts.median())
        spread = contextual_spread(recorded()[0], min_count=limit)
        assert spread.tokens.tolist() == (counts >= limit).nonzero().flatten().tolist()
        assert 0 < len(spread.tokens) < 6
        assert spread.mean_distance is None and spread.distance_variance is None and spread.corrected_distance is None

    def test_scales_with_the_rows(self):
        one, three = contextual_spread(*recorded()), contextual_spread(*recorded(3 * ROWS))
        assert three.mean_distance == pytest.approx(3 * one.mean_distance)
        assert three.distance_variance == pytest.approx(9 * one.distance_variance)

    def test_of_few_rows_is_too_small_unless_corrected(self):
        """All tokens have one law, and from 2 to 40 rows: the raw number grows with frequency, the corrected one does not."""
        counts = np.repeat([2, 3, 5, 10, 40], 400)
        tokens = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
        rows = torch.from_numpy(np.random.default_rng(0).normal(size=(len(tokens), 8)))
        spread = contextual_spread(*recorded(rows, tokens, range(len(counts))), min_count=2)
        frequencies = TokenFrequencies(counts)
        raw, corrected = (
            spread.correlation(frequencies, name).pearson for name in ("mean_distance", "corrected_distance")
        )
        assert raw.low > 0.5
        assert abs(corrected.estimate) < 0.1
        groups = spread.corrected_distance.reshape(5, 400).mean(axis=1)
        assert groups == pytest.approx(math.sqrt(2) * math.gamma(4.5) / math.gamma(4), rel=0.02)

    def test_has_a_table(self):
        frame = contextual_spread(*recorded()).to_pandas()
        assert list(frame.token) == list(range(6)) and not frame.isna().any().any()
        assert contextual_spread(recorded()[0]).to_pandas().mean_distance.isna().all()
        assert repr(contextual_spread(*recorded())) == "TokenSpread(here: 6 tokens, 200 rows)"

    def test_refuses_passes_that_do_not_belong_together(self):
        sums, distances = recorded()
        with pytest.raises(ValueError, match="here: the second pass saw other rows than the first"):
            contextual_spread(recorded()[0], distances)
        sums.update(ROWS[:1], TOKENS[:1])
        with pytest.raises(ValueError, match="here: the second pass saw other rows than the first"):
            contextual_spread(sums, distances)
        with pytest.raises(ValueError, match="min_count 1 must be 2 or more"):
            contextual_spread(sums, min_count=1)
        with pytest.raises(ValueError, match=r"here: no token has 500 rows \(the most is"):
            contextual_spread(sums, min_count=500)


class TestTrajectorySpread:
    @pytest.mark.parametrize("given_as", [MATRICES, list(MATRICES), torch.stack(MATRICES), lambda: iter(MATRICES)])
    def test_is_that_of_each_row_over_checkpoints(self, given_as):
        spread = trajectory_spread(given_as)
        assert spread.tokens.tolist() == list(range(9)) and set(spread.occurrences) == {6}
        for token in range(9):
            distances = distances_of(torch.stack([matrix[token] for matrix in MATRICES]))
            assert spread.mean_distance[token] == pytest.approx(distances.mean(), rel=1e-12)
            assert spread.mean_square[token] == pytest.approx((distances**2).mean(), rel=1e-12)
            assert spread.distance_variance[token] == pytest.approx(distances.var(), rel=1e-9)

    def test_of_some_rows_is_a_part(self):
        some_rows, every = trajectory_spread(MATRICES, [7, 2]), trajectory_spread(MATRICES)
        assert some_rows.tokens.tolist() == [2, 7]
        assert some_rows.mean_distance.tolist() == every.mean_distance[[2, 7]].tolist()

    def test_depends_on_no_order_of_the_checkpoints_and_on_no_shift(self):
        turned = trajectory_spread([matrix + 5 for matrix in MATRICES[::-1]])
        assert turned.mean_distance == pytest.approx(trajectory_spread(MATRICES).mean_distance, rel=1e-12)

    def test_of_an_iterator_has_mean_squares_alone(self):
        spread = trajectory_spread(iter(MATRICES))
        assert spread.mean_square.tolist() == trajectory_spread(MATRICES).mean_square.tolist()
        assert spread.mean_distance is None
        with pytest.raises(ValueError, match=r"mean_distance needs a second pass .* or use mean_square"):
            spread.correlation(TokenFrequencies(np.arange(1, 10)))
        assert spread.correlation(TokenFrequencies(np.arange(1, 10)), "mean_square").pearson.n == 9

    def test_a_row_that_stays_has_none(self):
        still = [torch.cat([torch.ones(1, 4).double(), matrix]) for matrix in MATRICES]
        assert trajectory_spread(still).mean_distance[0] == 0 < trajectory_spread(still).mean_distance[1]

    def test_refusals(self):
        with pytest.raises(ValueError, match="a trajectory needs 2 checkpoints or more"):
            trajectory_spread(MATRICES[:1])
        with pytest.raises(ValueError, match="a trajectory needs 2 checkpoints or more"):
            trajectory_spread([])
        with pytest.raises(ValueError, match=r"a matrix of shape \(8, 4\) follows one of \(9, 4\)"):
            trajectory_spread([MATRICES[0], MATRICES[1][:8]])


class TestCorrelation:
    def test_is_that_of_scipy_with_its_intervals(self):
        generator = np.random.default_rng(5)
        x = generator.normal(size=50)
        y = np.exp(-x + generator.normal(size=50))
        found = frequency_correlation(x, y)
        r, rho = stats.pearsonr(x, y), stats.spearmanr(x, y)
        assert (found.pearson.estimate, found.pearson.p_value) == pytest.approx((r.statistic, r.pvalue))
        assert (found.spearman.estimate, found.spearman.p_value) == pytest.approx((rho.statistic, rho.pvalue))
        assert (found.pearson.low, found.pearson.high) == pytest.approx(tuple(r.confidence_interval(0.95)))
        half = 1.959964 * math.sqrt((1 + rho.statistic**2 / 2) / 47)
        ends = [math.tanh(math.atanh(rho.statistic) + sign * half) for sign in (-1, 1)]
        assert [found.spearman.low, found.spearman.high] == pytest.approx(ends, rel=1e-6)
        assert found.pearson.n == found.spearman.n == 50
        frame = found.to_pandas()
        assert list(frame.method) == ["pearson", "spearman"] and frame.estimate[1] == found.spearman.estimate

    @PROPERTY
    @given(some.floats(0.1, 10), some.floats(-5, 5))
    def test_changes_with_no_unit(self, scale, shift):
        x, y = array(random_rows(30, 2)).T
        one, other = frequency_correlation(x, y), frequency_correlation(scale * x + shift, scale * y - shift)
        assert other.pearson.estimate == pytest.approx(one.pearson.estimate)
        assert other.spearman == one.spearman
        turned = frequency_correlation(x, -y)
        assert (turned.pearson.low, turned.pearson.high) == pytest.approx((-one.pearson.high, -one.pearson.low))

    def test_intervals_hold_the_truth_as_often_as_they_say(self):
        """400 samples of 40 pairs of correlation 0.6 (Spearman's 6/pi asin(0.3)): 95 % of the intervals, give or take 3.3."""
        generator, inside = np.random.default_rng(2), np.zeros(2)
        truths = (0.6, 6 / math.pi * math.asin(0.3))
        for _ in range(400):
            x, noise = generator.normal(size=(2, 40))
            found = frequency_correlation(x, 0.6 * x + 0.8 * noise)
            inside += [one.low <= truth <= one.high for one, truth in zip(vars(found).values(), truths, strict=True)]
        assert (np.abs(inside / 400 - 0.95) < 0.033).all()

    def test_of_a_line_is_one(self):
        found = frequency_correlation(np.arange(9.0), -2 * np.arange(9.0))
        assert found.spearman.estimate == found.spearman.low == found.spearman.high == -1
        assert found.pearson.high == pytest.approx(-1)

    def test_pairs_every_token_with_its_own_frequency(self):
        counts = np.array([0, 8, 4, 2, 1, 16])
        spread = TokenSpread(
            "here", np.array([5, 1, 3, 4]), np.full(4, 9), np.array([1.0, 2, 4, 5]), np.array([1.0, 2, 4, 5])
        )
        found = spread.correlation(TokenFrequencies(counts), level=0.9)
        assert found.pearson.estimate == pytest.approx(-1) and found.pearson.level == 0.9

    @pytest.mark.parametrize(
        ("x", "y", "level", "message"),
        [
            ([1, 2, 3], [1, 2, 3], 0.95, "3 tokens give no interval"),
            ([1, 2, 3, 4], [1, 2, 3], 0.95, "are no pairs"),
            ([1, 2, 3, math.nan], [1, 2, 3, 4], 0.95, "NaN or infinite"),
            ([1, 1, 1, 1], [1, 2, 3, 4], 0.95, "every token has the same frequency"),
            ([1, 2, 3, 4], [1, 1, 1, 1], 0.95, "every token has the same number"),
            ([1, 2, 3, 4], [1, 3, 2, 4], 95, "level 95 must lie between 0 and 1"),
        ],
    )
    def test_of_what_has_none_is_refused(self, x, y, level, message):
        with pytest.raises(ValueError, match=message):
            frequency_correlation(np.array(x), np.array(y), level=level)
