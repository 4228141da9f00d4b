"""What one layer and batch hand to the attention sums: which query may look at which key, and the parts of both."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# Query rows taken together. Under a causal mask fewer rows skip more of the keys that none of them may look at, and
# more rows make larger products.
ROWS_A_BLOCK = 32


@dataclass(frozen=True)
class Block:
    """Consecutive query rows and the keys that any of them may look at.

    Attributes:
        queries: of the query positions.
        keys: of the key positions; no row of the block looks outside.
        partial: of ``keys``, counted from its start: outside this slice every row of the block may look at every key.
    """

    queries: slice
    keys: slice
    partial: slice


@dataclass(frozen=True, eq=False)
class AllowedPairs:
    """The pairs that enter the statistics of one batch.

    The axis ``mask_heads`` has length 1 where all heads share a mask.

    Attributes:
        allowed: True for pairs that count; rows that are not kept or were left out have none.
        counts: allowed keys of each row; 0 for rows that do not count.
        left_out: rows that are kept but have fewer than two allowed keys: a softmax over one key is constant, and there
            is nothing to centre.
        blocks: the query rows in order, without blocks in which nothing is allowed.
    """

    allowed: Bool[Tensor, "batch mask_heads query key"]
    counts: Int[Tensor, "batch mask_heads query"]
    left_out: Int[Tensor, " mask_heads"]
    blocks: tuple[Block, ...]

    @classmethod
    def of(
        cls,
        allowed: Bool[Tensor, "batch mask_heads query key"],
        kept: Bool[Tensor, "batch query"] | None = None,
        *,
        rows_a_block: int = ROWS_A_BLOCK,
    ) -> AllowedPairs:
        """Count the pairs of a mask.

        Args:
            allowed: True where a query may look at a key: causal, sliding window, without padding keys, or all keys
                of an encoder. Its second axis is 1 or the number of heads.
            kept: True for query rows that are counted; padding is not. All rows by default.
            rows_a_block: query rows taken together; changes cost, never a result.

        Raises:
            ValueError: a shape or a type that does not fit.
        """
        _check(allowed, kept, rows_a_block)
        wanted = torch.ones_like(allowed[:, :1, :, 0]) if kept is None else kept.to(allowed.device)[:, None]
        allowed = allowed & wanted[..., None]
        counts = allowed.sum(dim=-1)
        lonely = counts < 2
        left_out = (lonely & wanted).sum(dim=(0, 2))
        allowed = allowed & ~lonely[..., None]
        counts = counts.masked_fill(lonely, 0)
        starts = range(0, allowed.shape[2], rows_a_block)
        blocks = (_block(allowed, slice(start, min(start + rows_a_block, allowed.shape[2]))) for start in starts)
        return cls(allowed, counts, left_out, tuple(block for block in blocks if block is not None))

    @property
    def used(self) -> Bool[Tensor, "batch query"]:
        """True for query rows that enter the statistics of some head."""
        return (self.counts > 0).any(dim=1)

    @property
    def seen(self) -> Bool[Tensor, "batch key"]:
        """True for keys that some counted row may look at."""
        return self.allowed.any(dim=2).any(dim=1)


@dataclass(frozen=True, eq=False)
class ScoreParts:
    """Parts of one layer's queries and keys for one batch; all that is linear is already applied to them.

    The norm with frozen scale, W_Q and W_K, biases (in the centre), query/key norms and rotary are in the parts, and the
    scale of the scores is multiplied into the queries: the model's score is (sum of query parts) . (sum of key parts),
    soft-capped if it caps, plus the bias. Query heads share keys in consecutive groups of heads / kv_heads.

    Attributes:
        queries: centre, tangent and normal part of each query; keys: of each key.
        pairs: which pairs count.
        control_queries, control_keys: the part of each query and key inside control j; None without controls.
        bias: what is added to the scores (ALiBi, T5), a part of its own; not read where a pair is not allowed.
        softcap: c where the model takes c * tanh(s / c) of the scores s before it adds the bias. The split and all shares
            are of s plus bias, before the cap; the patterns are after it.
        frequency: bucket of each query token, from 0 on; negative for none.
        radius: |x - c| of each row.
    """

    queries: Float[Tensor, "3 batch heads query d_head"]
    keys: Float[Tensor, "3 batch kv_heads key d_head"]
    pairs: AllowedPairs
    control_queries: Float[Tensor, "m batch heads query d_head"] | None = None
    control_keys: Float[Tensor, "m batch kv_heads key d_head"] | None = None
    bias: Float[Tensor, "heads query key"] | Float[Tensor, "batch heads query key"] | None = None
    softcap: float | None = None
    frequency: Int[Tensor, "batch query"] | None = None
    radius: Float[Tensor, "batch pos"] | None = None

    def __post_init__(self) -> None:
        """Refuse what does not fit together.

        Raises:
            ValueError: shapes that differ, heads that kv_heads do not divide, or a cap that is not positive.
        """
        _check_parts(self)

    def without_unused(self) -> ScoreParts:
        """The same with zeros for queries and keys that enter no statistic, whatever stood there."""
        used, seen = self.pairs.used[None, :, None, :, None], self.pairs.seen[None, :, None, :, None]
        return replace(
            self,
            **{
                name: torch.where(places.to(side.device), side, 0)
                for name, places in (
                    ("queries", used),
                    ("keys", seen),
                    ("control_queries", used),
                    ("control_keys", seen),
                )
                if (side := getattr(self, name)) is not None
            },
        )

    def with_controls(
        self,
        sequences: Int[Tensor, " n"],
        rows: Int[Tensor, "n row"],
        pairs: AllowedPairs,
        control_queries: Float[Tensor, "m n heads row d_head"],
        control_keys: Float[Tensor, "m n kv_heads key d_head"],
    ) -> ScoreParts:
        """Some query rows of some sequences, and what of them lies inside controls; frequency and radius stay behind.

        Args:
            sequences, rows: their places in the batch.
            pairs: of these rows.
        """
        sequences, rows = sequences.to(self.queries.device), rows.to(self.queries.device)
        bias = None if self.bias is None else self.bias if self.bias.ndim == 4 else self.bias[None]
        if bias is not None:
            bias = bias if len(bias) == 1 else bias[sequences]
            bias = torch.take_along_dim(bias, rows[:, None, :, None], dim=2)
        queries = torch.take_along_dim(self.queries[:, sequences], rows[None, :, None, :, None], dim=3)
        keys = self.keys[:, sequences]
        return ScoreParts(queries, keys, pairs, control_queries, control_keys, bias, self.softcap)

    @property
    def controls(self) -> int:
        """How many controls came along."""
        return 0 if self.control_queries is None else len(self.control_queries)

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.queries.shape[2]


def distance_buckets(
    queries: slice, keys: slice, edges: tuple[int, ...], device: torch.device | str = "cpu"
) -> Int[Tensor, "query key"]:
    """The bucket of |query position - key position|: bucket b holds distances from ``edges[b-1]`` to below ``edges[b]``.

    Positions count from the start of the padded row, so that padding on either side gives the same distances.
    """
    here, there = (torch.arange(places.start, places.stop, device=device) for places in (queries, keys))
    distance = (here[:, None] - there).abs()
    return torch.bucketize(distance, torch.tensor(edges, device=device), right=True)


def distance_labels(edges: tuple[int, ...]) -> list[str]:
    """``0``, ``1``, ``2-3``, ``4+`` for the edges (1, 2, 4)."""
    starts, ends = (0, *edges), [edge - 1 for edge in edges]
    spans = [str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=False)]
    return [*spans, f"{starts[-1]}+"] if edges else []


def _block(allowed: Tensor, queries: slice) -> Block | None:
    rows = allowed[:, :, queries]
    seen = _extent(rows.any(dim=0).any(dim=0).any(dim=0))
    if seen is None:
        return None
    missing = ~rows[..., seen].all(dim=0).all(dim=0).all(dim=0)
    return Block(queries, seen, _extent(missing) or slice(0, 0))


def _extent(places: Bool[Tensor, " n"]) -> slice | None:
    """From the first True to the last."""
    found = torch.nonzero(places).flatten()
    return slice(int(found[0]), int(found[-1]) + 1) if len(found) else None


def _check(allowed: Tensor, kept: Tensor | None, rows_a_block: int) -> None:
    if allowed.dtype != torch.bool or allowed.ndim != 4 or not allowed.numel():
        raise ValueError(
            f"allowed must be bool (batch, 1 or heads, query, key), not {allowed.dtype} of shape {tuple(allowed.shape)}; "
            "make an additive mask boolean first: mask == 0"
        )
    if kept is not None and (kept.dtype != torch.bool or kept.shape != (allowed.shape[0], allowed.shape[2])):
        raise ValueError(
            f"kept must be bool (batch, query) = ({allowed.shape[0]}, {allowed.shape[2]}), not {kept.dtype} of shape "
            f"{tuple(kept.shape)}; it is True for query rows that are not padding"
        )
    if rows_a_block < 1:
        raise ValueError(f"{rows_a_block} rows a block make no progress; use 1 or more")


def _check_parts(parts: ScoreParts) -> None:
    queries, keys = parts.queries, parts.keys
    if queries.ndim != 5 or keys.ndim != 5 or len(queries) != 3 or len(keys) != 3:
        raise ValueError(
            f"queries {tuple(queries.shape)} and keys {tuple(keys.shape)} must be (3, batch, heads, position, d_head): "
            "centre, tangent and normal"
        )
    (_, batch, heads, rows, width), (_, _, kv_heads, columns, _) = queries.shape, keys.shape
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key heads; heads must be a multiple of kv_heads")
    mask_heads = parts.pairs.allowed.shape[1]
    bias_shape = (heads, rows, columns)
    expected = {
        "keys": (keys, (3, batch, kv_heads, columns, width)),
        "allowed": (parts.pairs.allowed, (batch, 1 if mask_heads == 1 else heads, rows, columns)),
        "control_queries": (parts.control_queries, (parts.controls, batch, heads, rows, width)),
        "control_keys": (parts.control_keys, (parts.controls, batch, kv_heads, columns, width)),
        "frequency": (parts.frequency, (batch, rows)),
        "radius": (parts.radius, (batch, rows)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} does not fit queries of shape {tuple(queries.shape)}"
            )
    if parts.bias is not None and tuple(parts.bias.shape) not in (bias_shape, (1, *bias_shape), (batch, *bias_shape)):
        raise ValueError(f"bias of shape {tuple(parts.bias.shape)} must be {bias_shape} or {(batch, *bias_shape)}")
    if (parts.control_queries is None) != (parts.control_keys is None):
        raise ValueError("control_queries and control_keys come together; one of them is missing")
    if parts.radius is not None and rows != columns:
        raise ValueError(
            f"a radius belongs to positions that are query and key, not to {rows} queries and {columns} keys"
        )
    if parts.softcap is not None and not parts.softcap > 0:
        raise ValueError(f"softcap {parts.softcap} must be positive; pass None for no cap")
