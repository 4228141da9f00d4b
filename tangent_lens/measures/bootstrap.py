"""How sure a number is: the bootstrap over sequences, and what many tests at once make of their p-values.

Sequences are what was drawn; tokens of one sequence are not independent. A resampled corpus is a vector of weights, how
often each sequence was drawn, so that a number needs sums by sequence and never the model again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm

# From weights (replicates, sequences) to one number each.
Statistic = Callable[[np.ndarray], np.ndarray]
FEWEST_SEQUENCES = 8


@dataclass(frozen=True)
class Interval:
    """A number with its bootstrap intervals.

    Attributes:
        estimate: on all sequences, each counted once.
        low, high: percentile interval; bca_low, bca_high: bias-corrected and accelerated.
        standard_error: standard deviation over the replicates.
        level: of both intervals, for example 0.95.
        replicates, sequences: resampled corpora, and how many sequences were drawn for each.
    """

    estimate: float
    low: float
    high: float
    bca_low: float
    bca_high: float
    standard_error: float
    level: float
    replicates: int
    sequences: int


@dataclass(frozen=True)
class Uncertainty:
    """Bootstrap intervals over the test sequences, the subspaces held as they were fitted.

    Attributes:
        energy_interval, lift_interval: of E(Q) and R.
        delta_iso_interval: of the change of IsoScore*, for residual gradients without shrinkage; that of a weight gradient is
            of the fourth order in the sequences' weights, and is left out.
    """

    energy_interval: Interval
    lift_interval: Interval
    delta_iso_interval: Interval | None = None


def bootstrap(
    statistic: Statistic, sequences: int, *, replicates: int = 2000, level: float = 0.95, seed: int = 0
) -> Interval:
    """Percentile and BCa intervals of a number over resampled corpora.

    BCa (Efron 1987; Efron and Tibshirani 1993, chapter 14) shifts the percentiles by the bias z0 = the normal quantile of the
    share of replicates below the estimate (ties count half), and by the acceleration a = sum u^3 / (6 (sum u^2)^1.5) of the
    jackknife differences u.

    Args:
        statistic: from weights (replicates, sequences), how often each sequence counts, to one number each.
        sequences: how many there are.

    Raises:
        ValueError: fewer than 8 sequences, fewer than 100 replicates, a level outside (0, 1), or a statistic that is not
            finite where every sequence counts once.
    """
    _check(sequences, replicates, level)
    estimate = float(statistic(np.ones((1, sequences)))[0])
    if not np.isfinite(estimate):
        raise ValueError(f"the number itself is {estimate} on all sequences, so no interval can stand around it")
    found = statistic(resampled_weights(sequences, replicates, seed))
    found = found[np.isfinite(found)]
    if len(found) < 0.9 * replicates:
        raise ValueError(
            f"only {len(found)} of {replicates} resampled corpora give a finite number; use more sequences"
        )
    tail = (1 - level) / 2
    low, high = np.quantile(found, [tail, 1 - tail])
    bca_low, bca_high = np.quantile(found, _bca_levels(found, estimate, statistic, sequences, tail))
    return Interval(
        estimate=estimate,
        low=float(low),
        high=float(high),
        bca_low=float(bca_low),
        bca_high=float(bca_high),
        standard_error=float(found.std(ddof=1)),
        level=level,
        replicates=replicates,
        sequences=sequences,
    )


def resampled_weights(sequences: int, replicates: int, seed: int = 0) -> np.ndarray:
    """How often each sequence was drawn in each resampled corpus, (replicates, sequences); rows sum to ``sequences``."""
    generator = np.random.Generator(np.random.PCG64(seed))
    drawn = generator.integers(0, sequences, size=(replicates, sequences))
    places = drawn + sequences * np.arange(replicates)[:, None]
    counts = np.bincount(places.ravel(), minlength=replicates * sequences)
    return counts.reshape(replicates, sequences).astype(np.float64)


def adjusted_p_values(p_values: Sequence[float]) -> tuple[float, ...]:
    """Benjamini-Hochberg (1995): the smallest false discovery rate at which each test is still among the discoveries.

    The i-th smallest of m p-values becomes min over j >= i of p_j m / j. Not-a-number stays, and is not counted.
    """
    values = np.asarray(p_values, dtype=np.float64)
    known = np.flatnonzero(~np.isnan(values))
    if bool(((values[known] < 0) | (values[known] > 1)).any()):
        raise ValueError(f"p-values lie between 0 and 1; these reach from {np.nanmin(values)} to {np.nanmax(values)}")
    order = known[np.argsort(values[known], kind="stable")]
    scaled = values[order] * len(order) / np.arange(1, len(order) + 1)
    adjusted = values.copy()
    adjusted[order] = np.minimum.accumulate(scaled[::-1])[::-1].clip(max=1)
    return tuple(adjusted.tolist())


def _bca_levels(found: np.ndarray, estimate: float, statistic: Statistic, sequences: int, tail: float) -> list[float]:
    below = (np.sum(found < estimate) + 0.5 * np.sum(found == estimate)) / len(found)
    # All replicates on one side would ask for an infinite shift; half a replicate is the least that can be told.
    bias = norm.ppf(np.clip(below, 0.5 / len(found), 1 - 0.5 / len(found)))
    left_out = statistic(1 - np.eye(sequences))
    differences = np.nanmean(left_out) - left_out[np.isfinite(left_out)]
    square = np.sum(differences**2)
    acceleration = np.sum(differences**3) / (6 * square**1.5) if square > 0 else 0.0
    shifted = bias + norm.ppf([tail, 1 - tail])
    return norm.cdf(bias + shifted / (1 - acceleration * shifted)).tolist()


def _check(sequences: int, replicates: int, level: float) -> None:
    if sequences < FEWEST_SEQUENCES:
        raise ValueError(
            f"{sequences} sequences are too few to resample; use {FEWEST_SEQUENCES} test sequences or more (more text, or a "
            "smaller fit_fraction)"
        )
    if replicates < 100:
        raise ValueError(f"{replicates} replicates give no interval; use 100 or more (2000 is usual)")
    if not 0 < level < 1:
        raise ValueError(f"level {level} must lie between 0 and 1, for example 0.95")
