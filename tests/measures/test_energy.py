"""Energies against explicit traces, and the closed forms of their controls against samples and permutations."""

from __future__ import annotations

import itertools
import math
import sys

import numpy as np
import pytest
import torch
from explicit import PROPERTY, array, energy, random_frame, random_moment, random_rows, random_subspace
from hypothesis import given
from hypothesis import strategies as st

from tangent_lens.measures.energy import (
    BackwardSignals,
    energy_fraction,
    energy_test,
    lift_of,
    monte_carlo_p,
    random_normal_moments,
    random_normal_p_value,
    random_normal_skewness,
    shuffled_energy,
)
from tangent_lens.recording.moments import Moments, SecondMoments
from tangent_lens.subspaces import controls
from tangent_lens.subspaces.controls import random_normals
from tangent_lens.subspaces.subspace import Subspace

seeds = st.integers(0, 10_000)


def stream_of(matrix: torch.Tensor, name: str = "here") -> SecondMoments:
    """Moments whose second moment about zero is this matrix."""
    moments = SecondMoments(len(matrix), name=name)
    moments.count, moments.scatter = 1, matrix.clone()
    return moments


def subspace_with_rivals(d: int = 9, k: int = 2) -> Subspace:
    frame = random_frame(d, d)
    rivals = {"next": frame[:, k : 2 * k], "trailing": frame[:, -k:]}
    return Subspace(frame[:, :k], torch.zeros(d, dtype=torch.float64), {}, rivals)


@given(seed=seeds, k=st.integers(1, 8))
@PROPERTY
def test_energy_is_the_share_of_the_trace(seed, k):
    moment, basis = random_moment(8, seed), random_frame(8, k, seed)
    found = energy_fraction(moment, basis)
    assert found == pytest.approx(energy(moment, basis), rel=1e-12)
    assert 0 <= found <= 1


@given(seed=seeds, k=st.integers(1, 7))
@PROPERTY
def test_a_subspace_and_its_complement_share_all_energy(seed, k):
    moment, frame = random_moment(8, seed), random_frame(8, 8, seed)
    parts = energy_fraction(moment, frame[:, :k]) + energy_fraction(moment, frame[:, k:])
    assert parts == pytest.approx(1, abs=1e-12)
    assert energy_fraction(moment, frame) == pytest.approx(1, abs=1e-12)


def test_energy_of_one_direction():
    direction = torch.tensor([0.6, 0.8, 0.0], dtype=torch.float64)
    moment = torch.outer(direction, direction)
    axes = torch.eye(3, dtype=torch.float64)
    shares = [energy_fraction(moment, axes[:, place : place + 1]) for place in range(3)]
    assert shares == pytest.approx([0.36, 0.64, 0])


@given(seed=seeds, exponent=st.integers(-9, 9))
@PROPERTY
def test_neither_rotation_nor_scale_changes_an_energy(seed, exponent):
    moment, basis, turn = random_moment(8), random_frame(8, 3, seed=1), random_frame(8, 8, seed)
    turned = energy_fraction(10.0**exponent * turn @ moment @ turn.T, turn @ basis)
    assert turned == pytest.approx(energy_fraction(moment, basis), rel=1e-11)


@given(seed=seeds)
@PROPERTY
def test_another_basis_of_the_same_span_has_the_same_energy(seed):
    moment, basis = random_moment(8), random_frame(8, 3)
    assert energy_fraction(moment, basis @ random_frame(3, 3, seed)) == pytest.approx(energy_fraction(moment, basis))


@pytest.mark.parametrize(
    ("moment", "taught"),
    [
        (torch.zeros(4, 4), "the gradient is zero everywhere.*the loss does not depend on this place"),
        (torch.full((4, 4), math.nan), "the gradient holds NaN or infinity"),
        (torch.eye(5), "the gradient lives in 5 dimensions, the subspace in 4; fit it at the same site"),
    ],
)
def test_moments_without_an_energy_are_refused(moment, taught):
    for ask in (energy_fraction, random_normal_moments):
        with pytest.raises(ValueError, match=taught):
            ask(moment, random_frame(4, 2))


def test_one_infinite_entry_is_found_wherever_it_is():
    moment = random_moment(4)
    moment[0, 3] = math.inf
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        energy_fraction(moment, random_frame(4, 2))


def test_directions_that_are_not_orthonormal_have_no_energy():
    with pytest.raises(ValueError, match="not orthonormal"):
        energy_fraction(random_moment(4), 0.5 * random_frame(4, 2))


def test_lift_is_energy_a_direction_inside_over_outside():
    assert lift_of(0.5, rank=2, d=10) == pytest.approx((0.5 / 2) / (0.5 / 8))
    assert lift_of(2 / 10, rank=2, d=10) == pytest.approx(1)
    assert lift_of(0, rank=2, d=10) == 0
    assert lift_of(1, rank=2, d=10) == math.inf


@given(seed=seeds, k=st.integers(1, 4))
@PROPERTY
def test_lift_is_energy_over_its_mean_on_random_normals(seed, k):
    moment, basis = random_moment(9, seed), random_frame(9, k, seed)
    found = energy_fraction(moment, basis)
    assert lift_of(found, k, 9) == pytest.approx(found / random_normal_moments(moment, basis)[0], rel=1e-10)


@pytest.mark.parametrize(("d", "k"), [(7, 2), (5, 1), (9, 4)])
def test_closed_mean_and_deviation_equal_those_of_20000_random_normals(d, k):
    moment, tangent, count = random_moment(d, seed=d), random_subspace(d, k), 20_000
    frames = random_normals(tangent, count, seed=3)
    sampled = array((frames * (moment @ frames)).sum(dim=(1, 2)) / moment.trace())
    mean, deviation = random_normal_moments(moment, tangent.basis)
    assert sampled.mean() == pytest.approx(mean, abs=4 * deviation / math.sqrt(count))
    assert sampled.std(ddof=1) == pytest.approx(deviation, rel=0.025)


def test_at_half_the_width_every_normal_is_the_same():
    moment, basis = random_moment(8), random_frame(8, 4)
    mean, deviation = random_normal_moments(moment, basis)
    assert mean == pytest.approx(1 - energy(moment, basis), rel=1e-12)
    assert deviation == pytest.approx(0, abs=1e-7)


def test_in_two_dimensions_one_normal_is_left():
    moment, basis = random_moment(2), random_frame(2, 1)
    assert random_normal_moments(moment, basis) == (pytest.approx(1 - energy(moment, basis)), 0.0)


def test_an_isotropic_gradient_gives_every_normal_the_same_energy():
    mean, deviation = random_normal_moments(7 * torch.eye(10), random_frame(10, 2))
    assert mean == pytest.approx(0.2, rel=1e-12)
    assert deviation == pytest.approx(0, abs=1e-8)


@given(exponent=st.integers(-9, 9))
@PROPERTY
def test_neither_moment_of_the_normals_depends_on_the_scale(exponent):
    moment, basis = random_moment(9), random_frame(9, 2)
    scaled = random_normal_moments(10.0**exponent * moment, basis)
    assert scaled == pytest.approx(random_normal_moments(moment, basis), rel=1e-10)


@pytest.mark.parametrize("ratio", [1e3, 1e5])
def test_the_moments_of_normals_survive_a_tangent_with_nearly_all_energy(ratio):
    frame = random_frame(9, 9)
    variances = torch.tensor([ratio, ratio, *range(1, 8)], dtype=torch.float64)
    found = random_normal_moments((frame * variances) @ frame.T, frame[:, :2])
    rest = array(variances[2:]) / float(variances.sum())
    mean, variance = 2 / 7 * rest.sum(), 2 * 2 * 5 / (49 * 9 * 6) * (7 * (rest**2).sum() - rest.sum() ** 2)
    assert found == pytest.approx((mean, math.sqrt(variance)), rel=1e-4)


def test_p_values_count_controls_that_reach_the_observed_one():
    assert monte_carlo_p(0.5, [0.1] * 20) == pytest.approx(1 / 21)
    assert monte_carlo_p(0.5, [0.1, 0.5, 0.6]) == pytest.approx(3 / 4)
    assert monte_carlo_p(0.0, [0.1, 0.5, 0.6]) == 1
    assert monte_carlo_p(0.5, []) == 1


@given(observed=st.floats(0, 1), controls=st.lists(st.floats(0, 1), min_size=1, max_size=30))
@PROPERTY
def test_p_values_follow_their_definition(observed, controls):
    reached = len([control for control in controls if control >= observed - 1e-12])
    assert monte_carlo_p(observed, controls) == (1 + reached) / (len(controls) + 1)


def test_every_field_of_an_energy_test():
    rows, tangent = random_rows(50, 9, seed=2) - 4, subspace_with_rivals()
    moment = rows.T @ rows
    result = energy_test(SecondMoments.of(rows), tangent, controls=30, seed=5)
    sampled = [energy(moment, frame) for frame in random_normals(tangent, 30, seed=5)]
    largest = np.linalg.eigvalsh(array(moment))[-2:].sum() / np.trace(array(moment))
    mean, deviation = random_normal_moments(moment, tangent.basis)
    share = energy(moment, tangent.basis)
    assert (result.rank, result.d) == (2, 9)
    assert result.energy == pytest.approx(share, rel=1e-12)
    assert result.lift == pytest.approx(share * 7 / (2 * (1 - share)), rel=1e-11)
    assert result.random == pytest.approx(sampled, rel=1e-11)
    assert result.random_mean == pytest.approx(np.mean(sampled), rel=1e-11)
    assert result.random_sd == pytest.approx(np.std(sampled, ddof=1), rel=1e-9)
    assert (result.expected_random, result.expected_random_sd) == pytest.approx((mean, deviation), rel=1e-9)
    assert result.p_value == monte_carlo_p(share, sampled)
    assert result.following == pytest.approx(energy(moment, tangent.rivals["next"]), rel=1e-11)
    assert result.trailing == pytest.approx(energy(moment, tangent.rivals["trailing"]), rel=1e-11)
    assert result.following_ratio == pytest.approx(result.energy / result.following)
    assert result.trailing_ratio == pytest.approx(result.energy / result.trailing)
    assert result.oracle == pytest.approx(largest, rel=1e-11)
    assert result.alignment == pytest.approx(share / largest, rel=1e-11)
    assert (result.shuffled, result.signal_lift) == (None, None)


@given(seed=seeds)
@PROPERTY
def test_no_subspace_beats_the_oracle(seed):
    moment = random_moment(9, seed)
    leading = torch.from_numpy(np.linalg.eigh(array(moment))[1][:, -2:].copy())
    own = energy_test(stream_of(moment), Subspace(leading, torch.zeros(9, dtype=torch.float64)))
    other = energy_test(stream_of(moment), random_subspace(9, 2, seed))
    assert own.alignment == pytest.approx(1, abs=1e-12)
    assert max(other.energy, *other.random) <= other.oracle + 1e-12
    assert own.p_value == pytest.approx(1 / 21)


def test_the_oracle_of_a_wide_gradient():
    width = 1100
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(40, width)) * np.linspace(3, 0.1, width))
    values = np.linalg.svd(array(rows), compute_uv=False) ** 2
    moment = rows.T @ rows
    tangent = Subspace.spanned_by(torch.eye(width)[:, :3])
    result = energy_test(stream_of(moment), tangent, controls=1)
    assert result.oracle == pytest.approx(values[:3].sum() / values.sum(), rel=1e-9)


def test_of_a_recording_the_gradients_are_taken():
    activations, gradients, tangent = random_rows(50, 9, seed=1), random_rows(50, 9, seed=2), random_subspace(9, 2)
    result = energy_test(Moments.of(activations, gradients), tangent)
    assert result.energy == energy_test(SecondMoments.of(gradients), tangent).energy
    assert result.energy == pytest.approx(energy(gradients.T @ gradients, tangent.basis), rel=1e-12)


def test_controls_already_drawn_are_those_of_their_seed():
    moments, tangent = SecondMoments.of(random_rows(50, 9)), random_subspace(9, 2)
    drawn = energy_test(moments, tangent, controls=random_normals(tangent, 8, seed=4))
    assert drawn.random == energy_test(moments, tangent, controls=8, seed=4).random
    assert drawn.random != energy_test(moments, tangent, controls=8, seed=5).random


def test_controls_of_another_rank_are_refused():
    tangent, moments = random_subspace(9, 2), SecondMoments.of(random_rows(50, 9))
    with pytest.raises(ValueError, match="rank"):
        energy_test(moments, tangent, controls=random_normals(random_subspace(9, 1), 8))


def test_rivals_that_are_not_known_stay_out():
    result = energy_test(SecondMoments.of(random_rows(50, 9)), random_subspace(9, 2))
    assert (result.trailing, result.following, result.trailing_ratio, result.following_ratio) == (None,) * 4


def test_the_deviation_of_a_single_control_is_not_a_number():
    result = energy_test(SecondMoments.of(random_rows(50, 9)), random_subspace(9, 2), controls=1)
    assert math.isnan(result.random_sd)
    assert result.random_mean == result.random[0]


def test_a_gradient_wholly_inside_has_infinite_ratios():
    axes = torch.eye(6, dtype=torch.float64)
    tangent = Subspace(axes[:, :2], torch.zeros(6, dtype=torch.float64), {}, {"trailing": axes[:, 4:]})
    result = energy_test(stream_of(torch.diag(torch.tensor([2.0, 1, 0, 0, 0, 0], dtype=torch.float64))), tangent)
    assert result.energy == 1
    assert result.lift == result.trailing_ratio == math.inf
    assert (result.expected_random, result.expected_random_sd) == (0, 0)
    assert result.p_value == pytest.approx(1 / 21)


def test_no_energy_against_no_energy_is_no_infinite_preference():
    axes = torch.eye(6, dtype=torch.float64)
    rivals = {"next": axes[:, 2:4], "trailing": axes[:, 4:]}
    tangent = Subspace(axes[:, :2], torch.zeros(6, dtype=torch.float64), {}, rivals)
    result = energy_test(stream_of(torch.diag(torch.tensor([0.0, 0, 1, 1, 0, 0], dtype=torch.float64))), tangent)
    assert result.energy == result.following_ratio == 0
    assert result.trailing_ratio != math.inf


def test_what_cannot_be_tested_is_refused_by_name():
    tangent = random_subspace(9, 2)
    with pytest.raises(ValueError, match=r"gradients at here: no gradient was gathered; attach with gradients=True"):
        energy_test(Moments.of(random_rows(50, 9), name="here"), tangent)
    with pytest.raises(ValueError, match="here is zero everywhere, so it has no direction"):
        energy_test(SecondMoments.of(torch.zeros(5, 9), name="here"), tangent)
    with pytest.raises(ValueError, match="here lives in 8 dimensions, the subspace in 9; fit it at the same site"):
        energy_test(SecondMoments.of(random_rows(50, 8), name="here"), tangent)
    with pytest.raises(ValueError, match=r"rank 5 needs 2\*rank <= d = 9 for a normal control; use rank <= 4"):
        energy_test(SecondMoments.of(random_rows(50, 9)), random_subspace(9, 5))
    with pytest.raises(ValueError, match="0 controls give no comparison"):
        energy_test(SecondMoments.of(random_rows(50, 9)), tangent, controls=0)


def signals_of(deltas: torch.Tensor, inputs: torch.Tensor) -> BackwardSignals:
    return BackwardSignals.of(deltas.sum(dim=0), deltas.square().sum(dim=0), SecondMoments.of(inputs))


def energy_over_permutations(deltas, inputs, basis, orders) -> float:
    """Mean of |G Q|^2 over mean of |G|^2, with G = sum of delta_{pi(i)} u_i^T for each order pi."""
    above = below = 0.0
    for order in orders:
        gradient = array(deltas)[list(order)].T @ array(inputs)
        above += np.square(gradient @ array(basis)).sum()
        below += np.square(gradient).sum()
    return above / below


@pytest.mark.parametrize("rows", [2, 4, 5])
@pytest.mark.parametrize("seed", range(3))
def test_the_shuffled_control_equals_every_permutation(rows, seed):
    deltas, inputs, basis = random_rows(rows, 3, seed), random_rows(rows, 6, seed + 50), random_frame(6, 2, seed)
    expected = energy_over_permutations(deltas, inputs, basis, itertools.permutations(range(rows)))
    assert shuffled_energy(signals_of(deltas, inputs), basis) == pytest.approx(expected, rel=1e-11)


def test_the_shuffled_control_equals_many_random_permutations():
    deltas, inputs, basis = random_rows(60, 4, 1), random_rows(60, 7, 2), random_frame(7, 2)
    generator = np.random.default_rng(0)
    orders = [generator.permutation(60) for _ in range(4000)]
    expected = energy_over_permutations(deltas, inputs, basis, orders)
    assert shuffled_energy(signals_of(deltas, inputs), basis) == pytest.approx(expected, rel=0.01)


def test_several_maps_of_one_input_are_one_map_with_all_their_outputs():
    inputs, basis = random_rows(5, 6, 1), random_frame(6, 2)
    first, second = random_rows(5, 3, 2), 3 * random_rows(5, 2, 3)
    expected = energy_over_permutations(
        torch.cat([first, second], dim=1), inputs, basis, itertools.permutations(range(5))
    )
    apart = shuffled_energy([signals_of(first, inputs), signals_of(second, inputs)], basis)
    together = shuffled_energy(signals_of(torch.cat([first, second], dim=1), inputs), basis)
    assert apart == pytest.approx(expected, rel=1e-11)
    assert together == pytest.approx(expected, rel=1e-11)


@given(seed=seeds, k=st.integers(1, 6))
@PROPERTY
def test_shuffled_energies_are_shares(seed, k):
    signals, frame = signals_of(random_rows(30, 3, seed), random_rows(30, 6, seed + 1)), random_frame(6, 6, seed)
    inside, outside = shuffled_energy(signals, frame[:, :k]), shuffled_energy(signals, frame[:, k:])
    assert 0 <= inside <= 1 + 1e-12
    assert inside + outside == pytest.approx(1, abs=1e-11)


@given(exponent=st.integers(-9, 9))
@PROPERTY
def test_the_scale_of_the_signals_does_not_change_the_shuffled_energy(exponent):
    deltas, inputs, basis = random_rows(30, 3, 1), random_rows(30, 6, 2), random_frame(6, 2)
    scaled = shuffled_energy(signals_of(deltas * 10.0**exponent, inputs), basis)
    assert scaled == pytest.approx(shuffled_energy(signals_of(deltas, inputs), basis), rel=1e-10)


def test_constant_signals_leave_nothing_to_shuffle_about():
    inputs, basis = random_rows(30, 6), random_frame(6, 2)
    deltas = torch.ones(30, 3, dtype=torch.float64)
    total = inputs.sum(dim=0)
    expected = float((basis.T @ total).square().sum() / total.square().sum())
    assert shuffled_energy(signals_of(deltas, inputs), basis) == pytest.approx(expected, rel=1e-10)


def test_signals_that_follow_the_tangent_lift_it_and_independent_ones_do_not():
    inputs = random_rows(400, 6, 2) - random_rows(400, 6, 2).mean(dim=0)
    direction = random_frame(6, 1)
    tangent = Subspace(direction, torch.zeros(6, dtype=torch.float64))
    noise = torch.from_numpy(np.random.default_rng(3).normal(size=(400, 40)))
    following = noise + 3 * inputs @ direction
    lifts = []
    for deltas in (noise, following):
        rows = SecondMoments.of(deltas.T @ inputs)
        lifts.append(energy_test(rows, tangent, signals=[signals_of(deltas, inputs)]).signal_lift)
    assert lifts[0] == pytest.approx(1, abs=0.35)
    assert lifts[1] > 1.5 * lifts[0]


def test_the_test_reports_the_shuffled_energy_and_the_lift_over_it():
    deltas, inputs, tangent = random_rows(30, 5, 1), random_rows(30, 9, 2), random_subspace(9, 2)
    signals = [signals_of(deltas, inputs)]
    result = energy_test(SecondMoments.of(deltas.T @ inputs), tangent, signals=signals)
    assert result.shuffled == pytest.approx(shuffled_energy(signals, tangent.basis), rel=1e-12)
    assert result.signal_lift == pytest.approx(result.energy / result.shuffled, rel=1e-12)


def test_signals_that_cannot_be_shuffled_are_refused():
    with pytest.raises(ValueError, match="1 row cannot be shuffled; at least 2 are needed"):
        signals_of(random_rows(1, 3), random_rows(1, 6))
    silent = signals_of(torch.zeros(5, 3, dtype=torch.float64), random_rows(5, 6))
    with pytest.raises(ValueError, match="the backward signals are all zero, so there is nothing to shuffle"):
        shuffled_energy(silent, random_frame(6, 2))


def test_a_gradient_without_preference_has_p_one_whatever_rounding_says():
    tangent = Subspace(torch.eye(12, dtype=torch.float64)[:, :3], torch.zeros(12, dtype=torch.float64))
    ball = SecondMoments(12)
    ball.count, ball.scatter = 100, 0.37 * torch.eye(12, dtype=torch.float64)
    assert energy_test(ball, tangent, controls=50).p_value == 1


def spectrum_of_kind(kind: str, n: int) -> torch.Tensor:
    index = torch.arange(1, n + 1, dtype=torch.float64)
    kinds = {"flat": 1 + index / n, "power law": index**-0.8, "steep": index**-1.5, "one": torch.ones_like(index)}
    values = kinds[kind].clone()
    values[0] *= n if kind == "one" else 1
    return values


def sampled_energies(moment: torch.Tensor, tangent: Subspace, count: int = 20_000) -> torch.Tensor:
    frames = random_normals(tangent, count, seed=3)
    return (frames * (moment @ frames)).sum(dim=(1, 2)) / moment.trace()


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("kind", ["flat", "power law", "steep", "one"])
def test_unsampled_p_values_are_those_of_20000_random_normals(kind, k):
    d = 24 + k
    frame, variances = random_frame(d, d, seed=1), torch.cat([torch.full((k,), 2.0), spectrum_of_kind(kind, 24)])
    moment, tangent = (frame * variances) @ frame.T, Subspace.spanned_by(frame[:, :k])
    energies = sampled_energies(moment, tangent)
    centred = array((energies - energies.mean()) / energies.std())
    found = random_normal_skewness(moment, tangent.basis)
    assert found == pytest.approx((centred**3).mean(), abs=0.15)
    for share in (0.05, 0.01, 0.002):
        place = float(energies.quantile(1 - share))
        assert random_normal_p_value(place, moment, tangent.basis) == pytest.approx(share, rel=0.5)


def test_skewness_changes_its_sign_with_the_moment_and_ends_at_half_of_the_complement():
    frame = random_frame(10, 10)
    values = torch.tensor([5.0, 5, 9, 1, 1, 1, 2, 1, 1, 1], dtype=torch.float64)
    mirrored = torch.cat([values[:2], 10 - values[2:]])
    found, other = (random_normal_skewness((frame * one) @ frame.T, frame[:, :2]) for one in (values, mirrored))
    assert found > 0.3
    assert other == pytest.approx(-found, rel=1e-9)
    assert random_normal_skewness(random_moment(9), random_frame(9, 3)) == 0
    assert random_normal_skewness(random_moment(8), random_frame(8, 4)) is None


def test_where_the_normals_are_skewed_to_the_left_the_p_value_is_too_large():
    frame = random_frame(25, 25, seed=1)
    variances = torch.cat([torch.ones(1), 1.1 - spectrum_of_kind("steep", 24)]).double()
    moment, tangent = (frame * variances) @ frame.T, Subspace.spanned_by(frame[:, :1])
    assert random_normal_skewness(moment, tangent.basis) < -1
    energies = sampled_energies(moment, tangent)
    for share in (0.05, 0.01, 0.002):
        assert random_normal_p_value(float(energies.quantile(1 - share)), moment, tangent.basis) > share


def test_the_unsampled_p_value_stands_beside_the_sampled_one():
    moment, tangent = random_moment(30, seed=4), random_subspace(30, 3)
    result = energy_test(stream_of(moment), tangent, controls=4000)
    assert result.exact_p_value == random_normal_p_value(result.energy, moment, tangent.basis)
    assert result.exact_p_value == pytest.approx(result.p_value, rel=0.15)


def test_p_values_of_no_law_are_none_and_none_is_zero():
    ball = stream_of(torch.eye(12, dtype=torch.float64))
    assert energy_test(ball, random_subspace(12, 3)).exact_p_value is None
    assert energy_test(stream_of(random_moment(7)), random_subspace(7, 2)).exact_p_value is None
    values = torch.cat([torch.full((2,), 1e6), 1 + torch.arange(198) / 1e3]).double()
    basis = torch.eye(200, dtype=torch.float64)[:, :2]
    assert energy_test(stream_of(torch.diag(values)), Subspace.spanned_by(basis)).exact_p_value == sys.float_info.min


def test_controls_come_in_batches_without_changing_a_number(monkeypatch):
    moments, tangent = SecondMoments.of(random_rows(50, 9)), random_subspace(9, 2)
    whole = energy_test(moments, tangent, controls=40, seed=4).random
    monkeypatch.setattr(controls, "_NUMBERS_AT_ONCE", 18 * 8)
    assert [len(batch) for batch in controls.normal_frame_batches(tangent, 40, 4)] == [8] * 5
    # The frames are the same to the last bit; a product with more of them at once rounds otherwise.
    for controlled in (40, random_normals(tangent, 40, seed=4)):
        assert energy_test(moments, tangent, controls=controlled, seed=4).random == pytest.approx(whole, rel=1e-14)
