"""A corpus through a model: right sums however it is cut, the model given back, memory that does not grow, clear refusals."""

from __future__ import annotations

import pytest
import torch
from conftest import FAMILIES, tiny_model
from model_snapshot import GraphMemory, Snapshot, bytes_of, hooks_of, live_tensors, unusual_state
from plain_reference import (
    assert_close,
    block_list,
    plain_pass,
    random_sequences,
    random_tokens,
    singles,
    tiny_relative,
    tolerance_of,
    turn_on_checkpointing,
)

from tangent_lens.lens import Lens
from tangent_lens.models.loading import wrap
from tangent_lens.models.protocol import Batch, LinearMap, TapPoint
from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.moments import Moments, NonFiniteRows, ProjectedSums, SecondMoments
from tangent_lens.recording.passes import record_activations, record_gradients
from tangent_lens.recording.receivers import Selection, WeightReceiver
from tangent_lens.recording.taps import GradientNeverCame, SiteNeverFired
from tangent_lens.sites import Site, resid_post, resolve

SEQUENCES = random_sequences([5, 9, 2, 14, 7, 23, 3, 11, 6, 17, 4, 8, 12, 2, 19, 10])
CORPUS = Corpus.from_tokens(SEQUENCES)
BATCHINGS = [(1, "right"), (4, "right"), (4, "left"), (16, "right"), (16, "left")]
RELATIVES = ("mistral", "qwen2")


class Stop(Exception):
    """What a hook of a test raises."""


def model_of(name):
    return tiny_relative(name) if name in RELATIVES else tiny_model(name)


def sites_of(model, selection="resid_post.*"):
    return resolve(selection, model.sites, model.absent)


def batches(corpus=CORPUS, **options):
    return corpus.batches(**options)


@pytest.fixture(scope="module")
def references():
    """Each sequence alone, unpadded, through plain PyTorch: once a model."""
    return {name: plain_pass(model_of(name), singles(SEQUENCES)) for name in (*FAMILIES, *RELATIVES)}


class TestHowTheCorpusIsCut:
    @pytest.mark.parametrize("name", (*FAMILIES, *RELATIVES))
    @pytest.mark.parametrize(("batch_size", "side"), BATCHINGS)
    def test_changes_no_moment(self, name, batch_size, side, references):
        model, expected = wrap(model_of(name)), references[name]
        cut = batches(batch_size=batch_size, padding_side=side)
        recorded = record_gradients(model, cut, model.sites, model.maps, activations=True, cross=True)
        tolerance = tolerance_of(name)
        for site in model.sites:
            x, g = expected.activations[site.name], expected.gradients[site.name]
            moments = recorded.moments[site]
            assert moments.activations.count == moments.gradients.count == CORPUS.tokens == len(x)
            assert_close(moments.activations.mean, x.mean(0), tolerance, site.name)
            assert_close(moments.activations.second_moment(), x.T @ x, tolerance, site.name)
            assert_close(moments.gradients.second_moment(), g.T @ g, tolerance, site.name)
            assert_close(moments.cross_moment(), g.T @ x, tolerance, site.name)

    @pytest.mark.parametrize("name", (*FAMILIES, *RELATIVES))
    @pytest.mark.parametrize(("batch_size", "side"), BATCHINGS)
    def test_changes_no_weight_gradient_and_no_loss(self, name, batch_size, side, references):
        model, expected = wrap(model_of(name)), references[name]
        recorded = record_gradients(model, batches(batch_size=batch_size, padding_side=side), (), model.maps)
        assert {weight.name for weight in recorded.weights} == set(expected.weights)
        for weight in recorded.weights:
            signals, u = expected.gradients[weight.name], expected.activations[weight.reads.name]
            assert_close(weight.gradient, expected.weights[weight.name], tolerance_of(name), weight.name)
            assert_close(weight.signal_square_sum, signals.square().sum(0), tolerance_of(name), weight.name)
            assert_close(recorded.inputs[weight.reads].second_moment(), u.T @ u, tolerance_of(name), weight.name)
            assert weight.rows == CORPUS.tokens
        assert recorded.loss == pytest.approx(expected.loss / expected.targets, rel=1e-6)
        assert recorded.targets == expected.targets == CORPUS.tokens - len(SEQUENCES)

    @pytest.mark.parametrize("name", FAMILIES)
    @pytest.mark.parametrize(("batch_size", "side"), BATCHINGS)
    def test_changes_nothing_in_a_forward_pass(self, name, batch_size, side, references):
        model = wrap(model_of(name))
        records = record_activations(model, batches(batch_size=batch_size, padding_side=side), model.sites)
        places = references[name].positions
        for site, record in records.items():
            x = references[name].activations[site.name]
            distances = (x - x.mean(0)).square().sum(1)
            shares = torch.stack([distances[places == place].sum() for place in range(16)]) / distances.sum()
            assert_close(record.moments.second_moment(), x.T @ x, tolerance_of(name), site.name)
            assert_close(record.positions.shares(record.moments), shares, tolerance_of(name), site.name)
            assert record.positions.count.tolist() == [float((places == place).sum()) for place in range(16)]

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_skipped_positions_are_those_of_each_sequence(self, side, references):
        model, expected = wrap(tiny_model("gpt2")), references["gpt2"]
        corpus = Corpus.from_tokens(SEQUENCES, special_ids=[0])
        cut = batches(corpus, batch_size=4, padding_side=side, skip_first=True, skip_special=True)
        recorded = record_gradients(model, cut, sites_of(model), model.maps)
        tokens = torch.tensor([token for sequence in SEQUENCES for token in sequence])
        kept = (expected.positions > 0) & (tokens != 0)
        assert 0 < int(kept.sum()) < CORPUS.tokens - len(SEQUENCES)
        for site, moments in recorded.moments.items():
            g = expected.gradients[site.name][kept]
            assert_close(moments.gradients.second_moment(), g.T @ g, 1e-10, site.name)
        for weight in recorded.weights:
            u, delta = expected.activations[weight.reads.name][kept], expected.gradients[weight.name][kept]
            assert_close(weight.gradient, delta.T @ u, 1e-10, weight.name)
            assert weight.rows == recorded.inputs[weight.reads].count == int(kept.sum())

    def test_one_sequence_is_a_corpus(self):
        model = wrap(tiny_model("gpt_neox"))
        recorded = record_gradients(model, batches(Corpus.from_tokens(SEQUENCES[:1])), sites_of(model))
        g = plain_pass(tiny_model("gpt_neox"), singles(SEQUENCES[:1])).gradients["resid_post.1"]
        assert_close(recorded.moments[Site("resid_post", 1)].gradients.second_moment(), g.T @ g, 1e-10)

    def test_any_iterable_of_batches_is_read_once(self):
        model = wrap(tiny_model("gpt2"))
        as_list = record_gradients(model, list(batches()), sites_of(model))
        as_generator = record_gradients(model, (batch for batch in batches()), sites_of(model))
        for site, moments in as_list.moments.items():
            assert torch.equal(moments.gradients.scatter, as_generator.moments[site].gradients.scatter)

    def test_last_position_has_no_gradient_at_the_last_layer(self):
        model = wrap(tiny_model("gpt2"))
        with_last = record_gradients(model, batches(batch_size=1), sites_of(model, "resid_post.2"))
        (moments,) = with_last.moments.values()
        g = plain_pass(tiny_model("gpt2"), singles(SEQUENCES)).gradients["resid_post.2"]
        zero_rows = int((g.abs().sum(1) == 0).sum())
        assert zero_rows == len(SEQUENCES)
        assert moments.gradients.count == len(g)


class TestTheModelComesBack:
    def record_both(self, model):
        wrapped = wrap(model)
        record_activations(wrapped, batches(batch_size=4), wrapped.sites)
        record_gradients(wrapped, batches(batch_size=4), wrapped.sites, wrapped.maps, cross=True)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_after_success(self, family):
        model = tiny_model(family)
        unusual_state(model)
        model.get_input_embeddings().register_forward_hook(lambda *args: None)
        before = Snapshot.of(model)
        self.record_both(model)
        before.assert_unchanged(model)

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("where", ["forward", "backward"])
    def test_after_an_exception_in_the_middle(self, family, where):
        model = tiny_model(family)
        unusual_state(model)
        calls = []

        def raising(*args):
            calls.append(where)
            if len(calls) == 3:
                raise Stop

        layer = block_list(model)[1]
        (layer.register_forward_hook if where == "forward" else layer.register_full_backward_hook)(raising)
        before = Snapshot.of(model)
        wrapped = wrap(model)
        with pytest.raises(Stop):
            record_gradients(wrapped, batches(batch_size=4), wrapped.sites, wrapped.maps)
        before.assert_unchanged(model)
        assert len(calls) == 3
        if where == "forward":
            calls.clear()
            with pytest.raises(Stop):
                record_activations(wrapped, batches(batch_size=4), wrapped.sites)
            before.assert_unchanged(model)

    def test_after_a_batch_source_that_raises(self):
        def interrupted():
            yield next(batches(batch_size=4))
            raise KeyboardInterrupt

        model = tiny_model("gpt2")
        unusual_state(model)
        before, wrapped = Snapshot.of(model), wrap(model)
        for record in (record_activations, record_gradients):
            with pytest.raises(KeyboardInterrupt):
                record(wrapped, interrupted(), sites_of(wrapped))
            before.assert_unchanged(model)

    def test_the_persons_hooks_still_fire(self):
        model, seen = tiny_model("gpt2"), []
        handle = block_list(model)[1].register_forward_hook(lambda *args: seen.append(1))
        self.record_both(model)
        during = len(seen)
        model(random_tokens(1, 4))
        assert during == 2 * 4 and len(seen) == during + 1
        handle.remove()
        assert not any(hooks_of(module) for module in model.modules())

    def test_under_the_persons_no_grad(self):
        model = wrap(tiny_model("gpt2"))
        expected = record_gradients(model, batches(), sites_of(model))
        with torch.no_grad():
            found = record_gradients(model, batches(), sites_of(model))
            assert not torch.is_grad_enabled()
        for site, moments in found.moments.items():
            assert torch.equal(moments.gradients.scatter, expected.moments[site].gradients.scatter)

    def test_under_inference_mode_it_is_right_or_refused(self):
        model = wrap(tiny_model("gpt2"))
        with torch.inference_mode():
            try:
                found = record_gradients(model, batches(), sites_of(model))
            except (GradientNeverCame, RuntimeError) as refusal:
                assert "inference" in str(refusal)
                return
        assert all(float(moments.gradients.scatter.abs().max()) > 0 for moments in found.moments.values())


class TestStatesOfTheModel:
    def moments_and_weights(self, model):
        wrapped = wrap(model)
        recorded = record_gradients(wrapped, batches(batch_size=4), wrapped.sites, wrapped.maps, activations=True)
        matrices = {site.name: moments.gradients.scatter for site, moments in recorded.moments.items()}
        return matrices | {weight.name: weight.gradient for weight in recorded.weights}

    def test_dropout_in_train_mode_changes_no_number(self):
        model = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
        quiet = self.moments_and_weights(model)
        model.train()
        with torch.no_grad():
            noisy = [model(random_tokens(2, 9)).logits for _ in range(2)]
        assert not torch.equal(*noisy)
        for name, matrix in self.moments_and_weights(model).items():
            assert torch.equal(matrix, quiet[name]), name
        assert model.training

    def test_frozen_parameters_change_no_number(self):
        model = tiny_model("gpt2")
        trainable = self.moments_and_weights(model)
        model.requires_grad_(False)
        for name, matrix in self.moments_and_weights(model).items():
            assert torch.equal(matrix, trainable[name]), name
        assert not any(parameter.requires_grad for parameter in model.parameters())

    @pytest.mark.parametrize("family", FAMILIES)
    def test_gradient_checkpointing_in_train_mode_changes_no_number(self, family):
        model = tiny_model(family)
        plain = self.moments_and_weights(model)
        turn_on_checkpointing(model)
        model.train()
        for name, matrix in self.moments_and_weights(model).items():
            assert_close(matrix, plain[name], 1e-10, name)
        assert model.training and any(getattr(part, "gradient_checkpointing", False) for part in model.modules())

    @pytest.mark.parametrize("family", FAMILIES)
    def test_bfloat16_rows_are_summed_wide(self, family):
        """Rounding happens in the model, not in the sums: the rows of a plain bfloat16 model, summed in float64."""
        tokens = random_tokens(2, 9)
        expected = plain_pass(tiny_model(family, dtype=torch.bfloat16), [tokens])
        model = wrap(tiny_model(family, dtype=torch.bfloat16))
        cut = Corpus.from_tokens(tokens).batches()
        recorded = record_gradients(model, cut, model.sites, model.maps, activations=True, cross=True)
        for site, moments in recorded.moments.items():
            x = expected.activations[site.name].double()
            assert x.isfinite().all() and moments.gradients.scatter.isfinite().all()
            # resid_mid of the reference is a sum rounded once more; its values are compared loosely.
            assert_close(moments.activations.second_moment(), x.T @ x, 2e-2 if site.kind == "resid_mid" else 1e-5)
            assert moments.gradients.scatter.dtype == torch.float64
        for weight in recorded.weights:
            assert weight.gradient.isfinite().all() and weight.gradient.dtype == torch.float64
            assert_close(weight.gradient, expected.weights[weight.name].double(), 0.1, weight.name)

    def test_float32_agrees_with_float64(self):
        model = wrap(tiny_model("gpt_neox", dtype=torch.float32))
        recorded = record_gradients(model, batches(batch_size=4), (), model.maps)
        expected = plain_pass(tiny_model("gpt_neox"), singles(SEQUENCES)).weights
        for weight in recorded.weights:
            assert_close(weight.gradient, expected[weight.name], 1e-4, weight.name)

    def test_each_part_asked_for_alone_is_the_same(self):
        model = wrap(tiny_model("llama"))
        whole = record_gradients(model, batches(), model.sites, model.maps, activations=True)
        for site in sites_of(model):
            alone = record_gradients(model, batches(), [site]).moments[site]
            assert torch.equal(alone.gradients.scatter, whole.moments[site].gradients.scatter)
            assert alone.activations.count == 0
        for one in model.maps:
            (weight,) = record_gradients(model, batches(), (), [one]).weights
            (same,) = (other for other in whole.weights if other.name == one.name)
            assert torch.equal(weight.gradient, same.gradient), one.name


class TestRefusals:
    def model(self, **changes):
        return wrap(tiny_model("llama", **changes))

    @pytest.mark.parametrize("record", [record_activations, record_gradients])
    def test_nan_weights_name_the_first_site_they_reach(self, record):
        model = self.model()
        block_list(model.module)[1].mlp.down_proj.weight.data[0, 0] = float("nan")
        before = Snapshot.of(model.module).hooks
        with pytest.raises(NonFiniteRows, match=r"resid_post\.1: \d+ of \d+ values are NaN or infinite"):
            if record is record_activations:
                record(model, batches(), sites_of(model))
            else:
                record(model, batches(), sites_of(model), activations=True)
        assert Snapshot.of(model.module).hooks == before

    def test_nan_gradients_name_the_site(self):
        model = self.model()
        block_list(model.module)[2].register_full_backward_hook(
            lambda module, inputs, outputs: tuple(gradient * float("nan") for gradient in inputs)
        )
        with pytest.raises(NonFiniteRows, match=r"gradients at resid_post\.1: \d+ of \d+ values are NaN"):
            record_gradients(model, batches(), sites_of(model))

    def test_nan_inputs_of_a_map_name_their_site(self):
        model = self.model()
        block_list(model.module)[1].self_attn.o_proj.weight.data.fill_(float("nan"))
        with pytest.raises(NonFiniteRows, match=r"inputs at mlp_input\.1: \d+ of \d+ values are NaN"):
            record_gradients(model, batches(batch_size=4, padding_side="left"), (), model.maps)

    def test_nan_signals_name_the_map(self):
        model = self.model()
        block_list(model.module)[1].self_attn.q_proj.register_forward_hook(poisoning_the_gradient)
        with pytest.raises(NonFiniteRows, match=r"query\.1: its weight gradient holds NaN or infinity"):
            record_gradients(model, batches(), (), model.maps)

    @pytest.mark.parametrize("record", [record_activations, record_gradients])
    def test_token_ids_beyond_the_vocabulary(self, record):
        model = self.model()
        corpus = Corpus.from_tokens([[3, 4, 5], [3, 100, 4]])
        with pytest.raises(
            ValueError, match=r"token id 100 is outside this model's vocabulary of 100; use its own token"
        ):
            record(model, corpus.batches(), sites_of(model))

    @pytest.mark.parametrize("record", [record_activations, record_gradients])
    def test_negative_token_ids(self, record):
        """-100 marks ignored labels, and people do pass labels for ids."""
        model = self.model()
        with pytest.raises(ValueError, match=r"-100"):
            record(model, Corpus.from_tokens([[3, 4, 5], [3, -100, 4]]).batches(), sites_of(model))

    def test_sequences_longer_than_the_models_positions(self):
        """GPT-2's learned positions end at 64 here; torch alone says ``index out of range in self``."""
        model = wrap(tiny_model("gpt2"))
        corpus = Corpus.from_tokens(random_tokens(2, 80))
        with pytest.raises(ValueError, match=r"80.*64|64.*80"):
            record_gradients(model, corpus.batches(), sites_of(model))

    @pytest.mark.parametrize("record", [record_activations, record_gradients])
    def test_no_batch_at_all(self, record):
        model = self.model()
        with pytest.raises(ValueError, match=r"no batch to record (activations|gradients) from; the corpus is empty"):
            record(model, [], sites_of(model))

    @pytest.mark.parametrize("record", [record_activations, record_gradients])
    def test_no_position_kept(self, record):
        model = self.model()
        corpus = Corpus.from_tokens([[7, 7, 7], [7, 7]], special_ids=[7])
        with pytest.raises(
            ValueError, match=r"no position is left for the statistics: skip_first and skip_special leave"
        ):
            record(model, corpus.batches(skip_special=True), sites_of(model))

    def test_no_position_kept_for_weights_alone(self):
        model = self.model()
        corpus = Corpus.from_tokens([[7, 7, 7], [7, 7]], special_ids=[7])
        with pytest.raises(ValueError, match=r"no position is left for the statistics"):
            record_gradients(model, corpus.batches(skip_special=True), (), model.maps)

    def test_a_batch_that_keeps_nothing_among_others_is_no_error(self):
        model = self.model()
        corpus = Corpus.from_tokens([[7, 7, 7], [3, 4]], special_ids=[7])
        recorded = record_gradients(model, corpus.batches(1, skip_special=True), sites_of(model), model.maps)
        assert {moments.gradients.count for moments in recorded.moments.values()} == {2}
        assert {weight.rows for weight in recorded.weights} == {2}

    def test_no_token_has_a_next_one(self):
        model = self.model()
        tokens = torch.tensor([[3], [4]])
        true = torch.ones_like(tokens, dtype=torch.bool)
        with pytest.raises(ValueError, match=r"no position of this batch \(2 sequences of up to 1 tokens\) has a next"):
            record_gradients(model, [Batch(tokens, true, tokens * 0, true)], sites_of(model))

    def test_one_token_sequences_never_reach_the_model_and_are_told(self):
        corpus = Corpus.from_tokens([[3], [4, 5], [6]])
        assert [len(sequence) for sequence in corpus.sequences] == [2]
        assert corpus.left_out == ("2 sequences of fewer than 2 tokens left out: they have no next token",)
        with pytest.raises(ValueError, match=r"holds only 2 sequences of fewer than 2 tokens"):
            Corpus.from_tokens([[3], [6]])

    def test_a_module_that_the_model_skips(self):
        model = self.model()
        block_list(model.module)[2].mlp.forward = lambda hidden: hidden
        with pytest.raises(
            SiteNeverFired, match=r"mlp_input\.2: the model ran, but no tensor passed here; it skips that"
        ):
            record_activations(model, batches(), sites_of(model, "mlp_input.*"))

    @pytest.mark.parametrize("selection", ["resid_post.*", "resid_post.2", "resid_post.1, resid_post.2"])
    @pytest.mark.parametrize("record", [record_activations, record_gradients])
    def test_layers_that_share_one_module(self, record, selection):
        """The module runs twice a pass, so each of its two sites would hold the rows of both."""
        plain = tiny_model("llama")
        plain.model.layers[2] = plain.model.layers[1]
        model = wrap(plain)
        with pytest.raises(SiteNeverFired, match=r"resid_post\.\d: .*shared layers run a module more than once"):
            record(model, batches(), sites_of(model, selection))

    def test_a_place_the_loss_does_not_reach(self):
        plain = tiny_model("llama")
        plain.model.layers[1].register_forward_hook(lambda module, args, output: output.detach())
        model = wrap(plain)
        with pytest.raises(GradientNeverCame, match=r"model\.layers\.1: no gradient can come here, since its tensor"):
            record_gradients(model, batches(), sites_of(model))

    def test_a_gradient_that_stays_away_names_place_and_counts(self):
        plain = tiny_model("llama")
        plain.model.layers[2].register_forward_pre_hook(lambda module, args: (args[0].detach().requires_grad_(),))
        model = wrap(plain)
        with pytest.raises(
            GradientNeverCame, match=r"resid_post\.0: 0 gradients came for 1 forward passes; the loss does"
        ):
            record_gradients(model, batches(batch_size=16), sites_of(model, "resid_post.0, resid_post.2"))

    def test_a_map_the_loss_does_not_reach(self):
        plain = tiny_model("llama")
        plain.model.layers[2].register_forward_pre_hook(lambda module, args: (args[0].detach().requires_grad_(),))
        model = wrap(plain)
        with pytest.raises(GradientNeverCame, match=r"query\.0: 0 gradients came for 1 forward passes"):
            record_gradients(model, batches(batch_size=16), (), model.maps)

    def test_an_in_place_change_after_a_tap_never_reaches_the_sums(self, references):
        """A person's hook on the next block adds to the residual stream in place: what passed here had not that."""
        plain = tiny_model("llama")
        model = wrap(plain)
        expected = record_gradients(model, batches(), sites_of(model, "resid_post.0"), activations=True).moments
        plain.model.layers[1].register_forward_pre_hook(adding_in_place)
        (site,) = sites_of(model, "resid_post.0")
        for cross in (False, True):
            try:
                found = record_gradients(model, batches(), [site], activations=True, cross=cross).moments[site]
            except RuntimeError as refusal:
                assert "in place" in str(refusal)
                continue
            assert_close(found.activations.mean, expected[site].activations.mean, 1e-10, f"cross={cross}")


def adding_in_place(module, args):
    args[0].add_(1)


def poisoning_the_gradient(module, args, output):
    output.register_hook(lambda gradient: gradient * float("nan"))


class TestProgress:
    class Told:
        def __init__(self):
            self.events = []

        def start(self, description, total=None, unit=""):
            self.events.append(("start", description, total, unit))

        def advance(self, amount=1.0, note=""):
            self.events.append(("advance", amount))

        def finish(self):
            self.events.append(("finish",))

    @pytest.mark.parametrize(("record", "word"), [(record_activations, "activations"), (record_gradients, "gradients")])
    def test_tokens_that_are_no_padding_are_told(self, record, word):
        told, model = self.Told(), wrap(tiny_model("gpt2"))
        record(model, batches(batch_size=4), sites_of(model), progress=told, tokens=CORPUS.tokens)
        assert told.events[0] == ("start", word, CORPUS.tokens, "tokens")
        assert told.events[-1] == ("finish",)
        amounts = [event[1] for event in told.events[1:-1]]
        assert len(amounts) == 4 and sum(amounts) == CORPUS.tokens

    def test_it_finishes_after_an_exception(self):
        told, model = self.Told(), wrap(tiny_model("gpt2"))
        corpus = Corpus.from_tokens([[3, 4, 5], [3, 100, 4]])
        with pytest.raises(ValueError, match="vocabulary"):
            record_gradients(model, corpus.batches(1), sites_of(model), progress=told)
        assert told.events[-1] == ("finish",)


class TestMemory:
    def equal_batches(self, count):
        return Corpus.from_tokens(random_tokens(4 * count, 12)).batches(4)

    def peak_of_graphs(self, count):
        model = wrap(tiny_model("llama"))
        with GraphMemory() as memory:
            record_gradients(model, self.equal_batches(count), model.sites, model.maps, activations=True, cross=True)
        return memory

    def test_graphs_die_with_their_step_and_their_peak_does_not_grow(self):
        few, many = self.peak_of_graphs(4), self.peak_of_graphs(16)
        assert few.peak == many.peak > 10_000
        assert few.live == many.live == 0

    def test_each_graph_is_gone_when_the_next_batch_is_drawn(self):
        model, alive = wrap(tiny_model("gpt2")), []
        with GraphMemory() as memory:

            def watched():
                for batch in self.equal_batches(4):
                    alive.append(memory.live)
                    yield batch

            record_gradients(model, watched(), model.sites, model.maps)
        assert memory.peak > 10_000 and alive == [0] * 4

    @pytest.mark.parametrize("record", ["activations", "gradients"])
    def test_between_batches_only_sums_stay(self, record):
        model = wrap(tiny_model("llama"))
        bytes_alive, activations_alive = [], []

        def watched():
            for batch in self.equal_batches(6):
                tensors = live_tensors()
                bytes_alive.append(bytes_of(tensors))
                activations_alive.append(sum(tensor.ndim == 3 and tensor.shape[:2] == (4, 12) for tensor in tensors))
                del tensors
                yield batch

        if record == "activations":
            record_activations(model, watched(), model.sites)
        else:
            record_gradients(model, watched(), model.sites, model.maps, activations=True, cross=True)
        assert bytes_alive[1] > bytes_alive[0]
        assert len(set(bytes_alive[2:])) == 1
        assert activations_alive == [0] * 6

    def test_a_forward_only_pass_builds_no_graph(self):
        model = wrap(tiny_model("llama"))
        with GraphMemory() as memory:
            record_activations(model, self.equal_batches(3), model.sites)
        assert memory.peak == 0


def test_rows_kept_by_hand_have_the_same_moments():
    plain = tiny_model("llama")
    lens = Lens(plain)
    found = lens.record(SEQUENCES, cross=True, batch_size=4, progress=False)
    kept = {site: ([], []) for site in lens.resolve(resid_post())}
    for batch in CORPUS.batches(4):
        with lens.attach(resid_post(), gradients=True) as taps:
            log_probabilities = lens.model.run(batch).logits.log_softmax(-1)[:, :-1]
            target = log_probabilities.gather(-1, batch.tokens[:, 1:, None])[..., 0]
            (-target * batch.attention_mask[:, 1:]).sum().backward()
        for site, (x, g) in kept.items():
            x.append(taps[site].activations[batch.keep])
            g.append(taps[site].gradients[batch.keep])
    for site, rows in kept.items():
        expected = Moments.of(*(torch.cat(part) for part in rows), cross=True)
        assert_close(found[site].activations.scatter, expected.activations.scatter, 1e-10, site.name)
        assert_close(found[site].gradients.scatter, expected.gradients.scatter, 1e-10, site.name)
        assert_close(found[site].cross_moment(), expected.cross_moment(), 1e-10, site.name)


def test_autocast_does_not_reach_into_the_sums():
    """Under autocast the model's own products are bfloat16; ours stay as wide as the rows that passed."""
    rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    basis = torch.linalg.qr(torch.randn(8, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).Q
    site, wide = Site("mlp_input", 0), rows.double()
    place = TapPoint(torch.nn.Linear(8, 8), "output", "map")
    receiver = WeightReceiver([LinearMap("mlp_in", 0, site, (place,), place)], Selection())
    projected = ProjectedSums(basis)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        moments = SecondMoments.of(rows)
        projected.update(rows)
        receiver.take_input(rows[None])
        receiver.take_output(rows[None])(rows[None])
    assert_close(moments.second_moment(), wide.T @ wide, 1e-6)
    assert_close(receiver.results()[0].gradient, wide.T @ wide, 1e-6)
    assert projected.square_along(basis) == pytest.approx(float((wide @ basis).square().sum()), rel=1e-6)
