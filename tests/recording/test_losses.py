"""The summed causal loss against explicit log-probabilities, one position at a time."""

from __future__ import annotations

import functools
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import tiny_model
from explicit import PROPERTY, array, scatter
from hypothesis import given
from hypothesis import strategies as st
from model_snapshot import Snapshot
from plain_reference import random_sequences
from transformers import BertConfig, BertModel, LlamaModel

from tangent_lens.lens import Lens
from tangent_lens.models.protocol import Batch, Inputs
from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.losses import CausalLoss, UserLoss, causal_loss_sum, causal_targets, choose_loss
from tangent_lens.recording.masking import MaskedLoss
from tangent_lens.reports.console import as_text

VOCABULARY = 7
LENGTHS = (5, 3, 1, 4)


def padded(side: str, dtype: torch.dtype = torch.float64):
    """Logits, tokens and mask of four sequences; the same numbers stand at the same tokens on either padding side."""
    generator = torch.Generator().manual_seed(0)
    longest = max(LENGTHS)
    logits = torch.full((len(LENGTHS), longest, VOCABULARY), 9.0, dtype=dtype)
    tokens = torch.full((len(LENGTHS), longest), 6)
    mask = torch.zeros(len(LENGTHS), longest, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        place = slice(longest - length, longest) if side == "left" else slice(0, length)
        values = torch.randn(length, VOCABULARY, generator=generator, dtype=torch.float64)
        logits[row, place] = (3 * values).to(dtype)
        tokens[row, place] = torch.randint(VOCABULARY, (length,), generator=generator)
        mask[row, place] = True
    return logits, tokens, mask


def token_rows(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return values[mask]


def explicit_loss(logits, tokens, mask) -> tuple[float, int]:
    """Walk over every sequence and every position."""
    total, count = 0.0, 0
    for values, ids, kept in zip(array(logits), tokens.numpy(), mask.numpy(), strict=True):
        for position in range(len(ids) - 1):
            if kept[position] and kept[position + 1]:
                total -= values[position][ids[position + 1]] - np.log(np.exp(values[position]).sum())
                count += 1
    return total, count


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_loss_is_the_sum_over_positions(side):
    loss, count = causal_loss_sum(*padded(side))
    expected, targets = explicit_loss(*padded(side))
    assert count == targets == sum(length - 1 for length in LENGTHS)
    assert loss.dtype == torch.float64
    assert float(loss) == pytest.approx(expected, rel=1e-13)


@given(cut=st.lists(st.booleans(), min_size=len(LENGTHS) - 1, max_size=len(LENGTHS) - 1))
@PROPERTY
def test_no_cut_into_batches_changes_the_sum_or_its_gradient(cut):
    logits, tokens, mask = padded("right")
    mask[2, :2] = True  # A batch of a single one-token sequence would have no target at all.
    whole, cut_up = (logits.clone().requires_grad_() for _ in range(2))
    causal_loss_sum(whole, tokens, mask)[0].backward()
    starts = [0, *(place + 1 for place, here in enumerate(cut) if here), len(LENGTHS)]
    targets = 0
    for start, end in itertools.pairwise(starts):
        loss, count = causal_loss_sum(cut_up[start:end], tokens[start:end], mask[start:end])
        loss.backward()
        targets += count
    assert targets == causal_loss_sum(logits, tokens, mask)[1]
    assert torch.allclose(cut_up.grad, whole.grad, rtol=1e-13, atol=1e-15)


def test_the_padding_side_changes_nothing():
    results = []
    for side in ("left", "right"):
        logits, tokens, mask = padded(side)
        logits.requires_grad_()
        loss, _ = causal_loss_sum(logits, tokens, mask)
        loss.backward()
        results.append((float(loss.detach()), token_rows(logits.grad, mask)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-14)
    assert torch.allclose(results[0][1], results[1][1], rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_last_positions_get_no_gradient_and_others_softmax_minus_target(side):
    logits, tokens, mask = padded(side)
    logits.requires_grad_()
    causal_loss_sum(logits, tokens, mask)[0].backward()
    expected = torch.zeros_like(logits)
    for row, length in enumerate(LENGTHS):
        first = logits.shape[1] - length if side == "left" else 0
        for position in range(first, first + length - 1):
            expected[row, position] = logits[row, position].detach().softmax(dim=0)
            expected[row, position, tokens[row, position + 1]] -= 1
    assert torch.allclose(logits.grad, expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(logits.grad == 0, expected == 0)


def test_targets_are_the_next_tokens():
    tokens = torch.tensor([[4, 5, 6, 0], [0, 0, 5, 6]])
    mask = torch.tensor([[True, True, True, False], [False, False, True, True]])
    assert causal_targets(tokens, mask).tolist() == [[5, 6, -100, -100], [-100, -100, 6, -100]]


def test_no_target_reaches_across_a_gap():
    tokens = torch.tensor([[4, 5, 6, 3]])
    mask = torch.tensor([[True, False, True, True]])
    assert causal_targets(tokens, mask).tolist() == [[-100, -100, 3, -100]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_logits_are_summed_in_float32(dtype):
    logits, tokens, mask = padded("right", dtype)
    loss, _ = causal_loss_sum(logits, tokens, mask)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(explicit_loss(logits, tokens, mask)[0], rel=1e-6)
    assert float(loss) == float(causal_loss_sum(logits.float(), tokens, mask)[0])


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[[1e4, 0.0], [0.0, 0.0]]])
    loss, _ = causal_loss_sum(logits, torch.tensor([[0, 1]]), torch.ones(1, 2, dtype=torch.bool))
    assert float(loss) == 1e4


@pytest.mark.parametrize("length", [1, 4])
def test_a_batch_without_a_target_is_an_error(length):
    logits, tokens = torch.zeros(3, length, VOCABULARY), torch.zeros(3, length, dtype=torch.long)
    mask = torch.zeros(3, length, dtype=torch.bool)
    mask[:, 0] = True
    message = rf"no position of this batch \(3 sequences of up to {length} tokens\) has a next token.*at least 2 tokens"
    with pytest.raises(ValueError, match=message):
        causal_loss_sum(logits, tokens, mask)


# --- Which loss is differentiated --------------------------------------------------------------------------------------

SEQUENCES = random_sequences([9, 3, 14, 5, 7, 2, 11, 8])
QUICK = {"rank": 3, "controls": 3, "progress": False}


def model_for(objective: str, **description):
    """As much of a model as the choice of a loss looks at."""
    shape = {"architecture": "SomeModel", "vocabulary": 50, "n_layers": 2} | description
    tokenizer = SimpleNamespace(mask_token_id=7, all_special_ids=[0, 7])
    return SimpleNamespace(objective=objective, tokenizer=tokenizer, description=SimpleNamespace(**shape))


def a_sum(output, batch):
    return output.logits.sum()


class TestTheChoice:
    def test_by_default_what_the_model_was_trained_with(self):
        assert isinstance(choose_loss(None, model_for("causal"), seed=5), CausalLoss)
        found = choose_loss(None, model_for("masked"), seed=5)
        assert isinstance(found, MaskedLoss)
        assert (found.seed, found.share, found.style, found.mask_id, found.special_ids) == (
            5,
            0.15,
            "80/10/10",
            7,
            {0, 7},
        )

    def test_by_name(self):
        assert isinstance(choose_loss("causal", model_for("causal")), CausalLoss)
        assert choose_loss("masked", model_for("masked"), seed=5) == choose_loss(None, model_for("masked"), seed=5)

    def test_a_masked_loss_keeps_what_it_says_and_learns_the_rest(self):
        asked = MaskedLoss(share=0.4, style="plain", seed=2, mask_id=9)
        found = choose_loss(asked, model_for("masked"), seed=5)
        assert (found.seed, found.share, found.style, found.mask_id, found.special_ids) == (
            2,
            0.4,
            "plain",
            9,
            {0, 7, 9},
        )

    @pytest.mark.parametrize(
        ("asked", "trained"), [("causal", "masked"), ("masked", "causal"), (MaskedLoss(), "causal")]
    )
    def test_the_other_objective_is_refused_with_the_models_own(self, asked, trained):
        other = {"causal": "masked", "masked": "causal"}[trained]
        sentence = (
            rf"a {other} loss was asked for, and SomeModel is a {trained} language model; "
            rf"leave loss out, or pass loss='{trained}'"
        )
        with pytest.raises(ValueError, match=sentence):
            choose_loss(asked, model_for(trained))

    @pytest.mark.parametrize("asked", [None, "causal", "masked", MaskedLoss(mask_id=3)], ids=str)
    def test_without_a_head_there_is_no_loss_and_the_sentence_says_what_to_pass(self, asked):
        with pytest.raises(ValueError, match=r"SomeModel has no language-model head.*pass loss=.*last_hidden_state"):
            choose_loss(asked, model_for(""))
        with pytest.raises(
            ValueError, match=r"SomeModel is trained for is not known here: pass loss=.*gradients=False"
        ):
            choose_loss(asked, model_for("", n_layers=0))

    @pytest.mark.parametrize("trained", ["causal", "masked", ""])
    def test_a_function_needs_no_objective(self, trained):
        assert isinstance(choose_loss(a_sum, model_for(trained)), UserLoss)

    @pytest.mark.parametrize("name", ["mlm", "Causal", "", "next-token"])
    def test_an_unknown_name_lists_the_known_ones(self, name):
        with pytest.raises(ValueError, match=rf"loss '{name}' is not known; use 'causal', 'masked', or a function of"):
            choose_loss(name, model_for("causal"))

    @pytest.mark.parametrize("thing", [3, 0.5, MaskedLoss, CausalLoss, ["causal"], torch.zeros(())], ids=repr)
    def test_what_cannot_be_called_is_refused_before_the_model_runs(self, thing):
        with pytest.raises(TypeError, match=r"is no loss; pass 'causal', 'masked', MaskedLoss\(\), or a function of"):
            choose_loss(thing, model_for("causal"))

    def test_a_loss_of_the_persons_own_kind_is_taken_as_it_is(self):
        class Own:
            name, unit = "mine", "wish"

            def prepare(self, batch):
                return batch

            def __call__(self, output, batch):
                return output.logits.sum(), 1

        own = Own()
        assert choose_loss(own, model_for("causal")) is own
        report = Lens(tiny_model("llama")).measure(SEQUENCES, "resid_post.1", loss=Own(), **QUICK)
        assert (report.settings.loss, report.corpus.loss_unit) == ("mine", "wish")


class Summed:
    """A loss that is an object: it has no ``__name__``."""

    def __call__(self, output, batch):
        return output.logits.square().sum()


OUTPUT = SimpleNamespace(logits=torch.arange(1.0, 7).reshape(2, 3).requires_grad_(True))
BATCH = next(Corpus.from_tokens([[1, 2, 3], [4, 5]]).batches(2))


class TestAFunctionOfYourOwn:
    @pytest.mark.parametrize(
        ("function", "name"),
        [
            (a_sum, "a_sum"),
            (lambda output, batch: output.logits.sum(), "<lambda>"),
            (Summed(), "Summed"),
            (functools.partial(a_sum), "partial"),
            (torch.nn.Module(), "Module"),
        ],
        ids=["function", "lambda", "object", "partial", "module"],
    )
    def test_its_name(self, function, name):
        assert UserLoss(function).name == f"{name} (your own)" and UserLoss(function).unit == "sequence"

    def test_it_sees_what_the_model_returned_and_the_batch(self):
        seen = []
        loss = UserLoss(lambda output, batch: seen.append((output, batch)) or output.logits.sum())
        assert loss.prepare(BATCH) is BATCH
        value, count = loss(OUTPUT, BATCH)
        assert seen == [(OUTPUT, BATCH)] and (float(value.detach()), count) == (21.0, 2)
        given_by_hand = {"x": torch.zeros(4, 2)}
        value, count = loss(OUTPUT, Inputs(given_by_hand, 4))
        assert seen[1][1] is given_by_hand and count == 4

    @pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
    def test_a_single_number_of_any_shape_is_a_scalar(self, shape):
        value, _ = UserLoss(lambda output, batch: output.logits.sum().reshape(shape))(OUTPUT, BATCH)
        assert value.shape == () and value.requires_grad

    @pytest.mark.parametrize(
        ("make", "error", "sentence"),
        [
            (lambda logits: 3.5, TypeError, r"f \(your own\) returned a float; it must return a scalar tensor"),
            (lambda logits: None, TypeError, r"returned a NoneType; it must return a scalar tensor"),
            (lambda logits: (logits.sum(), 6), TypeError, r"returned a tuple; it must return a scalar tensor"),
            (lambda logits: np.float64(1), TypeError, r"returned a float64; it must"),
            (lambda logits: logits, ValueError, r"returned a tensor of shape \(2, 3\); sum it to a scalar"),
            (lambda logits: logits[:0], ValueError, r"returned a tensor of shape \(0, 3\); sum it to a scalar"),
            (lambda logits: (logits - 9).log().sum(), ValueError, r"returned nan; nothing can be differentiated there"),
            (lambda logits: logits.sum() * math.inf, ValueError, r"returned inf; nothing can be differentiated there"),
            (
                lambda logits: logits.detach().sum(),
                ValueError,
                r"depends on none of the measured places, so it has no grad",
            ),
            (lambda logits: torch.tensor(1.0), ValueError, r"depends on none of the measured places"),
            (lambda logits: (logits > 2).sum(), ValueError, r"depends on none of the measured places"),
        ],
    )
    def test_what_it_must_not_return(self, make, error, sentence):
        def f(output, batch):
            return make(output.logits)

        with pytest.raises(error, match=sentence):
            UserLoss(f)(OUTPUT, BATCH)
        model = tiny_model("llama")
        before = Snapshot.of(model)
        for act in (Lens(model).record, functools.partial(Lens(model).measure, rank=3)):
            with pytest.raises(error):
                act(SEQUENCES, "resid_post.1", loss=f, progress=False)
        before.assert_unchanged(model)

    def test_its_own_exceptions_come_through(self):
        model = tiny_model("llama")
        before = Snapshot.of(model)
        with pytest.raises(AttributeError, match=r"predictions"):
            Lens(model).record(SEQUENCES, loss=lambda output, batch: output.predictions.sum(), progress=False)
        before.assert_unchanged(model)


def own_next_token_loss(output, batch: Batch):
    """Written as a person would: the log-probability of every next token."""
    chosen = output.logits.log_softmax(-1)[:, :-1].gather(-1, batch.tokens[:, 1:, None])[..., 0]
    wanted = batch.attention_mask[:, :-1] & batch.attention_mask[:, 1:]
    return -(chosen * wanted).sum()


def shorter_next_token_loss(output, batch: Batch):
    return causal_loss_sum(output.logits, batch.tokens, batch.attention_mask)[0]


@pytest.fixture(scope="module")
def default():
    return Lens(tiny_model("llama")).measure(SEQUENCES, **QUICK)


class TestAgainstTheLossOfTheModel:
    @pytest.mark.parametrize("padding_side", ["left", "right"])
    def test_the_same_loss_written_by_hand_gives_the_same_numbers(self, default, padding_side):
        options = {"padding_side": padding_side, **QUICK}
        found = Lens(tiny_model("llama")).measure(SEQUENCES, loss=own_next_token_loss, **options)
        assert [one.name for one in found.measurements] == [one.name for one in default.measurements]
        for one, other in zip(found.measurements, default.measurements, strict=True):
            assert one.energy.energy == pytest.approx(other.energy.energy, rel=1e-5)
            if other.energy.signal_lift is not None:
                assert one.energy.signal_lift == pytest.approx(other.energy.signal_lift, rel=1e-5)
            assert one.energy.p_value == other.energy.p_value
            assert one.isotropy.score == pytest.approx(other.isotropy.score, rel=1e-5)
        targets = default.corpus.test_tokens - default.corpus.test_sequences
        assert found.corpus.loss * found.corpus.test_sequences == pytest.approx(default.corpus.loss * targets, rel=1e-9)

    def test_the_very_same_sums_are_equal_to_the_last_bit(self, default):
        found = Lens(tiny_model("llama")).measure(SEQUENCES, loss=shorter_next_token_loss, **QUICK)
        assert found.measurements == default.measurements and found.spaces == default.spaces

    def test_the_report_says_whose_it_is(self, default):
        found = Lens(tiny_model("llama")).measure(SEQUENCES, loss=own_next_token_loss, **QUICK)
        assert (found.settings.loss, found.corpus.loss_unit) == ("own_next_token_loss (your own)", "sequence")
        assert (default.settings.loss, default.corpus.loss_unit) == ("next-token", "token")
        header = " ".join(as_text(found, width=160).split())
        assert f"own_next_token_loss (your own) loss {found.corpus.loss:.3f} a sequence" in header
        usual = " ".join(as_text(default, width=160).split())
        assert f"rows), loss {default.corpus.loss:.3f} nats a token" in usual


def bert_body():
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = BertModel(BertConfig(vocab_size=100, **shape))
        for parameter in model.parameters():
            parameter.data = parameter.data + 0.2 * torch.randn_like(parameter)
    return model.double().eval()


def llama_body():
    model = LlamaModel(tiny_model("llama").config).double().eval()
    model.load_state_dict(tiny_model("llama").model.state_dict())
    return model


def hidden_loss(output, batch):
    """Of real tokens only: padding must not add to it."""
    return output.last_hidden_state[batch.attention_mask].sin().sum()


class TestABodyWithoutAHead:
    """A person's own loss on what the body returns."""

    @pytest.mark.parametrize(("make", "tolerance"), [(bert_body, 1e-9), (llama_body, 1e-4)])
    @pytest.mark.parametrize("options", [{"batch_size": 1}, {"batch_size": 3, "padding_side": "left"}, {}], ids=str)
    def test_moments_are_those_of_plain_autograd_whatever_the_batches(self, make, tolerance, options):
        rows, slopes, model = [], [], make()
        for sequence in SEQUENCES:
            output = model(input_ids=torch.tensor([sequence]), output_hidden_states=True)
            output.hidden_states[1].retain_grad()
            output.last_hidden_state.sin().sum().backward()
            rows.append(output.hidden_states[1].detach()[0])
            slopes.append(output.hidden_states[1].grad[0])
        found = Lens(make()).record(SEQUENCES, "resid_post.0", loss=hidden_loss, progress=False, **options)
        (found,) = found.values()
        for moments, parts in ((found.activations, rows), (found.gradients, slopes)):
            expected = scatter(torch.cat(parts))
            assert moments.count == sum(map(len, SEQUENCES))
            assert np.abs(array(moments.scatter) - expected).max() <= tolerance * np.abs(expected).max()

    @pytest.mark.parametrize("make", [bert_body, llama_body])
    def test_a_sum_does_not_depend_on_the_batches_and_a_mean_does(self, make):
        def mean_loss(output, batch):
            return hidden_loss(output, batch) / batch.attention_mask.sum()

        found = {
            (loss, size): Lens(make()).measure(SEQUENCES, "resid_post.0", loss=loss, batch_size=size, **QUICK)
            for loss in (hidden_loss, mean_loss)
            for size in (1, 4)
        }
        energies = {key: report.of("resid_post.0").energy.energy for key, report in found.items()}
        assert energies[hidden_loss, 1] == pytest.approx(energies[hidden_loss, 4], rel=1e-5)
        assert found[hidden_loss, 1].corpus.loss == pytest.approx(found[hidden_loss, 4].corpus.loss, rel=1e-6)
        assert abs(energies[mean_loss, 1] / energies[mean_loss, 4] - 1) > 1e-3

    def test_weight_gradients_of_such_a_loss(self):
        model = bert_body()
        _, test = Corpus.from_tokens(SEQUENCES).split(0.5, 0)
        for sequence in test.sequences:
            model(input_ids=torch.tensor(sequence[None].astype(np.int64))).last_hidden_state.sin().sum().backward()
        gradient = model.encoder.layer[0].intermediate.dense.weight.grad
        report = Lens(bert_body()).measure(SEQUENCES, loss=hidden_loss, **QUICK)
        one = report.of("mlp_in.0")
        basis = report.subspaces[one.fit_site].basis
        share = float((gradient @ basis).square().sum() / gradient.square().sum())
        assert one.energy.energy == pytest.approx(share, rel=1e-9)
