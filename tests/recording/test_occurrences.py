"""Which occurrences are chosen: what loops over the sequences would choose, whatever the batches."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.occurrences import choose_occurrences, clouds_of

DRAW = np.random.default_rng(5)
SEQUENCES = [(DRAW.zipf(1.5, size=length) % 60).tolist() for length in range(5, 45)]
CORPUS = Corpus.from_tokens(SEQUENCES)


def chosen(batch_size=4, padding_side="right", skip_first=False, **options):
    batches = CORPUS.batches(batch_size, padding_side=padding_side, skip_first=skip_first)
    return choose_occurrences(batches, 12, **{"buckets": 2, "tokens": 3, "seed": 1, **options})


def seen(found, batch_size=4, padding_side="right"):
    """Of every batch, which tokens stand at the places that are kept, and where."""
    rows = []
    for batch in found.only(CORPUS.batches(batch_size, padding_side=padding_side)):
        for row in range(len(batch.tokens)):
            sequence = batch.tokens[row][batch.attention_mask[row]].tolist()
            for place in batch.keep[row].nonzero().flatten().tolist():
                rows.append((tuple(sequence), int(batch.positions[row, place]), int(batch.tokens[row, place])))
    return rows


def test_every_token_has_equally_many_and_enough():
    found, counts = chosen(), Counter(token for sequence in SEQUENCES for token in sequence)
    eligible = {token for token, count in counts.items() if count >= 12}
    assert found.eligible == len(eligible) and set(found.chosen) <= eligible
    assert Counter(found.tokens.tolist()) == dict.fromkeys(found.chosen, 12)
    assert found.counts == tuple(tuple(counts[token] for token in bucket) for bucket in found.buckets)


def test_buckets_rise_and_split_the_eligible_tokens_evenly():
    found, counts = chosen(tokens=100, buckets=3), Counter(token for sequence in SEQUENCES for token in sequence)
    ordered = sorted((count, token) for token, count in counts.items() if count >= 12)
    assert found.chosen == tuple(token for _, token in ordered)
    sizes = [len(bucket) for bucket in found.buckets]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_only_keeps_just_these_in_their_order(batch_size, padding_side):
    found = chosen()
    rows = seen(found, batch_size, padding_side)
    assert [token for _, _, token in rows] == found.tokens.tolist()
    assert len(set(rows)) == len(rows) == len(found)
    assert [position for _, position, _ in rows] == found.positions.tolist()


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_neither_batches_nor_padding_change_the_choice(batch_size, padding_side):
    found, other = chosen(), chosen(batch_size, padding_side)
    assert found.buckets == other.buckets
    for name in ("sequences", "positions", "tokens"):
        assert getattr(found, name).tolist() == getattr(other, name).tolist()


def test_seeds_choose_differently_and_one_seed_alike():
    found = [
        sorted(zip(*(getattr(chosen(seed=seed), name).tolist() for name in ("sequences", "positions")), strict=True))
        for seed in (1, 1, 2)
    ]
    assert found[0] == found[1] != found[2]


def test_first_positions_can_be_left_out():
    found = chosen(skip_first=True)
    assert 0 in chosen().positions and 0 not in found.positions
    kept = Counter(token for sequence in SEQUENCES for token in sequence[1:])
    assert found.counts == tuple(tuple(kept[token] for token in bucket) for bucket in found.buckets)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"buckets": 0}, "must be 1 or more"),
        ({"tokens": 0}, "must be 1 or more"),
        ({"buckets": 500}, "500 buckets need one each"),
    ],
)
def test_what_cannot_be_chosen_is_said(options, said):
    with pytest.raises(ValueError, match=said):
        chosen(**options)


def test_too_rare_says_how_frequent_the_most_frequent_is():
    most = max(Counter(token for sequence in SEQUENCES for token in sequence).values())
    with pytest.raises(ValueError, match=f"most frequent {most} times"):
        choose_occurrences(CORPUS.batches(), most + 1)
    with pytest.raises(ValueError, match="corpus is empty"):
        choose_occurrences([], 1)


def test_clouds_are_the_rows_of_each_token_in_order():
    rows, tokens = torch.arange(12.0).view(6, 2), np.array([3, 5, 3, 7, 5, 3])
    found = clouds_of(rows, tokens, (5, 3))
    assert list(found) == [5, 3]
    assert found[3].tolist() == rows[[0, 2, 5]].tolist() and found[5].tolist() == rows[[1, 4]].tolist()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=12), min_size=3, max_size=10),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_whatever_the_texts(sequences, each, seed):
    corpus = Corpus.from_tokens(sequences)
    counts = Counter(token for sequence in sequences for token in sequence)
    eligible = [token for token, count in counts.items() if count >= each]
    if not eligible:
        return
    found = choose_occurrences(corpus.batches(3), each, buckets=1, tokens=6, seed=seed)
    assert sorted(found.chosen) == sorted(eligible)
    kept = [batch.tokens[batch.keep] for batch in found.only(corpus.batches(2, padding_side="left"))]
    assert torch.cat(kept).tolist() == found.tokens.tolist()
    assert Counter(found.tokens.tolist()) == dict.fromkeys(eligible, each)
