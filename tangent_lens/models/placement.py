"""Where the parts of a model lie and run: on one device, on several, or offloaded by accelerate until they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tangent_lens.models.protocol import UnsupportedModel


def input_device(module: nn.Module) -> torch.device:
    """Where token ids must lie: where the token embedding is computed, also while its weights are offloaded.

    Raises:
        UnsupportedModel: the weights were never loaded.
    """
    embedding = _embedding_of(module)
    weight = next(embedding.parameters(), None)
    if weight is None:
        return torch.device("cpu")
    if not weight.is_meta:
        return weight.device
    for hook in _hooks_around(embedding, module):
        if hook.execution_device is not None:
            return torch.device(hook.execution_device)
    raise UnsupportedModel(
        f"the weights of this {type(module).__name__} are on the meta device and nothing loads them, so it cannot run; "
        "load it with from_pretrained(...)"
    )


def cuda_devices(module: nn.Module) -> list[torch.device]:
    """Every CUDA device on which a part of the model draws its random numbers."""
    hooks = [hook for part in module.modules() for hook in accelerate_hooks(part)]
    named = {torch.device(hook.execution_device) for hook in hooks if hook.execution_device is not None}
    here = {parameter.device for parameter in module.parameters()}
    return sorted((device for device in named | here if device.type == "cuda"), key=str)


def accelerate_hooks(part: nn.Module) -> list[Any]:
    """The hooks of accelerate on one module: each says where the module is computed."""
    hook = getattr(part, "_hf_hook", None)
    return [one for one in getattr(hook, "hooks", (hook,)) if hasattr(one, "execution_device")]


def _embedding_of(module: nn.Module) -> nn.Module:
    """The token embedding: the first embedding of all; of a model without one, the first part that has weights."""
    embeddings = (part for part in module.modules() if isinstance(part, nn.Embedding))
    weighted = (part for part in module.modules() if next(part.parameters(recurse=False), None) is not None)
    return next(embeddings, None) or next(weighted, module)


def _hooks_around(part: nn.Module, root: nn.Module) -> list[Any]:
    """Accelerate's hooks on a module and on all that hold it, innermost first."""
    name = next(name for name, module in root.named_modules() if module is part)
    steps = name.split(".") if name else []
    around = [root.get_submodule(".".join(steps[:depth])) for depth in range(len(steps), -1, -1)]
    return [hook for module in around for hook in accelerate_hooks(module)]


@dataclass(frozen=True)
class _OffloadedWeight:
    """A tensor that autograd wants to keep, and that can be had again from an offloaded weight."""

    hook: Any
    name: str
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    def load(self) -> Tensor:
        weight = self.hook.weights_map[self.name].detach().to(self.hook.execution_device, self.dtype).contiguous()
        return weight.as_strided(self.size, self.stride, weight.storage_offset() + self.start)


@contextmanager
def offloaded_weights_reloaded(module: nn.Module) -> Iterator[None]:
    """The graph of one step would hold every offloaded weight at once, on the device that is too small for them."""
    running: list[tuple[nn.Module, Any]] = []

    def keep(tensor: Tensor) -> Any:
        found = _offloaded_weight(tensor, *running[-1]) if running else None
        return found or (tensor, tensor._version)

    def give_back(kept: Any) -> Tensor:
        if isinstance(kept, _OffloadedWeight):
            return kept.load()
        tensor, version = kept
        if tensor._version != version:  # autograd's own check, which hooks turn off
            raise RuntimeError(
                "a tensor that the backward pass needs was changed in place; let the hook make a new one"
            )
        return tensor

    offloaded = [
        (part, hook)
        for part in module.modules()
        for hook in accelerate_hooks(part)
        if getattr(hook, "offload", False) is True
    ]
    with ExitStack() as stack:
        for part, hook in offloaded:
            _note_while_running(part, hook, running, stack)
        if offloaded:
            stack.enter_context(saved_tensors_hooks(keep, give_back))
        yield


def _note_while_running(part: nn.Module, hook: Any, running: list[tuple[nn.Module, Any]], stack: ExitStack) -> None:
    def begin(*_: Any) -> None:
        running.append((part, hook))

    def end(*_: Any) -> None:
        running.pop()

    stack.callback(part.register_forward_pre_hook(begin).remove)
    stack.callback(part.register_forward_hook(end, always_call=True).remove)


def _offloaded_weight(tensor: Tensor, part: nn.Module, hook: Any) -> _OffloadedWeight | None:
    for name, weight in part.named_parameters(recurse=hook.place_submodules):
        plain = type(weight) is nn.Parameter and type(tensor) in (Tensor, nn.Parameter) and weight.is_contiguous()
        if plain and not weight.is_meta and weight.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            start = int(tensor.storage_offset() - weight.storage_offset())
            return _OffloadedWeight(hook, name, weight.dtype, tuple(tensor.shape), tensor.stride(), start)
    return None
