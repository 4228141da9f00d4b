"""From a model's attention calls to the tangent dominance of every layer: parts, controls, sums, one pass of a corpus."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tangent_lens.measures.attention import AttentionDominance
from tangent_lens.measures.attention_inputs import AllowedPairs, ScoreParts
from tangent_lens.measures.attention_parts import (
    FrozenNorm,
    SplitLinear,
    SplitRows,
    apply_frozen_norm,
    apply_rotary,
    split_rows,
)
from tangent_lens.measures.attention_report import AttentionSettings
from tangent_lens.measures.attention_sums import AttentionSums
from tangent_lens.models.attention import AttentionCall, AttentionReader, AttentionWeights, NormWeights
from tangent_lens.models.protocol import Batch, Model, UnsupportedModel
from tangent_lens.models.state import evaluation_mode
from tangent_lens.progress import Progress
from tangent_lens.recording.passes import passing
from tangent_lens.recording.receivers import Selection
from tangent_lens.recording.taps import SiteNeverFired
from tangent_lens.subspaces.controls import random_normals
from tangent_lens.subspaces.subspace import Subspace

# Largest difference, relative to the largest number, between the sum of the parts and the model's own queries and keys.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


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
        self._sums = AttentionSums(
            weights.heads,
            settings.controls,
            distance_edges=settings.distance_edges,
            frequency_buckets=len(frequency_labels),
            scaling=settings.scaling,
            name=f"attention scores of layer {layer}",
        )

    def take(self, call: AttentionCall, batch: Batch, buckets: Tensor | None, check: bool) -> None:
        """Split one batch and add it.

        Raises:
            UnsupportedModel: the parts do not add up to what the model computed.
        """
        rows = split_rows(call.rows, self._tangent.centre, self._tangent.basis, self._frames)
        query, key = self._split_maps(call)
        queries = self._parts(query.parts(rows, call.row_scale), call, "query")
        keys = self._parts(key.parts(rows, call.row_scale), call, "key")
        if check:
            self._check(queries, call.query, batch, "queries")
            self._check(keys, call.key, batch, "keys")
        control_queries = self._parts(query.control_parts(rows, call.row_scale), call, "query", constant=False)
        control_keys = self._parts(key.control_parts(rows, call.row_scale), call, "key", constant=False)
        self._add_share(rows, call, batch)
        self._sums.update(
            ScoreParts(
                queries=queries * call.scaling,
                keys=keys,
                pairs=AllowedPairs.of(call.allowed, batch.keep),
                control_queries=control_queries * call.scaling,
                control_keys=control_keys,
                bias=call.bias,
                softcap=call.softcap,
                frequency=buckets,
                radius=rows.radius() if self._scaling else None,
            )
        )

    def result(self) -> AttentionDominance:
        """What follows from all batches."""
        found = self._sums.result(layer=self.layer, tangent_share=self._inside / self._whole)
        if found.by_frequency is None:
            return found
        return replace(found, by_frequency=replace(found.by_frequency, labels=self._frequency_labels))

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
        scale = 1.0 if call.row_scale is None else call.row_scale[keep].double()
        inside = (rows.tangent[keep].double() / scale).square().sum()
        self._inside += float(inside)
        self._whole += float(inside + (rows.normal[keep].double() / scale).square().sum())


def record_attention(
    model: Model,
    reader: AttentionReader,
    batches: Iterable[Batch],
    proxies: Mapping[int, Subspace],
    settings: AttentionSettings,
    *,
    token_buckets: Tensor | None = None,
    frequency_labels: Sequence[str] = (),
    progress: Progress | None = None,
    tokens: int = 0,
) -> tuple[tuple[AttentionDominance, ...], float]:
    """One forward pass over the batches; what each layer's attention computes is split and summed at once.

    Args:
        proxies: the tangent proxy of the residual stream that each layer's attention reads, by layer.
        token_buckets: for every token of the vocabulary its frequency bucket, -1 for none; for that axis, with
            ``frequency_labels`` of the buckets.

    Returns:
        One entry a layer, and the worst relative difference of parts and model on the first batch.

    Raises:
        UnsupportedModel: parts that do not add up to what the model computed.
        SiteNeverFired: a layer whose attention was not called, or not once a pass.
    """
    layers = {
        layer: LayerAttention(layer, reader.weights(layer), proxy, settings, frequency_labels)
        for layer, proxy in proxies.items()
    }
    called: list[int] = []
    current: dict[str, Any] = {"first": True}

    def receive(call: AttentionCall) -> None:
        called.append(call.layer)
        batch: Batch = current["batch"]
        layers[call.layer].take(call, batch, current["buckets"], current["first"])

    with ExitStack() as stack:
        stack.enter_context(evaluation_mode(model.module))
        stack.enter_context(torch.no_grad())
        stack.enter_context(reader.watching(tuple(layers), receive))
        for batch in passing(batches, Selection(), model, "attention scores", tokens, progress):
            current |= {"batch": batch, "buckets": None if token_buckets is None else token_buckets[batch.tokens.cpu()]}
            reader.run(batch)
            _check_called(called, tuple(layers))
            called.clear()
            current["first"] = False
    return tuple(one.result() for one in layers.values()), max(one.worst_sum for one in layers.values())


def _check_called(called: Sequence[int], layers: Sequence[int]) -> None:
    if sorted(called) != sorted(layers):
        missing = sorted(set(layers) - set(called)) or sorted(called)
        raise SiteNeverFired(
            f"attention of layers {missing}: called {len(called)} times in a forward pass for {len(layers)} layers; each "
            "layer's attention must run once"
        )


def _frozen(norm: NormWeights | None) -> FrozenNorm | None:
    return None if norm is None else FrozenNorm(norm.weight, norm.bias, norm.subtract_mean)


def frequency_buckets(sequences: Iterable[Any], vocabulary: int, buckets: int) -> tuple[Tensor, tuple[str, ...]]:
    """Buckets of tokens by how often they occur, each with about the same number of occurrences, the rarest first.

    Args:
        sequences: token ids of the corpus, one array a sequence.
        vocabulary: number of tokens.
        buckets: how many; fewer come back where the corpus has too few tokens of different frequency.

    Returns:
        The bucket of every token (-1 for tokens that do not occur), and how often the tokens of each bucket occur.
    """
    counts = torch.zeros(vocabulary, dtype=torch.long)
    for sequence in sequences:
        counts += torch.bincount(torch.as_tensor(sequence).long(), minlength=vocabulary)
    order = counts.argsort(stable=True)
    cumulative = counts[order].cumsum(0)
    # Tokens of equal frequency stay together: what decides is where the last of them ends.
    share = torch.zeros(vocabulary, dtype=torch.float64)
    share[order] = (cumulative.double() - counts[order].double() / 2) / max(int(cumulative[-1]), 1)
    middle = {int(count): float(share[counts == count].mean()) for count in counts.unique()}
    place = torch.tensor([min(int(middle[int(count)] * buckets), buckets - 1) for count in counts])
    place[counts == 0] = -1
    used = sorted(set(place[place >= 0].tolist()))
    renumbered = torch.full_like(place, -1)
    labels = []
    for number, old in enumerate(used):
        renumbered[place == old] = number
        inside = counts[place == old]
        low, high = int(inside.min()), int(inside.max())
        labels.append(f"{low} times" if low == high else f"{low} to {high} times")
    return renumbered, tuple(labels)
