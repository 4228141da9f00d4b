"""From a model and a corpus to a report by token frequency: spreads of every token, gradient energy of every bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tangent_lens.measures.analysis import concentration_warnings, fit_proxies, summarise_space
from tangent_lens.measures.enrichment import FrequencyBuckets, TangentEnrichment, tangent_enrichment
from tangent_lens.measures.frequency import TokenFrequencies, TokenSpread, contextual_spread, token_frequencies
from tangent_lens.measures.frequency_report import (
    FrequencyCorpus,
    FrequencyReport,
    FrequencySettings,
    SiteFrequency,
    spread_correlations,
)
from tangent_lens.measures.report import Settings, library_versions, now
from tangent_lens.models.protocol import Batch, Model
from tangent_lens.progress import Progress
from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.losses import Loss
from tangent_lens.recording.passes import ActivationRecord, record_activations
from tangent_lens.recording.token_passes import record_bucket_energy, record_token_distances, record_token_sums
from tangent_lens.recording.token_sums import TokenSums
from tangent_lens.sites import Site
from tangent_lens.subspaces.ranks import check_rank
from tangent_lens.subspaces.subspace import Subspace

# Of the square of a token's mean. Rows of one token that differ by less are one row and rounding.
_NO_SPREAD = 1e-9


def measure_frequency(
    model: Model,
    corpus: Corpus,
    sites: Sequence[Site],
    settings: FrequencySettings,
    loss: Loss,
    *,
    frequencies: TokenFrequencies | None = None,
    trajectory: TokenSpread | None = None,
    pad_id: int = 0,
    progress: Progress | None = None,
) -> FrequencyReport:
    """Two forward passes over all sequences for the spreads; then one over the fit sequences for the proxies, and one
    forward and backward over the test sequences for the gradients.

    Memory is tokens x width float64 numbers a site, of the tokens that occur at least ``min_count`` times.

    Args:
        frequencies: given ones; None counts them over the corpus.
        trajectory: of the embedding rows over checkpoints, with mean distances.
        pad_id: what stands at padding.

    Raises:
        ValueError: settings that do not fit, too few tokens, or a site where the rows of a token are all alike.
        SiteNeverFired, GradientNeverCame, NonFiniteRows: what went wrong inside the model.
    """
    check_rank(settings.rank)
    fit, test = corpus.split(settings.fit_fraction, settings.seed)
    counted = token_frequencies(corpus, model.description.vocabulary)
    known = counted if frequencies is None else frequencies
    buckets = FrequencyBuckets.by_mass(known, settings.buckets)
    tokens = spread_tokens(counted, known, settings.min_count)
    passes = _Passes(model, tuple(sites), settings, loss, pad_id, progress)
    spreads = passes.spreads(corpus, tokens)
    records = passes.activations(fit)
    proxies = fit_proxies(records, Settings(rank=settings.rank, seed=settings.seed))
    enrichments = passes.enrichments(test, proxies, buckets)
    correlated = partial(spread_correlations, frequencies=known, seed=settings.seed)
    spaces = [summarise_space(site, record, proxies[site]) for site, record in records.items()]
    return FrequencyReport(
        model=model.description,
        corpus=FrequencyCorpus(
            name=corpus.name,
            sequences=len(corpus.sequences),
            tokens=corpus.tokens,
            fit_sequences=len(fit.sequences),
            test_sequences=len(test.sequences),
            different=int((counted.counts > 0).sum()),
        ),
        settings=settings,
        sites=tuple(
            SiteFrequency(site.name, site.layer, correlated(spreads[site]), enrichments[site]) for site in sites
        ),
        trajectory=None if trajectory is None else correlated(trajectory),
        warnings=(*corpus.left_out, *_few_buckets(buckets, settings), *concentration_warnings(spaces)),
        versions=library_versions(),
        created=now(),
    )


def spread_tokens(counted: TokenFrequencies, known: TokenFrequencies, min_count: int) -> np.ndarray:
    """The tokens that occur at least ``min_count`` times in the corpus and have a frequency.

    Raises:
        ValueError: fewer than 4, which give no interval, or a min_count below 2.
    """
    if min_count < 2:
        raise ValueError(f"min_count {min_count} must be 2 or more: one row lies on its own mean")
    seen = counted.seen(min_count)
    if int(seen.max()) >= known.vocabulary:
        raise ValueError(
            f"token {int(seen.max())} of the texts is outside the {known.vocabulary} that have a frequency; give one a token "
            f"of the whole vocabulary of {counted.vocabulary}"
        )
    found = seen[known.counts[seen] > 0]
    if len(found) < 4:
        raise ValueError(
            f"{len(found)} tokens occur {min_count} times or more, and a correlation with its interval needs 4; use a smaller "
            "min_count or more text"
        )
    return found


@dataclass(frozen=True)
class _Passes:
    """The passes of one run."""

    model: Model
    sites: tuple[Site, ...]
    settings: FrequencySettings
    loss: Loss
    pad_id: int
    progress: Progress | None

    def _batches(self, corpus: Corpus) -> Iterator[Batch]:
        settings = self.settings
        return corpus.batches(
            settings.batch_size,
            padding_side=settings.padding_side,
            pad_id=self.pad_id,
            skip_first=settings.skip_first,
            skip_special=settings.skip_special,
        )

    def spreads(self, corpus: Corpus, tokens: np.ndarray) -> dict[Site, TokenSpread]:
        """Means of the tokens first, then the distances to them; the text is read as it is, nothing masked."""
        shown: dict[str, Any] = {"progress": self.progress, "total": corpus.tokens}
        sums = record_token_sums(self.model, self._batches(corpus), self.sites, tokens.tolist(), **shown)
        for site, one in sums.items():
            _check_spread(site, one)
        distances = record_token_distances(self.model, self._batches(corpus), sums, **shown)
        fewest = self.settings.min_count
        return {site: contextual_spread(one, distances[site], min_count=fewest) for site, one in sums.items()}

    def activations(self, fit: Corpus) -> dict[Site, ActivationRecord]:
        """What the proxies are fitted on."""
        shown: dict[str, Any] = {"progress": self.progress, "tokens": fit.tokens}
        return record_activations(self.model, self._batches(fit), self.sites, loss=self.loss, **shown)

    def enrichments(
        self, test: Corpus, proxies: Mapping[Site, Subspace], buckets: FrequencyBuckets
    ) -> dict[Site, TangentEnrichment]:
        """Gradients along the proxies."""
        bases = {site: proxy.basis for site, proxy in proxies.items()}
        shown: dict[str, Any] = {"progress": self.progress, "total": test.tokens}
        sums = record_bucket_energy(self.model, self._batches(test), bases, buckets.bucket_of, loss=self.loss, **shown)
        return {site: tangent_enrichment(one, buckets) for site, one in sums.items()}


def _check_spread(site: Site, sums: TokenSums) -> None:
    if float(sums.square.sum()) <= _NO_SPREAD * float((sums.count * sums.mean.square().sum(dim=1)).sum()):
        raise ValueError(
            f"{site}: the rows of a token are all alike, since no context has entered there yet; choose a site behind an "
            "attention"
        )


def _few_buckets(buckets: FrequencyBuckets, settings: FrequencySettings) -> tuple[str, ...]:
    if len(buckets) == settings.buckets:
        return ()
    return (
        f"{len(buckets)} buckets instead of {settings.buckets}: tokens of one frequency stay together, and the others would "
        "be empty",
    )
