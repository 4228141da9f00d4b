"""bfloat16: as near to plain HuggingFace in bfloat16 as that itself is to the truth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from conformance.batching import lay_out
from conformance.comparing import Error, joined, largest
from conformance.measuring import recorded_sums, tapped_rows
from conformance.reference import reference_of
from torch import Tensor

# Two programs that round at other places each miss the truth by about the same: their difference is some 1.4 of it.
_TIMES = 4.0


def bfloat16_errors(name: str, lens: Any) -> Iterator[tuple[str, Error, float]]:
    """What was compared, how far off it is in units of bfloat16's own error, and how far it may be."""
    truth, plain = reference_of(name), reference_of(name, torch.bfloat16)
    layout = lay_out(truth.examples, "alone")
    rows = tapped_rows(lens, layout)
    weights = recorded_sums(lens, layout, name).weights
    for what in ("activations", "gradients"):
        found, own, true = (joined(getattr(one, what), rows.activations) for one in (rows, plain, truth))
        yield what, _in_units(found, own, true), _TIMES
    yield "weight gradients", _in_units(weights, plain.weights, truth.weights), _TIMES


def _in_units(found: Mapping[str, Tensor], plain: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> Error:
    """Worst over all names: |found - plain| over |plain - truth|, in the Frobenius norm."""
    errors = []
    for name, tensor in found.items():
        if name not in truth or tensor.shape != truth[name].shape:
            return Error(float("inf"), name)
        own_error = max(float((plain[name].double() - truth[name]).norm()), 2**-9 * float(truth[name].norm()))
        errors.append(Error(float((tensor.double() - plain[name].double()).norm()) / own_error, name))
    return largest(errors)
