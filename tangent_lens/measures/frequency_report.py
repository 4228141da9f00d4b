"""What a run by token frequency found: frozen numbers, of which tables and plots are views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from tangent_lens.measures.enrichment import TangentEnrichment
from tangent_lens.measures.frequency import FrequencyCorrelation, TokenFrequencies, TokenSpread
from tangent_lens.models.protocol import ModelDescription
from tangent_lens.showing import Shown

if TYPE_CHECKING:
    import pandas

# More points than these only blacken a plot.
MOST_POINTS = 3000


@dataclass(frozen=True)
class FrequencySettings:
    """How a run by token frequency was asked for.

    Attributes:
        rank: k of the tangent proxies, a share of the variance, or a rule.
        min_count: rows that a token needs for its spread to be measured.
        buckets: of frequency, of about equal mass; fewer where tokens of one frequency fill several.
        loss: which one was differentiated.
        seed: of the split, of the masks, and of the tokens that a plot shows.
        fit_fraction: share of the sequences that the proxies are fitted on.
        frequencies: ``corpus`` where counted over the texts, ``given`` where the person brought them.
    """

    rank: int | float | str = 16
    min_count: int = 10
    buckets: int = 5
    loss: str = "next-token"
    seed: int = 0
    fit_fraction: float = 0.5
    skip_first: bool = False
    skip_special: bool = False
    batch_size: int = 8
    padding_side: str = "right"
    frequencies: str = "corpus"


@dataclass(frozen=True)
class FrequencyCorpus:
    """What was read.

    Attributes:
        sequences, tokens: all of them, on which spreads are measured.
        fit_sequences, test_sequences: those behind the proxies, and behind the gradients.
        different: tokens of the vocabulary that occur.
    """

    name: str
    sequences: int
    tokens: int
    fit_sequences: int
    test_sequences: int
    different: int


@dataclass(frozen=True, eq=False)
class SpreadPoints:
    """Some tokens of a spread, for plots: ids, log f (natural), mean distance raw and corrected, each (n,)."""

    tokens: np.ndarray
    log_frequency: np.ndarray
    distance: np.ndarray
    corrected: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class SpreadCorrelations:
    """How the spread of tokens goes with their log frequency.

    Attributes:
        tokens, rows: how many are behind it.
        mean: of the corrected mean distance, over tokens.
        raw: log f with the mean distance of a token's rows to their own mean. Biased: the mean is fitted to the same rows.
        corrected: with that distance times sqrt(n/(n-1)).
        variance: with the variance of the distance.
        points: at most :data:`MOST_POINTS` tokens, chosen by the seed.
    """

    name: str
    tokens: int
    rows: int
    mean: float
    raw: FrequencyCorrelation
    corrected: FrequencyCorrelation
    variance: FrequencyCorrelation
    points: SpreadPoints


@dataclass(frozen=True)
class SiteFrequency:
    """One site: its contextual spread, and the energy of its residual gradients by bucket along its tangent proxy."""

    site: str
    layer: int | None
    spread: SpreadCorrelations
    enrichment: TangentEnrichment


@dataclass(frozen=True, repr=False, eq=False)
class FrequencyReport(Shown):
    """What token frequency has to do with the geometry of one model (section 7 of ``MEASUREMENTS``).

    Attributes:
        sites: one entry a site.
        trajectory: of the embedding rows over checkpoints; None where none were given.
        warnings: what a reader must know before believing the numbers.
        created: when, UTC.
    """

    model: ModelDescription
    corpus: FrequencyCorpus
    settings: FrequencySettings
    sites: tuple[SiteFrequency, ...]
    trajectory: SpreadCorrelations | None
    warnings: tuple[str, ...]
    versions: Mapping[str, str]
    created: str

    def of(self, site: str) -> SiteFrequency:
        """The numbers of one site.

        Raises:
            KeyError: not measured.
        """
        for one in self.sites:
            if one.site == site:
                return one
        raise KeyError(f"{site} was not measured; measured: {', '.join(one.site for one in self.sites)}")

    @property
    def spreads(self) -> tuple[tuple[str, int | None, SpreadCorrelations], ...]:
        """Name, layer and correlations of every site and, last, of the embedding's trajectory."""
        found = tuple((one.site, one.layer, one.spread) for one in self.sites)
        return found if self.trajectory is None else (*found, ("trajectory", None, self.trajectory))

    def to_pandas(self) -> pandas.DataFrame:
        """One row a site (and the trajectory), a number of a token (``raw``, ``corrected``, ``variance``) and a method."""
        import pandas

        return pandas.DataFrame(
            [
                {"site": name, "layer": layer, "number": number, **vars(found)}
                for name, layer, spread in self.spreads
                for number in ("raw", "corrected", "variance")
                for found in (getattr(spread, number).pearson, getattr(spread, number).spearman)
            ]
        )

    def buckets(self) -> pandas.DataFrame:
        """One row a site and a bucket of frequency, the rarest first: energy, lift, rows, share of the gradient."""
        import pandas

        return pandas.DataFrame(
            [
                {"site": one.site, "layer": one.layer, "bucket": number, **vars(bucket)}
                for one in self.sites
                for number, bucket in enumerate(one.enrichment.buckets)
            ]
        )

    def points(self) -> pandas.DataFrame:
        """One row a site (and the trajectory) and a token: log f and spread, as the plot draws them."""
        import pandas

        names = [field.name for field in fields(SpreadPoints)]
        frames = [
            pandas.DataFrame({"site": name, **{column: getattr(spread.points, column) for column in names}})
            for name, _, spread in self.spreads
        ]
        return pandas.concat(frames, ignore_index=True)

    def plot(self) -> Any:
        """Spread against log frequency, and energy by bucket, as a matplotlib figure (needs the ``plot`` extra)."""
        from tangent_lens.reports.frequency_plot import plot_frequency

        return plot_frequency(self)


def spread_correlations(
    spread: TokenSpread, frequencies: TokenFrequencies, *, seed: int = 0, most: int = MOST_POINTS
) -> SpreadCorrelations:
    """Log frequency with the spread of tokens, raw and corrected, and the points of a plot.

    Args:
        spread: with mean distances.
        most: points to keep, chosen by ``seed``.

    Raises:
        ValueError: no mean distances, tokens of frequency 0, too few tokens, or all of one number.
    """
    raw, corrected, variance = (
        spread.correlation(frequencies, number)
        for number in ("mean_distance", "corrected_distance", "distance_variance")
    )
    assert spread.mean_distance is not None and spread.corrected_distance is not None
    every = np.arange(len(spread.tokens))
    shown = every if len(every) <= most else np.sort(np.random.default_rng(seed).choice(every, most, replace=False))
    return SpreadCorrelations(
        name=spread.name,
        tokens=len(every),
        rows=int(spread.occurrences.sum()),
        mean=float(spread.corrected_distance.mean()),
        raw=raw,
        corrected=corrected,
        variance=variance,
        points=SpreadPoints(
            tokens=spread.tokens[shown],
            log_frequency=frequencies.log(spread.tokens[shown]),
            distance=spread.mean_distance[shown],
            corrected=spread.corrected_distance[shown],
        ),
    )
