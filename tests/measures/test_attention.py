"""The numbers of a result and the functions they come from."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from explicit import PROPERTY
from hypothesis import given
from hypothesis import strategies as st

from tangent_lens.measures.attention import (
    SHARES,
    THEORY,
    AttentionDominance,
    Spread,
    control_products,
    dominance_of_squares,
    dominance_of_sums,
    fitted_exponent,
)
from tangent_lens.measures.energy import monte_carlo_p

seeds = st.integers(0, 10_000)


def some_result(**changes) -> AttentionDominance:
    """Three heads and four controls of invented numbers."""
    generator = np.random.default_rng(0)
    numbers = {
        "layer": 2,
        "dominance": (0.5, 0.02, 0.9),
        "random": ((0.1, 0.2, 0.3, 0.4), (0.02, 0.01, 0.03, 0.0), (0.1, 0.2, 0.91, 0.95)),
        "shares": {name: tuple(generator.normal(size=3).tolist()) for name in SHARES},
        "random_shares": {name: tuple(map(tuple, generator.normal(size=(3, 4)).tolist())) for name in SHARES},
        "kl": (0.1, 0.5, 2.0),
        "random_kl": ((0.2, 0.3, 0.4, 0.5), (0.5, 0.6, 0.4, 0.3), (1.0, 1.5, 1.9, 1.0)),
        "variance_baseline": 0.25,
        "rows": (10, 11, 12),
        "pairs": (50, 51, 52),
        "left_out_rows": (1, 0, 2),
        "random_rows": (10, 10, 10),
    }
    return AttentionDominance(**(numbers | changes))


def test_dominance_is_the_tangent_square_over_all_four():
    squares = np.array([[1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    found = dominance_of_squares(squares)
    assert found[:3].tolist() == [0.1, 0.0, 1.0]
    assert math.isnan(found[3])


def test_squares_below_zero_by_rounding_are_zero():
    assert dominance_of_squares(np.array([1.0, -1e-3, 0.0, 1.0])) == 0.5


def test_p_values_count_the_controls_that_reach_a_head():
    result = some_result()
    assert result.p_value == (1 / 5, 3 / 5, 3 / 5)
    assert result.kl_p_value == (1 / 5, 4 / 5, 1.0)
    for name in SHARES:
        expected = [monte_carlo_p(*one) for one in zip(result.shares[name], result.random_shares[name], strict=True)]
        assert result.share_p_value(name) == tuple(expected)


def test_means_and_deviations_of_the_controls():
    result = some_result()
    for found, values in (
        (result.random_mean, [np.mean(one) for one in result.random]),
        (result.random_sd, [np.std(one, ddof=1) for one in result.random]),
        (result.random_kl_mean, [np.mean(one) for one in result.random_kl]),
        (result.random_kl_sd, [np.std(one, ddof=1) for one in result.random_kl]),
        (result.random_share_mean("bias"), [np.mean(one) for one in result.random_shares["bias"]]),
        (result.random_share_sd("bias"), [np.std(one, ddof=1) for one in result.random_shares["bias"]]),
    ):
        assert found == pytest.approx(values, rel=1e-12)


def test_without_controls_there_is_no_comparison():
    result = some_result(random=((),) * 3, random_kl=((),) * 3, random_shares={name: ((),) * 3 for name in SHARES})
    numbers = result.random_mean + result.random_sd + result.p_value + result.kl_p_value + result.share_p_value("bias")
    assert all(math.isnan(value) for value in numbers)
    assert math.isnan(result.flat_rows()[0]["random_mean"])


def test_a_head_without_a_number_has_no_p_value():
    result = some_result(dominance=(math.nan, 0.02, 0.9))
    assert math.isnan(result.p_value[0])
    assert result.p_value[1:] == some_result().p_value[1:]
    assert result.summary["dominance"] == Spread(pytest.approx(0.46), 0.02, 0.9)


def test_the_summary_of_a_layer():
    result = some_result()
    assert result.heads == 3
    assert result.summary["dominance"] == Spread(0.5, 0.02, 0.9)
    assert result.summary["kl"] == Spread(0.5, 0.1, 2.0)
    assert result.summary["p_value"] == Spread(0.6, 0.2, 0.6)
    assert set(SHARES) < set(result.summary)
    empty = Spread.of([math.nan])
    assert all(math.isnan(value) for value in dataclasses.astuple(empty))


def test_one_flat_row_a_head():
    result = some_result()
    rows = result.flat_rows()
    assert [row["head"] for row in rows] == [0, 1, 2]
    assert list(rows[0])[:3] == ["layer", "head", "dominance"]
    assert rows[1]["dominance"] == 0.02
    assert rows[1]["share_centre_tangent"] == result.shares["centre_tangent"][1]
    assert rows[1]["random_share_bias"] == result.random_share_mean("bias")[1]
    assert (rows[2]["kl"], rows[2]["rows"], rows[2]["left_out_rows"], rows[2]["random_rows"]) == (2.0, 12, 2, 10)
    assert {row["variance_baseline"] for row in rows} == {0.25}
    assert all(isinstance(value, int | float) for row in rows for value in row.values())


@given(seed=seeds)
@PROPERTY
def test_products_of_a_control_split_are_differences_of_the_tangent_split(seed):
    """Random 3 x 3 products of single rows: q^a . (S k^b) is bilinear, and so are the sums."""
    generator = np.random.default_rng(seed)
    q, k, own_q, own_k = (generator.normal(size=shape) for shape in ((3, 5), (3, 6), (5,), (6,)))
    scores = generator.normal(size=(5, 6))
    rest_q, rest_k = q[1] + q[2], k[1] + k[2]
    split_q, split_k = np.stack([q[0], own_q, rest_q - own_q]), np.stack([k[0], own_k, rest_k - own_k])
    given_products = np.append((q @ scores @ k.T).ravel(), 0.7)[None]
    inside = [(q[0], own_k), (own_q, k[0]), (own_q, rest_k), (rest_q, own_k), (own_q, own_k)]
    found = control_products(given_products, np.array([[[a @ scores @ b for a, b in inside]]]))
    np.testing.assert_allclose(found[0, 0], np.append((split_q @ scores @ split_k.T).ravel(), 0.7), atol=1e-12)


@given(seed=seeds, points=st.integers(3, 12))
@PROPERTY
def test_exponents_are_weighted_least_squares(seed, points):
    generator = np.random.default_rng(seed)
    x, y, weights = generator.normal(size=points), generator.normal(size=points), generator.uniform(0.1, 9, size=points)
    design = np.stack([x, np.ones(points)], axis=1) * np.sqrt(weights)[:, None]
    expected, residual, *_ = np.linalg.lstsq(design, y * np.sqrt(weights), rcond=None)
    covariance = np.linalg.inv(design.T @ design) * residual[0] / (points - 2)
    assert fitted_exponent(x, y, weights) == pytest.approx((expected[0], math.sqrt(covariance[0, 0])), rel=1e-8)


def test_standard_errors_of_exponents_are_those_of_repeated_noise():
    generator = np.random.default_rng(0)
    x, weights = np.linspace(0, 3, 40), np.linspace(1, 50, 40)
    slopes, errors = zip(
        *(fitted_exponent(x, 2 * x + generator.normal(size=40) / np.sqrt(weights), weights) for _ in range(2000)),
        strict=True,
    )
    assert np.mean(slopes) == pytest.approx(2, abs=4 * np.std(slopes) / math.sqrt(2000))
    assert np.mean(np.square(errors)) == pytest.approx(np.var(slopes), rel=0.15)


def test_exponents_that_few_bins_do_not_determine():
    two = fitted_exponent(np.array([0.0, 1.0]), np.array([1.0, 3.0]), np.array([1.0, 5.0]))
    assert two[0] == pytest.approx(2) and math.isnan(two[1])
    for x, y, weights in (
        ([1.0], [1.0], [1.0]),
        ([1.0, 1.0], [1.0, 2.0], [1.0, 1.0]),
        ([0.0, 1.0], [1.0, 2.0], [1, 0]),
    ):
        assert all(math.isnan(value) for value in fitted_exponent(np.array(x), np.array(y), np.array(weights)))
    empty_bin = fitted_exponent(np.array([0.0, 1.0, 2.0]), np.array([1.0, 3.0, -math.inf]), np.ones(3))
    assert empty_bin[0] == pytest.approx(2)


def test_the_orders_of_the_theory():
    assert THEORY == {"tangent_tangent": 2, "mixed": 3, "normal_normal": 4}


@pytest.mark.parametrize("share", [-0.1, 1.2])
def test_a_share_of_variance_that_is_none_is_refused(share):
    with pytest.raises(ValueError, match="must lie between 0 and 1"):
        dominance_of_sums({}, tangent_share=share)
