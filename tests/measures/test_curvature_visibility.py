"""Geodesics and the directions seen, against closed forms, finite differences and points drawn on the surface itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from explicit import PROPERTY
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad, solve_ivp

from tangent_lens.measures import geodesics as walking
from tangent_lens.measures.curvature_visibility import (
    curvature_visibility,
    radii_of,
    visibility_by_concentration,
)
from tangent_lens.measures.geodesics import chord_arc, geodesics

curvature_lists = st.lists(st.floats(-2, 2), min_size=1, max_size=4).filter(lambda them: max(map(abs, them)) > 0.1)


def unit_rows(count: int, m: int, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).normal(size=(count, m))
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def parabola_arc(curvature: float, x: np.ndarray) -> np.ndarray:
    """Length of z = k x^2 / 2 from 0 to x, in closed form."""
    rise = curvature * x
    return (x * np.sqrt(1 + rise**2) + np.arcsinh(rise) / curvature) / 2


def ricci(curvatures: np.ndarray, units: np.ndarray) -> np.ndarray:
    """Ric(v, v) of a hypersurface, one sectional curvature at a time (Gauss equation)."""
    found = []
    for unit in units:
        frame = np.linalg.qr(np.column_stack([unit, np.eye(len(unit))]))[0]
        matrix = frame.T @ np.diag(curvatures) @ frame
        found.append(sum(matrix[0, 0] * matrix[i, i] - matrix[0, i] ** 2 for i in range(1, len(unit))))
    return np.array(found)


def end_of(curvatures: np.ndarray, speed: np.ndarray) -> np.ndarray:
    """Where the geodesic of this initial velocity is at time 1, in m + 1 dimensions, by scipy and the full Christoffel sum."""
    m = len(speed)

    def rates(_: float, state: np.ndarray) -> np.ndarray:
        place, moving = state[:m], state[m:]
        slopes = curvatures * place
        symbols = np.einsum("k,ij->kij", slopes, np.diag(curvatures)) / (1 + slopes @ slopes)
        return np.concatenate([moving, -np.einsum("kij,i,j->k", symbols, moving, moving)])

    place = solve_ivp(rates, (0, 1), np.concatenate([np.zeros(m), speed]), rtol=1e-11, atol=1e-12).y[:m, -1]
    return np.append(place, curvatures @ place**2 / 2)


def mean_seen(curvatures: np.ndarray, units: np.ndarray) -> tuple[float, float]:
    """Mean κ^2 of given directions, and its standard error."""
    square = (units**2 @ curvatures) ** 2
    return square.mean(), square.std() / math.sqrt(len(square))


def uniform_mean(curvatures: np.ndarray) -> float:
    """E[κ(v)^2] = ((tr K)^2 + 2 tr K^2) / (m (m + 2)) over the unit sphere."""
    m = len(curvatures)
    return (curvatures.sum() ** 2 + 2 * (curvatures**2).sum()) / (m * (m + 2))


# Geodesics


def test_along_a_principal_direction_it_is_a_parabola():
    paths = geodesics([2.0, -0.7], np.eye(2), 3.0, 400)
    for column, curvature in enumerate((2.0, 0.7)):
        x = np.linspace(0, 4, 4001)
        radius = np.interp(paths.arc[:, column], parabola_arc(curvature, x), np.hypot(x, curvature * x**2 / 2))
        assert np.allclose(paths.radius[:, column], radius, atol=1e-6)
        assert parabola_arc(curvature, paths.ends[column, column]) == pytest.approx(3.0, abs=1e-8)


def test_steps_even_in_radius_find_the_same_geodesics():
    curvatures, units = [2.0, -1.0, 0.3], unit_rows(20, 3)
    by_arc = geodesics(curvatures, units, 2.0, 2000)
    by_radius = geodesics(curvatures, units, 1.2, 100, along="radius")
    assert np.allclose(by_radius.radius, np.linspace(0, 1.2, 101)[:, None], atol=1e-6)
    for column in range(20):
        for name in ("arc", "slope", "jacobian"):
            found = np.interp(by_radius.radius[:, column], by_arc.radius[:, column], getattr(by_arc, name)[:, column])
            assert np.allclose(getattr(by_radius, name)[:, column], found, atol=1e-5)


def test_ends_and_jacobian_against_another_integrator_and_finite_differences():
    curvatures, length, small = np.array([1.5, -0.8, 0.4]), 1.3, 1e-4
    units = unit_rows(4, 3, seed=1)
    paths = geodesics(curvatures, units, length, 300)
    for column, unit in enumerate(units):
        end = end_of(curvatures, length * unit)
        assert np.allclose(paths.ends[column], end[:3], atol=1e-8)
        assert paths.radius[-1, column] == pytest.approx(np.linalg.norm(end), abs=1e-8)
        derivative = np.stack(
            [
                (end_of(curvatures, length * unit + move) - end_of(curvatures, length * unit - move)) / (2 * small)
                for move in small * np.eye(3)
            ]
        )
        volume = math.sqrt(np.linalg.det(derivative @ derivative.T))
        assert paths.jacobian[-1, column] == pytest.approx(volume, rel=1e-6)


def test_near_the_apex_the_jacobian_is_one_less_a_sixth_of_ricci():
    curvatures, units = np.array([1.0, 2.0, -0.5, 0.3]), unit_rows(50, 4)
    errors = []
    for length in (0.1, 0.05):
        jacobian = geodesics(curvatures, units, length, 50).jacobian[-1]
        errors.append(np.abs(jacobian - (1 - ricci(curvatures, units) * length**2 / 6)).max())
    assert errors[0] < 1e-3
    assert errors[0] / errors[1] == pytest.approx(16, rel=0.15)


def test_the_chord_arc_error_falls_as_the_fifth_power():
    units = unit_rows(50, 3)
    errors = []
    for length in (0.2, 0.1):
        paths = geodesics([1.0, 2.0, -0.5], units, length, 100, jacobian=False, along="radius")
        errors.append(np.abs(paths.arc[-1] - chord_arc(units**2 @ [1.0, 2.0, -0.5], length)).max())
    assert errors[0] < 1e-3
    assert errors[0] / errors[1] == pytest.approx(32, rel=0.15)
    assert chord_arc(2.0, 0.6) == pytest.approx(0.6 + 4 * 0.6**3 / 24)


def test_a_flat_surface_has_straight_geodesics():
    units = unit_rows(5, 3)
    paths = geodesics([0.0, 0.0, 0.0], units, 2.0, 10)
    assert np.allclose(paths.arc, paths.radius) and np.allclose(paths.jacobian, 1)
    assert np.allclose(paths.ends, 2 * units)


def test_many_directions_are_done_in_parts(monkeypatch):
    units = unit_rows(11, 3)
    whole = geodesics([1.0, 2.0, 0.5], units, 1.0, 60)
    monkeypatch.setattr(walking, "_LONGEST_ARRAY", 36)
    parts = geodesics([1.0, 2.0, 0.5], units, 1.0, 60)
    for name in ("arc", "radius", "slope", "jacobian", "ends"):
        assert np.allclose(getattr(whole, name), getattr(parts, name), rtol=1e-13)
    assert "11 of dimension 3, to arc length 1, 60 steps" in repr(whole)


def test_weights_add_up_to_the_area_within_a_radius():
    """∫∫ s J ds/dt dt dv is the area of the surface inside a ball, which a double integral of the graph gives too."""
    curvatures, reach, steps = np.array([2.0, 0.7]), 1.2, 300
    angles = 2 * np.pi * np.arange(400) / 400
    paths = geodesics(curvatures, np.stack([np.cos(angles), np.sin(angles)], axis=1), reach, steps, along="radius")
    rings = (paths.arc * paths.jacobian / paths.slope).mean(axis=1) * 2 * np.pi
    weights = np.array([1] + [4, 2] * (steps // 2 - 1) + [4, 1]) * reach / steps / 3
    area = quad(lambda angle: area_along(curvatures, reach, angle), 0, np.pi / 2, epsabs=1e-10)[0]
    assert weights @ rings == pytest.approx(4 * area, rel=1e-7)


def area_along(curvatures: np.ndarray, reach: float, angle: float) -> float:
    unit = np.array([math.cos(angle), math.sin(angle)])
    bend, steep = curvatures @ unit**2, curvatures**2 @ unit**2
    # u^2 + (bend u^2 / 2)^2 = reach^2, and the integral of u sqrt(1 + steep u^2).
    edge = 2 * (math.sqrt(1 + bend**2 * reach**2) - 1) / bend**2
    return ((1 + steep * edge) ** 1.5 - 1) / (3 * steep)


# Points drawn on a surface whose geodesics are known: paraboloids of revolution times straight lines


def straightened(points: np.ndarray, curvature: float, curved: int) -> np.ndarray:
    """Directions of the geodesics to points u: the curved part along a parabola, the rest straight."""
    part = points[:, :curved]
    size = np.linalg.norm(part, axis=1, keepdims=True)
    flat = np.concatenate([part * parabola_arc(curvature, size) / size, points[:, curved:]], axis=1)
    return flat / np.linalg.norm(flat, axis=1, keepdims=True)


@pytest.mark.parametrize(("curvature", "curved", "m"), [(2.0, 1, 2), (2.0, 2, 3), (-1.5, 3, 4)])
def test_points_uniform_in_volume_are_seen_where_it_says(curvature, curved, m):
    generator = np.random.default_rng(7)
    points = generator.uniform(-1, 1, size=(600_000, m))
    square = (points[:, :curved] ** 2).sum(axis=1)
    radius = np.sqrt((points**2).sum(axis=1) + (curvature * square / 2) ** 2)
    weight = np.sqrt(1 + curvature**2 * square)
    kept = (radius < 1) & (generator.uniform(size=len(points)) * math.sqrt(1 + curvature**2) < weight)
    curvatures = np.array([curvature] * curved + [0.0] * (m - curved))
    seen, error = mean_seen(curvatures, straightened(points[kept], curvature, curved))
    found = curvature_visibility(curvatures, radius[kept], measure="volume", directions=6000, steps=48)
    assert found.ratio == pytest.approx(
        seen / uniform_mean(curvatures), abs=4 * error / uniform_mean(curvatures) + 1e-3
    )
    assert error / uniform_mean(curvatures) < 4e-3
    assert found.radii == kept.sum() and found.mean_square_radius == pytest.approx((radius[kept] ** 2).mean())


@pytest.mark.parametrize("m", [2, 3])
def test_points_uniform_in_arc_length_are_seen_where_it_says(m):
    generator = np.random.default_rng(3)
    curvature, count, table = 2.0, 400_000, np.linspace(0, 2, 20_001)
    units = generator.normal(size=(count, m))
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    arc = 1.4 * generator.uniform(size=count) ** (1 / m)
    x = np.interp(arc * np.abs(units[:, 0]), parabola_arc(curvature, table), table)
    radius = np.sqrt((arc**2) * (1 - units[:, 0] ** 2) + x**2 + (curvature * x**2 / 2) ** 2)
    kept = radius < 1
    assert arc[kept].max() < 1.3
    curvatures = np.array([curvature] + [0.0] * (m - 1))
    seen, error = mean_seen(curvatures, units[kept])
    found = curvature_visibility(curvatures, radius[kept], directions=6000, steps=64)
    assert found.ratio == pytest.approx(
        seen / uniform_mean(curvatures), abs=4 * error / uniform_mean(curvatures) + 1e-3
    )
    top = np.sort(found.curvature)[-600]
    share = (np.abs(units[kept] ** 2 @ curvatures) >= top).mean()
    uniform = (np.abs(units**2 @ curvatures) >= top).mean()
    assert found.top_ratio == pytest.approx(share / uniform, abs=0.02)
    assert found.top_ratio > 1.03


# The claim near the apex


@given(curvatures=curvature_lists, measure=st.sampled_from(["arc", "volume"]))
@PROPERTY
def test_near_the_apex_it_is_the_expansion(curvatures, measure):
    far, near = (
        curvature_visibility(curvatures, [t, t / 2], measure=measure, directions=200, steps=32) for t in (0.1, 0.05)
    )
    assert far.density.mean() == pytest.approx(1, abs=1e-12)
    assert abs(far.ratio - far.predicted_ratio) < 2e-3
    # The error is of the fourth order.
    assert abs(near.ratio - near.predicted_ratio) <= abs(far.ratio - far.predicted_ratio) / 12 + 1e-8


def test_the_prediction_is_the_mean_square_radius_times_a_moment():
    curvatures, radii = np.array([2.0, 1.0, -0.5]), np.array([0.1, 0.2, 0.4])
    for measure, m in (("arc", 3), ("volume", 3)):
        found = curvature_visibility(curvatures, radii, measure=measure, directions=500)
        square = found.curvature**2
        order = (m + 2) * square / 24 - (ricci(curvatures, found.directions) / 6 if measure == "volume" else 0)
        covariance = np.mean(square * order) - square.mean() * order.mean()
        assert found.predicted_ratio == pytest.approx(1 + np.mean(radii**2) * covariance / square.mean(), abs=1e-12)
        assert np.allclose(square, (found.directions**2 @ curvatures) ** 2)


def test_ricci_changes_nothing_in_two_dimensions_and_can_undo_the_claim_from_four_on():
    def slope(curvatures, measure):
        found = curvature_visibility(curvatures, [0.01], measure=measure, directions=2000, steps=8)
        return (found.predicted_ratio - 1) / 1e-4

    assert slope([2.0, 0.5], "volume") == pytest.approx(slope([2.0, 0.5], "arc"), rel=1e-9)
    assert 0 < slope([2.0, 1.0, 1.0], "volume") < slope([2.0, 1.0, 1.0], "arc")
    assert slope([2.0, -1.0, -1.0], "volume") > slope([2.0, -1.0, -1.0], "arc")
    assert slope([1.0, -1.0, -1.0, -1.0], "volume") < 0 < slope([1.0, -1.0, -1.0, -1.0], "arc")
    assert slope([3.0] + [0.0] * 4, "volume") == pytest.approx(slope([3.0] + [0.0] * 4, "arc"), rel=1e-9)
    for m, sign in ((5, 1), (7, -1)):
        assert np.sign(slope([1.05] + [1.0] * (m - 1), "volume")) == sign


def test_in_three_dimensions_ricci_never_undoes_it():
    nodes, weights = np.polynomial.legendre.leggauss(12)
    height, angle = (one.ravel() for one in np.meshgrid(nodes, 2 * np.pi * np.arange(24) / 24, indexing="ij"))
    flat, weights = np.sqrt(1 - height**2), np.repeat(weights / 48, 24)
    squares = np.stack([flat * np.cos(angle), flat * np.sin(angle), height], axis=1) ** 2

    def slope(curvatures):
        square = (squares @ curvatures) ** 2
        order = 5 * square / 24 - (curvatures.sum() * squares @ curvatures - squares @ curvatures**2) / 6
        centred = square - weights @ square
        return weights @ (centred * order) / (weights @ centred**2)

    assert slope(np.array([1.0, -2 / 3, 1.0])) == pytest.approx(1 / 48, abs=1e-12)
    drawn = np.random.default_rng(0).uniform(-1, 1, size=(500, 3))
    assert min(slope(one) for one in drawn) > 1 / 48 - 1e-12


def test_far_from_the_apex_the_claim_can_turn_over():
    for curvatures, measure in (((2, 1), "arc"), ((2, -1), "volume"), ((2, 2, 0), "volume")):
        near, far = (curvature_visibility(curvatures, [t], measure=measure, directions=400) for t in (0.2, 3.0))
        assert near.ratio > 1.001 and far.ratio < 0.999 and far.predicted_ratio > 1.1


def test_concentration_near_the_base_point_hides_the_curvature():
    concentrations = (1, 2, 5, 20, 100)
    for curvatures, measure in (((2, 0), "arc"), ((2, 1, 1), "volume"), ((1, -1, -1, -1), "volume")):
        sweep = visibility_by_concentration(curvatures, concentrations, 0.25, measure=measure, directions=500)
        distances = [abs(one.ratio - 1) for one in sweep.results]
        assert distances == sorted(distances, reverse=True) and distances[-1] < 0.05 * distances[0]
        assert len({one.ratio > 1 for one in sweep.results}) == 1
        frame = sweep.to_pandas()
        assert list(frame["concentration"]) == list(concentrations)
        assert list(frame["ratio"]) == [one.ratio for one in sweep.results]
        # One integration for all concentrations is as good as one each.
        alone = curvature_visibility(curvatures, radii_of(5, 0.25, len(curvatures)), measure=measure, directions=500)
        assert sweep.results[2].ratio == pytest.approx(alone.ratio, abs=1e-9)


def test_radii_are_quantiles_of_the_density():
    for concentration, m in ((1.0, 2), (4.0, 3), (0.5, 1)):
        radii = radii_of(concentration, 0.7, m, 20_000)
        exponent = m / concentration - 1
        share = quad(lambda t, e=exponent: t**e, 0, 0.3)[0] / quad(lambda t, e=exponent: t**e, 0, 0.7)[0]
        assert np.mean(radii < 0.3) == pytest.approx(share, abs=1e-4)
        assert np.mean(radii**2) == pytest.approx(0.7**2 * m / (m + 2 * concentration), rel=1e-6)


# What must not change it


@pytest.mark.parametrize("measure", ["arc", "volume"])
@pytest.mark.parametrize("curvatures", [(1.5,), (2.0, 2.0), (-0.7, -0.7, -0.7)])
def test_a_surface_alike_in_all_directions_shows_none_above_others(curvatures, measure):
    found = curvature_visibility(curvatures, [0.3, 0.8, 1.0], measure=measure, directions=200)
    assert found.ratio == pytest.approx(1, abs=1e-12) and found.predicted_ratio == pytest.approx(1, abs=1e-12)
    assert found.top_ratio == pytest.approx(1, abs=1e-12)
    assert np.allclose(found.density, 1, atol=1e-12)


@given(curvatures=curvature_lists, exponent=st.integers(-60, 60), measure=st.sampled_from(["arc", "volume"]))
@PROPERTY
def test_neither_the_unit_nor_the_side_changes_it(curvatures, exponent, measure):
    factor = 10.0**exponent
    options = {"measure": measure, "directions": 100, "steps": 32}
    found = curvature_visibility(curvatures, [0.1, 0.3], **options)
    scaled = curvature_visibility(np.array(curvatures) * factor, np.array([0.1, 0.3]) / factor, **options)
    turned = curvature_visibility(-np.array(curvatures), [0.1, 0.3], **options)
    for other in (scaled, turned):
        for name in ("ratio", "top_ratio", "predicted_ratio"):
            assert getattr(other, name) == pytest.approx(getattr(found, name), abs=1e-10)
        assert np.allclose(other.density, found.density, atol=1e-10)


def test_the_order_of_curvatures_and_of_radii_is_nothing():
    radii = np.random.default_rng(0).uniform(0, 1, 50)
    one = curvature_visibility([2.0, -0.5], radii, measure="volume")
    other = curvature_visibility([-0.5, 2.0], radii[::-1], measure="volume")
    assert other.ratio == pytest.approx(one.ratio, abs=1e-12)
    assert other.top_ratio == pytest.approx(one.top_ratio, abs=1e-12)
    ratios = [
        curvature_visibility(own, radii, directions=10_000, steps=64).ratio
        for own in ([2.0, 1.0, 0.0], [0.0, 2.0, 1.0])
    ]
    assert ratios[0] == pytest.approx(ratios[1], abs=3e-3)


def test_radii_are_averaged_over_one_by_one():
    radii = np.array([0.11, 0.5, 0.93, 1.0])
    together = curvature_visibility([2.0, 1.0], radii, directions=60)
    alone = [curvature_visibility([2.0, 1.0], [one], directions=60).density for one in radii]
    assert np.allclose(together.density, np.mean(alone, axis=0), atol=1e-8)
    assert np.allclose(
        curvature_visibility([2.0, 1.0], torch.from_numpy(radii), directions=60).density, together.density
    )


def test_the_seed_makes_the_directions():
    first, again, other = (curvature_visibility([2, 1, 0], [0.5], directions=50, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.density, again.density) and first.seed == 1 and first.steps == 256
    assert not np.array_equal(first.directions, other.directions)
    assert "κ = 2, 1, 0; arc" in repr(first)


# What is refused


@pytest.mark.parametrize(
    ("curvatures", "radii", "options", "sentence"),
    [
        ([0.0, 0.0], [1.0], {}, "all principal curvatures are 0: a flat surface has no curvature to see"),
        ([], [1.0], {}, "1 or more finite numbers"),
        ([math.nan, 1.0], [1.0], {}, "1 or more finite numbers"),
        ([[1.0, 2.0]], [1.0], {}, "1 or more finite numbers"),
        ([1.0, 2.0], [], {}, r"shape \(n,\), n of 1 or more, not \(0,\)"),
        ([1.0, 2.0], [0.1, math.nan], {}, "NaN, infinity or a negative"),
        ([1.0, 2.0], [0.1, math.inf], {}, "NaN, infinity or a negative"),
        ([1.0, 2.0], [0.1, -0.1], {}, "NaN, infinity or a negative"),
        ([1.0, 2.0], [0.0, 0.0], {}, "all radii are 0"),
        ([1.0, 2.0], [0.1], {"measure": "area"}, "'arc' or in 'volume', not in 'area'"),
        ([1.0, 2.0], [0.1], {"directions": 9}, "9 directions .* use 10 or more"),
        ([1.0, 2.0], [0.1], {"steps": 4}, "4 steps are too few"),
        ([1.0, 2.0], [1000.0], {}, "256 steps are too long: after .* more steps, or go less far"),
        ([1e-140, 2e-140], [1e-20], {}, "leave the range of numbers"),
        ([10.0, 0.1], [5.0], {"steps": 1000, "measure": "volume"}, "at radius 3.2.* geodesics .* cross"),
    ],
)
def test_what_shows_nothing_is_refused(curvatures, radii, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        curvature_visibility(curvatures, radii, **{"directions": 40, **options})


def test_what_geodesics_radii_and_sweeps_refuse(monkeypatch):
    with pytest.raises(ValueError, match=r"shape \(N, 2\), one column a principal curvature, not \(3, 3\)"):
        geodesics([1.0, 2.0], np.eye(3), 1.0)
    with pytest.raises(ValueError, match="must be unit vectors"):
        geodesics([1.0, 2.0], 2 * np.eye(2), 1.0)
    with pytest.raises(ValueError, match="a length of -1"):
        geodesics([1.0, 2.0], np.eye(2), -1.0)
    with pytest.raises(ValueError, match="along 'arc' or 'radius', not 'time'"):
        geodesics([1.0, 2.0], np.eye(2), 1.0, along="time")
    with pytest.raises(ValueError, match="finite and 0 or more"):
        chord_arc(1.0, -0.1)
    with pytest.raises(ValueError, match="a concentration of 0"):
        radii_of(0, 1.0, 2)
    with pytest.raises(ValueError, match="a largest radius of inf"):
        radii_of(1, math.inf, 2)
    with pytest.raises(ValueError, match="10 radii in dimension 0"):
        radii_of(1, 1.0, 0, 10)
    with pytest.raises(ValueError, match="no concentration to look at"):
        visibility_by_concentration([1.0], [], 1.0)
    monkeypatch.setattr(walking, "_SLOWEST", 0.95)
    with pytest.raises(ValueError, match="turns back to the base point"):
        geodesics([1.0, 2.0], np.eye(2), 3.0, along="radius")
