"""Bootstrap intervals: known answers, scipy's own BCa, and coverage by simulation; Benjamini-Hochberg against scipy's."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from explicit import PROPERTY
from hypothesis import given
from hypothesis import strategies as st

from tangent_lens.measures.bootstrap import adjusted_p_values, bootstrap, resampled_weights


def weighted_mean(values):
    """The mean of the sequences' values as a function of their weights."""
    return lambda weights: weights @ values / weights.sum(axis=1)


def weighted_ratio(above, below):
    """A ratio of sums, as an energy is."""
    return lambda weights: (weights @ above) / (weights @ below)


def test_weights_count_draws():
    weights = resampled_weights(12, 500, seed=3)
    assert weights.shape == (500, 12) and (weights.sum(axis=1) == 12).all()
    assert weights.mean() == pytest.approx(1) and weights.var() == pytest.approx(11 / 12, rel=0.05)
    assert (weights == resampled_weights(12, 500, seed=3)).all()
    assert (weights != resampled_weights(12, 500, seed=4)).any()


def test_the_standard_error_of_a_mean_is_known():
    values = np.random.default_rng(0).exponential(size=50)
    found = bootstrap(weighted_mean(values), 50, replicates=4000)
    assert found.estimate == pytest.approx(values.mean())
    assert found.standard_error == pytest.approx(values.std() / np.sqrt(50), rel=0.05)
    assert found.low < found.estimate < found.high


def test_intervals_are_those_of_scipy():
    values = np.random.default_rng(1).exponential(size=(40, 2))
    found = bootstrap(weighted_ratio(*values.T), 40, replicates=20_000, level=0.9)
    for method, low, high in (("percentile", found.low, found.high), ("BCa", found.bca_low, found.bca_high)):
        expected = scipy.stats.bootstrap(
            (values[:, 0], values[:, 1]),
            lambda a, b, axis=-1: a.sum(axis=axis) / b.sum(axis=axis),
            n_resamples=20_000,
            confidence_level=0.9,
            method=method,
            paired=True,
            rng=np.random.default_rng(5),
        ).confidence_interval
        width = expected.high - expected.low
        assert low == pytest.approx(expected.low, abs=0.02 * width)
        assert high == pytest.approx(expected.high, abs=0.02 * width)


@pytest.mark.parametrize(("kind", "least", "most"), [("percentile", 0.84, 0.93), ("bca", 0.86, 0.95)])
def test_intervals_of_a_skewed_ratio_cover_the_truth_about_as_often_as_they_say(kind, least, most):
    """300 corpora of 40 sequences whose true ratio is 1/2, level 0.9; the bands hold 4 standard errors of 300 draws."""
    generator, covered = np.random.default_rng(7), 0
    for trial in range(300):
        size = generator.gamma(2.0, size=40)
        found = bootstrap(
            weighted_ratio(size * generator.beta(2, 2, size=40), size), 40, replicates=400, level=0.9, seed=trial
        )
        low, high = (found.low, found.high) if kind == "percentile" else (found.bca_low, found.bca_high)
        covered += low <= 0.5 <= high
    assert least <= covered / 300 <= most


def test_the_same_seed_gives_the_same_interval():
    values = np.random.default_rng(0).normal(size=20)
    assert bootstrap(weighted_mean(values), 20, seed=1) == bootstrap(weighted_mean(values), 20, seed=1)


def test_a_number_that_never_moves_has_an_interval_of_no_width():
    found = bootstrap(weighted_mean(np.full(10, 3.0)), 10)
    assert (found.low, found.high, found.bca_low, found.bca_high) == pytest.approx((3.0,) * 4)


@given(values=st.lists(st.floats(0, 1), min_size=1, max_size=30))
@PROPERTY
def test_adjusted_p_values_are_scipys(values):
    expected = scipy.stats.false_discovery_control(values, method="bh")
    assert adjusted_p_values(values) == pytest.approx(expected, rel=1e-12, abs=1e-300)


def test_p_values_that_are_not_there_stay_out():
    assert adjusted_p_values([0.01, float("nan"), 0.04])[::2] == pytest.approx((0.02, 0.04))
    assert np.isnan(adjusted_p_values([0.01, float("nan")])[1])
    assert adjusted_p_values([]) == ()


def test_what_gives_no_interval_is_refused():
    statistic = weighted_mean(np.arange(20.0))
    with pytest.raises(ValueError, match="7 sequences are too few to resample; use 8"):
        bootstrap(statistic, 7)
    with pytest.raises(ValueError, match="99 replicates give no interval"):
        bootstrap(statistic, 20, replicates=99)
    with pytest.raises(ValueError, match="level 1 must lie between"):
        bootstrap(statistic, 20, level=1)
    with pytest.raises(ValueError, match="nan on all sequences"):
        bootstrap(lambda weights: np.full(len(weights), np.nan), 20)
    with pytest.raises(ValueError, match="p-values lie between 0 and 1"):
        adjusted_p_values([0.5, 1.5])
