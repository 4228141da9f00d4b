"""Updates of the embedding rows along a tangent, by frequency."""

from __future__ import annotations

import pytest
import torch

from tangent_lens.dynamics.embedding_updates import update_energies, update_sums
from tangent_lens.measures.enrichment import FrequencyBuckets
from tangent_lens.measures.frequency import token_frequencies
from tangent_lens.subspaces.subspace import Subspace

COUNTS = {0: 1, 1: 2, 2: 4, 3: 8, 4: 16, 5: 32}


@pytest.fixture
def buckets():
    return FrequencyBuckets.by_mass(token_frequencies(COUNTS, 8), 2)


def tangent(*columns):
    basis = torch.eye(6, dtype=torch.float64)[:, list(columns)]
    return Subspace(basis, torch.zeros(6, dtype=torch.float64))


def test_energy_is_the_share_of_the_squared_steps_along_the_tangent(buckets):
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    step = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    whole, *parts = update_energies("early", update_sums(before, before + step, tangent(0, 3), buckets), buckets)
    seen = step[:6]
    assert whole.energy == pytest.approx(float(seen[:, [0, 3]].square().sum() / seen.square().sum()))
    for part in parts:
        own = step[buckets.bucket_of == part.bucket]
        assert part.energy == pytest.approx(float(own[:, [0, 3]].square().sum() / own.square().sum()))
        assert part.share == pytest.approx(float(own.square().sum() / seen.square().sum()))


def test_steps_inside_and_outside_are_told_apart(buckets):
    before = torch.zeros(8, 6, dtype=torch.float64)
    after = before.clone()
    after[buckets.bucket_of == 0, 0] = 1.0
    after[buckets.bucket_of == 1, 5] = 2.0
    _, rare, frequent = update_energies("late", update_sums(before, after, tangent(0), buckets), buckets)
    assert (rare.energy, frequent.energy, frequent.lift) == (1.0, 0.0, 0.0)


def test_tokens_that_never_occur_are_left_out(buckets):
    before = torch.zeros(8, 6, dtype=torch.float64)
    after = before.clone()
    after[:, 1] = 1.0
    sums = update_sums(before, after, tangent(1), buckets)
    assert int(sums.count.sum()) == len(COUNTS) and sums.left_out == 2


def test_embeddings_of_two_shapes_have_no_difference(buckets):
    with pytest.raises(ValueError, match="no difference"):
        update_sums(torch.zeros(8, 6), torch.zeros(9, 6), tangent(0), buckets)
