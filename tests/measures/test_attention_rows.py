"""Which query rows the random normals are measured on: as many as wanted, and none but the sequence decides."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from explicit import PROPERTY
from hypothesis import given
from hypothesis import strategies as st

from tangent_lens.measures.attention_rows import ROWS_APART, ChosenRows, row_numbers
from tangent_lens.recording.corpus import Corpus

LENGTHS = st.lists(st.integers(2, 40), min_size=1, max_size=40)


def corpus_of(lengths, seed=0):
    """Random sequences of these lengths, all different with near certainty."""
    generator = np.random.default_rng(seed)
    return Corpus.from_tokens([generator.integers(0, 10_000, size=length) for length in lengths])


def found(corpus, chosen, size, side):
    """The chosen positions of every sequence, by its first tokens."""
    rows = {}
    for batch in corpus.batches(size, padding_side=side):
        for tokens, mask, own in zip(batch.tokens, batch.attention_mask, chosen(batch), strict=True):
            assert not own[~mask].any()
            rows[tuple(tokens[mask][:2].tolist())] = own[mask].nonzero().flatten().tolist()
    return rows


@given(lengths=LENGTHS, wanted=st.integers(1, 400), size=st.integers(1, 8), side=st.sampled_from(["left", "right"]))
@PROPERTY
def test_neither_batches_nor_padding_nor_order_choose(lengths, wanted, size, side):
    corpus = corpus_of(lengths)
    expected = found(corpus, ChosenRows.of(corpus.sequences, wanted), 1, "right")
    turned = Corpus.from_tokens(corpus.sequences[::-1])
    assert found(turned, ChosenRows.of(turned.sequences, wanted), size, side) == expected


@given(lengths=LENGTHS, wanted=st.integers(1, 400))
@PROPERTY
def test_about_as_many_rows_as_wanted_are_chosen(lengths, wanted):
    corpus = corpus_of(lengths)
    count = sum(len(rows) for rows in found(corpus, ChosenRows.of(corpus.sequences, wanted), 4, "right").values())
    if corpus.tokens <= wanted:
        assert count == corpus.tokens
    else:
        # A whole sequence too many at most, and one row of each lost or won where it does not divide.
        assert wanted - len(lengths) <= count <= wanted + max(lengths) + len(lengths)
        assert count >= 1


def test_all_rows_are_chosen_for_none():
    corpus = corpus_of([5, 9])
    assert found(corpus, ChosenRows.of(corpus.sequences, None), 2, "right") == found(corpus, ChosenRows(), 2, "right")
    assert sum(map(len, found(corpus, ChosenRows(), 2, "right").values())) == 14


def test_chosen_sequences_have_every_so_manieth_row_and_others_none():
    corpus = corpus_of([40] * 50)
    rows = found(corpus, ChosenRows.of(corpus.sequences, 200), 8, "right")
    used = [row for row in rows.values() if row]
    assert len(used) == 200 * ROWS_APART // 40
    assert all(set(np.diff(row)) == {ROWS_APART} for row in used)


def test_rows_that_are_not_kept_are_not_chosen():
    corpus = corpus_of([20] * 4)
    for batch in corpus.batches(4, skip_first=True):
        chosen = ChosenRows()(batch)
        assert not chosen[:, 0].any() and chosen[:, 1:].all()


def test_numbers_of_chosen_rows_are_filled_up_to_one_length():
    chosen = torch.tensor([[False, True, False, True], [True, False, False, False]])
    numbers, valid = row_numbers(chosen)
    assert numbers[valid].tolist() == [1, 3, 0]
    assert valid.tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize("wanted", [1, 3])
def test_few_rows_are_still_some(wanted):
    corpus = corpus_of([2, 2, 2])
    assert sum(map(len, found(corpus, ChosenRows.of(corpus.sequences, wanted), 2, "left").values())) >= 1
