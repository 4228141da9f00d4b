"""Rows of chosen occurrences: those of the general passes, with hooks gone and errors that teach."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conformance.families import tiny_model

from tangent_lens.models.loading import wrap
from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.losses import CausalLoss
from tangent_lens.recording.occurrence_rows import record_map_rows, record_site_rows
from tangent_lens.recording.occurrences import choose_occurrences
from tangent_lens.recording.passes import record_activations, record_gradients
from tangent_lens.recording.taps import GradientNeverCame
from tangent_lens.sites import resolve

DRAW = np.random.default_rng(5)
CORPUS = Corpus.from_tokens([(DRAW.zipf(1.5, size=length) % 60).tolist() for length in range(5, 30)])


@pytest.fixture(scope="module")
def model():
    return wrap(tiny_model("llama", torch.float32))


@pytest.fixture(scope="module")
def chosen():
    return choose_occurrences(CORPUS.batches(), 12, buckets=2, tokens=3, seed=1)


def batches(chosen):
    return chosen.only(CORPUS.batches(4))


def test_site_rows_are_those_of_the_general_pass(model, chosen):
    sites = resolve("resid_post.0,query.1", model.sites)
    found = record_site_rows(model, batches(chosen), sites, len(chosen), seed=3)
    expected = record_activations(model, batches(chosen), sites, sample=len(chosen), seed=3)
    for site in sites:
        sample = expected[site].sample
        for name in ("rows", "tokens", "sequences"):
            assert torch.equal(getattr(found[site], name), getattr(sample, name))
        assert len(found[site]) == len(chosen) == found[site].seen
        assert sorted(found[site].tokens.tolist()) == sorted(chosen.tokens.tolist())


def test_map_rows_are_those_of_the_general_pass_in_the_order_of_the_choice(model, chosen):
    maps = [one for one in model.maps if one.layer == 1]
    found = record_map_rows(model, batches(chosen), maps, CausalLoss())
    expected = record_gradients(model, batches(chosen), maps=maps, keep_rows=True)
    assert set(found.signals) == {one.name for one in maps}
    for site, rows in found.inputs.items():
        assert torch.equal(rows, expected.kept_inputs[site][0]) and len(rows) == len(chosen)
    for name, rows in found.signals.items():
        assert torch.equal(rows, expected.kept_signals[name])
    embedding = record_site_rows(model, batches(chosen), resolve("embedding", model.sites), len(chosen))
    by_token = {int(token): row for row, token in zip(*vars_of(embedding), strict=True)}
    assert len(by_token) == len(chosen.chosen)


def vars_of(samples):
    (sample,) = samples.values()
    return sample.rows, sample.tokens


def test_hooks_are_gone_and_parameters_as_before(model, chosen):
    before = [parameter.requires_grad for parameter in model.module.parameters()]
    record_map_rows(model, batches(chosen), model.maps[:1], CausalLoss())
    assert before == [parameter.requires_grad for parameter in model.module.parameters()]
    assert not any(module._forward_hooks for module in model.module.modules())


def test_a_loss_that_reaches_no_map_is_an_error(model, chosen):
    class Elsewhere(CausalLoss):
        def __call__(self, output, batch):
            value, count = super().__call__(output, batch)
            return value.detach() * torch.ones((), requires_grad=True), count

    with pytest.raises(GradientNeverCame, match=r"query\.0"):
        record_map_rows(model, batches(chosen), model.maps[:1], Elsewhere())
    assert not any(module._forward_hooks for module in model.module.modules())


def test_no_batch_is_an_error(model):
    with pytest.raises(ValueError, match="corpus is empty"):
        record_site_rows(model, [], model.sites[:1], 5)
