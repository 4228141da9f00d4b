"""The scores of one block of query rows: parts, centred over the allowed keys, and what is summed of them.

Axes. Query heads h are kv_heads g times the r heads that share a key: scores are (n, b, g, r, q, k), where n counts parts or
controls. The r heads of a group become rows of one product with the keys that they share; no key is expanded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tangent_lens.measures.attention_inputs import AllowedPairs, Block, ScoreParts

# What a pair that is not allowed has for a logit: far below any score, and still finite where numbers are added to it.
_NEVER = -1e30
# Queries and keys of TT, TN, NT, NN among (centre, tangent, normal).
_FOUR = ((1, 1), (1, 2), (2, 1), (2, 2))


@dataclass(frozen=True, eq=False)
class Masked:
    """The allowed pairs of one block, ready to act on scores (n, b, g, r, q, k); axes of length 1 are shared.

    Attributes:
        allowed: 1 for pairs that count, else 0.
        counts: how many of them a row has; share: 1 / counts.
        partial: the keys among which some pair of the block is not allowed.
        inside: ``allowed`` of these keys.
    """

    allowed: Float[Tensor, "b g r q k"]
    counts: Int[Tensor, "b g r q"]
    share: Float[Tensor, "b g r q 1"]
    partial: slice
    inside: Float[Tensor, "b g r q partial"]

    @classmethod
    def of(cls, pairs: AllowedPairs, block: Block, sequences: slice, kv_heads: int, like: Tensor) -> Masked:
        """The pairs of some sequences and some rows, in the place and precision of ``like``."""
        allowed = _grouped(pairs.allowed[sequences, :, block.queries, block.keys], kv_heads).to(like)
        counts = _grouped(pairs.counts[sequences, :, block.queries], kv_heads).to(like.device)
        share = 1 / counts[..., None].clamp(min=1).to(like)
        return cls(allowed, counts, share, block.partial, allowed[..., block.partial])

    def centre_(self, scores: Float[Tensor, "*n b g r q k"]) -> Float[Tensor, "*n b g r q k"]:
        """Subtract each row's mean over its allowed keys, in place; pairs that are not allowed become 0."""
        self.clear_(scores)
        scores -= scores.sum(dim=-1, keepdim=True).mul_(self.share)
        return self.clear_(scores)

    def clear_(self, scores: Float[Tensor, "*n b g r q k"]) -> Float[Tensor, "*n b g r q k"]:
        """Make pairs that are not allowed 0, in place."""
        if self.inside.shape[-1]:
            scores[..., self.partial] *= self.inside
        return scores


def _grouped(values: Tensor, kv_heads: int) -> Tensor:
    """(b, heads or 1, ...) to (b, g or 1, r or 1, ...)."""
    return values.unflatten(1, (1 if values.shape[1] == 1 else kv_heads, -1))


def query_rows(queries: Float[Tensor, "n b heads q d_head"], kv_heads: int) -> Float[Tensor, "n b g rq d_head"]:
    """The heads that share a key one below the other, as one product takes them."""
    return queries.unflatten(2, (kv_heads, -1)).flatten(3, 4)


def products(
    queries: Float[Tensor, "*n rq d_head"], keys: Float[Tensor, "*n k d_head"], rows: int, out: Tensor | None = None
) -> Float[Tensor, "*n r q k"]:
    """Scores of queries with keys; the axes before are the same."""
    scores = torch.matmul(queries, keys.transpose(-1, -2), out=None if out is None else out.flatten(-3, -2))
    return scores.unflatten(-2, (-1, rows))


@dataclass(frozen=True, eq=False)
class Pattern:
    """softmax of a block's scores, and the scores without any part but those that touch the centre.

    Attributes:
        probabilities: softmax over the allowed keys.
        confidence: sum of P log P of each row, in nats.
        centred_alone: the query-key scores without tangent and normal parts: centre with anything, anything with centre.
        added: the bias, and ``_NEVER`` for pairs that are not allowed.
        softcap: c of c * tanh(s / c); None for no cap.
    """

    probabilities: Float[Tensor, "b g r q k"]
    confidence: Float[Tensor, "b g r q"]
    centred_alone: Float[Tensor, "b g r q k"]
    added: Float[Tensor, "b g_or_1 r_or_1 q k"]
    softcap: float | None

    @classmethod
    def of(
        cls, scores: Tensor, non_centre: Tensor, masked: Masked, bias: Tensor | None, softcap: float | None
    ) -> Pattern:
        """The pattern of raw query-key scores; the bias is added after the cap, as host models do it."""
        added = (1 - masked.allowed) * _NEVER
        added = added if bias is None else added + bias
        logs = torch.log_softmax(_capped(scores, softcap) + added, dim=-1)
        probabilities = torch.softmax(logs, dim=-1)
        centred_alone = scores - non_centre
        if softcap is None:
            centred_alone += added
        return cls(probabilities, logs.mul_(probabilities).sum(dim=-1), centred_alone, added, softcap)

    def divergence(self, kept: Float[Tensor, "*n b g r q k"]) -> Float[Tensor, "*n b g r q"]:
        """KL(softmax(S) || softmax(S without all but the centre's parts and ``kept``)) of each row, in nats.

        Rows without any allowed key have two uniform patterns, and 0.
        """
        logits = self.centred_alone + kept
        if self.softcap is not None:
            logits = _capped(logits, self.softcap).add_(self.added)
        expected = torch.log_softmax(logits, dim=-1).mul_(self.probabilities).sum(dim=-1)
        return self.confidence - expected


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap).mul_(softcap)


def wide(values: Tensor) -> Tensor:
    """In float64, on the CPU, where the sums are."""
    return values.cpu().double()


def by_head(values: Float[Tensor, "n b g r q"]) -> Float[Tensor, "heads n"]:
    """Sums over sequences and rows, in float64."""
    return wide(values).sum(dim=(-4, -1)).flatten(-2).movedim(-1, 0)


def row_squares(scores: Float[Tensor, "*n k"]) -> Float[Tensor, "*n"]:
    """Sum of squares over the keys of each row."""
    return torch.linalg.vector_norm(scores, dim=-1).square_()


@dataclass(frozen=True, eq=False)
class BlockScores:
    """The scores of one block of rows.

    Attributes:
        masked: its allowed pairs.
        four: S^TT, S^TN, S^NT, S^NN, centred over the allowed keys.
        raw: the same before centring; None if it was not to be kept.
        whole: the sum of the four.
        total: S, parts and bias together, centred.
        pattern: softmax of the model's scores, and what a kept part makes of them.
        divergence: KL(softmax(S) || softmax(S without TN, NT, NN)) of each row, in nats.
        bias: <bias, S> of each row; None without a bias.
    """

    masked: Masked
    four: Float[Tensor, "4 b g r q k"]
    raw: Float[Tensor, "4 b g r q k"] | None
    whole: Float[Tensor, "b g r q k"]
    total: Float[Tensor, "b g r q k"]
    pattern: Pattern
    divergence: Float[Tensor, "b g r q"]
    bias: Float[Tensor, "b g r q"] | None

    @classmethod
    def of(
        cls,
        queries: Float[Tensor, "3 b g rq d_head"],
        keys: Float[Tensor, "3 b g k d_head"],
        parts: ScoreParts,
        block: Block,
        sequences: slice,
        *,
        keep_raw: bool = False,
    ) -> BlockScores:
        """From the rows of one block and the keys they may look at."""
        kv_heads, rows = queries.shape[2], block.queries.stop - block.queries.start
        masked = Masked.of(parts.pairs, block, sequences, kv_heads, queries)
        total = products(queries.sum(dim=0), keys.sum(dim=0), rows)
        four = total.new_empty((4, *total.shape))
        for place, (query, key) in enumerate(_FOUR):
            products(queries[query], keys[key], rows, out=four[place])
        bias = _bias_of(parts, block, sequences, kv_heads, masked)
        pattern = Pattern.of(total, four.sum(dim=0), masked, bias, parts.softcap)
        divergence = pattern.divergence(four[0])
        raw = four * masked.allowed if keep_raw else None
        total = masked.centre_(total if bias is None else total + bias)
        masked.centre_(four)
        with_bias = None if bias is None else (total * bias).sum(dim=-1)
        return cls(masked, four, raw, four.sum(dim=0), total, pattern, divergence, with_bias)


def _bias_of(parts: ScoreParts, block: Block, sequences: slice, kv_heads: int, masked: Masked) -> Tensor | None:
    if parts.bias is None:
        return None
    bias = parts.bias if parts.bias.ndim == 4 else parts.bias[None]
    bias = bias if len(bias) == 1 else bias[sequences]
    bias = _grouped(bias[:, :, block.queries, block.keys].to(masked.allowed), kv_heads)
    return torch.where(masked.allowed > 0, bias, 0)


class ControlScores:
    """All controls on one block of rows, a few at a time: three products a control instead of a whole split.

    N is inside the control, R the rest of what is not centre: NN, NR and RN are products, and RR is what they leave. No
    score is centred one by one; sums of squares and of scores give the squares about the mean. Keys may be shifted by any
    constant beforehand (it changes no square), so that these differences lose no digits.

    Args:
        queries: parts inside the controls, and tangent plus normal without them, (2, m * b * g, r * q, d_head).
        keys: the same of the keys, (2, m * b * g, d_head, k).
        scores: those of the tangent's own split.
    """

    def __init__(
        self, queries: Float[Tensor, "2 mbg rq d_head"], keys: Float[Tensor, "2 mbg d_head k"], scores: BlockScores
    ) -> None:
        self.queries, self.keys, self.scores = queries, keys, scores
        self.shape = scores.total.shape
        self.groups = self.shape[0] * self.shape[1]
        self.controls = queries.shape[1] // self.groups
        # |S^NN|^2, |S^NR|^2, |S^RN|^2, |S^RR|^2 of each row, <S^NN, S>, and the divergence when only NN stays, in nats.
        self.rows = queries.new_empty((6, self.controls, *self.shape[:-1]))

    def measure(self, step: int) -> Float[Tensor, "6 m b g r q"]:
        """Every row of every control, ``step`` controls at a time."""
        three = self.queries.new_empty((3, step * self.groups, *self.queries.shape[2:3], self.shape[-1]))
        for start in range(0, self.controls, step):
            stop = min(start + step, self.controls)
            self._measure(slice(start, stop), three[:, : (stop - start) * self.groups])
        return self.rows

    def _measure(self, some: slice, three: Float[Tensor, "3 nbg rq k"]) -> None:
        places = slice(some.start * self.groups, some.stop * self.groups)
        (own_queries, other_queries), (own_keys, other_keys) = self.queries[:, places], self.keys[:, places]
        for out, queries, keys in zip(
            three, (own_queries, own_queries, other_queries), (own_keys, other_keys, own_keys), strict=True
        ):
            torch.bmm(queries, keys, out=out)
        three = three.view(3, -1, *self.shape)
        both, query_side, key_side = three
        scores, rows = self.scores, self.rows[:, some]
        rows[5] = scores.pattern.divergence(both)
        scores.masked.clear_(three)
        torch.sum(both * scores.total, dim=-1, out=rows[4])
        sums = three.sum(dim=-1)
        rest = (scores.whole - both).sub_(query_side).sub_(key_side)
        squares = rows[:4]
        torch.linalg.vector_norm(three, dim=-1, out=squares[:3])
        torch.linalg.vector_norm(rest, dim=-1, out=squares[3])
        squares.square_()
        # All scores without centre are centred already, so that what is left of them sums to minus the three.
        share = scores.masked.share[..., 0]
        squares[:3].sub_(sums.square() * share)
        squares[3].sub_(sums.sum(dim=0).square_().mul_(share))
