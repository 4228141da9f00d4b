"""A corpus through a model into sums by token: right however it is cut, the model given back, clear refusals."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_model
from explicit import random_frame
from model_snapshot import Snapshot
from plain_reference import assert_close, plain_pass, random_sequences, singles

from tangent_lens.models.loading import wrap
from tangent_lens.models.protocol import Inputs
from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.masking import MaskedLoss
from tangent_lens.recording.receivers import Selection
from tangent_lens.recording.row_choice import RowChoice
from tangent_lens.recording.taps import GradientNeverCame, SiteNeverFired
from tangent_lens.recording.token_passes import (
    BucketReceiver,
    record_bucket_energy,
    record_token_distances,
    record_token_sums,
    text_tokens,
)
from tangent_lens.recording.token_sums import BucketSums
from tangent_lens.sites import Site

SEQUENCES = [[token % 12 for token in sequence] for sequence in random_sequences([5, 9, 2, 14, 7, 11, 3, 17])]
TOKENS = torch.tensor([token for sequence in SEQUENCES for token in sequence])
CORPUS = Corpus.from_tokens(SEQUENCES, special_ids=[0])
CHOSEN = [1, 2, 5, 9]
SITES = (Site("embedding"), Site("resid_post", 1), Site("resid_post", 2))
BUCKET_OF = torch.tensor([place % 3 - 1 for place in range(100)])
BASES = {site: random_frame(32, 3, seed) for seed, site in enumerate(SITES)}
BATCHINGS = [(1, "right"), (3, "right"), (3, "left"), (8, "left")]


@pytest.fixture(scope="module")
def reference():
    """Each sequence alone, unpadded, through plain PyTorch."""
    return plain_pass(tiny_model("gpt2"), singles(SEQUENCES))


@pytest.fixture
def model():
    return wrap(tiny_model("gpt2"))


def of_token(rows, token):
    own = rows[token == TOKENS]
    distances = torch.stack([torch.linalg.vector_norm(row - own.mean(0)) for row in own])
    return len(own), own.mean(0), distances.square().sum(), distances.sum()


@pytest.mark.parametrize(("batch_size", "side"), BATCHINGS)
def test_spreads_are_those_of_plain_rows_however_the_corpus_is_cut(model, reference, batch_size, side):
    def cut():
        return CORPUS.batches(batch_size, padding_side=side)

    sums = record_token_sums(model, cut(), SITES, CHOSEN)
    distances = record_token_distances(model, cut(), sums)
    assert list(sums) == list(distances) == list(SITES)
    for site in SITES[1:]:
        for place, token in enumerate(CHOSEN):
            count, mean, square, distance = of_token(reference.activations[site.name], token)
            assert int(sums[site].count[place]) == int(distances[site].count[place]) == count >= 2
            assert_close(sums[site].mean[place], mean, 1e-10, site.name)
            assert_close(sums[site].square[place], square, 1e-10, site.name)
            assert_close(distances[site].distance[place], distance, 1e-10, site.name)


def test_what_an_embedding_without_positions_gives_one_token_has_no_spread():
    model = wrap(tiny_model("llama"))
    sums = record_token_sums(model, CORPUS.batches(4), [Site("embedding"), Site("resid_post", 0)], CHOSEN)
    table = model.module.get_input_embeddings().weight.detach()
    assert_close(sums[Site("embedding")].mean, table[CHOSEN], 1e-12)
    assert float(sums[Site("embedding")].square.max()) < 1e-20 < float(sums[Site("resid_post", 0)].square.min())


@pytest.mark.parametrize(("batch_size", "side"), BATCHINGS)
def test_gradient_energy_is_that_of_plain_rows_however_the_corpus_is_cut(model, reference, batch_size, side):
    found = record_bucket_energy(model, CORPUS.batches(batch_size, padding_side=side), BASES, BUCKET_OF)
    buckets = BUCKET_OF[TOKENS]
    for site in SITES[1:]:
        g = reference.gradients[site.name]
        total = torch.stack([g[buckets == bucket].square().sum() for bucket in range(2)])
        along = torch.stack([(g[buckets == bucket] @ BASES[site]).square().sum() for bucket in range(2)])
        assert_close(found[site].total, total, 1e-10, site.name)
        assert_close(found[site].along, along, 1e-10, site.name)
        assert found[site].count.tolist() == [int((buckets == bucket).sum()) for bucket in range(2)]
        assert found[site].left_out == int((buckets < 0).sum()) > 0


def test_positions_left_out_of_the_statistics_are_left_out_here(model, reference):
    options = {"skip_first": True, "skip_special": True}
    kept = (reference.positions > 0) & (TOKENS != 0)
    sums = record_token_sums(model, CORPUS.batches(3, **options), SITES[1:2], [0, 5])[SITES[1]]
    energy = record_bucket_energy(model, CORPUS.batches(3, **options), BASES, BUCKET_OF)[SITES[1]]
    assert sums.count.tolist() == [0, int((kept & (TOKENS == 5)).sum())]
    assert int(energy.count.sum()) + energy.left_out == int(kept.sum()) < len(TOKENS) - len(SEQUENCES)
    g = reference.gradients[SITES[1].name][kept & (BUCKET_OF[TOKENS] >= 0)]
    assert_close(energy.total.sum(), g.square().sum(), 1e-10)


def test_a_hidden_token_counts_as_what_it_was():
    loss = MaskedLoss(mask_id=99, special_ids=frozenset(), share=0.5).for_model(None, 100)
    (batch,) = CORPUS.batches(8)
    masked = loss.prepare(batch)
    rows = torch.zeros(*batch.tokens.shape, 2)
    assert bool((masked.tokens == 99).any()) and bool((masked.tokens != batch.tokens).any())
    assert torch.equal(text_tokens(RowChoice.of(masked), rows, "here"), batch.tokens[batch.keep])


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_model_is_given_back(family):
    model = tiny_model(family)
    snapshot = Snapshot.of(model)
    wrapped = wrap(model)
    sums = record_token_sums(wrapped, CORPUS.batches(4), SITES, CHOSEN)
    record_token_distances(wrapped, CORPUS.batches(4), sums)
    record_bucket_energy(wrapped, CORPUS.batches(4), BASES, BUCKET_OF)
    with pytest.raises(ValueError, match="none of the chosen tokens"):
        record_token_sums(wrapped, CORPUS.batches(4), SITES, [50])
    snapshot.assert_unchanged(model)


def test_no_graph_is_kept_of_a_forward_pass(model):
    modes = []
    with model.module.transformer.h[1].register_forward_hook(lambda *passed: modes.append(torch.is_grad_enabled())):
        record_token_distances(model, CORPUS.batches(8), record_token_sums(model, CORPUS.batches(8), SITES, CHOSEN))
    assert modes == [False, False]


def test_refusals(model):
    with pytest.raises(ValueError, match="embedding: none of the chosen tokens stands at a row that was kept"):
        record_token_sums(model, CORPUS.batches(4), SITES, [50])
    with pytest.raises(ValueError, match="no batch to record activations by token from"):
        record_token_sums(model, [], SITES, CHOSEN)
    with pytest.raises(ValueError, match="do not fit buckets of a vocabulary of 5"):
        record_bucket_energy(model, CORPUS.batches(4), BASES, BUCKET_OF[:5])
    with pytest.raises(ValueError, match="these rows stand for no tokens"):
        text_tokens(RowChoice.of(Inputs(torch.zeros(2, 3))), torch.zeros(2, 3), "here")


def test_a_layer_that_is_skipped_is_not_silence(model):
    class Skipping(torch.nn.Module):
        def forward(self, hidden, *args, **kwargs):
            return hidden

    model.module.transformer.h[1] = Skipping()
    with pytest.raises(SiteNeverFired, match=r"resid_post.1: the model ran, but no tensor passed here"):
        record_token_sums(model, CORPUS.batches(4), SITES[1:2], CHOSEN)
    with pytest.raises(SiteNeverFired, match=r"resid_post.1: the model ran, but no tensor passed here"):
        record_bucket_energy(model, CORPUS.batches(4), {SITES[1]: BASES[SITES[1]]}, BUCKET_OF)


def test_a_loss_that_does_not_reach_a_site_is_not_silence(model):
    class First:
        name, unit = "first layer", "token"

        def prepare(self, batch):
            return batch

        def __call__(self, output, batch):
            return output.hidden_states[1].square().sum(), batch.size

    model.module.config.output_hidden_states = True
    with pytest.raises(GradientNeverCame, match=r"resid_post.1: 0 gradients came for 1 forward passes"):
        record_bucket_energy(model, CORPUS.batches(4), BASES, BUCKET_OF, loss=First())


def test_a_second_backward_pass_is_refused():
    selection = Selection()
    selection.current = RowChoice.of(next(CORPUS.batches(8)))
    receiver = BucketReceiver(SITES[1], selection, BucketSums(BASES[SITES[1]], BUCKET_OF))
    rows = torch.ones(*selection.current.batch.tokens.shape, 32)
    take = receiver(rows)
    take(rows)
    with pytest.raises(GradientNeverCame, match=r"resid_post.1: a second backward pass"):
        take(rows)
