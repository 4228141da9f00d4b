"""Everything a measurement must give back as it found it."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True)
class Snapshot:
    """A model and the process around it at one moment."""

    wants_gradient: tuple[bool, ...]
    gradients: tuple[Tensor | None, ...]
    gradient_values: tuple[Tensor | None, ...]
    values: tuple[Tensor, ...]
    training: tuple[bool, ...]
    hooks: tuple[tuple[int, ...], ...]
    random_state: Tensor
    gradients_enabled: bool

    @classmethod
    def of(cls, model: Any) -> Snapshot:
        parameters, modules = list(model.parameters()), list(model.modules())
        return cls(
            wants_gradient=tuple(parameter.requires_grad for parameter in parameters),
            gradients=tuple(parameter.grad for parameter in parameters),
            gradient_values=tuple(None if p.grad is None else p.grad.clone() for p in parameters),
            values=tuple(parameter.detach().clone() for parameter in parameters),
            training=tuple(module.training for module in modules),
            hooks=tuple(hooks_of(module) for module in modules),
            random_state=torch.get_rng_state(),
            gradients_enabled=torch.is_grad_enabled(),
        )

    def assert_unchanged(self, model: Any) -> None:
        """The same flags, the same ``grad`` objects with the same values, the same modes, hooks and random state."""
        now = Snapshot.of(model)
        assert now.wants_gradient == self.wants_gradient
        assert all(new is old for new, old in zip(now.gradients, self.gradients, strict=True))
        for new, old in zip(now.gradient_values, self.gradient_values, strict=True):
            assert old is None or torch.equal(new, old)
        assert all(torch.equal(new, old) for new, old in zip(now.values, self.values, strict=True))
        assert now.training == self.training
        assert now.hooks == self.hooks
        assert torch.equal(now.random_state, self.random_state)
        assert now.gradients_enabled == self.gradients_enabled


def hooks_of(module: Any) -> tuple[int, ...]:
    """Identities of all hooks of one module."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return tuple(id(hook) for kind in kinds for hook in getattr(module, kind).values())


def unusual_state(model: Any) -> None:
    """Mixed flags, some gradients, mixed train and eval, dropout that would change every number."""
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 3 != 0)
        if number % 2:
            parameter.grad = torch.full_like(parameter, float(number))
    for number, module in enumerate(model.modules()):
        module.training = number % 2 == 0
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
            module.training = True


class GraphMemory:
    """Bytes that autograd graphs hold, now and at most, with Python's cycle collector off.

    Everything that a graph saves is wrapped, and the wrapper's death is counted: what a reference cycle keeps alive
    stays on the books.
    """

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0
        self._hooks = saved_tensors_hooks(self._pack, lambda box: box.tensor)

    def __enter__(self) -> GraphMemory:
        gc.collect()
        gc.disable()
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        gc.enable()

    def _pack(self, tensor: Tensor) -> _Box:
        box = _Box(tensor.detach())
        size = tensor.numel() * tensor.element_size()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(box, self._release, size)
        return box

    def _release(self, size: int) -> None:
        self.live -= size


class _Box:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def live_tensors() -> list[Tensor]:
    """All tensors that Python can see."""
    # isinstance would wake deprecated attributes of torch's modules.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]


def bytes_of(tensors: list[Tensor]) -> int:
    """Bytes of these tensors, each storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
