"""Dominance along an axis: key distance, frequency of the query token, radius of the rows. Each adds to named sums."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tangent_lens.measures.attention_blocks import BlockScores, Masked, wide
from tangent_lens.measures.attention_inputs import Block, distance_buckets

# Radii are binned on one fixed grid, so that the bins of two recordings are the same: 4 a doubling, from 2^-32 to 2^32.
BINS_A_DOUBLING = 4
RADIUS_BINS = 64 * BINS_A_DOUBLING


def add_distances(into: dict[str, Tensor], scores: BlockScores, block: Block, edges: tuple[int, ...]) -> None:
    """Squares of the four parts by the distance between query and key."""
    buckets = distance_buckets(block.queries, block.keys, edges, scores.four.device)
    chosen = _chosen(buckets, 0, len(edges) + 1, scores.four.dtype)[None]
    into["distance_squares"] += _by_pair(scores.four.square(), chosen)
    into["distance_pairs"] += _by_pair(scores.masked.allowed[None], chosen)[..., 0]


def add_frequencies(
    into: dict[str, Tensor], squares: Float[Tensor, "4 b g r q"], masked: Masked, buckets: Int[Tensor, "b q"]
) -> None:
    """Squares of the four parts by the bucket of the query token; rows in no bucket (negative) are left out."""
    chosen = wide(_chosen(buckets[:, None], 0, into["frequency_pairs"].shape[1], squares.dtype))
    into["frequency_squares"] += _by_pair(wide(squares)[..., None], chosen)
    into["frequency_pairs"] += _by_pair(wide(masked.counts)[None, ..., None], chosen)[..., 0]


def add_radii(into: dict[str, Tensor], scores: BlockScores, radius: Float[Tensor, "b pos"], block: Block) -> None:
    """Squares of the four parts, as they are and centred, by the geometric mean of the radii of query and key row.

    A row at the centre itself has no place on a logarithmic axis; its pairs are left out.
    """
    assert scores.raw is not None
    logs = wide(radius).log()
    log_pair = (logs[:, block.queries, None] + logs[:, None, block.keys]) / 2
    bins = torch.floor(log_pair * (BINS_A_DOUBLING / math.log(2))) + RADIUS_BINS // 2
    placed = torch.isfinite(log_pair)
    if not bool(placed.any()):
        return
    bins = bins.clamp(0, RADIUS_BINS - 1)
    first, last = int(bins[placed].min()), int(bins[placed].max()) + 1
    chosen, within = _chosen(torch.where(placed, bins, -1), first, last, scores.four.dtype), slice(first, last)
    here = chosen.to(scores.four.device)
    for place, four in ((slice(0, 4), scores.raw), (slice(4, 8), scores.four)):
        into["radius_squares"][:, within, place] += _by_pair(four.square(), here)
    allowed = scores.masked.allowed[None]
    into["radius_pairs"][:, within] += _by_pair(allowed, here)[..., 0]
    log_pair = torch.where(placed, log_pair, 0)[:, None, None]
    into["radius_logs"][:, within] += _by_pair(wide(allowed) * log_pair, chosen.double())[..., 0]


def _chosen(buckets: Tensor, first: int, last: int, dtype: torch.dtype) -> Float[Tensor, "*b qk buckets"]:
    """1 where a pair is in a bucket, else 0."""
    return (buckets.flatten(-2)[..., None] == torch.arange(first, last, device=buckets.device)).to(dtype)


def _by_pair(
    values: Float[Tensor, "n b g r q k"], chosen: Float[Tensor, "b qk buckets"]
) -> Float[Tensor, "heads buckets n"]:
    """Sums over sequences and pairs, bucket by bucket; heads that share their values are one."""
    n, batch, groups, heads = values.shape[:4]
    rows = values.flatten(4).transpose(0, 1).reshape(batch, n * groups * heads, -1)
    found = wide(rows @ chosen).sum(dim=0)
    return found.reshape(n, groups * heads, -1).permute(1, 2, 0)
