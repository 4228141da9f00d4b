"""Second fundamental forms against explicit regressions, Hessians and the closed forms of known manifolds."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from explicit import PROPERTY, array, projector, random_frame, random_rows
from hypothesis import given
from hypothesis import strategies as some
from scipy.stats import t as student

from tangent_lens.measures.curvature import (
    bent_dimension,
    halves,
    joint_form,
    most_bent_dimension,
    principal_curvatures,
    second_fundamental_form,
)
from tangent_lens.measures.curvature_summary import curvature_summary
from tangent_lens.measures.explained_normal import explained_normal
from tangent_lens.measures.local_tangent import fit_local_tangent, nearness, products
from tangent_lens.measures.manifolds import Manifold

# A manifold and the tangent radius of a patch that is small for its curvature.
PLACES = {
    "sphere": (Manifold.sphere(2, 2.0), 0.3),
    "sphere in 4": (Manifold.sphere(4), 0.15),
    "torus outside": (Manifold.torus(), 0.15),
    "torus inside": (Manifold.torus(angle=math.pi), 0.15),
    "torus on top": (Manifold.torus(angle=math.pi / 2), 0.15),
    "paraboloid": (Manifold.paraboloid([2.0, 0.5, -1.0]), 0.1),
    "saddle": (Manifold.paraboloid([2.0, -2.0]), 0.1),
    "swiss roll": (Manifold.swiss_roll(), 0.8),
    "flat": (Manifold.flat(2), 0.5),
}
SEEDS = range(100)


def cloud(name, noise=0.0, seed=1, count=500, d=20):
    """Noise in units of how far the patch bends at its edge."""
    manifold, radius = PLACES[name]
    bend = max(map(abs, manifold.principal_curvatures)) * radius**2 / 2 or radius
    return manifold.sample(count, radius, d=d, noise=noise * bend, within="tangent", seed=seed).rows


@functools.cache
def forms(name, noise=0.02, radius=0.5, count=120, d=50):
    """Of a hundred clouds of the same manifold."""
    manifold = {"sphere": Manifold.sphere(2), "flat": Manifold.flat(2), "saddle": Manifold.paraboloid([1.0, -1.0])}[
        name
    ]
    rows = [manifold.sample(count, radius, d=d, noise=noise, within="tangent", seed=seed).rows for seed in SEEDS]
    return rows, [second_fundamental_form(one, 2) for one in rows]


def mean_and_error(values):
    return float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))


class TestForm:
    @pytest.mark.parametrize("nearest", [1.0, 0.6])
    def test_is_a_weighted_regression(self, nearest):
        rows = random_rows(90, 6) + 3
        found, tangent = second_fundamental_form(rows, 2, nearest=nearest), fit_local_tangent(rows, 2, nearest=nearest)
        parts = tangent.parts(rows)
        u, root = array(parts.tangent), np.sqrt(array(nearness((rows - tangent.mean).norm(dim=1), nearest)))[:, None]
        design = np.column_stack([np.ones(90), u, u[:, 0] ** 2, 2 * u[:, 0] * u[:, 1], u[:, 1] ** 2])
        coefficients = np.linalg.lstsq(root * design, root * array(parts.normal), rcond=None)[0]
        for place, (i, j) in enumerate([(0, 0), (0, 1), (1, 1)]):
            assert array(found.form[i, j]) == pytest.approx(2 * coefficients[3 + place], rel=1e-8, abs=1e-10)
            assert torch.equal(found.form[i, j], found.form[j, i])
        hat = np.linalg.pinv(root * design) * root.T
        assert array(found.noise) == pytest.approx(4 * (hat @ hat.T)[3:, 3:], rel=1e-8)
        # Degrees of freedom: the mean of the weighted squares of residuals that unit noise leaves.
        left = np.eye(90) - design @ hat
        freedom = np.trace(left.T @ np.diag(root[:, 0] ** 2) @ left)
        squares = (root**2 * (array(parts.normal) - design @ coefficients) ** 2).sum()
        assert found.residual == pytest.approx(squares / freedom, rel=1e-9)
        assert torch.equal(found.foot, tangent.foot) and torch.equal(found.basis, tangent.basis)

    def test_is_the_hessian_of_a_graph(self):
        """Three normal directions, in each of which the graph has a quadratic of its own and higher terms."""

        def graph(u):
            one, other = u
            bent = [one**2 + one * other, torch.sin(one) * other + 0.3 * other**2, torch.cos(other - one)]
            return torch.stack([*u, *bent])

        u = 0.05 * (2 * torch.rand(300, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 1)
        found = second_fundamental_form(torch.stack([graph(one) for one in u]), 2)
        origin = found.foot[:2]
        first = torch.autograd.functional.jacobian(graph, origin)
        second = torch.stack(
            [torch.autograd.functional.hessian(lambda v, place=place: graph(v)[place], origin) for place in range(5)]
        )
        normal = np.eye(5) - projector(torch.linalg.qr(first).Q)
        # The chart's directions, as coordinates in the fitted basis.
        turn = array(torch.linalg.inv(first.T @ first) @ first.T @ found.basis)
        expected = np.einsum("xy,yij,ia,jb->abx", normal, array(second), turn, turn)
        assert projector(found.basis) == pytest.approx(projector(torch.linalg.qr(first).Q), abs=2e-3)
        assert array(found.form) == pytest.approx(expected, abs=0.01)

    @pytest.mark.parametrize("name", PLACES)
    def test_has_the_curvatures_of_known_manifolds(self, name):
        curvatures = np.array(PLACES[name][0].principal_curvatures)
        rows, m = cloud(name), len(curvatures)
        found = second_fundamental_form(rows, m)
        size = max(np.square(curvatures).sum(), 1e-9)
        assert array(found.principal_curvatures()) == pytest.approx(np.sort(curvatures)[::-1], abs=0.02 * size**0.5)
        assert array(principal_curvatures(rows, m)) == pytest.approx(np.sort(curvatures)[::-1], abs=0.02 * size**0.5)
        assert found.mean_curvature_square == pytest.approx(curvatures.mean() ** 2, abs=0.015 * size)
        assert float(found.mean_curvature.norm()) == pytest.approx(abs(curvatures.mean()), abs=0.01 * size**0.5)
        assert found.square == pytest.approx(np.square(curvatures).sum(), abs=0.02 * size)
        gauss = curvatures.sum() ** 2 - np.square(curvatures).sum()
        assert found.scalar_curvature == pytest.approx(gauss, abs=0.1 * size)

    @pytest.mark.parametrize("name", [name for name in PLACES if name != "flat"])
    def test_has_them_under_noise_too(self, name):
        """Of a tenth of the bend at the edge, in each of 20 coordinates; averaged over 6 clouds."""
        curvatures = np.array(PLACES[name][0].principal_curvatures)
        m, size = len(curvatures), np.linalg.norm(curvatures)
        clouds = [cloud(name, 0.1, seed) for seed in range(6)]
        found = [second_fundamental_form(rows, m) for rows in clouds]
        assert np.mean([one.square for one in found]) == pytest.approx(size**2, rel=0.06)
        assert np.mean([one.mean_curvature_square for one in found]) == pytest.approx(
            curvatures.mean() ** 2, abs=0.06 * size**2
        )
        principal = np.mean([array(principal_curvatures(rows, m)) for rows in clouds], axis=0)
        assert principal == pytest.approx(np.sort(curvatures)[::-1], abs=0.08 * size)

    def test_bends_towards_the_centre_of_a_sphere(self):
        sample = Manifold.sphere(3, 2.0).sample(300, 0.4, d=9, within="tangent", noise=0.002)
        found = second_fundamental_form(sample.rows, 3)
        assert float(found.bending_direction @ sample.normal) > 0.99
        assert float(found.mean_curvature @ sample.normal) == pytest.approx(0.5, abs=0.03)
        assert array(found.principal_curvatures(-7 * sample.normal)) == pytest.approx(-0.5, abs=0.06)

    def test_along_a_direction_is_euler_s_formula(self):
        sample = Manifold.paraboloid([2.0, -1.0]).sample(300, 0.1, d=6, within="tangent")
        found = second_fundamental_form(sample.rows, 2)
        angles = torch.linspace(0, math.pi, 7, dtype=torch.float64)
        directions = torch.stack([angles.cos(), angles.sin()], dim=1) @ sample.tangent.T @ found.basis
        expected = 2 * angles.cos() ** 2 - angles.sin() ** 2
        assert array(found.along(3 * directions) @ sample.normal) == pytest.approx(9 * array(expected), abs=0.02)
        assert float(found.along(directions).sub(expected[:, None] * sample.normal).norm(dim=1).max()) < 0.02

    @PROPERTY
    @given(some.integers(0, 99), some.integers(-6, 6), some.sampled_from(["saddle", "paraboloid", "sphere in 4"]))
    def test_curvature_is_one_over_length_however_the_rows_are_turned_and_moved(self, seed, exponent, name):
        rows, m = cloud(name, 0.1, count=120), PLACES[name][0].dimension
        turn, scale = random_frame(20, 20, seed), 10.0**exponent
        one, other = second_fundamental_form(rows, m), second_fundamental_form(scale * (rows @ turn.T + 0.1 * seed), m)
        assert scale**2 * other.square == pytest.approx(one.square, rel=1e-6)
        assert scale**2 * other.scalar_curvature == pytest.approx(one.scalar_curvature, rel=1e-6, abs=1e-6 * one.square)
        # Mean curvature is a vector, and turns too.
        assert array(scale * other.mean_curvature) == pytest.approx(array(turn @ one.mean_curvature), abs=1e-6)
        assert scale**-2 * other.residual == pytest.approx(one.residual, rel=1e-6)


class TestNoise:
    @pytest.mark.parametrize(
        ("name", "mean", "square"), [("sphere", 1.0, 2.0), ("flat", 0.0, 0.0), ("saddle", 0.0, 2.0)]
    )
    def test_adds_nothing_on_average_to_corrected_squares(self, name, mean, square):
        found = forms(name)[1]
        # The second-order form of a patch this large is a little more than that at its foot.
        more = 0.1 * square
        for corrected, raw, truth, extra in (
            (
                [one.mean_curvature_square for one in found],
                [float(one.mean_curvature.square().sum()) for one in found],
                mean,
                more / 2,
            ),
            ([one.square for one in found], [float(one.form.square().sum()) for one in found], square, more),
        ):
            middle, error = mean_and_error(corrected)
            assert abs(middle - truth) < extra + 3 * error
            middle, error = mean_and_error(raw)
            assert middle - truth - extra > 8 * error

    def test_products_of_halves_have_none_either(self):
        rows = forms("flat")[0]
        joints = [joint_form(one, 2).inner for one in rows]
        for values in (
            [float(torch.einsum("ijij->", one)) for one in joints],
            [float(torch.einsum("iikk->", one)) for one in joints],
        ):
            middle, error = mean_and_error(values)
            assert abs(middle) < 3 * error

    def test_is_what_the_residual_says(self):
        rows, found = forms("flat")
        middle, error = mean_and_error([one.residual / (48 * 0.02**2) for one in found])
        # The fit turns the plane to where there is a little less of it.
        assert middle == pytest.approx(0.99, abs=0.015) and error < 0.005 and len(rows) == 100

    def test_of_a_saddle_does_not_favour_one_side(self):
        """Which side is up is chance, and taken where the mean is not negative: that is all by which the sides differ."""
        principal = np.array([array(principal_curvatures(rows, 2)) for rows in forms("saddle", count=240)[0]])
        # Noise in the direction takes a little off both.
        assert principal.mean(axis=0) == pytest.approx([0.95, -0.92], abs=0.04)

    def test_of_halves_that_disagree_about_the_side_is_read_along_one(self):
        """Curvatures that sum to 0 have no side of their own: 2, -1, -1 and 1, 1, -2 are the same surface."""
        manifold, sides = Manifold.paraboloid([2.0, -1.0, -1.0]), []
        for seed in range(30):
            rows = manifold.sample(200, 0.2, d=10, noise=0.002, within="tangent", seed=seed).rows
            found = array(principal_curvatures(rows, 3, seed=seed))
            sides.append(found[0] > 1.5)
            assert found == pytest.approx([2, -1, -1] if sides[-1] else [1, 1, -2], abs=0.35)
        assert 5 < sum(sides) < 25

    def test_in_the_direction_makes_curvatures_larger_unless_another_half_gives_it(self):
        rows, found = forms("flat", noise=0.01)
        own = np.mean([float(one.principal_curvatures().abs().max()) for one in found])
        held_out = np.mean([float(principal_curvatures(one, 2).abs().max()) for one in rows])
        assert own > 2 * held_out


class TestExplainedNormal:
    @pytest.mark.parametrize("name", [name for name in PLACES if name != "flat"])
    def test_is_all_of_a_smooth_bend(self, name):
        found = explained_normal(cloud(name), PLACES[name][0].dimension)
        assert 0.995 < found.share <= 1 and found.rows == 500

    def test_is_nothing_of_noise(self):
        shares = [explained_normal(rows, 2).share for rows in forms("flat")[0]]
        assert min(shares) > -0.2 and max(shares) < 0.01

    def test_is_the_share_of_the_bend_in_between(self):
        """Of u1 u2 and as large a noise. What a row counts by its nearness is averaged over a grid of the square."""
        generator = torch.Generator().manual_seed(0)
        u = torch.rand(4000, 2, generator=generator, dtype=torch.float64) * 12**0.5 - 3**0.5
        height = u[:, :1] * u[:, 1:] + torch.randn(4000, 1, generator=generator, dtype=torch.float64)
        found = explained_normal(torch.cat([100 * u, height], dim=1), 2)
        one, other = np.meshgrid(*2 * [np.linspace(-(3**0.5), 3**0.5, 400)])
        counts = np.clip(1 - (np.hypot(one, other) / (1.05 * 6**0.5)) ** 3, 0, 1) ** 3
        bend = (counts * (one * other) ** 2).sum() / counts.sum()
        assert found.share == pytest.approx(bend / (1 + bend), abs=0.02)

    def test_is_that_of_explicit_folds(self):
        rows = cloud("saddle", 0.3, count=60, d=5)
        order = torch.randperm(60, generator=torch.Generator().manual_seed(2))
        bent = plain = 0.0
        for fold in range(4):
            out = order[fold::4].tolist()
            kept = rows[[row for row in range(60) if row not in out]]
            tangent = fit_local_tangent(kept, 2)
            root = array(nearness((kept - tangent.mean).norm(dim=1), 1.0).sqrt())[:, None]
            reach = 1.05 * float((kept - tangent.mean).norm(dim=1).max())
            far = array((rows[out] - tangent.mean).norm(dim=1))
            counts = np.clip(1 - (far / reach) ** 3, 0, 1)[:, None] ** 3
            own, seen = tangent.parts(kept), tangent.parts(rows[out])

            def columns(parts, much):
                one, other = array(parts.tangent).T
                bends = [one**2, one * other, other**2] if much else []
                return np.column_stack([np.ones(len(one)), one, other, *bends])

            errors = []
            for much in (True, False):
                found = np.linalg.lstsq(root * columns(own, much), root * array(own.normal), rcond=None)[0]
                errors.append((counts * (array(seen.normal) - columns(seen, much) @ found) ** 2).sum())
            bent, plain = bent + errors[0], plain + errors[1]
        assert explained_normal(rows, 2, folds=4, seed=2).share == pytest.approx(1 - bent / plain, rel=1e-9)

    @pytest.mark.parametrize(
        ("rows", "m", "settings", "message"),
        [
            (random_rows(90, 5), 2, {"folds": 1}, "1 folds of 90 rows: use between 2 and 90"),
            (random_rows(90, 5), 2, {"folds": 91}, "91 folds of 90 rows"),
            (random_rows(20, 5), 2, {}, "16 rows are too few for a quadratic of m 2"),
            (random_rows(90, 5), 5, {}, "m 5 must lie between 1 and 4"),
            (random_rows(90, 5)[:, 0], 2, {}, r"rows must be of shape \(n, d\)"),
            (Manifold.flat(2).sample(90, 0.5, d=20).rows, 2, {}, "have no normal part at all"),
        ],
    )
    def test_of_what_has_none_is_refused(self, rows, m, settings, message):
        with pytest.raises(ValueError, match=message):
            explained_normal(rows, m, **settings)


class TestJointForm:
    def test_is_the_product_of_the_forms_of_two_halves(self):
        rows = cloud("paraboloid", 0.1)
        joint = joint_form(rows, 3, seed=4)
        one, other = (second_fundamental_form(half, 3) for half in halves(rows, 4))
        assert array(joint.foot) == pytest.approx(array(one.foot + other.foot) / 2, abs=1e-14)
        first, second = (
            np.einsum("ia,jb,ijd->abd", turn, turn, array(half.form))
            for half in (one, other)
            for turn in [array(half.basis.T @ joint.basis)]
        )
        inner = np.einsum("ijd,kld->ijkl", first, second)
        assert array(joint.inner) == pytest.approx((inner + inner.transpose(2, 3, 0, 1)) / 2, rel=1e-10)
        # The basis lies between those of the halves.
        apart = np.linalg.norm(projector(one.basis) - projector(other.basis))
        for half in (one, other):
            distance = np.linalg.norm(projector(half.basis) - projector(joint.basis))
            assert distance == pytest.approx(apart / 2, rel=0.01)

    def test_halves_share_no_row(self):
        one, other = halves(torch.arange(41)[:, None], 3)
        assert sorted([*one.flatten().tolist(), *other.flatten().tolist()]) == list(range(41)) and len(one) == 20


class TestSummary:
    def test_of_a_sphere(self):
        """Of radius 2, and patches of tangent radius 0.6."""
        samples = [
            Manifold.sphere(2, 2.0).sample(150, 0.6, d=30, noise=0.002, within="tangent", seed=s) for s in range(12)
        ]
        found = curvature_summary({seed: one.rows for seed, one in enumerate(samples)}, 2, name="here")
        assert (found.name, found.m, found.tokens) == ("here", 2, 12)
        assert found.curvature == pytest.approx(0.5, rel=0.03) and found.mean_curvature == pytest.approx(0.5, rel=0.03)
        assert found.curvature_low < found.curvature < found.curvature_high < 1.05 * found.curvature_low
        assert found.explained_low < found.explained < found.explained_high and found.explained > 0.7
        along = torch.cat([one.rows @ one.tangent for one in samples]).norm(dim=1)
        assert found.bend == pytest.approx(float(along.square().mean().sqrt()) * 0.5 / 2, rel=0.05)
        chords = torch.cat([one.rows for one in samples]).norm(dim=1)
        excess = (4 * torch.asin(chords / 4) / chords - 1).mean()
        assert found.arc_excess == pytest.approx(float(excess), rel=0.06)

    @pytest.mark.parametrize("name", ["torus outside", "torus inside", "torus on top", "paraboloid", "sphere in 4"])
    def test_curvature_is_the_root_mean_square_over_directions(self, name):
        curvatures = np.array(PLACES[name][0].principal_curvatures)
        directions = np.random.default_rng(0).normal(size=(200_000, len(curvatures)))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        expected = math.sqrt((((directions**2) @ curvatures) ** 2).mean())
        found = curvature_summary({seed: cloud(name, 0.1, seed) for seed in range(3)}, len(curvatures))
        assert found.curvature == pytest.approx(expected, rel=0.04)

    def test_intervals_are_those_of_student(self):
        clouds = {seed: cloud("saddle", 0.3, seed, 100) for seed in range(6)}
        found = curvature_summary(clouds, 2, level=0.9)
        shares = [explained_normal(rows, 2).share for rows in clouds.values()]
        half = student.ppf(0.95, 5) * np.std(shares, ddof=1) / math.sqrt(6)
        assert (found.explained_low, found.explained_high) == pytest.approx(
            (np.mean(shares) - half, np.mean(shares) + half)
        )
        inner = [array(joint_form(rows, 2).inner) for rows in clouds.values()]
        values = [(np.einsum("iikk->", one) + 2 * np.einsum("ijij->", one)) / 8 for one in inner]
        half = student.ppf(0.95, 5) * np.std(values, ddof=1) / math.sqrt(6)
        assert found.curvature == pytest.approx(math.sqrt(np.mean(values)), rel=1e-9)
        assert found.curvature_low == pytest.approx(math.sqrt(np.mean(values) - half), rel=1e-9)
        assert found.curvature_high == pytest.approx(math.sqrt(np.mean(values) + half), rel=1e-9)

    def test_of_noise_is_flat(self):
        rows = {seed: torch.from_numpy(np.random.default_rng(seed).normal(size=(120, 50))) for seed in range(20)}
        found = curvature_summary(rows, 2)
        assert found.explained_high < 0.01 and found.curvature_low == 0 and found.curvature < 0.05

    def test_of_flat_rows_without_noise_is_flat(self):
        flat = {seed: cloud("flat", seed=seed) for seed in range(3)}
        found = curvature_summary(flat, 2)
        assert found.curvature == pytest.approx(0, abs=1e-12) and found.explained == 0
        assert found.bend == pytest.approx(0, abs=1e-12)

    def test_of_one_token_has_no_interval(self):
        found = curvature_summary({3: cloud("sphere")}, 2)
        assert found.explained_low is found.curvature_low is found.curvature_high is None
        assert found.curvature == pytest.approx(0.5, rel=0.02)

    def test_depends_on_no_order_of_tokens_and_on_no_unit(self):
        clouds = {seed: cloud("torus outside", 0.1, seed, 120) for seed in range(4)}
        turned = {seed: 1000 * rows + 5 for seed, rows in reversed(clouds.items())}
        one, other = curvature_summary(clouds, 2), curvature_summary(turned, 2)
        assert 1000 * other.curvature == pytest.approx(one.curvature, rel=1e-7)
        assert (other.explained, other.bend) == pytest.approx((one.explained, one.bend), rel=1e-7)

    def test_lowers_m_to_what_the_rows_determine(self):
        assert curvature_summary({0: random_rows(40, 9)}, 5).m == 2
        assert curvature_summary({0: random_rows(40, 9)}, 5, nearest=0.5).m == 1
        assert curvature_summary({0: random_rows(90, 9), 1: random_rows(18, 9)}, 5).m == 1

    @pytest.mark.parametrize("nearest", [1.0, 0.5])
    @pytest.mark.parametrize("rows", [17, 18, 35, 36, 59, 60, 71, 90, 126, 200])
    def test_the_largest_m_is_the_last_that_half_the_rows_fit(self, rows, nearest):
        most = most_bent_dimension(rows, nearest)
        used = round(nearest * (rows // 2))
        assert most == max((m for m in range(1, 20) if 3 * (1 + m + products(m)) <= used), default=0)
        values = random_rows(rows // 2, 25)
        if most:
            second_fundamental_form(values, most, nearest=nearest)
        with pytest.raises(ValueError, match=r"use a smaller m|use m <="):
            second_fundamental_form(values, most + 1, nearest=nearest)

    @pytest.mark.parametrize(
        ("clouds", "m", "settings", "message"),
        [
            ({}, 2, {}, "no token's rows were given"),
            ({0: random_rows(17, 4)}, 2, {}, "17 rows of a token determine no quadratic; use 18 or more"),
            ({0: random_rows(30, 4)}, 2, {"nearest": 0.5}, "30 rows of a token determine no quadratic; use 36 or more"),
            ({0: random_rows(90, 4), 1: random_rows(90, 5)}, 2, {}, r"widths \[4, 5\]"),
            ({0: random_rows(90, 4)[:, 0]}, 2, {}, r"must be of shape \(n, d\)"),
            ({0: random_rows(90, 4)}, 0, {}, "m 0 must be 1 or more"),
            ({0: random_rows(90, 4)}, 4, {}, "m 4 .* between 1 and 3|m 4 must lie between 1 and 3"),
            ({0: random_rows(90, 4)}, 2, {"level": 95}, "level 95 must lie"),
            ({0: random_rows(90, 4)}, 2, {"nearest": 2}, "nearest 2 must lie in"),
            ({0: torch.ones(90, 4)}, 2, {}, "all rows are equal"),
            ({0: random_rows(90, 4) * math.nan}, 2, {}, "NaN or infinity"),
        ],
    )
    def test_of_what_has_none_is_refused(self, clouds, m, settings, message):
        with pytest.raises(ValueError, match=message):
            curvature_summary(clouds, m, **settings)
        if "level" not in settings and clouds and len(clouds[0]) < 40:
            with pytest.raises(ValueError, match=message):
                bent_dimension(clouds, m, settings.get("nearest", 1.0))


def test_forms_that_bend_nowhere_have_no_direction():
    flat = second_fundamental_form(cloud("flat"), 2)
    zeros = type(flat)(flat.foot, flat.basis, torch.zeros_like(flat.form), flat.noise, 0.0)
    with pytest.raises(ValueError, match="is zero, so it bends in no direction"):
        zeros.principal_curvatures()
    with pytest.raises(ValueError, match="a normal direction of length 0"):
        flat.principal_curvatures(torch.zeros(20))
    with pytest.raises(ValueError, match="has 6 coefficients and needs 3 rows of each, not 17"):
        second_fundamental_form(random_rows(17, 5), 2)


def test_rows_of_other_kinds_count_in_float64():
    rows = (1000 * cloud("saddle", 0.1)).round()
    assert torch.equal(second_fundamental_form(rows.long(), 2).form, second_fundamental_form(rows, 2).form)
    single = (cloud("saddle", 0.1) + 10).float()
    assert torch.equal(second_fundamental_form(single, 2).form, second_fundamental_form(single.double(), 2).form)
    assert explained_normal(rows.long(), 2) == explained_normal(rows, 2)
