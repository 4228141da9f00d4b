"""Receivers fed by hand: rows chosen, moments, kept rows, and weight gradients of a map whose answer is known."""

from __future__ import annotations

import pytest
import torch
from plain_reference import assert_close
from torch import nn

from tangent_lens.models.protocol import Batch, LinearMap, TapPoint
from tangent_lens.recording.moments import ROWS_A_PRODUCT, Moments, NonFiniteRows, SecondMoments
from tangent_lens.recording.receivers import (
    WATCHED_POSITIONS,
    MomentsReceiver,
    PositionVariance,
    RowsReceiver,
    Selection,
    WeightReceiver,
)
from tangent_lens.recording.row_choice import RowChoice
from tangent_lens.recording.taps import SiteNeverFired
from tangent_lens.sites import Site

SITE = Site("resid_post", 1)
KEEP = torch.tensor([[True, False, True, True], [False, True, True, False]])
POSITIONS = torch.tensor([[0, 1, 2, 3], [0, 0, 1, 2]])


def tensor_of(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class TestRowChoice:
    def test_all_rows_by_default_one_under_the_other(self):
        x = tensor_of(2, 4, 3)
        assert torch.equal(RowChoice().rows(x), x.reshape(8, 3))

    def test_kept_rows_only(self):
        x = tensor_of(2, 4, 3)
        expected = torch.stack([x[0, 0], x[0, 2], x[0, 3], x[1, 1], x[1, 2]])
        assert torch.equal(RowChoice(KEEP).rows(x), expected)

    def test_positions_go_with_the_rows(self):
        assert RowChoice(KEEP, POSITIONS).row_positions().tolist() == [0, 2, 3, 0, 1]
        assert RowChoice(None, POSITIONS).row_positions().tolist() == [0, 1, 2, 3, 0, 0, 1, 2]

    def test_of_a_batch_drops_a_mask_that_keeps_all(self):
        every = torch.ones(2, 4, dtype=torch.bool)
        assert RowChoice.of(Batch(POSITIONS, every, POSITIONS, every)).keep is None
        assert torch.equal(RowChoice.of(Batch(POSITIONS, every, POSITIONS, KEEP)).keep, KEEP)

    @pytest.mark.parametrize("shape", [(8, 3), (2, 4, 2, 3)])
    def test_other_dimensions_are_refused_with_the_shape(self, shape):
        with pytest.raises(ValueError, match=rf"carries \(batch, position, width\); here \({shape[0]}, {shape[1]}"):
            RowChoice(None, POSITIONS).rows(torch.zeros(shape))

    def test_a_module_of_unknown_structure_may_have_any_rows_but_none_at_all(self):
        tensor = torch.arange(48.0).view(2, 4, 2, 3)
        assert torch.equal(RowChoice().rows(tensor), tensor.view(16, 3))
        with pytest.raises(ValueError, match=r"carries rows \(\.\.\., width\); here \(5,\) passed"):
            RowChoice().rows(torch.zeros(5))

    def test_a_mask_of_another_shape_is_refused_with_both_shapes(self):
        with pytest.raises(ValueError, match=r"mask of shape \(2, 4\) does not fit activations \(2, 5, 3\)"):
            RowChoice(KEEP).rows(torch.zeros(2, 5, 3))

    def test_positions_are_unknown_outside_a_corpus(self):
        with pytest.raises(ValueError, match="positions are only known of batches of a corpus"):
            RowChoice(KEEP).row_positions()


class TestPositionVariance:
    def test_shares_are_those_of_the_squared_distances_to_the_mean(self):
        rows, positions = tensor_of(40, 5), torch.arange(40) % 20
        rows[positions == 3] *= 10
        watched = PositionVariance(5)
        for part in (slice(0, 7), slice(7, 40)):
            watched.update(rows[part], positions[part])
        distances = (rows - rows.mean(0)).square().sum(1)
        expected = torch.stack([distances[positions == place].sum() for place in range(WATCHED_POSITIONS)])
        assert_close(watched.shares(SecondMoments.of(rows)), expected / distances.sum(), 1e-12)
        assert watched.count.tolist() == [2.0] * WATCHED_POSITIONS
        assert int(expected.argmax()) == 3

    def test_shares_of_all_positions_sum_to_one(self):
        rows, positions = tensor_of(30, 5) + 1e3, torch.arange(30) % 10
        watched = PositionVariance(5)
        watched.update(rows, positions)
        assert float(watched.shares(SecondMoments.of(rows)).sum()) == pytest.approx(1, abs=1e-6)


class TestMomentsReceiver:
    def feed(self, receiver, selection, seeds=(0, 1)):
        kept_x, kept_g = [], []
        for seed in seeds:
            selection.current = RowChoice(KEEP if seed % 2 else None, POSITIONS)
            x, g = tensor_of(2, 4, 3, seed=seed), tensor_of(2, 4, 3, seed=seed + 100)
            answer = receiver(x)
            if answer is not None:
                answer(g)
            kept_x.append(selection.current.rows(x))
            kept_g.append(selection.current.rows(g))
        return Moments.of(torch.cat(kept_x), torch.cat(kept_g), cross=True)

    @pytest.mark.parametrize("cross", [True, False])
    def test_moments_of_both_streams(self, cross):
        selection = Selection()
        receiver = MomentsReceiver(SITE, selection, gradients=True, cross=cross)
        expected, found = self.feed(receiver, selection), receiver.result()
        assert (found.activations.count, found.gradients.count) == (13, 13)
        assert_close(found.activations.scatter, expected.activations.scatter, 1e-12)
        assert_close(found.gradients.scatter, expected.gradients.scatter, 1e-12)
        assert_close(found.activations.mean, expected.activations.mean, 1e-12)
        if cross:
            assert_close(found.cross_moment(), expected.cross_moment(), 1e-12)
        assert (receiver.fired, receiver.answered) == (2, 2)

    def test_gradients_alone_leave_activations_out(self):
        selection = Selection()
        receiver = MomentsReceiver(SITE, selection, activations=False, gradients=True)
        self.feed(receiver, selection)
        assert (receiver.result().activations.count, receiver.result().gradients.count) == (0, 13)

    def test_activations_alone_ask_for_no_gradient(self):
        receiver = MomentsReceiver(SITE, Selection())
        assert receiver(tensor_of(2, 4, 3)) is None
        assert receiver.result().gradients.count == 0

    def test_a_gradient_that_comes_late_keeps_the_mask_of_its_own_pass(self):
        selection = Selection()
        receiver = MomentsReceiver(SITE, selection, gradients=True)
        selection.current = RowChoice(KEEP)
        answer = receiver(tensor_of(2, 4, 3))
        selection.current = RowChoice()
        answer(tensor_of(2, 4, 3, seed=1))
        assert receiver.result().gradients.count == int(KEEP.sum())

    def test_first_positions_are_watched_when_asked(self):
        selection = Selection()
        receiver = MomentsReceiver(SITE, selection, watch_positions=True)
        self.feed(receiver, selection)
        assert receiver.positions.count[:4].tolist() == [5.0, 3.0, 3.0, 2.0]

    def test_nan_is_refused_by_the_sites_name(self):
        receiver = MomentsReceiver(SITE, Selection())
        x = tensor_of(2, 4, 3)
        x[1, 2, 0] = float("nan")
        with pytest.raises(NonFiniteRows, match=r"activations at resid_post\.1: 1 of 24 values .*row 6, dimension 0"):
            receiver(x)

    def test_infinite_gradients_are_refused_by_the_sites_name(self):
        receiver = MomentsReceiver(SITE, Selection(), gradients=True)
        answer = receiver(tensor_of(2, 4, 3))
        with pytest.raises(NonFiniteRows, match=r"gradients at resid_post\.1: 24 of 24 values"):
            answer(torch.full((2, 4, 3), float("inf"), dtype=torch.float64))

    def test_without_a_pass_there_is_no_result(self):
        with pytest.raises(SiteNeverFired, match=r"resid_post\.1: no forward pass has come by; run the model while"):
            MomentsReceiver(SITE, Selection()).result()

    def test_an_activation_changed_in_place_before_its_gradient_came_is_not_measured(self):
        """A later hook of the person adds to the tensor in place: the pair must be of what passed here, or refused."""
        before = tensor_of(2, 4, 3)
        receiver = MomentsReceiver(SITE, Selection(), gradients=True, cross=True)
        passing = before.clone()
        answer = receiver(passing)
        passing.add_(1)
        try:
            answer(tensor_of(2, 4, 3, seed=1))
        except RuntimeError as refusal:
            assert "in place" in str(refusal)
            return
        assert_close(receiver.result().activations.mean, before.reshape(8, 3).mean(0), 1e-12)


class TestRowsReceiver:
    def test_rows_are_copies(self):
        receiver = RowsReceiver(SITE, Selection(), gradients=True)
        x, g = tensor_of(2, 4, 3), tensor_of(2, 4, 3, seed=1)
        before = x.clone(), g.clone()
        receiver(x)(g)
        x.zero_(), g.zero_()
        assert torch.equal(receiver.activations[0], before[0])
        assert torch.equal(receiver.gradients[0], before[1])

    def test_a_second_backward_pass_adds_and_counts_once(self):
        receiver = RowsReceiver(SITE, Selection(), gradients=True)
        answer = receiver(tensor_of(2, 4, 3))
        answer(torch.ones(2, 4, 3))
        answer(torch.full((2, 4, 3), 2.0))
        assert torch.equal(receiver.gradients[0], torch.full((2, 4, 3), 3.0))
        assert (receiver.fired, receiver.answered) == (1, 1)

    def test_gradients_find_their_own_pass_in_any_order(self):
        receiver = RowsReceiver(SITE, Selection(), gradients=True)
        first, second = receiver(tensor_of(2, 4, 3)), receiver(tensor_of(2, 4, 3, seed=1))
        second(torch.full((2, 4, 3), 2.0))
        assert receiver.gradients[0] is None
        first(torch.ones(2, 4, 3))
        assert [float(gradient.mean()) for gradient in receiver.gradients] == [1.0, 2.0]


def linear_map(kind="query", columns=None, module=None):
    module = module or nn.Linear(3, 6)
    output = TapPoint(module, "output", "map", columns)
    return LinearMap(kind, 2, Site("attention_input", 2), (TapPoint(module, "input", "map"),), output)


class TestWeightReceiver:
    def test_gradient_is_the_sum_of_outer_products_over_kept_rows(self):
        selection = Selection()
        receiver = WeightReceiver([linear_map()], selection)
        rows_u, rows_delta = [], []
        for seed in (0, 1):
            selection.current = RowChoice(KEEP if seed else None)
            u, delta = tensor_of(2, 4, 3, seed=seed), tensor_of(2, 4, 6, seed=seed + 9)
            receiver.take_input(u)
            receiver.take_output(tensor_of(2, 4, 6))(delta)
            rows_u.append(selection.current.rows(u))
            rows_delta.append(selection.current.rows(delta))
        u, delta = torch.cat(rows_u), torch.cat(rows_delta)
        (found,) = receiver.results()
        explicit = sum(torch.outer(d, x) for d, x in zip(delta, u, strict=True))
        assert_close(found.gradient, explicit, 1e-12)
        assert_close(found.signal_sum, delta.sum(0), 1e-12)
        assert_close(found.signal_square_sum, delta.square().sum(0), 1e-12)
        assert (found.rows, found.name, found.reads.name) == (13, "query.2", "attention_input.2")

    def test_more_rows_than_one_product_takes(self):
        u, delta = tensor_of(1, ROWS_A_PRODUCT + 7, 3), tensor_of(1, ROWS_A_PRODUCT + 7, 6, seed=1)
        receiver = WeightReceiver([linear_map()], Selection())
        receiver.take_input(u)
        receiver.take_output(delta)(delta)
        (found,) = receiver.results()
        assert_close(found.gradient, delta[0].T @ u[0], 1e-11)
        assert found.rows == ROWS_A_PRODUCT + 7

    def test_bfloat16_rows_are_summed_in_float32(self):
        u, delta = (tensor_of(1, 500, width, seed=width, dtype=torch.bfloat16) for width in (3, 6))
        receiver = WeightReceiver([linear_map()], Selection())
        receiver.take_input(u)
        receiver.take_output(delta)(delta)
        (found,) = receiver.results()
        assert found.gradient.dtype == torch.float64
        assert_close(found.gradient, delta[0].double().T @ u[0].double(), 1e-5)

    def test_maps_of_one_module_share_one_product_and_take_their_own_rows(self):
        module = nn.Linear(3, 6)
        places = {"query": torch.tensor([0, 3]), "key": torch.tensor([1, 4]), "value": torch.tensor([5, 2])}
        receiver = WeightReceiver([linear_map(kind, own, module) for kind, own in places.items()], Selection())
        u, delta = tensor_of(2, 4, 3), tensor_of(2, 4, 6, seed=1)
        receiver.take_input(u)
        receiver.take_output(delta)(delta)
        whole = delta.reshape(8, 6).T @ u.reshape(8, 3)
        for found in receiver.results():
            own = places[found.kind]
            assert_close(found.gradient, whole[own], 1e-12)
            assert_close(found.signal_sum, delta.reshape(8, 6).sum(0)[own], 1e-12)
            assert_close(found.signal_square_sum, delta.reshape(8, 6).square().sum(0)[own], 1e-12)

    def test_an_input_changed_in_place_is_refused(self):
        receiver = WeightReceiver([linear_map()], Selection())
        u = tensor_of(2, 4, 3)
        receiver.take_input(u)
        answer = receiver.take_output(tensor_of(2, 4, 6))
        u.add_(1)
        with pytest.raises(
            RuntimeError, match=r"query\.2: the tensor that passed here was changed in place before its gradient came"
        ):
            answer(tensor_of(2, 4, 6))

    def test_an_output_without_its_input_is_refused(self):
        receiver = WeightReceiver([linear_map()], Selection())
        receiver.take_input(tensor_of(2, 4, 3))
        receiver.take_output(tensor_of(2, 4, 6))
        with pytest.raises(SiteNeverFired, match=r"query\.2: its output passed without its input"):
            receiver.take_output(tensor_of(2, 4, 6))

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_signals_that_are_not_finite_are_refused(self, bad):
        receiver = WeightReceiver([linear_map()], Selection())
        delta = tensor_of(2, 4, 6)
        delta[0, 1, 2] = bad
        receiver.take_input(tensor_of(2, 4, 3))
        with pytest.raises(NonFiniteRows, match=r"query\.2: its weight gradient holds NaN or infinity"):
            receiver.take_output(tensor_of(2, 4, 6))(delta)

    def test_a_product_that_overflows_is_refused(self):
        huge = torch.full((2, 4, 3), 1e30)
        receiver = WeightReceiver([linear_map()], Selection())
        receiver.take_input(huge)
        receiver.take_output(torch.zeros(2, 4, 6))(torch.full((2, 4, 6), 1e30))
        with pytest.raises(NonFiniteRows, match=r"query\.2: its weight gradient holds NaN or infinity"):
            receiver.results()

    def test_without_a_backward_pass_there_is_no_result(self):
        receiver = WeightReceiver([linear_map()], Selection())
        receiver.take_input(tensor_of(2, 4, 3))
        receiver.take_output(tensor_of(2, 4, 6))
        with pytest.raises(SiteNeverFired, match=r"query\.2: no backward pass has come by"):
            receiver.results()
