"""Weighted sums by sequence against a corpus in which each sequence really stands as often as its weight says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from explicit import PROPERTY, random_frame, random_rows
from hypothesis import given
from hypothesis import strategies as st

from tangent_lens.measures import sequence_sums
from tangent_lens.measures.energy import energy_fraction
from tangent_lens.measures.isotropy import iso_score
from tangent_lens.measures.sequence_sums import RowsBySequence, WeightsBySequence

D, K, SEQUENCES = 7, 2, 5
weights = st.lists(st.integers(0, 3), min_size=SEQUENCES, max_size=SEQUENCES).filter(lambda found: sum(found) >= 2)


def case(seed):
    """Rows with a mean, of sequences of different lengths in a jumbled order."""
    generator = torch.Generator().manual_seed(seed)
    sequences = torch.arange(SEQUENCES).repeat_interleave(torch.tensor([3, 5, 4, 6, 3]))
    sequences = sequences[torch.randperm(len(sequences), generator=generator)]
    return random_rows(len(sequences), D, seed) + random_rows(1, D, seed + 1), sequences


def copies(counts, sequences):
    """Places of the rows in a corpus that holds each sequence as often as said."""
    return torch.cat([torch.nonzero(sequences == s).flatten() for s, n in enumerate(counts) for _ in range(n)])


@given(seed=st.integers(0, 1000), counts=weights)
@PROPERTY
def test_weighted_rows_are_copied_rows(seed, counts):
    (rows, sequences), basis = case(seed), random_frame(D, K, seed)
    found = RowsBySequence.of(rows, sequences, basis)
    many = rows[copies(counts, sequences)]
    weighting = np.array([counts], dtype=float)
    assert found.energy(weighting)[0] == pytest.approx(energy_fraction(many.T @ many, basis), rel=1e-11)
    centred = many - many.mean(dim=0)
    left = centred - centred @ basis @ basis.T
    expected = iso_score(left.T @ left) - iso_score(centred.T @ centred)
    assert found.delta_iso(weighting)[0] == pytest.approx(expected, abs=1e-9)


@given(seed=st.integers(0, 1000), counts=weights)
@PROPERTY
def test_weighted_weight_gradients_are_those_of_copied_rows(seed, counts):
    (inputs, sequences), signals, basis = case(seed), random_rows(21, 4, seed + 2), random_frame(D, K, seed)
    found = WeightsBySequence.of(inputs, signals, sequences, basis)
    places = copies(counts, sequences)
    gradient = signals[places].T @ inputs[places]
    expected = energy_fraction(gradient.T @ gradient, basis)
    assert found.energy(np.array([counts], dtype=float))[0] == pytest.approx(expected, rel=1e-9)


def test_maps_together_are_the_sum_of_their_forms():
    inputs, sequences = case(1)
    first, second, basis = random_rows(21, 4, 5), random_rows(21, 3, 6), random_frame(D, K)
    found, other = (WeightsBySequence.of(inputs, signals, sequences, basis) for signals in (first, second))
    gradient = torch.cat([first, second], dim=1).T @ inputs
    expected = energy_fraction(gradient.T @ gradient, basis)
    assert (found + other).energy(np.ones((1, SEQUENCES)))[0] == pytest.approx(expected, rel=1e-11)


def test_single_precision_rows_give_nearly_the_same():
    (inputs, sequences), signals, basis = case(1), random_rows(21, 4, 5), random_frame(D, K)
    wide = WeightsBySequence.of(inputs, signals, sequences, basis)
    single = WeightsBySequence.of(inputs.float(), signals.float(), sequences, basis)
    np.testing.assert_allclose(single.whole, wide.whole, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(single.inside, wide.inside, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("at_once", [1, 4, 100])
def test_how_the_work_is_cut_changes_nothing(at_once, monkeypatch):
    (rows, sequences), basis = case(3), random_frame(D, K)
    weighting = np.array([[1.0, 2, 0, 1, 3]])
    expected = RowsBySequence.of(rows, sequences, basis).delta_iso(weighting)
    monkeypatch.setattr(sequence_sums, "ROWS_AT_ONCE", at_once)
    assert RowsBySequence.of(rows, sequences, basis).delta_iso(weighting) == pytest.approx(expected, rel=1e-11)


def test_rows_that_are_all_equal_have_no_isotropy():
    (rows, sequences), basis = case(3), random_frame(D, K)
    equal = rows[:1].expand(len(rows), -1) * 0
    found = RowsBySequence.of(equal, sequences, basis)
    assert np.isnan(found.delta_iso(np.ones((1, SEQUENCES)))).all()
