"""Queries and keys in three parts: centre, tangent, normal. All that lies between a residual row and a score is linear.

A norm with frozen scale, a linear map, a query/key norm with frozen scale and a rotary rotation are linear in the row, so
that x = c + v + n (centre, tangent, normal; Section 6 of ``MEASUREMENTS``) passes through them part by part. What is
added to every row (biases) belongs to the centre. Scales and pairings are the host model's; nothing is computed twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.storage import as_float64


@dataclass(frozen=True, eq=False)
class FrozenNorm:
    """What a LayerNorm or RMSNorm does beside dividing each row by its scale.

    Attributes:
        weight: what each dimension is multiplied with; None for 1. Where a model stores it less one (Gemma), add the one.
        bias: what is added at the end; None for 0.
        subtract_mean: whether each row's mean is subtracted first (LayerNorm).
    """

    weight: Float[Tensor, " d"] | None = None
    bias: Float[Tensor, " d"] | None = None
    subtract_mean: bool = False


@dataclass(frozen=True, eq=False)
class SplitRows:
    """Rows split about a centre; the projections that every map reading these rows shares.

    Attributes:
        tangent: coordinates Q^T (x - c) in the tangent proxy.
        normal: the rest, x - c - Q Q^T (x - c).
    """

    tangent: Float[Tensor, "batch pos k"]
    normal: Float[Tensor, "batch pos d"]

    def radius(self) -> Float[Tensor, "batch pos"]:
        """|x - c| of each row."""
        return torch.hypot(
            torch.linalg.vector_norm(self.tangent, dim=-1), torch.linalg.vector_norm(self.normal, dim=-1)
        )


def split_rows(
    rows: Float[Tensor, "batch pos d"],
    centre: Float[Tensor, " d"],
    basis: Float[Tensor, "d k"],
) -> SplitRows:
    """Split rows about a centre: once a layer, for queries and keys alike.

    Args:
        rows: of the residual stream, before the norm.
        centre: c, the corpus mean.
        basis: Q, orthonormal.

    Raises:
        ValueError: widths that differ.
    """
    _check_widths(rows, centre=len(centre), basis=len(basis))
    shifted, basis = rows - centre.to(rows), basis.to(rows)
    tangent = shifted @ basis
    normal = shifted - tangent @ basis.T
    return SplitRows(tangent, normal)


def control_coordinates(
    rows: Float[Tensor, "batch pos d"], centre: Float[Tensor, " d"], frames: Float[Tensor, "m d k"]
) -> Float[Tensor, "m batch pos k"]:
    """Q_j^T (x - c) of every row in every control, in one product.

    Raises:
        ValueError: widths that differ.
    """
    m, d, k = frames.shape
    _check_widths(rows, centre=len(centre), controls=d)
    flat = (rows - centre.to(rows)) @ frames.to(rows).transpose(0, 1).reshape(d, m * k)
    return flat.unflatten(-1, (m, k)).movedim(-2, 0)


def _check_widths(rows: Tensor, **widths: int) -> None:
    for name, width in widths.items():
        if width != rows.shape[-1]:
            raise ValueError(
                f"rows of width {rows.shape[-1]} cannot be split by a {name} of width {width}; use one site"
            )


@dataclass(frozen=True, eq=False)
class SplitLinear:
    """A norm with frozen scale and the linear map that reads it, ready to act on parts of rows.

    Attributes:
        heads: of the outputs.
        whole: W A, with A what the norm does to a row beside its scale (out, d).
        centre: W A c (out,).
        constant: W times the norm's bias, plus the map's own bias (out,).
        tangent: W A Q, transposed (k, out).
        controls: W A Q_j, transposed (m, k, out); None without controls.
    """

    heads: int
    whole: Float[Tensor, "out d"]
    centre: Float[Tensor, " out"]
    constant: Float[Tensor, " out"]
    tangent: Float[Tensor, "k out"]
    controls: Float[Tensor, "m k out"] | None

    @classmethod
    def of(
        cls,
        weight: Float[Tensor, "out d"],
        heads: int,
        centre: Float[Tensor, " d"],
        basis: Float[Tensor, "d k"],
        controls: Float[Tensor, "m d k"] | None = None,
        *,
        bias: Float[Tensor, " out"] | None = None,
        norm: FrozenNorm | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> SplitLinear:
        """Prepare a map, once a layer; the small products are taken in float64.

        Args:
            weight: W, with heads * d_head rows; a row of the output is W x + bias.
            heads: of the output: query heads, or key/value heads.
            dtype, device: of the rows to come.

        Raises:
            ValueError: an output that the heads do not divide.
        """
        if len(weight) % heads:
            raise ValueError(f"{len(weight)} outputs cannot be cut into {heads} heads of one width")
        norm = norm or FrozenNorm()
        matrix = as_float64(weight)
        constant = torch.zeros(len(matrix), dtype=torch.float64) if bias is None else as_float64(bias)
        if norm.bias is not None:
            constant = constant + matrix @ as_float64(norm.bias)
        if norm.weight is not None:
            matrix = matrix * as_float64(norm.weight)
        if norm.subtract_mean:
            matrix = matrix - matrix.mean(dim=1, keepdim=True)
        place = {"dtype": dtype, "device": device}
        return cls(
            heads,
            matrix.to(**place),
            (matrix @ as_float64(centre)).to(**place),
            constant.to(**place),
            (matrix @ as_float64(basis)).T.contiguous().to(**place),
            None if controls is None else (matrix @ as_float64(controls)).transpose(1, 2).contiguous().to(**place),
        )

    def parts(
        self, rows: SplitRows, scale: Float[Tensor, "batch pos 1"] | None = None
    ) -> Float[Tensor, "3 batch heads pos d_head"]:
        """Centre, tangent and normal part of the output; their sum is the map's own output for these rows.

        Args:
            rows: from :func:`split_rows`.
            scale: what the norm divided each row by; None where there is no norm.
        """
        tangent, normal = rows.tangent, rows.normal
        centre = self.centre.expand(*normal.shape[:-1], -1)
        if scale is not None:
            centre, tangent, normal = centre / scale, tangent / scale, normal / scale
        parts = torch.stack([centre + self.constant, tangent @ self.tangent, normal @ self.whole.T])
        return self._by_head(parts)

    def control_parts(
        self, coordinates: Float[Tensor, "m batch pos k"], scale: Float[Tensor, "batch pos 1"] | None = None
    ) -> Float[Tensor, "m batch heads pos d_head"]:
        """The part of the output that comes from inside each control, for rows by their :func:`control_coordinates`.

        Raises:
            ValueError: this map was prepared without controls.
        """
        if self.controls is None:
            raise ValueError("this map knows no controls; pass controls to SplitLinear.of")
        coordinates = coordinates if scale is None else coordinates / scale
        batch, pos = coordinates.shape[1:3]
        return self._by_head(torch.bmm(coordinates.flatten(1, 2), self.controls).unflatten(1, (batch, pos)))

    def _by_head(self, output: Tensor) -> Tensor:
        return output.unflatten(-1, (self.heads, -1)).transpose(-2, -3)


def split_linear(
    rows: Float[Tensor, "batch pos d"],
    centre: Float[Tensor, " d"],
    basis: Float[Tensor, "d k"],
    weight: Float[Tensor, "out d"],
    heads: int,
    *,
    controls: Float[Tensor, "m d k"] | None = None,
    bias: Float[Tensor, " out"] | None = None,
    norm: FrozenNorm | None = None,
    scale: Float[Tensor, "batch pos 1"] | None = None,
) -> tuple[Float[Tensor, "3 batch heads pos d_head"], Float[Tensor, "m batch heads pos d_head"] | None]:
    """Parts of one map's output, and its parts inside the controls, in one call.

    For several maps of the same rows :func:`split_rows` and :class:`SplitLinear` share the work.

    Raises:
        ValueError: widths that differ.
    """
    split = split_rows(rows, centre, basis)
    if controls is not None:
        _check_widths(rows, controls=controls.shape[1])
    place = {"dtype": rows.dtype, "device": rows.device}
    linear = SplitLinear.of(weight, heads, centre, basis, controls, bias=bias, norm=norm, **place)
    inside = None if controls is None else linear.control_parts(control_coordinates(rows, centre, controls), scale)
    return linear.parts(split, scale), inside


def apply_frozen_norm(
    parts: Float[Tensor, "part batch heads pos d_head"],
    scale: Float[Tensor, "batch heads_or_1 pos 1"],
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    subtract_mean: bool = False,
    over_heads: bool = False,
) -> Float[Tensor, "part batch heads pos d_head"]:
    """A query or key norm with frozen scale, part by part.

    Args:
        parts: centre, tangent and normal; or parts inside controls, then without ``bias``.
        scale: what each row is divided by: of every head, or one for all heads (second axis 1).
        weight, bias: (d_head,) shared by the heads, or one entry a head and dimension: (heads, d_head) or
            (heads * d_head,). The bias is added to the first part, the centre.
        subtract_mean: a LayerNorm's; ``over_heads``: whether it takes the mean of all heads side by side.

    Raises:
        ValueError: a weight or bias of another size.
    """
    if subtract_mean:
        parts = parts - parts.mean(dim=(-3, -1) if over_heads else -1, keepdim=True)
    parts = parts / scale
    if weight is not None:
        parts = parts * _by_dimension(weight, parts, "weight")
    if bias is not None:
        parts = torch.cat([parts[:1] + _by_dimension(bias, parts, "bias"), parts[1:]])
    return parts


def _by_dimension(values: Tensor, parts: Tensor, name: str) -> Tensor:
    heads, width = parts.shape[-3], parts.shape[-1]
    if values.numel() not in (width, heads * width):
        raise ValueError(
            f"a query/key norm's {name} has {width} or {heads} * {width} entries, not the shape {tuple(values.shape)}"
        )
    return values.to(parts).reshape(-1, 1, width)


def apply_rotary(
    parts: Float[Tensor, "part batch heads pos d_head"],
    cos: Float[Tensor, "*batch pos rotary"],
    sin: Float[Tensor, "*batch pos rotary"],
    rotary_dim: int | None = None,
    *,
    interleaved: bool = False,
) -> Float[Tensor, "part batch heads pos d_head"]:
    """Rotate the first ``rotary_dim`` dimensions of every head; the others pass.

    Args:
        parts: centre, tangent and normal, or parts inside controls; only a part's own numbers enter its result.
        cos, sin: (pos, w) or (batch, pos, w), with w = rotary_dim, or rotary_dim / 2 where both partners share a value.
        rotary_dim: all of d_head by default.
        interleaved: partners are dimensions (0, 1), (2, 3), ... as in GPT-J; by default (0, r/2), (1, r/2 + 1), ... as
            in Llama and GPT-NeoX.

    Raises:
        ValueError: an odd or too large rotary_dim, or cosines of another width.
    """
    width = parts.shape[-1]
    turned = width if rotary_dim is None else rotary_dim
    if turned % 2 or not 0 < turned <= width:
        raise ValueError(f"rotary_dim {turned} must be even and between 2 and d_head = {width}")
    half = turned // 2
    if cos.shape != sin.shape or cos.shape[-1] not in (half, turned):
        raise ValueError(
            f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must both end in rotary_dim = {turned} or half of it"
        )
    firsts, seconds = (
        (slice(0, turned, 2), slice(1, turned, 2)) if interleaved else (slice(0, half), slice(half, turned))
    )
    out = torch.empty(parts.shape, dtype=parts.dtype, device=parts.device)
    out[..., turned:] = parts[..., turned:]
    for own, partner, sign in ((firsts, seconds, -1), (seconds, firsts, 1)):
        cosine, sine = (_of_partner(table, half, own).to(parts).unsqueeze(-3) for table in (cos, sin))
        torch.mul(parts[..., own], cosine, out=out[..., own])
        out[..., own].addcmul_(parts[..., partner], sine, value=sign)
    return out


def _of_partner(table: Tensor, half: int, own: slice) -> Tensor:
    return table if table.shape[-1] == half else table[..., own]
