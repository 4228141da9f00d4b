"""Reports by token frequency to show: made-up spreads and gradients, the same at every call."""

from __future__ import annotations

import numpy as np
import torch

from tangent_lens.measures.enrichment import FrequencyBuckets, tangent_enrichment
from tangent_lens.measures.frequency import TokenFrequencies, TokenSpread
from tangent_lens.measures.frequency_report import (
    FrequencyCorpus,
    FrequencyReport,
    FrequencySettings,
    SiteFrequency,
    spread_correlations,
)
from tangent_lens.models.protocol import ModelDescription
from tangent_lens.recording.token_sums import BucketSums


def spread_of(frequencies: TokenFrequencies, seed: int = 0, scale: float = 10.0) -> TokenSpread:
    """Spreads of all tokens that shrink with frequency; rows from 3 of the rarest up."""
    draw, count = np.random.default_rng(seed), len(frequencies.counts)
    distance = scale - np.log(frequencies.counts) + draw.normal(size=count)
    square = distance**2 + draw.uniform(0.1, 2, size=count)
    return TokenSpread(f"site {seed}", np.arange(count), 3 + np.arange(count), square, distance)


def frequency_report(tokens: int = 40, sites: tuple[int, ...] = (2, 7), rank: int = 3, **changes) -> FrequencyReport:
    """Of layers, each with a spread and an enrichment of its own, and with the trajectory of the embedding."""
    frequencies = TokenFrequencies(np.arange(1, tokens + 1) ** 2.0)
    buckets = FrequencyBuckets.by_mass(frequencies, 4)
    # Rows of one run stand at the same tokens at every site.
    standing = torch.randint(0, tokens, (300,), generator=torch.Generator().manual_seed(0))
    found = []
    for layer in sites:
        draw = torch.Generator().manual_seed(layer)
        basis = torch.linalg.qr(torch.randn(12, rank, generator=draw, dtype=torch.float64))[0]
        sums = BucketSums(basis, buckets.bucket_of, name=f"gradients at resid_post.{layer}")
        sums.update(torch.randn(300, 12, generator=draw), standing)
        spread = spread_correlations(spread_of(frequencies, layer), frequencies)
        found.append(SiteFrequency(f"resid_post.{layer}", layer, spread, tangent_enrichment(sums, buckets)))
    whole = {
        "model": ModelDescription(
            name="[tiny] model",
            revision="step7",
            library="transformers 5",
            architecture="LlamaForCausalLM",
            weights="as stored",
            dtype="float64",
            parameters=12345,
            n_layers=9,
            d_model=12,
            n_heads=4,
            n_key_value_heads=2,
            d_head=3,
            vocabulary=tokens,
        ),
        "corpus": FrequencyCorpus("numbers [0]", 20, 300, 10, 10, tokens),
        "settings": FrequencySettings(rank=rank, min_count=3, buckets=4),
        "sites": tuple(found),
        "trajectory": spread_correlations(spread_of(frequencies, 99, 30), frequencies),
        "warnings": ("a sentence to read first",),
        "versions": {"tangent-lens": "0"},
        "created": "2026-01-01",
    }
    return FrequencyReport(**whole | changes)
