"""Sketches hold exactly what the whole sums would show through their directions, however the rows came."""

import pytest
import torch
from conftest import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_reference import random_sequences

from tangent_lens.lens import Lens
from tangent_lens.recording.moments import NonFiniteRows, SecondMoments
from tangent_lens.recording.passes import record_activations, record_gradients
from tangent_lens.recording.sketch import SketchedGradient, SketchedMoments, gaussian_directions, left_directions
from tangent_lens.recording.sketch_receivers import GradientSketch, SketchDirections

OWN, PROBES = gaussian_directions(7, 3, "own"), gaussian_directions(7, 2, "probes")
W = torch.cat([OWN, PROBES], dim=1)
SEQUENCES = random_sequences([5, 9, 2, 14, 7, 3, 11, 6])


def rows_of(count, seed=0, mean=3.0):
    return mean + torch.randn(count, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(found, expected, tolerance=1e-10):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def check_against(sketch, rows, tolerance=1e-10):
    exact = SecondMoments.of(rows.double())
    assert sketch.count == len(rows)
    close(sketch.mean, exact.mean, tolerance)
    close(sketch.sum(), exact.sum(), tolerance * len(rows))
    close(sketch.diagonal, exact.scatter.diagonal(), tolerance * len(rows))
    close(sketch.through, exact.scatter @ W, tolerance * len(rows))
    close(sketch.covariance_through(), exact.covariance() @ W, tolerance)
    close(sketch.second_moment_through(), exact.second_moment() @ W, tolerance * len(rows))
    assert sketch.square_total() == pytest.approx(exact.square_total(), rel=tolerance)
    assert sketch.total_variance() == pytest.approx(exact.total_variance(), rel=tolerance)


class TestSketchedMoments:
    def test_it_is_the_whole_sum_times_the_directions(self):
        check_against(SketchedMoments.of(rows_of(50), OWN, PROBES), rows_of(50))

    def test_float32_rows_far_from_zero_keep_what_they_carry(self):
        rows = rows_of(5000, mean=1e4).float()
        found = SketchedMoments.of(rows, OWN, PROBES)
        exact = SecondMoments.of(rows.double())
        close(
            found.through / exact.scatter.diagonal().mean(), exact.scatter @ W / exact.scatter.diagonal().mean(), 1e-4
        )

    @settings(max_examples=25, deadline=None)
    @given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6), seed=st.integers(0, 100))
    def test_batches_order_and_merging_change_nothing(self, sizes, seed):
        rows = rows_of(sum(sizes) + 2, seed)
        parts = rows.split([*sizes, 2])
        one = SketchedMoments(OWN, PROBES)
        for part in parts:
            one.update(part)
        merged = SketchedMoments(OWN, PROBES)
        for part in reversed(parts):
            merged.merge(SketchedMoments.of(part, OWN, PROBES))
        check_against(one, rows, 1e-9)
        check_against(merged, rows, 1e-9)

    def test_sums_computed_elsewhere_join(self):
        rows, found = rows_of(30), SketchedMoments(OWN, PROBES)
        for part in rows.split(11):
            centred = part - part.mean(0)
            found.join(len(part), part.mean(0), centred.square().sum(0), centred.T @ (centred @ W))
        check_against(found, rows)

    def test_nothing_joins_where_no_row_was_seen(self):
        found = SketchedMoments.of(rows_of(5), OWN, PROBES)
        found.merge(SketchedMoments(OWN, PROBES))
        check_against(found, rows_of(5))

    def test_a_file_keeps_it(self):
        found = SketchedMoments.of(rows_of(9), OWN, PROBES)
        again = SketchedMoments.from_tensors(found.tensors("a."), "a.")
        check_against(again, rows_of(9))
        assert torch.equal(again.own, OWN) and torch.equal(again.probes, PROBES)

    def test_probes_are_shared_and_not_copied(self):
        assert SketchedMoments(OWN, PROBES).probes.data_ptr() == PROBES.data_ptr()

    def test_not_finite_rows_leave_it_as_it_was(self):
        found, bad = SketchedMoments.of(rows_of(9), OWN, PROBES), rows_of(3)
        bad[1, 2] = float("nan")
        with pytest.raises(NonFiniteRows, match="row 1, dimension 2"):
            found.update(bad)
        with pytest.raises(NonFiniteRows, match="the through that joins"):
            found.join(2, torch.zeros(7), torch.zeros(7), torch.full((7, 5), float("inf")))
        check_against(found, rows_of(9))

    @pytest.mark.parametrize(
        ("act", "sentence"),
        [
            (lambda: SketchedMoments.of(torch.zeros(3, 6), OWN), "width 6 cannot join rows of width 7"),
            (lambda: SketchedMoments(OWN, PROBES[:5]), "columns"),
            (lambda: SketchedMoments(OWN * float("nan")), "NaN"),
            (
                lambda: SketchedMoments(OWN).join(1, torch.zeros(7), torch.zeros(6), torch.zeros(7, 3)),
                "diagonal of shape",
            ),
            (lambda: SketchedMoments(OWN).merge(SketchedMoments(OWN + 1)), "different directions"),
            (lambda: SketchedMoments(OWN).merge(SketchedMoments(OWN, PROBES)), "different directions"),
            (lambda: SketchedMoments(OWN).covariance_through(), "at least 2 needed"),
        ],
    )
    def test_refusals(self, act, sentence):
        with pytest.raises(ValueError, match=sentence):
            act()


def test_directions_are_decided_by_their_arguments():
    before = torch.random.get_rng_state()
    assert torch.equal(gaussian_directions(5, 4, 1), gaussian_directions(5, 4, 1))
    assert not torch.equal(gaussian_directions(5, 4, 1), gaussian_directions(5, 4, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    many = gaussian_directions(200, 500, 3)
    assert abs(float(many.mean())) < 0.02 and float(many.std()) == pytest.approx(1, abs=0.02)
    assert torch.equal(left_directions(6, 3, 0)[-1], torch.ones(6))


class TestSketchedGradient:
    LEFT = left_directions(4, 5, "left")

    def signals(self, count, dtype=torch.float64):
        generator = torch.Generator().manual_seed(1)
        return torch.randn(count, 4, generator=generator, dtype=dtype), rows_of(count).to(dtype)

    def check(self, sketch, delta, u, tolerance=1e-10):
        gradient = delta.double().T @ u.double()
        close(sketch.through, gradient @ W, tolerance)
        close(sketch.left, self.LEFT.double() @ gradient, tolerance)
        close(sketch.signal_sum, delta.double().sum(0), tolerance)
        close(sketch.signal_square_sum, delta.double().square().sum(0), tolerance)
        assert sketch.rows == len(u)

    def test_both_sides_of_the_gradient(self):
        delta, u = self.signals(40)
        sketch = SketchedGradient(OWN, self.LEFT, PROBES)
        for d, x in zip(delta.split(7), u.split(7), strict=True):
            sketch.update(d, x)
        self.check(sketch, delta, u)

    def test_merging_adds(self):
        delta, u = self.signals(40)
        parts = [SketchedGradient(OWN, self.LEFT, PROBES) for _ in range(2)]
        parts[0].update(delta[:13], u[:13])
        parts[1].update(delta[13:], u[13:])
        parts[1].merge(parts[0])
        self.check(parts[1], delta, u)

    def test_tiny_signals_do_not_vanish_beside_float32_inputs(self):
        delta, u = self.signals(40, torch.float32)
        sketch = SketchedGradient(OWN, self.LEFT, PROBES)
        sketch.update(delta * 1e-30, u)
        close(sketch.signal_square_sum * 1e60, delta.double().square().sum(0), 1e-5)

    def test_of_a_gradient_at_hand(self):
        delta, u = self.signals(9)
        found = SketchedGradient.of(delta.T @ u, OWN, self.LEFT, PROBES)
        close(found.through, delta.T @ u @ W)
        close(found.left[-1], (delta.T @ u).sum(0))

    def test_refusals(self):
        sketch, (delta, u) = SketchedGradient(OWN, self.LEFT, PROBES), self.signals(3)
        with pytest.raises(ValueError, match="left of shape"):
            sketch.join(1, torch.zeros(4, 5), torch.zeros(4, 7), torch.zeros(4), torch.zeros(4))
        with pytest.raises(NonFiniteRows, match="signal_sum that joins"):
            sketch.join(1, torch.zeros(4, 5), torch.zeros(6, 7), torch.full((4,), float("nan")), torch.zeros(4))
        with pytest.raises(ValueError, match="different directions"):
            sketch.merge(SketchedGradient(OWN, self.LEFT + 1, PROBES))
        delta[0, 0] = float("inf")
        with pytest.raises(NonFiniteRows, match="signals of weight gradient"):
            sketch.update(delta, u)
        assert sketch.rows == 0 and not bool(sketch.through.any())


class TestRecording:
    """The receivers, against whole sums of the same passes."""

    def matrices(self, width):
        return SketchDirections(gaussian_directions(width, 4, "own"), gaussian_directions(width, 6, "probes"))

    def sketch_of(self, lens, sites):
        inputs = {one.reads: self.matrices(32) for one in lens.maps}
        return GradientSketch({site: self.matrices(32) for site in sites}, inputs, dict.fromkeys(inputs, 5), seed=3)

    @pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])
    @pytest.mark.parametrize(("size", "side"), [(1, "right"), (3, "left"), (8, "right")])
    def test_both_passes_on_any_batches(self, family, size, side):
        lens = Lens(tiny_model(family))
        corpus, sites = lens.corpus(SEQUENCES), lens.resolve("resid_post.*")
        exact = record_activations(lens.model, corpus.batches(4), sites)
        found = record_activations(
            lens.model, corpus.batches(size, padding_side=side), sites, sketch=lambda site, width: self.matrices(width)
        )
        for site in sites:
            whole, part = exact[site].moments, found[site].moments
            close(part.through, whole.scatter @ part.directions, 1e-8)
            close(found[site].positions.shares(part), exact[site].positions.shares(whole), 1e-8)
        whole = record_gradients(lens.model, corpus.batches(4), sites, lens.maps)
        batches = corpus.batches(size, padding_side=side)
        part = record_gradients(lens.model, batches, sites, lens.maps, sketch=self.sketch_of(lens, sites))
        assert part.loss == pytest.approx(whole.loss) and part.rows == whole.rows and not part.moments
        for site in sites:
            gradients, sketch = whole.moments[site].gradients, part.sketches[site]
            close(sketch.second_moment_through(), gradients.second_moment() @ sketch.directions, 1e-8)
        assert [one.name for one in part.sketched_weights] == [one.name for one in whole.weights]
        for weight, sketched in zip(whole.weights, part.sketched_weights, strict=True):
            close(sketched.gradient.through, weight.gradient @ sketched.gradient.directions, 1e-8)
            close(sketched.gradient.left, sketched.gradient.left_directions.double() @ weight.gradient, 1e-8)
            close(sketched.gradient.signal_square_sum, weight.signal_square_sum, 1e-8)

    def test_every_map_has_left_directions_of_its_own(self):
        lens = Lens(tiny_model("llama"))
        sketch = self.sketch_of(lens, ())
        query, key = (next(one for one in lens.maps if one.kind == kind) for kind in ("query", "key"))
        assert not torch.equal(sketch.left(query, 16)[:-1], sketch.left(key, 16)[:-1])

    def test_a_second_backward_pass_is_refused(self):
        from tangent_lens.recording.receivers import Selection
        from tangent_lens.recording.sketch_receivers import SketchReceiver
        from tangent_lens.recording.taps import GradientNeverCame

        lens = Lens(tiny_model("llama"))
        receiver = SketchReceiver(lens.sites[0], Selection(), lambda site, width: self.matrices(width), gradients=True)
        take = receiver(torch.randn(2, 3, 32))
        take(torch.randn(2, 3, 32))
        with pytest.raises(GradientNeverCame, match="second backward pass"):
            take(torch.randn(2, 3, 32))
        assert receiver.result().count == 6

    def test_it_takes_no_activations_beside_gradients(self):
        lens = Lens(tiny_model("llama"))
        with pytest.raises(ValueError, match="no activations"):
            batches = lens.corpus(SEQUENCES).batches(4)
            record_gradients(lens.model, batches, lens.sites[:1], activations=True, sketch=self.sketch_of(lens, ()))
