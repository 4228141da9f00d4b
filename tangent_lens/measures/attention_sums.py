"""From parts of queries and keys to sums that stay: one call a layer and batch, float64, O(heads) numbers a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.measures.attention import AttentionDominance, dominance_of_sums
from tangent_lens.measures.attention_axes import RADIUS_BINS, add_distances, add_frequencies, add_radii
from tangent_lens.measures.attention_blocks import (
    BlockScores,
    ControlScores,
    by_head,
    query_rows,
    row_squares,
    wide,
)
from tangent_lens.measures.attention_inputs import Block, ScoreParts, distance_labels
from tangent_lens.recording.moments import full_precision

# Scores worked on together: a few arrays of this many numbers stay in the caches of one core.
SCORES_AT_ONCE = 1 << 18


class AttentionSums:
    """Sums over a corpus from which the tangent dominance of one layer's heads follows.

    No result depends on how sequences are cut into batches, padded or ordered, beyond the rounding of the scores.

    Attributes:
        heads: query heads.
        controls: how many random normal subspaces stand beside the tangent.
        distance_edges: key distances at which a new bucket begins; empty for no buckets.
        frequency_buckets: how many frequency buckets query tokens fall into; 0 for none.
        scaling: whether rows come with their radius.
        sums: named float64 sums, heads first; two recordings merge by adding them.
    """

    def __init__(
        self,
        heads: int,
        controls: int = 0,
        *,
        distance_edges: Sequence[int] = (),
        frequency_buckets: int = 0,
        scaling: bool = False,
        name: str = "attention scores",
    ) -> None:
        """Empty sums.

        Args:
            name: what errors call it.

        Raises:
            ValueError: no heads, a negative number, or edges that do not increase.
        """
        edges = tuple(int(edge) for edge in distance_edges)
        if heads < 1 or controls < 0 or frequency_buckets < 0:
            raise ValueError(
                f"{name}: {heads} heads, {controls} controls and {frequency_buckets} frequency buckets cannot be summed; "
                "heads are 1 or more, the others 0 or more"
            )
        if edges != tuple(sorted(set(edges))) or min(edges, default=1) < 1:
            raise ValueError(f"{name}: distance edges {edges} must increase from 1 or more, for example (1, 2, 4, 8)")
        self.heads, self.controls, self.name = heads, controls, name
        self.distance_edges, self.frequency_buckets, self.scaling = edges, frequency_buckets, scaling
        self.sums = {key: torch.zeros(shape, dtype=torch.float64) for key, shape in self._shapes().items()}

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        h, m, distances = self.heads, self.controls, len(self.distance_edges) + 1
        shapes: dict[str, tuple[int, ...]] = {
            name: (h,) for name in ("rows", "pairs", "left_out_rows", "kl", "score_square")
        }
        shapes |= {"squares": (h, 4), "products": (h, 10)}
        if m:
            shapes |= {"control_squares": (h, m, 4), "control_products": (h, m, 5), "control_kl": (h, m)}
        if self.distance_edges:
            shapes |= {"distance_squares": (h, distances, 4), "distance_pairs": (h, distances)}
        if self.frequency_buckets:
            shapes |= {
                "frequency_squares": (h, self.frequency_buckets, 4),
                "frequency_pairs": (h, self.frequency_buckets),
            }
        if self.scaling:
            shapes |= {"radius_squares": (h, RADIUS_BINS, 8)}
            shapes |= {"radius_pairs": (h, RADIUS_BINS), "radius_logs": (h, RADIUS_BINS)}
        return shapes

    def update(self, parts: ScoreParts) -> None:
        """Add a batch. Beside the parts, memory is that of a few blocks of rows, never of all controls' scores.

        Raises:
            ValueError: other heads or controls than announced, an axis that was announced and did not come or the
                reverse, or NaN or infinity among the scores; nothing is added then.
        """
        self._check(parts)
        fresh = self._summed(parts)
        if self._not_finite(fresh):
            # Some models leave NaN at padding, where no mask can multiply it away.
            fresh = self._summed(parts.without_unused())
        found = self._not_finite(fresh)
        if found:
            raise ValueError(
                f"{self.name}: {found} is NaN or infinite; find out where queries or keys overflow (float32 is the safest "
                "dtype)"
            )
        for key, value in fresh.items():
            self.sums[key] += value

    def sequences_at_once(self, length: int) -> int:
        """How many sequences of this length are best split and handed in together.

        The parts inside all controls are many times the rows they come from. A few sequences of them stay in the caches
        between the split and the scores; a whole batch does not, and takes a third longer and that much more memory.
        """
        return max(1, SCORES_AT_ONCE // (self.heads * length**2))

    def _summed(self, parts: ScoreParts) -> dict[str, Tensor]:
        fresh = {key: torch.zeros_like(value) for key, value in self.sums.items()}
        with torch.no_grad(), full_precision(parts.queries):
            counts = parts.pairs.counts
            fresh["rows"] += (counts > 0).sum(dim=(0, 2)).cpu()
            fresh["pairs"] += counts.sum(dim=(0, 2)).cpu()
            fresh["left_out_rows"] += parts.pairs.left_out.cpu()
            for sequences in self._sequences(parts):
                _Sequences(self, parts, sequences, fresh).add()
        return fresh

    @staticmethod
    def _not_finite(fresh: Mapping[str, Tensor]) -> str:
        """Which sum of which head; empty if all are finite."""
        for key, values in fresh.items():
            bad = torch.nonzero(~torch.isfinite(values))
            if len(bad):
                return f"{key} of head {int(bad[0, 0])}"
        return ""

    def _sequences(self, parts: ScoreParts) -> list[slice]:
        """Few enough sequences at once for one block of their scores."""
        block = max((_length(one.queries) * _length(one.keys) for one in parts.pairs.blocks), default=1)
        step = max(1, SCORES_AT_ONCE // (self.heads * block))
        batch = parts.queries.shape[1]
        return [slice(start, min(start + step, batch)) for start in range(0, batch, step)]

    def _check(self, parts: ScoreParts) -> None:
        if parts.heads != self.heads:
            raise ValueError(f"{self.name}: {parts.heads} query heads came, {self.heads} were announced")
        if parts.controls != self.controls:
            raise ValueError(f"{self.name}: {parts.controls} controls came, {self.controls} were announced")
        for what, wanted, came in (
            ("frequency", bool(self.frequency_buckets), parts.frequency is not None),
            ("radius", self.scaling, parts.radius is not None),
        ):
            if wanted != came:
                raise ValueError(
                    f"{self.name}: {what} {'was announced but did not come' if wanted else 'came but was not announced'}; "
                    "AttentionSums(frequency_buckets=..., scaling=...) says what every batch brings"
                )
        if parts.frequency is not None and int(parts.frequency.max()) >= self.frequency_buckets:
            raise ValueError(
                f"{self.name}: frequency bucket {int(parts.frequency.max())} is outside the {self.frequency_buckets} "
                "announced; they count from 0"
            )
        if parts.radius is not None and not bool(torch.isfinite(parts.radius.cpu()[parts.pairs.used.cpu()]).all()):
            raise ValueError(
                f"{self.name}: the radius of some row is NaN or infinite; find out where the rows overflow"
            )
        if self.distance_edges and parts.queries.shape[3] != parts.keys.shape[3]:
            raise ValueError(f"{self.name}: key distances need the same positions for queries and keys")

    def merge(self, other: AttentionSums) -> None:
        """Add all that another recording of the same layer saw; exact up to rounding, in any order.

        Raises:
            ValueError: it counted other heads, controls or axes.
        """
        if self._settings() != other._settings():
            raise ValueError(
                f"{self.name}: sums of {other._settings()} cannot be merged into sums of {self._settings()}"
            )
        for key, value in other.sums.items():
            self.sums[key] += value

    def _settings(self) -> dict[str, object]:
        names = ("heads", "controls", "distance_edges", "frequency_buckets", "scaling")
        return {name: getattr(self, name) for name in names}

    def result(
        self, *, layer: int | None = None, tangent_share: float | None = None, controls: AttentionSums | None = None
    ) -> AttentionDominance:
        """What follows from all batches so far.

        Args:
            controls: sums of some of the same rows, from which all that concerns the controls is taken; by default these
                sums themselves. Controls cost most of the time, and less of it on fewer rows.
            layer: the result's name for itself.
            tangent_share: rho = tr(Q^T C Q) / tr(C) of the rows after the norm with frozen scale.

        Raises:
            ValueError: no row was counted, or a share outside [0, 1].
        """
        if not bool((self.sums["rows"] > 0).all()):
            raise ValueError(
                f"{self.name}: some head has no query row with two or more allowed keys, so no score can be compared; "
                "use longer sequences"
            )
        return dominance_of_sums(
            {key: value.numpy() for key, value in self.sums.items()},
            None if controls is None else {key: value.numpy() for key, value in controls.sums.items()},
            layer=layer,
            tangent_share=tangent_share,
            distance_labels=distance_labels(self.distance_edges),
            frequency_labels=[str(bucket) for bucket in range(self.frequency_buckets)],
        )

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """What a file keeps of it."""
        return {f"{prefix}{key}": value for key, value in self.sums.items()}

    def load_tensors(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        """Take over what :meth:`tensors` of sums with the same settings gave.

        Raises:
            ValueError: other settings.
        """
        found = {key: tensors.get(f"{prefix}{key}") for key in self.sums}
        if any(value is None or value.shape != self.sums[key].shape for key, value in found.items()):
            raise ValueError(f"{self.name}: these sums were not made with {self._settings()}")
        self.sums = {key: value.double().clone() for key, value in found.items() if value is not None}

    def __repr__(self) -> str:
        return f"AttentionSums({self.name}: {self.heads} heads, {int(self.sums['rows'].max())} rows)"


class _Sequences:
    """Some sequences of a batch: their blocks of rows one after the other, each added to the same sums."""

    def __init__(self, sums: AttentionSums, parts: ScoreParts, sequences: slice, into: dict[str, Tensor]) -> None:
        self.settings, self.parts, self.sequences, self.into = sums, parts, sequences, into
        self.queries, self.keys = self._some(parts.queries), self._some(parts.keys)
        if parts.control_queries is not None and parts.control_keys is not None:
            self.own_queries, self.own_keys = self._some(parts.control_queries), self._some(parts.control_keys)
            self.control_keys = self._control_keys()
        # S k of every query and S^T q of every key, centre and the rest apart: what is linear in a control's queries or
        # keys (<S^Nc, S>, <S^NM, S>, <S^cN, S>, <S^MN, S> with M = tangent + normal) follows without any of its scores.
        _, batch, kv_heads, columns, width = self.keys.shape
        self.met_keys = torch.zeros_like(self.queries[:2])
        self.met_queries = self.keys.new_zeros((2, sums.heads // kv_heads, batch, kv_heads, columns, width))

    def _some(self, side: Tensor) -> Tensor:
        dtype = torch.float64 if self.parts.queries.dtype == torch.float64 else torch.float32
        return side[:, self.sequences].to(self.parts.queries.device, dtype).contiguous()

    def _control_keys(self) -> Float[Tensor, "2 mbg d_head key"]:
        """Parts of the keys inside the controls, and tangent plus normal without them, about their means.

        A constant on all keys changes no centred score; but before a soft cap it is not free.
        """
        both = torch.stack([self.own_keys, self.keys[1] + self.keys[2] - self.own_keys])
        if self.parts.softcap is None:
            both -= both.mean(dim=-2, keepdim=True)
        return both.flatten(1, 3).transpose(-1, -2)

    def add(self) -> None:
        """All blocks, then what controls need of whole sequences."""
        for block in self.parts.pairs.blocks:
            self._add_block(block)
        if self.parts.controls:
            self._add_linear()

    def _rows(self, queries: Float[Tensor, "n b heads query d_head"], block: Block) -> Float[Tensor, "n b g rq d_head"]:
        return query_rows(queries[..., block.queries, :], self.keys.shape[2])

    def _add_block(self, block: Block) -> None:
        parts = self.parts
        queries, keys = self._rows(self.queries, block), self.keys[..., block.keys, :]
        scores = BlockScores.of(queries, keys, parts, block, self.sequences, keep_raw=self.settings.scaling)
        squares = row_squares(scores.four)
        self.into["squares"] += by_head(squares)
        self.into["score_square"] += by_head(row_squares(scores.total))
        self.into["kl"] += by_head(scores.divergence)
        self._add_products(scores, queries, keys, block)
        if self.settings.distance_edges:
            add_distances(self.into, scores, block, self.settings.distance_edges)
        if parts.frequency is not None:
            add_frequencies(self.into, squares, scores.masked, parts.frequency[self.sequences, block.queries])
        if parts.radius is not None:
            add_radii(self.into, scores, parts.radius[self.sequences], block)
        if parts.controls:
            self._add_controls(scores, queries, block)

    def _add_products(self, scores: BlockScores, queries: Tensor, keys: Tensor, block: Block) -> None:
        """<S^ab, S> = sum over queries of q^a . (S k^b): one product for all shares with one part of the keys."""
        met = torch.stack([scores.total.flatten(2, 3) @ part for part in keys])
        met, queries = (side.unflatten(3, (-1, _length(block.queries))) for side in (met, queries))
        self.into["products"][:, :9] += _inner(queries.flatten(2, 3), met.flatten(2, 3)).flatten(1)
        if scores.bias is not None:
            self.into["products"][:, 9] += by_head(scores.bias)
        if self.parts.controls:
            self.met_keys[..., block.queries, :] = _centre_and_rest(met).flatten(2, 3)
            for place, part in enumerate(_centre_and_rest(queries)):
                self.met_queries[place, ..., block.keys, :] += (scores.total.transpose(-1, -2) @ part).movedim(2, 0)

    def _add_controls(self, scores: BlockScores, queries: Tensor, block: Block) -> None:
        own = self._rows(self.own_queries, block)
        both = torch.stack([own, queries[1] + queries[2] - own]).flatten(1, 3)
        found = ControlScores(both, self.control_keys[..., block.keys], scores)
        sums = by_head(found.measure(min(self.parts.controls, max(1, SCORES_AT_ONCE // scores.total.numel()))))
        self.into["control_squares"] += sums[:, :4].transpose(1, 2)
        self.into["control_products"][..., 4] += sums[:, 4]
        self.into["control_kl"] += sums[:, 5]

    def _add_linear(self) -> None:
        """One product of all controls with what their queries or keys met in S."""
        self.into["control_products"][..., [1, 2]] += _inner(self.own_queries, self.met_keys)
        by_group = _inner(self.own_keys, self.met_queries.flatten(0, 1)).unflatten(2, (2, -1))
        self.into["control_products"][..., [0, 3]] += by_group.movedim(3, 1).flatten(0, 1)


def _inner(left: Float[Tensor, "n b h *rest"], right: Float[Tensor, "z b h *rest"]) -> Float[Tensor, "h n z"]:
    """Sums over sequences, positions and dimensions of every left with every right, head by head."""
    first, second = (side.flatten(3).permute(1, 2, 0, 3) for side in (left, right))
    return wide(first @ second.transpose(-1, -2)).sum(dim=0)


def _centre_and_rest(parts: Float[Tensor, "3 b g ..."]) -> Float[Tensor, "2 b g ..."]:
    return torch.stack([parts[0], parts[1] + parts[2]])


def _length(places: slice) -> int:
    return places.stop - places.start
