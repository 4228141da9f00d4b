"""What a server shall do with each tensor that passes: one request, in the order in which the model reaches its places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tangent_lens.models.ndif import NdifModel
from tangent_lens.models.protocol import Batch, LinearMap, TapPoint
from tangent_lens.recording.losses import CausalLoss, Loss, causal_targets
from tangent_lens.recording.masking import MaskedLoss
from tangent_lens.recording.moments import NonFiniteRows


class SumsRequest:
    """The sums that one recording wants, each under a key of its own.

    Attributes:
        directions: (d, w) matrices by name, which travel with every job.
    """

    def __init__(self, model: NdifModel, *, gradients: bool = False) -> None:
        self.model = model
        self.gradients = gradients
        self.directions: dict[str, Tensor] = {}
        self._places: dict[tuple[str, str], dict[str, Any]] = {}
        self._order: dict[tuple[str, str], tuple[int, ...]] = {}
        self._directions_of: dict[str, list[str]] = {}
        if gradients:
            self._place(model.start, "embedding", None)["starts_gradients"] = True

    def ask(
        self,
        duty: str,
        key: str,
        point: TapPoint,
        kind: str,
        layer: int | None,
        *,
        directions: Sequence[str] = (),
        left: Mapping[str, int] | None = None,
        watch: bool = False,
    ) -> None:
        """One more sum.

        Args:
            duty: ``activations``, ``gradients``, ``inputs``, ``map input`` or ``map output`` of ``server_functions.attend``.
            point: where the tensor passes; ``kind`` and ``layer`` say what passes there.
            directions: names of the directions that the sums are taken along.
            left: how the server draws the directions of the output side of a weight gradient.
            watch: the first positions, too.
        """
        columns = None if duty == "map input" else point.columns
        names = list(directions)
        what = {"kind": duty, "key": key, "columns": columns, "directions": names, "left": left, "watch": watch}
        self._place(point, kind, layer)["duties"].append(what)
        if names:
            self._directions_of[key] = names

    def send(self, name: str, directions: Tensor) -> str:
        """Directions (d, w) that travel along, under their name. One tensor that several places use travels once."""
        for known, tensor in self.directions.items():
            if tensor is directions:
                return known
        self.directions[name] = directions
        return name

    def written(self) -> dict[str, Any]:
        """As plain data."""
        ordered = sorted(self._places, key=self._order.__getitem__)
        return {
            "places": [self._places[place] for place in ordered],
            "gradients": self.gradients,
            "directions": {name: tensor.detach().cpu().float() for name, tensor in self.directions.items()},
            "directions_of": dict(self._directions_of),
        }

    def batch(self, prepared: Batch, loss: Loss | None) -> dict[str, Any]:
        """One batch as plain data: what the model is called with, and which rows count."""
        prepared.check_fits(self.model.description.vocabulary, self.model.longest_sequence)
        return {
            "arguments": self.model.arguments(prepared),
            "keep": prepared.keep,
            "positions": prepared.positions,
            "targets": self._targets(prepared, loss) if self.gradients else None,
            "sampled": None,
            "size": prepared.size,
        }

    def _targets(self, batch: Batch, loss: Loss | None) -> Tensor:
        if isinstance(loss, CausalLoss):
            return causal_targets(batch.tokens, batch.attention_mask.bool())
        if isinstance(loss, MaskedLoss) and batch.targets is not None:
            return batch.targets
        raise ValueError(
            f"the loss {getattr(loss, 'name', loss)!r} cannot travel to a server: use 'causal' or 'masked' there, or leave "
            "remote out"
        )

    def _place(self, point: TapPoint, kind: str, layer: int | None) -> dict[str, Any]:
        where = (point.name, point.side)
        if where not in self._places:
            self._order[where] = self.model.place_in_order(point, kind, layer)
            self._places[where] = {
                "path": point.name,
                "side": point.side,
                "argument": point.arguments[0],
                "starts_gradients": False,
                "duties": [],
            }
        return self._places[where]


def check_finite(sums: dict[str, dict[str, Any]]) -> None:
    """Refuse sums that mean nothing.

    Raises:
        NonFiniteRows: with the key of the sum.
    """
    for key, one in sums.items():
        for value in one.values():
            if isinstance(value, Tensor) and not bool(torch.isfinite(value).all()):
                raise NonFiniteRows(
                    f"{key}: its sums hold NaN or infinity, so some rows on the server do; find out where the model overflows "
                    "before measuring (float32 is the safest dtype, bfloat16 safer than float16)"
                )


def output_width(one: LinearMap) -> int:
    """How many numbers a map puts out: the rows of its weight."""
    if one.output.columns is not None:
        return len(one.output.columns)
    weight = one.output.module.get_parameter("weight")
    # GPT-2 keeps its weights the other way round.
    return int(weight.shape[1] if type(one.output.module).__name__ == "Conv1D" else weight.shape[0])
