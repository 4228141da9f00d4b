"""The curvature that rows see: on cylinders, which unroll, on spheres, where it is one everywhere, and where there is none."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from explicit import PROPERTY, array, random_frame, random_rows
from hypothesis import given
from hypothesis import strategies as some

from tangent_lens.measures.curvature import JointForm, joint_form
from tangent_lens.measures.manifolds import Manifold
from tangent_lens.measures.seen_curvature import seen_curvature


def clouds(manifold, radius=0.5, noise=0.0, tokens=20, count=120, d=50, within="tangent"):
    return {
        seed: manifold.sample(count, radius, d=d, noise=noise, within=within, seed=seed).rows for seed in range(tokens)
    }


def cylinder(arc, along, radius=1.0):
    """Points at an arc length around and a length along, which are also the geodesics from (0, 0): a cylinder unrolls."""
    return torch.stack([radius * torch.sin(arc / radius), along, radius * (1 - torch.cos(arc / radius))], dim=1)


def known_cylinder(radius=1.0):
    inner = torch.zeros(2, 2, 2, 2, dtype=torch.float64)
    inner[0, 0, 0, 0] = radius**-2
    return JointForm(torch.zeros(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)[:, :2], inner)


class TestDirections:
    @pytest.mark.parametrize("radius", [1.0, 3.0])
    def test_are_those_in_which_the_way_along_a_cylinder_sets_out(self, radius):
        """By series, what is left is of the fifth power in arc over radius; of the chord's direction, of the third."""
        angles = torch.linspace(0.1, 1.4, 14, dtype=torch.float64)
        errors = []
        for length in (0.6, 0.3):
            rows = cylinder(radius * length * angles.cos(), radius * length * angles.sin(), radius)
            true = angles.cos() ** 4 / radius**2
            found = known_cylinder(radius).seen_by(rows)
            chord = rows[:, 0] ** 4 / rows[:, :2].norm(dim=1) ** 4 / radius**2
            assert array(found.radius) == pytest.approx(array(rows.norm(dim=1)), rel=1e-12)
            assert array(found.tangent_radius) == pytest.approx(array(rows[:, :2].norm(dim=1)), rel=1e-12)
            errors.append([radius**2 * float((one - true).abs().max()) for one in (found.curvature, chord)])
        (turned, chord), (turned_near, chord_near) = errors
        assert turned < 0.15 * chord and turned_near < 0.04 * chord_near
        assert math.log2(turned / turned_near) == pytest.approx(4, abs=0.15)
        assert math.log2(chord / chord_near) == pytest.approx(2, abs=0.15)

    def test_are_those_of_a_fitted_cylinder_too(self):
        generator = torch.Generator().manual_seed(0)
        arc, along = (2 * torch.rand(2, 1000, generator=generator, dtype=torch.float64) - 1) * 0.3
        frame = random_frame(9, 3)
        joint = joint_form(cylinder(arc, along) @ frame.T, 2)
        angles = torch.linspace(0, math.pi / 2, 9, dtype=torch.float64)
        found = joint.seen_by(cylinder(0.3 * angles.cos(), 0.3 * angles.sin()) @ frame.T).curvature
        assert array(found) == pytest.approx(array(angles.cos() ** 4), abs=0.04)

    def test_of_anything_are_those_of_an_explicit_loop(self):
        rows = random_rows(60, 6)
        joint = joint_form(rows, 2)
        inner, found = array(joint.inner), joint.seen_by(rows[:5])
        for place, row in enumerate(array(rows[:5])):
            u = (row - array(joint.foot)) @ array(joint.basis)
            turned = u.copy()
            for i, j, k, axis in np.ndindex(2, 2, 2, 2):
                turned[axis] += u[i] * u[j] * u[k] * inner[i, j, k, axis] / 6
            v = turned / np.linalg.norm(turned)
            expected = sum(v[i] * v[j] * v[k] * v[m] * inner[i, j, k, m] for i, j, k, m in np.ndindex(2, 2, 2, 2))
            assert float(found.curvature[place]) == pytest.approx(expected, rel=1e-9)

    def test_a_row_on_the_foot_sees_nothing(self):
        found = known_cylinder().seen_by(torch.zeros(1, 3))
        assert float(found.curvature) == float(found.radius) == 0


class TestRatio:
    @pytest.mark.parametrize(("noise", "within"), [(0.0, 0.003), (0.01, 0.03)])
    @pytest.mark.parametrize("m", [2, 3])
    def test_is_one_on_a_sphere(self, m, noise, within):
        found = seen_curvature(clouds(Manifold.sphere(m), noise=noise), m)
        assert found.ratio == pytest.approx(1, abs=within)
        assert found.low < found.ratio < found.high and found.high - found.low < 2 * within
        assert (found.m, found.tokens, found.level, found.name) == (m, 20, 0.95, "tokens")

    def test_near_and_far_are_squares_of_radius_over_that_of_the_sphere(self):
        rows = clouds(Manifold.sphere(2, 5.0), 1.0)
        found = seen_curvature(rows, 2)
        expected = np.mean([float(one.square().sum(dim=1).mean()) for one in rows.values()]) / 25
        assert found.near == pytest.approx(expected, rel=0.05) and found.far == pytest.approx(expected, rel=0.05)

    def test_is_above_one_where_rows_spread_along_what_bends(self):
        """A cylinder, and rows that lie twice as far around it as along it."""
        rows = {}
        for seed in range(20):
            arc, along = torch.from_numpy(np.random.default_rng(seed).uniform(-1, 1, size=(2, 150)))
            rows[seed] = cylinder(0.6 * arc, 0.3 * along) @ random_frame(9, 3, seed).T
        found = seen_curvature(rows, 2)
        direct = []
        for seed in range(20):
            arc, along = np.random.default_rng(seed).uniform(-1, 1, size=(2, 150)) * [[0.6], [0.3]]
            radius = np.sqrt((2 * np.sin(arc / 2)) ** 2 + along**2)
            curvature = (arc**2 / (arc**2 + along**2)) ** 2
            order = np.argsort(radius)
            direct.append([curvature[order[:75]].mean(), curvature[order[75:]].mean()])
        near, far = np.mean(direct, axis=0)
        assert found.low > 1.1 and found.ratio == pytest.approx(far / near, rel=0.05)

    @pytest.mark.parametrize("noise", [0.01, 0.05])
    def test_is_none_on_a_flat_noisy_cloud(self, noise):
        found = seen_curvature(clouds(Manifold.flat(2), noise=noise), 2)
        assert found.ratio is found.low is found.high is None
        assert abs(found.near) < 10 * noise**2

    def test_is_none_of_noise_alone(self):
        rows = {seed: torch.from_numpy(np.random.default_rng(seed).normal(size=(120, 50))) for seed in range(20)}
        assert seen_curvature(rows, 2).ratio is None

    def test_of_one_token_has_no_interval(self):
        found = seen_curvature(clouds(Manifold.sphere(2), tokens=1), 2)
        assert found.ratio == pytest.approx(1, abs=0.01) and found.low is found.high is None

    def test_interval_is_that_of_resampled_tokens(self):
        rows = clouds(Manifold.paraboloid([1.0, 0.3]), noise=0.003)
        found, pairs = seen_curvature(rows, 2, level=0.9, seed=3), []
        for one in rows.values():
            seen = joint_form(one, 2, seed=3).seen_by(one)
            order, scale = np.argsort(array(seen.radius)), float((seen.radius**2).mean())
            curvature = array(seen.curvature) * scale
            pairs.append((curvature[order[:60]].mean(), curvature[order[60:]].mean()))
        pairs = np.array(pairs)
        assert (found.near, found.far) == pytest.approx(tuple(pairs.mean(axis=0)), rel=1e-9)
        assert found.ratio == pytest.approx(found.far / found.near, rel=1e-12)
        generator = np.random.default_rng(8)
        draws = np.array([pairs[generator.integers(0, 20, 20)].mean(axis=0) for _ in range(2000)])
        low, high = np.quantile(draws[:, 1] / draws[:, 0], [0.05, 0.95])
        assert (found.low, found.high) == pytest.approx((low, high), abs=0.15 * (high - low))

    @PROPERTY
    @given(some.integers(0, 99), some.integers(-6, 6))
    def test_depends_on_no_turn_place_or_unit(self, seed, exponent):
        rows = clouds(Manifold.paraboloid([1.0, 0.3]), noise=0.003, tokens=3)
        turn = random_frame(50, 50, seed)
        moved = {token: 10.0**exponent * (one @ turn.T + seed) for token, one in reversed(rows.items())}
        one, other = seen_curvature(rows, 2, resamples=20), seen_curvature(moved, 2, resamples=20)
        assert (other.near, other.far, other.ratio) == pytest.approx((one.near, one.far, one.ratio), rel=1e-6)

    def test_lowers_m_to_what_the_rows_determine(self):
        assert seen_curvature({0: random_rows(40, 9)}, 5).m == 2

    @pytest.mark.parametrize(
        ("given_as", "m", "settings", "message"),
        [
            ({}, 2, {}, "no token's rows were given"),
            ({0: random_rows(17, 4)}, 2, {}, "17 rows of a token determine no quadratic; use 18 or more"),
            ({0: random_rows(90, 4), 1: random_rows(90, 5)}, 2, {}, r"widths \[4, 5\]"),
            ({0: random_rows(90, 4)}, 0, {}, "m 0 must be 1 or more"),
            ({0: random_rows(90, 4)}, 4, {}, "m 4 must lie between 1 and 3"),
            ({0: random_rows(90, 4)}, 2, {"level": 95}, "level 95 must lie"),
            ({0: random_rows(90, 4)}, 2, {"resamples": 0}, "0 resamples give no interval"),
            ({0: random_rows(90, 4)}, 2, {"nearest": 0}, "nearest 0 must lie in"),
            ({0: torch.ones(90, 4)}, 2, {}, "all rows are equal"),
            ({0: random_rows(90, 4) * math.nan}, 2, {}, "NaN or infinity"),
        ],
    )
    def test_of_what_has_none_is_refused(self, given_as, m, settings, message):
        with pytest.raises(ValueError, match=message):
            seen_curvature(given_as, m, **settings)
