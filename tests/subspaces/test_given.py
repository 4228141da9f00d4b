"""Given directions against explicit projectors, files of them, and tokens of an unembedding."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from explicit import PROPERTY, array, projector, random_rows
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tangent_lens.storage import FileProblem
from tangent_lens.subspaces.given import fit_token_directions, fit_vectors, load_vectors


def onto_rows(rows: np.ndarray) -> np.ndarray:
    """The projector onto the span of independent rows, by the normal equations."""
    return rows.T @ np.linalg.inv(rows @ rows.T) @ rows


@given(seed=st.integers(0, 10_000), m=st.integers(1, 5))
@PROPERTY
def test_vectors_span_what_the_normal_equations_say(seed, m):
    vectors = random_rows(m, 8, seed)
    subspace = fit_vectors(vectors, name="probe")
    assert np.allclose(projector(subspace.basis), onto_rows(array(vectors)), rtol=0, atol=1e-7)
    assert torch.equal(subspace.directions, vectors.T)
    assert subspace.origin == {"method": "vectors", "fitted_on": "probe", "vectors": m, "rank": m}
    assert not subspace.centre.any()


def test_a_rank_takes_leading_singular_directions():
    vectors = random_rows(30, 8)
    subspace = fit_vectors(vectors, 3)
    expected = np.linalg.svd(array(vectors), full_matrices=False)[2][:3]
    assert np.allclose(projector(subspace.basis), expected.T @ expected, rtol=0, atol=1e-9)
    assert subspace.directions is None
    assert subspace.condition_number == 1


def test_with_their_whole_span_as_rank_dependent_vectors_are_kept():
    vectors = random_rows(3, 8)
    vectors = torch.cat([vectors, vectors.sum(dim=0, keepdim=True)])
    subspace = fit_vectors(vectors, 3)
    assert torch.equal(subspace.directions, vectors.T)
    assert np.allclose(projector(subspace.basis), onto_rows(array(vectors[:3])), rtol=0, atol=1e-9)
    values = np.linalg.svd(array(vectors) / np.linalg.norm(array(vectors), axis=1, keepdims=True), compute_uv=False)
    assert subspace.condition_number == pytest.approx(values[0] / values[2], rel=1e-9)


def test_one_vector_and_a_centre():
    centre = torch.ones(4)
    subspace = fit_vectors(torch.tensor([0.0, 3.0, 0.0, 4.0]), centre=centre)
    assert torch.equal(subspace.centre, centre.double())
    assert np.allclose(np.abs(array(subspace.basis)[:, 0]), [0, 0.6, 0, 0.8])


@pytest.mark.parametrize(
    ("vectors", "rank", "taught"),
    [
        (torch.ones(2, 4), None, "vectors: 2 directions span only 1 dimensions.*or give a rank"),
        (torch.ones(2, 4), 2, "2 directions span only 1 dimensions, rank 2 was asked; use rank <= 1"),
        (torch.zeros(2, 4), 1, "all 2 directions are zero"),
        (torch.zeros(1, 4), None, "1 directions span only 0 dimensions"),
        (torch.eye(4), 0, "rank 0 spans nothing"),
        (torch.eye(4), 0.5, "rank 0.5 must be a whole number"),
        (torch.full((2, 4), math.nan), None, "vectors: some numbers are NaN or infinite"),
        (torch.ones(2, 2, 2), None, r"directions must be rows \(m, d\), not of shape \(2, 2, 2\)"),
        (torch.ones(0, 4), None, r"not of shape \(0, 4\)"),
    ],
)
def test_vectors_that_span_nothing_are_refused(vectors, rank, taught):
    with pytest.raises(ValueError, match=taught):
        fit_vectors(vectors, rank)


def test_token_directions_are_rows_minus_the_mean_row():
    matrix = random_rows(50, 8)
    subspace = fit_token_directions(matrix, [3, 7])
    expected = array(matrix)[[3, 7]] - array(matrix).mean(0)
    assert np.allclose(array(subspace.directions), expected.T)
    assert np.allclose(projector(subspace.basis), onto_rows(expected), rtol=0, atol=1e-10)
    assert np.allclose(array(subspace.centre), array(matrix).mean(0))
    assert subspace.origin["tokens"] == [3, 7]


def test_token_directions_that_are_not_centred_are_the_rows():
    matrix = random_rows(50, 8)
    subspace = fit_token_directions(matrix, torch.tensor([3, 7]), center=False)
    assert torch.equal(subspace.directions, matrix[[3, 7]].T)
    assert not subspace.centre.any()


def test_what_is_common_to_all_tokens_changes_no_direction():
    matrix = random_rows(50, 8)
    moved = fit_token_directions(matrix + random_rows(1, 8, seed=3), [3, 7])
    assert moved.overlap(fit_token_directions(matrix, [3, 7])) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    ("tokens", "taught"),
    [
        ([3, 50], "token 50 does not exist; there are 0 to 49"),
        ([-1], "token -1 does not exist"),
        ([3, 3], "token 3 is there more than once"),
        ([], "token numbers must be a list of one or more"),
        ([1.0], "token numbers must be whole, not torch.float32"),
        ([True], "token numbers must be whole, not torch.bool"),
        (list(range(9)), "9 directions span only 8 dimensions"),
    ],
)
def test_tokens_that_are_not_there_are_refused(tokens, taught):
    with pytest.raises(ValueError, match=taught):
        fit_token_directions(random_rows(50, 8), tokens)


@pytest.fixture
def decoder_file(tmp_path):
    path = tmp_path / "sae.safetensors"
    tensors = {"W_dec": random_rows(6, 4, dtype=torch.bfloat16), "b_dec": torch.ones(4), "W": torch.zeros(2, 2, 2)}
    save_file(tensors, path)
    return path


def test_vectors_are_read_from_a_file(decoder_file):
    expected = random_rows(6, 4, dtype=torch.bfloat16).double()
    assert torch.equal(load_vectors(decoder_file), expected)
    assert torch.equal(load_vectors(decoder_file, "W_dec", [4, 1]), expected[[4, 1]])
    assert torch.equal(load_vectors(decoder_file, "b_dec"), torch.ones(1, 4, dtype=torch.float64))


def test_files_without_what_was_asked_for_say_what_they_have(decoder_file, tmp_path):
    with pytest.raises(ValueError, match=r"has no tensor 'decoder'; it has .*W_dec \(6, 4\)"):
        load_vectors(decoder_file, "decoder")
    with pytest.raises(ValueError, match="row 6 does not exist; there are 0 to 5"):
        load_vectors(decoder_file, rows=[6])
    with pytest.raises(ValueError, match=r"not of shape \(2, 2, 2\)"):
        load_vectors(decoder_file, "W")
    with pytest.raises(FileNotFoundError, match="no file at"):
        load_vectors(tmp_path / "nothing")
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(FileProblem, match="text is no safetensors file, or was cut short"):
        load_vectors(tmp_path / "text")
    save_file({"one": torch.eye(2), "two": torch.eye(3)}, tmp_path / "two")
    with pytest.raises(ValueError, match="has 2 matrices, so say which with key="):
        load_vectors(tmp_path / "two")
