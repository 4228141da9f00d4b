"""Where the token embedding moves: energy of W_E(t+1) - W_E(t) along its early tangent proxy, by token frequency."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.dynamics.report import UpdateEnergy
from tangent_lens.measures.enrichment import FrequencyBuckets, tangent_enrichment
from tangent_lens.recording.token_sums import BucketSums
from tangent_lens.subspaces.subspace import Subspace


def embedding_of(model: Any) -> Float[Tensor, "vocabulary d"] | None:
    """The token embedding as it is now, a copy in float64; None where the place of the embedding holds no such matrix."""
    weight = getattr(model.gradient_starts()[0].module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return None
    return weight.detach().to("cpu", torch.float64).clone()


def update_sums(
    before: Float[Tensor, "vocabulary d"],
    after: Float[Tensor, "vocabulary d"],
    tangent: Subspace,
    buckets: FrequencyBuckets,
) -> BucketSums:
    """Sums of the squared rows of one update, in total and along the tangent, by bucket. Tokens that never occur are left out.

    Raises:
        ValueError: embeddings of two shapes.
    """
    if before.shape != after.shape:
        raise ValueError(f"embeddings of shapes {tuple(before.shape)} and {tuple(after.shape)} have no difference")
    sums = BucketSums(tangent.basis, buckets.bucket_of, name="embedding updates")
    sums.update(after - before, torch.arange(len(after)))
    return sums


def update_energies(window: str, sums: BucketSums, buckets: FrequencyBuckets) -> tuple[UpdateEnergy, ...]:
    """All tokens together, and each bucket, the rarest first."""
    found = tangent_enrichment(sums, buckets)
    low, high = min(buckets.low), max(buckets.high)
    whole = UpdateEnergy(window, None, low, high, sum(buckets.tokens), 1.0, found.energy, found.lift)
    parts = [
        UpdateEnergy(window, number, one.low, one.high, one.tokens, one.energy_share, one.energy, one.lift)
        for number, one in enumerate(found.buckets)
    ]
    return (whole, *parts)
