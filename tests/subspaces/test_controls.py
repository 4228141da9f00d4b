"""Random normals: orthonormal, off the tangent, of the Haar distribution, and of the seed alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from explicit import PROPERTY, array, projector, random_frame, random_subspace
from hypothesis import given
from hypothesis import strategies as st

from tangent_lens.subspaces.controls import (
    check_normal_controls_fit,
    normal_frame_batches,
    normal_frames,
    random_normal_batches,
    random_normals,
)
from tangent_lens.subspaces.subspace import Subspace


@given(seed=st.integers(0, 10_000), k=st.integers(1, 5), extra=st.integers(0, 20))
@PROPERTY
def test_frames_are_orthonormal_and_orthogonal_to_the_tangent(seed, k, extra):
    tangent = random_subspace(2 * k + extra, k, seed)
    frames = random_normals(tangent, 4, seed)
    assert frames.shape == (4, 2 * k + extra, k)
    assert frames.dtype == torch.float64
    assert float((frames.transpose(1, 2) @ frames - torch.eye(k)).abs().max()) < 1e-13
    assert float((tangent.basis.T @ frames).abs().max()) < 1e-13


def test_they_stay_orthogonal_in_a_wide_space():
    tangent = random_subspace(1536, 32)
    frames = random_normals(tangent, 3)
    assert float((tangent.basis.T @ frames).abs().max()) < 1e-14
    assert float((frames.transpose(1, 2) @ frames - torch.eye(32)).abs().max()) < 1e-13


def test_the_seed_alone_decides():
    tangent = random_subspace(12, 3)
    first = random_normals(tangent, 5, seed=7)
    torch.rand(11)
    assert torch.equal(random_normals(tangent, 5, seed=7), first)
    assert float((random_normals(tangent, 5, seed=8) - first).abs().max()) > 0.1


def test_the_frames_of_one_draw_differ():
    frames = random_normals(random_subspace(12, 3), 5)
    for other in range(1, 5):
        assert np.linalg.norm(projector(frames[0]) - projector(frames[other])) > 0.1


def test_the_global_random_state_is_not_touched():
    torch.rand(1)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist()
    random_normals(random_subspace(12, 3), 5)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]


def test_a_basis_serves_as_well_as_its_subspace():
    tangent = random_subspace(12, 3)
    assert torch.equal(random_normals(tangent, 5), random_normals(tangent.basis, 5))


def test_twenty_is_the_default_count():
    assert len(random_normals(random_subspace(12, 3))) == 20


def test_at_half_the_width_every_frame_spans_the_whole_complement():
    tangent = random_subspace(8, 4)
    for frame in random_normals(tangent, 3):
        assert np.allclose(projector(frame), np.eye(8) - projector(tangent.basis), rtol=0, atol=1e-13)


def test_spans_are_spread_evenly_over_the_complement():
    tangent, count = random_subspace(7, 2), 20_000
    frames = random_normals(tangent, count, seed=1)
    turn = random_normals(tangent.basis, 1, seed=2)[0]
    mean = array(torch.einsum("mik,mjk->ij", frames, frames)) / count
    assert np.allclose(mean, (np.eye(7) - projector(tangent.basis)) * 2 / 5, rtol=0, atol=0.02)
    # |Q_1^T Q_2|^2 has the mean of its Haar moments against any fixed frame too: k^2 / n.
    overlaps = torch.einsum("ia,mib->mab", turn, frames).square().sum(dim=(1, 2))
    assert float(overlaps.mean()) == pytest.approx(4 / 5, abs=0.01)


def test_no_room_for_a_control_is_an_error():
    with pytest.raises(ValueError, match=r"rank 5 needs 2\*rank <= d = 9 for a normal control; use rank <= 4"):
        random_normals(random_subspace(9, 5))
    with pytest.raises(ValueError, match=r"rank 400 needs 2\*rank <= d = 576 for a normal control; use rank <= 288"):
        check_normal_controls_fit(400, 576)
    check_normal_controls_fit(288, 576)


@pytest.mark.parametrize("count", [0, -2])
def test_no_controls_are_no_comparison(count):
    with pytest.raises(ValueError, match=rf"{count} controls give no comparison; use 1 or more \(20 make .* 1/21\)"):
        random_normals(random_subspace(9, 2), count)


def test_a_basis_that_is_not_orthonormal_is_refused():
    with pytest.raises(ValueError, match="not orthonormal"):
        random_normals(3 * random_frame(9, 2))


def test_given_frames_are_checked_before_they_are_compared():
    tangent = Subspace(torch.eye(8, dtype=torch.float64)[:, :2], torch.zeros(8, dtype=torch.float64))
    good = random_normals(tangent, 3)
    assert torch.equal(normal_frames(tangent, good, 0), good)
    assert torch.equal(normal_frames(tangent, good.numpy(), 0), good)
    for bad, taught in (
        (10 * good, "not orthonormal"),
        (tangent.basis[None], "not normal to the subspace"),
        (good[:0], r"shape \(0, 8, 2\)"),
        (True, "whole number"),
        (2.7, "whole number"),
    ):
        with pytest.raises(ValueError, match=taught):
            normal_frames(tangent, bad, 0)


# Sizes below, at and beside the blocks in which torch draws normal numbers, and last batches smaller than a block.
@pytest.mark.parametrize(("d", "k", "count"), [(9, 2, 30), (3, 1, 40), (7, 3, 33), (2, 1, 3), (4, 2, 17), (64, 4, 7)])
@pytest.mark.parametrize("at_once", [1, 2, 5, 16, 1000, None])
def test_batches_hold_the_frames_of_one_draw(d, k, count, at_once):
    tangent = random_subspace(d, k)
    batches = list(random_normal_batches(tangent, count, seed=3, at_once=at_once))
    assert torch.equal(torch.cat(batches), random_normals(tangent, count, seed=3))
    assert max(len(batch) for batch in batches) <= max(at_once or count, 1) + 2 * 16


def test_no_batch_is_empty_and_none_is_refused_late():
    with pytest.raises(ValueError, match="at_once=0 frames make no batch"):
        random_normal_batches(random_subspace(9, 2), 5, at_once=0)
    with pytest.raises(ValueError, match="0 controls give no comparison"):
        random_normal_batches(random_subspace(9, 2), 0)


def test_frames_given_or_drawn_come_in_the_same_batches():
    tangent = random_subspace(9, 2)
    drawn = torch.cat(list(normal_frame_batches(tangent, 30, 5)))
    given_frames = torch.cat(list(normal_frame_batches(tangent, random_normals(tangent, 30, seed=5), 0)))
    assert torch.equal(drawn, given_frames)
    assert torch.equal(drawn, normal_frames(tangent, 30, 5))
    with pytest.raises(ValueError, match="not orthonormal"):
        normal_frame_batches(tangent, 2 * given_frames, 0)


@pytest.mark.parametrize("place", [0, 3])
def test_a_random_tangent_of_the_same_seed_is_compared_with_other_frames(place):
    """A person draws a tangent with the seed that the controls are drawn with: one control would be rounding alone."""
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randn(5, 40, 3, generator=generator, dtype=torch.float64)
    tangent = Subspace.spanned_by(drawn[place])
    frames = random_normals(tangent, 5, seed=7)
    assert float((tangent.basis.T @ frames).abs().max()) < 1e-12
    assert float((frames.transpose(1, 2) @ frames - torch.eye(3, dtype=torch.float64)).abs().max()) < 1e-12
    others = [one for one in range(5) if one != place]
    shared = (frames[place].T @ frames[others]).square().sum(dim=(1, 2))
    assert float(shared.max()) < 2
    assert torch.equal(random_normals(tangent, 5, seed=7), frames)
