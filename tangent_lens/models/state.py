"""Lend a model to a measurement and give it back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tangent_lens.models.protocol import Model, read_tensor


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """No dropout inside; each submodule's own train/eval mode and the random state come back."""
    modes = [(part, part.training) for part in module.modules()]
    device_of = next((p.device for p in module.parameters() if p.device.type == "cuda"), None)
    with torch.random.fork_rng(devices=[device_of] if device_of else []):
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
    site. ``requires_grad`` comes back as it was and no ``grad`` is touched.

    Raises:
        RuntimeError: under ``torch.inference_mode()``.
    """
    asked = [(parameter, parameter.requires_grad) for parameter in model.module.parameters()]
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "torch.inference_mode() is on, under which nothing has a gradient; leave it, or use torch.no_grad()"
        )
    start = model.embedding_point()
    # First of all hooks, so that a tap at the embedding sees the tensor that asks for the gradient.
    hook = start.module.register_forward_hook(
        lambda module, args, output: read_tensor(output).detach().requires_grad_(True), prepend=True
    )
    try:
        for parameter, _ in asked:
            parameter.requires_grad_(False)
        yield
    finally:
        hook.remove()
        for parameter, wanted in asked:
            parameter.requires_grad_(wanted)
