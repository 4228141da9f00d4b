"""Taps on hand-made modules: what they see, what they leave alone, and that nothing stays alive because of them."""

from __future__ import annotations

import weakref

import pytest
import torch
from model_snapshot import GraphMemory, hooks_of
from torch import nn

from tangent_lens.models.protocol import TapPoint
from tangent_lens.recording.taps import GradientNeverCame, SiteNeverFired, attach_tap, host_function


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


class Attention(nn.Module):
    """Reads one tensor three times, each time weighted by another matrix; ``reads`` says which of them count."""

    def __init__(self, reads="qkv"):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name in "qkv":
            self.register_buffer(name, torch.randn(4, 4, generator=generator).double())
        self.reads = reads

    def forward(self, query_input, key_input=None, value_input=None, *, scale=1.0):
        inputs = {"q": query_input, "k": key_input, "v": value_input}
        return scale * sum((inputs[name] @ getattr(self, name)).sin() for name in self.reads)


WIDE = X.double()
COPIES = ("query_input", "key_input", "value_input")


def total_gradient(make_arguments, module):
    """Of a tensor of which the arguments are made."""
    x = WIDE.clone().requires_grad_(True)
    args, kwargs = make_arguments(x)
    module(*args, **kwargs).square().sum().backward()
    return x.grad


def copied(*how):
    """Three copies of a tensor, each given by place (p) or by name (n)."""

    def make(x):
        given = [(name, x.clone(), way) for name, way in zip(COPIES, how, strict=True)]
        return [one for _, one, way in given if way == "p"], {name: one for name, one, way in given if way == "n"}

    return make


def near(found, expected):
    return float((found - expected).abs().max()) <= 1e-12 * float(expected.abs().max())


WAYS = {
    "by name": copied("n", "n", "n"),
    "by place": copied("p", "p", "p"),
    "one by place": copied("p", "n", "n"),
    "two by place": copied("p", "p", "n"),
    "the very same tensor": lambda x: ([x * 1] * 3, {}),
    "two that are one": lambda x: (lambda copy: ([copy, x.clone(), copy], {}))(x.clone()),
    "and another argument": lambda x: ([], {"scale": 2.0, **copied("n", "n", "n")(x)[1]}),
}


@pytest.mark.parametrize("way", WAYS)
class TestSeveralCopiesOfOneTensor:
    """A host library may hand one tensor over in copies: what comes back to them adds up."""

    def test_their_gradients_add_up_to_that_of_the_tensor(self, way):
        kept, module = Kept(gradients=True), Attention()
        expected = total_gradient(WAYS[way], module)
        handle = attach_tap(TapPoint(module, "input", "attn", arguments=COPIES), kept)
        found = total_gradient(WAYS[way], module)
        handle.remove()
        assert torch.equal(found, expected)
        assert len(kept.activations) == len(kept.gradients) == 1
        assert torch.equal(kept.activations[0], WIDE) and not kept.gradients[0].requires_grad
        assert near(kept.gradients[0], expected) and float(expected.abs().max()) > 1

    def test_each_pass_and_each_backward_pass_counts_for_itself(self, way):
        kept, module = Kept(gradients=True), Attention()
        attach_tap(TapPoint(module, "input", "attn", arguments=COPIES), kept)
        x = WIDE.clone().requires_grad_(True)
        losses = []
        for factor in (1.0, 3.0):
            args, kwargs = WAYS[way](x)
            losses.append(factor * module(*args, **kwargs).square().sum())
        losses[1].backward(retain_graph=True)
        losses[0].backward()
        losses[1].backward()
        assert len(kept.activations) == 2 and len(kept.gradients) == 3
        once = total_gradient(WAYS[way], Attention())
        for found, factor in zip(kept.gradients, (3, 1, 3), strict=True):
            assert near(found, factor * once)

    def test_as_hooks_of_the_person(self, way):
        kept, module = Kept(gradients=True), Attention()
        function = host_function(TapPoint(module, "input", "attn", arguments=COPIES), kept)
        module.register_forward_pre_hook(function, with_kwargs=True)
        found = total_gradient(WAYS[way], module)
        assert near(kept.gradients[0], found)


def test_no_graph_stays_alive_because_of_copies():
    attach_tap(TapPoint(module := Attention(), "input", "attn", arguments=COPIES), Kept(gradients=True))
    with GraphMemory() as memory:
        total_gradient(WAYS["one by place"], module)
        assert memory.peak > 0 and memory.live == 0


class TestCopiesThatAreNotAllReached:
    """A sum is whole or it is not told: never the gradient of some copies as if it were that of the tensor."""

    def test_of_a_copy_that_the_loss_does_not_reach(self):
        kept, module = Kept(gradients=True), Attention(reads="qv")
        attach_tap(TapPoint(module, "input", "attn", arguments=COPIES), kept)
        found = total_gradient(WAYS["by name"], module)
        assert not kept.gradients or near(kept.gradients[0], found)

    def test_of_a_copy_that_can_have_no_gradient(self):
        attach_tap(TapPoint(module := Attention(), "input", "attn", arguments=COPIES), Kept(gradients=True))
        x = WIDE.clone().requires_grad_(True)
        with pytest.raises(GradientNeverCame, match=r"attn: no gradient can come here"):
            module(x * 1, x.detach().clone(), x * 1)

    def test_what_one_backward_pass_left_over_does_not_enter_the_next(self):
        kept, module = Kept(gradients=True), Attention()
        attach_tap(TapPoint(module, "input", "attn", arguments=COPIES), kept)
        x = WIDE.clone().requires_grad_(True)
        copies = [x.clone() for _ in COPIES]
        output = module(*copies)
        (copies[0].square().sum() * 5).backward(retain_graph=True)
        partial = x.grad.clone()
        output.square().sum().backward()
        whole = x.grad - partial
        assert all(
            near(found, one)
            for found, one in zip(
                kept.gradients, [whole] if len(kept.gradients) == 1 else [partial, whole], strict=False
            )
        )

    @pytest.mark.parametrize(
        "arguments", [{}, {"key_input": X}, {"query_input": X, "key_input": X, "value_input": None}]
    )
    def test_a_call_without_one_of_them_is_told_with_their_names(self, arguments):
        block = Returning(lambda *args, **kwargs: X)
        attach_tap(TapPoint(block, "input", "blocks.1.attn", arguments=COPIES), Kept())
        with pytest.raises(
            SiteNeverFired, match=r"blocks\.1\.attn: called without query_input, key_input, value_input"
        ):
            block(**arguments)


class TestWhichArgument:
    class Block(nn.Module):
        def forward(self, first, hidden_states=None, third=None):
            return first if hidden_states is None else hidden_states

    @pytest.mark.parametrize(
        ("args", "kwargs"),
        [
            ((X * 2, X), {}),
            ((X * 2,), {"hidden_states": X}),
            ((), {"third": X * 3, "hidden_states": X, "first": X * 2}),
            ((X * 2, X, X * 3), {}),
        ],
        ids=["by place", "by name", "all by name", "among others"],
    )
    def test_by_name_or_by_its_place_in_the_signature(self, args, kwargs):
        kept, block = Kept(), self.Block()
        attach_tap(TapPoint(block, "input", "block"), kept)
        block(*args, **kwargs)
        assert torch.equal(kept.activations[0], X)

    def test_the_first_one_where_the_signature_has_no_such_name(self, linear):
        kept = Kept()
        attach_tap(TapPoint(linear, "input", "linear", arguments=("hidden_states",)), kept)
        linear(X)
        assert torch.equal(kept.activations[0], X)

    def test_a_call_without_it_is_told(self):
        attach_tap(TapPoint(block := Returning(lambda: X), "input", "blocks.2"), Kept())
        with pytest.raises(SiteNeverFired, match=r"blocks\.2: called without hidden_states"):
            block()


class TestWidth:
    """A tensor of another width than the site has is another tensor."""

    def through(self, tensor, receive, side="output", **options):
        block = Returning(lambda x: x * 1)
        attach_tap(TapPoint(block, side, "blocks.3.hook_q", **options), receive)
        return block(tensor)

    @pytest.mark.parametrize("side", ["input", "output"])
    def test_the_right_width_passes(self, side):
        kept = Kept()
        self.through(X, kept, side, width=4)
        assert torch.equal(kept.activations[0], X)

    @pytest.mark.parametrize("side", ["input", "output"])
    @pytest.mark.parametrize("width", [3, 5, 12])
    def test_another_is_told_with_both(self, side, width):
        with pytest.raises(SiteNeverFired, match=rf"blocks\.3\.hook_q: .*4.*{width}.*turn that mode off"):
            self.through(X, Kept(), side, width=width)

    def test_any_width_passes_where_none_is_known(self):
        kept = Kept()
        self.through(X, kept)
        assert kept.activations[0].shape == (2, 3, 4)

    def test_heads_side_by_side_are_one_row(self):
        kept, heads = Kept(gradients=True), X.reshape(2, 3, 2, 2).clone().requires_grad_(True)
        output = self.through(heads, kept, width=4)
        (output * X.reshape(2, 3, 2, 2)).sum().backward()
        assert torch.equal(kept.activations[0], X) and torch.equal(kept.gradients[0], X)
        assert output.shape == (2, 3, 2, 2)

    @pytest.mark.parametrize("shape", [(2, 1, 3, 4), (2, 3, 2, 4), (2, 4), (4,)])
    def test_one_copy_for_each_head_is_not_the_site(self, shape):
        """Only heads * d_head == width are heads side by side."""
        with pytest.raises(SiteNeverFired, match=r"turn that mode off"):
            self.through(torch.zeros(shape), Kept(), width=4)

    def test_four_dimensions_stay_four_where_no_width_is_known(self):
        kept, image = Kept(gradients=True), torch.randn(2, 3, 4, 5, requires_grad=True)
        self.through(image, kept).sum().backward()
        assert kept.activations[0].shape == kept.gradients[0].shape == (2, 3, 4, 5)

    def test_the_width_is_that_of_the_columns_and_the_whole_has_none(self):
        kept, point = (
            Kept(),
            TapPoint(block := Returning(lambda x: x * 1), "output", "qkv", torch.tensor([0, 3]), width=2),
        )
        attach_tap(point, kept)
        attach_tap(point.whole, kept)
        block(X)
        assert torch.equal(kept.activations[0], X[..., [0, 3]]) and torch.equal(kept.activations[1], X)
        whole = point.whole
        assert whole.columns is None and whole.width is None and whole.whole is whole and whole.module is block
        with pytest.raises(SiteNeverFired):
            self.through(X, Kept(), columns=torch.tensor([0, 3]), width=4)
