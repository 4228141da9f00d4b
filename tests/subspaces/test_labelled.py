"""Class means and contrasts against means taken one row at a time, and on classes planted in known directions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from explicit import PROPERTY, array, projector, random_frame, random_rows
from hypothesis import given
from hypothesis import strategies as st

from tangent_lens.recording.row_sample import RowSample
from tangent_lens.subspaces.labelled import fit_class_means, fit_contrast

seeds = st.integers(0, 10_000)


def sample_of(rows: torch.Tensor, sequences: list[int], name: str = "here") -> RowSample:
    return RowSample(rows, torch.tensor(sequences), torch.zeros(len(rows)).long(), 2 * len(rows), name)


def column_projector(columns: np.ndarray, rank: int) -> np.ndarray:
    left = np.linalg.svd(columns, full_matrices=False)[0][:, :rank]
    return left @ left.T


def class_means(rows: torch.Tensor, labels: list) -> np.ndarray:
    return np.array([array(rows)[[label == one for label in labels]].mean(axis=0) for one in "abc"])


LABELS = [*"aabbbcabcc", *"bacabcabca"]


def test_class_means_span_the_differences_of_the_means():
    rows = random_rows(20, 6)
    subspace = fit_class_means(rows, LABELS)
    means = class_means(rows, LABELS)
    differences = (means[1:] - means[0]).T
    assert subspace.rank == 2
    assert np.allclose(projector(subspace.basis), column_projector(differences, 2), rtol=0, atol=1e-10)
    assert np.allclose(array(subspace.centre), means.mean(0))
    assert np.allclose(array(subspace.directions), (means - means.mean(0)).T)
    assert subspace.origin["classes"] == ["a", "b", "c"]
    assert subspace.origin["rows_of_class"] == [LABELS.count(one) for one in "abc"]


def test_fewer_directions_are_the_leading_ones_of_the_means():
    rows = random_rows(20, 6)
    means = class_means(rows, LABELS)
    subspace = fit_class_means(rows, LABELS, 1)
    assert np.allclose(projector(subspace.basis), column_projector((means - means.mean(0)).T, 1), rtol=0, atol=1e-9)
    assert subspace.directions is None


def test_labels_of_sequences_reach_their_rows():
    rows, sequences = random_rows(20, 6), [0, 1, 2, 3] * 5
    sample = sample_of(rows, sequences)
    expected = fit_class_means(rows, [("x", "y", "x", "z")[one] for one in sequences])
    as_list = fit_class_means(sample, ["x", "y", "x", "z"], per="sequence")
    as_mapping = fit_class_means(sample, {0: "x", 1: "y", 2: "x", 3: "z"})
    for found in (as_list, as_mapping):
        assert torch.equal(found.basis, expected.basis)
    assert (as_list.origin["fitted_on"], as_list.origin["rows_seen"]) == ("here", 40)


def test_a_mapping_may_leave_sequences_out():
    rows, sequences = random_rows(20, 6), [0, 1, 2, 3] * 5
    kept = [index for index, one in enumerate(sequences) if one < 2]
    expected = fit_class_means(rows[kept], [sequences[index] for index in kept])
    found = fit_class_means(sample_of(rows, sequences), {0: 0, 1: 1})
    assert found.overlap(expected) == pytest.approx(1, abs=1e-12)
    assert found.origin["rows_of_class"] == [5, 5]


@given(seed=seeds)
@PROPERTY
def test_neither_row_order_nor_a_shift_matters_and_a_rotation_turns_it(seed):
    rows, turn = random_rows(20, 6), random_frame(6, 6, seed)
    order = np.random.default_rng(seed).permutation(20)
    shuffled = fit_class_means(rows[order] + 3, [LABELS[index] for index in order])
    expected = fit_class_means(rows, LABELS)
    assert shuffled.overlap(expected) == pytest.approx(1, abs=1e-10)
    turned = fit_class_means(rows @ turn.T, LABELS)
    assert np.allclose(projector(turned.basis), projector(turn @ expected.basis), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("labels", "options", "taught"),
    [
        (["a"] * 20, {}, "1 classes have no difference; label the rows with 2 or more"),
        (["a"] * 19, {}, '19 labels for 20 rows; give one a row, or per="sequence"'),
        (LABELS, {"rank": 3}, "3 class means differ in at most 2 directions, rank 3 was asked"),
        (LABELS, {"rank": 0}, "rank 0 spans nothing"),
        (LABELS, {"per": "token"}, "per='token' must be"),
        (["a", "b"], {"per": "sequence"}, "sequence 3 has no label, 2 were given"),
        ([*LABELS[:-1], None], {}, "None is no label"),
        ([*LABELS[:-1], float("nan")], {}, "a label is NaN"),
        ({0: "a", 1: "b", 9: "c"}, {}, "class 'c' has no rows in the sample; take more rows"),
        ({0: "a", 1: None}, {}, "None is no label; leave that sequence out"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels, options, taught):
    with pytest.raises(ValueError, match=f"here: {taught}|{taught}"):
        fit_class_means(sample_of(random_rows(20, 6), [0, 1, 2, 3] * 5), labels, **options)


def test_classes_with_equal_means_are_refused():
    rows = random_rows(10, 6).repeat(2, 1)
    with pytest.raises(ValueError, match="class_means: all 2 directions are zero, so they span nothing"):
        fit_class_means(rows, [0] * 10 + [1] * 10)


def paired(seed: int = 0) -> tuple[RowSample, RowSample]:
    """Two prompts each of five pairs, with two rows a sequence in mixed order."""
    order = [3, 1, 4, 0, 2]
    return (
        sample_of(random_rows(10, 6, seed), [0, 1, 2, 3, 4] * 2, "first"),
        sample_of(random_rows(10, 6, seed + 1), order * 2, "second"),
    )


def sequence_means(sample: RowSample) -> np.ndarray:
    numbers = sample.sequences.tolist()
    return np.array([array(sample.rows)[[n == one for n in numbers]].mean(0) for one in range(5)])


@pytest.mark.parametrize("pairing", [True, False])
def test_a_contrast_points_from_the_second_mean_to_the_first(pairing):
    first, second = paired()
    subspace = fit_contrast(first, second, paired=pairing)
    expected = sequence_means(first).mean(0) - sequence_means(second).mean(0)
    assert np.allclose(array(subspace.directions)[:, 0], expected)
    assert np.allclose(array(subspace.basis)[:, 0], expected / np.linalg.norm(expected))
    assert np.allclose(array(subspace.centre), (sequence_means(first).mean(0) + sequence_means(second).mean(0)) / 2)
    back = fit_contrast(second, first, paired=pairing)
    assert np.allclose(array(back.basis), -array(subspace.basis))


def test_more_directions_are_the_leading_ones_of_the_paired_differences():
    first, second = paired()
    differences = sequence_means(first) - sequence_means(second)
    subspace = fit_contrast(first, second, 3)
    assert np.allclose(projector(subspace.basis), column_projector(differences.T, 3), rtol=0, atol=1e-10)
    origin = subspace.origin
    assert (origin["fitted_on"], origin["second_fitted_on"]) == ("first", "second")
    assert (origin["method"], origin["sequences"], origin["rank"], origin["paired"]) == ("contrast", 5, 3, True)


def test_each_sequence_counts_once():
    rows = torch.tensor([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0], [0.0, 2.0]])
    first = sample_of(rows, [0, 0, 0, 1])
    subspace = fit_contrast(first, sample_of(torch.zeros(2, 2), [0, 1]))
    assert np.allclose(array(subspace.directions)[:, 0], [1, 1])


def test_contrasts_without_partners_or_difference_are_refused():
    first, second = paired()
    short = sample_of(second.rows[:4], [0, 1, 2, 3])
    with pytest.raises(ValueError, match=r"1 sequences have no partner \(the first is 4\).*paired=False"):
        fit_contrast(first, short)
    assert fit_contrast(first, short, paired=False).rank == 1
    with pytest.raises(ValueError, match=r"unpaired prompts have one direction.*rank 2 was asked"):
        fit_contrast(first, second, 2, paired=False)
    with pytest.raises(ValueError, match="rows of width 6 and of width 5 cannot be compared"):
        fit_contrast(first, random_rows(10, 5))
    with pytest.raises(ValueError, match="directions are zero, so they span nothing"):
        fit_contrast(first, first)
    with pytest.raises(ValueError, match="5 directions span only 5 dimensions, rank 6 was asked"):
        fit_contrast(first, second, 6)
