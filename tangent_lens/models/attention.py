"""What the attention of a layer read, and what it made of it: all that a score can be split by, whatever the library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tangent_lens.models.protocol import Batch, Model, UnsupportedModel

# A norm that is one of the known kind leaves this much of its output unexplained, relative to the output.
_ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}


@dataclass(frozen=True, eq=False)
class NormWeights:
    """A norm u = (x - mean(x)) / scale * weight + bias, linear once each row's scale is held.

    Attributes:
        weight: None for 1; as it multiplies (Gemma stores it less one).
        bias: None for 0.
        subtract_mean: LayerNorm; False for RMSNorm.
    """

    weight: Float[Tensor, " d"] | None = None
    bias: Float[Tensor, " d"] | None = None
    subtract_mean: bool = False

    def scale_of(
        self, rows: Float[Tensor, "*rows d"], normed: Float[Tensor, "*rows d"], name: str
    ) -> Float[Tensor, "*rows 1"]:
        """The scale that each row was divided by, read from what went in and what came out.

        Raises:
            UnsupportedModel: what came out is no such norm of what went in.
        """
        shifted = rows - rows.mean(dim=-1, keepdim=True) if self.subtract_mean else rows
        direction = shifted if self.weight is None else shifted * self.weight.to(shifted)
        wanted = normed if self.bias is None else normed - self.bias.to(normed)
        square = (direction * direction).sum(dim=-1, keepdim=True)
        # A row of zeros, as the embedding of a padding token often is, says nothing of its scale, and needs none.
        scale = torch.where(square > 0, square / (direction * wanted).sum(dim=-1, keepdim=True), 1.0)
        error = (direction / scale - wanted).abs().max()
        if not error <= _ROUNDING.get(rows.dtype, 1e-5) * wanted.abs().max():
            raise UnsupportedModel(
                f"{name}: what comes out of this norm is no scaled copy of what goes in (off by {float(error):.1e}), so its "
                "scores cannot be split into parts"
            )
        return scale


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """What one layer does to every row.

    Attributes:
        norm: before the maps; None where they read the residual stream itself.
        query_weight, key_weight: W (heads * d_head, d_model); query_bias, key_bias: None for 0.
        query_norm, key_norm: after the maps, over d_head numbers or over all heads side by side; None without.
        heads, kv_heads: of queries, and of keys.
        rotary_dim: how many numbers of a head are turned; None for as many as the cosines have.
        interleaved: whether rotary turns neighbouring numbers (GPT-J); otherwise the first half with the second.
    """

    norm: NormWeights | None
    query_weight: Float[Tensor, "out d"]
    query_bias: Float[Tensor, " out"] | None
    key_weight: Float[Tensor, "out_kv d"]
    key_bias: Float[Tensor, " out_kv"] | None
    query_norm: NormWeights | None
    key_norm: NormWeights | None
    heads: int
    kv_heads: int
    rotary_dim: int | None = None
    interleaved: bool = False


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What one layer's attention read and computed for one batch.

    Attributes:
        rows: of the residual stream.
        row_scale: the frozen scale of the norm before the maps; None without a norm.
        query, key: the model's own, after query/key norms and rotation: the score is scaling * query . key.
        query_scale, key_scale: the frozen scales of the query/key norms; None without.
        cos, sin: of the rotation, of its first columns; None without one.
        softcap: c where the model takes c * tanh(s / c) of a score s.
        allowed: which pairs the model looks at.
        bias: what the model adds to the scores after scaling (ALiBi); None without.
    """

    layer: int
    rows: Float[Tensor, "batch pos d"]
    row_scale: Float[Tensor, "batch pos 1"] | None
    query: Float[Tensor, "batch heads pos d_head"]
    key: Float[Tensor, "batch kv_heads pos d_head"]
    query_scale: Tensor | None
    key_scale: Tensor | None
    cos: Float[Tensor, "batch pos rotary"] | None
    sin: Float[Tensor, "batch pos rotary"] | None
    scaling: float
    softcap: float | None
    allowed: Bool[Tensor, "batch 1 pos pos"]
    bias: Tensor | None = None

    def of_sequences(self, numbers: Int[Tensor, " n"]) -> AttentionCall:
        """Some sequences of the batch; the bias is left alone."""
        return self._mapped(_BY_SEQUENCE, lambda values: values if len(values) == 1 else values[numbers])

    def of_rows(self, numbers: Int[Tensor, "batch n"]) -> AttentionCall:
        """Some rows of every sequence, as queries; keys and bias are left alone."""

        def taken(values: Tensor) -> Tensor:
            index = numbers[..., None] if values.ndim == 3 else numbers[:, None, :, None]
            return torch.take_along_dim(values, index, dim=-2)

        return self._mapped(_BY_QUERY, taken)

    def _mapped(self, names: Sequence[str], change: Callable[[Tensor], Tensor]) -> AttentionCall:
        found = {name: getattr(self, name) for name in names}
        return replace(self, **{name: change(values) for name, values in found.items() if values is not None})


_BY_QUERY = ("rows", "row_scale", "query", "query_scale", "cos", "sin", "allowed")
_BY_SEQUENCE = (*_BY_QUERY, "key", "key_scale")


Receiver = Callable[[AttentionCall], None]


class AttentionReader(Protocol):
    """How a library's attention is read."""

    def weights(self, layer: int) -> AttentionWeights:
        """What a layer does to every row.

        Raises:
            UnsupportedModel: weights that are no plain matrices.
        """
        ...

    def watching(self, layers: Sequence[int], receive: Receiver) -> AbstractContextManager[None]:
        """Inside, every forward pass of the model hands each of these layers' calls to ``receive``, one after another."""
        ...

    def run(self, batch: Batch) -> None:
        """Run the model for its attention alone."""
        ...


def attention_reader(model: Model) -> AttentionReader:
    """The reader of a model's attention.

    Raises:
        UnsupportedModel: attention of this library cannot be read.
    """
    from tangent_lens.models.hooked_transformer import HookedModel
    from tangent_lens.models.huggingface import HuggingFaceModel
    from tangent_lens.models.transformer_lens import BridgeModel

    # Each reader imports its library, which another person need not have.
    if isinstance(model, HuggingFaceModel):
        from tangent_lens.models.huggingface_attention import HuggingFaceAttention

        return HuggingFaceAttention(model)
    if isinstance(model, BridgeModel):
        from tangent_lens.models.bridge_attention import BridgeAttention

        return BridgeAttention(model)
    if isinstance(model, HookedModel):
        from tangent_lens.models.hooked_attention import HookedAttention

        return HookedAttention(model)
    raise UnsupportedModel(f"the attention scores of {model.description.library} cannot be split yet")
