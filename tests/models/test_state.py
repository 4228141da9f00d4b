"""A model that was lent comes back as it was, also when something raised in between."""

from __future__ import annotations

import pytest
import torch
from conftest import FAMILIES, boot_bridge, tiny_model
from model_snapshot import Snapshot, unusual_state
from plain_reference import assert_close, plain_pass, random_tokens, rows_of, summed_loss

from tangent_lens.lens import Lens
from tangent_lens.models.loading import wrap
from tangent_lens.models.state import evaluation_mode, frozen_parameters

TOKENS = random_tokens(2, 9)


class Stop(Exception):
    """What a hook of a test raises."""


def model_in_unusual_state(family="gpt2"):
    model = tiny_model(family)
    unusual_state(model)
    return model


def dropouts(model):
    return [module for module in model.modules() if isinstance(module, torch.nn.Dropout)]


def test_the_unusual_state_is_unusual():
    model = model_in_unusual_state()
    assert {parameter.requires_grad for parameter in model.parameters()} == {True, False}
    assert {parameter.grad is None for parameter in model.parameters()} == {True, False}
    assert {module.training for module in model.modules()} == {True, False}
    assert dropouts(model) and all(one.training and one.p == 0.5 for one in dropouts(model))


def test_evaluation_mode_puts_every_submodule_in_eval_and_back():
    model = model_in_unusual_state()
    before = Snapshot.of(model)
    with evaluation_mode(model):
        assert not any(module.training for module in model.modules())
    before.assert_unchanged(model)


def test_evaluation_mode_leaves_the_random_state():
    model = model_in_unusual_state()
    before = Snapshot.of(model)
    with evaluation_mode(model):
        torch.rand(7)
        torch.manual_seed(123)
    before.assert_unchanged(model)


def test_evaluation_mode_comes_back_after_an_exception():
    model = model_in_unusual_state()
    before = Snapshot.of(model)
    with pytest.raises(Stop), evaluation_mode(model):
        torch.rand(3)
        raise Stop
    before.assert_unchanged(model)


def test_evaluation_modes_nest():
    model = model_in_unusual_state()
    before = Snapshot.of(model)
    with evaluation_mode(model):
        with evaluation_mode(model):
            pass
        assert not any(module.training for module in model.modules())
    before.assert_unchanged(model)


def test_frozen_parameters_ask_for_nothing_inside_and_come_back():
    model = model_in_unusual_state()
    before = Snapshot.of(model)
    with frozen_parameters(wrap(model)):
        assert not any(parameter.requires_grad for parameter in model.parameters())
    before.assert_unchanged(model)


def test_a_backward_pass_inside_touches_no_gradient():
    model = model_in_unusual_state()
    before = Snapshot.of(model)
    with frozen_parameters(wrap(model)), evaluation_mode(model):
        summed_loss(model(input_ids=TOKENS).logits, TOKENS).backward()
    before.assert_unchanged(model)


def test_parameters_come_back_after_an_exception():
    model = model_in_unusual_state()
    before = Snapshot.of(model)
    with pytest.raises(Stop), frozen_parameters(wrap(model)):
        raise Stop
    before.assert_unchanged(model)


def test_frozen_parameters_nest_and_two_lenses_share_a_model():
    model = model_in_unusual_state("llama")  # without dropout, so that our own passes draw no random numbers
    before = Snapshot.of(model)
    first, second = Lens(model), Lens(model)
    with first.gradients():
        with second.gradients():
            summed_loss(model(input_ids=TOKENS).logits, TOKENS).backward()
        assert not any(parameter.requires_grad for parameter in model.parameters())
        with first.attach("resid_post.1", gradients=True) as taps:
            summed_loss(model(input_ids=TOKENS).logits, TOKENS).backward()
    before.assert_unchanged(model)
    assert taps[1].gradients.abs().max() > 0


@pytest.mark.parametrize("library", ["huggingface", "transformer_lens"])
@pytest.mark.parametrize("family", FAMILIES)
def test_site_gradients_are_the_same_on_frozen_parameters(family, library, tokenizer):
    model = tiny_model(family)
    lens = Lens(model if library == "huggingface" else boot_bridge(model, tokenizer))
    expected = plain_pass(tiny_model(family), [TOKENS]).gradients
    model = lens.model.module
    with lens.gradients(), lens.attach(lens.sites, gradients=True) as taps:
        output = model(TOKENS)
        summed_loss(output if library == "transformer_lens" else output.logits, TOKENS).backward()
    for site in lens.sites:
        assert_close(rows_of(taps[site].gradients), expected[site.name], 1e-5, site.name)


@pytest.mark.parametrize("order", ["gradients first", "attach first"])
def test_the_embedding_has_its_gradient_in_either_order(order):
    """The sentence of GradientNeverCame says: use ``with lens.gradients()`` around both passes."""
    model = tiny_model("llama")
    lens = Lens(model)
    expected = plain_pass(tiny_model("llama"), [TOKENS]).gradients["embedding"]
    taps = lens.attach("embedding", gradients=True)
    first, second = (lens.gradients(), taps) if order == "gradients first" else (taps, lens.gradients())
    with first, second:
        summed_loss(model(input_ids=TOKENS).logits, TOKENS).backward()
    assert_close(rows_of(taps["embedding"].gradients), expected, 1e-5)


def test_gradients_work_inside_no_grad_and_leave_it():
    model = tiny_model("gpt2")
    lens = Lens(model)
    with torch.no_grad():
        with lens.gradients(), lens.attach("resid_post.0", gradients=True) as taps:
            summed_loss(model(input_ids=TOKENS).logits, TOKENS).backward()
        assert not torch.is_grad_enabled()
    assert taps[0].gradients.abs().max() > 0


def test_tied_weights_come_back_once():
    model = tiny_model("gpt2")
    assert model.lm_head.weight is model.transformer.wte.weight
    model.lm_head.weight.requires_grad_(False)
    before = Snapshot.of(model)
    with frozen_parameters(wrap(model)):
        pass
    before.assert_unchanged(model)
