"""Slopes against dummy columns and explicit sandwiches, powers on a floor against an optimiser, and intervals against samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from explicit import PROPERTY
from hypothesis import given
from hypothesis import strategies as some
from scipy.optimize import minimize
from scipy.stats import t as student

from tangent_lens.measures.slopes import (
    EXPONENTS,
    FLOORS,
    FlooredPower,
    PowerCurves,
    Slope,
    floored_power,
    pooled_slope,
)


def grouped(sizes=(7, 12, 5, 9), slope=2.0, seed=0):
    """Logarithms of groups with intercepts of their own, and noise that a group shares in part."""
    generator = np.random.default_rng(seed)
    groups = np.repeat(np.arange(len(sizes)) * 10, sizes)
    x = generator.normal(size=len(groups)) + generator.normal(size=len(sizes)).repeat(sizes)
    together = generator.normal(size=len(sizes)).repeat(sizes)
    return x, slope * x + 0.3 * together * x + 5 * together + 0.5 * generator.normal(size=len(groups)), groups


def columns(x, groups):
    """x and a dummy column a group."""
    return np.column_stack([x, *((groups == one).astype(float) for one in np.unique(groups))])


def powers(exponent, floor, sizes=(200, 150, 180), seed=0, profile=None, width=1.0, shape=5):
    """y^2 = c (f q + (1-f) (x / median x)^(2b)) times a gamma of mean 1; log x of standard deviation ``width``."""
    generator = np.random.default_rng(seed)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    x = np.exp(width * generator.normal(size=len(groups)))
    medians = np.array([np.median(x[groups == one]) for one in range(len(sizes))])[groups]
    noise = np.ones_like(x) if profile is None else profile(x)
    mean = floor * noise + (1 - floor) * (x / medians) ** (2 * exponent)
    scale = np.exp(generator.normal(size=len(sizes)))[groups]
    return x, np.sqrt(scale * mean * generator.gamma(shape, 1 / shape, size=len(x))), groups


def loss(exponent, floor, x, y, groups, profile=None):
    """Minus twice the gamma quasi-likelihood, every group at its best scale, one row at a time."""
    total = 0.0
    for one in np.unique(groups):
        rows = np.flatnonzero(groups == one)
        median = math.exp(np.median(np.log(x[rows])))
        models = []
        for row in rows:
            noise = 1.0 if profile is None else profile[row]
            models.append(floor * noise + (1 - floor) * (x[row] / median) ** (2 * exponent))
        scale = sum(y[row] ** 2 / model for row, model in zip(rows, models, strict=True)) / len(rows)
        total += sum(
            y[row] ** 2 / (scale * model) + math.log(scale * model) for row, model in zip(rows, models, strict=True)
        )
    return total


class TestPooledSlope:
    def test_is_that_of_dummy_columns(self):
        x, y, groups = grouped()
        found = pooled_slope(x, y, groups)
        assert found.exponent == pytest.approx(np.linalg.lstsq(columns(x, groups), y, rcond=None)[0][0], rel=1e-12)
        assert (found.rows, found.groups, found.level) == (33, 4, 0.95)

    def test_standard_error_is_the_sandwich_over_groups(self):
        x, y, groups = grouped()
        design = columns(x, groups)
        left = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
        bread = np.linalg.inv(design.T @ design)
        meat = np.zeros_like(bread)
        for one in np.unique(groups):
            score = design[groups == one].T @ left[groups == one]
            meat += np.outer(score, score)
        error = math.sqrt((bread @ meat @ bread)[0, 0] * 4 / 3)
        found = pooled_slope(x, y, groups, level=0.9)
        assert found.standard_error == pytest.approx(error, rel=1e-11)
        half = student.ppf(0.95, 3) * error
        assert (found.low, found.high) == pytest.approx((found.exponent - half, found.exponent + half), rel=1e-11)

    def test_of_one_group_is_hc3(self):
        x, y, _ = grouped((25,))
        design = np.column_stack([x, np.ones(25)])
        hat = design @ np.linalg.inv(design.T @ design) @ design.T
        left = y - hat @ y
        bread = np.linalg.inv(design.T @ design)
        meat = sum(
            np.outer(row, row) * (e / (1 - h)) ** 2 for row, e, h in zip(design, left, hat.diagonal(), strict=True)
        )
        error = math.sqrt((bread @ meat @ bread)[0, 0])
        found = pooled_slope(x, y, np.full(25, 3))
        assert found.standard_error == pytest.approx(error, rel=1e-11)
        assert found.high - found.low == pytest.approx(2 * student.ppf(0.975, 23) * error, rel=1e-11)

    def test_groups_that_say_nothing_are_left_out(self):
        """They would count as groups that agree with the slope: with one other group, its score is 0 and so is the error."""
        x, y, groups = grouped((20,))
        alone = pooled_slope(x, y, groups)
        beside = pooled_slope(np.append(x, [1, 1, 4]), np.append(y, [3, 8, 2]), np.append(groups, [5, 5, 7]))
        assert alone.standard_error > 0.05
        assert beside == alone

    @PROPERTY
    @given(some.floats(0.1, 10), some.floats(-50, 50), some.integers(0, 99))
    def test_depends_on_no_order_unit_or_name(self, scale, shift, seed):
        x, y, groups = grouped(seed=seed)
        one = pooled_slope(x, y, groups)
        order = np.random.default_rng(seed).permutation(len(x))
        other = pooled_slope(x[order], y[order], 90 - groups[order])
        assert (other.exponent, other.low) == pytest.approx((one.exponent, one.low), rel=1e-9)
        turned = pooled_slope(scale * x + shift, y + shift * groups, groups)
        assert scale * turned.exponent == pytest.approx(one.exponent, rel=1e-7)
        assert scale * turned.standard_error == pytest.approx(one.standard_error, rel=1e-7)

    @pytest.mark.parametrize("sizes", [(10,) * 20, (40,)])
    def test_interval_holds_the_truth_as_often_as_it_says(self, sizes):
        """200 sets of unequal variances, and slopes of their own where there are groups: 95 %, give or take 4 (2.6 sd)."""
        inside = 0
        for seed in range(200):
            generator = np.random.default_rng([seed, len(sizes)])
            groups = np.repeat(np.arange(len(sizes)), sizes)
            x = generator.normal(size=len(groups))
            own = (0.3 * generator.normal(size=len(sizes)) if len(sizes) > 1 else np.zeros(1)).repeat(sizes)
            y = (2 + own) * x + (0.2 + 0.3 * x**2) * generator.normal(size=len(groups))
            inside += pooled_slope(x, y, groups).holds(2)
        assert abs(inside / 200 - 0.95) <= 0.04

    @pytest.mark.parametrize(
        ("x", "y", "groups", "level", "message"),
        [
            ([1, 2, 3], [1, 2, 3], [0, 0, 0], 0.95, "3 rows give no slope"),
            ([1, 2, 3, 4], [1, 2, 3], [0, 0, 0, 0], 0.95, "do not fit together"),
            ([[1, 2, 3, 4]], [[1, 2, 3, 4]], [[0, 0, 0, 0]], 0.95, "do not fit together"),
            ([1, 2, 3, math.nan], [1, 2, 3, 4], [0, 0, 0, 0], 0.95, "NaN or infinite; leave"),
            ([1, 2, 3, 4], [1, 2, -math.inf, 4], [0, 0, 0, 0], 0.95, "NaN or infinite; leave"),
            ([1, 2, 3, 4], [1, 2, 3, 4], [0, 0, 0, math.nan], 0.95, "some groups are NaN"),
            ([1, 1, 2, 2], [1, 2, 3, 4], [0, 0, 1, 1], 0.95, "lie at one radius"),
            ([1, 1, 1 + 1e-14, 1], [1, 2, 3, 4], [0, 0, 0, 0], 0.95, "lie at one radius"),
            ([1, 2, 3, 5, 5, 5], [1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 1, 1], 0.95, "lie at one radius"),
            ([1, 1, 1, 2], [1, 2, 3, 4], [0, 0, 0, 0], 0.95, "all rows but one lie at one radius"),
            ([1, 2, 3, 4], [1, 3, 2, 4], [0, 0, 0, 0], 95, "level 95 must lie between 0 and 1"),
            ([1, 2, 3, 4], [1, 3, 2, 4], [0, 0, 0, 0], math.nan, "level nan must lie"),
        ],
    )
    def test_of_what_has_none_is_refused(self, x, y, groups, level, message):
        with pytest.raises(ValueError, match=message):
            pooled_slope(np.array(x), np.array(y), np.array(groups), level=level)


class TestFlooredPower:
    @pytest.mark.parametrize("with_profile", [False, True])
    def test_curves_are_the_quasi_likelihood_row_by_row(self, with_profile):
        x, y, groups = powers(1.5, 0.2, (12, 9, 15))
        profile = 1 + 0.3 * x if with_profile else None
        curves = PowerCurves.of(x, y, groups + 4, profile)
        assert curves.groups.tolist() == [4, 5, 6] and curves.rows.tolist() == [12, 9, 15]
        places = [(0, 0), (28, 5), (40, 12), (78, 20), (38, len(FLOORS) - 1)]
        expected = [loss(EXPONENTS[e], FLOORS[f], x, y, groups, profile) for e, f in places]
        found = [curves.losses[:, e, f].sum() for e, f in places]
        # Both up to a constant.
        assert np.subtract(found, found[0]) == pytest.approx(np.subtract(expected, expected[0]), rel=1e-10)

    @pytest.mark.parametrize(("exponent", "floor"), [(2.0, 0.0), (2.0, 0.3), (1.0, 0.5), (3.0, 0.1)])
    def test_is_the_optimum_up_to_the_grid(self, exponent, floor):
        x, y, groups = powers(exponent, floor)
        found = floored_power(x, y, groups, resamples=20)

        def smooth(place):
            medians = np.array([np.median(np.log(x[groups == one])) for one in range(3)])[groups]
            model = place[1] + (1 - place[1]) * np.exp(2 * place[0] * (np.log(x) - medians))
            own = [groups == one for one in range(3)]
            return sum(o.sum() * math.log((y[o] ** 2 / model[o]).mean()) + np.log(model[o]).sum() for o in own)

        best = minimize(smooth, (found.exponent, max(found.floor, 1e-3)), bounds=[(0.05, 4), (0, 0.999)])
        assert smooth((found.exponent, found.floor)) == pytest.approx(best.fun, abs=1)
        assert found.exponent == pytest.approx(best.x[0], abs=0.076)
        assert found.floor == pytest.approx(best.x[1], abs=0.03)
        assert found.exponent == pytest.approx(exponent, abs=0.15)

    def test_profile_takes_off_noise_that_grows(self):
        """Noise that grows with x looks like a smaller exponent unless its growth is known."""
        x, y, groups = powers(2.0, 0.5, (3000, 3000), profile=lambda x: x**2, width=0.5)
        known = floored_power(x, y, groups, profile=x**2, resamples=50)
        assert known.exponent == pytest.approx(2, abs=0.1) and known.floor == pytest.approx(0.5, abs=0.1)
        assert floored_power(x, y, groups, resamples=2).exponent < 1.75

    def test_a_floor_alone_shows_no_exponent(self):
        x, y, groups = powers(2.0, 1.0, (60,) * 8, seed=3)
        found = floored_power(x, y, groups)
        assert not found.determined
        assert (found.low, found.high) == (EXPONENTS[0], EXPONENTS[-1])
        assert found.floor_high == 1 and found.floor > 0.85

    def test_that_is_none_is_not_determined(self):
        generator = np.random.default_rng(0)
        x = np.exp(generator.normal(size=80))
        # Falls with x: no power of these does.
        found = floored_power(x, 1 / x, np.repeat(np.arange(4), 20))
        assert found.exponent is None and found.floor == 1 and not found.determined

    def test_of_one_group_resamples_its_rows(self):
        x, y, groups = powers(2.0, 0.1, (300,))
        found = floored_power(x, y, groups, seed=4)
        assert found.groups == 1 and found.rows == 300
        assert found.exponent == pytest.approx(2, abs=0.1)
        assert found.holds(2) and 0.05 < found.high - found.low < 0.5
        generator = np.random.default_rng(9)
        drawn = []
        for _ in range(60):
            rows = generator.integers(0, 300, size=300)
            # The median stays that of all rows, as where the rows were resampled inside.
            logs = np.log(x) - np.median(np.log(x))
            model = FLOORS + (1 - FLOORS) * np.exp(2 * logs[rows, None, None] * EXPONENTS[:, None])
            losses = 300 * np.log((y[rows, None, None] ** 2 / model).mean(axis=0)) + np.log(model).sum(axis=0)
            drawn.append(EXPONENTS[np.unravel_index(losses.argmin(), losses.shape)[0]])
        assert found.high - found.low == pytest.approx(3.92 * np.std(drawn), rel=0.4)

    def test_of_chosen_groups_is_that_of_their_rows(self):
        x, y, groups = powers(2.0, 0.2, (40, 50, 60, 70))
        curves = PowerCurves.of(x, y, groups)
        own = np.isin(groups, [1, 3])
        assert curves.power([3, 1], seed=2) == floored_power(x[own], y[own], groups[own], seed=2)
        assert curves.power() == floored_power(x, y, groups)
        assert curves.power([0, 1, 2, 3]).rows == 220

    def test_interval_holds_the_truth_as_often_as_it_says(self):
        """200 sets of 40 groups whose floors differ about 0.3; 95 %, give or take 4. The truth is off the grid."""
        inside = 0
        for seed in range(200):
            floors = np.clip(0.3 + 0.1 * np.random.default_rng(seed).normal(size=40), 0, 1)
            parts = [powers(1.97, floor, (25,), [seed, place], None, 0.4, 2) for place, floor in enumerate(floors)]
            x, y = (np.concatenate([part[place] for part in parts]) for place in range(2))
            inside += floored_power(x, y, np.repeat(np.arange(40), 25), resamples=200).holds(1.97)
        assert abs(inside / 200 - 0.95) <= 0.04

    @PROPERTY
    @given(some.integers(-100, 100), some.integers(-100, 100), some.integers(0, 99))
    def test_depends_on_no_unit_not_even_on_one_a_group(self, for_x, for_y, seed):
        x, y, groups = powers(1.5, 0.2, (20, 30), seed=seed)
        one = floored_power(x, y, groups, resamples=30)
        scales = np.array([10.0**for_y, 10.0 ** (-for_y)])[groups]
        other = floored_power(10.0**for_x * x, scales * y, groups, resamples=30)
        assert (other.exponent, other.floor) == (one.exponent, one.floor)
        assert other.high == one.high

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"x": [0, 1, 2, 3]}, "finite positive numbers"),
            ({"y": [1, 1, math.nan, 3]}, "finite positive numbers"),
            ({"y": [1, 1, -1, 3]}, "finite positive numbers"),
            ({"y": [1, 1, 2]}, "do not fit together"),
            ({"profile": [1.0, 1, 1, 0]}, "finite positive numbers"),
            ({"profile": [1.0, 1, 1]}, r"a profile of shape \(3,\) does not fit rows of shape \(4,\)"),
            ({"groups": [0, 0, 0, math.nan]}, "some groups are NaN"),
            ({"x": [2, 2, 2, 2]}, "lie at one radius"),
            ({"level": 1.5}, "level 1.5 must lie between 0 and 1"),
            ({"resamples": 0}, "0 resamples give no interval"),
        ],
    )
    def test_of_what_has_none_is_refused(self, changes, message):
        given_as = {"x": [1, 2, 3, 4], "y": [1, 2, 3, 4], "groups": [0, 0, 0, 0]} | changes
        parts = [np.array(given_as.pop(name)) for name in ("x", "y", "groups")]
        if "profile" in given_as:
            given_as["profile"] = np.array(given_as["profile"])
        with pytest.raises(ValueError, match=message):
            floored_power(*parts, **given_as)

    def test_of_one_token_of_several_is_refused(self):
        curves = PowerCurves.of(*powers(2.0, 0.2, (40, 50)))
        for chosen in ([1], [7], []):
            with pytest.raises(ValueError, match=r"token cannot be resampled; use 2 or more"):
                curves.power(chosen)
        with pytest.raises(ValueError, match="level 2 must lie"):
            curves.power(level=2)


def test_intervals_hold_their_ends():
    slope = Slope(2.0, 0.5, 1.0, 3.0, 9, 3, 0.95)
    assert slope.holds(1) and slope.holds(3) and not slope.holds(3.01) and not slope.holds(0.99)
    power = FlooredPower(2.0, 1.0, 3.0, 0.1, 0, 0.2, 9, 3, 0.95)
    assert power.holds(1) and not power.holds(0.99) and power.determined
