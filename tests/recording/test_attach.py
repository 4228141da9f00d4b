"""Taps for a person who runs the model: attached in a block, or handed to the host library as hooks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from conftest import FAMILIES, boot_bridge, tiny_model
from model_snapshot import GraphMemory, Snapshot
from plain_reference import assert_close, plain_pass, random_tokens, rows_of, summed_loss, turn_on_checkpointing

from tangent_lens.lens import Lens
from tangent_lens.models.protocol import TapPoint
from tangent_lens.recording.attach import HostHook, Taps
from tangent_lens.recording.moments import Moments
from tangent_lens.recording.taps import GradientNeverCame, SiteNeverFired
from tangent_lens.sites import Site

TOKENS = random_tokens(2, 9)
MASK = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
HOST_SITES = ("embedding", "resid_pre", "attention_input", "query", "key", "value", "mlp_input", "resid_post")


class Stop(Exception):
    """What a test raises inside a block."""


@pytest.fixture
def model():
    return tiny_model("llama")


@pytest.fixture
def lens(model):
    return Lens(model)


@pytest.fixture
def expected():
    return plain_pass(tiny_model("llama"), [TOKENS])


def backward(model, tokens=TOKENS):
    loss = summed_loss(model(input_ids=tokens).logits, tokens)
    loss.backward()
    return loss


class TestFindingATap:
    def test_by_layer_by_name_and_by_site(self, lens, model):
        with lens.attach("resid_post.*") as taps:
            model(TOKENS)
        assert taps[2] is taps["resid_post.2"] is taps[Site("resid_post", 2)]
        assert taps[2].site == Site("resid_post", 2)

    def test_as_a_mapping_in_the_order_of_the_forward_pass(self, lens):
        taps = lens.attach("resid_post.1, embedding, query.1")
        assert [site.name for site in taps] == ["embedding", "query.1", "resid_post.1"]
        assert len(taps) == 3 and "query.1" in taps and "key.1" not in taps
        assert taps.get("key.1") is None

    def test_a_site_named_twice_is_tapped_once(self, lens, model):
        with lens.attach(["resid_post.1", Site("resid_post", 1), "resid_post.-2"]) as taps:
            model(TOKENS)
        assert len(taps) == 1 and taps[1].activations.shape == (2, 9, 32)

    def test_a_layer_with_several_taps_asks_for_a_name(self, lens):
        with pytest.raises(KeyError, match=r"layer 1 has 2 taps; name one of resid_pre\.1, resid_post\.1"):
            lens.attach("resid_post.1, resid_pre.1")[1]

    @pytest.mark.parametrize("key", [0, "resid_post.0", Site("resid_pre", 1)])
    def test_a_site_that_is_not_tapped_lists_those_that_are(self, lens, key):
        with pytest.raises(KeyError, match=r"is not tapped; tapped: resid_post\.1, resid_post\.2"):
            lens.attach("resid_post.1:")[key]

    def test_a_layer_the_model_has_not_offers_the_nearest(self, lens):
        with pytest.raises(
            ValueError, match=r"resid_post\.7 .*3 layers, 0 to 2; the nearest: resid_post\.2, resid_post\."
        ):
            lens.attach("resid_post.7")

    def test_a_misspelt_site_offers_the_nearest(self, lens):
        with pytest.raises(ValueError, match=r"'resid_pots\.1' names no site; did you mean resid_post"):
            lens.attach("resid_pots.1")

    def test_nothing_selected_is_refused(self, lens):
        with pytest.raises(ValueError, match=r"no site selected; name at least one"):
            lens.attach([])

    def test_unknown_keep_names_both_choices(self, lens):
        with pytest.raises(ValueError, match=r"keep='all' must be 'rows' \(everything\) or 'moments' \(sums only\)"):
            lens.attach("resid_post.1", keep="all")


class TestReading:
    def test_activations_and_gradients(self, lens, model, expected):
        with lens.attach("resid_post.1, key.0", gradients=True) as taps:
            backward(model)
        for site, tap in taps.items():
            assert_close(rows_of(tap.activations), expected.activations[site.name], 1e-12)
            assert_close(rows_of(tap.gradients), expected.gradients[site.name], 1e-12)
            assert not tap.activations.requires_grad and not tap.gradients.requires_grad

    def test_rows_are_there_inside_the_block_too(self, lens, model):
        with lens.attach("resid_post.1", gradients=True) as taps:
            loss = summed_loss(model(TOKENS).logits, TOKENS)
            assert taps[1].activations.shape == (2, 9, 32)
            loss.backward()
            assert taps[1].gradients.shape == (2, 9, 32)

    @pytest.mark.parametrize("keep", ["rows", "moments"])
    def test_moments_of_all_positions(self, lens, model, expected, keep):
        with lens.attach("resid_post.1", gradients=True, keep=keep) as taps:
            backward(model)
        wanted = Moments.of(expected.activations["resid_post.1"], expected.gradients["resid_post.1"])
        found = taps[1].moments()
        assert found.activations.count == found.gradients.count == 18
        assert_close(found.activations.scatter, wanted.activations.scatter, 1e-10)
        assert_close(found.gradients.second_moment(), wanted.gradients.second_moment(), 1e-10)
        assert_close(found.activations.mean, wanted.activations.mean, 1e-10)

    @pytest.mark.parametrize("keep", ["rows", "moments"])
    @pytest.mark.parametrize("mask", [MASK, MASK.bool()], ids=["numbers", "booleans"])
    def test_moments_leave_masked_positions_out(self, lens, model, expected, keep, mask):
        with lens.attach("resid_post.1", gradients=True, keep=keep) as taps:
            taps.use_mask(mask)
            backward(model)
        kept = MASK.bool().flatten()
        x, g = (rows["resid_post.1"][kept] for rows in (expected.activations, expected.gradients))
        found = taps[1].moments()
        assert found.activations.count == found.gradients.count == 14
        assert_close(found.activations.second_moment(), x.T @ x, 1e-10)
        assert_close(found.gradients.second_moment(), g.T @ g, 1e-10)

    def test_each_forward_pass_has_its_own_mask(self, lens, model):
        with lens.attach("resid_post.1") as taps:
            taps.use_mask(MASK)
            model(TOKENS)
            taps.use_mask(None)
            model(TOKENS)
        assert taps[1].moments().activations.count == 14 + 18
        assert taps[1].activations.shape == (4, 9, 32)

    @pytest.mark.parametrize("keep", ["rows", "moments"])
    def test_a_mask_of_another_shape_names_both(self, lens, model, keep):
        with (
            pytest.raises(ValueError, match=r"mask of shape \(2, 9\) does not fit activations \(2, 5, 32\)"),
            lens.attach("resid_post.1", keep=keep) as taps,
        ):
            taps.use_mask(MASK)
            model(TOKENS[:, :5])
            taps[1].moments()

    def test_several_forward_passes_stand_one_under_the_other(self, lens, model, expected):
        with lens.attach("resid_post.1", gradients=True) as taps:
            backward(model, TOKENS[:1])
            backward(model, TOKENS[1:])
        assert taps[1].fired == 2
        assert_close(rows_of(taps[1].activations), expected.activations["resid_post.1"], 1e-6)
        assert_close(rows_of(taps[1].gradients), expected.gradients["resid_post.1"], 1e-6)
        assert taps[1].moments().gradients.count == 18

    def test_different_lengths_cannot_be_stacked_but_have_moments(self, lens, model):
        with lens.attach("resid_post.1", gradients=True) as taps:
            backward(model, TOKENS)
            backward(model, TOKENS[:, :5])
        for read in (lambda: taps[1].activations, lambda: taps[1].gradients):
            with pytest.raises(
                ValueError, match=r"passes had \[5, 9\] positions and cannot be stacked; read tap\.batches"
            ):
                read()
        assert [tuple(activations.shape) for activations, _ in taps[1].batches] == [(2, 9, 32), (2, 5, 32)]
        assert taps[1].moments().activations.count == taps[1].moments().gradients.count == 28

    def test_a_second_backward_pass_adds_to_the_first(self, lens, model, expected):
        with lens.attach("resid_post.1", gradients=True) as taps:
            loss = summed_loss(model(TOKENS).logits, TOKENS)
            loss.backward(retain_graph=True)
            (2 * loss).backward()
        assert_close(rows_of(taps[1].gradients), 3 * expected.gradients["resid_post.1"], 1e-12)
        assert taps[1].moments().gradients.count == 18

    def test_kept_sums_agree_with_kept_rows_on_a_second_backward_pass_or_refuse(self, lens, model, expected):
        """The sums of g1 g1^T + g2 g2^T over 36 rows are not those of (g1 + g2)(g1 + g2)^T over 18."""
        try:
            with lens.attach("resid_post.1", gradients=True, keep="moments") as taps:
                loss = summed_loss(model(TOKENS).logits, TOKENS)
                loss.backward(retain_graph=True)
                loss.backward()
            found = taps[1].moments().gradients
        except RuntimeError as refusal:
            assert "backward" in str(refusal)
            return
        g = 2 * expected.gradients["resid_post.1"]
        assert found.count == 18
        assert_close(found.second_moment(), g.T @ g, 1e-10)

    def test_only_moments_kept_has_no_rows(self, lens, model):
        with lens.attach("resid_post.1", gradients=True, keep="moments") as taps:
            backward(model)
        for read in (lambda: taps[1].activations, lambda: taps[1].gradients, lambda: taps[1].batches):
            with pytest.raises(ValueError, match=r"only moments were kept; attach with keep='rows' to read rows"):
                read()

    def test_bfloat16_rows_stay_and_their_moments_are_wide(self):
        model = tiny_model("llama", dtype=torch.bfloat16)
        with Lens(model).attach("resid_post.1", gradients=True) as taps:
            model(TOKENS).logits.float().sum().backward()
        assert taps[1].activations.dtype == taps[1].gradients.dtype == torch.bfloat16
        moments = taps[1].moments()
        assert moments.activations.scatter.dtype == torch.float64
        rows = rows_of(taps[1].activations).double()
        assert_close(moments.activations.second_moment(), rows.T @ rows, 1e-5)

    def test_every_step_of_a_generation_passes(self, lens, model):
        with lens.attach("resid_post.1") as taps:
            model.generate(TOKENS, max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None)
        assert [tuple(activations.shape) for activations, _ in taps[1].batches] == [(2, 9, 32), (2, 1, 32), (2, 1, 32)]
        assert taps[1].moments().activations.count == 22


class TestWhatNeverCame:
    def test_a_block_in_which_the_model_never_ran(self, lens):
        with (
            pytest.raises(SiteNeverFired, match=r"no tensor passed resid_post\.1; run the model inside the with block"),
            lens.attach("resid_post.1"),
        ):
            pass

    def test_another_model_running_does_not_count(self, lens):
        with pytest.raises(SiteNeverFired, match="on the object that the lens holds"), lens.attach("resid_post.1"):
            tiny_model("llama")(TOKENS)

    def test_only_the_silent_sites_are_named(self, model):
        lens = Lens(model)
        model.model.layers[2].mlp.forward = lambda hidden: hidden
        with (
            pytest.raises(SiteNeverFired, match=r"no tensor passed mlp_input\.2; run"),
            lens.attach("mlp_input.1, mlp_input.2"),
        ):
            model(TOKENS)

    def test_reading_before_the_model_ran(self, lens):
        taps = lens.attach("resid_post.1")
        for read in (lambda: taps[1].activations, lambda: taps[1].moments(), lambda: taps[1].batches):
            with pytest.raises(SiteNeverFired, match=r"resid_post\.1: no forward pass came by; run the model inside"):
                read()

    def test_gradients_that_were_not_asked_for(self, lens, model):
        with lens.attach("resid_post.1") as taps:
            backward(model)
        with pytest.raises(GradientNeverCame, match=r"gradients were not asked for; attach with gradients=True"):
            taps[1].gradients  # noqa: B018

    def test_no_backward_pass(self, lens, model):
        with lens.attach("resid_post.1", gradients=True) as taps:
            model(TOKENS)
        with pytest.raises(GradientNeverCame, match=r"1 of 1 forward passes brought no gradient; call \.backward\(\)"):
            taps[1].gradients  # noqa: B018
        assert taps[1].moments().gradients.count == 0

    def test_a_loss_that_depends_on_nothing_of_the_site(self, lens, model):
        with lens.attach("resid_post.0, resid_post.1", gradients=True) as taps:
            output = model(TOKENS, output_hidden_states=True)
            output.hidden_states[1].sum().backward()
        assert taps[0].gradients.shape == (2, 9, 32)
        with pytest.raises(GradientNeverCame, match=r"resid_post\.1: 1 of 1 .*on a loss that depends on this site"):
            taps[1].gradients  # noqa: B018

    def test_one_of_two_passes_without_backward(self, lens, model):
        with lens.attach("resid_post.1", gradients=True) as taps:
            backward(model)
            model(TOKENS)
        with pytest.raises(GradientNeverCame, match=r"1 of 2 forward passes brought no gradient"):
            taps[1].gradients  # noqa: B018

    def test_a_model_run_under_no_grad(self, lens, model):
        before = Snapshot.of(model)
        with (
            pytest.raises(GradientNeverCame, match=r"ran under torch\.no_grad\(\)"),
            lens.attach("resid_post.1", gradients=True),
            torch.no_grad(),
        ):
            model(TOKENS)
        before.assert_unchanged(model)

    def test_frozen_parameters_name_the_way_out_and_the_way_works(self, lens, model, expected):
        model.requires_grad_(False)
        with (
            pytest.raises(GradientNeverCame, match=r"frozen; use `with lens\.gradients\(\):` around both passes"),
            lens.attach("resid_post.1", gradients=True),
        ):
            backward(model)
        with lens.gradients(), lens.attach("resid_post.1", gradients=True) as taps:
            backward(model)
        assert_close(rows_of(taps[1].gradients), expected.gradients["resid_post.1"], 1e-12)
        assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())


class TestAttachingAndLeaving:
    def test_no_hook_stays(self, lens, model):
        model.model.layers[1].register_forward_hook(lambda *args: None)
        before = Snapshot.of(model)
        with lens.attach(lens.sites) as taps, torch.no_grad():
            assert Snapshot.of(model).hooks != before.hooks
            model(TOKENS)
        before.assert_unchanged(model)
        assert all(tap.fired == 1 for tap in taps.values())

    def test_no_hook_stays_after_an_exception_and_the_exception_is_the_persons(self, lens, model):
        before = Snapshot.of(model)
        with pytest.raises(Stop), lens.attach(lens.sites, gradients=True):
            raise Stop
        before.assert_unchanged(model)

    @pytest.mark.parametrize("where", ["forward", "backward"])
    def test_no_hook_stays_when_a_hook_of_the_person_raises(self, lens, model, where):
        def raising(*args):
            raise Stop

        layer = model.model.layers[1]
        (layer.register_forward_hook if where == "forward" else layer.register_full_backward_hook)(raising)
        hooks = Snapshot.of(model).hooks
        with pytest.raises(Stop), lens.attach(lens.sites, gradients=True):
            backward(model)
        assert Snapshot.of(model).hooks == hooks

    def test_what_passes_after_the_block_is_not_seen(self, lens, model):
        with lens.attach("resid_post.1") as taps:
            model(TOKENS)
        model(TOKENS)
        assert taps[1].fired == 1 and taps[1].activations.shape == (2, 9, 32)

    def test_a_gradient_that_comes_after_the_block_belongs_to_its_pass(self, lens, model, expected):
        with lens.attach("resid_post.1", gradients=True) as taps:
            loss = summed_loss(model(TOKENS).logits, TOKENS)
        loss.backward()
        assert_close(rows_of(taps[1].gradients), expected.gradients["resid_post.1"], 1e-12)

    def test_attached_twice_at_once_is_refused(self, lens, model):
        taps = lens.attach("resid_post.1")
        with taps:
            with pytest.raises(RuntimeError, match=r"attached already; make new ones with lens\.attach"), taps:
                pass
            model(TOKENS)
        assert taps[1].fired == 1

    def test_used_taps_go_on_where_they_stopped(self, lens, model):
        taps = lens.attach("resid_post.1")
        for tokens in (TOKENS[:1], TOKENS[1:]):
            with taps:
                model(tokens)
        assert taps[1].fired == 2 and taps[1].activations.shape == (2, 9, 32)

    def test_used_taps_notice_a_block_in_which_the_model_never_ran(self, lens, model):
        taps = lens.attach("resid_post.1")
        with taps:
            model(TOKENS)
        with pytest.raises(SiteNeverFired, match=r"no tensor passed resid_post\.1"), taps:
            pass

    def test_two_attached_at_the_same_site_see_the_same(self, model, expected):
        first, second = Lens(model), Lens(model)
        with first.attach("resid_post.1", gradients=True) as one, second.attach("resid_post.1", gradients=True) as two:
            backward(model)
        for taps in (one, two):
            assert_close(rows_of(taps[1].activations), expected.activations["resid_post.1"], 1e-12)
            assert_close(rows_of(taps[1].gradients), expected.gradients["resid_post.1"], 1e-12)

    def test_a_tap_under_a_whole_recording_sees_its_passes_and_disturbs_nothing(self, model):
        lens, other = Lens(model), Lens(model)
        alone = other.record(TOKENS, "resid_post.1", progress=False)[Site("resid_post", 1)]
        with lens.attach("resid_post.1") as taps:
            found = other.record(TOKENS, "resid_post.1", progress=False)[Site("resid_post", 1)]
        assert torch.equal(found.gradients.scatter, alone.gradients.scatter)
        assert taps[1].fired == 1

    def test_no_graph_stays_alive_because_of_taps(self, lens, model):
        with GraphMemory() as memory, lens.attach(lens.sites, gradients=True) as taps:
            for _ in range(3):
                backward(model)
                assert memory.peak > 0 and memory.live == 0
        assert taps["resid_post.1"].fired == 3

    def test_an_activation_changed_in_place_later_is_kept_as_it_passed(self, lens, model, expected):
        model.model.layers[2].register_forward_pre_hook(adding_in_place)
        with lens.attach("resid_post.1") as taps, torch.no_grad():
            model(TOKENS)
        assert_close(rows_of(taps[1].activations), expected.activations["resid_post.1"], 1e-12)


def adding_in_place(module, args):
    args[0].add_(1)


class TestGradientCheckpointing:
    """Blocks that run again during the backward pass: their tensors pass twice."""

    @pytest.mark.parametrize("gradients", [False, True])
    @pytest.mark.parametrize("keep", ["rows", "moments"])
    @pytest.mark.parametrize("site", ["resid_post.1", "query.1", "resid_pre.1"])
    def test_numbers_are_right_or_refused(self, site, keep, gradients, expected):
        model = tiny_model("llama")
        turn_on_checkpointing(model)
        model.train()
        lens = Lens(model)
        try:
            with lens.attach(site, gradients=gradients, keep=keep) as taps:
                backward(model)
            moments = taps[site].moments()
            if gradients and keep == "rows":
                taps[site].gradients  # noqa: B018
        except (SiteNeverFired, GradientNeverCame) as refusal:
            assert "checkpointing" in str(refusal)
            return
        x, g = expected.activations[site], expected.gradients[site]
        assert moments.activations.count == len(x)
        assert_close(moments.activations.second_moment(), x.T @ x, 1e-6)
        if gradients:
            assert_close(moments.gradients.second_moment(), g.T @ g, 1e-6)


class TestHooksOfTransformerLens:
    """The same taps as ``(name, function)`` pairs, registered by the person in the bridge's own way."""

    def bridge_and_hooks(self, family, selection, tokenizer, **options):
        bridge = boot_bridge(tiny_model(family), tokenizer)
        lens = Lens(bridge)
        return bridge, lens, lens.hooks(selection, **options)

    def attached(self, lens, selection):
        with lens.attach(selection, gradients=True) as taps:
            lens.model.module(TOKENS, return_type="loss").backward()
        return taps

    @pytest.mark.parametrize("way", ["run_with_hooks", "hooks"])
    @pytest.mark.parametrize("kind", HOST_SITES)
    @pytest.mark.parametrize("family", FAMILIES)
    def test_they_see_what_attached_taps_see(self, family, kind, way, tokenizer):
        selection = kind if kind == "embedding" else f"{kind}.1"
        bridge, lens, hooks = self.bridge_and_hooks(family, selection, tokenizer, gradients=True)
        taps = self.attached(lens, selection)
        if way == "run_with_hooks":
            bridge.run_with_hooks(TOKENS, fwd_hooks=hooks, return_type="loss").backward()
        else:
            with bridge.hooks(fwd_hooks=hooks):
                bridge(TOKENS, return_type="loss").backward()
        (hook,) = hooks
        assert_close(hook.tap.activations, taps[hook.site].activations, 1e-12, f"{hook.name} value")
        assert_close(hook.tap.gradients, taps[hook.site].gradients, 1e-12, f"{hook.name} gradient")
        assert hook.tap.moments().gradients.count == 18

    def test_a_residual_between_attention_and_mlp(self, tokenizer):
        bridge, lens, hooks = self.bridge_and_hooks("gpt2", "resid_mid.1", tokenizer, gradients=True)
        taps = self.attached(lens, "resid_mid.1")
        bridge.run_with_hooks(TOKENS, fwd_hooks=hooks, return_type="loss").backward()
        assert_close(hooks[0].tap.gradients, taps[1].gradients, 1e-12)

    def test_activations_alone_with_logits_returned(self, tokenizer):
        bridge, _, hooks = self.bridge_and_hooks("gpt2", "resid_post.*", tokenizer)
        logits = bridge.run_with_hooks(TOKENS, fwd_hooks=hooks, return_type="logits")
        assert torch.equal(logits, bridge(TOKENS, return_type="logits"))
        assert [hook.tap.activations.shape for hook in hooks] == [(2, 9, 32)] * 3

    def test_they_can_be_used_again_and_add_up(self, tokenizer):
        bridge, _, hooks = self.bridge_and_hooks("gpt2", "resid_post.1", tokenizer, gradients=True)
        for _ in range(2):
            bridge.run_with_hooks(TOKENS, fwd_hooks=hooks, return_type="loss").backward()
        assert hooks[0].tap.fired == 2
        assert hooks[0].tap.gradients.shape == (4, 9, 32)

    def test_the_bridge_keeps_none_of_them(self, tokenizer):
        bridge, _, hooks = self.bridge_and_hooks("gpt2", "resid_post.*", tokenizer)
        bridge(TOKENS)
        before = Snapshot.of(bridge).hooks
        bridge.run_with_hooks(TOKENS, fwd_hooks=hooks)
        assert Snapshot.of(bridge).hooks == before
        bridge(TOKENS)
        assert all(hook.tap.fired == 1 for hook in hooks)

    def test_names_are_the_bridges_own(self, tokenizer):
        bridge, lens, _ = self.bridge_and_hooks("llama", "resid_post.1", tokenizer)
        hooks = lens.hooks(lens.sites)
        assert len(hooks) == len(lens.sites)
        assert all(hook.name in bridge.hook_dict for hook in hooks)


class TestHooksOfHuggingFace:
    def test_register_and_remove(self, lens, model, expected):
        before = Snapshot.of(model)
        (hook,) = lens.hooks("resid_post.1", gradients=True)
        handle = hook.register()
        backward(model)
        handle.remove()
        assert Snapshot.of(model).hooks == before.hooks
        model(TOKENS)
        assert_close(rows_of(hook.tap.activations), expected.activations["resid_post.1"], 1e-12)
        assert_close(rows_of(hook.tap.gradients), expected.gradients["resid_post.1"], 1e-12)
        assert hook.tap.fired == 1

    def test_the_function_registers_on_the_module_of_its_name(self, lens, model, expected):
        modules = dict(model.named_modules())
        for selection, with_kwargs in (("query.1", None), ("resid_pre.1", True), ("mlp_input.1", False)):
            ((name, function),) = hooks = lens.hooks(selection)
            if with_kwargs is None:
                handle = modules[name].register_forward_hook(function)
            else:
                handle = modules[name].register_forward_pre_hook(function, with_kwargs=with_kwargs)
            model(TOKENS)
            handle.remove()
            assert_close(rows_of(hooks[0].tap.activations), expected.activations[selection], 1e-12, selection)

    def test_a_hook_unpacks_as_name_and_function(self, lens):
        hook = lens.hooks("resid_post.1")[0]
        name, function = hook
        assert (name, function) == (hook.name, hook.function)
        assert name == "model.layers.1"

    @pytest.mark.parametrize("keep", ["rows", "moments"])
    def test_take_reads_and_empties(self, lens, model, keep):
        (hook,) = lens.hooks("resid_post.1", gradients=True, keep=keep)
        handle = hook.register()
        backward(model)
        first = hook.take()
        assert first.moments().gradients.count == 18
        assert hook.tap.fired == 0
        backward(model, TOKENS[:, :5])
        assert hook.take().moments().gradients.count == 10
        assert first.moments().gradients.count == 18
        handle.remove()

    @pytest.mark.parametrize("keep", ["rows", "moments"])
    def test_a_mask_leaves_positions_out_also_after_take(self, lens, model, keep):
        (hook,) = lens.hooks("resid_post.1", keep=keep)
        hook.use_mask(MASK)
        handle = hook.register()
        for _ in range(2):
            model(TOKENS)
            assert hook.take().moments().activations.count == 14
        handle.remove()

    def test_a_gradient_that_comes_after_take_belongs_to_what_was_taken(self, lens, model):
        (hook,) = lens.hooks("resid_post.1", gradients=True)
        handle = hook.register()
        loss = summed_loss(model(TOKENS).logits, TOKENS)
        taken = hook.take()
        loss.backward()
        handle.remove()
        assert taken.gradients.shape == (2, 9, 32)

    def test_what_they_say_of_themselves(self, lens, model):
        (hook,) = lens.hooks("resid_post.1", gradients=True)
        handle = hook.register()
        backward(model)
        handle.remove()
        assert repr(hook) == "HostHook('model.layers.1', Tap(resid_post.1: 1 forward passes, 1 gradients))"


class TestPlacesThatTheHostLibraryDoesNotKnow:
    """A module is no hook point of TransformerLens: its name would be looked up in vain."""

    SITE = Site("attention_input", 1)

    def point(self, **options):
        torch.manual_seed(0)
        return TapPoint(torch.nn.Linear(4, 4), "input", "blocks.1.attn", arguments=("input",), **options)

    @pytest.mark.parametrize("keep", ["rows", "moments"])
    def test_they_cannot_be_hooked_and_the_sentence_says_how_to_tap_them(self, keep):
        sentence = r"attention_input\.1 is no hook point .*\(blocks\.1\.attn is a module\).*lens\.attach\('attention_input\.1'\)"
        with pytest.raises(ValueError, match=sentence):
            HostHook(self.SITE, self.point(hookable=False), gradients=False, keep=keep)

    def test_a_hook_point_can(self):
        hook = HostHook(self.SITE, point := self.point(), gradients=False, keep="rows")
        handle = hook.register()
        point.module(TOKENS[:, :8].reshape(2, 2, 4).float())
        handle.remove()
        assert hook.name == "blocks.1.attn" and hook.tap.fired == 1

    def test_they_can_be_attached_to(self):
        point = self.point(hookable=False, width=4)
        taps = Taps(SimpleNamespace(tap_point=lambda site: point), [self.SITE], gradients=True)
        rows = torch.ones(2, 3, 4, requires_grad=True)
        with taps:
            point.module(rows).square().sum().backward()
        assert torch.equal(taps[1].activations, rows.detach()) and torch.equal(taps[1].gradients, rows.grad)
