"""Gradients by moving a tensor and watching the loss: needs no reference, so it works where weights were processed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from conformance.batching import lay_out
from conformance.comparing import Error, largest
from conformance.families import FAMILIES, Example
from conformance.measuring import recorded_sums, tapped_rows
from conformance.reference import summed_loss
from torch import Tensor

from tangent_lens.models.protocol import Batch, TapPoint, logits_of

# Copies of the sequence in one forward pass, two for each nudge.
_COPIES = 128


@dataclass(frozen=True)
class Nudge:
    """A direction (position, width) added at some places at once, and the slope that the gradient predicts.

    Attributes:
        size: of the gradient: what a random direction makes of it is of this order.
    """

    name: str
    places: tuple[TapPoint, ...]
    direction: Tensor
    predicted: float
    size: float


def worst_slope(lens: Any, example: Example, nudges: Sequence[Nudge], steps: Sequence[float]) -> Error:
    """The largest difference between predicted and measured slope, relative to the size of the gradient.

    Of several steps the one that fits best counts, nudge by nudge: a wrong gradient fits at none.
    """
    errors = []
    for start in range(0, len(nudges), _COPIES // 2):
        part = nudges[start : start + _COPIES // 2]
        slopes = torch.stack([_slopes(lens, example, part, step) for step in steps])
        predicted = torch.tensor([nudge.predicted for nudge in part], dtype=slopes.dtype)
        best = (slopes - predicted).abs().amin(dim=0).tolist()
        errors += [Error(size / nudge.size, nudge.name) for nudge, size in zip(part, best, strict=True)]
    return largest(errors)


def site_nudges(lens: Any, backend: str, name: str, example: Example, seed: int = 0) -> list[Nudge]:
    """One nudge at every site, in a random direction."""
    rows, generator = tapped_rows(lens, lay_out([example], "alone")), torch.Generator().manual_seed(seed)
    nudges = []
    for site in lens.sites:
        gradient = rows.gradients[site.name][0].double()
        direction = torch.randn(gradient.shape, generator=generator, dtype=torch.float64)
        places = _places(lens, backend, name, site)
        predicted = float((gradient * direction).sum())
        nudges.append(Nudge(site.name, places, direction, predicted, float(gradient.norm())))
    return nudges


def map_nudges(lens: Any, name: str, example: Example, seed: int = 1) -> list[Nudge]:
    """W + step D moves a map's output by step u D^T, with the rows u that it reads."""
    layout, generator = lay_out([example], "alone"), torch.Generator().manual_seed(seed)
    gradients = recorded_sums(lens, layout, name).weights
    rows = tapped_rows(lens, layout).activations
    nudges = []
    for one in lens.maps:
        gradient = gradients[one.name].double()
        direction = torch.randn(gradient.shape, generator=generator, dtype=torch.float64)
        moved = rows[one.reads.name][0].double() @ direction.T
        predicted = float((gradient * direction).sum())
        nudges.append(Nudge(f"weight of {one.name}", (one.output,), moved, predicted, float(gradient.norm())))
    return nudges


def _places(lens: Any, backend: str, name: str, site: Any) -> tuple[TapPoint, ...]:
    """Where a nudge of a site must go so that all that follows from the site sees it."""
    own = lens.model.tap_point(site)
    if site.kind != "resid_mid" or not backend.startswith("bridge"):
        return (own,)
    if FAMILIES[name].objective == "masked":
        norm = lens.model.module.blocks[site.layer].ln1.hook_out
        return (TapPoint(norm, "output", "ln1.hook_out"),)
    # On a bridge no module passes on the middle of a block to both of its readers, the MLP and the sum after it.
    after = next(one for one in lens.sites if one.kind == "resid_post" and one.layer == site.layer)
    return (own, lens.model.tap_point(after))


def _slopes(lens: Any, example: Example, nudges: Sequence[Nudge], step: float) -> Tensor:
    length, count = len(example.tokens), len(nudges)
    tokens = example.tokens.expand(2 * count, length)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    batch = Batch(tokens, mask, torch.arange(length).expand_as(tokens), mask)
    with ExitStack() as stack, torch.no_grad():
        for row, nudge in enumerate(nudges):
            for place in nudge.places:
                stack.callback(_attach(place, row, row + count, step * nudge.direction).remove)
        logits = logits_of(lens.model.run(batch))
    losses = torch.stack([summed_loss(own, example.targets) for own in logits])
    return (losses[:count] - losses[count:]) / (2 * step)


def _attach(place: TapPoint, up: int, down: int, direction: Tensor) -> Any:
    """Copy ``up`` of the batch is moved in the direction, copy ``down`` against it."""

    def moved(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        change = direction.to(tensor.dtype).reshape(tensor.shape[1:])
        tensor[up] += change
        tensor[down] -= change
        return tensor

    def after(module: Any, arguments: Any, output: Any) -> Any:
        return (moved(output[0]), *output[1:]) if isinstance(output, tuple) else moved(output)

    def before(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        here = [name for name in place.arguments if name in named]
        if here:
            return arguments, named | {name: moved(named[name]) for name in here}
        return (moved(arguments[0]), *arguments[1:]), named

    if place.side == "output":
        return place.module.register_forward_hook(after)
    return place.module.register_forward_pre_hook(before, with_kwargs=True)
