"""Lend a model to a measurement and give it back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from tangent_lens.models.placement import cuda_devices, offloaded_weights_reloaded
from tangent_lens.models.protocol import Model, read_tensor
from tangent_lens.models.quantisation import is_quantised, never_repacked, passes_gradients_on, refuse_repacked


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """No dropout inside; each submodule's own train/eval mode and the random state come back."""
    modes = [(part, part.training) for part in module.modules()]
    with torch.random.fork_rng(devices=cuda_devices(module)), never_repacked(module):
        module.eval()
        try:
            yield
        finally:
            for part, training in modes:
                part.training = training


@contextmanager
def frozen_parameters(model: Model) -> Iterator[None]:
    """Gradients of activations without gradients of parameters: the one big saving of a measurement.

    Inside, no parameter asks for a gradient; the token embedding does instead, so that a backward pass reaches every
    site. ``requires_grad`` comes back as it was and no ``grad`` is touched. Weights that accelerate offloads are not kept
    for the backward pass but loaded again.

    Raises:
        RuntimeError: under ``torch.inference_mode()``; or quantised weights through which no gradient can pass.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "torch.inference_mode() is on, under which nothing has a gradient; leave it, or use torch.no_grad()"
        )
    refuse_repacked(model.module)
    with ExitStack() as stack:
        # First of all hooks, so that a tap at a start sees the tensor that asks for the gradient.
        for start in model.gradient_starts():
            stack.callback(start.module.register_forward_hook(_start_gradients, prepend=True).remove)
        for name, part in model.module.named_modules():
            if is_quantised(part):
                stack.callback(part.register_forward_hook(passes_gradients_on(name)).remove)
        stack.enter_context(never_repacked(model.module))
        stack.enter_context(offloaded_weights_reloaded(model.module))
        stack.enter_context(_no_parameter_asks(model.module))
        yield


@contextmanager
def _no_parameter_asks(module: nn.Module) -> Iterator[None]:
    # By name: accelerate puts a new parameter in the place of an offloaded one whenever it runs.
    asked = {name: one.requires_grad for name, one in module.named_parameters(remove_duplicate=False)}
    try:
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        yield
    finally:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            parameter.requires_grad_(asked.get(name, parameter.requires_grad))


def _start_gradients(module: nn.Module, args: Any, output: Any) -> Any:
    """Where no gradient would come: the same numbers, asking for one. A copy, since the model may write into them."""
    tensor = read_tensor(output)
    if tensor.requires_grad or not tensor.is_floating_point():
        return None
    asking = tensor.detach().requires_grad_(True).clone()
    if tensor is output:
        return asking
    if hasattr(output, "_fields"):
        return output._replace(**{output._fields[0]: asking})
    return type(output)((asking, *output[1:]))
