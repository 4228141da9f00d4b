"""What weights are stored in, and what quantised weights do to gradients. The libraries are known by their attributes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tangent_lens.models.protocol import read_tensor

# The switch by which a bitsandbytes Linear4bit repacks its weights for the CPU; see ``never_repacked``.
_REPACKS = "support_avx512bf16_for_cpu"
# Of a bitsandbytes 8-bit map.
EIGHT_BIT = "8-bit (bitsandbytes), inputs rounded to 8 bits"
# What quantised weights are stored in; wider integers are positions and other tables.
_STORED_IN = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)


def precision_of(module: nn.Module) -> str:
    """What the weights are stored in: ``float32``, or ``4-bit nf4 (bitsandbytes), computed in float32; the rest float32``."""
    plain: Counter[str] = Counter()
    quantised: Counter[str] = Counter()
    for part in module.modules():
        if is_quantised(part):
            quantised[quantisation_of(part)] += 1
        else:
            for parameter in part.parameters(recurse=False):
                plain[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    rest = " and ".join(name for name, _ in plain.most_common()) or "without parameters"
    return "; ".join([*(name for name, _ in quantised.most_common()), f"the rest {rest}"]) if quantised else rest


def parameter_count(module: nn.Module) -> int:
    """How many numbers the weights stand for: 4-bit weights unpacked, tied weights once."""
    # Offloaded, tied weights are two parameters; a HuggingFace model still knows which they are.
    tied = set(getattr(module, "all_tied_weights_keys", ()))
    counted = {}
    for prefix, part in module.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            if not (parameter.is_meta and f"{prefix}.{name}".lstrip(".") in tied):
                counted[id(parameter)] = parameter.numel()
        if is_quantised(part) and hasattr(part, "in_features"):
            linear: Any = part
            counted[id(getattr(linear, "weight", linear))] = linear.in_features * linear.out_features
    return sum(counted.values())


def is_quantised(part: nn.Module) -> bool:
    """Whether a module's own weights are packed numbers, or tensors of a quantising library's own class."""
    # Some libraries keep the weights of a linear map in buffers; elsewhere, integers in buffers are tables.
    buffers = part.buffers(recurse=False) if hasattr(part, "in_features") else ()
    own = (*part.parameters(recurse=False), *buffers)
    return any(one.dtype in _STORED_IN or not _is_torchs_own(type(one)) for one in own)


def _is_torchs_own(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "torch"


def quantisation_of(part: nn.Module) -> str:
    """How the weights of one quantised module are stored, and by which library."""
    weight: Any = getattr(part, "weight", None)
    if hasattr(weight, "quant_state"):
        computed = getattr(part, "compute_dtype", None)
        way = f"4-bit {weight.quant_type} (bitsandbytes)"
        return f"{way}, computed in {str(computed).removeprefix('torch.')}" if computed else way
    if hasattr(weight, "SCB"):
        return EIGHT_BIT
    kind = type(part) if weight is None or _is_torchs_own(type(weight)) else type(weight)
    return f"{kind.__name__} ({kind.__module__.split('.')[0]})"


@contextmanager
def never_repacked(module: nn.Module) -> Iterator[None]:
    """On some CPUs bitsandbytes rewrites 4-bit weights in the first pass without gradients, for good.

    They are rounded once more, activations are computed in bfloat16, and no gradient passes them ever after.
    """
    switches = [(part, getattr(part, _REPACKS)) for part in module.modules() if hasattr(part, _REPACKS)]
    try:
        for part, _ in switches:
            setattr(part, _REPACKS, False)
        yield
    finally:
        for part, was in switches:
            setattr(part, _REPACKS, was)


def refuse_repacked(module: nn.Module) -> None:
    """Weights that :func:`never_repacked` came too late for.

    Raises:
        RuntimeError: 4-bit weights in the format for inference alone.
    """
    for name, part in module.named_modules():
        state = getattr(getattr(part, "weight", None), "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            raise RuntimeError(
                f"no gradient passes {name}: bitsandbytes repacked its 4-bit weights for this CPU when the model ran without "
                "gradients; load the model again and measure it before you run it (measuring does not repack)"
            )


def passes_gradients_on(name: str) -> Callable[..., None]:
    """A check: kernels made for inference alone would cut gradients off, and leave the residual stream with a part of them."""

    def check(part: nn.Module, args: Any, output: Any) -> None:
        asks = torch.is_grad_enabled() and args and isinstance(args[0], Tensor) and args[0].requires_grad
        if asks and not read_tensor(output).requires_grad:
            raise RuntimeError(
                f"no gradient passes {name} ({quantisation_of(part)}): its kernel is for inference alone, and gradients "
                "before it would be wrong; load the model unquantised, or quantised so that it can be trained through "
                "(bitsandbytes, or weights alone); activations need no gradient"
            )

    return check
