"""One layer's attention calls, split into parts and summed: all query rows for the tangent, some of them for the controls."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from tangent_lens.measures.attention import AttentionDominance
from tangent_lens.measures.attention_inputs import AllowedPairs, ScoreParts
from tangent_lens.measures.attention_parts import (
    FrozenNorm,
    SplitLinear,
    SplitRows,
    apply_frozen_norm,
    apply_rotary,
    control_coordinates,
    split_rows,
)
from tangent_lens.measures.attention_report import AttentionSettings
from tangent_lens.measures.attention_rows import row_numbers
from tangent_lens.measures.attention_sums import AttentionSums
from tangent_lens.models.attention import AttentionCall, AttentionWeights, NormWeights
from tangent_lens.models.protocol import Batch, UnsupportedModel
from tangent_lens.subspaces.controls import random_normals
from tangent_lens.subspaces.subspace import Subspace

# Largest difference, relative to the largest number, between the sum of the parts and the model's own queries and keys.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# Under a causal mask few rows a block skip keys that none of them may look at; chosen rows lie far apart.
CHOSEN_ROWS_A_BLOCK = 16


class LayerAttention:
    """One layer's scores: splits every call into parts and sums them up.

    Attributes:
        worst_sum: largest relative difference between the sum of the parts and the model's own queries and keys, where checked.
    """

    def __init__(
        self,
        layer: int,
        weights: AttentionWeights,
        tangent: Subspace,
        settings: AttentionSettings,
        frequency_labels: Sequence[str] = (),
    ) -> None:
        self.layer = layer
        self.worst_sum = 0.0
        self._weights, self._tangent = weights, tangent
        seed = zlib.crc32(f"{settings.seed}/attention.{layer}".encode())
        self._frames = random_normals(tangent, settings.controls, seed)
        self._maps: tuple[SplitLinear, SplitLinear] | None = None
        self._inside, self._whole = 0.0, 0.0
        self._scaling = settings.scaling
        self._frequency_labels = tuple(frequency_labels)
        name = f"attention scores of layer {layer}"
        self._sums = AttentionSums(
            weights.heads,
            distance_edges=settings.distance_edges,
            frequency_buckets=len(frequency_labels),
            scaling=settings.scaling,
            name=name,
        )
        self._controls = AttentionSums(weights.heads, settings.controls, name=f"{name}, random normals")

    def take(self, call: AttentionCall, batch: Batch, buckets: Tensor | None, chosen: Tensor, check: bool) -> None:
        """Split one batch and add it.

        Args:
            chosen: query rows on which the controls are measured (batch, pos).

        Raises:
            UnsupportedModel: the parts do not add up to what the model computed.
        """
        rows = split_rows(call.rows, self._tangent.centre, self._tangent.basis)
        query, key = self._split_maps(call)
        queries = self._parts(query.parts(rows, call.row_scale), call, "query")
        keys = self._parts(key.parts(rows, call.row_scale), call, "key")
        if check:
            self._check(queries, call.query, batch, "queries")
            self._check(keys, call.key, batch, "keys")
        self._add_share(rows, call, batch)
        parts = ScoreParts(
            queries=queries * call.scaling,
            keys=keys,
            pairs=AllowedPairs.of(call.allowed, batch.keep),
            bias=call.bias,
            softcap=call.softcap,
            frequency=buckets,
            radius=rows.radius() if self._scaling else None,
        )
        self._sums.update(parts)
        self._add_controls(call, parts, chosen)

    def result(self) -> AttentionDominance:
        """What follows from all batches."""
        found = self._sums.result(layer=self.layer, tangent_share=self._inside / self._whole, controls=self._controls)
        if found.by_frequency is None:
            return found
        return replace(found, by_frequency=replace(found.by_frequency, labels=self._frequency_labels))

    def _add_controls(self, call: AttentionCall, parts: ScoreParts, chosen: Bool[Tensor, "batch pos"]) -> None:
        """The chosen rows only, as queries; keys are all that they look at."""
        sequences = torch.nonzero(chosen.any(dim=1)).flatten()
        if not len(sequences):
            return
        numbers, valid = row_numbers(chosen[sequences])
        call = call.of_sequences(sequences.to(call.rows.device))
        here = call.of_rows(numbers.to(call.rows.device))
        query, key = self._split_maps(call)
        all_inside = control_coordinates(call.rows, self._tangent.centre, self._frames)
        inside = torch.take_along_dim(all_inside, numbers.to(all_inside.device)[None, :, :, None], dim=2)
        control_queries = self._parts(query.control_parts(inside, here.row_scale), here, "query", constant=False)
        control_keys = self._parts(key.control_parts(all_inside, call.row_scale), call, "key", constant=False)
        pairs = AllowedPairs.of(here.allowed, valid, rows_a_block=CHOSEN_ROWS_A_BLOCK)
        self._controls.update(
            parts.with_controls(sequences, numbers, pairs, control_queries * call.scaling, control_keys)
        )

    def _split_maps(self, call: AttentionCall) -> tuple[SplitLinear, SplitLinear]:
        """The two maps, prepared when the first rows show their precision and place."""
        if self._maps is None:
            weights, tangent = self._weights, self._tangent
            shared: dict[str, Any] = {
                "norm": _frozen(weights.norm),
                "dtype": call.rows.dtype,
                "device": call.rows.device,
            }
            place = (tangent.centre, tangent.basis, self._frames)
            self._maps = (
                SplitLinear.of(weights.query_weight, weights.heads, *place, bias=weights.query_bias, **shared),
                SplitLinear.of(weights.key_weight, weights.kv_heads, *place, bias=weights.key_bias, **shared),
            )
        return self._maps

    def _parts(self, parts: Tensor, call: AttentionCall, which: str, constant: bool = True) -> Tensor:
        """Through the query/key norm and the rotation; what a norm adds belongs to the centre alone."""
        norm: NormWeights | None = getattr(self._weights, f"{which}_norm")
        if norm is not None:
            scale = getattr(call, f"{which}_scale")
            bias = norm.bias if constant else None
            over_heads = scale.shape[1] == 1
            parts = apply_frozen_norm(
                parts, scale, weight=norm.weight, bias=bias, subtract_mean=norm.subtract_mean, over_heads=over_heads
            )
        if call.cos is None or call.sin is None:
            return parts
        rotary = self._weights.rotary_dim or call.cos.shape[-1]
        return apply_rotary(parts, call.cos, call.sin, rotary, interleaved=self._weights.interleaved)

    def _check(self, parts: Tensor, own: Tensor, batch: Batch, which: str) -> None:
        keep = batch.attention_mask.to(own.device)
        found, expected = parts.sum(dim=0).transpose(1, 2)[keep], own.transpose(1, 2)[keep]
        error = float((found - expected).abs().max() / expected.abs().max())
        self.worst_sum = max(self.worst_sum, error)
        if not error <= TOLERANCE.get(own.dtype, 1e-4):
            raise UnsupportedModel(
                f"layer {self.layer}: the parts of the {which} add up to something else than the model's own (off by "
                f"{error:.1e} of the largest): something between the residual stream and the scores is not linear "
                "(OLMo's clip_qkv that clips, a hook of yours), so its scores cannot be split"
            )

    def _add_share(self, rows: SplitRows, call: AttentionCall, batch: Batch) -> None:
        """rho: the tangent's share of the variance of the rows, each divided by the norm's scale for it."""
        keep = batch.keep.to(rows.tangent.device)
        tangent, normal = (
            torch.linalg.vector_norm(part, dim=-1)[keep].double().square() for part in (rows.tangent, rows.normal)
        )
        if call.row_scale is not None:
            scale = call.row_scale[..., 0][keep].double().square()
            tangent, normal = tangent / scale, normal / scale
        inside = float(tangent.sum())
        self._inside += inside
        self._whole += inside + float(normal.sum())


def _frozen(norm: NormWeights | None) -> FrozenNorm | None:
    return None if norm is None else FrozenNorm(norm.weight, norm.bias, norm.subtract_mean)
