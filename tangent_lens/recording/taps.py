"""Taps: raw torch hooks that read a site, on every torch library alike.

A forward hook on the module sees the activation; a hook on that very tensor sees its total gradient. The libraries' own
backward hooks are not used: some miss paths, some leak, some are removed by the person's ``reset_hooks()``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from tangent_lens.models.protocol import TapPoint, forward_parameters, read_tensor

GradientReceiver = Callable[[Tensor], None]
# Takes the activation; returns what wants its gradient, or None.
ActivationReceiver = Callable[[Tensor], "GradientReceiver | None"]


class GradientNeverCame(RuntimeError):
    """A gradient was asked for that no backward pass brought."""


class SiteNeverFired(RuntimeError):
    """A site was tapped, the model ran, and no tensor passed there (or more often than once a run)."""


def attach_tap(point: TapPoint, receive: ActivationReceiver) -> RemovableHandle:
    """Call ``receive`` with the detached tensor whenever one passes, and what it returns with the gradient.

    Raises:
        SiteNeverFired: (from inside the forward pass) a tensor of another width passes than the site has.
        GradientNeverCame: (from inside the forward pass) a gradient is wanted of a tensor that cannot have one.
    """
    if point.side == "output":
        return point.module.register_forward_hook(lambda module, args, output: _pass_on(point, [output], receive))

    def before(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        _pass_on(point, _arguments(point, args, kwargs), receive)

    return point.module.register_forward_pre_hook(before, with_kwargs=True)


def host_function(point: TapPoint, receive: ActivationReceiver) -> Callable[..., Tensor | None]:
    """The same tap as a function that a person registers: ``f(tensor, hook)`` for TransformerLens,
    ``f(module, args, output)`` for torch.
    """

    def function(first: Any, *rest: Any, **named: Any) -> Tensor | None:
        if isinstance(first, Tensor):
            _pass_on(point, [first], receive)
            # TransformerLens hands over a view by heads, and goes on with the tensor behind it unless the hook returns
            # the view: only then does the view have a gradient.
            return first if first.ndim == 4 else None
        if point.side == "output":
            _pass_on(point, [rest[1]], receive)
        else:
            _pass_on(point, _arguments(point, rest[0], rest[1] if len(rest) > 1 else {}), receive)
        return None

    return function


def _arguments(point: TapPoint, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that carry the site, by name or, where they were given without, by place."""
    found = [kwargs.get(name) if name in kwargs else _by_place(point, name, args) for name in point.arguments]
    if any(value is None for value in found):
        raise SiteNeverFired(f"{point.name}: called without {', '.join(point.arguments)}; this module is called oddly")
    return found


def _by_place(point: TapPoint, name: str, args: Sequence[Any]) -> Any:
    places = forward_parameters(point.module)
    place = places.index(name) if name in places else 0
    return args[place] if place < len(args) else None


def _pass_on(point: TapPoint, values: list[Any], receive: ActivationReceiver) -> None:
    _refuse_recomputation(point)
    # Returns None: the tensor goes on unchanged. Nothing here may keep a tensor itself alive: a closure over it inside
    # its own hook would be a cycle that holds the whole graph of one step.
    tensors = list({id(tensor): tensor for tensor in map(read_tensor, values)}.values())
    on_gradient = receive(_site_tensor(tensors[0].detach(), point))
    if on_gradient is None:
        return
    if not all(tensor.requires_grad for tensor in tensors):
        raise GradientNeverCame(
            f"{point.name}: no gradient can come here, since its tensor does not require one. The forward pass ran under "
            "torch.no_grad() (as gradient checkpointing does), or every parameter before it is frozen; use "
            "`with lens.gradients():` around both passes"
        )
    take = _receiver(point, on_gradient)
    if len(tensors) == 1:
        tensors[0].register_hook(take)
        return

    # One site, handed over as several equal tensors: its gradient is the sum of theirs, in each backward pass anew.
    def take_sum(gradients: Sequence[Tensor | None]) -> None:
        found = [gradient for gradient in gradients if gradient is not None]
        if found:
            take(torch.stack([gradient.detach() for gradient in found]).sum(dim=0))

    register_multi_grad_hook(tensors, take_sum)


def _receiver(point: TapPoint, on_gradient: GradientReceiver) -> Callable[[Tensor], None]:
    def receive(gradient: Tensor) -> None:
        on_gradient(_site_tensor(gradient.detach(), point))

    return receive


def _site_tensor(tensor: Tensor, point: TapPoint) -> Tensor:
    """(batch, position, width): heads side by side, and only the site's own columns of a fused tensor."""
    if tensor.ndim == 4 and point.width == tensor.shape[2] * tensor.shape[3]:
        tensor = tensor.flatten(2)
    if point.columns is not None:
        tensor = tensor[..., point.columns.to(tensor.device)]
    if point.width is not None and (tensor.ndim != 3 or tensor.shape[-1] != point.width):
        raise SiteNeverFired(
            f"{point.name}: a tensor of shape {tuple(tensor.shape)} passes, and the site is (batch, position, {point.width}); "
            "the model runs in a mode (split inputs for each head, say) in which no one tensor is the site; turn that mode off"
        )
    return tensor


def _refuse_recomputation(point: TapPoint) -> None:
    # A forward hook that fires while autograd runs backward: the module is being run a second time.
    if torch._C._current_graph_task_id() != -1:
        raise SiteNeverFired(
            f"{point.name} runs again during the backward pass: gradient checkpointing is on, and would count every row "
            "twice; turn it off with model.gradient_checkpointing_disable()"
        )
