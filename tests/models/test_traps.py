"""Traps of the host libraries. Each test shows the trap as it is, so that we learn when it is gone, and that we avoid it.

Runs in every environment of the matrix: a trap of a class that this TransformerLens does not have is skipped.
"""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch
from conformance.backends import backends_here, host, tokenizer
from conformance.families import FAMILIES, examples_of, tiny_model
from conformance.reference import plain_reference, summed_loss

from tangent_lens.lens import Lens
from tangent_lens.measures.comparison import compare
from tangent_lens.recording.masking import MaskedLoss
from tangent_lens.recording.moments import NonFiniteRows
from tangent_lens.recording.taps import SiteNeverFired

BRIDGE, HOOKED = "bridge", "hooked_transformer"
MAJOR = int(version("transformer-lens").split(".")[0])
SEQUENCES = [[7, 30, 12, 9, 55, 41, 8], [60, 5, 33], [21, 44, 90, 17, 6]] * 4

needs_bridge = pytest.mark.skipif(BRIDGE not in backends_here(), reason="this TransformerLens has no TransformerBridge")
needs_hooked = pytest.mark.skipif(HOOKED not in backends_here(), reason="this TransformerLens has no HookedTransformer")


def example(family):
    """The first sequence of a family, and what plain PyTorch says of it."""
    one = examples_of(family)[0]
    return one, plain_reference(family, tiny_model(family), [one])


def own_pass(model, lens, one, sites, gradients=True):
    with lens.attach(sites, gradients=gradients) as taps:
        summed_loss(model(one.tokens[None], return_type="logits")[0], one.targets).backward()
    return taps


def error(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())


@needs_bridge
class TestOnABridge:
    def test_the_backward_hook_in_the_middle_misses_the_path_around_the_mlp_and_our_tap_does_not(self):
        one, plain = example("gpt2")
        bridge, seen = host("gpt2", BRIDGE).model, []
        bridge.add_hook("blocks.1.hook_resid_mid", lambda gradient, hook: seen.append(gradient.clone()), dir="bwd")
        taps = own_pass(bridge, Lens(bridge), one, "resid_mid.1")
        expected = plain.gradients["resid_mid.1"][0]
        assert error(seen[0][0], expected) > 0.1
        assert error(taps[1].gradients[0], expected) < 1e-12

    @pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "bert", "olmo2"])
    def test_a_backward_hook_of_the_person_at_any_site_changes_no_gradient_of_ours(self, family):
        one, plain = example(family)
        bridge = host(family, BRIDGE).model
        lens = Lens(bridge)
        for site in lens.sites:
            bridge.add_hook(lens.model.tap_point(site).name, lambda gradient, hook: None, dir="bwd")
        taps = own_pass(bridge, lens, one, lens.sites)
        for site in lens.sites:
            assert error(taps[site].gradients[0], plain.gradients[site.name][0]) < 1e-5, site

    def test_scores_are_the_pattern_on_a_bert_and_no_site_of_ours(self):
        one, _ = example("bert")
        bridge, seen = host("bert", BRIDGE).model, {}
        for name in ("hook_attn_scores", "hook_pattern"):
            bridge.blocks[1].attn.get_submodule(name).register_forward_hook(
                lambda module, args, output, name=name: seen.update({name: output})
            )
        bridge(one.tokens[None], return_type="logits")
        # On TransformerLens 3.9 neither fires at all.
        assert len(seen) == (2 if MAJOR >= 4 else 0)
        if seen:
            assert torch.equal(seen["hook_attn_scores"], seen["hook_pattern"])
        with pytest.raises(ValueError, match=r"'blocks\.1\.attn\.hook_attn_scores' names no site"):
            Lens(bridge).resolve("blocks.1.attn.hook_attn_scores")

    def test_rotary_hooks_never_fire_on_gpt_neox_and_queries_are_tapped_before_the_rotation(self):
        one, plain = example("gpt_neox")
        bridge, fired = host("gpt_neox", BRIDGE).model, []
        bridge.blocks[1].attn.hook_rot_q.register_forward_hook(lambda *_: fired.append(1))
        taps = own_pass(bridge, Lens(bridge), one, "query.1")
        assert not fired
        assert error(taps[1].activations[0], plain.activations["query.1"][0]) < 1e-12

    def test_a_hook_that_never_fires_is_an_error_and_no_silence(self):
        bridge = host("gpt_neox", BRIDGE).model
        lens = Lens(bridge)
        with (
            pytest.raises(SiteNeverFired, match=r"no tensor passed resid_post\.1; run the model inside"),
            lens.attach("resid_post.1"),
        ):
            tiny_model("gpt_neox")(torch.tensor([[1, 2, 3]]))

    def test_the_loss_of_a_bert_bridge_is_a_shifted_causal_one_and_ours_is_not(self):
        one, _ = example("bert")
        bridge = host("bert", BRIDGE).model
        logits = bridge(one.tokens[None], return_type="logits")
        shifted = torch.nn.functional.cross_entropy(logits[0, :-1], one.tokens[1:])
        with torch.no_grad():
            assert float(bridge(one.tokens[None], return_type="loss")) == pytest.approx(float(shifted), rel=1e-6)
        masked = MaskedLoss(mask_id=4, special_ids=frozenset(range(5)))
        ours, plain = (
            Lens(model, tokenizer()).measure(SEQUENCES, rank=2, loss=masked, progress=False).corpus
            for model in (bridge, tiny_model("bert"))
        )
        assert ours.loss_unit == "masked token"
        assert ours.loss == pytest.approx(plain.loss, rel=1e-12)

    @pytest.mark.skipif(MAJOR != 3, reason="a trap of TransformerLens 3")
    def test_left_padding_in_compatibility_mode_is_nan_in_version_3_and_refused(self):
        lens = Lens(host("gpt2", "bridge_compatibility").model)
        with pytest.raises(NonFiniteRows, match=r"NaN.*This batch is padded.*padding_side='right'.*batch_size=1"):
            lens.measure(SEQUENCES, rank=2, padding_side="left", batch_size=4, progress=False)
        assert lens.measure(SEQUENCES, rank=2, batch_size=4, progress=False).measurements

    @pytest.mark.parametrize("name", ["hook_resid_mid", "hook_mlp_in"])
    def test_the_middle_of_a_bert_goes_by_names_that_mean_other_tensors(self, name):
        bridge = host("bert", BRIDGE).model
        one, plain = example("bert")
        seen = []
        bridge.hook_dict[f"blocks.1.{name}"].register_forward_hook(lambda module, args, output: seen.append(output))
        taps = own_pass(bridge, Lens(bridge), one, "resid_mid.1")
        if name == "hook_resid_mid":
            assert error(seen[0][0], plain.activations["resid_mid.1"][0]) > 0.1
        assert error(taps[1].activations[0], plain.activations["resid_mid.1"][0]) < 1e-12
        with pytest.raises(ValueError, match=rf"blocks\.1\.{name}'.*(write resid_mid|write 'resid_mid' instead)"):
            Lens(bridge).resolve(f"blocks.1.{name}")

    def test_to_tokens_prepends_what_the_tokenizer_alone_does_not_and_the_report_says_so(self):
        bridge = host("gpt2", BRIDGE).model
        assert bridge.to_tokens("5 6 7").tolist() == [[1, 5, 6, 7]]
        assert tokenizer()("5 6 7")["input_ids"] == [5, 6, 7]
        own = Lens(bridge).corpus(["5 6 7"] * 2)
        plain = Lens(tiny_model("gpt2"), tokenizer()).corpus(["5 6 7"] * 2)
        assert own.sequences[0].tolist() == [1, 5, 6, 7]
        assert plain.sequences[0].tolist() == [5, 6, 7]
        assert "every sequence begins with the special token" in own.warnings(None)[-1]

    def test_processed_weights_are_another_basis_and_a_comparison_says_so(self):
        stored, processed = (
            Lens(host("gpt2", backend).model, name="tiny").measure(SEQUENCES, rank=2, progress=False)
            for backend in (BRIDGE, "bridge_compatibility")
        )
        assert abs(stored.of("query.1").energy.energy - processed.of("query.1").energy.energy) > 1e-3
        assert stored.corpus.loss == pytest.approx(processed.corpus.loss, rel=1e-6)
        (warning,) = compare(stored, processed, names=["as stored", "processed"]).warnings
        assert "the weights are of different kinds" in warning

    def test_the_persons_reset_hooks_leaves_our_taps_alone(self):
        one, plain = example("gpt2")
        bridge = host("gpt2", BRIDGE).model
        with Lens(bridge).attach("resid_post.1") as taps:
            bridge.reset_hooks()
            bridge(one.tokens[None], return_type="logits")
        assert error(taps[1].activations[0], plain.activations["resid_post.1"][0]) < 1e-12


@needs_hooked
class TestOnAHookedTransformer:
    def test_the_norm_hook_fires_three_times_and_the_attention_input_is_the_sum_of_its_parts(self):
        one, plain = example("gpt2")
        model, fired = host("gpt2", HOOKED).model, []
        model.blocks[1].ln1.hook_normalized.register_forward_hook(lambda *_: fired.append(1))
        taps = own_pass(model, Lens(model), one, "attention_input.1")
        assert len(fired) == 3
        assert error(taps[1].activations[0], plain.activations["attention_input.1"][0]) < 1e-12
        assert error(taps[1].gradients[0], plain.gradients["attention_input.1"][0]) < 1e-12

    def test_the_norm_hook_stands_before_or_after_weight_and_bias_by_version_and_is_refused_as_a_name(self):
        one, plain = example("gpt2")
        model, seen = host("gpt2", HOOKED).model, []
        model.blocks[1].ln1.hook_normalized.register_forward_hook(lambda module, args, output: seen.append(output))
        model(one.tokens[None], return_type="logits")
        same = error(seen[0][0], plain.activations["attention_input.1"][0]) < 1e-12
        assert same == (MAJOR == 2)
        with pytest.raises(ValueError, match=r"another tensor in another version.*write 'attention_input' instead"):
            Lens(model).resolve("blocks.1.ln1.hook_normalized")

    @pytest.mark.parametrize("mode", ["use_split_qkv_input", "use_attn_in"])
    def test_split_inputs_are_no_site_and_refused(self, mode):
        model = host("gpt2", HOOKED).model
        getattr(model, f"set_{mode}")(True)
        lens = Lens(model)
        with pytest.raises(
            SiteNeverFired, match=r"shape \(8, 7, 4, 32\) passes, and the site is \(batch, position, 32\)"
        ):
            lens.record(SEQUENCES, "attention_input.1", progress=False)
        assert lens.record(SEQUENCES, "resid_post.1", progress=False)

    def test_padding_that_equals_a_token_of_the_text_is_no_padding(self):
        """With a tokenizer that pads on the left, TransformerLens guesses the mask from the tokens; ours is given."""
        model = host("gpt2", HOOKED).model
        model.tokenizer.padding_side = "left"
        model.tokenizer.pad_token = model.tokenizer.bos_token
        tokens = [[1, 1, 7, 30, 12, 1]] * 2
        found, plain = (Lens(one).record(tokens, "resid_post.2", progress=False) for one in (model, tiny_model("gpt2")))
        for site, moments in found.items():
            expected = plain[site].gradients.second_moment()
            assert error(moments.gradients.second_moment(), expected) < 1e-10

    def test_processed_weights_are_seen_whoever_processed_them(self):
        assert Lens(host("gpt2", HOOKED).model).description.weights == "as stored"
        processed = Lens(host("gpt2", "hooked_transformer_processed").model).description.weights
        assert processed == "processed (norms folded, writing weights centred)"


@pytest.mark.skipif("hooked_encoder" not in backends_here(), reason="this TransformerLens has no HookedEncoder")
class TestOnAHookedEncoder:
    def test_its_resid_post_is_before_the_last_norm_and_ours_is_after(self):
        one, plain = example("bert")
        encoder, seen = host("bert", "hooked_encoder").model, []
        encoder.blocks[1].hook_resid_post.register_forward_hook(lambda module, args, output: seen.append(output))
        taps = own_pass(encoder, Lens(encoder), one, "resid_post.1")
        assert error(seen[0][0], plain.activations["resid_post.1"][0]) > 0.1
        assert error(taps[1].activations[0], plain.activations["resid_post.1"][0]) < 1e-12
        assert error(taps[1].gradients[0], plain.gradients["resid_post.1"][0]) < 1e-12

    @pytest.mark.parametrize("kind", ["resid_mid", "resid_post"])
    def test_its_own_names_for_tensors_before_the_norm_are_refused(self, kind):
        with pytest.raises(ValueError, match=rf"on a HookedEncoder this stands before the LayerNorm.*write {kind}"):
            Lens(host("bert", "hooked_encoder").model).resolve(f"blocks.1.hook_{kind}")

    def test_left_padding_is_refused_since_it_counts_positions_from_the_first_column(self):
        lens = Lens(host("bert", "hooked_encoder").model)
        loss = MaskedLoss(mask_id=4)
        with pytest.raises(ValueError, match=r"padding_side 'left'.*use 'right', which changes no result"):
            lens.measure(SEQUENCES, rank=2, loss=loss, padding_side="left", progress=False)
        with pytest.raises(ValueError, match=r"padding_side 'left'"):
            lens.record(SEQUENCES, padding_side="left", gradients=False, progress=False)
        (batch,) = lens.corpus(SEQUENCES).batches(12, padding_side="left")
        with pytest.raises(ValueError, match=r"padded on the left.*pad it on the right"):
            lens.model.run(batch)


class TestOnHuggingFace:
    @pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
    def test_the_last_hidden_state_is_after_the_final_norm_and_the_last_resid_post_before_it(self, family):
        model = tiny_model(family)
        tokens = examples_of(family)[0].tokens[None]
        with Lens(model).attach("resid_post.2") as taps:
            last = model(tokens, output_hidden_states=True).hidden_states[-1]
        norm = {"llama": "model.norm", "gpt2": "transformer.ln_f", "gpt_neox": "gpt_neox.final_layer_norm"}[family]
        assert torch.equal(model.get_submodule(norm)(taps[2].activations), last)
        assert error(taps[2].activations, last) > 0.1

    def test_a_mean_loss_depends_on_the_batch_and_ours_does_not(self):
        lens = Lens(tiny_model("gpt2"))
        sums = [lens.record(SEQUENCES, "resid_post.1", batch_size=size, progress=False) for size in (1, 4)]
        first, second = (next(iter(found.values())).gradients.second_moment() for found in sums)
        assert error(first, second) < 1e-12

        def mean(output, batch):
            return output.logits.log_softmax(-1)[..., 0].mean()

        means = [lens.record(SEQUENCES, "resid_post.1", batch_size=size, loss=mean, progress=False) for size in (1, 4)]
        first, second = (next(iter(found.values())).gradients.second_moment() for found in means)
        assert error(first, second) > 1

    @pytest.mark.parametrize("family", [name for name in ("roberta", "camembert") if name in FAMILIES])
    def test_roberta_counts_positions_from_its_padding_id_and_takes_real_tokens_for_padding(self, family):
        """A text that holds the padding id: the model's own guess of positions depends on it, ours does not."""
        model = tiny_model(family)
        tokens = torch.tensor([[7, 1, 30, 12]])
        places = torch.arange(4)[None] + model.config.pad_token_id + 1
        with Lens(model).attach("resid_post.2") as taps, torch.no_grad():
            model(tokens, position_ids=places)
        found = Lens(model).record([tokens[0].tolist()], "resid_post.2", gradients=False, progress=False)
        expected = taps[2].activations[0].mean(dim=0)
        assert error(next(iter(found.values())).activations.mean, expected) < 1e-12
        with Lens(model).attach("resid_post.2") as guessed, torch.no_grad():
            model(tokens)
        assert error(guessed[2].activations[0].mean(dim=0), expected) > 1e-3
