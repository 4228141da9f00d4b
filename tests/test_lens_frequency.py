"""Token frequency through the front door: what loops over the plain model's own tensors find."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from conformance.families import tiny_model

import tangent_lens as tln
from tangent_lens.measures.frequency import TokenFrequencies
from tangent_lens.models.checkpoints import state_checkpoints

DRAW = np.random.default_rng(4)
# Some tokens often, many seldom; lengths that need padding.
SEQUENCES = [(DRAW.zipf(1.4, size=length) % 97).tolist() for length in range(8, 40)]
# Often enough in the texts, too seldom behind first positions.
SELDOM = 98
for place, sequence in enumerate(SEQUENCES[:5]):
    sequence[0 if place < 3 else 4] = SELDOM
SITES = ("resid_post.0", "resid_post.2")
OPTIONS = {"rank": 3, "min_count": 5, "buckets": 4, "seed": 2, "progress": False}


@pytest.fixture(scope="module")
def lens():
    return tln.Lens(tiny_model("llama", torch.float64))


@pytest.fixture(scope="module")
def report(lens):
    return lens.frequency(SEQUENCES, SITES, name="numbers", **OPTIONS)


def rows_and_tokens(lens, sequences, site, skip_first=False, gradients=False):
    """Rows of a site one sequence at a time, without padding, and the token at each."""
    rows, tokens = [], []
    for sequence in sequences:
        batch = torch.as_tensor(np.asarray(sequence)).long()[None]
        with lens.attach(site, gradients=gradients) as taps, torch.enable_grad():
            logits = lens.model.module(input_ids=batch).logits
            if gradients:
                torch.nn.functional.cross_entropy(logits[0, :-1], batch[0, 1:], reduction="sum").backward()
        found = taps[site].gradients if gradients else taps[site].activations
        rows.append(found[0, int(skip_first) :].detach())
        tokens.append(batch[0, int(skip_first) :])
    return torch.cat(rows), torch.cat(tokens)


def spread_by_loops(rows, tokens, token):
    own = rows[tokens == token]
    return float(torch.linalg.vector_norm(own - own.mean(dim=0), dim=1).mean()), len(own)


@pytest.mark.parametrize("skip_first", [False, True])
def test_spreads_are_those_of_each_tokens_own_rows(lens, skip_first):
    report = lens.frequency(SEQUENCES, SITES, skip_first=skip_first, **OPTIONS)
    counts = np.bincount(np.concatenate(SEQUENCES), minlength=100)
    for site in SITES:
        rows, tokens = rows_and_tokens(lens, SEQUENCES, site, skip_first)
        points = report.of(site).spread.points
        kept = np.bincount(tokens.numpy(), minlength=100)
        assert points.tokens.tolist() == np.flatnonzero(kept >= 5).tolist()
        assert counts[SELDOM] == 5 and (SELDOM in points.tokens) != skip_first
        for place, token in enumerate(points.tokens):
            distance, number = spread_by_loops(rows, tokens, token)
            assert points.distance[place] == pytest.approx(distance, rel=1e-9)
            assert points.corrected[place] == pytest.approx(distance * math.sqrt(number / (number - 1)), rel=1e-9)
            assert points.log_frequency[place] == pytest.approx(math.log(counts[token] / counts.sum()))
        expected = np.corrcoef(points.log_frequency, points.distance)[0, 1]
        assert report.of(site).spread.raw.pearson.estimate == pytest.approx(expected)


def test_energies_are_of_test_gradients_along_a_proxy_of_fit_activations(lens, report):
    corpus = lens.corpus(SEQUENCES)
    fit, test = corpus.split(0.5, 2)
    proxies = lens.fit(fit, SITES, rank=3, progress=False)
    for site, proxy in proxies.items():
        rows, tokens = rows_and_tokens(lens, test.sequences, site.name, gradients=True)
        buckets = tln.FrequencyBuckets.by_mass(tln.token_frequencies(corpus, 100), 4)
        found = report.of(site.name).enrichment
        assert len(found.buckets) == len(buckets) > 1
        for number, bucket in enumerate(found.buckets):
            own = rows[buckets.bucket_of[tokens] == number]
            energy = float((own @ proxy.basis).square().sum() / own.square().sum())
            assert bucket.energy == pytest.approx(energy, rel=1e-8)
            assert bucket.rows == len(own) > 0


def test_they_agree_with_the_energy_of_measure(lens, report):
    whole = lens.measure(SEQUENCES, SITES, rank=3, seed=2, gradients="residual", progress=False)
    for site in SITES:
        assert report.of(site).enrichment.energy == pytest.approx(whole.of(site).energy.energy, rel=1e-9)


def test_it_says_how_it_was_made(report):
    corpus, settings = report.corpus, report.settings
    assert (corpus.name, corpus.sequences, corpus.tokens) == ("numbers", 32, sum(map(len, SEQUENCES)))
    assert corpus.fit_sequences == corpus.test_sequences == 16
    assert corpus.different == len(set(np.concatenate(SEQUENCES).tolist()))
    assert (settings.rank, settings.min_count, settings.loss, settings.frequencies) == (3, 5, "next-token", "corpus")
    assert report.model.name and report.versions["torch"] and report.trajectory is None


def test_batches_and_padding_change_nothing(lens, report):
    other = lens.frequency(SEQUENCES, SITES, batch_size=3, padding_side="left", **OPTIONS)
    columns = ["estimate", "low", "high"]
    assert np.allclose(other.to_pandas()[columns], report.to_pandas()[columns], rtol=1e-7)
    assert np.allclose(other.buckets().energy, report.buckets().energy, rtol=1e-7)


def test_given_frequencies_take_the_place_of_the_counted_ones(lens, report):
    counts = np.arange(1.0, 101.0)
    counts[1] = 0
    given = lens.frequency(SEQUENCES, SITES[0], frequencies=counts, **OPTIONS)
    points, before = given.of(SITES[0]).spread.points, report.of(SITES[0]).spread.points
    assert points.tokens.tolist() == [token for token in before.tokens if token != 1] != before.tokens.tolist()
    assert points.log_frequency.tolist() == pytest.approx(np.log(counts[points.tokens] / counts.sum()).tolist())
    assert given.of(SITES[0]).enrichment.left_out > 0 and given.settings.frequencies == "given"
    same = lens.frequency(SEQUENCES, SITES[0], frequencies=TokenFrequencies(counts), **OPTIONS)
    assert same.to_pandas().estimate.tolist() == given.to_pandas().estimate.tolist()


def test_checkpoints_bring_the_embeddings_trajectory(lens):
    states = [(step, tiny_model("llama", torch.float64, seed=step).state_dict()) for step in (1, 2, 3)]
    source = state_checkpoints(tiny_model("llama", torch.float64), states)
    found = lens.frequency(SEQUENCES, SITES[0], checkpoints=source, **OPTIONS)
    rows = torch.stack([state["model.embed_tokens.weight"] for _, state in states])
    distance = torch.linalg.vector_norm(rows - rows.mean(dim=0), dim=2).mean(dim=0)
    points = found.trajectory.points
    assert points.tokens.tolist() == np.flatnonzero(np.bincount(np.concatenate(SEQUENCES)) >= 5).tolist()
    assert points.distance.tolist() == pytest.approx(distance[points.tokens].tolist())
    assert found.trajectory.raw.pearson.estimate == pytest.approx(found.trajectory.corrected.pearson.estimate)


def test_missing_buckets_are_warned_of(lens):
    found = lens.frequency(SEQUENCES, SITES[0], **OPTIONS | {"buckets": 60})
    assert any("buckets instead of 60" in sentence for sentence in found.warnings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_count": 1}, "min_count 1 must be 2 or more"),
        ({"min_count": 10_000}, "no token has a count of 10000 or more"),
        ({"buckets": 0}, "0 buckets hold nothing"),
        ({"rank": "elbow"}, "rank 'elbow'"),
        ({"rank": 32}, "32"),
        ({"frequencies": [1.0, 2.0]}, "is outside the 2 that have a frequency"),
        ({"fit_fraction": 1.5}, "fit_fraction 1.5 must lie between 0 and 1"),
        ({"sites": "embedding"}, "embedding: the rows of a token are all alike"),
    ],
)
def test_what_cannot_be_measured_is_a_sentence(lens, options, message):
    with pytest.raises(ValueError, match=message):
        lens.frequency(SEQUENCES, **{"sites": SITES[0]} | OPTIONS | options)


def test_a_module_of_unknown_structure_has_no_tokens():
    module = torch.nn.Sequential(torch.nn.Linear(4, 4))
    lens = tln.Lens(module, sites={"first": "0"})
    with pytest.raises(ValueError, match="reads no tokens, and only tokens have a frequency"):
        lens.frequency([torch.randn(2, 4)], progress=False)
