"""Energies and isotropy from sketches: exact where that is promised, unbiased and as uncertain as said where estimated."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tangent_lens.measures.energy import energy_test
from tangent_lens.measures.isotropy import iso_score, isotropy_test
from tangent_lens.measures.probing import Estimate, Fold, estimated_cube, estimated_square, estimated_trace, propagated
from tangent_lens.measures.sketched import sketched_energy_test, sketched_isotropy_test
from tangent_lens.measures.sketched_matrix import gradient_directions, gradient_probes, left_rows
from tangent_lens.measures.sketched_spectrum import sketched_iso_score, sketched_spectrum, variance_share
from tangent_lens.measures.spectrum import spectrum_of
from tangent_lens.recording.moments import SecondMoments
from tangent_lens.recording.sketch import SketchedGradient, SketchedMoments, gaussian_directions, left_directions
from tangent_lens.subspaces.fits import fit_pca
from tangent_lens.subspaces.sketched import fit_directions, range_directions
from tangent_lens.subspaces.subspace import Subspace

D, RANK, CONTROLS = 150, 3, 8


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scales(d, power):
    return torch.arange(1, d + 1, dtype=torch.float64) ** -power


def case(d=D, power=0.6, seed=0, rank=RANK):
    """Gradient rows of a power-law spectrum with a mean, and a tangent fitted on others, with both rivals."""
    rows = normal(300, d, seed=seed) * scales(d, power) + 0.2 * scales(d, 0.3)
    fitted = normal(400, d, seed=seed + 1) * scales(d, power / 2)
    return rows, fit_pca(SecondMoments.of(fitted), rank)


def weight_case(outs=(60,), power=0.8, seed=0, d=D):
    parts = [
        scales(out, power)[:, None] * normal(out, d, seed=seed + n) * scales(d, power) + 0.01
        for n, out in enumerate(outs)
    ]
    return [part @ torch.linalg.qr(normal(d, d, seed=7)).Q for part in parts], case(d)[1]


def frames_of(tangent, controls=CONTROLS, seed=0):
    """The control frames as they are defined, from the probes themselves."""
    probes = gradient_probes(tangent.d, tangent.rank, controls, seed)
    outside = torch.eye(tangent.d, dtype=torch.float64) - tangent.basis @ tangent.basis.T
    blocks = (outside @ probes)[:, : controls * tangent.rank].split(tangent.rank, dim=1)
    return torch.stack([torch.linalg.qr(block).Q for block in blocks])


def sketch_of(rows, tangent, seed=0, controls=CONTROLS):
    probes = gradient_probes(tangent.d, tangent.rank, controls, seed)
    return SketchedMoments.of(rows, gradient_directions(tangent), probes)


def gradient_sketches(gradients, tangent, seed=0, controls=CONTROLS, left=None):
    probes, own = gradient_probes(tangent.d, tangent.rank, controls, seed), gradient_directions(tangent)
    rows = left or left_rows(tangent.rank)
    return [
        SketchedGradient.of(one, own, left_directions(len(one), rows, f"{seed}/{n}"), probes)
        for n, one in enumerate(gradients)
    ]


EXACT = ("energy", "lift", "expected_random", "p_value", "trailing", "following")


@pytest.mark.parametrize("power", [0.0, 0.3, 1.0])
def test_residual_energies_are_exact(power):
    rows, tangent = case(power=power)
    found = sketched_energy_test(sketch_of(rows, tangent), tangent, controls=CONTROLS)
    exact = energy_test(SecondMoments.of(rows), tangent, controls=frames_of(tangent))
    for name in EXACT:
        assert getattr(found, name) == pytest.approx(getattr(exact, name), rel=1e-9), name
    assert found.random == pytest.approx(exact.random, rel=1e-9) and len(found.random) == CONTROLS
    assert found.standard_error == 0 and exact.standard_error is None
    assert found.expected_random_sd == pytest.approx(exact.expected_random_sd, rel=0.1)
    assert found.energy <= found.oracle <= exact.oracle * (1 + 1e-9)


@settings(max_examples=15, deadline=None)
@given(scale=st.floats(-12, 8), seed=st.integers(0, 50))
def test_no_number_depends_on_the_scale_or_on_a_turn(scale, seed):
    rows, tangent = case(d=40, seed=seed, rank=2)
    turn = torch.linalg.qr(normal(40, 40, seed=seed)).Q
    turned = Subspace(
        turn @ tangent.basis, turn @ tangent.centre, {}, {n: turn @ one for n, one in tangent.rivals.items()}
    )
    probes = gradient_probes(40, 2, 5, seed)
    plain = SketchedMoments.of(rows, gradient_directions(tangent), probes)
    other = SketchedMoments.of(10**scale * rows @ turn.T, gradient_directions(turned), turn @ probes)
    for test in (sketched_energy_test, sketched_isotropy_test):
        one, two = test(plain, tangent, controls=5), test(other, turned, controls=5)
        for name, value in vars(one).items():
            if not isinstance(value, str) and value is not None:
                assert getattr(two, name) == pytest.approx(value, rel=1e-5, abs=1e-9), name


@pytest.mark.parametrize("tilt", [0.0, 0.4, 0.8])
def test_the_p_value_of_all_normals_is_near_the_exact_one(tilt):
    rows, _ = case(power=0.6)
    tangent = Subspace.spanned_by(
        normal(D, RANK, seed=9) + tilt * 10 * torch.eye(D, dtype=torch.float64)[:, 4 : 4 + RANK]
    )
    exact = energy_test(SecondMoments.of(rows), tangent, controls=2).exact_p_value
    assert exact is not None
    for seed in range(5):
        found = sketched_energy_test(sketch_of(rows, tangent, seed, controls=20), tangent).exact_p_value
        assert math.log10(found) == pytest.approx(math.log10(exact), rel=0.05, abs=0.02)


@pytest.mark.parametrize("options", [{}, {"shrinkage": 0.3}, {"dimension": "complement"}])
def test_isotropy_of_rows_is_within_its_error(options):
    rows, tangent = case()
    exact = isotropy_test(SecondMoments.of(rows).covariance(), tangent, controls=frames_of(tangent), **options)
    found = sketched_isotropy_test(sketch_of(rows, tangent), tangent, controls=CONTROLS, **options)
    assert found.score == pytest.approx(exact.score, abs=4 * found.standard_error)
    assert found.delta == pytest.approx(exact.delta, abs=4 * found.delta_standard_error)
    assert 0 < found.standard_error < 0.05 * found.score
    assert found.random == pytest.approx(exact.random, abs=0.05 * max(map(abs, exact.random)))
    assert found.trailing == pytest.approx(exact.trailing, rel=0.1)
    assert found.p_value == exact.p_value and exact.standard_error is None


def test_probes_that_span_everything_leave_no_error():
    rows, tangent = case(d=20, rank=2)
    found = sketched_isotropy_test(sketch_of(rows, tangent), tangent, controls=CONTROLS)
    exact = isotropy_test(SecondMoments.of(rows).covariance(), tangent, controls=frames_of(tangent))
    assert found.score == pytest.approx(exact.score, rel=1e-9) and found.delta == pytest.approx(exact.delta, rel=1e-7)
    assert found.random == pytest.approx(exact.random, rel=1e-6)
    assert found.standard_error < 1e-9


def errors_of(pairs):
    """z of the mean error, and the share of errors within two standard errors."""
    errors, said = np.array(pairs).T
    return (
        errors.mean() / errors.std() * math.sqrt(len(errors)),
        float(np.mean(np.abs(errors) <= 2 * said)),
        errors,
        said,
    )


@pytest.mark.parametrize("power", [0.2, 0.5, 1.0])
def test_standard_errors_of_rows_cover_the_truth_and_the_mean_is_right(power):
    rows, tangent = case(power=power)
    exact = isotropy_test(SecondMoments.of(rows).covariance(), tangent, controls=1)
    found = [sketched_isotropy_test(sketch_of(rows, tangent, seed), tangent, controls=2) for seed in range(120)]
    for name, error in (("score", "standard_error"), ("delta", "delta_standard_error")):
        bias, covered, errors, said = errors_of(
            [(getattr(one, name) - getattr(exact, name), getattr(one, error)) for one in found]
        )
        assert abs(bias) < 4 and covered > 0.9, name
        # An upper bound, but not an idle one.
        assert 0.4 < np.sqrt(np.mean(errors**2)) / said.mean() < 1.15, name


def test_weight_energies_are_right_within_their_error():
    (gradient,), tangent = weight_case()
    exact = energy_test(SecondMoments.of(gradient), tangent, controls=frames_of(tangent))
    (sketch,) = gradient_sketches([gradient], tangent)
    found = sketched_energy_test(sketch, tangent, controls=CONTROLS)
    assert found.energy == pytest.approx(exact.energy, rel=0.01) and found.standard_error < 0.01 * found.energy
    # What is exact is the numerators: all energies are off by one factor, that of the total.
    factor = exact.energy / found.energy
    assert np.multiply(found.random, factor) == pytest.approx(exact.random, rel=1e-9)
    for name in ("trailing", "following"):
        assert factor * getattr(found, name) == pytest.approx(getattr(exact, name), rel=1e-9)
    assert found.expected_random == pytest.approx(exact.expected_random, rel=0.01)
    assert found.expected_random_sd == pytest.approx(exact.expected_random_sd, rel=0.05)
    assert 0.9 * exact.oracle < found.oracle < 1.01 * exact.oracle


@pytest.mark.parametrize("outs", [(60,), (40, 25)])
def test_standard_errors_of_weight_gradients_cover_the_truth(outs):
    """Of one map, and of two taken together, with so few left rows that the approximation is a poor one."""
    gradients, tangent = weight_case(outs, power=0.6)
    stacked = SecondMoments.of(torch.cat(gradients))
    energy, exact = energy_test(stacked, tangent, controls=1), isotropy_test(stacked.covariance(), tangent, controls=1)
    pairs = {"energy": [], "score": [], "delta": []}
    for seed in range(100):
        sketches = gradient_sketches(gradients, tangent, seed, controls=2, left=16)
        one = sketched_energy_test(sketches, tangent, controls=2)
        two = sketched_isotropy_test(sketches, tangent, controls=2)
        pairs["energy"].append((one.energy - energy.energy, one.standard_error))
        pairs["score"].append((two.score - exact.score, two.standard_error))
        pairs["delta"].append((two.delta - exact.delta, two.delta_standard_error))
    for name, found in pairs.items():
        bias, covered, errors, said = errors_of(found)
        assert covered > 0.9 and abs(bias) < 6, name
        assert np.sqrt(np.mean(errors**2)) < 1.3 * said.mean(), name


def test_maps_taken_together_are_their_stack():
    gradients, tangent = weight_case((60, 30, 30))
    stacked = SecondMoments.of(torch.cat(gradients))
    frames = frames_of(tangent)
    sketches = gradient_sketches(gradients, tangent)
    energy = sketched_energy_test(sketches, tangent, controls=CONTROLS)
    assert energy.energy == pytest.approx(energy_test(stacked, tangent, controls=frames).energy, rel=0.01)
    isotropy = sketched_isotropy_test(sketches, tangent, controls=CONTROLS)
    exact = isotropy_test(stacked.covariance(), tangent, controls=frames)
    assert isotropy.score == pytest.approx(exact.score, rel=0.05)
    assert isotropy.delta == pytest.approx(exact.delta, abs=4 * isotropy.delta_standard_error)
    assert isotropy.random == pytest.approx(exact.random, abs=0.05 * max(map(abs, exact.random)))
    assert isotropy.trailing == pytest.approx(exact.trailing, abs=0.05 * abs(exact.delta))


class TestEstimates:
    """The estimators themselves, on a matrix at hand."""

    B = torch.diag(scales(30, 0.7))

    def folds(self, seed, images, factor=True):
        probes = normal(30, 40, seed=seed)
        # An approximation that is wrong on purpose: it takes variance away, and no bias may come of that.
        approximation = torch.eye(30, dtype=torch.float64)[:, :4] * 0.8 if factor else torch.zeros(30, 1).double()
        image = self.B @ probes
        return [Fold(approximation, probes, probes.T @ image, image.square().sum(0) if images else None)]

    @pytest.mark.parametrize("images", [True, False])
    @pytest.mark.parametrize("factor", [True, False])
    def test_they_are_unbiased(self, images, factor):
        for function, power in ((estimated_trace, 1), (estimated_square, 2), (estimated_cube, 3)):
            values = [function(self.folds(seed, images, factor)).value for seed in range(300)]
            error = np.std(values) / math.sqrt(len(values))
            assert np.mean(values) == pytest.approx(float(scales(30, 0.7).pow(power).sum()), abs=4 * error), function

    @pytest.mark.parametrize("images", [True, False])
    def test_their_errors_are_as_large_as_they_say(self, images):
        for function in (estimated_trace, estimated_square):
            found = [function(self.folds(seed, images, False)) for seed in range(300)]
            spread, said = np.std([one.value for one in found]), np.mean([one.standard_error for one in found])
            assert 0.7 < said / spread < 1.3, function

    def test_functions_of_them_follow_the_chain_rule(self):
        one, two = Estimate(2.0, (torch.tensor([1.0, -1.0]),)), Estimate(3.0, (torch.tensor([0.5, -0.5]),))
        found = propagated(lambda x, y, z: x * y + z, one, two, Estimate(1.0))
        assert found.value == 7 and found.influences[0].tolist() == pytest.approx([4.0, -4.0], rel=1e-4)
        assert Estimate(1.0).standard_error == 0


class TestActivations:
    """The shape of activations from a sketch of the fit split."""

    def sketch(self, power, d=D, seed=0):
        rows = normal(500, d, seed=seed) * scales(d, power) + 1
        first = SketchedMoments.of(rows, fit_directions(d, RANK, seed))
        return rows, SketchedMoments.of(rows, range_directions(first), gaussian_directions(d, 64, f"{seed}/probes"))

    @pytest.mark.parametrize("power", [0.2, 0.6, 1.2])
    def test_it_is_near_the_exact_one(self, power):
        rows, sketch = self.sketch(power)
        exact, found = spectrum_of(SecondMoments.of(rows).covariance()), sketched_spectrum(sketch)
        score, truth = sketched_iso_score(sketch), iso_score(SecondMoments.of(rows).covariance())
        assert score.value == pytest.approx(truth, rel=0.05) and score.value == pytest.approx(
            truth, abs=4 * score.standard_error
        )
        assert found.participation_ratio == pytest.approx(exact.participation_ratio, rel=0.05)
        assert found.effective_rank == pytest.approx(exact.effective_rank, rel=0.1)
        assert found.effective_rank_singular == pytest.approx(exact.effective_rank_singular, rel=0.1)
        assert found.stable_rank == pytest.approx(exact.stable_rank, rel=0.02)
        assert (found.top_dimension, found.d) == (exact.top_dimension, D)
        assert found.top_share == pytest.approx(exact.top_share, rel=1e-9)
        assert (found.alpha_first, found.alpha_last) == (11, 64)

    def test_a_sketch_as_wide_as_the_space_is_exact(self):
        rows, sketch = self.sketch(0.6, d=30)
        exact, found = spectrum_of(SecondMoments.of(rows).covariance()), sketched_spectrum(sketch)
        for name, value in vars(exact).items():
            assert getattr(found, name) == pytest.approx(value, rel=1e-6), name
        basis = torch.linalg.qr(normal(30, 4, seed=5)).Q
        matrix = SecondMoments.of(rows).covariance()
        assert variance_share(sketch, basis) == pytest.approx(float((basis * (matrix @ basis)).sum() / matrix.trace()))

    def test_standard_errors_cover_the_truth(self):
        rows = normal(500, D) * scales(D, 0.4)
        truth = iso_score(SecondMoments.of(rows).covariance())
        pairs = []
        for seed in range(100):
            sketch = SketchedMoments.of(
                rows, gaussian_directions(D, 30, seed), gaussian_directions(D, 64, f"{seed}/probes")
            )
            found = sketched_iso_score(sketch)
            pairs.append((found.value - truth, found.standard_error))
        bias, covered, _, _ = errors_of(pairs)
        assert abs(bias) < 4 and covered > 0.88

    def test_isotropy_needs_probes(self):
        with pytest.raises(ValueError, match="2 probes or more"):
            sketched_iso_score(SketchedMoments.of(normal(9, 30), gaussian_directions(30, 5, 0)))


@pytest.mark.parametrize("test", [sketched_energy_test, sketched_isotropy_test])
class TestRefusals:
    def test_another_subspace(self, test):
        rows, tangent = case()
        with pytest.raises(ValueError, match="sketched for another subspace"):
            test(sketch_of(rows, tangent), case(seed=5)[1], controls=2)

    def test_more_controls_than_probes(self, test):
        rows, tangent = case()
        with pytest.raises(ValueError, match="40 controls of rank 3 need as many blocks of 3 probes"):
            test(sketch_of(rows, tangent), tangent, controls=40)

    def test_no_rows(self, test):
        _, tangent = case()
        with pytest.raises(ValueError, match="no gradient was gathered"):
            test(sketch_of(torch.zeros(0, D), tangent), tangent, controls=2)

    def test_a_gradient_of_zeros(self, test):
        _, tangent = case()
        with pytest.raises(ValueError, match=r"zero everywhere|no variance"):
            test(sketch_of(torch.zeros(5, D), tangent), tangent, controls=2)
        with pytest.raises(ValueError, match=r"zero everywhere|no variance"):
            test(gradient_sketches([torch.zeros(20, D)], tangent), tangent, controls=2)

    def test_maps_of_different_directions(self, test):
        gradients, tangent = weight_case((30, 30))
        one, two = gradient_sketches(gradients[:1], tangent), gradient_sketches(gradients[1:], tangent, seed=1)
        with pytest.raises(ValueError, match="different directions"):
            test([*one, *two], tangent, controls=2)


def test_a_rank_without_room_for_a_control_is_refused():
    with pytest.raises(ValueError, match=r"rank 6 needs 2\*rank <= d = 10"):
        gradient_probes(10, 6, 20, 0)


@pytest.mark.parametrize(
    ("options", "sentence"), [({"shrinkage": 2}, "shrinkage"), ({"dimension": "whole"}, "dimension")]
)
def test_isotropy_options_are_checked(options, sentence):
    rows, tangent = case()
    with pytest.raises(ValueError, match=sentence):
        sketched_isotropy_test(sketch_of(rows, tangent), tangent, controls=2, **options)
