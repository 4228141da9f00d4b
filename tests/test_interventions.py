"""Interventions: what a changed site does to the model, against plain hooks written here, on every library installed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conformance.backends import NotOffered, backends_here, host
from conftest import tiny_model
from model_snapshot import Snapshot
from torch import nn

import tangent_lens as tln
from tangent_lens.measures.ablation import measure_ablation
from tangent_lens.recording.taps import SiteNeverFired
from tangent_lens.sites import Site
from tangent_lens.subspaces.interventions import keep, remove, steer
from tangent_lens.subspaces.subspace import Subspace

TOKENS = torch.tensor([[5, 17, 40, 8, 33, 90, 21], [61, 9, 9, 72, 14, 30, 55]])
PLACES = torch.arange(7).expand(2, -1)
FAMILIES = ("gpt2", "gpt_neox_sequential", "llama", "phi3", "olmo2", "bert")


def subspace_in(width, rank=3, seed=0, origin=None):
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(width, rank + 1, generator=generator, dtype=torch.float64)
    return Subspace(torch.linalg.qr(draw[:, :rank]).Q, draw[:, rank], origin or {})


def logits(hosted):
    with torch.no_grad():
        return hosted.logits(TOKENS, None, PLACES)


@pytest.fixture
def model():
    return tiny_model("llama")


@pytest.fixture
def lens(model):
    return tln.Lens(model)


def run(model):
    with torch.no_grad():
        return model(TOKENS).logits


class TestEveryLibrary:
    @pytest.mark.parametrize("backend", backends_here())
    @pytest.mark.parametrize("family", FAMILIES)
    def test_what_the_site_reads_has_no_part_inside_and_nothing_stays(self, family, backend):
        hosted = offered(family, backend)
        lens = tln.Lens(hosted.model)
        before, snapshot = logits(hosted), Snapshot.of(hosted.model)
        for site in (one for one in lens.sites if one.layer in (None, 1)):
            tangent = subspace_in(lens.width(site))
            with remove(lens, {site: tangent}), lens.attach(site) as taps:
                changed = logits(hosted)
            assert float(tangent.coordinates(taps[site].activations.flatten(0, 1)).abs().max()) < 1e-12
            assert float((changed - before).abs().max()) > 1e-3
        snapshot.assert_unchanged(hosted.model)
        assert torch.equal(logits(hosted), before)

    @pytest.mark.parametrize("backend", [one for one in backends_here() if one != "huggingface"])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_steering_counts_once(self, family, backend):
        """Where a row is handed over in several places, each reader sees it moved once: as on the plain model."""
        if backend in ("bridge_compatibility", "hooked_transformer_processed", "hooked_encoder"):
            pytest.skip("its weights, and so its activations, are in another basis")
        hosted, plain = offered(family, backend), offered(family, "huggingface")
        if float((logits(hosted) - logits(plain)).abs().max()) > 1e-4:
            pytest.skip("this library computes something else for this family")
        lens, reference = tln.Lens(hosted.model), tln.Lens(plain.model)
        for site in (one for one in lens.sites if one.layer == 1 and one in reference.sites):
            tangent = subspace_in(lens.width(site))
            with steer(lens, {site: tangent}, 2.5):
                found = logits(hosted)
            with steer(reference, {site: tangent}, 2.5):
                expected = logits(plain)
            assert float((found - expected).abs().max()) < 1e-4, site

    @pytest.mark.parametrize("backend", backends_here())
    @pytest.mark.parametrize("family", FAMILIES)
    def test_moved_rows_are_read_moved_by_that_much(self, family, backend):
        hosted = offered(family, backend)
        lens = tln.Lens(hosted.model)
        for site in (one for one in lens.sites if one.layer == 1):
            tangent = subspace_in(lens.width(site))
            with lens.attach(site, keep="moments") as taps:
                logits(hosted)
            with steer(lens, {site: tangent}, 2.5), lens.attach(site, keep="moments") as moved:
                logits(hosted)
            shift = moved[site].moments().activations.mean - taps[site].moments().activations.mean
            assert float((shift - 2.5 * tangent.basis[:, 0]).abs().max()) < 1e-10, site


def offered(family, backend):
    try:
        return host(family, backend)
    except NotOffered as reason:
        pytest.skip(str(reason))


def plainly(model, module, change, *, at_input=False):
    """The logits of a model whose module has its output, or its first argument, changed."""
    if at_input:
        handle = module.register_forward_pre_hook(lambda module, args: (change(args[0]), *args[1:]))
    else:
        handle = module.register_forward_hook(lambda module, args, output: change(output))
    try:
        return run(model)
    finally:
        handle.remove()


class TestAgainstPlainHooks:
    def test_a_block_output(self, lens, model):
        tangent = subspace_in(32)
        q, c = tangent.basis, tangent.centre
        expected = plainly(model, model.model.layers[1], lambda x: x - (x - c) @ q @ q.T)
        with tangent.remove(lens, "resid_post.1"):
            assert float((run(model) - expected).abs().max()) < 1e-12
        expected = plainly(model, model.model.layers[1], lambda x: x - x @ q @ q.T)
        with tangent.remove(lens, "resid_post.1", about="zero"):
            assert float((run(model) - expected).abs().max()) < 1e-12
        expected = plainly(model, model.model.layers[1], lambda x: c + (x - c) @ q @ q.T)
        with tangent.keep(lens, "resid_post.1"):
            assert float((run(model) - expected).abs().max()) < 1e-12
        expected = plainly(model, model.model.layers[1], lambda x: x + 3 * q[:, 0] - q[:, 2])
        with tangent.steer(lens, torch.tensor([3.0, 0, -1]), "resid_post.1"):
            assert float((run(model) - expected).abs().max()) < 1e-12

    @pytest.mark.parametrize(("site", "norm"), [("attention_input", "input"), ("mlp_input", "post_attention")])
    def test_every_map_that_reads_a_norm(self, lens, model, site, norm):
        tangent = subspace_in(32)
        module = getattr(model.model.layers[1], f"{norm}_layernorm")
        expected = plainly(model, module, lambda x: x - tangent.project(x))
        with tangent.remove(lens, f"{site}.1"):
            # The norm itself comes out of float32 in transformers.
            assert float((run(model) - expected).abs().max()) < 1e-5

    @pytest.mark.parametrize("family", ["gpt2", "gpt_neox_sequential"])
    def test_the_middle_of_a_block_moves_the_path_around_the_mlp_too(self, family):
        """Moved by v: the norm reads mid + v, and what the block adds to is mid + v."""
        model, tangent = tiny_model(family), subspace_in(32)
        lens, v = tln.Lens(model), 2.5 * tangent.basis[:, 0]
        block = (model.transformer.h if family == "gpt2" else model.gpt_neox.layers)[1]
        norm = block.ln_2 if family == "gpt2" else block.post_attention_layernorm

        def further(module, args, output):
            # transformers 4 hands a tuple on here.
            return (output[0] + v, *output[1:]) if isinstance(output, tuple) else output + v

        behind = block.register_forward_hook(further)
        expected = plainly(model, norm, lambda x: x + v, at_input=True)
        behind.remove()
        with tangent.steer(lens, 2.5, "resid_mid.1"):
            assert float((run(model) - expected).abs().max()) < 1e-11

    def test_fused_columns_leave_the_others(self):
        model = tiny_model("gpt2")
        lens, tangent = tln.Lens(model), subspace_in(32)
        seen = []
        with tangent.remove(lens, "key.1"):
            handle = model.transformer.h[1].attn.c_attn.register_forward_hook(lambda m, a, out: seen.append(out))
            run(model)
            handle.remove()
        handle = model.transformer.h[1].attn.c_attn.register_forward_hook(lambda m, a, out: seen.append(out))
        run(model)
        handle.remove()
        changed, plain = seen
        assert torch.equal(changed[..., :32], plain[..., :32]) and torch.equal(changed[..., 64:], plain[..., 64:])
        assert float((changed[..., 32:64] - plain[..., 32:64] + tangent.project(plain[..., 32:64])).abs().max()) < 1e-12


class TestWhatMustHold:
    def test_nothing_is_changed_by_the_whole_space_or_a_step_of_zero(self, lens, model):
        before, whole = run(model), subspace_in(32, rank=32)
        for block in (whole.keep(lens, "resid_post.1"), whole.steer(lens, 0.0, "resid_post.1")):
            with block:
                assert float((run(model) - before).abs().max()) < 1e-5

    def test_removing_the_whole_space_leaves_the_centre(self, lens, model):
        whole = subspace_in(32, rank=32)
        with whole.remove(lens, "resid_post.1"), lens.attach("resid_post.1") as taps:
            run(model)
        assert float((taps[1].activations - whole.centre).abs().max()) < 1e-12

    def test_the_parts_add_up(self, lens, model):
        tangent, rows = subspace_in(32), []
        for block in (tangent.remove(lens, "resid_post.1"), tangent.keep(lens, "resid_post.1")):
            with block, lens.attach("resid_post.1") as taps:
                run(model)
            rows.append(taps[1].activations - tangent.centre)
        with lens.attach("resid_post.1") as taps:
            run(model)
        assert float((sum(rows) + tangent.centre - taps[1].activations).abs().max()) < 1e-12

    def test_nested_blocks_act_one_after_the_other(self, lens, model):
        one, two = subspace_in(32), subspace_in(32, seed=1)
        expected = plainly(model, model.model.layers[1], lambda x: x - one.project(x) - two.project(x - one.project(x)))
        with one.remove(lens, "resid_post.1"), two.remove(lens, "resid_post.1"):
            assert float((run(model) - expected).abs().max()) < 1e-11

    def test_hooks_go_after_an_exception(self, lens, model):
        snapshot = Snapshot.of(model)
        with pytest.raises(ZeroDivisionError), subspace_in(32).remove(lens, "mlp_input.*"):
            run(model)
            raise ZeroDivisionError
        snapshot.assert_unchanged(model)

    @pytest.mark.parametrize("site", ["resid_mid.1", "resid_post.1", "query.1", "mlp_input.1"])
    def test_gradients_flow_through(self, site):
        """Against a difference of losses."""
        model = tiny_model("gpt2")
        lens, tangent = tln.Lens(model), subspace_in(32)
        weight = model.transformer.h[0].mlp.c_fc.weight
        with tangent.remove(lens, site):
            model(TOKENS).logits.square().sum().backward()
            slope, step = float(weight.grad[2, 3]), 1e-5
            losses = []
            for sign in (1, -1):
                with torch.no_grad():
                    weight[2, 3] += sign * step
                    losses.append(float(model(TOKENS).logits.square().sum()))
                    weight[2, 3] -= sign * step
        assert slope == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-5)

    def test_half_precision_stays(self):
        model = tiny_model("llama", dtype=torch.bfloat16)
        with subspace_in(32).remove(tln.Lens(model), "resid_mid.1"):
            assert run(model).dtype == torch.bfloat16

    def test_a_subspace_knows_its_site(self, lens, model):
        tangent = subspace_in(32, origin={"fitted_on": "activations at resid_post.1"})
        with tangent.remove(lens, "resid_post.1"):
            expected = run(model)
        with tangent.remove(lens):
            assert torch.equal(run(model), expected)

    def test_a_module_of_any_kind(self):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
        lens, tangent = tln.Lens(module, sites={"middle": "1"}), subspace_in(6)
        x = torch.randn(5, 4, dtype=torch.float64)
        hidden = module[1](module[0](x))
        with keep(lens, {"middle": tangent}):
            assert torch.allclose(module(x), module[2](tangent.centre + tangent.project(hidden)), atol=1e-12)


class TestWhatIsRefused:
    def test_a_subspace_that_does_not_know_its_site(self, lens):
        with pytest.raises(ValueError, match="does not know its site"):
            subspace_in(32).remove(lens)

    def test_another_width(self, lens):
        with pytest.raises(ValueError, match="rows of width 32 pass there, and the subspace lives in 8 dimensions"):
            subspace_in(8).remove(lens, "resid_post.1")

    def test_an_unknown_point(self, lens):
        with pytest.raises(ValueError, match="about='mean' must be"):
            subspace_in(32).remove(lens, "resid_post.1", about="mean")

    @pytest.mark.parametrize("strength", [float("nan"), torch.ones(2), "much", True])
    def test_a_strength_that_is_none(self, lens, strength):
        with pytest.raises(ValueError, match="strength"):
            subspace_in(32).steer(lens, strength, "resid_post.1")

    def test_a_block_without_a_forward_pass(self, lens):
        with pytest.raises(SiteNeverFired, match="nothing was changed there"), subspace_in(32).remove(lens, "query.1"):
            pass

    def test_nothing_two_at_one_site_or_a_site_too_many(self, lens):
        tangent = subspace_in(32)
        with pytest.raises(ValueError, match="no subspace was given"):
            remove(lens, {})
        with pytest.raises(ValueError, match="two subspaces are named"):
            remove(lens, {"resid_post.1": tangent, "blocks.1.hook_resid_post": tangent})
        with pytest.raises(ValueError, match="leave site out"):
            remove(lens, {"resid_post.1": tangent}, "resid_post.2")


class TestAblation:
    @pytest.fixture
    def corpus(self, lens):
        return lens.corpus(np.random.default_rng(0).integers(0, 100, size=(6, 12)).tolist())

    def test_against_a_loss_computed_here(self, lens, model, corpus):
        site, tangent = Site("resid_post", 1), subspace_in(32)
        report = measure_ablation(lens.model, corpus, {site: tangent}, controls=3, batch_size=4)
        tokens = torch.tensor(np.stack(corpus.sequences)).long()

        def mean_loss(found):
            return float(nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))

        with torch.no_grad():
            before = mean_loss(model(tokens).logits)
            with tangent.remove(lens, "resid_post.1"):
                after = mean_loss(model(tokens).logits)
        one = report.of("resid_post.1")
        assert one.loss == pytest.approx(before, abs=1e-10)
        assert one.removed == pytest.approx(after - before, abs=1e-10)
        assert len(one.random) == 3 and one.trailing is None and report.targets == 66

    def test_a_model_in_which_the_tangent_carries_everything(self, model, corpus):
        """The last block's output enters the logits through the head only: behind the norm, the head reads three directions."""
        tangent = subspace_in(32)
        head = model.lm_head
        with torch.no_grad():
            head.weight.copy_(head.weight @ tangent.basis @ tangent.basis.T)
        model.model.norm = nn.Identity()
        lens = tln.Lens(model)
        report = measure_ablation(lens.model, corpus, {Site("resid_post", 2): tangent}, controls=20)
        one = report.of("resid_post.2")
        assert one.kept == pytest.approx(0, abs=1e-10)
        assert max(abs(change) for change in one.random) < 1e-10
        assert one.removed != pytest.approx(0, abs=1e-3)

    def test_the_model_is_given_back_and_the_batches_do_not_matter(self, lens, model, corpus):
        model.train()
        snapshot = Snapshot.of(model)
        subspaces = {Site("resid_mid", 1): subspace_in(32), Site("mlp_input", 2): subspace_in(32)}
        reports = [measure_ablation(lens.model, corpus, subspaces, controls=2, batch_size=size) for size in (2, 6)]
        snapshot.assert_unchanged(model)
        for first, second in zip(*(report.ablations for report in reports), strict=True):
            assert first.removed == pytest.approx(second.removed, abs=1e-6)
            assert first.random == pytest.approx(second.random, abs=1e-6)

    def test_it_shows_itself(self, lens, corpus):
        report = measure_ablation(lens.model, corpus, {Site("resid_post", 1): subspace_in(32)}, controls=2)
        assert "kept" in repr(report) and "resid_post.1" in repr(report)
        assert list(report.to_pandas()["site"]) == ["resid_post.1"]
        assert report.to_dict()["ablations"][0]["rank"] == 3

    def test_a_loss_of_ones_own(self, lens, corpus):
        def squares(output, batch):
            return output.logits.square().sum()

        report = measure_ablation(
            lens.model, corpus, {Site("resid_post", 1): subspace_in(32)}, controls=2, loss=squares
        )
        assert report.loss_unit == "sequence" and report.targets == 6

    def test_refusals(self, lens, corpus):
        with pytest.raises(ValueError, match="no subspace"):
            measure_ablation(lens.model, corpus, {})
        with pytest.raises(ValueError, match="use rank <= 16"):
            measure_ablation(lens.model, corpus, {Site("resid_post", 1): subspace_in(32, rank=17)})
