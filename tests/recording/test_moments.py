"""Moments against one-row-at-a-time NumPy, under every cut, order and shift, and against rows that hold no numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from explicit import PROPERTY, array, cross, random_frame, random_rows, scatter
from hypothesis import given
from hypothesis import strategies as st

from tangent_lens.recording.moments import ROWS_A_PRODUCT, Moments, NonFiniteRows, ProjectedSums, SecondMoments
from tangent_lens.storage import FileProblem
from tangent_lens.subspaces.subspace import Subspace

ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 1e-6}
cuts = st.lists(st.integers(0, 20), max_size=8)


def pieces(rows: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """The rows in consecutive pieces of these sizes, the rest in a last one."""
    ends = np.minimum(np.cumsum([0, *sizes, len(rows)]), len(rows))
    return [rows[start:end] for start, end in itertools.pairwise(ends)]


def relative(found, expected) -> float:
    """|found - expected|_F / |expected|_F."""
    return float(np.linalg.norm(array(found) - np.asarray(expected)) / np.linalg.norm(expected))


def same(first: SecondMoments, second: SecondMoments) -> bool:
    """Whether two moments are equal bit for bit."""
    return (
        first.count == second.count
        and torch.equal(first.mean, second.mean)
        and torch.equal(first.scatter, second.scatter)
    )


def copy_of(moments: SecondMoments) -> SecondMoments:
    return SecondMoments.from_tensors({name: tensor.clone() for name, tensor in moments.tensors().items()})


def centred_about_large_mean(count: int = 3000, mean: float = 1e4, width: int = 6) -> torch.Tensor:
    """float32 rows whose mean is far larger than their spread of 1."""
    return (mean + torch.from_numpy(np.random.default_rng(1).normal(size=(count, width)))).float()


def rows_with(value: float, count: int = 10, row: int = 3, column: int = 1) -> torch.Tensor:
    rows = random_rows(count, 4, seed=5)
    rows[row, column] = value
    return rows


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_moments_equal_numpy(dtype):
    rows = random_rows(300, 7, dtype=dtype)
    moments = SecondMoments.of(rows)
    values = array(rows)
    assert moments.count == 300
    assert moments.mean.dtype == moments.scatter.dtype == torch.float64
    assert relative(moments.mean, values.mean(axis=0)) < ROUNDING[dtype]
    assert relative(moments.sum(), values.sum(axis=0)) < ROUNDING[dtype]
    assert relative(moments.scatter, scatter(rows)) < ROUNDING[dtype]
    assert relative(moments.covariance(), np.cov(values.T)) < ROUNDING[dtype]
    assert relative(moments.second_moment(), values.T @ values) < ROUNDING[dtype]
    assert moments.total_variance() == pytest.approx(values.var(axis=0, ddof=1).sum(), rel=ROUNDING[dtype])


@given(sizes=cuts)
@PROPERTY
def test_no_cut_into_batches_changes_a_moment(sizes):
    rows = random_rows(60, 5)
    moments = SecondMoments(5)
    for piece in pieces(rows, sizes):
        moments.update(piece)
    assert moments.count == 60
    assert relative(moments.mean, array(rows).mean(axis=0)) < 1e-13
    assert relative(moments.scatter, scatter(rows)) < 1e-13


@given(sizes=cuts, order=st.randoms(use_true_random=False))
@PROPERTY
def test_parts_merge_in_any_order(sizes, order):
    rows = random_rows(60, 5, dtype=torch.float32)
    parts = [SecondMoments.of(piece) for piece in pieces(rows, sizes)]
    order.shuffle(parts)
    merged = SecondMoments(5)
    for part in parts:
        merged.merge(part)
    assert merged.count == 60
    assert relative(merged.mean, array(rows).mean(axis=0)) < 1e-6
    assert relative(merged.scatter, scatter(rows)) < 1e-6


def test_merging_is_associative():
    first, second, third = (SecondMoments.of(random_rows(20, 4, seed)) for seed in range(3))
    left, right = copy_of(first), copy_of(second)
    left.merge(second)
    left.merge(third)
    right.merge(third)
    right.merge(first)
    assert left.count == right.count
    assert relative(left.mean, array(right.mean)) < 1e-14
    assert relative(left.scatter, array(right.scatter)) < 1e-14


def test_merging_leaves_the_other_part_as_it_was():
    part = SecondMoments.of(random_rows(20, 4))
    before = copy_of(part)
    whole = SecondMoments(4)
    whole.merge(part)
    whole.update(random_rows(9, 4, seed=1))
    assert same(part, before)


def test_merging_with_nothing_changes_nothing():
    moments = SecondMoments.of(random_rows(20, 4))
    before = copy_of(moments)
    moments.merge(SecondMoments(4))
    moments.update(torch.zeros(0, 4))
    assert same(moments, before)


@given(seed=st.integers(0, 1000))
@PROPERTY
def test_row_order_does_not_matter(seed):
    rows = random_rows(60, 5)
    shuffled = rows[np.random.default_rng(seed).permutation(60)]
    assert relative(SecondMoments.of(shuffled).scatter, array(SecondMoments.of(rows).scatter)) < 1e-13


@given(shift=st.floats(-1e3, 1e3))
@PROPERTY
def test_a_shift_moves_the_mean_alone(shift):
    rows = random_rows(60, 5)
    still, moved = SecondMoments.of(rows), SecondMoments.of(rows + shift)
    assert np.allclose(array(moved.mean), array(still.mean) + shift, rtol=1e-12, atol=1e-12)
    assert relative(moved.scatter, array(still.scatter)) < 1e-11


@given(exponent=st.integers(-15, 15))
@PROPERTY
def test_a_scale_multiplies_even_float32_rows_exactly_as_it_should(exponent):
    rows = random_rows(60, 5, dtype=torch.float32)
    scale = 2.0**exponent
    plain, scaled = SecondMoments.of(rows), SecondMoments.of(rows * scale)
    assert torch.equal(scaled.scatter, plain.scatter * scale**2)


def test_a_rotation_turns_the_scatter():
    rows, turn = random_rows(60, 5), random_frame(5, 5, seed=3)
    turned = SecondMoments.of(rows @ turn.T)
    assert relative(turned.scatter, array(turn) @ scatter(rows) @ array(turn).T) < 1e-13


@pytest.mark.parametrize("batch", [1, 7, 3000])
@pytest.mark.parametrize(("mean", "bound"), [(1e4, 1e-5), (1e5, 1e-4), (1e6, 1e-4)])
def test_a_mean_far_larger_than_the_spread_costs_no_digits(mean, bound, batch):
    rows = centred_about_large_mean(mean=mean)
    moments = SecondMoments(rows.shape[1])
    for piece in rows.split(batch):
        moments.update(piece)
    # Against float64 sums of the very same float32 rows. At most 2e-6, 2e-5 and 2e-10 were seen.
    assert relative(moments.covariance(), np.cov(array(rows).T)) < bound
    assert relative(moments.mean, array(rows).mean(axis=0)) < 1e-12


def test_parts_with_a_large_mean_merge_without_losing_digits():
    rows = centred_about_large_mean()
    merged = SecondMoments.of(rows[:1000])
    merged.merge(SecondMoments.of(rows[1000:]))
    assert relative(merged.covariance(), np.cov(array(rows).T)) < 1e-5


def test_more_rows_than_one_product_takes():
    rows = random_rows(2 * ROWS_A_PRODUCT + 1, 3)
    values = array(rows)
    moments = SecondMoments.of(rows)
    assert moments.count == len(rows)
    assert relative(moments.second_moment(), values.T @ values) < 1e-13


def test_rows_are_neither_changed_nor_kept_in_the_graph():
    rows = random_rows(20, 4).requires_grad_()
    before = rows.detach().clone()
    moments = SecondMoments.of(rows)
    assert torch.equal(rows, before)
    assert not moments.mean.requires_grad
    assert not moments.scatter.requires_grad


def test_what_was_handed_out_does_not_change_when_more_rows_come():
    moments = SecondMoments.of(random_rows(20, 4))
    handed_out = [moments.mean, moments.sum(), moments.covariance(), moments.second_moment()]
    copies = [tensor.clone() for tensor in handed_out]
    moments.update(random_rows(20, 4, seed=1))
    for tensor, copy in zip(handed_out, copies, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_that_hold_no_numbers_are_refused_and_change_nothing(value):
    moments = SecondMoments.of(random_rows(20, 4), name="resid_post.3")
    before = copy_of(moments)
    with pytest.raises(
        NonFiniteRows, match=r"resid_post\.3: 1 of 40 values are NaN or infinite \(first at row 3, dim.* 1"
    ):
        moments.update(rows_with(value))
    assert same(moments, before)


def test_rows_after_the_first_product_are_refused_too_and_change_nothing():
    moments = SecondMoments(4)
    count = ROWS_A_PRODUCT + 100
    with pytest.raises(NonFiniteRows, match=f"first at row {count - 1}, dimension 2"):
        moments.update(rows_with(math.nan, count=count, row=count - 1, column=2))
    assert moments.count == 0
    assert float(moments.scatter.abs().sum()) == 0


def test_squares_that_overflow_are_refused_with_the_way_out():
    rows = random_rows(20, 4, dtype=torch.float32) * 1e30
    with pytest.raises(NonFiniteRows, match=r"overflow when squared in torch\.float32; pass float64 rows"):
        SecondMoments.of(rows)
    assert SecondMoments.of(rows.double()).total_variance() > 1e60


def test_float64_rows_that_overflow_are_not_told_to_become_float64():
    with pytest.raises(NonFiniteRows, match="overflow when squared") as caught:
        SecondMoments.of(random_rows(20, 4) * 1e200)
    assert "pass float64 rows" not in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "taught"),
    [
        (torch.zeros(2, 3, 4), r"must be a matrix \(rows, width\), not of shape \(2, 3, 4\)"),
        (torch.zeros(4), r"must be a matrix \(rows, width\), not of shape \(4,\)"),
        (torch.zeros(2, 4, dtype=torch.long), r"must be floating point numbers, not torch\.int64"),
        (torch.zeros(2, 5), "rows of width 5 cannot join rows of width 4"),
    ],
)
def test_rows_of_another_make_are_refused(rows, taught):
    with pytest.raises(ValueError, match=f"here: .*{taught}"):
        SecondMoments(4, name="here").update(rows)


def test_rows_without_width_are_refused():
    with pytest.raises(ValueError, match="rows of width 0 hold no numbers; the width must be 1 or more"):
        SecondMoments.of(torch.zeros(3, 0))


def test_too_few_rows_are_named_with_what_is_needed():
    none, one = SecondMoments(4, name="here"), SecondMoments.of(torch.ones(1, 4), name="here")
    with pytest.raises(ValueError, match="here: 0 rows seen, at least 1 needed"):
        none.second_moment()
    for ask in (one.covariance, one.total_variance):
        with pytest.raises(ValueError, match="here: 1 rows seen, at least 2 needed; run the model on more text"):
            ask()
    assert one.second_moment().tolist() == [[1.0] * 4] * 4


def test_other_widths_do_not_merge():
    with pytest.raises(ValueError, match="width 5 cannot be merged into width 4"):
        SecondMoments(4).merge(SecondMoments(5))


def paired(count: int = 60, width: int = 5, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    return random_rows(count, width, seed=1, dtype=dtype), random_rows(count, width, seed=2, dtype=dtype)


@given(sizes=cuts)
@PROPERTY
def test_no_cut_into_batches_changes_the_cross_moment(sizes):
    activations, gradients = paired()
    moments = Moments(5, cross=True)
    for x, g in zip(pieces(activations, sizes), pieces(gradients, sizes), strict=True):
        moments.update(x, g)
    assert relative(moments.cross_moment(), cross(gradients, activations)) < 1e-13
    assert relative(moments.activations.scatter, scatter(activations)) < 1e-13
    assert relative(moments.gradients.scatter, scatter(gradients)) < 1e-13


@given(sizes=cuts, order=st.randoms(use_true_random=False))
@PROPERTY
def test_cross_moments_merge_in_any_order(sizes, order):
    activations, gradients = paired()
    pairs = list(zip(pieces(activations, sizes), pieces(gradients, sizes), strict=True))
    order.shuffle(pairs)
    merged = Moments(5, cross=True)
    for x, g in pairs:
        merged.merge(Moments.of(x, g, cross=True))
    assert relative(merged.cross_moment(), cross(gradients, activations)) < 1e-13
    assert relative(merged.gradients.scatter, scatter(gradients)) < 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cross_moments_of_narrow_rows(dtype):
    activations, gradients = paired(dtype=dtype)
    moments = Moments.of(activations, gradients, cross=True)
    assert relative(moments.cross_moment(), cross(gradients, activations)) < 1e-6


def test_the_cross_scatter_keeps_its_digits_about_large_means():
    activations, gradients = centred_about_large_mean(500), centred_about_large_mean(500).flip(0)
    moments = Moments(6, cross=True)
    for x, g in zip(activations.split(90), gradients.split(90), strict=True):
        moments.update(x, g)
    deviations = [array(rows) - array(rows).mean(axis=0) for rows in (gradients, activations)]
    assert relative(moments.cross_scatter, deviations[0].T @ deviations[1]) < 1e-9


def test_a_cross_moment_over_more_rows_than_one_product_takes():
    activations, gradients = paired(ROWS_A_PRODUCT + 7, 3)
    moments = Moments.of(activations, gradients, cross=True)
    assert relative(moments.cross_moment(), array(gradients).T @ array(activations)) < 1e-12


def test_without_gradients_only_the_activations_are_gathered():
    activations, gradients = paired()
    alone, both = Moments.of(activations), Moments.of(activations, gradients)
    assert alone.gradients.count == 0
    assert relative(both.gradients.second_moment(), array(gradients).T @ array(gradients)) < 1e-13
    assert same(alone.activations, both.activations)
    both.check_paired()
    with pytest.raises(ValueError, match="here: 60 activation rows but 0 gradient rows; a backward pass is missing"):
        Moments.of(activations, name="here").check_paired()


def test_gradients_that_do_not_belong_to_the_activations_are_refused():
    activations, gradients = paired()
    with pytest.raises(
        ValueError, match=r"gradients of shape \(59, 5\) do not belong to activations of shape \(60, 5\)"
    ):
        Moments.of(activations, gradients[1:])


def test_a_cross_moment_that_was_not_gathered_or_cannot_be():
    activations, gradients = paired()
    with pytest.raises(ValueError, match="here: the cross moment was not gathered; ask for it with cross=True"):
        Moments.of(activations, gradients, name="here").cross_moment()
    with pytest.raises(ValueError, match="here: a cross moment needs the gradients of the same rows"):
        Moments.of(activations, name="here", cross=True)
    with pytest.raises(ValueError, match="with a cross moment and one without cannot be merged"):
        Moments.of(activations, gradients).merge(Moments.of(activations, gradients, cross=True))


@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize("spoiled", ["activations", "gradients"])
def test_a_pair_that_holds_no_numbers_changes_neither_stream(spoiled, crossed):
    activations, gradients = paired(10, 4)
    moments = Moments.of(activations, gradients, name="here", cross=crossed)
    before = [copy_of(stream) for stream in (moments.activations, moments.gradients)]
    pair = {"activations": activations, "gradients": gradients} | {spoiled: rows_with(math.nan)}
    with pytest.raises(NonFiniteRows, match=f"{spoiled} at here: 1 of 40 values are NaN"):
        moments.update(**pair)
    assert same(moments.activations, before[0])
    assert same(moments.gradients, before[1])


@pytest.mark.parametrize("spoiled", ["activations", "gradients"])
def test_a_pair_that_holds_no_numbers_leaves_the_cross_moment_whole(spoiled):
    activations, gradients = paired(10, 4)
    moments = Moments.of(activations, gradients, cross=True)
    pair = {"activations": activations, "gradients": gradients} | {spoiled: rows_with(math.nan)}
    before = moments.cross_scatter.clone()
    with pytest.raises(NonFiniteRows):
        moments.update(**pair)
    assert torch.equal(moments.cross_scatter, before)


@pytest.mark.parametrize("width", [1, 5])
def test_a_pair_of_another_width_is_refused_and_changes_nothing(width):
    moments = Moments(4, name="here", cross=True)
    with pytest.raises(ValueError, match=f"activations at here: rows of width {width} cannot join rows of width 4"):
        moments.update(*paired(10, width))
    assert float(moments.cross_scatter.abs().sum()) == 0
    assert moments.activations.count == 0


@pytest.mark.parametrize("crossed", [False, True])
def test_recordings_of_other_widths_do_not_merge(crossed):
    with pytest.raises(ValueError, match="width 5 cannot be merged into width 4"):
        Moments(4, cross=crossed).merge(Moments.of(*paired(10, 5), cross=crossed))


@pytest.mark.parametrize("crossed", [False, True])
def test_a_saved_recording_comes_back_bit_for_bit(tmp_path, crossed):
    moments = Moments.of(*paired(dtype=torch.float32), name="resid_post.3", cross=crossed)
    moments.save(tmp_path / "moments.safetensors")
    loaded = Moments.load(tmp_path / "moments.safetensors")
    assert loaded.name == "resid_post.3"
    assert loaded.gradients.name == moments.gradients.name
    assert same(loaded.activations, moments.activations)
    assert same(loaded.gradients, moments.gradients)
    if crossed:
        assert torch.equal(loaded.cross_scatter, moments.cross_scatter)
    else:
        assert loaded.cross_scatter is None


def test_a_loaded_recording_goes_on_where_it_stopped(tmp_path):
    activations, gradients = paired()
    moments = Moments.of(activations[:25], gradients[:25], cross=True)
    moments.save(tmp_path / "moments.safetensors")
    loaded = Moments.load(tmp_path / "moments.safetensors")
    for one in (moments, loaded):
        one.update(activations[25:], gradients[25:])
    assert same(loaded.activations, moments.activations)
    assert torch.equal(loaded.cross_scatter, moments.cross_scatter)
    assert relative(loaded.cross_moment(), cross(gradients, activations)) < 1e-13


def test_a_recording_without_rows_is_saved_too(tmp_path):
    Moments(4, name="empty").save(tmp_path / "moments.safetensors")
    assert Moments.load(tmp_path / "moments.safetensors").activations.count == 0


def test_a_subspace_is_no_recording(tmp_path):
    Subspace.spanned_by(random_frame(5, 2)).save(tmp_path / "file")
    with pytest.raises(FileProblem, match="file holds a 'subspace', not a 'moments'"):
        Moments.load(tmp_path / "file")


class TestProjectedSums:
    """What the shuffled control needs of a map's inputs, in O(d k): the same numbers as full second moments give."""

    def case(self):
        generator = torch.Generator().manual_seed(3)
        rows = torch.randn(50, 12, generator=generator, dtype=torch.float64) + 0.5
        basis = torch.linalg.qr(torch.randn(12, 3, generator=generator, dtype=torch.float64)).Q
        return rows, basis

    def test_they_agree_with_second_moments_and_with_numpy(self):
        rows, basis = self.case()
        projected, full = ProjectedSums(basis), SecondMoments.of(rows)
        for part in rows.split(7):
            projected.update(part)
        for sums in (projected, full):
            assert sums.count == 50
            assert np.allclose(sums.sum().numpy(), rows.numpy().sum(axis=0))
            assert np.isclose(sums.square_total(), (rows.numpy() ** 2).sum())
            assert np.isclose(sums.square_along(basis), ((rows.numpy() @ basis.numpy()) ** 2).sum())

    def test_another_subspace_is_refused(self):
        rows, basis = self.case()
        projected = ProjectedSums(basis, name="inputs at mlp_input.3")
        projected.update(rows)
        with pytest.raises(ValueError, match=r"mlp_input\.3: these rows were projected on another subspace"):
            projected.square_along(torch.eye(12, dtype=torch.float64)[:, :3])

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_rows_that_hold_no_numbers_change_nothing(self, bad):
        rows, basis = self.case()
        projected = ProjectedSums(basis)
        projected.update(rows)
        before = (projected.count, projected.square_total(), projected.sum().clone())
        rows[3, 4] = bad
        with pytest.raises(NonFiniteRows, match="first at row 3, dimension 4"):
            projected.update(rows)
        assert (projected.count, projected.square_total()) == before[:2]
        assert torch.equal(projected.sum(), before[2])

    def test_rows_of_another_width_are_refused(self):
        projected = ProjectedSums(self.case()[1])
        with pytest.raises(ValueError, match="rows of width 5 cannot join rows of width 12"):
            projected.update(torch.ones(2, 5))
