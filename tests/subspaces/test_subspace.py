"""A subspace against explicit projectors, and its angles against SciPy's."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import scipy.linalg
import torch
from explicit import PROPERTY, array, projector, random_frame, random_rows, random_subspace
from hypothesis import given
from hypothesis import strategies as st

from tangent_lens.recording.moments import Moments
from tangent_lens.storage import FileProblem
from tangent_lens.subspaces.subspace import Subspace

seeds = st.integers(0, 10_000)


def about(centre: torch.Tensor, basis: torch.Tensor) -> Subspace:
    return Subspace(basis, centre, {"method": "test"})


def centred_subspace() -> Subspace:
    return about(random_rows(1, 8, seed=1)[0], random_frame(8, 3))


def in_plane(angle: float) -> Subspace:
    """The line at this angle to the first axis of three dimensions."""
    direction = torch.tensor([[math.cos(angle)], [math.sin(angle)], [0.0]], dtype=torch.float64)
    return about(torch.zeros(3, dtype=torch.float64), direction)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_project_and_reject_equal_the_explicit_projector(dtype):
    subspace, rows = centred_subspace(), random_rows(20, 8, dtype=dtype)
    offsets = array(rows) - array(subspace.centre)
    inside = offsets @ projector(subspace.basis)
    assert np.allclose(array(subspace.coordinates(rows)), offsets @ array(subspace.basis), rtol=0, atol=1e-13)
    assert np.allclose(array(subspace.project(rows)), inside, rtol=0, atol=1e-13)
    assert np.allclose(array(subspace.reject(rows)), offsets - inside, rtol=0, atol=1e-13)
    assert subspace.project(rows).dtype == torch.float64


@given(seed=seeds)
@PROPERTY
def test_the_two_parts_and_the_centre_add_up_and_are_orthogonal(seed):
    subspace, rows = centred_subspace(), random_rows(20, 8, seed)
    inside, outside = subspace.project(rows), subspace.reject(rows)
    assert torch.allclose(inside + outside + subspace.centre, rows, rtol=0, atol=1e-12)
    assert float((inside * outside).sum(dim=1).abs().max()) < 1e-11
    assert torch.allclose(subspace.project(inside + subspace.centre), inside, rtol=0, atol=1e-12)


def test_rows_of_another_width_are_refused():
    subspace = centred_subspace()
    for read in (subspace.coordinates, subspace.project, subspace.reject):
        with pytest.raises(ValueError, match="rows of width 7 do not live in the 8 dimensions of this subspace"):
            read(torch.zeros(2, 7))


@given(seed=seeds, k=st.integers(1, 6))
@PROPERTY
def test_spanned_by_keeps_the_span(seed, k):
    directions = random_rows(k, 6, seed).T
    subspace = Subspace.spanned_by(directions)
    expected = array(directions) @ np.linalg.pinv(array(directions))
    assert (subspace.d, subspace.rank) == (6, k)
    assert np.allclose(projector(subspace.basis), expected, rtol=0, atol=1e-9)
    assert np.allclose(array(subspace.basis.T @ subspace.basis), np.eye(k), rtol=0, atol=1e-14)
    assert not subspace.centre.any()


def test_spanned_by_takes_float32_and_an_origin():
    subspace = Subspace.spanned_by(torch.eye(4)[:, :2] * 5, origin={"method": "axes"})
    assert subspace.basis.dtype == torch.float64
    assert subspace.origin == {"method": "axes"}
    assert np.allclose(projector(subspace.basis), np.diag([1.0, 1, 0, 0]))


@pytest.mark.parametrize(
    ("directions", "taught"),
    [
        (torch.ones(4, 2), "2 directions span only 1 dimensions; leave out the dependent ones"),
        (torch.zeros(4, 1), "1 directions span only 0 dimensions"),
        (torch.ones(2, 3), "3 directions span only 1 dimensions"),
        (torch.full((4, 1), math.nan), r"directions must be finite columns \(d, k\), not of shape \(4, 1\)"),
        (torch.ones(4), r"directions must be finite columns \(d, k\), not of shape \(4,\)"),
        (torch.zeros(4, 0), r"a basis is \(d, k\) with 1 <= k <= d, not of shape \(4, 0\)"),
    ],
)
def test_directions_that_span_nothing_new_are_refused(directions, taught):
    with pytest.raises(ValueError, match=taught):
        Subspace.spanned_by(directions)


@pytest.mark.parametrize(
    ("basis", "taught"),
    [
        (torch.eye(4)[:, :2] * 2, r"not orthonormal \(off by 3\); use Subspace\.spanned_by"),
        (torch.ones(4, 2) / 2, r"not orthonormal \(off by 1\)"),
        (torch.full((4, 1), math.nan), r"not orthonormal \(off by nan\)"),
        (torch.eye(4)[:2], r"a basis is \(d, k\) with 1 <= k <= d, not of shape \(2, 4\)"),
        (torch.eye(4)[0], r"not of shape \(4,\)"),
        (torch.zeros(4, 0), r"not of shape \(4, 0\)"),
    ],
)
def test_a_basis_that_is_not_orthonormal_is_refused(basis, taught):
    with pytest.raises(ValueError, match=taught):
        Subspace(basis.double(), torch.zeros(len(basis), dtype=torch.float64))


def test_a_centre_of_another_space_is_refused():
    with pytest.raises(ValueError, match=r"a centre of shape \(3,\) does not fit a basis in 4 dimensions"):
        Subspace(random_frame(4, 2), torch.zeros(3, dtype=torch.float64))


def test_an_exact_float32_basis_works_like_any_other():
    subspace = Subspace(torch.eye(4)[:, :2], torch.zeros(4))
    assert subspace.overlap(random_subspace(4, 4)) == pytest.approx(1)
    assert subspace.project(random_rows(3, 4)).dtype == torch.float64


@given(seed=seeds, k=st.integers(1, 5), other=st.integers(1, 5))
@PROPERTY
def test_principal_angles_equal_scipys(seed, k, other):
    first, second = random_subspace(9, k, seed), random_subspace(9, other, seed + 1)
    expected = np.sort(scipy.linalg.subspace_angles(array(first.basis), array(second.basis)))
    assert np.allclose(array(first.principal_angles(second)), expected, rtol=1e-9, atol=1e-12)
    assert np.allclose(array(second.principal_angles(first)), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("angle", [1e-12, 1e-7, 0.1, math.pi / 4, 1.5, math.pi / 2 - 1e-9, math.pi / 2])
def test_one_angle_is_found_to_full_precision(angle):
    found = float(in_plane(0).principal_angles(in_plane(angle))[0])
    assert found == pytest.approx(angle, rel=1e-9)


@given(seed=seeds)
@PROPERTY
def test_a_common_rotation_changes_neither_angles_nor_overlap(seed):
    turn = random_frame(7, 7, seed)
    first, second = random_subspace(7, 2, seed=1), random_subspace(7, 3, seed=2)
    turned = [about(one.centre, turn @ one.basis) for one in (first, second)]
    assert torch.allclose(turned[0].principal_angles(turned[1]), first.principal_angles(second), rtol=1e-10)
    assert turned[0].overlap(turned[1]) == pytest.approx(first.overlap(second), rel=1e-12)


@given(seed=seeds, k=st.integers(1, 5), other=st.integers(1, 5))
@PROPERTY
def test_overlap_is_the_mean_squared_cosine(seed, k, other):
    first, second = random_subspace(9, k, seed), random_subspace(9, other, seed + 1)
    expected = np.trace(projector(first.basis) @ projector(second.basis)) / min(k, other)
    assert first.overlap(second) == pytest.approx(expected, rel=1e-12)
    assert first.overlap(second) == pytest.approx(float(first.principal_angles(second).cos().square().mean()), rel=1e-9)
    assert 0 <= first.overlap(second) <= 1 + 1e-12


def test_overlap_of_nested_and_of_orthogonal_subspaces():
    frame = random_frame(9, 5)
    whole, part, rest = (Subspace.spanned_by(frame[:, columns]) for columns in (slice(5), slice(2), slice(2, 5)))
    assert whole.overlap(part) == pytest.approx(1, abs=1e-13)
    assert part.overlap(rest) == pytest.approx(0, abs=1e-13)


def test_subspaces_of_two_spaces_cannot_be_compared():
    for compare in (random_subspace(5, 2).overlap, random_subspace(5, 2).principal_angles):
        with pytest.raises(ValueError, match="subspaces of 5 and of 6 dimensions cannot be compared"):
            compare(random_subspace(6, 2))


def test_a_saved_subspace_comes_back_bit_for_bit(tmp_path):
    frame = random_frame(8, 6)
    rivals = {"next": frame[:, 2:4].contiguous(), "trailing": frame[:, 4:].contiguous()}
    saved = Subspace(
        frame[:, :2].contiguous(), random_rows(1, 8)[0], {"method": "pca", "rank": 2, "share": 0.1}, rivals
    )
    saved.save(tmp_path / "subspace.safetensors")
    loaded = Subspace.load(tmp_path / "subspace.safetensors")
    assert torch.equal(loaded.basis, saved.basis)
    assert torch.equal(loaded.centre, saved.centre)
    assert loaded.origin == saved.origin
    assert loaded.rivals.keys() == rivals.keys()
    assert all(torch.equal(loaded.rivals[name], rivals[name]) for name in rivals)


def test_views_of_one_matrix_are_saved_too(tmp_path):
    frame = torch.eye(6, dtype=torch.float64)
    Subspace(frame[:, :2], frame[0], {}, {"next": frame[:, 2:4]}).save(tmp_path / "file")
    loaded = Subspace.load(tmp_path / "file")
    assert torch.equal(loaded.basis, frame[:, :2])
    assert torch.equal(loaded.rivals["next"], frame[:, 2:4])


def test_a_recording_is_no_subspace(tmp_path):
    Moments(4).save(tmp_path / "file")
    with pytest.raises(FileProblem, match="file holds a 'moments', not a 'subspace'"):
        Subspace.load(tmp_path / "file")


def test_a_subspace_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        random_subspace(4, 2).basis = torch.eye(4)


def test_its_text_names_rank_space_and_method():
    assert repr(centred_subspace()) == "Subspace(rank 3 of 8, test)"


def test_a_span_keeps_the_directions_and_how_well_they_determine_it(tmp_path):
    directions = torch.tensor([[1.0, 5.0], [0.0, 5.0], [0.0, 0.0]])
    centre = torch.ones(3)
    subspace = Subspace.spanned_by(directions, {"method": "test"}, centre)
    # Unit directions 45 degrees apart have the singular values sqrt(1 +- cos 45).
    cosine = math.sqrt(0.5)
    assert subspace.condition_number == pytest.approx(math.sqrt((1 + cosine) / (1 - cosine)), rel=1e-12)
    subspace.save(tmp_path / "file")
    loaded = Subspace.load(tmp_path / "file")
    for one in (subspace, loaded):
        assert one.directions is not None
        assert torch.equal(one.directions, directions.double())
        assert torch.equal(one.centre, centre.double())


def test_a_subspace_without_directions_of_its_own_is_well_conditioned(tmp_path):
    random_subspace(5, 2).save(tmp_path / "file")
    loaded = Subspace.load(tmp_path / "file")
    assert loaded.directions is None
    assert loaded.condition_number == 1


def test_lengths_of_directions_change_neither_span_nor_conditioning():
    directions = random_rows(6, 3)
    scaled = Subspace.spanned_by(directions * torch.tensor([1e-9, 1.0, 1e9]))
    plain = Subspace.spanned_by(directions)
    assert scaled.condition_number == pytest.approx(plain.condition_number, rel=1e-9)
    assert np.allclose(projector(scaled.basis), projector(plain.basis), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("directions", "taught"),
    [
        (torch.full((4, 2), math.nan), r"directions must be finite columns"),
        (torch.eye(3), r"directions of shape \(3, 3\) do not fit a basis in 4 dimensions; they are columns \(4, m\)"),
        (torch.ones(4), r"directions must be finite columns \(d, k\), not of shape \(4,\)"),
        (torch.ones(4, 0), r"directions of shape \(4, 0\) do not fit"),
    ],
)
def test_directions_of_another_space_are_refused(directions, taught):
    with pytest.raises(ValueError, match=taught):
        Subspace(random_frame(4, 2), torch.zeros(4), directions=directions)
