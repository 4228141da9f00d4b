"""Whether what was read of a layer's attention makes the model's own queries, keys and scores: if not, nothing is split."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.models.attention import AttentionCall, AttentionWeights, NormWeights
from tangent_lens.models.protocol import UnsupportedModel

# Relative to the largest entry. What is wrong in its structure (another scale, position, map) is wrong by a tenth or more.
_ROUNDING = {torch.float64: 1e-3, torch.float32: 1e-3}
_ROUNDING_IN_16_BITS = 1e-1
_SPLIT_INPUTS = ("use_split_qkv_input", "use_attn_in")


def check_finite(rows: Tensor, layer: int) -> None:
    """Refuse rows that hold NaN or infinity.

    Raises:
        UnsupportedModel: they do.
    """
    if not bool(rows.isfinite().all()):
        raise UnsupportedModel(
            f"layer {layer} reads NaN or infinity. In float64, softmaxes that the library takes in float32 make NaN of "
            "padding that may look at nothing: use batch_size=1, or float32"
        )


def check_clip(rows: Tensor, limit: float | None, layer: int) -> None:
    """Refuse queries and keys that a model clips (OLMo's clip_qkv): what is clipped is no sum of parts.

    Raises:
        UnsupportedModel: an entry beyond the limit.
    """
    largest = 0.0 if limit is None else float(rows.detach().abs().max())
    if limit is not None and largest > limit:
        raise UnsupportedModel(
            f"layer {layer} clips its queries and keys to clip_qkv = {limit:g}, and here they reach {largest:.3g}: what is "
            "clipped cannot be split into parts; measure a model, or layers, that stay below"
        )


def check_inputs(config: Any) -> None:
    """Refuse modes of TransformerLens in which queries and keys each read a copy of the stream of their own.

    Raises:
        UnsupportedModel: the model is in one.
    """
    found = next((mode for mode in _SPLIT_INPUTS if getattr(config, mode, False)), None)
    if found:
        raise UnsupportedModel(
            f"with {found} every head reads a copy of the residual stream of its own, and there are no rows that all scores "
            f"come from; switch it off: model.set_{found}(False)"
        )


def check_call(call: AttentionCall, weights: AttentionWeights, scores: Tensor | None, pattern: Tensor | None) -> None:
    """Hold a call against the numbers that the model itself computed.

    Args:
        scores: the model's own before the softmax, pattern: after it; None where its library does not show them.

    Raises:
        UnsupportedModel: rows, weights, scales and rotation do not make the queries and keys, or these not the scores.
    """
    for kind, plural in (("query", "queries"), ("key", "keys")):
        sentence = (
            f"the {plural} of layer {call.layer} are not what its norm, its map and its rotation make of the stream"
        )
        _compare(_rebuilt(call, weights, kind), getattr(call, kind), sentence)
    own = scores_of(call)
    allowed = call.allowed.expand_as(own)
    if scores is not None and (pattern is None or not torch.equal(scores, pattern)):
        sentence = (
            f"the scores of layer {call.layer} are not {call.scaling:.4g} times query times key where its mask allows"
        )
        _compare(own[allowed], scores.detach()[allowed], sentence)
    elif pattern is not None:
        # Some bridges show the pattern under the name of the scores.
        looking = allowed.any(dim=-1)
        found = own.masked_fill(~allowed, -torch.inf)[looking].softmax(dim=-1)
        sentence = f"the patterns of layer {call.layer} are not the softmax of {call.scaling:.4g} times query times key"
        _compare(found, pattern.detach()[looking], sentence)


def scores_of(call: AttentionCall) -> Float[Tensor, "batch heads pos pos"]:
    """Scaling * query . key, capped, plus bias: what the softmax is taken of, on allowed pairs."""
    key = call.key.repeat_interleave(call.query.shape[1] // call.key.shape[1], dim=1)
    scores = call.scaling * (_wide(call.query) @ _wide(key).transpose(-1, -2))
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    return scores if call.bias is None else scores + call.bias


def rotated(
    heads: Float[Tensor, "batch heads pos d_head"],
    cos: Float[Tensor, "batch pos rotary"],
    sin: Float[Tensor, "batch pos rotary"],
    interleaved: bool = False,
) -> Float[Tensor, "batch heads pos d_head"]:
    """Queries or keys after their rotation."""
    width = cos.shape[-1]
    turned, rest = heads[..., :width], heads[..., width:]
    if interleaved:
        partner = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        partner = torch.cat((-second, first), dim=-1)
    return torch.cat((turned * cos.unsqueeze(-3) + partner * sin.unsqueeze(-3), rest), dim=-1)


def by_head(rows: Float[Tensor, "batch pos out"], heads: int) -> Float[Tensor, "batch heads pos d_head"]:
    """Heads side by side, one behind the other."""
    return rows.unflatten(-1, (heads, -1)).transpose(1, 2)


def _rebuilt(call: AttentionCall, weights: AttentionWeights, kind: str) -> Tensor:
    weight, bias = getattr(weights, f"{kind}_weight"), getattr(weights, f"{kind}_bias")
    norm, scale = getattr(weights, f"{kind}_norm"), getattr(call, f"{kind}_scale")
    rows = _normed(_wide(call.rows), weights.norm, call.row_scale)
    rows = torch.nn.functional.linear(rows, weight.to(rows), None if bias is None else bias.to(rows))
    heads = by_head(rows, weights.heads if kind == "query" else weights.kv_heads)
    if norm is not None and scale is not None:
        heads = heads / scale * _by_dimension(norm.weight, heads)
    return heads if call.cos is None or call.sin is None else rotated(heads, call.cos, call.sin, weights.interleaved)


def _normed(rows: Tensor, norm: NormWeights | None, scale: Tensor | None) -> Tensor:
    if norm is None or scale is None:
        return rows
    if norm.subtract_mean:
        rows = rows - rows.mean(dim=-1, keepdim=True)
    rows = rows / scale
    rows = rows if norm.weight is None else rows * norm.weight.to(rows)
    return rows if norm.bias is None else rows + norm.bias.to(rows)


def _by_dimension(weight: Tensor | None, heads: Tensor) -> Tensor | float:
    """The weight of a query or key norm: of d_head numbers, or of all heads side by side."""
    return 1.0 if weight is None else weight.to(heads).view(-1, 1, heads.shape[-1])


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _compare(found: Tensor, wanted: Tensor, sentence: str) -> None:
    error = (found - _wide(wanted)).abs().max()
    if not bool(error <= _ROUNDING.get(wanted.dtype, _ROUNDING_IN_16_BITS) * wanted.abs().max()):
        raise UnsupportedModel(
            f"{sentence} (off by {float(error):.1e} of {float(wanted.abs().max()):.1e}), so they cannot be split; "
            "if hooks of your own change what passes there, take them off (TransformerLens: model.reset_hooks())"
        )
