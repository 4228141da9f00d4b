"""Points against the equations they must satisfy, their curvatures by finite differences, and their evenness over area."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from explicit import PROPERTY, array
from hypothesis import given
from hypothesis import strategies as some
from scipy.integrate import quad
from scipy.stats import kstest

from tangent_lens.measures.manifolds import Manifold

TORI = tuple(Manifold.torus(2.5, 0.8, angle) for angle in (0.0, 1.0, math.pi / 2, math.pi, 4.0))
ROLLS = (Manifold.swiss_roll(0.7, 5.0), Manifold.swiss_roll(1.0, 1.0))
EVERY = (
    Manifold.flat(3),
    Manifold.sphere(2, 1.7),
    Manifold.sphere(4),
    Manifold.paraboloid([2.0, -0.5, 0.0]),
    *TORI,
    *ROLLS,
)


def name_of(manifold):
    return f"{manifold.name} {manifold.dimension} {manifold.reach:.3g}"


every = pytest.mark.parametrize("manifold", EVERY, ids=name_of)


def coordinates(sample):
    """Along the true tangent, and towards the bend."""
    return sample.rows @ sample.tangent, sample.rows @ sample.normal


def chart_derivatives(manifold):
    """Jacobian (m+1, m) and Hessian (m+1, m, m) of the chart at the base point, by central differences."""
    m, h = manifold.dimension, 1e-4 * min(manifold.reach, 1)

    def at(*steps):
        u = torch.zeros(1, m, dtype=torch.float64)
        for axis, size in steps:
            u[0, axis] += size * h
        return manifold.chart(u)[0][0]

    first = torch.stack([(at((i, 1)) - at((i, -1))) / (2 * h) for i in range(m)], dim=1)
    corners = [
        [sum(a * b * at((i, a), (j, b)) for a in (1, -1) for b in (1, -1)) / (4 * h * h) for j in range(m)]
        for i in range(m)
    ]
    return first, torch.stack([torch.stack(row) for row in corners]).permute(2, 0, 1)


@every
class TestEveryManifold:
    def test_has_its_base_point_at_zero_and_its_tangent_on_the_first_axes(self, manifold):
        point, area = manifold.chart(torch.zeros(1, manifold.dimension, dtype=torch.float64))
        assert float(point.abs().max()) < 1e-14 and float(area) > 0
        first, _ = chart_derivatives(manifold)
        assert float(first[-1].abs().max()) < 1e-7
        assert torch.linalg.matrix_rank(first[:-1]) == manifold.dimension

    def test_has_the_principal_curvatures_that_it_says(self, manifold):
        first, second = chart_derivatives(manifold)
        metric = first.T @ first
        # The normal of the surface is the last axis, so the second form is the Hessian along it.
        root = torch.linalg.cholesky(metric)
        shape = torch.linalg.solve(root, torch.linalg.solve(root, second[-1]).T)
        found = torch.linalg.eigvalsh(shape).tolist()
        assert found == pytest.approx(sorted(manifold.principal_curvatures), abs=2e-6)

    def test_gives_every_point_the_area_it_stands_for(self, manifold):
        u = 0.4 * (
            torch.rand(5, manifold.dimension, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 0.5
        )
        u = u * min(manifold.reach, 1)

        def jacobian(one):
            return torch.autograd.functional.jacobian(lambda v: manifold.chart(v[None])[0][0], one)

        metrics = [jacobian(one).T @ jacobian(one) for one in u]
        expected = torch.stack([torch.linalg.det(metric).sqrt() for metric in metrics])
        ratio = manifold.chart(u)[1] / expected
        assert array(ratio) == pytest.approx(float(ratio[0]), rel=1e-9)

    @pytest.mark.parametrize("within", ["chord", "tangent"])
    def test_samples_lie_in_their_ball_and_reach_its_edge(self, manifold, within):
        radius = min(manifold.reach, 1.0)
        sample = manifold.sample(400, radius, within=within, d=8, seed=3)
        along, _ = coordinates(sample)
        far = (sample.rows if within == "chord" else along).norm(dim=1)
        assert 0.9 * radius < float(far.max()) <= radius * (1 + 1e-12)
        assert sample.rows.shape == (400, 8)

    def test_samples_turned_into_more_dimensions_have_no_other_part(self, manifold):
        sample = manifold.sample(30, 0.5 * min(manifold.reach, 1), d=12, seed=1)
        frame = torch.cat([sample.tangent, sample.normal[:, None]], dim=1)
        assert array(frame.T @ frame) == pytest.approx(array(torch.eye(manifold.dimension + 1)), abs=1e-13)
        assert float((sample.rows - sample.rows @ frame @ frame.T).abs().max()) < 1e-14


class TestEquations:
    def test_of_a_sphere(self):
        sample = Manifold.sphere(3, 1.7).sample(200, 1.2, d=9)
        assert array((sample.rows - 1.7 * sample.normal).norm(dim=1)) == pytest.approx(1.7, rel=1e-13)

    def test_of_a_paraboloid(self):
        along, height = coordinates(Manifold.paraboloid([2.0, -0.5, 0.0]).sample(200, 1.2, d=9))
        expected = along.square() @ torch.tensor([1.0, -0.25, 0.0], dtype=torch.float64)
        assert array(height) == pytest.approx(array(expected), abs=1e-14)

    def test_of_a_plane(self):
        assert float(coordinates(Manifold.flat(2).sample(50, 9.0, d=7))[1].abs().max()) < 1e-14

    @pytest.mark.parametrize("angle", [0.0, 1.0, math.pi / 2, math.pi, 4.0])
    def test_of_a_torus(self, angle):
        along, inwards = coordinates(Manifold.torus(2.5, 0.8, angle).sample(200, 0.6, d=5))
        upwards, y = along.T
        # Back from the directions at the base point to the axis of the torus.
        x = 2.5 + 0.8 * math.cos(angle) - upwards * math.sin(angle) - inwards * math.cos(angle)
        z = 0.8 * math.sin(angle) + upwards * math.cos(angle) - inwards * math.sin(angle)
        assert array((torch.hypot(x, y) - 2.5).square() + z.square()) == pytest.approx(0.64, rel=1e-12)

    def test_of_a_swiss_roll(self):
        pitch, angle = 0.7, 5.0
        sample = Manifold.swiss_roll(pitch, angle).sample(200, 1.0, d=5)
        (arc, _), bent = coordinates(sample)[0].T, coordinates(sample)[1]
        turn = angle + math.atan(angle)
        x = pitch * angle * math.cos(angle) + arc * math.cos(turn) - bent * math.sin(turn)
        y = pitch * angle * math.sin(angle) + arc * math.sin(turn) + bent * math.cos(turn)
        unwound = torch.atan2(y, x)
        unwound = unwound + 2 * math.pi * ((angle - unwound) / (2 * math.pi)).round()
        assert array(torch.hypot(x, y)) == pytest.approx(array(pitch * unwound), rel=1e-12)


class TestEvenness:
    def test_heights_of_a_sphere_are_uniform(self):
        """Archimedes: on a sphere in three dimensions, area is proportional to height, up to that of a chord of 1: 1/2."""
        for seed in range(3):
            height = coordinates(Manifold.sphere(2).sample(2000, 1.0, seed=seed))[1]
            assert kstest(array(height), "uniform", (0, 0.5)).pvalue > 0.01

    def test_a_whole_hemisphere_is_even_and_no_more_than_one(self):
        """Of tangent radius 1; points of the far side would lie higher than 1."""
        height = coordinates(Manifold.sphere(2).sample(3000, 1.0, within="tangent"))[1]
        assert float(height.max()) <= 1
        assert kstest(array(height), "uniform", (0, 1)).pvalue > 0.01

    @pytest.mark.parametrize("m", [1, 3, 4])
    def test_angles_of_spheres_of_any_dimension(self, m):
        rows = Manifold.sphere(m).sample(2000, 1.0).rows
        whole = quad(lambda angle: math.sin(angle) ** (m - 1), 0, math.pi / 3)[0]

        def share(angles):
            return np.array([quad(lambda one: math.sin(one) ** (m - 1), 0, angle)[0] / whole for angle in angles])

        assert kstest(array(2 * torch.asin(rows.norm(dim=1) / 2)), share).pvalue > 0.01

    def test_of_a_round_paraboloid(self):
        radii = coordinates(Manifold.paraboloid([3.0, 3.0]).sample(2000, 1.0, within="tangent"))[0].norm(dim=1)
        found = kstest(array(radii), lambda r: ((1 + 9 * r**2) ** 1.5 - 1) / (10**1.5 - 1))
        assert found.pvalue > 0.01

    def test_of_a_torus_turns_around_its_tube(self):
        """Every ring is as long as its distance from the axis, and the chart is square: of points near one parallel."""
        manifold = Manifold.torus(1.2, 1.0, math.pi / 2)
        along, inwards = coordinates(manifold.sample(6000, 0.8))
        x, y, z = 1.2 - along[:, 0], along[:, 1], 1 - inwards
        near = (torch.atan2(y, x).abs() < 0.1) & ((torch.hypot(x, y) - 1.2).abs() < 0.6)
        turn = array(torch.atan2(z, torch.hypot(x, y) - 1.2))[array(near).astype(bool)]
        low, high = math.acos(0.6), math.acos(-0.6)

        def grown(angle):
            return 1.2 * angle + torch.sin(torch.as_tensor(angle)).numpy()

        assert len(turn) > 500
        assert kstest(turn, lambda one: (grown(one) - grown(low)) / (grown(high) - grown(low))).pvalue > 0.01

    def test_of_a_swiss_roll_is_along_its_arc(self):
        pitch, angle = 1.0, 1.5
        rows = Manifold.swiss_roll(pitch, angle).sample(3000, 0.75, seed=2)
        (arc, _), bent = coordinates(rows)[0].T, coordinates(rows)[1]
        turn = angle + math.atan(angle)
        x = angle * math.cos(angle) + arc * math.cos(turn) - bent * math.sin(turn)
        y = angle * math.sin(angle) + arc * math.sin(turn) + bent * math.cos(turn)
        phi = torch.hypot(x, y)
        # A strip that the ball holds whole.
        inside = (coordinates(rows)[0][:, 1].abs() < 0.4) & ((phi - angle).abs() < 0.25)

        def length(one):
            return (one * (1 + one**2) ** 0.5 + torch.asinh(torch.as_tensor(one)).numpy()) / 2

        low, high = length(angle - 0.25), length(angle + 0.25)
        found = kstest(array(phi[inside]), lambda one: (length(one) - low) / (high - low))
        assert int(inside.sum()) > 500 and found.pvalue > 0.01

    def test_of_directions(self):
        along, _ = coordinates(Manifold.sphere(2).sample(2000, 0.9, seed=5))
        assert kstest(array(torch.atan2(*along.T)), "uniform", (-math.pi, 2 * math.pi)).pvalue > 0.01

    def test_of_a_ball_of_chords_holds_less_of_what_bends(self):
        rows = {
            within: coordinates(Manifold.paraboloid([6.0, 0.0]).sample(2000, 1.0, within=within))[0]
            .square()
            .mean(dim=0)
            for within in ("chord", "tangent")
        }
        assert float(rows["chord"][0] / rows["chord"][1]) < 0.5
        assert float(rows["tangent"][0] / rows["tangent"][1]) > 1


class TestSamples:
    def test_noise_has_its_standard_deviation_in_every_coordinate(self):
        still = Manifold.sphere(2).sample(3000, 0.5, d=6, seed=1)
        noisy = Manifold.sphere(2).sample(3000, 0.5, d=6, noise=0.03, seed=1)
        added = noisy.rows - still.rows
        assert array(added.std(dim=0)) == pytest.approx(0.03, rel=0.05)
        assert kstest(array(added.flatten()) / 0.03, "norm").pvalue > 0.01
        assert noisy.noise == 0.03 and still.noise == 0

    def test_depend_on_the_seed_alone(self):
        one, same, other = (Manifold.sphere(2).sample(9, 0.5, d=6, seed=seed).rows for seed in (1, 1, 2))
        assert torch.equal(one, same) and not torch.equal(one, other)
        state = torch.get_rng_state()
        Manifold.sphere(2).sample(9, 0.5)
        assert torch.equal(state, torch.get_rng_state())

    @PROPERTY
    @given(some.integers(1, 4), some.floats(0.01, 100), some.floats(0.05, 1))
    def test_of_a_larger_sphere_are_a_larger_sample(self, m, size, share):
        one = Manifold.sphere(m).sample(20, share, seed=1).rows
        other = Manifold.sphere(m, size).sample(20, share * size, seed=1).rows
        assert array(other) == pytest.approx(size * array(one), rel=1e-9, abs=1e-9 * size)

    def test_of_a_torus_stop_at_its_hole(self):
        """A ball wider than the hole would hold its other side too, and go round it more than once."""
        assert Manifold.torus(1.1, 1.0, math.pi).reach == pytest.approx(0.1)
        assert Manifold.torus(1.1, 1.0, 0.0).reach == 1
        with pytest.raises(ValueError, match=r"radius 0.5 must lie in \(0, 0.1\], which the chart of the torus covers"):
            Manifold.torus(1.1, 1.0, math.pi).sample(5, 0.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Manifold.sphere(0), "dimension 0 must be 1 or more"),
        (lambda: Manifold.flat(0), "dimension 0 must be 1 or more"),
        (lambda: Manifold.paraboloid([]), "dimension 0 must be 1 or more"),
        (lambda: Manifold.sphere(2, 0), "radius 0 must be a positive number"),
        (lambda: Manifold.sphere(2, math.nan), "radius nan must be a positive number"),
        (lambda: Manifold.paraboloid([1, math.nan]), "must be finite numbers"),
        (lambda: Manifold.torus(1, 1), "ring 1 must be larger than tube 1"),
        (lambda: Manifold.torus(2, -1), "tube -1 must be a positive number"),
        (lambda: Manifold.torus(math.inf, 1), "ring inf must be a positive number"),
        (lambda: Manifold.torus(2, 1, math.nan), "angle nan must be a finite number"),
        (lambda: Manifold.swiss_roll(0), "pitch 0 must be a positive number"),
        (lambda: Manifold.swiss_roll(1, 0), "angle 0 must be a positive number"),
        (lambda: Manifold.sphere().sample(0, 0.5), "count 0, d 3 and noise 0.0 must be"),
        (lambda: Manifold.sphere().sample(5, 0.5, d=2), "count 5, d 2 and noise 0.0 must be 1 or more, 3 or more"),
        (lambda: Manifold.sphere().sample(5, 0.5, noise=-1), "noise -1 must be"),
        (lambda: Manifold.sphere().sample(5, 0.5, noise=math.nan), "noise nan must be"),
        (lambda: Manifold.sphere().sample(5, 0.5, noise=math.inf), "noise inf must be"),
        (lambda: Manifold.sphere().sample(5, 1.5), r"radius 1.5 must lie in \(0, 1\], which the chart of the sphere"),
        (lambda: Manifold.sphere().sample(5, 0), "radius 0 must lie in"),
        (lambda: Manifold.sphere().sample(5, math.nan), "radius nan must lie in"),
        (lambda: Manifold.sphere().sample(5, 0.5, within="arc"), "within 'arc' must be 'chord' or 'tangent'"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
