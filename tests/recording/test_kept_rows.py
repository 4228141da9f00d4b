"""Rows that stay: a sample that no batching changes, and all rows with the sequence that each belongs to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conformance.families import tiny_model

import tangent_lens as tln
from tangent_lens.models.protocol import Inputs
from tangent_lens.recording.kept_rows import RowSampler
from tangent_lens.recording.passes import record_activations, record_gradients
from tangent_lens.recording.receivers import Selection
from tangent_lens.recording.row_choice import RowChoice
from tangent_lens.sites import Site

SEQUENCES = [np.random.default_rng(length).integers(5, 100, size=length) for length in range(6, 18)]
SITE = Site("resid_post", 1)


@pytest.fixture(scope="module")
def lens():
    """A tiny model in float64."""
    return tln.Lens(tiny_model("llama", torch.float64))


def sample_of(lens, count=40, seed=0, sequences=SEQUENCES, **batching):
    """The sample of one site."""
    corpus = lens.corpus(sequences)
    records = record_activations(lens.model, corpus.batches(**batching), [SITE], sample=count, seed=seed)
    return records[SITE].sample


def ordered(sample):
    """The rows in the order of their first number."""
    return sample.rows[sample.rows[:, 0].argsort()]


@pytest.mark.parametrize("batching", [{"batch_size": 1}, {"batch_size": 5}, {"batch_size": 5, "padding_side": "left"}])
def test_no_batch_or_padding_changes_the_sample(lens, batching):
    found, expected = sample_of(lens, **batching), sample_of(lens, batch_size=12)
    torch.testing.assert_close(found.rows, expected.rows, rtol=1e-6, atol=1e-8)
    assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.sequences, expected.sequences)
    assert (found.seen, len(found)) == (sum(map(len, SEQUENCES)), 40)


def test_order_changes_no_row_of_the_sample(lens):
    turned = sample_of(lens, sequences=SEQUENCES[::-1])
    torch.testing.assert_close(ordered(turned), ordered(sample_of(lens)), rtol=1e-6, atol=1e-8)


def test_a_smaller_sample_is_the_start_of_a_larger_one_and_another_seed_another(lens):
    few, many, other = sample_of(lens, 10), sample_of(lens, 40), sample_of(lens, 10, seed=1)
    assert torch.equal(few.rows, many.rows[:10])
    assert not torch.equal(few.rows, other.rows)


def test_a_sample_larger_than_the_corpus_is_all_of_it(lens):
    sample = sample_of(lens, 10_000)
    assert len(sample) == sample.seen == sum(map(len, SEQUENCES))
    assert sorted(sample.tokens.tolist()) == sorted(np.concatenate(SEQUENCES).tolist())
    assert torch.bincount(sample.sequences).tolist() == sorted(map(len, SEQUENCES), reverse=True)


def test_every_row_is_as_likely_as_another(lens):
    """Over 300 seeds each of 24 rows is chosen 75 times of 300, give or take five standard deviations of 7.5."""
    tokens = torch.arange(24).view(4, 6)
    every = torch.ones(4, 6, dtype=torch.bool)
    batch = lens.corpus(tokens).batches(4).__next__()
    assert bool((batch.keep == every).all())
    counts = torch.zeros(24)
    for seed in range(300):
        selection = Selection()
        selection.current = RowChoice.of(batch)
        sampler = RowSampler(SITE, selection, 6, seed)
        sampler(batch.tokens[..., None].double())
        counts[sampler.result().tokens] += 1
    assert counts.sum() == 1800 and counts.min() > 37 and counts.max() < 113


def test_rows_of_batches_of_ones_own_are_sampled_too():
    selection = Selection()
    sampler = RowSampler(Site("named", None, label="middle"), selection, 5)
    for start in (0, 4):
        selection.current = RowChoice.of(Inputs(torch.zeros(4, 3), size=4), start)
        sampler(torch.arange(12.0).view(4, 3) + 100 * start)
    sample = sampler.result()
    assert (sample.seen, len(sample)) == (8, 5)
    assert sorted(set(sample.sequences.tolist())) == sorted(
        int(row[0] // 100 + row[0] % 100 // 3) for row in sample.rows
    )


def test_an_empty_sample_is_refused():
    with pytest.raises(ValueError, match="a sample of 0 rows holds nothing"):
        RowSampler(SITE, Selection(), 0)
    with pytest.raises(ValueError, match=r"resid_post.1: no row passed"):
        RowSampler(SITE, Selection(), 3).result()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_kept_rows_make_the_gradients_that_were_summed(family):
    """Also where queries, keys and values are one fused product."""
    lens = tln.Lens(tiny_model(family, torch.float64))
    maps = [one for one in lens.maps if one.layer == 1]
    batches = lens.corpus(SEQUENCES).batches(5)
    record = record_gradients(lens.model, batches, [SITE], maps, keep_rows=True)
    rows, sequences = record.kept_gradients[SITE]
    moments = record.moments[SITE].gradients
    torch.testing.assert_close(rows.T @ rows, moments.second_moment())
    assert torch.bincount(sequences).tolist() == sorted(map(len, SEQUENCES), reverse=True)
    for weight in record.weights:
        inputs, _ = record.kept_inputs[weight.reads]
        torch.testing.assert_close(record.kept_signals[weight.name].T @ inputs, weight.gradient, rtol=1e-9, atol=1e-12)


def test_nothing_is_kept_unasked(lens):
    record = record_gradients(lens.model, lens.corpus(SEQUENCES).batches(5), [SITE], lens.maps[:3])
    assert not record.kept_gradients and not record.kept_inputs and not record.kept_signals
