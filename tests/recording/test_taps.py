"""Taps on hand-made modules: what they see, what they leave alone, and that nothing stays alive because of them."""

from __future__ import annotations

import weakref

import pytest
import torch
from model_snapshot import GraphMemory, hooks_of
from torch import nn

from tangent_lens.models.protocol import TapPoint
from tangent_lens.recording.taps import GradientNeverCame, attach_tap, host_function


class Kept:
    """A receiver that keeps what it is given."""

    def __init__(self, gradients=False):
        self.wants_gradients = gradients
        self.activations = []
        self.gradients = []

    def __call__(self, activation):
        self.activations.append(activation)
        return self.gradients.append if self.wants_gradients else None


class Returning(nn.Module):
    """Hands over whatever it is told to make of its input."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, *args, **kwargs):
        return self.make(*args, **kwargs)


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 6)


X = torch.arange(24.0).reshape(2, 3, 4) / 7


def test_an_output_tap_sees_the_output_detached(linear):
    kept = Kept()
    attach_tap(TapPoint(linear, "output", "linear"), kept)
    output = linear(X)
    assert torch.equal(kept.activations[0], output)
    assert not kept.activations[0].requires_grad and output.requires_grad


def test_an_input_tap_sees_the_input(linear):
    kept = Kept()
    attach_tap(TapPoint(linear, "input", "linear"), kept)
    linear(X)
    assert torch.equal(kept.activations[0], X)


def test_an_input_tap_sees_hidden_states_given_by_name():
    kept = Kept()
    block = Returning(lambda hidden_states, mask=None: hidden_states * 2)
    attach_tap(TapPoint(block, "input", "block"), kept)
    block(mask=None, hidden_states=X)
    assert torch.equal(kept.activations[0], X)


@pytest.mark.parametrize("kind", [tuple, list])
def test_the_first_entry_of_a_tuple_is_what_passes(kind):
    kept = Kept()
    block = Returning(lambda x: kind([x * 2, "cache"]))
    attach_tap(TapPoint(block, "output", "block"), kept)
    block(X)
    assert torch.equal(kept.activations[0], X * 2)


def test_something_that_is_no_tensor_is_refused_by_its_type():
    block = Returning(lambda x: {"hidden": x})
    attach_tap(TapPoint(block, "output", "block"), Kept())
    with pytest.raises(TypeError, match="a tensor should pass here, but dict does"):
        block(X)


def test_what_passes_goes_on_unchanged(linear):
    whole = (X * 2, "cache")
    block = Returning(lambda x: whole)
    attach_tap(TapPoint(block, "output", "block"), Kept(gradients=False))
    assert block(X) is whole
    plain = linear(X)
    attach_tap(TapPoint(linear, "output", "linear"), Kept(gradients=True))
    attach_tap(TapPoint(linear, "input", "linear"), Kept())
    assert torch.equal(linear(X), plain)


@pytest.mark.parametrize("side", ["input", "output"])
def test_the_gradient_is_the_total_over_all_that_reads_the_tensor(linear, side):
    kept = Kept(gradients=True)
    attach_tap(TapPoint(linear, side, "linear"), kept)
    x = X.clone().requires_grad_(True)
    output = linear(x)
    output.retain_grad()
    (output.square().sum() + 3 * output.sum() + 5 * x.sum()).backward()
    assert torch.equal(kept.gradients[0], x.grad if side == "input" else output.grad)
    assert not kept.gradients[0].requires_grad


def test_each_backward_pass_is_told(linear):
    kept = Kept(gradients=True)
    attach_tap(TapPoint(linear, "output", "linear"), kept)
    loss = linear(X).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert len(kept.activations) == 1 and len(kept.gradients) == 2


def test_columns_pick_their_own_part_of_both(linear):
    kept, columns = Kept(gradients=True), torch.tensor([5, 0, 2])
    attach_tap(TapPoint(linear, "output", "linear", columns), kept)
    output = linear(X)
    output.retain_grad()
    output.pow(3).sum().backward()
    assert torch.equal(kept.activations[0], output.detach()[..., [5, 0, 2]])
    assert torch.equal(kept.gradients[0], output.grad[..., [5, 0, 2]])


def test_no_gradient_under_no_grad_is_an_error_that_names_the_place(linear):
    attach_tap(TapPoint(linear, "output", "blocks.7.linear"), Kept(gradients=True))
    with (
        torch.no_grad(),
        pytest.raises(GradientNeverCame, match=r"blocks\.7\.linear: .*torch\.no_grad\(\).*lens\.grad"),
    ):
        linear(X)


def test_no_gradient_of_frozen_parameters_is_an_error_that_names_the_way_out(linear):
    linear.requires_grad_(False)
    attach_tap(TapPoint(linear, "output", "linear"), Kept(gradients=True))
    with pytest.raises(
        GradientNeverCame, match=r"every parameter before it is frozen; use `with lens\.gradients\(\):`"
    ):
        linear(X)


def test_activations_alone_need_no_gradient(linear):
    kept = Kept()
    attach_tap(TapPoint(linear, "output", "linear"), kept)
    with torch.no_grad():
        linear(X)
    assert len(kept.activations) == 1


@pytest.mark.parametrize("side", ["input", "output"])
def test_removing_a_tap_leaves_the_persons_hooks(linear, side):
    seen = []
    linear.register_forward_hook(lambda *args: seen.append("after"))
    linear.register_forward_pre_hook(lambda *args: seen.append("before"))
    hooks, kept = hooks_of(linear), Kept()
    handle = attach_tap(TapPoint(linear, side, "linear"), kept)
    assert len(hooks_of(linear)) == len(hooks) + 1
    handle.remove()
    assert hooks_of(linear) == hooks
    linear(X)
    assert seen == ["before", "after"] and not kept.activations


def test_a_tap_sees_what_an_earlier_hook_replaced_and_not_what_a_later_one_does(linear):
    early, late = Kept(), Kept()
    attach_tap(TapPoint(linear, "output", "linear"), early)
    linear.register_forward_hook(lambda module, args, output: output * 0 + 9)
    attach_tap(TapPoint(linear, "output", "linear"), late)
    linear(X)
    assert torch.equal(late.activations[0], torch.full((2, 3, 6), 9.0))
    assert float(early.activations[0].max()) < 9


@pytest.mark.parametrize("backward", [True, False])
def test_no_cycle_keeps_a_graph_alive(linear, backward):
    attach_tap(TapPoint(linear, "output", "linear"), lambda activation: lambda gradient: None)
    attach_tap(TapPoint(linear, "input", "linear"), lambda activation: None)
    with GraphMemory() as memory:
        output = linear(X)
        loss = output.square().sum()
        alive = weakref.ref(output)
        if backward:
            loss.backward(retain_graph=True)
        assert memory.live > 0
        del output, loss
        assert alive() is None and memory.live == 0


class TestHostFunction:
    """The same tap as a function that a person registers."""

    def test_as_a_transformer_lens_hook(self):
        kept = Kept(gradients=True)
        function = host_function(TapPoint(nn.Identity(), "output", "hook"), kept)
        tensor = X.clone().requires_grad_(True)
        assert function(tensor, hook="a HookPoint") is None
        assert function(tensor, "a HookPoint") is None
        (tensor * 3).sum().backward()
        assert torch.equal(kept.activations[0], X) and len(kept.activations) == 2
        assert torch.equal(kept.gradients[0], torch.full_like(X, 3.0))

    def test_as_a_torch_forward_hook(self, linear):
        kept = Kept()
        linear.register_forward_hook(host_function(TapPoint(linear, "output", "linear"), kept))
        assert torch.equal(linear(X), kept.activations[0])

    @pytest.mark.parametrize("with_kwargs", [True, False])
    def test_as_a_torch_pre_hook(self, linear, with_kwargs):
        kept = Kept()
        function = host_function(TapPoint(linear, "input", "linear"), kept)
        linear.register_forward_pre_hook(function, with_kwargs=with_kwargs)
        linear(X)
        assert torch.equal(kept.activations[0], X)

    def test_as_a_torch_pre_hook_of_a_block_called_by_name(self):
        kept = Kept()
        block = Returning(lambda hidden_states: hidden_states)
        function = host_function(TapPoint(block, "input", "block"), kept)
        block.register_forward_pre_hook(function, with_kwargs=True)
        block(hidden_states=X)
        assert torch.equal(kept.activations[0], X)

    def test_columns_and_missing_gradients_as_in_any_tap(self):
        kept = Kept(gradients=True)
        function = host_function(TapPoint(nn.Identity(), "output", "blocks.0.hook", torch.tensor([1])), kept)
        with pytest.raises(GradientNeverCame, match=r"blocks\.0\.hook: no gradient can come here"):
            function(X, hook=None)
        assert torch.equal(kept.activations[0], X[..., [1]])
