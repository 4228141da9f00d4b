"""Exponents of the tangent and the normal part on manifolds whose exponents are known, with noise and without."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from explicit import PROPERTY, array, projector, random_frame, random_rows
from hypothesis import given
from hypothesis import strategies as some

from tangent_lens.measures.local_tangent import fit_local_tangent
from tangent_lens.measures.manifolds import Manifold
from tangent_lens.measures.slopes import floored_power, pooled_slope
from tangent_lens.measures.tangent_order import order_parts, other_choices, tangent_order

# A manifold and the tangent radius of its patches.
PLACES = {
    "sphere": (Manifold.sphere(2), 0.7),
    "torus outside": (Manifold.torus(), 0.5),
    "torus inside": (Manifold.torus(angle=math.pi), 0.5),
    "saddle": (Manifold.paraboloid([1.0, -1.0]), 0.6),
    "anisotropic": (Manifold.paraboloid([2.0, 0.5, 0.0]), 0.5),
    "round in 4": (Manifold.paraboloid([1.0, 1.0, 1.0, 1.0]), 0.6),
    "swiss roll": (Manifold.swiss_roll(), 1.2),
    "flat": (Manifold.flat(2), 1.0),
}
BENT = [name for name in PLACES if name != "flat"]
NOISES = (0.0, 0.003, 0.01, 0.02)


@functools.cache
def clouds(name, noise=0.0, tokens=20, d=50, count=120):
    manifold, radius = PLACES[name]
    return {
        seed: manifold.sample(count, radius, d=d, noise=noise * radius, within="tangent", seed=seed).rows
        for seed in range(tokens)
    }


@functools.cache
def measured(name, noise=0.0, **settings):
    return tangent_order(clouds(name, noise), **{"sensitivity": False} | settings)


def gaussians(d, tokens=20, count=120):
    return {token: torch.from_numpy(np.random.default_rng(token).normal(size=(count, d))) for token in range(tokens)}


class TestOnManifolds:
    @pytest.mark.parametrize("noise", NOISES)
    @pytest.mark.parametrize("name", PLACES)
    def test_the_rule_finds_the_dimension(self, name, noise):
        assert measured(name, noise).m == PLACES[name][0].dimension

    @pytest.mark.parametrize("noise", NOISES[:2])
    @pytest.mark.parametrize("name", PLACES)
    def test_the_tangent_part_grows_as_t(self, name, noise):
        found = measured(name, noise).chosen.tangent
        assert found.exponent == pytest.approx(1, abs=0.045)
        assert found.high - found.low < 0.03
        assert (found.rows, found.groups) == (2400, 20)

    @pytest.mark.parametrize("noise", NOISES)
    @pytest.mark.parametrize("name", BENT)
    def test_the_normal_part_grows_as_its_square_above_the_noise(self, name, noise):
        found = measured(name, noise).chosen.above_floor
        assert found.determined
        if (name, noise) == ("swiss roll", 0.02):
            # Its bend is 5 % of the noise.
            assert found.holds(2) and found.exponent == pytest.approx(2, abs=0.5) and found.floor > 0.9
        else:
            assert found.exponent == pytest.approx(2, abs=0.25)
            assert found.low > 1.4 and found.high < 2.45

    @pytest.mark.parametrize("name", BENT)
    def test_the_raw_normal_slope_is_lost_in_noise(self, name):
        slopes = [measured(name, noise).chosen.normal.exponent for noise in NOISES]
        floors = [measured(name, noise).chosen.above_floor.floor for noise in NOISES]
        assert 1.7 < slopes[0] < 2.15
        assert slopes == sorted(slopes, reverse=True) and slopes[0] - slopes[-1] > 0.9
        assert floors == sorted(floors) and floors[0] <= 0.01 and floors[-1] >= 0.25

    def test_near_the_foot_the_raw_slope_is_two(self):
        rows = {seed: Manifold.sphere(2).sample(120, 0.1, d=50, within="tangent", seed=seed).rows for seed in range(20)}
        found = tangent_order(rows, 2, sensitivity=False).chosen
        assert found.normal.exponent == pytest.approx(2, abs=0.04)
        assert found.tangent.exponent == pytest.approx(1, abs=0.002)

    def test_a_flat_cloud_has_no_normal_part(self):
        found = measured("flat").chosen
        assert found.normal is None and found.above_floor is None
        assert found.tangent.exponent == pytest.approx(1, abs=1e-12)
        assert found.normal_share < 1e-20

    @pytest.mark.parametrize("noise", NOISES[1:])
    def test_a_noisy_flat_cloud_shows_no_exponent(self, noise):
        found = measured("flat", noise).chosen
        assert not found.above_floor.determined and found.above_floor.floor_high == 1 and found.above_floor.floor > 0.95
        assert abs(found.normal.exponent) < 0.1

    def test_an_m_too_small_leaves_a_slope_of_one(self):
        """A tangent direction that is taken for a normal one grows as t."""
        found = measured("sphere", 0.003, m=1).chosen
        assert found.normal.exponent == pytest.approx(1, abs=0.1)
        assert not found.above_floor.determined
        assert found.normal_share > 0.3

    def test_an_m_that_holds_the_bend_leaves_nothing(self):
        assert measured("sphere", m=4).chosen.above_floor is None

    @pytest.mark.parametrize(("d", "m"), [(50, 2), (200, 2), (500, 4)])
    def test_noise_alone_has_a_normal_slope_of_one(self, d, m):
        """Not bending but arithmetic: the normal part is all of t but m / d of it."""
        found = tangent_order(gaussians(d), m, sensitivity=False).chosen
        assert found.normal.exponent == pytest.approx(1, abs=0.01)
        assert found.normal.high - found.normal.low < 0.03
        assert found.normal_share > 0.95
        assert not found.above_floor.determined

    def test_the_mean_of_a_bent_patch_is_the_wrong_foot(self):
        """It hangs below a sphere, so that rows near it have the largest normal part."""
        from_mean, from_foot = [], []
        for token, rows in clouds("sphere").items():
            found, seen = fit_local_tangent(rows[:60], 2), rows[60:]
            for point, parts in ((found.mean, from_mean), (found.foot, from_foot)):
                away = array(seen - point)
                normal = away - away @ projector(found.basis)
                radius, beside = (np.linalg.norm(one, axis=1) for one in (away, normal))
                parts.append((np.log(radius), np.log(beside), np.full(60, token)))
        wrong, right = (
            pooled_slope(*(np.concatenate([part[place] for part in parts]) for place in range(3)))
            for parts in (from_mean, from_foot)
        )
        assert wrong.high < 0
        assert right.exponent == pytest.approx(1.75, abs=0.1) and right.low > 1.6


class TestParts:
    def test_every_row_is_split_by_the_other_half(self):
        cloud = {7: random_rows(40, 6)}
        parts = order_parts(cloud, 2, nearest=0.8, seed=3)
        order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
        expected = []
        for fitted, seen in ((order[:20], order[20:]), (order[20:], order[:20])):
            split = fit_local_tangent(cloud[7][fitted], 2, nearest=0.8).parts(cloud[7][seen])
            expected += list(
                zip(split.radius, split.tangent.norm(dim=1), split.normal.norm(dim=1), split.profile, strict=True)
            )
        found = np.stack([parts.radius, parts.tangent, parts.normal, parts.profile], axis=1)
        assert found == pytest.approx(np.array(expected), rel=1e-13)
        assert set(parts.tokens) == {7} and (parts.m, parts.nearest, parts.d) == (2, 0.8, 6)

    def test_numbers_are_the_pooled_ones(self):
        parts = order_parts(clouds("torus outside", 0.01), 2)
        found = parts.numbers(level=0.9, seed=5)
        logs = np.log(parts.radius)
        assert found.tangent == pooled_slope(logs, np.log(parts.tangent), parts.tokens, level=0.9)
        assert found.normal == pooled_slope(logs, np.log(parts.normal), parts.tokens, level=0.9)
        assert found.above_floor == floored_power(
            parts.tangent, parts.normal, parts.tokens, profile=parts.profile, level=0.9, seed=5
        )
        assert found.normal_share == pytest.approx((parts.normal**2).sum() / (parts.radius**2).sum(), rel=1e-12)
        radii = [parts.radius[parts.tokens == token] for token in range(20)]
        variation = np.mean([one.std() / one.mean() for one in radii])
        assert parts.radii() == pytest.approx((parts.radius.mean(), variation), rel=1e-12)

    def test_the_other_tokens_change_nothing(self):
        every = clouds("sphere", 0.01)
        parts = order_parts(every, 2, seed=1)
        some_tokens = order_parts({4: every[4], 2: every[2]}, 2, seed=1)
        assert parts.numbers([2, 4], seed=1).tangent == some_tokens.numbers(seed=1).tangent
        assert parts.numbers([2, 4], seed=1).above_floor == some_tokens.numbers(seed=1).above_floor
        assert parts.radii([2, 4]) == pytest.approx(some_tokens.radii())
        alone = order_parts({4: every[4]}, 2, seed=1)
        assert parts.numbers([4], seed=1) == alone.numbers(seed=1)

    def test_one_flat_token_takes_no_exponent_from_the_others(self):
        flat = Manifold.flat(2).sample(120, 0.7, d=50).rows
        bent = clouds("sphere")
        parts = order_parts({99: flat, **bent}, 2)
        alone = order_parts(bent, 2).numbers()
        found = parts.numbers()
        assert found.normal == alone.normal and found.above_floor == alone.above_floor
        assert found.tangent.groups == 21
        assert parts.numbers([99]).normal is None and parts.numbers([99, 3]).normal.groups == 1

    def test_of_tokens_that_are_not_there_are_refused(self):
        with pytest.raises(ValueError, match=r"none of the tokens \[50\] was split; there are \[0, 1"):
            order_parts(clouds("sphere"), 2).numbers([50])


class TestInvariances:
    @PROPERTY
    @given(some.integers(0, 99), some.integers(-6, 6), some.sampled_from(["sphere", "anisotropic"]))
    def test_no_exponent_depends_on_how_the_space_is_turned_moved_or_scaled(self, seed, exponent, name):
        few = dict(list(clouds(name, 0.01).items())[:4])
        turn, scale = random_frame(50, 50, seed), 10.0**exponent
        moved = {token: scale * (rows @ turn.T + seed) for token, rows in few.items()}
        one, other = (tangent_order(given_as, sensitivity=False) for given_as in (few, moved))
        assert other.m == one.m and other.radius == pytest.approx(scale * one.radius, rel=1e-8)
        assert other.chosen.tangent.exponent == pytest.approx(one.chosen.tangent.exponent, rel=1e-7)
        assert other.chosen.normal.low == pytest.approx(one.chosen.normal.low, rel=1e-7)
        assert other.chosen.above_floor.exponent == one.chosen.above_floor.exponent
        assert other.chosen.normal_share == pytest.approx(one.chosen.normal_share, rel=1e-8)

    def test_nor_on_the_order_of_tokens(self):
        turned = dict(reversed(list(clouds("sphere", 0.01).items())))
        one, other = measured("sphere", 0.01), tangent_order(turned, sensitivity=False)
        assert other.chosen.tangent.exponent == pytest.approx(one.chosen.tangent.exponent, rel=1e-12)
        assert other.chosen.above_floor == one.chosen.above_floor

    def test_the_seed_changes_the_halves_and_little_else(self):
        one, other = measured("sphere", 0.01), measured("sphere", 0.01, seed=1)
        assert one.chosen != other.chosen
        assert other.chosen.above_floor.exponent == pytest.approx(one.chosen.above_floor.exponent, abs=0.11)
        assert one == tangent_order(clouds("sphere", 0.01), sensitivity=False)

    def test_rows_in_single_precision_about_a_huge_mean_count_as_they_are(self):
        single = {token: (rows + 1e4).float() for token, rows in clouds("sphere", 0.01).items() if token < 3}
        double = {token: rows.double() for token, rows in single.items()}
        assert tangent_order(single, 2).chosen == tangent_order(double, 2).chosen
        whole = {token: (1000 * rows).round() for token, rows in clouds("sphere").items() if token < 3}
        as_integers = {token: rows.long() for token, rows in whole.items()}
        assert tangent_order(as_integers, 2).chosen == tangent_order(whole, 2).chosen


class TestChoices:
    def test_other_choices_are_shown_beside(self):
        found = tangent_order(clouds("round in 4"))
        assert [(one.m, one.nearest) for one in found.others] == [(1, 1.0), (2, 1.0), (8, 1.0), (4, 0.5)]
        assert found.chosen == order_parts(clouds("round in 4"), 4).numbers()
        assert found.others[3] == order_parts(clouds("round in 4"), 4, nearest=0.5).numbers()
        assert (found.name, found.rule, found.tokens, found.rows, found.d) == (
            "tokens",
            "participation_ratio",
            20,
            2400,
            50,
        )
        assert 0.3 < found.radius < 0.6 and 0.1 < found.radius_variation < 0.4

    def test_that_the_rows_do_not_allow_are_left_out(self):
        few = {0: random_rows(24, 5)}
        assert other_choices(few, 2, 1.0) == ((1, 1.0),)
        assert other_choices(few, 1, 1.0) == ((2, 1.0), (1, 0.5))

    def test_have_a_table(self):
        found = tangent_order(clouds("sphere"), 2, name="frequent")
        frame = found.to_pandas()
        assert list(frame.m) == [2, 1, 4, 2] and set(frame.name) == {"frequent"} and list(frame.nearest)[-1] == 0.5
        assert (
            frame.tangent[0] == found.chosen.tangent.exponent
            and frame.above_floor[0] == found.chosen.above_floor.exponent
        )
        assert frame.normal_low[1] == found.others[0].normal.low
        assert math.isnan(frame.normal[2]) and math.isnan(frame.floor[2])

    @pytest.mark.parametrize(
        ("given_as", "m", "settings", "message"),
        [
            ({}, 2, {}, "no token's rows were given"),
            ({0: random_rows(30, 4)[:, 0]}, 2, {}, r"must be of shape \(n, d\), not \(30,\)"),
            ({0: random_rows(30, 4), 1: random_rows(30, 5)}, 2, {}, r"rows of widths \[4, 5\]"),
            ({0: random_rows(30, 4), 1: random_rows(3, 4)}, 1, {}, "use m <= 0, or more rows"),
            ({0: random_rows(30, 4)}, 0, {}, "rank 0 spans nothing"),
            ({0: random_rows(90, 4)}, 4, {}, "use m <= 3"),
            ({0: random_rows(30, 4)}, 5, {}, "use m <= 3"),
            ({0: torch.ones(30, 4)}, "participation_ratio", {}, "all rows are equal"),
            ({0: random_rows(30, 4), 1: torch.ones(30, 4)}, 2, {}, "all rows are equal"),
            ({0: random_rows(30, 4) * math.nan}, 2, {}, "NaN or infinity"),
            ({0: random_rows(30, 4)}, 2, {"level": 95}, "level 95 must lie between 0 and 1"),
            ({0: random_rows(30, 4)}, 2, {"nearest": 0}, "nearest 0 must lie in"),
            ({0: random_rows(30, 4)}, 2, {"nearest": math.nan}, "nearest nan must lie in"),
        ],
    )
    def test_what_has_no_order_is_refused(self, given_as, m, settings, message):
        with pytest.raises(ValueError, match=message):
            tangent_order(given_as, m, **settings)
