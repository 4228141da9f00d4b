"""Tangent dominance of attention scores through the front door: what a person calls, and what they must be able to rely on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conformance.families import tiny_model
from model_snapshot import Snapshot

import tangent_lens as tln
from tangent_lens.measures.attention_rows import ChosenRows
from tangent_lens.measures.attention_run import frequency_buckets
from tangent_lens.models.packaged import PackagedModelUnavailable
from tangent_lens.models.protocol import UnsupportedModel

SEQUENCES = [np.random.default_rng(length).integers(5, 100, size=length).tolist() for length in range(6, 22)]
FAMILIES = ("gpt2", "qwen3", "gemma2", "modernbert", "bert", "olmo2")
AXES = {"distance_edges": (1, 4), "frequency_buckets": 3, "scaling": True}


def report_of(family, dtype=torch.float32, **options):
    return tln.Lens(tiny_model(family, dtype)).attention(SEQUENCES, rank=4, controls=5, progress=False, **options)


def numbers(report, name):
    return np.array([getattr(one, name) for one in report.layers])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_add_up_and_the_shares_sum_to_one(family):
    report = report_of(family, **AXES)
    assert report.worst_sum < 1e-5
    for one in report.layers:
        np.testing.assert_allclose(sum(np.array(share) for share in one.shares.values()), 1, atol=1e-5)
        assert all(0 <= value <= 1 for value in one.dominance)
        assert 0 < one.variance_baseline < 1
        assert one.by_distance is not None and one.by_frequency is not None and one.scaling is not None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("batch_size", "side"), [(1, "right"), (5, "right"), (5, "left")])
def test_no_number_depends_on_batches_or_padding(family, batch_size, side):
    expected, found = report_of(family), report_of(family, batch_size=batch_size, padding_side=side)
    for name in ("dominance", "random_mean", "kl", "variance_baseline", "rows", "pairs"):
        np.testing.assert_allclose(numbers(found, name), numbers(expected, name), rtol=2e-3, atol=2e-5, err_msg=name)


def test_the_pass_that_looks_on_is_the_models_own_pass():
    """Without its mask the model would still run, and every layer but the first would see other rows."""
    from tangent_lens.models.attention import attention_reader

    model = tiny_model("mistral", torch.float32)
    lens = tln.Lens(model)
    (batch,) = lens.corpus(SEQUENCES[:4]).batches(4)
    rows = {}
    reader = attention_reader(lens.model)
    with torch.no_grad(), reader.watching(range(3), lambda call: rows.__setitem__(call.layer, call.rows)):
        reader.run(batch)
    with torch.no_grad(), lens.attach("resid_pre") as taps:
        lens.model.run(batch)
    for layer, found in rows.items():
        kept = batch.attention_mask
        torch.testing.assert_close(found[kept], taps[layer].activations[kept], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_neox"])
def test_controls_on_some_rows_are_those_of_a_run_that_counts_these_rows_alone(family, monkeypatch):
    """What is taken of queries, masks, rotations and biases by row is the same as what a whole run has there."""
    # Gemma 2 has no float64 under padding.
    dtype, digits = (torch.float32, 1e-3) if family == "gemma2" else (torch.float64, 1e-7)
    lens = tln.Lens(tiny_model(family, dtype))
    sampled = lens.attention(SEQUENCES, rank=4, controls=5, control_rows=40, progress=False)
    assert all(max(one.random_rows) < max(one.rows) / 1.5 for one in sampled.layers)
    every = ChosenRows.__call__

    def kept_alone(self, batch):
        rows = every(self, batch)
        object.__setattr__(batch, "keep", rows.to(batch.keep.device))
        return rows

    monkeypatch.setattr(ChosenRows, "__call__", kept_alone)
    alone = lens.attention(SEQUENCES, rank=4, controls=5, control_rows=40, progress=False)
    for few, same in zip(sampled.layers, alone.layers, strict=True):
        assert few.random_rows == same.rows == same.random_rows
        np.testing.assert_allclose(few.random, same.random, rtol=digits)
        np.testing.assert_allclose(few.random_kl, same.random_kl, rtol=digits, atol=1e-6 * digits)
        for name, values in few.random_shares.items():
            np.testing.assert_allclose(values, same.random_shares[name], rtol=digits, atol=1e-3 * digits)


def test_a_rule_chooses_the_rank_of_every_layer():
    lens = tln.Lens(tiny_model("llama", torch.float32))
    fitted, _ = lens.corpus(SEQUENCES).split(0.5, 0)
    records = lens.record(fitted, "resid_pre", gradients=False, progress=False)
    ranks = {site.layer: round(tln.participation_ratio(one.activations.covariance())) for site, one in records.items()}
    fitting = [layer for layer, rank in ranks.items() if rank <= 16]
    assert 0 < len(fitting) < 3
    options = {"rank": "participation_ratio", "controls": 2, "progress": False}
    report = lens.attention(SEQUENCES, fitting, **options)
    assert [one.rank for one in report.subspaces.values()] == [ranks[layer] for layer in fitting]
    assert "by participation ratio (k = " in " ".join(str(report).split())
    with pytest.raises(
        ValueError, match=r"resid_pre\.\d: what was asked for is of rank \d+, and a normal control needs"
    ):
        lens.attention(SEQUENCES, **options)


def test_layers_are_chosen_and_counted_from_the_end():
    model = tiny_model("gpt2")
    report = tln.Lens(model).attention(SEQUENCES, [0, -1], rank=4, progress=False)
    assert [one.layer for one in report.layers] == [0, 2]
    assert report.layer(2).heads == 4
    with pytest.raises(KeyError, match="layer 1 was not measured; measured: 0, 2"):
        report.layer(1)


def test_a_tangent_only_model_has_dominance_one_and_a_normal_only_model_zero():
    """W_Q and W_K read the tangent proxy alone, or everything but it: what D must be is known."""
    for inside, expected in ((True, 1.0), (False, 0.0)):
        model = tiny_model("olmo2", torch.float64, seed=3)
        lens = tln.Lens(model)
        first = lens.attention(SEQUENCES, [0], rank=4, progress=False)
        basis = first.subspaces["resid_pre.0"].basis
        projection = basis @ basis.T if inside else torch.eye(32, dtype=torch.float64) - basis @ basis.T
        attention = model.model.layers[0].self_attn
        for linear in (attention.q_proj, attention.k_proj):
            linear.weight.data = linear.weight.data @ projection
        (layer,) = lens.attention(SEQUENCES, [0], rank=4, progress=False).layers
        np.testing.assert_allclose(layer.dominance, expected, atol=1e-12)


def test_the_model_comes_back_as_it_was():
    model = tiny_model("llama", torch.float32)
    model.train()
    next(model.parameters()).requires_grad_(False)
    before, implementation = Snapshot.of(model), model.config._attn_implementation
    tln.Lens(model).attention(SEQUENCES, [1], rank=4, progress=False)
    before.assert_unchanged(model)
    assert model.config._attn_implementation == implementation


def test_the_same_seed_gives_the_same_report_and_another_seed_other_controls():
    first, second, other = (report_of("gpt2", seed=seed) for seed in (0, 0, 1))
    assert numbers(first, "random_mean").tolist() == numbers(second, "random_mean").tolist()
    assert numbers(first, "random_mean").tolist() != numbers(other, "random_mean").tolist()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rank": 17}, r"rank 17 needs 2\*rank <= d = 32"),
        ({"controls": 0}, "0 controls give no comparison"),
        ({"control_rows": 0}, "control_rows 0 leaves nothing to compare with"),
        ({"distance_edges": (4, 1)}, r"distance_edges \(4, 1\) must be growing key distances"),
        ({"frequency_buckets": -1}, "frequency_buckets -1 must be a whole number"),
        ({"layers": [7]}, r"resid_pre\.7 is not in this model, which has 3 layers"),
        ({"padding_side": "up"}, "padding_side 'up' must be 'left' or 'right'"),
    ],
)
def test_mistakes_get_a_sentence(options, sentence):
    layers = options.pop("layers", None) if "layers" in options else None
    with pytest.raises(ValueError, match=sentence):
        tln.Lens(tiny_model("gpt2")).attention(SEQUENCES, layers, progress=False, **({"rank": 4} | options))


def test_an_unknown_setting_is_a_type_error():
    with pytest.raises(TypeError, match="ranks"):
        tln.Lens(tiny_model("gpt2")).attention(SEQUENCES, ranks=4, progress=False)


def test_a_module_of_unknown_structure_has_no_scores():
    lens = tln.Lens(torch.nn.Linear(4, 4), sites={"out": ""})
    with pytest.raises((ValueError, UnsupportedModel), match="attention scores"):
        lens.attention([torch.zeros(2, 4)], progress=False)


def test_frequency_buckets_hold_about_as_many_occurrences_each_and_never_split_a_frequency():
    sequences = [[1] * 40 + [2] * 20 + [3] * 20 + [4] * 10 + [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]]
    places, labels = frequency_buckets(sequences, 20, 3)
    assert labels == ("1 to 10 times", "20 times", "40 times")
    assert places[[1, 2, 3, 4, 5, 14]].tolist() == [2, 1, 1, 0, 0, 0]
    assert places[[0, 15, 19]].tolist() == [-1, -1, -1]


@pytest.mark.slow
def test_on_a_real_model_the_parts_add_up_and_tangents_dominate_far_beyond_chance():
    try:
        lens = tln.Lens.from_pretrained("smollm2-135m", progress=False)
    except PackagedModelUnavailable as reason:
        pytest.skip(str(reason))
    options = {"max_sequences": 8, "sequence_length": 32, "pack": True, "prepend_bos": False, "progress": False}
    report = lens.attention(tln.reference_prose(), [0, 15, 29], rank=8, controls=5, **options)
    assert report.worst_sum < 1e-5
    for one in report.layers:
        assert min(one.dominance) > 10 * max(one.random_mean)


def test_a_row_of_zeros_has_no_scale_and_needs_none():
    """The embedding of the padding token is zeros in many models."""
    model = tiny_model("llama", torch.float32)
    model.model.embed_tokens.weight.data[0] = 0
    padded, alone = (
        tln.Lens(model).attention(SEQUENCES, rank=4, controls=5, batch_size=size, progress=False) for size in (5, 1)
    )
    np.testing.assert_allclose(numbers(padded, "dominance"), numbers(alone, "dominance"), rtol=2e-3, atol=2e-5)
