"""HookedTransformer and HookedEncoder (TransformerLens 2 and 3), used as a person would; conformance has the numbers."""

from __future__ import annotations

import pytest
import torch
from conformance.backends import backends_here, host
from conformance.families import tiny_model
from conformance.reference import summed_loss
from model_snapshot import Snapshot

from tangent_lens.lens import Lens
from tangent_lens.models.protocol import UnsupportedModel
from tangent_lens.recording.masking import MaskedLoss
from tangent_lens.recording.passes import record_gradients

pytestmark = pytest.mark.skipif(
    "hooked_transformer" not in backends_here(), reason="this TransformerLens has no HookedTransformer"
)
SEQUENCES = [[7, 30, 12, 9, 55, 41, 8], [60, 5, 33], [21, 44, 90, 17, 6], [8, 9, 10, 11, 12, 13]] * 3
TOKENS = torch.tensor([[7, 30, 12, 9, 55], [60, 5, 33, 21, 44]])
TARGETS = torch.cat([TOKENS[:, 1:], torch.full((2, 1), -100)], dim=1)
MASKED = MaskedLoss(mask_id=4, special_ids=frozenset(range(5)))


def hooked(family="gpt2", backend="hooked_transformer"):
    return host(family, backend).model


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox"])
def test_a_report_agrees_with_huggingface_on_every_number(family):
    ours, plain = (
        Lens(model).measure(SEQUENCES, rank=3, progress=False) for model in (hooked(family), tiny_model(family))
    )
    assert ours.corpus.loss == pytest.approx(plain.corpus.loss, rel=1e-5)
    for expected in plain.measurements:
        found = ours.of(expected.name)
        assert found.energy.energy == pytest.approx(expected.energy.energy, abs=1e-5)
        if expected.energy.signal_lift is not None:
            assert found.energy.signal_lift == pytest.approx(expected.energy.signal_lift, rel=1e-4)
        assert found.isotropy.score == pytest.approx(expected.isotropy.score, rel=1e-3)


def test_an_encoders_report_agrees_with_huggingface():
    ours, plain = (
        Lens(model).measure(SEQUENCES, rank=3, loss=MASKED, progress=False)
        for model in (hooked("bert", "hooked_encoder"), tiny_model("bert"))
    )
    for expected in plain.measurements:
        assert ours.of(expected.name).energy.energy == pytest.approx(expected.energy.energy, abs=1e-10)


def test_the_description_is_that_of_the_model():
    ours, plain = Lens(hooked("llama")).description, Lens(tiny_model("llama")).description
    for name in ("n_layers", "d_model", "n_heads", "n_key_value_heads", "d_head", "vocabulary", "dtype"):
        assert getattr(ours, name) == getattr(plain, name), name
    assert "(HookedTransformer)" in ours.library
    assert ours.architecture == plain.architecture


def test_its_own_hook_style_gives_queries_of_all_heads_side_by_side_and_their_gradients():
    model = hooked()
    lens = Lens(model)
    (hook,) = lens.hooks("query.1", gradients=True)
    assert hook.name == "blocks.1.attn.hook_q"
    logits = model.run_with_hooks(TOKENS, return_type="logits", fwd_hooks=[hook])
    summed_loss(logits.flatten(0, 1), TARGETS.flatten()).backward()
    with lens.attach("query.1", gradients=True) as taps:
        summed_loss(model(TOKENS, return_type="logits").flatten(0, 1), TARGETS.flatten()).backward()
    assert hook.tap.activations.shape == (2, 5, 32)
    assert torch.equal(hook.tap.activations, taps[1].activations)
    assert torch.allclose(hook.tap.gradients, taps[1].gradients, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["attention_input.1", "mlp_input.1"])
def test_a_site_that_is_no_hook_point_is_refused_in_that_style_and_tapped_otherwise(name):
    lens = Lens(hooked())
    with pytest.raises(ValueError, match=rf"{name} is no hook point of this library.*lens\.attach\('{name}'\)"):
        lens.hooks(name)
    with lens.attach(name) as taps:
        lens.model.run(next(lens.corpus(SEQUENCES).batches(4)))
    assert taps[1].activations.shape[2] == 32


def test_texts_are_read_with_the_models_own_tokenizer_and_a_special_token_that_it_sets_is_told():
    lens = Lens(hooked())
    corpus = lens.corpus(["5 6 7 8 9", "10 11 12", "13 14 15 16"])
    assert [int(word) for word in corpus.sequences[0][-5:]] == [5, 6, 7, 8, 9]
    begins = corpus.sequences[0][0] == 1  # TransformerLens 3 sees to it; version 2 asks the tokenizer to, in vain here
    assert (
        any("every sequence begins with the special token" in sentence for sentence in corpus.warnings(None)) == begins
    )


def test_the_model_comes_back_as_it_was():
    model = hooked()
    model.add_hook("blocks.0.hook_resid_post", lambda tensor, hook: None)
    model.train()
    next(model.parameters()).requires_grad_(False)
    before = Snapshot.of(model)
    Lens(model).measure(SEQUENCES, rank=3, progress=False)
    before.assert_unchanged(model)


def test_a_tap_sees_what_an_earlier_hook_of_the_person_put_in_place():
    model = hooked()
    model.add_hook("blocks.1.hook_resid_post", lambda tensor, hook: torch.full_like(tensor, 0.5))
    found = Lens(model).record(SEQUENCES, "resid_post.1", gradients=False, progress=False)
    assert torch.allclose(next(iter(found.values())).activations.mean, torch.full((32,), 0.5, dtype=torch.float64))


@pytest.mark.parametrize(("batch_size", "side"), [(1, "right"), (4, "right"), (4, "left"), (12, "left")])
def test_weight_gradients_do_not_depend_on_the_batch(batch_size, side):
    lens = Lens(hooked("llama"))
    corpus = lens.corpus(SEQUENCES)
    found, expected = (
        record_gradients(lens.model, corpus.batches(size, padding_side=where), (), lens.maps).weights
        for size, where in ((batch_size, side), (2, "right"))
    )
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one.gradient, other.gradient, rtol=0, atol=1e-5 * float(other.gradient.abs().max()))


def test_a_sequence_longer_than_the_context_is_refused():
    with pytest.raises(ValueError, match=r"a sequence of 70 tokens is longer than the 64 positions"):
        Lens(hooked()).record([list(range(70))], progress=False)


def test_short_position_embeddings_are_unknown():
    model = hooked()
    model.cfg.positional_embedding_type = "shortformer"
    with pytest.raises(UnsupportedModel, match="sites of this HookedTransformer are not known"):
        Lens(model)


def test_attention_only_models_say_what_they_lack():
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(
        n_layers=2,
        d_model=16,
        n_ctx=16,
        d_head=8,
        n_heads=2,
        d_vocab=100,
        attn_only=True,
        seed=0,
        normalization_type="LN",
    )
    lens = Lens(HookedTransformer(config), name="attention only")
    with pytest.raises(ValueError, match=r"this model has no mlp_input: it has attention layers only"):
        lens.resolve("mlp_input")
    report = lens.measure([one[:6] for one in SEQUENCES], rank=2, progress=False)
    assert {one.kind for one in report.measurements} == {"resid_post", "attention", "query", "key", "value"}
    assert any(
        "no weight gradient of mlp_in, mlp_gate was measured: it has attention layers only" in w
        for w in report.warnings
    )


@pytest.mark.skipif("bridge" in backends_here(), reason="this TransformerLens has bridges")
def test_loading_by_name_says_that_version_2_has_no_bridge(tmp_path):
    tiny_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ImportError, match=r"transformer-lens 2\..* has no TransformerBridge.*and pass it to Lens"):
        Lens.from_pretrained(str(tmp_path), backend="transformer_lens")
