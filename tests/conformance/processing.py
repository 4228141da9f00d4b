"""What processed weights make of the reference: folding moves a norm's scale and shift into the maps that read it, centring
takes the mean out of the residual stream, and folding value biases shifts the values. The function stays the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from conformance.comparing import Error, difference, largest
from conformance.reference import Reference
from torch import Tensor

_STREAM = ("embedding", "resid_pre", "resid_mid", "resid_post")
_NORMALISED = ("attention_input", "mlp_input")


def folded(reference: Reference) -> Reference:
    """The same where every norm between the stream and a map has become plain normalisation.

    With r = scale u + shift, what a map read before: u = (r - shift) / scale, dL/du = scale dL/dr, and as sum of delta u^T
    the weight gradient G becomes (G - (sum of delta) shift^T) / scale.
    """
    activations, gradients, weights = dict(reference.activations), dict(reference.gradients), dict(reference.weights)
    for site, (scale, shift) in reference.norms.items():
        activations[site] = [(rows - shift) / scale for rows in reference.activations[site]]
        gradients[site] = [scale * rows for rows in reference.gradients[site]]
    for name, gradient in reference.weights.items():
        kind, _, layer = name.partition(".")
        reads = f"{'mlp_input' if kind.startswith('mlp') else 'attention_input'}.{layer}"
        if reads in reference.norms:
            scale, shift = reference.norms[reads]
            if bool(shift.any()):
                gradient = gradient - torch.outer(reference.signals[name], shift)
            weights[name] = gradient / scale
    return replace(reference, activations=activations, gradients=gradients, weights=weights)


def worst_of_either(
    found: Mapping[str, Tensor], stored: Mapping[str, Tensor], processed: Mapping[str, Tensor], what: str
) -> Error:
    """Over all names, each against what suits it better: libraries fold some norms and leave others.

    Args:
        what: ``activations``, ``gradients`` or ``weight gradients``: what is free in each of them is left out.
    """
    errors = []
    for name, tensor in found.items():
        kind, own = name.partition(".")[0], [float("inf")]
        for expected in (stored, processed):
            if name in expected:
                own.append(difference(_determined(kind, what, tensor), _determined(kind, what, expected[name])))
        errors.append(Error(min(own), name))
    return largest(errors)


def _determined(kind: str, what: str, rows: Tensor) -> Tensor:
    """Without the mean of each row of a centred stream, the constant row that folded value biases take away, and the part
    of a gradient along which normalised rows, whose mean is 0, cannot move.
    """
    centred = _STREAM if what == "activations" else _NORMALISED if what == "gradients" else ()
    if kind in centred:
        return rows - rows.mean(dim=-1, keepdim=True)
    return rows - rows.mean(dim=0) if (kind, what) == ("value", "activations") else rows
